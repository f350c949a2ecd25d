"""What may change weights on purpose while a trainer watches them: a user's callbacks and trainers, a model's own
tables, an adapter's initialisation. The same without a purpose is a fault.
"""

from __future__ import annotations

import gc
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from transformers import TrainerCallback
from trl import SFTTrainer

from hf_rocm_tune import VerifiedTransferMixin
from hf_rocm_tune.errors import CorruptionError, MemoryFaultError
from hf_rocm_tune.train.sentinels import SentinelCallback
from hf_rocm_tune.transfer import Mover, QueuedDigests
from tests import tiny
from tests.train.trainers import Make, VerifiedSFT, build


class Clips:
    """Writes to its weights in every micro-step."""

    model: Any

    def training_step(self, *arguments: Any, **keywords: Any) -> Any:
        with torch.no_grad():
            for parameter in self.model.parameters():
                if parameter.requires_grad:
                    parameter.clamp_(-0.05, 0.05)
        return super().training_step(*arguments, **keywords)  # type: ignore[misc]


class Clipping(Clips, VerifiedTransferMixin, SFTTrainer):
    """With verification."""


class StockClipping(Clips, SFTTrainer):
    """Without."""


class At(TrainerCallback):
    """Calls a function with the model at the end of every step."""

    def __init__(self, do: Callable[[Any], None]) -> None:
        self.do = do

    def on_step_end(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        self.do(more["model"])


@pytest.fixture
def make(model_path: Path, tmp_path: Path) -> Make:
    """Builds a trainer of four steps; `lora` are options of the adapter."""

    rows = Dataset.from_list([{"text": text[:200]} for text in tiny.training_text()[:16]])

    def make(kind: Any = VerifiedSFT, *, path: Path = model_path, **more: Any) -> Any:
        return build(kind, path, rows, tmp_path / "out", **{"max_steps": 4, "max_length": 48, **more})

    return make


def trained(trainer: Any) -> dict[str, torch.Tensor]:
    trainer.train()
    return {name: each.detach().clone() for name, each in trainer.model.named_parameters() if each.requires_grad}


def base_weight(model: Any) -> torch.nn.Parameter:
    found: torch.nn.Parameter = model.get_parameter("base_model.model.model.layers.0.mlp.up_proj.base_layer.weight")
    return found


def assert_same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in found)


# ---- what is trained ----------------------------------------------------------------------------------------


def test_a_callback_may_write_to_what_is_trained(make: Make) -> None:
    """Through ``.data``, of which torch's version counter hears nothing, as much code does it."""

    def decay(model: Any) -> None:
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.data.mul_(0.9)

    trainer = make()
    trainer.add_callback(At(decay))
    expected = make(SFTTrainer)
    expected.add_callback(At(decay))
    assert_same(trained(trainer), trained(expected))
    counted = trainer.transfer_report.to_dict()["trained"]
    assert counted["checks"] > 4 and counted["mismatches"] == 0


def test_a_trainer_of_the_users_may_write_to_what_is_trained(make: Make) -> None:
    trainer = make(Clipping)
    assert_same(trained(trainer), trained(make(StockClipping)))
    counted = trainer.transfer_report.to_dict()["trained"]
    assert counted["rewritten"] > 0 and counted["mismatches"] == 0


# ---- what is frozen -----------------------------------------------------------------------------------------


def test_a_rewritten_base_weight_is_a_fault_unless_it_is_declared(make: Make) -> None:
    def zero(model: Any) -> None:
        base_weight(model).data = torch.zeros_like(base_weight(model))

    trainer = make(ours={"sentinel_every": 1})
    trainer.add_callback(At(zero))
    with pytest.raises(MemoryFaultError, match=r"were replaced by other tensors .*up_proj"):
        trainer.train()

    trainer = make(ours={"sentinel_every": 1})
    trainer.add_callback(At(lambda model: (zero(model), trainer.mover.mark_derived(base_weight(model), "pruned"))))
    trainer.train()
    rows = trainer.transfer_report.to_dict()["rebaselined"]
    assert rows[0]["reason"] == "pruned" and all("up_proj" in row["tensor"] for row in rows)
    assert trainer.weight_coverage().complete


def test_without_a_look_at_memory_a_replaced_weight_is_still_not_saved(make: Make) -> None:
    trainer = make(ours={"sentinel_every": 0})
    trainer.add_callback(At(lambda model: setattr(base_weight(model), "data", base_weight(model).data * 2)))
    trainer.train()
    with pytest.raises(CorruptionError, match=r"since the start of the training .*not verified: .*up_proj"):
        trainer.save_model()


