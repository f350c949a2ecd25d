"""Checks of the products with frozen weights while a model trains, and what is done when one is wrong.

Freivalds' check: with a random ``v`` and ``c = W^T v``, computed on the host from the weight's verified bytes, each row
of a product ``y = x W^T`` must have ``y . v = x . c`` up to rounding; in backward ``dX = dY W`` must have
``dX . u = dY . r`` with ``r = W u``. Each side has three vectors, one of signs and two of normal numbers; a wrong
product must escape all. A check reads x and y once, where the product reads all of W, and its result stays on the
device until the step's loss and gradient norm are read, before the optimizer: no further wait.

How large may a clean residual be? Let row i of y have the rounding errors ``e_ij``. They do not depend on v, so by
Hoeffding's inequality ``|sum_j v_j e_ij| > t ||e_i||`` has at most the probability ``2 exp(-t^2 / 2)``: 4e-16 for
t = 8.5, which is 5e-6 for a million products of 4,096 rows and three vectors. ``||e_i||`` is at most

    u ||y_i||                          the output is rounded to its dtype (unit roundoff u); twice with a separate bias
    2^-24 sqrt(K) ||x_i|| ||W||        K float32 additions with roundings of random sign (Higham and Mary 2019)
    u ||x_i|| max_k ||W_k||            8 bit, or 4 bit in another dtype than that of the checksums: the dequantised
                                       weight is rounded (W_k: column, in backward row)
    ||W|| max|x_i| / 254               8-bit layers, forward: the input is rounded to 1/127 of its largest value

(Frobenius norm), and the check's own two products and the float32 ``c`` add terms of the second kind. A `level` below 1
tightens this bound to four times a layer's largest clean residual so far: for float32 the bound is far too wide. That
stays sound because a residual above the level accuses nobody: the step is repeated, and the product's worst rows are
computed on the host in float64. Only a product that differs from them by more than its own rounding is called wrong;
else the layer's level rises.

A 4-bit weight that bitsandbytes has dequantised, as for each backward product, is checked by itself, where no output
rounding hides an error: each row times the vectors against `r`, within float32's rounding, ``t 2^-23 sqrt(K)`` of its
norm. The forward product dequantises within its kernel: there a wrong block must exceed the product's own bound.

What is found: a single element that is off by more than the bound B (3.4 % of its row's norm in bfloat16, 0.4 % in
float16; 0.007 % of a dequantised row of 4,096), always; an error of norm E spread over a row escapes with a probability
of about (0.8 B / E)^3, and one in r rows with independent errors with the r-th power of that. What is not: smaller
errors such as one low mantissa bit, and a product in a step in which its layer is not checked.
"""

from __future__ import annotations

import logging
import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import IntEnum
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes
from transformers.pytorch_utils import Conv1D

from hf_rocm_tune.models import products
from hf_rocm_tune.models.quantised import dequantised, host_weight, on_dequantised
from hf_rocm_tune.models.streaming import Streamer
from hf_rocm_tune.transfer import Mover, digest, host_copy

logger = logging.getLogger(__name__)

Mode = Literal["off", "sampled", "every"]
Side = Literal["forward", "backward", "dequantised"]
FIRST_STEPS = 2
"""Steps after a start in which all products are checked."""
SHARE = 0.007
"""Of a step's time, as estimated by `share_of_step`, that the sampled checks may take."""

_T = 8.5
_VECTORS = 3
_FLOAT32 = 2.0**-24
_LEVEL, _ENOUGH = 4.0, 20  # times the largest clean residual, after so many checks
_FLOOR = 1e-3
_CHUNK = 1 << 23  # elements of an activation that are widened to float32 at once
_ROWS = 8  # computed on the host when a product is judged
_ATTEMPTS = 5
_OPERATIONS, _BYTES = 50e12, 640e9  # a second, of an RX 7900 XT: dense bfloat16 and memory, as achieved, not peak
_BYTES_AN_ELEMENT = 12  # of a bfloat16 activation: read for its norm and to widen it (2 + 2), written, read (4 + 4)


