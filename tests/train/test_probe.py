"""The probe's step: it is the worst that the run can meet, and nothing is left of it, however it ends."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from datasets import Dataset

from hf_rocm_tune.errors import UsageError
from hf_rocm_tune.models.recompute import layers_of
from hf_rocm_tune.plan.candidates import Candidate, Way
from hf_rocm_tune.train.faults import STEP_VARIABLE as VARIABLE
from hf_rocm_tune.train.probe import probe, set_checkpointing, set_way, try_on_all_ranks, worst_rows
from hf_rocm_tune.train.trainer import VerifiedSFTTrainer
from tests.train.trainers import build as build_trainer

Build = Callable[..., VerifiedSFTTrainer]


@pytest.fixture
def build(model_path: Path, rows: Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Build:
    """A trainer with adapters and dropout that has not trained."""

    def make(fault: str = "", **options: Any) -> VerifiedSFTTrainer:
        monkeypatch.setenv(VARIABLE, fault)
        sizes = {"per_device_train_batch_size": 4, "max_length": 32}
        lora, ours = {"lora_dropout": 0.1}, {"consent_unverified": True}
        made: VerifiedSFTTrainer = build_trainer(
            VerifiedSFTTrainer, model_path, rows, tmp_path / "out", lora=lora, ours=ours, **{**sizes, **options}
        )
        return made

    return make


def way(micro_batch: int = 4, accumulation: int = 2, *, checkpointing: bool = False) -> Candidate:
    return Candidate(
        micro_batch=micro_batch,
        accumulation=accumulation,
        checkpointing=checkpointing,
        predicted=1,
        tokens_per_second=1.0,
    )


def state_of(trainer: VerifiedSFTTrainer) -> dict[str, Any]:
    """Everything that a step could leave behind."""
    model = trainer.model
    return {
        "weights": {name: tensor.clone() for name, tensor in model.state_dict().items()},
        "gradients": [name for name, parameter in model.named_parameters() if parameter.grad is not None],
        "python": random.getstate(),
        "numpy": numpy.random.get_state()[1].tolist(),
        "torch": torch.get_rng_state(),
        "metrics": copy.deepcopy({key: dict(value) for key, value in trainer._metrics.items()}),
        "tokens": trainer._total_train_tokens,
        "optimizer": trainer.optimizer,
        "prepared": [id(one) for one in trainer.accelerator._models],
        "attributes": sorted(vars(model)),
        "accelerator": sorted(vars(trainer.accelerator)),
        "recomputing": [name for name, one in model.named_modules() if getattr(one, "gradient_checkpointing", False)],
        "settings": (trainer.args.activation_checkpointing, trainer.args.gradient_checkpointing),
        "training": model.training,
        "global_step": trainer.state.global_step,
        "history": list(trainer.state.log_history),
        "steps": vars(trainer).get("current_gradient_accumulation_steps"),
        "incidents": list(trainer.transfer_report.incidents),
    }


def assert_equal(before: Any, after: Any, where: str = "") -> None:
    if isinstance(before, dict):
        assert before.keys() == after.keys(), where
        for name in before:
            assert_equal(before[name], after[name], f"{where}/{name}")
    elif isinstance(before, torch.Tensor):
        assert torch.equal(before, after), where
    else:
        assert before == after, where


@pytest.mark.parametrize(
    ("fault", "fits", "checkpointing"),
    [
        ("", True, True),
        ("kind=oom,where=forward", False, False),
        ("kind=oom,where=backward", False, True),
        ("kind=oom,rows=4", True, False),
        ("kind=nan", True, False),
    ],
)
def test_nothing_is_left_of_a_probe(build: Build, fault: str, fits: bool, checkpointing: bool) -> None:
    trainer = build(fault)
    before = state_of(trainer)
    assert probe(trainer, way(checkpointing=checkpointing)) == (fits, None), "on a CPU nothing measures the peak"
    assert_equal(before, state_of(trainer))


def test_mixed_precision_is_on_in_a_probe_and_as_it_was_afterwards(build: Build) -> None:
    trainer = build(bf16=True)
    seen: list[bool] = []
    trainer.model.get_base_model().register_forward_pre_hook(
        lambda module, arguments: seen.append(torch.is_autocast_enabled("cpu"))
    )
    before = state_of(trainer)
    assert probe(trainer, way(2, 1))[0]
    assert seen == [True]
    assert_equal(before, state_of(trainer))
    trainer.accelerator.prepare_model(trainer.model)
    trainer.model(input_ids=torch.tensor([[5, 6]]))
    assert seen == [True, True], "a model that still counted as prepared would get no mixed precision for training"


def test_what_a_probe_ran_was_the_real_step_with_gradients_in_place(build: Build) -> None:
    trainer = build()
    seen: list[tuple[tuple[int, ...], bool, bool]] = []

    def look(module: torch.nn.Module, arguments: Any, keywords: dict[str, Any]) -> None:
        gradients = any(parameter.grad is not None for parameter in module.parameters())
        seen.append((tuple(keywords["input_ids"].shape), module.training, gradients))

    trainer.model.get_base_model().register_forward_pre_hook(look, with_kwargs=True)
    assert probe(trainer, way(4, 2))[0]
    assert probe(trainer, way(2, 1))[0]
    assert seen == [((4, 32), True, False), ((4, 32), True, True), ((2, 32), True, False)]


def test_a_peak_above_the_budget_does_not_fit(build: Build, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = build()
    assert try_on_all_ranks(trainer, way(), budget=1 << 30).fits
    # Without a card the peak is 0, and the allocator's slack alone is above this budget.
    assert not try_on_all_ranks(trainer, way(), budget=1).fits


def test_a_way_that_is_set_is_trained(build: Build) -> None:
    trainer = build(max_steps=1)
    shapes: list[int] = []
    trainer.model.get_base_model().register_forward_pre_hook(
        lambda module, arguments, keywords: shapes.append(len(keywords["input_ids"])), with_kwargs=True
    )
    set_way(trainer, Way(micro_batch=2, accumulation=3, checkpointing=True, recompute=(0, 1)))
    trainer.train()
    assert shapes == [2, 2, 2]
    assert [layer.gradient_checkpointing for layer in layers_of(trainer.model)] == [True, False]
    assert "context_fn" in layers_of(trainer.model)[0]._gradient_checkpointing_func.keywords


@pytest.mark.parametrize("built_with", [False, True])
def test_checkpointing_turned_on_and_off_leaves_one_hook_or_none(build: Build, built_with: bool) -> None:
    trainer = build(activation_checkpointing=built_with)
    embeddings = trainer.model.get_input_embeddings()
    set_checkpointing(trainer, True)
    set_checkpointing(trainer, True)
    assert len(embeddings._forward_hooks) == 1
    set_checkpointing(trainer, False)
    assert len(embeddings._forward_hooks) == 0


# ---- the rows -------------------------------------------------------------------------------------------------


def prepared(*lengths: int) -> Dataset:
    return Dataset.from_list(
        [{"input_ids": [7] * size, "labels": [number] * size} for number, size in enumerate(lengths)]
    )


def test_the_longest_row_of_many_is_found_and_one_row_has_padding() -> None:
    rows = worst_rows(prepared(*([3] * 12_000), 9, *([4] * 9_000), 8), 3, limit=1000)
    assert [len(row["input_ids"]) for row in rows] == [9, 9, 8]
    assert [len(row["labels"]) for row in rows] == [9, 9, 8]
    assert rows[0]["labels"][0] == 12_000


def test_a_shuffled_selection_is_searched_in_its_own_order() -> None:
    chosen = prepared(50, 3, 9, 4).select([3, 1, 2])
    assert [len(row["input_ids"]) for row in worst_rows(chosen, 1, limit=1000)] == [9]


def test_a_packed_row_that_is_cut_keeps_its_sequences() -> None:
    rows = Dataset.from_list([{"input_ids": [7] * 9, "seq_lengths": [5, 4]}])
    assert [row["seq_lengths"] for row in worst_rows(rows, 2, limit=9)] == [[5, 4], [5, 3]]


@pytest.mark.parametrize(("limit", "found"), [(10, 10), (2, 2), (None, 4)])
def test_a_stream_is_stretched_to_the_longest_that_may_come(limit: int | None, found: int) -> None:
    class Stream:
        def __iter__(self) -> Iterator[dict[str, Any]]:
            yield {"input_ids": [1, 2, 3, 4], "seq_lengths": [3, 1], "text": "abcd"}

    (row,) = worst_rows(Stream(), 1, limit=limit)
    assert len(row["input_ids"]) == found == sum(row["seq_lengths"])
    assert row["text"] == "abcd"


def test_no_rows_are_a_usage_error() -> None:
    for empty in (prepared(), iter(())):
        with pytest.raises(UsageError, match="no row is left"):
            worst_rows(prepared(3).select([]) if isinstance(empty, Dataset) else empty, 1, limit=8)
