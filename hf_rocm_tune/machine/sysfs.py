"""The kernel's small text files: of the live machine, below a directory, or from a recording of another machine.

A `Tree` answers like the system, including ``OSError``; a path has no leading slash (``sys/class/kfd``). Replaying a
recording gives the same bytes and the same errors. The readers never raise: an unreadable file (missing, forbidden,
empty, binary or oversized) is a `Reading` without a value and with the reason. Not covered: a well-formed file with a
wrong value, and a driver that hangs inside a read.

A recording may come from an issue report, so its form is checked::

    {"schema": 1, "source": "where this comes from",
     "files": {path: text}, "binary": {path: base64}, "links": {path: target}, "names": {path: [name, ...]},
     "errors": {path: "EACCES"}, "nodes": {path: {"usable": true, "group": "render"}},
     "process": {"release": "...", "platform": "linux", "groups": ["render"], "shm_bytes": n, "cpu": "..."}}

Every section may be missing; other keys are ignored.
"""

from __future__ import annotations

import base64
import errno
import functools
import os
import platform
import stat
import sys
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import MISSING, asdict, dataclass, field, fields, is_dataclass
from pathlib import Path
from types import UnionType
from typing import Any, Generic, Protocol, TypeVar, get_args, get_origin, get_type_hints

from hf_rocm_tune.errors import UsageError

MAX_BYTES = 1 << 20
"""The kernel hands out at most one page (4 KiB) per sysfs attribute; /proc and /boot files may be larger."""
_SCHEMA = 1
# Usual owners of a GPU's device node; the name of another group may contain a user name.
_DEVICE_GROUPS = frozenset({"render", "video"})

T = TypeVar("T")
U = TypeVar("U")


@dataclass(frozen=True, kw_only=True)
class Reading(Generic[T]):
    """A value that was read, or None and the reason, one line."""

    value: T | None
    reason: str = ""

    def __post_init__(self) -> None:
        assert (self.value is None) == bool(self.reason), "a reading has either a value or a reason"


def known(value: T | None, reason: str) -> Reading[T]:
    return Reading(value=value) if value is not None else Reading(value=None, reason=reason)


def unknown(reason: str) -> Reading[T]:
    return Reading(value=None, reason=reason)


def derived(reading: Reading[T], convert: Callable[[T], U | None], complaint: str) -> Reading[U]:
    """``convert`` applied to a reading; ``complaint`` is the reason if it returns None."""
    return unknown(reading.reason) if reading.value is None else known(convert(reading.value), complaint)


@dataclass(frozen=True, kw_only=True)
class DeviceNode:
    """Whether the permissions of a device node let this process read and write it, and its group's name or number.

    None means unknown. A container's device filter may refuse access all the same.
    """

    usable: bool | None = None
    group: str | None = None


@dataclass(frozen=True, kw_only=True)
class Process:
    """Facts that are not in a file. None means unknown.

    Attributes:
        platform: ``linux``, ``windows`` or ``darwin``.
        release: of the kernel (``uname -r``).
        groups: names of this process's groups, or numbers.
        shm_bytes: size of ``/dev/shm``.
        cpu: its name, if it is not in a file.
    """

    platform: str = "linux"
    release: str | None = None
    groups: tuple[str, ...] | None = None
    shm_bytes: int | None = None
    cpu: str | None = None


class Tree(Protocol):
    """A machine's files."""

    def read(self, path: str, limit: int) -> bytes:
        """The whole file; ``EFBIG`` if it has more than ``limit`` bytes."""

    def names(self, path: str) -> list[str]:
        """The names in a directory, sorted."""

    def link(self, path: str) -> str:
        """The text of a symbolic link."""

    def node(self, path: str) -> DeviceNode:
        """Permissions of this process on a device node; ``ENODEV`` if it is not one."""

    def process(self) -> Process:
        """The facts that are not in a file."""


def _error(number: int, path: str) -> OSError:
    return OSError(number, os.strerror(number), f"/{path}")


