"""The sentinels of `models.sentinels` in a run of the trainer: when they check, and what their findings mean.

With several ranks replicas of trainable weights are compared as well.
"""

from __future__ import annotations

import copy
import functools
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from torch import Tensor
from torch.distributed.tensor import DTensor
from transformers import TrainerCallback

from hf_rocm_tune.cards.agree import compare_replicas
from hf_rocm_tune.errors import CorruptionError, MemoryFaultError, listed
from hf_rocm_tune.models.file_comparison import RECOMPUTED, TRAINED, is_recomputed
from hf_rocm_tune.models.quantised import running_statistics
from hf_rocm_tune.models.sentinels import OUTSTANDING_BATCHES, BatchSentinel, Change, FrozenSentinel, TrainedSentinel
from hf_rocm_tune.models.shards import cut_of, is_sharded, local, reshard
from hf_rocm_tune.models.tensors import findable_tensors_of, tensors_of
from hf_rocm_tune.transfer import QueuedDigests, digest, tree_tensors
from hf_rocm_tune.transfer.raw_bytes import storage_bytes

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from torch import nn
    from transformers import TrainerState

    from hf_rocm_tune.transfer import Mover

_RATES = Change("trained", "learning rates", "changed in memory")

_UPSTREAM = frozenset({"hf_rocm_tune", "transformers", "trl", "peft", "accelerate", "torch", "typing", "builtins"})
_WHAT = {
    "frozen": "frozen weights",
    "trained": "trained weights or optimizer state",
    "batches": "batch tensors on the device",
}
_SAID = {"replaced": "were replaced by other tensors", "removed": "were removed", "added": "were added"}
_ADVICE = (
    "Nothing has been saved since. Existing checkpoints are intact; rerun the same command to resume from the latest. "
    "Code that rewrites a frozen weight on purpose must declare it with "
    "trainer.mover.mark_derived(tensor, reason)"
)


def is_foreign(cls: type) -> bool:
    """Whether a class or one of its bases has code that is neither upstream's nor ours."""
    for base in cls.__mro__:
        if base.__module__.partition(".")[0] in _UPSTREAM:
            continue
        if any(callable(value) for name, value in vars(base).items() if not name.startswith("__")):
            return True
    return False


@functools.cache
def has_writer(event: str, *callbacks: type) -> bool:
    """Whether one of these callback classes has user code for this event, which may write to weights."""
    stock = getattr(TrainerCallback, event, None)
    return any(is_foreign(callback) and getattr(callback, event, None) is not stock for callback in callbacks)


