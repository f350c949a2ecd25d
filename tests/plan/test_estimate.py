"""What a case takes: parts add up, the highest moment counts, and optimizers keep what is said of them."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch import nn

from hf_rocm_tune.plan.estimate import (
    GIB,
    OPTIMIZERS,
    SLACK_SHARE,
    CardMemory,
    Case,
    Step,
    Tape,
    TapeSegment,
    Variant,
    Weight,
    Weights,
    estimate,
    fastest,
    host,
)

# ---- tapes written by hand -------------------------------------------------------------------------------------------

STEP = (
    TapeSegment(role="start"),
    TapeSegment(role="forward", layer=0),
    TapeSegment(role="forward", layer=1),
    TapeSegment(role="forward", layer=2),
    TapeSegment(role="head"),
    TapeSegment(role="loss"),
    TapeSegment(role="backward", layer=2),
    TapeSegment(role="backward", layer=1),
    TapeSegment(role="backward", layer=0),
)
LAYER_OF = (0, 1, 1, 1, 1, 2)  # six layers: the first, four of a kind, the last


def written_down(batch: int, length: int) -> Tape:
    """A step whose levels can be added up by hand, in units of tokens.

    Each layer keeps 10 a token and takes 4 more while it runs in either direction; it also makes a cast of 1000 bytes
    that lives until the head begins. The loss takes 50 a token. Each layer's gradient has 300 bytes.
    """
    tokens = batch * length
    events: list[tuple[int, int, int]] = []
    sizes: list[int] = []
    owners: list[int] = []

    def new(segment: int, nbytes: int) -> int:
        events.append((segment, len(sizes), 1))
        sizes.append(nbytes)
        owners.append(segment)
        return len(sizes) - 1

    def passing(segment: int, nbytes: int) -> None:
        events.append((segment, new(segment, nbytes), -1))

    kept, casts = [], []
    for segment in (1, 2, 3):
        kept.append(new(segment, 10 * tokens))
        casts.append(new(segment, 1000))
        passing(segment, 4 * tokens)
    for cast in casts:
        events.append((4, cast, -1))
    passing(4, 2 * tokens)
    passing(5, 50 * tokens)
    for segment, storage in zip((6, 7, 8), reversed(kept), strict=True):
        passing(segment, 4 * tokens)
        gradient = new(segment, 300)
        events.append((segment, gradient, 0))
        events.append((segment, storage, -1))
    return Tape(segments=list(STEP), events=events, sizes=sizes, owners=owners)


# ---- from recordings to a whole model --------------------------------------------------------------------------------


def step_of(tape: Tape) -> Step:
    return Step(((tape, LAYER_OF),))


def trace(batch: int, length: int) -> Step:
    return step_of(written_down(batch, length))


def test_the_peak_is_that_of_all_layers_and_not_of_the_recorded_ones() -> None:
    peak = trace(4, 1000).peak()
    tokens = 4000
    # six layers keep 10 a token, the loss takes 50; the casts of all six are gone by then
    assert peak.total == pytest.approx(6 * 10 * tokens + 50 * tokens)
    assert peak.total == peak.by_role["loss"]
    assert peak.kept == pytest.approx(60 * tokens)


def test_what_layers_made_and_the_head_ends_counts_once_for_every_layer() -> None:
    forward = trace(1, 10).peak().by_role["forward"]
    assert forward == pytest.approx(6 * 10 * 10 + 6 * 1000 + 4 * 10)
    assert trace(1, 10).peak().by_role["head"] == pytest.approx(600 + 6000)


def test_gradients_come_layer_by_layer_unless_there_are_some_already() -> None:
    first = trace(1, 1).peak()
    later = trace(1, 1).peak(accumulating=True)
    assert first.all_gradients == later.all_gradients == 6 * 300
    assert first.gradients == 0
    assert later.gradients == 1800
    assert later.by_role["loss"] == pytest.approx(first.by_role["loss"] + 1800)
    # the last backward pass: five gradients are there and a sixth comes; when accumulating all six and a seventh
    assert later.by_role["backward"] - first.by_role["backward"] == pytest.approx(1800 - 5 * 300, abs=300)


def test_work_counts_every_layer() -> None:
    segments = [replace(each, flops=7, written=11, launches=3) for each in STEP]
    tape = replace(written_down(2, 100), segments=segments)
    stretches = 3 + 2 * 6
    assert step_of(tape).work() == pytest.approx((7 * stretches, 11 * stretches, 3 * stretches, 0, 0))


def test_a_step_whose_layers_are_recorded_apart_is_the_same_step() -> None:
    tape = written_down(1, 10)
    apart, whole = Step(((tape, LAYER_OF[:2]), (tape, LAYER_OF[2:]))), step_of(tape)
    assert apart.layers == whole.layers == 6
    assert apart.peak().by_role == pytest.approx(whole.peak().by_role)
    assert apart.peak(accumulating=True).by_role == pytest.approx(whole.peak(accumulating=True).by_role)


def test_a_card_of_a_split_model_has_its_layers_and_the_first_one_all_else() -> None:
    tape = written_down(4, 1000)
    for step in (step_of(tape), Step(((tape, LAYER_OF[:3]), (tape, LAYER_OF[3:])))):
        first, second, third = step.part(0, 2), step.part(2, 5), step.part(5, 6)
        assert (first.layers, second.layers, third.layers) == (2, 3, 1)
        assert set(first.peak().by_role) == {"start", "forward", "head", "loss", "backward"}
        assert set(second.peak().by_role) == set(third.peak().by_role) == {"forward", "backward"}
        assert second.peak().most_kept == pytest.approx(3 * (10 * 4000 + 1000))  # nothing there frees the casts


# ---- what a case takes -----------------------------------------------------------------------------------------------

MIB = 1 << 20


def variant(*, name: str = "qlora", optim: str = "adamw_torch_fused", megabytes: int = 100) -> Variant:
    """A model of six layers: packed weights in its layers, an embedding outside, an adapter in each layer."""
    weights = [Weight(part="weights", layer=-1, elements=MIB, nbytes=2 * MIB, itemsize=2)]
    for layer in (0, 1, 2):
        packed = megabytes * MIB
        weights.append(Weight(part="weights", layer=layer, elements=2 * packed, nbytes=packed, itemsize=1))
        weights.append(Weight(part="quantisation constants", layer=layer, nbytes=packed // 32))
        weights.append(Weight(part="adapters", layer=layer, elements=1000, nbytes=4000, itemsize=4, trained=True))
    return Variant(
        name=name,
        weights=Weights.total(weights, LAYER_OF),
        trace=lambda case: trace(*case.shape),
        optimizer=OPTIMIZERS[optim],
    )


CARD = CardMemory(name="a card", usable=2 * GIB, desktop=100 * MIB, context=50 * MIB)
CASE = Case(micro_batch=4, length=100_000, checkpointing=False)


def test_parts_add_up_to_the_total_and_spare_is_what_is_left() -> None:
    found = estimate(variant(), CASE, CARD)
    assert math.isclose(sum(found.parts.values()), found.total)
    assert math.isclose(found.total + found.spare, CARD.usable)
    assert found.fits == (found.spare >= 0)
    around = ("allocator slack", "context", "desktop")
    assert math.isclose(found.allocated, sum(size for part, size in found.parts.items() if part not in around))

    exact = replace(CARD, usable=math.ceil(found.total))
    fits = [estimate(variant(), CASE, replace(exact, usable=exact.usable - lacking)).fits for lacking in (0, 1)]
    assert fits == [True, False]


def test_loading_or_the_optimizer_may_be_the_highest_moment() -> None:
    tiny = Case(micro_batch=1, length=1, checkpointing=False)
    loading = estimate(variant(), tiny, CARD)
    assert loading.moment == "loading"
    assert math.isclose(
        loading.allocated,
        sum(variant().weights.parts[k] for k in ("weights", "quantisation constants")) + variant().weights.loading,
    )
    # copies of the trained tensors outweigh a step on one token
    stepping = estimate(replace(variant(optim="adamw_torch", megabytes=0)), tiny, CARD)
    assert stepping.moment == "optimizer step"


def test_paged_states_are_on_the_host() -> None:
    paged = variant(optim="paged_adamw_32bit")
    found = estimate(paged, CASE, CARD)
    assert found.parts["optimizer state"] == 0
    assert host(paged, found.case)["paged optimizer state"] == 6 * 8000
    assert "paged optimizer state" not in host(variant(), found.case)


def test_each_card_has_a_process_on_the_host_and_all_share_the_rest() -> None:
    one, three = (host(variant(), replace(CASE, cards=cards)) for cards in (1, 3))
    for part in ("processes", "page-locked ring", "a layer computed again at the start"):
        assert three[part] == 3 * one[part] > 0
    for part in ("system", "a checkpoint being written"):
        assert three[part] == one[part] > 0
    assert one["processes"] == 3 * 2**30  # in bytes


def test_rows_that_are_packed_are_one_sequence_and_a_pair_is_two_rows() -> None:
    rows = Case(micro_batch=4, length=1000, checkpointing=False)
    assert (rows.shape, rows.content) == ((4, 1000), "padded")
    assert replace(rows, trainer="dpo").shape == (8, 1000)
    packed = replace(rows, packing=True)
    assert (packed.shape, packed.content) == ((1, 4000), "packed")
    assert replace(packed, trainer="dpo").shape == (1, 8000)


def test_an_evaluation_takes_its_own_batch() -> None:
    assert "evaluation" not in estimate(variant(), CASE, CARD).moments
    small, large = (estimate(variant(), replace(CASE, eval_batch=size), CARD).moments["evaluation"] for size in (3, 16))
    passes = [trace(size, CASE.length).peak().total for size in (3, 16)]
    assert large - small == pytest.approx(passes[1] - passes[0])


@pytest.mark.parametrize("flights", [1, 3])
def test_each_further_micro_batch_in_flight_keeps_its_activations(flights: int) -> None:
    peak, found = trace(*CASE.shape).peak(), estimate(variant(), replace(CASE, flights=flights), CARD)
    always = sum(variant().weights.parts.values()) + found.parts["optimizer state"]
    assert found.moments["loss"] == pytest.approx(always + (flights - 1) * peak.most_kept + peak.by_role["loss"])


def test_the_allocators_slack_grows_by_a_share_of_what_a_step_takes() -> None:
    found = [estimate(variant(), replace(CASE, length=length), CARD) for length in (10_000_000, 20_000_000)]
    assert [each.moment for each in found] == ["loss", "loss"]
    taken = [sum(each.parts[name] for name in ("gradients", "activations kept", "working memory")) for each in found]
    slack = [each.parts["allocator slack"] for each in found]
    assert slack[1] - slack[0] == pytest.approx(SLACK_SHARE * (taken[1] - taken[0]))


def test_workers_that_load_data_take_host_memory_on_every_card() -> None:
    case = replace(CASE, cards=2)
    assert host(variant(), case, workers=3)["data loader workers"] == 2 * 3 * GIB / 2
    assert "data loader workers" not in host(variant(), case)


def test_the_choice_fits_and_nothing_that_fits_is_clearly_faster() -> None:
    for usable in (GIB, 2 * GIB, 4 * GIB, 64 * GIB):
        card = replace(CARD, usable=usable)
        options = [estimate(variant(), replace(CASE, micro_batch=size), card) for size in (1, 2, 4, 8, 16)]
        choice, fitting = fastest(options), [each for each in options if each.fits]
        assert (choice is None) == (not fitting)
        if choice is not None:
            roomy = [each for each in fitting if each.spare >= card.room]
            quickest = max(each.tokens_per_second for each in roomy or fitting)
            assert choice.fits and choice.tokens_per_second >= 0.95 * quickest


@pytest.mark.parametrize(
    ("options", "chosen"),
    [
        # name, tokens a second, GiB left, micro-batch, whether it is a mix
        ([("plenty", 90, 9, 4, 0), ("full", 100, 1.5, 8, 0)], "plenty"),
        ([("half", 50, 2, 4, 0), ("full", 100, 1.9, 8, 0)], "half"),
        ([("full", 100, 1.9, 8, 0), ("fuller", 110, 0.8, 16, 0)], "fuller"),
        ([("full", 100, 1.9, 8, 0), ("tight", 200, 0.6, 16, 0)], "full"),
        ([("tight", 200, 0.5, 16, 0), ("less so", 100, 0.6, 8, 0)], "less so"),
        ([("eight", 100, 3, 8, 0), ("four", 96, 3, 4, 0)], "four"),
        ([("eight", 100, 3, 8, 0), ("four", 94, 9, 4, 0)], "eight"),
        ([("kept", 100, 3, 4, 0), ("recomputed", 99, 9, 4, 0)], "recomputed"),
        ([("plain", 100, 9, 8, 0), ("mix", 117, 3, 1, 1)], "plain"),
        ([("plain", 100, 9, 8, 0), ("mix", 118, 3, 1, 1)], "mix"),
        ([("none", 100, -1, 8, 0)], None),
    ],
)
def test_room_counts_first_then_speed_then_the_smaller_micro_batch(
    options: list[tuple[str, float, float, int, bool]], chosen: str | None
) -> None:
    card = replace(CARD, usable=20 * GIB)
    any_of_them = estimate(variant(), CASE, card)
    made = {}
    for name, speed, left, size, mixed in options:
        case = replace(CASE, micro_batch=size, recompute=(1, 1) if mixed else None)
        room = {"spare": left * GIB, "tight": 0 <= left < 0.7, "roomy": left >= 2}
        made[name] = replace(any_of_them, case=case, tokens_per_second=speed, **room)
    assert fastest(made.values()) == (None if chosen is None else made[chosen])


# ---- optimizers ------------------------------------------------------------------------------------------------------

SHAPES = ((128, 96), (64,), (256, 64))


def _parameters(dtype: torch.dtype) -> list[nn.Parameter]:
    return [nn.Parameter(torch.ones(shape, dtype=dtype)) for shape in SHAPES]


def _trained(dtype: torch.dtype) -> list[Weight]:
    sizes, itemsize = [math.prod(shape) for shape in SHAPES], dtype.itemsize
    return [Weight(part="weights", layer=-1, nbytes=n * itemsize, elements=n, itemsize=itemsize) for n in sizes]


def _state_bytes(found: torch.optim.Optimizer) -> int:
    """Bytes of tensors that have a value for each element, and of their constants."""
    states = [value for state in found.state.values() for value in state.values() if torch.is_tensor(value)]
    tables = {"qmap1", "qmap2"}
    shared = [value for state in found.state.values() for key, value in state.items() if key in tables]
    nbytes = sum(value.numel() * value.element_size() for value in states if value.ndim)
    return nbytes - sum(value.numel() * value.element_size() for value in shared)


def _stepped(found: torch.optim.Optimizer) -> torch.optim.Optimizer:
    for group in found.param_groups:
        for parameter in group["params"]:
            parameter.grad = torch.ones_like(parameter)
    found.step()
    return found


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["adamw_torch", "adamw_torch_fused"])
def test_states_of_torch_have_the_parameters_dtype(name: str, dtype: torch.dtype) -> None:
    real = _stepped(torch.optim.AdamW(_parameters(dtype), fused=name.endswith("fused")))
    assert OPTIMIZERS[name].kept(_trained(dtype)) == _state_bytes(real)


def test_states_of_8_bits() -> None:
    bitsandbytes = pytest.importorskip("bitsandbytes")
    bitsandbytes.optim.GlobalOptimManager.get_instance().initialize()  # without what a training before has told it
    real = _stepped(bitsandbytes.optim.AdamW8bit(_parameters(torch.float32)))
    kept = OPTIMIZERS["adamw_8bit"].kept(_trained(torch.float32))
    assert kept == _state_bytes(real)
    assert kept < OPTIMIZERS["adamw_torch"].kept(_trained(torch.float32)) / 3


def test_names_are_those_of_transformers() -> None:
    from transformers.training_args import OptimizerNames

    assert set(OPTIMIZERS) <= {each.value for each in OptimizerNames}


def test_only_the_loop_of_the_cpu_takes_copies_of_one_parameter() -> None:
    trained = _trained(torch.float32)
    everything = sum(each.gradient for each in trained)
    assert OPTIMIZERS["adamw_torch"].taken(trained) == everything
    on_cpu = {name: replace(OPTIMIZERS[name], on_cpu=True) for name in ("adamw_torch", "adamw_torch_fused")}
    assert on_cpu["adamw_torch"].taken(trained) == 3 * max(each.nbytes for each in trained)
    assert on_cpu["adamw_torch_fused"].taken(trained) == 0
