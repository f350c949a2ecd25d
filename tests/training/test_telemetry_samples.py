"""What is read of a card becomes figures and warnings: nothing is made up, one cause is said once."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from hf_rocm_tune.machine.sysfs import LiveTree
from hf_rocm_tune.training.telemetry import Sample, Telemetry, sample
from tests.training.telemetry_card import ADDRESS, CURRENT_BIT, FIT_BIT, HOTSPOT_BIT, POWER_BIT, VR_BIT, Card


@pytest.fixture
def card(tmp_path: Path) -> Card:
    return Card(tmp_path / "machine")


def test_what_cannot_be_read_is_left_out_and_never_zero(card: Card) -> None:
    for path in card.files:
        path.unlink()
    seen = sample(LiveTree(card.root), ADDRESS)
    assert (seen.metrics, seen.limits) == ({}, None)
    assert len(seen.missing) == 7
    for name, address in (("of no card", "0000:99:00.0"), ("of no address", "../../../etc"), ("of nothing", "")):
        assert sample(LiveTree(card.root), address).metrics == {}, name


def test_a_true_zero_is_kept(card: Card) -> None:
    card.say(busy=0, throttle=0)
    seen = sample(LiveTree(card.root), ADDRESS)
    assert seen.metrics["utilisation_percent"] == 0.0
    assert seen.limits == frozenset()


@pytest.mark.parametrize(
    ("bits", "limits"),
    [
        (POWER_BIT, {"power"}),
        (CURRENT_BIT | POWER_BIT, {"power", "current"}),
        (VR_BIT, {"temperature"}),
        (HOTSPOT_BIT, set()),  # set at idle too on this card
        (HOTSPOT_BIT | POWER_BIT, {"power"}),
        (1 << 47, {"temperature"}),
        (FIT_BIT, {"other"}),
        (1 << 63, {"other"}),
        (0, set()),
    ],
)
def test_the_throttle_bits_are_told_apart(card: Card, bits: int, limits: set[str]) -> None:
    card.say(throttle=bits)
    assert sample(LiveTree(card.root), ADDRESS).limits == limits


class Script:
    """Readings one after another, looked at by hand."""

    def __init__(self, *samples: Sample) -> None:
        self.lines: list[str] = []
        self._samples = iter(samples)
        self.telemetry = Telemetry(lambda: next(self._samples), source="a script", every_s=1.0, tell=self.lines.append)

    def play(self, count: int) -> None:
        for _ in range(count):
            self.telemetry.look()


def hot(*degrees: float) -> Iterator[Sample]:
    return (Sample(metrics={"hotspot_c": one}) for one in degrees)


def test_one_cause_is_said_once_and_its_episodes_are_counted() -> None:
    values = [104.9, 105.0, 104.0, 105.0, 95.0, 94.9, 106.0, 90.0, 110.0]
    script = Script(*hot(*values))
    script.play(len(values))
    assert len(script.lines) == 1
    assert script.telemetry.summary()["episodes"]["hotspot"] == 3
    assert script.telemetry.summary()["hotspot_c"]["max"] == 110.0


def test_the_power_limit_is_no_warning_of_heat() -> None:
    script = Script(*[Sample(metrics={}, limits=frozenset({"power"}))] * 5)
    script.play(5)
    (line,) = script.lines
    assert line.startswith("note: ") and "usual under full load" in line
    assert script.telemetry.summary()["held_down"] == {"temperature": 0.0, "power": 1.0, "other": 0.0}


def test_a_log_without_a_look_since_the_last_one_claims_nothing() -> None:
    script = Script(*hot(80, 90))
    script.play(1)
    assert script.telemetry.since_last_log() == {"gpu/hotspot_c": 80.0, "gpu/hotspot_max_c": 80.0}
    assert script.telemetry.since_last_log() == {}
    script.play(1)
    assert script.telemetry.since_last_log() == {"gpu/hotspot_c": 90.0, "gpu/hotspot_max_c": 90.0}


def test_an_alarm_survives_a_look_that_knows_nothing() -> None:
    held = Sample(metrics={}, limits=frozenset({"temperature"}))
    script = Script(held, Sample(metrics={}), held, Sample(metrics={}, limits=frozenset()), held)
    script.play(5)
    assert script.telemetry.summary()["episodes"]["temperature"] == 2
    assert len(script.lines) == 1


def test_a_peak_between_two_logs_is_in_the_log() -> None:
    script = Script(*hot(70, 103, 70, 70))
    script.play(4)
    assert script.telemetry.since_last_log() == {"gpu/hotspot_c": 78.25, "gpu/hotspot_max_c": 103.0}


def test_a_figure_that_comes_and_goes_is_averaged_over_where_it_was() -> None:
    script = Script(*hot(80), Sample(metrics={}, missing={"hotspot_c": "gone"}), *hot(90))
    script.play(3)
    found = script.telemetry.summary()
    assert found["hotspot_c"] == {"mean": 85.0, "max": 90.0}
    assert "missing" not in found and "held_down" not in found
