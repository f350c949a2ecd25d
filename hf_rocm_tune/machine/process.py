"""What a process settles at its start: which cards it sees, CPU or accelerator, and how many ranks.

Cards are chosen before torch is imported. A job of one process sees exactly one, unless a split was asked for: TRL's
``device_map="auto"`` splits a model over all visible cards by peer copies, and an integrated GPU beside the card may
come first (TheRock#5543: RX 7900 XT with a gfx1036 as device 0). Several ranks on a machine see all discrete cards:
accelerate 1.15.0 takes LOCAL_RANK itself as the device index (``PartialState.wait_for_everyone``,
``Accelerator.prepare_model``), so rank 1 would ask for a second card.

Filters nest: ROCR_VISIBLE_DEVICES first, then HIP_VISIBLE_DEVICES, or CUDA_VISIBLE_DEVICES where that is empty (clr,
rocdevice.cpp). That HIP counts GPUs in KFD's order is general knowledge, lower confidence: ROCR lists its agents so.

Accelerate 1.15 (``state.py``, ``PartialState.__init__``), without an accelerator, sees the other ranks only when it was
told ``cpu``; otherwise each rank trains alone and nothing says so.
"""

from __future__ import annotations

import importlib
import importlib.util
import re
import socket
import warnings
from collections.abc import Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType

from hf_rocm_tune.errors import UsageError
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
class CardChoice:
    """Variables to set, and why. Troubled: there are fewer cards than the processes need; worth a warning."""

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
) -> CardChoice:
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
        return CardChoice(reason="no AMD GPU is listed by the kernel: nothing to choose")
    if users:
        return _keep(nodes, users, processes)
    if not complete:
        return CardChoice(
            reason=f"some GPUs could not be read, so their indices are uncertain: set {OURS} yourself", troubled=True
        )
    # Integrated GPUs are left out beside a discrete card, and kept where there is nothing else.
    cards = [node for node in nodes if not is_integrated(node)] or list(nodes)
    cards.sort(key=lambda node: (-(node.vram_bytes or 0), node.index))
    hidden = [node for node in nodes if node not in cards]
    aside = f"; hidden as integrated: {', '.join(describe(node) for node in hidden)}" if hidden else ""
    if processes > len(cards):
        return CardChoice(
            reason=f"{processes} processes on this machine, but {len(cards)} card(s) to train on{aside}: nothing is "
            f"set; start at most {len(cards)} process(es)",
            troubled=True,
        )
    if split or processes > 1:
        why = f"each of {processes} processes takes one of them" if processes > 1 else "a split was asked for"
        listed = ",".join(str(node.index) for node in cards)
        shown = {OURS: listed} if hidden else {}
        return CardChoice(variables=shown, reason=f"{len(cards)} cards visible, {why}{aside}")
    if len(nodes) == 1:
        return CardChoice(reason=f"one GPU is there: {describe(cards[0])}")
    return CardChoice(variables={OURS: str(cards[0].index)}, reason=f"{describe(cards[0])}{aside}")


def _keep(nodes: Sequence[GpuNode], users: dict[str, str], processes: int) -> CardChoice:
    shown = ", ".join(f"{name}={value}" for name, value in users.items())
    seen = visible_nodes(nodes, users)
    if processes > 1 and seen is not None and len(seen) < processes:
        return CardChoice(
            reason=f"{shown} is set by the user and kept, but leaves {len(seen)} card(s) for {processes} processes",
            troubled=True,
        )
    return CardChoice(reason=f"{shown} is set by the user and kept")


def describe(node: GpuNode) -> str:
    """A GPU in a few words."""
    gib = "memory unknown" if node.vram_bytes is None else f"{node.vram_bytes / (1 << 30):.1f} GiB"
    return f"GPU {node.index} ({node.arch}, {gib}{', ' + node.pci_address if node.pci_address else ''})"


def enact(choice: CardChoice, environ: MutableMapping[str, str]) -> None:
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


# ---- ranks and devices, before Accelerate makes its state -------------------------------------------------------

_LOOPBACK = "127.0.0.1"
_hosted: list[object] = []  # the store of this job's ranks, where this process hosts it: kept alive here


def has_accelerator() -> bool:
    """Whether torch sees a GPU (HIP and CUDA answer the same call). Imports torch."""
    import torch

    return torch.cuda.is_available()


def has_bf16() -> bool:
    """Whether the GPU that torch sees computes in bfloat16 itself, without emulation. Imports torch."""
    import torch

    return torch.cuda.is_available() and torch.cuda.is_bf16_supported(including_emulation=False)


