"""Nonsense in every file of a machine, one kind at a time: never a traceback, and no word that nonsense bears out."""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from hf_rocm_tune.doctor.findings import Evidence
from hf_rocm_tune.machine.software import Software
from hf_rocm_tune.machine.survey import survey
from tests.machine.trees import RAPHAEL, XTX, Built, Slot
from tests.machines.case import case, cpu_stack, stack
from tests.machines.replay import Replay, replay


def whole() -> Built:
    """A machine with one of everything."""
    built = Built("invented: one of everything").card(slot=Slot(width=8)).card(XTX, slot=Slot(width=4, chipset=True))
    return built.igpu(RAPHAEL).container().memory_limit(1 << 34)


def spoilt(built: Built, root: Path, spoil: Callable[[Path], object], chosen: Callable[[Path], bool]) -> Evidence:
    """The machine, of which ``spoil`` has done something to the chosen files before they are read."""
    process = built.write(root)
    for file in [Path(top) / name for top, _, names in os.walk(root) for name in names]:
        if chosen(file) and not file.is_symlink():
            spoil(file)
    return Evidence(machine=replace(survey(root), **process), software=cpu_stack(), environ={}, root=root)


def directory(file: Path) -> None:
    file.unlink()
    file.mkdir()


def loop(file: Path) -> None:
    file.unlink()
    file.symlink_to(file)


def texts(text: str) -> Callable[[Path], object]:
    return lambda file: file.write_bytes(text.encode("utf-8", "surrogatepass"))


KINDS: dict[str, Callable[[Path], object]] = {
    "empty": texts(""),
    "a huge number": texts("9" * 400),
    "a negative number": texts("-1"),
    "escape sequences": texts("\x1b[2J\x1b[31mred\x07"),
    "braces": texts("{address} {0} %s {"),
    "a digit of another script": texts("\u0661"),
    "binary": lambda file: file.write_bytes(bytes(range(256))),
    "missing": Path.unlink,
    "directories": directory,
    "links to themselves": loop,
}


def sound(done: Replay) -> set[str]:
    assert all(": measuring " in line for line in done.stderr.splitlines()), done.stderr
    for text in done.text.values():
        assert all(letter.isprintable() or letter == "\n" for letter in text)
    told = {one["row"] for one in done.findings}
    assert "check_crashed" not in told
    return told


@pytest.mark.parametrize("kind", KINDS)
def test_nonsense_everywhere_is_not_known_and_no_traceback(kind: str, tmp_path: Path) -> None:
    done = replay(spoilt(whole(), tmp_path, KINDS[kind], lambda file: True))
    # Nothing about the machine may fail: nothing about it is known.
    assert "fail" not in {one["status"] for one in done.findings}
    assert any(one["status"] == "unknown" for one in done.findings)
    assert not sound(done) & {"link_ok", "bar_full", "aer_clean", "driver_ok", "sensors_ok", "kfd_missing"}


@pytest.mark.parametrize("share", [0.1, 0.5])
def test_a_machine_of_which_a_part_is_missing_or_spoilt_is_still_told_of(share: float, tmp_path: Path) -> None:
    chance = random.Random(0)
    kinds = list(KINDS.values())
    evidence = spoilt(whole(), tmp_path, lambda file: chance.choice(kinds)(file), lambda file: chance.random() < share)
    done = replay(evidence)
    sound(done)
    worst = max({"fail": 2, "warn": 1}.get(one["status"], 0) for one in done.findings)
    assert set(done.codes.values()) == {worst}


@pytest.mark.parametrize(
    "software",
    [
        stack(torch="", hip=""),
        stack(torch="not a version", hip="x.y", packages=dict.fromkeys(stack().packages, "?"), archs="", devices=()),
        stack(hip="9" * 300, libraries=("libbitsandbytes_rocm7x.so", "\ud800"), devices="{0}\n", arch_list=None),
        Software(),
    ],
)
def test_nonsense_in_what_is_installed_is_no_traceback(software: Software, tmp_path: Path) -> None:
    environ = {"HIP_VISIBLE_DEVICES": "0,x", "PYTORCH_ALLOC_CONF": "expandable_segments:True,,:"}
    sound(replay(case(whole(), software=software, environ=environ).evidence(tmp_path)))
