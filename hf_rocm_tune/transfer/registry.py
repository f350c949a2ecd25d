"""What is known of device tensors, by the storage they share, without keeping them alive.

Keyed by storage, so that views, ``param.data = moved`` and a ``Parameter`` made from a moved tensor are known too, and
a new tensor that happens to get the same address is not.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from hf_rocm_tune.transfer.digest import Digest, QueuedDigests
from hf_rocm_tune.transfer.shipment import Shipment


@dataclass
class Entry:
    """Provenance of one storage.

    Attributes:
        provenance: ``transferred`` (verified on the way), ``derived`` (computed from such), ``unverified``.
        reason: why it counts as derived or unverified.
        shipment: of a batch, for its sources and verdict; None for weights, whose host source is not kept.
        digest: of all bytes of the storage, as they arrived or were computed; not known for batches.
    """

    provenance: str
    reason: str | None = None
    shipment: Shipment | None = None
    digest: Digest | QueuedDigests | None = None

    def known_digest(self) -> Digest | None:
        """The digest; waits for one that is still queued."""
        if isinstance(self.digest, QueuedDigests):
            (self.digest,) = self.digest.result()
        return self.digest


class Registry:
    """Entries by storage. Each step is one dict operation, so it needs no lock, not even in a weak reference's end."""

    def __init__(self) -> None:
        self._entries: dict[int, tuple[weakref.ref[torch.UntypedStorage], Entry]] = {}

    def put(self, tensor: Tensor, entry: Entry) -> None:
        """Remember `entry` for the storage of `tensor`, in place of what was known before."""
        storage = tensor.untyped_storage()
        key = storage._cdata
        self._entries[key] = (weakref.ref(storage, partial(self._forget, key)), entry)

    def get(self, tensor: Tensor) -> Entry | None:
        """What is known of the storage of `tensor`; None for sparse tensors, which have none."""
        if tensor.layout is not torch.strided:
            return None
        storage = tensor.untyped_storage()
        reference, entry = self._entries.get(storage._cdata, (None, None))
        return entry if reference is not None and reference() is storage else None

    def __len__(self) -> int:
        return len(self._entries)

    def _forget(self, key: int, reference: weakref.ref[torch.UntypedStorage]) -> None:
        known = self._entries.get(key)
        if known is not None and known[0] is reference:
            del self._entries[key]
