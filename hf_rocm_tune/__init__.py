"""Fine-tune Hugging Face models on ROCm cards, with every byte verified on its way to the device.

Importing this package prepares the process before torch is imported: it chooses which cards are seen
(``machine.process``: one by a process on its own, all discrete ones by each of several ranks) and applies the variable
policy (``machine.variables``). Both keep what the user has set and neither ends the import; ``variables.DECISIONS``
holds what was decided. If torch is there first, nothing is changed, and that is said. It imports no torch itself: the
public names below are loaded when they are first used, and refuse a torch that is too old (``machine.torch_build``).

Variables: HF_ROCM_TUNE_SPLIT=1 leaves all discrete cards visible to one process; HF_ROCM_TUNE_QUIET=1 prints warnings
and errors only.
"""

# Until the working directory is out of the search, nothing may be imported that Python has not loaded itself.
import os
import sys


def _leave_working_directory() -> None:
    """Import nothing from the working directory, which ``python -m`` looks through first: a ``yaml.py`` beside
    somebody's data would be run.

    What a user's own program imports is theirs to say. Processes that this one starts are told the same by
    PYTHONSAFEPATH, unless the package itself is found in the working directory only: then that is looked through last.
    Not covered: what Python imports before it finds this package; ``hf-rocm-tune`` and ``python -P`` have no such
    moment.
    """
    by_name = sys.argv[:1] == ["-m"] and any(f"{word}.".startswith(f"{__name__}.") for word in sys.orig_argv)
    if not by_name and os.path.basename(sys.argv[0] if sys.argv else "") != "hf-rocm-tune":
        return
    try:
        here = os.getcwd()
    except OSError:  # it was deleted
        here = ""
    if by_name and not sys.flags.safe_path and sys.path[:1] == [here]:
        del sys.path[0]
    if any(finder.find_spec(__name__, None) for finder in sys.meta_path if hasattr(finder, "find_spec")):
        os.environ.setdefault("PYTHONSAFEPATH", "1")
    else:
        sys.path.append(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))


_leave_working_directory()

# isort: split
import importlib
import logging
import warnings
from typing import TYPE_CHECKING, Any

from hf_rocm_tune.machine import gpus, process, variables
from hf_rocm_tune.machine.variables import Action
from hf_rocm_tune.version import __version__

if TYPE_CHECKING:
    from hf_rocm_tune.accelerator import VerifiedAccelerator
    from hf_rocm_tune.engine import VerifiedTransfers
    from hf_rocm_tune.train.settings import TrainerSettings
    from hf_rocm_tune.train.trainer import VerifiedSFTTrainer, VerifiedTransferMixin
    from hf_rocm_tune.transfer import was_verified

__all__ = [
    "TrainerSettings",
    "VerifiedAccelerator",
    "VerifiedSFTTrainer",
    "VerifiedTransferMixin",
    "VerifiedTransfers",
    "__version__",
    "was_verified",
]

_LAZY = {
    "TrainerSettings": "hf_rocm_tune.train.settings",
    "VerifiedTransferMixin": "hf_rocm_tune.train.trainer",
    "VerifiedSFTTrainer": "hf_rocm_tune.train.trainer",
    "VerifiedAccelerator": "hf_rocm_tune.accelerator",
    "VerifiedTransfers": "hf_rocm_tune.engine",
    "was_verified": "hf_rocm_tune.transfer",
}
_CHOICE_SOURCE = "TheRock#5543; HIP environment variables page"


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from hf_rocm_tune.machine.torch_build import check_torch

    check_torch()
    value = getattr(importlib.import_module(_LAZY[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_LAZY})


def _choose_card(topology: gpus.Topology, rocm: bool | None, torch_loaded: bool) -> list[variables.Decision]:
    """Choose the cards that this process sees and write them to the environment, unless torch is there already."""
    choice = process.choose(
        # A torch that is known to be no ROCm build sees none of these GPUs, and its own filter is not ours to narrow.
        () if rocm is False else topology.nodes,
        os.environ,
        complete=topology.complete,
        processes=process.local_processes(os.environ),
        split=os.environ.get("HF_ROCM_TUNE_SPLIT", "").strip() == "1",
    )

    kept = [name for name in process.FILTERS if name in process.users_environ(os.environ)]
    made: list[tuple[str, Action, str | None]] = [(name, "keep", os.environ[name]) for name in kept]
    made += [(name, "set", value) for name, value in choice.variables.items()]
    made += [(process.OURS, "warn", None)] if choice.troubled else []
    decisions = [
        variables.Decision(variable=name, action=action, value=value, reason=choice.reason, source=_CHOICE_SOURCE)
        for name, action, value in made
    ]
    if torch_loaded:
        for number, decision in enumerate(decisions):
            if decision.action == "set" and os.environ.get(decision.variable) != decision.value:
                decisions[number] = variables.too_late(decision)
        return decisions
    process.enact(choice, os.environ)
    return decisions


def _matters(record: logging.LogRecord) -> bool:
    """False for bitsandbytes' word, when it is imported, that an optional kernel for 4-bit weights on CPUs is missing.

    Nothing of ours uses that kernel (see `models.quantised`), and on a card nobody does.
    """
    return not str(record.msg).startswith("Failed to load CPU gemm_4bit_forward")


def _prepare_process() -> None:
    logging.getLogger("bitsandbytes.backends.cpu.ops").addFilter(_matters)
    # PEFT 0.21 and TRL 1.16 use names that transformers 5.23 has changed; the user cannot change that.
    renamed = r"`(is_)?gradient_checkpointing(_enable|_disable)?` is deprecated"
    warnings.filterwarnings("ignore", message=renamed, category=FutureWarning)
    torch_loaded = "torch" in sys.modules
    topology = gpus.read_topology()
    chosen = _choose_card(topology, variables.read_facts(()).is_rocm, torch_loaded)
    variables.remember(chosen)
    variables.announce([*chosen, *variables.review(variables.read_facts(*process.visible_archs(topology, os.environ)))])


_prepare_process()
