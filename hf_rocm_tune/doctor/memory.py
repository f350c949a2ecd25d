"""The rate of the card's link (``bandwidth``), and memory that must not change beside other (``canaries``).

Faults: ``slow``; ``zeros`` (a range of a canary) and ``flip`` (one bit), in the second cycle.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from hf_rocm_tune.doctor.findings import Finding, from_row, knowledge_data
from hf_rocm_tune.doctor.measured import Again, with_evidence
from hf_rocm_tune.doctor.pairs import size_words
from hf_rocm_tune.doctor.pcie import rate_gb_s
from hf_rocm_tune.integrity.canaries import Canaries, CanarySettings, watch
from hf_rocm_tune.machine.child import device_of, step
from hf_rocm_tune.machine.pci import read_upward
from hf_rocm_tune.machine.sysfs import LiveTree
from hf_rocm_tune.transfer import gb_per_s
from hf_rocm_tune.transfer.raw_copies import RawCopies, wait_for

LEAST_SHARE = 0.7
"""Of a link's arithmetic rate: our own bound. A healthy x16 measured 0.90 to 0.92 of it (ROCm/ROCm#2253)."""
ALLOCATOR_VARIABLES = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
_ROUNDS, _QUEUED = 5, 4
_SLOWED = 3
_REPORTED_CYCLE = 144
"""In which the RX 7900 XT of ROCm/ROCm#6603 failed."""
_HARMED_CYCLE = 2

LinkState = tuple[int, float, str]
"""Lanes, 10^9 transfers a second and lane, and the PCI address of a link."""


def bandwidth(request: Mapping[str, Any]) -> list[Finding]:
    """Copy page-locked memory both ways, and read the state of the link while copies are on their way.

    Args:
        request: ``device``, ``address``; ``mib``: of one copy; ``root``: what stands for ``/`` where the link is read;
            ``fault``: ``slow``.
    """
    device = device_of(request)
    slow = (request.get("fault") or {}).get("kind") == "slow"
    nbytes = request["mib"] << 20
    host = torch.ones(nbytes, dtype=torch.uint8, pin_memory=device.type == "cuda")
    there = torch.zeros(nbytes, dtype=torch.uint8, device=device)
    rates: dict[str, list[float]] = {"to": [], "from": []}
    links: list[LinkState] = []
    for _ in range(_ROUNDS + 1):
        for way, target, source in (("to", there, host), ("from", host, there)):
            step(f"copying {request['mib']} MiB {way} {device}")
            began = time.perf_counter()
            for _ in range(_QUEUED):
                RawCopies().copy(target, source, what="", non_blocking=True)
            if request.get("address") is not None:  # copies are on their way: an idle link may be slower
                path = read_upward(LiveTree(Path(request.get("root", "/"))), request["address"]).links
                links = [
                    (link.width.value, link.speed.value, link.device)
                    for link in path
                    if link.width.value and link.speed.value
                ]
            wait_for(there)
            if slow:
                time.sleep((_SLOWED - 1) * (time.perf_counter() - began))
            rates[way].append(gb_per_s(_QUEUED * nbytes, time.perf_counter() - began))
    # The first round wakes the link and is left out.
    to_device, from_device = (statistics.median(all_of[1:]) for all_of in rates.values())
    return judge_bandwidth(request, to_device, from_device, links)


def judge_bandwidth(request: Mapping[str, Any], there: float, back: float, links: Sequence[LinkState]) -> list[Finding]:
    """The figures, and the name of the link that they are those of.

    Args:
        request: see `bandwidth`.
        there, back: 10^9 bytes a second to and from the device.
        links: those that could be read under load.
    """
    device = request["device"]
    evidence = [f"{there:.1f} GB/s to {device}, {back:.1f} GB/s from it, page-locked, {request['mib']} MiB at a time"]
    values: dict[str, Any] = {"there": there, "back": back}
    if not links:
        return [from_row("bandwidth_of_unknown_link", subject=device, evidence=evidence, **values)]
    width, speed, where = min(links, key=lambda link: rate_gb_s(link[1], link[0]))
    rate = rate_gb_s(speed, width)
    values |= {"width": width, "speed": f"{speed:g}", "rate": rate}
    evidence += [f"under load: x{width} at {speed:g} GT/s at {where}, {rate:.1f} GB/s each way by arithmetic"]
    if min(there, back) < LEAST_SHARE * rate:
        row = "bandwidth_low"
        values["share"] = 100 * min(there, back) / rate
    else:
        narrow = rate < knowledge_data("thresholds.toml")["link_gb_s"]["x4"]
        row = "bandwidth_of_narrow_link" if narrow else "bandwidth_right"
    return [from_row(row, subject=device, evidence=evidence, **values)]


def canaries(request: Mapping[str, Any]) -> list[Finding] | Again:
    """Watch; where memory changed, another process looks once more without the user's allocator settings.

    Args:
        request: ``device``, ``address``; ``cycles`` at most; ``seconds`` after which no cycle begins; ``share`` of the
            free memory that comes and goes; ``fault``; ``first``: of the process that found a change.
    """
    device = device_of(request)
    settings = CanarySettings.for_device(device, cycles=request["cycles"], share=request["share"])
    harm, run = (request.get("fault") or {}).get("kind"), 0

    def on_cycle(cycle: int, canaries: Canaries) -> None:
        nonlocal run
        run = cycle
        step(f"allocating and freeing memory beside canaries on {device}, cycle {cycle}")
        victim = canaries.blocks[-1].view(torch.uint8)
        if harm == "zeros" and cycle == _HARMED_CYCLE:
            victim[8192 : 8192 + 4096] = 0
        elif harm == "flip" and cycle == _HARMED_CYCLE:
            victim[12_345] ^= 16

    fault = watch(device, settings, on_cycle=on_cycle, seconds=request["seconds"])
    if request["first"]:
        held = f"held for {run} cycles" if fault is None else f"changed in cycle {fault.cycle} too"
        return with_evidence(request["first"], f"without allocator settings: {held}")
    sizes = (
        f"{settings.canaries} canaries of {size_words(settings.canary_bytes)} beside up to "
        f"{size_words(settings.churn_bytes)} that came and went, {run} cycles"
    )
    if fault is None:
        row = "canaries_held" if request["cycles"] > _REPORTED_CYCLE else "canaries_held_for_now"
        return [from_row(row, subject=request["device"], evidence=[sizes], cycles=run)]
    kinds = {"zeros": "zeros", "churn": "bytes of another block", "canary": "bytes of another canary"}
    line = (
        f"cycle {fault.cycle}, canary {fault.canary}: {fault.length:,} wrong bytes from offset "
        f"{fault.first_offset:,} (a multiple of {size_words(fault.alignment)}), "
        f"{kinds.get(fault.kind, fault.kind)}; read twice: {'the same' if fault.stable else 'not the same'}"
    )
    row = "canaries_changed" if fault.stable else "canaries_read_unstable"
    findings = [from_row(row, subject=request["device"], evidence=[line, sizes], cycles=run)]
    return Again(findings=findings, environ=dict.fromkeys(ALLOCATOR_VARIABLES), words="without allocator settings")
