"""Rows on the runtime below torch (ROCR, HIP, MIOpen) and on switches for debugging."""

from __future__ import annotations

from hf_rocm_tune.machine import rules as test
from hf_rocm_tune.machine.rules import Row

VISIBLE = ("HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES")
_OVERRIDE = ("HSA_OVERRIDE_GFX_VERSION", "HSA_OVERRIDE_GFX_VERSION_*")

OVERRIDE_ROWS: tuple[Row, ...] = (
    Row(
        variables=_OVERRIDE,
        action="info",
        topic="override",
        test=test.is_11_0_0,
        only_arch="gfx1100",
        reason="11.0.0 is what gfx1100 is: no effect here, but it relabels any other GPU",
        cure="unset it",
        source="libhsakmt topology.c",
    ),
    Row(
        variables=_OVERRIDE,
        action="error",
        topic="override",
        test=test.is_11_0_0,
        not_only_arch="gfx1100",
        reason="11.0.0 relabels GPUs that are not gfx1100, and code for the wrong architecture then runs on them",
        cure="unset it",
        source="libhsakmt topology.c; TheRock#5543",
    ),
    Row(
        variables=_OVERRIDE,
        action="info",
        topic="override",
        test=test.is_11_5_1,
        only_arch="gfx1151",
        reason="11.5.1 is what gfx1151 is: no effect here (not tested by this project)",
        cure="unset it",
        source="unsloth install.sh; TheRock SUPPORTED_GPUS.md",
    ),
    Row(
        variables=_OVERRIDE,
        action="error",
        topic="override",
        test=test.is_11_5_1,
        not_only_arch="gfx1151",
        reason="11.5.1 relabels GPUs that are not gfx1151, and code for the wrong architecture then runs on them",
        cure="unset it",
        source="libhsakmt topology.c",
    ),
    Row(
        variables=_OVERRIDE,
        action="error",
        topic="override",
        test=test.another_override,
        reason="has no effect at best, and at worst code for the wrong architecture runs: crash or garbage",
        cure="unset it",
        source="libhsakmt topology.c; unsloth install.sh",
    ),
)

RUNTIME_ROWS: tuple[Row, ...] = (
    Row(
        variables=VISIBLE,
        action="warn",
        topic="filters",
        together=test.nested,
        reason="these filters nest: under ROCR_VISIBLE_DEVICES the indices of the others count from 0 anew",
        cure="set one of them",
        source="HIP environment variables page; clr flags.hpp",
    ),
    Row(
        variables=VISIBLE,
        action="warn",
        topic="filters",
        together=test.twice,
        reason="both filters have the same effect in HIP, which follows only one of them",
        cure="set one of them",
        source="HIP environment variables page; clr flags.hpp; clr rocdevice.cpp",
    ),
    Row(
        variables=("AMD_SERIALIZE_KERNEL", "AMD_SERIALIZE_COPY", "HIP_LAUNCH_BLOCKING"),
        action="warn",
        test=test.non_zero,
        reason="serialises for debugging: slow, and may hide a race",
        cure="unset it for training",
        source="clr flags.hpp",
    ),
    Row(
        variables=("HSA_ENABLE_SDMA", "HSA_ENABLE_PEER_SDMA"),
        action="info",
        test=test.zero,
        reason="copies then run as kernels: costs bandwidth and overlap; a diagnostic, not a cure",
        cure="unset it unless you compare the two",
        source="rocr flag.h; rocm-systems#10943",
    ),
    Row(
        variables=("HIP_FORCE_DEV_KERNARG",),
        action="info",
        test=test.one,
        reason="not a memory setting: kernel arguments go through the BAR on gfx1100",
        cure="unset it while hunting corruption",
        source="clr rocsettings.cpp; clr flags.hpp",
    ),
    Row(
        variables=("HSA_FORCE_FINE_GRAIN_PCIE",),
        action="info",
        reason="a real variable; RCCL asks for it only in builds without HIP_UNCACHED_MEMORY",
        cure="unset it unless RCCL asks for it",
        source="rocr flag.h",
    ),
    Row(
        variables=("HSA_ENABLE_IPC_MODE_LEGACY",),
        action="warn",
        test=test.one,
        reason="hipIpcGetMemHandle was reported to fail with it; some container images set it",
        cure="unset it or set 0",
        source="rocm-systems#2209",
    ),
    Row(
        variables=("HSA_NO_SCRATCH_RECLAIM",),
        action="info",
        reason="RCCL may ask for it on some mixes of runtime and firmware",
        cure="keep it only if RCCL asks for it",
        source="RCCL's own message at start",
    ),
    Row(
        variables=("MIOPEN_DISABLE_CACHE",),
        action="warn",
        test=test.one,
        reason="switches MIOpen's kernel cache off: everything is compiled again",
        cure="unset it",
        source="MIOpen kernel cache page",
    ),
    Row(
        variables=("MIOPEN_USER_DB_PATH", "MIOPEN_CUSTOM_CACHE_DIR"),
        action="info",
        test=test.under_tmp,
        reason="/tmp loses the tuned kernels at a reboot",
        cure="name a persistent directory",
        source="MIOpen documentation",
    ),
    Row(
        variables=("PYTORCH_TUNABLEOP_ENABLED",),
        action="info",
        test=test.one,
        reason="which kernel runs is then not deterministic, and the first run is slow",
        cure="unset it while debugging",
        source="torch/cuda/tunable.py",
    ),
    Row(
        variables=("TORCH_CUDA_SANITIZER",),
        action="info",
        test=test.one,
        any_build=True,
        reason="slow; for debugging only, and not verified on ROCm",
        cure="unset it for training",
        source="pytorch documentation of torch.cuda._sanitizer",
    ),
    Row(
        variables=("BNB_ROCM_VERSION",),
        action="info",
        reason="bitsandbytes then loads the library of that ROCm version, whichever runs; not tested by this project",
        cure="unset it where bitsandbytes has a library for your ROCm version",
        source="bitsandbytes source and wheel 0.50.2",
    ),
)
