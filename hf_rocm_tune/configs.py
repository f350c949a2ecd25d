"""The accelerate configurations that ship with the package: list them, find them, copy them.

They stand in ``accelerate_configs/`` at the top of a checkout, and inside the package in an installed wheel; the
callers need not know which. `NamedFiles`, a directory of YAML files with names, serves recipes too.
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from hf_rocm_tune.errors import UsageError

_SUFFIX = ".yaml"


@dataclass(frozen=True, kw_only=True)
class NamedFiles:
    """YAML files that ship with the package, found by name."""

    what: str  # one of them, in words, for messages
    directory: Callable[[], Path]  # gives the directory that they stand in

    def names(self) -> list[str]:
        """All names, sorted, without ``.yaml``."""
        return sorted(file.stem for file in self.directory().glob(f"*{_SUFFIX}"))

    def path(self, name: str) -> Path:
        """The file of one, by its name with or without ``.yaml``.

        Raises:
            UsageError: there is none of that name; the message gives the nearest one and all of them.
        """
        known = self.names()
        wanted = name.removesuffix(_SUFFIX)
        if wanted in known:
            return self.directory() / f"{wanted}{_SUFFIX}"
        nearest = difflib.get_close_matches(wanted, known, n=1)
        hint = f"did you mean {nearest[0]}? " if nearest else ""
        raise UsageError(f"no {self.what} is named {name!r}: {hint}there are {', '.join(known) or 'none'}")

    def describe(self, name: str) -> str:
        """What one is for: the first line of its opening comment.

        Raises:
            UsageError: as `path`.
        """
        with self.path(name).open(encoding="utf-8") as file:
            return file.readline().lstrip("#").strip()

    def copy(self, name: str, dest: str | os.PathLike[str], *, overwrite: bool = False) -> Path:
        """Copy one to where the user can edit it.

        Args:
            name: as for `path`.
            dest: the new file, or an existing directory that gets the file under its own name.
            overwrite: replace a file that is already there.

        Returns:
            The file that was written.

        Raises:
            UsageError: unknown name, the file exists and ``overwrite`` is false, or it cannot be written.
        """
        source = self.path(name)
        text = source.read_bytes()  # before the target is opened: with overwrite it may be the same file
        target = Path(dest)
        if target.is_dir():
            target = target / source.name
        try:
            with target.open("wb" if overwrite else "xb") as file:
                file.write(text)
        except FileExistsError as error:
            raise UsageError(f"{target} exists and was left as it is: choose another name, or overwrite it") from error
        except OSError as error:
            raise UsageError(f"cannot write {target}: {error.strerror}; choose another place") from error
        return target


def _directory() -> Path:
    """Where the files are: in the installed package, else beside it in a checkout."""
    package = Path(__file__).resolve().parent
    installed = package / "accelerate_configs"
    return installed if installed.is_dir() else package.parent / "accelerate_configs"


_FILES = NamedFiles(what="accelerate configuration", directory=lambda: _directory())
names, path, describe, copy = _FILES.names, _FILES.path, _FILES.describe, _FILES.copy
