"""The decision of ``--auto_fit``: what is kept, what is tried next, and what is never tried."""

from __future__ import annotations

import dataclasses
import itertools
import json
import random

import pytest

from hf_rocm_tune.errors import UsageError
from hf_rocm_tune.plan.candidates import (
    MOST_UPWARD,
    Candidate,
    Choice,
    Demand,
    Trial,
    demand,
    fastest_that_fitted,
    next_candidate,
    with_slack,
)

MIB = 1 << 20


def wanted(*given: str, effective: int | None = None, ranks: int = 1, micro: int = 8, steps: int = 1) -> Demand:
    return demand(
        ranks=ranks, effective_batch=effective, micro_batch=micro, accumulation=steps, checkpointing=True, given=given
    )


MICRO, STEPS, CHECKPOINTING = "per_device_train_batch_size", "gradient_accumulation_steps", "activation_checkpointing"


@pytest.mark.parametrize(
    ("found", "each", "kept"),
    [
        (wanted(), 8, None),  # TRL's defaults are nobody's wish
        (wanted(ranks=2), 8, None),
        (wanted(MICRO, micro=4), 4, 4),
        (wanted(STEPS, steps=4), 32, 8),
        (wanted(effective=48, ranks=2), 24, None),
        (wanted(MICRO, effective=48, ranks=2, micro=6), 24, 6),
        (wanted(STEPS, effective=48, steps=16), 48, 3),
        (wanted(MICRO, STEPS, effective=12, micro=3, steps=4), 12, 3),
    ],
)
def test_what_the_user_set_is_kept_and_the_effective_batch_with_it(found: Demand, each: int, kept: int | None) -> None:
    assert (found.each, found.micro_batch) == (each, kept)
    assert found.checkpointing is None


@pytest.mark.parametrize(
    "name",
    [CHECKPOINTING, "gradient_checkpointing", "activation_checkpointing_kwargs", "gradient_checkpointing_kwargs"],
)
def test_checkpointing_is_kept_by_either_of_its_names_and_by_its_details(name: str) -> None:
    assert wanted(name).checkpointing is True


@pytest.mark.parametrize("effective", [7, 1])
def test_an_effective_batch_that_ranks_cannot_share_is_refused(effective: int) -> None:
    with pytest.raises(UsageError, match="cannot be divided evenly over 2 processes"):
        wanted(effective=effective, ranks=2)


@pytest.mark.parametrize(
    ("given", "numbers"),
    [
        ((MICRO,), {"micro": 5, "effective": 12}),
        ((MICRO,), {"micro": 16, "effective": 8}),
        ((STEPS,), {"steps": 5, "effective": 12}),
        ((STEPS,), {"steps": 16, "effective": 8}),
        ((MICRO, STEPS), {"micro": 2, "steps": 4, "effective": 16}),
    ],
)
def test_flags_that_cannot_make_the_effective_batch_are_refused_by_name(
    given: tuple[str, ...], numbers: dict[str, int]
) -> None:
    with pytest.raises(UsageError) as caught:
        wanted(*given, **numbers)
    assert all(f"--{name} " in str(caught.value) for name in given)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(("each", "limit", "found"), [(8, 8, 8), (12, 8, 6), (7, 4, 1), (16, 100, 16), (1, 8, 1)])
def test_without_a_card_the_effective_batch_is_still_reached_exactly(each: int, limit: int, found: int) -> None:
    assert Demand(each=each, ranks=1, micro_batch=None, checkpointing=None).largest_up_to(limit) == found


# ---- what a probe tries ---------------------------------------------------------------------------------------


def ways(each: int = 16) -> list[Candidate]:
    """A grid like the plan's: bytes grow with the micro-batch, recomputation saves bytes and costs speed."""
    sizes = [size for size in range(1, each + 1) if each % size == 0]
    return [
        Candidate(
            micro_batch=size,
            accumulation=each // size,
            checkpointing=on,
            predicted=(100 + size * (10 if on else 40)) * MIB,
            tokens_per_second=(70 if on else 100) * size / (size + 0.5),
        )
        for on in (False, True)
        for size in sizes
    ]


