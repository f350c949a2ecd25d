"""What ``torch.cuda`` answers on the simulated card: each name here takes the place of torch's own of that name."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, accelerator

from . import card

_CUDA = 1  # its number among torch's device types
_BLOCK_STATES = ("inactive", "active_allocated", "active_pending_free")
_set_device = accelerator.set_device_index
_libtorch = ctypes.CDLL(f"{card.torch_directory()}/lib/libtorch_python.so")
_requires_init = _libtorch["_ZN5torch5utils24set_requires_device_initEN3c1010DeviceTypeEb"]
set_stream = accelerator.set_stream
Stream, Event = torch.Stream, torch.Event


def install() -> None:
    """Tells ``torch.cuda`` that there is a card."""
    for module in (torch.cuda, torch.cuda.memory, torch.cuda.random):
        for name in globals().keys() & vars(module).keys():
            if not name.startswith("__"):
                setattr(module, name, globals()[name])
    torch.cuda.default_generators = tuple(_Generator(index) for index in range(2))
    torch.backends.cuda.is_built = lambda: True
    torch._C._cuda_getDeviceCount = _count_of_driver
    os.register_at_fork(after_in_child=_in_child)
    torch._C._cuda_getCurrentRawStream = lambda index: card.lib.sim_stream(index) or 0
    if card.gfx1100():
        from tests.gfx1100.hip import ROCM

        torch.version.hip, Properties.multi_processor_count = ROCM, 42
    if "SIMCARD_BLAS" in os.environ:
        torch.backends.cuda.preferred_blas_library = _preferred_blas_library
    torch.UntypedStorage.__new__ = _new_storage
    torch.UntypedStorage.resize_ = _resize


_backends = torch._C._BlasBackend
_preferred = _backends.Default


def _preferred_blas_library(backend: Any = None) -> Any:
    """Which of AMD's libraries multiplies; a build without CUDA has none to choose from."""
    global _preferred
    if backend is not None:
        names = {"default": _backends.Default, "cublas": _backends.Cublas, "cublaslt": _backends.Cublaslt}
        _preferred = names[backend] if isinstance(backend, str) else backend
        card.lib.sim_prefer_hipblaslt({_backends.Default: -1, _backends.Cublaslt: 1}.get(_preferred, 0))
    return _preferred


_stock_storage, _stock_resize = torch.UntypedStorage.__new__, torch.UntypedStorage.resize_


def _new_storage(cls: type, *args: Any, device: Any = None, **more: Any) -> torch.UntypedStorage:
    """A build without CUDA knows no storage there that is not a tensor's."""
    if device is not None and torch.device(device).type == "cuda":
        return torch.empty(*args, dtype=torch.uint8, device=device).untyped_storage()
    return _stock_storage(cls, *args, **({} if device is None else {"device": device}), **more)


def _resize(storage: torch.UntypedStorage, nbytes: int) -> torch.UntypedStorage:
    """FSDP2 frees and allocates so what it has gathered."""
    if storage.device.type != "cuda":
        return _stock_resize(storage, nbytes)
    card.lib.sim_resize(storage._cdata, nbytes)
    return storage


def current_device() -> int:
    init()
    return accelerator.current_device_index()


def index_of(device: Any = None) -> int:
    """Number of a device that is given in any way that torch takes; the current one, of a process that has one, for
    None."""
    if isinstance(device, int):
        return device if device >= 0 else current_device()
    index = None if device is None else torch.device(device).index
    return current_device() if index is None else index


# ---- devices --------------------------------------------------------------------------------------------------


def is_available() -> bool:
    return torch._C._cuda_getDeviceCount() > 0


_is_compiled = is_available

# torch's rule: a process that has asked the driver for its cards, or used one, leaves its forked children without any.
_asked = _used = _forked = False


def _in_child() -> None:
    global _used, _forked
    _used, _forked = False, _forked or _asked
    _requires_init(_CUDA, True)  # torch asks `_lazy_init` again


def is_initialized() -> bool:
    return _used


