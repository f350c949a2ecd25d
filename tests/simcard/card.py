"""Builds the simulated card's library, loads it before torch, and is its control panel.

Variables, read when torch is imported and again by `configure`:

    SIMCARD_DEVICES=1|2      cards; 1 by default
    SIMCARD_CAPACITY=bytes   memory of each; 20 GiB by default
    SIMCARD_OCCUPIED=bytes   of it are held by other processes; 0 by default
    SIMCARD_ARCH=gfx1100     ``gcnArchName``; "simulated" by default
    SIMCARD_DELAYS=a,b,c,d   each task of compute streams takes a..b, of other streams c..d microseconds longer
    SIMCARD_POISON=1         fresh and freed memory is overwritten
    SIMCARD_SEED=n           of the delays and of the harm
    SIMCARD_HARM=kind,rate   copies to the card go wrong: flip, zero, drop or stale, with this probability each;
                             kind,rate,bytes: only copies of at least as many bytes
    SIMCARD_HARM_BACK=...    likewise of copies to the host
    SIMCARD_WRONG=rate,seed  matrix products leave a tile at zero, with this probability each
    SIMCARD_REFUSAL=kind     who says that there is no memory: torch (as by default), accelerator, driver, blas,
                             or exit: bitsandbytes, which ends the process
    SIMCARD_LIBRARY=bytes    what the first matrix product of each thread takes outside torch's allocator
    SIMCARD_GFX1100=1        a ROCm torch and a gfx1100: kernels of Triton and of bitsandbytes' ROCm library run, as
                             machine code that `tests.gfx1100` executes; `tests.gfx1100.hip` has more variables
    SIMCARD_TRITON=broken    Triton can be imported, and its driver does not compile, as without Python's headers; or
                             "absent": there is none
    SIMCARD_OPERATORS=file   when the process ends, a line for each operator that the CPU's code has computed: its name,
                             how often, and how many bytes it read and wrote
    SIMCARD_LOG=file         a line for each copy, wait, harm and first use: process, kind, card, bytes, who called
"""

from __future__ import annotations

import atexit
import ctypes
import hashlib
import os
import shutil
import subprocess
import sys
import threading
from importlib.util import find_spec
from pathlib import Path
from types import FrameType, ModuleType

HERE = Path(__file__).resolve().parent
NAME = "Simulated card"
KINDS = ("to_card", "to_host", "wait", "context", "harm")
HARMS = ("none", "flip", "zero", "drop", "stale")
REFUSALS = ("torch", "accelerator", "driver", "blas", "exit")
COUNTED = (
    "kernels_async", "kernels_sync", "copies_async", "copies_sync", "blocks_reused", "blocks_fresh",
    "to_card_bytes", "to_host_bytes", "waits", "harmed",
)  # fmt: skip
_HOOK = ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_int, ctypes.c_int64)
_hook = _HOOK()
lib: ctypes.CDLL


class NoCompiler(Exception):
    """The library cannot be built here; says why."""


def torch_directory() -> Path:
    """Where torch is installed; does not import it."""
    spec = find_spec("torch")
    assert spec is not None and spec.origin is not None
    return Path(spec.origin).parent


def library() -> Path:
    """The built library: made on first use, kept until torch, the compiler or the source changes.

    Raises:
        NoCompiler: there is none, or it does not compile this.
    """
    compiler = shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        raise NoCompiler("the simulated card needs g++ or clang++, and there is neither")
    source, torch = HERE / "card.cpp", torch_directory()
    version = subprocess.run([compiler, "--version"], capture_output=True, text=True, check=True).stdout
    read = (source, HERE.parent / "gfx1100" / "blas.h", torch / "version.py")
    parts = (*(path.read_bytes() for path in read), version.encode(), str(torch).encode())
    key = hashlib.sha256(b"".join(parts)).hexdigest()[:16]
    target = HERE.parents[1] / "build" / "simcard" / f"{key}.so"
    if target.exists():
        return target
    from filelock import FileLock

    target.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(target.with_suffix(".lock")):
        if not target.exists():
            _compile(compiler, source, torch, target)
    return target


