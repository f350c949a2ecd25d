"""Micro-batches that are computed twice, and attention against a second computation of some of its rows.

What is no product with a frozen weight (attention, norms, LoRA's own products, the loss, gradients until the update)
has no checksum. But the same kernels give the same bits: at the first step after a start, and then every `EVERY` steps,
the first micro-batch is rehearsed: forward and backward with the random states of its real turn. Loss and gradients of
both are compared by digest. Where they differ, the step is computed again; it is used if the result then equals one of
the earlier ones. A fault that is the same each time is not seen so; with several ranks, all of them rehearse one rank's
micro-batch, and their results are compared.

Kernels that are not deterministic are found out at the first rehearsal, by further ones: then norms and sums of the
gradients are compared instead, within `_MARGIN` times the largest difference seen.

During the first rehearsal some rows of each call of ``scaled_dot_product_attention`` are computed again in float32 by
plain products: at the run's own length, with its own masks and packing. Not covered: other attention functions, and
the backward pass of attention against a second computation.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from hf_rocm_tune.cards.way import Stock
from hf_rocm_tune.errors import CorruptionError, device_shortage
from hf_rocm_tune.models.quantised import running_statistics
from hf_rocm_tune.train.arithmetic import Verdict
from hf_rocm_tune.train.oom import RandomState, StepWindow, local_gathers
from hf_rocm_tune.transfer import QueuedDigests
from hf_rocm_tune.transfer.host_group import host_group

logger = logging.getLogger(__name__)

EVERY = 200
"""Steps between two replays."""
_MARGIN, _AT_LEAST = 8.0, 1e-6
_RUNS = 4
_ROWS = 8  # of each attention call


@dataclass(frozen=True)
class Outcome:
    """Loss and gradients of a micro-batch."""

    digest: tuple[str, ...]
    figures: tuple[float, ...]  # the loss, then norm and sum of each gradient

    def distance(self, other: Outcome) -> float:
        """The largest difference of a figure, over the larger of the two."""
        pairs = zip(self.figures, other.figures, strict=True)
        return max(abs(a - b) / max(abs(a), abs(b), 1e-30) if a != b else 0.0 for a, b in pairs)


class Replays:
    """See the module's description. The trainer owns one, and calls it in the order of the methods.

    Attributes:
        deterministic: whether a micro-batch gives the same bits twice; None: not known yet.
        bound: how far the figures of two runs may lie apart, where it does not.
    """

    def __init__(self, trainer: Any, *, on: bool) -> None:
        self._trainer = trainer
        self._on = on
        self._begun = 0
        self._due = self._awaited = self._wrong = False
        self._seen: list[Outcome] = []  # of the micro-batch that is replayed in this step
        self.deterministic: bool | None = None
        self.bound = 0.0
        self.failure = ""

    def prepare(self) -> None:
        """A training begins. Sharded models and those whose buffers a forward pass changes are not replayed."""
        trainer = self._trainer
        self._on &= not (trainer.is_sharded or trainer.get_tp_size() > 1 or any(running_statistics(trainer.model)))

    def begin_step(self, step: int) -> None:
        """An optimizer step begins, the number ``step`` from 1."""
        self._begun += 1
        self._due = self._on and (self._begun == 1 or step % EVERY == 0)
        self._seen, self._wrong, self._awaited = [], False, False

    def rehearse(self, stock: Stock, model: nn.Module, inputs: Any, num_items: Any) -> None:
        """Before the first micro-step of a step: compute it once, as it will be. Collective where it is due."""
        if not self._due or not isinstance(inputs, Mapping):
            return
        self._due = False
        trainer = self._trainer
        start = StepWindow(trainer)
        several = trainer.args.world_size > 1
        if several:
            inputs, num_items, random = self._from_one_rank(inputs, num_items)

        def run(attention: AbstractContextManager[Any] = nullcontext()) -> Outcome:  # noqa: B008  # it has no state
            if several:
                random.restore()
            try:
                with local_gathers(trainer.accelerator), trainer.accelerator.no_sync(model), attention:
                    return self._outcome(model, stock(model, inputs, num_items))
            finally:
                start.restore(model)

        try:
            if self._begun == 1:
                attention = _CheckedAttention()
                first = run(attention)
                self._judge_attention(attention)
            else:
                first = run()
            if self.deterministic is None:
                self._find_out(first, run)
        except RuntimeError as error:
            if several or device_shortage(error) is None:
                raise
            return  # the real turn runs out of memory too, and is made smaller
        trainer.transfer_report.count("arithmetic", replays=1)
        if several:
            self._compare_ranks(first, run)
        else:
            self._seen, self._awaited = [first], True

    def _find_out(self, first: Outcome, run: Callable[[], Outcome]) -> None:
        second = run()
        if second.digest == first.digest:
            self.deterministic = True
            return
        more = [first, second, run(), run()]
        # One that differs from three equal ones is a fault, and is found when the real turn is compared.
        self.deterministic = len({each.digest for each in more}) < 3
        self.bound = max(_AT_LEAST, _MARGIN * max(a.distance(b) for a in more for b in more))

    def _outcome(self, model: nn.Module, loss: Tensor) -> Outcome:
        gradients = [each.grad for each in model.parameters() if each.grad is not None]
        digests = QueuedDigests([loss.detach(), *gradients]).result()
        sums = [torch.stack([each.float().norm(), each.float().sum()]) for each in gradients]
        by_device: dict[torch.device, list[Tensor]] = {}
        for each in sums:
            by_device.setdefault(each.device, []).append(each)
        figures = [number for each in by_device.values() for number in torch.cat(each).tolist()]
        return Outcome(tuple(each.hex() for each in digests), (loss.item(), *figures))

    def _same(self, one: Outcome, other: Outcome) -> bool:
        return one.digest == other.digest if self.deterministic else one.distance(other) <= self.bound

    # ---- one process: the real turn is compared -----------------------------------------------------------------

    def compare(self, model: nn.Module, loss: Tensor, *, again: bool = False) -> None:
        """After the first micro-step of a step, and of one that is computed ``again``."""
        if not (self._wrong if again else self._awaited):
            return
        self._awaited = False
        found = self._outcome(model, loss)
        if any(self._same(found, each) for each in self._seen):
            if self._wrong:
                self._tell("transient", "recovered", "the step was computed again, and equals one of the two")
            self._wrong = False
            return
        self._wrong = True
        self._seen.append(found)

    def judge(self, *, can_repeat: bool) -> Verdict:
        """What to do with the step, on this rank alone."""
        if not self._wrong:
            return Verdict.GO_ON
        if not can_repeat:
            self._tell("unknown", "skipped", "the step is skipped")
            return Verdict.SKIP
        if len(self._seen) < _RUNS:
            return Verdict.REPEAT
        self._tell("repeatable", "stopped", f"{_RUNS} runs give as many results")
        return Verdict.END

    def describe(self) -> dict[str, Any]:
        """For the report, besides the counters."""
        return {"deterministic": self.deterministic, "replay_every": EVERY if self._on else None}

    def _tell(self, kind: str, outcome: str, text: str) -> None:
        step = self._trainer.state.global_step + 1
        self.failure = f"step {step}: loss or gradients of a micro-batch that was computed twice differ: {text}"
        row = {"step": step, "stage": "arithmetic", "tensor": "gradients", "kind": kind, "text": text}
        self._trainer.transfer_report.incident({**row, "outcome": outcome})
        self._trainer.transfer_report.count("arithmetic", disagreements=1, recovered=int(outcome == "recovered"))
        logger.warning("%s", self.failure)

    # ---- several ranks: all compute the same micro-batch --------------------------------------------------------

    def _from_one_rank(self, inputs: Mapping[str, Any], num_items: Any) -> tuple[Any, Any, RandomState]:
        """The micro-batch, label count and random states of one rank, in turn, on all ranks."""
        trainer = self._trainer
        turn = self._begun // EVERY % trainer.args.world_size
        count = num_items.item() if isinstance(num_items, Tensor) else num_items
        sent = [(dict(trainer.host_batch(inputs)), count, RandomState(*trainer.devices))]
        dist.broadcast_object_list(sent, src=turn, group=host_group())
        batch, count, random = sent[0]
        if isinstance(num_items, Tensor):
            num_items = torch.full_like(num_items, count)
        return batch, num_items, random

    def _compare_ranks(self, first: Outcome, run: Callable[[], Outcome]) -> None:
        """Compare the ranks' outcomes; where they differ, all compute again, which tells whose card is wrong."""
        history = [self._all(first)]
        while not all(self._same(history[-1][0], each) for each in history[-1]):
            if len(history) == _RUNS:
                self._tell("repeatable", "stopped", "the cards differ each time: " + _by_rank(history))
                raise CorruptionError(self.failure)
            history.append(self._all(run()))
        if len(history) > 1:
            right = history[-1][0]
            wrong = [rank for rank, each in enumerate(history[0]) if not self._same(right, each)]
            if self._trainer.is_world_process_zero():
                self._tell(
                    "transient", "recovered", f"wrong on rank {', '.join(map(str, wrong))}, and right when repeated"
                )

    def _all(self, mine: Outcome) -> list[Outcome]:
        rows: list[Any] = [None] * dist.get_world_size(host_group())
        dist.all_gather_object(rows, mine, group=host_group())
        return rows

    # ---- attention ----------------------------------------------------------------------------------------------

    def _judge_attention(self, attention: _CheckedAttention) -> None:
        calls = attention.worst
        if not calls:
            return
        worst = max(float(each) if math.isfinite(float(each)) else math.inf for each in torch.stack(calls).tolist())
        self._trainer.transfer_report.count("arithmetic", attention=len(calls))
        if worst <= 1.0:
            return
        step = self._trainer.state.global_step + 1
        text = (
            f"step {step}: attention over {attention.length} tokens is wrong ({worst:.3g} times what rounding explains "
            "when it is compared with plain float32 products)"
        )
        row = {"step": step, "stage": "arithmetic", "tensor": "attention"}
        self._trainer.transfer_report.incident({**row, "kind": "attention", "text": text, "outcome": "stopped"})
        self._trainer.transfer_report.count("arithmetic", disagreements=1)
        raise CorruptionError(f"{text}: choose --attn_implementation eager, or a smaller --max_length")


