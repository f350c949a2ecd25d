"""Rows on names: those that nothing reads, with the name that is read, and real ones that need no more than that."""

from __future__ import annotations

from hf_rocm_tune.machine.rules import Action, Row

_PARAM_H = "rccl param.h; RCCL environment variables page"
# Read in RCCL's source as NCCL_*, and not as RCCL_*. Those with another right-hand side were never read by any name.
_INHERITED = {
    **{
        name: name
        for name in (
            "ALGO", "BUFFSIZE", "DEBUG", "DEBUG_FILE", "DEBUG_SUBSYS", "IB_DISABLE", "IB_HCA", "MAX_NCHANNELS",
            "MIN_NCHANNELS", "NET_GDR_LEVEL", "NTHREADS", "P2P_DISABLE", "P2P_LEVEL", "PROTO", "SHM_DISABLE",
            "SOCKET_*", "TOPO_FILE",
        )
    },
    "NCHANNELS": "MAX_NCHANNELS",
}  # fmt: skip


def _ignored(variables: tuple[str, ...], reason: str, source: str, *, instead: str | None = None, cure: str) -> Row:
    return Row(variables=variables, action="info", reason=reason, source=source, instead=instead, cure=cure)


UNKNOWN_ROWS: tuple[Row, ...] = (
    _ignored(
        tuple(
            f"{family}_{middle}{shape}_THRESHOLD"
            for family in ("RCCL", "NCCL")
            for middle in ("", "*_")
            for shape in ("TREE", "RING")
        ),
        "unknown to RCCL, ignored",
        "RCCL source: the names do not occur",
        instead="NCCL_ALGO",
        cure="unset it; {instead} chooses the algorithm",
    ),
    *(
        _ignored(
            (f"RCCL_{name}",),
            "unknown to RCCL, ignored: it reads {instead}",
            _PARAM_H,
            instead=f"NCCL_{real}",
            cure="set {instead} if you want it",
        )
        for name, real in _INHERITED.items()
    ),
    _ignored(
        ("HCCL_*",),
        "unknown to ROCm, ignored: HCCL is another vendor's library, and RCCL reads NCCL_* names",
        "pytorch hip.rst",
        instead="NCCL_*",
        cure="{instead} may be what was meant",
    ),
    _ignored(
        ("HIP_DISABLE_IPC",),
        "unknown to HIP, ROCR and torch, ignored",
        "rocr flag.h; clr flags.hpp",
        instead="HSA_ENABLE_IPC_MODE_LEGACY",
        cure="unset it; the nearest real name is {instead}",
    ),
    _ignored(
        ("PYTORCH_ROCM_DEVICE",),
        "unknown to torch, ignored",
        "HIP environment variables page",
        instead="HIP_VISIBLE_DEVICES",
        cure="use {instead}",
    ),
    _ignored(("HSA_UNALIGNED_ACCESS_MODE",), "unknown to ROCR, ignored", "rocr flag.h", cure="unset it"),
)

_KEEP: Action = "keep"

REAL_ROWS: tuple[Row, ...] = (
    Row(
        variables=("NCCL_P2P_DISABLE",),
        action=_KEEP,
        reason="real: RCCL then does not copy between cards directly; tensor.to() between cards is not affected",
        source=_PARAM_H,
    ),
    Row(
        variables=(
            "NCCL_DEBUG",
            "NCCL_SOCKET_IFNAME",
            "NCCL_IB_DISABLE",
            "NCCL_BUFFSIZE",
            "NCCL_MAX_NCHANNELS",
            "NCCL_NET_GDR_LEVEL",
            "NCCL_ALGO",
            "NCCL_PROTO",
        ),
        action=_KEEP,
        reason="real: RCCL reads it",
        source=_PARAM_H,
    ),
    Row(
        variables=("RCCL_MSCCL_ENABLE", "RCCL_P2P_NET_DISABLE", "RCCL_LL128_FORCE_ENABLE", "RCCL_LOG_LEVEL"),
        action=_KEEP,
        reason="real: one of RCCL's own, beside the NCCL_* names that it has inherited",
        source=_PARAM_H,
    ),
    Row(
        variables=("PAL_HIP_IPC_FLAG",),
        action=_KEEP,
        reason="real: HIP reads it",
        source="clr flags.hpp",
    ),
    Row(
        variables=("TORCH_BLAS_PREFER_HIPBLASLT",),
        action=_KEEP,
        reason="real: chooses between hipBLASLt and rocBLAS, to compare the two",
        source="pytorch#136347; pytorch#185375",
    ),
    Row(
        variables=("TORCH_ROCM_AOTRITON_ENABLE_EXPERIMENTAL",),
        action=_KEEP,
        reason="real, and harmless where it is not needed",
        source="aotriton util.cc; pytorch#134498",
    ),
    Row(
        variables=("FLASH_ATTENTION_TRITON_AMD_ENABLE",),
        action=_KEEP,
        reason="real: only flash-attn reads it",
        source="flash-attention README",
    ),
    Row(
        variables=("MIOPEN_USER_DB_PATH", "MIOPEN_CUSTOM_CACHE_DIR"),
        action=_KEEP,
        reason="real: where MIOpen keeps tuned kernels, of use to models with convolutions",
        source="MIOpen documentation",
    ),
    Row(
        variables=("MIOPEN_ENABLE_LOGGING", "MIOPEN_LOG_LEVEL"),
        action=_KEEP,
        reason="only logging: it makes nothing faster",
        source="MIOpen documentation",
    ),
    Row(
        variables=("OMP_NUM_THREADS",),
        action=_KEEP,
        any_build=True,
        reason="the user's; where it is unset, torchrun sets 1 in its workers",
        source="torch.distributed.run",
    ),
    Row(
        variables=("KMP_AFFINITY",),
        action=_KEEP,
        any_build=True,
        reason="OpenMP's: nothing of it is particular to ROCm",
        source="general knowledge, lower confidence",
    ),
)