class SentinelCallback(TrainerCallback):
    """Checks device memory during a run.

    Frozen weights are checked at every step in slices, each once in ``every`` steps, and in full before a save. Trained
    weights and optimizer state are digested after each update, and compared before the next one and before a save. With
    several ranks, replicas of trainable weights are compared every ``every`` steps: they must be bit-identical.
    """

    def __init__(
        self, model: nn.Module, mover: Mover, *, every: int, excuse_writes: bool, references: Sequence[nn.Module]
    ) -> None:
        self._model = model
        self._mover = mover
        self._report = mover.report
        self._every = every
        self._excuse_writes = excuse_writes
        self._references = references
        self._sentinel: FrozenSentinel | None = None
        self._trained: TrainedSentinel | None = None
        self._batches = BatchSentinel(mover.verdict_of)
        self._optimizer: Any = None
        self._scheduler: Any = None
        self._rates: list[dict[str, Any]] = []
        self._explained: set[tuple[str, str]] = set()
        self._checked_at = -1  # the step at which everything was checked last

    # ---- events ---------------------------------------------------------------------------------------------

    def on_train_begin(self, args: Any, state: TrainerState, control: Any, **more: Any) -> None:
        if self._every <= 0:
            return
        self._optimizer = more.get("optimizer")
        self._scheduler = more.get("lr_scheduler")
        arrived_with = self._mover.digest_of
        self._sentinel = FrozenSentinel(self._frozen, self._every, arrived_with, self._explain)
        changes = self._sentinel.changed_at_start
        if self._optimizer is not None and not _moves_weights_itself(self._optimizer):
            excuse = self._excuse_writes or is_sharded(self._model)
            self._trained = TrainedSentinel(self._optimizer, arrived_with=arrived_with, excuse_writes=excuse)
            changes = [*changes, *self._trained.begin()]
            self._follow_prompts()
        for parameter in self._trained_parameters():
            if self._mover.was_verified(parameter):
                self._mover.mark_trained(parameter, TRAINED)
        self._report_changes(changes, "between the load and the first step", state.global_step)

    def on_step_begin(self, args: Any, state: TrainerState, control: Any, **_: Any) -> None:
        self._rates = self._read_rates()

    def on_optimizer_step(self, args: Any, state: TrainerState, control: Any, **_: Any) -> None:
        if self._trained is not None:  # the learning rates are read when the next step begins: the scheduler sets them
            self._trained.take()

    def on_step_end(self, args: Any, state: TrainerState, control: Any, **_: Any) -> None:
        step = state.global_step
        if self._sentinel is not None:
            self._reshard()
            self._report_changes(self._sentinel.check_slice(), f"after step {step}", step)
            if step % self._every == 0:
                replicas = list(self._replicas())
                if replicas:
                    self.check_replicas(replicas, f"at step {step}")

    def on_train_end(self, args: Any, state: TrainerState, control: Any, **_: Any) -> None:
        if self._sentinel is not None and self._checked_at != state.global_step:  # nothing was saved at this step
            self.check_all(state.global_step, "the training ends")
        if self._trained is not None:
            self._trained.take(versions=True)

    # ---- checks ---------------------------------------------------------------------------------------------

    def enter(self, step: int, doing: str) -> None:
        """Between trainings: compare all weights with what the last training left, or with what was loaded.

        What the program itself has written since, by torch's operations, is no fault: it is recorded.
        """
        if self._every <= 0:
            return
        if self._sentinel is None:
            self._sentinel = FrozenSentinel(self._frozen, self._every, self._mover.digest_of, self._explain)
            changes = [*self._sentinel.changed_at_start, *self._changed_since_load()]
            self._report_changes(changes, f"since they were loaded, before {doing}", step)
            return
        self._reshard()
        when = f"since the last check, before {doing}"
        self._report_changes(self._sentinel.check_all(), when, step)
        if self._trained is not None:
            before = self._trained.rewritten
            self.check_trained(when, step)
            if self._trained.rewritten > before:
                self._report.rebaselined("trained weights", f"written by the program before {doing}", step)
            self._trained.take(versions=True)

    def _changed_since_load(self) -> list[Change]:
        known = []
        for name, parameter in self._model.named_parameters():
            if not parameter.requires_grad:
                continue
            data = storage_bytes(local(parameter))
            before = self._mover.digest_of(data)
            if before is not None:
                known.append((name, data, before))
        digests = QueuedDigests([data for _, data, _ in known]).result()
        changes = []
        for (name, _, before), now in zip(known, digests, strict=True):
            if now != before:
                changes.append(Change("trained", name, "changed in memory"))
        return changes

    def take(self, event: str = "") -> None:
        """Record the trained state, which has been changed on purpose, as right; what a callback has written at an
        ``event`` is reported."""
        self._rates = self._read_rates()
        if self._trained is None:
            return
        if event and event != "on_optimizer_step" and self._trained.was_written():
            self._explain_writes(event)
        self._trained.take(versions=event == "on_train_end")

    def _explain_writes(self, event: str) -> None:
        reason = f"written by a callback ({event})"
        if ("trained weights", reason) not in self._explained:
            self._explained.add(("trained weights", reason))
            self._report.rebaselined("trained weights", reason, self._mover.step)

    def _follow_prompts(self) -> None:
        """PEFT's CPT replaces its trained prompt in each forward, wherever that is called: right from then on."""
        encoders: Any = getattr(getattr(self._model, "prompt_encoder", None), "values", list)()
        for encoder in encoders:
            encoder.register_forward_pre_hook(lambda *_: self.queue_check())
            encoder.register_forward_hook(lambda *_: self._adopt_prompts())

    def _adopt_prompts(self) -> None:
        assert self._trained is not None
        self._trained.take()
        for parameter in self._trained_parameters():
            if self._mover.provenance(parameter) is None:
                self._mover.mark_trained(parameter, TRAINED)

    def use_batch(self, batch: Any) -> None:
        """A verified batch is used from now on."""
        if self._sentinel is not None:
            self._batches.use(batch)

    def queue_batch_check(self) -> None:
        """Queue a check of the batches that were used; `wait_verified` reports the result."""
        self._batches.queue_check()

    def wait_for_batches(self, step: int) -> None:
        """Wait for the result of the checks of batches alone; raises as `wait_verified`."""
        if self._sentinel is not None:
            self._report_changes(self._batches.collect(), f"at step {step}", step)

    def wait_for_older(self, step: int) -> None:
        """Wait for what was queued some batches ago, so that in a long evaluation no more than that is outstanding."""
        if self._sentinel is None:
            return
        changes = self._batches.collect(newest=OUTSTANDING_BATCHES)
        if self._trained is not None:
            changes += self._trained.collect(newest=1)
        self._report_changes(changes, f"in an evaluation after step {step}", step)

    def queue_check(self) -> None:
        """Queue a check of the trained state before it is used or changed; `wait_verified` reports the result."""
        if self._trained is not None:
            self._trained.queue_check()

    def mark(self) -> None:
        """A callback that may write follows: `take` tells whether it did."""
        if self._trained is not None:
            self._trained.mark()

    def wait_verified(self, step: int) -> None:
        """Wait for the results of all checks so far; ``step`` is the number of the current step."""
        if self._sentinel is None:
            return
        changes = self._sentinel.collect(wait=True)
        if self._trained is not None:
            changes += self._trained.collect()
        changes += self._batches.collect()
        if not self._excuse_writes and self._differ(self._rates):
            changes.append(_RATES)
        self._report_changes(changes, f"before the update of step {step}", step)

    @contextmanager
    def keeping_rates(self, step: int) -> Iterator[None]:
        """Within the block nothing may change the learning rates; between steps, callbacks and schedulers do."""
        before = self._read_rates()
        yield
        if self._sentinel is not None and not self._excuse_writes and self._differ(before):
            self._report_changes([_RATES], f"during the evaluation after step {step}", step)

    def check_all(self, step: int, doing: str = "saving") -> None:
        """Check every frozen tensor and the trained state, before ``doing`` something with them."""
        if self._sentinel is None:
            for name, tensor, _ in self._frozen():
                if self._mover.provenance(tensor) is None:
                    self._explain(name, tensor, False)
            return
        self._reshard()
        when = f"before {doing} at step {step}"
        self._report_changes(self._sentinel.check_all(), when, step)
        self.check_trained(when, step)
        self._checked_at = step

    def _reshard(self) -> None:
        """FSDP2 leaves the outermost parameters gathered after an evaluation: not the tensor of the rank's own part."""
        if is_sharded(self._model):
            reshard(self._model)

    def check_trained(self, when: str, step: int) -> None:
        if self._trained is not None:
            self._trained.queue_check()
            self._report_changes(self._trained.collect(), when, step)

    def check_replicas(self, tensors: Iterable[tuple[str, Tensor]], when: str) -> None:
        """`compare_replicas`, counted. Collective."""
        try:
            compared = compare_replicas(tensors, when)
        except CorruptionError:
            self._report.count("replicas", checks=1, mismatches=1)
            raise
        if compared:
            self._report.count("replicas", checks=1)

    # ---- which tensors are checked --------------------------------------------------------------------------

    def _frozen(self) -> Iterator[tuple[str, Tensor, Callable[[], Tensor]]]:
        counted = {name for name, _ in running_statistics(self._model)}
        for name, tensor, find in findable_tensors_of(self._model):
            if not tensor.requires_grad and name not in counted:
                yield name, tensor, find
        for number, model in enumerate(self._references):
            for name, tensor, find in findable_tensors_of(model):
                yield f"reference {number}: {name}", tensor, find

    def _replicas(self) -> Iterator[tuple[str, Tensor]]:
        """Trained tensors that every rank holds completely."""
        if not is_sharded(self._model):
            yield from ((name, tensor) for name, tensor in tensors_of(self._model) if tensor.requires_grad)
            return
        for name, parameter in self._model.named_parameters():
            if isinstance(parameter, DTensor) and parameter.requires_grad and cut_of(parameter) is None:
                yield name, local(parameter)

    def _trained_parameters(self) -> Iterator[Tensor]:
        if self._optimizer is None:
            return
        for group in self._optimizer.param_groups:
            for parameter in group["params"]:
                yield local(parameter)

    def _explain(self, name: str, tensor: Tensor, same: bool) -> str | None:
        """The reason why a frozen tensor may differ, or None; with a reason it is marked derived and reported once."""
        reason = "equal to the tensor that it replaces"  # byte for byte, or a buffer's values in another precision
        if not same:
            known = self._known_reason(name, tensor)
            if known is None:
                return None
            reason = known
        self._mover.mark_derived(tensor, reason)
        if (name, reason) not in self._explained:
            self._explained.add((name, reason))
            self._report.rebaselined(name, reason, self._mover.step)
        return reason

    def _known_reason(self, name: str, tensor: Tensor) -> str | None:
        data = storage_bytes(tensor)
        if self._mover.digest_of(data) == digest(data):
            return self._mover.reason(tensor) or "came through the mover"
        if any(parameter is tensor for parameter in self._trained_parameters()):
            return "was trained until now"
        if is_recomputed(*self._owner(name), tensor, self._mover):
            return RECOMPUTED
        return None

    def _read_rates(self) -> list[dict[str, Any]]:
        """What the optimizer computes the next update with besides tensors, and the scheduler's state; copies."""
        rates = []
        for values in self._live_rates():
            rates.append({key: copy.copy(value) for key, value in values.items() if _is_plain(value)})
        return rates

    def _live_rates(self) -> list[dict[str, Any]]:
        """The settings of the optimizer's groups, and the scheduler's state."""
        rates: list[dict[str, Any]] = []
        if self._optimizer is not None:
            rates += self._optimizer.param_groups
        state: dict[str, Any] = {}
        if hasattr(self._scheduler, "state_dict"):
            state = self._scheduler.state_dict()
        rates.append(state)
        return rates

    def _differ(self, rates: list[dict[str, Any]]) -> bool:
        """Whether the rates are others than those that were read; compared where they are, without another copy."""
        live = self._live_rates()
        if len(live) != len(rates):
            return True
        for values, known in zip(live, rates, strict=True):
            if not known.keys() <= values.keys():
                return True
            if any(values[key] is not value and values[key] != value for key, value in known.items()):
                return True
            if any(_is_plain(value) for key, value in values.items() if key not in known):
                return True
        return False

    def _owner(self, name: str) -> tuple[nn.Module, str]:
        reference, _, inside = name.rpartition(": ")
        return (self._references[int(reference.split()[1])], inside) if reference else (self._model, name)

    # ---- the verdict ----------------------------------------------------------------------------------------

    def _report_changes(self, changes: Sequence[Change], when: str, step: int) -> None:
        assert self._sentinel is not None
        wrong = Counter(change.stage for change in changes)
        frozen = self._sentinel
        trained = self._trained
        self._report.watched("frozen", passes=frozen.passes, tensors=frozen.tensors, new_mismatches=wrong["frozen"])
        if trained is not None:
            state = {"checks": trained.checks, "rewritten": trained.rewritten}
            self._report.watched("trained", **state, new_mismatches=wrong["trained"])
        if not changes:
            return
        for change in changes:
            row = {"step": step, "stage": change.stage, "tensor": change.name, "kind": change.kind}
            self._report.incident({**row, "outcome": "stopped"})
        self._report.add("batches", mismatches=wrong["batches"])
        what = _WHAT[changes[0].stage]
        how = _SAID.get(changes[0].kind, changes[0].kind)
        raise MemoryFaultError(f"{what} {how} ({when}): {listed([change.name for change in changes])}", _ADVICE)


def _is_plain(value: Any) -> bool:
    return isinstance(value, int | float | str | list | tuple) and not any(True for _ in tree_tensors(value))


def _moves_weights_itself(optimizer: Any) -> bool:
    """Whether weights change outside of the optimizer's step: schedule-free ones, during backward, or DeepSpeed's."""
    own = getattr(optimizer, "optimizer", optimizer)
    names = {"LayerWiseDummyOptimizer", "DeepSpeedOptimizerWrapper", "Lomo", "AdaLomo"}
    return hasattr(own, "eval") or bool(names & {type(optimizer).__name__, type(own).__name__})
