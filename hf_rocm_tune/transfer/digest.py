"""A 128-bit, position-dependent digest of raw bytes, bit-identical on the host and on any torch device.

The bytes are read as little-endian unsigned 32-bit words ``w[i]``, the tail padded with zeros; ``s1 = sum(w[i])`` and
``s2 = sum(w[i] * h(i))`` modulo 2^64, and the length. With ``lo = i mod 2^16`` and the block ``b = i div 2^16``,

    h(i) = A(lo) * m(b) + c(b)    mod 2^64
    A(lo) = mix(lo + 1) << 32 | (mix(lo + 2^16) with its low 16 bits replaced by lo)
    m(b) = 1 + (mix(b + 1) << 32)
    c(b) = (b << 16) + (mix(b + 2^31) << 32)

where ``mix`` is a 32-bit finaliser (Wellons, "lowbias32"), so that one table serves all blocks.

Certain, below 16 GiB (2^32 words): *zeroing any set of non-zero words is detected*, for ``s1`` cannot wrap and gets
smaller; and so is *any swap of two different words* and any change confined to two words: if ``s1`` is unchanged, they
differ by ``d`` and ``-d``, ``0 < |d| < 2^32``, and ``s2`` changes by ``d * (h(i) - h(j))``. The low 32 bits of ``h``
are a bijection of ``i``: each factor has at most 31 trailing zero bits, and the product is not 0 modulo 2^64. Other
changes that keep ``s1`` escape with odds of about 2^-64. The digest does not resist an attacker.

The digests of ranges, each taken with its `word_offset`, add up. Triton (`digest_triton`) and a small C function on the
host are used after they have given the same sums as plain torch (`device_method`, `host_method`).
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TypeVar

import torch
from torch import Tensor
from torch.nn import functional

from hf_rocm_tune.errors import CorruptionError, UsageError
from hf_rocm_tune.machine.software import missing_for_triton
from hf_rocm_tune.paths import cache_directory
from hf_rocm_tune.transfer.interception import own_copies
from hf_rocm_tune.transfer.raw_bytes import as_bytes, dense, ordinary, plain

BLOCK_WORDS = 1 << 16
"""Words per block of the definition; also the host's working set: 256 KiB of input, 512 KiB of table."""
PIECE_BYTES = 4 * BLOCK_WORDS
"""Bytes that plain torch digests on the host at a time."""
CHUNK_BLOCKS = 16
"""Blocks that plain torch digests at a time on a device: 4 MiB of input, a temporary of 8 MiB."""
TABLED_BLOCKS = 1 << 12
"""Blocks whose weights are kept in a table: 1 GiB of data, 128 KiB of table."""
_FEW_ROWS = 2
"""Blocks for which plain torch uses fewer operators and a larger temporary."""
GROUP_BYTES = 32 << 20
"""The most bytes of small tensors that belong into a `TensorGroup`: the size of a temporary."""

_HOST = torch.device("cpu")
_M64 = 0xFFFFFFFFFFFFFFFF
T = TypeVar("T", int, Tensor)


@dataclass(frozen=True)
class Digest:
    """Two sums modulo 2^64 and the length in bytes; for what equal digests prove see the module's docstring."""

    s1: int
    s2: int
    nbytes: int

    def hex(self) -> str:
        """``s1`` and ``s2`` as 16 hexadecimal digits each, then the length in hexadecimal, joined by dashes."""
        return f"{self.s1:016x}-{self.s2:016x}-{self.nbytes:x}"

    @classmethod
    def from_hex(cls, text: str) -> Digest:
        try:
            s1, s2, nbytes = (int(part, 16) for part in text.split("-"))
        except ValueError:
            raise UsageError(f"'{text}' is not a digest; expected three hexadecimal numbers joined by '-'") from None
        return cls(s1, s2, nbytes)

    def same_words(self, other: Digest) -> bool:
        """Whether the sums are equal, whatever the lengths: for data with trailing zeros on one side."""
        return (self.s1, self.s2) == (other.s1, other.s2)


