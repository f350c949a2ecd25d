"""One bucket of DistributedDataParallel: what a rank put in, and where its average came out."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from hf_rocm_tune.distributed.projections import MAGNITUDE, project

if TYPE_CHECKING:
    from torch import distributed as dist


@dataclass(frozen=True, kw_only=True)
class _Place:
    """A parameter in a bucket: its elements lie there from `start` on, the dimensions in memory order."""

    parameter: nn.Parameter
    start: int
    order: tuple[int, ...]

    @property
    def shape(self) -> list[int]:
        return [self.parameter.shape[dimension] for dimension in self.order]


@dataclass(frozen=True, kw_only=True, eq=False)
class Bucket:
    """The gradients of one bucket.

    Attributes:
        index: DistributedDataParallel's number of it.
        number: counts the buckets of the whole run, alike on all ranks; for injected faults.
        sent: the local gradients as they went into the average, 1-dimensional, kept until the verdict.
        wire: dtype in which the ranks' gradients are added up; None where the result is not to be their average, but
            near it, and nothing is projected.
        projected: `project` of what travels, taken from the bucket itself, not from a copy; float64[blocks, 3].
    """

    index: int
    number: int
    sent: Tensor
    wire: torch.dtype | None
    projected: Tensor
    places: tuple[_Place, ...]

    @classmethod
    def before_averaging(
        cls,
        bucket: dist.GradBucket,  # type: ignore[name-defined]
        *,
        number: int,
        wire: torch.dtype | None,
        copied: bool,
    ) -> Bucket:
        """Record a bucket that is about to be averaged.

        Args:
            bucket: as the communication hook gets it.
            number: see `Bucket`.
            wire: see `Bucket`.
            copied: whether `sent` must be a copy, because the average will be written over the bucket.
        """
        buffer = bucket.buffer()
        places, start = [], 0
        for parameter in bucket.parameters():
            places.append(_Place(parameter=parameter, start=start, order=_order_in_bucket(parameter)))
            start += parameter.numel()
        return cls(
            index=bucket.index(),
            number=number,
            sent=buffer.clone() if copied else buffer,
            wire=wire,
            projected=_project_sent(buffer, wire),
            places=tuple(places),
        )

    def project_sent(self) -> Tensor:
        """What `projected` was taken from, projected again from `sent`."""
        return _project_sent(self.sent, self.wire)

    def project_averaged(self, average: Tensor) -> Tensor:
        """`project` of what came out, block by block beside `projected`."""
        return self.projected if self.wire is None else project(average, wire=self.wire)

    @property
    def name(self) -> str:
        """For incidents and for the patterns of injected faults."""
        return f"bucket {self.index}"

    def averaged(self) -> Tensor:
        """What the optimizer will read: the parameters' gradients as they are now, laid out like `sent`.

        A parameter that no rank used has no gradient; its place in the bucket is zero.
        """
        return torch.cat([self._flat(place) for place in self.places])

    def write(self, average: Tensor) -> None:
        """Put `average`, laid out like `sent` and on the same device, into the parameters' gradients."""
        for place in self.places:
            gradient = place.parameter.grad
            if gradient is not None:
                piece = average[place.start : place.start + gradient.numel()].view(place.shape)
                gradient.permute(place.order).copy_(piece)  # device: both are on the parameter's device

    def owners(self, first: int, last: int) -> Iterator[nn.Parameter]:
        """The parameters that have elements `first` to `last` of the bucket."""
        for place in self.places:
            if place.start <= last and first < place.start + place.parameter.numel():
                yield place.parameter

    def _flat(self, place: _Place) -> Tensor:
        gradient = place.parameter.grad
        if gradient is None:
            return self.sent.new_zeros(place.parameter.numel())
        return gradient.detach().permute(place.order).reshape(-1)


def _project_sent(flat: Tensor, wire: torch.dtype | None) -> Tensor:
    if wire is None:
        return torch.empty(0, MAGNITUDE + 1, dtype=torch.float64, device=flat.device)
    return project(flat.to(wire))


def _order_in_bucket(parameter: nn.Parameter) -> tuple[int, ...]:
    """The dimensions as torch's reducer lays the gradient out (``initialize_bucket_views``): as the parameter is laid
    out, where that is dense. `GradBucket.gradients` does not heed that: its views are right for contiguous ones only.
    """
    order = tuple(sorted(range(parameter.dim()), key=parameter.stride, reverse=True))
    return order if parameter.permute(order).is_contiguous() else tuple(range(parameter.dim()))
