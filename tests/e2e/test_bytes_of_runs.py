"""All bytes that cross in a run, as the driver of the simulated card counts them, are those that the report counts."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.command import CommandServer
from tests.e2e.conftest import MakeJob, report_of, sampled
from tests.e2e.test_methods import jobs_of
from tests.simcard.log import Log

QUANTISED = {"load_in_4bit": True}
#: Flags of `sft`, or the verb whose toy rows are trained on.
RUNS: dict[str, dict[str, Any] | str] = {
    "lora": {"gradient_accumulation_steps": 2},
    "qlora": {**QUANTISED, "gradient_checkpointing": True},
    "full": {"use_peft": False, "optim": "adamw_torch_fused"},
    "evaluation": {"eval_strategy": "steps", "eval_steps": 1},
    "packed": {"packing": True},
    "streamed": {"stream_weights": 1, "dtype": "bfloat16", "bf16": True},
    "8 bit": {"load_in_8bit": True, "optim": "adamw_8bit"},
    "resumed": {"save_steps": 1, "max_steps": 3},
    "dpo": "dpo",
    "kto": "kto",
    "reward": "reward",
    "grpo": "grpo",
    "orpo": "orpo",
}


@pytest.mark.parametrize("name", sampled(RUNS, "lora"))
def test_what_the_driver_counts_is_what_the_report_counts(
    make_job: MakeJob, card_server: CommandServer, name: str, tmp_path: Path
) -> None:
    wanted = RUNS[name]
    log = tmp_path / "log"
    if isinstance(wanted, str):
        job = replace(jobs_of(make_job, "bytes")[wanted], server=card_server)
        job.done(tmp_path / "out", env={"SIMCARD_LOG": str(log)}, max_steps=2)
        return assert_equal(log, report_of(tmp_path / "out"))
    usual = {"max_steps": 2, "lora_dropout": 0.0, "doctor": "off"}
    job = make_job("bytes/sft", server=card_server, **usual)
    job = replace(job, settings=job.settings | wanted)
    crash = "step=2,kind=kill" if name == "resumed" else ""
    if crash:
        assert job.run(tmp_path / "out", crash=crash).code == -9
    job.done(tmp_path / "out", crash=crash, env={"SIMCARD_LOG": str(log)})
    return assert_equal(log, report_of(tmp_path / "out"))


def assert_equal(log: Path, report: dict[str, Any]) -> None:
    events, crossed = Log(log).events, report["crossings"]
    driver = {kind: sum(event.nbytes for event in events if event.kind == kind) for kind in ("to_card", "to_host")}
    counted = {"to_card": crossed["to_device_bytes"], "to_host": crossed["to_host_bytes"] + crossed["numbers_bytes"]}
    print(f"driver {driver}, report {counted}, of them numbers {crossed['numbers_bytes']}")
    assert driver == counted and driver["to_card"] > 0 < driver["to_host"]
    assert report["coverage"]["unverified"] == []
