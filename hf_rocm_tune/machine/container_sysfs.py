"""Whether this process runs in a container, and how much memory its control group leaves it.

A container shows by marks that its engine leaves (``/.dockerenv``, ``/run/.containerenv``, ``/run/systemd/container``,
``/.singularity.d``) or by the name of its control group. Limits: kernel ``cgroup-v2`` (``memory.max``) and
``cgroup-v1/memory`` (``memory.limit_in_bytes``), of this group and of every one above it.
"""

from __future__ import annotations

import re

from hf_rocm_tune.machine.sysfs import MAX_BYTES, Reading, known, parse_int, read_text
from hf_rocm_tune.machine.sysfs_tree import Tree

_CGROUP = "proc/self/cgroup"
_NO_MARK = "no mark of a container"
_ENGINES = {
    "docker": "docker",
    "libpod": "podman",
    "kubepods": "kubernetes",
    "crio-": "kubernetes",
    "containerd": "containerd",
    "lxc": "lxc",
}
_DEEPEST = 32
_MOUNTS = {
    "v2": (("sys/fs/cgroup", "memory.max"), ("sys/fs/cgroup/unified", "memory.max")),
    "v1": (("sys/fs/cgroup/memory", "memory.limit_in_bytes"),),
}


def read_container(tree: Tree) -> Reading[str]:
    """``docker``, ``podman`` or the like. Outside of one there is no value, and the reason says so."""
    return known(_marked(tree) or _named(read_text(tree, _CGROUP).value or ""), _NO_MARK)


def _marked(tree: Tree) -> str | None:
    # systemd's own note comes first: it names the engine, whichever it is.
    noted = read_text(tree, "run/systemd/container").value
    if noted and re.fullmatch("[a-z-]{1,32}", noted):
        return noted
    if _exists(tree, "run/.containerenv"):
        return "podman"
    if _exists(tree, ".dockerenv"):
        return "docker"
    return "apptainer" if _exists(tree, ".singularity.d/runscript") else None


def _exists(tree: Tree, path: str) -> bool:
    try:
        tree.read(path, MAX_BYTES)
    except (PermissionError, IsADirectoryError):
        return True
    except OSError:
        return False
    return True


def _named(cgroup: str) -> str | None:
    return next((engine for part, engine in _ENGINES.items() if part in cgroup), None)


def read_memory_limit(tree: Tree, memory_bytes: int | None) -> Reading[int]:
    """The lowest limit in bytes of this process's control groups, where it is below the host's memory.

    Args:
        tree: the machine.
        memory_bytes: of the host; where it is not known, every limit counts.
    """
    cgroup = read_text(tree, _CGROUP)
    places = _memory_groups(cgroup.value or "") or {("v2", "")}
    limits = [
        limit
        for version, group in sorted(places)
        for mount, file in _MOUNTS[version]
        for directory in _upward(group)
        if (limit := parse_int(read_text(tree, f"{mount}{directory}/{file}").value or "")) is not None
    ]
    lowest = min(limits, default=None)
    if lowest is not None and (memory_bytes is None or lowest < memory_bytes):
        return Reading(value=lowest)
    return Reading(value=None, reason="no control group limits the memory below the host's")


def _memory_groups(cgroup: str) -> set[tuple[str, str]]:
    """Version and path of the groups that count memory, from ``hierarchy:controllers:path`` lines."""
    found: set[tuple[str, str]] = set()
    for line in cgroup.splitlines():
        fields = line.split(":", 2)
        if len(fields) == 3 and fields[:2] == ["0", ""]:
            found.add(("v2", fields[2]))
        elif len(fields) == 3 and "memory" in fields[1].split(","):
            found.add(("v1", fields[2]))
    return found


def _upward(group: str) -> list[str]:
    """``/a/b``, ``/a`` and ``""``. Above its own root a group's path begins with ``..``, which leads nowhere here."""
    parts = [part for part in group.split("/") if part not in {"", ".", ".."}][:_DEEPEST]
    return [f"/{'/'.join(parts[:depth])}".rstrip("/") for depth in range(len(parts), -1, -1)]
