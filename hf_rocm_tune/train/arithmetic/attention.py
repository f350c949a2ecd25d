"""Rows of torch's ``scaled_dot_product_attention``, computed again in float32 by plain products, with the run's masks;
and whether a ``topk``, as of a router of experts, has taken the best.

Both are done in the first step, and whenever a longer batch comes than all before.

Not found: a wrong backward pass; attention with dropout; other attention functions.
"""

from __future__ import annotations

import logging
import math
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from hf_rocm_tune.models.trainer_parts import OwningTrainer
from hf_rocm_tune.train.arithmetic.bounds import roundoff
from hf_rocm_tune.train.arithmetic.verdict import StepVerdict, record_disagreement

logger = logging.getLogger(__name__)

_ROWS = 8  # of each attention call


class AttentionChecks:
    """The checks of attention and of `topk` in a training. The trainer owns one, and calls it in order of the methods.

    Attributes:
        failure: the sentence on what ended the run; empty before.
    """

    def __init__(self, trainer: OwningTrainer, *, on: bool) -> None:
        self._trainer = trainer
        self._is_on = on
        self._longest_row = 0  # tokens of the longest row whose attention was checked
        # Of this step, by device, a tensor of shape [] for each call:
        self._errors: dict[torch.device, list[Tensor]] = defaultdict(list)  # `attention_error`
        self._wrong_choices: dict[torch.device, list[Tensor]] = defaultdict(list)  # `wrong_choice`
        self._wrong_computations = 0  # of this step
        self._was_wrong = ""  # what was wrong in the last of them
        self.failure = ""

    def prepare(self) -> None:
        """A training begins."""
        if self._trainer.args.torch_compile:  # what is compiled calls no attention function
            self._is_on = False

    def begin_step(self) -> None:
        self._errors.clear()
        self._wrong_choices.clear()
        self._wrong_computations = 0

    @contextmanager
    def watching(self, inputs: Any = None) -> Iterator[None]:
        """Within the block the calls of attention and of `topk` are checked.

        ``inputs``: of a micro-batch, checked if its rows are the longest yet; None: of all micro-batches of a step that
        is computed again, checked if attention or a choice was wrong in it.
        """
        length = 0
        if self._is_on and isinstance(inputs, Mapping):
            length = _row_length(inputs)
        is_step_again = inputs is None and self._wrong_computations > 0
        if length <= self._longest_row and not is_step_again:
            yield
            return
        self._longest_row = max(self._longest_row, length)
        stock = functional.scaled_dot_product_attention
        thread = threading.get_ident()

        def checked(query: Tensor, *args: Any, **kwargs: Any) -> Tensor:
            result: Tensor = stock(query, *args, **kwargs)
            if threading.get_ident() != thread:  # that computes a layer on the host
                return result
            with torch.no_grad(), torch.autocast(result.device.type, enabled=False):
                if query.dim() == 4:
                    error = attention_error(result, query, *args, **kwargs)
                    if error is not None:
                        self._errors[error.device].append(error)
            return result

        def add_choice(wrong: Tensor) -> None:
            self._wrong_choices[wrong.device].append(wrong)

        functional.scaled_dot_product_attention = checked
        try:
            with WatchedChoices(add_choice):
                yield
        finally:
            functional.scaled_dot_product_attention = stock

    def pending(self) -> list[Tensor]:
        """The errors of attention, then the wrong choices: shape [calls], one tensor for each device."""
        on_devices = [*self._errors.values(), *self._wrong_choices.values()]
        return [torch.stack(calls) for calls in on_devices]

    def judge(self, figures: Sequence[Sequence[float]], *, can_repeat: bool) -> StepVerdict:
        """What to do with the step; ``figures``: a row for each tensor of `pending`."""
        errors: list[float] = []
        for row in figures[: len(self._errors)]:
            errors += row
        wrong_choices: list[float] = []
        for row in figures[len(self._errors) :]:
            wrong_choices += row
        self._errors.clear()
        self._wrong_choices.clear()
        if not errors and not wrong_choices:
            return StepVerdict.GO_ON
        self._trainer.transfer_report.count("arithmetic", attention=len(errors), choices=len(wrong_choices))

        wrong = []
        if any(not error <= 1.0 for error in errors):  # NaN too
            wrong.append(f"attention over {self._longest_row} tokens")
        if any(wrong_choices):
            wrong.append("topk (the choice of experts)")
        if not wrong:
            if self._wrong_computations:
                self._record(self._was_wrong, kind="transient", outcome="recovered", text="it is right now")
            return StepVerdict.GO_ON
        self._wrong_computations += 1
        self._was_wrong = " and ".join(wrong)
        if can_repeat and self._wrong_computations == 1:
            return StepVerdict.REPEAT

        text = "something else than the best was chosen, each time: run hf-rocm-tune doctor --full"
        if self._was_wrong.startswith("attention"):
            largest = max(math.inf if math.isnan(error) else error for error in errors)
            advice = "give --attn_implementation eager, or a smaller --max_length"
            text = f"{largest:.3g} times what rounding explains: {advice}"
        self.failure = self._record(self._was_wrong, kind="repeatable", outcome="stopped", text=text)
        return StepVerdict.END

    def describe(self) -> dict[str, Any]:
        """For the report."""
        return {"attention_length": self._longest_row}

    def _record(self, what: str, *, kind: str, outcome: str, text: str) -> str:
        """An incident in the report, and a warning, which is returned."""
        step = self._trainer.state.global_step + 1
        tensor, *_ = what.split()
        report = self._trainer.transfer_report
        record_disagreement(report, step, tensor, kind=kind, outcome=outcome, text=text)
        sentence = f"step {step}: {what}: {text}"
        logger.warning("%s", sentence)
        return sentence


