"""Measured between cards: copies of every ordered pair, and sums over all, by the trials of a run's preflight, which
measure in child processes. Imports no torch.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Any

from hf_rocm_tune.cards.preflight import SyncMethod, Trial, try_machine, try_pair
from hf_rocm_tune.doctor.findings import Finding, fail, failure, ok, problem_lines, unknown

_WITHOUT_ENGINES = {"HSA_ENABLE_PEER_SDMA": "0"}
_IOMMU = (
    "AMD documents two contradictory settings (RCCL: iommu=pt; ROCm IOMMU page: translation enabled for Radeon P2P). "
    "Others fixed this by iommu=pt, by disabling the IOMMU in BIOS, or by amdgpu.pcie_p2p=0. Re-run this test after "
    "each change. Until then train on one card, or with gradients averaged through the host"
)
_IOMMU_SOURCES = "ROCm docs: IOMMU; rccl init.cc; rccl#1129"
# Row, end of the title and fix of a failing all-reduce, by the way that works instead.
_INSTEAD: Mapping[SyncMethod, tuple[str, str, str]] = {
    "ddp_without_p2p": ("all_reduce_without_p2p", "with NCCL_P2P_DISABLE=1 it is correct",
                        "set NCCL_P2P_DISABLE=1 for training on both cards (RCCL only, not tensor.to('cuda:1')); see "
                        "the findings on pairs"),
    "host": ("all_reduce_over_gloo_only", "over gloo it is correct",
             "average gradients through the host (`--grad_sync host`), or train on one card"),
    "one_card": ("all_reduce_on_no_way", "and no other way works, either",
                 "see the findings on the single cards first; gloo needs this machine's own name to resolve to an "
                 "address of it (`getent hosts $(hostname)`)"),
}  # fmt: skip


def pairs(request: Mapping[str, Any]) -> list[Finding]:
    """A finding for each ordered pair; one with wrong copies is tried again without the engines for peer copies."""
    options: dict[str, Any] = {name: request.get(name) for name in ("deadline_s", "largest", "repeats")}
    findings = []
    for pair in itertools.permutations(request["devices"], 2):
        source, destination = pair
        trial = try_pair(source, destination, environ={}, **options)
        again = None
        if trial.verdict != "right" and request.get("hip"):
            again = try_pair(source, destination, environ=_WITHOUT_ENGINES, **options).reason
        about = str(request.get("about", ""))
        findings.append(assess_pair(source["device"], destination["device"], trial, again, about))
    return findings


def assess_pair(source: str, destination: str, trial: Trial, again: str | None, about: str) -> Finding:
    """The finding on one pair; ``again`` is the result without the engines for peer copies."""
    way = f"{source} to {destination}"
    subject = f"{source}->{destination}"
    seen = [f"with HSA_ENABLE_PEER_SDMA=0: {again}"] if again else []
    result = trial.outcomes[0].result
    if result is None:
        base = failure(about, trial.outcomes[0], subject=subject)
        if base.status == "unknown":
            return base
        if trial.verdict == "untried":
            return unknown(trial.reason, subject=subject, read=base.read)
        if trial.verdict == "hung":
            row, what = "pair_hung", "do not return"
        else:
            row, what = "pair_died", "end the process"
        return fail(row, f"Copies {way} {what}",
                    f"the measuring process for copies from {way} {trial.outcomes[0].how}",
                    f"look in `dmesg` for a page fault of amdgpu; move a card from a slot of the chipset. {_IOMMU}",
                    f"pytorch#132397; ROCm/ROCm#2429; {_IOMMU_SOURCES}", subject=subject,
                    read=[*base.read, *seen])  # fmt: skip
    access = {True: "yes", False: "no", None: "not asked"}[result["peer_access"]]
    read = [
        *problem_lines(result["problems"]),
        f"{result['wrong']} of {result['cases']} copies wrong; torch's can_device_access_peer: {access}",
        f"through the host: {'wrong' if result['staged_wrong'] else 'right'}",
        *seen,
    ]
    if result["staged_wrong"]:
        return fail("pair_wrong_through_host", f"Copies {way} are wrong even through the host",
                    f"bytes from {way} by the host arrived wrong: copies between cards are not the cause",
                    "see the findings of round_trip for both cards, and fix those first", "exllamav3#333",
                    subject=subject, read=read)  # fmt: skip
    if result["wrong"]:
        return fail("pair_wrong", f"Copies {way} are wrong",
                    f"peer copies from {way} returned wrong data while every call reported success; the copy through "
                    "the host is correct. device_map and naive model parallelism use such copies, whatever "
                    "NCCL_P2P_DISABLE is", f"BIOS: Above 4G decoding and resizable BAR on. {_IOMMU}",
                    "exllamav3#333; accelerate#4036; pytorch#84803; pytorch#87363; llama.cpp#6208; ROCm/ROCm#6342; "
                    f"{_IOMMU_SOURCES}", subject=subject, read=read)  # fmt: skip
    text = f"{way}: contiguous, strided and dtype-changing, cold and warm, both directions at once"
    return ok("pair_right", "copies between cards", text, "exllamav3#333; accelerate#4036", subject=subject, read=read)


def all_reduce(request: Mapping[str, Any]) -> list[Finding]:
    """Sums over all cards by the trials of a run's preflight: RCCL, else without peer copies, else gloo."""
    choice = try_machine(request["devices"], environ={}, limit_s=request["deadline_s"])
    if choice.method == "ddp" and not choice.shown:
        return [unknown(choice.reason, read=choice.evidence)]
    if choice.method == "ddp":
        text = "on all ranks, for all tested sizes and dtypes"
        return [ok("all_reduce_right", "sums over RCCL", text, "rccl#1129", read=choice.evidence)]
    row, end, fix = _INSTEAD[choice.method]
    text = f"{choice.reason}; NCCL_DEBUG=INFO prints what RCCL waits for"
    source = "rccl#1129; ROCm/vllm#390; rocm-systems#5480; ROCm/ROCm#6505"
    return [fail(row, f"All-reduce over RCCL does not work; {end}", text, fix, source, read=choice.evidence)]
