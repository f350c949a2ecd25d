"""One load in a process of its own: ``python -m hf_rocm_tune.bench.load_child SPEC.json ANSWER.json``.

Everything is imported and the device is woken before the clock starts, the same for both sides.
"""

from __future__ import annotations

import contextlib
import json
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

import torch
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, LlamaForCausalLM
from transformers.utils import logging as transformers_logging
from trl.trainer import utils as trl_utils

from hf_rocm_tune.bench.loads import LoadSpec
from hf_rocm_tune.errors import OutOfMemoryError, TuneError, device_shortage
from hf_rocm_tune.models.factory import ModelSource, load_model
from hf_rocm_tune.models.placement import coverage
from hf_rocm_tune.transfer import Mover, TransferSettings, digest

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_TOKENS = 8
_BEFORE_THE_CLOCK = (LlamaForCausalLM, trl_utils.create_model_from_path)
"""What the two sides import only when they load, and neither shall pay for."""


def measure(spec: LoadSpec) -> dict[str, Any]:
    """Load, run one ``forward`` of 8 tokens, and say how long it took and what it needed.

    Returns:
        ``seconds_load``, ``seconds_to_forward``, bytes of memory, the digest of the logits, and the share of the
        model's bytes that was verified (None for stock).
    """
    device = torch.device(spec.device)
    tokens = torch.arange(_TOKENS, device=device)[None]  # the device is awake now
    _synchronise(device)
    load = _ours(spec, device) if spec.side == "ours" else _stock(spec, device)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    with PeakMemory() as memory, torch.no_grad():
        started = time.perf_counter()
        model, share = load()
        _synchronise(device)
        loaded = time.perf_counter()
        logits = model(tokens).logits
        _synchronise(device)
        ended = time.perf_counter()
    return {
        "seconds_load": loaded - started,
        "seconds_to_forward": ended - started,
        "host_before": asdict(memory.before),
        "host_peak": asdict(memory.peak),
        "device_peak": torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None,
        "logits": digest(logits).hex(),
        "verified_share": share(),
    }


Loaded = tuple["PreTrainedModel", Callable[[], float | None]]


def _stock(spec: LoadSpec, device: torch.device) -> Callable[[], Loaded]:
    def load() -> Loaded:
        quantization = {"quantization_config": _nf4()} if spec.load_in_4bit else {}
        model = AutoModelForCausalLM.from_pretrained(
            spec.model, dtype=torch.bfloat16, device_map={"": device}, **quantization
        )
        return model, lambda: None

    return load


def _ours(spec: LoadSpec, device: torch.device) -> Callable[[], Loaded]:
    source = ModelSource(
        name=spec.model, init={"dtype": "bfloat16"}, quantization=_nf4() if spec.load_in_4bit else None
    )

    def load() -> Loaded:
        mover = Mover(device, settings=TransferSettings(verify=spec.verify))
        model, _ = load_model(source, mover)

        def share() -> float:
            found = coverage(model, mover)
            return found.verified_bytes / found.device_bytes

        return model, share

    return load


def _nf4() -> BitsAndBytesConfig:
    return BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=torch.bfloat16,
    )


def _synchronise(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


# ---- memory -----------------------------------------------------------------------------------------------------

_STATUS = Path("/proc/self/status")
_CLEAR = Path("/proc/self/clear_refs")
_EVERY_SECONDS = 0.01


@dataclass(frozen=True, kw_only=True)
class HostMemory:
    """Bytes of resident memory; None where the system does not say (only Linux does)."""

    anonymous: int | None  # memory that no file backs (``RssAnon``)
    resident: int | None  # all of it, mapped files included (``VmRSS``, its peak ``VmHWM``)


class PeakMemory:
    """Watches the peaks within a ``with`` block.

    ``resident`` is the kernel's own peak. ``anonymous`` is looked at every 10 ms, because the kernel keeps no peak of
    it: a shorter peak may be missed.
    """

    def __init__(self) -> None:
        self.before = HostMemory(anonymous=_read("RssAnon"), resident=_read("VmRSS"))
        self._anonymous = self.before.anonymous
        self._done = threading.Event()
        self._watcher = threading.Thread(target=self._watch, name="memory-watch", daemon=True)

    @property
    def peak(self) -> HostMemory:
        """The peaks so far."""
        return HostMemory(anonymous=self._anonymous, resident=_read("VmHWM"))

    def __enter__(self) -> PeakMemory:
        # Where it is refused, the peak is that of the process so far, which imports alone have not raised much.
        with contextlib.suppress(OSError):
            _CLEAR.write_text("5", encoding="ascii")  # the kernel's peak starts anew, see proc(5)
        self._watcher.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._done.set()
        self._watcher.join()
        self._look()

    def _watch(self) -> None:
        while not self._done.wait(_EVERY_SECONDS):
            self._look()

    def _look(self) -> None:
        now = _read("RssAnon")
        if now is not None:
            self._anonymous = max(now, self._anonymous or 0)


def _read(name: str) -> int | None:
    """A field of this process's status, in bytes; None where there is none."""
    try:
        lines = _STATUS.read_text(encoding="ascii").splitlines()
    except OSError:
        return None
    row = next((line for line in lines if line.startswith(f"{name}:")), None)
    return None if row is None else int(row.split()[1]) * 1024


def main(spec_file: str, answer_file: str) -> int:
    """Read a specification, measure, and write the answer: the figures, or ``error`` and ``exit_code``."""
    spec = LoadSpec(**json.loads(Path(spec_file).read_text(encoding="utf-8")))
    transformers_logging.disable_progress_bar()
    code = 0
    try:
        answer = measure(spec)
    except TuneError as error:
        code, answer = error.exit_code, {"error": str(error), "exit_code": error.exit_code}
    except RuntimeError as error:
        if (said := device_shortage(error)) is None:
            raise
        code = OutOfMemoryError.exit_code
        answer = {"error": f"{said}; give a smaller --scale", "exit_code": code}
    Path(answer_file).write_text(json.dumps(answer), encoding="utf-8")
    return code


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
