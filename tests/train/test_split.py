"""A trainer on a split model: any trainer, all weights trained too, and upstream leaves the cards alone."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from torch import nn
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments, default_data_collator

from hf_rocm_tune import VerifiedTransferMixin, upstream
from hf_rocm_tune.cards.split import clip_over_cards
from hf_rocm_tune.errors import CorruptionError, UsageError
from hf_rocm_tune.job.fit import _devices
from hf_rocm_tune.models.factory import ModelSource, load_model
from hf_rocm_tune.models.split import LayerSplit, SplitMover, device_map, without_dispatch
from hf_rocm_tune.transfer import FaultSpec, Mover
from tests import tiny

CPU = torch.device("cpu")
SPLIT = LayerSplit("model.layers", (1, 1))


class VerifiedPlain(VerifiedTransferMixin, Trainer):
    """In front of the plain trainer."""


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Qwen3, whose output head is tied to its embeddings."""
    return tiny.build("qwen3", tmp_path_factory.mktemp("models"))


@pytest.fixture
def trainer(model_path: Path, tmp_path: Path) -> Callable[..., VerifiedPlain]:
    """Builds a trainer of all weights through a mover."""

    def build(mover: Mover, **options: Any) -> VerifiedPlain:
        model, _ = load_model(ModelSource(name=str(model_path), init={"dtype": "float32"}), mover)
        rows = torch.randint(5, 500, (12, 16), generator=torch.Generator().manual_seed(1)).tolist()
        data = Dataset.from_list([{"input_ids": row, "attention_mask": [1] * 16, "labels": row} for row in rows])
        settings = {
            "output_dir": str(tmp_path / "out"),
            "per_device_train_batch_size": 2,
            "gradient_accumulation_steps": 2,
            "max_steps": 4,
            "learning_rate": 1e-2,
            "max_grad_norm": 0.5,
            "logging_steps": 1,
            "report_to": "none",
            "save_strategy": "no",
            "use_cpu": True,
            "disable_tqdm": True,
        } | options
        return VerifiedPlain(
            model=model,
            args=TrainingArguments(**settings),
            train_dataset=data,
            data_collator=default_data_collator,
            mover=mover,
        )

    return build


def split_mover(faults: str = "") -> SplitMover:
    return SplitMover(SPLIT, [CPU, CPU], faults=FaultSpec.parse(faults) if faults else None)


def numbers(trained: VerifiedPlain) -> list[tuple[float, float]]:
    return [(row["loss"], row["grad_norm"]) for row in trained.state.log_history if "loss" in row]


def test_all_weights_of_a_tied_model_train_as_on_one_card(trainer: Callable[..., VerifiedPlain]) -> None:
    with Mover(CPU) as one, split_mover() as two:
        whole, parts = trainer(one), trainer(two)
        for each in (whole, parts):
            each.train()
        assert numbers(whole) == numbers(parts) and len(numbers(parts)) == 4
        for (name, left), (_, right) in zip(
            whole.model.named_parameters(), parts.model.named_parameters(), strict=True
        ):
            assert torch.equal(left, right), name
        assert parts.weight_coverage().complete
        described = parts.describe()["split"]
        assert described is not None and whole.describe()["split"] is None
        held = [row["model_bytes"] for row in described["cards"]]
        assert sum(held) == parts.weight_coverage().device_bytes
        assert held[0] > held[1] > 0  # the embeddings, which are the head too, are on the first


def test_the_norm_over_the_cards_is_verified_on_its_way(trainer: Callable[..., VerifiedPlain]) -> None:
    harmed = split_mover("kind=zero,tensor=gradient_norm.to1,persist=1")
    with harmed as mover, pytest.raises(CorruptionError, match="gradient_norm"):
        trainer(mover).train()


def test_frozen_weights_of_every_card_are_watched(trainer: Callable[..., VerifiedPlain]) -> None:
    with split_mover() as mover:
        made = trainer(mover, max_steps=2)
        for name, parameter in made.model.named_parameters():
            parameter.requires_grad = "norm" in name
        made.train()
        watched = made.transfer_report.to_dict()["frozen"]
        frozen = [name for name, each in made.model.named_parameters() if not each.requires_grad]
        assert watched["tensors"] >= len(frozen) and {SPLIT.card_of(name) for name in frozen} == {0, 1}


def test_optimizer_state_is_placed_with_its_parameter(trainer: Callable[..., VerifiedPlain]) -> None:
    with split_mover() as mover:
        made = trainer(mover, max_steps=1)
        made.train()
        names = {id(parameter): name for name, parameter in made.model.named_parameters()}
        parameters = [each for group in made.optimizer.param_groups for each in group["params"]]
        for number, parameter in enumerate(parameters):
            counted = mover.card_reports[SPLIT.card_of(names[id(parameter)])]
            before = counted.to_dict()["optimizer"]["tensors"]
            moved = made.place_tensor(torch.ones(3), name=f"optimizer.state.{number}.exp_avg", stage="optimizer")
            assert mover.provenance(moved) == "transferred" and counted.to_dict()["optimizer"]["tensors"] == before + 1


