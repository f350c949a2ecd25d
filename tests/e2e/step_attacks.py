"""Faults within a step of a running command, put in from outside: kernels, updates, routing, and writes to weights.

Upstream's functions are wrapped, or results change in torch's dispatcher, below autograd; nothing of ours is touched.
`tests.e2e.memory_attacks.arm` begins one, by its kind. Each tells in its log when it first happens.
"""

from __future__ import annotations

import functools
import importlib
import random
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

Tell = Callable[[str], None]
When = Callable[[int], bool]

# ---- kernels ------------------------------------------------------------------------------------------------

_ATTENTION = ("attention_for_cpu_backward", "attention_backward", "fused_attention_overrideable_backward")
KERNELS: dict[str, tuple[str, ...]] = {
    "SiLU": ("aten::silu",),
    "SiLU's backward": ("aten::silu_backward",),
    "RMSNorm": ("aten::rsqrt",),
    "attention's backward": _ATTENTION,
    "LoRA's products": ("aten::mm", "aten::addmm"),
    "rotary embedding": ("aten::neg",),
    "ReLU": ("aten::relu", "aten::clamp_min"),
}
_RANKS = (4, 8, 16)  # widths of adapters


class WrongKernel(TorchDispatchMode):
    """Results of a kernel are multiplied, in every call (``always``) or each time otherwise (``varying``)."""

    def __init__(self, kernel: str, rng: random.Random, tell: Tell, *, how: str, strength: float) -> None:
        super().__init__()
        self._names, self._of_adapter = KERNELS[kernel], kernel == "LoRA's products"
        self._rng, self._tell, self._how, self._strength = rng, tell, how, strength
        self._sign = rng.choice((-1, 1))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name = func.name().partition(".")[0]
        if not any(name == each or (each in _ATTENTION and each in name) for each in self._names):
            return result
        made = result[0] if isinstance(result, tuple) else result
        if self._of_adapter and not any(isinstance(a, Tensor) and set(a.shape[-2:]) & {*_RANKS} for a in args):
            return result
        if name == "aten::neg" and made.dim() != 4:
            return result
        factor = self._sign if self._how == "always" else self._rng.uniform(-1, 1)
        made.mul_(1 + self._strength * factor)
        self._tell(name)
        return result


def _kernel(rng: random.Random, step: int, tell: Tell, kernel: str, how: str = "always", strength: float = 0.1) -> None:
    del step
    WrongKernel(kernel, rng, _first(tell), how=how, strength=strength).__enter__()


def _first(tell: Tell) -> Tell:
    told: list[str] = []

    def once(what: str) -> None:
        if not told:
            told.append(what)
            tell(what)

    return once


# ---- clipping, updates, settings of the adapter -------------------------------------------------------------

UPDATES: dict[str, Callable[[list[Tensor], list[Tensor], list[Tensor], list[Tensor]], Any]] = {
    "against the gradient": lambda new, old, one, two: [n.copy_(2 * o - n) for n, o in zip(new, old, strict=True)],
    "lost": lambda new, old, one, two: [n.copy_(o) for n, o in zip(new, old, strict=True)],
    "twice as far": lambda new, old, one, two: [n.copy_(2 * n - o) for n, o in zip(new, old, strict=True)],
    "first moment": lambda new, old, one, two: [each.neg_() for each in one],
    "second moment": lambda new, old, one, two: [each.mul_(1.5) for each in two],
}
CLIPPINGS: dict[str, Callable[[list[Tensor], Any], Any]] = {
    "half": lambda grads, total: [each.mul_(0.5) for each in grads],
    "wrong sign": lambda grads, total: [each.neg_() for each in grads],
    "left out": lambda grads, total: [each.mul_(total.item()) for each in grads],
}


def _whole(tensors: Any) -> list[Tensor]:
    return [getattr(each, "_local_tensor", each) for each in tensors]


def _due(step: int, when: str) -> When:
    """``step``: from 1 on."""
    return (lambda call: call == step) if when == "once" else (lambda call: True)


