"""What a training step takes of the card, part by part, and whether it fits.

    there during the whole step   weights, quantisation constants, adapters, optimizer state, gradient buckets
    at the peak                   gradients, activations kept for backward, working memory of the stretch that peaks
    around it                     allocator slack, the driver's context, what a desktop holds

The peak is the highest of several moments (backward of the loss, of a layer, of the embeddings, the optimizer's step,
loading), never the sum of all that a step ever holds. Counted: everything but the last three parts, which are
assumptions or readings and are labelled so. Pure arithmetic: no torch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

from hf_rocm_tune.memory.plan_optimizers import Optimizer, Trained
from hf_rocm_tune.memory.plan_trace import Peak, Trace, Work

GIB = 1 << 30

#: Assumed, not measured on a 7900 XT: what the runtime holds before the first tensor, kernels and workspaces included.
CONTEXT_BYTES = GIB // 2
#: Assumed: share of what comes and goes that the caching allocator cannot reuse, and a floor.
SLACK_SHARE, SLACK_FLOOR = 0.05, GIB // 10
#: Assumed where it cannot be read: a desktop session that draws on the card.
DESKTOP_BYTES = GIB


class WeightLike(Protocol):
    """A tensor that is there during the whole step; see ``models.shapes_model.Weight``."""

    @property
    def group(self) -> str: ...
    @property
    def layer(self) -> int: ...
    @property
    def elements(self) -> int: ...
    @property
    def nbytes(self) -> int: ...
    @property
    def itemsize(self) -> int: ...
    @property
    def trained(self) -> bool: ...


@dataclass(frozen=True, kw_only=True)
class Weights:
    """Totals of a model as it is trained.

    Args:
        parts: bytes by group: ``weights``, ``quantisation``, ``adapters``.
        trained: the tensors that have gradients.
        parameters: of the model, adapters not counted, packed ones as what they stand for.
        largest: bytes that the largest tensor has before it is quantised; 0 where nothing is.
    """

    parts: Mapping[str, int]
    trained: tuple[Trained, ...]
    parameters: int
    largest: int

    @classmethod
    def total(cls, tensors: Iterable[WeightLike], layer_of: tuple[int, ...]) -> Weights:
        """Adds up the tensors of the recorded layers, each as often as the real model has such a layer."""
        parts = {"weights": 0, "quantisation": 0, "adapters": 0}
        trained, parameters, largest = [], 0, 0
        for tensor in tensors:
            count = 1 if tensor.layer < 0 else layer_of.count(tensor.layer)
            part = {"adapter": "adapters", "quantisation": "quantisation"}.get(tensor.group, "weights")
            parts[part] += tensor.nbytes * count
            if tensor.trained:
                trained.append(Trained(elements=tensor.elements, itemsize=tensor.itemsize, count=count))
            if part == "weights":
                parameters += tensor.elements * count
                if tensor.elements * tensor.itemsize > tensor.nbytes:  # packed
                    largest = max(largest, 2 * tensor.elements)
        return cls(parts=parts, trained=tuple(trained), parameters=parameters, largest=largest)


@dataclass(frozen=True, kw_only=True)
class CardMemory:
    """The memory of one card, in bytes.

    Args:
        name: as it is shown.
        usable: what torch can see of it.
        desktop: held by others.
        desktop_source: how that is known.
        context: held by the runtime.
        bandwidth: bytes a second, for the estimate of speed.
    """

    name: str
    usable: int
    desktop: int = DESKTOP_BYTES
    desktop_source: str = "assumed"
    context: int = CONTEXT_BYTES
    bandwidth: float = 800e9

    @property
    def free(self) -> int:
        """What is left for torch's allocator."""
        return self.usable - self.desktop - self.context


@dataclass(frozen=True, kw_only=True)
class Case:
    """One way to run a step.

    Args:
        micro_batch: sequences on one card at a time.
        length: tokens of a sequence.
        checkpointing: activations are recomputed.
        packing: a row holds several sequences, and all rows become one (TRL's ``bfd``).
        accumulation: micro-batches to one optimizer step.
        cards: that hold the whole model each and average gradients.
    """

    micro_batch: int
    length: int
    checkpointing: bool
    packing: bool = False
    accumulation: int = 1
    cards: int = 1

    @property
    def content(self) -> str:
        """``packed``; ``plain`` for a single sequence, which needs no padding; else ``padded``."""
        if self.packing:
            return "packed"
        return "plain" if self.micro_batch == 1 else "padded"

    @property
    def shape(self) -> tuple[int, int]:
        """Rows and tokens of the tensors on the card."""
        return (1, self.micro_batch * self.length) if self.packing else (self.micro_batch, self.length)


