"""The supervisor's parts: which commands it starts and how, what it decides after a death, and its journal."""

from __future__ import annotations

import shlex
import sys
from dataclasses import fields
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hf_rocm_tune.errors import UsageError
from hf_rocm_tune.lifecycle import heartbeat
from hf_rocm_tune.lifecycle.supervisor import (
    Death,
    Limits,
    PulseWatch,
    RestartDecision,
    decide,
    main,
    to_start,
)

THIS = [sys.executable, "-m"]
THROUGH = [*THIS, "hf_rocm_tune.lifecycle.launch"]


@pytest.mark.parametrize(
    ("given", "started"),
    [
        ("hf-rocm-tune sft --lora_r 8", [*THIS, "hf_rocm_tune", "sft", "--lora_r", "8"]),
        ("/x/bin/hf-rocm-tune sft", [*THIS, "hf_rocm_tune", "sft"]),
        (
            "accelerate launch --cpu -m hf_rocm_tune.sft --a b",
            [*THROUGH, "--cpu", "-m", "hf_rocm_tune.sft", "--a", "b"],
        ),
        ("python -m hf_rocm_tune.sft --a", ["python", "-m", "hf_rocm_tune.sft", "--a"]),
        ("torchrun --nproc-per-node 2 -m hf_rocm_tune.sft", None),
        ("python -m torch.distributed.run -m hf_rocm_tune.sft", None),
    ],
)
def test_what_trains_through_us_is_started(given: str, started: list[str] | None) -> None:
    assert to_start(shlex.split(given)) == (started if started is not None else shlex.split(given))


REFUSED = """
hf-rocm-tune|hf-rocm-tune run -- hf-rocm-tune sft|hf-rocm-tune env|accelerate|accelerate config|accelerate launch
accelerate-launch -m hf_rocm_tune.sft|accelerate launch train.py|accelerate launch train.py --method -m
accelerate launch -m trl.scripts.sft|accelerate launch -m hf_rocm_tune|torchrun train.py|python|python -m
python train.py|python -m hf_rocm_tune env|python -m hf_rocm_tune.sftx|python -m torch.distributed.run train.py
trl sft|CUDA_VISIBLE_DEVICES=0 hf-rocm-tune sft
"""


@pytest.mark.parametrize("given", ["", *REFUSED.strip().replace("\n", "|").split("|")])
def test_anything_else_is_refused_with_what_would_do(given: str) -> None:
    with pytest.raises(UsageError, match="run supervises `accelerate launch") as caught:
        to_start(shlex.split(given))
    assert (given or "nothing") in str(caught.value)


@pytest.mark.parametrize("flag", ["--hub_token hf_s3cret", "--hub-token=hf_s3cret", "--push_to_hub_token hf_s3cret"])
def test_a_token_on_the_command_line_is_never_shown(flag: str) -> None:
    with pytest.raises(UsageError) as refused:
        to_start(shlex.split(f"echo {flag}"))
    assert "s3cret" not in str(refused.value)


# ---- after a death -----------------------------------------------------------------------------------------------

SETTINGS = Limits()


def death(
    step: int = 6, phase: str | None = "step", *, checkpoint: int = 4, resumed_at: int = 4, code: int = 137
) -> Death:
    return Death(code=code, phase=phase, step=step, resumed_at=resumed_at, checkpoint=checkpoint)  # type: ignore[arg-type]


def decisions(deaths: list[Death], settings: Limits = SETTINGS) -> list[RestartDecision]:
    """The decision after each of them, until it is to stop; steps are left out as decided."""
    made: list[RestartDecision] = []
    for count in range(1, len(deaths) + 1):
        skipped = {each.skip for each in made if each.skip is not None}
        made.append(decide(deaths[:count], skipped, settings))
        if not made[-1].restart:
            break
    return made


def test_the_second_death_in_a_step_leaves_it_out_and_the_fourth_gives_up() -> None:
    made = decisions([death()] * 9)
    assert [each.restart for each in made] == [True, True, True, False]
    assert [each.skip for each in made] == [None, 7, None, None]
    assert "in step 7" in made[1].reason and "skipped" in made[1].reason
    assert "4 times in step 7, although it is skipped" in made[3].reason


