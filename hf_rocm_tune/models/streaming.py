"""Weight streaming: frozen decoder layers that live in host memory and visit the card while they compute.

The matrices of some layers (packed ones with their scales too) are views of one of a few buffers, device memory that
is filled through the engine ahead of the layer's use: a visit is digested on the card, and once more when the next
layer takes its place. Streamed layer k always lands in buffer ``k % n`` of its card, so autograd's references to views
of the buffer hold that layer again in backward. A thread packs what is fetched ahead.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from hf_rocm_tune.errors import MemoryFaultError, UsageError
from hf_rocm_tune.models.files import MappedFile
from hf_rocm_tune.models.split import SplitMover, layer_stack
from hf_rocm_tune.models.streamed import FLAG, LAYER_BUFFERS_A_CARD, Streamed
from hf_rocm_tune.models.tensors import LAYER_BUFFERS, Place, checked_read, places_of
from hf_rocm_tune.transfer import combine, tree_tensors
from hf_rocm_tune.transfer.digest import digest_range
from hf_rocm_tune.transfer.layer_buffer import ADVICE, Content, LayerBuffer
from hf_rocm_tune.transfer.raw_bytes import typed_view
from hf_rocm_tune.transfer.to_device import ALIGNMENT, Segment

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from hf_rocm_tune.transfer import Mover

_ATTRIBUTE = "_hf_rocm_tune_streamer"  # of the list of layers


def is_streamed(name: str, tensor: Tensor) -> bool:
    """Whether a streamed layer's tensor is streamed, rather than on the card for good: matrices and 4-bit scales."""
    return tensor.dim() >= 2 or hasattr(tensor, "quant_state") or name.endswith("quant_state.absmax")


def streamer_of(model: nn.Module) -> Streamer | None:
    for module in model.modules():
        streamer: Streamer | None = getattr(module, _ATTRIBUTE, None)
        if streamer is not None:
            return streamer
    return None