def combine(parts: Iterable[Digest]) -> Digest:
    """The digest of data from those of its ranges, each taken at its own `word_offset`; without parts: of 0 bytes."""
    s1 = s2 = nbytes = 0
    for part in parts:
        s1 += part.s1
        s2 += part.s2
        nbytes += part.nbytes
    return Digest(s1 & _M64, s2 & _M64, nbytes)


def digest(tensor: Tensor, *, word_offset: int = 0) -> Digest:
    """Digest the bytes of `tensor` in logical order, as if it were contiguous.

    Args:
        tensor: any dense dtype, shape, strides and device. On an accelerator the digest is computed there, on the
            current stream, and this function waits for its 16 bytes.
        word_offset: index of the first word, for a part of larger data.

    Dtype and shape are not part of the digest.
    """
    data = as_bytes(dense(tensor))
    if data.device.type == "cpu":
        return Digest(*_host_sums(data, word_offset), data.nbytes)
    readback = DigestReadback(_device_sums(data, word_offset))
    readback.join()
    (digest,) = readback.digests([data.nbytes])
    return digest


class DigestReadback:
    """Sums of digests on their way to the host, queued on the current stream behind what computes them.

    They land in page-locked memory of their own; what is queued later does not delay them.
    """

    def __init__(self, sums: Tensor) -> None:
        """``sums``: int64[2] or int64[n, 2] on an accelerator, see `digest_on_device`."""
        with torch.cuda.device(sums.device), ordinary(), own_copies():
            self._landed = torch.empty(sums.shape, dtype=torch.int64, device=_HOST, pin_memory=True)
            self._landed.copy_(sums, non_blocking=True)
            self._event = torch.cuda.current_stream().record_event()

    def done(self) -> bool:
        return bool(self._event.query())

    def join(self) -> None:
        """Wait until the sums have landed."""
        self._event.synchronize()

    def digests(self, sizes: Sequence[int]) -> list[Digest]:
        """Valid once they are `done`, or after `join`; ``sizes``: of what was digested, in bytes."""
        return _as_digests(self._landed, sizes)


def _as_digests(sums: Tensor, sizes: Sequence[int]) -> list[Digest]:
    """From int64[2 n] or int64[n, 2] on the host, as two's complement."""
    rows: list[list[int]] = sums.view(-1, 2).tolist()
    return [Digest(s1 & _M64, s2 & _M64, size) for (s1, s2), size in zip(rows, sizes, strict=True)]


class TensorGroup:
    """Small tensors of one device, each uint8[n] and a whole storage, digested as one: launches cost more than they do.

    The digest is that of their bytes in a row, each padded to whole words.
    """

    def __init__(self, parts: Sequence[Tensor]) -> None:
        self.parts, self.device = parts, parts[0].device
        self.nbytes = sum(part.nbytes for part in parts)
        # Views of whole words, made once: the group is digested at every step.
        self._words = [None if part.nbytes % 4 else part.view(torch.int32) for part in parts]

    def joined(self) -> Tensor:
        """The bytes in one tensor; a copy unless it is the only one."""
        if len(self.parts) == 1:
            return self.parts[0]
        words = [
            functional.pad(part, (0, -part.nbytes % 4)).view(torch.int32) if view is None else view
            for part, view in zip(self.parts, self._words, strict=True)
        ]
        return torch.cat(words).view(torch.uint8)


_READINGS = 32  # of digests that differ each time they are read


