"""Tasks of EleutherAI's lm-evaluation-harness, on a model that came through our door.

The harness is a package of its own (the extra ``eval``). It is handed the loaded model, so weights and adapter are
verified as everywhere; what it asks the model it puts on the device itself, which is not verified, and the result says
so. Tried with lm-eval 0.4.13.
"""

from __future__ import annotations

import importlib.util
import logging
from typing import TYPE_CHECKING, Any

from hf_rocm_tune.errors import UsageError

if TYPE_CHECKING:
    from hf_rocm_tune.publish.evaluate_settings import HarnessSettings
    from hf_rocm_tune.publish.generate_model import Loaded

_INSTALL = "pip install 'hf-rocm-tune[eval]'"
_KEPT = ("results", "groups", "n-shot", "n-samples", "versions", "higher_is_better")


def find_tasks(settings: HarnessSettings) -> Any:
    """The harness's own `TaskManager`, before a model is loaded.

    Raises:
        UsageError: the package is not installed, or a task is unknown.
    """
    if importlib.util.find_spec("lm_eval") is None:
        raise UsageError(f"--tasks needs lm-evaluation-harness, which is not installed: {_INSTALL}")
    from lm_eval.tasks import TaskManager

    manager = TaskManager(include_path=str(settings.include_path) if settings.include_path else None)
    unknown = [name for name in settings.tasks if not manager.match_tasks([name])]
    if unknown:
        raise UsageError(
            f"--tasks: lm-evaluation-harness has no task {unknown[0]!r}: `lm-eval ls tasks` lists them, and "
            "--include_path names a folder with more"
        )
    return manager


def run_tasks(loaded: Loaded, settings: HarnessSettings, manager: Any, *, compare: bool) -> dict[str, Any]:
    """Run tasks, on the base too where wanted.

    Args:
        loaded: the model.
        settings: which tasks, and how.
        manager: of `find_tasks`.
        compare: also without the adapter.

    Returns:
        The harness's own results as plain values, of the base under ``without_adapter``.

    Raises:
        UsageError: the data of a task cannot be had.
    """
    from lm_eval.models.huggingface import HFLM

    logging.getLogger("lm_eval.models.huggingface").setLevel(logging.ERROR)  # it warns about a model that is loaded
    wrapped = HFLM(pretrained=loaded.model, tokenizer=loaded.tokenizer, batch_size=settings.batch_size)
    result = _evaluate(wrapped, manager, settings)
    if compare:
        with loaded.without_adapter():
            result["without_adapter"] = _evaluate(wrapped, manager, settings)
    return {**result, "inputs": "not verified: the harness puts them on the device itself"}


def _evaluate(wrapped: Any, manager: Any, settings: HarnessSettings) -> dict[str, Any]:
    import lm_eval
    from datasets.exceptions import DatasetsError

    try:
        found = lm_eval.simple_evaluate(
            model=wrapped,
            tasks=list(settings.tasks),
            task_manager=manager,
            num_fewshot=settings.num_fewshot,
            limit=settings.limit,
            apply_chat_template=settings.chat_template,
            random_seed=settings.seed,
            numpy_random_seed=settings.seed,
            torch_random_seed=settings.seed,
            fewshot_random_seed=settings.seed,
            log_samples=False,
        )
    except (OSError, DatasetsError) as error:  # ConnectionError is an OSError
        first = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise UsageError(
            f"the data of the task cannot be had: {first}; check the network and HF_HUB_OFFLINE"
        ) from error
    return {name: found[name] for name in _KEPT if name in found}
