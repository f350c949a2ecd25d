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

#: Why it cannot be planned, in words of the refusal.
REFUSED = {
    "bailing_hybrid": "operations",
    "big_bird": "scatter()",
    "blt": "no stack",
    "cohere_compass_text": "full_attention",
    "dbrx": "rope_theta",
    "deepseek_v4": "cannot be recorded",
    "falcon_h1": "incompatible with Mamba",
    "falcon_mamba": "incompatible with Mamba",
    "gemma3n": "timm",
    "gemma4_assistant": "no default configuration",
    "gemma4_unified_assistant": "layer types",
    "git": "cannot be recorded",
    "hrm_text": "no stack",
    "jamba": "operations",
    "jetmoe": "cannot be recorded",
    "kimi_linear": "operations",
    "llama4": "no backbone",
    "llama4_text": "no backbone",
    "longcat_flash": "cannot be recorded",
    "mamba": "incompatible with Mamba",
    "mamba2": "incompatible with Mamba",
    "mllama": "no backbone",
    "musicgen": "no causal language model",
    "musicgen_melody": "no causal language model",
    "nemotron": "unsupported operand",
    "nemotron_h": "incompatible with Mamba",
    "pegasus": "no causal language model",
    "phimoe": "cannot be recorded",
    "prophetnet": "no causal language model",
    "qwen4_exp": "unsupported operand",
    "qwen4_exp_text": "unsupported operand",
    "recurrent_gemma": "operations",
    "reformer": "is_decoder",
    "rwkv": "operations",
    "xlm": "cannot be recorded",
    "xlnet": "cannot be recorded",
    "xlstm": "operations",
    "xmod": "cannot be recorded",
    "zamba": "operations",
    "zamba2": "operations",
}


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


@pytest.mark.parametrize("wanted", MEASURED, ids=lambda wanted: "-".join(map(str, wanted[:2])))
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
