"""``hf-rocm-tune plan --measure``: the speed of this machine's card, and the memory of the runtime on it.

A child process times matrix products in bfloat16 by size, dequantisation of 4-bit weights, and a copy within the card's
memory; the runtime's memory is that of another process. The result is saved by card, kernel and versions in
``hf_rocm_tune/rates.json`` below ``XDG_CACHE_HOME``. A CPU is not measured; results of a simulated card are not saved.
Not covered: clocks that fall in a long run, and float16.
"""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any

from hf_rocm_tune.errors import UsageError
from hf_rocm_tune.machine import child
from hf_rocm_tune.plan.estimate import Rates

_SMALL, _LARGE = 1024, 8192  # of cubed matrix products: from both follow the fixed time of a product and the rate
_WEIGHT = 4096, 4096  # of the 4-bit weight
_COPY_BYTES = 256 << 20
_WARM, _TIMED = 3, 10
_FIELDS = {"card", "date", "simulated", "small_s", "large_s", "copy_s", "unpack_s", "context_bytes"}
_DEADLINE_SECONDS = 300.0


def kept(card: str) -> dict[str, Any] | None:
    """The kept measurement of a card with this kernel and these versions; None if there is none."""
    found = _read().get(_key(card))
    return found if isinstance(found, dict) and found.keys() >= _FIELDS else None


def rates_of(measured: Mapping[str, Any], assumed: Rates) -> Rates:
    """The rates of a measurement, with assumed ones for what it lacks."""
    large, small = (2 * size**3 for size in (_LARGE, _SMALL))
    products = (large - small) / max(measured["large_s"] - measured["small_s"], 1e-9)
    unpacked = measured["unpack_s"]
    return Rates(
        products=products,
        each=max(0.0, measured["small_s"] - small / products),
        unpacked=_WEIGHT[0] * _WEIGHT[1] / unpacked if unpacked else assumed.unpacked,
        bandwidth=2 * _COPY_BYTES / measured["copy_s"],
        source=f"measured on this card on {measured['date']}",
        least=0.7,  # our own bounds, narrower than those of rates that were read
        most=1.2,
    )


def measure() -> tuple[dict[str, Any] | None, str]:
    """Measures this machine's card and keeps the result.

    Returns:
        The measurement, or None without a real card; and a note for the reader.

    Raises:
        UsageError: the measurement failed.
    """
    done = child.run(__name__, request={}, deadline_s=_DEADLINE_SECONDS)
    if done.result is None:
        raise UsageError(f"--measure: the measuring process {done.how}; see `hf-rocm-tune doctor`, or plan without it")
    found = done.result
    if not found:
        return None, "torch sees no card here, so nothing was measured: the rates are assumed"
    if found["simulated"]:
        return None, f"measured on {found['card']}, which is no card: not used and not kept; the rates are assumed"
    path = _path()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        fresh = path.with_suffix(f".{os.getpid()}")
        fresh.write_text(json.dumps(_read() | {_key(found["card"]): found}, indent=1), encoding="utf-8")
        fresh.replace(path)
    except OSError as error:
        return found, f"the measurement could not be kept in {path}: {error.strerror}"
    return found, f"measured on {found['card']}, kept in {path}"


def _path() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "hf_rocm_tune" / "rates.json"


def _read() -> dict[str, Any]:
    try:
        found = json.loads(_path().read_text(encoding="utf-8"))
    except (OSError, ValueError, RuntimeError):  # RuntimeError: there is no home
        return {}
    return found if isinstance(found, dict) else {}


def _key(card: str) -> str:
    """Changes with the card, the kernel and its driver, torch (whose version names ROCm's) and bitsandbytes."""
    driver = Path("/sys/module/amdgpu/version")
    parts = [card, platform.release(), driver.read_text().strip() if driver.is_file() else ""]
    for name in ("torch", "bitsandbytes"):
        try:
            parts.append(f"{name} {metadata.version(name)}")
        except metadata.PackageNotFoundError:
            parts.append(f"no {name}")
    return " | ".join(filter(None, parts))


# ---- in the child ----------------------------------------------------------------------------------------------------

#: A process that allocates the runtime's memory, like a training process, and waits.
_HOLDER = """
import sys, torch
a = torch.ones(1024, 1024, dtype=torch.bfloat16, device="cuda")
(a @ a).sum().item()
print(torch.cuda.memory_reserved(), flush=True)
sys.stdin.read()
"""


def _measure(request: dict[str, Any]) -> dict[str, Any]:
    import torch

    from hf_rocm_tune.machine.cards import identify

    del request
    if not torch.cuda.is_available():
        return {}
    known = torch.cuda.get_device_properties(0)
    arch = getattr(known, "gcnArchName", None)
    card = identify(arch=arch, vram_bytes=known.total_memory, name=known.name).card
    found: dict[str, Any] = {"card": card.name if card else known.name, "date": time.strftime("%Y-%m-%d")}
    found["simulated"] = "simulated" in known.name.lower()
    for name, wanted in (("small_s", _SMALL), ("large_s", _LARGE)):
        size = wanted // 32 if found["simulated"] else wanted  # its times are not used
        child.step(f"timing matrix products of {size} cubed")
        a, b = (torch.randn(size, size, dtype=torch.bfloat16, device="cuda") for _ in range(2))
        found[name] = _seconds(partial(torch.matmul, a, b))
    child.step("timing a copy within the card")
    source = torch.empty(_COPY_BYTES, dtype=torch.uint8, device="cuda")
    found["copy_s"] = _seconds(source.clone)
    child.step("timing the unpacking of 4-bit weights")
    found["unpack_s"] = _unpacking_seconds()
    child.step("starting a second process on the card")
    found["context_bytes"] = _context_bytes()
    return found


def _unpacking_seconds() -> float | None:
    import torch

    try:
        from bitsandbytes import functional

        weight = torch.randn(*_WEIGHT, dtype=torch.bfloat16, device="cuda")
        packed, state = functional.quantize_4bit(weight, quant_type="nf4", compress_statistics=True)
        return _seconds(lambda: functional.dequantize_4bit(packed, state))
    except Exception:  # no library for this card: 4-bit training reports it
        return None


def _context_bytes() -> int | None:
    """Memory of the card that a second process uses outside its allocator; None if it cannot be determined."""
    import torch

    before = torch.cuda.mem_get_info(0)[0]
    command = [sys.executable, "-P", "-c", _HOLDER]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout is not None
        reserved = holder.stdout.readline().strip()
        taken = before - torch.cuda.mem_get_info(0)[0]
        holder.communicate()
    return taken - int(reserved) if reserved.isdigit() and taken > int(reserved) else None


def _seconds(work: Callable[[], object]) -> float:
    import torch

    for count in (_WARM, _TIMED):
        torch.cuda.synchronize()
        began = time.perf_counter()
        for _ in range(count):
            work()
        torch.cuda.synchronize()
    return (time.perf_counter() - began) / _TIMED


if __name__ == "__main__":
    sys.exit(child.answer(_measure))
