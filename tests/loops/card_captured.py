"""In one process on the simulated card: copies and an update while a stream is captured, where nothing may wait.

The card has no graphs: what is queued runs at once, and the driver's own count tells whether the host has waited.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from simcard import counts
from torch import nn

import hf_rocm_tune
from hf_rocm_tune.transfer.interception import own_copies


@contextmanager
def capturing() -> Iterator[None]:
    """What torch says while it captures the current stream."""
    stock, torch.cuda.is_current_stream_capturing = torch.cuda.is_current_stream_capturing, lambda: True
    try:
        yield
    finally:
        torch.cuda.is_current_stream_capturing = stock


sent, target, back = torch.arange(64.0).pin_memory(), torch.zeros(64, device="cuda"), torch.zeros(64).pin_memory()
layer, frozen = nn.Linear(8, 8).to("cuda"), nn.Linear(8, 8).requires_grad_(False).to("cuda")
optimizer = torch.optim.AdamW(layer.parameters(), lr=0.1, capturable=True)


def update() -> None:
    frozen(layer(torch.ones(2, 8, device="cuda"))).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def waits_of_updates() -> int:
    """Of the card's own operators, for want of a shape before they run."""
    update()
    begun = counts()["waits"]
    update()
    return counts()["waits"] - begun


of_stock = waits_of_updates()
transfers = hf_rocm_tune.VerifiedTransfers("cuda")
transfers.watch(layer, frozen, optimizer)
update()
torch.cuda.synchronize()
before = counts()["waits"], transfers.describe()["coverage"]["verified_bytes"]
with capturing():
    target.copy_(sent, non_blocking=True)
    back.copy_(target, non_blocking=True)
    update()
after = counts()["waits"], transfers.describe()["coverage"]["verified_bytes"]
torch.cuda.synchronize()
with own_copies():  # as a replay does it: no hook is called, no version counts, nothing passes the dispatcher
    layer.weight.data.copy_(torch.zeros(8, 8, device="cuda"))
transfers.check()
arrived = torch.equal(back, sent)
with_card = torch.equal(torch.ones(5).to("cuda").cpu(), torch.ones(5))
report = transfers.describe()
print(
    json.dumps(
        {
            "arrived": arrived and with_card,
            "waits": after[0] - before[0] - of_stock,
            "verified_within": after[1] - before[1],
            "verified_after": report["coverage"]["verified_bytes"] - after[1],
            "unverified": report["coverage"]["unverified"],
            "rebaselined": report["rebaselined"],
        }
    )
)
