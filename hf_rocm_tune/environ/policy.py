"""The environment variables that matter on ROCm, as rows: what is done about each, when, why and on whose word.

The rule above all rows: a healthy gfx1100 with a matching wheel needs no variable. Rows that set something are
conditional, and none overrides what the user has set. Where AMD contradicts itself (IOMMU) there is no row.

A row fires when all its conditions hold. A condition on something that could not be read makes the row *cautious*
instead: it says so, an error becomes a warning, and nothing is set. Rows of one topic exclude each other. Which card
is visible is chosen in ``hardware/visible.py``, because it depends on the cards and not on a variable.
"""

from __future__ import annotations

from hf_rocm_tune.environ import rules as test
from hf_rocm_tune.environ.rules import Row

ALLOCATOR = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
VISIBLE = ("HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES")

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
        source="flash-attention README and git",
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
        variables=("MIOPEN_USER_DB_PATH", "MIOPEN_CUSTOM_CACHE_DIR"),
        action="set",
        value="~/.cache/hf_rocm_tune/miopen",
        finding="convolution_model",
        reason="the model has convolutions: a persistent directory keeps the tuned kernels over a reboot",
        source="MIOpen docs",
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
    Row(
        variables=("OMP_NUM_THREADS",),
        action="keep",
        any_build=True,
        reason="the user's; where it is unset, torchrun sets 1 in its workers",
        source="torch.distributed.run",
    ),
)

ALLOCATOR_ROWS: tuple[Row, ...] = (
    Row(
        variables=ALLOCATOR,
        action="error",
        topic="expandable",
        test=test.expandable_with_split,
        torch=("2.12", None),
        rocm=("7", None),
        reason="expandable_segments:True with max_split_size_mb: live tensors that turned to zeros were reported with "
        "this pair on an RX 7900 XT; unset both",
        source="ROCm/ROCm#6603",
    ),
    Row(
        variables=ALLOCATOR,
        action="warn",
        topic="expandable",
        test=test.expandable_alone,
        torch=("2.12", None),
        rocm=("7", None),
        reason="expandable_segments:True: zeroed tensors, hangs and crashes were reported with HIP virtual memory, and "
        "whether it is safe alone on gfx1100 is not settled; unset it",
        source="ROCm/ROCm#6603; pytorch#192259; pytorch#187343; rocm-systems#11693",
    ),
    Row(
        variables=ALLOCATOR,
        action="info",
        topic="expandable",
        test=test.expandable,
        torch=(None, "2.12"),
        reason="expandable_segments:True is ignored on ROCm by torch below 2.12 (AMD's fork has it from 2.11)",
        source="pytorch#177974",
    ),
    Row(
        variables=ALLOCATOR,
        action="info",
        topic="expandable",
        test=test.expandable,
        rocm=(None, "7"),
        reason="expandable_segments:True is ignored below ROCm 7",
        source="pytorch#177974",
    ),
    Row(
        variables=ALLOCATOR,
        action="error",
        topic="backend",
        test=test.async_backend,
        reason="the asynchronous allocator backend gave zeroed buffers (gfx1030) and crashes (gfx1100) on ROCm; unset",
        source="ROCm/ROCm#6178; rocm-systems#10943",
    ),
    Row(
        variables=ALLOCATOR,
        action="warn",
        topic="order",
        together=test.values_differ,
        any_build=True,
        reason="different values: torch 2.13 reads only the first that is set, in the order CUDA, HIP, ALLOC_CONF "
        "(2.9.1 ignores PYTORCH_ALLOC_CONF for expandable_segments); set one",
        source="torch CUDAAllocatorConfig.h; pytorch#167659",
    ),
    Row(
        variables=("PYTORCH_NO_HIP_MEMORY_CACHING", "PYTORCH_NO_CUDA_MEMORY_CACHING"),
        action="warn",
        any_build=True,
        reason="switches the caching allocator off: very slow, and *_ALLOC_CONF then does nothing; for debugging only",
        source="pytorch hip.rst",
    ),
)

