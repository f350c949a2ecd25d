"""The start of a training command, before torch and TRL are imported: help, refusals, and the cards that it sees."""

from __future__ import annotations

import os
import sys
from collections.abc import MutableMapping, Sequence
from typing import Any

from hf_rocm_tune.data.formats import Method
from hf_rocm_tune.errors import UsageError
from hf_rocm_tune.lifecycle.launcher_flags import bare
from hf_rocm_tune.machine import gpus, process, variables
from hf_rocm_tune.settings.flags import HELP_ALL, flags, unknown_flag
from hf_rocm_tune.settings.recipes import asks_for_split, typed, words_before_flags
from hf_rocm_tune.settings.screen import screen
from hf_rocm_tune.settings.values import check_values, missing, without_value


def answered(verb: Method, argv: Sequence[str]) -> bool:
    """Print the help if asked for, and return whether it was; else check the flags. Called before torch is imported."""
    if HELP_ALL in argv:
        from hf_rocm_tune.settings.arguments import help_all

        process.prepare_process(os.environ)
        print(help_all(verb))
    elif {"-h", "--help"} & set(argv):
        print(screen(verb))
    else:
        check(verb, argv)
        return False
    return True


def check(verb: Method, argv: Sequence[str]) -> None:
    """Refuse flags and keys of the recipe that the verb does not have, and values that no run can use."""
    known = flags(verb)
    if not known:
        return
    recipe, given = typed(argv)
    words = words_before_flags(argv)
    if words:
        raise UsageError(
            f"unexpected argument {words[0]!r}: flags begin with --, such as --model NAME and --dataset NAME"
        )
    on = {f"no_{name}" for name in known}  # `--no_NAME` is argparse's for flags that are on, and left to it
    wrong = [flag for flag in given if bare(flag) not in known | on]
    if wrong:
        raise UsageError("; ".join(unknown_flag(flag, known, dashes="--") for flag in wrong))
    values = {bare(flag): value for flag, value in given.items()}
    empty = without_value(values)
    if empty:
        raise UsageError("; ".join(empty))
    if recipe is not None:
        wrong = [key for key in recipe.values if key not in known]
        if wrong:
            faults = "; ".join(unknown_flag(key, known, dashes="") for key in wrong)
            raise UsageError(f"recipe {recipe.path}: {faults}")
        values = {**recipe.values, **values}
    check_values(values)
    absent = missing(values)
    if absent:
        raise UsageError("; ".join(absent))


def show_all_cards(argv: Sequence[str], environ: MutableMapping[str, str]) -> None:
    """Make several cards visible if the job splits a model, and print it; does nothing once torch is imported."""
    if not asks_for_split(argv) or "torch" in sys.modules:
        return
    environ["HF_ROCM_TUNE_SPLIT"] = "1"  # for processes that this one starts
    topology = gpus.read_topology()
    nodes = topology.nodes
    if variables.read_facts(()).is_rocm is False:  # this torch uses none of them
        nodes = ()
    count = process.local_processes(environ)
    choice = process.choose(nodes, environ, complete=topology.complete, processes=count, split=True)
    process.enact(choice, environ)
    common: Any = {"action": "set", "reason": choice.reason, "source": "--split_layers"}
    made = [variables.Decision(variable=name, value=value, **common) for name, value in choice.variables.items()]
    variables.remember(made)
    variables.announce(made)
