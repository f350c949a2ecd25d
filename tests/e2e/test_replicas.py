"""Ranks that drift apart during a real run of two processes: all stop, naming what differs.

One rank's update comes out wrong by one bit, which nothing on that rank can tell. From then on its steps differ from
the other rank's, although the averaged gradients are the same.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from tests import tiny
from tests.e2e.command import CommandServer, Result
from tests.e2e.conftest import flags
from tests.e2e.test_gradients import ADAPTER, Job


@pytest.fixture(scope="module")
def job(server: CommandServer, model_of: Callable[[str], Path], scratch: Path) -> Job:
    """An undisturbed run of four steps."""
    root = scratch / "replicas"
    argv = flags(
        model_name_or_path=model_of("llama3"),
        dataset_name=tiny.write_dataset_dir(root / "data", train=24, test=4),
        max_steps=4,
        per_device_train_batch_size=1,
        max_length=64,
        learning_rate=0.01,
        save_strategy="no",
        eval_strategy="no",
        disable_tqdm=True,
    )
    made = Job(server=server, argv=argv, clean=root / "clean")
    results = made.run(made.clean)
    assert [result.code for result in results] == [0, 0], [result.stderr[-3000:] for result in results]
    return made


def disturbed(job: Job, output: Path, what: str, **changed: object) -> list[Result]:
    """Trains again; the third update of rank 1 comes out wrong."""
    harm = {"MEMORY_ATTACK": json.dumps({"kind": "wrong update", "what": what, "step": 3})}
    return job.run(output, environ=({}, harm), **changed)


def error_line(results: list[Result]) -> str:
    """The one line of both ranks together."""
    assert [result.code for result in results] == [3, 3], [result.stderr[-3000:] for result in results]
    said = [line for result in results for line in result.stderr.splitlines()]
    lines = [line for line in said if re.match(r"hf-rocm-tune: (\[rank \d+\] )?error: ", line)]
    assert len(lines) == 1 and not any("Traceback" in line for line in said)
    return lines[0]


def test_an_adapter_that_differs_is_named(job: Job, tmp_path: Path) -> None:
    line = error_line(disturbed(job, tmp_path / "out", "weight", sentinel_every=1))
    assert "at step 3: ranks differ" in line
    assert re.search(r"lora_[AB]\.default\.weight \(ranks \[1\]\)", line) and "exp_avg" not in line
    assert not (tmp_path / "out" / ADAPTER).exists()
