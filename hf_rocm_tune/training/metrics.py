"""What TRL's trainers log is noted on the device in each micro-step, and brought to the host when it is logged.

TRL's ``compute_loss`` gathers each figure over the ranks and reads it at once: several collectives and several waits
for the card in each micro-step. Within `Notes.taken` ``Accelerator.gather`` and ``gather_for_metrics`` give a `Later`
instead. `settle` then computes all of them with TRL's own operations in TRL's own order, so that they are the same bit
for bit, after one gather and with one read. Used for the trainers in `TRAINERS`, in the version that was tried, whose
figures go into the log alone; KTO and GRPO compute with what they gather. The loss is upstream's to add up; only its
question whether each is finite is answered on the device, see `Notes.loss_to_log`.
"""

from __future__ import annotations

import importlib.metadata
import math
import operator
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from trl import DPOTrainer, RewardTrainer, SFTTrainer

from hf_rocm_tune.training.sentinels import is_foreign
from hf_rocm_tune.upstream import TESTED

TRAINERS = (SFTTrainer, DPOTrainer, RewardTrainer)
_AT_MOST = 100
"""Micro-steps whose figures may be outstanding: they are small tensors on the device."""


def is_tried(library: str) -> bool:
    """Whether this is the version whose private names stand here."""
    return importlib.metadata.version(library) == TESTED[library]


class Later:
    """The outcome of an operation on tensors or numbers of which some are not known yet."""

    def __init__(self, operation: Callable[..., Any], *parts: Any) -> None:
        self._operation, self.parts = operation, parts
        self.known: Any = None

    def sum(self) -> Later:
        return Later(Tensor.sum, self)

    def mean(self) -> Later:
        return Later(Tensor.mean, self)

    def min(self) -> Later:
        return Later(Tensor.min, self)

    def max(self) -> Later:
        return Later(Tensor.max, self)

    def item(self) -> Later:
        return _Read(self)

    def __gt__(self, other: int) -> bool:
        """TRL asks whether a count is above 0 before it divides by it: `_share` does."""
        assert other == 0, other
        return True

    def __truediv__(self, other: Any) -> Later:
        return Later(_share, self, other)

    def __floordiv__(self, other: Any) -> Later:
        return Later(operator.floordiv, self, other)

    def __add__(self, other: Any) -> Later:
        return Later(operator.add, self, other)

    __radd__ = __add__

    def value(self) -> Any:
        """What it is; all that it needs has been gathered and read."""
        if self.known is None:
            self.known = self._operation(*map(value_of, self.parts))
            self.parts = ()
        return self.known


class _Leaf(Later):
    """A tensor of all ranks; ``rows``: how many of them count, None for all."""

    def __init__(self, tensor: Tensor, rows: int | None) -> None:
        super().__init__(lambda: None)
        self.tensor, self.rows = tensor.detach(), rows  # with its graph it would keep all activations


class _Read(Later):
    """The number in a tensor of one element."""

    def __init__(self, tensor: Later) -> None:
        super().__init__(lambda: None, tensor)


def value_of(figure: Any) -> Any:
    """A figure as TRL would have it."""
    return figure.value() if isinstance(figure, Later) else figure


def _share(part: Any, whole: Any) -> Any:
    if isinstance(whole, Tensor):
        return torch.where(whole > 0, part / whole, 0.0)
    return part / whole if whole > 0 else 0.0


