"""Frozen weights as the host has them: their checksums, sent to the device, and rows to compare a product with.

Of a sharded weight each rank sums up its rows, and the ranks add; a part that its rank computes with is a weight.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from hf_rocm_tune.host_group import host_group
from hf_rocm_tune.models import experts
from hf_rocm_tune.models.quantised import host_weight
from hf_rocm_tune.models.shards import local, rows_of
from hf_rocm_tune.models.streaming import Streamer
from hf_rocm_tune.train.arithmetic.bounds import VECTORS, random_vectors
from hf_rocm_tune.train.arithmetic.products import Product, bytes_of
from hf_rocm_tune.transfer import Mover, digest, host_copy


class HostWeights:
    """See the module's description.

    Attributes:
        streamer: brings layers that are streamed to the device; None: there are none.
        changed: called when a frozen weight is no longer what was verified; it raises.
        vectors: the random vectors by their number of rows, each float32 [rows, 3].
    """

    def __init__(self, mover: Mover) -> None:
        self._mover = mover
        self.streamer: Streamer | None = None
        self.changed: Callable[[], None] = lambda: None
        self.vectors: dict[int, Tensor] = {}

    # ---- checksums ----------------------------------------------------------------------------------------------

    def compute(self, layers: Sequence[Product]) -> None:
        """Draw the vectors, and compute the checksums of all layers on the host."""
        generator = torch.Generator().manual_seed(0x5EED)
        sizes = sorted({size for layer in layers for size in layer.columns})
        self.vectors = {size: random_vectors(size, generator) for size in sizes}
        for layer in layers:
            self.checksum(layer)

    def checksum(self, layer: Product) -> None:
        """``W^T v``, ``W u`` and ``b . v`` on the host; sets the layer's norms."""
        into, out = layer.columns
        count = max(layer.experts, 1)
        forward = torch.zeros(count, into, VECTORS)
        backward = torch.zeros(count, out, VECTORS)
        by_column = torch.zeros(count, into)  # squares of norms
        by_row = torch.zeros(count, out)
        for expert, rows, weight in self.rows(layer):
            forward[expert] += weight.T @ self.vectors[out][rows]
            backward[expert, rows] = weight @ self.vectors[into]
            squares = weight.square()
            by_column[expert] += squares.sum(0)
            by_row[expert, rows] = squares.sum(1)
        offset = torch.zeros(1, VECTORS)
        of_bias = torch.zeros(1)
        if not layer.experts and layer.module.bias is not None:  # experts' biases are added after their products
            values = self.verified_copy(layer.module.bias).float()
            first = _first_row(layer, layer.module.bias)
            offset += values @ self.vectors[out][first : first + len(values)]
            of_bias += values.square().sum()
        if layer.cut == "gathered":  # each rank has added up its rows
            for own_part in (forward, backward, by_column, by_row, offset, of_bias):
                dist.all_reduce(own_part, group=host_group())
        layer.norm = math.sqrt(float(by_row.double().sum(1).max()))
        layer.largest = math.sqrt(float(by_column.max())), math.sqrt(float(by_row.max()))
        layer.bias_norm = math.sqrt(float(of_bias))
        layer.on_host = [forward, backward, offset]

    # ---- on the device ------------------------------------------------------------------------------------------

    def place(self, layers: Sequence[Product]) -> None:
        """Send the checksums of these layers to their devices, to each in one transfer."""
        by_device: dict[torch.device, list[Product]] = defaultdict(list)
        for layer in layers:
            by_device[layer.weight.device].append(layer)
        for device, on_device in by_device.items():
            self._place_on(device, on_device)

    def _place_on(self, device: torch.device, layers: Sequence[Product]) -> None:
        sizes = sorted({size for layer in layers for size in layer.columns})
        parts = [self.vectors[size] for size in sizes]
        for layer in layers:
            parts += layer.on_host
        whole = torch.cat([part.flatten() for part in parts])
        sent = self._mover.move_to(device, whole, name="checksums of weights")
        pieces = sent.split([part.numel() for part in parts])
        placed = iter([piece.view(part.shape) for piece, part in zip(pieces, parts, strict=True)])
        vectors = {size: next(placed) for size in sizes}
        for layer in layers:
            forward, backward, offset = next(placed), next(placed), next(placed)
            into, out = layer.columns
            biased = offset if layer.bias_norm else None
            layer.put("forward", vectors=vectors[out], checksum=forward, offset=biased)
            if layer.quantised == "4 bit" and layer.transposed:  # before the product, whose error it explains
                layer.put("dequantised", vectors=vectors[out], checksum=forward)
            elif layer.quantised == "4 bit":
                layer.put("dequantised", vectors=vectors[into], checksum=backward)
            layer.put("backward", vectors=vectors[into], checksum=backward)

    def bring(self, wanted: Sequence[Product], layers: Sequence[Product]) -> list[Product]:
        """Have the checksums of these experts on the device in place of others', as many as are allowed there.

        Returns those of ``wanted`` whose checksums are there; ``layers``: all.
        """
        due = []
        held = 0  # bytes of experts' checksums
        for layer in wanted:
            size = 0
            if layer.experts:
                size = bytes_of([layer])
            if not size or not held or held + size <= experts.CHECKSUMS_OF_EXPERTS:
                due.append(layer)
                held += size
        for layer in layers:
            if layer.experts and layer not in due:
                for side in layer.sides.values():
                    side.vectors = side.checksum = torch.empty(0)
        self.place([layer for layer in due if layer.experts and not _is_placed(layer)])
        return due

    # ---- rows of a weight ---------------------------------------------------------------------------------------

    def rows(
        self, layer: Product, only: Collection[int] | None = None, gathered: Sequence[Tensor] = ()
    ) -> Iterator[tuple[int, slice, Tensor]]:
        """Rows of the weight ``[out, in]`` in float32 as the layer computes with them, and the expert, 0 without.

        ``only``: of these experts; ``gathered``: in place of this rank's rows of a sharded weight; the traffic's checks
        verify it.
        """
        if layer.experts:
            wanted: Sequence[int] = range(layer.experts)
            if only is not None:
                wanted = sorted(only)
            weights = experts.host_weights(layer.weight, wanted, layer.transposed, layer.dtype, self.verified_copy)
            for expert, weight in zip(wanted, weights, strict=True):
                yield expert, slice(0, len(weight)), weight
        elif gathered:
            yield 0, slice(0, layer.columns[1]), host_copy(gathered[0]).float()
        else:
            first = _first_row(layer, layer.weight)
            for rows, weight in host_weight(layer.module, layer.dtype, self.verified_copy):
                yield 0, slice(rows.start + first, rows.stop + first), weight

    def verified_copy(self, tensor: Tensor) -> Tensor:
        """A tensor's bytes on the host, as verified when it was loaded, where that is known."""
        tensor = local(tensor)
        if self.streamer is not None:
            waiting = self.streamer.waiting(tensor)
            if waiting is not None:
                return waiting
        copied = host_copy(tensor.detach())
        known = self._mover.digest_of(tensor)
        if known is not None and digest(copied) != known:
            self.changed()
        return copied


def _is_placed(layer: Product) -> bool:
    return any(side.checksum.numel() for side in layer.sides.values())


def _first_row(layer: Product, tensor: Tensor) -> int:
    """The number of this rank's first row in what is multiplied with."""
    if layer.cut != "gathered" or not isinstance(tensor, DTensor):
        return 0
    return rows_of(tensor.device_mesh.get_local_rank(), tensor.device_mesh.size(), len(tensor))[0]
