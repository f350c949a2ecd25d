"""Loads a synthetic checkpoint through the mover and prints how much host memory that took, as one JSON line.

Run in a process of its own: ``python loading_memory.py DIRECTORY``. "Device" memory is shared memory here, which the
kernel counts apart from the private memory of the process (``RssAnon``); pages of the mapped file are page cache and
are counted apart as well. What is left is the ring and whatever else the loading holds.
"""

from __future__ import annotations

import ctypes
import gc
import json
import mmap
import sys
import threading
import time
from pathlib import Path

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from hf_rocm_tune.models.factory import ModelSource, load_model
from hf_rocm_tune.transfer import HostBackend, Mover, TransferSettings

SLOTS, SLOT_BYTES = 4, 2 << 20
SLACK_BYTES = 16 << 20


class SharedMemoryDevice(HostBackend):
    """Weights lie in shared memory, and staging memory is counted."""

    staging_grows = False
    staged = 0

    def allocate(self, nbytes: int, *, long_lived: bool) -> Tensor:
        return torch.frombuffer(mmap.mmap(-1, max(nbytes, 1)), dtype=torch.uint8)[:nbytes]

    def staging(self, nbytes: int) -> Tensor:
        self.staged += nbytes
        return super().staging(nbytes)


def private_bytes() -> int:
    """``RssAnon`` of this process."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("RssAnon"))


class Peak(threading.Thread):
    """Samples the private memory until it is told to stop."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.highest = private_bytes()
        self._stop_now = threading.Event()

    def run(self) -> None:
        while not self._stop_now.is_set():
            self.highest = max(self.highest, private_bytes())
            time.sleep(0.001)

    def stop(self) -> int:
        self._stop_now.set()
        self.join()
        return max(self.highest, private_bytes())


def llama(layers: int, directory: Path) -> Path:
    """A checkpoint of 33 MB a layer, in shards of 100 MB."""
    config = LlamaConfig(
        hidden_size=1024,
        intermediate_size=4096,
        num_hidden_layers=layers,
        num_attention_heads=8,
        num_key_value_heads=8,
        vocab_size=512,
        dtype="bfloat16",
    )
    with torch.device("meta"):
        model = LlamaForCausalLM(config).to(torch.bfloat16)
    model.to_empty(device="cpu").save_pretrained(directory, max_shard_size="100MB")
    return directory


def load(directory: Path, mover: Mover) -> None:
    load_model(ModelSource(name=str(directory), init={"dtype": torch.bfloat16}), mover)


def main(place: Path) -> None:
    settings = TransferSettings(slots=SLOTS, slot_bytes=SLOT_BYTES)
    small, large = llama(1, place / "small"), llama(5, place / "large")
    with Mover(torch.device("cpu"), settings=settings) as warming:
        load(small, warming)  # imports, threads, caches
    gc.collect()
    # Freed memory that the C library keeps would hide as much of what comes now.
    ctypes.CDLL(None).malloc_trim(0)
    backend = SharedMemoryDevice()
    before = private_bytes()
    peak = Peak()
    peak.start()
    with Mover(torch.device("cpu"), settings=settings, backend=backend) as mover:
        load(large, mover)
        highest = peak.stop()
        verified = mover.report.to_dict()["weights"]["verified_bytes"]
    shards = list(large.glob("*.safetensors"))
    found = {
        "checkpoint_bytes": sum(file.stat().st_size for file in shards),
        "header_bytes": sum(8 + int.from_bytes(file.read_bytes()[:8], "little") for file in shards),
        "ring_bytes": SLOTS * SLOT_BYTES,
        "staging_bytes": backend.staged,
        "verified_bytes": verified,
        "peak_bytes": highest - before,
        "slack_bytes": SLACK_BYTES,
    }
    print(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
