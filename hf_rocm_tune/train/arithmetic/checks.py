"""The checks of products in a training, in the order in which the trainer calls them."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn

from hf_rocm_tune.errors import UsageError
from hf_rocm_tune.models import experts, loss, products
from hf_rocm_tune.models.quantised import Watch, dequantised, on_dequantised
from hf_rocm_tune.models.trainer_parts import OwningTrainer
from hf_rocm_tune.train.arithmetic.bounds import SHARE, share_of_step, weight_residuals
from hf_rocm_tune.train.arithmetic.checksums import HostWeights
from hf_rocm_tune.train.arithmetic.experts import ProductsWithin
from hf_rocm_tune.train.arithmetic.products import (
    Call,
    CheckedSide,
    HeldProduct,
    Product,
    Side,
    bytes_of,
    frozen_products,
    unrecorded,
)
from hf_rocm_tune.train.arithmetic.verdict import ROWS, ProductVerdicts, StepVerdict
from hf_rocm_tune.transfer import Mover

Mode = Literal["off", "sampled", "every"]
FIRST_STEPS = 2
"""Steps after a start in which all products are checked."""


class ArithmeticChecks:
    """Checks of the products with frozen weights. The trainer owns one, and calls it in the order of the methods.

    Attributes:
        refusal: why nothing is checked; None if something is.
        period: steps in which each layer is checked once.
    """

    def __init__(self, mode: Mode, mover: Mover) -> None:
        self._mode = mode
        self._mover = mover
        self._report = mover.report
        self._weights = HostWeights(mover)
        self._verdicts = ProductVerdicts(mover, self._weights)
        self._products: list[Product] = []
        self._due: list[Product] = []
        self._handles: list[Any] = []
        # Of this step, by device: the largest residual of each product over its bound, shape [].
        self._residuals: dict[torch.device, list[tuple[CheckedSide, Tensor]]] = defaultdict(list)
        self._begun = 0
        self._paused = False
        self._all_placed = True  # the checksums of all layers are on the device
        self._head: nn.Module | None = None  # whose products a fused loss computes
        self.refusal: str | None = "training has not begun"
        if mode == "off":
            self.refusal = "--check_arithmetic off"
        self.period = 0

    @property
    def failure(self) -> str:
        """The sentence on the product that ended the run."""
        return self._verdicts.failure

    # ---- a training begins --------------------------------------------------------------------------------------

    def prepare(self, trainer: OwningTrainer, changed: Callable[[], None]) -> None:
        """A training begins. ``changed`` is called when a frozen weight is no longer what was verified; it raises."""
        if self._mode == "off" or self._products:
            return
        if trainer.args.torch_compile:
            self.refusal = "--torch_compile: compiled products have no place to check them"
        elif trainer.is_sharded and trainer.full_state is None:
            self.refusal = "the weights are sharded over ranks by others than hf-rocm-tune"
        else:
            self._products = self._checkable(trainer)
            self.refusal = None if self._products else "no layer is frozen"
            self._weights.changed = changed
            self._weights.streamer = trainer.streamer
            self._send_checksums()
        if self._products:
            columns = [layer.columns for layer in self._products]
            chosen = [layer.chosen for layer in self._products]
            often = 1.0
            if self._mode != "every":
                often = min(1.0, SHARE / share_of_step(columns, chosen))
            self._at_once = max(1, int(often * len(self._products)))
            self.period = math.ceil(len(self._products) / self._at_once)

    def _checkable(self, trainer: OwningTrainer) -> list[Product]:
        """The products whose operands and results are seen; sets the head whose products a fused loss computes."""
        precision = {"fp16": torch.float16, "bf16": torch.bfloat16}.get(trainer.accelerator.mixed_precision)
        layers = frozen_products(trainer.model, computed_in=precision, own_parts=trainer.get_tp_size() > 1)
        # Fused losses multiply with the head's weight without calling its module; TRL's own ones are not seen.
        fused = any(base.__module__.startswith("trl.") for base in type(trainer).__mro__)
        find_head = getattr(trainer.model, "get_output_embeddings", None)
        self._head = None
        if fused and find_head is not None:
            self._head = find_head()
        ours = fused and trainer.loss_context is loss.one_pass_loss

        def is_seen(layer: Product) -> bool:
            if layer.module is not self._head:
                return True
            return ours and not layer.cut and layer.dtype == layer.weight.dtype != torch.float16

        return [layer for layer in layers if is_seen(layer)]

    def _send_checksums(self) -> None:
        """Checksums of all layers, sent to each device in one transfer; those of many experts wait for their turn."""
        self._weights.compute(self._products)
        of_experts = bytes_of(layer for layer in self._products if layer.experts)
        self._all_placed = self._mode == "every" or of_experts <= experts.CHECKSUMS_OF_EXPERTS
        self._weights.place([layer for layer in self._products if self._all_placed or not layer.experts])

    # ---- a step -------------------------------------------------------------------------------------------------

    def begin_step(self, step: int) -> None:
        """Choose the layers of this step, and hook into them."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._verdicts.begin_step(step)
        self._residuals.clear()
        layers = len(self._products)
        if not layers:
            return
        self._begun += 1
        if self._begun <= FIRST_STEPS:
            self._due = self._products
        else:
            first = step * self._at_once
            self._due = [self._products[(first + number) % layers] for number in range(self._at_once)]
        if not self._all_placed:
            self._due = self._weights.bring(self._due, self._products)
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
            mode = ProductsWithin(own, self.after_forward)
            self._handles.append(module.register_forward_pre_hook(mode.begin, with_kwargs=True))
            self._handles.append(module.register_forward_hook(mode.end, always_call=True))
        self._report.count("arithmetic", products=layers, checked=len(self._due))

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Within the block nothing is checked: a trainer generates answers, token by token."""
        before = self._paused
        self._paused = True
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
            self.after_forward(layer, arguments[0], output, Call(again=module.forward))

    def after_forward(self, layer: Product, x: Tensor, y: Tensor, call: Call) -> None:
        """Check a product ``y`` of ``x``, and in backward the product with the gradient of ``y``."""
        if self._paused or x.numel() == 0:
            return
        if layer.quantised and not x.is_floating_point():
            raise UsageError(
                f"{layer.name}: the model's own code casts its input to the dtype of its weight, which holds bytes in "
                f"{layer.quantised}: train without --load_in_4bit and --load_in_8bit"
            )
        dtype = layer.dtype_for(x, y)
        if dtype is None:
            return
        self._check(layer, "forward", x, y, dtype, call)
        if x.requires_grad and y.requires_grad:
            gradients: list[Tensor] = []
            y.register_hook(gradients.append)
            x.register_hook(lambda dx: self._check(layer, "backward", gradients.pop(), dx, dtype, call))

    def _check(
        self, layer: Product, side: Side, operand: Tensor, result: Tensor, dtype: torch.dtype, call: Call
    ) -> None:
        """Queue the residuals of a product on the device; ``operand`` and ``result``: any shape, columns last."""
        checked = layer.sides[side]
        with unrecorded(operand.device):
            into, out = layer.columns_of(side)
            operand = operand.detach().reshape(-1, into)
            result = result.detach().reshape(-1, out)
            residuals = layer.residuals(side, operand, result, dtype, call)
            checked.spread = 1.0
            if dtype == torch.float32:
                checked.spread = math.sqrt(2 * into / 3)
            if self._is_to_be_held(checked, residuals):
                kept = operand.to(dtype, copy=True)
                checked.held = HeldProduct(kept, result.clone(), residuals, dtype, call.to_keep())

    def _is_to_be_held(self, checked: CheckedSide, residuals: Tensor) -> bool:
        """Record the largest residual; whether the product is to be held, in a step that is computed again."""
        worst = residuals.amax()
        self._residuals[worst.device].append((checked, worst))
        return self._verdicts.holding and checked.held is None and not worst.item() <= checked.level

    def _check_head(
        self, layer: Product, side: Side, operand: Tensor, result: Tensor, dtype: torch.dtype, *again: Any
    ) -> None:
        if self._paused:
            return
        forward, *backward = again
        back = backward[0] if backward else None
        self._check(layer, side, operand, result, dtype, Call(again=forward, back=back))

    def _check_weight(self, layer: Product, weight: Tensor, expert: int = 0) -> None:
        """Check a dequantised weight, [out, in], or an expert's as it is stored."""
        checked = layer.sides["dequantised"]
        columns = tuple(weight.shape)
        if not layer.transposed:
            columns = columns[::-1]
        if self._paused or columns != layer.columns:
            return

        def again(_: Tensor) -> Tensor:
            if layer.experts:
                return experts.unpacked(layer.weight, expert)
            return dequantised(layer.module)

        with unrecorded(weight.device):
            residuals = weight_residuals(weight, checked.vectors, checked.checksum[expert])
            if self._is_to_be_held(checked, residuals):
                rows = residuals.topk(min(ROWS, len(residuals))).indices
                call = Call(again=again, expert=expert)
                checked.held = HeldProduct(rows, weight[rows].clone(), residuals, weight.dtype, call)

    # ---- the step is judged -------------------------------------------------------------------------------------

    def pending(self) -> list[Tensor]:
        """The residuals of this step, one tensor a device: to be read with the step's loss."""
        return [torch.stack([worst for _, worst in on_device]) for on_device in self._residuals.values()]

    def judge(self, numbers: Sequence[Sequence[float]], *, can_repeat: bool) -> StepVerdict:
        """What to do with the step, by the numbers of `pending` as read, a row for each tensor, on this rank alone."""
        largest = self._largest(numbers)
        flagged, clean = [], []
        for layer in self._due:
            for side, checked in layer.sides.items():
                number = largest.get(id(checked), 0.0)
                if not number <= checked.level:  # NaN too
                    checked.flagged = number
                    flagged.append((layer, side))
                elif id(checked) in largest:
                    clean.append((checked, number))
        if flagged:
            again = StepVerdict.REPEAT if can_repeat else StepVerdict.SKIP
            return self._verdicts.accuse(flagged, again)
        for checked, number in clean:
            checked.learn(number)
        return self._verdicts.clear()

    def _largest(self, numbers: Sequence[Sequence[float]]) -> dict[int, float]:
        """The largest residual of each side by the side's id, NaN above all."""
        largest: dict[int, float] = {}
        residuals = 0
        for on_device, row in zip(self._residuals.values(), numbers, strict=True):
            for (checked, _), number in zip(on_device, row, strict=True):
                residuals += 1
                known = largest.setdefault(id(checked), 0.0)
                if not (number <= known or math.isnan(known)):
                    largest[id(checked)] = number
        self._report.count("arithmetic", residuals=residuals)
        self._residuals.clear()
        return largest

    def describe(self) -> dict[str, Any]:
        """For the report."""
        never_seen = [layer for layer in self._products if not any(side.seen for side in layer.sides.values())]
        return {
            "mode": self._mode,
            "refusal": self.refusal,
            "layers": len(self._products),
            "never_seen": len(never_seen),
            "steps_to_check_all": self.period,
            "library": products.current_library(self._mover.device),
        }
