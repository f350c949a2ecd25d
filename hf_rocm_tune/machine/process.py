"""Decisions at the start of a process: visible cards, CPU or accelerator, number of ranks.

Cards are chosen before torch is imported. A job of one process sees exactly one, unless a split was asked for; several
ranks see all discrete cards (accelerate 1.15.0 takes LOCAL_RANK as the device index). An integrated GPU may come first
(TheRock#5543). Filters nest: ROCR_VISIBLE_DEVICES, then HIP_VISIBLE_DEVICES, or CUDA_VISIBLE_DEVICES where that is
empty (clr, rocdevice.cpp). That HIP counts GPUs in KFD's order is general knowledge, lower confidence.
"""

from __future__ import annotations

import importlib
import importlib.util
import itertools
import os
import re
import socket
import stat
from collections.abc import Mapping, MutableMapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from hf_rocm_tune.errors import UsageError
from hf_rocm_tune.machine.gpus import GpuNode, Topology

FILTERS = ("ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES")
OURS = "HIP_VISIBLE_DEVICES"

MARK = "HF_ROCM_TUNE_VISIBLE_SET"
"""Marks a choice of our parent process, which a child (a rank, a loader worker) must not take for the user's."""

# gfx1036: TheRock#5543. gfx1151: Strix Halo, unsloth install.sh. The others: marked as APU in LLVM's AMDGPUUsage.
_INTEGRATED_ARCHS = frozenset(
    f"gfx{name}" for name in ("902", "909", "90c", 1033, 1035, 1036, 1103, 1150, 1151, 1152, 1153)
)
# Our own bound: firmware reserves less than this of system memory for a display; no model trains in it.
_SMALL_VRAM_BYTES = 3 << 30


@dataclass(frozen=True, kw_only=True)
class CardChoice:
    """Variables to set, and why; ``troubled``: fewer cards than processes, which deserves a warning."""

    variables: Mapping[str, str] = field(default_factory=dict)
    reason: str
    troubled: bool = False


def is_integrated(node: GpuNode) -> bool:
    """Whether a node shares the CPU's memory: by architecture, by CPU cores in the node, or by very little memory."""
    small = node.vram_bytes is not None and node.vram_bytes < _SMALL_VRAM_BYTES
    return node.arch in _INTEGRATED_ARCHS or node.has_cpu or small


def users_environ(environ: Mapping[str, str]) -> dict[str, str]:
    """``environ`` without an unchanged choice of our parent process."""
    plain = {name: value for name, value in environ.items() if name != MARK}
    name, _, value = environ.get(MARK, "").partition("=")
    if name in FILTERS and plain.get(name) == value:
        del plain[name]
    return plain


def local_processes(environ: Mapping[str, str]) -> int:
    """Number of processes of this job on this machine: LOCAL_WORLD_SIZE, or 1 if it is unset or invalid."""
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
    """Choose the visible cards of this process; every rank of a job makes the same choice."""
    users = {name: value for name, value in users_environ(environ).items() if name in FILTERS}
    if not nodes:
        return CardChoice(reason="the kernel lists no AMD GPU: nothing to choose")
    if users:
        return _choice_of_the_user(nodes, users, processes)
    if not complete:
        reason = f"some GPUs could not be read, so their indices are uncertain: set {OURS} yourself"
        return CardChoice(reason=reason, troubled=True)
    # Integrated GPUs are hidden if there is a discrete card.
    cards = [node for node in nodes if not is_integrated(node)] or list(nodes)
    cards.sort(key=lambda node: (-(node.vram_bytes or 0), node.index))
    aside = ""
    hidden = [describe(node) for node in nodes if node not in cards]
    if hidden:
        aside = f"; hidden as integrated: {', '.join(hidden)}"
    if processes > len(cards):
        reason = f"{processes} processes on this machine, but {len(cards)} card(s) to train on{aside}"
        return CardChoice(reason=f"{reason}: start at most {len(cards)} process(es)", troubled=True)
    seen = cards
    if processes > 1:
        reason = f"{len(cards)} cards visible, each of {processes} processes takes one of them"
    elif split:
        reason = f"{len(cards)} cards visible, a split is requested"
    else:
        seen = cards[:1]
        reason = describe(cards[0])
    variables = {}
    if len(seen) < len(nodes):
        variables[OURS] = ",".join(str(node.index) for node in seen)
    return CardChoice(variables=variables, reason=f"{reason}{aside}")


