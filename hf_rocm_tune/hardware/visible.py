"""Which card this process is to see: exactly one, chosen before torch is imported, unless a split was asked for.

Why one: TRL's ``device_map="auto"`` splits a model over all visible cards by peer copies, and an integrated GPU beside
the card may come first (TheRock#5543: RX 7900 XT with a gfx1036 as device 0).

What Accelerate makes of it, read in accelerate 1.15.0: ``PartialState.set_device`` takes
``LOCAL_RANK % device_count()``, so a rank that sees one card gets ``cuda:0``. Two other places take ``LOCAL_RANK``
itself as the device index: ``PartialState.wait_for_everyone`` (``barrier(device_ids=[local_process_index])``) and
``Accelerator.prepare_model`` (``DistributedDataParallel(device_ids=[local_process_index])``, not where
ACCELERATE_BYPASS_DEVICE_MAP is ``true``). Whoever trains with several narrowed ranks has to see to these two.

Filters nest: ROCR_VISIBLE_DEVICES first, then HIP_VISIBLE_DEVICES, or CUDA_VISIBLE_DEVICES where that is empty (clr,
rocdevice.cpp). That HIP counts GPUs in KFD's order is general knowledge, lower confidence: ROCR lists its agents so.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType

from hf_rocm_tune.hardware.kfd import GpuNode

FILTERS = ("ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES")
OURS = "HIP_VISIBLE_DEVICES"

# What a parent process of ours set, and what was there before: a child (a rank of the launcher, a loader's worker)
# inherits the parent's choice and must not take it for the user's.
MARK_SET = "HF_ROCM_TUNE_VISIBLE_SET"
MARK_WAS = "HF_ROCM_TUNE_VISIBLE_WAS"

# gfx1036: TheRock#5543. gfx1151: Strix Halo, unsloth install.sh. The others: general knowledge, lower confidence.
INTEGRATED_ARCHS = frozenset({"gfx90c", "gfx1036", "gfx1103", "gfx1150", "gfx1151"})
# Our own bound: less is what firmware carves out of system memory for a display, and no model trains in it.
SMALL_VRAM_BYTES = 4 << 30


@dataclass(frozen=True, kw_only=True)
class Choice:
    """What to set, and why.

    Attributes:
        variables: name to value; empty where nothing is to be set.
        reason: one line.
        troubled: something is not as one process on one card needs it; worth a warning.
        node: the chosen card where exactly one was chosen from the kernel's list.
    """

    variables: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    reason: str
    troubled: bool = False
    node: GpuNode | None = None


def is_integrated(node: GpuNode) -> bool:
    """Whether a node shares the CPU's memory: by architecture, by CPU cores in the node, or by very little memory."""
    small = node.vram_bytes is not None and node.vram_bytes < SMALL_VRAM_BYTES
    return node.arch in INTEGRATED_ARCHS or node.has_cpu or small


def ranked(nodes: Sequence[GpuNode]) -> list[GpuNode]:
    """The cards to train on, the one with most memory first, ties in the kernel's order.

    Integrated GPUs are left out beside a discrete card, and kept where there is nothing else.
    """
    cards = [node for node in nodes if not is_integrated(node)] or list(nodes)
    return sorted(cards, key=lambda node: (-(node.vram_bytes or 0), node.index))


def users_environ(environ: Mapping[str, str]) -> dict[str, str]:
    """``environ`` with the choice of a parent process of ours taken back, as far as nobody has changed it since."""
    plain = {name: value for name, value in environ.items() if name not in (MARK_SET, MARK_WAS)}
    name, _, value = environ.get(MARK_SET, "").partition("=")
    if name in FILTERS and plain.get(name) == value:
        del plain[name]
        if MARK_WAS in environ:
            plain[name] = environ[MARK_WAS]
    return plain


def local_int(environ: Mapping[str, str], name: str) -> int | None:
    """LOCAL_RANK or LOCAL_WORLD_SIZE as a number; None where unset or nonsense (``-1`` means: not launched)."""
    text = environ.get(name, "").strip()
    return int(text) if re.fullmatch("[0-9]{1,9}", text) else None


