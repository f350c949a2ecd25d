"""What is known of a micro-batch that found no memory, once its memory is given back; and what to do when it must fit.

The batch and the allocator's state at that moment are kept in a directory that is not uploaded. The allocator's
snapshot opens in https://pytorch.org/memory_viz.
"""

from __future__ import annotations

import atexit
import ctypes
import logging
import os
import pickle
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from hf_rocm_tune.errors import RUNTIME_OUT_OF_MEMORY, OutOfMemoryError, TuneError
from hf_rocm_tune.memory.stepdown import Layout, Part, next_divisor
from hf_rocm_tune.transfer import map_tensors

if TYPE_CHECKING:
    from hf_rocm_tune.training.mixin import VerifiedTransferMixin

logger = logging.getLogger(__name__)

_PEEK = ("hipPeekAtLastError", "cudaPeekAtLastError")
# The underscore keeps it out of transformers' uploads, which ignore "_*": it holds training data.
DIRECTORY = "_out_of_memory"


@dataclass(frozen=True, kw_only=True)
class Shortage:
    """A micro-batch of this rank, or a part of one, that ran out of memory.

    Attributes:
        wanted: by what micro-batches must be cut: so that this one gets smaller, or as before when it is worth another
            try as it is; None when it cannot be smaller.
        what: it, in words.
        said: the allocator's words.
        incident: for the report, but for its outcome, which is not known yet.
    """

    wanted: int | None
    what: str
    said: str
    incident: dict[str, Any]


def note(
    error: RuntimeError,
    *,
    trainer: VerifiedTransferMixin,
    micro_step: int,
    part: Part,
    layout: Layout,
    divisor: int,
    again: bool,
    number: int,
) -> Shortage:
    """Record a shortage. Keeps nothing of the error, which holds on to every activation; allocates no device memory.

    Args:
        error: see `errors.device_shortage`.
        trainer: in whose step.
        micro_step: number of the micro-batch in the optimizer step, from 1 on.
        part: what was computed.
        layout: of its micro-batch.
        divisor: by what micro-batches are cut at present.
        again: it is to be tried as it is once more.
        number: how many shortages this rank has had before.
    """
    step, rank = trainer.state.global_step + 1, trainer.args.process_index
    said = " ".join(str(error).split())
    name = f"step-{step}-rank-{rank}-{number + 1}"
    units = "sequence" if layout.kind == "packed" else "row"
    return Shortage(
        wanted=divisor if again else next_divisor(layout.sizes, divisor, part.units),
        what=f"{len(part.units)} {units}{'s' if len(part.units) > 1 else ''} ({part.tokens} tokens)"
        + (f" ({layout.reason})" if layout.reason else ""),
        said=said.split(". ")[0],
        incident={
            "step": step,
            "stage": "memory",
            "kind": "out of memory",
            "micro_step": micro_step,
            "rows": len(part.units),
            "tokens": part.tokens,
            "shapes": _shapes(part),
            "divisor": divisor,
            "said": said,
            "evidence": _keep(Path(trainer.args.output_dir) / DIRECTORY, name, part, layout, trainer.args.device, said),
        },
    )


def refusal(shortage: Shortage, trainer: VerifiedTransferMixin) -> str:
    """What to tell the user when this micro-batch cannot be made smaller."""
    args = trainer.args
    base = trainer.model.get_base_model() if hasattr(trainer.model, "get_base_model") else trainer.model
    quantised = getattr(base, "is_loaded_in_4bit", False)
    advice = []
    if getattr(args, "max_length", None):
        advice.append(f"lower --max_length (it is {args.max_length})")
    if not args.activation_checkpointing:
        advice.append("turn --activation_checkpointing on")
    if not quantised and hasattr(trainer.model, "peft_config"):
        advice.append("add --load_in_4bit")
    advice.append("see what fits with `hf-rocm-tune plan`")
    who = f"rank {args.process_index}: " if args.world_size > 1 else ""
    kept = shortage.incident["evidence"]
    seen = f"; the batch and the allocator's state are in {kept}" if kept else ""
    return (
        f"{who}no memory for {shortage.what} at step {shortage.incident['step']}, and a micro-batch cannot be smaller "
        f"({shortage.said}): {', or '.join(advice)}{seen}"
    )


def _keep(directory: Path, name: str, part: Part, layout: Layout, device: torch.device, said: str) -> str | None:
    """Write ``<name>.pt`` and, on an accelerator, ``<name>.pickle``; None when that fails: it is not worth the run."""
    accelerator = device.type == "cuda"
    content = {
        "said": said,
        "inputs": map_tensors(part.inputs, torch.clone),  # not the whole batch, of which it is a view
        "layout": layout.kind,
        "lengths": list(layout.sizes),
        "units": [part.units.start, part.units.stop],
        "memory_stats": dict(torch.cuda.memory_stats(device)) if accelerator else None,
    }
    try:
        directory.mkdir(parents=True, exist_ok=True)
        torch.save(content, directory / f"{name}.pt")
        if accelerator:
            (directory / f"{name}.pickle").write_bytes(pickle.dumps(torch.cuda.memory._snapshot(device)))
    except (OSError, RuntimeError) as failure:  # torch.save raises RuntimeError when a disk is full
        logger.warning("the batch that ran out of memory could not be kept in %s: %s", directory, failure)
        return None
    return str(directory)


def _shapes(part: Part) -> dict[str, list[int]]:
    return {name: list(value.shape) for name, value in part.inputs.items() if isinstance(value, torch.Tensor)}


def explain_native_exits(tell: Callable[[TuneError], None]) -> None:
    """From now on a native library that ends this process gives it a line and an exit code of ours.

    When a call to the runtime fails, bitsandbytes prints ``Error out of memory at line N in file F`` and calls C's
    ``exit(1)`` (csrc/compat.cuh, ``BNB_CHECK_RETURN``; bitsandbytes#464): nothing is raised, and nothing of Python runs
    any more but what C calls at the end.

    Args:
        tell: prints and records an error as the ending of this process.
    """
    libc, owner, alive = ctypes.CDLL(None), os.getpid(), True

    def ended(_: int | None) -> None:
        if alive and os.getpid() == owner:
            error = _native_error()
            tell(error)
            os._exit(error.exit_code)

    handler = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(ended)
    key = ctypes.pointer(handler)  # names the handler to libc, and is kept with it until Python ends

    def python_ends() -> None:
        nonlocal alive
        alive = False
        libc.__cxa_finalize(key)  # calls it and forgets it: without Python it could not run

    libc.__cxa_atexit(handler, None, key)
    atexit.register(python_ends)


def _native_error() -> TuneError:
    """What the runtime of the card said last; both give the same number to a shortage of memory."""
    peeks = [getattr(library, name, None) for library in _native_libraries() for name in _PEEK]
    if any(peek is not None and peek() == RUNTIME_OUT_OF_MEMORY for peek in peeks):
        return OutOfMemoryError(
            "a native library found no memory on the card and ended the process (its own line stands above; "
            "bitsandbytes does so): lower --per_device_train_batch_size (and raise --gradient_accumulation_steps by as "
            "much) or --max_length; the same command goes on from the newest checkpoint"
        )
    return TuneError("a native library ended the process; its own line stands above; see `hf-rocm-tune doctor`")


def _native_libraries() -> list[ctypes.CDLL]:
    extension = sys.modules.get("bitsandbytes.cextension")
    own = getattr(getattr(extension, "lib", None), "_lib", None)  # looking there finds the runtime that it is linked to
    return [library for library in (own, ctypes.CDLL(None)) if library is not None]