class Streamer:
    """Brings the streamed layers of a model, just loaded, to the card when they compute."""

    def __init__(self, model: PreTrainedModel, streamed: Streamed, mover: Mover) -> None:
        _, stack = layer_stack(model, model.config)
        self._mover = mover
        self._stack = stack
        self.layers = streamed.layers
        self.host_bytes = {"mapped": 0, "anonymous": 0}  # of streamed weights: of files, or of this process
        self.visits = 0  # layers fetched
        self.waits = [0] * len(streamed.layers)  # of each, the uses for which the training thread waited
        self.wait_seconds = 0.0
        self.contents: list[Content] = []  # the streamed layers as they are sent, in order
        self._segments: dict[int, tuple[Tensor, Segment]] = {}  # by the identity of the layer's own tensor
        self._bound: list[list[tuple[Place, str, int]]] = [[] for _ in self.layers]  # with the address that it has
        where = []
        for layer in self.layers:
            placed = list(self._take(stack[layer]))
            self.contents.append(self._content(f"{streamed.stack}.{layer}", placed))
            where.append(placed)
        self.buffers: list[LayerBuffer] = []
        self._buffer_of: list[int] = []  # of each streamed layer
        cards: list[tuple[Mover, range]] = [(mover, range(len(stack)))]
        if isinstance(mover, SplitMover):
            cards = list(zip(mover.cards, mover.split.ranges, strict=True))
        for card, there in cards:
            first = len(self.buffers)
            own = [layer for layer in self.layers if layer in there]
            for at in range(min(LAYER_BUFFERS_A_CARD, len(own))):
                nbytes = max(self.contents[self.layers.index(layer)].nbytes for layer in own[at::LAYER_BUFFERS_A_CARD])
                self.buffers.append(card.layer_buffer(nbytes))
                LAYER_BUFFERS.put(self.buffers[-1].memory, f"buffer {first + at} of streamed layers")
            self._buffer_of += [first + at % LAYER_BUFFERS_A_CARD for at in range(len(own))]
        for at, (layer, placed) in enumerate(zip(self.layers, where, strict=True)):
            self._bind(at, placed)
            stack[layer].register_forward_pre_hook(partial(self._enter, at))
            stack[layer].register_forward_hook(partial(self._after_forward, at))
        self._holds: list[int | None] = [None] * len(self.buffers)
        self._sent: list[Future[None] | None] = [None] * len(self.buffers)
        self._worker = ThreadPoolExecutor(max_workers=1, thread_name_prefix="streaming")
        setattr(stack, _ATTRIBUTE, self)

    @property
    def layer_buffer_bytes(self) -> int:
        return sum(buffer.memory.nbytes for buffer in self.buffers)

    def _take(self, layer: nn.Module) -> Iterator[tuple[Place, Tensor]]:
        seen: dict[int, Tensor] = {}
        for where in places_of(layer):
            tensor = where.find()
            if not is_streamed(where.name, tensor):
                continue
            key = tensor.untyped_storage()._cdata
            if key not in seen:
                on_host = tensor.device.type == "cpu" and self._mover.provenance(tensor) is None
                if on_host:
                    seen[key] = tensor.detach().contiguous()
                else:
                    seen[key] = to_host(tensor, where.name, self._mover)
            yield where, seen[key]

    def _content(self, layer: str, placed: Sequence[tuple[Place, Tensor]]) -> Content:
        """The layer as it is sent. Each tensor is compared with what was read from its file, and digested again."""
        segments: list[Segment] = []
        by_source: set[int] = set()
        for where, source in placed:
            if id(source) in by_source:
                continue
            by_source.add(id(source))
            offset = -(-segments[-1].end // ALIGNMENT) * ALIGNMENT if segments else 0
            segment = Segment(f"{layer}.{where.name}", source, offset)
            known = checked_read(segment.name, source)
            segment.digest = digest_range(source, 0, source.nbytes, word_offset=offset // 4)
            if known is not None and known.file is not None:
                segment.file = known.file
                segment.read_again = partial(_read, known.file, known.name)
            self.host_bytes["mapped" if segment.file else "anonymous"] += source.nbytes
            segments.append(segment)
        return Content(layer, segments, combine(segment.digest for segment in segments if segment.digest is not None))

    def _bind(self, at: int, placed: Sequence[tuple[Place, Tensor]]) -> None:
        memory = self.buffers[self._buffer_of[at]].memory
        segments = {id(segment.source): segment for segment in self.contents[at].segments}
        for where, source in placed:
            segment = segments[id(source)]
            bound = where.rebind(typed_view(memory, segment.offset, source.dtype, source.shape))
            self._segments[id(bound)] = bound, segment
            self._bound[at].append((where, segment.name, bound.data_ptr()))

    def _require_bound(self, at: int) -> None:
        """Refuse to compute with a layer one of whose tensors lies elsewhere than where its bytes arrive."""
        for where, name, pointer in self._bound[at]:
            try:
                there = where.find().data_ptr()
            except AttributeError:  # an adapter of experts has taken its place
                continue
            if there != pointer:
                raise MemoryFaultError(f"a streamed weight is bound to another place in memory: {name}", ADVICE)

    def _after_forward(self, at: int, module: nn.Module, arguments: Any, output: Any) -> Any:
        if torch.is_grad_enabled() and not _in_backward():
            for tensor in tree_tensors(output):
                if tensor.requires_grad:
                    tensor.register_hook(partial(self._enter, at))

    def _enter(self, at: int, *_: Any) -> None:
        """The layer's weights are in its buffer when this returns, and the next ones are on their way.

        Whatever other layers have launched so far is all that they will launch until they enter again.
        """
        self._fetch_ahead(at)
        buffer = self._buffer_of[at]
        sent = self._sent[buffer]
        assert sent is not None
        begun = time.perf_counter()
        try:
            self.waits[at] += not sent.done() or not self.buffers[buffer].has_arrived
            sent.result()
            self.buffers[buffer].wait_verified()
        except BaseException:
            self._holds[buffer] = None
            raise
        self._require_bound(at)
        self.wait_seconds += time.perf_counter() - begun

    def _fetch_ahead(self, at: int) -> None:
        """Send what will be used next into the buffers that nothing earlier needs."""
        claimed: set[int] = set()
        for layer in self._order_from(at):
            buffer = self._buffer_of[layer]
            if self._holds[buffer] != layer:
                if buffer in claimed:
                    return
                self._holds[buffer] = layer
                send, mark = self.buffers[buffer].send, self.buffers[buffer].mark()
                self._sent[buffer] = self._worker.submit(send, self.contents[layer], mark)
                self.visits += 1
            claimed.add(buffer)
            if len(claimed) == len(self.buffers):
                return

    def _order_from(self, at: int) -> Iterable[int]:
        """The streamed layers in the order in which they will be used, by what is computed now."""
        yield at
        if _in_backward():
            yield from range(at - 1, -1, -1)
        else:
            yield from range(at + 1, len(self.layers))
            if torch.is_grad_enabled():
                yield from range(len(self.layers) - 1, -1, -1)
        yield from range(len(self.layers))

    def bring(self, module: nn.Module) -> None:
        """Have the layer that a module is part of in its buffer, outside of a pass through the model."""
        for at, layer in enumerate(self.layers):
            if any(inner is module for inner in self._stack[layer].modules()):
                self._enter(at)

    def require_frozen(self) -> None:
        """Refuse adapters that copy weights of streamed layers, which were not there to be copied."""
        for layer in self.layers:
            for name, module in self._stack[layer].named_modules():
                if not hasattr(module, "modules_to_save"):
                    continue
                if any(is_streamed("", parameter) for parameter in module.parameters()):
                    raise UsageError(
                        f"--lora_modules_to_save {name.rpartition('.')[2]}: it is in layers that {FLAG} streams, which "
                        "cannot be trained: leave it out"
                    )

    def waiting(self, tensor: Tensor) -> Tensor | None:
        """The bytes of a streamed layer's tensor, as they wait on the host; None for every other tensor."""
        held = self._segments.get(id(tensor))
        if held is None:
            return None
        _, segment = held
        if segment.is_right(segment.source):
            return segment.source
        if segment.read_again is not None:
            again = segment.read_again()
            if segment.is_right(again):
                segment.source = again
                return again
        raise MemoryFaultError(f"streamed weights changed in host memory: {segment.name}", ADVICE)

    def read_apart(self) -> Iterator[tuple[str, Tensor, Tensor]]:
        """Streamed tensors that are no part of a mapped file: names, the layer's own tensors, and their host memory.

        Nothing else compares that memory with the file: what crosses is compared with it.
        """
        for bound, segment in self._segments.values():
            if segment.file is None:
                yield segment.name, bound, segment.source

    def check(self) -> None:
        """Compare what the buffers hold with what arrived; part of the check before a save."""
        for sent, buffer in zip(self._sent, self.buffers, strict=True):
            if sent is not None:
                sent.result()
                buffer.wait_verified()
            buffer.check()

    def describe(self) -> dict[str, Any]:
        return {
            "layers": list(self.layers),
            "host_bytes": dict(self.host_bytes),
            "layer_buffer_bytes": self.layer_buffer_bytes,
            "visits": self.visits,
            "waits": list(self.waits),
            "wait_seconds": self.wait_seconds,
        }


def leave_device(model: nn.Module, name: str, mover: Mover) -> None:
    path, _, key = name.rpartition(".")
    moved: dict[int, Tensor] = {}  # 8-bit data has two names
    for where in places_of(model.get_submodule(path)):
        tensor = where.find()
        if where.name.split(".")[0] == key and is_streamed(where.name, tensor) and mover.provenance(tensor) is not None:
            storage = tensor.untyped_storage()._cdata
            if storage not in moved:
                moved[storage] = to_host(tensor, f"{path}.{where.name}", mover)
            where.rebind(moved[storage])


def to_host(tensor: Tensor, name: str, mover: Mover) -> Tensor:
    """A tensor of the card in memory of this process, verified."""
    with mover.fetched(tensor.detach(), name=name, stage="weights") as fetched:
        return fetched.host.clone()


def _in_backward() -> bool:
    return bool(torch._C._current_graph_task_id() != -1)


def _read(file: str, name: str) -> Tensor:
    return MappedFile(file).tensors[name].clone()
