"""Methods recorded at once, each in a process: the plan is the same, whatever happens to those processes."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from hf_rocm_tune import cli, plan_beside, plan_job
from hf_rocm_tune.errors import UsageError
from hf_rocm_tune.memory.plan import GIB, CardMemory
from hf_rocm_tune.models.shapes_config import config_of
from hf_rocm_tune.models.shapes_record import TooManyOperations
from hf_rocm_tune.plan_beside import at_once, worthwhile
from hf_rocm_tune.plan_job import Plan, plan_for
from hf_rocm_tune.plan_recordings import Kept, Recordings
from hf_rocm_tune.plan_request import PlanRequest
from hf_rocm_tune.plan_text import as_values
from tests.small_models import EXPERTS, SMALL

CARD = CardMemory(name="Radeon RX 7900 XT", usable=int(19.9 * GIB), desktop=GIB // 2)
WINDOWS = {**SMALL, "model_type": "gemma3_text", "architectures": ["Gemma3ForCausalLM"], "sliding_window": 600}
LLAMA = {**SMALL, "model_type": "llama", "architectures": ["LlamaForCausalLM"]}
REQUEST = PlanRequest(length=512, effective_batch=4)


@pytest.fixture(autouse=True)
def _environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")


def _plan(fields: dict[str, Any], *, together: bool) -> Plan:
    return plan_for(REQUEST, card=CARD, config=config_of(fields), at_once=together)


@pytest.mark.parametrize("fields", [WINDOWS, EXPERTS], ids=["windows", "experts"])
def test_the_plan_is_the_same(fields: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Without one more recording in this process than those of its own method."""
    expected = as_values(_plan(fields, together=False), "")
    recorded: list[str] = []
    record = Recordings._record
    monkeypatch.setattr(
        Recordings, "_record", lambda self, *rest: (recorded.append(self.method), record(self, *rest))[1]
    )
    found = _plan(fields, together=True)
    assert as_values(found, "") == expected
    assert set(recorded) == {"lora"}
    assert list(found.variants) == ["lora", "qlora"]


def test_a_process_that_is_killed_costs_time_only(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = as_values(_plan(LLAMA, together=False), "")
    here, kept = os.getpid(), Recordings.kept

    def die(self: Recordings) -> Kept:
        if os.getpid() != here:
            os.kill(os.getpid(), signal.SIGKILL)
        return kept(self)

    monkeypatch.setattr(Recordings, "kept", die)
    assert as_values(_plan(LLAMA, together=True), "") == expected


def test_a_refusal_of_both_is_that_of_the_first() -> None:
    request = PlanRequest(length=512, targets=("nothing",))
    told = []
    for together in (False, True):
        with pytest.raises(UsageError) as refused:
            plan_for(request, card=CARD, config=config_of(LLAMA), at_once=together)
        told.append(str(refused.value))
    assert told[0] == told[1]
    assert "nothing" in told[0]


def test_a_refusal_of_the_second_is_told_and_not_looked_for_again(monkeypatch: pytest.MonkeyPatch) -> None:
    facts = Recordings.__dict__["facts"].func
    tried: list[str] = []

    def refuse(self: Recordings) -> Any:
        tried.append(self.method)
        if self.method == "qlora":
            raise UsageError("not in four bits")
        return facts(self)

    monkeypatch.setattr(Recordings, "facts", property(refuse, lambda self, value: None))
    found = _plan(WINDOWS, together=True)
    assert list(found.variants) == ["lora"]
    assert any("not in four bits" in note for note in found.notes)
    assert set(tried) == {"lora"}


def test_steps_that_take_long_are_recorded_once_for_each_method(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hf_rocm_tune.plan_recordings._MANY_EVENTS", 10)
    monkeypatch.setattr(Recordings, "fixed_length", True)
    alone, together = (_plan(LLAMA, together=way) for way in (False, True))
    assert list(alone.variants) == ["lora"]
    assert any("--method qlora plans it" in note for note in alone.notes)
    assert list(together.variants) == ["lora", "qlora"]
    assert not any("--method" in note for note in together.notes)


def test_a_step_that_is_too_long_is_not_recorded_for_a_further_method(monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[str] = []

    def refuse(self: Recordings, *rest: Any) -> Any:
        tried.append(self.method)
        raise TooManyOperations("too many")

    monkeypatch.setattr(Recordings, "_record", refuse)
    with pytest.raises(TooManyOperations):
        _plan(LLAMA, together=True)
    assert tried == ["lora"]


def _by_name(**ways: Callable[[], Any]) -> Callable[[str], Any]:
    return lambda name: ways[name]()


def test_each_is_done_in_a_process_of_its_own() -> None:
    found = at_once(lambda name: (name, os.getpid()), ["a", "b", "c"])
    assert [name for name, _ in found.values()] == ["a", "b", "c"]
    assert found["a"][1] == os.getpid()
    assert len({pid for _, pid in found.values()}) == 3


def test_what_fails_elsewhere_is_left_out_without_a_word(capfd: pytest.CaptureFixture[str]) -> None:
    ways = _by_name(
        a=lambda: 1,
        raises=lambda: 1 / 0,
        interrupted=lambda: os.kill(os.getpid(), signal.SIGINT),
        killed=lambda: os.kill(os.getpid(), signal.SIGKILL),
        unpicklable=lambda: lambda: None,
        large=lambda: b"x" * 10_000_000,
    )
    found = at_once(ways, ["a", "raises", "interrupted", "killed", "unpicklable", "large"])
    assert {name: value for name, value in found.items() if name not in ("interrupted", "large")} == {"a": 1}
    assert len(found["large"]) == 10_000_000
    assert capfd.readouterr() == ("", "")


def test_a_failure_here_waits_for_nobody() -> None:
    with pytest.raises(ZeroDivisionError):
        at_once(_by_name(a=lambda: 1 / 0, b=lambda: time.sleep(600)), ["a", "b"])
    assert not multiprocessing.active_children()


def test_one_core_is_not_shared(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0})
    assert not worthwhile()
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1})
    assert worthwhile()
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    assert not worthwhile()


_PLAN = ("plan", "--model", "meta-llama/Llama-3.2-1B", "--seq", "256", "--json")


def test_the_command_on_one_core_says_the_same() -> None:
    core = min(os.sched_getaffinity(0))
    outputs = [
        subprocess.run(
            [sys.executable, "-c", f"{before}; from hf_rocm_tune.cli import main; main()", *_PLAN],
            capture_output=True,
            text=True,
            timeout=120,
            check=True,
        ).stdout
        for before in ("pass", f"import os; os.sched_setaffinity(0, {{{core}}})")
    ]
    assert outputs[0] == outputs[1] != ""


@pytest.mark.parametrize("several", [True, False])
def test_the_command_records_at_once_where_that_is_worthwhile(several: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[Sequence[str]] = []
    monkeypatch.setattr(plan_beside, "worthwhile", lambda: several)
    monkeypatch.setattr(plan_job, "at_once", lambda work, names: (started.append(names), at_once(work, names))[1])
    assert cli.main(_PLAN) == 0
    assert started == ([("lora", "qlora")] if several else [])
