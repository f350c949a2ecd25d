"""Everything about a recipe that can be checked without its model, its data and a card."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from hf_rocm_tune import arguments, environ, process, recipe_file
from hf_rocm_tune.errors import UsageError
from hf_rocm_tune.training.refusals import check_loggers, check_offloads

_NEED_A_CARD = ("bf16", "fp16", "activation_offloading")


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """What was found in a recipe that can be used.

    Args:
        path: the file.
        settings: how many it gives.
        warnings: what it will do that a user should know; one line each.
        unchecked: what only the run can tell.
    """

    path: Path
    settings: int
    warnings: tuple[str, ...]
    unchecked: tuple[str, ...]


def validate(given: str | Path) -> Verdict:
    """Check a recipe: its YAML, names, types, bounds, what excludes what, loggers, optimizer, variables, local paths.

    On a machine without a GPU, settings that need one are left out of the check and named in ``unchecked``.

    Args:
        given: a path, or the name of a recipe that ships with the package.

    Raises:
        UsageError: it cannot be used; one message names all that could be found at once.
    """
    recipe = recipe_file.read_recipe(given)
    accelerator = process.has_accelerator()
    left_out = () if accelerator else tuple(name for name in _NEED_A_CARD if recipe.values.get(name))
    overrides = [f"--{name}=false" for name in left_out]
    job = arguments.parse([recipe_file.FLAG, str(recipe.path), *overrides])  # its `env` is in place from here on
    check_loggers(job.training.report_to)
    check_offloads(job.training)
    _check_paths(job)
    decided = environ.evaluate(os.environ, environ.known_facts() or environ.read_facts())
    harmful = [one for one in decided if one.action in ("warn", "error") and one.variable in recipe.env]
    return Verdict(
        path=recipe.path,
        settings=len(recipe.values) + len(recipe.env),
        warnings=tuple(f"{one.variable}: {one.reason} ({one.source})" for one in harmful),
        unchecked=("the model", "the data", *(f"{name} (there is no GPU here)" for name in left_out)),
    )


def _check_paths(job: arguments.Arguments) -> None:
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
