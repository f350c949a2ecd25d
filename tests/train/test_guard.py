"""Training that dies in silence is named; a step that is not finite changes nothing; sound training is left alone."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import TrainerCallback

from hf_rocm_tune.errors import DivergedError
from hf_rocm_tune.train.guard import StepGuard
from tests.train.trainers import Make, VerifiedPlain

BAD = (math.nan, math.inf, -math.inf)


# ---- the numbers alone ------------------------------------------------------------------------------------------


def judged(guard: StepGuard, step: int, loss: float, norm: float = 1.0, **more: Any) -> tuple[bool, bool]:
    """Whether the step is skipped, and whether the run stops."""
    found = guard.judge(step, loss, norm, **more)
    return (False, False) if found is None else (found.skips, found.stops)


@pytest.mark.parametrize("bad", BAD)
def test_a_step_with_a_number_that_is_not_finite_is_skipped_and_only_that(bad: float) -> None:
    guard = StepGuard(max_skipped=5)
    numbers = [(1.0, 2.0), (bad, 2.0), (1.0, bad), (bad, bad), (1.0, 2.0)]
    skipped = [judged(guard, step, *each)[0] for step, each in enumerate(numbers, start=1)]
    assert skipped == [False, True, True, True, False]


def test_a_spike_of_the_loss_is_named_once() -> None:
    guard = StepGuard(max_skipped=5)
    losses = [2.5 - 0.01 * step + 0.3 * (step % 3) for step in range(1, 60)]
    assert not any(guard.judge(step, loss, 1.0) for step, loss in enumerate(losses, start=1))
    found = guard.judge(60, 40.0, 1.0)
    assert found is not None and found.kind == "loss spike" and not found.stops and not found.skips
    assert "step 60: the loss is 40" in found.text
    assert guard.judge(61, 40.0, 1.0) is None


def test_a_gradient_scaler_looks_after_gradients_itself() -> None:
    guard = StepGuard(max_skipped=0)
    assert not judged(guard, 1, 1.0, math.inf, scaled=True)[0]
    assert judged(guard, 2, math.nan, scaled=True)[0]


# ---- in a trainer -----------------------------------------------------------------------------------------------


class Snapshots(TrainerCallback):
    """Trainable weights and optimizer state before each step and after the last."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self.taken: list[list[Tensor]] = []

    def _take(self, optimizer: Any) -> None:
        weights = [weight for weight in self._model.parameters() if weight.requires_grad]
        state = [value for each in optimizer.state.values() for value in each.values() if torch.is_tensor(value)]
        self.taken.append([tensor.detach().clone() for tensor in [*weights, *state]])

    def on_step_begin(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        """Before."""
        self._take(more["optimizer"])

    def on_train_end(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        """After."""
        self._take(more["optimizer"])


def same(one: list[Tensor], other: list[Tensor]) -> bool:
    return len(one) == len(other) and all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def guarded(trainer: Any) -> list[tuple[int, str, str]]:
    rows = [row for row in trainer.transfer_report.incidents if row["stage"] == "guard"]
    return [(row["step"], row["kind"], row["outcome"]) for row in rows]


def test_a_step_with_nan_gradients_changes_no_weight_and_no_optimizer_state(
    make: Make, caplog: pytest.LogCaptureFixture
) -> None:
    trainer = make()

    def harm(_module: Any, _inputs: Any, output: Tensor) -> None:
        if trainer.state.global_step == 2:  # however often the step is computed
            output.register_hook(lambda gradient: torch.full_like(gradient, math.nan))

    trainer.model.get_output_embeddings().register_forward_hook(harm)
    snapshots = Snapshots(trainer.model)
    trainer.add_callback(snapshots)
    trainer.train()
    first, second, third, fourth, end = snapshots.taken
    assert same(third, fourth)
    assert not same(first, second) and not same(second, third) and not same(fourth, end)
    assert all(tensor.isfinite().all() for tensor in end)
    assert guarded(trainer) == [(3, "not finite", "skipped")]
    assert "step 3: loss 6" in caplog.text and "gradient norm nan: the step was skipped" in caplog.text
    assert trainer.state.global_step == 4


def test_nan_that_does_not_come_again_when_its_step_is_computed_twice_is_recovered_and_reported(make: Make) -> None:
    ends = []
    for fault in ("", "kind=nan,first=3,count=1"):  # the third step is the one that is computed twice
        trainer = make(fault=fault)
        trainer.train()
        ends.append([weight.detach().clone() for weight in trainer.model.parameters() if weight.requires_grad])
    assert same(*ends)
    (row,) = trainer.transfer_report.incidents
    assert (row["step"], row["stage"], row["tensor"], row["outcome"]) == (3, "arithmetic", "gradients", "recovered")
    assert guarded(trainer) == []


@pytest.mark.parametrize("bad", [BAD[0], *(pytest.param(bad, marks=pytest.mark.long) for bad in BAD[1:])])
def test_a_loss_that_is_not_finite_is_not_used_even_where_its_gradients_are(make: Make, bad: float) -> None:
    class Harming(VerifiedPlain):
        """Adds something to the loss that has no gradient."""

        def compute_loss(self, *arguments: Any, **keywords: Any) -> Any:
            """As upstream, and more."""
            loss = super().compute_loss(*arguments, **keywords)
            return loss + (bad if self.state.global_step == 1 else 0)

    trainer = make(Harming)
    snapshots = Snapshots(trainer.model)
    trainer.add_callback(snapshots)
    trainer.train()
    assert same(snapshots.taken[1], snapshots.taken[2]) and not same(snapshots.taken[2], snapshots.taken[3])
    assert guarded(trainer) == [(2, "not finite", "skipped")]


def test_weights_that_are_not_finite_are_never_saved(make: Make, tmp_path: Path) -> None:
    class Spoiling(TrainerCallback):
        """What an optimizer does whose step overflows."""

        def on_step_end(self, args: Any, state: Any, control: Any, **more: Any) -> None:
            """At the third step."""
            if state.global_step == 3:
                weight = next(each for each in more["model"].parameters() if each.requires_grad)
                weight.data.view(-1)[5] = math.inf

    trainer = make(save_strategy="steps", save_steps=1)
    trainer.add_callback(Spoiling())
    with pytest.raises(DivergedError, match=r"1 trainable weights hold NaN or infinity: .*lora_A.*checkpoint-2 is"):
        trainer.train()
    assert sorted(path.name for path in (tmp_path / "out").glob("checkpoint-*")) == ["checkpoint-1", "checkpoint-2"]


def test_a_loss_of_zero_is_named_with_its_causes(make: Make, caplog: pytest.LogCaptureFixture) -> None:
    class Zero(VerifiedPlain):
        """The device returns zeros."""

        def compute_loss(self, *arguments: Any, **keywords: Any) -> Any:
            """Nothing of it is left."""
            return super().compute_loss(*arguments, **keywords) * 0

    trainer = make(Zero, max_steps=25)
    with pytest.raises(DivergedError, match="for 20 steps now"):
        trainer.train()
    assert guarded(trainer) == [(3, "dead", "named"), (10, "nothing moves", "named"), (20, "dead", "stopped")]
    assert "answers cut off by --max_length" in caplog.text


def test_adapters_that_do_not_move_are_named(make: Make, caplog: pytest.LogCaptureFixture) -> None:
    class Stuck(TrainerCallback):
        """Takes all gradients away before the optimizer sees them."""

        def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **more: Any) -> None:
            """At every step."""
            more["model"].zero_grad()

    trainer = make(max_steps=11)
    trainer.add_callback(Stuck())
    trainer.train()
    assert guarded(trainer) == [(10, "nothing moves", "named")]
    assert "no trainable weight changed in 10 steps (28 weights)" in caplog.text


def test_one_adapter_that_gets_no_gradient_is_named(make: Make, caplog: pytest.LogCaptureFixture) -> None:
    trainer = make(max_steps=11)
    name, weight = next((n, w) for n, w in trainer.model.named_parameters() if "lora_B" in n)
    weight.register_hook(torch.zeros_like)
    trainer.train()
    assert guarded(trainer) == [(10, "adapters do not move", "named")]
    assert f"1 LoRA matrices B are still zero after 10 steps ({name})" in caplog.text
