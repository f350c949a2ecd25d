"""What a training step of ours waits for, counted by the simulated card: the host must run ahead of the card."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.e2e.command import CommandServer
from tests.e2e.conftest import flags
from tests.simcard.log import Event, Log

VERDICT = "transfer/digest.py:DigestReadback.join"
"""A batch's, which must be there before its forward. It follows the copy on a queue of its own, not the computation."""
GUARD = "train/guard.py:_read_figures"
"""Loss and gradient norm, before they are used."""
LOGGED = "train/metrics.py:evaluate_deferred"
"""What TRL's trainer notes in each micro-step, once a log."""
REPLAY = "train/replay.py:_result_of"
"""In the third step and once in 400 micro-batches: of the micro-batch that is computed twice, both times."""
UPSTREAM = ("transformers/", "trainer/sft_trainer.py", "accelerate/")


@pytest.mark.parametrize("accumulated", [pytest.param(1, marks=pytest.mark.long), 3])
def test_a_step_waits_for_its_batches_verdicts_and_the_guard_and_a_log_for_its_figures(
    card_server: CommandServer, model_of: Callable[[str], Path], base_flags: list[str], tmp_path: Path, accumulated: int
) -> None:
    log = tmp_path / "log"
    result = card_server.run(
        *flags(model_name_or_path=model_of("llama3"), gradient_accumulation_steps=accumulated),
        *base_flags,
        env={"SIMCARD_LOG": str(log)},
    )
    assert result.code == 0, result.stderr[-2000:]
    steps = whole_steps(Log(log))
    assert len(steps) == 3
    for number, step in enumerate(steps, start=2):
        ours = Counter(event.caller for event in step if event.kind == "wait" and not event.caller.startswith(UPSTREAM))
        # What a guard reads is verified like every copy: a wait for its bytes, and one, already over, for its digest.
        assert ours == {VERDICT: accumulated, GUARD: 2, LOGGED: 2, **({REPLAY: 4} if number == 3 else {})}
        theirs = {event.caller for event in step if event.kind == "wait"} - ours.keys()
        assert not any("sft_trainer" in caller or "_run_epoch" in caller for caller in theirs), theirs
        # One copy to the card for each batch, all its tensors in it, and nothing beside them.
        assert [event.engine for event in step if event.kind == "to_card"] == [True] * accumulated


def whole_steps(log: Log) -> list[list[Event]]:
    """Events from one guard's last wait to the next: all steps but the first, which looks at what is new."""
    steps: list[list[Event]] = [[]]
    waits = 0
    for event in log.events:
        steps[-1].append(event)
        if event.kind == "wait" and event.caller == GUARD:
            waits += 1
            if waits % 2 == 0:
                steps.append([])
    return steps[1:-1]
