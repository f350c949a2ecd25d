"""``canaries``: memory of the card that must not change while other memory is allocated and freed.

Where it changed, another process looks once more without the user's allocator settings, which are read only once.
Faults: ``zeros`` (a range of a canary), ``flip`` (one bit), in the second cycle.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from hf_rocm_tune.doctor.finding import Finding, from_row
from hf_rocm_tune.doctor.measured.conduct import Ask, failure
from hf_rocm_tune.doctor.measured.words import size_words
from hf_rocm_tune.machine.child import Outcome

ALLOCATOR_VARIABLES = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF", "PYTORCH_ALLOC_CONF")

_REPORTED_CYCLE = 144
"""In which the RX 7900 XT of ROCm/ROCm#6603 failed."""
_HARMED_CYCLE = 2


def measure(request: dict[str, Any]) -> dict[str, Any]:
    """The child's half.

    Args:
        request: ``device``, ``address``; ``cycles`` at most; ``seconds`` after which no cycle begins; ``share`` of the
            free memory that comes and goes; ``fault``.

    Returns:
        ``cycles`` that were run, ``canaries``, ``canary_bytes``, ``churn_bytes``; ``fault``: a ``CanaryFault`` or None;
        ``allocator``: the settings in force.
    """
    import torch

    from hf_rocm_tune.integrity.canaries import Canaries, CanarySettings, watch
    from hf_rocm_tune.machine.child import device_of, step

    device = device_of(request)
    settings = CanarySettings.for_device(device, cycles=request["cycles"], share=request["share"])
    harm = (request.get("fault") or {}).get("kind")
    run = 0

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
    return {
        "cycles": run,
        "canaries": settings.canaries,
        "canary_bytes": settings.canary_bytes,
        "churn_bytes": settings.churn_bytes,
        "fault": None if fault is None else asdict(fault),
    }


def conduct(ask: Ask, request: Mapping[str, Any]) -> list[Finding]:
    """One child; where its memory changed, another without allocator settings."""
    outcome = ask()
    if outcome.result is None:
        return [failure(ask, outcome)]
    if outcome.result["fault"] is None:
        return judge(outcome, request)
    plain = ask(environ=dict.fromkeys(ALLOCATOR_VARIABLES))
    return judge(outcome, request, plain=plain)


def judge(outcome: Outcome, request: Mapping[str, Any], *, plain: Outcome | None = None) -> list[Finding]:
    """One finding."""
    assert outcome.result is not None
    result, device = outcome.result, request["device"]
    sizes = (
        f"{result['canaries']} canaries of {size_words(result['canary_bytes'])} beside up to "
        f"{size_words(result['churn_bytes'])} that came and went, {result['cycles']} cycles"
    )
    values: dict[str, Any] = {"device": device, "cycles": result["cycles"]}
    fault = result["fault"]
    if fault is None:
        row = "canaries_held" if request["cycles"] > _REPORTED_CYCLE else "canaries_held_for_now"
        return [from_row("canaries", row, subject=device, evidence=[sizes], **values)]
    found = {"zeros": "zeros", "churn": "bytes of another block", "canary": "bytes of another canary"}
    lines = [
        f"cycle {fault['cycle']}, canary {fault['canary']}: {fault['length']:,} wrong bytes from offset "
        f"{fault['first_offset']:,} (a multiple of {size_words(fault['alignment'])}), "
        f"{found.get(fault['kind'], fault['kind'])}; read twice: {'the same' if fault['stable'] else 'not the same'}",
        sizes,
    ]
    if plain is not None:
        lines.append(f"without allocator settings: {_other(plain)}")
    row = "canaries_changed" if fault["stable"] else "canaries_read_unstable"
    return [from_row("canaries", row, subject=device, evidence=lines, **values)]


def _other(outcome: Outcome) -> str:
    if outcome.result is None:
        return f"the measuring process {outcome.how}"
    fault, cycles = outcome.result["fault"], outcome.result["cycles"]
    return f"held for {cycles} cycles" if fault is None else f"changed in cycle {fault['cycle']} too"
