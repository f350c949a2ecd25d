"""How each optimizer moves a weight and its state, by its definition, in float64.

Each result of the optimizer's own is a few roundings of the stored dtype away, and one of every operation that is not
fused. ``p`` is a weight, ``g`` its gradient, ``m`` and ``v`` the moments, as in the papers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hf_rocm_tune.train.update.comparison import TINY, Recomputed

BLOCK = 256
"""Elements that share a scale in bitsandbytes' 8-bit states."""
_SINGLE = float(torch.finfo(torch.float32).eps)
_COARSE = 2e-5  # of a block's largest value: bitsandbytes on a CPU finds codes of smaller ones by a coarse table


@dataclass(frozen=True, kw_only=True)
class Update:
    """What an update was given and what it has made, of neighbouring elements of one tensor: arrays of float64.

    Attributes:
        dtype: in which weight and state are stored.
        group: the settings of the tensor's group in this step.
        step: of this tensor, from 1.
        weight, gradient: before the update, the gradient without the scaler's scale.
        state: before the update, by name; None where there was none.
        made_weight, made_state: after it.
    """

    dtype: torch.dtype
    group: Mapping[str, Any]
    step: int
    weight: Any
    gradient: Any
    state: Mapping[str, Any]
    made_weight: Any
    made_state: Mapping[str, Any]

    @property
    def stored(self) -> float:
        """The relative rounding of the stored dtype."""
        return float(torch.finfo(self.dtype).eps)

    @property
    def spacing(self) -> float:
        """The distance of two neighbours near zero, where it is absolute: 6e-8 in float16, 9e-41 in bfloat16."""
        info = torch.finfo(self.dtype)
        return max(2 * float(info.smallest_normal) * float(info.eps), TINY)


@dataclass(frozen=True)
class SGD:
    """torch's SGD; its subclasses are other optimizers."""

    states: tuple[str, ...] = ("momentum_buffer",)
    in_blocks: bool = False  # a sample is a block of the state
    fused: bool = False  # else every operation rounds to the stored dtype

    def sizes(self, length: int) -> list[int]:
        """Numbers of elements of each state, of a sample of ``length``."""
        return [length] * len(self.states)

    def rounding(self, update: Update) -> float:
        """The relative rounding of each operation."""
        if self.fused or update.group.get("fused"):
            return _SINGLE
        return max(_SINGLE, update.stored)

    def compared(self, update: Update) -> list[Recomputed]:
        """The weight and the state that the definition makes, beside what was made."""
        group = update.group
        stored, computed = update.stored, self.rounding(update)
        lr = float(group["lr"])
        decay = float(group["weight_decay"])
        momentum = float(group["momentum"])
        p, g = update.weight, update.gradient
        if group["maximize"]:
            g = -g
        g = g + decay * p
        size = np.abs(g) + 2 * abs(decay) * np.abs(p)
        moved = g
        recomputed = []
        if momentum:
            before = update.state["momentum_buffer"]
            buffer = g
            if before is not None:
                buffer = momentum * before + (1 - group["dampening"]) * g
                size = size + momentum * np.abs(before)
            bound = (2 * stored + 8 * computed) * size + update.spacing
            recomputed.append(Recomputed("its momentum", update.made_state["momentum_buffer"], buffer, bound))
            moved = buffer
            if group["nesterov"]:
                moved = g + momentum * buffer
            size = size * (1 + momentum)
        expected = p - lr * moved
        bound = 2 * stored * (np.abs(p) + np.abs(expected)) + (2 * stored + 16 * computed) * lr * size
        bound = bound + (1 + lr) * update.spacing
        recomputed.append(Recomputed("the weight", update.made_weight, expected, bound))
        return recomputed


@dataclass(frozen=True)
class _Moment:
    """A moment after an update, by definition."""

    value: Any
    off: Any  # how far the rounding of its decay moves it


