"""Builds the interpreter of gfx1100 machine code on first use; kept until sources, compiler or processor change."""

from __future__ import annotations

import hashlib
import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

HERE = Path(__file__).resolve().parent
# Without -ffp-contract=off a product and a sum would be fused where the card rounds twice.
FLAGS = ["-std=c++20", "-O3", "-g0", "-march=native", "-ffp-contract=off", "-fno-math-errno", "-fPIC"]
# What others add to the interpreter (the HIP runtime's stand-in) is built apart from it.
SOURCES = sorted(
    HERE / f"{name}.cpp"
    for name in (
        "conversion_ops",
        "decode",
        "float_ops",
        "integer_ops",
        "lds",
        "memory",
        "packed_ops",
        "scalar",
        "text",
        "vector",
        "wave",
    )
)


class NoCompiler(Exception):
    """The interpreter cannot be built here; says why."""


def library() -> Path:
    """Path of the shared library.

    Raises:
        NoCompiler: there is none, or it does not compile this.
    """
    compiler = shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        raise NoCompiler("the gfx1100 interpreter needs g++ or clang++, and there is neither")
    version = subprocess.run([compiler, "--version"], capture_output=True, check=True).stdout
    # `native` is another thing on another processor, and a build directory may be shared.
    processor = next((line for line in Path("/proc/cpuinfo").read_text().splitlines() if "flags" in line.lower()), "")
    headers = sorted(HERE.glob("*.h"))
    parts = [path.read_bytes() for path in (*headers, *SOURCES)] + [version, processor.encode(), repr(FLAGS).encode()]
    key = hashlib.sha256(b"".join(parts)).hexdigest()[:16]
    target = HERE.parents[1] / "build" / "gfx1100" / f"{key}.so"
    if not target.exists():
        from filelock import FileLock

        target.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(target.with_suffix(".lock")):
            if not target.exists():
                _compile(compiler, target)
    return target


def _compile(compiler: str, target: Path) -> None:
    objects = target.with_suffix(".parts")
    objects.mkdir(exist_ok=True)

    def run(command: list[str]) -> None:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise NoCompiler(f"the gfx1100 interpreter does not compile here: {done.stderr.strip()[:600]}")

    with ThreadPoolExecutor(2) as pool:
        for _ in pool.map(run, ([compiler, *FLAGS, "-c", str(s), "-o", str(objects / f"{s.stem}.o")] for s in SOURCES)):
            pass
    scratch = target.with_suffix(".building")
    run([compiler, "-shared", *(str(objects / f"{s.stem}.o") for s in SOURCES), "-o", str(scratch)])
    shutil.rmtree(objects)
    scratch.rename(target)
