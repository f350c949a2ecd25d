"""Logged metrics of TRL's trainers stay on the device in each micro-step and are read when they are logged.

TRL's ``compute_loss`` gathers and reads each metric at once: several collectives and waits in each micro-step. Within
`DeferredMetrics.deferring` gathers return a `Deferred`; `evaluate_deferred` evaluates all of them with TRL's own
operations in its own order, so the values are bit-identical, with one gather and one read. An operation that a
`Deferred` does not know reads it at once, as stock does: slower, and right in any version of TRL. So is the last step
of an epoch, of whose batches `gather_for_metrics` cuts what fills them up. Only for `TRAINERS`: KTO and GRPO compute
with what they gather.
"""

from __future__ import annotations

import math
import operator
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from trl import DPOTrainer, RewardTrainer, SFTTrainer

from hf_rocm_tune import upstream
from hf_rocm_tune.train.sentinels import is_foreign

TRAINERS = (SFTTrainer, DPOTrainer, RewardTrainer)
_AT_MOST = 100
"""Micro-steps whose metrics may be outstanding; they are small tensors on the device."""


class Deferred:
    """The result of an operation on tensors or numbers, some of which are not known yet."""

    def __init__(self, operation: Callable[..., Any], *parts: Any) -> None:
        self._operation = operation
        self.parts = parts
        self.known: Any = None

    def __getattr__(self, name: str) -> Callable[[], Deferred]:
        if name in ("sum", "mean", "min", "max"):
            return partial(Deferred, getattr(Tensor, name), self)
        if name.startswith("__"):
            raise AttributeError(name)
        attribute: Callable[[], Deferred] = getattr(self.now(), name)
        return attribute

    def item(self) -> Deferred:
        return _Number(self)

    def __gt__(self, other: Any) -> bool:
        """Only for TRL, which asks whether a count is above 0 before it divides by it: `_ratio` checks that later."""
        if other == 0 and sys._getframe(1).f_globals.get("__name__", "").startswith("trl."):
            return True
        return bool(self.now() > value_of(other))

    def __truediv__(self, other: Any) -> Deferred:
        return Deferred(_ratio, self, other)

    def __floordiv__(self, other: Any) -> Deferred:
        return Deferred(operator.floordiv, self, other)

    def __add__(self, other: Any) -> Deferred:
        return Deferred(operator.add, self, other)

    __radd__ = __add__

    def now(self) -> Any:
        """Gather and read what this depends on, for an operation that cannot wait. Collective."""
        evaluate_deferred([self])
        return self.value()

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        keywords = {name: _now(value) for name, value in (kwargs or {}).items()}
        return function(*map(_now, args), **keywords)

    def value(self) -> Any:
        """The value, after everything it depends on has been gathered and read."""
        if self.known is None:
            self.known = self._operation(*map(value_of, self.parts))
            self.parts = ()
        return self.known


def _now(figure: Any) -> Any:
    return figure.now() if isinstance(figure, Deferred) else figure


def _reading(operation: Callable[..., Any]) -> Callable[..., Any]:
    """A method that reads what it is given, and computes with the values."""

    def read(self: Deferred, *others: Any) -> Any:
        return operation(self.now(), *map(_now, others))

    return read


def _reflected(operation: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    return lambda mine, other: operation(other, mine)


_BINARY = ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "matmul", "and", "or", "xor", "lshift", "rshift")
_OPERATIONS: dict[str, Callable[..., Any]] = {
    **{name: getattr(operator, f"__{name}__") for name in _BINARY},
    **{f"r{name}": _reflected(getattr(operator, f"__{name}__")) for name in _BINARY},
    "divmod": divmod,
    "rdivmod": _reflected(divmod),
    **{name: getattr(operator, name) for name in ("lt", "le", "eq", "ne", "ge", "gt", "neg", "pos", "invert", "index")},
    **{name: getattr(operator, name) for name in ("getitem", "contains")},
    **{kind.__name__: kind for kind in (float, int, bool, complex, str)},
    **{function.__name__: function for function in (len, iter, format, round, abs, math.trunc, math.floor, math.ceil)},
}
"""All that Python's syntax and built-in functions may ask of a number or a tensor."""
for _name, _operation in _OPERATIONS.items():
    if f"__{_name}__" not in vars(Deferred):
        setattr(Deferred, f"__{_name}__", _reading(_operation))


class _Leaf(Deferred):
    """A tensor to be gathered from all ranks."""

    def __init__(self, accelerator: Any, tensor: Tensor) -> None:
        super().__init__(lambda: None)
        self.accelerator = accelerator
        self.tensor = tensor.detach()  # its graph would keep all activations alive


class _Number(Deferred):
    """The number in a tensor of one element."""

    def __init__(self, tensor: Deferred) -> None:
        super().__init__(lambda: None, tensor)


def value_of(figure: Any) -> Any:
    """The value of a metric, deferred or not."""
    return figure.value() if isinstance(figure, Deferred) else figure


