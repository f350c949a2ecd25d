"""Links between card and processor, read (width, slot, memory window, error counters) and measured (``bandwidth``); and
between cards (``pairs``, ``all_reduce``, ``grad_sync``), by the trials of the preflight, which measures in child
processes. Imports torch only to measure.

The rate of a link by arithmetic is that of its lanes less the line code, 8b/10b up to 5 GT/s and 128b/130b above (PCI
Express base specification). PCIe 4.0 x16 has 31.5 * 10^9 bytes a second in each direction, of which packet headers take
about a tenth. Not covered: PCIe 6.0, which has no such code.

Injected faults: ``slow`` for ``bandwidth``; those of ``transfer.damage`` for pairs (``where=cuda:1 to cuda:0`` is one
direction, ``where=cold`` the first copy, ``where=strided`` or ``where=cast`` those by a kernel, ``where=through the
host`` the staged copy); those of ``trial_measures`` for sums, on the last rank with every backend, or with
``where=over nccl`` with one.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from hf_rocm_tune.cards.preflight import (
    PairTrial,
    PreflightFault,
    ReduceTrial,
    SyncWay,
    Way,
    try_all_reduce,
    try_machine,
    try_pairs,
)
from hf_rocm_tune.doctor.findings import (
    Check,
    Evidence,
    Finding,
    failure,
    from_row,
    knowledge_data,
    problem_lines,
    size_words,
    unknown,
)
from hf_rocm_tune.machine.child import device_of, step
from hf_rocm_tune.machine.gpus import Link, read_upward
from hf_rocm_tune.machine.survey import Gpu, survey
from hf_rocm_tune.machine.sysfs import LiveTree, Reading

_MIB, _GIB = 1 << 20, 1 << 30
_CORRECTED = "correctable"
"""Errors after which the hardware repeats the packet, so that no data is lost."""

_LEAST_SHARE = 0.7
"""Share of a link's arithmetic rate: our own bound. A healthy x16 measured 0.90 to 0.92 of it (ROCm/ROCm#2253)."""
_ROUNDS, _QUEUED = 5, 4
_SLOWED = 3

_PEER_ENGINES_OFF = {"HSA_ENABLE_PEER_SDMA": "0"}
_TAIL_LINES = 4
_WAYS: Mapping[Way, str] = {
    "rccl": "RCCL (backend nccl)",
    "rccl_without_p2p": "RCCL with NCCL_P2P_DISABLE=1",
    "gloo": "gloo",
}
_HOW = {"wrong": "gave wrong sums", "hung": "did not return", "died": "ended a rank"}
_DECISIONS: Mapping[SyncWay, str] = {
    "ddp": "grad_sync_ddp",
    "ddp_without_p2p": "grad_sync_without_p2p",
    "host": "grad_sync_host",
    "one_card": "grad_sync_one_card",
}


class LinkRate(NamedTuple):
    """The state of a link: lanes, 10^9 transfers a second and lane, PCI address of the device at its lower end."""

    width: int
    speed: float
    where: str

    @property
    def gb_s(self) -> float:
        """10^9 bytes a second in one direction."""
        return self.speed * self.width * (128 / 130 if self.speed >= 8 else 8 / 10) / 8


def reachable_speed(link: Link) -> float | None:
    """The speed that both ends of a link support (an idle link may run slower); None if unknown."""
    ends = [reading.value for reading in (link.max_speed, link.port_max_speed) if reading.value is not None]
    now = link.speed.value
    # A link that runs faster than the stated maximum of one end has its current speed.
    return max(min(ends), now or 0.0) if ends else now


def narrowest(path: Sequence[Link]) -> LinkRate | None:
    """The slowest link between a card and the processor; None if width or speed of one of them is unknown."""
    rates = [LinkRate(link.width.value or 0, reachable_speed(link) or 0, link.device) for link in path]
    return min(rates, key=lambda one: one.gb_s) if rates and all(one.gb_s for one in rates) else None


def _links(evidence: Evidence) -> Iterator[Finding]:
    known: dict[str, LinkRate] = {}
    for gpu in evidence.cards:
        slowest = narrowest(gpu.upward.links)
        if slowest is None:
            seen = [
                reading.reason for link in gpu.upward.links for reading in (link.width, link.speed) if reading.reason
            ]
            yield unknown(
                "; ".join(seen) or "the links between it and the processor could not be read", subject=gpu.address
            )
            continue
        known[gpu.address] = slowest
        yield _link(gpu, slowest)
        for link in gpu.upward.links:
            now, able = link.speed.value, reachable_speed(link)
            if now is not None and able is not None and now < able:
                speeds = {"now": f"{now:g}", "speed": f"{able:g}"}
                yield from_row("link_slow_now", subject=gpu.address, where=link.device, **speeds)
    # Cards are compared by width, else by supported speed: an idle link may run slower.
    if len({one.width for one in known.values()}) > 1:
        yield from_row("links_unequal", widths=", ".join(f"{place}: x{one.width}" for place, one in known.items()))
    elif len({one.speed for one in known.values()}) > 1:
        listed = ", ".join(f"{place}: x{one.width} at {one.speed:g} GT/s" for place, one in known.items())
        yield from_row("links_unequal_speed", speeds=listed)


