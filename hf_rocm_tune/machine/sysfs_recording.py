"""The form of a recording of a machine, checked: it may come from a stranger's issue report.

    {"schema": 1, "source": "where this comes from",
     "files": {path: text}, "binary": {path: base64}, "links": {path: target}, "names": {path: [name, ...]},
     "errors": {path: "EACCES"}, "nodes": {path: {"usable": true, "group": "render"}},
     "process": {"release": "...", "platform": "linux", "groups": ["render"], "shm_bytes": n, "cpu": "..."}}

Every section may be missing; other keys belong to whoever wrote them and are left alone.
"""

from __future__ import annotations

import base64
import binascii
import errno
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from hf_rocm_tune.errors import UsageError

SCHEMA = 1


@dataclass(frozen=True, kw_only=True)
class DeviceNode:
    """What the permissions of a device node say. A container's device filter may still refuse what they allow.

    Attributes:
        usable: whether this process may read and write it (None: not known).
        group: name of its group, its number where it has no name; None where unknown.
    """

    usable: bool | None
    group: str | None


@dataclass(frozen=True, kw_only=True)
class Process:
    """The few facts that no file states. None means: not known.

    Attributes:
        platform: ``linux``, ``windows`` or ``darwin``.
        release: of the kernel, as ``uname -r`` has it.
        groups: names of the groups that this process is in, numbers where they have no name.
        shm_bytes: size of ``/dev/shm``.
        cpu: its name, where the system tells it otherwise than by a file.
    """

    platform: str
    release: str | None = None
    groups: tuple[str, ...] | None = None
    shm_bytes: int | None = None
    cpu: str | None = None


@dataclass(frozen=True, kw_only=True)
class Recording:
    """A recording whose form is right. Paths have no leading slash; errors are this system's error numbers."""

    files: Mapping[str, bytes]
    links: Mapping[str, str]
    names: Mapping[str, tuple[str, ...]]
    errors: Mapping[str, int]
    nodes: Mapping[str, DeviceNode]
    process: Process

    def paths(self) -> Iterator[str]:
        """Every path that is known to be there, directories that were listed included."""
        for section in (self.files, self.links, self.names, self.errors, self.nodes):
            yield from section
        for directory, listed in self.names.items():
            yield from (f"{directory}/{name}" for name in listed)


def parse(recording: Mapping[str, Any]) -> Recording:
    """Check a recording's form.

    Raises:
        UsageError: what is wrong and where.
    """
    if not isinstance(recording, Mapping) or recording.get("schema") != SCHEMA:
        got = recording.get("schema") if isinstance(recording, Mapping) else type(recording).__name__
        raise UsageError(f"this is no recording of a machine that can be read: schema {SCHEMA} expected, got {got!r}")
    files = {path: _encoded(text) for path, text in _section(recording, "files", str).items()}
    for path, text in _section(recording, "binary", str).items():
        files[path] = _decoded(path, text)
    return Recording(
        files=files,
        links=_section(recording, "links", str),
        names={path: _texts("names", path, value) for path, value in _section(recording, "names", list).items()},
        # A name that this system does not know (recorded on another) is still an error.
        errors={path: getattr(errno, name, errno.EIO) for path, name in _section(recording, "errors", str).items()},
        nodes={path: _node(path, value) for path, value in _section(recording, "nodes", Mapping).items()},
        process=_process(recording.get("process", {})),
    )


def _wrong(section: str, path: object, got: object) -> UsageError:
    return UsageError(f"the recording is damaged: {section!r} has {str(got)[:40]!r} at {str(path)[:80]!r}")


def _section(recording: Mapping[str, Any], name: str, kind: Any) -> dict[str, Any]:
    section = recording.get(name, {})
    if not isinstance(section, Mapping):
        raise _wrong(name, "", section)
    for path, value in section.items():
        if not isinstance(path, str) or not isinstance(value, kind):
            raise _wrong(name, path, value)
    return {path.strip("/"): value for path, value in section.items()}


def _encoded(text: str) -> bytes:
    # JSON may hold half a surrogate pair, which is no text: it becomes bytes that no reader takes for text.
    return text.encode("utf-8", "surrogatepass")


def _decoded(path: str, text: str) -> bytes:
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError) as bad:
        raise _wrong("binary", path, text) from bad


def _texts(section: str, path: str, values: list[Any]) -> tuple[str, ...]:
    if not all(isinstance(value, str) for value in values):
        raise _wrong(section, path, values)
    return tuple(values)


def _node(path: str, value: Mapping[str, Any]) -> DeviceNode:
    usable, group = value.get("usable"), value.get("group")
    if not isinstance(usable, bool | None) or not isinstance(group, str | None):
        raise _wrong("nodes", path, value)
    return DeviceNode(usable=usable, group=group)


def _process(facts: Any) -> Process:
    if not isinstance(facts, Mapping):
        raise _wrong("process", "", facts)
    kinds: dict[str, Any] = {"release": str, "platform": str, "groups": list, "shm_bytes": int, "cpu": str}
    known = {name: facts[name] for name in kinds if facts.get(name) is not None}
    for name, value in known.items():
        if not isinstance(value, kinds[name]) or isinstance(value, bool):
            raise _wrong("process", name, value)
    if "groups" in known:
        known["groups"] = _texts("process", "groups", known["groups"])
    return Process(**{"platform": "linux", **known})