RUNTIME_ROWS: tuple[Row, ...] = (
    Row(
        variables=("HSA_OVERRIDE_GFX_VERSION", "HSA_OVERRIDE_GFX_VERSION_*"),
        action="info",
        topic="override",
        test=test.is_11_0_0,
        only_arch=True,
        reason="11.0.0 is what gfx1100 is: no effect here; unset it, it relabels other GPUs",
        source="libhsakmt topology.c",
    ),
    Row(
        variables=("HSA_OVERRIDE_GFX_VERSION", "HSA_OVERRIDE_GFX_VERSION_*"),
        action="error",
        topic="override",
        test=test.is_11_0_0,
        only_arch=False,
        reason="11.0.0 relabels GPUs that are not gfx1100, and code for the wrong architecture then runs on them; "
        "unset it",
        source="libhsakmt topology.c; TheRock#5543",
    ),
    Row(
        variables=("HSA_OVERRIDE_GFX_VERSION", "HSA_OVERRIDE_GFX_VERSION_*"),
        action="error",
        topic="override",
        test=test.not_11_0_0,
        reason="has no effect at best, and at worst code for the wrong architecture runs: crash or garbage; unset it",
        source="libhsakmt topology.c; unsloth install.sh",
    ),
    Row(
        variables=VISIBLE,
        action="warn",
        topic="nested",
        together=test.several,
        reason="these filters nest: under ROCR_VISIBLE_DEVICES the indices of the others count from 0 anew; set one",
        source="HIP environment variables page; clr flags.hpp",
    ),
    Row(
        variables=("AMD_SERIALIZE_KERNEL", "AMD_SERIALIZE_COPY", "HIP_LAUNCH_BLOCKING"),
        action="warn",
        test=test.non_zero,
        reason="serialises for debugging: slow, and may hide a race; unset it for training",
        source="clr flags.hpp",
    ),
    Row(
        variables=("HSA_ENABLE_SDMA", "HSA_ENABLE_PEER_SDMA"),
        action="info",
        test=test.zero,
        reason="copies then run as kernels: costs bandwidth and overlap; a diagnostic, not a cure",
        source="rocr flag.h; rocm-systems#10943",
    ),
    Row(
        variables=("HIP_FORCE_DEV_KERNARG",),
        action="info",
        test=test.one,
        reason="not a memory setting: kernel arguments go through the BAR on gfx1100; unset while hunting corruption",
        source="clr rocsettings.cpp, flags.hpp",
    ),
    Row(
        variables=("HSA_FORCE_FINE_GRAIN_PCIE",),
        action="info",
        reason="a real variable; RCCL asks for it only in builds without HIP_UNCACHED_MEMORY",
        source="rocr flag.h",
    ),
    Row(
        variables=("HSA_ENABLE_IPC_MODE_LEGACY",),
        action="warn",
        test=test.one,
        reason="hipIpcGetMemHandle was reported to fail with it, on two 7900 XTX too; some container images set it",
        source="rocm-systems#2209",
    ),
    Row(
        variables=("HSA_NO_SCRATCH_RECLAIM",),
        action="info",
        reason="RCCL may ask for it on some mixes of runtime and firmware; keep it only if RCCL does",
        source="RCCL's own message at start",
    ),
    Row(
        variables=("MIOPEN_DISABLE_CACHE",),
        action="warn",
        test=test.one,
        reason="switches MIOpen's kernel cache off: everything is compiled again",
        source="MIOpen docs",
    ),
    Row(
        variables=("MIOPEN_USER_DB_PATH", "MIOPEN_CUSTOM_CACHE_DIR"),
        action="info",
        test=test.under_tmp,
        reason="/tmp loses the tuned kernels at a reboot; name a persistent directory",
        source="MIOpen docs",
    ),
    Row(
        variables=("PYTORCH_TUNABLEOP_ENABLED",),
        action="info",
        test=test.one,
        reason="which kernel runs is then not deterministic; unset while debugging",
        source="torch/cuda/tunable.py",
    ),
    Row(
        variables=("TORCH_CUDA_SANITIZER",),
        action="info",
        test=test.one,
        any_build=True,
        reason="slow; for debugging only, and not verified on ROCm",
        source="pytorch documentation of torch.cuda._sanitizer",
    ),
)

_INHERITED = "nothing reads it, so it is ignored; RCCL reads {instead}"
_PARAM_H = "rccl param.h; RCCL environment variables page"

UNKNOWN_ROWS: tuple[Row, ...] = (
    Row(
        variables=tuple(
            f"{family}_{middle}{shape}_THRESHOLD"
            for family in ("RCCL", "NCCL")
            for middle in ("", "*_")
            for shape in ("TREE", "RING")
        ),
        action="info",
        reason="unknown to RCCL, ignored; use {instead}",
        instead="NCCL_ALGO",
        source="RCCL source: the names do not occur",
    ),
    *(
        Row(variables=(f"RCCL_{name}",), action="info", reason=_INHERITED, instead=f"NCCL_{real}", source=_PARAM_H)
        for name, real in (
            ("DEBUG", "DEBUG"),
            ("BUFFSIZE", "BUFFSIZE"),
            ("SOCKET_*", "SOCKET_*"),
            ("IB_DISABLE", "IB_DISABLE"),
            ("NET_GDR_LEVEL", "NET_GDR_LEVEL"),
            ("MAX_NCHANNELS", "MAX_NCHANNELS"),
            ("NCHANNELS", "MAX_NCHANNELS"),
        )
    ),
    Row(
        variables=("HCCL_*",),
        action="info",
        reason="ignored on ROCm: HCCL is another vendor's library; RCCL reads {instead}, for example NCCL_DEBUG",
        instead="NCCL_*",
        source="pytorch hip.rst",
    ),
    Row(
        variables=("HIP_DISABLE_IPC",),
        action="info",
        reason="unknown to HIP, ROCR and torch, ignored; the nearest real name is {instead}",
        instead="HSA_ENABLE_IPC_MODE_LEGACY",
        source="rocr flag.h; clr flags.hpp",
    ),
    Row(
        variables=("PYTORCH_ROCM_DEVICE",),
        action="info",
        reason="unknown to torch, ignored; use {instead}",
        instead="HIP_VISIBLE_DEVICES",
        source="HIP environment variables page",
    ),
    Row(
        variables=("HSA_UNALIGNED_ACCESS_MODE",),
        action="info",
        reason="unknown to ROCR, ignored",
        source="rocr flag.h",
    ),
)

POLICY: tuple[Row, ...] = SET_ROWS + ALLOCATOR_ROWS + RUNTIME_ROWS + UNKNOWN_ROWS
