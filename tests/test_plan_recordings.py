"""A case's step, scaled from recordings of other cases, takes what it takes when it is recorded itself."""

from __future__ import annotations

from itertools import product

import pytest

from hf_rocm_tune.memory.plan import Case
from hf_rocm_tune.models.shapes_config import config_of
from hf_rocm_tune.plan_recordings import Recordings
from hf_rocm_tune.plan_request import PlanRequest

LENGTHS = (128, 256, 512)


def _recordings(window: int | None, method: str = "lora") -> Recordings:
    fields = {
        "model_type": "mistral",
        "architectures": ["MistralForCausalLM"],
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_hidden_layers": 6,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 640,
        "max_position_embeddings": 4096,
        "sliding_window": window,
    }
    return Recordings(config_of(fields), PlanRequest(length=LENGTHS[1]), method, LENGTHS)


def _cases(lengths: tuple[int, ...] = LENGTHS) -> list[Case]:
    return [
        Case(micro_batch=batch, length=length, checkpointing=checkpointing)
        for length, checkpointing, batch in product(lengths, (False, True), (1, 2, 4, 16))
    ]


@pytest.mark.parametrize("window", [None, 64, 150, 224, 300, 384, 448, 2000])
def test_a_window_changes_no_case_but_its_own(window: int | None) -> None:
    """Wherever a window's width lies among the lengths: what was told from a bad pair of them was half, or less."""
    recordings = _recordings(window)
    assert not recordings.fixed_length
    for case in [*_cases(), *_cases((192, 200, 320))]:
        scaled, itself = (made(case).peak(*case.shape) for made in (recordings, recordings.exact))
        assert scaled.total == pytest.approx(itself.total, rel=0.01), case
        assert scaled.role == itself.role, case


def test_few_recordings_serve_all_cases() -> None:
    recordings = _recordings(None)
    for case in _cases():
        recordings(case)
    assert len(recordings._tapes) == 8  # two lengths, plain and padded, with checkpointing and without
