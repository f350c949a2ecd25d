"""Micro-batches that are computed twice: the same kernels give the same bits.

What is no product with a frozen weight has no checksum (`arithmetic`), but can be computed again. At the third step
after a start, and after every `EVERY` micro-batches, the first micro-batch of a step is computed once ahead of the
training's own computation of it, and loss and gradients of both are compared by digest. Where they differ, the step is
computed again until two results agree. If no two of `_RUNS` results agree but all lie close together, the kernels are
not deterministic: from then on loss, norms and sums are compared within a tolerance, unless this training has given
equal bits on this machine before (`KnownEqual`). Several ranks all compute one rank's micro-batch.

Not found: a fault that one card repeats each time. Not replayed: what `Replays.prepare` lists, pipelines, and steps
whose micro-batches are split.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import logging
import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import set_seed

from hf_rocm_tune.cards.strategy import Stock
from hf_rocm_tune.errors import CorruptionError, device_shortage
from hf_rocm_tune.foreign import read_object
from hf_rocm_tune.host_group import host_group
from hf_rocm_tune.models.quantised import running_statistics
from hf_rocm_tune.models.trainer_parts import OwningTrainer
from hf_rocm_tune.paths import kept_file
from hf_rocm_tune.survive.atomic import write_text_atomic
from hf_rocm_tune.train.arithmetic.bounds import roundoff
from hf_rocm_tune.train.arithmetic.checks import FIRST_STEPS, ArithmeticChecks
from hf_rocm_tune.train.arithmetic.verdict import StepVerdict, record_disagreement
from hf_rocm_tune.train.oom import StepWindow, local_gathers
from hf_rocm_tune.train.report import versions
from hf_rocm_tune.train.sentinels import is_foreign
from hf_rocm_tune.transfer import QueuedDigests

logger = logging.getLogger(__name__)

EVERY = 400
"""Micro-batches between two replays."""
_RUNS = 4
_KNOWN = 1000  # trainings that are remembered
# Kernels without a fixed order of additions give results that differ by a few unit roundoffs of the coarsest dtype:
_SPREAD_ROUNDOFFS = 8.0
_LEAST_SPREAD, _MOST_SPREAD = 1e-4, 0.01  # limits of that product
# Results that differed by so much are expected to differ by several times as much later on:
_TOLERANCE_OVER_SPREAD = 8.0
_LEAST_TOLERANCE = 1e-6


@dataclass(frozen=True)
class MicroBatchResult:
    """What is compared of two computations of one micro-batch."""

    digests: tuple[str, ...]  # of the loss and of all gradients
    numbers: tuple[tuple[float, float], ...]  # norm and sum of each, with the scale of their rounding

    def distance(self, other: MicroBatchResult) -> float:
        """The largest difference of two numbers over their scale; infinite where only one is NaN."""
        largest = 0.0
        for (own, scale), (others, _) in zip(self.numbers, other.numbers, strict=True):
            if own == others or (math.isnan(own) and math.isnan(others)):
                continue
            difference = abs(own - others) / max(scale, 1e-30)
            if math.isnan(difference):
                return math.inf
            largest = max(largest, difference)
        return largest


class _State(Enum):
    """Of the replay in this step."""

    SETTLED = auto()  # no replay is due, or two results agreed
    COMPUTED_ONCE = auto()  # ahead of the training's own computation, which is compared with it
    DISAGREES = auto()  # no two results agree: the step is to be computed again


class Replays:
    """See the module's description. The trainer owns one, and calls it in the order of the methods.

    Attributes:
        refusal: why no micro-batch is computed twice; None if some are.
        deterministic: whether a micro-batch gives the same bits twice; None: not known yet.
        tolerance: how far the numbers of two results may lie apart, where it does not.
        failure: the sentence on what ended the run; empty before.
    """

    def __init__(self, trainer: OwningTrainer, products: ArithmeticChecks, *, on: bool) -> None:
        self._trainer = trainer
        self._products = products
        self._is_on = on
        self._steps_between = EVERY
        self._begun_steps = 0
        self._replayed = 0  # micro-batches
        self._is_due = False  # in this step
        self._state = _State.SETTLED
        self._results: list[MicroBatchResult] = []  # of the micro-batch that is replayed in this step
        self._known: KnownEqual | None = None
        self._most_spread = _MOST_SPREAD  # between results of kernels that are not deterministic
        self.deterministic: bool | None = None
        self.tolerance = 0.0
        self.failure = ""
        self.refusal: str | None = "training has not begun"

    def prepare(self) -> None:
        """A training begins."""
        trainer, args = self._trainer, self._trainer.args
        self.refusal = self._why_not()
        self._steps_between = max(1, EVERY // args.gradient_accumulation_steps)
        spread = _SPREAD_ROUNDOFFS * roundoff(_coarsest_dtype(trainer))
        self._most_spread = min(_MOST_SPREAD, max(_LEAST_SPREAD, spread))
        is_card = trainer.mover.device.type != "cpu"
        is_one_process = args.world_size == 1  # ranks might know other things
        if self.refusal is None and is_card and is_one_process and not args.torch_compile:
            self._known = KnownEqual(trainer)
            if self.deterministic is None and self._known.is_known():
                self.deterministic = True

    def _why_not(self) -> str | None:
        trainer = self._trainer
        optimizer = str(trainer.args.optim)
        if not self._is_on:
            return "--check_arithmetic off"
        if trainer.is_sharded or trainer.get_tp_size() > 1:
            return "the weights are sharded over ranks"
        if any(running_statistics(trainer.model)):
            return "the model changes buffers in its forward pass"
        if "lomo" in optimizer or "layerwise" in optimizer:
            return "weights change during backward"
        if is_foreign(type(trainer)):  # it may count what it sees, and would count a micro-batch twice
            return "the trainer has code of its own"
        return None

    def begin_step(self, step: int) -> None:
        self._begun_steps += 1
        is_turn = self._begun_steps == FIRST_STEPS + 1 or step % self._steps_between == 0
        self._is_due = self.refusal is None and is_turn
        self._state = _State.SETTLED
        self._results = []

    def run_ahead(self, stock: Stock, model: nn.Module, inputs: Any, num_items: Any) -> None:
        """Compute a step's first micro-batch ahead of the training's own computation of it, if a replay is due.

        Collective in a step that has one.
        """
        is_due = self._is_due
        self._is_due = False
        if not is_due or not isinstance(inputs, Mapping):
            return
        trainer = self._trainer
        start = StepWindow(trainer)
        several = trainer.args.world_size > 1
        if several:
            inputs, num_items = self._from_one_rank(inputs, num_items)

        def run() -> MicroBatchResult | None:
            """None: out of memory; so will be the training's own computation, which makes its parts smaller."""
            if several:
                set_seed(self._begun_steps)
            try:
                accelerator = trainer.accelerator
                with local_gathers(accelerator, several), accelerator.no_sync(model), self._products.paused():
                    loss = stock(model, inputs, num_items)
                    return _result_of(model, loss)
            except RuntimeError as error:
                if device_shortage(error) is None:
                    raise
                return None
            finally:
                start.restore(model)

        first = run()
        self._replayed += 1
        if several:
            self._compare_ranks(first, run)
        elif first is not None:
            self._results = [first]
            self._state = _State.COMPUTED_ONCE
        trainer.transfer_report.count("arithmetic", replays=1)

    # ---- results are compared -----------------------------------------------------------------------------------

    def compare(self, model: nn.Module, loss: Tensor, *, again: bool = False) -> None:
        """Compare a step's first micro-batch, which has just been computed, with its earlier results in this step.

        To be called after the training's own computation, and each time that the step is computed ``again``. Two
        results that agree are right. If no two of `_RUNS` do, either the kernels add in another order each time, and
        the differences are small, or something is faulty, and `judge` ends the run.

        Args:
            model: with the gradients of this micro-batch.
            loss: of this micro-batch, shape [].
            again: the whole step was computed again, because the first results disagreed.
        """
        awaited = _State.COMPUTED_ONCE
        if again:
            awaited = _State.DISAGREES
        if self._state is not awaited:
            return
        result = _result_of(model, loss)
        agrees = any(self._are_equal(result, earlier) for earlier in self._results)
        self._results.append(result)
        if agrees:
            self._state = _State.SETTLED
            self._set_deterministic()
            if again:
                text = "the step was computed again, and equals an earlier one"
                self._record(kind="transient", outcome="recovered", text=text)
            return
        self._state = _State.DISAGREES
        if len(self._results) == _RUNS:
            are_close = self._learn_tolerance([self._results])
            if are_close:
                self._state = _State.SETTLED

    def _are_equal(self, result: MicroBatchResult, other: MicroBatchResult) -> bool:
        """Whether two results have the same bits; of kernels that are not deterministic: lie within the tolerance."""
        if result.digests == other.digests:
            return True
        return self.deterministic is False and result.distance(other) <= self.tolerance

    def _set_deterministic(self) -> None:
        """Two results agree: the kernels are deterministic, unless it is known that they are not."""
        if self.deterministic is None:
            self.deterministic = True
            if self._known is not None:
                self._known.remember()

    def _learn_tolerance(self, groups: Sequence[Sequence[MicroBatchResult]]) -> bool:
        """Set the tolerance by the results of kernels that are not deterministic; False: these differ by more.

        Never on a CPU, nor on a card that has given the same bits twice: there every difference is a fault.

        ``groups``: results that should be equal: all of one process, or those of all ranks, run by run.
        """
        if self.deterministic or self._trainer.mover.device.type == "cpu":
            return False
        spread = 0.0
        for results in groups:
            for result, other in itertools.permutations(results, 2):  # a distance is relative to the first
                spread = max(spread, result.distance(other))
        if spread > self._most_spread:
            return False
        self.deterministic = False
        self.tolerance = max(_LEAST_TOLERANCE, self.tolerance, _TOLERANCE_OVER_SPREAD * spread)
        logger.warning(
            "the same micro-batch gives gradients that differ by %.2g: replays are compared within it", spread
        )
        return True

    # ---- the step is judged -------------------------------------------------------------------------------------

    def pending(self) -> list[Tensor]:
        """Nothing: what was compared has been read."""
        return []

    def judge(self, _figures: Sequence[Sequence[float]], *, can_repeat: bool) -> StepVerdict:
        """What to do with the step, on this rank alone."""
        if self._state is not _State.DISAGREES:
            return StepVerdict.GO_ON
        if not can_repeat:
            self._record(kind="unknown", outcome="skipped", text="the step is skipped")
            return StepVerdict.SKIP
        if len(self._results) < _RUNS:
            return StepVerdict.REPEAT
        text = f"{_RUNS} runs give as many results"
        self.failure = self._record(kind="repeatable", outcome="stopped", text=text)
        return StepVerdict.END

    def describe(self) -> dict[str, Any]:
        """For the report."""
        return {
            "replay_every": None if self.refusal else self._steps_between,
            "replay_refusal": self.refusal,
            "deterministic": self.deterministic,
            "replay_bound": self.tolerance or None,
        }

    def _record(self, *, kind: str, outcome: str, text: str) -> str:
        """An incident in the report, and a warning, which is returned."""
        step = self._trainer.state.global_step + 1
        report = self._trainer.transfer_report
        record_disagreement(report, step, "gradients", kind=kind, outcome=outcome, text=text)
        sentence = f"step {step}: loss or gradients of a micro-batch that was computed twice differ: {text}"
        logger.warning("%s", sentence)
        return sentence

    # ---- several ranks: all compute the same micro-batch --------------------------------------------------------

    def _from_one_rank(self, inputs: Mapping[str, Any], num_items: Any) -> tuple[Any, Any]:
        """The micro-batch and label count of one rank, in turn, on all ranks."""
        trainer = self._trainer
        count = num_items
        if isinstance(num_items, Tensor):
            count = num_items.item()
        sent = [(dict(trainer.host_batch(inputs)), count)]
        dist.broadcast_object_list(sent, src=self._replayed % trainer.args.world_size, group=host_group())
        batch, count = sent[0]
        if isinstance(num_items, Tensor):
            count = torch.full_like(num_items, count)
        return batch, count

    def _compare_ranks(self, first: MicroBatchResult | None, run: Callable[[], MicroBatchResult | None]) -> None:
        """Compare the results of all ranks; where they differ, all compute again, which tells whose card is wrong.

        ``first``: this rank's result of the first run; None: it ran out of memory.
        """
        own = first
        runs: list[list[MicroBatchResult]] = []  # of each run the results of all ranks
        while True:
            gathered: list[MicroBatchResult | None] = [None] * dist.get_world_size(host_group())
            dist.all_gather_object(gathered, own, group=host_group())
            of_ranks = [result for result in gathered if result is not None]
            if len(of_ranks) < len(gathered):
                return  # one is out of memory
            runs.append(of_ranks)
            if all(self._are_equal(of_ranks[0], result) for result in of_ranks):
                break
            if len(runs) == _RUNS:
                if self._learn_tolerance(runs):
                    return
                text = f"the cards differ each time: {_steadiness(runs)}"
                raise CorruptionError(self._record(kind="repeatable", outcome="stopped", text=text))
            own = run()
        self._set_deterministic()
        if len(runs) > 1 and self._trainer.is_world_process_zero():
            right = runs[-1][0]
            wrong = [str(rank) for rank, result in enumerate(runs[0]) if not self._are_equal(right, result)]
            text = f"wrong on rank {', '.join(wrong)}, and right when repeated"
            self._record(kind="transient", outcome="recovered", text=text)


