"""One 7900 XT each, with installations that do not fit it, and kernels with a report against them."""

from __future__ import annotations

from tests.machine.trees import Built
from tests.machines.case import ROCM72, Case, broken, case, cpu_stack, multi_arch_stack, stack

ROCM_INDEX = "--index-url https://download.pytorch.org/whl/rocm7.2"


def one(source: str) -> Built:
    return Built(source).card()


SOFTWARE: dict[str, Case] = {
    "cpu_torch": case(one("uv#17674: what plain `pip install torch` or a CPU index leaves on an AMD machine"),
        software=cpu_stack(), fail=("torch_wrong_build",), says=("this machine has Radeon RX 7900 XT", ROCM_INDEX)),
    "torch_does_not_import": case(one("a wheel whose libraries do not load"),
        software=broken("ImportError: libamdhip64.so.7: cannot open shared object file"), fail=("torch_missing",),
        says=("libamdhip64.so.7",)),
    "wheel_without_gfx1100": case(one("uv#18730: a wheel for other architectures"),
        software=stack(archs=" ".join(arch for arch in ROCM72.split() if not arch.startswith("gfx11"))),
        fail=("arch_missing",), says=("torch has no code for gfx1100", "do not set HSA_OVERRIDE_GFX_VERSION")),
    "rocm10_with_bitsandbytes": case(
        one("bitsandbytes wheel 0.50.2: its library rocm715 is for ROCm 10; pytorch#194256: HIP is 7.15 there"),
        software=multi_arch_stack("rocm-sdk-device-gfx1100"), fine=("bnb_library",)),
    "rocm10_where_hip_counts_alike": case(one("bitsandbytes cextension.py: never a library of another major version"),
        software=stack("2.13.0+rocm10.0.0", "10.0.1"), warn=("bnb_no_library",),
        says=("does not load one of another major version", "train without quantisation")),
    "rocm10_without_device_extra": case(one("uv#21683: is_available() is True, and the first kernel fails"),
        software=multi_arch_stack(), fail=("device_wheel_missing",),
        says=("`torch[device-gfx1100]`", "hipErrorInvalidImage")),
    "bitsandbytes_0_49_2": case(one("bitsandbytes#1887: NaN at decode shapes up to 0.49.2"),
        software=stack(packages={"bitsandbytes": "0.49.2"}), fail=("version_untested bitsandbytes",),
        fine=("bnb_library",), says=("0.50.0",)),
    "bitsandbytes_forced": case(one("bitsandbytes#1878: BNB_ROCM_VERSION chooses the library"),
        software=multi_arch_stack("rocm-sdk-device-gfx1100"), environ={"BNB_ROCM_VERSION": "72"},
        note=("environ:BNB_ROCM_VERSION",), unknown=("bitsandbytes",)),
    "bitsandbytes_missing": case(one("bitsandbytes installation page: it is not there, and only QLoRA needs it"),
        software=stack(packages={"bitsandbytes": None}), note=("bnb_missing",), says=("LoRA in bf16 works",)),
    "torch_2_9": case(one("aotriton#123, pytorch#166397: AOTriton 0.11b gives NaN on gfx1100"),
        software=stack("2.9.1+rocm6.4", "6.4.43484"), fail=("version_untested torch",), warn=("bnb_rocm64",),
        says=("AOTriton 0.11b", "libbitsandbytes_rocm64.so")),
    "no_python_headers": case(one("Debian's python3-venv does not bring Python.h, which Triton's driver includes"),
        software=stack(missing_for_triton="/usr/include has no Python.h: install python3-dev (python3-devel)"),
        warn=("triton_cannot_compile",),
        says=("has no Python.h. Triton compiles", "install python3-dev (python3-devel)")),
    "libraries_of_all_ages": case(
        one("this project's tested versions: one older, one newer by a major version, one missing"),
        software=stack(packages={"transformers": "4.57.1", "huggingface_hub": "3.0.1", "trl": None}),
        fail=("version_missing trl",), warn=("version_untested transformers",)),
    "kernel_7_0_0_28": case(Built("ROCm/ROCm#6523: Ubuntu 24.04 HWE, gfx1100").kernel("7.0.0-28-generic").card(),
        warn=("kernel_mmap_stall", "kernel_sdma_faults"), says=("7.0.0-28-generic", "342981fff328", "6.17"),
        never=("7.0.0-30",)),
    "kernel_6_17": case(Built("ROCm/amdgpu#225: good for the reporters").kernel("6.17.9-1-generic").card()),
    "kernel_5_15": case(Built("ROCm/ROCm#6123: kernel 5.15 with a ROCm 6.4 wheel").kernel("5.15.0-139-generic").card(),
        warn=("kernel_too_old",), says=("5.15.0-139-generic",)),
}  # fmt: skip