def _link(gpu: Gpu, slowest: LinkRate) -> Finding:
    bounds = knowledge_data("thresholds.toml")
    speed, width, rate = f"{slowest.speed:g}", slowest.width, slowest.gb_s
    limits = bounds["link_gb_s"]
    row = "link_full" if rate >= limits["x8"] else "link_half" if rate >= limits["x4"] else "link_narrow"
    values: dict[str, Any] = {"expect": bounds["expected"].get(speed, {}).get(f"x{width}", "")}
    values |= {"width": width, "speed": speed, "rate": rate}
    values |= {"where": slowest.where} if row != "link_full" else {}
    return from_row(row, subject=gpu.address, evidence=map(_describe, gpu.upward.links), **values)


def _describe(link: Link) -> str:
    width, speed = link.width, link.speed
    lanes = f"x{width.value}" if width.value else f"width unknown ({width.reason})"
    rate = f"{speed.value:g} GT/s" if speed.value else f"speed unknown ({speed.reason})"
    ends = {"device": (link.max_width, link.max_speed), "port": (link.port_max_width, link.port_max_speed)}
    able = [f"{end}: x{lane.value} at {top.value:g}" for end, (lane, top) in ends.items() if lane.value and top.value]
    return f"{link.device}: {lanes} at {rate}" + (f" (able: {', '.join(able)})" if able else "")


def _slot(evidence: Evidence) -> Iterator[Finding]:
    on_chipset = "slot_of_chipset" if evidence.card_count < 2 else "slot_of_chipset_pair"
    for gpu in evidence.cards:
        path = " > ".join(filter(None, [*(link.device for link in gpu.upward.links), gpu.upward.root_port]))
        if gpu.upward.behind_chipset is None:
            why = "it is unknown which of the bridges above it belong to the processor"
            yield unknown(why, subject=gpu.address, evidence=[path] if path else [])
        else:
            yield from_row(
                on_chipset if gpu.upward.behind_chipset else "slot_of_processor", subject=gpu.address, path=path
            )


def _atomics(evidence: Evidence) -> Iterator[Finding]:
    missing = "atomics_missing" if evidence.card_count < 2 else "atomics_missing_pair"
    for gpu in evidence.cards:
        if gpu.atomics.value is None:
            yield unknown(gpu.atomics.reason, subject=gpu.address)
        else:
            yield from_row("atomics_ok" if gpu.atomics.value else missing, subject=gpu.address)


def _bar(evidence: Evidence) -> Iterator[Finding]:
    share = knowledge_data("thresholds.toml")["bar_share"]["full"]
    for gpu in evidence.cards:
        vram = gpu.node.vram_bytes if gpu.node else gpu.sensors.vram_total_bytes.value
        window = gpu.bar_bytes
        if window.value is None or not vram:
            yield unknown(window.reason or "the size of the card's memory is not known", subject=gpu.address)
        elif window.value >= share * vram:
            yield from_row("bar_full", subject=gpu.address, bar_gib=window.value / _GIB)
        else:
            row = "bar_small" if evidence.card_count < 2 else "bar_small_pair"
            yield from_row(row, subject=gpu.address, bar_mib=window.value / _MIB, vram_gib=vram / _GIB)


def _errors(evidence: Evidence) -> Iterator[Finding]:
    for gpu in evidence.cards:
        counted = _counted(gpu.aer)
        seen = [", ".join(f"{kind} {count:,}" for kind, count in counted.items())] if counted else []
        if not counted:
            reasons = {reading.reason for reading in gpu.aer.values()}
            yield unknown("; ".join(sorted(reasons)) or "the kernel has no error counters for it", subject=gpu.address)
        elif not any(counted.values()):
            yield from_row("aer_clean", subject=gpu.address, evidence=seen)
        yield from _by_kind(gpu.address, counted, seen, "aer_errors", "aer_corrected")


def _errors_since(evidence: Evidence) -> Iterator[Finding]:
    """The errors counted since the machine was read, which is before all measurements."""
    now = {gpu.address: gpu for gpu in survey().gpus}
    for gpu in evidence.cards:
        before, after = _counted(gpu.aer), _counted(now[gpu.address].aer) if gpu.address in now else {}
        grown = {kind: after[kind] - count for kind, count in before.items() if after.get(kind, 0) > count}
        seen = [f"{kind}: {before[kind]:,} before, {after[kind]:,} after" for kind in grown]
        yield from _by_kind(gpu.address, grown, seen, "aer_rising", "aer_corrected_rising")
        if not grown and before and after:
            yield from_row("aer_still", subject=gpu.address)