class StepVerdict(IntEnum):
    """What is to be done with a step, from the lightest on: ranks agree on the highest."""

    GO_ON = 0
    REPEAT = 1
    SKIP = 2
    END = 3


@dataclass(frozen=True, kw_only=True)
class _Bound:
    """Of ``|y_i . v - x_i . c|``: a ||x_i|| + b ||y_i|| + c + q max|x_i|; rows with ||x_i|| >= limit may overflow."""

    a: float
    b: float
    c: float
    q: float
    limit: float


@dataclass(kw_only=True, eq=False)
class _Checked:
    """One side of a layer's products."""

    vectors: Tensor  # [columns of the result, 3], float32 on the device
    checksum: Tensor  # [columns of the operand, 3]
    offset: Tensor | None  # [1, 3]: the bias times the vectors
    level: float = 1.0
    largest: float = 0.0  # clean residual over its bound, so far
    seen: int = 0
    flagged: float = 0.0  # the residual that made the step be repeated
    where: str = ""  # which rows and columns are wrong
    held: tuple[Tensor, Tensor, Tensor, torch.dtype] | None = None  # operand, result, residuals, dtype; when repeated

    def learn(self, clean: float, *, cleared: bool = False) -> None:
        """Take a clean residual into account; ``cleared``: the host has shown that it is clean."""
        self.seen += 1
        self.largest = max(self.largest, clean)
        if cleared or self.seen >= _ENOUGH:
            self.level = max(_LEVEL * self.largest, _FLOOR) if cleared else min(1.0, max(_LEVEL * self.largest, _FLOOR))


@dataclass(kw_only=True, eq=False)
class Product:
    """A frozen linear layer, ``y = x W^T + b``; norms and sides are filled in by `_prepare`."""

    name: str
    module: Any
    columns: tuple[int, int]  # of the input, and of the output
    quantised: Literal["", "4 bit", "8 bit"]
    dtype: torch.dtype | None  # in which it is computed; None: the dtype of each call's input
    norm: float = 0.0  # Frobenius
    largest: tuple[float, float] = (0.0, 0.0)  # norms of columns and of rows
    bias_norm: float = 0.0
    sides: dict[Side, _Checked] = field(default_factory=dict)

    def dtype_for(self, x: Tensor) -> torch.dtype | None:
        """In which a call with this input computes; None where that is not what the checksum was made for."""
        if self.quantised:
            return getattr(self.module, "compute_dtype", None) or x.dtype
        kind = x.device.type
        now = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else self.module.weight.dtype
        return now if now == self.dtype else None

    def bound(self, side: Side, dtype: torch.dtype) -> _Bound:
        """See the module's description."""
        finfo = torch.finfo(dtype)
        out, (inner, outer) = roundoff(dtype), self.columns if side == "forward" else self.columns[::-1]
        bias = self.bias_norm if side == "forward" else 0.0
        state = getattr(self.module.weight, "quant_state", None)
        as_on_host = not self.quantised or (state is not None and state.dtype == dtype)
        weight = 0.0 if as_on_host else out * self.largest[side == "backward"]
        rounds_input = self.quantised == "8 bit" and side == "forward"
        return _Bound(
            a=_T * (_FLOAT32 * (2 * math.sqrt(inner) + math.sqrt(outer)) * self.norm + weight),
            b=_T * (out * (2 if bias else 1) + _FLOAT32 * math.sqrt(outer)),
            c=_T * (out * bias + finfo.tiny * math.sqrt(outer)),
            q=_T * (1 / 254 + 2**-11) * self.norm if rounds_input else 0.0,
            limit=finfo.max / max(self.norm, 1.0),
        )


