"""What must not leave this machine with an upload: local paths, names of its users and hosts, secrets.

`Private` says what is private here; `scrub_text` and `scrub_json` put something harmless in its place, and
`find_in_file` looks for it in files that cannot be rewritten. Whoever writes text that will be published (the model
card, a report) sends every value that is not its own through `scrub_text`.

Covered: absolute paths below a directory of this machine's root that is not the system's own, paths that begin with
``~``, the paths that the caller names wherever they lie, and secrets (`redaction`; values of variables that are named
like one among them). Names are replaced as whole words, and only on request: in prose
that a person wrote, "max" is more often a word than a user. Not covered: relative paths, secrets of an unknown form
that no variable holds, and anything inside pictures.
"""

from __future__ import annotations

import contextlib
import getpass
import os
import platform
import re
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hf_rocm_tune.redaction import is_secret_name, redact

_SHORTEST_SECRET = 8
_SHORTEST_NAME = 3
_CHUNK_BYTES = 1 << 20

# Directories of the system: what lies there is the same on every machine.
_PUBLIC_ROOTS = frozenset({"usr", "sys", "proc", "dev", "etc", "lib", "lib32", "lib64", "bin", "sbin", "boot"})
# Where people keep things, whether or not this machine has such a directory.
_USUAL_ROOTS = frozenset({"home", "Users", "root", "mnt", "media", "tmp", "var", "data", "scratch", "workspace"})
_PUBLIC_NAMES = frozenset(
    {"root", "user", "users", "host", "localhost", "home", "default", "none", "true", "false", "admin", "runner"}
    | {"amd", "gpu", "ubuntu", "fedora", "debian", "arch", "linux", "docker", "test", "data", "model", "train"}
)
# A path in running text: absolute with at least two parts, or one that begins with the home directory's sign.
_PART = r"[^\s/'\"`<>|:;,(){}\[\]*?\\]+"
_PATH = re.compile(rf"(?:(?<![\w.~/<\\-])|(?<=file://))(?:/({_PART})(?:/{_PART})+/?|~[\w.-]*(?:/{_PART})+/?)")
_HUB_CACHE = re.compile(r"(?:^|/)(?:models|datasets)--(?P<id>[^/]+)(?:/|$)")


@dataclass(frozen=True, kw_only=True)
class Private:
    """What is private on this machine.

    Attributes:
        paths: what stands in the place of each of these paths and of what lies below them, the longest path first.
        users: login names.
        hosts: names of this machine.
        secrets: values that are never shown.
        roots: names of the directories directly below ``/`` in which every path is private.
    """

    paths: Mapping[str, str] = field(default_factory=dict)
    users: tuple[str, ...] = ()
    hosts: tuple[str, ...] = ()
    secrets: tuple[str, ...] = field(default=(), repr=False)
    roots: frozenset[str] = _USUAL_ROOTS

    @classmethod
    def of_this_machine(
        cls,
        environ: Mapping[str, str],
        *,
        paths: Mapping[str, str] | None = None,
        secrets: Iterable[str | None] = (),
    ) -> Private:
        """Whatever this machine and its variables call private.

        Args:
            paths: paths that the caller knows to be private, by what stands in their place ("" for their last name).
            secrets: secrets that no variable holds; None is passed over.
        """
        homes = {environ.get("HOME", ""), os.path.expanduser("~")} - {"", "/", "~"}
        known = dict.fromkeys(homes, "~")
        for path, instead in (paths or {}).items():
            for spelling in {path, os.path.abspath(path), os.path.realpath(path)}:
                if len(Path(spelling).parts) > 1:
                    known[spelling.rstrip("/")] = instead or _last_name(spelling)
        users = [environ.get(name, "") for name in ("USER", "LOGNAME", "SUDO_USER", "USERNAME")]
        with contextlib.suppress(OSError, KeyError, ImportError):  # no entry for this user id, as in containers
            users.append(getpass.getuser())
        users += [Path(home).name for home in homes]
        hosts = [platform.node(), environ.get("HOSTNAME", "")]
        hosts += [host.partition(".")[0] for host in hosts]
        held = [value for name, value in environ.items() if is_secret_name(name) and not value.startswith("/")]
        everything = {value for value in (*held, *secrets) if value and len(value) >= _SHORTEST_SECRET}
        return cls(
            paths={path: known[path] for path in sorted(known, key=len, reverse=True)},
            users=_names(users),
            hosts=_names(hosts),
            secrets=tuple(sorted((s for s in everything if not s.isdigit()), key=len, reverse=True)),
            roots=_USUAL_ROOTS | (_top_directories() - _PUBLIC_ROOTS),
        )

    def is_local(self, name: str) -> bool:
        """Whether a model or dataset is named by a path of this machine, not by an id of the Hub."""
        return name.startswith(("/", "~", ".", "file:")) or name in self.paths or os.path.exists(name)


