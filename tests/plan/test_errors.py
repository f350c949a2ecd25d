"""Predicted against measured: peaks of real training steps, with every allocation counted."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks import plan_errors
from benchmarks.plan_cases import CPU_CASES, Case, gpu_cases
from benchmarks.plan_errors import compare

LIMIT_PERCENT = 10.0
SAMPLE = (
    ("Llama", "lora", False, "float32"),
    ("Gemma 3", "full", False, "float32"),
    ("Llama, mix", "lora", True, "float32"),
)


@pytest.fixture(autouse=True)
def _environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")


def _errors(cases: list[Case], device: str) -> list[tuple[str, Any]]:
    rows = compare(cases, device=device)
    return [
        (f"{row['model']} {row['method']} {row['way']}", row["error_percent"])
        for row in rows
        if row["error_percent"] is None or abs(row["error_percent"]) > LIMIT_PERCENT
    ]


@pytest.mark.parametrize("wanted", SAMPLE, ids=lambda wanted: "-".join(map(str, wanted[:2])))
def test_the_prediction_is_what_a_real_step_takes(wanted: tuple[str, str, bool, str]) -> None:
    cases = [
        case
        for case in CPU_CASES
        if (case.name, case.request.methods[0], case.request.checkpointing, case.label()) == wanted
    ]
    assert len(cases) == 1
    assert _errors(cases, "cpu") == []


def test_a_prediction_that_is_far_off_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def measured(case: Case, *, device: str) -> dict[str, float]:
        return {"peak": plan_errors.predict(case, device=device).allocated * 0.85}

    monkeypatch.setattr(plan_errors, "measure", measured)
    assert len(_errors(list(CPU_CASES[:1]), "cpu")) == 1


@pytest.mark.long
def test_every_prediction_is_what_a_real_step_takes() -> None:
    assert _errors(list(CPU_CASES), "cpu") == []


@pytest.mark.gpu
def test_predictions_hold_on_a_card_of_20_gib() -> None:
    """1B, 3B and 8B shapes with random weights; Llama-3.1-8B with 2 x 2048 tokens runs as LoRA and as QLoRA."""
    assert _errors(list(gpu_cases()), "cuda") == []
