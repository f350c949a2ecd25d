"""What TRL, PEFT and transformers refuse while a trainer is built, as one line for the user."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from jinja2 import TemplateError

from hf_rocm_tune.errors import UsageError

_UPSTREAM = frozenset({"trl", "peft", "transformers", "accelerate"})


@contextmanager
def as_usage_errors() -> Iterator[None]:
    """Within the block a ``ValueError`` or ``ImportError`` that upstream raises itself becomes a ``UsageError``.

    They check combinations of settings there that no parser sees (an ``eos_token`` outside the vocabulary, an adapter
    on ``lm_head``, ``padding_free`` with ``max_length``). One raised elsewhere is a bug and keeps its traceback. A chat
    template that does not take the rows, and a Hub that cannot be reached, are the user's to change as well.
    """
    try:
        yield
    except TemplateError as error:
        raise UsageError(
            f"the chat template cannot render these rows: {error}; change the rows, or give another template with "
            "--chat_template_path"
        ) from error
    except ConnectionError as error:
        raise UsageError(f"{error}; check the network, or leave --push_to_hub away") from error
    except (ValueError, ImportError) as error:
        if _raised_by(error) not in _UPSTREAM:
            raise
        raise UsageError(f"these settings do not go together: {' '.join(str(error).split())}") from error


def _raised_by(error: BaseException) -> str:
    """The top-level package of the function that raised an error."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    name = trace.tb_frame.f_globals.get("__name__", "") if trace is not None else ""
    return str(name).partition(".")[0]
