"""Rows that set a variable where the user has not. Each has a condition: a healthy machine needs none of them."""

from __future__ import annotations

from hf_rocm_tune.machine.rules import Row

SET_ROWS: tuple[Row, ...] = (
    Row(
        variables=("TORCH_ROCM_AOTRITON_ENABLE_EXPERIMENTAL",),
        action="set",
        value="1",
        torch_releases=("2.5", "2.6", "2.9"),
        has_arch="gfx1100",
        reason="this torch release has gfx1100 on AOTriton's experimental list: without it SDPA falls back to the "
        "O(N^2) math path",
        source="aotriton util.cc; pytorch#134498; unsloth#8821",
    ),
    Row(
        variables=("FLASH_ATTENTION_TRITON_AMD_ENABLE",),
        action="set",
        value="TRUE",
        flash_attn=(None, "2.9"),
        has_arch="gfx1100",
        reason="this flash-attn release has only its Triton backend on gfx1100; it is needed when building too",
        source="flash-attention README; flash-attention git",
    ),
    Row(
        variables=("NCCL_P2P_DISABLE",),
        action="set",
        value="1",
        finding="peer_copy_failed",
        reason="a copy or an all-reduce between two cards came back wrong; RCCL only, tensor.to() is not affected",
        source="rccl#1129; pytorch#84803",
    ),
    Row(
        variables=("NCCL_DEBUG",),
        action="set",
        value="WARN",
        finding="diagnosis",
        reason="a diagnosis is running: RCCL then prints its own warnings",
        source="rccl init.cc",
    ),
    Row(
        variables=("TORCH_BLAS_PREFER_HIPBLASLT",),
        action="set",
        value="1",
        finding="gemm_prefers_hipblaslt",
        topic="blas",
        reason="the GEMM check prefers hipBLASLt here",
        source="pytorch#136347; pytorch#185375",
    ),
    Row(
        variables=("TORCH_BLAS_PREFER_HIPBLASLT",),
        action="set",
        value="0",
        finding="gemm_prefers_rocblas",
        topic="blas",
        reason="the GEMM check prefers rocBLAS here",
        source="pytorch#136347; pytorch#185375",
    ),
)
