"""What a process that is to split a model does before torch is imported: see all discrete cards instead of one.

The package narrows a process to one card when it is imported (``machine.visible``), before anybody has read a command
line. A filter of the user's own stays.
"""

from __future__ import annotations

import sys
from collections.abc import MutableMapping, Sequence

from hf_rocm_tune.machine import gpus, visible
from hf_rocm_tune.machine import variables as policy
from hf_rocm_tune.settings import recipe as recipe_file

FLAG = "--split_layers"
VARIABLE = "HF_ROCM_TUNE_SPLIT"


def asks_for_split(argv: Sequence[str]) -> bool:
    """Whether a command line, or the recipe on it, splits a model.

    Raises:
        UsageError: the recipe cannot be read.
    """
    value, rest = recipe_file.take_flag([argument.replace("--split-layers", FLAG) for argument in argv], FLAG)
    path, _ = recipe_file.take_flag(rest, recipe_file.FLAG)
    if value is not None or path is None:
        return value is not None
    values = recipe_file.read_recipe(path).values
    return any(key.removeprefix("--").replace("-", "_") == FLAG.removeprefix("--") for key in values)


def show_all_cards(
    argv: Sequence[str], environ: MutableMapping[str, str], *, topology: gpus.Topology | None = None
) -> None:
    """Choose the cards again where the job splits a model, and say so; nothing once torch is imported.

    Args:
        argv: of the job.
        environ: the process's variables; changed.
        topology: of the machine; it is read unless given.
    """
    if not asks_for_split(argv) or "torch" in sys.modules:
        return
    environ[VARIABLE] = "1"  # for processes that this one starts
    found = gpus.read_topology() if topology is None else topology
    rocm = policy.read_facts(archs=()).is_rocm
    choice = visible.choose(
        () if rocm is False else found.nodes,
        environ,
        complete=found.complete,
        processes=visible.local_processes(environ),
        split=True,
    )
    visible.enact(choice, environ)
    made = [
        policy.Decision(variable=name, action="set", value=value, reason=choice.reason, source="--split_layers")
        for name, value in choice.variables.items()
    ]
    policy.remember(made)
    policy.announce(made)
