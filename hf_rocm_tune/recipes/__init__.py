"""Recipes: complete settings of a training job as YAML files, by names that ``--config`` takes too.

Each says in its opening comment what it is for, how to start it, what it needs and what memory is planned for it. This
finds and copies them; it imports no torch. Reading one is :mod:`hf_rocm_tune.settings.recipe`'s.
"""

from __future__ import annotations

from pathlib import Path

from hf_rocm_tune.configs import NamedFiles

#: Begins the line of the opening comment that ``scripts/recipe_memory.py`` writes.
MEMORY = "# Memory:"

_FILES = NamedFiles(what="recipe", directory=lambda: Path(__file__).resolve().parent)
names, path, describe, copy = _FILES.names, _FILES.path, _FILES.describe, _FILES.copy


def planned_memory(name: str) -> str:
    """What the planner said of one recipe, as its opening comment has it.

    Raises:
        UsageError: there is no such recipe.
    """
    lines = path(name).read_text(encoding="utf-8").splitlines()
    return next(line.removeprefix(MEMORY).strip() for line in lines if line.startswith(MEMORY))
