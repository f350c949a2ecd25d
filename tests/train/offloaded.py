"""A few training steps with and without activation offloading. ``python offloaded.py [MUTANT]`` runs them on a card, as
it is or with a wait taken out, and prints one JSON object."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from contextlib import nullcontext
from itertools import chain
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from hf_rocm_tune.models.placement import place
from hf_rocm_tune.train import offload
from hf_rocm_tune.train.offload import ActivationOffload, HostMemory
from hf_rocm_tune.transfer import AcceleratorBackend, FaultSpec, Mover, TransferSettings

SLOT = 1 << 18


def mover_of(device: torch.device, *, fault: str = "", **settings: Any) -> Mover:
    """Two slots of 256 KiB: so much is on its way at once."""
    chosen = TransferSettings(**{"slot_bytes": SLOT, "slots": 2, **settings})
    return Mover(device, settings=chosen, faults=FaultSpec.parse(fault) if fault else None)


def llama(mover: Mover, *, layers: int = 4, checkpointing: bool = False) -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=64, intermediate_size=128, num_hidden_layers=layers, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=128, use_cache=False,
    )  # fmt: skip
    model = LlamaForCausalLM(config).train()
    place(model, mover)
    if checkpointing:
        model.activation_checkpointing_enable({"use_reentrant": False})
    return model


def steps(model: LlamaForCausalLM, mover: Mover, offload: ActivationOffload | None, count: int = 3) -> list[Any]:
    """Loss and gradients of each step; rows and their length differ."""
    found = []
    for step in range(count):
        ids = torch.randint(0, 128, (4, 96 + 32 * step), generator=torch.Generator().manual_seed(step))
        batch = mover.begin({"input_ids": ids})
        mover.settle(batch)
        model.zero_grad()
        with offload or nullcontext():
            loss = model(**batch, labels=batch["input_ids"]).loss
        loss.backward()
        found.append([loss.detach().cpu(), *(parameter.grad.cpu() for parameter in model.parameters())])
    return found


def same(one: list[Any], other: list[Any]) -> bool:
    pairs = zip(chain.from_iterable(one), chain.from_iterable(other), strict=True)
    return all(torch.equal(left, right) for left, right in pairs)


def peak(work: Callable[[], Any]) -> tuple[Any, int]:
    """What it gives, and the most that torch's allocator held meanwhile."""
    torch.cuda.reset_peak_memory_stats()
    return work(), torch.cuda.max_memory_allocated()


MUTANTS: dict[str, Callable[[], None]] = {
    "copied before it is computed": lambda: setattr(AcceleratorBackend, "follow", lambda *_: None),
    "used before it is back": lambda: setattr(AcceleratorBackend, "hand_out", lambda *_: None),
    "host memory reused at once": lambda: setattr(HostMemory, "_reclaim", _reclaim_at_once),
}


def _reclaim_at_once(memory: Any) -> None:
    while memory._released:
        memory._released.popleft()
    for slab in memory._slabs:
        slab.filled = 0


def main(mutant: str = "") -> None:
    if mutant:
        MUTANTS[mutant]()
    with mover_of(torch.device("cuda", 0), verify="off" if mutant else "full") as mover:
        model = llama(mover)
        plain, before = peak(lambda: steps(model, mover, None, 2))
        offloading = ActivationOffload(model, mover, smallest_bytes=4096)
        offloaded, after = peak(lambda: steps(model, mover, offloading, 2))
        counted = mover.report.to_dict()
        report = {"same": same(plain, offloaded), "plain": before, "offloaded": after, **counted[offload.STAGE]}
        report["incidents"] = len(counted["incidents"])
    print(json.dumps(report))


if __name__ == "__main__":
    main(*sys.argv[1:])