def _is_in_bad_fork() -> bool:
    return _forked


def init() -> None:
    global _asked, _used
    if _forked:
        raise RuntimeError(
            "Cannot re-initialize CUDA in forked subprocess. To use CUDA with multiprocessing, you must use the "
            "'spawn' start method"
        )
    _asked = _used = True


_lazy_init = init


def _lazy_call(function: Any, **_: Any) -> None:
    function()


def device_count() -> int:
    return torch._C._cuda_getDeviceCount()


def _count_of_driver() -> int:
    global _asked
    _asked = True
    return card.lib.sim_device_count()


_contexts: set[int] = set()


def contexts() -> set[int]:
    """Cards on which this process has a context, half a GB on a real one: it was set, or has had memory."""
    return _contexts | {index for index in range(device_count()) if accelerator.max_memory_reserved(index)}


def set_device(device: Any) -> None:
    init()
    _contexts.add(index_of(device))
    _set_device(index_of(device))


def _exchange_device(index: int) -> int:
    before = current_device()
    if index >= 0:
        set_device(index)
    return before


def _maybe_exchange_device(index: int) -> int:
    """Makes no context."""
    before = current_device()
    if index >= 0:
        _set_device(index)
    return before


class device:
    """Another current device for the length of a block."""

    def __init__(self, device: Any) -> None:
        self._index = self.idx = -1 if device is None else index_of(device)

    def __enter__(self) -> None:
        self._before = _exchange_device(self._index)

    def __exit__(self, *_: object) -> None:
        _maybe_exchange_device(self._before)


class device_of(device):
    """That of a tensor; nothing changes for one on the host."""

    def __init__(self, tensor: Tensor) -> None:
        super().__init__(tensor.device if tensor.is_cuda else None)


class Properties:
    """Of every simulated card."""

    name = card.NAME
    major, minor, multi_processor_count, warp_size = 11, 0, 1, 32
    uuid, is_integrated, is_multi_gpu_board = "", 0, False
    pci_bus_id = pci_device_id = pci_domain_id = 0
    L2_cache_size, shared_memory_per_block = 1 << 20, 1 << 16
    regs_per_multiprocessor, max_threads_per_multi_processor = 1 << 16, 1024

    def __init__(self) -> None:
        self.total_memory = card.capacity()
        self.gcnArchName = os.environ.get("SIMCARD_ARCH", "gfx1100" if card.gfx1100() else "simulated")


def get_device_properties(device: Any = None) -> Properties:
    init()
    return Properties()


def get_device_name(device: Any = None) -> str:
    return get_device_properties(device).name


def get_device_capability(device: Any = None) -> tuple[int, int]:
    properties = get_device_properties(device)
    return properties.major, properties.minor


def get_arch_list() -> list[str]:
    return []


def is_bf16_supported(including_emulation: bool = True) -> bool:
    return True


def can_device_access_peer(device: Any, peer: Any) -> bool:
    return False


# ---- streams --------------------------------------------------------------------------------------------------


def synchronize(device: Any = None) -> None:
    init()
    accelerator.synchronize(index_of(device))


def current_stream(device: Any = None) -> torch.Stream:
    init()
    return accelerator.current_stream(index_of(device))


def default_stream(device: Any = None) -> torch.Stream:
    return torch.Stream(stream_id=0, device_index=index_of(device), device_type=_CUDA)


@contextmanager
def stream(given: torch.Stream | None) -> Iterator[torch.Stream | None]:
    """Another current stream, and device, for the length of a block."""
    if given is None:
        yield None
        return
    before_device, before = current_device(), accelerator.current_stream(given.device)
    set_stream(given)
    try:
        yield given
    finally:
        set_stream(before)
        if before_device != current_device():
            set_device(before_device)


StreamContext = stream


def is_current_stream_capturing() -> bool:
    return False


