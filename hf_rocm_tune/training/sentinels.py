"""Trainer callbacks: frozen weights, trained state, replicas and, on request, optimizer state looked at in a run."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from transformers import TrainerCallback

from hf_rocm_tune.errors import CorruptionError, MemoryFaultError
from hf_rocm_tune.integrity.replicas import compare_replicas
from hf_rocm_tune.integrity.sentinels import Change, FrozenSentinel, TrainedSentinel
from hf_rocm_tune.models.attest import RECOMPUTED, TRAINED, is_recomputed
from hf_rocm_tune.models.placement import findable_tensors_of, tensors_of
from hf_rocm_tune.models.quantised import running_statistics
from hf_rocm_tune.models.shards import is_sharded, local, reshard
from hf_rocm_tune.transfer import digest
from hf_rocm_tune.transfer.raw_bytes import storage_bytes

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from torch import Tensor, nn
    from torch.optim import Optimizer
    from transformers import TrainerControl, TrainerState, TrainingArguments

    from hf_rocm_tune.transfer import Mover

_UPSTREAM = frozenset({"hf_rocm_tune", "transformers", "trl", "peft", "accelerate", "torch", "typing", "builtins"})


_SAID = {
    "changed in memory": "changed in memory",
    "replaced": "were replaced by other tensors",
    "removed": "were removed",
    "added": "were added",
}
_ADVICE = (
    "Nothing was saved since; the checkpoints already written are intact: start the same command again to continue "
    "from the newest one. Code that means to rewrite a frozen weight declares it: trainer.mover.mark_derived(it, why)"
)


def is_foreign(cls: type) -> bool:
    """Whether a class, or one that it is made of, has code that is neither upstream's nor ours."""
    return any(
        base.__module__.partition(".")[0] not in _UPSTREAM
        and any(callable(value) for name, value in vars(base).items() if not name.startswith("__"))
        for base in cls.__mro__
    )