def _counted(aer: Mapping[str, Reading[int]]) -> dict[str, int]:
    return {kind: reading.value for kind, reading in aer.items() if reading.value is not None}


def _by_kind(
    address: str, counts: Mapping[str, int], seen: list[str], uncorrected: str, corrected: str
) -> Iterator[Finding]:
    for row, is_corrected in ((uncorrected, False), (corrected, True)):
        found = [
            f"{count:,} {kind}" for kind, count in counts.items() if count and (kind == _CORRECTED) == is_corrected
        ]
        if found:
            yield from_row(row, subject=address, evidence=seen, counts=" and ".join(found))


def bandwidth(request: Mapping[str, Any]) -> list[Finding]:
    """Copy page-locked memory both ways, ``mib`` at a time, and read the state of the link during the copies.

    ``root`` in the request replaces ``/`` when the link is read.
    """
    import torch

    from hf_rocm_tune.transfer import gb_per_s
    from hf_rocm_tune.transfer.damage import Copies, wait_for

    device = device_of(request)
    slow = (request.get("fault") or {}).get("kind") == "slow"
    nbytes = request["mib"] << 20
    host = torch.ones(nbytes, dtype=torch.uint8, pin_memory=device.type == "cuda")
    there = torch.zeros(nbytes, dtype=torch.uint8, device=device)
    rates: dict[str, list[float]] = {"to": [], "from": []}
    links: list[LinkRate] = []
    for _ in range(_ROUNDS + 1):
        for way, target, source in (("to", there, host), ("from", host, there)):
            step(f"copying {request['mib']} MiB {way} {device}")
            began = time.perf_counter()
            for _ in range(_QUEUED):
                Copies().copy(target, source, what="", non_blocking=True)
            if request.get("address") is not None:  # during the copies: an idle link may be slower
                path = read_upward(LiveTree(Path(request.get("root", "/"))), request["address"]).links
                known = [(link.width.value, link.speed.value, link.device) for link in path]
                links = [LinkRate(width, speed, where) for width, speed, where in known if width and speed]
            wait_for(there)
            if slow:
                time.sleep((_SLOWED - 1) * (time.perf_counter() - began))
            rates[way].append(gb_per_s(_QUEUED * nbytes, time.perf_counter() - began))
    # Without the first round, in which the link leaves its idle state.
    to_device, from_device = (statistics.median(all_of[1:]) for all_of in rates.values())
    return judge_bandwidth(request, to_device, from_device, links)


def judge_bandwidth(request: Mapping[str, Any], there: float, back: float, links: Sequence[LinkRate]) -> list[Finding]:
    """The finding on the rates (10^9 bytes a second) ``there`` and ``back`` and the links that were read under load."""
    device = request["device"]
    evidence = [f"{there:.1f} GB/s to {device}, {back:.1f} GB/s from it, page-locked, {request['mib']} MiB at a time"]
    values: dict[str, Any] = {"there": there, "back": back}
    if not links:
        return [from_row("bandwidth_of_unknown_link", subject=device, evidence=evidence, **values)]
    link = min(links, key=lambda one: one.gb_s)
    rate, state = link.gb_s, f"x{link.width} at {link.speed:g} GT/s at {link.where}"
    values |= {"width": link.width, "speed": f"{link.speed:g}", "rate": rate}
    evidence += [f"under load: {state}, {rate:.1f} GB/s each way by arithmetic"]
    if min(there, back) < _LEAST_SHARE * rate:
        row = "bandwidth_low"
        values["share"] = 100 * min(there, back) / rate
    else:
        narrow = rate < knowledge_data("thresholds.toml")["link_gb_s"]["x4"]
        row = "bandwidth_of_narrow_link" if narrow else "bandwidth_right"
    return [from_row(row, subject=device, evidence=evidence, **values)]


def pairs(request: Mapping[str, Any]) -> list[Finding]:
    """A finding for each ordered pair; one with wrong copies is tried again without the engines for peer copies."""
    findings = []
    for trial in _try_pairs(request, request["devices"], {}):
        again = None
        if trial.verdict != "right" and request.get("hip"):
            names = (trial.source, trial.destination)
            pair = [device for name in names for device in request["devices"] if device["device"] == name]
            again = _try_pairs(request, pair, _PEER_ENGINES_OFF)[0].reason
        findings.append(judge_pair(trial, again, str(request.get("about", ""))))
    return findings


