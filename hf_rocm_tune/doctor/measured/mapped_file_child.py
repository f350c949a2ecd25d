"""The child's half of ``mmap_heap``."""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from hf_rocm_tune.machine.child import device_of, step
from hf_rocm_tune.transfer import Mover
from hf_rocm_tune.transfer.pattern import count_wrong, fill_with_pattern
from hf_rocm_tune.transfer.raw_copies import Copies, copies_for, wait_for

_FIRST_MIB, _MIB = 8, 32
_ROUNDS = 3
_LONG_SECONDS = 1.0
_SLOW_SECONDS = 1.5
_NAME = "weight"


def measure(request: Mapping[str, Any]) -> dict[str, Any]:
    """Time both.

    Args:
        request: ``device``, ``address``; ``fault``: ``slow`` or ``zeros``.

    Returns:
        ``mib`` copied; medians ``mapped_s``, ``heap_s``, ``mover_s`` in seconds; ``wrong`` bytes of the mapped one on
        the device; ``directory`` of the file.
    """
    device = device_of(request)
    slow = (request.get("fault") or {}).get("kind") == "slow"
    bench = _Bench(device, copies_for(request), _SLOW_SECONDS if slow else 0.0)
    with tempfile.TemporaryDirectory(prefix="hf-rocm-tune-doctor-", dir=_directory()) as folder:
        small = _write(Path(folder), _FIRST_MIB)
        bench.heap(small)  # the first copy of a process starts what all later ones use
        rounds = [bench.round(small)]
        mib = _FIRST_MIB
        # Where it stalls, 8 MiB take seconds and say enough.
        if rounds[0]["mapped_s"] < _LONG_SECONDS:
            mib, file = _MIB, _write(Path(folder), _MIB)
            rounds = [bench.round(file) for _ in range(_ROUNDS)]
    medians = {name: statistics.median(one[name] for one in rounds) for name in ("mapped_s", "heap_s", "mover_s")}
    wrong = sum(int(one["wrong"]) for one in rounds)
    return {"mib": mib, "wrong": wrong, "directory": str(Path(folder).parent), **medians}


class _Bench:
    def __init__(self, device: torch.device, copies: Copies, delay: float) -> None:
        self._device, self._copies, self._delay = device, copies, delay

    def round(self, file: Path) -> dict[str, float]:
        """All three ways once."""
        mapped_s, wrong = self.mapped(file)
        return {"mapped_s": mapped_s, "wrong": wrong, "heap_s": self.heap(file), "mover_s": self.moved(file)}

    def mapped(self, file: Path) -> tuple[float, int]:
        """Seconds of a copy out of a fresh mapping, and how many bytes arrived wrong."""
        with safe_open(file, framework="pt") as opened:
            seconds, arrived = self._time(opened.get_tensor(_NAME), "a mapped tensor", self._delay)
        return seconds, count_wrong(arrived, 0)

    def heap(self, file: Path) -> float:
        """Seconds of a copy of the same bytes from the heap."""
        with safe_open(file, framework="pt") as opened:
            return self._time(opened.get_tensor(_NAME).clone(), "a tensor on the heap", 0.0)[0]

    def moved(self, file: Path) -> float:
        """Seconds of a verified transfer out of a fresh mapping by our own mover, as weights are loaded."""
        step(f"moving a mapped tensor to {self._device} through page-locked slots")
        with safe_open(file, framework="pt") as opened, Mover(self._device) as mover:
            mover.move(fill_with_pattern(torch.empty(1 << 20, dtype=torch.uint8), 1), name="first")
            began = time.perf_counter()
            wait_for(mover.move(opened.get_tensor(_NAME), name=_NAME))
            return time.perf_counter() - began

    def _time(self, tensor: Tensor, what: str, delay: float) -> tuple[float, Tensor]:
        step(f"copying {what} of {tensor.nbytes >> 20} MiB to {self._device}")
        destination = torch.empty(tensor.shape, dtype=tensor.dtype, device=self._device)
        wait_for(destination)
        began = time.perf_counter()
        self._copies.copy(destination, tensor, what=f"{what} to {self._device}")
        wait_for(destination)
        time.sleep(delay)
        return time.perf_counter() - began, destination


def _write(folder: Path, mib: int) -> Path:
    file = folder / f"{mib}.safetensors"
    save_file({_NAME: fill_with_pattern(torch.empty(mib << 20, dtype=torch.uint8), 0)}, file)
    with file.open("rb") as written:
        os.fsync(written.fileno())  # the pages of a model's file are in memory, and on the disc
    return file


def _directory() -> str:
    """A directory on a disc, as models are: the temporary one is memory on many machines, which maps differently."""
    for directory in ("/var/tmp", tempfile.gettempdir()):
        try:
            with tempfile.TemporaryFile(dir=directory):
                return directory
        except OSError:
            continue
    return tempfile.gettempdir()
