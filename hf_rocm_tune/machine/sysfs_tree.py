"""The one door through which the machine is read: the live machine, a directory, or a recording of another machine.

A path has no leading slash (``sys/class/kfd``). Every method raises ``OSError`` as the system does. Replaying a
recording gives the same bytes and the same errors, so whatever is read through this door can be read again elsewhere.

Not covered: a driver that hangs inside a read hangs its reader.
"""

from __future__ import annotations

import base64
import errno
import os
import platform
import stat
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from hf_rocm_tune.machine.sysfs_recording import SCHEMA, DeviceNode, Process, Recording, parse

# Groups that may own a device node of a GPU; a name of another group may hold the name of a user.
_DEVICE_GROUPS = frozenset({"render", "video"})


# What of a file's content goes into a recording, by path and content.
Keep = Callable[[str, bytes], bytes]


class Tree(Protocol):
    """A machine's files."""

    def read(self, path: str, limit: int) -> bytes:
        """The whole file; ``EFBIG`` where it holds more than ``limit`` bytes."""

    def names(self, path: str) -> list[str]:
        """The names in a directory, sorted."""

    def link(self, path: str) -> str:
        """The text of a symbolic link."""

    def node(self, path: str) -> DeviceNode:
        """What this process may do with a device node; ``ENODEV`` where it is none."""

    def process(self) -> Process:
        """The facts that are in no file."""


def error(number: int, path: str) -> OSError:
    """The error that the system would raise for ``path``."""
    return OSError(number, os.strerror(number), f"/{path}")


class LiveTree:
    """The files below ``root``. What is in no file is known of the machine itself only, where ``root`` is ``/``."""

    def __init__(self, root: Path = Path("/")) -> None:
        self._root = root

    def read(self, path: str, limit: int) -> bytes:
        # Without waiting: a pipe where a file belongs would stop us for good.
        flags = os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)
        with open(os.open(self._at(path), flags), "rb", buffering=0) as file:
            if stat.S_ISDIR(os.fstat(file.fileno()).st_mode):
                raise error(errno.EISDIR, path)
            parts: list[bytes] = []
            taken = 0
            # One read of a sysfs or proc file may return less than there is.
            while taken <= limit and (part := file.read(limit + 1 - taken)):
                parts.append(part)
                taken += len(part)
        if taken > limit:
            raise error(errno.EFBIG, path)
        return b"".join(parts)

    def names(self, path: str) -> list[str]:
        return sorted(os.listdir(self._at(path)))

    def link(self, path: str) -> str:
        return os.readlink(self._at(path))

    def node(self, path: str) -> DeviceNode:
        place = self._at(path)
        found = os.stat(place)
        if not stat.S_ISCHR(found.st_mode):
            raise error(errno.ENODEV, path)
        return DeviceNode(usable=os.access(place, os.R_OK | os.W_OK), group=_group_name(found.st_gid))

    def process(self) -> Process:
        if self._root != Path("/"):
            return Process(platform="linux")
        return Process(
            platform="windows" if sys.platform in {"win32", "cygwin"} else sys.platform,
            release=platform.release() or None,
            groups=_own_groups(),
            shm_bytes=_shm_bytes(),
            cpu=platform.processor() or None,
        )

    def _at(self, path: str) -> str:
        if "\0" in path:
            raise error(errno.EINVAL, path.replace("\0", "?"))
        return os.path.join(self._root, path)


class RecordedTree:
    """A machine that was recorded, or built by hand. What was not recorded does not exist.

    Args:
        recording: as :meth:`RecordingTree.recording` gives it, from JSON. The names in a directory that has no entry
            of its own follow from the paths below it.

    Raises:
        UsageError: it does not have that form.
    """

    def __init__(self, recording: Mapping[str, Any]) -> None:
        self._recording: Recording = parse(recording)
        self._below: dict[str, set[str]] = {}
        for path in self._recording.paths():
            parts = path.split("/")
            for depth in range(len(parts)):
                self._below.setdefault("/".join(parts[:depth]), set()).add(parts[depth])

    def read(self, path: str, limit: int) -> bytes:
        content = self._recording.files.get(path)
        if content is None:
            raise self._missing(path, errno.EISDIR if path in self._below else errno.ENOENT)
        if len(content) > limit:
            raise error(errno.EFBIG, path)
        return content

    def names(self, path: str) -> list[str]:
        listed = self._recording.names.get(path)
        if listed is not None:
            return sorted(listed)
        if path in self._below and path not in self._recording.errors:
            return sorted(self._below[path])
        raise self._missing(path, errno.ENOTDIR if path in self._recording.files else errno.ENOENT)

    def link(self, path: str) -> str:
        target = self._recording.links.get(path)
        if target is None:
            there = path in self._recording.files or path in self._below
            raise self._missing(path, errno.EINVAL if there else errno.ENOENT)
        return target

    def node(self, path: str) -> DeviceNode:
        found = self._recording.nodes.get(path)
        if found is None:
            there = path in self._recording.files or path in self._below
            raise self._missing(path, errno.ENODEV if there else errno.ENOENT)
        return found

    def process(self) -> Process:
        return self._recording.process

    def _missing(self, path: str, otherwise: int) -> OSError:
        return error(self._recording.errors.get(path, otherwise), path)


