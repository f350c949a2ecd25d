"""One 7900 XT each, and what its owner has set."""

from __future__ import annotations

from tests.machine.trees import RAPHAEL, XTX, Built, Slot
from tests.machines.case import Case, case, device, stack

HALF = Slot(width=8)
SPLIT = "expandable_segments:True,max_split_size_mb:512,garbage_collection_threshold:0.8"
ALL_NAMES = "environ:PYTORCH_CUDA_ALLOC_CONF, PYTORCH_HIP_ALLOC_CONF, PYTORCH_ALLOC_CONF"
OVERRIDE = "environ:HSA_OVERRIDE_GFX_VERSION"

# What guides of the years before told owners to set.
OLD_GUIDE = """
    HSA_OVERRIDE_GFX_VERSION=11.0.0 PYTORCH_ROCM_DEVICE=0 HIP_VISIBLE_DEVICES=0 CUDA_VISIBLE_DEVICES=0
    HIP_DISABLE_IPC=1 HIP_FORCE_DEV_KERNARG=1 HCCL_DEBUG=INFO RCCL_BUFFSIZE=2097152 RCCL_NCHANNELS=8
    RCCL_TREE_THRESHOLD=0 HSA_UNALIGNED_ACCESS_MODE=1 AMD_SERIALIZE_KERNEL=3 AMD_SERIALIZE_COPY=3
    PYTORCH_NO_HIP_MEMORY_CACHING=1 MIOPEN_DISABLE_CACHE=1 MIOPEN_USER_DB_PATH=/tmp/miopen HSA_ENABLE_SDMA=0
    NCCL_DEBUG=INFO NCCL_P2P_DISABLE=1
"""


def one(source: str) -> Built:
    return Built(source).card()


VARIABLES: dict[str, Case] = {
    "override_with_an_igpu": case(
        Built("libhsakmt topology.c: it relabels a Ryzen's GPU (gfx1036) as gfx1100").card().igpu(RAPHAEL),
        environ={"HSA_OVERRIDE_GFX_VERSION": "11.0.0"}, fail=(OVERRIDE,), note=("igpu_hidden",),
        says=("unset it", "`export HIP_VISIBLE_DEVICES=0`")),
    "override_9_4_2": case(one("libhsakmt topology.c: 9.4.2 loads gfx942 code, crash or garbage"),
        environ={"HSA_OVERRIDE_GFX_VERSION": "9.4.2"}, software=stack(devices=[device(arch="gfx942")]),
        fail=("arch_spoofed", OVERRIDE), says=("is gfx1100 in the kernel's list, and gfx942 in torch's",)),
    "expandable_segments_with_split": case(
        Built("ROCm/ROCm#6603: zeroed tensors on an RX 7900 XT, torch 2.12, kernel 7.0.0-28")
        .kernel("7.0.0-28-generic")
        .card(),
        environ={"PYTORCH_HIP_ALLOC_CONF": SPLIT},
        software=stack("2.12.0+rocm7.14.0", "7.14.26251"),
        fail=("environ:PYTORCH_HIP_ALLOC_CONF",),
        warn=("kernel_mmap_stall", "kernel_sdma_faults"),
        says=("unset both", "live tensors read back as zeros", "until the card was full"),
    ),
    "all_allocator_names_at_once": case(
        one("torch CUDAAllocatorConfig.h: CUDA, HIP, ALLOC, the first wins; pytorch#167659"),
        environ={
            "PYTORCH_CUDA_ALLOC_CONF": "garbage_collection_threshold:0.7",
            "PYTORCH_HIP_ALLOC_CONF": "max_split_size_mb:256",
            "PYTORCH_ALLOC_CONF": "roundup_power2_divisions:8",
        },
        warn=(ALL_NAMES,),
        says=("in the order CUDA, HIP, ALLOC", "PYTORCH_HIP_ALLOC_CONF=max_split_size_mb:256"),
    ),
    "filter_shows_the_wrong_gpu": case(
        Built("TheRock#5543: the filter leaves the processor's GPU").card().igpu(RAPHAEL),
        environ={"HIP_VISIBLE_DEVICES": "1"},
        software=stack(devices=[device("0000:04:00.0", name="AMD Radeon Graphics", arch="gfx1036", gib=15.4)]),
        fail=("igpu_visible",), note=("torch_sees_fewer",),
        says=("`export HIP_VISIBLE_DEVICES=0`", "HIP_VISIBLE_DEVICES=1")),
    "filters_that_nest": case(
        Built("HIP environment variables page: ROCR filters below HIP, whose indices count anew")
        .card(slot=HALF)
        .card(XTX, slot=HALF),
        environ={"ROCR_VISIBLE_DEVICES": "1", "HIP_VISIBLE_DEVICES": "0"},
        software=stack(devices=[device("0000:06:00.0", name="AMD Radeon RX 7900 XTX", gib=23.98)]),
        warn=("cards_unequal", "environ:ROCR_VISIBLE_DEVICES, HIP_VISIBLE_DEVICES"),
        note=("torch_sees_fewer",),
        says=("these filters are nested",),
    ),
    "filter_by_uuid": case(Built("HIP environment variables page: ROCR takes UUIDs").card().igpu(RAPHAEL),
        environ={"ROCR_VISIBLE_DEVICES": "GPU-0000000000000000"}, unknown=("integrated",)),
    "an_old_guide": case(
        one("an old guide: all of its variables at once"),
        environ=dict(pair.split("=") for pair in OLD_GUIDE.split()),
        warn=(
            *("environ:AMD_SERIALIZE_COPY", "environ:AMD_SERIALIZE_KERNEL"),
            *("environ:HIP_VISIBLE_DEVICES, CUDA_VISIBLE_DEVICES", "environ:PYTORCH_NO_HIP_MEMORY_CACHING"),
        ),
        note=(
            *("environ:HCCL_DEBUG", "environ:HIP_DISABLE_IPC", "environ:HIP_FORCE_DEV_KERNARG"),
            *("environ:HSA_ENABLE_SDMA", "environ:HSA_UNALIGNED_ACCESS_MODE"),
            *("environ:PYTORCH_ROCM_DEVICE", "environ:RCCL_BUFFSIZE", "environ:RCCL_NCHANNELS"),
            *("environ:RCCL_TREE_THRESHOLD", OVERRIDE),
        ),
        says=("NCCL_MAX_NCHANNELS", "NCCL_ALGO", "HIP applies the first of HIP_ and CUDA_VISIBLE_DEVICES"),
    ),
}  # fmt: skip
