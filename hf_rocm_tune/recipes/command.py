"""``hf-rocm-tune recipes``: list, show, copy and check recipes."""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import TYPE_CHECKING

from hf_rocm_tune import recipes
from hf_rocm_tune.errors import UsageError
from hf_rocm_tune.machine import process, variables
from hf_rocm_tune.settings import recipe as recipe_file

if TYPE_CHECKING:
    from hf_rocm_tune.settings.arguments import Arguments


def add_actions(parser: argparse.ArgumentParser) -> None:
    """The command line of the verb."""
    actions = parser.add_subparsers(dest="action", required=True, metavar="ls|show|cp|validate")
    actions.add_parser("ls", help="list the names, with what each is for and the memory planned for it")
    actions.add_parser("show", help="print one").add_argument("name", help="a name, or the path of a recipe")
    copy = actions.add_parser("cp", help="copy one, to edit it")
    copy.add_argument("name")
    copy.add_argument("dest", help="a file, or a directory that exists")
    copy.add_argument("--force", action="store_true", help="replace a file that is there")
    check = actions.add_parser("validate", help="check one as far as it goes without model, data and card")
    check.add_argument("file", help="the path of a recipe, or a name")


def run(wanted: argparse.Namespace) -> int:
    """Does what was asked for.

    Args:
        wanted: parsed by a parser that `add_actions` has seen.

    Returns:
        0.

    Raises:
        UsageError: no such recipe, a copy that cannot be written, or a recipe that cannot be used.
    """
    actions = {"ls": _list, "show": _show, "cp": _copy, "validate": _validate}
    actions[wanted.action](wanted)
    return 0


def _list(wanted: argparse.Namespace) -> None:
    del wanted
    for name in recipes.names():
        print(f"{name}\n  {recipes.describe(name)}\n  memory: {recipes.planned_memory(name)}")
    print("\nStart one with `hf-rocm-tune sft --config NAME`; every flag after it wins over the recipe.")


def _show(wanted: argparse.Namespace) -> None:
    recipe = recipe_file.read_recipe(wanted.name)
    print(recipe.path.read_text(encoding="utf-8"), end="")


def _copy(wanted: argparse.Namespace) -> None:
    print(recipes.copy(wanted.name, wanted.dest, overwrite=wanted.force))


_NEED_A_CARD = ("bf16", "fp16", "activation_offloading")


def _validate(wanted: argparse.Namespace) -> None:
    """Check a recipe: its YAML, names, types, bounds, what excludes what, loggers, optimizer, variables, local paths.

    On a machine without a GPU, settings that need one are left out of the check and named as unchecked.

    Raises:
        UsageError: it cannot be used; one message names all that could be found at once.
    """
    process.prepare_process(os.environ)  # before the libraries that what follows imports
    from hf_rocm_tune.settings import arguments
    from hf_rocm_tune.training.refusals import check_loggers, check_offloads

    recipe = recipe_file.read_recipe(wanted.file)
    left_out = [name for name in _NEED_A_CARD if recipe.values.get(name) and not process.has_accelerator()]
    overrides = [f"--{name}=false" for name in left_out]
    job = arguments.parse([recipe_file.FLAG, str(recipe.path), *overrides])  # its `env` is in place from here on
    check_loggers(job.training.report_to)
    check_offloads(job.training)
    _check_paths(job)
    for one in variables.evaluate(os.environ, variables.known_facts() or variables.read_facts()):
        if one.action in ("warn", "error") and one.variable in recipe.env:
            print(f"warning: {one.variable}: {one.reason} ({one.source})")
    count = len(recipe.values) + len(recipe.env)
    unchecked = ", ".join(["the model", "the data", *(f"{name} (there is no GPU here)" for name in left_out)])
    print(f"{recipe.path}: {count} settings, all valid; only a run can check {unchecked}")


def _check_paths(job: Arguments) -> None:
    """Settings that are written as a path must lead somewhere."""
    wanted = {
        "model_name_or_path": job.model.model_name_or_path,
        "dataset_name": job.script.dataset_name,
        "chat_template_path": job.training.chat_template_path,
    }
    lost = [
        f"{name} {value} does not exist"
        for name, value in wanted.items()
        if value and value.startswith((".", "/", "~")) and not Path(value).expanduser().exists()
    ]
    if lost:
        raise UsageError("; ".join(lost) + ": correct the path, or give a Hub id")