def _sleep(cycles: int) -> None:
    ticks = 100 if Properties().gcnArchName.startswith("gfx11") else 2000  # a microsecond; RDNA3's clock has 100 MHz
    card.lib.sim_sleep(int(cycles // ticks))


# ---- memory ---------------------------------------------------------------------------------------------------


def empty_cache() -> None:
    if not is_initialized():
        return
    for index in range(device_count()):
        synchronize(index)  # gives up Python's lock, which torch keeps while it empties the cache and waits for streams
    accelerator.empty_cache()


def memory_stats(device: Any = None) -> dict[str, Any]:
    return {} if not is_initialized() else accelerator.memory_stats(index_of(device))


def mem_get_info(device: Any = None) -> tuple[int, int]:
    init()
    return accelerator.get_memory_info(index_of(device))


def reset_peak_memory_stats(device: Any = None) -> None:
    accelerator.reset_peak_memory_stats(index_of(device))


def set_per_process_memory_fraction(fraction: float, device: Any = None) -> None:
    card.lib.sim_occupied(int((1 - fraction) * card.capacity()))


def memory_snapshot(*_: Any, **__: Any) -> list[dict[str, Any]]:
    """Every block is a segment of its own: this allocator does not split."""
    return [segment for index in range(device_count()) for segment in _segments(index)]


def _snapshot(device: Any = None, **_: Any) -> dict[str, Any]:
    return {"segments": memory_snapshot(), "device_traces": [], "allocator_settings": {}}


def _segments(index: int) -> Iterator[dict[str, Any]]:
    """In torch's format."""
    room = card.lib.sim_blocks(index, None, 0)
    rows = (ctypes.c_int64 * (4 * room))()
    for row in range(min(room, card.lib.sim_blocks(index, rows, room))):
        address, size, stream_id, state = rows[4 * row : 4 * row + 4]
        active = size if state else 0
        block = {"address": address, "size": size, "requested_size": size, "state": _BLOCK_STATES[state], "frames": []}
        yield {
            "device": index,
            "address": address,
            "stream": stream_id,
            "segment_type": "large" if size > 1 << 20 else "small",
            "total_size": size,
            "allocated_size": size if state == 1 else 0,
            "active_size": active,
            "requested_size": active,
            "segment_pool_id": (0, 0),
            "blocks": [block],
        }


# ---- random numbers -------------------------------------------------------------------------------------------


class _Generator:
    """The default one of a card."""

    def __init__(self, index: int) -> None:
        self.device = torch.device("cuda", index)

    def manual_seed(self, seed: int) -> _Generator:
        card.lib.sim_rng_seed(self.device.index, int(seed) & (2**64 - 1))
        return self

    def initial_seed(self) -> int:
        return card.lib.sim_rng_initial_seed(self.device.index)

    seed = initial_seed

    def get_state(self) -> Tensor:
        init()
        state = torch.empty(card.lib.sim_rng_get(self.device.index, None, 0), dtype=torch.uint8, device="cpu")
        card.lib.sim_rng_get(self.device.index, state.data_ptr(), state.numel())
        return state

    def set_state(self, state: Tensor) -> None:
        kept = state.cpu().contiguous()
        card.lib.sim_rng_set(self.device.index, kept.data_ptr(), kept.numel())


def _generators() -> tuple[_Generator, ...]:
    return torch.cuda.default_generators[: device_count()]


def get_rng_state(device: Any = None) -> Tensor:
    return torch.cuda.default_generators[index_of(device)].get_state()


def get_rng_state_all() -> list[Tensor]:
    return [generator.get_state() for generator in _generators()]


def set_rng_state(state: Tensor, device: Any = None) -> None:
    torch.cuda.default_generators[index_of(device)].set_state(state)


def set_rng_state_all(states: Iterable[Tensor]) -> None:
    for generator, state in zip(_generators(), states, strict=True):
        generator.set_state(state)


def manual_seed(seed: int) -> None:
    torch.cuda.default_generators[current_device()].manual_seed(seed)


def manual_seed_all(seed: int) -> None:
    for generator in _generators():
        generator.manual_seed(seed)


def initial_seed() -> int:
    return torch.cuda.default_generators[current_device()].initial_seed()
