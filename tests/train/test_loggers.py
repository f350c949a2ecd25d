"""What the logging services hear beside the loss: counters that equal the report's, and a pace without interruptions.

The services themselves are tried in ``tests/e2e/test_loggers.py``.
"""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import TrainerControl, TrainerState

from hf_rocm_tune.errors import UsageError
from hf_rocm_tune.train.refusals import check_loggers
from hf_rocm_tune.train.telemetry import MetricsCallback, integrity_counters
from hf_rocm_tune.transfer import TransferReport


class Run:
    """A trainer's events, in the order in which transformers has them, with a clock."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, report: TransferReport | None = None) -> None:
        self.now, self.state = 100.0, TrainerState()
        monkeypatch.setattr(time, "perf_counter", lambda: self.now)
        self.callback = MetricsCallback(report or TransferReport())
        self.tell("on_train_begin")

    def tell(self, event: str, **more: Any) -> None:
        args = SimpleNamespace(device=torch.device("cpu"))
        getattr(self.callback, event)(args, self.state, TrainerControl(), **more)

    def step(self, seconds: float, *, fetching: float = 0.0) -> None:
        self.now += fetching
        self.tell("on_step_begin")
        self.now += seconds
        self.tell("on_step_end")

    def log(self, **logs: float) -> dict[str, float]:
        said = {"loss": 1.0, **logs}
        self.state.log_history.append(dict(said))
        self.tell("on_log", logs=said)
        assert self.state.log_history[-1] == said  # what the services hear is what the history keeps
        return said


def test_pace_counts_fetching_and_neither_evaluation_nor_saving(monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run(monkeypatch)
    run.step(2.0)
    run.step(2.0, fetching=1.0)
    assert run.log(num_tokens=500.0)["speed/seconds_per_step"] == 2.5
    for event in ("on_evaluate", "on_save"):
        run.now += 1000.0
        run.tell(event)
        run.step(4.0)
        found = run.log(num_tokens=900.0)
        assert found["speed/seconds_per_step"] == 4.0


def test_tokens_a_second_are_those_since_the_last_log(monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run(monkeypatch)
    run.step(2.0)
    assert run.log(num_tokens=500.0)["speed/tokens_per_second"] == 250.0
    run.step(4.0)
    assert run.log(num_tokens=540.0)["speed/tokens_per_second"] == 10.0
    run.step(1.0)
    assert "speed/tokens_per_second" not in run.log()  # a trainer that counts no tokens


def test_counters_are_the_reports(monkeypatch: pytest.MonkeyPatch) -> None:
    report = TransferReport()
    report.add("weights", tensors=2, bytes=3_000_000_000, verified_bytes=2_000_000_000, mismatches=3, recovered=3)
    report.add("batches", bytes=10, verified_bytes=500_000_000, mismatches=1)
    report.count("gradients", buckets=4, mismatches=2, recovered=1)
    report.count("memory", shortages=5, recovered=5)  # a shortage that was overcome is no wrong byte
    report.count("casts", checked=1, mismatches=1, recovered=1)
    report.watched("frozen", passes=1, tensors=2, new_mismatches=1)
    report.incident({"mismatches": 99, "kind": "not a section"})
    assert integrity_counters(report.to_dict()) == {
        "integrity/verified_gb": 2.5,
        "integrity/mismatches": 8,
        "integrity/recovered": 5,
    }
    assert Run(monkeypatch, report).log()["integrity/mismatches"] == 8


def test_several_services_in_one_word_are_explained() -> None:
    with pytest.raises(UsageError, match=r"as a list in a --config file"):
        check_loggers("tensorboard,trackio")
    with pytest.raises(UsageError, match=r"hf-rocm-tune\[loggers\]"):
        check_loggers(["nobody"])
    check_loggers("none")
    check_loggers([])
