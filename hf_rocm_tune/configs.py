"""The accelerate configurations and recipes of the package: list, find, copy.

A recipe is a complete set of settings of a training job; its opening comment has its purpose, command, requirements and
planned memory.
"""

from __future__ import annotations

import difflib
import os
from dataclasses import dataclass
from pathlib import Path

from hf_rocm_tune.errors import UsageError

_SUFFIX = ".yaml"


@dataclass(frozen=True, kw_only=True)
class NamedFiles:
    """A directory of YAML files, found by name."""

    what: str  # one of them, in words
    directory: Path

    def names(self) -> list[str]:
        """All names, sorted, without ``.yaml``."""
        return sorted(file.stem for file in self.directory.glob(f"*{_SUFFIX}"))

    def path(self, name: str) -> Path:
        """The file of one, by its name with or without ``.yaml``."""
        known = self.names()
        wanted = name.removesuffix(_SUFFIX)
        if wanted in known:
            return self.directory / f"{wanted}{_SUFFIX}"
        nearest = difflib.get_close_matches(wanted, known, n=1)
        hint = f"did you mean {nearest[0]}? " if nearest else ""
        raise UsageError(f"no {self.what} is named {name!r}: {hint}there are {', '.join(known) or 'none'}")

    def describe(self, name: str) -> str:
        """The purpose of one: the first line of its opening comment."""
        with self.path(name).open(encoding="utf-8") as file:
            return file.readline().lstrip("#").strip()

    def copy(self, name: str, dest: str | os.PathLike[str], *, overwrite: bool = False) -> Path:
        """Copy one to a new file, or into an existing directory under its own name; returns the file."""
        source, target = self.path(name), Path(dest)
        if os.path.isdir(target):
            target = target / source.name
        text = source.read_bytes()
        try:
            with target.open("wb" if overwrite else "xb") as file:
                file.write(text)
        except FileExistsError as error:
            raise UsageError(f"{target} exists and was not changed: choose another name, or overwrite it") from error
        except OSError as error:
            raise UsageError(f"cannot write {target}: {error.strerror}; choose another place") from error
        return target


_PACKAGE = Path(__file__).resolve().parent
_installed = _PACKAGE / "accelerate_configs"
_directory = _installed if _installed.is_dir() else _PACKAGE.parent / "accelerate_configs"  # in a checkout
CONFIGS = NamedFiles(what="accelerate configuration", directory=_directory)
path = CONFIGS.path
RECIPES = NamedFiles(what="recipe", directory=_PACKAGE / "recipes")
#: Begins the line of a recipe's opening comment that ``scripts/recipe_memory.py`` writes.
MEMORY = "# Memory:"
START = "# Start:"


def start_of(text: str) -> str:
    """The command that a recipe's opening comment gives, such as ``hf-rocm-tune dpo --config NAME``; empty: none."""
    lines = text.splitlines()
    return next((line.removeprefix(START).strip() for line in lines if line.startswith(START)), "")


def planned_memory(name: str) -> str:
    """The planned memory of a recipe, from its opening comment."""
    lines = RECIPES.path(name).read_text(encoding="utf-8").splitlines()
    return next(line.removeprefix(MEMORY).strip() for line in lines if line.startswith(MEMORY))
