"""The digest of host memory: a small C function where a compiler is at hand, else plain torch, bit-identical.

Neither makes a temporary of the size of the tensor.

Measured with ``python benchmarks/digest_host.py --mib 256 --rounds 9`` on two cores of an AMD EPYC (family 26, AVX-512)
that other programs used as well; torch 2.13, NumPy 2.4, Numba 0.68; GB/s of 10^9 bytes, median of the rounds and best:

    reading alone    20.3  30.2        plain torch                   3.7   4.9
    Numba            14.2  15.9        NumPy, best of six ways       5.3   7.3
    C (shipped)      11.9  15.3        C, halves in two threads      8.2  14.9

C is three times as fast as plain torch, and eight times for a few KiB, where torch's calls are what costs; compiled for
AVX2 the same loop gave 8. Numba is as fast and would bring a compiler of its own (LLVM) into every installation.
A second thread gained nothing here, and the callers (loading threads, the training loop) run beside each other already:
a digest stays in the thread that asks for it. A copy made on the way is worth several where it is large: it writes too.
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
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from hf_rocm_tune.transfer.digest_device import DigestMethod
from hf_rocm_tune.transfer.digest_weights import BLOCK_WORDS, block_factor, block_term, place_weights

HostSums = Callable[[Tensor, int, Tensor | None], tuple[int, int]]
"""As `host_sums`."""

BYTES_A_THREAD = 4 << 20
THREADS = 4

_M64 = 0xFFFFFFFFFFFFFFFF


def host_sums(flat: Tensor, index: int, copy_to: Tensor | None = None) -> tuple[int, int]:
    """The digest's two sums modulo 2^64, and a copy of the bytes in the same pass over them.

    Args:
        flat: uint8[n], contiguous, on the host.
        index: that of its first word.
        copy_to: uint8[n], contiguous, on the host, apart from `flat`; None for no copy.
    """
    return _chosen()[0](flat, index, copy_to)


def host_method() -> DigestMethod:
    """How `host_sums` computes, and why; compiles when it must."""
    return _chosen()[1]


_choice: tuple[HostSums, DigestMethod] | None = None
_choice_lock = threading.Lock()


def _chosen() -> tuple[HostSums, DigestMethod]:
    global _choice
    if _choice is None:
        with _choice_lock:
            _choice = _choice or _choose()
    return _choice


def _choose() -> tuple[HostSums, DigestMethod]:
    native, reason = load_native()
    if native is None:
        return torch_sums, DigestMethod(name="torch", reason=reason)
    sums = with_table(native)
    # Every place of a block, a start within one, the end of one, a tail, an odd address, a copy by threads.
    data = place_weights(torch.device("cpu")).view(torch.uint8)
    large = data.repeat(1 + 2 * BYTES_A_THREAD // data.numel())
    for piece, index in ((data[:-5], 0), (data[3:4002], 2 * BLOCK_WORDS - 99), (large, 7)):
        copy = ~piece
        expected = torch_sums(piece, index)
        if expected != sums(piece, index, None) or expected != sums(piece, index, copy) or not torch.equal(copy, piece):
            return torch_sums, DigestMethod(name="torch", reason=f"other sums than plain torch when {reason}")
    return sums, DigestMethod(name="native", reason=reason)


def with_table(native: NativeSums) -> HostSums:
    """The compiled function on tensors."""
    table = place_weights(torch.device("cpu"))
    threads = min(THREADS, len(os.sched_getaffinity(0)))

    def sums(flat: Tensor, index: int, copy_to: Tensor | None = None) -> tuple[int, int]:
        if copy_to is None:
            return native(flat.data_ptr(), None, flat.numel(), index, table.data_ptr(), 1)
        assert copy_to.numel() == flat.numel()
        wanted = min(threads, flat.numel() // BYTES_A_THREAD)
        return native(flat.data_ptr(), copy_to.data_ptr(), flat.numel(), index, table.data_ptr(), wanted)

    return sums


def torch_sums(flat: Tensor, index: int, copy_to: Tensor | None = None) -> tuple[int, int]:
    """The same as `host_sums` in plain torch, on blocks that stay in the cache."""
    s1 = s2 = position = 0
    while position < flat.numel():
        number, low = divmod(index, BLOCK_WORDS)
        end = min(flat.numel(), position + 4 * (BLOCK_WORDS - low))
        total, weighted = _scratch.reduce(flat[position:end], low)
        if copy_to is not None:
            copy_to[position:end].copy_(flat[position:end])
        s1 += total
        s2 += weighted * block_factor(number) + total * block_term(number)
        position, index = end, index + BLOCK_WORDS - low
    return s1 & _M64, s2 & _M64


class _Scratch(threading.local):
    """Memory of one thread for plain torch: 768 KiB, made once, when the thread first digests."""

    def __init__(self) -> None:
        self.table = place_weights(torch.device("cpu"))
        with torch.inference_mode(False):
            self.words = torch.empty(BLOCK_WORDS, dtype=torch.int64)
            self.aligned = torch.empty(4 * BLOCK_WORDS, dtype=torch.uint8)

    def reduce(self, block: Tensor, low: int) -> tuple[int, int]:
        """(sum of words, dot with the table from `low` on) of at most one block of bytes."""
        whole = block.numel() // 4
        total = weighted = 0
        if whole:
            words = self.words[:whole]
            body = block[: 4 * whole]
            if body.data_ptr() % 4 or body.storage_offset() % 4:
                body = self.aligned[: 4 * whole].copy_(body)
            words.copy_(body.view(torch.uint32))
            total, weighted = int(words.sum()), int(torch.dot(words, self.table[low : low + whole]))
        if block.numel() % 4:
            word = int.from_bytes(bytes(block[4 * whole :].tolist()), "little")
            total, weighted = total + word, weighted + word * int(self.table[low + whole])
        return total, weighted


_scratch = _Scratch()


# ----------------------------------------------------------------------------------------------------
# The host's digest in C, compiled at first use with the system's compiler; without one, plain torch does the same.
#
# Nothing is needed to install the package, and nothing is downloaded: `cc` (or ``CC``) compiles 100 lines that ship
# with it, for this very processor, into the user's cache directory. The library is named by its source and the
# processor, so neither an update nor a home directory shared between machines can bring up one that does not fit.
# `digest_host` uses it once it has given the same sums as plain torch.

SOURCE = Path(__file__).with_suffix(".c")
FLAGS = ("-O3", "-march=native", "-pthread", "-shared", "-fPIC")
COMPILE_SECONDS = 60

NativeSums = Callable[[int, int | None, int, int, int, int], tuple[int, int]]
"""Address, address of a copy to be made or None, bytes, index of the first word, address of the table and threads to
``(s1, s2)`` modulo 2^64."""


def cache_directory() -> Path:
    """Where compiled libraries are kept: ``hf_rocm_tune`` in ``XDG_CACHE_HOME``, which is ``~/.cache`` by default."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "hf_rocm_tune" / "native"


