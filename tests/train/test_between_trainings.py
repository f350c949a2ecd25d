"""Weights that change while nobody trains, and LoRA layers that compute with other numbers than they are said to."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from peft.tuners.lora import LoraLayer
from torch import Tensor
from transformers import TrainerCallback

from hf_rocm_tune.errors import CorruptionError, MemoryFaultError
from tests.train.trainers import Make


def weight(trainer: Any, part: str) -> Tensor:
    return next(each for name, each in trainer.model.named_parameters() if part in name)


def flip(tensor: Tensor) -> None:
    """Changes one byte of the memory, which torch does not see."""
    raw = torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage())
    raw[tensor.storage_offset() * tensor.element_size() + 3] ^= 64


FACES: dict[str, Callable[[Any], Any]] = {
    "train": lambda trainer: trainer.train(),
    "evaluate": lambda trainer: trainer.evaluate(),
    "predict": lambda trainer: trainer.predict(trainer.eval_dataset),
}


@pytest.mark.parametrize("face", FACES)
@pytest.mark.parametrize("trained", [True, False])
def test_a_weight_that_changed_since_a_training_is_found_when_a_face_is_entered(
    make: Make, face: str, trained: bool
) -> None:
    trainer = make(max_steps=1)
    trainer.train()
    FACES["evaluate"](trainer)  # no alarm
    flip(weight(trainer, "lora_A" if trained else "embed_tokens"))
    with pytest.raises(MemoryFaultError, match="trained weights" if trained else "frozen weights"):
        FACES[face](trainer)


@pytest.mark.parametrize("part", ["lora_B", "down_proj.base_layer"])
def test_a_weight_that_changed_since_its_load_is_found_before_an_evaluation(make: Make, part: str) -> None:
    trainer = make()
    flip(weight(trainer, part))
    with pytest.raises(MemoryFaultError, match="since they were loaded, before evaluating"):
        trainer.evaluate()


def test_the_first_training_does_not_say_that_it_is_not_the_first(make: Make) -> None:
    trainer = make()
    flip(weight(trainer, "embed_tokens"))
    with pytest.raises(MemoryFaultError, match=r"since they were loaded, before training\)"):
        trainer.train()


def test_what_the_program_writes_between_two_trainings_is_reported_and_no_fault(make: Make) -> None:
    trainer = make(max_steps=1)
    trainer.train()
    with torch.no_grad():
        weight(trainer, "lora_A").mul_(0.5)
    trainer.evaluate()
    trainer.train()
    told = trainer.transfer_report.to_dict()["rebaselined"]
    assert [each["reason"] for each in told if each["tensor"] == "trained weights"] == [
        "written by the program before evaluating"
    ]


class Writer(TrainerCallback):
    def on_step_end(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        with torch.no_grad():
            next(each for name, each in more["model"].named_parameters() if "lora_A" in name).mul_(0.9)


def test_what_a_callback_writes_is_reported(make: Make) -> None:
    trainer = make(max_steps=2)
    trainer.add_callback(Writer())
    trainer.train()
    told = trainer.transfer_report.to_dict()["rebaselined"]
    assert [each["reason"] for each in told if each["tensor"] == "trained weights"] == [
        "written by a callback (on_step_end)"
    ]


def layer_of(trainer: Any) -> Any:
    return next(each for each in trainer.model.modules() if isinstance(each, LoraLayer))


def scale(layer: Any) -> None:
    layer.scaling["default"] *= -1


def drop(layer: Any) -> None:
    layer.lora_dropout["default"] = torch.nn.Dropout(0.5)


@pytest.mark.parametrize("harm", [scale, drop])
@pytest.mark.parametrize("early", [True, False])
def test_a_lora_layer_with_other_settings_is_found(make: Make, harm: Callable[[Any], None], early: bool) -> None:
    """Before the first step, and in the middle of one, by something that is no callback."""
    trainer = make(max_steps=3)
    if early:
        harm(layer_of(trainer))
    else:
        stock, harmed = trainer.compute_loss, list[None]()

        def compute_loss(*given: Any, **more: Any) -> Any:
            if trainer.state.global_step == 1 and not harmed:
                harmed.append(harm(layer_of(trainer)))
            return stock(*given, **more)

        trainer.compute_loss = compute_loss
    with pytest.raises(CorruptionError, match="settings of LoRA's layer"):
        trainer.train()
    assert trainer.state.global_step == (0 if early else 1)