def choose(
    nodes: Sequence[GpuNode],
    environ: Mapping[str, str],
    *,
    complete: bool = True,
    local_rank: int | None = None,
    local_world_size: int | None = None,
    split: bool = False,
) -> Choice:
    """Choose the card that this process is to see.

    Args:
        nodes: GPUs in the kernel's order (``kfd.read_topology``). Empty on a CUDA machine: then nothing is set.
        environ: the process's variables; the user's own filter is kept, and narrowed to one entry for each rank.
        complete: whether ``nodes`` are all there are; where not, indices are uncertain and nothing is set.
        local_rank: place among the processes of this machine, from 0; None for a process on its own.
        local_world_size: number of those processes; None where unknown.
        split: one process is to use several cards. Integrated GPUs are still hidden.
    """
    users = {name: value for name, value in users_environ(environ).items() if name in FILTERS}
    if not nodes:
        return Choice(reason="no AMD GPU is listed by the kernel: nothing to choose")
    if users:
        return _keep_or_narrow(users, local_rank, local_world_size, split)
    if not complete:
        return Choice(
            reason=f"some GPUs could not be read, so their indices are uncertain: set {OURS} yourself", troubled=True
        )
    return _choose_from(nodes, local_rank, local_world_size, split)


def _choose_from(nodes: Sequence[GpuNode], rank: int | None, world_size: int | None, split: bool) -> Choice:
    cards = ranked(nodes)
    hidden = [node for node in nodes if node not in cards]
    aside = f"; hidden as integrated: {', '.join(_describe(node) for node in hidden)}" if hidden else ""
    if split:
        listed = ",".join(str(node.index) for node in cards)
        return Choice(
            variables={OURS: listed} if hidden else {}, reason=f"a split was asked for: {len(cards)} visible{aside}"
        )
    wanted = max(world_size or 1, (rank or 0) + 1)
    if wanted > len(cards):
        return Choice(
            reason=f"{wanted} processes on this machine, but {len(cards)} card(s) to train on{aside}: nothing is set; "
            f"start at most {len(cards)} process(es)",
            troubled=True,
        )
    card = cards[rank or 0]
    if len(nodes) == 1:
        return Choice(reason=f"one GPU is there: {_describe(card)}", node=card)
    whose = "" if rank is None else f" for local rank {rank}"
    return Choice(variables={OURS: str(card.index)}, reason=f"{_describe(card)}{whose}{aside}", node=card)


def _keep_or_narrow(users: dict[str, str], rank: int | None, world_size: int | None, split: bool) -> Choice:
    shown = ", ".join(f"{name}={value}" for name, value in users.items())
    if len(users) > 1:
        return Choice(reason=f"{shown} are set by the user and kept")  # the variable policy warns of nesting
    ((name, value),) = users.items()
    entries = [entry.strip() for entry in value.split(",") if entry.strip()]
    needed = max(world_size or 1, (rank or 0) + 1)
    if split or rank is None or len(entries) < 2:
        return Choice(reason=f"{shown} is set by the user and kept")
    if len(entries) < needed:
        return Choice(
            reason=f"{shown} is set by the user and kept, but it names {len(entries)} for {needed} processes",
            troubled=True,
        )
    return Choice(
        variables={name: entries[rank]}, reason=f"entry {rank} of the user's {shown}, because local rank is {rank}"
    )


def _describe(node: GpuNode) -> str:
    gib = "memory unknown" if node.vram_bytes is None else f"{node.vram_bytes / (1 << 30):.0f} GiB"
    return f"GPU {node.index} ({node.arch}, {gib}{', ' + node.pci_address if node.pci_address else ''})"


def enact(choice: Choice, environ: MutableMapping[str, str]) -> None:
    """Write a choice to ``environ``, with the mark by which a child process knows it as ours.

    A parent's choice that no longer holds here is taken back first, so the outcome does not depend on who started us.
    """
    users = users_environ(environ)
    for name in (*FILTERS, MARK_SET, MARK_WAS):
        environ.pop(name, None)
        if name in users:
            environ[name] = users[name]
    for name, value in choice.variables.items():
        environ[MARK_SET] = f"{name}={value}"
        if name in users:
            environ[MARK_WAS] = users[name]
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