def load_native() -> tuple[NativeSums | None, str]:
    """The compiled function, unchecked, or None; and in words what it was compiled with, or why there is none."""
    compiler = shutil.which(os.environ.get("CC") or "cc")
    if compiler is None:
        return None, "there is no C compiler (cc, or what CC names)"
    try:
        library = cache_directory() / f"digest-{_key(compiler)}.so"
        if not library.exists():
            _compile(compiler, library)
        return _bind(library), f"compiled with {compiler} {' '.join(FLAGS)}"
    except subprocess.CalledProcessError as error:
        lines = error.stderr.decode(errors="replace").strip().splitlines() or ["no message"]
        return None, f"{compiler} failed: {lines[0][:200]}"
    # A home that cannot be found, a directory that cannot be written, a library that cannot be loaded, a time-out.
    except (OSError, RuntimeError, AttributeError, subprocess.SubprocessError) as error:
        return None, f"{type(error).__name__}: {error}"


def _key(compiler: str) -> str:
    """Changes with the source, the flags, the compiler's path and the processor's instruction set."""
    content = hashlib.sha256(SOURCE.read_bytes())
    content.update(repr((FLAGS, compiler, platform.machine(), _instruction_set())).encode())
    return content.hexdigest()[:24]


def _instruction_set() -> list[str]:
    """The lines of ``/proc/cpuinfo`` that decide what ``-march=native`` means, without repetition."""
    names = ("vendor_id", "cpu family", "model", "flags", "Features", "CPU part")
    lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    return sorted({line for line in lines if line.partition("\t")[0].partition(":")[0].strip() in names})


def _compile(compiler: str, library: Path) -> None:
    library.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    with tempfile.TemporaryDirectory(dir=library.parent) as directory:
        fresh = Path(directory) / library.name
        command = [compiler, *FLAGS, str(SOURCE), "-o", str(fresh)]
        subprocess.run(command, check=True, capture_output=True, timeout=COMPILE_SECONDS, stdin=subprocess.DEVNULL)
        fresh.replace(library)  # at once: other processes may be compiling, or loading, the same


def _bind(library: Path) -> NativeSums:
    function = ctypes.CDLL(str(library)).hf_rocm_tune_digest  # a CDLL's functions run without the interpreter's lock
    pointer = ctypes.c_void_p
    function.argtypes = (pointer, pointer, ctypes.c_uint64, ctypes.c_uint64, pointer, ctypes.c_int, pointer)
    function.restype = None

    def sums(address: int, copy: int | None, nbytes: int, index: int, table: int, threads: int) -> tuple[int, int]:
        result = (ctypes.c_uint64 * 2)()
        function(address, copy, nbytes, index, table, threads, result)
        return result[0], result[1]

    return sums
