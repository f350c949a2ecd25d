"""``hf-rocm-tune recipes``: list, show, copy and check recipes."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable

from hf_rocm_tune import recipe_file, recipes
from hf_rocm_tune.machine import process


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
    actions: dict[str, Callable[[argparse.Namespace], None]] = {
        "ls": _list,
        "show": _show,
        "cp": _copy,
        "validate": _validate,
    }
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


def _validate(wanted: argparse.Namespace) -> None:
    process.prepare_process(os.environ)  # before the libraries that what follows imports
    from hf_rocm_tune.recipes.validate import validate

    found = validate(wanted.file)
    for warning in found.warnings:
        print(f"warning: {warning}")
    unchecked = ", ".join(found.unchecked)
    print(f"{found.path}: {found.settings} settings, all valid; only a run can check {unchecked}")
