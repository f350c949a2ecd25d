"""Telemetry: what the card says over a run stands beside the loss, nothing is made up, and no run breaks over it."""

from __future__ import annotations

import struct
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import TrainerCallback

from hf_rocm_tune.machine.sysfs import Files
from hf_rocm_tune.train import telemetry
from hf_rocm_tune.train.telemetry import SensorSample, Telemetry, of_device, sample

ADDRESS = "0000:03:00.0"
POWER_BIT, CURRENT_BIT, VR_BIT, HOTSPOT_BIT, FIT_BIT = 1 << 0, 1 << 16, 1 << 38, 1 << 36, 1 << 57


class Card:
    """The files that amdgpu shows of one card, rewritten at will."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.device = root / "sys/bus/pci/devices" / ADDRESS
        self.hwmon = self.device / "hwmon/hwmon3"
        self.hwmon.mkdir(parents=True)
        for number, label in ((1, "edge"), (2, "junction"), (3, "mem")):
            (self.hwmon / f"temp{number}_label").write_text(f"{label}\n")
        (self.hwmon / "name").write_text("amdgpu\n")
        (self.hwmon / "power1_cap").write_text("315000000\n")
        (self.device / "mem_info_vram_total").write_text(f"{20 << 30}\n")
        self.say()

    def say(
        self,
        *,
        edge: int = 60,
        hotspot: int = 80,
        memory: int = 70,
        watts: int = 300,
        busy: int = 99,
        throttle: int = 0,
    ) -> None:
        """What all files say from now on."""
        for number, degrees in ((1, edge), (2, hotspot), (3, memory)):
            (self.hwmon / f"temp{number}_input").write_text(f"{degrees * 1000}\n")
        (self.hwmon / "power1_average").write_text(f"{watts * 1_000_000}\n")
        (self.device / "gpu_busy_percent").write_text(f"{busy}\n")
        (self.device / "mem_info_vram_used").write_text(f"{5 << 30}\n")
        (self.device / "gpu_metrics").write_bytes(gpu_metrics(throttle))

    @property
    def files(self) -> list[Path]:
        return [path for path in self.device.rglob("*") if path.is_file()]


def gpu_metrics(throttle: int) -> bytes:
    """gpu_metrics_v1_3 of the kernel's kgd_pp_interface.h, with all but the independent throttle status left empty."""
    return (
        struct.pack("<HBB", 120, 1, 3)
        + b"\xff" * 64
        + struct.pack("<I", 0)
        + b"\xff" * 40
        + struct.pack("<Q", throttle)
    )


@pytest.fixture
def card(tmp_path: Path) -> Card:
    return Card(tmp_path / "machine")


class _Steps(TrainerCallback):
    """Changes the machine at the beginning of each step, and keeps what a logger would get.

    Args:
        watched: has to have looked at a change twice before the step goes on: the first look may be half of each.
        tell: is given the number of the step.
        after: called at the end of each step.
    """

    def __init__(
        self, watched: Telemetry, tell: Callable[[int], None], after: Callable[[], None] = lambda: None
    ) -> None:
        self.watched = watched
        self.tell = tell
        self.after = after
        self.logs: list[dict[str, float]] = []

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.tell(state.global_step + 1)
        self._looks(2)
        self.watched.since_last_log()  # what was seen before the change
        self._looks(2)

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.after()
        self._looks(2)

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
        self.logs.append(dict(logs))

    @property
    def training(self) -> list[dict[str, float]]:
        return [logs for logs in self.logs if "loss" in logs]

    def _looks(self, more: int) -> None:
        wanted = self.watched.summary()["looks"] + more
        deadline = time.monotonic() + 20
        while self.watched.summary()["looks"] < wanted and time.monotonic() < deadline:
            time.sleep(0.001)


Watch = Callable[[], tuple[Telemetry, list[str]]]