def _row_length(inputs: Mapping[str, Any]) -> int:
    """The largest last dim of a micro-batch's tensors."""
    length = 0
    for tensor in inputs.values():
        if isinstance(tensor, Tensor) and tensor.dim():
            length = max(length, tensor.shape[-1])
    return length


def attention_error(
    result: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor | None:
    """The largest difference of some rows over what rounding explains, shape [], on the device; None with dropout.

    Arguments as of ``scaled_dot_product_attention``: ``query`` and ``result`` [batch, heads, rows, width]; ``key`` and
    ``value`` [batch, heads or fewer, keys, width].
    """
    if dropout_p:
        return None
    (batch, heads, rows, width), (_, shared, keys, _) = query.shape, key.shape
    picked = torch.linspace(0, rows - 1, min(_ROWS, rows), device=query.device).long()
    hidden = mask = None
    if is_causal:
        hidden = torch.arange(keys, device=query.device) > picked[:, None]
    if attn_mask is not None:
        mask = attn_mask.expand(batch, heads, rows, keys)[:, :, picked]
    unit = roundoff(result.dtype)
    query = query[:, :, picked].to(result.dtype)  # as autocast does
    key = key.to(result.dtype)
    value = value.to(result.dtype)
    worst = []
    for head in range(shared):  # one at a time: in float32 the keys of a long row are large
        own = slice(head * heads // shared, (head + 1) * heads // shared)
        queries = query[:, own].float()
        keys_of_head = key[:, head, None].float()
        values = value[:, head, None].float()
        scores = queries @ keys_of_head.transpose(-1, -2) * (scale or width**-0.5)
        largest = scores.abs().amax(-1, keepdim=True)
        if hidden is not None:
            scores = scores.masked_fill(hidden, -math.inf)
        if mask is not None and mask.dtype == torch.bool:
            scores = scores.masked_fill(~mask[:, own], -math.inf)
        elif mask is not None:
            scores = scores + mask[:, own].float()
        weights = scores.softmax(-1)
        sees = scores.amax(-1, keepdim=True) > -3e4  # else: a row of padding
        allowed = 8 * unit * (1 + largest) * (weights @ values.abs()) + 1e-5 * values.abs().amax()
        difference = (result[:, own, picked].float() - weights @ values).abs()
        differs = difference != 0  # else 0 / 0, where all values are 0; NaN differs
        worst.append(torch.where(sees & differs, difference / allowed, 0.0).amax())
    return torch.stack(worst).amax()


class WatchedChoices(TorchFunctionMode):
    """Within the block, in this thread, each ``topk`` of numbers is looked over: `wrong_choice` goes to ``add``."""

    def __init__(self, add: Callable[[Tensor], None]) -> None:
        super().__init__()
        self._add = add

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func in (torch.topk, Tensor.topk):
            self._look_over(result, *args, **(kwargs or {}))
        return result

    def _look_over(
        self, result: Any, input: Tensor, k: int, dim: int = -1, largest: bool = True, *_: Any, **__: Any
    ) -> None:
        if not input.is_floating_point():
            return
        with torch.no_grad():
            values, chosen = result
            self._add(wrong_choice(chosen, values.detach(), input.detach(), dim, largest=largest))


def wrong_choice(chosen: Tensor, values: Tensor, scores: Tensor, dim: int, *, largest: bool) -> Tensor:
    """Whether a ``topk`` along ``dim`` left out something better, chose twice or gave other values.

    ``chosen``, ``values``: what it gave. Returns 1.0 or 0.0, shape [].
    """
    own = scores.gather(dim, chosen)
    other_values = (own != values).any()
    if not largest:
        own, scores = -own, -scores
    others = scores.scatter(dim, chosen, -math.inf).amax(dim)
    left_out_better = (others > own.amin(dim)).any()
    times = torch.zeros_like(scores, dtype=torch.int32).scatter_add_(dim, chosen, torch.ones_like(chosen).int())
    chosen_twice = (times > 1).any()
    wrong = left_out_better | chosen_twice | other_values
    return (wrong & ~scores.isnan().any()).float()
