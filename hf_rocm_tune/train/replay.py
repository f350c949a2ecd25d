"""Micro-batches that are computed twice, and rows of attention that are computed again by plain products.

What is no product with a frozen weight has no checksum, but the same kernels give the same bits. At the third step
after a start, and after every `EVERY` micro-batches, the first one of a step is computed once before its real turn, and
loss and gradients of both are compared by digest; where they differ, the step is computed again until two results
agree. If none of `_RUNS` agree but all lie close together, the kernels are not deterministic: from then on loss, norms
and sums are compared within a bound, unless this training has given equal bits on this machine before (`KnownEqual`).
Several ranks all compute one rank's micro-batch. In the first step, and whenever
a longer batch comes, rows of each ``scaled_dot_product_attention`` are computed again in float32, with the run's masks,
and each ``torch.topk`` is looked over: a router of experts has chosen the best.

Not found: a fault that one card repeats each time; attention's backward, unless it differs from run to run; attention
with dropout; other attention functions. Not replayed: what `Replays.prepare` lists, pipelines, and steps whose
micro-batches are split.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import logging
import math
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional
from transformers import set_seed

from hf_rocm_tune.cards.strategy import Stock
from hf_rocm_tune.errors import CorruptionError, device_shortage
from hf_rocm_tune.foreign import read_object
from hf_rocm_tune.host_group import host_group
from hf_rocm_tune.models.quantised import running_statistics
from hf_rocm_tune.models.trainer_parts import OwningTrainer
from hf_rocm_tune.paths import kept_file
from hf_rocm_tune.survive.atomic import write_text_atomic
from hf_rocm_tune.train.arithmetic.attention import WatchedChoices, attention_error
from hf_rocm_tune.train.arithmetic.bounds import roundoff
from hf_rocm_tune.train.arithmetic.checks import FIRST_STEPS, ArithmeticChecks
from hf_rocm_tune.train.arithmetic.verdict import StepVerdict
from hf_rocm_tune.train.oom import StepWindow, local_gathers
from hf_rocm_tune.train.report import versions
from hf_rocm_tune.train.sentinels import is_foreign
from hf_rocm_tune.transfer import QueuedDigests

logger = logging.getLogger(__name__)

EVERY = 400
"""Micro-batches between two replays."""
_MARGIN, _AT_LEAST = 8.0, 1e-6  # of what kernels that are not deterministic may differ
_AT_MOST, _ROUNDINGS = (1e-4, 0.01), 8.0  # the latter: unit roundoffs of the coarsest dtype
_RUNS = 4
_KNOWN = 1000  # trainings that are remembered


@dataclass(frozen=True)
class Figures:
    """What is compared of two computations of one micro-batch."""

    digest: tuple[str, ...]
    figures: tuple[tuple[float, float], ...]  # loss, norms and sums of gradients, each with its scale

    def distance(self, other: Figures) -> float:
        """The largest difference of a figure over its scale; infinite where only one is NaN."""
        largest = 0.0
        for (mine, scale), (theirs, _) in zip(self.figures, other.figures, strict=True):
            if mine == theirs or (math.isnan(mine) and math.isnan(theirs)):
                continue
            difference = abs(mine - theirs) / max(scale, 1e-30)
            if math.isnan(difference):
                return math.inf
            largest = max(largest, difference)
        return largest


class _Awaits(Enum):
    """What of the micro-batch that is replayed in this step is to be compared next."""

    NOTHING = auto()
    REAL_TURN = auto()  # it was computed once before
    ANOTHER_RUN = auto()  # its real turn gave something else: the step is computed again


class Replays:
    """See the module's description. The trainer owns one, and calls it in the order of the methods.

    Attributes:
        refusal: why no micro-batch is computed twice; None if some are.
        deterministic: whether a micro-batch gives the same bits twice; None: not known yet.
        bound: how far the figures of two runs may lie apart, where it does not.
    """

    def __init__(self, trainer: OwningTrainer, products: ArithmeticChecks, *, on: bool) -> None:
        self._trainer = trainer
        self._products = products
        self._on = on
        self._every = EVERY  # steps
        self._begun = 0  # steps
        self._replayed = 0  # micro-batches
        # of this step
        self._is_due = False  # its first micro-batch is to be computed once before its real turn
        self._awaits = _Awaits.NOTHING
        self._results: list[Figures] = []  # of the micro-batch that is replayed
        self._attempts = 0  # in which attention or a choice was wrong
        self._was_wrong = ""  # which of them
        self._longest = 0  # tokens of the rows whose attention was checked
        self._known: KnownEqual | None = None
        self._most_spread = _AT_MOST[1]  # of results that kernels which are not deterministic explain
        self.deterministic: bool | None = None
        self.bound = 0.0
        self.failure = ""
        self.refusal: str | None = "training has not begun"

    def prepare(self) -> None:
        """A training begins."""
        trainer, args = self._trainer, self._trainer.args
        self.refusal = self._why_not()
        self._on &= not args.torch_compile  # what is compiled calls no attention function
        self._every = max(1, EVERY // args.gradient_accumulation_steps)
        lowest, highest = _AT_MOST
        self._most_spread = min(highest, max(lowest, _ROUNDINGS * roundoff(_coarsest_dtype(trainer))))
        is_card = trainer.mover.device.type != "cpu"
        if self._on and self.refusal is None and is_card and args.world_size == 1:  # ranks might know other things
            self._known = KnownEqual(trainer)
            if self.deterministic is None and self._known.is_known():
                self.deterministic = True

    def _why_not(self) -> str | None:
        trainer = self._trainer
        optimizer = str(trainer.args.optim)
        if not self._on:
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
        self._begun += 1
        is_turn = self._begun == FIRST_STEPS + 1 or step % self._every == 0
        self._is_due = self.refusal is None and is_turn
        self._awaits = _Awaits.NOTHING
        self._results = []
        self._attempts = 0

    def rehearse(self, stock: Stock, model: nn.Module, inputs: Any, num_items: Any) -> None:
        """Before the first micro-step of a step: compute it once, as it will be. Collective where it is due."""
        is_due = self._is_due
        self._is_due = False
        if not is_due or not isinstance(inputs, Mapping):
            return
        trainer = self._trainer
        start = StepWindow(trainer)
        several = trainer.args.world_size > 1
        if several:
            inputs, num_items = self._from_one_rank(inputs, num_items)

        def run() -> Figures | None:
            """None: out of memory; the real turn will be, too, and makes its parts smaller."""
            if several:
                set_seed(self._begun)
            try:
                accelerator = trainer.accelerator
                with local_gathers(accelerator, several), accelerator.no_sync(model), self._products.paused():
                    return _outcome(model, stock(model, inputs, num_items))
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
            self._awaits = _Awaits.REAL_TURN
        trainer.transfer_report.count("arithmetic", replays=1)

    def _are_equal(self, result: Figures, other: Figures) -> bool:
        """Whether two results are the same: to the bit, or within the bound of kernels that are not deterministic."""
        if result.digest == other.digest:
            return True
        return self.deterministic is False and result.distance(other) <= self.bound

    def _record_deterministic(self) -> None:
        """Two runs gave the same: the kernels are deterministic, unless it is known that they are not."""
        if self.deterministic is None:
            self.deterministic = True
            if self._known is not None:
                self._known.remember()

    # ---- one process: the real turn is compared -----------------------------------------------------------------

    def compare(self, model: nn.Module, loss: Tensor, *, again: bool = False) -> None:
        """Compare the result of a step's first micro-batch with the earlier results of the same micro-batch.

        `rehearse` has computed it once, before its real turn. This is called after the real turn, and each time the
        step is computed ``again`` because no two results were equal. Two equal results are right. If no two of `_RUNS`
        results are equal, then either the kernels add in another order each time, and the differences are small, or
        something is faulty, and `judge` ends the run.
        """
        expected = _Awaits.ANOTHER_RUN if again else _Awaits.REAL_TURN
        if self._awaits is not expected:
            return
        result = _outcome(model, loss)
        is_equal = any(self._are_equal(result, earlier) for earlier in self._results)
        self._results.append(result)
        if is_equal:
            self._awaits = _Awaits.NOTHING
            self._record_deterministic()
            if again:
                text = "the step was computed again, and equals an earlier one"
                self._record_incident("gradients", "transient", "recovered", text)
        elif len(self._results) == _RUNS and self._learn_bound(self._results):
            self._awaits = _Awaits.NOTHING
        else:
            self._awaits = _Awaits.ANOTHER_RUN

    def _learn_bound(self, *groups: list[Figures]) -> bool:
        """Learn how far equal results may lie apart, if these differ as little as those of kernels without fixed order.

        Never on a CPU, nor on a card that has given the same bits twice: there every difference is a fault.

        Args:
            groups: results that should be equal: all of one process, or those of all ranks, run by run.

        Returns:
            Whether the bound was learned: within it later results count as equal.
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
        self.bound = max(_AT_LEAST, self.bound, _MARGIN * spread)
        logger.warning(
            "the same micro-batch gives gradients that differ by %.2g: replays are compared within it", spread
        )
        return True

    def pending(self) -> list[Tensor]:
        """Nothing: what was compared has been read."""
        return []

    def judge(self, _figures: Sequence[Sequence[float]], *, can_repeat: bool) -> StepVerdict:
        """What to do with the step, by its repetitions and attention, on this rank alone."""
        attention = self._attention_verdict(can_repeat=can_repeat)
        if self._awaits is not _Awaits.ANOTHER_RUN:
            return attention
        if not can_repeat:
            self._record_incident("gradients", "unknown", "skipped", "the step is skipped")
            return max(attention, StepVerdict.SKIP)
        if len(self._results) < _RUNS:
            return max(attention, StepVerdict.REPEAT)
        self._record_incident("gradients", "repeatable", "stopped", f"{_RUNS} runs give as many results")
        return StepVerdict.END

    def describe(self) -> dict[str, Any]:
        """For the report."""
        return {
            "replay_every": None if self.refusal else self._every,
            "replay_refusal": self.refusal,
            "deterministic": self.deterministic,
            "replay_bound": self.bound or None,
            "attention_length": self._longest,
        }

    def _record_incident(self, tensor: str, kind: str, outcome: str, text: str) -> None:
        """An incident in the report, and a warning; sets `failure`."""
        step = self._trainer.state.global_step + 1
        what = tensor
        if tensor == "gradients":
            what = "loss or gradients of a micro-batch that was computed twice differ"
        self.failure = f"step {step}: {what}: {text}"
        row = {"step": step, "stage": "arithmetic", "tensor": tensor.split()[0], "kind": kind, "text": text}
        self._trainer.transfer_report.incident({**row, "outcome": outcome})
        self._trainer.transfer_report.count("arithmetic", disagreements=1, recovered=int(outcome == "recovered"))
        logger.warning("%s", self.failure)

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

    def _compare_ranks(self, first: Figures | None, run: Callable[[], Figures | None]) -> None:
        """Compare the ranks' outcomes; where they differ, all compute again, which tells whose card is wrong."""
        runs: list[list[Figures]] = []  # of each run the figures of all ranks
        while not runs or not self._all_equal(runs[-1]):
            if len(runs) == _RUNS:
                if self._learn_bound(*runs):
                    return
                text = f"the cards differ each time: {_steadiness(runs)}"
                self._record_incident("gradients", "repeatable", "stopped", text)
                raise CorruptionError(self.failure)
            own = run() if runs else first
            gathered: list[Figures | None] = [None] * dist.get_world_size(host_group())
            dist.all_gather_object(gathered, own, group=host_group())
            of_ranks = [figures for figures in gathered if figures is not None]
            if len(of_ranks) < len(gathered):
                return  # one is out of memory
            runs.append(of_ranks)
        self._record_deterministic()
        if len(runs) > 1 and self._trainer.is_world_process_zero():
            right = runs[-1][0]
            wrong = [str(rank) for rank, figures in enumerate(runs[0]) if not self._are_equal(right, figures)]
            text = f"wrong on rank {', '.join(wrong)}, and right when repeated"
            self._record_incident("gradients", "transient", "recovered", text)

    def _all_equal(self, of_ranks: list[Figures]) -> bool:
        return all(self._are_equal(of_ranks[0], figures) for figures in of_ranks)

    # ---- attention ----------------------------------------------------------------------------------------------

    @contextmanager
    def watching_attention(self, inputs: Any = None) -> Iterator[None]:
        """Within the block attention is checked, if these inputs are the longest yet, or if it was wrong before."""
        length = 0
        if self._on and isinstance(inputs, Mapping):
            for tensor in inputs.values():
                if isinstance(tensor, Tensor) and tensor.dim():
                    length = max(length, tensor.shape[-1])
        was_wrong = inputs is None and self._attempts > 0
        if length <= self._longest and not was_wrong:
            yield
            return
        self._longest = max(self._longest, length)
        stock = functional.scaled_dot_product_attention
        thread = threading.get_ident()

        def checked(query: Tensor, *args: Any, **kwargs: Any) -> Tensor:
            result: Tensor = stock(query, *args, **kwargs)
            if threading.get_ident() != thread:  # that computes a layer on the host
                return result
            with torch.no_grad(), torch.autocast(result.device.type, enabled=False):
                if query.dim() == 4:
                    worst = attention_error(result, query, *args, **kwargs)
                    if worst is not None:
                        self._products.add_attention(worst)
            return result

        functional.scaled_dot_product_attention = checked
        try:
            with WatchedChoices(self._products.add_choice):
                yield
        finally:
            functional.scaled_dot_product_attention = stock

    def _attention_verdict(self, *, can_repeat: bool) -> StepVerdict:
        attention, choices = self._products.attention, self._products.choices
        if not attention and not choices:
            return StepVerdict.GO_ON
        self._trainer.transfer_report.count("arithmetic", attention=len(attention), choices=len(choices))
        wrong = []
        if any(not number <= 1.0 for number in attention):  # NaN too
            wrong.append(f"attention over {self._longest} tokens")
        if any(choices):
            wrong.append("topk (the choice of experts)")
        if not wrong:
            if self._attempts:
                self._record_incident(self._was_wrong, "transient", "recovered", "it is right now")
            return StepVerdict.GO_ON
        self._attempts += 1
        self._was_wrong = " and ".join(wrong)
        if can_repeat and self._attempts == 1:
            return StepVerdict.REPEAT
        text = "something else than the best was chosen, each time: run hf-rocm-tune doctor --full"
        if self._was_wrong.startswith("attention"):
            worst = max(math.inf if math.isnan(number) else number for number in attention)
            advice = "give --attn_implementation eager, or a smaller --max_length"
            text = f"{worst:.3g} times what rounding explains: {advice}"
        self._record_incident(self._was_wrong, "repeatable", "stopped", text)
        return StepVerdict.END


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


