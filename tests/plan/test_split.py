"""The plan of a split: nothing is lost or counted twice, the cut leaves the fullest card most, and it agrees with one.

From recordings of real architectures on the meta device, small ones and the published shape of a 14B.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoConfig

from hf_rocm_tune.errors import UsageError
from hf_rocm_tune.plan.estimate import GIB, CardMemory
from hf_rocm_tune.plan.fit import Plan, plan_for
from hf_rocm_tune.plan.request import PlanRequest, config_of, public_model
from hf_rocm_tune.plan.strategies import SplitPlan, even_counts, split_plan
from tests import tiny

MIB = 1 << 20
Planned = Callable[..., SplitPlan]


def card(mib: float) -> CardMemory:
    return CardMemory(name="a card", usable=int(mib * MIB), desktop=0, context=0)


@pytest.fixture(scope="module")
def config() -> Any:
    from transformers import LlamaConfig

    return LlamaConfig(
        hidden_size=2048,
        intermediate_size=8192,
        num_hidden_layers=10,
        num_attention_heads=16,
        num_key_value_heads=4,
        vocab_size=32000,
        architectures=["LlamaForCausalLM"],
    )


@pytest.fixture(scope="module")
def planned(config: Any) -> Callable[..., SplitPlan]:
    """Plans for cards of so many MiB; each question is recorded once."""
    wholes: dict[str, Plan] = {}

    def plan(*mib: float, counts: tuple[int, ...] | None = None, **more: Any) -> SplitPlan:
        usual = {"methods": ("lora",), "length": 256, "effective_batch": 4, "micro_batch": 2, "checkpointing": True}
        request = PlanRequest(**(usual | more))
        if str(request) not in wholes:
            wholes[str(request)] = plan_for(request, card=card(9000), config=config)
        return split_plan(wholes[str(request)], cards=[card(each) for each in mib], counts=counts)

    return plan


def test_layers_are_shared_out_evenly() -> None:
    for layers, cards, counts in ((40, 2, (20, 20)), (9, 2, (4, 5)), (11, 3, (3, 4, 4)), (3, 3, (1, 1, 1))):
        assert even_counts(layers, cards) == counts


@pytest.mark.parametrize(("method", "checkpointing"), [("qlora", True), ("full", False)])
def test_all_cards_together_hold_what_one_would(planned: Planned, method: str, checkpointing: bool) -> None:
    found = planned(9000, 9000, counts=(4, 6), methods=(method,), checkpointing=checkpointing)
    whole, parts = found.option, found.estimates
    for name in ("weights", "quantisation constants", "adapters"):
        assert sum(each.parts[name] for each in parts) == pytest.approx(whole.parts[name])
    for name in ("optimizer state", "gradients"):
        held = sum(each.parts[name] for each in parts)
        assert held == pytest.approx(whole.parts[name], rel=0.05) or whole.moment != parts[0].moment
    kept = sum(each.parts["activations kept"] for each in parts)
    hidden = 2 * 256 * 2048 * 4
    copies = 3 * hidden + 2 * MIB  # hidden states on their way, there and back; position embeddings, masks
    assert kept <= whole.parts["activations kept"] + copies


def test_embeddings_head_and_loss_are_on_the_first_card(planned: Planned) -> None:
    even = planned(9000, 9000, counts=(5, 5))
    first, second = (each.parts["weights"] for each in even.estimates)
    embeddings = 2 * 32000 * 2048 * 2  # input and output, bfloat16
    assert first - second == pytest.approx(embeddings, rel=0.01)
    assert "loss" in even.estimates[0].moments and "loss" not in even.estimates[1].moments


@pytest.mark.parametrize("mib", [(1500, 1500), (2000, 1300), (1300, 2000)])
def test_the_cut_is_the_one_that_leaves_the_fullest_card_most(planned: Planned, mib: tuple[int, ...]) -> None:
    every = [planned(*mib, counts=(first, 10 - first)).least_spare for first in range(1, 10)]
    assert planned(*mib).least_spare == max(every)


def test_the_fastest_that_fits_every_card_is_chosen(planned: Planned) -> None:
    roomy = planned(40000, 40000, micro_batch=None, checkpointing=None)
    assert roomy.option.case == replace(roomy.option.case, micro_batch=4, checkpointing=False)
    tight = planned(1200, 1200, micro_batch=None, checkpointing=None)
    assert tight.fits
    assert tight.option.tokens_per_second < roomy.option.tokens_per_second


def test_more_cards_than_layers_are_refused(planned: Planned) -> None:
    with pytest.raises(UsageError, match="10 layers cannot be distributed over 11 cards"):
        planned(*[9000] * 11)
    with pytest.raises(UsageError, match="does not fit a model of 10 layers"):
        planned(9000, 9000, counts=(10,))


def test_a_14b_in_bfloat16_needs_two_cards_of_20_gib_and_fits_them() -> None:
    known = public_model("Qwen/Qwen3-14B")
    assert known is not None
    xt = CardMemory(name="xt", usable=int(19.9 * GIB))
    request = PlanRequest(methods=("lora",), length=1024, effective_batch=16, micro_batch=1, checkpointing=True)
    found = split_plan(plan_for(request, card=xt, config=config_of(known.fields)), cards=(xt, xt))
    assert found.fits and not found.option.fits
    assert sum(found.counts) == 40 and found.counts[0] < found.counts[1]
    assert sum(each.parts["weights"] for each in found.estimates) == pytest.approx(14.77e9 * 2, rel=0.01)


def test_a_micro_batch_that_waits_between_its_passes_counts_with_its_masks(tmp_path: Path) -> None:
    """On the second card of a pipeline; masks are freed when the forward pass of the whole model has returned."""
    config = AutoConfig.from_pretrained(tiny.build("llama3", tmp_path))
    config.num_hidden_layers = 4
    request = PlanRequest(
        methods=("lora",), length=320, effective_batch=12, micro_batch=2, checkpointing=False, rank=4, dtype="float32",
        autocast=False, platform="cuda", triton=False, attention="eager", evaluates=False,
    )  # fmt: skip
    cards = [CardMemory(name="a card", usable=GIB, desktop=0, context=0)] * 2
    whole = plan_for(request, card=cards[0], config=config)
    alone, four = (split_plan(whole, cards=cards, counts=(2, 2), flights=flights) for flights in (1, 4))
    each = (four.estimates[1].allocated - alone.estimates[1].allocated) / 3
    mask = 2 * 320 * 320 * 4  # float32 [batch, 1, rows, keys]
    kept = alone.estimates[1].parts["activations kept"]  # at the peak, in the backward pass: without masks
    assert mask < each - kept < 1.1 * mask