class QueuedDigests:
    """Digests of tensors or `TensorGroup`s, queued on the current streams of their devices without a wait.

    Host tensors are digested at once. The digests of a device are copied back together. The tensors need not be kept.
    """

    def __init__(self, tensors: Sequence[Tensor | TensorGroup]) -> None:
        self._found: dict[int, Digest] = {}
        self._on_device: list[tuple[list[int], list[int], Tensor]] = []  # places in `tensors`, sizes, sums
        self._pending: list[tuple[list[int], list[int], DigestReadback]] = []
        for device in {tensor.device for tensor in tensors}:
            places = [at for at, tensor in enumerate(tensors) if tensor.device == device]
            mine = [tensors[at] for at in places]
            sizes = [tensor.nbytes for tensor in mine]
            if device.type == "cpu":
                self._keep(places, [Digest(*_host_sums(_bytes_of(tensor)), tensor.nbytes) for tensor in mine])
                continue
            with torch.cuda.device(device), torch.inference_mode(False), own_copies():
                sums = torch.zeros(len(mine), 2, dtype=torch.int64, device=device)
                for row, tensor in zip(sums, mine, strict=True):
                    _chosen(device)[0](_bytes_of(tensor), 0, row)
            self._pending.append((places, sizes, DigestReadback(sums)))
            self._on_device.append((places, sizes, sums))

    def done(self) -> bool:
        """Whether `result` will not wait."""
        return all(readback.done() for _, _, readback in self._pending)

    def result(self) -> list[Digest]:
        for places, sizes, readback in self._pending:
            if not readback.done():
                readback.join()
            self._keep(places, readback.digests(sizes))
        self._pending = []
        return [self._found[at] for at in range(len(self._found))]

    def _keep(self, places: list[int], digests: list[Digest]) -> None:
        self._found.update(zip(places, digests, strict=True))

    def confirmed(self) -> list[Digest]:
        """As `result`, read from the device until two readings in succession agree, at most `_READINGS` times.

        A digest crosses the link that it checks, and may arrive wrong; each reading crosses as other words, so that two
        zeroed or stale ones do not agree. Waits for the device.

        Raises:
            CorruptionError: no two readings agreed: nothing can be said about the memory.
        """
        digests = self.result()
        if not self._on_device:
            return digests
        for reading in range(1, _READINGS + 1):
            before = digests
            mask = mix(reading)
            for places, sizes, sums in self._on_device:
                with own_copies(), torch.inference_mode(False):
                    landed = (sums ^ mask).cpu() ^ mask  # device: the engine's own
                self._keep(places, _as_digests(landed, sizes))
            digests = self.result()
            if digests == before:
                return digests
        devices = ", ".join(str(sums.device) for _, _, sums in self._on_device)
        raise CorruptionError(
            f"digests that {devices} sent to the host differed in each of {_READINGS} readings: copies from the device "
            "arrive wrong. Nothing has been saved since; run the doctor"
        )


def _bytes_of(tensor: Tensor | TensorGroup) -> Tensor:
    return tensor.joined() if isinstance(tensor, TensorGroup) else as_bytes(dense(plain(tensor)))


def _host_sums(flat: Tensor, index: int = 0, copy_to: Tensor | None = None) -> tuple[int, int]:
    return _chosen_on_host()[0](flat, index, copy_to)


def digest_range(
    tensor: Tensor, start: int, stop: int, *, word_offset: int = 0, copy_to: Tensor | None = None
) -> Digest:
    """Digest bytes [start, stop) of a contiguous host tensor, and copy them to ``copy_to``, uint8, in one pass."""
    return Digest(*_host_sums(as_bytes(tensor)[start:stop], word_offset, copy_to), stop - start)


# ---- the weights h(i) = A(lo) * m(b) + c(b), in plain integers and in torch --------------------------------


def mix(x: T) -> T:
    """Wellons' lowbias32 on a number below 2^32, or on an int64 tensor of such numbers."""
    x = ((x ^ (x >> 16)) * 0x7FEB352D) & 0xFFFFFFFF
    x = ((x ^ (x >> 15)) * 0x846CA68B) & 0xFFFFFFFF
    return x ^ (x >> 16)


def block_factor(block: T) -> T:
    return (mix((block + 1) & 0xFFFFFFFF) << 32) + 1


def block_term(block: T) -> T:
    return (mix((block + (1 << 31)) & 0xFFFFFFFF) << 32) + (block << 16)


@cache
def place_weights(device: torch.device) -> Tensor:
    """``A`` as int64[BLOCK_WORDS], computed on the device itself: not copied over the link that is being checked."""
    with torch.inference_mode(False):
        low = torch.arange(BLOCK_WORDS, dtype=torch.int64, device=device)
        lower = (mix(low + BLOCK_WORDS) & 0xFFFF0000) | low
        table = (mix(low + 1) << 32) | lower
    return _computed(table)


@cache
def block_table(device: torch.device) -> Tensor:
    """`_coefficients` of the first blocks, int64[2, 2, TABLED_BLOCKS], computed like `place_weights`."""
    with torch.inference_mode(False):
        return _computed(_coefficients(torch.arange(TABLED_BLOCKS, dtype=torch.int64, device=device)))


