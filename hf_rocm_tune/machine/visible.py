"""Which cards this process is to see, chosen before torch is imported: one, or all discrete ones for several ranks.

A job of one process sees exactly one card, unless a split was asked for: TRL's ``device_map="auto"`` splits a model
over all visible cards by peer copies, and an integrated GPU beside the card may come first (TheRock#5543: RX 7900 XT
with a gfx1036 as device 0).

In a job of several processes on this machine every rank sees all discrete cards, and Accelerate gives each its own by
LOCAL_RANK. One card a rank would not work: accelerate 1.15.0 takes LOCAL_RANK itself as the device index
(``PartialState.wait_for_everyone``, ``Accelerator.prepare_model``), so rank 1 would ask for a second card.

Filters nest: ROCR_VISIBLE_DEVICES first, then HIP_VISIBLE_DEVICES, or CUDA_VISIBLE_DEVICES where that is empty (clr,
rocdevice.cpp). That HIP counts GPUs in KFD's order is general knowledge, lower confidence: ROCR lists its agents so.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType

from hf_rocm_tune.machine.gpus import GpuNode

FILTERS = ("ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES")
OURS = "HIP_VISIBLE_DEVICES"

MARK = "HF_ROCM_TUNE_VISIBLE_SET"
"""What a parent process of ours set: a child (a rank of the launcher, a loader's worker) inherits its parent's choice
and must not take it for the user's."""

# gfx1036: TheRock#5543. gfx1151: Strix Halo, unsloth install.sh. The others: general knowledge, lower confidence.
_INTEGRATED_ARCHS = frozenset({"gfx90c", "gfx1036", "gfx1103", "gfx1150", "gfx1151"})
# Our own bound: less is what firmware carves out of system memory for a display, and no model trains in it.
_SMALL_VRAM_BYTES = 4 << 30


@dataclass(frozen=True, kw_only=True)
class Choice:
    """What to set, and why.

    Attributes:
        variables: name to value; empty where nothing is to be set.
        reason: one line.
        troubled: something is not as one card for each process needs it; worth a warning.
    """

    variables: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    reason: str
    troubled: bool = False


def is_integrated(node: GpuNode) -> bool:
    """Whether a node shares the CPU's memory: by architecture, by CPU cores in the node, or by very little memory."""
    small = node.vram_bytes is not None and node.vram_bytes < _SMALL_VRAM_BYTES
    return node.arch in _INTEGRATED_ARCHS or node.has_cpu or small


def users_environ(environ: Mapping[str, str]) -> dict[str, str]:
    """``environ`` without the choice of a parent process of ours, as far as nobody has changed it since."""
    plain = {name: value for name, value in environ.items() if name != MARK}
    name, _, value = environ.get(MARK, "").partition("=")
    if name in FILTERS and plain.get(name) == value:
        del plain[name]
    return plain


def local_processes(environ: Mapping[str, str]) -> int:
    """Number of processes of this job on this machine: LOCAL_WORLD_SIZE, or 1 where it is unset or nonsense."""
    text = environ.get("LOCAL_WORLD_SIZE", "").strip()
    return max(int(text), 1) if re.fullmatch("[0-9]{1,9}", text) else 1


def choose(
    nodes: Sequence[GpuNode],
    environ: Mapping[str, str],
    *,
    complete: bool = True,
    processes: int = 1,
    split: bool = False,
) -> Choice:
    """Choose the cards that this process is to see; every rank of a job comes to the same choice.

    Args:
        nodes: GPUs in the kernel's order (``gpus.read_topology``). Empty on a CUDA machine: then nothing is set.
        environ: the process's variables; the user's own filter is kept.
        complete: whether ``nodes`` are all there are; where not, indices are uncertain and nothing is set.
        processes: how many processes of this job run on this machine.
        split: one process is to use several cards. Integrated GPUs are still hidden.
    """
    users = {name: value for name, value in users_environ(environ).items() if name in FILTERS}
    if not nodes:
        return Choice(reason="no AMD GPU is listed by the kernel: nothing to choose")
    if users:
        return _keep(nodes, users, processes)
    if not complete:
        return Choice(
            reason=f"some GPUs could not be read, so their indices are uncertain: set {OURS} yourself", troubled=True
        )
    # Integrated GPUs are left out beside a discrete card, and kept where there is nothing else.
    cards = [node for node in nodes if not is_integrated(node)] or list(nodes)
    cards.sort(key=lambda node: (-(node.vram_bytes or 0), node.index))
    hidden = [node for node in nodes if node not in cards]
    aside = f"; hidden as integrated: {', '.join(describe(node) for node in hidden)}" if hidden else ""
    if processes > len(cards):
        return Choice(
            reason=f"{processes} processes on this machine, but {len(cards)} card(s) to train on{aside}: nothing is "
            f"set; start at most {len(cards)} process(es)",
            troubled=True,
        )
    if split or processes > 1:
        why = f"each of {processes} processes takes one of them" if processes > 1 else "a split was asked for"
        listed = ",".join(str(node.index) for node in cards)
        return Choice(variables={OURS: listed} if hidden else {}, reason=f"{len(cards)} cards visible, {why}{aside}")
    if len(nodes) == 1:
        return Choice(reason=f"one GPU is there: {describe(cards[0])}")
    return Choice(variables={OURS: str(cards[0].index)}, reason=f"{describe(cards[0])}{aside}")


def _keep(nodes: Sequence[GpuNode], users: dict[str, str], processes: int) -> Choice:
    shown = ", ".join(f"{name}={value}" for name, value in users.items())
    seen = visible_nodes(nodes, users)
    if processes > 1 and seen is not None and len(seen) < processes:
        return Choice(
            reason=f"{shown} is set by the user and kept, but leaves {len(seen)} card(s) for {processes} processes",
            troubled=True,
        )
    return Choice(reason=f"{shown} is set by the user and kept")


def describe(node: GpuNode) -> str:
    """A GPU in a few words."""
    gib = "memory unknown" if node.vram_bytes is None else f"{node.vram_bytes / (1 << 30):.1f} GiB"
    return f"GPU {node.index} ({node.arch}, {gib}{', ' + node.pci_address if node.pci_address else ''})"


def enact(choice: Choice, environ: MutableMapping[str, str]) -> None:
    """Write a choice to ``environ``, with the mark by which a child process knows it as ours.

    A parent's choice that no longer holds here is taken back first, so the outcome does not depend on who started us.
    """
    users = users_environ(environ)
    for name in (*FILTERS, MARK):
        if name not in users:
            environ.pop(name, None)
    for name, value in choice.variables.items():
        environ[MARK] = f"{name}={value}"
        environ[name] = value


def visible_nodes(nodes: Sequence[GpuNode], environ: Mapping[str, str]) -> tuple[GpuNode, ...] | None:
    """The nodes that pass the filters in ``environ``, in the order in which HIP counts them.

    None where a filter cannot be followed (empty, or entries that are not indices, for example UUIDs).
    """
    hip = environ.get("HIP_VISIBLE_DEVICES") or environ.get("CUDA_VISIBLE_DEVICES")
    seen: list[GpuNode] | None = list(nodes)
    for listed in (environ.get("ROCR_VISIBLE_DEVICES"), hip or None):
        if listed is not None and seen is not None:
            seen = _filtered(seen, listed)
    return None if seen is None else tuple(seen)


def _filtered(nodes: Sequence[GpuNode], listed: str) -> list[GpuNode] | None:
    kept: list[GpuNode] = []
    for entry in (part.strip() for part in listed.split(",")):
        if re.fullmatch(r"-?[0-9]{1,9}", entry):
            # An index that does not exist ends the list, as HIP and CUDA both have it.
            if not 0 <= int(entry) < len(nodes):
                break
            kept.append(nodes[int(entry)])
        else:
            return None
    return kept
