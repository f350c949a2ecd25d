"""Predictions against the peaks of real training steps with every allocation counted, and every architecture of
transformers, planned or refused in one line that is known.

The configurations are the default ones of transformers; ``benchmarks/plan_architectures.py`` tells how long each takes.
"""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks import plan_errors
from benchmarks.plan_architectures import architectures, walk
from benchmarks.plan_cases import CPU_CASES, Case, gpu_cases
from benchmarks.plan_errors import compare

#: Model types that cannot be planned, by words of the refusal.
_REASONS = {
    "operations": "longcat_flash zamba",
    "full_attention": "cohere_compass_text",
    "rope_theta": "dbrx",
    "cannot be recorded": "blt gemma4_unified_assistant git xmod",
    "timm": "gemma3n",
    "no default configuration": "gemma4_assistant",
    "no causal language model": "musicgen musicgen_melody pegasus prophetnet",
    "is missing in its config.json": "nemotron",
    "are missing in its config.json": "qwen4_exp qwen4_exp_text",
    "is_decoder": "reformer",
}
REFUSED = {kind: reason for reason, kinds in _REASONS.items() for kind in kinds.split()}


@pytest.fixture(autouse=True)
def _environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")


@pytest.mark.long
def test_all_architectures_are_planned_or_refused() -> None:
    """Refused are those that should be, in one line and for the reason that is expected."""
    wrong = []
    for row in walk(list(architectures())):
        expected, refusal = REFUSED.get(row["model_type"]), row.get("refused")
        one_line = refusal is None or len(refusal.splitlines()) == 1
        if not one_line or (expected is None) != (refusal is None) or (refusal and (expected or "") not in refusal):
            wrong.append(f"{row['model_type']}: expected {expected}, got {refusal}")
    assert wrong == []
    assert set(REFUSED) <= set(architectures())


# ---- predicted and measured ---------------------------------------------------------------------------------------


LIMIT_PERCENT = 3.0
MEASURED = (
    ("Llama", "lora", False, "float32, one-pass loss"),
    ("Gemma 3", "full", False, "float32"),
    ("Qwen3-MoE, mix", "lora", True, "float32"),
)


def _errors(cases: list[Case], device: str) -> list[tuple[str, Any]]:
    rows = compare(cases, device=device)
    return [
        (f"{row['model']} {row['method']} {row['way']}", row["error_percent"])
        for row in rows
        if row["error_percent"] is None or abs(row["error_percent"]) > LIMIT_PERCENT
    ]


@pytest.mark.parametrize(
    "wanted",
    [
        pytest.param(wanted, id=f"{wanted[0]}-{wanted[1]}", marks=() if "Llama" in wanted else pytest.mark.long)
        for wanted in MEASURED
    ],
)
def test_the_prediction_is_what_a_real_step_takes(wanted: tuple[str, str, bool, str]) -> None:
    asked = ((each.name, each.request.methods[0], each.request.checkpointing, each.label()) for each in CPU_CASES)
    (case,) = (each for each, words in zip(CPU_CASES, asked, strict=True) if words == wanted)
    assert _errors([case], "cpu") == []


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