def _ratio(part: Any, whole: Any) -> Any:
    if isinstance(whole, Tensor):
        return torch.where(whole > 0, part / whole, 0.0)
    return part / whole if whole > 0 else 0.0


class DeferredMetrics:
    """The outstanding metrics of one trainer, and the losses that it logs."""

    def __init__(self, trainer: Any, *, filters_losses: bool) -> None:
        self._trainer = trainer
        self._filters_losses = filters_losses
        known = all(upstream.read(name, trainer) is not None for name in ("metrics", "trained_tokens"))
        # User code may gather by itself, and read TRL's metrics.
        self._wanted = (
            isinstance(trainer, TRAINERS)
            and known
            and not is_foreign(type(trainer))
            and trainer.compute_loss_func is None
        )
        self._micro_steps = 0
        self._within = 0  # micro-batches that are in `deferring` now: several in a pipeline
        self._logged_at = 0  # the step of the last log of a loss

    def loss_to_log(self, loss: Tensor) -> Tensor:
        """Apply ``--logging_nan_inf_filter`` on the device; upstream would read the loss of each micro-step."""
        if not self._filters_losses or (loss.device.type == "cpu" and math.isfinite(loss.item())):
            return loss
        trainer = self._trainer
        steps = 1 + trainer.state.global_step - self._logged_at
        return torch.where(loss - loss == 0, loss, trainer._tr_loss / steps)  # fewer kernels than isfinite

    def logged_at(self, step: int) -> None:
        """The losses up to this step have been logged, or a training begins with it."""
        self._logged_at = step

    @contextmanager
    def deferring(self) -> Iterator[None]:
        """Within the block gathers are deferred, unless they are replaced by `oom.local_gathers` already."""
        accelerator = self._trainer.accelerator
        ending = accelerator.gradient_state
        cuts = ending.end_of_dataloader and ending.remainder > 0  # `gather_for_metrics` takes rows off what it gathered
        if not self._wanted or cuts or ("gather" in vars(accelerator) and not self._within):
            yield
            return
        self._micro_steps += 1
        self._within += 1
        accelerator.gather = partial(_Leaf, accelerator)
        try:
            yield
        finally:
            self._within -= 1
            if not self._within:
                del accelerator.gather
        if self._micro_steps >= _AT_MOST and not self._within:
            self.evaluate()

    def evaluate(self) -> None:
        """Evaluate all outstanding metrics. Collective."""
        if not self._micro_steps:
            return
        self._micro_steps = 0
        trainer = self._trainer
        figures: list[Any] = []
        for metrics in trainer._metrics.values():
            for values in metrics.values():
                figures += values
        evaluate_deferred([*figures, trainer._total_train_tokens])
        trainer._total_train_tokens = value_of(trainer._total_train_tokens)
        for metrics in trainer._metrics.values():
            for values in metrics.values():
                values[:] = map(value_of, values)


def evaluate_deferred(figures: Iterable[Any]) -> None:
    """Gather and read what these metrics depend on, so that each has its value. Collective."""
    needed: dict[int, Deferred] = {}
    pending = [figure for figure in figures if isinstance(figure, Deferred)]
    while pending:
        figure = pending.pop()
        if id(figure) not in needed and figure.known is None:
            needed[id(figure)] = figure
            pending += [part for part in figure.parts if isinstance(part, Deferred)]
    _gather([figure for figure in needed.values() if isinstance(figure, _Leaf)])
    reads = [figure for figure in needed.values() if isinstance(figure, _Number)]
    if reads:
        tensors = [figure.parts[0].value().reshape(()) for figure in reads]
        # float64 is exact for float32, and for counts below 2^53
        numbers = torch.stack([tensor.double() for tensor in tensors]).tolist()
        for figure, tensor, number in zip(reads, tensors, numbers, strict=True):
            figure.known = number if tensor.is_floating_point() else int(number)


def _gather(leaves: list[_Leaf]) -> None:
    """Gather all leaves in one collective, as bytes; with one process there is nothing to gather."""
    if not leaves:
        return
    accelerator = leaves[0].accelerator
    ranks = accelerator.num_processes
    if ranks == 1:
        for leaf in leaves:
            leaf.known = leaf.tensor
        return
    padded = []
    for leaf in leaves:
        data = leaf.tensor.reshape(-1).contiguous().view(torch.uint8)
        padded.append(functional.pad(data, (0, -data.numel() % 8)))  # a multiple of 8 is aligned for every dtype
    gather = type(accelerator).gather  # not the one that defers
    rows = gather(accelerator, torch.cat(padded)).view(ranks, -1)
    begin = 0
    for leaf, data in zip(leaves, padded, strict=True):
        shape = leaf.tensor.shape or (1,)
        of_ranks = rows[:, begin : begin + leaf.tensor.nbytes].contiguous().view(leaf.tensor.dtype)
        leaf.known = of_ranks.reshape(ranks * shape[0], *shape[1:])
        begin += data.numel()