def test_a_model_on_two_accelerators_is_neither_moved_nor_replicated(trainer: Callable[..., VerifiedPlain]) -> None:
    """What `set_device_map` says on the model is what makes transformers keep its hands off."""
    with Mover(CPU) as mover:
        made = trainer(mover)
        assert (made.is_model_parallel, made.place_model_on_device) == (False, True)
        made.model.hf_device_map = {"": torch.device("cuda:0"), "model.layers.1": torch.device("cuda:1")}
        args = made.args
        args._n_gpu = 2
        again = VerifiedPlain(model=made.model, args=args, train_dataset=made.train_dataset, mover=mover)
        assert (again.is_model_parallel, again.place_model_on_device, again.args.n_gpu) == (True, False, 1)


def test_transformers_puts_no_copies_between_devices(model_path: Path) -> None:
    """To torch "cpu" and "cpu:0" are two devices, so transformers takes this for a model of several."""
    apart = {"": CPU, "model.layers.1": torch.device("cpu:0")}

    called: list[Any] = []
    with upstream.replaced("dispatch", lambda stock: lambda *arguments: called.append(arguments)):
        AutoModelForCausalLM.from_pretrained(model_path, device_map=apart)
    assert len(called) == 1
    with without_dispatch():
        ours = AutoModelForCausalLM.from_pretrained(model_path, device_map=apart)
    assert [name for name, module in ours.named_modules() if hasattr(module, "_hf_hook")] == []
    assert not hasattr(ours, "hf_device_map")


def test_the_device_map_of_a_plain_mover_and_of_logical_cards_is_one_device() -> None:
    with Mover(CPU) as one, split_mover() as two:
        assert device_map(one) == device_map(two) == {"": CPU}


@pytest.mark.parametrize(("visible", "wanted"), [(1, None), (1, 2), (2, 3)])
def test_too_few_cards_are_said(visible: int, wanted: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: visible)
    with pytest.raises(UsageError, match=f"needs {wanted or 2} cards and this process sees {visible}"):
        _devices(torch.device("cuda", 0), wanted, 40)


def test_as_many_cards_as_are_seen_unless_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    first = torch.device("cuda", 0)
    assert [device.index for device in _devices(first, None, 40)] == [0, 1, 2]
    assert [device.index for device in _devices(first, 2, 40)] == [0, 1]
    assert _devices(CPU, None, 40) == [CPU, CPU]
    with pytest.raises(UsageError, match="2 layers cannot be distributed over 3 cards"):
        _devices(first, None, 2)


# ---- clipping over cards: torch's own norm and gradients, and nothing comes over unverified ---------------------


def three_cards(faults: str = "") -> SplitMover:
    return SplitMover(LayerSplit("layers", (2, 1, 3)), [CPU] * 3, faults=FaultSpec.parse(faults) if faults else None)


def parameters(dtype: torch.dtype, scale: float = 1.0) -> list[nn.Parameter]:
    torch.manual_seed(3)
    made = [nn.Parameter(torch.randn(size, 33).to(dtype)) for size in (5, 16, 1, 64, 7, 9)]
    for each in made:
        each.grad = (scale * torch.randn_like(each)).contiguous()
    made.insert(3, nn.Parameter(torch.randn(4).to(dtype)))  # has no gradient
    return made


def owners(made: list[nn.Parameter]) -> dict[int, int]:
    return {id(each): number % 3 for number, each in enumerate(made)}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("max_norm", [0.5, 1e6, math.inf])
def test_bit_for_bit_torchs_own(dtype: torch.dtype, max_norm: float) -> None:
    made = parameters(dtype)
    expected = copy.deepcopy(made)
    for theirs, ours in zip(expected, made, strict=True):
        theirs.grad = None if ours.grad is None else ours.grad.clone()
    norm = nn.utils.clip_grad_norm_(expected, max_norm)
    with three_cards() as cards:
        found = clip_over_cards(cards, owners(made), iter(made), max_norm)
        counted = cards.report.to_dict()["activations"]
    assert torch.equal(found, norm) and found.shape == norm.shape
    for theirs, ours in zip(expected, made, strict=True):
        assert (ours.grad is None) == (theirs.grad is None)
        assert ours.grad is None or (theirs.grad is not None and torch.equal(ours.grad, theirs.grad))
    assert counted["tensors"] == 6 and counted["verified_bytes"] == counted["bytes"] > 0


@pytest.mark.parametrize("value", [math.inf, math.nan])
def test_a_gradient_that_is_not_finite_shows_in_the_norm(value: float) -> None:
    made = parameters(torch.float32)
    assert made[-1].grad is not None
    made[-1].grad[0, 0] = value
    with three_cards() as cards:
        assert not math.isfinite(clip_over_cards(cards, owners(made), made, 1.0).item())


@pytest.mark.parametrize("leg", ["gradient_norms.from1", "gradient_norm.to2"])
def test_a_norm_that_arrives_wrong_is_found(leg: str) -> None:
    made = parameters(torch.float32)
    with three_cards(f"kind=zero,tensor={leg},count=1") as cards:
        found = clip_over_cards(cards, owners(made), made, 1.0)
        counted = cards.report.to_dict()["activations"]
    assert counted["mismatches"] == counted["recovered"] == 1
    assert torch.equal(
        found, nn.utils.get_total_norm([each.grad for each in parameters(torch.float32) if each.grad is not None])
    )
    with three_cards(f"kind=zero,tensor={leg},persist=1") as cards, pytest.raises(CorruptionError):
        clip_over_cards(cards, owners(made), made, 1.0)