def _choice_of_the_user(nodes: Sequence[GpuNode], users: Mapping[str, str], processes: int) -> CardChoice:
    """The user's own variables stay; what is said of them."""
    reason = f"{', '.join(f'{name}={value}' for name, value in users.items())} is set by the user and kept"
    left = visible_nodes(nodes, users)
    too_few = processes > 1 and left is not None and len(left) < processes
    if too_few:
        reason += f", but leaves {len(left or ())} card(s) for {processes} processes"
    return CardChoice(reason=reason, troubled=too_few)


def describe(node: GpuNode) -> str:
    """A GPU in a few words."""
    facts = [node.arch]
    if node.vram_bytes is None:
        facts.append("memory unknown")
    else:
        facts.append(f"{node.vram_bytes / (1 << 30):.1f} GiB")
    if node.pci_address:
        facts.append(node.pci_address)
    return f"GPU {node.index} ({', '.join(facts)})"


def enact(choice: CardChoice, environ: MutableMapping[str, str]) -> None:
    """Write a choice to ``environ`` instead of a parent's, with the mark that identifies it as ours."""
    users = users_environ(environ)
    for name in (*FILTERS, MARK):
        if name not in users:
            environ.pop(name, None)
    for name, value in choice.variables.items():
        environ[MARK] = f"{name}={value}"
        environ[name] = value


def visible_nodes(nodes: Sequence[GpuNode], environ: Mapping[str, str]) -> tuple[GpuNode, ...] | None:
    """The nodes that pass the filters, in HIP's order; None if one is empty or has other entries than indices."""
    hip = environ.get("HIP_VISIBLE_DEVICES") or environ.get("CUDA_VISIBLE_DEVICES") or None
    seen = tuple(nodes)
    for listed in (environ.get("ROCR_VISIBLE_DEVICES"), hip):
        if listed is None:
            continue
        if not re.fullmatch(r"\s*-?[0-9]{1,9}\s*(,\s*-?[0-9]{1,9}\s*)*", listed):
            return None
        # An invalid index ends the list, in HIP and in CUDA.
        valid = itertools.takewhile(range(len(seen)).__contains__, map(int, listed.split(",")))
        seen = tuple(seen[index] for index in valid)
    return seen


def visible_archs(topology: Topology, environ: Mapping[str, str]) -> tuple[tuple[str, ...] | None, str]:
    """The architectures of `visible_nodes`; or None, and why they are unknown."""
    if topology.complete and not topology.nodes:  # as in WSL, where torch may see a card all the same
        return None, "the kernel lists no GPU"
    seen = visible_nodes(topology.nodes, environ) if topology.complete else None
    if seen is None:
        return None, "; ".join(topology.reasons) or "the filter of visible GPUs is not a plain list of indices"
    return tuple(node.arch for node in seen), ""


# ---- ranks and devices, before Accelerate makes its state -------------------------------------------------------

_LOOPBACK = "127.0.0.1"
_hosted: list[object] = []  # keeps the store of this job's ranks alive, if this process hosts it


def has_accelerator() -> bool:
    """Whether torch sees a GPU (HIP or CUDA). Imports torch."""
    import torch

    return torch.cuda.is_available()


def has_bf16() -> bool:
    """Whether torch's GPU has bfloat16 without emulation. Imports torch."""
    import torch

    return torch.cuda.is_available() and torch.cuda.is_bf16_supported(including_emulation=False)


def prepare_process(environ: MutableMapping[str, str]) -> None:
    """Make Accelerate use the CPU where there is no accelerator (in 1.15 each rank would train alone), at the start."""
    _check_launch(environ)
    if environ.get("ACCELERATE_USE_DEEPSPEED", "false").lower() == "true":
        require_deepspeed()
        if not has_accelerator():
            raise UsageError(
                "DeepSpeed is requested, but torch sees no GPU; Accelerate would silently train with DDP instead: "
                "use --accelerate_config cpu_dual"
            )
    _listen_on_loopback_only(environ)
    if not has_accelerator():
        environ["ACCELERATE_USE_CPU"] = "true"


def several_machines(environ: Mapping[str, str]) -> bool:
    """Whether ranks of this job run on other machines, from the launcher's variables."""
    world = environ.get("WORLD_SIZE", "1")
    return environ.get("LOCAL_WORLD_SIZE", world) != world or environ.get("GROUP_WORLD_SIZE", "1") != "1"


