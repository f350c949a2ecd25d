"""In one process on two simulated cards: copies between them, and a second card that only the script uses."""

from __future__ import annotations

import json
import sys

import torch

import hf_rocm_tune
from hf_rocm_tune.transfer.interception import serve_others_with
from hf_rocm_tune.transfer.mover import Mover

first = hf_rocm_tune.VerifiedTransfers("cuda:0")
serve_others_with(lambda card: Mover(card, report=first.report))
right = []
for size in (3, 1000, 70_000):
    for dtype in (torch.float32, torch.bfloat16, torch.int64):
        host = torch.arange(size).to(dtype)
        there = host.to("cuda:0").to("cuda:1")
        right.append(torch.equal(there.cpu(), host) and torch.equal(there.to("cuda:0").cpu(), host))
target = torch.zeros(10, 20, device="cuda:1")
target[:, ::2].copy_(torch.ones(10, 10, device="cuda:0"))
right.append(torch.equal(target.cpu(), torch.tensor([1.0, 0.0]).repeat(10, 10)))
found = first.describe()
between = [row for row in found["origins"] if row["direction"] == "between_cards"]
print(
    json.dumps(
        {
            "right": all(right),
            "activations": found["activations"],
            "between": sum(row["bytes"] for row in between),
            "unverified": found["coverage"]["unverified"],
            "incidents": [row["outcome"] for row in found["incidents"] if row["stage"] == "activations"],
        }
    )
)
sys.stdout.flush()
