"""Checks of what lies between the gradients and the new weights: clipping, learning rates and the optimizer's step.

Samples are copied on the device before and after each operation and read with the numbers of the step, so that nothing
waits. The host computes the operation's definition in float64; results must agree within the rounding of the dtypes
that are stored and computed in. In each step

- a run of at most `ELEMENTS` neighbours of at most `TENSORS` gradients before and after clipping, and the norm of all
  gradients by another kernel (a scalar product), where they are within `NORM_BYTES`, else every so many steps;
- as many elements of weights, gradients and state before and after the update: AdamW and Adam (Kingma and Ba,
  arXiv:1412.6980; Loshchilov and Hutter, arXiv:1711.05101), also bitsandbytes' with 32 bits, or with 8 (then one block
  of 256 elements of a tensor: its scale is the block's largest value), and SGD (Sutskever et al. 2013, as torch
  defines it);
- each group's learning rate, from the definition of the schedule, before it is used.

Clipping is judged before the update, the update with the numbers of the next step, or before a save.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim.lr_scheduler import LambdaLR

from hf_rocm_tune.errors import CorruptionError
from hf_rocm_tune.models.shards import local
from hf_rocm_tune.train.arithmetic import StepVerdict

if TYPE_CHECKING:
    from hf_rocm_tune.transfer import TransferReport

TENSORS = 4
ELEMENTS = 32
NORM_BYTES = 256 << 20
"""Bytes of gradients whose norm is computed a second time in a step, on average."""
_BLOCK = 256  # elements that share a scale in bitsandbytes' 8-bit states
_PACK_BYTES = 32 << 20
_SINGLE = float(torch.finfo(torch.float32).eps)
_TINY = 1e-37  # what float32 may flush to zero
_COARSE = 2e-5  # of a block's largest value: bitsandbytes on a CPU finds codes of smaller ones by a coarse table
_NORM_ERROR = 1e-4  # of a scalar product of millions of float32, relative

Judge = Callable[[Any], str | None]
"""What is wrong with an array of float64, which was read from a device; None if nothing is."""


class _Moved(NamedTuple):
    """What an operation has made of values, what it should have made, and how far both may lie apart."""

    what: str
    found: Any
    wanted: Any
    bound: Any

    def wrong(self) -> str | None:
        with np.errstate(invalid="ignore"):
            bad = ~(np.abs(self.found - self.wanted) <= self.bound)
        if not bad.any():
            return None
        at = int(np.argmax(bad))
        return f"{self.what} is {self.found[at]:.6g} instead of {self.wanted[at]:.6g}"


class Schedule:
    """Learning rates by the definition of a schedule; the trainer's own code and a user's callback may set others.

    Attributes:
        refusal: why rates are not computed; None if they are.
    """

    def __init__(self, scheduler: Any, optimizer: Any, args: Any, max_steps: int, *, excused: bool) -> None:
        self._scheduler, self._groups = scheduler, optimizer.param_groups
        self._base = [group.get("initial_lr") for group in self._groups]
        kind = str(getattr(args.lr_scheduler_type, "value", args.lr_scheduler_type))
        self._warmup, self._steps = args.get_warmup_steps(max_steps), max_steps
        own = {"linear": self._linear, "cosine": self._cosine, "constant": lambda _: 1.0}
        own["constant_with_warmup"] = self._warming_up
        self._factor = None if args.lr_scheduler_kwargs else own.get(kind)
        self._first = getattr(scheduler, "last_epoch", 0)  # a resumed run's first rates may be of an earlier schedule
        reasons = {
            f"the schedule is {type(scheduler).__name__}": type(scheduler) is not LambdaLR,
            "the trainer or a callback has code of its own": excused,
            "a group has no rate of its own": not all(isinstance(each, float | int) for each in self._base),
        }
        self.refusal = next((reason for reason, holds in reasons.items() if holds), None)

    def wrong(self) -> str | None:
        """The first group whose rate is not that of its schedule."""
        step = getattr(self._scheduler, "last_epoch", 0)
        if self.refusal is not None or step <= self._first:
            return None
        for number, (group, base) in enumerate(zip(self._groups, self._base, strict=True)):
            factor = self._scheduler.lr_lambdas[number](step) if self._factor is None else self._factor(step)
            wanted, found = base * factor, group["lr"]
            if not isinstance(found, Tensor) and not math.isclose(found, wanted, rel_tol=1e-9, abs_tol=1e-30):
                return f"the learning rate of group {number} is {found:.9g} instead of {wanted:.9g} (update {step + 1})"
        return None

    def _warming_up(self, step: int) -> float:
        return min(1.0, step / max(1, self._warmup))

    def _left(self, step: int) -> float:
        return (self._steps - step) / max(1, self._steps - self._warmup)

    def _linear(self, step: int) -> float:
        return self._warming_up(step) if step < self._warmup else max(0.0, self._left(step))

    def _cosine(self, step: int) -> float:
        if step < self._warmup:
            return self._warming_up(step)
        return max(0.0, 0.5 * (1.0 + math.cos(math.pi * (1.0 - self._left(step)))))


@dataclass(frozen=True, kw_only=True)
class _Sample:
    """Neighbouring elements of one tensor, before a step."""

    name: str
    whole: Tensor
    parameter: Tensor  # this rank's part of it
    begin: int
    length: int
    rule: _Rule
    states: tuple[str, ...]  # of the rule's, those that there were; the others are zero
    group: Mapping[str, Any]  # the settings of its group in this step
    step: int  # of this tensor, from 1; 0: it is on the device
    scaled: tuple[bool, bool]  # whether the step itself skips what is infinite, and divides by the scaler's scale
    before: list[Tensor] = field(default_factory=list)


class UpdateChecks:
    """Watches one optimizer and the clipping before it; the trainer owns one.

    Attributes:
        refusal: why updates are not checked; None if they are.
        clip_refusal: likewise of clipping's norm.
        schedule: of the learning rates; None before the training.
        failure: what was wrong, and what to do.
    """

    def __init__(self, report: TransferReport, *, on: bool) -> None:
        self._report, self._on = report, on
        self._drawn = random.Random(0)  # not torch's or Python's own, which training uses
        self._handles: list[Any] = []
        self._rows: list[tuple[dict[str, Any], Tensor]] = []
        self._samples: list[_Sample] = []
        self._rule: Callable[[Tensor, Mapping[str, Any]], _Rule] | None = None
        self._pending: list[tuple[Tensor, Judge]] = []  # of the last update
        self._clipped: list[tuple[Tensor, Judge]] = []  # of this step's clipping
        self._names: Mapping[int, str] = {}
        self._clippings = 0
        self._repeated = False
        self.failure = ""
        self.schedule: Schedule | None = None
        self.refusal: str | None = "training has not begun"
        self.clip_refusal: str | None = "training has not begun"

    def watch(self, optimizer: Any, names: Mapping[int, str], schedule: Schedule | None = None) -> None:
        """Watch the optimizer of a training; ``names``: of parameters by id."""
        for handle in self._handles:
            handle.remove()
        self._handles, self._pending, self._clipped, self._names = [], [], [], names
        self._clippings, self._repeated, self.schedule = 0, False, schedule
        while hasattr(optimizer, "optimizer"):  # Accelerate's, around torch's
            optimizer = optimizer.optimizer
        self._rows = [(group, each) for group in optimizer.param_groups for each in group["params"]]
        self._rule = _rules_of(optimizer)
        off = None if self._on else "--check_arithmetic off"
        self.refusal = off or (f"the optimizer is {type(optimizer).__name__}" if self._rule is None else None)
        cut = any(isinstance(each, DTensor) for _, each in self._rows)
        self.clip_refusal = off or ("the norm of sharded gradients is summed over ranks" if cut else None)
        if self._on:
            self._handles = [
                optimizer.register_step_pre_hook(lambda owner, *_: self._look_before(owner)),
                optimizer.register_step_post_hook(lambda owner, *_: self._look_after(owner)),
            ]

    # ---- clipping -----------------------------------------------------------------------------------------------

    def clipping(self, stock: Callable[..., Any], scale: Callable[[], Tensor | None]) -> Callable[..., Any]:
        """``Accelerator.clip_grad_norm_``, watched. ``scale``: what gradients are multiplied with until then."""

        def clip(parameters: Iterable[Tensor], max_norm: float, *arguments: Any, **keywords: Any) -> Any:
            parameters = list(parameters)
            if not self._on or not self._handles or arguments or keywords:
                return stock(parameters, max_norm, *arguments, **keywords)
            with torch.no_grad():
                return self._clip(stock, parameters, max_norm, scale())

        return clip

    def _clip(self, stock: Callable[..., Any], parameters: list[Tensor], max_norm: float, scale: Tensor | None) -> Any:
        known = [(each, local(each.grad)) for each in parameters if each.grad is not None]
        usable = [(each, grad) for each, grad in known if grad.numel() and not grad.is_sparse and grad.is_contiguous()]
        picked = []
        for parameter, grad in self._drawn.sample(usable, min(TENSORS, len(usable))):
            length = min(ELEMENTS, grad.numel())
            part = slice(begin := self._drawn.randrange(grad.numel() - length + 1), begin + length)
            picked.append((parameter, part, _copied(grad.view(-1)[part])))
        squares = self._squares([grad for _, grad in known])
        norm = stock(parameters, max_norm)
        self._clippings += 1
        if not isinstance(norm, Tensor):
            return norm
        total = local(norm).detach().reshape(1)
        said = {"scale": 1.0}  # with the norm, what the others are judged by
        self._clipped = [(total.double(), partial(_keep, said, "norm"))]
        if scale is not None:
            self._clipped.append((scale.detach().double().reshape(1), partial(_keep, said, "scale")))
        exact = float(torch.finfo(total.dtype).eps)
        for parameter, part, before in picked:
            grad = local(parameter.grad)  # type: ignore[arg-type]
            own = self._clip_judge(parameter, len(before), grad.dtype, exact, max_norm, said)
            self._clipped.append((torch.cat([before, _copied(grad.view(-1)[part])]), own))
        self._clipped += self._norm_judges(squares, torch.finfo(total.dtype), said)
        return norm

    def _clip_judge(
        self, parameter: Tensor, length: int, dtype: torch.dtype, exact: float, max_norm: float, said: dict[str, float]
    ) -> Judge:
        name = self._names.get(id(parameter), "a parameter")

        def judge(numbers: Any) -> str | None:
            before, after = numbers[:length] / said["scale"], numbers[length:]
            norm = said["norm"]
            if not math.isfinite(norm):
                return None  # the step is not used
            wanted = before * min(1.0, max_norm / (norm + 1e-6))
            info = torch.finfo(dtype)
            bound = (6 * info.eps + 6 * exact) * np.abs(wanted) + max(2 * info.tiny * info.eps, _TINY)
            self._report.count("arithmetic", clipped=1)
            found = _Moved(f"the clipped gradient of {name}", after, wanted, bound).wrong()
            return found and f"{found}, for a norm of {norm:.6g}"

        return judge

    def _squares(self, gradients: list[Tensor]) -> dict[torch.device, list[tuple[Tensor, float]]]:
        """Sums of squares, float64 of shape [1], by device, and how far torch's norm of each may be off, relative.

        Empty where it is not this step's turn.
        """
        size = sum(each.numel() * each.element_size() for each in gradients)
        if self.clip_refusal is not None or self._clippings % max(1, math.ceil(size / NORM_BYTES)):
            return {}
        packs: dict[torch.device, list[list[Tensor]]] = {}
        for each in gradients:
            rows = packs.setdefault(each.device, [[]])
            for part in each.reshape(-1).split(_PACK_BYTES // each.element_size()):
                full = _bytes([*rows[-1], part]) > _PACK_BYTES
                if rows[-1] and (full or rows[-1][0].dtype != part.dtype):
                    rows.append([])
                rows[-1].append(part)
        longest = max((each.numel() for each in gradients), default=0)

        def unit(part: Tensor) -> float:
            # On a CPU torch adds a tensor's squares one after another in 8 lanes of float32, on a card in short chunks
            added = longest / 8 * _SINGLE / 4 if part.device.type == "cpu" else 0.0
            return float(torch.finfo(part.dtype).eps) / 2 + added

        return {device: [(_square(row), unit(row[0])) for row in rows if row] for device, rows in packs.items()}

    def _norm_judges(
        self, squares: dict[torch.device, list[tuple[Tensor, float]]], info: torch.finfo, said: dict[str, float]
    ) -> list[tuple[Tensor, Judge]]:
        missing, total, rounded = len(squares), 0.0, 0.0

        def judge(numbers: Any, units: Any) -> str | None:
            nonlocal missing, total, rounded
            missing, total = missing - 1, total + float(numbers.sum())
            rounded += float((numbers * units**2).sum())
            if missing:
                return None
            wanted, found = math.sqrt(total) / said["scale"], said["norm"]
            self._report.count("arithmetic", norms=1)
            # torch rounds each tensor's norm to its own dtype, then takes the norm of these: it moves at most by the
            # norm of their errors
            bound = (_NORM_ERROR + 8 * float(info.eps)) * wanted + math.sqrt(rounded) / said["scale"] + 1e-18
            # What overflows in float32 is infinite in both, or its square is; a float16 norm is from 65,520 on
            overflows = math.isinf(found) and wanted + bound >= info.max
            if not math.isfinite(wanted) or overflows or abs(found - wanted) <= bound:
                return None
            return f"the norm of the gradients is {found:.6g} instead of {wanted:.6g}"

        return [
            (torch.cat([each for each, _ in row]), partial(judge, units=np.array([unit for _, unit in row])))
            for row in squares.values()
        ]

    # ---- the update, on the device ------------------------------------------------------------------------------

    def _look_before(self, optimizer: Any) -> None:
        if self.schedule is not None and (said := self.schedule.wrong()) is not None:
            self._tell("learning rates", said, "stopped")
            raise CorruptionError(self.failure)
        self._samples = []
        if self.refusal is not None:
            return
        scales = [getattr(optimizer, name, None) for name in ("found_inf", "grad_scale")]  # that it applies itself
        for group, whole in self._drawn.sample(self._rows, min(TENSORS, len(self._rows))):
            sample = self._taken(group, whole, optimizer.state.get(whole, {}), scales)
            if sample is not None:
                self._samples.append(sample)

    def _rule_for(self, parameter: Tensor, state: Mapping[str, Any]) -> _Rule:
        assert self._rule is not None
        return self._rule(parameter, state)

    def _taken(
        self, group: Mapping[str, Any], whole: Tensor, state: Mapping[str, Any], scales: list[Tensor | None]
    ) -> _Sample | None:
        if whole.grad is None or whole.grad.is_sparse or group.get("amsgrad") or isinstance(group["lr"], Tensor):
            return None
        parameter, grad = local(whole.detach()), local(whole.grad)
        rule = self._rule_for(parameter, state)
        states = tuple(name for name in rule.states if state.get(name) is not None)
        read = [parameter, grad, *(local(state[name]) for name in states)]
        if not parameter.numel() or not all(each.is_contiguous() for each in read):
            return None
        if any(each is not None and each.device != parameter.device for each in scales):
            return None
        length = min(rule.elements, parameter.numel())
        begin = self._drawn.randrange(parameter.numel() - length + 1)
        if rule.elements == _BLOCK:
            begin -= begin % _BLOCK
            length = min(_BLOCK, parameter.numel() - begin)
        done = state.get("step", 0)
        on_device = isinstance(done, Tensor) and done.device.type != "cpu"
        sample = _Sample(
            name=self._names.get(id(whole), "a parameter"),
            whole=whole,
            parameter=parameter,
            begin=begin,
            length=length,
            rule=rule,
            states=states,
            group={**group, "params": ()},
            step=0 if on_device else int(done) + 1,
            scaled=(scales[0] is not None, scales[1] is not None),
        )
        sample.before.extend(_part(each, sample) for each in read)
        beside = [done if on_device else None, *scales]
        sample.before.extend(_copied(each.reshape(1)) for each in beside if each is not None)
        return sample

    def _look_after(self, optimizer: Any) -> None:
        samples, self._samples = self._samples, []
        self._pending = []
        for sample in samples:
            state, rule = optimizer.state[sample.whole], sample.rule
            if rule != self._rule_for(sample.parameter, state):  # its state is of another kind than was expected
                continue
            made = [local(state[name]) for name in rule.states if state.get(name) is not None]
            after = [_part(each, sample) for each in (sample.parameter, *made)]
            self._pending.append((torch.cat([*sample.before, *after]), self._update_judge(sample)))

    def _update_judge(self, sample: _Sample) -> Judge:
        def judge(numbers: Any) -> str | None:
            row = _Elements(numbers)
            sizes = sample.rule.sizes(sample.length)
            p, g = row.take(sample.length), row.take(sample.length)
            old = {
                name: row.take(size) if name in sample.states else None
                for name, size in zip(sample.rule.states, sizes, strict=True)
            }
            step = sample.step or int(row.take(1)[0]) + 1
            skipped = bool(row.take(1)[0]) if sample.scaled[0] else False
            scale = float(row.take(1)[0]) if sample.scaled[1] else 1.0
            made_p = row.take(sample.length)
            made = {name: row.take(size) for name, size in zip(sample.rule.states, sizes, strict=True) if row.left}
            self._report.count("arithmetic", updates=1)
            if skipped:  # infinite gradients, by the scaler
                return _Moved("the weight", made_p, p, np.zeros(len(p))).wrong()
            for each in sample.rule.recomputed(sample, step, p, g / scale, old, made_p, made):
                if (said := each.wrong()) is not None:
                    return f"the optimizer's update of {sample.name} is wrong: {said}"
            return None

        return judge

    # ---- on the host --------------------------------------------------------------------------------------------

    def pending(self) -> list[Tensor]:
        """What `judge` waits for, float64 of shape [n], one of each device."""
        return [torch.cat([each for each, _ in parts]) for parts in self._by_device(self._clipped + self._pending)]

    def judge(self, rows: Sequence[Sequence[float]], *, can_repeat: bool) -> StepVerdict:
        """Judge the last update and this step's clipping, by what was read of `pending`; `failure` says what is wrong.

        A wrong update has been used: the run ends. Wrong clipping has not: the step is computed again, once.
        """
        clipped, pending = self._clipped, self._pending
        self._clipped, self._pending = [], []
        found: dict[int, Any] = {}
        for parts, row in zip(self._by_device(clipped + pending), rows, strict=True):
            numbers = _Elements(row)
            found |= {id(each): numbers.take(each.numel()) for each, _ in parts}
        said = next(filter(None, (own(found[id(each)]) for each, own in pending)), None)
        if said is not None:
            self._tell("update", said, "stopped")
            return StepVerdict.END
        said = next(filter(None, (own(found[id(each)]) for each, own in clipped)), None)
        if said is None:
            if self._repeated:
                self._tell("clipping", "it is right now that the step was computed again", "recovered")
            self._repeated = False
            return StepVerdict.GO_ON
        again, self._repeated = self._repeated, True
        if can_repeat and not again:
            return StepVerdict.REPEAT
        self._tell("clipping", said, "stopped")
        return StepVerdict.END

    def check_now(self) -> None:
        """Judge the last update now: before its weights are saved, and at the end."""
        self._clipped = []
        if self.judge([each.tolist() for each in self.pending()], can_repeat=False) == StepVerdict.END:
            raise CorruptionError(self.failure)

    def describe(self) -> dict[str, Any]:
        return {
            "update_refusal": self.refusal,
            "clip_refusal": self.clip_refusal,
            "rate_refusal": "training has not begun" if self.schedule is None else self.schedule.refusal,
        }

    def _by_device(self, parts: list[tuple[Tensor, Judge]]) -> list[list[tuple[Tensor, Judge]]]:
        devices = dict.fromkeys(each.device for each, _ in parts)
        return [[part for part in parts if part[0].device == device] for device in devices]

    def _tell(self, tensor: str, text: str, outcome: str) -> None:
        row = {"stage": "arithmetic", "tensor": tensor, "kind": "update", "text": text, "outcome": outcome}
        self._report.incident(row)
        self._report.count("arithmetic", disagreements=1, recovered=int(outcome == "recovered"))
        self.failure = (
            f"{text}. Nothing of it was saved: the same command goes on from the newest checkpoint; if it happens "
            "again, run hf-rocm-tune doctor --full"
        )


def _keep(said: dict[str, float], name: str, numbers: Any) -> None:
    said[name] = float(numbers[0])


def _bytes(tensors: list[Tensor]) -> int:
    return sum(each.numel() * each.element_size() for each in tensors)


def _square(parts: list[Tensor]) -> Tensor:
    """The sum of squares of flat tensors, float64 of shape [1]."""
    flat = torch.cat(parts)
    # A processor adds the products one after another: in float32, 8 million equal ones are 0.4 % off. Cards add them in
    # short chunks.
    flat = flat.double() if flat.device.type == "cpu" else flat.float()
    return torch.dot(flat, flat).double().reshape(1)


def _part(tensor: Tensor, sample: _Sample) -> Tensor:
    begin, length = sample.begin, sample.length
    if tensor.numel() != sample.parameter.numel():  # one value of each block
        begin, length = begin // _BLOCK, 1
    return _copied(tensor.detach().view(-1)[begin : begin + length])


def _copied(tensor: Tensor) -> Tensor:
    """In float64, and never the same memory."""
    return tensor.clone() if tensor.dtype == torch.float64 else tensor.double()


class _Elements:
    """Takes the numbers of a row one part after another."""

    def __init__(self, numbers: Any) -> None:
        self._numbers, self._at = np.asarray(numbers, dtype=np.float64), 0

    @property
    def left(self) -> int:
        return len(self._numbers) - self._at

    def take(self, length: int) -> Any:
        self._at += length
        return self._numbers[self._at - length : self._at]


# ---- the definitions ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Rule:
    """How an optimizer moves a tensor: torch's SGD; the others are below.

    Each result is a few roundings of the stored dtype away, and one of every operation that is not fused.
    """

    states: tuple[str, ...] = ("momentum_buffer",)
    elements: int = ELEMENTS
    fused: bool = False  # else every operation rounds to the stored dtype

    def sizes(self, length: int) -> list[int]:
        """Numbers of elements of each state."""
        return [length] * len(self.states)

    def roundings(self, sample: _Sample) -> tuple[float, float]:
        stored = float(torch.finfo(sample.parameter.dtype).eps)
        return stored, max(_SINGLE, 0.0 if self.fused or sample.group.get("fused") else stored)

    def spacing(self, sample: _Sample) -> float:
        """The distance of two neighbours near zero, where it is absolute: 6e-8 in float16, 9e-41 in bfloat16."""
        info = torch.finfo(sample.parameter.dtype)
        return max(2 * float(info.smallest_normal) * float(info.eps), _TINY)

    def recomputed(
        self, sample: _Sample, step: int, p: Any, g: Any, old: Mapping[str, Any], made_p: Any, made: Mapping[str, Any]
    ) -> list[_Moved]:
        """What was made of a weight ``p`` and its state by a gradient ``g``; ``step``: of this tensor, from 1."""
        group, (stored, computed) = sample.group, self.roundings(sample)
        lr, decay, momentum = float(group["lr"]), float(group["weight_decay"]), float(group["momentum"])
        g = (-g if group["maximize"] else g) + decay * p
        size = np.abs(g) + 2 * abs(decay) * np.abs(p)
        moved, moments = g, list[_Moved]()
        if momentum:
            before = old["momentum_buffer"]
            buffer = g if before is None else momentum * before + (1 - group["dampening"]) * g
            size = size + (0.0 if before is None else momentum * np.abs(before))
            bound = (2 * stored + 8 * computed) * size + self.spacing(sample)
            moments = [_Moved("its momentum", made["momentum_buffer"], buffer, bound)]
            moved = g + momentum * buffer if group["nesterov"] else buffer
            size = size * (1 + momentum)
        wanted = p - lr * moved
        bound = 2 * stored * (np.abs(p) + np.abs(wanted)) + (2 * stored + 16 * computed) * lr * size
        bound = bound + (1 + lr) * self.spacing(sample)
        return [*moments, _Moved("the weight", made_p, wanted, bound)]


@dataclass(frozen=True)
class _Adam(_Rule):
    """Adam and AdamW, torch's or bitsandbytes' with 32 bits."""

    states: tuple[str, ...] = ("exp_avg", "exp_avg_sq")
    own_decay: bool | None = None  # whether decay is decoupled whatever the group says

    def moments(self, old: Mapping[str, Any], length: int) -> tuple[Any, Any]:
        zero = np.zeros(length)
        m, v = (old[name] for name in self.states[:2])
        return (zero, zero) if m is None else (m, v)

    def recomputed(
        self, sample: _Sample, step: int, p: Any, g: Any, old: Mapping[str, Any], made_p: Any, made: Mapping[str, Any]
    ) -> list[_Moved]:
        group, (stored, computed) = sample.group, self.roundings(sample)
        m, v = self.moments(old, sample.length)
        lr, (first, second), decay = float(group["lr"]), group["betas"][:2], float(group["weight_decay"])
        g = -g if group.get("maximize") else g
        decoupled = group.get("decoupled_weight_decay", True) if self.own_decay is None else self.own_decay
        if not decoupled:
            g = g + decay * p
        size = np.abs(m) + np.abs(g) + (0 if decoupled else abs(decay) * np.abs(p))
        new_m = first * m + (1 - first) * g
        new_v = second * v + (1 - second) * g * g
        root = np.sqrt(new_v / (1 - second**step)) + group["eps"]
        rate = lr / (1 - first**step)
        change = rate * new_m / root
        # bitsandbytes' kernels take decays in float32 on a card: 1 - 0.999 is then 1.3e-5 less; in float64 on a CPU
        loose = [abs(float(np.float32(each)) - each) if self.fused else 0.0 for each in (first, second)]
        off_m, off_v = loose[0] * size, loose[1] * (v + g * g)
        off = [
            (step * each ** (step - 1) * shift + 2 * _SINGLE) / (1 - each**step) if self.fused else 0.0
            for each, shift in zip((first, second), loose, strict=True)
        ]  # of 1 - decay ** step, relative, where a power is within 2 units
        share = np.divide(off_v, new_v, out=np.zeros(len(new_v)), where=new_v > 0)
        kept = p * (1 - lr * decay) if decoupled else p
        rounding = 16 * computed * (np.abs(change) + lr * abs(decay) * np.abs(p)) + 8 * computed * rate * size / root
        rounding = rounding + rate * off_m / root + (off[0] + off[1] + share) * np.abs(change)
        rounding = rounding + (lr * abs(decay) * np.abs(change) if self.own_decay else 0.0)  # decayed before or after
        if computed > _SINGLE:  # its moments are stored before they are used, and may be too small for their dtype
            spacing = self.spacing(sample)
            least = np.sqrt(np.maximum(new_v - spacing, 0) / (1 - second**step)) + group["eps"]
            rounding = rounding + rate * (np.abs(new_m) + spacing) / least - np.abs(change)
        wanted = kept - change
        bound = 2 * stored * (np.abs(p) + np.abs(wanted)) + rounding + self.spacing(sample)
        return [
            *self.recomputed_moments(sample, made, (new_m, off_m), (new_v, off_v), size),
            _Moved("the weight", made_p, wanted, bound),
        ]

    def recomputed_moments(
        self, sample: _Sample, made: Mapping[str, Any], new_m: tuple[Any, Any], new_v: tuple[Any, Any], size: Any
    ) -> list[_Moved]:
        """Of the moments and of how far each may be off by its decay's rounding."""
        (m, off_m), (v, off_v) = new_m, new_v
        stored, computed = self.roundings(sample)
        least = self.spacing(sample)
        if self.fused:  # bitsandbytes' are in float32
            stored, least = min(stored, _SINGLE), _TINY
        first, second = (made[name] for name in self.states)
        return [
            _Moved("its first moment", first, m, (2 * stored + 8 * computed) * size + off_m + least),
            _Moved("its second moment", second, v, (4 * stored + 16 * computed) * v + off_v + least),
        ]


