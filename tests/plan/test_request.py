"""The table of public shapes, and reading a configuration without its weights."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from hf_rocm_tune.errors import UsageError
from hf_rocm_tune.plan.estimate import Weights
from hf_rocm_tune.plan.request import (
    PUBLIC_MODELS,
    PlanRequest,
    PublicModel,
    config_of,
    load_config,
    longest_position,
    public_model,
)
from hf_rocm_tune.plan.sample import build


@pytest.mark.parametrize("model", PUBLIC_MODELS, ids=lambda model: model.name)
def test_the_shape_has_the_published_number_of_parameters(model: PublicModel) -> None:
    sample = build(config_of(model.fields), PlanRequest(dtype="bfloat16"), "full")
    total = Weights.total(sample.weights(), sample.layer_of)
    assert total.parameters / 1e9 == pytest.approx(model.billions, abs=0.006)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("meta-llama/Llama-3.1-8B", "meta-llama/Llama-3.1-8B"),
        ("meta-llama/Llama-3.1-8B-Instruct", "meta-llama/Llama-3.1-8B"),
        ("google/gemma-3-1b-it", "google/gemma-3-1b-pt"),
        ("mistralai/Mistral-Small-24B-Instruct-2501", "mistralai/Mistral-Small-24B-Base-2501"),
        ("qwen/qwen3-8b", "Qwen/Qwen3-8B"),
        ("someone/Llama-3.1-8B", None),
        ("meta-llama/Llama-3.1-405B", None),
    ],
)
def test_only_a_name_of_the_same_shape_is_taken_for_it(name: str, expected: str | None) -> None:
    found = public_model(name)
    assert (found.name if found else None) == expected


def test_a_directory_needs_its_configuration_only(tmp_path: Path) -> None:
    fields = dict(PUBLIC_MODELS[0].fields)
    (tmp_path / "config.json").write_text(json.dumps(fields))
    config = load_config(str(tmp_path))
    assert config.num_hidden_layers == fields["num_hidden_layers"]
    assert longest_position(config) == fields["max_position_embeddings"]


@pytest.mark.parametrize(
    "content", ["{", "[]", "{}", '{"model_type": "nobody"}', '{"model_type": "llama", "hidden_size": "wide"}', None]
)
def test_a_configuration_that_is_none_is_one_line(tmp_path: Path, content: str | None) -> None:
    if content is not None:
        (tmp_path / "config.json").write_text(content)
    with pytest.raises(UsageError) as refused:
        load_config(str(tmp_path))
    assert str(tmp_path) in str(refused.value)
    assert "\n" not in str(refused.value)


def test_a_hub_that_does_not_answer_is_one_line() -> None:
    with pytest.raises(UsageError, match=r"nobody/nothing.*network"):
        load_config("nobody/nothing")
