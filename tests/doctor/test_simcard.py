"""The doctor on the simulated card: it sees a card that only torch knows, and its measured checks run there.

The card has no Triton, no real rates, no sysfs and no bitsandbytes kernels: what rests on those cannot be shown here.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import pytest

from tests import simcard

MODULE = "hf_rocm_tune.doctor.diagnose"


@pytest.fixture(scope="module")
def card() -> dict[str, str]:
    """The variables of a process that has the card."""
    try:
        return {**os.environ, **simcard.environment(), "HF_ROCM_TUNE_QUIET": "1"}
    except simcard.NoCompiler as missing:
        pytest.skip(str(missing))


def told(environ: dict[str, str], *argv: str, request: dict[str, Any] | None = None) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, "-m", *argv],
        input=json.dumps(request or {}),
        capture_output=True,
        text=True,
        timeout=600,
        env=environ,
        check=False,
    )
    assert "Traceback" not in done.stderr, done.stderr
    answer: dict[str, Any] = json.loads(done.stdout)
    return answer


def measured(environ: dict[str, str], name: str, **request: Any) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = told(environ, MODULE, name, request={"device": "cuda:0", **request})["findings"]
    return found


@pytest.mark.long
def test_a_card_that_only_torch_sees_is_measured(card: dict[str, str]) -> None:
    report = told(card, "hf_rocm_tune", "doctor", "--only", "driver", "torch", "bandwidth", "--json")
    found = {one["check"]: one for one in report["findings"]}
    assert found["driver"]["row"] == "other_gpu" and simcard.NAME in found["driver"]["text"]
    assert simcard.NAME in report["machine"]
    assert (found["bandwidth"]["status"], found["bandwidth"]["subject"][:6]) == ("unknown", "cuda:0")
    assert "GB/s" in found["bandwidth"]["text"], "a rate of nothing real is compared with nothing"
    assert report["exit_code"] == 0


def test_measurements_end_within_the_given_time_and_the_one_that_runs_is_named(card: dict[str, str]) -> None:
    command = [
        sys.executable,
        "-m",
        "hf_rocm_tune",
        "doctor",
        "--only",
        "transfers",
        "compute",
        "--seconds",
        "1",
        "--json",
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, env=card, check=False)
    found = {one["check"]: one for one in json.loads(done.stdout)["findings"]}
    assert done.stderr.splitlines() == [
        "hf-rocm-tune doctor: measuring copies to the card and back, by size, dtype and kind, cold and warm"
    ]
    assert found["round_trip"]["row"] == "measurement_hung"
    for name in ("casts", "bandwidth", "gemm", "model", "attention"):
        assert found[name]["status"] == "skipped", name
        assert found[name]["text"] == f"1 s were over; --only {name} measures it"


@pytest.mark.long
def test_what_there_is_no_time_for_is_left_out_of_a_measurement_and_told(card: dict[str, str]) -> None:
    (copies,) = measured(card, "round_trip", largest=4096, repeats=20, seconds=0)
    assert copies["read"] == ["0 wrong of 1 cases, there and back twice; 82 cases were left out for time"], copies
    (canaries,) = measured(card, "canaries", cycles=40, seconds=30, room=300 << 20)
    assert "beside up to 44 MiB" in canaries["read"][0] and canaries["status"] == "ok", canaries
    (attention, _) = measured(card, "attention", length=4096, seconds=1000, total=0.001)
    assert attention["title"] == "attention at 256 tokens" and "512 tokens packed would take" in attention["text"]


def test_a_right_card_passes_and_a_harmed_way_is_found_and_told(card: dict[str, str]) -> None:
    small = {"largest": 65_536, "repeats": 2}
    (right,) = measured(card, "round_trip", **small)
    assert right["row"] == "round_trip_right"
    rows = {one["row"] for one in measured({**card, "SIMCARD_HARM": "zero,0.2,65536"}, "round_trip", **small)}
    assert rows and rows <= {"round_trip_sending", "round_trip_memory"}


@pytest.mark.long
def test_a_harmed_way_back_and_arithmetic_are_told(card: dict[str, str]) -> None:
    request = {"largest": 65_536, "repeats": 2}
    rows = {one["row"] for one in measured({**card, "SIMCARD_HARM_BACK": "flip,0.2,65536"}, "round_trip", **request)}
    assert rows and rows <= {"round_trip_read_back", "round_trip_disagree"}
    rows = [one["row"] for one in measured(card, "gemm", seconds=0)]
    assert rows[0] == "gemm_right" and rows[1] in ("gemm_speed", "gemm_slow")
    assert [measured(card, name, length=600)[0]["row"] for name in ("model", "attention")] == [
        "model_right",
        "attention_right",
    ]