@dataclass(frozen=True)
class _BlockAdam(_Adam):
    """bitsandbytes' with moments in 8 bit: codes of a map, times the largest value of their block of 256.

    A new code may be either neighbour of the exact value (the kernels keep signs, which is no nearest one).
    """

    states: tuple[str, ...] = ("state1", "state2", "absmax1", "absmax2")
    elements: int = _BLOCK
    fused: bool = True
    own_decay: bool | None = True

    def sizes(self, length: int) -> list[int]:
        return [length, length, 1, 1]

    def moments(self, old: Mapping[str, Any], length: int) -> tuple[Any, Any]:
        if old["state1"] is None:
            return np.zeros(length), np.zeros(length)
        first = _code_map(True)[old["state1"].astype(int)] * old["absmax1"]
        return first, _code_map(False)[old["state2"].astype(int)] * old["absmax2"]

    def recomputed_moments(
        self, sample: _Sample, made: Mapping[str, Any], new_m: tuple[Any, Any], new_v: tuple[Any, Any], size: Any
    ) -> list[_Moved]:
        found = []
        for at, (what, (wanted, off), signed) in enumerate(
            (("its first moment", new_m, True), ("its second moment", new_v, False)), start=1
        ):
            codes, largest = made[f"state{at}"].astype(int), made[f"absmax{at}"]
            values, most = _code_map(signed), np.abs(wanted).max(keepdims=True)
            error = 64 * _SINGLE * (size if signed else wanted).max() + off.max() + _TINY
            below, above = values[np.maximum(codes - 1, 0)], values[np.minimum(codes + 1, 255)]
            middle, half = (below + above) / 2 * largest, (above - below) / 2 * largest
            edge = (values[1] - values[0]) * largest * ((codes == 0) | (codes == 255)) + _COARSE * largest
            found += [
                _Moved(f"{what}'s scale", largest, most, np.array([error])),
                _Moved(what, middle, wanted, half + edge + error),
            ]
        return found


