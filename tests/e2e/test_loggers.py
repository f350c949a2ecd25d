"""TensorBoard and Trackio themselves, without a network: what a run wrote is read back with their own readers.

Not covered: Weights & Biases and MLflow, which hear the same dict through transformers' own integrations.
"""

from __future__ import annotations

import json
import sqlite3
from contextlib import closing
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.conftest import MakeJob, flags, report_of

SERVICES = ("tensorboard", "trackio")
METRICS = (
    "integrity/verified_gb",
    "integrity/mismatches",
    "integrity/recovered",
    "speed/seconds_per_step",
    "speed/tokens_per_second",
    "loss",
    "grad_norm",
)
STEPS = 6

pytestmark = [
    pytest.mark.skipif(
        find_spec(name) is None, reason=f"{name} is not installed: `pip install 'hf-rocm-tune[loggers]'`"
    )
    for name in SERVICES
]


@dataclass(frozen=True, kw_only=True)
class Logged:
    """A run that reported to both services, with faults, and the log that it left itself."""

    output: Path
    trackio: Path

    @property
    def rows(self) -> list[dict[str, Any]]:
        """The training logs in ``training_log.json``."""
        rows: list[dict[str, Any]] = json.loads((self.output / "training_log.json").read_text())["log"]
        return [row for row in rows if "loss" in row]


@pytest.fixture(scope="module")
def logged(make_job: MakeJob) -> Logged:
    """The run."""
    job = make_job("loggers", train=48, test=9, max_steps=STEPS, eval_strategy="steps", eval_steps=3)
    recipe, ended = job.root / "recipe.yaml", Logged(output=job.root / "out", trackio=job.root / "trackio")
    recipe.write_text(f"report_to: [{', '.join(SERVICES)}]\n")
    job.done(
        ended.output,
        *flags(config=recipe, save_strategy="no", project="of-a-test", run_name="with-faults"),
        fault="kind=zero,rate=0.3,seed=5,persist=0",
        env={"TRACKIO_DIR": str(ended.trackio)},
    )
    return ended


def test_tensorboard_has_every_metric_of_every_log(logged: Logged) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    (folder,) = (logged.output / "runs").iterdir()
    events = EventAccumulator(str(folder))
    events.Reload()
    for name in METRICS:
        found = [(scalar.step, scalar.value) for scalar in events.Scalars(f"train/{name}")]
        assert found == [(row["step"], pytest.approx(row[name], rel=1e-6)) for row in logged.rows], name
    assert [scalar.step for scalar in events.Scalars("eval/loss")] == [3, STEPS]


def test_trackio_has_every_metric_of_every_log(logged: Logged) -> None:
    with closing(sqlite3.connect(logged.trackio / "of-a-test.db")) as database:
        stored = database.execute("SELECT run_name, metrics FROM metrics ORDER BY id").fetchall()
    assert {name for name, _ in stored} == {"with-faults"}
    training = [json.loads(metrics) for _, metrics in stored if "train/loss" in json.loads(metrics)]
    assert [row["train/global_step"] for row in training] == [row["step"] for row in logged.rows]
    for name in METRICS:
        assert [row[f"train/{name}"] for row in training] == [row[name] for row in logged.rows], name


def test_the_last_counters_are_the_reports(logged: Logged) -> None:
    report, last = report_of(logged.output), logged.rows[-1]
    assert last["integrity/mismatches"] > 0
    assert last["integrity/mismatches"] == last["integrity/recovered"]
    # After the last log an evaluation still moved batches.
    assert last["integrity/mismatches"] <= sum(report[s]["mismatches"] for s in ("weights", "batches", "adapter"))
    assert last["step"] == STEPS and len(logged.rows) == STEPS


def test_faults_are_marked_in_the_log_step_by_step(logged: Logged) -> None:
    steps = [row["step"] for row in report_of(logged.output)["incidents"] if row["stage"] == "batches"]
    risen = [
        after["step"]
        for before, after in zip(logged.rows, logged.rows[1:], strict=False)
        if after["integrity/mismatches"] > before["integrity/mismatches"]
    ]
    assert risen
    assert len(steps) >= len(risen)
