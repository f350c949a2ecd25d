"""A model's peak from recordings of three layers: the highest of its moments, at any batch size and length."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from hf_rocm_tune.memory.plan_growth import Growth, told_apart
from hf_rocm_tune.memory.plan_trace import Trace
from tests.memory.tapes import LAYER_OF, STEP, Tape, written_down

TRACE = Trace(written_down(2, 100), written_down(3, 400), LAYER_OF)


def test_the_peak_is_that_of_all_layers_and_not_of_the_recorded_ones() -> None:
    peak = TRACE.peak(4, 1000)
    tokens = 4000
    # six layers keep 10 a token, the loss takes 50; the casts of all six are gone by then
    assert peak.total == pytest.approx(6 * 10 * tokens + 50 * tokens)
    assert (peak.role, peak.layer) == ("loss", -1)
    assert peak.kept == pytest.approx(60 * tokens)
    assert peak.working == pytest.approx(50 * tokens)


def test_what_layers_made_and_the_head_ends_counts_once_for_every_layer() -> None:
    forward = TRACE.peak(1, 10).by_role["forward"]
    assert forward == pytest.approx(6 * 10 * 10 + 6 * 1000 + 4 * 10)
    assert TRACE.peak(1, 10).by_role["head"] == pytest.approx(600 + 6000)


def test_the_peak_moves_to_where_it_is_higher() -> None:
    short = TRACE.peak(1, 2)
    assert (short.role, short.layer) == ("forward", 5)  # casts outweigh 50 a token of the loss


def test_moments_of_a_step_are_not_added_up() -> None:
    peak = TRACE.peak(2, 500)
    assert peak.total == max(peak.by_role.values())
    assert peak.total < sum(peak.by_role.values())


def test_gradients_come_layer_by_layer_unless_there_are_some_already() -> None:
    first = TRACE.peak(1, 1)
    later = TRACE.peak(1, 1, accumulating=True)
    assert first.all_gradients == later.all_gradients == 6 * 300
    assert first.gradients == 0
    assert later.gradients == 1800
    assert later.by_role["loss"] == pytest.approx(first.by_role["loss"] + 1800)
    # the last backward pass: five gradients are there and a sixth comes; when accumulating all six and a seventh
    assert later.by_role["backward"] - first.by_role["backward"] == pytest.approx(1800 - 5 * 300, abs=300)


def test_recordings_of_different_steps_are_refused() -> None:
    other = written_down(3, 400)
    with pytest.raises(ValueError, match="other things"):
        Trace(written_down(2, 100), replace(other, events=other.events[:-1]), LAYER_OF)


def test_one_recording_is_enough_at_its_own_length() -> None:
    same = Trace(written_down(2, 100), written_down(3, 100), LAYER_OF)
    assert same.peak(7, 100).total == pytest.approx(TRACE.peak(7, 100).total)
    assert Trace(written_down(1, 64), written_down(1, 64), LAYER_OF).peak(1, 64).total == TRACE.peak(1, 64).total


def _single(nbytes: int, batch: int, length: int, tiles: bool = False) -> Tape:
    events = ((0, 0, 1),)
    marked = frozenset({0}) if tiles else frozenset()
    return Tape(
        batch=batch, length=length, segments=STEP[:1], events=events, sizes=(nbytes,), owners=(0,), tiles=marked
    )


@given(
    factor=st.integers(1, 10**6),
    powers=st.tuples(st.integers(0, 1), st.integers(0, 2)),
    length=st.integers(2, 8192),
    longer=st.integers(1, 8192),
    more=st.sampled_from([3, 4, 6]),
    asked=st.tuples(st.integers(1, 64), st.integers(1, 20000)),
)
def test_growth_of_a_product_is_met_exactly_wherever_it_can_be_told(
    factor: int, powers: tuple[int, int], length: int, longer: int, more: int, asked: tuple[int, int]
) -> None:
    def size(batch: int, tokens: int) -> int:
        return factor * batch ** powers[0] * tokens ** powers[1]

    shapes = ((2, length), (more, length + longer))
    assume(told_apart(*shapes))
    growth = Growth.fit(*(_single(size(*shape), *shape) for shape in shapes))
    assert growth.at(*asked)[0] == pytest.approx(size(*asked), rel=1e-6)


@pytest.mark.parametrize(
    ("first", "second", "told"),
    [
        ((2, 1024), (3, 2048), True),
        ((2, 1024), (3, 1536), False),  # tokens grow as the square of the length
        ((2, 1000), (3, 1225), False),  # the square of the length grows as the batch
        ((2, 1024), (3, 1500), False),  # nearly so
        ((2, 1024), (4, 1536), True),
        ((2, 1024), (3, 1040), False),  # hardly anything grows
        ((1, 1024), (1, 2048), True),
        ((2, 1024), (3, 1024), True),
        ((1, 1024), (1, 1024), True),
    ],
)
def test_two_shapes_tell_how_sizes_grow_or_do_not(first: tuple[int, int], second: tuple[int, int], told: bool) -> None:
    assert told_apart(first, second) is told
    if not told:
        with pytest.raises(ValueError, match="do not tell"):
            Growth.fit(_single(8, *first), _single(16, *second))


@given(width=st.integers(1, 4096), batch=st.integers(1, 32), length=st.integers(512, 16384))
def test_growth_of_a_tensor_one_token_shorter_is_nearly_met(width: int, batch: int, length: int) -> None:
    growth = Growth.fit(_single(width * 2 * 1023, 2, 1024), _single(width * 3 * 4095, 3, 4096))
    assert growth.at(batch, length)[0] == pytest.approx(width * batch * (length - 1), rel=0.01)


def test_a_tile_stops_growing() -> None:
    growth = Growth.fit(_single(10 * 4096, 2, 4096, tiles=True), _single(10 * 4096, 3, 8192, tiles=True))
    assert growth.at(1, 100)[0] == 1000
    assert growth.at(8, 4096)[0] == 10 * 4096


@given(batch=st.integers(1, 16), length=st.integers(1, 8192))
def test_more_tokens_never_take_less(batch: int, length: int) -> None:
    here = TRACE.peak(batch, length).total
    assert TRACE.peak(batch + 1, length).total >= here
    assert TRACE.peak(batch, length + 1).total >= here


def test_work_counts_every_layer() -> None:
    segments = tuple(replace(each, flops=7, written=11, launches=3) for each in STEP)
    tapes = [replace(written_down(batch, 100), segments=segments) for batch in (2, 2)]
    work = Trace(*tapes, LAYER_OF).work(2, 100)
    stretches = 3 + 2 * 6
    assert (work.flops, work.written, work.launches) == pytest.approx((7 * stretches, 11 * stretches, 3 * stretches))