def _update(rng: random.Random, step: int, tell: Tell, what: str, when: str = "once") -> None:
    """AdamW's step gives another result."""
    del rng
    module: Any = importlib.import_module("torch.optim.adam")
    stock, calls, due, told = module.adam, [0], _due(step, when), _first(tell)

    def wrong(new: list[Any], grads: Any, first: list[Any], second: list[Any], *rest: Any, **more: Any) -> None:
        old = [each.clone() for each in _whole(new)]
        stock(new, grads, first, second, *rest, **more)
        calls[0] += bool(new)
        if new and due(calls[0]):
            UPDATES[what](_whole(new), old, _whole(first), _whole(second))
            told(what)

    module.adam = wrong


def _clipping(rng: random.Random, step: int, tell: Tell, what: str, when: str = "once") -> None:
    """Gradients are clipped by another factor, or their norm is another one."""
    del rng
    module, calls, due, told = torch.nn.utils.clip_grad, [0], _due(step, when), _first(tell)
    if what == "norm":
        stock_norm: Any = module._get_total_norm

        def norm(*given: Any, **more: Any) -> Any:
            calls[0] += 1
            found = stock_norm(*given, **more)
            if due(calls[0]):
                told(what)
                return found * 3
            return found

        module._get_total_norm = norm
        return
    stock: Any = module._clip_grads_with_norm_

    def clip(parameters: Any, max_norm: float, total: Any, *rest: Any, **more: Any) -> None:
        parameters = list(parameters)
        stock(parameters, max_norm, total, *rest, **more)
        calls[0] += 1
        if due(calls[0]):
            CLIPPINGS[what](_whole([each.grad for each in parameters if each.grad is not None]), total)
            told(what)

    module._clip_grads_with_norm_ = clip


def _scaler(rng: random.Random, step: int, tell: Tell) -> None:
    """The scaler multiplies the loss with another number than it has said."""
    stock, calls, factor = torch.amp.GradScaler.scale, [0], rng.choice((0.5, 2.0))

    def scale(self: Any, outputs: Any) -> Any:
        calls[0] += 1
        found = stock(self, outputs)
        if calls[0] == step:
            tell("scaler")
            return found * factor
        return found

    torch.amp.GradScaler.scale = scale  # type: ignore[method-assign]


def _adapter(rng: random.Random, step: int, tell: Tell, what: str) -> None:
    """A LoRA layer computes with another scale, or drops another share, from a step on."""
    from peft.tuners.lora import LoraLayer
    from transformers import Trainer

    stock, done = Trainer.training_step, [False]

    def training_step(self: Any, model: Any, *given: Any, **more: Any) -> Any:
        if not done[0] and self.state.global_step >= step - 1:
            done[0] = True
            layer = rng.choice([each for each in model.modules() if isinstance(each, LoraLayer)])
            if what == "scale":
                layer.scaling["default"] *= rng.choice((-1, 0.5, 2))
            else:
                layer.lora_dropout["default"] = torch.nn.Dropout(0.5)
            tell(what)
        return stock(self, model, *given, **more)

    Trainer.training_step = functools.wraps(stock)(training_step)


# ---- writes by code that is no optimizer --------------------------------------------------------------------


def _writes(rng: random.Random, step: int, tell: Tell, who: str) -> None:
    """A collator or a callback multiplies a trained weight, as a program may: through torch."""
    from transformers import Trainer
    from transformers.trainer_callback import CallbackHandler, TrainerCallback
    from trl.trainer import sft_trainer

    trainers: list[Any] = []
    stock = Trainer.create_optimizer

    def create(self: Any, *given: Any, **more: Any) -> Any:
        trainers.append(self)
        if who == "callback":
            self.add_callback(Writer())
        return stock(self, *given, **more)

    def write(of_step: int) -> None:
        if len(trainers) and of_step == step and not told:
            told.append(True)
            rows = [each for each in trainers[0].model.parameters() if each.requires_grad]
            with torch.no_grad():
                rng.choice(rows).mul_(0.9)
            tell(who)

    told: list[bool] = []

    class Writer(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **more: Any) -> None:
            write(state.global_step)

    Trainer.create_optimizer = functools.wraps(stock)(create)
    if who == "callback":
        del CallbackHandler
        return
    collator = sft_trainer.DataCollatorForLanguageModeling
    stock_call = collator.torch_call

    def torch_call(self: Any, examples: Any) -> Any:
        if trainers:
            write(max(step, trainers[0].state.global_step) if trainers[0].state.global_step >= step - 1 else -1)
        return stock_call(self, examples)

    collator.torch_call = functools.wraps(stock_call)(torch_call)