def local_paths(settings: Any) -> list[str]:
    """The strings of a plain value, at any depth, that name a file or a directory of this machine."""
    if isinstance(settings, str):
        return [settings] if os.sep in settings and os.path.exists(settings) else []
    if isinstance(settings, Mapping):
        settings = settings.values()
    elif not isinstance(settings, list | tuple):
        return []
    return [path for each in settings for path in local_paths(each)]


def hub_id_of(path: str) -> str | None:
    """The id that a path in the Hub's cache stands for (``.../models--ORG--NAME/snapshots/...``); None for others."""
    found = _HUB_CACHE.search(path)
    return found["id"].replace("--", "/", 1) if found else None


def scrub_text(text: str, private: Private, *, names: bool = True) -> str:
    """A text without secrets and local paths.

    Args:
        names: take out names of users and hosts too, wherever they stand as a word.
    """
    text = redact(text, also=private.secrets)
    for path, instead in private.paths.items():
        text = re.sub(rf"(?<![\w/]){re.escape(path)}(?![\w-])", instead.replace("\\", r"\\"), text)
    text = _PATH.sub(lambda found: _shortened(found, private), text)
    if names:
        for known, instead in ((private.users, "user"), (private.hosts, "host")):
            for name in known:
                text = re.sub(rf"(?<![\w-]){re.escape(name)}(?![\w-])", instead, text)
    return text


def scrub_json(value: Any, private: Private, *, names: bool = True) -> Any:
    """Every string of a JSON value, keys included; the rest stays. See `scrub_text`."""
    if isinstance(value, str):
        return scrub_text(value, private, names=names)
    if isinstance(value, Mapping):
        return {
            scrub_text(str(key), private, names=False): scrub_json(one, private, names=names)
            for key, one in value.items()
        }
    if isinstance(value, list | tuple):
        return [scrub_json(one, private, names=names) for one in value]
    return value


def find_in_file(path: Path, private: Private) -> str | None:
    """What private thing the bytes of a file hold, in words that do not give it away; None for nothing.

    Looked for are the secrets and the paths that `Private` knows literally: other patterns occur by chance in weights
    and in vocabularies. Of safetensors only the header is read, because the rest is numbers.

    Raises:
        OSError: the file cannot be read.
    """
    paths = [known for known, instead in private.paths.items() if instead != "~" and len(Path(known).parts) > 2]
    wanted = {secret.encode(): "a secret" for secret in private.secrets} | {p.encode(): f"the path {p}" for p in paths}
    overlap = max(map(len, wanted), default=1) - 1
    tail = b""
    with open(path, "rb") as file:
        left = 8 + int.from_bytes(file.read(8), "little") if path.suffix == ".safetensors" else sys.maxsize
        file.seek(0)
        while chunk := file.read(min(_CHUNK_BYTES, left)):
            left -= len(chunk)
            window = tail + chunk
            for needle, what in wanted.items():
                if needle in window:
                    return what
            tail = window[-overlap:] if overlap else b""
    return None


def _shortened(found: re.Match[str], private: Private) -> str:
    """``.../NAME`` for a private path; what is not private stays."""
    text, root = found[0], found[1]
    if root is not None and root not in private.roots:
        return text
    last = _last_name(text)
    return "..." if last in private.users or last.startswith("~") else f".../{last}"


def _last_name(path: str) -> str:
    """The last part of a path, or the id where the path lies in the Hub's cache."""
    return hub_id_of(path) or Path(path.rstrip("/")).name


def _top_directories() -> set[str]:
    with contextlib.suppress(OSError):
        return {entry.name for entry in os.scandir("/") if entry.is_dir()}
    return set()


def _names(found: Iterable[str]) -> tuple[str, ...]:
    """Those that are worth hiding, the longest first so that a name within a name does not spoil it."""
    kept = {n for n in found if len(n) >= _SHORTEST_NAME and n.lower() not in _PUBLIC_NAMES and not n.isdigit()}
    return tuple(sorted(kept, key=lambda name: (-len(name), name)))
