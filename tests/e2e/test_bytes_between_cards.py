"""What crosses between two cards in a step is what `plan --cards 2` says.

Every row is cut to the length that the plan is asked for. Measured are the counters of ``transfer_report.json``.
"""

from __future__ import annotations

import contextlib
import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hf_rocm_tune import cli
from tests.e2e.conftest import Job, MakeJob, done, flags, report_of
from tests.e2e.test_ranks import FSDP2

LENGTH, STEPS, BATCH, MICRO = 16, 3, 8, 2


@pytest.fixture(scope="module")
def job(make_job: MakeJob) -> Job:
    """Three steps of whole batches."""
    return make_job(
        "bytes",
        train=BATCH * STEPS,
        test=2,
        max_steps=STEPS,
        max_length=LENGTH,
        per_device_train_batch_size=MICRO,
        save_strategy="no",
    )


@pytest.fixture(scope="module")
def planned(model_of: Callable[[str], Path]) -> dict[str, dict[str, Any]]:
    """The ways by name."""
    asked = flags(model=model_of("llama3"), cards=2, seq=LENGTH, effective_batch=BATCH, micro_batch=MICRO, vram=8)
    asked += [*flags(method="lora", dtype="float32"), "--checkpointing", "--json"]
    with contextlib.redirect_stdout(io.StringIO()) as out:
        assert cli.main(["plan", *asked]) == 0
    return {way["name"]: way for way in json.loads(out.getvalue())["ways"]}


def _between_ranks(report: dict[str, Any]) -> float:
    """Of both ranks; the report is of the first, and the second sends as much."""
    return float(2 * report["grad_sync"]["bytes_between_ranks_per_step"])


def _through_host(report: dict[str, Any]) -> float:
    return float(2 * report["grad_sync"]["bytes_to_host_and_back_per_step"])


def _between_layers(report: dict[str, Any]) -> float:
    """Hidden states and their gradients. The rest is the same for each micro-batch: cosines and sines, a mask of
    float32, positions; and once a step the norms of the gradients, 14 tensors on each card, and their total."""
    both = report["activations"]["bytes"] / 2 / STEPS  # counted when they leave a card and when they arrive
    micro_batches, head = BATCH // MICRO, 16
    rest = 2 * LENGTH * head * 4 + MICRO * LENGTH * LENGTH * 4 + LENGTH * 8
    return float(both - micro_batches * rest - 4 * (14 + 1))


@pytest.mark.parametrize(
    ("way", "processes", "given", "measured"),
    [
        ("ddp", 2, {}, _between_ranks),
        ("host", 2, {"grad_sync": "host"}, _through_host),
        pytest.param("fsdp2", 2, {}, _between_ranks, marks=pytest.mark.long),
        ("tensor", 2, {"tensor_parallel": True}, _between_ranks),
        ("split", 1, {"split_layers": "1,1"}, _between_layers),
        pytest.param(
            "pipeline", 1, {"split_layers": "1,1", "pipeline": "auto"}, _between_layers, marks=pytest.mark.long
        ),
    ],
)
def test_the_plan_counts_what_is_sent(
    way: str,
    processes: int,
    given: dict[str, Any],
    measured: Callable[[dict[str, Any]], float],
    planned: dict[str, dict[str, Any]],
    job: Job,
    tmp_path: Path,
) -> None:
    # the plan does not count the micro-batch in 400 that is computed twice
    given = {"gradient_accumulation_steps": planned[way]["accumulation"], "check_arithmetic": "off", **given}
    env = FSDP2 if way == "fsdp2" else {}
    output = tmp_path / "out"
    for each in job.ranks(output, each=[env, env], **given) if processes == 2 else [job.run(output, **given)]:
        done(each)
    # FSDP2 does not shard buffers, which the plan counts with the weights
    assert measured(report_of(tmp_path / "out")) == pytest.approx(planned[way]["crossing"], rel=1e-4)