@dataclass(frozen=True, kw_only=True)
class Variant:
    """A model and a method.

    Args:
        name: ``lora``, ``qlora`` or ``full``.
        weights: its totals.
        trace: gives the recorded step for a case, scaled to its batch and length.
        exact: the same, recorded at the case's own length.
        optimizer: the one that trains it.
        can_checkpoint: whether activations can be recomputed.
    """

    name: str
    weights: Weights
    trace: Callable[[Case], Trace]
    exact: Callable[[Case], Trace]
    optimizer: Optimizer
    can_checkpoint: bool = True


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """What a case takes.

    Args:
        variant: name of the method.
        case: the case.
        parts: bytes at the peak, by part, in the order in which they are shown.
        moment: where the peak is.
        moments: highest level at each kind of moment, in bytes of torch's allocator.
        total: bytes of the card, everything included.
        spare: bytes left over; negative: missing.
        work: what one micro-batch computes.
        notes: what a reader should know.
    """

    variant: str
    case: Case
    parts: Mapping[str, float]
    moment: str
    moments: Mapping[str, float]
    total: float
    spare: float
    work: Work
    notes: tuple[str, ...] = field(default=())

    @property
    def fits(self) -> bool:
        """Whether nothing is missing."""
        return self.spare >= 0

    @property
    def allocated(self) -> float:
        """The allocator's peak: without slack, context and desktop. What a measurement is compared with."""
        return max(self.moments.values())


def estimate(variant: Variant, case: Case, card: CardMemory) -> Estimate:
    """What one case takes of a card."""
    weights, trace = variant.weights, variant.trace(case)
    batch, length = case.shape
    peak = trace.peak(batch, length, accumulating=case.accumulation > 1)
    fixed = _fixed(variant, case)
    held = sum(fixed.values())
    moments = {
        f"{role} pass" if role in ("forward", "backward") else role: held + level
        for role, level in peak.by_role.items()
    }
    moments["optimizer step"] = held + peak.all_gradients + variant.optimizer.taken(weights.trained)
    moments["loading"] = weights.parts["weights"] + weights.parts["quantisation"] + weights.largest
    at_peak = _at_peak(peak, moments, held)
    slack = SLACK_SHARE * (sum(at_peak.values())) + SLACK_FLOOR
    parts = {
        **fixed,
        **at_peak,
        "allocator slack": slack,
        "context": float(card.context),
        "desktop": float(card.desktop),
    }
    total = sum(parts.values())
    return Estimate(
        variant=variant.name,
        case=case,
        parts=parts,
        moment=_moment(peak, moments),
        moments=moments,
        total=total,
        spare=card.usable - total,
        work=trace.work(batch, length),
    )


def _fixed(variant: Variant, case: Case) -> dict[str, float]:
    """Parts that are there during the whole step."""
    parts = variant.weights.parts
    trained = variant.weights.trained
    state = 0 if variant.optimizer.paged else variant.optimizer.kept(trained)
    fixed = {
        "weights": float(parts["weights"]),
        "quantisation constants": float(parts["quantisation"]),
        "adapters": float(parts["adapters"]),
        "optimizer state": float(state),
    }
    if case.cards > 1:
        fixed["gradient buckets"] = float(sum(tensor.nbytes for tensor in trained))
    return fixed


def _at_peak(peak: Peak, moments: Mapping[str, float], held: float) -> dict[str, float]:
    """Parts that exist at the highest moment."""
    highest = max(moments, key=lambda name: moments[name])
    if highest == "optimizer step":
        kept, quadratic, gradients = 0.0, 0.0, peak.all_gradients
    elif highest == "loading":
        kept, quadratic, gradients = 0.0, 0.0, 0.0
    else:
        kept, quadratic, gradients = peak.kept, peak.quadratic, peak.gradients
    return {
        "gradients": gradients,
        "activations kept": kept - quadratic,
        "attention masks kept": quadratic,
        "working memory": moments[highest] - held - kept - gradients,
    }


_MOMENTS = {
    "start": "embeddings and masks",
    "head": "loss, forward",
    "loss": "loss, backward",
    "end": "backward of the embeddings",
}


def _moment(peak: Peak, moments: Mapping[str, float]) -> str:
    highest = max(moments, key=lambda name: moments[name])
    if peak.role in ("forward", "backward") and highest == f"{peak.role} pass":
        return f"{peak.role} of layer {peak.layer + 1}"
    return _MOMENTS.get(highest, highest)