@pytest.mark.parametrize("kind", ["dynamic", "longrope"])
def test_a_rotary_table_that_follows_the_length_is_explained_and_a_damaged_one_is_not(
    make: Make, model_path: Path, tmp_path: Path, kind: str
) -> None:
    """Dynamic ones take new memory when rows get longer, long ones are rewritten in place in each forward."""
    path = tmp_path / kind
    shutil.copytree(model_path, path)
    config = json.loads((path / "config.json").read_text())
    rope = {"rope_type": kind, "rope_theta": 10000.0, "factor": 2.0}
    if kind == "longrope":
        factors = [1.0 + number / 16 for number in range(config["head_dim"] // 2)]
        rope |= {"short_factor": factors, "long_factor": [3 * each for each in factors]}
        rope["original_max_position_embeddings"] = 16
    config |= {"rope_parameters": rope, "max_position_embeddings": 16 if kind == "dynamic" else 32}
    (path / "config.json").write_text(json.dumps(config))
    trainer = make(path=path, ours={"sentinel_every": 1})
    assert_same(trained(trainer), trained(make(SFTTrainer, path=path)))
    trainer.save_model()
    report = trainer.transfer_report.to_dict()
    assert report["frozen"]["mismatches"] == 0 and trainer.weight_coverage().complete
    assert {row["reason"] for row in report["rebaselined"]} == {"equal to what its configuration gives on the host"}
    assert all("inv_freq" in row["tensor"] for row in report["rebaselined"])

    trainer = make(path=path, ours={"sentinel_every": 1})
    table = "base_model.model.model.rotary_emb.original_inv_freq"
    trainer.add_callback(At(lambda model: model.get_buffer(table).view(torch.int32)[3:4].bitwise_xor_(1 << 20)))
    with pytest.raises(MemoryFaultError, match="inv_freq"):
        trainer.train()


@pytest.mark.parametrize("damage", ["none", "before the cast", "after the cast", "of a weight"])
def test_a_buffer_that_a_model_casts_is_explained_and_a_damaged_one_or_a_weight_is_not(make: Make, damage: str) -> None:
    """As CTRL's forward does with its positions, in the precision of its embeddings."""

    def cast(model: Any) -> None:
        rotary = model.base_model.model.model.rotary_emb
        if damage == "of a weight":
            base_weight(model).data = base_weight(model).data.to(torch.bfloat16).to(torch.float32)
        elif rotary.inv_freq.dtype is torch.float32:
            if damage == "before the cast":
                rotary.inv_freq.view(torch.int32)[3] ^= 1 << 20
            rotary.inv_freq = rotary.inv_freq.to(torch.bfloat16)
            if damage == "after the cast":
                rotary.inv_freq.view(torch.int16)[3] ^= 1 << 4

    trainer = make(ours={"sentinel_every": 1})
    trainer.add_callback(At(cast))
    if damage != "none":
        with pytest.raises(MemoryFaultError, match="were replaced by other tensors"):
            trainer.train()
        return
    trainer.train()
    trainer.save_model()
    report = trainer.transfer_report.to_dict()
    assert report["frozen"]["mismatches"] == 0 and trainer.weight_coverage().complete
    (row,) = report["rebaselined"]
    assert row["tensor"].endswith("inv_freq") and row["reason"] == "equal to the tensor that it replaces"


def test_an_initialisation_that_rewrites_base_weights_is_recorded_weight_by_weight(make: Make) -> None:
    for scheme, expected in (("pissa", 14), (True, 0)):
        trainer = make(lora={"init_lora_weights": scheme})
        rows = trainer.transfer_report.to_dict()["rebaselined"]
        assert len(rows) == expected
        assert all(row["tensor"].endswith(".base_layer.weight") and "initialisation" in row["reason"] for row in rows)
        trainer.train()
        assert trainer.transfer_report.to_dict()["frozen"]["mismatches"] == 0


def test_learning_rates_are_read_once_a_step(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[int] = []
    stock = SentinelCallback._read_rates

    def counting(watched: SentinelCallback) -> Any:
        read.append(1)
        return stock(watched)

    monkeypatch.setattr(SentinelCallback, "_read_rates", counting)
    trainer = make()
    trainer.train()
    assert len(read) == trainer.state.global_step == 4


class Corrupts(TrainerCallback):
    """Flips bits of a frozen weight at one of the trainer's events, behind torch's back."""

    def __init__(self, event: str, at_step: int) -> None:
        self._event, self._at_step = event, at_step

    def _corrupt(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        if state.global_step == self._at_step:
            base_weight(more["model"]).detach().view(torch.int32).numpy()[0, 0] ^= 1 << 20

    def __getattribute__(self, name: str) -> Any:
        wanted = name.startswith("on_") and name == object.__getattribute__(self, "_event")
        return object.__getattribute__(self, "_corrupt" if wanted else name)


@pytest.mark.parametrize("event", ["on_step_end", "on_pre_optimizer_step"])
def test_without_a_save_the_frozen_weights_are_checked_when_the_training_ends(make: Make, event: str) -> None:
    trainer = make(save_strategy="no", ours={"sentinel_every": 1000})
    trainer.add_callback(Corrupts(event, 4 if event == "on_step_end" else 3))
    with pytest.raises(MemoryFaultError, match=r"changed in memory .*the training ends.*up_proj"):
        trainer.train()


# ---- evaluated batches ----------------------------------------------------------------------------------------


class CountsWaits(Mover):
    """Counts how often a batch is asked for its verdict."""

    asked = 0

    def wait_verified(self, tree: Any) -> None:
        self.asked += 1
        super().wait_verified(tree)


class CountsDigests(TrainerCallback):
    """After each evaluated batch: how many digests are still referred to."""

    def __init__(self) -> None:
        self.alive: list[int] = []

    def on_prediction_step(self, *_: Any, **__: Any) -> None:
        self.alive.append(sum(isinstance(each, QueuedDigests) for each in gc.get_objects()))


def test_evaluated_batches_are_prepared_once_and_their_checks_do_not_pile_up(make: Make) -> None:
    counts = CountsDigests()
    with CountsWaits(torch.device("cpu")) as mover:
        rows = Dataset.from_list([{"text": text[:40]} for text in tiny.training_text()[:40]])
        trainer = make(max_steps=1, per_device_eval_batch_size=1, ours={"mover": mover, "eval_dataset": rows})
        trainer.train()
        trainer.add_callback(counts)
        asked = mover.asked
        trainer.evaluate()
    assert len(counts.alive) == 40
    assert max(counts.alive) - counts.alive[0] < 20
    assert mover.asked - asked == 40
