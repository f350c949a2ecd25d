"""One 7900 XT, and what its owner has installed and set."""

from __future__ import annotations

from tests.doctor.expected import Machine, machine
from tests.doctor.stacks import BNB, PACKAGES, cpu_stack, device, no_torch, stack
from tests.hardware.trees import Built

SPLIT = "expandable_segments:True,max_split_size_mb:128"

SOFTWARE: dict[str, Machine] = {
    "override_with_igpu": machine(
        Built("A1111#14763: the override that old guides call critical").card().igpu(),
        "igpu_hidden",
        "environ:HSA_OVERRIDE_GFX_VERSION=fail",
        environ={"HSA_OVERRIDE_GFX_VERSION": "11.0.0"},
        code=2,
    ),
    "override_alone": machine(
        Built("the same override on a machine with nothing but the card").card(),
        "environ:HSA_OVERRIDE_GFX_VERSION=info",
        environ={"HSA_OVERRIDE_GFX_VERSION": "11.0.0"},
    ),
    "override_destructive": machine(
        Built("FACTS 1c: 9.4.2 loads code for another architecture").card(),
        "environ:HSA_OVERRIDE_GFX_VERSION=fail",
        "arch_spoofed",
        environ={"HSA_OVERRIDE_GFX_VERSION": "9.4.2"},
        software=stack(devices=[device(arch="gfx942")]),
        code=2,
    ),
    "expandable_split": machine(
        Built("ROCm/ROCm#6603: zeroed tensors on a 7900 XT").card(),
        *("environ:PYTORCH_HIP_ALLOC_CONF=fail", "version_older"),
        environ={"PYTORCH_HIP_ALLOC_CONF": SPLIT},
        software=stack(torch="2.12.0+rocm7.14", hip="7.14.26333", allocator=SPLIT, system_rocm="7.14.0"),
        code=2,
    ),
    "all_conf_names": machine(
        Built("pytorch#167659: all names at once, and they differ").card(),
        "environ:PYTORCH_CUDA_ALLOC_CONF, PYTORCH_HIP_ALLOC_CONF, PYTORCH_ALLOC_CONF=warn",
        environ={
            "PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:512",
            "PYTORCH_HIP_ALLOC_CONF": "garbage_collection_threshold:0.8",
            "PYTORCH_ALLOC_CONF": "roundup_power2_divisions:8",
        },
        code=1,
    ),
    "aotriton": machine(
        Built("aotriton util.cc: torch 2.9 needs the flag").card(),
        *("environ:TORCH_ROCM_AOTRITON_ENABLE_EXPERIMENTAL=info", "version_older"),
        software=stack(torch="2.9.1+rocm6.4", hip="6.4.43482", system_rocm="6.4.0"),
        code=1,
    ),
    "rocm10_hip7": machine(
        Built("pytorch#194256: ROCm 10 comes with a HIP of 7.x").card(),
        "bnb_rocm10",
        software=stack(torch="2.13.0+rocm10.0.0", hip="7.15.26333", system_rocm="10.0.0"),
        code=1,
    ),
    "rocm10_hip10": machine(
        Built("FACTS 1e: a HIP of another major version").card(),
        "bnb_no_library",
        software=stack(torch="2.13.0+rocm10.0.0", hip="10.0.1", rocm="10.0.0", system_rocm="10.0.0"),
        code=1,
    ),
    "rocm10_no_device_wheel": machine(
        Built("uv#21683: multi-architecture wheels without the device extra").card(),
        *("device_wheel_missing", "bnb_rocm10", "rocm_system_differs"),
        software=stack(torch="2.13.0+rocm10.0.0", hip="7.15.26333", wheels={"rocm-sdk-core": "10.0.0"}),
        code=2,
    ),
    "rocm10_other_device_wheel": machine(
        Built("the device extra of another card").card(),
        *("device_wheel_missing", "bnb_rocm10"),
        software=stack(
            torch="2.13.0+rocm10.0.0",
            hip="7.15.26333",
            wheels={"rocm-sdk-core": "10.0.0", "rocm-sdk-device-gfx1201": "10.0.0"},
            system_rocm="10.0.0",
        ),
        code=2,
    ),
    "bnb_nearest": machine(
        Built("a minor version without a library of its own").card(),
        *("bnb_nearest", "rocm_preview", "pair_unknown"),
        software=stack(torch="2.13.0+rocm7.10", hip="7.10.1", system_rocm="7.10.0"),
    ),
    "bnb_old": machine(
        Built("bitsandbytes#1887: NaN in 4-bit").card(),
        *("bnb_old", "bnb_nearest", "version_older"),
        software=stack(packages={"bitsandbytes": "0.49.2"}, libraries=BNB[:3]),
        code=2,
    ),
    "bnb_missing": machine(
        Built("bitsandbytes is not there").card(), "bnb_missing", software=stack(packages={"bitsandbytes": None})
    ),
    "bnb_broken": machine(
        Built("bitsandbytes whose directory cannot be read").card(),
        "bnb_unread",
        software=stack() | {"bitsandbytes_libraries": {"reason": "bitsandbytes: Permission denied"}},
        code=1,
    ),
    "rocm70": machine(
        Built("pytorch#197377: memset in captured graphs").card(),
        *("rocm_graph_memset", "pair_unknown"),
        software=stack(torch="2.13.0+rocm7.0", hip="7.0.51831", system_rocm="7.0.2"),
    ),
    "torch28_rocm63": machine(
        Built("pytorch#194447: bf16 crashes").card(),
        *("torch28_bf16", "version_older"),
        software=stack(
            torch="2.8.0+rocm6.3", hip="6.3.42131", system_rocm="6.3.4", libraries=("libbitsandbytes_rocm63.so",)
        ),
        code=1,
    ),
    "rocm62": machine(
        Built("before hipBLASLt on gfx1100").card(),
        *("hipblaslt_no", "version_older", "bnb_nearest"),
        software=stack(torch="2.6.0+rocm6.2.4", hip="6.2.41134", system_rocm="6.2.4"),
        environ={"TORCH_ROCM_AOTRITON_ENABLE_EXPERIMENTAL": "1"},
        code=1,
    ),
    "cpu_torch": machine(
        Built("plain `pip install torch` on an AMD machine").card(),
        "torch_cpu_build",
        software=cpu_stack(),
        code=2,
    ),
    "cuda_torch": machine(
        Built("the CUDA wheel on an AMD machine").card(),
        "torch_cuda_build",
        software=stack(torch="2.13.0+cu130", hip=None, cuda="13.0", archs="sm_90", devices=()),
        code=2,
    ),
    "no_torch": machine(Built("no torch at all").card(), "torch_missing", software=no_torch(), code=2),
    "torch_hangs": machine(
        Built("a driver that hangs when it is asked").card(),
        "torch_sees_nothing",
        software=stack(
            devices="the process that asked torch had not ended after 60 s while asking torch for its devices"
        ),
        code=2,
    ),
    "torch_sees_nothing": machine(
        Built("a ROCm build that lists no device").card(), "torch_sees_nothing", software=stack(devices=()), code=2
    ),
    "wheel_without_arch": machine(
        Built("uv#18730: a wheel without gfx1100").card(),
        "arch_missing",
        software=stack(archs="gfx942 gfx950 gfx1200 gfx1201"),
        code=2,
    ),
    "old_libraries": machine(
        Built("libraries older, newer by a major version, and missing").card(),
        *("version_older", "version_newer", "version_missing"),
        software=stack(packages={"transformers": "4.57.1", "huggingface_hub": "3.0.1", "trl": None}),
        code=2,
    ),
    "torch_unreadable": machine(
        Built("a torch whose files are damaged").card(),
        "torch_fails",
        software=no_torch()
        | {"torch_version": {"reason": "torch/version.py: Input/output error"}, "packages": PACKAGES},
        code=2,
    ),
}
