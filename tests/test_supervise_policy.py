"""What is decided after a death: never for ever, a step is left out only when it is the cause, progress is honoured."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hf_rocm_tune.errors import UsageError
from hf_rocm_tune.supervisor.policy import Death, Decision, decide, place_of
from hf_rocm_tune.supervisor.settings import Settings

SETTINGS = Settings()


def death(
    step: int = 6, phase: str | None = "step", *, checkpoint: int = 4, resumed_at: int = 4, code: int = 137
) -> Death:
    return Death(how="ended", code=code, phase=phase, step=step, resumed_at=resumed_at, checkpoint=checkpoint)  # type: ignore[arg-type]


def decisions(deaths: list[Death], settings: Settings = SETTINGS) -> list[Decision]:
    """The decision after each of them, until it is to stop; steps are left out as decided."""
    made: list[Decision] = []
    for count in range(1, len(deaths) + 1):
        skipped = {each.skip for each in made if each.skip is not None}
        made.append(decide(deaths[:count], skipped, settings))
        if made[-1].action == "stop":
            break
    return made


def test_the_second_death_in_a_step_leaves_it_out_and_the_fourth_gives_up() -> None:
    made = decisions([death()] * 9)
    assert [each.action for each in made] == ["restart", "restart", "restart", "stop"]
    assert [each.skip for each in made] == [None, 7, None, None]
    assert "in step 7" in made[1].reason and "left out" in made[1].reason
    assert "4 times in step 7, although it is left out" in made[3].reason


def test_an_exception_at_the_start_is_tried_once_more_and_not_again() -> None:
    made = decisions([death(phase="start"), *[death(phase="start", code=1)] * 9])
    assert [each.action for each in made] == ["restart", "restart", "stop"]
    assert [each.action for each in decisions([death(phase="save", code=1)] * 9)] == ["restart"] * 3 + ["stop"]


@pytest.mark.parametrize("phase", ["evaluate", "save", "end", "start", None])
def test_where_no_batch_can_be_the_cause_no_step_is_left_out(phase: str | None) -> None:
    made = decisions([death(phase=phase)] * 9)
    assert [each.skip for each in made] == [None] * 4
    assert made[-1].action == "stop" and "4 times" in made[-1].reason


def test_between_steps_the_last_ones_kernels_may_have_been_running() -> None:
    assert place_of(death(6, "between")) == place_of(death(5, "step"))
    assert place_of(death(4, "between", resumed_at=4)).step is None, "this process has computed no step yet"


def test_deaths_in_different_steps_are_restarted_up_to_the_limit() -> None:
    made = decisions([death(step) for step in range(4, 40)], Settings(max_restarts=5))
    assert [each.action for each in made] == ["restart"] * 5 + ["stop"]
    assert all(each.skip is None for each in made)
    assert "5 restarts brought no new checkpoint" in made[-1].reason


def test_a_new_checkpoint_begins_the_counts_again() -> None:
    deaths = [death(10 * n + 3, checkpoint=10 * n) for n in range(50)]
    assert all(each.action == "restart" and each.skip is None for each in decisions(deaths, Settings(max_restarts=1)))
    waits = [each.wait_seconds for each in decisions(deaths)]
    assert set(waits) == {SETTINGS.backoff_seconds}


def test_restarts_wait_longer_and_longer_but_not_for_ever() -> None:
    made = decisions([death(step) for step in range(4, 40)], Settings(max_restarts=20, backoff_seconds=5))
    waits = [each.wait_seconds for each in made[:-1]]
    assert waits[:4] == [5, 10, 20, 40] and max(waits) == 300


def test_only_a_few_steps_may_be_left_out() -> None:
    deaths = [death(step, checkpoint=step // 2) for step in (6, 6, 8, 8, 10, 10, 12, 12)]
    made = decisions(deaths, Settings(max_skips=3))
    assert [each.skip for each in made] == [None, 7, None, 9, None, 11, None, None]
    assert made[-1].action == "stop" and "steps 7, 9, 11 are left out already" in made[-1].reason
    refused = decisions([death()] * 2, Settings(max_skips=0))[-1]
    assert refused.action == "stop" and "no step may be left out" in refused.reason


def test_a_result_that_is_complete_is_not_made_again_for_its_upload() -> None:
    assert decisions([death(phase="publish")])[-1].action == "stop"


PHASES = st.sampled_from([None, "start", "step", "between", "evaluate", "save", "end"])


@given(
    places=st.lists(st.tuples(st.integers(0, 6), PHASES), min_size=40, max_size=40),
    checkpoints=st.lists(st.integers(0, 2), min_size=40, max_size=40),
)
def test_without_steady_progress_it_always_ends(places: list[tuple[int, str | None]], checkpoints: list[int]) -> None:
    """Even where the newest checkpoint comes and goes, as when damaged ones are set aside."""
    deaths = [
        death(step, phase, checkpoint=kept, resumed_at=0)
        for (step, phase), kept in zip(places, checkpoints, strict=True)
    ]
    made = decisions(deaths)
    assert made[-1].action == "stop"
    assert len(made) <= 3 * (SETTINGS.max_restarts + 1)
    assert len([each for each in made if each.skip is not None]) <= SETTINGS.max_skips


@pytest.mark.parametrize("name", Settings.__dataclass_fields__)
def test_settings_below_zero_are_refused(name: str) -> None:
    for value in (-1, float("nan")):
        with pytest.raises(UsageError, match=f"--{name}"):
            Settings(**{name: value})
