"""``mmap_heap``: a tensor that lies in a mapped file, copied to the card, against the same tensor on the heap.

With some kernels the mapped one takes a thousand times as long (ROCm/ROCm#6523). Faults: ``slow`` (the mapped copy
takes long), ``zeros``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hf_rocm_tune.doctor.finding import Finding, from_row
from hf_rocm_tune.machine.child import Outcome

STALL_RATIO = 20
"""Times as long as from the heap: our own bound, far below what was reported (5 s against 4 ms) and far above noise."""


def measure(request: dict[str, Any]) -> dict[str, Any]:
    """The child's half."""
    from hf_rocm_tune.doctor.measured import mapped_file_child

    return mapped_file_child.measure(request)


def judge(outcome: Outcome, request: Mapping[str, Any]) -> list[Finding]:
    """One finding."""
    assert outcome.result is not None
    result, device = outcome.result, request["device"]
    mapped, heap = result["mapped_s"], result["heap_s"]
    ratio = mapped / heap
    values = {
        "device": device,
        "mib": result["mib"],
        "mapped_ms": 1000 * mapped,
        "heap_ms": 1000 * heap,
        "ratio": ratio,
    }
    evidence = [
        f"{result['mib']} MiB to {device}: {1000 * mapped:.1f} ms from a mapped file in {result['directory']}, "
        f"{1000 * heap:.1f} ms from the heap",
        f"the same mapped tensor through this project's page-locked slots: {1000 * result['mover_s']:.1f} ms",
    ]
    if result["wrong"]:
        row, values = "mapped_file_wrong", {"device": device, "wrong": result["wrong"]}
    else:
        row = "mapped_file_stall" if ratio > STALL_RATIO else "mapped_file_fast"
    return [from_row("mmap_heap", row, subject=device, evidence=evidence, **values)]