def roundoff(dtype: torch.dtype) -> float:
    """Unit roundoff of a result, including that of the operands where float32 products round them first."""
    if dtype == torch.float32:
        return {"highest": _FLOAT32, "high": 2.0**-10, "medium": 2.0**-7}[torch.get_float32_matmul_precision()]
    return torch.finfo(dtype).eps / 2


def share_of_step(columns: Sequence[tuple[int, int]]) -> float:
    """Time of checking every product of these layers, as a share of the products' own time, by bytes and operations."""
    checks = sum(_BYTES_AN_ELEMENT * (into + out) / _BYTES for into, out in columns)
    return checks / sum(2 * into * out / _OPERATIONS for into, out in columns)


def frozen_products(model: nn.Module, *, but: nn.Module | None, computed_in: torch.dtype | None) -> list[Product]:
    """The layers whose products can be checked, in order.

    Args:
        model: its weights lie where they are computed with.
        but: a layer to leave out.
        computed_in: autocast's dtype; None without autocast.
    """
    found = []
    for name, module in model.named_modules():
        weight = getattr(module, "weight", None)
        if module is but or not isinstance(module, nn.Linear | Conv1D) or not isinstance(weight, Tensor):
            continue
        if any(parameter.requires_grad for parameter in module.parameters()) or weight.is_meta:
            continue
        columns = (module.nx, module.nf) if isinstance(module, Conv1D) else (module.in_features, module.out_features)
        kind = {"Linear4bit": "4 bit", "LinearNF4": "4 bit", "LinearFP4": "4 bit", "Linear8bitLt": "8 bit"}
        quantised: Any = kind.get(type(module).__name__, "")
        plain = type(module).forward in (nn.Linear.forward, Conv1D.forward) and weight.is_floating_point()
        if quantised or plain:
            dtype = None if quantised else computed_in or weight.dtype
            found.append(Product(name=name, module=module, columns=columns, quantised=quantised, dtype=dtype))
    return found


