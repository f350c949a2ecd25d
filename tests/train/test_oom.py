"""A run that finds no memory now and then ends where the undisturbed run ends, with the same effective batch.

In one process; `tests/e2e/test_oom.py` has the command line and two ranks. The errors are raised inside a layer, in
forward or in backward, as ``HF_ROCM_TUNE_STEP_FAULT`` asks.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor, nn
from transformers import default_data_collator

from hf_rocm_tune import upstream
from hf_rocm_tune.errors import OutOfMemoryError
from hf_rocm_tune.train import oom
from hf_rocm_tune.train.faults import STEP_VARIABLE as VARIABLE
from hf_rocm_tune.train.oom import STATE_FILE, read_state
from tests.train.trainers import Make, VerifiedPlain, VerifiedSFT

ROWS, MICRO, WINDOW, STEPS = 46, 4, 2, 5  # the last window of an epoch has 2 + 2 rows less than the others


class MeanLoss(VerifiedPlain):
    """A trainer whose loss is a mean over the labels of a micro-batch, whatever is counted."""

    loss_is_scaled_for_ga = False

    def compute_loss(
        self, model: nn.Module, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        """Mean over the labels of the micro-batch."""
        del num_items_in_batch
        return super().compute_loss(model, inputs, return_outputs=return_outputs)


class UncountedLoss(VerifiedSFT):
    """A trainer for whose model nothing is counted: TRL then takes the mean over a micro-batch."""

    def _get_num_items_in_batch(self, *_: Any) -> None:
        return None


@pytest.fixture
def make(make: Make) -> Make:
    sizes = {"per_device_train_batch_size": MICRO, "gradient_accumulation_steps": WINDOW, "max_steps": STEPS}
    return lambda kind=VerifiedSFT, **options: make(kind, **{**sizes, **options})


def trajectory(trainer: Any) -> list[list[float]]:
    """Loss, gradient norm and token count of each step."""
    rows = [row for row in trainer.state.log_history if "loss" in row]
    return [[row["loss"], row["grad_norm"], row.get("num_tokens", 0)] for row in rows]


def adapter(trainer: Any) -> dict[str, Tensor]:
    return {name: weight.detach() for name, weight in trainer.model.named_parameters() if weight.requires_grad}


def assert_same_end(disturbed: Any, clean: Any) -> None:
    assert disturbed.state.global_step == clean.state.global_step
    for ours, theirs in zip(trajectory(disturbed), trajectory(clean), strict=True):
        assert ours == pytest.approx(theirs, rel=2e-4)
        assert ours[2] == theirs[2]  # the same tokens
    expected = adapter(clean)
    for name, weight in adapter(disturbed).items():
        torch.testing.assert_close(weight, expected[name], rtol=2e-2, atol=2e-4)


def shortages(trainer: Any) -> list[dict[str, Any]]:
    return [row for row in trainer.transfer_report.incidents if row["kind"] == "out of memory"]


PACKED = {"packing": True, "max_length": 96, "per_device_train_batch_size": 1}
KINDS: dict[str, tuple[Any, dict[str, Any]]] = {
    "padded": (VerifiedSFT, {}),
    "packed": (VerifiedSFT, PACKED),
    "plain trainer": (VerifiedPlain, {}),
    "mean": (MeanLoss, {}),
    "uncounted": (UncountedLoss, {}),
}
FAULTS = {
    "forward": ("where=forward,rate=0.3,seed=7,count=1", 1),
    "backward": ("where=backward,rate=0.3,seed=7,count=1", 1),
    "repeatedly": ("rate=0.4,seed=4,rows=1", 2),
    "always": ("rows=1", 2),
}
PAIRS = [
    *(("padded", fault) for fault in ("forward", "always")),
    ("packed", "always"),
    ("plain trainer", "backward"),
    ("mean", "backward"),
    ("uncounted", "repeatedly"),
    *(pytest.param("padded", fault, marks=pytest.mark.long) for fault in ("backward", "repeatedly")),
    *(pytest.param(kind, "backward", marks=pytest.mark.long) for kind in ("packed", "uncounted")),
    pytest.param("mean", "repeatedly", marks=pytest.mark.long),
]


def test_it_is_said_once_when_the_metrics_of_a_repeated_step_cannot_be_taken_back(
    make: Make, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As with a version of TRL that keeps them elsewhere: the training goes on, and reads them as TRL does."""
    moved = dataclasses.replace(upstream._BY_NAME["metrics"], attribute="_moved")
    monkeypatch.setitem(upstream._BY_NAME, "metrics", moved)
    oom._warn_of_metrics.cache_clear()
    clean, disturbed = (make(fault=fault, max_steps=2) for fault in ("", "kind=oom,where=forward,count=1"))
    with caplog.at_level(logging.WARNING):
        for trainer in (clean, disturbed):
            trainer.train()
    assert len(shortages(disturbed)) == 1
    assert_same_end(disturbed, clean)
    said = [one.message for one in caplog.records if "logged twice" in one.message]
    assert len(said) == 1 and said[0].startswith("TRL ")


