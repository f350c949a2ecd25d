"""Requests to stop or to save: who is asked, who is left alone, and that no setting swallows the checkpoint."""

from __future__ import annotations

import itertools
import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from datasets import Dataset
from transformers import TrainerCallback, TrainerControl

from hf_rocm_tune.errors import Interrupted
from hf_rocm_tune.survive import manifest
from hf_rocm_tune.train.interrupt import REQUEST_FILE, SAME_PRESS_SECONDS, InterruptCallback, StopRequests
from tests.train.trainers import VerifiedSFT, build

BOTH = (signal.SIGINT, signal.SIGTERM)


@pytest.fixture(autouse=True)
def _handlers() -> Iterator[None]:
    before = [signal.getsignal(number) for number in BOTH]
    yield
    for number, handler in zip(BOTH, before, strict=True):
        signal.signal(number, handler)


def send(number: int) -> None:
    """A signal to this process, handled before this returns."""
    os.kill(os.getpid(), number)
    time.sleep(0.01)


def test_a_ctrl_c_afterwards_raises_and_a_sigterm_never_does(monkeypatch: pytest.MonkeyPatch) -> None:
    requests, now = StopRequests(), [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    with requests.installed(), requests.installed():  # the inner one does nothing
        send(signal.SIGTERM)
        now[0] += SAME_PRESS_SECONDS / 2
        send(signal.SIGINT)  # a service manager that sends both, a launcher's copy
        now[0] += 60
        send(signal.SIGTERM)
        with pytest.raises(KeyboardInterrupt):
            send(signal.SIGINT)
        assert requests.received == signal.SIGTERM
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def test_the_users_own_handlers_and_ignored_signals_are_left_alone() -> None:
    heard: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, _: heard.append(number))
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # nohup, a job in the background
    requests = StopRequests()
    with requests.installed():
        for number in BOTH:
            send(number)
    assert heard == [signal.SIGTERM] and requests.received == 0


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")  # python 3.12: other threads are not forked
def test_a_forked_worker_does_not_take_the_signal_for_its_own() -> None:
    """A loader's worker inherits the handler: Ctrl-C must not end it, SIGTERM must."""
    requests = StopRequests()
    with requests.installed():
        pid = os.fork()
        if pid == 0:
            send(signal.SIGINT)
            send(signal.SIGTERM)
            os._exit(1)
        _, status = os.waitpid(pid, 0)
    assert os.waitstatus_to_exitcode(status) == -signal.SIGTERM
    assert requests.received == 0


# ---- the file -----------------------------------------------------------------------------------------------


def step(callback: InterruptCallback, output: Path, number: int, *, write: bool) -> bool:
    """One step and, if it was asked for, its save; False where nothing was asked for."""
    args, state = (
        SimpleNamespace(output_dir=str(output), save_strategy="steps"),
        SimpleNamespace(global_step=number, is_world_process_zero=True),
    )
    control = TrainerControl()
    callback.on_step_end(args, state, control)  # type: ignore[arg-type]
    if not control.should_save:
        return False
    if write:
        (output / f"checkpoint-{number}").mkdir()
        manifest.write(output / f"checkpoint-{number}", run_id="r", step=number, status="checkpoint")
    callback.on_save(args, state, control)  # type: ignore[arg-type]
    return True


def test_a_file_of_the_users_that_has_the_name_stays(tmp_path: Path) -> None:
    (tmp_path / REQUEST_FILE).write_text("my notes")
    requests = StopRequests()
    requests.received = signal.SIGINT
    with pytest.raises(Interrupted):
        step(InterruptCallback(requests), tmp_path, 1, write=True)
    assert (tmp_path / REQUEST_FILE).read_text() == "my notes"


def test_the_ending_says_whether_there_is_a_checkpoint(tmp_path: Path) -> None:
    for number, (write, said) in enumerate([(True, "checkpoint-0 is written"), (False, "could not be written")]):
        requests = StopRequests()
        requests.received = signal.SIGTERM
        with pytest.raises(Interrupted, match=f"stopped by SIGTERM, .*{said}"):
            step(InterruptCallback(requests), tmp_path, number, write=write)


# ---- a real trainer -----------------------------------------------------------------------------------------


class _At(TrainerCallback):
    """Does something at the end of a step."""

    def __init__(self, number: int, act: Callable[[], object]) -> None:
        self._number, self._act = number, act

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step + 1 == self._number:
            self._act()


def trainer(
    model_path: Path, rows: Dataset, output: Path, skip: frozenset[int] = frozenset(), **options: Any
) -> VerifiedSFT:
    ours = {"eval_dataset": rows.select(range(4)), "consent_unverified": True, "skip_steps": skip}
    made: VerifiedSFT = build(VerifiedSFT, model_path, rows, output, ours=ours, max_steps=4, max_length=32, **options)
    return made


BEST = {"save_strategy": "best", "eval_strategy": "steps", "eval_steps": 1, "metric_for_best_model": "loss"}


@pytest.mark.parametrize("options", [{}, BEST, {"enable_jit_checkpoint": True}], ids=["no", "best", "jit"])
def test_whatever_the_save_strategy_the_checkpoint_is_written(
    model_path: Path, rows: Dataset, tmp_path: Path, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    stopped = trainer(model_path, rows, tmp_path, **options)
    if options is BEST:  # every evaluation after the first is worse
        losses = iter(range(1, 9))
        monkeypatch.setattr(stopped, "evaluate", lambda **_: {"eval_loss": float(next(losses))})
    stopped.add_callback(_At(2, (tmp_path / REQUEST_FILE).touch))
    stopped.add_callback(_At(3, lambda: send(signal.SIGTERM)))
    with pytest.raises(Interrupted, match="stopped by SIGTERM, checkpoint-3 is written"):
        stopped.train()
    assert {"checkpoint-2", "checkpoint-3"} <= {path.name for path in tmp_path.iterdir()}
    assert all(manifest.verify(tmp_path / f"checkpoint-{number}") == [] for number in (2, 3))
    assert not (tmp_path / REQUEST_FILE).exists()
    assert stopped.args.save_strategy == options.get("save_strategy", "no")
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def test_a_skipped_step_takes_its_batch_and_moves_nothing(model_path: Path, rows: Dataset, tmp_path: Path) -> None:
    """The steps after it see the batches that they would have seen; one that is computed twice counts once."""

    def batches(skip: frozenset[int]) -> list[list[int]]:
        seen: list[list[int]] = []
        torch.manual_seed(3)
        made = trainer(model_path, rows, tmp_path / str(len(skip)), skip, seed=5)
        made.model.register_forward_pre_hook(
            lambda _, args, kwargs: seen.append(kwargs["input_ids"].flatten().tolist()), with_kwargs=True
        )
        made.train()
        assert made.state.global_step == 4
        return [batch for batch, _ in itertools.groupby(seen)]

    whole, without = batches(frozenset()), batches(frozenset({2}))
    assert without == [whole[0], whole[2], whole[3]]