class SentinelCallback(TrainerCallback):
    """Watches device memory while a run lasts.

    Frozen weights are looked at every step by slices, each of them once in ``every`` steps, and in full before a save.
    Trained weights and the optimizer's state are looked at after each update, and again before the next one and before
    a save. What a look has found is told by `settle`, when the training loop has waited for the device anyway.

    With several ranks, every ``every`` steps the trainable weights of all ranks are compared too: their optimizers have
    seen the same averaged gradients, so they hold the same bits or something went wrong. A model that is sharded has no
    replicas: each rank watches its own part.

    Args:
        model: whose tensors are watched.
        mover: knows with which digest each arrived or was derived; its report counts passes and mismatches.
        every: steps in which each frozen tensor is looked at once; 0: no look at memory at all. Before a save it is
            then still looked for frozen tensors that were replaced.
        compare_optimizer_every: steps between two comparisons of all of the optimizer's state over all ranks; 0 for
            never.
        excuse_writes: see `TrainedSentinel`.
        references: models that are only evaluated: all their tensors are watched.

    Raises:
        MemoryFaultError: from the start, `settle` or save that told of a change.
    """

    def __init__(
        self,
        model: nn.Module,
        mover: Mover,
        *,
        every: int,
        compare_optimizer_every: int = 0,
        excuse_writes: bool = False,
        references: Sequence[nn.Module] = (),
    ) -> None:
        self._model = model
        self._mover, self._report = mover, mover.report
        self._every = every
        self._compare_optimizer_every = compare_optimizer_every
        self._excuse_writes = excuse_writes
        self._references = references
        self._optimizer: Optimizer | None = None
        self._sentinel: FrozenSentinel | None = None
        self._trained: TrainedSentinel | None = None
        self._explained: set[tuple[str, str]] = set()

    # ---- events ---------------------------------------------------------------------------------------------

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **more: Any
    ) -> None:
        """Takes the baselines, before the first step: the digests from the load where they are known."""
        if self._every <= 0:
            return
        self._optimizer = more.get("optimizer")
        self._sentinel = FrozenSentinel(
            list_tensors=self._frozen, period=self._every, arrived_with=self._mover.digest_of, explain=self._explain
        )
        changes = self._sentinel.changed_at_start
        if self._optimizer is not None and not _moves_weights_itself(self._optimizer):
            self._trained = TrainedSentinel(
                self._optimizer,
                local=local,
                arrived_with=self._mover.digest_of,
                excuse_writes=self._excuse_writes or is_sharded(self._model),
            )
            changes = [*changes, *self._trained.begin()]
        for each in self._trained_parameters():
            if self._mover.was_verified(local(each)):
                self._mover.mark_trained(local(each), TRAINED)
        self._judge(changes, "between the load and the first step", state.global_step)

    def on_optimizer_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        """Remembers what the update has made."""
        self.take()

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **more: Any) -> None:
        """Looks at the next slice, and compares the replicas and the optimizer's state when it is time."""
        step = state.global_step
        if self._sentinel is not None:
            self._drop_what_is_gathered()
            self._judge(self._sentinel.check_slice(), f"after step {step}", step)
            if step % self._every == 0 and not is_sharded(self._model):
                self.check_replicas(self._trainable(), f"at step {step}")
        if self._compare_optimizer_every > 0 and step % self._compare_optimizer_every == 0:
            self.check_replicas(self._optimizer_state(more["optimizer"]), f"at step {step}")

    # ---- looking --------------------------------------------------------------------------------------------

    def take(self) -> None:
        """The trained state has been changed on purpose: what it is now is right."""
        if self._trained is not None:
            self._trained.take()

    def look(self) -> None:
        """The trained state is about to be used or changed: `settle` tells whether it is what it was."""
        if self._trained is not None:
            self._trained.look()

    def settle(self, step: int) -> None:
        """Waits for the verdict of all looks so far.

        Raises:
            MemoryFaultError: something has changed.
        """
        if self._sentinel is None:
            return
        changes = self._sentinel.collect(wait=True)
        if self._trained is not None:
            changes += self._trained.collect()
        self._judge(changes, f"before the update of step {step}", step)

    def check_all(self, step: int) -> None:
        """Checks every frozen tensor and the trained state; called before a save."""
        if self._sentinel is None:
            for name, tensor, _ in self._frozen():
                if self._mover.provenance(tensor) is None:
                    self._explain(name, tensor, False)
            return
        self._drop_what_is_gathered()
        when = f"before saving at step {step}"
        self._judge(self._sentinel.check_all(), when, step)
        self.check_trained(when, step)

    def _drop_what_is_gathered(self) -> None:
        """FSDP2 keeps the outermost parameters whole after an evaluation: another tensor than the rank's own part."""
        if is_sharded(self._model):
            reshard(self._model)

    def check_trained(self, when: str, step: int) -> None:
        """Checks the trained state alone.

        Raises:
            MemoryFaultError: it is not what the last update made.
        """
        if self._trained is not None:
            self._trained.look()
            self._judge(self._trained.collect(), when, step)

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

    # ---- what is watched ------------------------------------------------------------------------------------

    def _frozen(self) -> Iterator[tuple[str, Tensor, Callable[[], Tensor]]]:
        counted = running_statistics(self._model)
        found = findable_tensors_of(self._model)
        yield from (each for each in found if not each[1].requires_grad and each[0] not in counted)
        for number, model in enumerate(self._references):
            yield from (
                (f"reference {number}: {name}", tensor, find) for name, tensor, find in findable_tensors_of(model)
            )

    def _trainable(self) -> Iterator[tuple[str, Tensor]]:
        return ((name, tensor) for name, tensor in tensors_of(self._model) if tensor.requires_grad)

    def _trained_parameters(self) -> Iterator[Tensor]:
        groups = self._optimizer.param_groups if self._optimizer is not None else ()
        return (each for group in groups for each in group["params"])

    def _optimizer_state(self, optimizer: Optimizer) -> Iterator[tuple[str, Tensor]]:
        """Every state tensor, called after its parameter: "<parameter>/exp_avg"."""
        names = {id(parameter): name for name, parameter in self._model.named_parameters()}
        for number, (parameter, state) in enumerate(optimizer.state.items()):
            owner = names.get(id(parameter), f"parameter {number}")
            yield from ((f"{owner}/{name}", value) for name, value in state.items() if torch.is_tensor(value))

    def _explain(self, name: str, tensor: Tensor, same: bool) -> str | None:
        """Why a frozen tensor may be another than before; what is explained is derived, and told once."""
        if same:
            reason = "equal to the tensor that it replaces"
        elif self._mover.digest_of(data := storage_bytes(tensor)) == digest(data):
            reason = self._mover.reason(tensor) or "came through the mover"
        elif any(each is tensor for each in self._trained_parameters()):
            reason = "was trained until now"
        elif is_recomputed(*self._owner(name), tensor, self._mover):
            reason = RECOMPUTED
        else:
            return None
        self._mover.mark_derived(tensor, reason)
        if (name, reason) not in self._explained:
            self._explained.add((name, reason))
            self._report.rebaselined(name, reason, self._mover.step)
        return reason

    def _owner(self, name: str) -> tuple[nn.Module, str]:
        """Whose a tensor is, and its name there."""
        reference, _, inside = name.rpartition(": ")
        return (self._references[int(reference.split()[1])], inside) if reference else (self._model, name)

    # ---- the verdict ----------------------------------------------------------------------------------------

    def _judge(self, changes: Sequence[Change], when: str, step: int) -> None:
        assert self._sentinel is not None
        in_trained = sum(each.stage == "trained" for each in changes)
        passes, tensors = self._sentinel.passes, self._sentinel.tensors
        self._report.watched("frozen", passes=passes, tensors=tensors, new_mismatches=len(changes) - in_trained)
        if (trained := self._trained) is not None:
            self._report.watched(
                "trained", checks=trained.checks, rewritten=trained.rewritten, new_mismatches=in_trained
            )
        if not changes:
            return
        for each in changes:
            row = {"step": step, "stage": each.stage, "tensor": each.name, "kind": each.kind, "outcome": "stopped"}
            self._report.incident(row)
        what = "frozen weights" if changes[0].stage == "frozen" else "trained weights or optimizer state"
        names = ", ".join(each.name for each in changes[:3])
        more = f" and {len(changes) - 3} more" if len(changes) > 3 else ""
        raise MemoryFaultError(f"{what} {_SAID[changes[0].kind]} ({when}): {names}{more}", _ADVICE)


def _moves_weights_itself(optimizer: Any) -> bool:
    """Whether weights change outside of the optimizer's step: schedule-free ones, during backward, or DeepSpeed's."""
    own = getattr(optimizer, "optimizer", optimizer)
    names = {"LayerWiseDummyOptimizer", "DeepSpeedOptimizerWrapper", "Lomo", "AdaLomo"}
    return hasattr(own, "eval") or bool(names & {type(optimizer).__name__, type(own).__name__})
