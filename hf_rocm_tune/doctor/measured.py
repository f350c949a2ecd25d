"""Measured checks: what is tried on the device itself, each in a child process with a deadline.

A check is an entry of `MEASURED` and a function ``check(request) -> list[Finding] | Again`` in the module that the
entry names. The child imports that module, and with it torch; this process never does. ``request["device"]`` is
``cuda:0`` ... or ``cpu``; ``request["fault"]``, where it is there, is ``{"kind": ..., "where": ...}``, one of the
check's own ``faults``. Faults of the process itself (hang, kill, garbage ...) are made by ``machine.child``. The
function calls ``child.step("copying 64 MiB")`` before each part, so that a hang can be told by name. Here is
judged what all of them have in common: a child that hung, died or left garbage.

To try one by hand: ``echo '{"device": "cpu"}' | python -m hf_rocm_tune.doctor.measured NAME``.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from hf_rocm_tune.doctor.evidence import Check, Evidence
from hf_rocm_tune.doctor.findings import Finding, from_row, unknown
from hf_rocm_tune.errors import UsageError
from hf_rocm_tune.machine.child import ENDINGS, Outcome, answer, run
from hf_rocm_tune.machine.software import TorchDevice
from hf_rocm_tune.ranks.trials import DEVICE_ERRORS

VARIABLE = "HF_ROCM_TUNE_DOCTOR_FAULT"
MODULE = "hf_rocm_tune.doctor.measured"
COPY_FAULTS = ("zeros", "zero_range", "flip", "stale", "drop", "unstable")  # transfer.raw_copies, which imports torch
RANK_FAULTS = ("wrong", "zeros", "own", "absent")  # distributed.preflight_ranks, likewise
RESULT_FAULTS = ("wrong", "nan", "zeros")  # arithmetic, likewise
GRADIENT_FAULTS = (*RESULT_FAULTS, "gradient")
_NEVER = 10**9  # seconds: JSON has no infinity
_TAIL_LINES = 6
_STACK_HEAD = "(most recent call first):"


@dataclass(frozen=True, kw_only=True)
class Measured:
    """One measured check.

    Attributes:
        name: of the check.
        group: a key of ``GROUPS``.
        about: one line for ``doctor --list``.
        function: ``module.function`` in this package; several checks may share one.
        seconds: what it takes on a card, as an estimate.
        deadline_s: seconds after which a child is killed; generous, since a healthy one never waits for it.
        faults: kinds that it can be given as ``request["fault"]["kind"]``, beside those of every child.
        options: goes into the request.
        full: only run with ``--full``.
        needs_cards: with fewer discrete cards it does not exist. A check of two cards is called in this process with
            ``request["devices"]``, because the preflight that it shares its trials with has children of its own; any
            other has one child for each card.
    """

    name: str
    group: str
    about: str
    function: str
    seconds: float
    deadline_s: float = 120
    faults: tuple[str, ...]
    options: Mapping[str, Any] = field(default_factory=dict)
    full: bool = False
    needs_cards: int = 0

    def __call__(self, request: dict[str, Any]) -> list[Finding] | Again:
        """Measure in this process."""
        module, _, function = self.function.partition(".")
        made: list[Finding] | Again = getattr(importlib.import_module(f"{__package__}.{module}"), function)(request)
        return made


@dataclass(frozen=True, kw_only=True)
class Again:
    """Findings that a second child may say more about, with other variables, which a process reads only once.

    Attributes:
        findings: what is said where the second child gives no result.
        environ: variables beside those of the first child; None takes one away.
        request: what the second is asked more; it finds `findings` as ``request["first"]`` and gives them all again.
        words: "with HSA_ENABLE_SDMA=0".
    """

    findings: list[Finding]
    environ: Mapping[str, str | None]
    words: str
    request: Mapping[str, Any] = field(default_factory=dict)


_transfer = partial(Measured, group="transfers", faults=COPY_FAULTS)
_memory = partial(Measured, group="memory", function="memory.canaries", faults=("zeros", "flip"))
_pairs = partial(Measured, group="pairs", needs_cards=2)
_compute = partial(Measured, group="compute", faults=RESULT_FAULTS)
_long = {"full": True}

# In the order in which they run.
_CHECKS = (
    _transfer(
        name="round_trip",
        about="bytes from the host to the card and back, by size, dtype and way of copying, cold and warm",
        function="transfers.round_trip",
        seconds=8,
        options={"largest": 64 << 20, "repeats": 20},
    ),
    _transfer(
        name="round_trip_long",
        about="the same with up to 256 MiB, and a hundred times the same tensor",
        function="transfers.round_trip",
        seconds=25,
        deadline_s=300,
        options={"largest": 256 << 20, "repeats": 100},
        full=True,
    ),
    _transfer(
        name="mmap_heap",
        about="a tensor in a mapped file to the card, against the same tensor on the heap",
        function="transfers.mmap_heap",
        seconds=5,
        deadline_s=240,  # 8 MiB took 5 s where it stalls, and all ways of 40 MiB shall end
        faults=("slow", "zeros"),
    ),
    _transfer(
        name="casts",
        about="changes of dtype on the card, and on the way to and from it, against the CPU's",
        function="casts.casts",
        seconds=6,
    ),
    _transfer(
        name="bandwidth",
        about="speed of page-locked copies to the card and back, against what its link should give",
        function="memory.bandwidth",
        seconds=4,
        faults=("slow",),
        options={"mib": 256},
    ),
    _memory(
        name="canaries",
        about="memory that must not change while other memory is allocated and freed, for a few seconds",
        seconds=8,
        options={"cycles": 40, "seconds": 4, "share": 0.9},
    ),
    _memory(
        name="canaries_long",
        about="the same through 400 cycles",
        seconds=180,
        deadline_s=1800,
        options={"cycles": 400, "seconds": _NEVER, "share": 0.9},
        full=True,
    ),
    _pairs(
        name="pairs",
        about="copies between every ordered pair of cards, cold and warm, against copies through the host",
        function="pairs.pairs",
        seconds=12,
        deadline_s=45,
        faults=COPY_FAULTS,
        options={"largest": 64 << 20, "repeats": 10},
    ),
    _pairs(
        name="pairs_long",
        about="the same with up to 1 GiB, and a hundred times the same copy",
        function="pairs.pairs",
        seconds=30,
        deadline_s=180,
        faults=COPY_FAULTS,
        options={"largest": 1 << 30, "repeats": 100},
        full=True,
    ),
    _pairs(
        name="all_reduce",
        about="sums over all cards by value: RCCL, and where it fails what works instead",
        function="pairs.all_reduce",
        seconds=8,
        deadline_s=45,
        faults=RANK_FAULTS,
        options={"largest": 64 << 20, "repeats": 5},
    ),
    _pairs(
        name="grad_sync",
        about="how a run on all cards would average gradients: its own preflight, with its deadlines",
        function="pairs.grad_sync",
        seconds=15,
        deadline_s=30,
        faults=RANK_FAULTS,
    ),
    _compute(
        name="gemm",
        about="matrix products of every dtype against float64, also odd shapes and transposed factors",
        function="gemm.gemm",
        seconds=5,
    ),
    _compute(
        name="gemm_repeat",
        about="the same matrix product again and again under load, bit for bit",
        function="gemm.gemm_repeat",
        seconds=6,
        options={"seconds": 0.4},
    ),
    _compute(
        name="attention",
        about="attention forward and backward against float64, and which backend really runs",
        function="attention.attention",
        seconds=6,
        faults=GRADIENT_FAULTS,
    ),
    _compute(
        name="norm",
        about="normalisation, embedding, softmax and cross entropy forward and backward against float64",
        function="layers.norm",
        seconds=5,
        faults=GRADIENT_FAULTS,
    ),
    _compute(
        name="nf4",
        about="4-bit weights of bitsandbytes: quantised, dequantised and multiplied, against their definition",
        function="layers.nf4",
        seconds=6,
        faults=(*GRADIENT_FAULTS, "absmax"),
    ),
    _compute(
        name="gemm_long",
        about="matrix products of the sizes of a language model's layers against float64",
        function="gemm.gemm",
        seconds=30,
        deadline_s=900,
        options=_long,
        full=True,
    ),
    _compute(
        name="gemm_repeat_long",
        about="the same matrix product for half a minute in each dtype under load, bit for bit",
        function="gemm.gemm_repeat",
        seconds=130,
        deadline_s=900,
        options={"seconds": 30},
        full=True,
    ),
    _compute(
        name="attention_long",
        about="attention of longer sequences and other head sizes, with the names of the kernels",
        function="attention.attention",
        seconds=20,
        deadline_s=600,
        faults=GRADIENT_FAULTS,
        options=_long,
        full=True,
    ),
    _compute(
        name="norm_long",
        about="the layers of norm in the sizes of a language model",
        function="layers.norm",
        seconds=20,
        deadline_s=600,
        faults=GRADIENT_FAULTS,
        options=_long,
        full=True,
    ),
    _compute(
        name="nf4_long",
        about="4-bit weights in the sizes of a language model's layers",
        function="layers.nf4",
        seconds=30,
        deadline_s=600,
        faults=(*GRADIENT_FAULTS, "absmax"),
        options=_long,
        full=True,
    ),
    _compute(
        name="blas",
        about="hipBLASLt against rocBLAS, by result and by time",
        function="gemm.blas",
        seconds=5,
        full=True,
    ),
)
MEASURED: Mapping[str, Measured] = {one.name: one for one in _CHECKS}


@dataclass(frozen=True, kw_only=True)
class DoctorFault:
    """A fault on purpose, so that a user can see that a check would find one.

    ``HF_ROCM_TUNE_DOCTOR_FAULT="check=round_trip,kind=zeros,where=page-locked"``

    Attributes:
        check: a key of ``MEASURED``.
        kind: one of that check's faults, or an ending of its process (``child.ENDINGS``).
        where: only where these words are part of what the check says it is doing.
    """

    check: str
    kind: str
    where: str = ""

    @classmethod
    def from_environment(cls, environ: Mapping[str, str]) -> DoctorFault | None:
        """The fault that the variable asks for; None where it is unset or empty.

        Raises:
            UsageError: names what is unknown, missing, given twice or not valid, and what is valid.
        """
        values: dict[str, str] = {}
        for item in filter(None, (piece.strip() for piece in environ.get(VARIABLE, "").split(","))):
            key, separator, value = (piece.strip() for piece in item.partition("="))
            if not separator or key not in ("check", "kind", "where") or key in values:
                raise UsageError(f"{VARIABLE}: '{item}' is not understood; give each of check kind where once")
            values[key] = value
        if not values:
            return None
        for key in ("check", "kind"):
            if key not in values:
                raise UsageError(f"{VARIABLE}: '{key}' is missing; for example check=round_trip,kind=zeros")
        check, kind = values["check"], values["kind"]
        if check not in MEASURED:
            raise UsageError(f"{VARIABLE}: check={check} is not valid; expected one of {' '.join(MEASURED)}")
        kinds = (*MEASURED[check].faults, *ENDINGS)
        if kind not in kinds:
            raise UsageError(f"{VARIABLE}: kind={kind} is not valid for {check}; expected one of {' '.join(kinds)}")
        return cls(**values)


def checks() -> tuple[Check, ...]:
    """All measured checks, in their order."""
    return tuple(
        Check(
            name=one.name,
            group=one.group,
            about=one.about,
            run=partial(_on_this_machine, one),
            measured=True,
            full=one.full,
            needs_gpu=True,
            needs_cards=one.needs_cards,
            seconds=one.seconds,
        )
        for one in MEASURED.values()
    )


def _on_this_machine(measured: Measured, evidence: Evidence) -> list[Finding]:
    fault = DoctorFault.from_environment(os.environ)
    common = {"hip": evidence.software is not None and evidence.software.build == "rocm"}
    if measured.needs_cards:
        requests = [{**common, "devices": list(map(_device, evidence.seen_cards))}]
    else:
        requests = [{**common, **_device(device)} for device in evidence.devices]
    return run_measured(measured, requests, fault=fault if fault and fault.check == measured.name else None)


def _device(device: TorchDevice) -> dict[str, Any]:
    return {
        "device": f"cuda:{device.index}",
        "name": device.name,
        "arch": device.arch,
        "address": device.pci_address,
        "total_bytes": device.total_bytes,
    }


def run_measured(
    measured: Measured, requests: Iterable[Mapping[str, Any]], *, fault: DoctorFault | None = None
) -> list[Finding]:
    """Run a check.

    Args:
        measured: the check.
        requests: one for each of its runs.
        fault: harms it on purpose; every finding says so, and one more.
    """
    findings: list[Finding] = []
    for asked in requests:
        request: dict[str, Any] = {**measured.options, **asked}
        if fault is not None:
            request["fault"] = {"kind": fault.kind, "where": fault.where}
        if measured.needs_cards:
            made = measured({**request, "deadline_s": measured.deadline_s, "about": measured.about})
            assert not isinstance(made, Again)
        else:
            made = _in_child(measured, request)
        # A card is named with its address, which no filter of visible devices changes.
        device, address = request.get("device"), request.get("address")
        for finding in made:
            subject = f"{device} at {address}" if address and finding.subject == device else finding.subject
            findings.append(replace(finding, check=measured.name, subject=subject))
    if fault is None:
        return findings
    said = f"a fault was put in on purpose: {VARIABLE}=check={fault.check},kind={fault.kind}"
    said += f",where={fault.where}" if fault.where else ""
    marked = [replace(finding, evidence=(said, *finding.evidence)) for finding in findings]
    return [from_row("fault_on_purpose", check=fault.check, kind=fault.kind, name=fault.check), *marked]


def _in_child(measured: Measured, request: Mapping[str, Any]) -> list[Finding]:
    ask = partial(run, MODULE, measured.name, deadline_s=measured.deadline_s)
    outcome = ask(request=request)
    if outcome.result is None:
        return [failure(measured.about, outcome, subject=str(request["device"]))]
    findings, again = outcome.result["findings"], outcome.result["again"]
    if again is not None:
        second = ask(request={**request, **again["request"], "first": findings}, environ=again["environ"])
        if second.result is None:
            line = f"{again['words']}: the measuring process {second.how}"
            return with_evidence(map(Finding.from_dict, findings), line)
        findings = second.result["findings"]
    return [Finding.from_dict(values) for values in findings]


def with_evidence(findings: Iterable[Finding], line: str) -> list[Finding]:
    """Findings with one more line of evidence each, but for those that are all right."""
    return [one if one.status == "ok" else replace(one, evidence=(*one.evidence, line)) for one in findings]


def failure(what: str, outcome: Outcome, *, subject: str) -> Finding:
    """The finding on a child that hung, died or left garbage.

    Args:
        what: it was to find out.
        outcome: how it ended.
        subject: what it was about.
    """
    evidence = [f"the measuring process {outcome.how}", *_printed(outcome)]
    if outcome.error.startswith("OutOfMemoryError"):
        return unknown(f"not enough memory is free: {outcome.error}", subject=subject, evidence=evidence)
    if outcome.error and not outcome.error.startswith(DEVICE_ERRORS):
        why = f"the measuring process {outcome.how}: a bug of ours, or a broken installation"
        return unknown(why, subject=subject, evidence=evidence)
    if outcome.status == "timeout":
        row = "measurement_hung"
    elif outcome.status == "garbage":
        row = "measurement_garbage"
    else:
        row = "measurement_refused" if outcome.error else "measurement_killed"
    return from_row(row, subject=subject, evidence=evidence, what=what, how=outcome.how)


def _printed(outcome: Outcome) -> list[str]:
    """Of what it printed, what tells most: the innermost calls of a hang, else the end."""
    lines = [line.strip() for line in outcome.tail.splitlines() if line.strip()]
    stacks = [number for number, line in enumerate(lines) if line.endswith(_STACK_HEAD)]
    if outcome.status == "timeout" and stacks:
        return lines[stacks[-1] + 1 :][:_TAIL_LINES]
    return lines[-_TAIL_LINES:]


def measure(request: dict[str, Any]) -> dict[str, Any]:
    """The child: measure what the command line names.

    Raises:
        UsageError: it names no check that measures in a child of this module.
    """
    names = [name for name, one in MEASURED.items() if not one.needs_cards]
    if len(sys.argv) != 2 or sys.argv[1] not in names:
        raise UsageError(f"got {' '.join(sys.argv[1:]) or 'nothing'} to measure: give one of {' '.join(names)}")
    return measure_here(MEASURED[sys.argv[1]], request)


def measure_here(measured: Measured, request: Mapping[str, Any]) -> dict[str, Any]:
    """``findings``, and ``again`` where a second child is wanted; plain JSON values."""
    made = measured({**measured.options, **request, "first": list(map(Finding.from_dict, request.get("first", ())))})
    if isinstance(made, Again):
        again = {"environ": dict(made.environ), "words": made.words, "request": dict(made.request)}
        return {"findings": [one.to_dict() for one in made.findings], "again": again}
    return {"findings": [one.to_dict() for one in made], "again": None}


if __name__ == "__main__":
    # Under its own name, which the modules of the checks import it by.
    from hf_rocm_tune.doctor.measured import measure as measure_check

    sys.exit(answer(measure_check))
