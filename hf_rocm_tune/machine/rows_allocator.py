"""Rows on torch's caching allocator: the three names of its settings, and the switches that turn it off."""

from __future__ import annotations

from hf_rocm_tune.machine import rules as test
from hf_rocm_tune.machine.rules import Row

ALLOCATOR = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF", "PYTORCH_ALLOC_CONF")

ALLOCATOR_ROWS: tuple[Row, ...] = (
    Row(
        variables=ALLOCATOR,
        action="error",
        topic="expandable",
        test=test.expandable_with_split,
        torch=("2.12", None),
        rocm=("7", None),
        reason="expandable_segments:True with max_split_size_mb: live tensors that turned to zeros were reported with "
        "this pair on an RX 7900 XT",
        cure="unset both",
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
        "whether it is safe alone on gfx1100 is not settled",
        cure="unset it",
        source="ROCm/ROCm#6603; pytorch#192259; pytorch#187343; rocm-systems#11693",
    ),
    Row(
        variables=ALLOCATOR,
        action="info",
        topic="expandable",
        test=test.expandable,
        torch=(None, "2.12"),
        reason="expandable_segments:True is ignored on ROCm by torch below 2.12 (AMD's fork has it from 2.11)",
        cure="unset it: a later torch reads it",
        source="pytorch#177974",
    ),
    Row(
        variables=ALLOCATOR,
        action="info",
        topic="expandable",
        test=test.expandable,
        rocm=(None, "7"),
        reason="expandable_segments:True is ignored below ROCm 7",
        cure="unset it: a later ROCm reads it",
        source="pytorch#177974",
    ),
    Row(
        variables=ALLOCATOR,
        action="error",
        topic="backend",
        test=test.async_backend,
        reason="the asynchronous allocator backend gave zeroed buffers (gfx1030) and crashes (gfx1100) on ROCm",
        cure="unset backend, the native allocator is the default",
        source="ROCm/ROCm#6178; rocm-systems#10943",
    ),
    Row(
        variables=ALLOCATOR,
        action="warn",
        topic="order",
        together=test.values_differ,
        any_build=True,
        reason="different values: torch 2.13 reads only the first that is set, in the order CUDA, HIP, ALLOC_CONF "
        "(2.9.1 ignores PYTORCH_ALLOC_CONF for expandable_segments)",
        cure="set one of them",
        source="torch CUDAAllocatorConfig.h; pytorch#167659",
    ),
    Row(
        variables=ALLOCATOR,
        action="warn",
        topic="refused",
        test=test.refused,
        any_build=True,
        reason="torch refuses this value and raises when it first reads it: max_split_size_mb is 20 or more, "
        "garbage_collection_threshold between 0 and 1, roundup_power2_divisions a power of two, "
        "expandable_segments True or False",
        cure="correct the value, or unset it",
        source="torch AllocatorConfig.h; tried with torch 2.13.0",
    ),
    Row(
        variables=ALLOCATOR,
        action="info",
        topic="threshold",
        test=test.high_threshold,
        any_build=True,
        reason="garbage_collection_threshold above 0.9 is valid and high: blocks are given back only when memory is "
        "nearly full",
        cure="0.6 to 0.8 is usual",
        source="torch AllocatorConfig.h",
    ),
    Row(
        variables=ALLOCATOR[:2],
        action="keep",
        topic="name",
        torch=("2.9", "2.12"),
        any_build=True,
        reason="read; this torch may warn that the name is old, which later releases no longer do",
        source="pytorch#167659; pytorch#183387",
    ),
    Row(
        variables=ALLOCATOR,
        action="keep",
        topic="name",
        any_build=True,
        reason="read by torch's caching allocator, nothing in it is known to be harmful here",
        source="torch CUDAAllocatorConfig.h",
    ),
    Row(
        variables=("PYTORCH_NO_HIP_MEMORY_CACHING", "PYTORCH_NO_CUDA_MEMORY_CACHING"),
        action="warn",
        any_build=True,
        reason="switches the caching allocator off: very slow, and *_ALLOC_CONF then does nothing",
        cure="unset it, it is for debugging only",
        source="pytorch hip.rst",
    ),
)
