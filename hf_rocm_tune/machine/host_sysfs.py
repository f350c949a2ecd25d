"""The host around the cards: memory and its limits, container, seccomp, device nodes and who may use them."""

from __future__ import annotations

import re

from hf_rocm_tune.machine.container_sysfs import read_container, read_memory_limit
from hf_rocm_tune.machine.machine import Host, Node
from hf_rocm_tune.machine.sysfs import Reading, derived, known, list_names, parse_int, read_text, unknown
from hf_rocm_tune.machine.sysfs_recording import Process
from hf_rocm_tune.machine.sysfs_tree import Tree

MEMINFO = "proc/meminfo"
STATUS = "proc/self/status"
CPUINFO = "proc/cpuinfo"
# Lines that are read of files that say much more.
MEMINFO_NAMES = ("MemTotal", "MemAvailable", "SwapTotal")
CPU_NAME = re.compile(r"^model name[ \t]*:[ \t]*(\S.*)$", re.MULTILINE)


def read_host(tree: Tree) -> Host:
    """Everything about the host. Never raises."""
    process = tree.process()
    nodes = _read_nodes(tree)
    memory = _read_memory(tree, "MemTotal")
    return Host(
        platform=process.platform,
        cpu=_read_cpu(tree, process),
        memory_bytes=memory,
        available_bytes=_read_memory(tree, "MemAvailable"),
        swap_bytes=_read_memory(tree, "SwapTotal"),
        memory_limit_bytes=read_memory_limit(tree, memory.value),
        shm_bytes=known(process.shm_bytes, "the size of /dev/shm is not known"),
        container=read_container(tree),
        seccomp=_read_seccomp(tree),
        nodes=nodes,
        groups=_own_groups(process, nodes),
    )


def _read_cpu(tree: Tree, process: Process) -> Reading[str]:
    text = read_text(tree, CPUINFO)
    if text.value is None:
        return known(process.cpu, text.reason)
    found = CPU_NAME.search(text.value)
    return known(found[1].strip() if found else process.cpu, f"/{CPUINFO}: no model name")


def _read_memory(tree: Tree, name: str) -> Reading[int]:
    return derived(read_text(tree, MEMINFO), lambda text: _kib_line(text, name), f"/{MEMINFO}: no {name}")


def _kib_line(text: str, name: str) -> int | None:
    found = re.search(rf"^{name}:[ \t]+([0-9]{{1,16}}) kB[ \t]*$", text, re.MULTILINE | re.ASCII)
    return int(found[1]) << 10 if found else None


def _read_seccomp(tree: Tree) -> Reading[int]:
    def mode(text: str) -> int | None:
        found = re.search(r"^Seccomp:[ \t]+([0-2])[ \t]*$", text, re.MULTILINE)
        return parse_int(found[1]) if found else None

    return derived(read_text(tree, STATUS), mode, f"/{STATUS}: no Seccomp")


def _read_nodes(tree: Tree) -> tuple[Node, ...]:
    names = list_names(tree, "dev/dri").value or []
    renders = [name for name in names if re.fullmatch("renderD[0-9]{1,6}", name)]
    return tuple(_read_node(tree, path) for path in ("dev/kfd", *(f"dev/dri/{name}" for name in renders)))


def _read_node(tree: Tree, path: str) -> Node:
    try:
        found = tree.node(path)
    except FileNotFoundError:
        return Node(path=f"/{path}", exists=False, usable=None, group=None)
    except OSError:
        return Node(path=f"/{path}", exists=True, usable=None, group=None)
    return Node(path=f"/{path}", exists=True, usable=found.usable, group=found.group)


def _own_groups(process: Process, nodes: tuple[Node, ...]) -> Reading[tuple[str, ...]]:
    if process.groups is None:
        return unknown("the groups of this process are not known")
    owners = {node.group for node in nodes}
    return Reading(value=tuple(name for name in process.groups if name in owners))