def _coefficients(blocks: Tensor) -> Tensor:
    """How a block's sums of words and of words by ``A`` count in ``s1`` and ``s2``: ones, zeros; ``c``, ``m``."""
    ones = torch.ones_like(blocks)
    rows = (ones, torch.zeros_like(blocks), block_term(blocks), block_factor(blocks))
    return torch.stack(rows).view(2, 2, -1)


def _computed(table: Tensor) -> Tensor:
    """Wait until the table is computed: other streams use it without waiting for this stream."""
    if table.is_cuda:
        torch.cuda.current_stream(table.device).synchronize()
    return table


# ---- on a device --------------------------------------------------------------------------------------------

Sums = Callable[[Tensor, int, Tensor], object]
"""Adds ``s1`` and ``s2`` of uint8[n] at a word offset to an int64[2] tensor, as two's complement."""


@dataclass(frozen=True, kw_only=True)
class DigestMethod:
    """The implementation of digests in use, and the reason for the choice."""

    name: str
    reason: str


def digest_on_device(tensor: Tensor, word_offset: int = 0) -> Tensor:
    """Digest on the tensor's own device and current stream, without a wait, except once to choose the method.

    Returns ``s1`` and ``s2`` as two's complement, int64[2] on the tensor's device.
    """
    return _device_sums(as_bytes(dense(tensor)), word_offset)


def _device_sums(data: Tensor, word_offset: int) -> Tensor:
    """`digest_on_device` of uint8[n]."""
    sums = torch.zeros(2, dtype=torch.int64, device=data.device)
    add_sums, _ = _chosen(data.device)
    add_sums(data, word_offset, sums)
    return sums


def device_method(device: torch.device) -> DigestMethod:
    """The method that `digest_on_device` uses on `device`, and why; tests the kernel the first time."""
    return _chosen(device)[1]


def triton_refusal(device: torch.device) -> str:
    """Why Triton's kernels do not run on `device`; empty if they do. Everything that launches one asks here.

    The judgement is that of `device_method`: the digest's kernel was compiled and launched, and its sums were right.
    """
    method = device_method(device)
    return "" if method.name == "triton" else method.reason


_trying = threading.Lock()


def _chosen(device: torch.device) -> tuple[Sums, DigestMethod]:
    with _trying:  # several threads load weights, and Triton starts in one
        return _tried(device)


@cache
def _tried(device: torch.device) -> tuple[Sums, DigestMethod]:
    if device.type != "cuda":
        reason = f"Triton has no kernels for {device.type}"
    elif os.environ.get("TRITON_INTERPRET", "0") == "1":
        reason = "TRITON_INTERPRET=1 would run the kernel on the host"
    else:
        try:
            from hf_rocm_tune.transfer.digest_triton import triton_sums

            reason = _differs(triton_sums, device)
        # Triton can raise anything (absent, no C compiler, an unknown architecture, no driver): plain torch gives the
        # same digest, and the reason is kept; of the error its end, where a failed command says how it ended.
        except Exception as error:
            why = missing_for_triton() or f"{type(error).__name__} ... {' '.join(str(error).split())[-160:]}"
            reason = f"Triton cannot run a kernel: {why}"
    if reason:
        return torch_sums, DigestMethod(name="torch", reason=reason)
    return triton_sums, DigestMethod(name="triton", reason="gives the same sums as plain torch on this device")


def _differs(sums: Sums, device: torch.device) -> str:
    """In which case `sums` and plain torch differ on `device`; empty if they agree. Waits for the device."""
    data = place_weights(device).view(torch.uint8)
    for start, stop, offset in ((0, data.numel() - 5, 0), (16, 4003, 70001), (3, 1000, 0)):
        kernel_sums, plain_sums = torch.zeros(2, 2, dtype=torch.int64, device=device)
        sums(data[start:stop], offset, kernel_sums)
        torch_sums(data[start:stop], offset, plain_sums)
        if not torch.equal(kernel_sums, plain_sums):
            return f"the Triton kernel gave other sums than plain torch for {stop - start} bytes at word {offset}"
    return ""