class ArithmeticChecks:
    """See the module's description. The trainer owns one, and calls it in the order of the methods.

    Attributes:
        refusal: why nothing is checked; None if something is.
        period: steps in which each layer is checked once.
        failure: the sentence on the product that ended the run.
        attention: the figures given to `add_attention`, as read by the last `judge`.
    """

    def __init__(self, mode: Mode, mover: Mover) -> None:
        self._mode, self._mover, self._report = mode, mover, mover.report
        self._products: list[Product] = []
        self._due: list[Product] = []
        self._handles: list[Any] = []
        # Of this step: the largest residual over its bound, shape []; of attention without a `_Checked`.
        self._found: list[tuple[_Checked | None, Tensor]] = []
        self._begun = self._attempt = self._step = 0
        self._suspects: list[tuple[Product, Side]] = []
        self._paused = self._watching = self._skipped = False
        self._streamer: Streamer | None = None
        self.failure, self.attention = "", list[float]()
        self.refusal: str | None = "--check_arithmetic off" if mode == "off" else "training has not begun"
        self.period = 0

    # ---- a training begins --------------------------------------------------------------------------------------

    def prepare(self, trainer: Any, changed: Callable[[], None]) -> None:
        """Find the layers, and compute their checksums on the host.

        Args:
            trainer: about to train.
            changed: called when a frozen weight is no longer what was verified; raises.
        """
        if self._mode == "off" or self._products:
            return
        args: Any = trainer.args
        if args.torch_compile:
            self.refusal = "--torch_compile: compiled products have no place to check them"
        elif trainer.is_sharded or trainer.get_tp_size() > 1:
            self.refusal = "the weights are sharded over ranks"
        else:
            precision = {"fp16": torch.float16, "bf16": torch.bfloat16}.get(trainer.accelerator.mixed_precision)
            # TRL's fused losses multiply with the head's weight without calling its module.
            fused = any(each.__module__.startswith("trl.") for each in type(trainer).__mro__)
            head = (
                trainer.model.get_output_embeddings()
                if fused and hasattr(trainer.model, "get_output_embeddings")
                else None
            )
            found = frozen_products(trainer.model, but=head, computed_in=precision)
            self.refusal = None if found else "no layer is frozen"
            self._products, self._changed, self._streamer = found, changed, trainer.streamer
            self._prepare()
        if self._products:
            share = share_of_step([each.columns for each in self._products])
            often = 1.0 if self._mode == "every" else min(1.0, SHARE / share)
            self._at_once = max(1, int(often * len(self._products)))
            self.period = -(-len(self._products) // self._at_once)

    def _prepare(self) -> None:
        """Checksums of all layers, sent to each device in one transfer."""
        by_device: dict[torch.device, list[Product]] = defaultdict(list)
        for each in self._products:
            by_device[each.module.weight.device].append(each)
        generator = torch.Generator().manual_seed(0x5EED)
        sizes = sorted({size for each in self._products for size in each.columns})
        vectors = {size: _random_vectors(size, generator) for size in sizes}
        for device, layers in by_device.items():
            parts = [vectors[size] for size in sizes]
            for layer in layers:
                parts += self._checksums(layer, vectors)
            sent = self._mover.move_to(
                device, torch.cat([part.flatten() for part in parts]), name="checksums of weights"
            )
            pieces = iter(sent.split([part.numel() for part in parts]))
            placed = {size: next(pieces).view(size, _VECTORS) for size in sizes}
            for layer in layers:
                into, out = layer.columns
                forward, backward, offset = (next(pieces).view(-1, _VECTORS) for _ in range(3))
                has_bias = layer.bias_norm > 0
                layer.sides["forward"] = _Checked(
                    vectors=placed[out], checksum=forward, offset=offset if has_bias else None
                )
                if layer.quantised == "4 bit":  # before the product, whose error it explains
                    layer.sides["dequantised"] = _Checked(vectors=placed[into], checksum=backward, offset=None)
                layer.sides["backward"] = _Checked(vectors=placed[into], checksum=backward, offset=None)

    def _checksums(self, layer: Product, vectors: dict[int, Tensor]) -> list[Tensor]:
        """``W^T v``, ``W u`` and ``b . v`` on the host; sets the layer's norms."""
        into, out = layer.columns
        forward, backward = torch.zeros(into, _VECTORS), torch.zeros(out, _VECTORS)
        by_column, by_row = torch.zeros(into), torch.zeros(out)
        for rows, weight in self._host_weight(layer):
            forward += weight.T @ vectors[out][rows]
            backward[rows] = weight @ vectors[into]
            squares = weight.square()
            by_column += squares.sum(0)
            by_row[rows] = squares.sum(1)
        layer.norm = math.sqrt(float(by_row.double().sum()))
        layer.largest = math.sqrt(float(by_column.max())), math.sqrt(float(by_row.max()))
        bias = layer.module.bias
        offset = torch.zeros(1, _VECTORS)
        if bias is not None:
            values = self._verified_copy(bias).float()
            layer.bias_norm = float(values.norm())
            offset = (values @ vectors[out])[None]
        return [forward, backward, offset]

    def _host_weight(self, layer: Product) -> Iterator[tuple[slice, Tensor]]:
        """The rows of the weight ``[out, in]`` in float32 as the layer computes with them, some at a time."""
        yield from host_weight(layer.module, layer.dtype, self._verified_copy)

    def _verified_copy(self, tensor: Tensor) -> Tensor:
        if self._streamer is not None and (waiting := self._streamer.waiting(tensor)) is not None:
            return waiting
        found, known = host_copy(tensor.detach()), self._mover.digest_of(tensor)
        if known is not None and digest(found) != known:
            self._changed()
        return found

    # ---- a step -------------------------------------------------------------------------------------------------

    def begin_step(self, step: int) -> None:
        """An optimizer step begins, the number ``step`` from 1."""
        self._release()
        self._step, self._attempt = step, 0
        self._watching, self._skipped = self._skipped, False
        self._found.clear()
        layers = len(self._products)
        if not layers:
            return
        self._begun += 1
        if self._begun <= FIRST_STEPS:
            self._due = self._products
        else:
            first = step * self._at_once
            self._due = [self._products[(first + number) % layers] for number in range(self._at_once)]
        for layer in self._due:
            self._handles.append(layer.module.register_forward_pre_hook(self._branch))
            self._handles.append(layer.module.register_forward_hook(_Hook(self, layer)))
            if "dequantised" in layer.sides:
                self._handles.append(on_dequantised(layer.module.weight, partial(self._check_weight, layer)))
        self._report.count("arithmetic", products=layers, checked=len(self._due))

    def _release(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Within the block nothing is checked: a trainer generates answers, token by token."""
        before, self._paused = self._paused, True
        try:
            yield
        finally:
            self._paused = before

    def _branch(self, module: nn.Module, arguments: tuple[Any, ...]) -> Any:
        """Give the layer a view of its input, whose gradient is then this product's alone, without the adapter's."""
        del module
        if not arguments or self._paused or not (torch.is_grad_enabled() and arguments[0].requires_grad):
            return None
        return (arguments[0].view_as(arguments[0]), *arguments[1:])

    def after_forward(self, layer: Product, x: Tensor, y: Tensor) -> None:
        """Check a product, and have its backward checked."""
        dtype = None if self._paused else layer.dtype_for(x)
        if dtype is None or x.numel() == 0:
            return
        self._check(layer, "forward", x, y, dtype)
        if x.requires_grad and y.requires_grad:
            gradients: list[Tensor] = []
            y.register_hook(gradients.append)
            x.register_hook(lambda dx: self._check(layer, "backward", gradients.pop(), dx, dtype))

    def _check(self, layer: Product, side: Side, operand: Tensor, result: Tensor, dtype: torch.dtype) -> None:
        checked = layer.sides[side]
        # Not within selective recomputation, which keeps products and would hand ours out in place of the model's.
        with _disable_current_modes(), torch.no_grad(), torch.autocast(operand.device.type, enabled=False):
            operand = operand.detach().reshape(-1, operand.shape[-1]).to(dtype)
            result = result.detach().reshape(-1, result.shape[-1])
            bound = layer.bound(side, dtype)
            step = max(1, _CHUNK // max(operand.shape[1], result.shape[1]))
            parts = [
                _residuals(operand[begin : begin + step], result[begin : begin + step], checked, bound)
                for begin in range(0, len(operand), step)
            ]
            residuals = parts[0] if len(parts) == 1 else torch.cat(parts)
            worst = residuals.amax()
            if self._watching and checked.held is None and not worst.item() <= checked.level:
                checked.held = (operand.clone(), result.clone(), residuals, dtype)
        self._found.append((checked, worst))

    def _check_weight(self, layer: Product, weight: Tensor) -> None:
        """Check a dequantised weight, [out, in]."""
        checked = layer.sides["dequantised"]
        if self._paused or tuple(weight.shape[::-1]) != layer.columns:
            return
        with _disable_current_modes(), torch.no_grad(), torch.autocast(weight.device.type, enabled=False):
            residuals = _weight_residuals(weight, checked)
            worst = residuals.amax()
            if self._watching and checked.held is None and not worst.item() <= checked.level:
                rows = residuals.topk(min(_ROWS, len(residuals))).indices
                checked.held = (rows, weight[rows].clone(), residuals, weight.dtype)
        self._found.append((checked, worst))

    def add_attention(self, worst: Tensor) -> None:
        """Have a figure on an attention call, shape [], read with the residuals."""
        self._found.append((None, worst))

    # ---- the verdict --------------------------------------------------------------------------------------------

    def pending(self) -> list[Tensor]:
        """The residuals of this step, one tensor a device: to be read with the step's loss."""
        by_device: dict[torch.device, list[Tensor]] = defaultdict(list)
        for _, worst in self._found:
            by_device[worst.device].append(worst)
        return [torch.stack(each) for each in by_device.values()]

    def judge(self, numbers: Sequence[Sequence[float]], *, can_repeat: bool) -> StepVerdict:
        """What to do with the step, by the numbers of `pending` as read, on this rank alone.

        Args:
            numbers: a row for each tensor of `pending`.
            can_repeat: whether the trainer can compute the step again.
        """
        devices = list(dict.fromkeys(worst.device for _, worst in self._found))
        rows = {device: iter(row) for device, row in zip(devices, numbers, strict=True)}
        largest: dict[int, float] = {}
        self.attention = []
        for checked, worst in self._found:
            number = next(rows[worst.device])
            if checked is None:
                self.attention.append(number)
                continue
            known = largest.setdefault(id(checked), 0.0)
            largest[id(checked)] = known if number <= known or math.isnan(known) else number
        self._report.count("arithmetic", residuals=len(self._found) - len(self.attention))
        self._found.clear()
        flagged = []
        for layer in self._due:
            for side, checked in layer.sides.items():
                number = largest.get(id(checked), 0.0)
                if not number <= checked.level:
                    checked.flagged = number
                    flagged.append((layer, side))
        if flagged:
            return self._accused(flagged, StepVerdict.REPEAT if can_repeat else StepVerdict.SKIP)
        for layer in self._due:
            for checked in layer.sides.values():
                if id(checked) in largest:
                    checked.learn(largest[id(checked)])
        return self._settled()

    def _settled(self) -> StepVerdict:
        """Nothing is wrong now: what made the step be repeated was a fault that has passed."""
        for layer, side in self._suspects:
            self._tell(layer, side, "transient", "recovered", "the step was computed again, and is right now")
        self._suspects.clear()
        return StepVerdict.GO_ON

    def _accused(self, flagged: list[tuple[Product, Side]], again: StepVerdict) -> StepVerdict:
        """Judge products whose operands are held, and have the others computed again, in a step that holds them."""
        self._watching, self._attempt = True, self._attempt + 1
        wrong, unknown, current = [], [], products.current_library(self._mover.device)
        chosen: str | None = current
        for layer, side in flagged:
            checked = layer.sides[side]
            if checked.held is None:
                unknown.append((layer, side))
            elif self._is_wrong(layer, side):
                wrong.append((layer, side))
                chosen = self._library_for(layer, side) if chosen == current else chosen
            else:
                checked.learn(checked.flagged, cleared=True)
                self._report.count("arithmetic", cleared=1)
                if (layer, side) in self._suspects:
                    self._suspects.remove((layer, side))
            checked.held = None
        if not (wrong or unknown):
            return self._settled()
        if wrong and (chosen is None or self._attempt > _ATTEMPTS):
            why = "no library computes it right" if chosen is None else f"so it was in {self._attempt} attempts"
            self.failure, *_ = [self._tell(*each, "repeatable", "stopped", why) for each in wrong]
            return StepVerdict.END
        if chosen is not None and chosen != current:
            products.use_library(self._mover.device, chosen)
            for each in wrong:
                self._tell(*each, "one library", "recovered", f"{current} computes it so: {chosen} is used from now on")
            self._suspects = [each for each in self._suspects if each not in wrong]
        else:
            self._suspects += [each for each in (*unknown, *wrong) if each not in self._suspects]
        if again is StepVerdict.SKIP:
            self._skipped = True
        return again

    def _tell(self, layer: Product, side: Side, kind: str, outcome: str, text: str) -> str:
        """Report an incident; returns its sentence."""
        checked = layer.sides[side]
        where = f", {checked.where}" if checked.where else ""
        what = "weight" if side == "dequantised" else "product"
        sentence = (
            f"step {self._step}: the {side} {what} of {layer.name} is wrong "
            f"({checked.flagged:.3g} times what rounding explains{where}): {text}"
        )
        row = {"step": self._step, "stage": "arithmetic", "tensor": layer.name, "side": side, "kind": kind}
        self._report.incident(
            {**row, "residual": checked.flagged, "where": checked.where, "text": text, "outcome": outcome}
        )
        self._report.count("arithmetic", disagreements=1, recovered=int(outcome == "recovered"))
        logger.warning("%s", sentence)
        return sentence

    def describe(self) -> dict[str, Any]:
        """For the report, besides the counters."""
        return {
            "mode": self._mode,
            "refusal": self.refusal,
            "layers": len(self._products),
            "steps_to_check_all": self.period,
            "library": products.current_library(self._mover.device),
        }

    # ---- diagnosis ----------------------------------------------------------------------------------------------

    def _is_wrong(self, layer: Product, side: Side) -> bool:
        """Whether the product's worst rows differ from the host's by more than its own rounding; notes where."""
        checked = layer.sides[side]
        assert checked.held is not None
        operand, result, residuals, dtype = checked.held
        if side == "dequantised":
            return self._is_wrong_weight(layer, checked, host_copy(operand), host_copy(result).double())
        worst = residuals.topk(min(_ROWS, len(residuals))).indices
        x, y = host_copy(operand[worst]).double(), host_copy(result[worst]).double()
        if not x.isfinite().all():
            return False
        right, norms = torch.zeros_like(y), torch.zeros(y.shape[1], dtype=torch.float64)
        for rows, weight in self._host_weight(layer):
            wide = weight.double()
            if side == "forward":
                right[:, rows] = x @ wide.T
                norms[rows] = wide.norm(dim=1)
            else:
                right += x[:, rows] @ wide
                norms += wide.square().sum(0)
        if side == "backward":
            norms = norms.sqrt()
        elif layer.module.bias is not None:
            right += host_copy(layer.module.bias).double()
        out, bound = roundoff(dtype), layer.bound(side, dtype)
        length = x.norm(dim=1, keepdim=True)
        allowed = 4 * out * right.abs() + 8 * out * right.norm(dim=1, keepdim=True) / math.sqrt(right.shape[1])
        allowed += (bound.a * length + bound.q * x.abs().amax(1, keepdim=True)) * norms / max(layer.norm, 1e-30)
        if layer.quantised:  # a kernel need not round the weight as the host does
            allowed += 2 * out * length * norms
        right = torch.where(right.abs() > torch.finfo(dtype).max, right.sign() * math.inf, right)
        wrong = ~(((y - right).abs() <= allowed) | (y == right))
        checked.where = _where(~(residuals <= checked.level), wrong.any(0))
        return bool(wrong.any())

    def _is_wrong_weight(self, layer: Product, checked: _Checked, rows: Tensor, found: Tensor) -> bool:
        """Whether these rows of a dequantised weight differ from the host's by more than a rounding."""
        assert checked.held is not None
        right, (_, _, residuals, dtype) = torch.zeros_like(found), checked.held
        for part, weight in self._host_weight(layer):
            inside = (rows >= part.start) & (rows < part.stop)
            right[inside] = weight[rows[inside] - part.start].double()
        wrong = ~((found - right).abs() <= 4 * roundoff(dtype) * right.abs() + torch.finfo(dtype).tiny)
        checked.where = _where(~(residuals <= checked.level), wrong.any(0))
        return bool(wrong.any())

    def _library_for(self, layer: Product, side: Side) -> str | None:
        """The library that computes the held product right, the current one first; None if none does."""
        checked = layer.sides[side]
        assert checked.held is not None
        operand, _, _, dtype = checked.held
        device = operand.device
        if side == "dequantised":  # by no BLAS library
            if self._streamer is not None:
                self._streamer.bring(layer.module)
            with torch.no_grad():
                right = bool(_weight_residuals(dequantised(layer.module), checked).amax() <= checked.level)
            return products.current_library(device) if right else None
        for name in products.each_library(device):
            again = self._again(layer, side, operand, dtype)
            with torch.no_grad():
                if bool(_residuals(operand, again, checked, layer.bound(side, dtype)).amax() <= checked.level):
                    return name
        return None

    def _again(self, layer: Product, side: Side, operand: Tensor, dtype: torch.dtype) -> Tensor:
        """The product once more, by the layer itself."""
        module, kind = layer.module, operand.device.type
        if self._streamer is not None:
            self._streamer.bring(module)
        cast = not layer.quantised and module.weight.dtype != dtype
        with torch.autocast(kind, dtype=dtype if cast else None, enabled=cast), torch.enable_grad():
            if side == "forward":
                return module.forward(operand).detach()
            x = operand.new_zeros(len(operand), layer.columns[0]).requires_grad_()
            y = module.forward(x)
            (found,) = torch.autograd.grad(y, x, operand.to(y.dtype))
            return found


class _Hook:
    """After a layer's forward."""

    def __init__(self, checks: ArithmeticChecks, layer: Product) -> None:
        self._checks, self._layer = checks, layer

    def __call__(self, module: nn.Module, arguments: tuple[Any, ...], output: Any) -> None:
        if arguments and isinstance(output, Tensor):
            self._checks.after_forward(self._layer, arguments[0], output)


def _random_vectors(size: int, generator: torch.Generator) -> Tensor:
    """Signs, which miss no single wrong element, and normal numbers, which tell swapped columns apart; [size, 3]."""
    signs = torch.randint(0, 2, (size,), generator=generator) * 2.0 - 1
    return torch.cat([signs[:, None], torch.randn(size, _VECTORS - 1, generator=generator)], dim=1)


def _residuals(operand: Tensor, result: Tensor, checked: _Checked, bound: _Bound) -> Tensor:
    """Of each row the largest of its residuals over its bound, float32 [rows]; NaN where only the result has it."""
    found = torch.mm(result.float(), checked.vectors)
    if checked.offset is not None:
        found -= checked.offset
    found = torch.addmm(found, operand.float(), checked.checksum, alpha=-1).abs_().amax(1)
    length = torch.linalg.vector_norm(operand, dim=1, dtype=torch.float32)
    allowed = torch.linalg.vector_norm(result, dim=1, dtype=torch.float32).mul_(bound.b).add_(length, alpha=bound.a)
    if bound.q:
        allowed.add_(torch.linalg.vector_norm(operand, math.inf, dim=1, dtype=torch.float32), alpha=bound.q)
    return torch.where(length < bound.limit, found.div_(allowed.add_(bound.c)), 0.0)


def _weight_residuals(weight: Tensor, checked: _Checked) -> Tensor:
    """Of each row of a weight the largest of its residuals over its bound, float32 [rows]."""
    step = max(1, _CHUNK // weight.shape[1])
    bound = _T * _FLOAT32 * 2 * math.sqrt(weight.shape[1])
    parts = []
    for begin in range(0, len(weight), step):
        wide = weight[begin : begin + step].float()
        found = torch.addmm(checked.checksum[begin : begin + step], wide, checked.vectors, beta=-1).abs_().amax(1)
        length = torch.linalg.vector_norm(wide, dim=1)
        parts.append(found.div_(length.mul_(bound).add_(torch.finfo(torch.float32).tiny)))
    return torch.cat(parts)


def _where(rows: Tensor, columns: Tensor) -> str:
    """Which of a product's rows, and of its columns in the worst rows, are wrong."""
    parts = []
    for name, marks in (("rows", rows), ("columns", columns)):
        places = marks.nonzero().flatten().tolist()
        if places:
            parts.append(f"{len(places)} of {len(marks)} {name} from {places[0]} to {places[-1]}")
    return ", ".join(parts)
