"""Rows with pictures on a simulated card: a step that does not fit is repeated in parts, two ranks train like one.

Rows have none, one or two pictures of several sizes, so that the parts of a batch, and the batches of two ranks, differ
in theirs. The models keep their pixels in two ways: LLaVA and Gemma 3 have an entry for each picture, Qwen3-VL (where
torchvision is installed) one tensor of patches, in which a larger picture has more.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests import pictures
from tests.e2e.command import CommandServer, Result
from tests.e2e.conftest import ADAPTER, Job, assert_covered, assert_same_run, done, flags, losses_of, report_of
from tests.e2e.test_oom import shortages_of
from tests.two_ranks import environments

pytestmark = pytest.mark.long

ROWS, BATCH, STEPS = 32, 4, 4
SIZES = ((40, 32), (64, 96), (128, 32))
MODELS = {"llava": pictures.build_llava, "gemma3": pictures.build_gemma3, "qwen3_vl": pictures.build_qwen3_vl}
BOTH_PARTS = {"train_vision_tower": "lora", "train_projector": "whole"}


@pytest.fixture(scope="module", params=list(MODELS))
def job(request: pytest.FixtureRequest, card_server: CommandServer, scratch: Path) -> Job:
    """In float32 and with SGD: rounding stays small where rows are divided otherwise."""
    if request.param == "qwen3_vl":
        pytest.importorskip("torchvision")
    root = scratch / f"{request.param} on card"
    names = pictures.write_files(root / "files", ROWS, sizes=SIZES)
    rows = []
    for number in range(ROWS):
        shown = [str(root / "files" / names[(number + each) % ROWS]) for each in range(number % 3)]
        rows.append({"images": shown, "messages": pictures.turns(number)})
    settings = {
        "model_name_or_path": MODELS[request.param](root / "model"),
        "dataset_name": pictures.write_jsonl(root / "data" / "rows.jsonl", rows),
        "per_device_train_batch_size": BATCH,
        "max_length": 128,
        "max_steps": STEPS,
        "save_steps": 2,
        "logging_steps": 1,
        "learning_rate": 0.1,
        "optim": "sgd",
        "lora_dropout": 0.0,
        "dtype": "float32",
        "bf16": False,
        "attn_implementation": "eager",
        "disable_tqdm": True,
        "doctor": "off",
    }
    return Job(server=card_server, root=root, settings=settings)


def ranks(job: Job, output: Path, *, each: Sequence[dict[str, str]] = ({}, {}), **changed: Any) -> list[Result]:
    """A run of two ranks, each on its own card."""
    environ = environments(output.with_suffix(".exit.json"), each, SIMCARD_DEVICES="2")
    started = [job.start(output, env=env, grad_sync="host", preflight="off", **changed) for env in environ]
    return [rank.wait() for rank in started]


def assert_same_end(output: Path, expected: Path) -> None:
    """Losses and adapter of a run that divided its rows otherwise."""
    assert losses_of(output) == pytest.approx(losses_of(expected), rel=2e-5)
    wanted = load_file(expected / ADAPTER)
    for name, tensor in load_file(output / ADAPTER).items():
        torch.testing.assert_close(tensor, wanted[name], rtol=1e-3, atol=1e-5)
    assert_covered(report_of(output))


@pytest.mark.parametrize("trained", [{}, BOTH_PARTS], ids=["language model", "tower too"])
def test_the_plan_counts_pictures(job: Job, tmp_path: Path, trained: dict[str, str]) -> None:
    """Within 3 % of the most that the card's allocator held, with rows that are all as long as the longest.

    An epoch has two batches: in one of a single batch none is transferred ahead, and the plan counts one.
    """
    (line, *_) = [line for line in job.settings["dataset_name"].read_text().splitlines() if line.count(".png") == 2]
    data = pictures.write_jsonl(tmp_path / "data" / "rows.jsonl", [json.loads(line)] * (2 * ROWS))
    argv = flags(model=job.settings["model_name_or_path"], dataset=data, max_length=256)
    planned = done(job.server.run(*argv, "--json", env={"VERB": "plan"}))
    longest = json.loads(planned.stdout)["data"]["longest"]
    given = {"dataset_name": data, "max_length": longest, "auto_fit": "plan", "gradient_accumulation_steps": 1}
    given |= {"per_device_train_batch_size": ROWS, "gradient_checkpointing": "false"}  # the peak is told in MiB
    job.done(tmp_path / "planned", **given, **trained)
    report = report_of(tmp_path / "planned")
    peak = report["telemetry"][0]["torch_peak_allocated_gib"] * 2**30
    assert 0.97 <= report["auto_fit"]["predicted_bytes"] / peak <= 1.03


@pytest.mark.parametrize("trained", [{}, BOTH_PARTS], ids=["language model", "tower too"])
def test_a_step_that_does_not_fit_is_repeated_in_parts(job: Job, tmp_path: Path, trained: dict[str, str]) -> None:
    whole = job.clean(**trained)
    found = losses_of(whole)
    assert len(found) == STEPS and found[0] - found[-1] > 0.05  # it learned
    job.done(tmp_path / "parts", env={"HF_ROCM_TUNE_STEP_FAULT": "kind=oom,rows=1"}, **trained)
    assert_same_end(tmp_path / "parts", whole)
    shortages = shortages_of(tmp_path / "parts")
    assert [row["divisor"] for row in shortages] == [1, 2]
    assert {row["outcome"] for row in shortages} == {"recovered"}


def test_layers_of_the_language_model_that_are_streamed_train_the_same(job: Job, tmp_path: Path) -> None:
    said = job.done(tmp_path / "streamed", stream_weights=1).stdout
    assert "1 of 2 layers are streamed" in said
    assert_same_run(tmp_path / "streamed", job.clean())


def test_a_row_whose_pictures_do_not_fit_is_one_line(job: Job, tmp_path: Path) -> None:
    refused = job.run(tmp_path / "out", env={"HF_ROCM_TUNE_STEP_FAULT": "kind=oom,rows=0"})
    (line,) = refused.error_lines
    assert refused.code == 5 and "--max_pixels" in line, refused.stderr[-3000:]


@pytest.mark.parametrize("trained", [{}, BOTH_PARTS], ids=["language model", "tower too"])
def test_two_ranks_train_like_one(job: Job, tmp_path: Path, trained: dict[str, str]) -> None:
    """With one row each, so that a rank often has no picture where the other has; harmed pixels change nothing.

    The one accumulates two rows: of some models, Qwen3-VL too, the Trainer averages the means of micro-batches.
    """
    output, one_row = tmp_path / "two", {"per_device_train_batch_size": 1, **trained}
    for rank in ranks(job, output, **one_row):
        done(rank)
    assert report_of(output)["ranks"] == 2
    assert_same_end(output, job.clean(**one_row, gradient_accumulation_steps=2))

    harmed = {"HF_ROCM_TUNE_FAULT": "kind=zero,tensor=pixel_values,persist=0,count=2"}
    for rank in ranks(job, tmp_path / "harmed", each=[{}, harmed], **one_row):
        done(rank)
    assert_same_run(tmp_path / "harmed", output)
    counted = report_of(tmp_path / "harmed")
    assert counted["batches"]["mismatches"] == counted["batches"]["recovered"] == 2
    assert {row["tensor"] for row in counted["incidents"]} == {"pixel_values"}


def test_of_two_ranks_the_one_without_memory_goes_on_with_smaller_parts(job: Job, tmp_path: Path) -> None:
    half = {"per_device_train_batch_size": BATCH // 2}
    short = {"HF_ROCM_TUNE_STEP_FAULT": "kind=oom,rows=1"}
    ended = ranks(job, tmp_path / "parts", each=[short, {}], **half)
    assert {rank.code for rank in ended} == {5}
    assert any("1 picture" in line or "2 pictures" in line for rank in ended for line in rank.error_lines)
    for rank in ranks(job, tmp_path / "parts", each=[short, {}], **half):
        done(rank)
    assert_same_end(tmp_path / "parts", job.clean(**half, gradient_accumulation_steps=2))