def torch_sums(flat: Tensor, word_offset: int, sums: Tensor) -> None:
    """Add the digest of uint8[n] to `sums` in plain torch, for any device."""
    position = 0
    index = word_offset
    while position < flat.numel():
        low = index % BLOCK_WORDS
        room = BLOCK_WORDS - low if low else BLOCK_WORDS * CHUNK_BLOCKS
        _add_piece(flat[position : position + 4 * room], index, sums)
        position += 4 * room
        index += room


def _add_piece(piece: Tensor, index: int, sums: Tensor) -> None:
    """Add whole blocks and the part of one that follows them, or a part of one block."""
    words, low = _words(piece), index % BLOCK_WORDS
    whole = words.numel() // BLOCK_WORDS if low == 0 else 0
    if whole:
        _add_rows(words[: whole * BLOCK_WORDS].view(whole, BLOCK_WORDS), 0, index // BLOCK_WORDS, sums)
    rest = words[whole * BLOCK_WORDS :]
    if rest.numel():
        _add_rows(rest[None], low, index // BLOCK_WORDS + whole, sums)


def _words(piece: Tensor) -> Tensor:
    """uint8[n] to int64[ceil(n / 4)] in 0 .. 2^32 - 1."""
    padding = -piece.numel() % 4
    if padding:
        piece = functional.pad(piece, (0, padding))
    elif piece.storage_offset() % 4 or piece.data_ptr() % 4:
        piece = piece.clone()
    return piece.view(torch.uint32).to(torch.int64)


def _add_rows(words: Tensor, low: int, first_block: int, sums: Tensor) -> None:
    """Add rows of words: consecutive blocks, or a part of one block from its word ``low`` on."""
    count, length = words.shape
    if count <= _FEW_ROWS:  # few operators: launches cost more than the temporary, of twice the size
        weighted = words * place_weights(words.device)[low : low + length]
        pairs = torch.stack((words, weighted)).sum(2)
    else:
        totals = words.sum(1)
        pairs = torch.stack((totals, words.mul_(place_weights(words.device)).sum(1)))
    sums += (pairs * _block_weights(first_block, count, words.device)).sum((1, 2))


def _block_weights(first: int, count: int, device: torch.device) -> Tensor:
    """`_coefficients` of consecutive blocks, int64[2, 2, count]."""
    if first + count <= TABLED_BLOCKS:
        return block_table(device)[:, :, first : first + count]
    return _coefficients(torch.arange(first, first + count, dtype=torch.int64, device=device))


# ---- on the host --------------------------------------------------------------------------------------------
#
# The C function is compiled at first use, for this processor, into the user's cache directory; the library's name has a
# hash of its source and the processor, so that a home directory shared between machines holds one for each.
# `benchmarks/digest_host.py` on two cores of an AMD EPYC, GB/s: C 11.9, NumPy 5.3, Numba 14.2 (with LLVM in every
# installation), reading alone 20.3. A second thread gains only where large copies are made in the same pass.

HostSums = Callable[[Tensor, int, Tensor | None], tuple[int, int]]
"""The two sums modulo 2^64 of a contiguous uint8[n] on the host, given the index of its first word; copies the bytes to
the third argument, uint8[n], if that is not None."""
BYTES_A_THREAD = 4 << 20
THREADS = 4
SOURCE = Path(__file__).with_name("digest_host.c")
FLAGS = ("-O3", "-march=native", "-pthread", "-shared", "-fPIC")
COMPILE_SECONDS = 60


def host_method() -> DigestMethod:
    """The method that digests host tensors, and why; compiles the C function the first time."""
    return _chosen_on_host()[1]


@cache
def _chosen_on_host() -> tuple[HostSums, DigestMethod]:
    native, reason = load_native()
    if native is None:
        return plain_sums, DigestMethod(name="torch", reason=reason)
    # Covers every word of a block, a start inside a block, its end, a tail, an odd address, a copy by several threads.
    data, other = place_weights(torch.device("cpu")).view(torch.uint8), f"other sums than plain torch when {reason}"
    large = data.repeat(1 + 2 * BYTES_A_THREAD // data.numel())
    for piece, index in ((data[:-5], 0), (data[3:4002], 2 * BLOCK_WORDS - 99), (large, 7)):
        copy = ~piece
        expected = plain_sums(piece, index)
        if not (expected == native(piece, index, None) == native(piece, index, copy) and torch.equal(copy, piece)):
            return plain_sums, DigestMethod(name="torch", reason=other)
    return native, DigestMethod(name="native", reason=reason)


_TwoSums = ctypes.c_uint64 * 2


class NativeSums:
    """The compiled function; an instance is a `HostSums`."""

    def __init__(self, library: Path) -> None:
        # a CDLL's functions run without the interpreter's lock
        self._function = ctypes.CDLL(str(library)).hf_rocm_tune_digest
        pointer = ctypes.c_void_p
        self._function.argtypes = (pointer, pointer, ctypes.c_uint64, ctypes.c_uint64, pointer, ctypes.c_int, pointer)
        self._function.restype = None
        self._table = place_weights(torch.device("cpu"))
        self._threads = min(THREADS, len(os.sched_getaffinity(0)))

    def __call__(self, flat: Tensor, index: int, copy_to: Tensor | None = None) -> tuple[int, int]:
        result = _TwoSums()
        nbytes = flat.numel()
        copy: int | None = None
        threads = 1
        if copy_to is not None:
            assert copy_to.numel() == nbytes
            copy = copy_to.data_ptr()
            threads = min(self._threads, nbytes // BYTES_A_THREAD)
        self._function(flat.data_ptr(), copy, nbytes, index, self._table.data_ptr(), threads, result)
        return result[0], result[1]


def plain_sums(flat: Tensor, index: int, copy_to: Tensor | None = None) -> tuple[int, int]:
    """A `HostSums` in plain torch, on pieces that stay in the cache."""
    sums = torch.zeros(2, dtype=torch.int64)
    for start in range(0, flat.numel(), PIECE_BYTES):
        piece = flat[start : start + PIECE_BYTES]
        torch_sums(piece, index + start // 4, sums)
        if copy_to is not None:
            copy_to[start : start + PIECE_BYTES].copy_(piece)
    s1, s2 = sums.tolist()
    return s1 & _M64, s2 & _M64


def load_native() -> tuple[NativeSums | None, str]:
    """The compiled functions, untested, or None; and how they were compiled, or why there are none."""
    compiler = shutil.which(os.environ.get("CC") or "cc")
    if compiler is None:
        return None, "there is no C compiler (cc, or what CC names)"
    try:
        library = cache_directory() / f"digest-{_key(compiler)}.so"
        if not library.exists():
            _compile(compiler, library)
        return NativeSums(library), f"compiled with {compiler} {' '.join(FLAGS)}"
    except subprocess.CalledProcessError as error:
        lines = error.stderr.decode(errors="replace").strip().splitlines() or ["no message"]
        return None, f"{compiler} failed: {lines[0][:200]}"
    # No home directory, a directory that cannot be written, a library that cannot be loaded, a timeout.
    except (OSError, RuntimeError, AttributeError, subprocess.SubprocessError) as error:
        return None, f"{type(error).__name__}: {error}"


def _key(compiler: str) -> str:
    """A hash of the source, the flags, the compiler's path and what decides the effect of ``-march=native``."""
    names = ("vendor_id", "cpu family", "model", "flags", "Features", "CPU part")
    lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    here = sorted({line for line in lines if line.partition("\t")[0].partition(":")[0].strip() in names})
    content = hashlib.sha256(SOURCE.read_bytes())
    content.update(repr((FLAGS, compiler, platform.machine(), here)).encode())
    return content.hexdigest()[:24]


def _compile(compiler: str, library: Path) -> None:
    library.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    with tempfile.TemporaryDirectory(dir=library.parent) as directory:
        fresh = Path(directory) / library.name
        command = [compiler, *FLAGS, str(SOURCE), "-o", str(fresh)]
        subprocess.run(command, check=True, capture_output=True, timeout=COMPILE_SECONDS, stdin=subprocess.DEVNULL)
        fresh.replace(library)  # atomic: other processes may be compiling or loading the same library