@pytest.fixture
def watch(card: Card) -> Iterator[Watch]:
    """Telemetry of ``card`` that looks all the time, and what it says."""
    made: list[Telemetry] = []

    def build() -> tuple[Telemetry, list[str]]:
        lines: list[str] = []
        read = lambda: sample(Files(card.root), ADDRESS)  # noqa: E731
        made.append(Telemetry(read, source=f"amdgpu, {ADDRESS}", every_s=0.001, tell=lines.append))
        return made[-1], lines

    yield build
    for one in made:
        one.stop()


def train(saver: Any, watched: Telemetry, steps: _Steps, **options: Any) -> Any:
    trainer = saver(save_strategy="no", ours={"telemetry": watched}, **options)
    trainer.add_callback(steps)
    trainer.train()
    return trainer


def test_what_the_card_says_at_each_step_stands_beside_its_loss(card: Card, saver: Any, watch: Watch) -> None:
    hot = {1: 80, 2: 104, 3: 106, 4: 100, 5: 107, 6: 90}
    watched, lines = watch()
    steps = _Steps(watched, lambda step: card.say(hotspot=hot[step], watts=300 + step, throttle=VR_BIT * (step == 3)))
    trainer = train(saver, watched, steps, max_steps=6)
    logged = steps.training
    assert [row["gpu/hotspot_c"] for row in logged] == list(hot.values())
    assert [row["gpu/power_w"] for row in logged] == [301, 302, 303, 304, 305, 306]
    assert [row["gpu/held_down_temperature"] for row in logged] == [0, 0, 1, 0, 0, 0]
    assert {row["gpu/held_down_power"] for row in logged} == {0.0}
    assert {row["gpu/utilisation_percent"] for row in logged} == {99.0}
    assert {row["gpu/vram_used_gib"] for row in logged} == {5.0}
    history = [row for row in trainer.state.log_history if "loss" in row]
    assert [row["gpu/hotspot_c"] for row in history] == list(hot.values())
    found = watched.summary()
    assert found["hotspot_c"]["max"] == 107.0 and 80 <= found["hotspot_c"]["mean"] <= 107
    assert 0 < found["held_down"]["temperature"] < 1
    assert found["looks"] >= 24
    assert len(lines) == 2 and all(line.startswith("warning: ") for line in lines), "each cause is said once"
    assert any("106" in line and "lower confidence" in line and ADDRESS in line for line in lines)
    assert any("because of its temperature" in line for line in lines)


def test_the_evaluation_log_says_nothing_of_the_card(saver: Any, watch: Watch) -> None:
    watched, _ = watch()
    steps = _Steps(watched, lambda step: None)
    train(saver, watched, steps, max_steps=2, eval_strategy="steps", eval_steps=1)
    silent = [logs for logs in steps.logs if "loss" not in logs]
    assert any("eval_loss" in logs for logs in silent)
    assert not [name for logs in silent for name in logs if name.startswith("gpu/")]


def test_the_thread_ends_with_the_training_and_begins_again_with_the_next(saver: Any, watch: Watch) -> None:
    def alive() -> int:
        return sum(thread.name == "telemetry" for thread in threading.enumerate())

    watched, _ = watch()
    for steps in (1, 2):
        during: list[int] = []
        callback = _Steps(watched, lambda step, seen=during: seen.append(alive()))
        train(saver, watched, callback, max_steps=steps)
        assert set(during) == {1}
        assert alive() == 0
    seen = watched.summary()["looks"]
    watched.start()
    watched.start()
    assert alive() == 1
    watched.stop()
    watched.stop()
    assert alive() == 0 and watched.summary()["looks"] >= seen


def test_a_read_that_hangs_holds_no_training_up(saver: Any) -> None:
    released = threading.Event()

    def read() -> SensorSample:
        released.wait(60)
        return SensorSample(metrics={})

    watched = Telemetry(read, source="a driver that hangs", every_s=0.001, tell=lambda line: None)
    trainer = saver(save_strategy="no", max_steps=3, ours={"telemetry": watched})
    trainer.train()
    assert watched.summary()["looks"] == 0
    assert len([row for row in trainer.state.log_history if "loss" in row]) == 3
    released.set()