@dataclass
class _Answers:
    """What a tree was asked and what it answered, in the sections of a recording."""

    files: dict[str, str] = field(default_factory=dict)
    binary: dict[str, str] = field(default_factory=dict)
    links: dict[str, str] = field(default_factory=dict)
    names: dict[str, list[str]] = field(default_factory=dict)
    errors: dict[str, str] = field(default_factory=dict)
    nodes: dict[str, dict[str, Any]] = field(default_factory=dict)


class RecordingTree:
    """Another tree, with a memory of every question and its answer.

    Args:
        tree: the tree that answers.
        keep: what of a file's content goes into the recording, by path and content; everything by default. It has to
            leave what the readers read, and must not fail on nonsense.
    """

    def __init__(self, tree: Tree, keep: Keep | None = None) -> None:
        self._tree = tree
        self._keep = keep
        self._answers = _Answers()
        self._process: Process | None = None

    def read(self, path: str, limit: int) -> bytes:
        content = self._ask(self._tree.read, path, limit)
        kept = content if self._keep is None else self._keep(path, content)
        try:
            self._answers.files[path] = kept.decode("utf-8")
        except UnicodeDecodeError:
            self._answers.binary[path] = base64.b64encode(kept).decode("ascii")
        return content

    def names(self, path: str) -> list[str]:
        self._answers.names[path] = answer = self._ask(self._tree.names, path)
        return list(answer)

    def link(self, path: str) -> str:
        self._answers.links[path] = answer = self._ask(self._tree.link, path)
        return answer

    def node(self, path: str) -> DeviceNode:
        answer = self._ask(self._tree.node, path)
        self._answers.nodes[path] = {"usable": answer.usable, "group": answer.group}
        return answer

    def process(self) -> Process:
        self._process = self._tree.process()
        return self._process

    def recording(self, source: str = "") -> dict[str, Any]:
        """Everything that was asked so far, ready for JSON.

        Of the process's groups only those are in it that own a device node or are the usual owners of one.

        Args:
            source: where this machine comes from.
        """
        sections = {name: dict(sorted(value.items())) for name, value in vars(self._answers).items()}
        owners = {node["group"] for node in self._answers.nodes.values()} | _DEVICE_GROUPS
        facts = {} if self._process is None else {k: v for k, v in vars(self._process).items() if v is not None}
        if "groups" in facts:
            facts["groups"] = [name for name in facts["groups"] if name in owners]
        return {"schema": SCHEMA, "source": source, **sections, "process": facts}

    def _ask(self, question: Any, path: str, *details: Any) -> Any:
        try:
            return question(path, *details)
        except OSError as refused:
            # A path that is not in a recording does not exist; only other errors are worth a line.
            if refused.errno != errno.ENOENT:
                self._answers.errors[path] = errno.errorcode.get(refused.errno or 0, "EIO")
            raise


def as_tree(root: Tree | Path) -> Tree:
    """A directory as a tree of files; a tree as it is."""
    return LiveTree(root) if isinstance(root, Path) else root


def _group_name(number: int) -> str:
    import grp  # there is none on Windows, and no device node either

    try:
        return grp.getgrgid(number).gr_name
    except KeyError:
        return str(number)


def _own_groups() -> tuple[str, ...] | None:
    if not hasattr(os, "getgroups"):
        return None
    return tuple(sorted({_group_name(number) for number in (*os.getgroups(), os.getegid())}))


def _shm_bytes() -> int | None:
    try:
        found = os.statvfs("/dev/shm")
    except (OSError, AttributeError):  # AttributeError: Windows
        return None
    return found.f_blocks * found.f_frsize
