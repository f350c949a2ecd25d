"""A split model computes the same bits, everything between its cards is a verified copy, and faults there are found.

The cards are logical: two or three movers on the CPU, with real copies between them.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.utils.checkpoint
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM

from hf_rocm_tune.errors import CorruptionError, UsageError
from hf_rocm_tune.models import recompute
from hf_rocm_tune.models.split import Crossing, Hops, LayerSplit, SplitMover, counts_for, layer_stack, parse, stack_of
from hf_rocm_tune.transfer import FaultSpec, Mover, TransferSettings, digest
from tests import tiny


@pytest.mark.parametrize(
    ("text", "given", "counts"),
    [
        ("auto", None, None),
        ("18", (18,), (18, 22)),
        ("18,22", (18, 22), (18, 22)),
        (" 10 , 15 ", (10, 15), (10, 15, 15)),
        ("1", (1,), (1, 39)),
    ],
)
def test_the_last_card_takes_what_is_left_of_what_was_parsed(text: str, given: Any, counts: Any) -> None:
    assert parse(text) == given
    assert given is None or counts_for(given, 40) == counts


@pytest.mark.parametrize("text", ["", "0", "18,0", "-3", "1.5", "half", "18;22", "auto,3", "1,,2", "1e3", "٣"])
def test_nonsense_is_one_line_that_says_what_is_valid(text: str) -> None:
    with pytest.raises(UsageError, match="give auto, or layers of each card, as 18 or 18,22"):
        parse(text)


@pytest.mark.parametrize("given", [(40,), (41,), (20, 21)])
def test_counts_that_do_not_fit_the_model_are_refused(given: tuple[int, ...]) -> None:
    with pytest.raises(UsageError, match="does not fit a model of 40 layers"):
        counts_for(given, 40)


def test_every_layer_is_on_one_card_and_the_rest_on_the_first() -> None:
    split = LayerSplit("model.layers", (3, 9, 1))
    assert [split.card_of_layer(layer) for layer in range(13)] == [0] * 3 + [1] * 9 + [2]
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


@pytest.mark.parametrize(("arch", "name"), [("llama3", "model.layers"), ("gpt2", "transformer.h")])
def test_the_stack_is_found_from_the_configuration_alone(arch: str, name: str, tmp_path: Path) -> None:
    config = AutoConfig.from_pretrained(tiny.build(arch, tmp_path))
    assert stack_of(config, trust_remote_code=False) == (name, tiny.LAYERS)


# ---- what crosses between cards -----------------------------------------------------------------------------------


CPU = torch.device("cpu")
LAYERS = 4
ARCHS = ("llama3", "qwen3", "gemma3", "qwen3_moe", "gpt2")


@pytest.fixture(scope="module")
def model_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Any]:
    """A fresh model of four layers, always with the same weights."""
    folder = tmp_path_factory.mktemp("models")

    def build(arch: str) -> Any:
        from transformers import AutoConfig

        config = AutoConfig.from_pretrained(tiny.build(arch, folder))
        text = config.get_text_config()
        text.num_hidden_layers = LAYERS
        if hasattr(text, "layer_types"):
            text.layer_types = text.layer_types * (LAYERS // tiny.LAYERS)
        torch.manual_seed(5)
        model = AutoModelForCausalLM.from_config(config)
        if arch == "qwen3_moe":
            model.config.output_router_logits = True
        return model.train()

    return build


@contextmanager
def split(model: Any, *counts: int, faults: str = "") -> Iterator[SplitMover]:
    """The hooks of a split on a model, and its mover."""
    name, layers = layer_stack(model, model.config)
    spec = FaultSpec.parse(faults) if faults else None
    with SplitMover(LayerSplit(name, counts), [CPU] * len(counts), faults=spec) as mover:
        Hops(mover).install(model.base_model, layers)
        yield mover


def batch() -> dict[str, Tensor]:
    torch.manual_seed(1)
    ids = torch.randint(5, 500, (2, 12))
    mask = torch.ones_like(ids)
    mask[1, 8:] = 0
    return {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}


def step(model: Any, *, passes: int = 1) -> tuple[Tensor, dict[str, Tensor]]:
    """Loss and gradients."""
    model.zero_grad()
    for _ in range(passes):
        loss = model(**batch(), use_cache=False).loss
        loss.backward()
    return loss.detach(), {name: each.grad for name, each in model.named_parameters() if each.grad is not None}


def carried(mover: SplitMover) -> dict[str, Any]:
    found: dict[str, Any] = mover.report.to_dict()["activations"]
    return found


def assert_same(one: tuple[Tensor, dict[str, Tensor]], other: tuple[Tensor, dict[str, Tensor]]) -> None:
    assert torch.equal(one[0], other[0])
    assert one[1].keys() == other[1].keys() and len(one[1]) > 10
    assert [name for name in one[1] if not torch.equal(one[1][name], other[1][name])] == []


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("checkpointing", [False, True])
def test_loss_and_gradients_are_those_of_the_whole_model(arch: str, checkpointing: bool, model_of: Any) -> None:
    whole, parts = model_of(arch), model_of(arch)
    if checkpointing:
        for each in (whole, parts):
            recompute.enable(each)
    with split(parts, 1, 2, 1) as mover:
        assert_same(step(parts, passes=2), step(whole, passes=2))
        counted = carried(mover)
        # Two boundaries and the way home, each with two legs, forward and backward, twice; masks and the like besides.
        assert counted["tensors"] >= 3 * 2 * 2 * 2
        assert counted["verified_bytes"] == counted["bytes"] > 0 and counted["mismatches"] == 0


class _Counting(Mover):
    """Keeps the names of what it moves."""

    def __init__(self, names: Counter[str]) -> None:
        super().__init__(CPU)
        self._names = names

    def move(self, tensor: Tensor, *, name: str, **more: Any) -> Tensor:  # type: ignore[override]
        self._names[name] += 1
        return super().move(tensor, name=name, **more)


def names_of(model: Any, *counts: int) -> Counter[str]:
    """What crosses in one step, by the names of the second legs."""
    found: Counter[str] = Counter()
    with split(model, *counts) as mover:
        mover.cards = tuple(_Counting(found) for _ in counts)
        step(model)
    return found


@pytest.mark.parametrize("checkpointing", [False, True])
def test_each_tensor_crosses_once_also_where_layers_are_recomputed(checkpointing: bool, model_of: Any) -> None:
    model = model_of("llama3")
    if checkpointing:
        recompute.enable(model)
    found = names_of(model, 2, 2)
    assert set(found.values()) == {1}
    forward = sorted(name for name in found if name.startswith("forward"))
    beside = r"forward\.layers\.2\.(attention_mask|position_embeddings\.[01]|position_ids)\.to1"
    assert {"forward.layers.2.0.to1", "forward.layers.3.output.to0"} <= set(forward)
    assert all(re.fullmatch(beside, name) for name in forward if name.endswith("to1") and ".0.to1" not in name[-7:])
    assert sorted(name for name in found if name.startswith("backward")) == [
        "backward.layers.2.0.to0",
        "backward.layers.3.output.to1",
    ]


def test_a_model_that_recomputes_whole_modules_itself_computes_the_same(model_of: Any) -> None:
    """What is recomputed is then carried again, the same way each time."""
    right = step(model_of("llama3"))
    model = model_of("llama3")
    stock = type(model.model.layers[2]).__call__

    def recomputed(self: nn.Module, *arguments: Any, **keywords: Any) -> Any:
        return torch.utils.checkpoint.checkpoint(partial(stock, self, **keywords), *arguments, use_reentrant=False)

    for layer in model.model.layers:
        layer.__class__ = type(type(layer).__name__, (type(layer),), {"__call__": recomputed})
    with split(model, 2, 2) as mover:
        assert_same(step(model), right)
        once = carried(mover)["tensors"]
        assert_same(step(model), right)
        assert carried(mover)["tensors"] == 2 * once


def test_router_logits_come_home_with_their_gradients(model_of: Any) -> None:
    found = names_of(model_of("qwen3_moe"), 2, 2)
    home = [name for name in found if name.startswith("forward.output.router_logits")]
    assert home == ["forward.output.router_logits.2.to0", "forward.output.router_logits.3.to0"]
    assert {name.replace("forward", "backward").replace("to0", "to1") for name in home} <= set(found)


def test_what_crosses_shares_no_memory_with_what_it_was(model_of: Any) -> None:
    model = model_of("llama3")
    seen: dict[int, Tensor] = {}
    for number, layer in enumerate(model.model.layers):
        layer.register_forward_hook(lambda module, inputs, output, at=number: seen.setdefault(at, output))
    with split(model, 2, 2):
        model.model.layers[2].register_forward_pre_hook(lambda module, inputs: seen.setdefault(-1, inputs[0]))
        step(model)
    assert torch.equal(seen[-1], seen[1]) and seen[-1].data_ptr() != seen[1].data_ptr()


@pytest.mark.parametrize("leg", ["forward.layers.2.0.from0", "forward.layers.2.0.to1", "forward.*attention_mask.to1"])
@pytest.mark.parametrize("kind", ["zero", "flip"])
def test_a_fault_on_the_way_forward_is_healed_before_anything_uses_it(leg: str, kind: str, model_of: Any) -> None:
    right = step(model_of("llama3"))
    model = model_of("llama3")
    with split(model, 2, 2, faults=f"kind={kind},tensor={leg},seed=3") as mover:
        assert_same(step(model), right)
        counted = carried(mover)
    assert counted["mismatches"] == counted["recovered"] == 1
    (row,) = mover.report.incidents
    assert row["stage"] == "activations" and row["card"] == int(leg[-1])


@pytest.mark.parametrize("leg", ["backward.layers.2.0.from1", "backward.layers.3.output.to1"])
def test_a_fault_on_the_way_back_is_healed_before_anything_uses_it(leg: str, model_of: Any) -> None:
    right = step(model_of("llama3"))
    model = model_of("llama3")
    with split(model, 2, 2, faults=f"kind=flip,tensor={leg},seed=2") as mover:
        assert_same(step(model), right)
        assert carried(mover)["recovered"] == 1


@pytest.mark.parametrize("way", ["forward", "backward"])
@pytest.mark.parametrize("leg", ["from*", "to*"])
def test_one_that_stays_is_raised_and_nothing_uses_it(way: str, leg: str, model_of: Any) -> None:
    model = model_of("llama3")
    faults = f"kind=zero,tensor={way}.layers.2.0.{leg},persist=1"
    with split(model, 2, 2, faults=faults), pytest.raises(CorruptionError, match=f"{way}.layers.2.0"):
        step(model)
    got_gradients = [name for name, each in model.named_parameters() if each.grad is not None]
    assert all("layers.3" in name or "layers.2" in name or "layers" not in name for name in got_gradients)
    assert (got_gradients == []) == (way == "forward")


def test_the_next_forward_pass_is_sound_after_one_that_failed(model_of: Any) -> None:
    right = step(model_of("llama3"))
    model = model_of("llama3")

    def fail(module: nn.Module, arguments: Any) -> None:
        raise torch.OutOfMemoryError("out of memory")

    with split(model, 2, 2):
        hook = model.model.layers[3].register_forward_pre_hook(fail)
        with pytest.raises(torch.OutOfMemoryError):
            step(model)
        hook.remove()
        assert_same(step(model), right)


def test_bytes_that_change_in_host_memory_are_sent_again() -> None:
    with SplitMover(LayerSplit("layers", (1, 1)), [CPU] * 2) as mover:
        harmed = _HarmedHost(mover, times=1)
        assert torch.equal(Crossing(harmed, source=0, target=1, name="x").forward(torch.ones(40)), torch.ones(40))
        (row,) = mover.report.incidents
        assert row["kind"] == "changed on the host"
        with pytest.raises(CorruptionError, match="changed in host memory"):
            Crossing(_HarmedHost(mover, times=9), source=0, target=1, name="x").forward(torch.ones(40))


def test_bytes_that_change_in_host_memory_end_the_run_where_that_is_asked_for() -> None:
    settings = TransferSettings(on_corruption="stop")
    with SplitMover(LayerSplit("layers", (1, 1)), [CPU] * 2, settings=settings) as mover:
        crossing = Crossing(_HarmedHost(mover, times=1), source=0, target=1, name="x")
        with pytest.raises(CorruptionError, match="--on_corruption stop is set"):
            crossing.forward(torch.ones(40))
        (row,) = mover.report.incidents
        assert row["outcome"] == "stopped"


def _HarmedHost(mover: SplitMover, *, times: int) -> SplitMover:
    """A mover whose first card's bytes change on the host after they were verified there, so many times."""
    left = [times]
    stock = type(mover.cards[0]).fetched

    @contextmanager
    def fetched(tensor: Tensor, *, name: str, stage: str) -> Iterator[Any]:
        with stock(mover.cards[0], tensor, name=name, stage=stage) as found:
            if left[0]:
                left[0] -= 1
                found.host[3] += 1
            yield found

    mover.cards[0].fetched = fetched  # type: ignore[method-assign]
    return mover