def _steadiness(runs: list[list[Figures]]) -> str:
    """Which ranks gave the same in all runs."""
    sentences = []
    for rank in range(len(runs[0])):
        digests = {of_ranks[rank].digest for of_ranks in runs}
        said = "repeats its result" if len(digests) == 1 else "does not"
        sentences.append(f"rank {rank} {said}")
    return ", ".join(sentences)


def _outcome(model: nn.Module, loss: Tensor) -> Figures:
    """Digests and figures of the loss and of all gradients; waits for them once a device."""
    by_device: dict[torch.device, list[Tensor]] = defaultdict(list)
    by_device[loss.device].append(loss.detach())
    for parameter in model.parameters():
        if parameter.grad is not None:
            by_device[parameter.grad.device].append(parameter.grad.detach())
    digests = QueuedDigests([tensor for tensors in by_device.values() for tensor in tensors])
    figures: list[tuple[float, float]] = []
    for tensors in by_device.values():
        norms = [torch.linalg.vector_norm(tensor, dtype=torch.float32) for tensor in tensors]
        sums = [tensor.sum(dtype=torch.float32) for tensor in tensors]
        numbers = torch.stack([*norms, *sums]).tolist()  # one wait
        for tensor, norm, total in zip(tensors, numbers, numbers[len(tensors) :], strict=False):
            figures += [(norm, norm), (total, norm * math.sqrt(tensor.numel()))]
    # The figures were read from the same streams after them: the digests are there.
    return Figures(tuple(digest.hex() for digest in digests.result()), tuple(figures))
