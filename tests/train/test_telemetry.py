"""Telemetry: what the card says over a run stands beside the loss, nothing is made up, and no run breaks over it.

A whole machine behind it: `tests/e2e/test_findings.py`.
"""

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
from hf_rocm_tune.train.telemetry import Reading, Telemetry, of_device, sample

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
            (self.hwmon / f"temp{number}_input").write_text("60000\n")
        (self.hwmon / "name").write_text("amdgpu\n")
        (self.device / "gpu_busy_percent").write_text("99\n")
        (self.device / "mem_info_vram_used").write_text(f"{5 << 30}\n")
        self.say()

    def say(self, *, hotspot: int = 80, watts: int = 300, throttle: int = 0) -> None:
        """What these files say from now on."""
        (self.hwmon / "temp2_input").write_text(f"{hotspot * 1000}\n")
        (self.hwmon / "power1_average").write_text(f"{watts * 1_000_000}\n")
        # gpu_metrics_v1_3 of the kernel's kgd_pp_interface.h, with all but the independent throttle status left empty
        head = struct.pack("<HBB", 120, 1, 3) + b"\xff" * 64 + struct.pack("<I", 0) + b"\xff" * 40
        (self.device / "gpu_metrics").write_bytes(head + struct.pack("<Q", throttle))

    def read(self) -> Reading:
        return sample(Files(self.root), ADDRESS)


@pytest.fixture
def card(tmp_path: Path) -> Card:
    return Card(tmp_path / "machine")


class _Steps(TrainerCallback):
    """Changes the machine at the beginning of each step, and keeps what a logger would get."""

    def __init__(self, watched: Telemetry, tell: Callable[[int], object]) -> None:
        self.watched, self.tell = watched, tell
        self.logs: list[dict[str, float]] = []

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.tell(state.global_step + 1)
        self._looks(2)  # the first look may be half of each
        self.watched.since_last_log()  # what was seen before the change
        self._looks(2)

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
        self.logs.append(dict(logs))

    def _looks(self, more: int) -> None:
        wanted = self.watched.summary()["looks"] + more
        deadline = time.monotonic() + 20
        while self.watched.summary()["looks"] < wanted and time.monotonic() < deadline:
            time.sleep(0.001)


def threads() -> int:
    return sum(thread.name == "telemetry" for thread in threading.enumerate())


def train(saver: Any, watched: Telemetry, steps: _Steps, **options: Any) -> Any:
    trainer = saver(save_strategy="no", ours={"telemetry": watched}, **options)
    trainer.add_callback(steps)
    trainer.train()
    return trainer


@pytest.fixture
def watched(card: Card) -> Iterator[tuple[Telemetry, list[str]]]:
    """Telemetry of ``card`` that looks all the time, and what it says."""
    lines: list[str] = []
    made = Telemetry(card.read, source=f"amdgpu, {ADDRESS}", every_s=0.001, say=lines.append)
    yield made, lines
    made.stop()


def test_what_the_card_says_at_each_step_stands_beside_its_loss(
    card: Card, saver: Any, watched: tuple[Telemetry, list[str]]
) -> None:
    hot = {1: 80, 2: 104, 3: 106, 4: 100, 5: 107, 6: 90}
    made, lines = watched
    steps = _Steps(made, lambda step: card.say(hotspot=hot[step], watts=300 + step, throttle=VR_BIT * (step == 3)))
    trainer = train(saver, made, steps, max_steps=6, eval_strategy="steps", eval_steps=3)
    logged = [row for row in steps.logs if "loss" in row]
    assert [row["gpu/hotspot_c"] for row in logged] == list(hot.values())
    assert [row["gpu/power_w"] for row in logged] == [301, 302, 303, 304, 305, 306]
    assert [row["gpu/held_down_temperature"] for row in logged] == [0, 0, 1, 0, 0, 0]
    assert {row["gpu/held_down_power"] for row in logged} == {0.0}
    assert {(row["gpu/utilisation_percent"], row["gpu/vram_used_gib"]) for row in logged} == {(99.0, 5.0)}
    history = [row for row in trainer.state.log_history if "loss" in row]
    assert [row["gpu/hotspot_c"] for row in history] == list(hot.values())
    silent = [row for row in steps.logs if "loss" not in row]
    assert any("eval_loss" in row for row in silent)
    assert not [name for row in silent for name in row if name.startswith("gpu/")]
    found = made.summary()
    assert found["hotspot_c"]["max"] == 107.0 and 80 <= found["hotspot_c"]["mean"] <= 107
    assert 0 < found["held_down_temperature"]["mean"] < 1
    assert found["looks"] >= 24
    assert len(lines) == 2 and all(line.startswith("warning: ") for line in lines), "each cause is said once"
    assert any("106" in line and "lower confidence" in line and ADDRESS in line for line in lines)
    assert any("because of its temperature" in line for line in lines)


