"""What a training process settles before Accelerate makes its state: CPU or accelerator, and how many ranks.

Source: accelerate 1.15 ``state.py``, ``PartialState.__init__``. Without an accelerator it sees the other ranks only
when it was told ``cpu``; otherwise each rank trains alone and nothing says so.
"""

from __future__ import annotations

import importlib
import importlib.util
import socket
import warnings
from collections.abc import Mapping, MutableMapping

from hf_rocm_tune.errors import UsageError

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
    # PEFT 0.21 asks for a property that transformers 5.23 has renamed; nothing that a user could change.
    warnings.filterwarnings("ignore", message="`is_gradient_checkpointing` is deprecated", category=FutureWarning)


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