@cache
def _code_map(signed: bool) -> Any:
    """The 256 values of bitsandbytes' dynamic 8-bit type, ascending."""
    from bitsandbytes.functional import create_dynamic_map

    return create_dynamic_map(signed=signed).double().numpy()


def _rules_of(optimizer: Any) -> Callable[[Tensor, Mapping[str, Any]], _Rule] | None:
    """The rule of each tensor, by it and its state; None for an optimizer whose steps are not checked."""
    kind = type(optimizer)
    if kind in (torch.optim.AdamW, torch.optim.Adam):
        return lambda *_: _Adam()
    if kind is torch.optim.SGD:
        return lambda *_: _Rule()
    if not kind.__module__.startswith("bitsandbytes.optim.adam") or optimizer.is_paged:
        return None
    settings = optimizer.args
    if settings.max_unorm or settings.skip_zeros or getattr(optimizer, "optimizer_name", "") != "adam":
        return None

    def rule(parameter: Tensor, state: Mapping[str, Any]) -> _Rule:
        blocks = settings.optim_bits == 8 and parameter.numel() >= settings.min_8bit_size
        if "state1" in state:
            blocks = state["state1"].dtype == torch.uint8
        return _BlockAdam() if blocks else _Adam(states=("state1", "state2"), fused=True, own_decay=True)

    return rule