def _try_pairs(request: Mapping[str, Any], devices: Sequence[Any], environ: Mapping[str, str]) -> list[PairTrial]:
    options = {name: request.get(name) for name in ("deadline_s", "largest", "repeats", "fault")}
    return try_pairs(devices, environ=environ, **options)  # type: ignore[arg-type]


def judge_pair(trial: PairTrial, again: str | None, about: str) -> Finding:
    """The finding on one pair; ``again`` is the result without the engines for peer copies."""
    subject = f"{trial.source}->{trial.destination}"
    names = {"source": trial.source, "destination": trial.destination}
    seen = [f"with HSA_ENABLE_PEER_SDMA=0: {again}"] if again else []
    result = trial.outcome.result
    if result is None:
        base = failure(about, trial.outcome, subject=subject)
        if base.status == "unknown":
            return base
        if trial.verdict == "untried":
            return unknown(trial.reason, subject=subject, evidence=base.evidence)
        row = "pair_hung" if trial.verdict == "hung" else "pair_died"
        return from_row(row, subject=subject, evidence=[*base.evidence, *seen], how=trial.outcome.how, **names)
    access = {True: "yes", False: "no", None: "not asked"}[result["peer_access"]]
    evidence = [
        *problem_lines(result["problems"]),
        f"{result['wrong']} of {result['cases']} copies wrong; torch's can_device_access_peer: {access}",
        f"through the host: {'wrong' if result['staged_wrong'] else 'right'}",
    ]
    if result["staged_wrong"]:
        row = "pair_wrong_through_host"
    else:
        row = "pair_wrong" if result["wrong"] else "pair_right"
    return from_row(row, subject=subject, evidence=[*evidence, *seen], **names)


def all_reduce(request: Mapping[str, Any]) -> list[Finding]:
    """Sums over RCCL; if that fails, with NCCL_P2P_DISABLE=1 and then over gloo, to find a backend that works."""
    trials: list[ReduceTrial] = []
    on_cards = any(device["device"] != "cpu" for device in request["devices"])
    options = {name: request.get(name) for name in ("deadline_s", "largest", "repeats", "fault")}
    for way in list(_WAYS) if on_cards else ["gloo"]:
        trials.append(try_all_reduce(request["devices"], way, **options))  # type: ignore[arg-type]
        if trials[-1].verdict in ("right", "untried"):
            break
    first, last = trials[0], trials[-1]
    evidence = [trial.reason for trial in trials]
    if first.verdict == "right":
        result = first.outcomes[0].result
        if result is not None and result["gb_per_s"]:
            evidence.append(f"{result['gb_per_s']:.2f} GB/s summing {size_words(result['repeated_bytes'])} of bfloat16")
        return [from_row("all_reduce_right", evidence=evidence, way=_WAYS[first.way])]
    if first.verdict == "untried":
        return [unknown(f"nothing was tried on the cards: {first.reason}")]
    outcome = first.outcomes[first.telling_rank]
    evidence += problem_lines((outcome.result or {}).get("problems", []))
    evidence += outcome.tail.splitlines()[-_TAIL_LINES:] if outcome.result is None else []
    if last.verdict != "right":
        row = "all_reduce_on_no_way"
    else:
        row = "all_reduce_without_p2p" if last.way == "rccl_without_p2p" else "all_reduce_over_gloo_only"
    return [from_row(row, evidence=evidence, way=_WAYS[first.way], how=_HOW[first.verdict])]


def grad_sync(request: Mapping[str, Any]) -> list[Finding]:
    """The decision of ``--grad_sync auto`` on these cards, made by its preflight.

    ``pairs`` and ``all_reduce`` test longer and advise on repairs; this tells what a run does until then.
    """
    wanted = request.get("fault")
    fault = PreflightFault(trial="ddp", kind=wanted["kind"], where=wanted["where"]) if wanted else None
    chosen = try_machine(request["devices"], environ=os.environ, fault=fault, limit_s=request["deadline_s"])
    if not chosen.shown and chosen.way != "one_card":
        return [unknown(chosen.reason, evidence=chosen.evidence)]
    return [from_row(_DECISIONS[chosen.way], evidence=chosen.evidence, reason=chosen.reason)]


CHECKS = (
    Check("link_width", "links", "width and speed of every link up to the processor", _links),
    Check("slot", "links", "whether the card is on a slot of the chipset", _slot),
    Check("atomics", "links", "PCIe atomics between card and processor", _atomics),
    Check("bar", "links", "resizable BAR", _bar),
    Check("link_errors", "links", "PCIe error counters since boot", _errors),
    Check(
        "link_errors_after",
        "after",
        "PCIe error counters again, after all measurements",
        _errors_since,
        measured=True,
    ),
)
