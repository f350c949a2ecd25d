"""A base that changes on disk while its run is down, in places that the identity of a run does not read."""

from __future__ import annotations

import json
import random
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.e2e.conftest import ADAPTER, Job, MakeJob

_PAD = 33 << 20  # bytes before and behind the weights, more than the identity of a run reads at each end


@pytest.fixture(scope="module")
def job(make_job: MakeJob) -> Job:
    return make_job("base-changed", train=24, test=4, max_steps=4, learning_rate=1e-3, save_steps=2)


@pytest.fixture
def base(job: Job, tmp_path: Path) -> Path:
    """The job's model with tensors that nothing uses around its weights."""
    base = Path(shutil.copytree(job.settings["model_name_or_path"], tmp_path / "base"))
    tensors = load_file(base / "model.safetensors")
    pads = {name: torch.zeros(_PAD, dtype=torch.uint8) for name in ("a.pad", "z.pad")}
    dtype = next(iter(tensors.values())).dtype
    pads = {name: pad.view(dtype) for name, pad in pads.items()}  # the file's order is by dtype, then by name
    save_file({**tensors, **pads}, base / "model.safetensors", metadata={"format": "pt"})
    return base


def flip(file: Path, seed: int) -> None:
    """One bit of one weight."""
    with file.open("r+b") as stream:
        length = int.from_bytes(stream.read(8), "little")
        header = json.loads(stream.read(length))
        drawn = random.Random(seed)
        name = drawn.choice(sorted(name for name in header if name.endswith("proj.weight")))
        begin, end = header[name]["data_offsets"]
        at = 8 + length + drawn.randrange(begin, end)
        assert _PAD < at < file.stat().st_size - _PAD
        stream.seek(at)
        (byte,) = stream.read(1)
        stream.seek(at)
        stream.write(bytes([byte ^ 1 << drawn.randrange(8)]))


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.long) for seed in range(1, 10))])
@pytest.mark.parametrize(
    "more", [{}, pytest.param({"load_in_4bit": True, "bf16": False}, marks=pytest.mark.long)], ids=["plain", "4 bit"]
)
def test_a_bit_of_the_base_that_changed_while_the_run_was_down(
    job: Job, base: Path, tmp_path: Path, more: dict[str, object], seed: int
) -> None:
    settings = {"model_name_or_path": base, **more}
    job.done(tmp_path / "whole", **settings)
    assert job.run(tmp_path / "killed", crash="step=4,kind=kill", **settings).code < 0
    flip(base / "model.safetensors", seed)
    again = job.run(tmp_path / "killed", **settings)
    assert again.code == 2, again.stderr[-2000:]
    assert "model.safetensors of the model has other weights than when checkpoint-2 was saved" in again.error_lines[0]
    flip(base / "model.safetensors", seed)  # as it was
    job.done(tmp_path / "killed", **settings)
    assert (tmp_path / "killed" / ADAPTER).read_bytes() == (tmp_path / "whole" / ADAPTER).read_bytes()