@pytest.fixture(scope="module")
def clean_ends() -> dict[str, Any]:
    """Undisturbed trainers by kind, made when they are first asked for."""
    return {}


@pytest.mark.filterwarnings("ignore:.*packing.*:UserWarning", "ignore:.*Padding-free.*:UserWarning")
@pytest.mark.parametrize(("kind", "fault"), PAIRS)
def test_the_trajectory_is_the_undisturbed_one(
    make: Make, clean_ends: dict[str, Any], kind: str, fault: str, caplog: pytest.LogCaptureFixture
) -> None:
    trainer_class, options = KINDS[kind]
    if kind not in clean_ends:
        clean_ends[kind] = make(trainer_class, **options)
        clean_ends[kind].train()
        assert shortages(clean_ends[kind]) == []
    specification, at_least = FAULTS[fault]
    disturbed = make(trainer_class, fault=f"kind=oom,{specification}", **options)
    with caplog.at_level(logging.WARNING):
        disturbed.train()
    assert_same_end(disturbed, clean_ends[kind])
    found = shortages(disturbed)
    assert len(found) >= at_least and {row["outcome"] for row in found} == {"recovered"}
    counted = disturbed.transfer_report.to_dict()
    assert counted["memory"]["shortages"] == counted["memory"]["recovered"] == len(found)
    assert counted["step_faults"]["injected"] == len(found)
    divisors = [row["divisor"] for row in found]
    assert divisors == sorted(divisors) and len(set(divisors)) == len(divisors)  # it never steps up
    assert disturbed.describe()["memory"]["micro_batch_divisor"] > divisors[-1]
    assert "the effective batch stays" in caplog.text
    if fault in ("forward", "backward"):
        assert found[0]["micro_step"] == WINDOW  # something of the step had been done already


def test_what_is_done_again_starts_from_the_same_random_state(make: Make) -> None:
    drawn: list[tuple[float, ...]] = []

    class Drawing(VerifiedPlain):
        """Draws from every generator in each micro-step, as dropout does."""

        def compute_loss(self, *arguments: Any, **keywords: Any) -> Any:
            """As upstream."""
            drawn.append((random.random(), float(numpy.random.rand()), float(torch.rand(()))))
            return super().compute_loss(*arguments, **keywords)

    make(Drawing, fault="kind=oom,where=forward,first=2,count=1", max_steps=2).train()
    tried, again = drawn[WINDOW], drawn[WINDOW + 1]
    assert tried == again != drawn[WINDOW + 2]
    assert len(drawn) == WINDOW + 1 + 2 * WINDOW  # a step, the try that failed, the step in halves


@pytest.mark.filterwarnings("ignore:.*packing.*:UserWarning", "ignore:.*Padding-free.*:UserWarning")
@pytest.mark.parametrize("options", [{}, PACKED], ids=["padded", "packed"])
def test_a_single_row_that_does_not_fit_ends_the_run_with_advice(
    make: Make, options: dict[str, Any], tmp_path: Path
) -> None:
    trainer = make(fault="kind=oom,first=2", **{"max_length": 96, **options})
    with pytest.raises(OutOfMemoryError) as caught:
        trainer.train()
    line = str(caught.value)
    assert caught.value.exit_code == 5 and "\n" not in line
    assert f"out of memory with 1 {'sequence' if options else 'row'} (" in line and "at step 2" in line
    for advice in ("--max_length (it is 96)", "--gradient_checkpointing", "--load_in_4bit", "hf-rocm-tune plan"):
        assert advice in line
    assert trainer.state.global_step == 1
    assert [row["outcome"] for row in shortages(trainer)] == ["failed"] * len(shortages(trainer))
    assert len(shortages(trainer)) >= 1 if options else len(shortages(trainer)) == 3


def test_a_shortage_is_described_and_a_state_that_cannot_be_written_is_no_reason_to_stop(
    make: Make, tmp_path: Path
) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out/_step_down.json").mkdir()
    trainer = make(VerifiedPlain, fault="kind=oom,first=2,count=2,rate=1,rows=1")
    trainer.train()
    for row, rows in zip(shortages(trainer), (4, 2), strict=True):
        assert (row["step"], row["micro_step"], row["rows"], row["tokens"]) == (2, 1, rows, rows * 16)
        assert VARIABLE in row["said"]
    assert json.dumps(trainer.transfer_report.incidents)