def test_a_step_that_is_tried_again_in_smaller_parts_is_not_left_out() -> None:
    made = decisions([death(code=5)] * 9)
    assert [(each.restart, each.skip) for each in made] == [(True, None)] * 3 + [(False, None)]


@pytest.mark.parametrize("phase", ["evaluate", "save", "end", "start", None])
def test_where_no_batch_can_be_the_cause_no_step_is_left_out(phase: str | None) -> None:
    made = decisions([death(phase=phase)] * 9)
    assert [each.skip for each in made] == [None] * 4
    assert not made[-1].restart and "4 times" in made[-1].reason


def test_between_steps_the_last_ones_kernels_may_have_been_running() -> None:
    assert death(6, "between").where == death(5, "step").where
    assert death(4, "between", resumed_at=4).in_step is None, "this process has computed no step yet"


def test_a_new_checkpoint_begins_the_counts_again() -> None:
    deaths = [death(10 * n + 3, checkpoint=10 * n) for n in range(50)]
    assert all(each.restart and each.skip is None for each in decisions(deaths, Limits(max_restarts=1)))
    waits = [each.wait_seconds for each in decisions(deaths)]
    assert set(waits) == {SETTINGS.backoff_seconds}


def test_only_a_few_steps_may_be_left_out() -> None:
    deaths = [death(step, checkpoint=step // 2) for step in (6, 6, 8, 8, 10, 10, 12, 12)]
    made = decisions(deaths, Limits(max_skips=3))
    assert [each.skip for each in made] == [None, 7, None, 9, None, 11, None, None]
    assert not made[-1].restart and "steps skipped already: 3" in made[-1].reason
    refused = decisions([death()] * 2, Limits(max_skips=0))[-1]
    assert not refused.restart and "steps skipped already: 0" in refused.reason


def test_a_result_that_is_complete_is_not_made_again_for_its_upload() -> None:
    assert not decisions([death(phase="publish")])[-1].restart


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
    assert not made[-1].restart
    assert len(made) <= 3 * (SETTINGS.max_restarts + 1)
    assert len([each for each in made if each.skip is not None]) <= SETTINGS.max_skips


def test_restarts_are_limited_and_wait_longer_and_longer_but_not_for_ever() -> None:
    made = decisions([death(step) for step in range(4, 40)], Limits(max_restarts=20, backoff_seconds=5))
    assert len(made) == 21 and "20 restarts without a new checkpoint" in made[-1].reason
    waits = [each.wait_seconds for each in made[:-1]]
    assert waits[:4] == [5, 10, 20, 40] and max(waits) == 300 and all(each.skip is None for each in made)
    for each in fields(Limits):
        with pytest.raises(UsageError, match=f"--{each.name}"):
            main([f"--{each.name}=-1", "--", "hf-rocm-tune", "sft"])


def test_silence_counts_while_it_is_watched_and_an_upload_may_take_its_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [0.0]
    watch = PulseWatch(tmp_path, Limits(start_seconds=100, stall_seconds=10), lambda: now[0])
    told = heartbeat.Supervised(directory=str(tmp_path), start_seconds=100, stall_seconds=10).to_json()
    monkeypatch.setenv(heartbeat.VARIABLE, told)

    def after(seconds: int) -> float | None:
        for _ in range(seconds):
            now[0] += 1.0
            watch.poll()
        return watch.silence()

    assert (after(100), after(1)) == (None, 101.0)
    beats = heartbeat.Heartbeat()
    beats.beat(step=3, phase="step")
    assert (after(11), after(1)) == (None, 11.0)
    heartbeat.touch_pulse()
    assert after(1) is None, "the watchdog is finding the cause"
    now[0] += 999
    watch.poll()
    assert watch.silence() is None, "the machine was suspended"
    beats.beat(step=3, phase="publish")
    assert after(50) is None
