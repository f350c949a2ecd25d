"""Real commands on a simulated card that has little memory left: its allocator really refuses.

What does not fit is split and ends where the run ends that has room; whoever says that there is no memory is
understood; libraries take theirs before the weights; and what the planner predicts is what the allocator counts.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests import simcard
from tests.e2e.command import CommandServer, Result
from tests.e2e.conftest import Job, MakeJob, done, report_of
from tests.e2e.test_oom import assert_same_end, shortages_of

CAPACITY = 20 << 30
BATCHES: dict[str, Any] = {"per_device_train_batch_size": 4, "max_length": 64}


@pytest.fixture(scope="module")
def job(card_server: CommandServer, make_job: MakeJob) -> Job:
    """In float32: what bfloat16 rounds differs with the number of rows."""
    plain = {"attn_implementation": "eager", "dtype": "float32", "bf16": False, "optim": "sgd", "learning_rate": 1.0}
    steps = {"max_steps": 5, "save_steps": 2, "eval_strategy": "no", "doctor": "off", "lora_dropout": 0.0}
    return make_job("oom_card", server=card_server, train=64, **plain, **steps, **BATCHES)


def run(job: Job, output: Path, *, room: int = CAPACITY, refusal: str = "torch", library: int = 0) -> Result:
    """A run with so many bytes that nobody else holds."""
    environ = {"SIMCARD_OCCUPIED": str(CAPACITY - room), "SIMCARD_REFUSAL": refusal, "SIMCARD_LIBRARY": str(library)}
    return job.run(output, env=environ)


@pytest.fixture(scope="module")
def plenty(job: Job) -> Path:
    """The output of a run that has room for everything."""
    output = job.root / "plenty"
    done(run(job, output))
    assert report_of(output)["memory"]["shortages"] == 0
    return output


def peak(output: Path) -> int:
    """Bytes that torch's allocator held at the most."""
    return int(report_of(output)["telemetry"][0]["torch_peak_reserved_gib"] * 2**30)


LONG = [pytest.param(each, marks=pytest.mark.long) for each in ("accelerator", "driver", "blas")]


@pytest.mark.parametrize("refusal", ["torch", *LONG])
def test_what_does_not_fit_is_split_and_ends_the_same(job: Job, plenty: Path, tmp_path: Path, refusal: str) -> None:
    library = 16 << 20 if refusal == "torch" else 0  # taken by each library's first operation
    done(run(job, tmp_path / "out", room=peak(plenty) * 2 // 5 + 2 * library, refusal=refusal, library=library))
    assert_same_end(tmp_path / "out", plenty)
    found = shortages_of(tmp_path / "out")
    assert found and {row["outcome"] for row in found} == {"recovered"}
    memory = report_of(tmp_path / "out")["memory"]
    assert memory["micro_batch_divisor"] > 1
    # Before the weights; backward has a thread, and a handle, of its own.
    assert memory["libraries_bytes"] == 2 * library
    assert refusal == "blas" or all("BLAS" not in row["said"] for row in found)
    assert [row["divisor"] for row in found[:2]] == [1, 2][: len(found[:2])]


@pytest.mark.parametrize(
    ("room", "code", "said"), [(1 << 20, 5, "before a weight is loaded"), (CAPACITY, 4, "although")]
)
def test_a_card_that_cannot_multiply_is_refused_before_the_model_is_loaded(
    job: Job, tmp_path: Path, room: int, code: int, said: str
) -> None:
    refused = run(job, tmp_path / "out", room=room, library=room + 1)
    assert refused.code == code, refused.stderr[-3000:]
    (line,) = refused.error_lines
    assert said in line and "STATUS_ALLOC_FAILED" in line
    assert "Loading weights" not in refused.stderr


@pytest.mark.long
@pytest.mark.parametrize("model", ["Qwen3", "Llama", "gpt-oss"])
def test_the_plan_predicts_what_the_allocator_counts(tmp_path: Path, model: str) -> None:
    try:
        environ = simcard.environment()
    except simcard.NoCompiler as missing:
        pytest.skip(str(missing))
    root = Path(__file__).parents[2]
    result = tmp_path / "result.json"
    argv = [sys.executable, "benchmarks/plan_errors.py", "--device", "cuda", "--simulated", "--only", model]
    argv += ["--json", str(result)]
    planned = subprocess.run(
        argv, cwd=root, env={**os.environ, **environ}, capture_output=True, text=True, check=False, timeout=500
    )
    assert planned.returncode == 0, planned.stderr[-3000:]
    assert json.loads(result.read_text())["largest_error_percent"] < 2.0