def test_a_card_is_found_by_the_address_of_its_device(card: Card, monkeypatch: pytest.MonkeyPatch) -> None:
    # Only the probe is replaced: a ROCm torch that names the card's address.
    monkeypatch.setattr(telemetry, "card_of", lambda device: (ADDRESS, ""))
    watched = of_device(torch.device("cpu"), every_s=0.0, tell=lambda line: None, files=Files(card.root))
    watched.look()
    found = watched.summary()
    assert found["source"] == f"amdgpu, {ADDRESS}"
    assert found["edge_c"] == {"mean": 60.0, "max": 60.0}
    assert not [name for name in found if name.startswith("torch_")]


@pytest.mark.gpu
def test_on_an_accelerator_torch_s_own_memory_is_told() -> None:
    device = torch.device("cuda:0")
    held = torch.empty(64 << 20, dtype=torch.uint8, device=device)
    watched = of_device(device, every_s=0.0, tell=lambda line: None)
    watched.look()
    logged = watched.since_last_log()
    assert logged["gpu/torch_allocated_gib"] >= held.numel() / 2**30
    found = watched.summary()
    assert found["torch_peak_allocated_gib"] >= logged["gpu/torch_allocated_gib"]
    if torch.version.hip is None:
        assert found["looks"] == 0
        assert not [name for name in logged if not name.startswith("gpu/torch_")]


# ---- what is read becomes figures and warnings ------------------------------------------------------------------


def test_what_cannot_be_read_is_left_out_and_never_zero(card: Card) -> None:
    for path in card.files:
        path.unlink()
    seen = sample(Files(card.root), ADDRESS)
    assert (seen.metrics, seen.limits) == ({}, None)
    assert len(seen.missing) == 7
    for name, address in (("of no card", "0000:99:00.0"), ("of no address", "../../../etc"), ("of nothing", "")):
        assert sample(Files(card.root), address).metrics == {}, name


def test_the_throttle_bits_are_told_apart(card: Card) -> None:
    found = {"power": {"power"}, "both": {"power", "current"}, "heat": {"temperature"}, "idle": set(), "fit": {"other"}}
    bits = (POWER_BIT, CURRENT_BIT | POWER_BIT, VR_BIT, HOTSPOT_BIT, FIT_BIT)  # the hotspot's is set at idle too
    for (name, limits), each in zip(found.items(), bits, strict=True):
        card.say(throttle=each)
        assert sample(Files(card.root), ADDRESS).limits == limits, name


class Script:
    """Readings one after another, looked at by hand."""

    def __init__(self, *samples: SensorSample) -> None:
        self.lines: list[str] = []
        self._samples = iter(samples)
        self.telemetry = Telemetry(lambda: next(self._samples), source="a script", every_s=1.0, tell=self.lines.append)

    def play(self, count: int) -> None:
        for _ in range(count):
            self.telemetry.look()


def hot(*degrees: float) -> Iterator[SensorSample]:
    return (SensorSample(metrics={"hotspot_c": one}) for one in degrees)


def test_the_power_limit_is_no_warning_of_heat() -> None:
    script = Script(*[SensorSample(metrics={}, limits=frozenset({"power"}))] * 5)
    script.play(5)
    (line,) = script.lines
    assert line.startswith("note: ") and "usual under full load" in line
    assert script.telemetry.summary()["held_down"] == {"temperature": 0.0, "power": 1.0, "other": 0.0}


def test_a_figure_that_comes_and_goes_is_averaged_over_where_it_was() -> None:
    script = Script(*hot(80), SensorSample(metrics={}, missing={"hotspot_c": "gone"}), *hot(90))
    script.play(3)
    found = script.telemetry.summary()
    assert found["hotspot_c"] == {"mean": 85.0, "max": 90.0}
    assert "missing" not in found and "held_down" not in found