def prepare_process(environ: MutableMapping[str, str]) -> None:
    """Tell Accelerate to use the CPU where there is nothing else. Call it before anything makes Accelerate's state.

    It replaces a ``false`` as well: launchers write that for every configuration that names a GPU.

    Raises:
        UsageError: the environment says that a launcher started several processes, and none did; or that DeepSpeed is
            to be used, which cannot be.
    """
    _check_launch(environ)
    if environ.get("ACCELERATE_USE_DEEPSPEED", "false").lower() == "true":
        require_deepspeed()
        if not has_accelerator():
            raise UsageError(
                "DeepSpeed was asked for, and torch sees no GPU, where Accelerate would silently train with DDP "
                "instead: use --accelerate_config cpu_dual"
            )
    _listen_on_loopback_only(environ)
    if not has_accelerator():
        environ["ACCELERATE_USE_CPU"] = "true"
    # PEFT 0.21 and TRL 1.16 use names that transformers 5.23 has changed; nothing that a user could change.
    renamed = r"`(is_)?gradient_checkpointing(_enable|_disable)?` is deprecated"
    warnings.filterwarnings("ignore", message=renamed, category=FutureWarning)


def several_machines(environ: Mapping[str, str]) -> bool:
    """Whether ranks of this job run on other machines, by what launchers say."""
    world = environ.get("WORLD_SIZE", "1")
    return environ.get("LOCAL_WORLD_SIZE", world) != world or environ.get("GROUP_WORLD_SIZE", "1") != "1"


def _listen_on_loopback_only(environ: MutableMapping[str, str]) -> None:
    """Where all ranks are on this machine, nothing that they open is reached from another.

    torch's TCP store listens on every interface, whatever address it is given (torch 2.13; pytorch#173909). A server
    that is there already, on the port of the ranks, is the one that torch uses in this process (``multi_tenant``).
    Gloo and RCCL listen on the interface that they are told; what the user has set is kept.
    """
    if environ.get("WORLD_SIZE", "1") == "1" or several_machines(environ):
        return
    import psutil

    interfaces = psutil.net_if_addrs().items()
    name = next((name for name, found in interfaces if any(each.address == _LOOPBACK for each in found)), None)
    if name is not None:
        environ.setdefault("GLOO_SOCKET_IFNAME", name)
        environ.setdefault("NCCL_SOCKET_IFNAME", name)
    hosted = environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    if environ["RANK"] == "0" and not hosted and environ["MASTER_ADDR"] in (_LOOPBACK, "localhost"):
        _host_store(int(environ.get("MASTER_PORT", "29500")))


def _host_store(port: int) -> None:
    from torch._C._distributed_c10d import TCPStore  # torch's annotations do not export it

    listening = socket.socket()
    try:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind((_LOOPBACK, port))
        listening.listen()
    except OSError:  # it is taken: torch says so itself
        listening.close()
        return
    fd = listening.detach()  # the store takes it over
    _hosted.append(
        TCPStore(_LOOPBACK, port, is_master=True, wait_for_workers=False, multi_tenant=True, master_listen_fd=fd)
    )


def _check_launch(environ: Mapping[str, str]) -> None:
    launched = environ.get("WORLD_SIZE", "1")
    if not launched.isdecimal():
        raise UsageError(f"WORLD_SIZE is {launched!r} in the environment, which is no number: unset it")
    missing = [name for name in ("RANK", "LOCAL_RANK", "MASTER_ADDR") if name not in environ]
    if int(launched) > 1 and missing:
        raise UsageError(
            f"WORLD_SIZE is {launched} in the environment, but {', '.join(missing)} not set, so no launcher started "
            "this process: unset WORLD_SIZE, or start all processes with `hf-rocm-tune sft --num_processes`"
        )


def require_deepspeed() -> None:
    """Refuse a job for DeepSpeed where that is not installed. Imports nothing.

    Raises:
        UsageError: it is not; the message says what it would gain, too.
    """
    if importlib.util.find_spec("deepspeed") is None:
        raise UsageError(
            "this configuration needs DeepSpeed, which is not installed (`pip install deepspeed`). For LoRA it gains "
            "nothing, because ZeRO-2 shards gradients and optimizer state, which are tens of megabytes there: use "
            "--accelerate_config dual_rx7900xt, or dual_rx7900xt_fsdp2 to shard the model too"
        )


def check_bitsandbytes() -> None:
    """Import bitsandbytes where it is installed, as PEFT does unasked when it is imported itself.

    Raises:
        UsageError: it is there and broken; every run would end in a traceback, not only a quantised one.
    """
    if importlib.util.find_spec("bitsandbytes") is None:
        return
    try:
        importlib.import_module("bitsandbytes")
    except Exception as error:  # a broken package may raise anything: a missing library is an OSError
        raise UsageError(
            f"bitsandbytes is installed but cannot be imported ({type(error).__name__}: {error}): install "
            "bitsandbytes>=0.50.2 again, or remove it and train without --load_in_4bit and --load_in_8bit"
        ) from error


def check_world(num_processes: int, environ: Mapping[str, str]) -> None:
    """Refuse to train when the launcher started more ranks than Accelerate knows of.

    Raises:
        UsageError: ``WORLD_SIZE`` differs from ``Accelerator.num_processes``; each rank would train alone on all of
            the data.
    """
    launched = int(environ.get("WORLD_SIZE", "1"))
    if launched != num_processes:
        raise UsageError(
            f"the launcher started {launched} processes, but Accelerate knows of {num_processes}, so they would train "
            "apart; use an accelerate config with `distributed_type: MULTI_GPU` and `use_cpu: false` "
            "(without GPUs: --accelerate_config cpu_dual)"
        )
