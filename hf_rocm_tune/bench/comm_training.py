"""The training part of ``bench comm``: a small Llama with LoRA adapters, trained in several ways, turn by turn.

Every way has its own copy of the same model. A step is forward, backward with the averages in it, their verdict where
there is one, clipping and the optimizer. One rank alone trains while the other waits.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from peft import LoraConfig, get_peft_model
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.utils import logging as transformers_logging

from hf_rocm_tune.bench.comm_ranks import HOST_WAYS
from hf_rocm_tune.hardware.child_main import step as tell
from hf_rocm_tune.models.placement import place
from hf_rocm_tune.ranks.averaging import SyncSettings
from hf_rocm_tune.ranks.gradients import GradientCheck, watch
from hf_rocm_tune.transfer import Mover, TransferSettings
from hf_rocm_tune.transfer.raw_copies import wait_for

ALONE, DDP = "1 rank", "ddp"
WAYS: dict[str, tuple[str, SyncSettings]] = {
    DDP: ("off", SyncSettings()),
    "ddp, again": ("off", SyncSettings()),
    "ddp, checked": ("full", SyncSettings()),
    **HOST_WAYS,
}
"""What is verified, and how gradients are averaged. The second is the first once more: what cannot be told apart."""
_VOCABULARY, _HEAD = 4096, 64


@dataclass(kw_only=True, eq=False)
class _Side:
    """One way of training, on this rank."""

    model: nn.Module
    mover: Mover
    optimizer: torch.optim.Optimizer
    check: GradientCheck | None
    draws: torch.Generator
    done: int = 0
    loss: float = 0.0


def measure(request: Mapping[str, Any], device: torch.device, *, rank: int) -> list[dict[str, Any]]:
    """Train.

    Args:
        request: ``hidden``, ``layers``, ``batch``, ``seq``; ``turns``, and ``steps`` in each.
        device: of this rank.
        rank: its number.

    Returns:
        A row for each way: ``seconds`` and ``cpu_seconds`` (processor time of this process) of each step, the last
        ``loss``, ``trainable_bytes`` and, for several ranks, what `GradientCheck.describe` says.
    """
    transformers_logging.set_verbosity_error()
    torch.manual_seed(0)
    base = get_peft_model(_model(request), LoraConfig(target_modules="all-linear", r=16, lora_alpha=32))
    with ExitStack() as stack:
        sides = {ALONE: _side(base, None, stack, device, rank)}
        sides |= {name: _side(base, way, stack, device, rank) for name, way in WAYS.items()}
        taken: dict[str, list[tuple[float, float]]] = {name: [] for name in sides}
        names = list(sides)
        for turn in range(request["turns"] + 1):
            shift = turn % len(names)
            for name in names[shift:] + names[:shift]:
                tell(f"turn {turn}: training with {name}")
                seconds = _turn(sides[name], request, idle=name == ALONE and rank > 0)
                taken[name] += seconds if turn else []  # the first rebuilds buckets and fills caches
        return [_row(name, sides[name], taken[name]) for name in names]


def _side(
    base: nn.Module, way: tuple[str, SyncSettings] | None, stack: ExitStack, device: torch.device, rank: int
) -> _Side:
    verify, sync = way or ("off", SyncSettings())
    mover = stack.enter_context(Mover(device, settings=TransferSettings(verify=verify)))
    model = copy.deepcopy(base)
    place(model, mover)
    check = None
    if way is not None:
        model = DistributedDataParallel(model, forward_sync_buffers=False)
        check = watch(model, mover, None, sync)
    optimizer = torch.optim.AdamW([weight for weight in model.parameters() if weight.requires_grad], lr=1e-3)
    return _Side(model=model, mover=mover, optimizer=optimizer, check=check, draws=torch.Generator().manual_seed(rank))


def _turn(side: _Side, request: Mapping[str, Any], *, idle: bool) -> list[tuple[float, float]]:
    """Seconds and processor seconds of each step."""
    taken: list[tuple[float, float]] = []
    dist.barrier()
    for _ in range(0 if idle else request["steps"]):
        shape = (request["batch"], request["seq"])
        rows = torch.randint(2, _VOCABULARY, shape, generator=side.draws)
        tokens = side.mover.move(rows, name="tokens", stage="batches")
        wait_for(tokens)
        begun = time.perf_counter(), time.process_time()
        loss = side.model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        side.done += 1
        if side.check is not None:
            side.check.settle(step=side.done)
        nn.utils.clip_grad_norm_(side.model.parameters(), 1.0)
        side.optimizer.step()
        side.optimizer.zero_grad()
        side.loss = loss.item()
        wait_for(tokens)
        taken.append((time.perf_counter() - begun[0], time.process_time() - begun[1]))
    dist.barrier()
    return taken


def _row(name: str, side: _Side, taken: list[tuple[float, float]]) -> dict[str, Any]:
    trainable = sum(weight.nbytes for weight in side.model.parameters() if weight.requires_grad)
    return {
        "way": name,
        "ranks": 1 if name == ALONE else dist.get_world_size(),
        "seconds": [seconds for seconds, _ in taken],
        "cpu_seconds": [seconds for _, seconds in taken],
        "loss": side.loss,
        "parameters": sum(weight.numel() for weight in side.model.parameters()),
        "trainable_bytes": trainable,
        "sync": side.check.describe() if side.check is not None else None,
    }


def _model(request: Mapping[str, Any]) -> LlamaForCausalLM:
    hidden = request["hidden"]
    heads = hidden // _HEAD
    return LlamaForCausalLM(
        LlamaConfig(
            hidden_size=hidden,
            intermediate_size=hidden * 11 // 4,
            num_hidden_layers=request["layers"],
            num_attention_heads=heads,
            num_key_value_heads=heads,
            vocab_size=_VOCABULARY,
            max_position_embeddings=max(request["seq"], 128),
            pad_token_id=0,
            bos_token_id=1,
            eos_token_id=1,
        )
    )