# ---- experts ------------------------------------------------------------------------------------------------


class WrongRouting(TorchDispatchMode):
    """A router's choice names other experts, or the counts of the experts' rows are wrong with the right sum."""

    def __init__(self, rng: random.Random, tell: Tell, *, what: str, when: str, at: int) -> None:
        super().__init__()
        self._rng, self._tell, self._what, self._when, self._at, self._seen = rng, tell, what, when, at, 0

    def _is_due(self) -> bool:
        self._seen += 1
        return self._when == "always" or self._seen == self._at

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.name().partition(".")[0]
        if self._what == "wrong expert":
            result = func(*args, **(kwargs or {}))
            if name == "aten::topk" and args[0].dim() == 2 and self._is_due():
                result[1].add_(1).remainder_(args[0].shape[-1])
                self._tell(self._what)
            return result
        if name == "aten::_grouped_mm" and len(args) > 2 and isinstance(args[2], Tensor) and self._is_due():
            offsets = args[2].clone()
            which = self._rng.randrange(len(offsets) - 1)
            offsets[which].sub_((offsets[which] > 0).to(offsets.dtype))
            self._tell(self._what)
            return func(args[0], args[1], offsets, *args[3:], **(kwargs or {}))
        return func(*args, **(kwargs or {}))


def _routing(rng: random.Random, step: int, tell: Tell, what: str, when: str = "always") -> None:
    """Once: in one of the calls after the first step, in which all is checked."""
    WrongRouting(rng, _first(tell), what=what, when=when, at=6 + 2 * step + rng.randrange(8)).__enter__()


# ---- streamed layers, the report ----------------------------------------------------------------------------


def _bound_elsewhere(rng: random.Random, step: int, tell: Tell) -> None:
    """A frozen weight of the first layers has the memory of another one, of the same shape."""
    from transformers import Trainer

    stock, done = Trainer.training_step, [False]

    def training_step(self: Any, model: Any, *given: Any, **more: Any) -> Any:
        if not done[0] and self.state.global_step >= step - 1:
            done[0] = True
            named = [(n, p) for n, p in model.named_parameters() if not p.requires_grad and ".layers." in n]
            name, one = rng.choice(named)
            alike = [p for n, p in named if n != name and p.shape == one.shape and p.dtype == one.dtype]
            one.data = rng.choice(alike).data
            tell(name)
        return stock(self, model, *given, **more)

    Trainer.training_step = functools.wraps(stock)(training_step)


def _report_cut(rng: random.Random, step: int, tell: Tell, times: int = 1) -> None:
    """The disk keeps a part of the report, or another byte of it, each time that it is renamed into place."""
    import os
    import sys

    del step
    left = [times]
    share, changes = rng.uniform(0.05, 0.95), rng.random() < 0.5

    def watch(event: str, arguments: tuple[Any, ...]) -> None:
        if event != "os.rename" or not left[0] or not str(arguments[1]).endswith("transfer_report.json"):
            return
        left[0] -= 1
        source = os.fsdecode(arguments[0])
        size = os.stat(source).st_size
        if changes:
            with open(source, "r+b") as file:
                file.seek(int(size * share))
                file.write(b"\0")
        else:
            os.truncate(source, int(size * share))
        tell("cut")

    sys.addaudithook(watch)


ATTACKS: dict[str, Callable[..., None]] = {
    "kernel": _kernel,
    "update": _update,
    "clipping": _clipping,
    "scaler": _scaler,
    "adapter": _adapter,
    "writes": _writes,
    "routing": _routing,
    "bound elsewhere": _bound_elsewhere,
    "report cut": _report_cut,
}