class Notes:
    """The outstanding figures of one trainer, and the losses that it logs."""

    def __init__(self, trainer: Any, *, filters_losses: bool) -> None:
        self._trainer, self._filters_losses = trainer, filters_losses
        tried = isinstance(trainer, TRAINERS) and is_tried("trl")
        # A user's code may gather by itself, and read what TRL has noted.
        self._wanted = tried and not is_foreign(type(trainer)) and trainer.compute_loss_func is None
        self._micro_steps = 0
        self._within = 0  # micro-batches that are in `taken` now: several in a pipeline

    def loss_to_log(self, loss: Tensor) -> Tensor:
        """What ``--logging_nan_inf_filter`` asks for, on the device; upstream would read each micro-step's loss."""
        if not self._filters_losses or (loss.device.type == "cpu" and math.isfinite(loss.item())):
            return loss
        trainer = self._trainer
        steps = 1 + trainer.state.global_step - trainer._globalstep_last_logged
        return torch.where(loss - loss == 0, loss, trainer._tr_loss / steps)  # fewer kernels than isfinite

    @contextmanager
    def taken(self) -> Iterator[None]:
        """Within the block what is gathered is noted, unless ranks gather by themselves: see `oom.local_gathers`."""
        accelerator = self._trainer.accelerator
        if not self._wanted or ("gather" in vars(accelerator) and not self._within):
            yield
            return
        self._micro_steps += 1
        self._within += 1
        ending = accelerator.gradient_state
        accelerator.gather = lambda tensor: _Leaf(tensor, None)
        accelerator.gather_for_metrics = lambda tensor: _Leaf(
            tensor, ending.remainder if ending.end_of_dataloader and ending.remainder > 0 else None
        )
        try:
            yield
        finally:
            self._within -= 1
            if not self._within:
                del accelerator.gather, accelerator.gather_for_metrics
        if self._micro_steps >= _AT_MOST and not self._within:
            self.settle()

    def settle(self) -> None:
        """Compute what is outstanding. Collective."""
        if not self._micro_steps:
            return
        self._micro_steps = 0
        trainer = self._trainer
        figures = [figure for metrics in trainer._metrics.values() for values in metrics.values() for figure in values]
        settle([*figures, trainer._total_train_tokens], trainer.accelerator)
        trainer._total_train_tokens = value_of(trainer._total_train_tokens)
        for metrics in trainer._metrics.values():
            for values in metrics.values():
                values[:] = map(value_of, values)


def settle(figures: Iterable[Any], accelerator: Any) -> None:
    """Gather and read what these figures need, so that each has its value. Collective."""
    found: dict[int, Later] = {}
    open_ends = [figure for figure in figures if isinstance(figure, Later)]
    while open_ends:
        figure = open_ends.pop()
        if id(figure) not in found and figure.known is None:
            found[id(figure)] = figure
            open_ends += [part for part in figure.parts if isinstance(part, Later)]
    _gather([each for each in found.values() if isinstance(each, _Leaf)], accelerator)
    reads = [each for each in found.values() if isinstance(each, _Read)]
    if reads:
        tensors = [each.parts[0].value().reshape(()) for each in reads]
        numbers = torch.stack([one.double() for one in tensors]).tolist()  # exact for float32, and counts below 2^53
        for each, tensor, number in zip(reads, tensors, numbers, strict=True):
            each.known = number if tensor.is_floating_point() else int(number)


def _gather(leaves: list[_Leaf], accelerator: Any) -> None:
    """All of them in one collective, as bytes; with one process there is nothing to gather."""
    ranks = accelerator.num_processes
    if ranks == 1:
        for each in leaves:
            each.known = each.tensor[: each.rows] if each.tensor.dim() else each.tensor
        return
    if not leaves:
        return
    flat = [each.tensor.reshape(-1).contiguous().view(torch.uint8) for each in leaves]
    sizes = [-(-one.numel() // 8) * 8 for one in flat]  # every dtype is at home at a multiple of 8
    packed = torch.cat([functional.pad(one, (0, size - one.numel())) for one, size in zip(flat, sizes, strict=True)])
    rows, begin = accelerator.gather(packed).view(ranks, -1), 0
    for each, one, size in zip(leaves, flat, sizes, strict=True):
        shape = each.tensor.shape or (1,)
        mine = rows[:, begin : begin + one.numel()].contiguous().view(each.tensor.dtype)
        each.known = mine.reshape(ranks * shape[0], *shape[1:])[: each.rows]
        begin += size
