"""The one place that every copy between host and card passes: ``aten::copy_`` with the dispatch key CUDA (ROCm too).

Whoever asks for a copy (``Tensor.to``, a data loader, bitsandbytes, an optimizer, a checkpoint writer), in whichever
thread, ends in this operator. `torch.library` lets a function of ours stand there, and it gives each copy to the mover
of that card, which verifies it. Autograd, autocast and functorch lie above the key and notice nothing.

The function is installed once, when the first mover of a card is made, and never removed: removing it while another
thread copies raises internal errors of torch. Without an open mover for the card a copy is torch's own.

What does not pass here, and so is not verified: numbers read by ``item`` and what is built on it (counted, see
`numbers_read`), quantised tensors (a dispatch key of their own), collectives, the driver's own staging between cards,
managed memory, replays of a captured graph, other processes. A copy while a stream is captured is counted and not
verified, because nothing may wait there.
"""

from __future__ import annotations

import re
import sys
import threading
import warnings
import weakref
from collections.abc import Callable
from types import FrameType
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

from hf_rocm_tune.errors import UsageError
from hf_rocm_tune.transfer.copy_on_card import CopyOnCard, load
from hf_rocm_tune.transfer.report import TransferReport, count_crossing, count_number

if TYPE_CHECKING:
    from torch.library import Library

_OPERATOR = "aten::copy_"
_NUMBER = "aten::_local_scalar_dense"  # ``item``
# Dispatch keys.
_CARD = "CUDA"
_HOST = "CPU"


class Server(Protocol):
    """What the copies of a card are given to: a mover."""

    device: torch.device
    report: TransferReport

    # Copy a host tensor into one of the card, a tensor of the card into one of the host, or one of the card that
    # ``sending`` serves into one of this card; of any strides, dtypes and shapes that ``Tensor.copy_`` takes.
    def deliver(self, target: Tensor, source: Tensor, *, origin: str) -> None: ...
    def collect(self, target: Tensor, source: Tensor, *, origin: str) -> None: ...
    def receive(self, target: Tensor, source: Tensor, sending: Any, *, origin: str) -> None: ...


class _Thread(threading.local):
    own_copies = 0  # above 0: what this thread copies is the engine's own


_thread = _Thread()
_movers: dict[int, list[weakref.ref[Server]]] = {}  # of each card, by its index; the last open one serves
_install_lock = threading.Lock()
_libraries: dict[str, Library] = {}  # by dispatch key
_native: list[CopyOnCard] = []  # the function in C++ for copies on one card, where it has been compiled
_writes: dict[int, int] = {}  # copies into watched storages that are alive, by their address in torch


class _OwnCopies:
    """Within it, copies of this thread are the engine's own and are not given to a mover."""

    def __enter__(self) -> None:
        _thread.own_copies += 1

    def __exit__(self, *_: object) -> None:
        _thread.own_copies -= 1


_OWN = _OwnCopies()


def own_copies() -> _OwnCopies:
    """A context for the engine's own copies. By thread, not by the stack: autograd's threads have no Python frames."""
    return _OWN


# ---- which mover serves a card ------------------------------------------------------------------------------


def serve(mover: Server) -> None:
    """Give every copy between the host and the mover's card to this mover, until it is closed or collected."""
    _install()
    with _install_lock:
        _movers.setdefault(mover.device.index, []).append(weakref.ref(mover))


def stop_serving(mover: Server) -> None:
    """The copies of its card go to the mover that served before, if that is still open. The second time: nothing."""
    with _install_lock:
        kept = [other for other in _movers.get(mover.device.index, ()) if other() not in (None, mover)]
        _movers[mover.device.index] = kept


def serving(device: torch.device) -> Server | None:
    """The open mover to which copies of this card are given."""
    for reference in reversed(_movers.get(device.index or 0, ())):
        mover = reference()
        if mover is not None:
            return mover
    return None if _make_server is None else _make_server(device)


_make_server: Callable[[torch.device], Server] | None = None


def serve_others_with(make: Callable[[torch.device], Server]) -> None:
    """From now on ``make`` a server for a card that has none when something is copied there first; they are kept."""
    kept: list[Server] = []
    making = threading.RLock()

    def made(device: torch.device) -> Server:
        with making:
            known = next((server for server in kept if server.device == device), None)
            if known is None:
                known = make(device)
                kept.append(known)
            return known

    global _make_server
    _make_server = made


# ---- the function that stands there -------------------------------------------------------------------------


def _install(key: str = _CARD) -> None:
    with _install_lock:
        if key in _libraries:
            return
        get_kernel: Callable[..., Any] | None = getattr(torch.library, "get_kernel", None)
        if get_kernel is None:
            raise UsageError(
                f"torch {torch.__version__} has no torch.library.get_kernel, with which every copy is verified: "
                "install torch 2.10 or newer"
            )
        native = load() if key == _CARD else None
        if native is not None:
            native.find_torchs()
        library = torch.library.Library("aten", "IMPL")  # kept for good
        copy = get_kernel(_OPERATOR, key)
        functions = {"copy_": _recording(copy) if key == _HOST else _copy_through(copy)}
        if key == _CARD:
            functions["_local_scalar_dense"] = _read_through(get_kernel(_NUMBER, key))
        with warnings.catch_warnings():  # torch warns of what `allow_override` asks for
            warnings.simplefilter("ignore", UserWarning)
            for operator, function in functions.items():
                library.impl(operator, function, key, with_keyset=True, allow_override=True)
        _libraries[key] = library
        if native is not None:
            native.install()
            _native.append(native)


def copies_on_card() -> str:
    """What serves copies on one card: ``compiled``, or ``python``, where each takes 4 us more of host time."""
    return "compiled" if _native else "python"


