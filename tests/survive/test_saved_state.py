"""What was saved is read back and compared: every difference is named, and the reading needs no memory of its size."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from hf_rocm_tune.survive.saved_state import compare_model

MIB = 1 << 20
FILE = "model.safetensors"


class Weights(nn.Module):
    """Weights of several dtypes and odd sizes; the large one is read in several pieces."""

    def __init__(self, large_bytes: int = 9 * MIB) -> None:
        super().__init__()
        self.large = nn.Parameter(torch.randn(large_bytes // 4))
        self.short = nn.Parameter(torch.randn(5, 3).to(torch.bfloat16))
        self.register_buffer("count", torch.tensor(7))
        self.register_buffer("mask", torch.tensor([True, False, True]))
        self.register_buffer("empty", torch.zeros(0, 4))


@pytest.fixture
def saved(tmp_path: Path) -> tuple[Path, Weights]:
    """A directory with the file of a model, and the model."""
    torch.manual_seed(0)
    model = Weights()
    save_file(model.state_dict(), tmp_path / FILE)
    return tmp_path, model


def memory(kind: str) -> int:
    """Bytes of this process: "VmRSS" now, "VmHWM" the most since the last reset; shared memory counts."""
    (line,) = re.findall(rf"^{kind}:\s+(\d+) kB", Path("/proc/self/status").read_text(), re.MULTILINE)
    return int(line) << 10


def test_the_manifest_gets_the_digests_of_the_bytes_that_were_compared(saved: tuple[Path, Weights]) -> None:
    directory, model = saved
    found = compare_model(directory, model)[FILE]
    content = (directory / FILE).read_bytes()
    assert found.differing == []
    assert found.entry is not None
    assert (found.entry.bytes, found.entry.sha256) == (len(content), hashlib.sha256(content).hexdigest())
    assert found.digests.keys() == {f"{FILE}:{name}" for name in model.state_dict()}


def test_reading_back_needs_no_memory_of_the_files_size(tmp_path: Path) -> None:
    model = Weights(192 * MIB)
    save_file(model.state_dict(), tmp_path / FILE)
    compare_model(tmp_path, model)  # what is loaded and allocated once
    before = memory("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # resets VmHWM
    assert compare_model(tmp_path, model)[FILE].differing == []
    assert memory("VmHWM") - before < 64 * MIB


def _flip(content: bytearray, at: int) -> bytearray:
    content[at] ^= 4
    return content


def _header(content: bytearray, old: str, new: str) -> bytearray:
    assert len(old) == len(new) and old.encode() in content
    return content.replace(old.encode(), new.encode(), 1)


@pytest.mark.parametrize(
    ("harm", "named"),
    [
        (lambda content: _flip(content, len(content) - 1), None),
        (lambda content: _flip(content, len(content) - 5 * MIB), f"{FILE}:large"),
        (lambda content: content[:-3], FILE),
        (lambda content: _header(content, '"BF16","shape":[5,3]', '"F16","shape":[ 5,3]'), f"{FILE}:short"),
        (lambda content: _header(content, '"shape":[5,3]', '"shape":[3,5]'), f"{FILE}:short"),
        (lambda content: _header(content, '"count"', '"cOunt"'), f"{FILE}:cOunt"),
        (lambda content: _header(content, "data_offsets", "data_offsetS"), FILE),
        (lambda content: bytearray(b"\xff" * 8) + content[8:], FILE),
        (lambda content: content[:4], FILE),
    ],
    ids=["last bit", "a bit", "truncated", "dtype", "shape", "name", "header", "length", "four bytes"],
)
def test_what_differs_is_named(
    saved: tuple[Path, Weights], harm: Callable[[bytearray], bytearray], named: str | None
) -> None:
    directory, model = saved
    (directory / FILE).write_bytes(harm(bytearray((directory / FILE).read_bytes())))
    differing = compare_model(directory, model)[FILE].differing
    assert differing and (named is None or any(label.startswith(named) for label in differing))


def test_a_live_weight_that_is_not_in_the_file_is_named(saved: tuple[Path, Weights]) -> None:
    directory, model = saved
    names = json.loads((directory / FILE).read_bytes()[8:].split(b"}}")[0] + b"}}")
    assert set(names) == set(model.state_dict())
    state = model.state_dict()
    del state["short"]
    save_file(state, directory / FILE)
    assert compare_model(directory, model)[FILE].differing == [f"{FILE}:short"]
