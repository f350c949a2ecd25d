"""What is known of a micro-batch that found no memory, once its memory is given back; and what to do when it must fit.

The batch and the allocator's state at that moment are kept in a directory that is not uploaded. The allocator's
snapshot opens in https://pytorch.org/memory_viz.
"""

from __future__ import annotations

import logging
import pickle
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from hf_rocm_tune.memory.stepdown import Layout, Part, next_divisor
from hf_rocm_tune.transfer import map_tensors

if TYPE_CHECKING:
    from hf_rocm_tune.training.mixin import VerifiedTransferMixin

logger = logging.getLogger(__name__)

# The underscore keeps it out of transformers' uploads, which ignore "_*": it holds training data.
DIRECTORY = "_out_of_memory"


@dataclass(frozen=True, kw_only=True)
class Shortage:
    """A micro-batch of this rank, or a part of one, that ran out of memory.

    Attributes:
        wanted: by what micro-batches must be cut so that this one gets smaller; None when it cannot.
        what: it, in words.
        said: the allocator's words.
        incident: for the report, but for its outcome, which is not known yet.
    """

    wanted: int | None
    what: str
    said: str
    incident: dict[str, Any]


def note(
    error: torch.OutOfMemoryError,
    *,
    trainer: VerifiedTransferMixin,
    micro_step: int,
    part: Part,
    layout: Layout,
    divisor: int,
    number: int,
) -> Shortage:
    """Record a shortage. Keeps nothing of the error, which holds on to every activation; allocates no device memory.

    Args:
        error: what the allocator raised.
        trainer: in whose step.
        micro_step: number of the micro-batch in the optimizer step, from 1 on.
        part: what was computed.
        layout: of its micro-batch.
        divisor: by what micro-batches are cut at present.
        number: how many shortages this rank has had before.
    """
    step, rank = trainer.state.global_step + 1, trainer.args.process_index
    said = " ".join(str(error).split())
    name = f"step-{step}-rank-{rank}-{number + 1}"
    units = "sequence" if layout.kind == "packed" else "row"
    return Shortage(
        wanted=next_divisor(layout.sizes, divisor, part.units),
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