# ---- which copies were written into a tensor ----------------------------------------------------------------
#
# A program that rewrites a weight on purpose through ``tensor.data`` leaves no trace in the tensor's version counter.
# Such writes are copies too, and pass here.


def watch_writes(tensor: Tensor) -> None:
    """Count the copies into a tensor's storage, as long as it lives, for `writes_to`."""
    _install(_HOST if tensor.is_cpu else _CARD)
    storage = tensor.untyped_storage()
    if storage._cdata not in _writes:
        _writes[storage._cdata] = 0
        for native in _native:
            native.watch(storage._cdata, True)
        weakref.finalize(storage, _watch_no_longer, storage._cdata)


def _watch_no_longer(storage: int) -> None:
    _writes.pop(storage, None)
    for native in _native:
        native.watch(storage, False)


def writes_to(tensor: Tensor) -> int:
    """The number of copies into a watched tensor's storage so far; 0 for one that is not watched."""
    return _writes.get(tensor.untyped_storage()._cdata, 0) if _writes else 0


def writes_to_storages(storages: list[int]) -> list[int]:
    """As `writes_to`, of storages by their ``_cdata``."""
    return [_writes.get(storage, 0) for storage in storages]


def _record_write(target: Tensor) -> None:
    storage = target.untyped_storage()._cdata
    if storage in _writes:
        _writes[storage] += 1  # two threads may count as one: only a change matters


def _recording(stock: Any) -> Callable[..., Tensor]:
    """A copy on the host, whose write is counted where its target is watched."""
    call_stock = stock.call_boxed

    def copy_(keys: Any, target: Tensor, source: Any, non_blocking: bool = False) -> Tensor:
        if _writes and not _thread.own_copies:
            _record_write(target)
        call_stock(keys, target, _as_tensor(source), non_blocking)
        return target

    return copy_


def _as_tensor(source: Any) -> Tensor:
    """The source of a copy. torch hands a number on as Python's own, and its kernels do not take it so."""
    return torch.tensor(source) if isinstance(source, (bool, int, float, complex)) else source


def _copy_through(stock: Any) -> Callable[..., Tensor]:
    call_stock = stock.call_boxed

    def copy_(keys: Any, target: Tensor, source: Any, non_blocking: bool = False) -> Tensor:
        source = _as_tensor(source)
        # The most frequent case first, and it must cost little: a cast or a copy on one card.
        if _writes and not _thread.own_copies:
            _record_write(target)
        to_card = target.is_cuda
        if to_card and source.is_cuda:
            if target.get_device() != source.get_device() and not _thread.own_copies and target.numel():
                return _between_cards(call_stock, keys, target, source, non_blocking)
            call_stock(keys, target, source, non_blocking)
            return target
        card, other = (target, source) if to_card else (source, target)
        if not other.is_cpu:  # it has no bytes here: a meta tensor, which torch refuses
            call_stock(keys, target, source, non_blocking)
            return target
        mover = None if _thread.own_copies or not target.numel() else serving(card.device)
        if mover is not None and torch.cuda.is_current_stream_capturing():
            direction = "to_device" if to_card else "to_host"
            mover.report.crossed(direction, requester(), target.nbytes, verified=False, why="a stream was captured")
            mover = None
        if mover is None:
            if to_card:
                count_crossing(to_device_bytes=target.nbytes)
            else:
                count_crossing(to_host_bytes=target.nbytes)
            if not non_blocking:
                _wait_without_lock(card.device)
            with _OWN:  # torch enters this operator again for casts and strides: one copy
                call_stock(keys, target, source, non_blocking)
        elif to_card:
            mover.deliver(target, source, origin=requester())
        else:
            mover.collect(target, source, origin=requester())
        return target

    return copy_


def _read_through(stock: Any) -> Callable[..., Any]:
    call_stock = stock.call_boxed

    def local_scalar_dense(keys: Any, tensor: Tensor) -> Any:
        count_number(tensor.element_size())
        _wait_without_lock(tensor.device)
        return call_stock(keys, tensor)

    return local_scalar_dense


def _wait_without_lock(card: torch.device) -> None:
    """Wait for the current stream of a card, before a kernel of torch's that would wait with Python's lock held.

    Called from Python a kernel keeps the lock: loaders, prefetchers and writers would stand still meanwhile.
    """
    if not torch.cuda.is_current_stream_capturing():
        stream = torch.cuda.current_stream(card)
        if not stream.query():
            stream.synchronize()


def _between_cards(call_stock: Any, keys: Any, target: Tensor, source: Tensor, non_blocking: bool) -> Tensor:
    receiving = serving(target.device)
    sending = serving(source.device)
    if receiving is None or sending is None or torch.cuda.is_current_stream_capturing():
        reporting = receiving or sending
        if reporting is not None:
            why = "a stream was captured" if receiving and sending else "one of the two cards has no mover"
            reporting.report.crossed("between_cards", requester(), target.nbytes, verified=False, why=why)
        call_stock(keys, target, source, non_blocking)
        return target
    receiving.receive(target, source, sending, origin=requester())
    return target


_INSTALLED = re.compile(r".*/(?:site|dist)-packages/(.*)")


def requester() -> str:
    """``file:function`` of the innermost Python caller outside torch and this package; for origins and incidents.

    Of an installed library the file's last two parts are named, of any other file its name alone: its directory may
    name a person, and reports are published.
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        file = frame.f_code.co_filename
        if "/torch/" not in file and "hf_rocm_tune/transfer/" not in file:
            installed = _INSTALLED.match(file)
            named = "/".join(installed[1].split("/")[-2:]) if installed else file.rpartition("/")[2]
            return f"{named}:{frame.f_code.co_name}"
        frame = frame.f_back
    return "torch's own threads"
