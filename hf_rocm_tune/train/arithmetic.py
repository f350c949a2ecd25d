"""Checks of the products with frozen weights while a model trains, and what is done when one is wrong.

Freivalds' check: with a random ``v`` and ``c = W^T v``, computed on the host from the weight's verified bytes, each row
of ``y = x W^T`` must have ``y . v = x . c`` up to rounding; in backward ``dX . u = dY . r`` with ``r = W u``. Each side
has three vectors, one of signs and two of normal numbers; a wrong product must escape all. Residuals stay on the device
until the step's loss and gradient norm are read, before the optimizer: no further wait.

The rounding errors ``e_i`` of row i do not depend on v, so by Hoeffding's inequality ``|v . e_i| > t ||e_i||`` has at
most the probability ``2 exp(-t^2 / 2)``: 4e-16 for t = 8.5. ``||e_i||`` is at most

    u ||y_i||                          the output is rounded to its dtype (unit roundoff u); twice with a separate bias
    2^-24 sqrt(K) ||x_i|| ||W||        K float32 additions with roundings of random sign (Higham and Mary 2019)
    u ||x_i|| max_k ||W_k||            8 bit, or 4 bit in another dtype than that of the checksums: the dequantised
                                       weight is rounded (W_k: column, in backward row)
    ||W|| max|x_i| / 254               8-bit layers, forward: the input is rounded to 1/127 of its largest value

(Frobenius norm), and the check's own products add terms of the second kind. A `level` below 1 tightens this to four
times a layer's largest clean residual; of float32 products, whose error is that of their sums, to four times what it
would be with other data: sums of K products that all have one sign round sqrt(2 K / 3) times as much as sums that stay
small. A residual above the level accuses nobody: the step is repeated, and the worst rows are computed on the host in
float64. Only a product that differs from them by more than its own rounding is called wrong; else the level rises.

Each row of a mixture is checked by the checksum of its expert. An adapter that PEFT adds to the weight, W + s B A, adds
``s A^T B^T v`` to c, ``s B A u`` to r, its norms to those of W, and has the third term twice. Of a sharded weight each
rank sums up its rows, and the ranks add; a part that its rank computes with is a weight. A 4-bit weight that
bitsandbytes has dequantised is checked by itself: each row times the vectors against `r`, within ``t 2^-23 sqrt(K)`` of
its norm. The forward product dequantises within its kernel: there a wrong block must exceed the product's own bound.

Always found is a single element that is off by more than the bound B (3.4 % of its row's norm in bfloat16, 0.4 % in
float16; 0.007 % of a dequantised row of 4,096); an error of norm E spread over a row escapes with a probability of
about (0.8 B / E)^3, one in r rows with the r-th power of that. Not found: smaller errors such as one low mantissa bit,
and a product in a step in which its layer is not checked.
"""

from __future__ import annotations

import logging
import math
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from enum import IntEnum
from functools import partial
from typing import Any, Literal, NamedTuple, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import _disable_current_modes
from transformers.pytorch_utils import Conv1D

from hf_rocm_tune.host_group import host_group
from hf_rocm_tune.models import experts, loss, products
from hf_rocm_tune.models.quantised import Watch, dequantised, host_weight, on_dequantised
from hf_rocm_tune.models.shards import local, rows_of
from hf_rocm_tune.models.streaming import Streamer
from hf_rocm_tune.transfer import Mover, digest, host_copy

logger = logging.getLogger(__name__)

Mode = Literal["off", "sampled", "every"]
Side = Literal["forward", "backward", "dequantised"]
_DIRECTIONS: tuple[Side, Side] = "forward", "backward"
FIRST_STEPS = 2
"""Steps after a start in which all products are checked."""
SHARE = 0.007
"""Of a step's time, as estimated by `share_of_step`, that the sampled checks may take."""

_T = 8.5
_VECTORS = 3
_FLOAT32 = 2.0**-24
_UNDERFLOW = 2.0**-63  # the square of a smaller number may be zero in a norm
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


class _Bound(NamedTuple):
    """Of ``|y_i . v - x_i . c|``: a ||x_i|| + b ||y_i|| + c + q max|x_i|; rows with ||x_i|| >= limit may overflow."""

    a: float
    b: float
    c: float
    q: float
    limit: float


@dataclass(frozen=True, kw_only=True)
class _Added:
    """What adapters have added to the weights of a layer's experts: ``scaling * left @ right``, or their sum."""

    # left [experts, out, rank], right [experts, rank, in]; right is None where left is the sum, [experts, out, in]
    factors: tuple[Tensor, Tensor | None, float]
    checksums: dict[Side, Tensor]  # as in `_Checked`, of both
    norm: Tensor  # [], as in `Product`
    largest: tuple[Tensor, Tensor]


@dataclass(frozen=True, kw_only=True)
class _Call:
    """One product: how it is computed again, from an operand [rows, columns]; and of experts what they are."""

    again: Callable[[Tensor], Tensor]  # in forward
    biased: bool = True  # if the layer has a bias
    gathered: tuple[Tensor, ...] = ()  # weight and bias, which are there only while the layer computes
    back: Callable[[Tensor], Tensor] | None = None  # in backward; None: by autograd
    experts: Tensor | None = None  # int64, of each row, or the one of all rows [1]
    added: _Added | None = None
    expert: int = 0  # of a dequantised weight

    def to_keep(self) -> _Call:
        if not self.gathered:
            return self
        kept = tuple(each.detach().clone() for each in self.gathered)
        return replace(self, again=lambda operand: functional.linear(operand, *kept), gathered=kept)