class LiveTree:
    """The files below ``root``; `process` needs ``/`` as root."""

    def __init__(self, root: Path = Path("/")) -> None:
        self._root = root

    def read(self, path: str, limit: int) -> bytes:
        # Non-blocking: opening a pipe would hang.
        flags = os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)
        with open(os.open(self._at(path), flags), "rb", buffering=0) as file:
            if stat.S_ISDIR(os.fstat(file.fileno()).st_mode):
                raise _error(errno.EISDIR, path)
            content = b""
            # One read of a sysfs or proc file may return less than there is.
            while len(content) <= limit and (part := file.read(limit + 1 - len(content))):
                content += part
        if len(content) > limit:
            raise _error(errno.EFBIG, path)
        return content

    def names(self, path: str) -> list[str]:
        return sorted(os.listdir(self._at(path)))

    def link(self, path: str) -> str:
        return os.readlink(self._at(path))

    def node(self, path: str) -> DeviceNode:
        place = self._at(path)
        found = os.stat(place)
        if not stat.S_ISCHR(found.st_mode):
            raise _error(errno.ENODEV, path)
        return DeviceNode(usable=os.access(place, os.R_OK | os.W_OK), group=_group_name(found.st_gid))

    def process(self) -> Process:
        if self._root != Path("/"):
            return Process()
        return Process(
            platform="windows" if sys.platform in {"win32", "cygwin"} else sys.platform,
            release=platform.release() or None,
            groups=_own_groups(),
            shm_bytes=_shm_bytes(),
            cpu=platform.processor() or None,
        )

    def _at(self, path: str) -> str:
        if "\0" in path:
            raise _error(errno.EINVAL, path.replace("\0", "?"))
        return os.path.join(self._root, path)


def _group_name(number: int) -> str:
    import grp  # not on Windows

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


@dataclass(frozen=True, kw_only=True)
class Recording:
    """The sections of a recording, by path without a leading slash."""

    files: Mapping[str, str] = field(default_factory=dict)
    binary: Mapping[str, str] = field(default_factory=dict)
    links: Mapping[str, str] = field(default_factory=dict)
    names: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    errors: Mapping[str, str] = field(default_factory=dict)
    nodes: Mapping[str, DeviceNode] = field(default_factory=dict)
    process: Process = Process()


_KINDS = {str: "text", int: "a number from 0", bool: "true or false", tuple: "a list", Reading: "a value or a reason"}
_hints = functools.cache(get_type_hints)


def unpack(form: Any, value: Any, name: str, *, extra: bool = True) -> Any:
    """Convert a JSON value to an annotated type: records, mappings, lists (as tuples), readings, texts, numbers.

    Args:
        value: anything. Of a record, an entry that has a default may be missing or null.
        name: of the entry, for the message.
        extra: a record may have other entries, which are ignored.

    Raises:
        ValueError: the value has another form; names the entry and the error.
    """
    of, inner = get_origin(form), get_args(form)
    if of is UnionType:
        return None if value is None else unpack(inner[0], value, name)
    if of is tuple and isinstance(value, list):
        return tuple(unpack(inner[0], entry, name) for entry in value)
    if of is Mapping and isinstance(value, Mapping):
        return {unpack(str, key, name): unpack(inner[1], entry, f"{name}: {key!s:.80}") for key, entry in value.items()}
    if of is Reading and isinstance(value, Mapping) and value.keys() == {"value"}:
        return Reading(value=unpack(inner[0], value["value"], name))
    if of is Reading and isinstance(value, Mapping) and value.keys() == {"reason"} and str(value["reason"]).strip():
        return Reading(value=None, reason=unpack(str, value["reason"], name))
    if isinstance(form, type) and is_dataclass(form) and isinstance(value, Mapping):
        forms = _hints(form)
        needed = {f.name for f in fields(form) if f.default is MISSING and f.default_factory is MISSING}
        odd = (needed - value.keys()) | (set() if extra else value.keys() - forms.keys())
        if odd:
            raise ValueError(f"{name} has unexpected or missing entries: {', '.join(sorted(map(str, odd)))}")
        given = [part for part in forms if part in needed or value.get(part) is not None]
        return form(**{part: unpack(forms[part], value[part], f"{name}: {part}") for part in given})
    if (form is str and isinstance(value, str)) or (form is bool and isinstance(value, bool)):
        return value
    if form is int and type(value) is int and value >= 0:
        return value
    raise ValueError(f"{name}: {value!r:.60} is not {_KINDS.get(of or form, 'an object')}")


def _bare(section: Mapping[str, T]) -> dict[str, T]:
    return {path.strip("/"): value for path, value in section.items()}


