"""Trainer callbacks: frozen weights, replicas and, on request, optimizer state looked at while a run lasts."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from transformers import TrainerCallback

from hf_rocm_tune.errors import CorruptionError, MemoryFaultError
from hf_rocm_tune.integrity.replicas import compare_replicas
from hf_rocm_tune.integrity.sentinels import FrozenSentinel
from hf_rocm_tune.models.placement import tensors_of
from hf_rocm_tune.models.shards import is_sharded

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from torch import Tensor, nn
    from torch.optim import Optimizer
    from transformers import TrainerControl, TrainerState, TrainingArguments

    from hf_rocm_tune.transfer import Digest, TransferReport


class SentinelCallback(TrainerCallback):
    """Checks frozen weights every step by slices, each of them once in ``every`` steps, and in full before a save.

    With several ranks, every ``every`` steps it compares the trainable weights of all ranks too: their optimizers have
    seen the same averaged gradients, so they hold the same bits or something went wrong. A model that is sharded has no
    replicas: each rank watches its own part.

    Args:
        model: whose tensors that do not require gradients are watched.
        report: counts passes and mismatches.
        every: steps in which each tensor is checked once; 0 for never, not before a save either.
        compare_optimizer_every: steps between two comparisons of all of the optimizer's state over all ranks; 0 for
            never.
        arrived_with: the digest that a tensor had when it was loaded, or None where that is not known.

    Raises:
        CorruptionError: from the start, step or save at which a changed tensor was found.
    """

    def __init__(
        self,
        model: nn.Module,
        report: TransferReport,
        *,
        every: int,
        compare_optimizer_every: int = 0,
        arrived_with: Callable[[Tensor], Digest | None] = lambda _: None,
    ) -> None:
        self._model = model
        self._report = report
        self._every = every
        self._compare_optimizer_every = compare_optimizer_every
        self._arrived_with = arrived_with
        self._sentinel: FrozenSentinel | None = None

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """Takes the baselines, before the first step: the digests from the load where they are known."""
        if self._every > 0:
            self._sentinel = FrozenSentinel(
                list_tensors=self._frozen, period=self._every, arrived_with=self._arrived_with
            )
            self._judge(self._sentinel.changed_at_start, "between the load and the first step", state.global_step)

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **more: Any) -> None:
        """Checks the next slice, and the replicas and the optimizer's state when it is time."""
        step = state.global_step
        if self._sentinel is not None:
            self._judge(self._sentinel.check_slice(), f"after step {step}", step)
            if step % self._every == 0 and not is_sharded(self._model):
                self.check_replicas(self._trainable(), f"at step {step}")
        if self._compare_optimizer_every > 0 and step % self._compare_optimizer_every == 0:
            self.check_replicas(self._optimizer_state(more["optimizer"]), f"at step {step}")

    def check_all(self, step: int) -> None:
        """Checks every frozen tensor; called before a save."""
        if self._sentinel is not None:
            self._judge(self._sentinel.check_all(), f"before saving at step {step}", step)

    def check_replicas(self, tensors: Iterable[tuple[str, Tensor]], when: str) -> None:
        """Compares these tensors over all ranks and counts it. Collective.

        Raises:
            CorruptionError: on every rank, see :func:`~hf_rocm_tune.integrity.replicas.compare_replicas`.
        """
        try:
            compared = compare_replicas(tensors, when)
        except CorruptionError:
            self._report.count("replicas", checks=1, mismatches=1)
            raise
        if compared:
            self._report.count("replicas", checks=1)

    def _trainable(self) -> Iterator[tuple[str, Tensor]]:
        return ((name, tensor) for name, tensor in tensors_of(self._model) if tensor.requires_grad)

    def _optimizer_state(self, optimizer: Optimizer) -> Iterator[tuple[str, Tensor]]:
        """Every state tensor, called after its parameter: "<parameter>/exp_avg"."""
        names = {id(parameter): name for name, parameter in self._model.named_parameters()}
        for number, (parameter, state) in enumerate(optimizer.state.items()):
            owner = names.get(id(parameter), f"parameter {number}")
            yield from ((f"{owner}/{name}", value) for name, value in state.items() if torch.is_tensor(value))

    def _frozen(self) -> Iterator[tuple[str, Tensor]]:
        return ((name, tensor) for name, tensor in tensors_of(self._model) if not tensor.requires_grad)

    def _judge(self, changed: list[str], when: str, step: int) -> None:
        self._count(changed)
        if not changed:
            return
        for name in changed:
            self._report.incident(
                {"step": step, "stage": "frozen", "tensor": name, "kind": "changed in memory", "outcome": "stopped"}
            )
        more = f" and {len(changed) - 3} more" if len(changed) > 3 else ""
        raise MemoryFaultError(
            f"frozen weights changed in memory ({when}): {', '.join(changed[:3])}{more}",
            "Nothing was saved since; the checkpoints already written are intact: start the same command again to "
            "continue from the newest one",
        )

    def _count(self, changed: list[str]) -> None:
        assert self._sentinel is not None
        self._report.frozen(passes=self._sentinel.passes, tensors=self._sentinel.tensors, new_mismatches=len(changed))