@dataclass(frozen=True)
class Adam(SGD):
    """Adam and AdamW, torch's or bitsandbytes' with 32 bits."""

    states: tuple[str, ...] = ("exp_avg", "exp_avg_sq")
    own_decay: bool | None = None  # whether decay is decoupled whatever the group says

    def moments(self, update: Update) -> tuple[Any, Any]:
        """Before the update."""
        m, v = (update.state[name] for name in self.states[:2])
        if m is None:
            zero = np.zeros(len(update.weight))
            return zero, zero
        return m, v

    def compared(self, update: Update) -> list[Recomputed]:
        group, step = update.group, update.step
        p, g = update.weight, update.gradient
        lr = float(group["lr"])
        decay = float(group["weight_decay"])
        eps = group["eps"]
        first, second = group["betas"][:2]
        m, v = self.moments(update)
        if group.get("maximize"):
            g = -g
        decoupled = self.own_decay
        if decoupled is None:
            decoupled = group.get("decoupled_weight_decay", True)
        size = np.abs(m) + np.abs(g)
        if not decoupled:
            g = g + decay * p
            size = np.abs(m) + np.abs(g) + abs(decay) * np.abs(p)

        new_m = first * m + (1 - first) * g
        new_v = second * v + (1 - second) * g * g
        root = np.sqrt(new_v / (1 - second**step)) + eps
        rate = lr / (1 - first**step)
        change = rate * new_m / root
        expected = p - change
        if decoupled:
            expected = p * (1 - lr * decay) - change

        computed = self.rounding(update)
        off_m = self._loose(first) * size
        off_v = self._loose(second) * (v + g * g)
        off_powers = self._loose_power(first, step) + self._loose_power(second, step)
        share = np.divide(off_v, new_v, out=np.zeros(len(new_v)), where=new_v > 0)
        rounding = 16 * computed * (np.abs(change) + lr * abs(decay) * np.abs(p)) + 8 * computed * rate * size / root
        rounding = rounding + rate * off_m / root + (off_powers + share) * np.abs(change)
        if self.own_decay:  # the weight decays before or after its change
            rounding = rounding + lr * abs(decay) * np.abs(change)
        if computed > _SINGLE:  # its moments are stored before they are used, and may be too small for their dtype
            least = np.sqrt(np.maximum(new_v - update.spacing, 0) / (1 - second**step)) + eps
            rounding = rounding + rate * (np.abs(new_m) + update.spacing) / least - np.abs(change)
        bound = 2 * update.stored * (np.abs(p) + np.abs(expected)) + rounding + update.spacing
        return [
            *self.compared_moments(update, _Moment(new_m, off_m), _Moment(new_v, off_v), size),
            Recomputed("the weight", update.made_weight, expected, bound),
        ]

    def _loose(self, decay: float) -> float:
        """How far a decay is from bitsandbytes' on a card, in float32: 1 - 0.999 is 1.3e-5 less. A CPU has float64."""
        if not self.fused:
            return 0.0
        return abs(float(np.float32(decay)) - decay)

    def _loose_power(self, decay: float, step: int) -> float:
        """How far ``1 - decay ** step`` may be off, relative, where a power is within 2 units."""
        if not self.fused:
            return 0.0
        power: float = decay ** (step - 1)
        return (step * power * self._loose(decay) + 2 * _SINGLE) / (1 - power * decay)

    def compared_moments(self, update: Update, m: _Moment, v: _Moment, size: Any) -> list[Recomputed]:
        """``size``: of the terms of the first moment."""
        computed = self.rounding(update)
        stored, least = update.stored, update.spacing
        if self.fused:  # bitsandbytes' are in float32
            stored, least = min(stored, _SINGLE), TINY
        first, second = (update.made_state[name] for name in self.states)
        return [
            Recomputed("its first moment", first, m.value, (2 * stored + 8 * computed) * size + m.off + least),
            Recomputed("its second moment", second, v.value, (4 * stored + 16 * computed) * v.value + v.off + least),
        ]


@dataclass(frozen=True)
class BlockAdam(Adam):
    """bitsandbytes' with moments in 8 bit: codes of a map, times the largest value of their block of 256.

    A new code may be either neighbour of the exact value (the kernels keep signs, which is no nearest one).
    """

    states: tuple[str, ...] = ("state1", "state2", "absmax1", "absmax2")
    in_blocks: bool = True
    fused: bool = True
    own_decay: bool | None = True

    def sizes(self, length: int) -> list[int]:
        return [length, length, 1, 1]

    def moments(self, update: Update) -> tuple[Any, Any]:
        state = update.state
        if state["state1"] is None:
            zero = np.zeros(len(update.weight))
            return zero, zero
        first = _code_map(True)[state["state1"].astype(int)] * state["absmax1"]
        second = _code_map(False)[state["state2"].astype(int)] * state["absmax2"]
        return first, second

    def compared_moments(self, update: Update, m: _Moment, v: _Moment, size: Any) -> list[Recomputed]:
        made = update.made_state
        return [
            *_compared_codes("its first moment", made["state1"], made["absmax1"], m, size, signed=True),
            *_compared_codes("its second moment", made["state2"], made["absmax2"], v, v.value, signed=False),
        ]


def _compared_codes(
    what: str, codes: Any, largest: Any, moment: _Moment, size: Any, *, signed: bool
) -> list[Recomputed]:
    """A block's codes and its scale, float64 of shapes [n] and [1], beside the moment that they stand for."""
    codes = codes.astype(int)
    values = _code_map(signed)
    error = 64 * _SINGLE * size.max() + moment.off.max() + TINY
    below = values[np.maximum(codes - 1, 0)]
    above = values[np.minimum(codes + 1, 255)]
    middle = (below + above) / 2 * largest
    half = (above - below) / 2 * largest
    is_edge = (codes == 0) | (codes == 255)
    edge = (values[1] - values[0]) * largest * is_edge + _COARSE * largest
    most = np.abs(moment.value).max(keepdims=True)
    return [
        Recomputed(f"{what}'s scale", largest, most, np.array([error])),
        Recomputed(what, middle, moment.value, half + edge + error),
    ]


@cache
def _code_map(signed: bool) -> Any:
    """The 256 values of bitsandbytes' dynamic 8-bit type, ascending."""
    from bitsandbytes.functional import create_dynamic_map

    return create_dynamic_map(signed=signed).double().numpy()


def definition_of(optimizer: Any) -> Callable[[Tensor, Mapping[str, Any]], SGD] | None:
    """The definition of each tensor's update, by it and its state; None for an optimizer that is not checked."""
    kind = type(optimizer)
    if kind in (torch.optim.AdamW, torch.optim.Adam):
        return lambda *_: Adam()
    if kind is torch.optim.SGD:
        return lambda *_: SGD()
    if not kind.__module__.startswith("bitsandbytes.optim.adam") or optimizer.is_paged:
        return None
    settings = optimizer.args
    if settings.max_unorm or settings.skip_zeros or getattr(optimizer, "optimizer_name", "") != "adam":
        return None

    def definition(parameter: Tensor, state: Mapping[str, Any]) -> SGD:
        in_blocks = settings.optim_bits == 8 and parameter.numel() >= settings.min_8bit_size
        if "state1" in state:
            in_blocks = state["state1"].dtype == torch.uint8
        if in_blocks:
            return BlockAdam()
        return Adam(states=("state1", "state2"), fused=True, own_decay=True)

    return definition