class RecordedTree:
    """A recorded machine, or one built by hand. A path that was not recorded does not exist.

    Args:
        recording: from :meth:`RecordingTree.recording`. The names in a directory without an entry follow from the paths
            below it.

    Raises:
        UsageError: it does not have that form.
    """

    def __init__(self, recording: Mapping[str, Any]) -> None:
        if (schema := recording.get("schema")) != _SCHEMA:
            raise UsageError(f"this is not a recording of a machine: expected schema {_SCHEMA}, got {schema!r}")
        try:
            told: Recording = unpack(Recording, recording, "recording")
            binary = {path: base64.b64decode(text, validate=True) for path, text in told.binary.items()}
        except ValueError as error:
            raise UsageError(f"the recording is damaged: {error}") from error
        # A lone surrogate in JSON becomes bytes that no reader takes for text.
        files = {path: text.encode("utf-8", "surrogatepass") for path, text in told.files.items()}
        self._files = _bare(files | binary)
        self._links, self._names, self._nodes = _bare(told.links), _bare(told.names), _bare(told.nodes)
        # An error name of another system is still an error.
        self._errors = {path: getattr(errno, name, errno.EIO) for path, name in _bare(told.errors).items()}
        self._process = told.process
        self._below: dict[str, set[str]] = {}
        listed = [f"{directory}/{name}" for directory, names in self._names.items() for name in names]
        for path in (*self._files, *self._links, *self._names, *self._errors, *self._nodes, *listed):
            parts = path.split("/")
            for depth in range(len(parts)):
                self._below.setdefault("/".join(parts[:depth]), set()).add(parts[depth])

    def read(self, path: str, limit: int) -> bytes:
        content = self._files.get(path)
        if content is None:
            raise self._missing(path, errno.EISDIR if path in self._below else errno.ENOENT)
        if len(content) > limit:
            raise _error(errno.EFBIG, path)
        return content

    def names(self, path: str) -> list[str]:
        listed = self._names.get(path)
        if listed is not None:
            return sorted(listed)
        if path in self._below and path not in self._errors:
            return sorted(self._below[path])
        raise self._missing(path, errno.ENOTDIR if path in self._files else errno.ENOENT)

    def link(self, path: str) -> str:
        target = self._links.get(path)
        if target is None:
            raise self._missing(path, errno.EINVAL if self._has(path) else errno.ENOENT)
        return target

    def node(self, path: str) -> DeviceNode:
        found = self._nodes.get(path)
        if found is None:
            raise self._missing(path, errno.ENODEV if self._has(path) else errno.ENOENT)
        return found

    def process(self) -> Process:
        return self._process

    def _has(self, path: str) -> bool:
        return path in self._files or path in self._below

    def _missing(self, path: str, otherwise: int) -> OSError:
        return _error(self._errors.get(path, otherwise), path)


class RecordingTree:
    """Records every access to another tree.

    Args:
        tree: the tree that answers.
        keep: the part of a file's content for the recording, by path and content; everything by default. It must keep
            what the readers use, and not fail on invalid content.
    """

    def __init__(self, tree: Tree, keep: Callable[[str, bytes], bytes] | None = None) -> None:
        self._tree = tree
        self._keep = keep
        self._answers: dict[str, dict[str, Any]] = {
            name: {} for name in ("files", "binary", "links", "names", "errors", "nodes")
        }
        self._process: Process | None = None

    def read(self, path: str, limit: int) -> bytes:
        content: bytes = self._ask(self._tree.read, path, limit)
        kept = content if self._keep is None else self._keep(path, content)
        try:
            self._answers["files"][path] = kept.decode("utf-8")
        except UnicodeDecodeError:
            self._answers["binary"][path] = base64.b64encode(kept).decode("ascii")
        return content

    def names(self, path: str) -> list[str]:
        answer: list[str] = self._ask(self._tree.names, path)
        self._answers["names"][path] = list(answer)
        return answer

    def link(self, path: str) -> str:
        answer: str = self._ask(self._tree.link, path)
        self._answers["links"][path] = answer
        return answer

    def node(self, path: str) -> DeviceNode:
        answer: DeviceNode = self._ask(self._tree.node, path)
        self._answers["nodes"][path] = asdict(answer)
        return answer

    def process(self) -> Process:
        self._process = self._tree.process()
        return self._process

    def recording(self, source: str = "") -> dict[str, Any]:
        """Everything that was asked so far, ready for JSON; `source` says where this machine comes from.

        Of the process's groups only those are in it that own a device node or are the usual owners of one.
        """
        sections = {name: dict(sorted(answers.items())) for name, answers in self._answers.items()}
        owners = {node["group"] for node in self._answers["nodes"].values()} | _DEVICE_GROUPS
        facts = {} if self._process is None else {k: v for k, v in vars(self._process).items() if v is not None}
        if "groups" in facts:
            facts["groups"] = [name for name in facts["groups"] if name in owners]
        return {"schema": _SCHEMA, "source": source, **sections, "process": facts}

    def _ask(self, question: Any, path: str, *details: Any) -> Any:
        try:
            return question(path, *details)
        except OSError as refused:
            # A path that is not in a recording does not exist; only other errors are recorded.
            if refused.errno != errno.ENOENT:
                self._answers["errors"][path] = errno.errorcode.get(refused.errno or 0, "EIO")
            raise


