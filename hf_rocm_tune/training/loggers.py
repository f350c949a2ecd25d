"""The services that ``--report_to`` names: are they installed?"""

from __future__ import annotations

from collections.abc import Iterable

from hf_rocm_tune.errors import UsageError


def check_loggers(names: str | Iterable[str] | None) -> None:
    """Checks that transformers can report to each of these, before anything is loaded.

    Args:
        names: ``report_to`` of the training arguments, where "none" and "all" stand for themselves or are resolved.

    Raises:
        UsageError: one is unknown or not installed; names those that are.
    """
    from transformers.integrations.integration_utils import get_available_reporting_integrations

    available = get_available_reporting_integrations()
    wanted = [names] if isinstance(names, str) else list(names or ())
    lacking = [name for name in wanted if name not in (*available, "none", "all")]
    if lacking:
        there = ", ".join(available) or "none of those that transformers knows"
        raise UsageError(
            f"--report_to {' '.join(lacking)}: unknown or not installed; installed here: {there}. Install it, or leave "
            "the flag away"
        )