@dataclass(frozen=True)
class _Held:
    """A product, or rows of a dequantised weight, that may be wrong, until it is judged."""

    operand: Tensor  # or the numbers of the rows
    result: Tensor
    residuals: Tensor
    dtype: torch.dtype
    call: _Call


@dataclass(kw_only=True, eq=False)
class _Checked:
    vectors: Tensor  # [columns of the result, 3], float32 on the device
    checksum: Tensor  # [experts or 1, columns of the operand, 3]
    offset: Tensor | None = None  # [1, 3]: the bias times the vectors
    level: float = 1.0
    largest: float = 0.0  # clean residual over its bound, so far
    seen: int = 0
    spread: float = 1.0  # of clean residuals over the data that there may be
    flagged: float = 0.0  # the residual that made the step be repeated
    where: str = ""  # which rows and columns are wrong
    held: _Held | None = None  # when repeated

    def learn(self, clean: float, *, cleared: bool = False) -> None:
        """Take a clean residual into account; ``cleared``: the host has shown that it is clean."""
        self.seen += 1
        self.largest = max(self.largest, clean)
        if cleared or self.seen >= _ENOUGH:
            level = max(_LEVEL * self.largest, _FLOOR)
            usual = min(1.0, level * self.spread)
            self.level = max(level, usual) if cleared else usual