def test_a_batch_that_must_stay_whole_ends_the_run_and_says_why(make: Make) -> None:
    def collate(rows: list[Any]) -> dict[str, Tensor]:
        return {**default_data_collator(rows), "labels_of_pairs": torch.zeros(len(rows))}

    class Ignoring(VerifiedPlain):
        """Takes away what the model does not know."""

        def compute_loss(self, model: nn.Module, inputs: Any, **more: Any) -> Any:
            """As upstream."""
            known = {name: value for name, value in inputs.items() if name != "labels_of_pairs"}
            return super().compute_loss(model, known, **more)

    trainer = make(Ignoring, fault="kind=oom,count=1", extra={"data_collator": collate})
    with pytest.raises(OutOfMemoryError, match="how to split its labels_of_pairs"):
        trainer.train()


def test_a_micro_batch_that_is_not_split_is_not_analysed(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    analysed: list[int] = []
    split = oom.split

    def counting(batch: Any, divisor: int, **how: Any) -> Any:
        analysed.append(divisor)
        return split(batch, divisor, **how)

    monkeypatch.setattr(oom, "split", counting)
    make().train()
    assert analysed == []
    make(fault="kind=oom,where=forward,count=1").train()
    assert 2 in analysed


def test_other_errors_are_not_taken_for_a_shortage(make: Make) -> None:
    class Failing(VerifiedPlain):
        """Raises what older versions of torch raised, and what is no shortage of the device."""

        def compute_loss(self, *_arguments: Any, **_keywords: Any) -> Any:
            """Fails."""
            raise RuntimeError("CUDA out of memory. Tried to allocate 2 GiB")

    with pytest.raises(RuntimeError, match="Tried to allocate"):
        make(Failing).train()


def test_a_restart_cuts_from_the_start_and_ends_like_the_undisturbed_run(make: Make, tmp_path: Path) -> None:
    run = {"run_id": "run-1"}
    clean = make(max_steps=4)
    clean.train()
    first = make(fault="kind=oom,first=2,count=1", save_strategy="steps", save_steps=2, max_steps=4, extra=run)
    first.train()
    second = make(fault="kind=oom,rows=1", max_steps=4, extra=run)
    second.train(resume_from_checkpoint=str(tmp_path / "out/checkpoint-2"))
    (found,) = shortages(second)
    assert (found["step"], found["divisor"]) == (3, 2)  # not 1: it began where the first had come to
    expected = adapter(clean)
    for name, weight in adapter(second).items():
        torch.testing.assert_close(weight, expected[name], rtol=2e-2, atol=2e-4)


def test_what_a_run_has_learned_is_not_another_run_s(tmp_path: Path) -> None:
    def read(run_id: str, batch_size: int, *, resumed: bool) -> int:
        args = SimpleNamespace(output_dir=str(tmp_path), per_device_train_batch_size=batch_size)
        return read_state(SimpleNamespace(run_id=run_id, args=args), resumed=resumed)[0]

    body = {"run_id": "run-1", "batch_size": 4}
    (tmp_path / STATE_FILE).write_text(json.dumps({**body, "divisor": 2}))
    assert read("run-1", 4, resumed=True) == 2
    assert read("run-1", 4, resumed=False) == 2  # died before its first checkpoint
    assert read("run-2", 4, resumed=True) == read("run-1", 2, resumed=True) == 1
    (tmp_path / STATE_FILE).write_text(json.dumps({**body, "run_id": "", "divisor": 8}))
    assert read("", 4, resumed=True) == 8  # a trainer of the user's own
    assert read("", 4, resumed=False) == 1
    for nonsense in ("", "{", "[]", json.dumps(body), json.dumps({**body, "divisor": "many"}), "\udcff"):
        (tmp_path / STATE_FILE).write_text(nonsense, errors="surrogateescape")
        assert read("run-1", 4, resumed=True) == 1


@pytest.mark.gpu
def test_a_real_shortage_is_stepped_down_from(make: Make) -> None:
    unit = 2**30

    class Hungry(VerifiedPlain):
        """Needs a gigabyte a row from forward to backward."""

        def compute_loss(self, model: nn.Module, inputs: Any, **more: Any) -> Any:
            """As upstream, with ballast."""
            ballast = torch.zeros(unit // 4 * len(inputs["input_ids"]), device=self.args.device, requires_grad=True)
            return super().compute_loss(model, inputs, **more) + 0 * ballast.sum()

    trainer = make(Hungry, use_cpu=False, max_steps=2)
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + 5.5 * unit) / total)
    try:
        trainer.train()
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    (found,) = shortages(trainer)  # two rows take 2 GiB, and as much for the gradient
    assert (found["step"], found["rows"], found["outcome"]) == (1, MICRO, "recovered")
    assert trainer.describe()["memory"]["micro_batch_divisor"] == 2
    (row, _) = (row for row in trainer.state.log_history if "loss" in row)
    assert row["memory/reserved_gib"] >= row["memory/allocated_gib"] > 0
