"""Measured checks of transfers and memory: right machines pass, and every fault of their kind is found and named.

On the CPU the same code copies from memory to memory; the faults go in at the copy.
"""

from __future__ import annotations

import importlib
import json
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from hf_rocm_tune.doctor.casts import WAYS
from hf_rocm_tune.doctor.finding import Finding
from hf_rocm_tune.doctor.measured import MEASURED, PACKAGE, bandwidth, canaries, mapped_file_child, round_trip_child
from hf_rocm_tune.doctor.measured.conduct import Ask, failure, run_measured
from hf_rocm_tune.doctor.measured.faults import VARIABLE, DoctorFault
from hf_rocm_tune.doctor.measured.transfer import COPY_FAULTS, TRANSFER
from hf_rocm_tune.errors import UsageError
from hf_rocm_tune.hardware.child import Outcome
from hf_rocm_tune.hardware.child_main import ENDINGS
from hf_rocm_tune.transfer.raw_copies import FAULTS
from tests.doctor.together import together

ALONE = [one for one in TRANSFER if one.every_card]
LATE = 120.0
CPU = {"device": "cpu"}
TWO = {"devices": [CPU, CPU]}
SMALL: dict[str, dict[str, Any]] = {
    "round_trip": {"largest": 65_536, "repeats": 4},
    "casts": {},
    "mmap_heap": {},
    "bandwidth": {"mib": 1},
    "canaries": {"cycles": 3, "seconds": 60, "share": 0.9},
}


def found_here(name: str, fault: dict[str, str] | None = None, **request: Any) -> Finding:
    """The one finding of a check that is measured in this process."""
    module = importlib.import_module(f"{PACKAGE}.{MEASURED[name].module}")
    whole = {**CPU, **SMALL[name], **request, "fault": fault}
    result = json.loads(json.dumps(module.measure(whole)))
    (finding,) = module.judge(Outcome(status="done", result=result), whole)
    assert isinstance(finding, Finding)
    return finding


def run_small(name: str, deadline_s: float = LATE, kind: str = "") -> list[Finding]:
    measured = replace(MEASURED[name], deadline_s=deadline_s)
    request = {**measured.options, **(CPU if measured.every_card else TWO), **SMALL.get(name, {})}
    request["hip"] = name == "blas"  # only there does it have something to choose from
    fault = DoctorFault(check=name, kind=kind) if kind else None
    return run_measured(measured, [request], fault=fault)


@pytest.fixture(scope="module")
def passed() -> dict[str, list[Finding]]:
    """The findings on this machine, and on one whose canaries change."""
    calls = {name: partial(run_small, name) for name in SMALL}
    return together({**calls, "changing": partial(run_small, "canaries", kind="zeros")}, workers=2)


@pytest.mark.parametrize("name", SMALL)
def test_a_sound_machine_passes_in_a_child(name: str, passed: dict[str, list[Finding]]) -> None:
    (finding,) = passed[name]
    # What the link of a CPU gives cannot be compared with anything.
    assert finding.status == ("info" if name == "bandwidth" else "ok"), finding
    assert finding.subject == "cpu" and finding.evidence and finding.sources


# A long form is the same module with other sizes; of blas there is no short one.
# grad_sync decides, and a trial that gives no result is part of that: see tests/ranks/test_choice.py.
SHORT = [one.name for one in MEASURED.values() if (not one.full or one.name == "blas") and one.name != "grad_sync"]


@pytest.fixture(scope="module")
def ended() -> dict[tuple[str, str], list[Finding]]:
    """The findings of every check whose children end so."""
    late = {"hang": 1, "kill": LATE, "garbage": LATE}
    cases = {(name, kind): partial(run_small, name, late[kind], kind) for kind in late for name in SHORT}
    return together(cases, workers=6)


@pytest.mark.parametrize("kind", ["hang", "kill", "garbage"])
@pytest.mark.parametrize("name", SHORT)
def test_a_child_that_gives_no_result_is_a_finding(
    name: str, kind: str, ended: dict[tuple[str, str], list[Finding]]
) -> None:
    if (name, kind) == ("all_reduce", "hang"):
        pytest.skip("within a second it is still importing, which proves nothing: see test_measured_pairs.py")
    findings = ended[name, kind]
    assert findings[0].row == "fault_on_purpose" and len(findings) > 1
    for finding in findings[1:]:
        assert finding.check == name
        assert finding.status == "fail" and finding.cure and finding.sources
        assert VARIABLE in finding.evidence[0]
        said = " ".join((finding.text, *finding.evidence))
        assert {"hang": "had not ended", "kill": "SIGKILL", "garbage": "cannot be read"}[kind] in said