class KnownEqual:
    """Which trainings have given the same bits twice on this machine: card, versions, model, shapes and dtypes."""

    def __init__(self, trainer: OwningTrainer) -> None:
        config = getattr(trainer.model, "config", None)
        names = ("per_device_train_batch_size", "max_length", "packing", "gradient_checkpointing", "fp16", "bf16")
        settings = [getattr(trainer.args, name, None) for name in names]
        weights = []
        for name, parameter in trainer.model.named_parameters():
            weights.append((name, list(parameter.shape), str(parameter.dtype)))
        facts = [
            torch.cuda.get_device_name(trainer.mover.device),
            versions(),
            getattr(config, "to_json_string", str)(),
            settings,
            weights,
        ]
        self._name = hashlib.sha256(json.dumps(facts, default=str).encode()).hexdigest()[:32]
        self._path = kept_file("equal_replays.json")

    def _names(self) -> list[str]:
        with suppress(OSError, ValueError):
            return [str(name) for name in read_object(self._path)["equal"]]
        return []

    def is_known(self) -> bool:
        return self._name in self._names()

    def remember(self) -> None:
        """Without a writable home a later run begins as the first one."""
        names = [*self._names(), self._name][-_KNOWN:]
        with suppress(OSError):
            self._path.parent.mkdir(parents=True, exist_ok=True)
            write_text_atomic(self._path, json.dumps({"equal": names}))


