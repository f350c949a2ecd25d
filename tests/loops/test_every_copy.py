"""Every copy between host and card is verified, whoever asks for it, and what we count is what the driver counts."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest

from tests.loops.conftest import Done, RunFile
from tests.simcard.log import Log

CALLS = Path(__file__).with_name("card_calls.py")
NO_COMPILER = {"CXX": "no-such-compiler"}
SAMPLE = {("SIMCARD_HARM", "flip"), ("SIMCARD_HARM_BACK", "drop")}


def answer(done: Done) -> dict[str, Any]:
    assert done.returncode == 0, done.stderr[-3000:]
    content: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return content


@pytest.mark.parametrize("served_by", ["compiled", "python"])
def test_every_way_of_copying_is_verified_and_counted_as_the_driver_does(
    run_file: RunFile, card: dict[str, str], tmp_path: Path, served_by: str
) -> None:
    log, more = tmp_path / "log", {} if served_by == "compiled" else NO_COMPILER
    found = answer(run_file(CALLS, env={**card, **more, "SIMCARD_LOG": str(log), "SIMCARD_POISON": "1"}))
    assert found["copies_on_card"] == served_by
    for name, row in found["calls"].items():
        assert row["right"], name
        assert row["verified"] == row["crossed"], name
        assert (row["crossed"] > 0) == (name != "empty"), name
    events = Log(log).events
    for kind, counter in (("to_card", "to_device_bytes"), ("to_host", "to_host_bytes")):
        driver = sum(event.nbytes for event in events if event.kind == kind)
        ours = found["crossings"][counter] + (found["crossings"]["numbers_bytes"] if kind == "to_host" else 0)
        assert driver == ours, kind


@pytest.mark.parametrize(
    ("direction", "harm"),
    [
        pytest.param(way, harm, marks=() if (way, harm) in SAMPLE else pytest.mark.long)
        for way in ("SIMCARD_HARM", "SIMCARD_HARM_BACK")
        for harm in ("flip", "zero", "stale", "drop")
    ],
)
def test_harm_below_everything_is_found_and_sent_again(
    run_file: RunFile, card: dict[str, str], harm: str, direction: str
) -> None:
    more = {direction: f"{harm},0.05,16", "SIMCARD_DELAYS": "0,50,0,50", "SIMCARD_SEED": "11"}
    found = answer(run_file(CALLS, env={**card, **more}))
    assert all(row["right"] for row in found["calls"].values())
    assert found["mismatches"] > 0


@pytest.mark.parametrize("faults", ["", "kind=flip,stage=activations,rate=0.3,seed=5"])
def test_copies_between_two_cards_are_verified_on_both(run_file: RunFile, card: dict[str, str], faults: str) -> None:
    env = {**card, "SIMCARD_DEVICES": "2", "HF_ROCM_TUNE_SPLIT": "1", "HF_ROCM_TUNE_FAULT": faults}
    found = answer(run_file(CALLS.with_name("two_cards.py"), env=env))
    assert found["right"] and found["unverified"] == []
    assert found["between"] > 1_000_000 or faults
    assert (found["activations"]["mismatches"] > 0) == bool(faults)
    assert found["activations"]["mismatches"] == found["activations"]["recovered"]
    assert set(found["incidents"]) == ({"recovered"} if faults else set())


@pytest.mark.long
def test_the_function_for_copies_on_one_card_is_compiled_once_in_the_background(
    run_file: RunFile, card: dict[str, str], tmp_path: Path
) -> None:
    env, cache = {**card, "XDG_CACHE_HOME": str(tmp_path)}, tmp_path / "hf_rocm_tune" / "native"
    assert answer(run_file(CALLS, env=env))["copies_on_card"] == "python"
    deadline = time.monotonic() + 300
    while not list(cache.glob("copy-*.so")):
        assert time.monotonic() < deadline, [*cache.iterdir()]
        time.sleep(0.5)
    found = answer(run_file(CALLS, env=env))
    assert found["copies_on_card"] == "compiled" and all(row["right"] for row in found["calls"].values())
    (library,) = cache.glob("copy-*")
    library.write_bytes(b"not a library")
    assert answer(run_file(CALLS, env=env))["copies_on_card"] == "python"


def test_nothing_waits_while_a_stream_is_captured_and_what_crosses_then_is_named(
    run_file: RunFile, card: dict[str, str]
) -> None:
    found = answer(run_file(CALLS.with_name("card_captured.py"), env=card))
    assert found["arrived"]
    assert found["waits"] == 0 and found["verified_within"] == 0 and found["verified_after"] > 0
    rows = {row["direction"]: row for row in found["unverified"]}
    assert {name: (row["bytes"], row["reason"]) for name, row in rows.items()} == {
        "to_device": (256, "a stream was captured"),
        "to_host": (256, "a stream was captured"),
    }
    assert [row["tensor"] for row in found["rebaselined"]] == ["trained weights and optimizer state"]
