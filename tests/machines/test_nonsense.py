"""Nonsense in every file of a machine, one kind at a time: never a traceback, and no word that nonsense bears out."""

from __future__ import annotations

import base64
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.machine.trees import RAPHAEL, XTX, Built, Slot
from tests.machines.case import cpu_stack, pair, stack
from tests.machines.replay import replay

SECTIONS = ("files", "binary", "links", "names", "nodes")


def whole(**sections: Any) -> dict[str, Any]:
    """A machine with one of everything."""
    built = Built("invented: one of everything").card(slot=Slot(width=8)).card(XTX, slot=Slot(width=4, chipset=True))
    built.igpu(RAPHAEL).container("docker").memory_limit(1 << 34)
    return built.having(**{"software": stack(devices=pair()), "environ": {}, **sections}).recording()


def replaced(fill: Callable[[dict[str, Any], list[str]], None]) -> dict[str, Any]:
    """The machine in which ``fill`` puts something else at every path, to compute on with the processor."""
    recording = whole(software=cpu_stack())
    paths = [path for section in SECTIONS for path in recording[section]]
    for section in SECTIONS:
        recording[section] = {}
    fill(recording, paths)
    return recording


def texts(text: str) -> Callable[[dict[str, Any], list[str]], None]:
    return lambda recording, paths: recording["files"].update(dict.fromkeys(paths, text))


def binaries(content: bytes) -> Callable[[dict[str, Any], list[str]], None]:
    encoded = base64.b64encode(content).decode()
    return lambda recording, paths: recording["binary"].update(dict.fromkeys(paths, encoded))


def errors(name: str) -> Callable[[dict[str, Any], list[str]], None]:
    return lambda recording, paths: recording["errors"].update(dict.fromkeys(paths, name))


def directories(recording: dict[str, Any], paths: list[str]) -> None:
    recording["names"].update({path: ["nothing"] for path in paths})


def links(recording: dict[str, Any], paths: list[str]) -> None:
    recording["links"].update({path: f"../../{path}" for path in paths})


def nodes(recording: dict[str, Any], paths: list[str]) -> None:
    recording["nodes"].update({path: {"usable": None, "group": None} for path in paths})


KINDS: dict[str, Callable[[dict[str, Any], list[str]], None]] = {
    "empty": texts(""),
    "line breaks": texts("\n\n\n"),
    "a huge number": texts("9" * 400),
    "a negative number": texts("-1"),
    "escape sequences": texts("\x1b[2J\x1b[31mred\x07"),
    "half a surrogate": texts("\ud800"),
    "braces": texts("{address} {0} %s {"),
    "not available": texts("N/A"),
    "half a hexadecimal number": texts("0x"),
    "a digit of another script": texts("\u0661"),
    "minus zero": texts("-0"),
    "too many numbers": texts("0 " * 9),
    "much text": texts("all work and no play " * 500),
    "binary": binaries(bytes(range(256))),
    "zeros": binaries(b"\0" * 4096),
    "permission denied": errors("EACCES"),
    "input/output error": errors("EIO"),
    "a loop": errors("ELOOP"),
    "directories": directories,
    "links to themselves": links,
    "device nodes": nodes,
}


@pytest.mark.parametrize("kind", KINDS)
def test_nonsense_everywhere_is_not_known_and_no_traceback(kind: str, tmp_path: Path) -> None:
    done = replay(replaced(KINDS[kind]), tmp_path / "machine.json")
    assert done.stderr == ""
    told = {one["row"] for one in done.findings}
    assert "check_crashed" not in told
    # Nothing about the machine may fail: nothing about it is known.
    assert "fail" not in {one["status"] for one in done.findings}
    assert any(one["status"] == "unknown" for one in done.findings)
    assert not told & {"link_full", "bar_full", "aer_clean", "permissions_ok", "driver_ok", "sensors_ok", "kfd_missing"}
    for text in done.text.values():
        assert all(letter.isprintable() or letter == "\n" for letter in text)


@pytest.mark.parametrize("seed", [0, 1, 2, *(pytest.param(seed, marks=pytest.mark.long) for seed in range(3, 12))])
@pytest.mark.parametrize("share", [0.1, 0.5])
def test_a_machine_of_which_a_part_is_missing_or_spoilt_is_still_told_of(
    share: float, seed: int, tmp_path: Path
) -> None:
    chance = random.Random(seed)
    recording = whole(environ={"HIP_VISIBLE_DEVICES": "0,x", "PYTORCH_ALLOC_CONF": "expandable_segments:True,,:"})
    for section in SECTIONS:
        for path in list(recording[section]):
            if chance.random() > share:
                continue
            del recording[section][path]
            fate = chance.randrange(3)
            if fate == 1:
                recording["errors"][path] = chance.choice(("EACCES", "EIO", "ENODEV", "EINVAL"))
            elif fate == 2:
                recording["files"][path] = chance.choice(
                    ("", "x" * 5000, "0x", "\u0661", "a b\n" * 99, "1e9", "-0", "N/A")
                )
    done = replay(recording, tmp_path / "machine.json")
    assert done.stderr == ""
    assert "check_crashed" not in {one["row"] for one in done.findings}
    worst = max({"fail": 2, "warn": 1}.get(one["status"], 0) for one in done.findings)
    assert set(done.codes.values()) == {worst}
    for text in done.text.values():
        assert all(letter.isprintable() or letter == "\n" for letter in text)


@pytest.mark.parametrize(
    "software",
    [
        stack(torch="", hip="", system_rocm="", allocator="\x1b[2J"),
        stack(torch="not a version", hip="x.y", packages=dict.fromkeys(stack()["packages"], "?")),
        stack(archs="", libraries=(), devices=()),
        stack(hip="9" * 300, libraries=("libbitsandbytes_rocm.so", "libbitsandbytes_rocm7x.so", "\ud800")),
        stack() | {"devices": {"reason": "Traceback (most recent call last):\n  {0}\n"}, "arch_list": {"reason": "x"}},
    ],
)
def test_nonsense_in_what_is_installed_is_no_traceback(software: dict[str, Any], tmp_path: Path) -> None:
    recording = Built("invented").card().having(software=software).recording()
    done = replay(recording, tmp_path / "machine.json")
    assert done.stderr == ""
    assert "check_crashed" not in {one["row"] for one in done.findings}
    for text in done.text.values():
        assert all(letter.isprintable() or letter == "\n" for letter in text)
