"""A recorder of one training step on meta tensors: which storage comes into being when, and when it goes.

It sees every operation after autograd, so saved tensors, gradients and recomputation are counted because they are
there, not because a formula says so. A storage counts once, whatever views it has; parameters and buffers, which exist
before the step, do not count.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from hf_rocm_tune.errors import UsageError
from hf_rocm_tune.models.shapes_kernels import Kernels, tensors_in

GLOBAL = -1


@dataclass(frozen=True, kw_only=True)
class Segment:
    """A stretch of the step.

    Args:
        role: ``start`` (embeddings, masks), ``forward``, ``head`` (last norm, head, loss), ``loss`` (their backward),
            ``backward``, ``end`` (backward of the embeddings), in this order.
        layer: position among the recorded layers; ``GLOBAL`` for a stretch that belongs to none.
        flops: floating point operations of its matrix multiplications.
        written: bytes of all tensors that came into being in it.
        launches: operations that wrote a tensor.
    """

    role: str
    layer: int
    flops: int
    written: int
    launches: int


@dataclass(frozen=True, kw_only=True)
class Tape:
    """What was recorded of one step.

    Args:
        batch, length: sequences and tokens of each.
        segments: in order of time.
        events: (segment, storage, +1 or -1) in order of time; 0 where a storage has become a parameter's gradient.
        sizes: bytes of each storage.
        owners: segment in which each storage came into being.
        tiles: storages whose size stops growing with the batch at ``tile_tokens`` tokens.
        tile_tokens: see there.
    """

    batch: int
    length: int
    segments: tuple[Segment, ...]
    events: tuple[tuple[int, int, int], ...]
    sizes: tuple[int, ...]
    owners: tuple[int, ...]
    tiles: frozenset[int]
    tile_tokens: int


@dataclass
class _Open:
    role: str
    layer: int
    flops: int = 0
    written: int = 0
    launches: int = 0


@dataclass
class _Log:
    segments: list[_Open] = field(default_factory=list)
    events: list[tuple[int, int, int]] = field(default_factory=list)
    sizes: list[int] = field(default_factory=list)
    owners: list[int] = field(default_factory=list)


#: A step of more operations is not recorded: it would take many seconds.
MOST_OPERATIONS = 20_000


class TooManyOperations(UsageError):
    """A step of so many operations that to record it would take too long: most often it loops over its tokens."""


class Recorder(TorchDispatchMode):
    """Records what happens inside its ``with`` block.

    Raises :class:`TooManyOperations` in there when it goes on for too long.

    Args:
        existing: tensors that are there before the step, and do not count.
        workspaces: bytes that a kernel takes for itself while it runs, by operator; called with its arguments.
        kernels: remembers the outputs of operators, for several recordings.
    """

    def __init__(
        self,
        existing: Iterable[Tensor],
        workspaces: dict[Any, Callable[..., int]],
        kernels: Kernels | None = None,
    ) -> None:
        super().__init__()
        self._kernels = kernels or Kernels()
        self._log = _Log()
        self._known: dict[int, object] = {}
        self._index: dict[int, int] = {}
        self._tiles: set[int] = set()
        self._landed: set[int] = set()
        self._workspaces = workspaces
        self._next: _Open | None = None
        self._operations = 0
        for tensor in existing:
            storage = tensor.untyped_storage()
            self._known[id(storage)] = storage
        self.segment("start")

    def segment(self, role: str, layer: int = GLOBAL) -> None:
        """Begins a stretch with the next operation: what goes before that still belongs to the stretch before."""
        self._next = _Open(role, layer)

    def mark_tile(self, tensor: Tensor) -> None:
        """Says that this tensor's size stops growing at a number of tokens."""
        self._tiles.add(self._index[id(tensor.untyped_storage())])

    def landed(self, gradient: Tensor) -> None:
        """Says that this tensor has become a parameter's gradient; where it is added to an earlier one, it goes now."""
        index = self._index.get(id(gradient.untyped_storage()))
        if index is not None and index not in self._landed:
            self._landed.add(index)
            self._log.events.append((len(self._log.segments) - 1, index, 0))

    def tape(self, *, batch: int, length: int, tile_tokens: int) -> Tape:
        """The recording, after the step."""
        return Tape(
            batch=batch,
            length=length,
            segments=tuple(Segment(**vars(segment)) for segment in self._log.segments),
            events=tuple(self._log.events),
            sizes=tuple(self._log.sizes),
            owners=tuple(self._log.owners),
            tiles=frozenset(self._tiles),
            tile_tokens=tile_tokens,
        )

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """torch's own switch: nothing is compiled here, and its guard around each operator costs a twentieth."""
        return False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        del types
        kwargs = kwargs or {}
        if self._next is not None:
            self._log.segments.append(self._next)
            self._next = None
        self._operations += 1
        if self._operations > MOST_OPERATIONS:
            raise TooManyOperations(f"its step takes more than {MOST_OPERATIONS} operations, as loops over tokens do")
        own = self._workspaces.get(func)
        workspace = self._new(own(*args, **kwargs)) if own is not None else None
        out, flops = self._kernels.run(func, args, kwargs)
        if self._enter(out) if isinstance(out, Tensor) else sum([self._enter(tensor) for tensor in tensors_in(out)]):
            segment = self._log.segments[-1]
            segment.launches += 1
            segment.flops += flops
        if workspace is not None:
            self._log.events.append((len(self._log.segments) - 1, workspace, -1))
        return out

    def _enter(self, tensor: Tensor) -> bool:
        storage = tensor.untyped_storage()
        key = id(storage)
        if key in self._known:
            return False
        index = self._new(storage.nbytes())
        self._index[key] = index
        self._known[key] = weakref.ref(storage, partial(self._leave, key, index))
        return True

    def _new(self, nbytes: int) -> int:
        log, segment = self._log, len(self._log.segments) - 1
        index = len(log.sizes)
        log.sizes.append(nbytes)
        log.owners.append(segment)
        log.events.append((segment, index, 1))
        log.segments[segment].written += nbytes
        return index

    def _leave(self, key: int, index: int, _: object) -> None:
        del self._known[key], self._index[key]
        self._log.events.append((len(self._log.segments) - 1, index, -1))