@pytest.mark.parametrize(
    ("kind", "where", "row"),
    [
        ("zeros", " to cpu", "memory"),
        ("zero_range", " to cpu", "memory"),
        ("flip", " to cpu", "memory"),
        ("stale", " to cpu", "sending"),
        ("unstable", " to cpu", "memory"),
        ("drop", " to cpu", "not_written"),
        ("zeros", "back", "mapping"),
        ("drop", "back", "mapping"),
        ("unstable", "back", "read_back"),
        ("flip", "to page-locked memory", "read_back"),
        ("zeros", "65,536 bytes of uint8, page-locked, non_blocking to", "memory"),
        ("zeros", "bfloat16, pageable to", "memory"),
        ("flip", "strided to", "memory"),
        ("flip", "bytes off to", "memory"),
        ("drop", "reused to", "not_written"),
        ("zeros", "cold: 65,536 bytes of uint8, pageable to", "memory"),
        ("flip", "1 bytes of uint8, pageable to", "memory"),
    ],
)
def test_a_faulty_copy_is_found_and_its_way_is_named(kind: str, where: str, row: str) -> None:
    finding = found_here("round_trip", {"kind": kind, "where": where})
    assert (finding.status, finding.row) == ("fail", f"round_trip_{row}")
    first = finding.evidence[0]
    assert "wrong, the first at offset" in first and "instead of" in first
    assert {"zeros": "100 % zeros", "drop": "poison (never written)"}.get(kind, "") in first


class Scripted:
    """Copies that do something else at chosen calls."""

    def __init__(self, harm: Any) -> None:
        self.harm, self.calls = harm, 0

    def copy(self, destination: Tensor, source: Tensor, *, what: str, non_blocking: bool = False) -> None:
        destination.copy_(source)
        self.harm(self, destination, source, what)


def once(copies: Scripted, destination: Tensor, source: Tensor, what: str) -> None:
    copies.calls += 1
    if copies.calls == 1:
        destination.zero_()


def source_too(copies: Scripted, destination: Tensor, source: Tensor, what: str) -> None:
    # 65,536 bytes: the first case; the source was right when it was sent, and changes behind it.
    if " to cpu" in what and "cold" in what:
        destination[:100] ^= 1
        source[:100] ^= 1


def late(copies: Scripted, destination: Tensor, source: Tensor, what: str) -> None:
    """Not there when the device looks, and there when it is read."""
    if "cold" in what and " to cpu" in what:
        destination.zero_()
    elif "cold" in what:
        destination[:] = round_trip_child.fill_with_pattern(torch.empty_like(destination), 0)