class _CheckedAttention(TorchFunctionMode):
    """Within the block some rows of each attention call are computed again.

    Attributes:
        worst: of each call, the largest difference over what rounding explains, shape [].
        length: keys of the longest call.
    """

    def __init__(self) -> None:
        super().__init__()
        self.worst: list[Tensor] = []
        self.length = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if func is functional.scaled_dot_product_attention and len(args) >= 3:
            with torch.no_grad(), torch.autocast(result.device.type, enabled=False):
                self._check(result, *args, **kwargs)
        return result

    def _check(
        self,
        result: Tensor,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> None:
        """``query`` [batch, heads, rows, width]; ``key`` and ``value`` [batch, heads or fewer, keys, width]."""
        if dropout_p or query.dim() != 4:
            return
        rows, keys = query.shape[2], key.shape[2]
        self.length = max(self.length, keys)
        picked = torch.linspace(0, rows - 1, min(_ROWS, rows), device=query.device).long()
        wide = [each.float() for each in (query[:, :, picked], key, value)]
        if enable_gqa and wide[1].shape[1] != wide[0].shape[1]:
            wide[1:] = [each.repeat_interleave(wide[0].shape[1] // each.shape[1], 1) for each in wide[1:]]
        scores = wide[0] @ wide[1].transpose(-1, -2) * (scale if scale is not None else query.shape[-1] ** -0.5)
        largest = scores.abs().amax(-1, keepdim=True)
        if is_causal:
            later = torch.arange(keys, device=query.device) > picked[:, None]
            scores = scores.masked_fill(later, -math.inf)
        if attn_mask is not None:
            mask = attn_mask.expand(*attn_mask.shape[:-2], rows, keys)[..., picked, :]
            scores = scores.masked_fill(~mask, -math.inf) if mask.dtype == torch.bool else scores + mask.float()
        weights = scores.softmax(-1)
        unit = torch.finfo(result.dtype).eps / 2
        allowed = 8 * unit * (1 + largest) * (weights @ wide[2].abs()) + 1e-5 * wide[2].abs().amax()
        difference = (result[:, :, picked].float() - weights @ wide[2]).abs() / allowed
        self.worst.append(torch.where(weights.isnan().any(-1, keepdim=True), 0.0, difference).amax())


def _by_rank(history: list[list[Outcome]]) -> str:
    """Which ranks give the same result each time."""
    steady = [len({each[rank].digest for each in history}) == 1 for rank in range(len(history[0]))]
    return ", ".join(f"rank {rank} {'repeats its result' if each else 'does not'}" for rank, each in enumerate(steady))