def _listen_on_loopback_only(environ: MutableMapping[str, str]) -> None:
    """If all ranks are on this machine, open no port to the network.

    torch's TCP store listens on every interface, whatever its address is (torch 2.13; pytorch#173909). torch uses an
    existing server on the port of the ranks in this process (``multi_tenant``). Gloo and RCCL listen on the interface
    of their variables; the user's values are kept.
    """
    if environ.get("WORLD_SIZE", "1") == "1" or several_machines(environ):
        return
    if os.path.exists("/sys/class/net/lo"):
        environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        environ.setdefault("NCCL_SOCKET_IFNAME", "lo")
    hosted = environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    if environ["RANK"] != "0" or hosted or environ["MASTER_ADDR"] not in (_LOOPBACK, "localhost"):
        return
    from torch.distributed import TCPStore  # type: ignore[attr-defined]  # public, and not in ``__all__``

    port = int(environ.get("MASTER_PORT", "29500"))
    try:
        fd = socket.create_server((_LOOPBACK, port)).detach()  # the store owns it
    except OSError:  # in use: torch reports it
        return
    _hosted.append(
        TCPStore(_LOOPBACK, port, is_master=True, wait_for_workers=False, multi_tenant=True, master_listen_fd=fd)
    )


def _stat(pid: int) -> list[str]:
    """The fields of a process after its name, from its state on; empty if there is no such process."""
    try:
        return Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
    except OSError:
        return []


def start_ticks(pid: int) -> int:
    """When a process started, in clock ticks since boot, which identifies it beside its pid; 0 if there is none."""
    fields = _stat(pid)
    return int(fields[19]) if fields else 0


def state_of(pid: int) -> str:
    """State of a main thread: R runs, S sleeps, D hangs in a driver, T stopped, Z ended; empty: no such process."""
    fields = _stat(pid)
    return fields[0] if fields else ""


def is_alive(pid: int, born: int) -> bool:
    """Whether the process that started at ``born``, see `start_ticks`, is still running (a zombie is not)."""
    return state_of(pid) not in ("", "Z", "X") and start_ticks(pid) == born


def make_private(directory: Path) -> None:
    """Create a directory, or check that an existing one is private to this user."""
    with suppress(FileExistsError):
        directory.mkdir(mode=0o700)
    state = directory.lstat()
    if not stat.S_ISDIR(state.st_mode) or state.st_uid != os.getuid() or state.st_mode & 0o077:
        raise UsageError(
            f"{directory}, which the ranks of this job share, is not a directory that only you can access: remove it, "
            "or set TMPDIR to a directory of your own"
        )


def _check_launch(environ: Mapping[str, str]) -> None:
    for name, high in {"WORLD_SIZE": 10**9, "RANK": 10**9, "LOCAL_RANK": 10**9, "MASTER_PORT": 65535}.items():
        low = int(name == "WORLD_SIZE")
        value = environ.get(name, str(low))
        if not re.fullmatch("[0-9]{1,9}", value) or not low <= int(value) <= high:
            raise UsageError(f"{name} is {value!r} in the environment, not a number from {low} to {high}: unset it")
    missing = [name for name in ("RANK", "LOCAL_RANK", "MASTER_ADDR") if name not in environ]
    world = environ.get("WORLD_SIZE", "1")
    if missing and world != "1":
        raise UsageError(
            f"WORLD_SIZE is {world} in the environment, but {', '.join(missing)} not set, so no launcher started "
            "this process: unset WORLD_SIZE, or start all processes with `hf-rocm-tune sft --num_processes`"
        )


def require_deepspeed() -> None:
    """Refuse a DeepSpeed job if DeepSpeed is not installed. Imports nothing."""
    if importlib.util.find_spec("deepspeed") is None:
        raise UsageError(
            "this configuration needs DeepSpeed, which is not installed (`pip install deepspeed`). For LoRA it gains "
            "nothing, because ZeRO-2 shards gradients and optimizer state, which are tens of megabytes there: use "
            "--accelerate_config dual_rx7900xt, or dual_rx7900xt_fsdp2 to shard the model too"
        )


def check_bitsandbytes() -> None:
    """Import bitsandbytes if it is installed, as PEFT does at its own import."""
    if importlib.util.find_spec("bitsandbytes") is None:
        return
    try:
        importlib.import_module("bitsandbytes")
    except (Exception, SystemExit) as error:  # a broken package may raise anything: a missing library is an OSError
        raise UsageError(
            f"bitsandbytes is installed but cannot be imported ({type(error).__name__}: {error}): install "
            "bitsandbytes>=0.50.2 again, or remove it and train without --load_in_4bit and --load_in_8bit"
        ) from error


def check_world(num_processes: int, environ: Mapping[str, str]) -> None:
    """Refuse to train when the launcher started more ranks than Accelerate knows of."""
    launched = int(environ.get("WORLD_SIZE", "1"))
    if launched != num_processes:
        raise UsageError(
            f"the launcher started {launched} processes, but Accelerate knows of {num_processes}, so each would train "
            "alone; use an accelerate config with `distributed_type: MULTI_GPU` and `use_cpu: false` "
            "(without GPUs: --accelerate_config cpu_dual)"
        )
