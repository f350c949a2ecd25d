"""Where layers lie: flags, counts, names and device maps of a split."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoConfig

from hf_rocm_tune.errors import UsageError
from hf_rocm_tune.models.split import Split, counts_for, parse, stack_of
from tests import tiny


@pytest.mark.parametrize(
    ("text", "counts"), [("auto", None), ("18", (18,)), ("18,22", (18, 22)), (" 10 , 15 ", (10, 15))]
)
def test_parsed(text: str, counts: tuple[int, ...] | None) -> None:
    assert parse(text) == counts


@pytest.mark.parametrize("text", ["", "0", "18,0", "-3", "1.5", "half", "18;22", "auto,3", "1,,2", "1e3", "٣"])
def test_nonsense_is_one_line_that_says_what_is_valid(text: str) -> None:
    with pytest.raises(UsageError, match="give auto, or layers of each card, as 18 or 18,22"):
        parse(text)


@pytest.mark.parametrize(
    ("given", "counts"), [((18,), (18, 22)), ((18, 22), (18, 22)), ((10, 15), (10, 15, 15)), ((1,), (1, 39))]
)
def test_the_last_card_takes_what_is_left(given: tuple[int, ...], counts: tuple[int, ...]) -> None:
    assert counts_for(given, 40) == counts


@pytest.mark.parametrize("given", [(40,), (41,), (20, 21)])
def test_counts_that_do_not_fit_the_model_are_refused(given: tuple[int, ...]) -> None:
    with pytest.raises(UsageError, match="does not fit a model of 40 layers"):
        counts_for(given, 40)


def test_every_layer_is_on_one_card_and_the_rest_on_the_first() -> None:
    split = Split.of("model.layers", (3, 9, 1))
    assert [split.card_of_layer(layer) for layer in range(13)] == [0] * 3 + [1] * 9 + [2]
    assert (split.cards, split.counts) == (3, (3, 9, 1))
    assert split.card_of("model.layers.12.mlp.up_proj.weight") == 2
    assert split.card_of("base_model.model.model.layers.1.self_attn.q_proj.lora_A.default.weight") == 0
    assert split.card_of("base_model.model.model.layers.11.self_attn.q_proj.lora_A.weight/exp_avg") == 1
    for name in (
        "model.embed_tokens.weight",
        "lm_head.weight",
        "model.norm.weight",
        "num_items_in_batch",
        "",
        "layers",
    ):
        assert split.card_of(name) == 0
    assert split.card_of("vision.layers.12.weight") == 0  # another stack


def test_the_device_map_names_the_layers_of_other_cards_only() -> None:
    devices = [torch.device("cuda", index) for index in range(2)]
    found = Split.of("model.layers", (2, 2)).device_map(devices)
    assert found == {"": devices[0], "model.layers.2": devices[1], "model.layers.3": devices[1]}


@pytest.mark.parametrize(("arch", "name"), [("llama3", "model.layers"), ("gpt2", "transformer.h")])
def test_the_stack_is_found_from_the_configuration_alone(arch: str, name: str, tmp_path: Path) -> None:
    config = AutoConfig.from_pretrained(tiny.build(arch, tmp_path))
    assert stack_of(config, trust_remote_code=False) == (name, tiny.LAYERS)


def test_a_model_that_is_no_causal_language_model_is_refused() -> None:
    from transformers import ViTConfig

    with pytest.raises(UsageError, match="cannot be split"):
        stack_of(ViTConfig(), trust_remote_code=False)