def _compile(compiler: str, source: Path, torch: Path, target: Path) -> None:
    scratch = target.with_suffix(".building")
    includes = [f"-I{torch}/include", f"-I{torch}/include/torch/csrc/api/include"]
    libraries = [f"-L{torch}/lib", f"-Wl,-rpath,{torch}/lib", "-Wl,--no-as-needed", "-ltorch_cpu", "-lc10", "-pthread"]
    command = [compiler, "-std=c++20", "-O1", "-g0", "-fPIC", "-shared", "-w", *includes, str(source), "-o"]
    done = subprocess.run([*command, str(scratch), *libraries], capture_output=True, text=True, check=False)
    if done.returncode:
        raise NoCompiler(f"the simulated card does not compile here: {done.stderr.strip()[:600]}")
    scratch.rename(target)


def load() -> None:
    """Puts the card in place of CUDA. torch asks once, when it is imported, so this comes before."""
    global lib
    os.environ.setdefault("TORCH_DEVICE_BACKEND_AUTOLOAD", "0")
    os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")  # there is no compiler for this card
    if os.environ.get("SIMCARD_TRITON") == "absent":
        sys.modules["triton"] = None  # type: ignore[assignment]
    for name in sorted((torch_directory() / "lib").glob("libgomp*")):
        ctypes.CDLL(str(name), mode=ctypes.RTLD_GLOBAL)
    lib = ctypes.CDLL(str(library()), mode=ctypes.RTLD_GLOBAL)
    lib.sim_capacity.argtypes = [ctypes.c_int64]
    lib.sim_occupied.argtypes = [ctypes.c_int64]
    lib.sim_refusal.argtypes = [ctypes.c_int, ctypes.c_int64]
    lib.sim_seed.argtypes = [ctypes.c_uint64]
    lib.sim_wrong.argtypes = [ctypes.c_double, ctypes.c_uint64]
    lib.sim_harm.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_double, ctypes.c_int64]
    lib.sim_resize.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    lib.sim_rng_seed.argtypes = [ctypes.c_int, ctypes.c_uint64]
    lib.sim_rng_get.argtypes = lib.sim_rng_set.argtypes = [ctypes.c_int, ctypes.c_void_p, ctypes.c_int]
    lib.sim_blocks.argtypes = [ctypes.c_int, ctypes.c_void_p, ctypes.c_int]
    lib.sim_count.restype = ctypes.c_int64
    lib.sim_rng_initial_seed.restype = ctypes.c_uint64
    lib.sim_products.argtypes = [ctypes.c_void_p]
    lib.sim_stream.restype = ctypes.c_void_p
    if gfx1100():
        from tests.gfx1100 import hip

        lib.sim_products(hip.install())


def gfx1100() -> bool:
    """Whether kernels are gfx1100 machine code."""
    return os.environ.get("SIMCARD_GFX1100") == "1"


def refuse_to_compile(driver: ModuleType) -> None:
    """Lets ``triton.runtime.driver`` fail as it does on a machine without Python's headers: at the first launch."""
    if gfx1100():
        return

    def without_headers() -> None:
        command = [
            "/usr/bin/gcc",
            "/tmp/simulated/hip_utils.c",
            "-O3",
            "-shared",
            "-fPIC",
            "-o",
            "/tmp/simulated/hip_utils.so",
        ]
        raise subprocess.CalledProcessError(1, [*command, *[f"-I/opt/simulated/{number}" for number in range(20)]])

    driver._create_driver = without_headers