def test_the_thread_ends_with_the_training_and_begins_again_with_the_next(
    saver: Any, watched: tuple[Telemetry, list[str]]
) -> None:
    for steps in (1, 2):
        during: list[int] = []
        train(saver, watched[0], _Steps(watched[0], lambda _, seen=during: seen.append(threads())), max_steps=steps)
        assert set(during) == {1} and threads() == 0


def test_a_read_that_hangs_holds_no_training_up(saver: Any) -> None:
    released = threading.Event()
    watched = Telemetry(lambda: (released.wait(60) and {}, {}), source="it hangs", every_s=0.001, say=print)
    trainer = saver(save_strategy="no", max_steps=3, ours={"telemetry": watched})
    trainer.train()
    assert watched.summary()["looks"] == 0
    assert len([row for row in trainer.state.log_history if "loss" in row]) == 3
    released.set()


@pytest.mark.gpu
def test_on_an_accelerator_torch_s_own_memory_is_told() -> None:
    device = torch.device("cuda:0")
    held = torch.empty(64 << 20, dtype=torch.uint8, device=device)
    watched = of_device(device, every_s=0.0, say=lambda line: None)
    watched.sample()
    found = watched.summary()
    assert found["torch_peak_allocated_gib"] >= held.numel() / 2**30
    assert torch.version.hip is not None or found["looks"] == 0


# ---- what is read becomes figures and warnings ------------------------------------------------------------------


def test_what_cannot_be_read_is_left_out_and_never_zero(card: Card) -> None:
    for path in card.device.rglob("*"):
        if path.is_file():
            path.unlink()
    metrics, missing = card.read()
    assert metrics == {} and len(missing) == 7
    for name, address in (("of no card", "0000:99:00.0"), ("of no address", "../../../etc"), ("of nothing", "")):
        assert sample(Files(card.root), address)[0] == {}, name


def test_the_throttle_bits_are_told_apart(card: Card) -> None:
    power = {POWER_BIT: 1, CURRENT_BIT | POWER_BIT: 1, VR_BIT: 0, HOTSPOT_BIT: 0, FIT_BIT: 0}
    for bits, expected in power.items():  # the hotspot's is set at idle too
        card.say(throttle=bits)
        metrics, _ = card.read()
        assert metrics["held_down_power"] == expected and metrics["held_down_temperature"] == (bits == VR_BIT)


def looked(*readings: Reading) -> tuple[Telemetry, list[str]]:
    lines: list[str] = []
    left = iter(readings)
    made = Telemetry(lambda: next(left), source="a script", every_s=1.0, say=lines.append)
    for _ in readings:
        made.sample()
    return made, lines


def test_the_power_limit_is_no_warning_of_heat() -> None:
    _, lines = looked(*[({"held_down_power": 1.0, "held_down_temperature": 0.0}, {})] * 5)
    assert lines == []


def test_a_figure_that_comes_and_goes_is_averaged_over_where_it_was() -> None:
    made, _ = looked(({"hotspot_c": 80.0}, {}), ({}, {"hotspot_c": "gone"}), ({"hotspot_c": 90.0}, {}))
    found = made.summary()
    assert found["hotspot_c"] == {"mean": 85.0, "max": 90.0} and "missing" not in found