class TestMover:
    """The door in front of the cards."""

    def test_what_belongs_to_a_layer_goes_to_its_card(self, tmp_path: Path) -> None:
        with SplitMover(LayerSplit("layers", (1, 1)), [CPU] * 2) as mover:
            there = mover.move(torch.ones(4), name="layers.1.weight")
            home = mover.move(torch.ones(4), name="embed.weight")
            assert [report.to_dict()["weights"]["tensors"] for report in mover.card_reports] == [1, 1]
            assert mover.provenance(there) == mover.provenance(home) == "transferred"
            assert mover.was_verified(there) and mover.digest_of(there) is not None
            mover.mark_derived(there, "rewritten")
            assert (mover.provenance(there), mover.reason(there), mover.digest_of(there)) == (
                "derived",
                "rewritten",
                digest(there),
            )
            assert mover.provenance(torch.ones(1)) is None
            mover.step = 7
            assert {card.step for card in mover.cards} == {7}

    def test_the_report_adds_up_and_incidents_name_the_card(self) -> None:
        faults = FaultSpec.parse("kind=zero,tensor=layers.1*,count=1")
        with SplitMover(LayerSplit("layers", (1, 1)), [CPU] * 2, faults=faults) as mover:
            for name in ("embed", "layers.0.weight", "layers.1.weight"):
                mover.move(torch.ones(8), name=name)
            whole = mover.report.to_dict()
            parts = [report.to_dict()["weights"] for report in mover.card_reports]
            assert [part["tensors"] for part in parts] == [2, 1] and whole["weights"]["tensors"] == 3
            assert [part["recovered"] for part in parts] == [0, 1] and whole["weights"]["recovered"] == 1
            assert [row["card"] for row in whole["incidents"]] == [1]
            assert mover.fault_injection() is not None and mover.fault_injection()["injected"] == 1  # type: ignore[index]


@pytest.mark.gpu
def test_between_two_accelerators(model_of: Any) -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two accelerators, and torch sees one")
    devices = [torch.device("cuda", index) for index in range(2)]
    whole = model_of("qwen3").to(devices[0])
    right = step_on(whole, devices[0])
    model = model_of("qwen3")
    placement = LayerSplit("model.layers", (2, 2))
    model.to(devices[0])
    for layer in placement.ranges[1]:
        model.model.layers[layer].to(devices[1])
    with SplitMover(placement, devices) as mover:
        Hops(mover).install(model.base_model, model.model.layers)
        loss, gradients = step_on(model, devices[0])
        assert mover.report.to_dict()["activations"]["mismatches"] == 0
    torch.testing.assert_close(loss, right[0])
    for name, gradient in gradients.items():
        torch.testing.assert_close(gradient.cpu(), right[1][name].cpu(), rtol=1e-3, atol=1e-5)


def step_on(model: Any, device: torch.device) -> tuple[Tensor, dict[str, Tensor]]:
    inputs = {name: value.to(device) for name, value in batch().items()}
    loss = model(**inputs, use_cache=False).loss
    loss.backward()
    return loss.detach(), {name: each.grad for name, each in model.named_parameters() if each.grad is not None}