def _refused(path: str, error: OSError) -> str:
    if error.errno == errno.EFBIG:
        return f"/{path}: more than {MAX_BYTES} bytes"
    return f"/{path}: {os.strerror(error.errno) if error.errno else type(error).__name__}"


def read_bytes(tree: Tree, path: str) -> Reading[bytes]:
    """The content of a file of at most ``MAX_BYTES``; empty counts as unreadable."""
    try:
        raw = tree.read(path, MAX_BYTES)
    except OSError as error:
        return unknown(_refused(path, error))
    return Reading(value=raw) if raw else unknown(f"/{path}: empty")


def read_text(tree: Tree, path: str) -> Reading[str]:
    """The stripped text of a file. Empty, binary and oversized files count as unreadable."""
    raw = read_bytes(tree, path)
    if raw.value is None:
        return unknown(raw.reason)
    try:
        text = raw.value.decode("utf-8").strip()
    except UnicodeDecodeError:
        text = "\0"
    if "\0" in text:
        return unknown(f"/{path}: binary, not text")
    return Reading(value=text) if text else unknown(f"/{path}: empty")


def read_parsed(tree: Tree, path: str, parse: Callable[[str], T | None], complaint: str) -> Reading[T]:
    """``parse`` applied to a file's stripped text; if that is None, the reason is the complaint and the text."""
    text = read_text(tree, path)
    return derived(text, parse, f"/{path}: {complaint}: {(text.value or '')[:40]!r}")


def table_rows(file: Path, name: str) -> list[dict[str, Any]]:
    """The tables of an array in a TOML file, lists as tuples."""
    tables = tomllib.loads(file.read_text(encoding="utf-8"))[name]
    return [{key: tuple(v) if isinstance(v, list) else v for key, v in table.items()} for table in tables]


def parse_int(text: str) -> int | None:
    """A plain ASCII decimal number of at most 64 bits, or None. ``int()`` alone takes ``1_0``, ``+1`` and more."""
    plain = text.isascii() and text.isdigit() and len(text) <= 20
    return int(text) if plain and int(text) < 1 << 64 else None


def read_int(tree: Tree, path: str) -> Reading[int]:
    return read_parsed(tree, path, parse_int, "not a number")


def read_properties(tree: Tree, path: str) -> Reading[dict[str, int]]:
    """A file of ``name number`` lines, as KFD writes them. Lines of another form are left out."""

    def parse(text: str) -> dict[str, int] | None:
        fields = [line.split() for line in text.splitlines()]
        numbers = {pair[0]: parse_int(pair[1]) for pair in fields if len(pair) == 2}
        return {name: number for name, number in numbers.items() if number is not None} or None

    return derived(read_text(tree, path), parse, f"/{path}: no line of the form 'name number'")


def list_names(tree: Tree, path: str, absent: str = "") -> Reading[list[str]]:
    """The names in a directory, sorted; ``absent`` is the reason for a missing directory."""
    try:
        return Reading(value=tree.names(path))
    except OSError as error:
        return unknown(absent if absent and error.errno == errno.ENOENT else _refused(path, error))


def list_numbered(tree: Tree, path: str) -> Reading[list[int]]:
    """The entries of a directory whose names are numbers, in numeric order. Other entries are left out."""
    names = list_names(tree, path)
    return derived(names, lambda found: sorted(n for n in map(parse_int, found) if n is not None), "")


def read_link_name(tree: Tree, path: str, absent: str = "") -> Reading[str]:
    """The last part of a symbolic link's target (a driver, a group); ``absent`` as above."""
    try:
        target = tree.link(path)
    except OSError as error:
        return unknown(absent if absent and error.errno == errno.ENOENT else _refused(path, error))
    return known(target.rstrip("/").rpartition("/")[2] or None, f"/{path}: points at nothing")