def _coarsest_dtype(trainer: OwningTrainer) -> torch.dtype:
    """Of the weights, of 4-bit products, and autocast's."""
    dtypes = {torch.float32}
    autocast = {"fp16": torch.float16, "bf16": torch.bfloat16}.get(trainer.accelerator.mixed_precision)
    if autocast is not None:
        dtypes.add(autocast)
    for module in trainer.model.modules():
        computed = getattr(module, "compute_dtype", None)
        if isinstance(computed, torch.dtype):
            dtypes.add(computed)
        dtypes |= {parameter.dtype for parameter in module.parameters(recurse=False)}
    return max(dtypes & {torch.float32, torch.float16, torch.bfloat16}, key=roundoff)


def _steadiness(runs: list[list[MicroBatchResult]]) -> str:
    """Which ranks gave the same in all runs."""
    sentences = []
    for rank in range(len(runs[0])):
        digests = {of_ranks[rank].digests for of_ranks in runs}
        said = "repeats its result" if len(digests) == 1 else "does not"
        sentences.append(f"rank {rank} {said}")
    return ", ".join(sentences)


def _result_of(model: nn.Module, loss: Tensor) -> MicroBatchResult:
    """Digests, norms and sums of the loss and of all gradients; waits for them once a device."""
    by_device: dict[torch.device, list[Tensor]] = defaultdict(list)
    by_device[loss.device].append(loss.detach())
    for parameter in model.parameters():
        if parameter.grad is not None:
            by_device[parameter.grad.device].append(parameter.grad.detach())
    digests = QueuedDigests([tensor for tensors in by_device.values() for tensor in tensors])
    numbers: list[tuple[float, float]] = []
    for tensors in by_device.values():
        norms = [torch.linalg.vector_norm(tensor, dtype=torch.float32) for tensor in tensors]
        sums = [tensor.sum(dtype=torch.float32) for tensor in tensors]
        read = torch.stack([*norms, *sums]).tolist()  # one wait
        for tensor, norm, total in zip(tensors, read, read[len(tensors) :], strict=False):
            numbers += [(norm, norm), (total, norm * math.sqrt(tensor.numel()))]
    # The numbers were read from the same streams after them: the digests are there.
    return MicroBatchResult(tuple(digest.hex() for digest in digests.result()), tuple(numbers))
