"""What stepping down keeps beside the batches: random state, what a run has learned, and the faults of its tests."""

from __future__ import annotations

import json
import os
import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy
import pytest
import torch

from hf_rocm_tune.errors import UsageError
from hf_rocm_tune.training.faults import STEP_VARIABLE as VARIABLE
from hf_rocm_tune.training.faults import StepFaultSpec
from hf_rocm_tune.training.oom import STATE_FILE, RandomState, read_state


def test_a_random_state_is_put_back_whole() -> None:
    def draw() -> tuple[Any, ...]:
        return random.random(), numpy.random.rand(3).tolist(), torch.rand(3).tolist()

    before = RandomState(torch.device("cpu"))
    first = draw()
    assert draw() != first
    before.restore()
    assert draw() == first


def test_what_a_run_has_learned_is_not_another_run_s(tmp_path: Path) -> None:
    def read(run_id: str, batch_size: int, *, resumed: bool) -> int:
        args = SimpleNamespace(output_dir=str(tmp_path), per_device_train_batch_size=batch_size)
        return read_state(SimpleNamespace(run_id=run_id, args=args), resumed=resumed)[0]

    body = {"run_id": "run-1", "batch_size": 4}
    (tmp_path / STATE_FILE).write_text(json.dumps({**body, "divisor": 2}))
    assert read("run-1", 4, resumed=True) == 2
    assert read("run-1", 4, resumed=False) == 2  # died before its first checkpoint
    assert read("run-2", 4, resumed=True) == read("run-1", 2, resumed=True) == 1
    (tmp_path / STATE_FILE).write_text(json.dumps({**body, "run_id": "", "divisor": 8}))
    assert read("", 4, resumed=True) == 8  # a trainer of the user's own
    assert read("", 4, resumed=False) == 1
    for nonsense in ("", "{", "[]", json.dumps(body), json.dumps({**body, "divisor": "many"}), "\udcff"):
        (tmp_path / STATE_FILE).write_text(nonsense, errors="surrogateescape")
        assert read("run-1", 4, resumed=True) == 1


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("kind=ooom", "one of oom nan"),
        ("rate=1", "'kind' is missing"),
        ("kind=oom,rate=2", "from 0 to 1"),
        ("kind=oom,rows=-1", "from 0 on"),
        ("kind=oom,rows=two", "expected a number"),
        ("kind=oom,where=left", "forward backward"),
        ("kind=oom,first=0", "from 1 on"),
        ("kind=oom,count=0", "from 1 on"),
        ("kind=oom,kind=nan", "given twice"),
        ("kind=oom;rate=1", "one of oom nan"),
        ("oom", "valid keys"),
    ],
)
def test_a_fault_that_is_not_understood_is_refused(text: str, named: str) -> None:
    with pytest.raises(UsageError, match=VARIABLE) as caught:
        StepFaultSpec.parse(text)
    assert named in str(caught.value)


def test_no_fault_is_asked_for_by_an_empty_variable() -> None:
    assert StepFaultSpec.from_environment({}) is StepFaultSpec.from_environment({VARIABLE: " "}) is None
    assert os.environ.get(VARIABLE, "") == ""