def configure() -> None:
    """Takes over what the environment says now; a forked process has its own."""
    environ = os.environ
    lib.sim_devices(max(1, min(2, int(environ.get("SIMCARD_DEVICES", "1")))))
    lib.sim_capacity(capacity())
    lib.sim_occupied(int(environ.get("SIMCARD_OCCUPIED", "0")))
    lib.sim_seed(int(environ.get("SIMCARD_SEED", "1")))
    delay(*map(int, environ.get("SIMCARD_DELAYS", "0,0,0,0").split(",")))
    poison(environ.get("SIMCARD_POISON") == "1")
    for back, name in enumerate(("SIMCARD_HARM", "SIMCARD_HARM_BACK")):
        kind, rate, *smallest = environ.get(name, "none,0").split(",")
        lib.sim_harm(back, HARMS.index(kind), float(rate), int(smallest[0]) if smallest else 1)
    wrong, seed = environ.get("SIMCARD_WRONG", "0,0").split(",")
    lib.sim_wrong(float(wrong), int(seed))
    refusal = REFUSALS.index(environ.get("SIMCARD_REFUSAL", "torch"))
    lib.sim_refusal(refusal, int(environ.get("SIMCARD_LIBRARY", "0")))
    if "SIMCARD_LOG" in environ:
        log_to(environ["SIMCARD_LOG"])
    if "SIMCARD_OPERATORS" in environ:
        lib.sim_count_operators(1)
        atexit.register(_write_operators, Path(environ["SIMCARD_OPERATORS"]))
    if gfx1100():
        from tests.gfx1100 import hip

        hip.configure()


def capacity() -> int:
    """Bytes of memory of each card."""
    return int(os.environ.get("SIMCARD_CAPACITY", str(20 << 30)))


def delay(compute_low: int = 0, compute_high: int = 0, copy_low: int = 0, copy_high: int = 0) -> None:
    """Lets each task of compute streams and of other streams take longer, at random, in microseconds."""
    lib.sim_delay(compute_low, compute_high, copy_low, copy_high)


def poison(on: bool) -> None:
    """Whether fresh and freed memory is overwritten."""
    lib.sim_poison(int(on))


def counts() -> dict[str, int]:
    """What the driver has counted in this process."""
    return {name: lib.sim_count(i) for i, name in enumerate(COUNTED)}


def sync_ops() -> list[str]:
    """Operators for which the caller waits, for want of a shape before they run."""
    room = ctypes.create_string_buffer(1 << 16)
    lib.sim_sync_ops(room, len(room))
    return room.value.decode().split()


def _write_operators(path: Path) -> None:
    room = ctypes.create_string_buffer(1 << 16)
    lib.sim_operators(room, len(room))
    with path.open("ab") as file:
        file.write(room.value)


def log_to(path: str) -> None:
    """Appends a line for each copy between host and card, each wait, each harm done, each card's first use."""
    global _hook
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)

    def seen(kind: int, device: int, nbytes: int) -> None:
        os.write(file, f"{os.getpid()}\t{KINDS[kind]}\t{device}\t{nbytes}\t{_caller()}\n".encode())

    _hook = _HOOK(seen)
    lib.sim_hook(_hook)


def _caller() -> str:
    """The innermost caller outside torch as ``file:function``; "engine" stands before what our engine does. A thread
    without Python has its name alone."""
    try:
        frame: FrameType | None = sys._getframe(2)
    except ValueError:
        return "thread " + Path(f"/proc/self/task/{threading.get_native_id()}/comm").read_text().strip()
    name, engine = "", False
    while frame is not None:
        path = frame.f_code.co_filename
        if path.endswith("/hf_rocm_tune/transfer/interception.py"):
            name = ""  # whoever asked for this copy is above
        elif "/torch/" not in path and not path.startswith("<"):
            name = name or "/".join(path.split("/")[-2:]) + ":" + frame.f_code.co_qualname
            engine = engine or "/hf_rocm_tune/transfer/" in path
        frame = frame.f_back
    return f"engine {name}" if engine else name