@dataclass(kw_only=True, eq=False)
class Product:
    """A frozen linear layer, ``y = x W^T + b``, or the same of each expert; norms and sides are filled in later."""

    name: str
    module: Any
    key: str = "weight"
    experts: int = 0  # 0: a linear layer
    chosen: int = 0  # experts of a token
    transposed: bool = False  # experts' weights are [in, out]
    cut: Literal["", "own", "gathered"] = ""  # over ranks: each computes with its part, or with all of it
    columns: tuple[int, int]  # of the input, and of the output
    quantised: Literal["", "4 bit", "8 bit"]
    dtype: torch.dtype | None  # in which it is computed; None: the dtype of each call's input
    norm: float = 0.0  # Frobenius; of experts that of the largest one, as below
    largest: tuple[float, float] = (0.0, 0.0)  # norms of columns and of rows
    bias_norm: float = 0.0
    sides: dict[Side, _Checked] = field(default_factory=dict)
    on_host: list[Tensor] = field(default_factory=list)  # checksums: `W^T v`, `W u` and `b . v`

    @property
    def weight(self) -> Any:
        """The frozen parameter, also while PEFT has it parametrised."""
        parametrised = getattr(self.module, "parametrizations", {})
        return parametrised[self.key].original if self.key in parametrised else getattr(self.module, self.key)

    def dtype_for(self, x: Tensor, y: Tensor) -> torch.dtype | None:
        """In which a call has computed; None where that is not what the checksum was made for."""
        if self.quantised:  # and rounded to the input's dtype, if that is a coarser one
            return max(
                getattr(self.module, "compute_dtype", None) or x.dtype, y.dtype, key=lambda each: torch.finfo(each).eps
            )
        return y.dtype if y.dtype == self.dtype else None

    def put(self, side: Side, *, vectors: Tensor, checksum: Tensor, offset: Tensor | None = None) -> None:
        """Have these tensors on the device; what is known of clean residuals stays."""
        known = self.sides.setdefault(side, _Checked(vectors=vectors, checksum=checksum))
        known.vectors, known.checksum, known.offset = vectors, checksum, offset

    def bound(self, side: Side, dtype: torch.dtype, *, added: bool = False) -> _Bound:
        finfo = torch.finfo(dtype)
        out, (inner, outer) = roundoff(dtype), self.columns if side == "forward" else self.columns[::-1]
        bias = self.bias_norm if side == "forward" else 0.0
        state = getattr(self.weight, "quant_state", None)
        as_on_host = not self.quantised or (state is not None and state.dtype == dtype)
        weight = 0.0 if as_on_host and not added else (1 + added) * out * self.largest[side == "backward"]
        rounds_input = self.quantised == "8 bit" and side == "forward"
        a = _T * (_FLOAT32 * (2 * math.sqrt(inner) + math.sqrt(outer)) * self.norm + weight)
        b = _T * (out * (2 if bias else 1) + _FLOAT32 * math.sqrt(outer))
        unseen = _UNDERFLOW * (a * math.sqrt(inner) + b * math.sqrt(outer))
        return _Bound(
            a=a,
            b=b,
            c=_T * (out * bias + finfo.tiny * math.sqrt(outer)) + unseen,
            q=_T * (1 / 254 + 2**-11) * self.norm if rounds_input else 0.0,
            limit=finfo.max / max(self.norm, 1.0),
        )

    def residuals(self, side: Side, operand: Tensor, result: Tensor, dtype: torch.dtype, call: _Call) -> Tensor:
        """Of each row the largest of its residuals over its bound, float32 [rows]; NaN where only the result has it."""
        checked, added, of = self.sides[side], call.added, call.experts
        bound, checksum = self.bound(side, dtype, added=added is not None), checked.checksum
        slope: Tensor | float = bound.a
        if added is not None:
            sums = 2 * math.sqrt(operand.shape[1]) + math.sqrt(result.shape[1])
            more = _T * (_FLOAT32 * sums * added.norm + 2 * roundoff(dtype) * added.largest[side == "backward"])
            slope, checksum = more + slope, added.checksums[side]
        each_own = of is not None and len(of) > 1
        shared = checksum[0] if of is None or each_own else checksum.index_select(0, of)[0]
        step = max(1, _CHUNK // (max(self.columns) * (_VECTORS if each_own else 1)))
        parts = []
        for begin in range(0, len(operand), step):
            part = slice(begin, begin + step)
            x, y = operand[part].to(dtype), result[part]
            found = torch.mm(y.float(), checked.vectors)
            if call.biased and checked.offset is not None:
                found -= checked.offset
            if of is not None and each_own:
                found -= torch.bmm(x.float()[:, None], checksum.index_select(0, of[part]))[:, 0]
            else:
                found = torch.addmm(found, x.float(), shared, alpha=-1)
            length = torch.linalg.vector_norm(x, dim=1, dtype=torch.float32)
            norm = torch.linalg.vector_norm(y, dim=1, dtype=torch.float32)
            allowed = length * slope + bound.c
            allowed.add_(norm, alpha=bound.b)
            if bound.q:
                largest = torch.linalg.vector_norm(x, math.inf, dim=1, dtype=torch.float32)
                allowed.add_(largest, alpha=bound.q)
            parts.append(torch.where(length < bound.limit, found.abs_().amax(1).div_(allowed), 0.0))
        return torch.cat(parts)


def roundoff(dtype: torch.dtype) -> float:
    """Unit roundoff of a result, including that of the operands where float32 products round them first."""
    if dtype == torch.float32:
        return {"highest": _FLOAT32, "high": 2.0**-10, "medium": 2.0**-7}[torch.get_float32_matmul_precision()]
    return torch.finfo(dtype).eps / 2


def share_of_step(columns: Sequence[tuple[int, int]], experts: Sequence[int] | None = None) -> float:
    """Time of checking every product of these layers, as a share of the products' own time, by bytes and operations.

    ``experts``: of each layer, how many of them a token is given to; 0 for those without, whose checks cost half.
    """
    checks = products = 0.0
    for (into, out), chosen in zip(columns, experts or [0] * len(columns), strict=True):
        checks += (2 * chosen or 1) * _BYTES_AN_ELEMENT * (into + out) / _BYTES
        products += (chosen or 1) * 2 * into * out / _OPERATIONS
    return checks / products


def frozen_products(model: nn.Module, *, computed_in: torch.dtype | None, own_parts: bool = False) -> list[Product]:
    """The layers whose products can be checked, in order; their weights lie where they are computed with.

    ``computed_in``: autocast's dtype; ``own_parts``: each rank computes with its own part of a sharded weight.
    """
    found = []
    for name, module in model.named_modules():
        weight = getattr(module, "weight", None)
        if not isinstance(module, nn.Linear | Conv1D) or not isinstance(weight, Tensor):
            continue
        if any(parameter.requires_grad for parameter in module.parameters()) or weight.is_meta:
            continue
        columns = (module.nx, module.nf) if isinstance(module, Conv1D) else (module.in_features, module.out_features)
        cut: Any = "" if not isinstance(weight, DTensor) else "own" if own_parts else "gathered"
        if cut == "own":
            columns = (local(weight).shape[1], local(weight).shape[0])
        kind = {"Linear4bit": "4 bit", "LinearNF4": "4 bit", "LinearFP4": "4 bit", "Linear8bitLt": "8 bit"}
        quantised: Any = kind.get(type(module).__name__, "")
        plain = type(module).forward in (nn.Linear.forward, Conv1D.forward) and weight.is_floating_point()
        if plain or (quantised and not cut):
            dtype = None if quantised else computed_in or weight.dtype
            found.append(Product(name=name, module=module, columns=columns, quantised=quantised, dtype=dtype, cut=cut))
    for name, module in experts.experts_of(model):
        for key in experts.weights_of(module):
            weight = getattr(module, key)
            if weight.requires_grad or weight.is_meta or isinstance(weight, DTensor):
                continue
            count, *shape, turned = experts.layout(module, key)
            # Autocast knows no grouped product.
            grouped = experts.is_packed(module) or module.config._experts_implementation == "grouped_mm"
            found.append(
                Product(
                    name=f"{name}.{key}",
                    module=module,
                    key=key,
                    experts=count,
                    transposed=turned,
                    chosen=getattr(module.config, "num_experts_per_tok", 1),
                    columns=(shape[0], shape[1]) if turned else (shape[1], shape[0]),
                    quantised="4 bit" if experts.is_packed(module) else "",
                    dtype=weight.dtype if grouped or computed_in is None else computed_in,
                )
            )
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
        # Of this step, by device: the largest residual over its bound, shape []; of attention without a `_Checked`.
        self._found: dict[torch.device, list[tuple[_Checked | None, Tensor]]] = defaultdict(list)
        self._begun = self._attempt = self._step = 0
        self._suspects: list[tuple[Product, Side]] = []
        self._paused = self._watching = self._skipped = False
        self._streamer: Streamer | None = None
        self._head: nn.Module | None = None  # whose products a fused loss computes
        self.failure, self.attention = "", list[float]()
        self.refusal: str | None = "--check_arithmetic off" if mode == "off" else "training has not begun"
        self.period = 0

    # ---- a training begins --------------------------------------------------------------------------------------

    def prepare(self, trainer: Any, changed: Callable[[], None]) -> None:
        """A training begins. ``changed`` is called when a frozen weight is no longer what was verified; it raises."""
        if self._mode == "off" or self._products:
            return
        args: Any = trainer.args
        if args.torch_compile:
            self.refusal = "--torch_compile: compiled products have no place to check them"
        elif trainer.is_sharded and trainer.full_state is None:
            self.refusal = "the weights are sharded over ranks by others than hf-rocm-tune"
        else:
            precision = {"fp16": torch.float16, "bf16": torch.bfloat16}.get(trainer.accelerator.mixed_precision)
            # Fused losses multiply with the head's weight without calling its module; TRL's own ones are not seen.
            fused = any(each.__module__.startswith("trl.") for each in type(trainer).__mro__)
            find = getattr(trainer.model, "get_output_embeddings", None)
            self._head = find() if fused and find is not None else None
            own_parts = trainer.get_tp_size() > 1
            found = frozen_products(trainer.model, computed_in=precision, own_parts=own_parts)
            known = fused and trainer.loss_way is loss.one_pass_loss
            found = [
                each
                for each in found
                if each.module is not self._head
                or (known and not each.cut and each.dtype == each.weight.dtype != torch.float16)
            ]
            self.refusal = None if found else "no layer is frozen"
            self._products, self._changed, self._streamer = found, changed, trainer.streamer
            self._prepare()
        if self._products:
            share = share_of_step([each.columns for each in self._products], [each.chosen for each in self._products])
            often = 1.0 if self._mode == "every" else min(1.0, SHARE / share)
            self._at_once = max(1, int(often * len(self._products)))
            self.period = -(-len(self._products) // self._at_once)

    def _prepare(self) -> None:
        """Checksums of all layers, sent to each device in one transfer; those of many experts wait for their turn."""
        generator = torch.Generator().manual_seed(0x5EED)
        sizes = sorted({size for each in self._products for size in each.columns})
        self._vectors = {size: _random_vectors(size, generator) for size in sizes}
        for layer in self._products:
            self._checksum(layer)
        self._few = (
            self._mode == "every"
            or _bytes_of(each for each in self._products if each.experts) <= experts.CHECKSUMS_OF_EXPERTS
        )
        self._place([each for each in self._products if self._few or not each.experts])

    def _place(self, layers: Sequence[Product]) -> None:
        by_device: dict[torch.device, list[Product]] = defaultdict(list)
        for each in layers:
            by_device[each.weight.device].append(each)
        for device, each_layer in by_device.items():
            sizes = sorted({size for layer in each_layer for size in layer.columns})
            parts = [self._vectors[size] for size in sizes] + [part for layer in each_layer for part in layer.on_host]
            sent = self._mover.move_to(
                device, torch.cat([part.flatten() for part in parts]), name="checksums of weights"
            )
            placed = [
                each.view(part.shape) for each, part in zip(sent.split([p.numel() for p in parts]), parts, strict=True)
            ]
            vectors, pieces = dict(zip(sizes, placed, strict=False)), iter(placed[len(sizes) :])
            for layer in each_layer:
                forward, backward, offset = (next(pieces) for _ in range(3))
                tensors = {"vectors": vectors[layer.columns[1]], "checksum": forward}
                rows = {"vectors": vectors[layer.columns[0]], "checksum": backward}
                layer.put("forward", **tensors, offset=offset if layer.bias_norm else None)
                if layer.quantised == "4 bit":  # before the product, whose error it explains
                    layer.put("dequantised", **tensors if layer.transposed else rows)
                layer.put("backward", **rows)

    def _checksum(self, layer: Product) -> None:
        """``W^T v``, ``W u`` and ``b . v`` on the host; sets the layer's norms."""
        into, out = layer.columns
        count = max(layer.experts, 1)
        forward, backward = torch.zeros(count, into, _VECTORS), torch.zeros(count, out, _VECTORS)
        by_column, by_row = torch.zeros(count, into), torch.zeros(count, out)
        for expert, rows, weight in self._host_weight(layer):
            forward[expert] += weight.T @ self._vectors[out][rows]
            backward[expert, rows] = weight @ self._vectors[into]
            squares = weight.square()
            by_column[expert] += squares.sum(0)
            by_row[expert, rows] = squares.sum(1)
        offset, of_bias = torch.zeros(1, _VECTORS), torch.zeros(1)
        if not layer.experts and layer.module.bias is not None:  # experts' biases are added after their products
            values = self._verified_copy(layer.module.bias).float()
            first = self._first(layer, layer.module.bias)
            offset += values @ self._vectors[out][first : first + len(values)]
            of_bias += values.square().sum()
        if layer.cut == "gathered":  # each rank has added up its rows
            for each in (forward, backward, by_column, by_row, offset, of_bias):
                dist.all_reduce(each, group=host_group())
        layer.norm = math.sqrt(float(by_row.double().sum(1).max()))
        layer.largest = math.sqrt(float(by_column.max())), math.sqrt(float(by_row.max()))
        layer.bias_norm = math.sqrt(float(of_bias))
        layer.on_host = [forward, backward, offset]

    def _host_weight(
        self, layer: Product, only: Collection[int] | None = None, gathered: Sequence[Tensor] = ()
    ) -> Iterator[tuple[int, slice, Tensor]]:
        """Rows of the weight ``[out, in]`` in float32 as the layer computes with them, and the expert, 0 without.

        ``gathered``: in place of this rank's rows of a sharded weight; the traffic's checks verify it.
        """
        if layer.experts:
            wanted = range(layer.experts) if only is None else sorted(only)
            each = experts.host_weights(layer.weight, wanted, layer.transposed, layer.dtype, self._verified_copy)
            yield from ((expert, slice(0, len(weight)), weight) for expert, weight in zip(wanted, each, strict=True))
        elif gathered:
            yield 0, slice(0, layer.columns[1]), host_copy(gathered[0]).float()
        else:
            first = self._first(layer, layer.weight)
            for rows, weight in host_weight(layer.module, layer.dtype, self._verified_copy):
                yield 0, slice(rows.start + first, rows.stop + first), weight

    def _first(self, layer: Product, tensor: Tensor) -> int:
        """The number of this rank's first row in what is multiplied with."""
        if layer.cut != "gathered" or not isinstance(tensor, DTensor):
            return 0
        return rows_of(tensor.device_mesh.get_local_rank(), tensor.device_mesh.size(), len(tensor))[0]

    def _verified_copy(self, tensor: Tensor) -> Tensor:
        tensor = local(tensor)
        if self._streamer is not None and (waiting := self._streamer.waiting(tensor)) is not None:
            return waiting
        found, known = host_copy(tensor.detach()), self._mover.digest_of(tensor)
        if known is not None and digest(found) != known:
            self._changed()
        return found

    # ---- a step -------------------------------------------------------------------------------------------------

    def begin_step(self, step: int) -> None:
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
        if not self._few:
            self._due = self._bring(self._due)
        within: dict[Any, list[Product]] = defaultdict(list)
        for layer in self._due:
            if layer.experts or layer.cut:
                within[layer.module].append(layer)
            elif layer.module is self._head:
                self._handles.append(Watch(layer.weight, partial(self._check_head, layer)))
            else:
                self._handles.append(layer.module.register_forward_pre_hook(self._branch))
                self._handles.append(layer.module.register_forward_hook(partial(self._after_linear, layer)))
            if "dequantised" in layer.sides:
                self._handles.append(on_dequantised(layer.weight, partial(self._check_weight, layer)))
        for module, own in within.items():
            mode = _Within(self, own)
            self._handles.append(module.register_forward_pre_hook(mode.begin, with_kwargs=True))
            self._handles.append(module.register_forward_hook(mode.end, always_call=True))
        self._report.count("arithmetic", products=layers, checked=len(self._due))

    def _bring(self, wanted: Sequence[Product]) -> list[Product]:
        """Have the checksums of these experts on the device in place of others', as many as are allowed there."""
        due, held = [], 0
        for layer in wanted:
            size = _bytes_of([layer]) if layer.experts else 0
            if not size or not held or held + size <= experts.CHECKSUMS_OF_EXPERTS:
                due.append(layer)
                held += size
        for layer in self._products:
            if layer.experts and layer not in due:
                for checked in layer.sides.values():
                    checked.vectors = checked.checksum = torch.empty(0)
        self._place([each for each in due if each.experts and not any(s.checksum.numel() for s in each.sides.values())])
        return due

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

    def _after_linear(self, layer: Product, module: nn.Module, arguments: tuple[Any, ...], output: Any) -> None:
        if arguments and isinstance(output, Tensor):
            self.after_forward(layer, arguments[0], output, _Call(again=module.forward))

    def after_forward(self, layer: Product, x: Tensor, y: Tensor, call: _Call) -> None:
        dtype = None if self._paused else layer.dtype_for(x, y)
        if dtype is None or x.numel() == 0:
            return
        self._check(layer, "forward", x, y, dtype, call)
        if x.requires_grad and y.requires_grad:
            gradients: list[Tensor] = []
            y.register_hook(gradients.append)
            x.register_hook(lambda dx: self._check(layer, "backward", gradients.pop(), dx, dtype, call))

    def _check(
        self, layer: Product, side: Side, operand: Tensor, result: Tensor, dtype: torch.dtype, call: _Call
    ) -> None:
        checked = layer.sides[side]
        with _unseen(operand.device):
            into, out = layer.columns if side == "forward" else layer.columns[::-1]
            operand = operand.detach().reshape(-1, into)
            result = result.detach().reshape(-1, out)
            residuals = layer.residuals(side, operand, result, dtype, call)
            checked.spread = math.sqrt(2 * into / 3) if dtype == torch.float32 else 1.0
            if self._is_due(checked, residuals):
                checked.held = _Held(operand.to(dtype, copy=True), result.clone(), residuals, dtype, call.to_keep())

    def _is_due(self, checked: _Checked, residuals: Tensor) -> bool:
        """Note the largest residual; whether the product is to be held, in a step that is computed again."""
        worst = residuals.amax()
        self._found[worst.device].append((checked, worst))
        return self._watching and checked.held is None and not worst.item() <= checked.level

    def _check_head(
        self, layer: Product, side: Side, operand: Tensor, result: Tensor, dtype: torch.dtype, *again: Any
    ) -> None:
        if not self._paused:
            call = _Call(again=again[0], back=again[1] if again[1:] else None)
            self._check(layer, side, operand, result, dtype, call)

    def _check_weight(self, layer: Product, weight: Tensor, expert: int = 0) -> None:
        """Check a dequantised weight, [out, in], or an expert's as it is stored."""
        checked = layer.sides["dequantised"]
        shape = weight.shape if layer.transposed else weight.shape[::-1]
        if self._paused or tuple(shape) != layer.columns:
            return
        with _unseen(weight.device):
            residuals = _weight_residuals(weight, checked.vectors, checked.checksum[expert])
            if self._is_due(checked, residuals):
                rows = residuals.topk(min(_ROWS, len(residuals))).indices

                def again(_: Tensor) -> Tensor:
                    return experts.unpacked(layer.weight, expert) if layer.experts else dequantised(layer.module)

                call = _Call(again=again, expert=expert)
                checked.held = _Held(rows, weight[rows].clone(), residuals, weight.dtype, call)

    def add_attention(self, worst: Tensor) -> None:
        """Have a figure on an attention call, shape [], read with the residuals."""
        self._found[worst.device].append((None, worst))

    # ---- the verdict --------------------------------------------------------------------------------------------

    def pending(self) -> list[Tensor]:
        """The residuals of this step, one tensor a device: to be read with the step's loss."""
        return [torch.stack([worst for _, worst in each]) for each in self._found.values()]

    def judge(self, numbers: Sequence[Sequence[float]], *, can_repeat: bool) -> StepVerdict:
        """What to do with the step, by the numbers of `pending` as read, a row for each tensor, on this rank alone."""
        largest: dict[int, float] = {}
        self.attention, residuals = [], 0
        for found, row in zip(self._found.values(), numbers, strict=True):
            for (checked, _), number in zip(found, row, strict=True):
                if checked is None:
                    self.attention.append(number)
                    continue
                residuals += 1
                known = largest.setdefault(id(checked), 0.0)
                largest[id(checked)] = known if number <= known or math.isnan(known) else number
        self._report.count("arithmetic", residuals=residuals)
        self._found.clear()
        flagged, clean = [], []
        for layer in self._due:
            for side, each in layer.sides.items():
                if not (number := largest.get(id(each), 0.0)) <= each.level:
                    each.flagged = number
                    flagged.append((layer, side))
                elif id(each) in largest:
                    clean.append((each, number))
        if flagged:
            return self._accused(flagged, StepVerdict.REPEAT if can_repeat else StepVerdict.SKIP)
        for each, number in clean:
            each.learn(number)
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
            held, checked.held = checked.held, None
            if held is None:
                unknown.append((layer, side))
            elif self._is_wrong(layer, side, held):
                wrong.append((layer, side))
                chosen = self._library_for(layer, side, held) if chosen == current else chosen
            else:
                checked.learn(checked.flagged, cleared=True)
                self._report.count("arithmetic", cleared=1)
                if (layer, side) in self._suspects:
                    self._suspects.remove((layer, side))
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
        return {
            "mode": self._mode,
            "refusal": self.refusal,
            "layers": len(self._products),
            "never_seen": sum(not any(side.seen for side in each.sides.values()) for each in self._products),
            "steps_to_check_all": self.period,
            "library": products.current_library(self._mover.device),
        }

    # ---- diagnosis ----------------------------------------------------------------------------------------------

    def _is_wrong(self, layer: Product, side: Side, held: _Held) -> bool:
        """Whether the product's worst rows differ from the host's by more than its own rounding; notes where."""
        if side == "dequantised":
            found, right, allowed = self._weight_on_host(layer, held)
        else:
            worst = held.residuals.topk(min(_ROWS, len(held.residuals))).indices
            x, found = host_copy(held.operand[worst]).double(), host_copy(held.result[worst]).double()
            if not x.isfinite().all():
                return False
            of = torch.zeros(1, dtype=torch.int64)
            if held.call.experts is not None:
                of = host_copy(held.call.experts if len(held.call.experts) == 1 else held.call.experts[worst])
            right, allowed = self._product_on_host(layer, side, held, x, of.expand(len(x)))
        wrong = ~(((found - right).abs() <= allowed) | (found == right))
        layer.sides[side].where = _where(~(held.residuals <= layer.sides[side].level), wrong.any(0))
        return bool(wrong.any())

    def _product_on_host(self, layer: Product, side: Side, held: _Held, x: Tensor, of: Tensor) -> tuple[Tensor, Tensor]:
        """The product of rows ``x`` with the weights of the experts ``of``, float64, and how far a right one may be."""
        added, dtype = held.call.added, held.dtype
        right = torch.zeros(len(x), layer.columns[side == "forward"], dtype=torch.float64)
        norms = torch.zeros_like(right)
        for expert, rows, weight in self._host_weight(layer, set(of.tolist()), held.call.gathered):
            mine, wide = of == expert, weight.double()
            if added is not None:
                left, factor, scaling = added.factors
                more = host_copy(left[expert]).double()
                wide += more if factor is None else scaling * (more @ host_copy(factor[expert]).double())
            if side == "forward":
                right[mine, rows] = x[mine] @ wide.T
                norms[mine, rows] = wide.square().sum(1)
            else:
                right[mine] += x[mine][:, rows] @ wide
                norms[mine] += wide.square().sum(0)
        norms = norms.sqrt()
        if side == "forward" and layer.bias_norm and held.call.biased:
            _, *bias = held.call.gathered or (None, local(layer.module.bias))
            right += host_copy(bias[0]).double()
        out, bound = roundoff(dtype), layer.bound(side, dtype)
        length = x.norm(dim=1, keepdim=True)
        allowed = 4 * out * right.abs() + 8 * out * right.norm(dim=1, keepdim=True) / math.sqrt(right.shape[1])
        allowed += (bound.a * length + bound.q * x.abs().amax(1, keepdim=True)) * norms / max(layer.norm, 1e-30)
        if layer.quantised or added is not None:  # a kernel need not round the weight as the host does
            allowed += (2 + 2 * (added is not None)) * out * length * norms
        return torch.where(right.abs() > torch.finfo(dtype).max, right.sign() * math.inf, right), allowed

    def _weight_on_host(self, layer: Product, held: _Held) -> tuple[Tensor, Tensor, Tensor]:
        """Rows of a dequantised weight, the host's, float64, and how far they may lie apart."""
        rows, found = host_copy(held.operand), host_copy(held.result).double()
        right = torch.zeros_like(found)
        for _, part, weight in self._host_weight(layer, [held.call.expert]):
            stored = weight.T if layer.transposed else weight
            inside = (rows >= part.start) & (rows < part.start + len(stored))
            right[inside] = stored[rows[inside] - part.start].double()
        return found, right, 4 * roundoff(held.dtype) * right.abs() + torch.finfo(held.dtype).tiny

    def _library_for(self, layer: Product, side: Side, held: _Held) -> str | None:
        """The library that computes the held product right, the current one first; None if none does."""
        checked, device = layer.sides[side], held.operand.device
        if self._streamer is not None:
            self._streamer.bring(layer.module)
        if side == "dequantised":  # by no BLAS library
            with torch.no_grad():
                again, own = held.call.again(held.operand), checked.checksum[held.call.expert]
                right = bool(_weight_residuals(again, checked.vectors, own).amax() <= checked.level)
            return products.current_library(device) if right else None
        for name in products.each_library(device):
            again = self._again(layer, side, held)
            with torch.no_grad():
                if bool(layer.residuals(side, held.operand, again, held.dtype, held.call).amax() <= checked.level):
                    return name
        return None

    def _again(self, layer: Product, side: Side, held: _Held) -> Tensor:
        """The product once more, as it was computed, [rows, columns]."""
        operand, kind, call = held.operand, held.operand.device.type, held.call
        if side == "backward" and call.back is not None:
            return call.back(operand)
        cast = not layer.quantised and layer.weight.dtype != held.dtype
        with torch.autocast(kind, dtype=held.dtype if cast else None, enabled=cast), torch.enable_grad():
            if side == "forward":
                return call.again(operand).detach().view(len(operand), -1)
            x = operand.new_zeros(len(operand), layer.columns[0]).requires_grad_()
            y = call.again(x)
            (found,) = torch.autograd.grad(y, x, operand.to(y.dtype).view(y.shape))
            return found


class _Within(TorchFunctionMode):
    """Within a module's forward: products with its weights are checked, whichever function computes them.

    The module is a mixture, or a linear layer that has sharded weights: its hooks see gathered weights, but sums over
    the ranks in place of its own products.
    """

    def __init__(self, checks: ArithmeticChecks, layers: Sequence[Product]) -> None:
        super().__init__()
        self._checks, self._layers = checks, layers
        self._weights: dict[int, tuple[Tensor, Product, _Added | None]] = {}
        self._chosen = torch.empty(0)

    def begin(self, module: Any, arguments: tuple[Any, ...], keywords: Mapping[str, Any]) -> None:
        """Before ``module(hidden)``, or ``module(hidden, chosen experts [tokens, experts], their weights)``."""
        for layer in self._layers:
            if layer.experts:
                _, chosen, *_ = (*arguments, *keywords.values())
                self._chosen = chosen.detach().reshape(-1)
            weight = local(getattr(module, layer.key))  # as it is multiplied with: of PEFT's cache
            parametrised = getattr(module, "parametrizations", None)
            proxies = list(getattr(parametrised, layer.key, ()))
            if not proxies or (
                len(proxies) == 1 and (hasattr(proxies[0], "lhs") or hasattr(proxies[0], "delta_weight"))
            ):
                added = _added(layer, proxies[0]) if proxies else None
                self._weights[weight.data_ptr()] = weight, layer, added
        self.__enter__()

    def end(self, *_: Any) -> None:
        self.__exit__(None, None, None)
        self._weights.clear()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is Tensor.__getitem__ and isinstance(args[1], Tensor) and args[0].data_ptr() in self._weights:
            found: Any = func(*args, **kwargs)
            found.of_experts = args[0].data_ptr(), args[1].reshape(-1)
            return found
        if func not in _MULTIPLY:
            return func(*args, **kwargs)
        for at in range(2):
            weight = args[1 - at]
            known, of = getattr(weight, "of_experts", (weight.data_ptr(), None))
            _, layer, added = self._weights.get(known, (None, None, None))
            if layer is not None and (of is not None or weight.dim() == 3 or func is experts.multiply or layer.cut):
                break
        else:
            return func(*args, **kwargs)
        bias = args[2] if func is functional.linear and len(args) > 2 else None
        if bias is not None and layer.experts:
            return func(*args, **kwargs)
        x, before, after = args[at], args[:at], args[at + 1 :]
        if torch.is_grad_enabled() and x.requires_grad:
            x = x.view_as(x)  # its gradient is this product's alone
        shape = x.shape
        y = func(*before, x, *after, **kwargs)
        if of is None and layer.experts:
            of = self._chosen.sort().values

        def again(operand: Tensor) -> Tensor:
            return cast(Tensor, func(*before, operand.view(shape), *after, **kwargs))

        gathered = [each for each in (weight, bias) if each is not None and layer.cut == "gathered"]
        call = _Call(again=again, experts=of, added=added, biased=bias is not None, gathered=tuple(gathered))
        self._checks.after_forward(layer, x, y, call)
        return y


_MULTIPLY = {
    functional.linear, torch._grouped_mm, torch.matmul, torch.mm, torch.bmm, Tensor.matmul, Tensor.__matmul__,
    torch.ops.transformers.grouped_mm_fallback, experts.multiply,
}  # fmt: skip


def _added(layer: Product, proxy: Any) -> _Added:
    """Of one adapter PEFT has the factors, from 0.21 on; of several at once, and before 0.21, the sum."""
    if not hasattr(proxy, "lhs"):
        return _added_sum(layer, proxy.delta_weight.detach())
    left, right, scaling = proxy.lhs.detach(), proxy.rhs.detach(), proxy.scaling
    if layer.transposed:
        left, right = right.mT, left.mT
    with _unseen(layer.weight.device):
        one, two = scaling * left.float(), right.float()
        (forward, v), (backward, u) = ((layer.sides[each].checksum, layer.sides[each].vectors) for each in _DIRECTIONS)
        by_column = (two * (one.mT @ one @ two)).sum(1)  # squares of the norms, [experts, in]
        by_row = (one * (one @ (two @ two.mT))).sum(2)
        return _Added(
            factors=(left, right, scaling),
            checksums={"forward": forward + two.mT @ (one.mT @ v), "backward": backward + one @ (two @ u)},
            norm=by_column.sum(1).amax().sqrt(),
            largest=(by_column.amax().sqrt(), by_row.amax().sqrt()),
        )


def _added_sum(layer: Product, delta: Tensor) -> _Added:
    delta = delta.mT if layer.transposed else delta
    with _unseen(layer.weight.device):
        checksums = {each: layer.sides[each].checksum.clone() for each in _DIRECTIONS}
        norms, columns, rows = [], [], []
        for expert, part in enumerate(delta):  # one at a time: in float32 they take as much memory as the weights
            one = part.float()
            checksums["forward"][expert] += one.mT @ layer.sides["forward"].vectors
            checksums["backward"][expert] += one @ layer.sides["backward"].vectors
            squares = one.square()
            norms.append(squares.sum())
            columns.append(squares.sum(0).amax())
            rows.append(squares.sum(1).amax())
        return _Added(
            factors=(delta, None, 1.0),
            checksums=checksums,
            norm=torch.stack(norms).amax().sqrt(),
            largest=(torch.stack(columns).amax().sqrt(), torch.stack(rows).amax().sqrt()),
        )


@contextmanager
def _unseen(device: torch.device) -> Iterator[None]:
    """Nothing within is recorded: not by autograd, and not by selective recomputation, which would hand it out."""
    with _disable_current_modes(), torch.no_grad(), torch.autocast(device.type, enabled=False):
        yield


def _bytes_of(layers: Iterable[Product]) -> int:
    return sum(part.nbytes for layer in layers for part in layer.on_host)


def _random_vectors(size: int, generator: torch.Generator) -> Tensor:
    """Signs, which miss no single wrong element, and normal numbers, which tell swapped columns apart; [size, 3]."""
    signs = torch.randint(0, 2, (size,), generator=generator) * 2.0 - 1
    return torch.cat([signs[:, None], torch.randn(size, _VECTORS - 1, generator=generator)], dim=1)


def _weight_residuals(weight: Tensor, vectors: Tensor, checksum: Tensor) -> Tensor:
    """Of each row of a weight the largest of its residuals over its bound, float32 [rows]."""
    step = max(1, _CHUNK // weight.shape[1])
    bound = _T * _FLOAT32 * 2 * math.sqrt(weight.shape[1])
    parts = []
    for begin in range(0, len(weight), step):
        wide = weight[begin : begin + step].float()
        found = torch.addmm(checksum[begin : begin + step], wide, vectors, beta=-1).abs_().amax(1)
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