@pytest.mark.parametrize(("harm", "row"), [(once, "sending"), (source_too, "source"), (late, "device_only")])
def test_what_is_no_constant_fault_of_the_way_is_told_apart(
    harm: Any, row: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(round_trip_child, "copies_for", lambda request: Scripted(harm))
    finding = found_here("round_trip")
    assert finding.row == f"round_trip_{row}"


def test_a_dtype_that_torch_cannot_copy_is_left_out_and_said(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(copies: Scripted, destination: Tensor, source: Tensor, what: str) -> None:
        if "float8_e5m2," in what:
            raise NotImplementedError

    monkeypatch.setattr(round_trip_child, "copies_for", lambda request: Scripted(refuse))
    finding = found_here("round_trip")
    assert finding.status == "ok" and "float8_e5m2" in finding.evidence[1]


def test_wrong_bytes_are_tried_again_without_copy_engines_on_rocm_only() -> None:
    asked: list[Any] = []
    bad = {"cases": 9, "bytes": 99, "wrong": 1, "left_out": [], "problems": [{"case": "c", "verdict": "memory"}]}
    good = {**bad, "wrong": 0, "problems": []}

    class Asked(Ask):
        def __call__(self, *, environ: Any = None, **more: Any) -> Outcome:
            asked.append(environ)
            return Outcome(status="done", result=good if environ else bad)

    module = importlib.import_module(f"{PACKAGE}.round_trip")
    for hip in (False, True):
        request = {**CPU, "hip": hip}
        (finding,) = module.conduct(Asked(measured=MEASURED["round_trip"], request=request), request)
        assert any("HSA_ENABLE_SDMA=0: none wrong" in line for line in finding.evidence) == hip
    assert asked == [None, None, {"HSA_ENABLE_SDMA": "0"}]


CASTS = [
    ("on the device", "zeros"),
    ("on the device", "flip"),
    ("to the device, non_blocking", "zero_range"),
    ("to the device, blocking", "drop"),
    ("from the device, blocking", "unstable"),
    ("from the device, non_blocking", "zeros"),
]
OTHERS = [(way, kind) for way in WAYS for kind in COPY_FAULTS if kind != "stale" and (way, kind) not in CASTS]


@pytest.mark.parametrize(
    ("where", "kind"), [*CASTS, *(pytest.param(*other, marks=pytest.mark.long) for other in OTHERS)]
)
def test_a_wrong_cast_is_found_whichever_way_it_is_made(where: str, kind: str) -> None:
    finding = found_here("casts", {"kind": kind, "where": f"torch.float32 to torch.bfloat16 {where}"})
    assert finding.row == "casts_wrong" and where in finding.evidence[1]


def test_a_slow_mapped_copy_is_a_stall_and_ends_early() -> None:
    finding = found_here("mmap_heap", {"kind": "slow"})
    assert (finding.status, finding.row) == ("warn", "mapped_file_stall")
    assert "8 MiB" in finding.text, "where it stalls, the larger tensor is not waited for"


def test_a_mapped_tensor_that_arrives_wrong_is_no_matter_of_speed() -> None:
    finding = found_here("mmap_heap", {"kind": "zeros", "where": "mapped"})
    assert (finding.status, finding.row) == ("fail", "mapped_file_wrong")


def test_mapped_tensors_are_mapped(tmp_path: Path) -> None:
    file = mapped_file_child._write(tmp_path, 1)
    with mapped_file_child.safe_open(file, framework="pt") as opened:
        tensor = opened.get_tensor("weight")
        addresses = [line.split()[0] for line in Path("/proc/self/maps").read_text().splitlines() if str(file) in line]
        ranges = [tuple(int(end, 16) for end in line.split("-")) for line in addresses]
        assert any(first <= tensor.data_ptr() < last for first, last in ranges)


@pytest.mark.parametrize(("kind", "words"), [("zeros", "zeros"), ("flip", "bit_flip")])
def test_a_canary_that_changes_is_found(kind: str, words: str) -> None:
    finding = found_here("canaries", {"kind": kind})
    assert (finding.status, finding.row) == ("fail", "canaries_changed")
    assert words in finding.evidence[0] and "cycle 2" in finding.evidence[0]


def test_a_changed_canary_is_looked_at_again_without_allocator_settings(passed: dict[str, list[Finding]]) -> None:
    _, changed = passed["changing"]
    assert "without allocator settings: changed in cycle 2 too" in changed.evidence


def test_a_short_watch_claims_no_more_than_it_saw() -> None:
    result = canaries.measure({**CPU, "cycles": 3, "seconds": 0, "share": 0.9})
    assert result["cycles"] == 0 and result["fault"] is None, "no cycle begins after its time"
    assert found_here("canaries").row == "canaries_held_for_now"
    done = Outcome(status="done", result={**result, "cycles": 400})
    (finding,) = canaries.judge(done, {**CPU, "cycles": 400})
    assert finding.row == "canaries_held"


def link(width: int | None, speed: float | None, device: str = "0000:03:00.0") -> dict[str, Any]:
    return {"device": device, "width": width, "speed": speed, "max_speed": speed}


@pytest.mark.parametrize(
    ("rate", "links", "row", "words"),
    [
        (28.4, [link(16, 16.0)], "bandwidth_right", "x16 link: 28.4 GB/s"),
        (13.5, [link(8, 16.0)], "bandwidth_right", "x8 link: 13.5 GB/s"),
        (6.5, [link(4, 16.0)], "bandwidth_of_narrow_link", "x4 link: 6.5 GB/s"),
        (6.5, [link(16, 16.0), link(4, 16.0, "0000:00:01.0")], "bandwidth_of_narrow_link", "x4 link"),
        (13.0, [link(16, 8.0)], "bandwidth_right", "x16 link"),
        (6.5, [link(16, 16.0)], "bandwidth_low", "21 %"),
        (9.0, [link(8, 16.0)], "bandwidth_low", "57 %"),
        (3.0, [link(4, 16.0)], "bandwidth_low", "38 %"),
        (6.5, [], "bandwidth_of_unknown_link", "6.5 GB/s"),
        (6.5, [link(None, None)], "bandwidth_of_unknown_link", "6.5 GB/s"),
    ],
)
def test_a_link_is_called_by_its_name(rate: float, links: list[dict[str, Any]], row: str, words: str) -> None:
    result = {"to_device": rate, "from_device": rate + 1, "links": links}
    (finding,) = bandwidth.judge(Outcome(status="done", result=result), {"device": "cuda:0", "mib": 256})
    assert finding.row == row and words in finding.title


def test_the_link_is_read_while_copies_are_on_their_way(tmp_path: Path) -> None:
    address = "0000:03:00.0"
    folder = tmp_path / "sys/bus/pci/devices" / address
    folder.mkdir(parents=True)
    files = {"current_link_width": "4", "current_link_speed": "16.0 GT/s PCIe", "max_link_speed": "16.0 GT/s PCIe"}
    for name, text in files.items():
        (folder / name).write_text(f"{text}\n")
    finding = found_here("bandwidth", {"kind": "slow"}, address=address, root=str(tmp_path))
    assert finding.row == "bandwidth_low", "three times as long"
    assert "x4 at 16 GT/s at 0000:03:00.0" in finding.evidence[1]


@pytest.mark.parametrize(
    ("outcome", "status", "words"),
    [
        (Outcome(status="died", error="OutOfMemoryError: HIP out of memory", code=1), "unknown", "not enough memory"),
        (Outcome(status="died", error="RuntimeError: HIP error: invalid device function", code=1), "fail", "HIP error"),
        (Outcome(status="died", error="AcceleratorError: HIP error", code=1), "fail", "HIP error"),
        (Outcome(status="died", error="ImportError: libamdhip64.so.7", code=1), "unknown", "broken installation"),
        (Outcome(status="died", error="AttributeError: x", code=1), "unknown", "bug of ours"),
        (Outcome(status="died", code=-11, step="casting"), "fail", "SIGSEGV while casting"),
        (Outcome(status="died", code=-99), "fail", "signal 99"),
        (Outcome(status="timeout", seconds=60, state="D (disk sleep), in amdgpu_x"), "fail", "could not be killed"),
    ],
)
def test_what_no_result_means_depends_on_how_the_child_ended(outcome: Outcome, status: str, words: str) -> None:
    finding = failure(Ask(measured=MEASURED["casts"], request=CPU), outcome)
    assert finding.status == status and words in finding.text


@pytest.mark.parametrize(
    "text",
    [
        "check=round_trip",
        "kind=zeros",
        "check=nothing,kind=zeros",
        "check=round_trip,kind=slow",
        "check=canaries,kind=drop",
        "check=casts,kind=zeros,kind=flip",
        "round_trip",
        "check=casts,kind=zeros,rate=1",
    ],
)
def test_a_fault_that_makes_no_sense_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match=VARIABLE):
        DoctorFault.from_environment({VARIABLE: text})


def test_every_fault_of_every_check_can_be_asked_for() -> None:
    assert DoctorFault.from_environment({}) is None and DoctorFault.from_environment({VARIABLE: " "}) is None
    for name, measured in MEASURED.items():
        for kind in (*measured.faults, *ENDINGS):
            fault = DoctorFault.from_environment({VARIABLE: f"check={name},kind={kind},where=a b"})
            assert fault is not None and fault.request() == {"kind": kind, "where": "a b"}
    assert COPY_FAULTS == FAULTS, "a copy of what cannot be imported without torch"


def test_a_finding_bears_the_name_of_its_check_and_the_address_of_its_card(monkeypatch: pytest.MonkeyPatch) -> None:
    done = Outcome(status="done", result={"to_device": 1.0, "from_device": 1.0, "links": []})
    monkeypatch.setattr(Ask, "__call__", lambda self, **_: done)
    measured = replace(MEASURED["bandwidth"], name="another")
    requests = [{"device": "cuda:1", "address": address, "mib": 1} for address in ("0000:03:00.0", None)]
    findings = run_measured(measured, requests)
    assert [finding.subject for finding in findings] == ["cuda:1 at 0000:03:00.0", "cuda:1"]
    assert {finding.check for finding in findings} == {"another"}


@pytest.mark.gpu
@pytest.mark.parametrize("measured", ALONE, ids=lambda one: one.name)
def test_a_gpu_is_measured(measured: Any) -> None:
    request = {**measured.options, "device": "cuda:0", "hip": torch.version.hip is not None}
    if "cycles" in request:
        request["cycles"] = min(request["cycles"], 10)
    (finding,) = run_measured(measured, [request])
    assert finding.status in ("ok", "info", "warn") and (finding.status != "warn" or measured.name == "bandwidth")


@pytest.mark.gpu
@pytest.mark.parametrize(("name", "where"), [("round_trip", " to cuda:0"), ("round_trip", "back"), ("casts", "from")])
def test_faulty_copies_of_a_gpu_are_found(name: str, where: str) -> None:
    request = {**MEASURED[name].options, "device": "cuda:0", **SMALL[name]}
    findings = run_measured(MEASURED[name], [request], fault=DoctorFault(check=name, kind="flip", where=where))
    assert [finding.status for finding in findings] == ["warn", "fail"]
