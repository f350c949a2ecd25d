"""What a case takes: parts add up, the highest moment counts, and nothing that is assumed is told as counted."""

from __future__ import annotations

import math
import subprocess
import sys
from dataclasses import dataclass, replace

import pytest

from hf_rocm_tune.memory.plan import GIB, CardMemory, Case, Variant, Weights, estimate
from hf_rocm_tune.memory.plan_choice import Option, fastest, longest, micro_batches, nearest, option
from hf_rocm_tune.memory.plan_host import host
from hf_rocm_tune.memory.plan_optimizers import optimizer
from hf_rocm_tune.memory.plan_speed import speed
from hf_rocm_tune.memory.plan_trace import Trace
from tests.memory.tapes import LAYER_OF, written_down

MIB = 1 << 20


@dataclass(frozen=True, kw_only=True)
class Weight:
    """As ``models.shapes_model.Weight``."""

    group: str
    layer: int
    elements: int
    nbytes: int
    itemsize: int
    trained: bool = False


def variant(*, name: str = "qlora", optim: str = "adamw_torch_fused", megabytes: int = 100) -> Variant:
    """A model of six layers: packed weights in its layers, an embedding outside, an adapter in each layer."""
    weights = [Weight(group="embeddings", layer=-1, elements=MIB, nbytes=2 * MIB, itemsize=2)]
    for layer in (0, 1, 2):
        packed = megabytes * MIB
        weights.append(Weight(group="base", layer=layer, elements=2 * packed, nbytes=packed, itemsize=1))
        weights.append(Weight(group="quantisation", layer=layer, elements=0, nbytes=packed // 32, itemsize=0))
        weights.append(Weight(group="adapter", layer=layer, elements=1000, nbytes=4000, itemsize=4, trained=True))
    trace = Trace(written_down(2, 100), written_down(3, 400), LAYER_OF)
    return Variant(
        name=name,
        weights=Weights.total(weights, LAYER_OF),
        trace=lambda case: trace,
        exact=lambda case: trace,
        optimizer=optimizer(optim),
    )


CARD = CardMemory(name="a card", usable=2 * GIB, desktop=100 * MIB, context=50 * MIB)
CASE = Case(micro_batch=4, length=100_000, checkpointing=False)


def test_layers_that_were_not_recorded_are_weighed_too() -> None:
    found = variant().weights
    assert found.parts["weights"] == 6 * 100 * MIB + 2 * MIB
    assert found.parts["quantisation"] == 6 * 100 * MIB // 32
    assert found.parts["adapters"] == 6 * 4000
    assert found.parameters == 6 * 200 * MIB + MIB
    assert found.largest == 2 * 200 * MIB  # bfloat16, before it is packed


def test_parts_add_up_to_the_total_and_spare_is_what_is_left() -> None:
    found = estimate(variant(), CASE, CARD)
    assert math.isclose(sum(found.parts.values()), found.total)
    assert math.isclose(found.total + found.spare, CARD.usable)
    assert found.fits == (found.spare >= 0)
    around = ("allocator slack", "context", "desktop")
    assert math.isclose(found.allocated, sum(size for part, size in found.parts.items() if part not in around))


def test_a_byte_decides() -> None:
    found = estimate(variant(), CASE, CARD)
    exact = replace(CARD, usable=math.ceil(found.total))
    assert estimate(variant(), CASE, exact).fits
    assert not estimate(variant(), CASE, replace(exact, usable=exact.usable - 1)).fits


def test_loading_or_the_optimizer_may_be_the_highest_moment() -> None:
    tiny = Case(micro_batch=1, length=1, checkpointing=False)
    loading = estimate(variant(), tiny, CARD)
    assert loading.moment == "loading"
    assert math.isclose(
        loading.allocated,
        sum(variant().weights.parts[k] for k in ("weights", "quantisation")) + variant().weights.largest,
    )
    # copies of the trained tensors outweigh a step on one token
    stepping = estimate(replace(variant(optim="adamw_torch", megabytes=0)), tiny, CARD)
    assert stepping.moment == "optimizer step"


def test_a_second_card_costs_the_buckets_of_the_gradients() -> None:
    alone = estimate(variant(), CASE, CARD)
    shared = estimate(variant(), replace(CASE, cards=2), CARD)
    assert shared.parts["gradient buckets"] == 6 * 4000
    assert "gradient buckets" not in alone.parts
    assert shared.moments["loss"] == alone.moments["loss"] + 6 * 4000


def test_paged_states_are_on_the_host() -> None:
    paged = variant(optim="paged_adamw_32bit")
    found = estimate(paged, CASE, CARD)
    assert found.parts["optimizer state"] == 0
    assert host(paged, found).parts["paged optimizer state"] == 6 * 8000
    assert "paged optimizer state" not in host(variant(), found).parts


def test_hosts_need_more_with_more_processes() -> None:
    found = estimate(variant(), replace(CASE, cards=2), CARD)
    two, one = host(variant(), found, workers=4), host(variant(), estimate(variant(), CASE, CARD))
    assert two.total > one.total
    assert two.parts["processes"] == 2 * one.parts["processes"]
    assert set(two.fits) == {16, 32}


@pytest.mark.parametrize(("batch", "cards"), [(1, 1), (16, 1), (12, 2), (7, 1), (6, 3)])
def test_every_micro_batch_reaches_the_effective_batch_exactly(batch: int, cards: int) -> None:
    sizes = micro_batches(batch, cards)
    assert sizes[0] == 1
    assert sizes[-1] == batch // cards
    for size in sizes:
        found = option(
            variant(), CARD, micro_batch=size, length=8, checkpointing=False, effective_batch=batch, cards=cards
        )
        case = found.estimate.case
        assert case.micro_batch * case.accumulation * case.cards == batch


def _options(usable: int) -> list[Option]:
    card = replace(CARD, usable=usable)
    return [
        option(variant(), card, micro_batch=size, length=100_000, checkpointing=False, effective_batch=16)
        for size in micro_batches(16, 1)
    ]


def test_the_choice_fits_and_nothing_that_fits_is_clearly_faster() -> None:
    for usable in (GIB, 2 * GIB, 4 * GIB, 64 * GIB):
        options = _options(usable)
        choice = fastest(options)
        fitting = [each for each in options if each.fits]
        assert (choice is None) == (not fitting)
        if choice is not None:
            assert choice.fits
            quickest = max(each.speed.tokens_per_second for each in fitting)
            assert choice.speed.tokens_per_second >= 0.98 * quickest


def test_the_nearest_needs_least() -> None:
    options = _options(1)
    assert fastest(options) is None
    assert nearest(options).estimate.total == min(each.estimate.total for each in options)


@pytest.mark.parametrize("usable", [GIB // 2, GIB, 2 * GIB, 3 * GIB])
def test_the_longest_sequence_fits_and_the_next_does_not(usable: int) -> None:
    card = replace(CARD, usable=usable)

    def at(length: int) -> bool:
        return estimate(variant(), replace(CASE, micro_batch=1, length=length), card).fits

    found = longest(lambda length: estimate(variant(), replace(CASE, micro_batch=1, length=length), card), limit=10**8)
    if found is None:
        assert not at(128)
    else:
        assert at(found)
        assert not at(found + 128)


def test_shares_of_the_time_make_a_whole() -> None:
    found = speed(estimate(variant(), CASE, CARD), CARD)
    assert math.isclose(found.products + found.traffic + found.launches, 1)


def test_planning_imports_no_torch() -> None:
    modules = [
        *(f"hf_rocm_tune.memory.{name}" for name in ("plan", "plan_choice", "plan_host", "plan_models", "plan_speed")),
        *(f"hf_rocm_tune.{name}" for name in ("plan_request", "plan_card", "plan_recipe", "plan_job", "plan_text")),
        "hf_rocm_tune.plan_command",
    ]
    code = (
        "import importlib, sys\n"
        f"for name in {modules!r}:\n"
        "    importlib.import_module(name)\n"
        "    if {'torch', 'transformers'} & set(sys.modules): sys.exit(f'{name} imports torch or transformers')\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