def search(candidates: list[Candidate], first: Candidate, needs: dict[Candidate, int], budget: int) -> list[Trial]:
    """A probe on a card where each way really takes what ``needs`` says."""
    trials: list[Trial] = []
    while (one := next_candidate(candidates, trials, first=first, budget=budget)) is not None:
        assert one not in [trial.candidate for trial in trials]
        fits = with_slack(needs[one]) <= budget
        trials.append(Trial(candidate=one, fits=fits, measured=needs[one] if fits else None))
    return trials


def planned(candidates: list[Candidate], budget: int) -> Candidate:
    fitting = [one for one in candidates if one.fits(budget)]
    return (
        max(fitting, key=lambda one: one.tokens_per_second) if fitting else min(candidates, key=lambda o: o.predicted)
    )


def test_a_plan_that_is_right_is_tried_once() -> None:
    candidates, budget = ways(), 600 * MIB
    first = planned(candidates, budget)
    trials = search(candidates, first, {one: one.predicted for one in candidates}, budget)
    assert [trial.candidate for trial in trials] == [first]


def test_out_of_memory_goes_down_to_something_that_fits() -> None:
    candidates, budget = ways(), 600 * MIB
    needs = {one: 2 * one.predicted for one in candidates}
    trials = search(candidates, planned(candidates, budget), needs, budget)
    best = fastest_that_fitted(trials)
    assert best is not None and with_slack(needs[best.candidate]) <= budget
    failed = [trial.candidate for trial in trials if not trial.fits]
    assert failed and len(trials) <= 6


def test_room_that_was_measured_is_used_and_only_so_often() -> None:
    candidates, budget = ways(64), 600 * MIB
    needs = {one: one.predicted // 3 for one in candidates}
    first = planned(candidates, budget)
    trials = search(candidates, first, needs, budget)
    best = fastest_that_fitted(trials)
    assert best is not None and best.candidate.tokens_per_second > first.tokens_per_second
    assert 1 < len(trials) <= 1 + MOST_UPWARD


def test_without_a_measurement_nothing_is_tried_upward() -> None:
    candidates = ways()
    trial = Trial(candidate=candidates[0], fits=True, measured=None)
    assert next_candidate(candidates, [trial], first=candidates[0], budget=10**15) is None


def test_nothing_fits_ends_and_says_so() -> None:
    candidates = ways()
    trials = search(candidates, candidates[4], dict.fromkeys(candidates, 10**12), 600 * MIB)
    assert fastest_that_fitted(trials) is None
    assert {(trial.candidate.micro_batch, trial.candidate.checkpointing) for trial in trials} >= {(1, True)}


@pytest.mark.parametrize("seed", range(40))
def test_whatever_memory_does_the_search_ends_within_the_grid_and_its_answer_fitted(seed: int) -> None:
    draw = random.Random(seed)
    candidates = ways(draw.choice([1, 7, 16, 48, 64]))
    budget = draw.randrange(150, 2000) * MIB
    needs = {one: int(one.predicted * draw.uniform(0.3, 3.0)) for one in candidates}
    trials = search(candidates, planned(candidates, budget), needs, budget)
    best = fastest_that_fitted(trials)
    assert len(trials) <= len(candidates)
    assert best is None or with_slack(needs[best.candidate]) <= budget
    for earlier, later in itertools.pairwise(trials):
        if not earlier.fits and later.candidate.checkpointing == earlier.candidate.checkpointing:
            assert later.candidate.micro_batch < earlier.candidate.micro_batch


# ---- what run.json keeps --------------------------------------------------------------------------------------


def test_a_choice_comes_back_from_its_record() -> None:
    choice = Choice.of(ways()[1], mode="probe", budget=5 * MIB, measured=3 * MIB, tries=2)
    again = Choice.from_record(json.loads(json.dumps(vars(choice))), wanted(effective=16))
    assert again == choice


@pytest.mark.parametrize("damage", [{"micro_batch": 3}, {"micro_batch": None}, {"unknown": 1}, {"accumulation": "x"}])
def test_a_record_that_makes_no_sense_is_refused(damage: dict[str, object]) -> None:
    values = dataclasses.asdict(Choice.of(ways()[1], mode="plan", budget=1)) | damage
    with pytest.raises(UsageError, match=r"run\.json"):
        Choice.from_record(values, wanted(effective=16))
