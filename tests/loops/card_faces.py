"""On the simulated card: a loop of Accelerate's under each harm of its copies, and with a bit that flips in its memory.

``card_faces.py accelerator`` has a `VerifiedAccelerator`; ``card_faces.py plain``, which `script` runs, Accelerate's.
A second word, ``frozen`` or ``optimizer``, flips a bit there after two steps.
"""

from __future__ import annotations

import ctypes
import json
import sys
from typing import Any

import torch
from accelerate import Accelerator
from simcard import card  # the simulated card of this process
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

STEPS = 6


def accelerator() -> Accelerator:
    if sys.argv[1] == "plain":
        return Accelerator()
    import hf_rocm_tune

    return hf_rocm_tune.VerifiedAccelerator(transfers=hf_rocm_tune.VerifiedTransfers("cuda", check_every=1))


def trained(attack: str = "") -> list[list[float]]:
    """What the loop has read from the card: outputs, and the weights at its end."""
    torch.manual_seed(1)
    rows = TensorDataset(torch.randn(STEPS * 4, 64))
    frozen, head = nn.Linear(64, 64).requires_grad_(False), nn.Linear(64, 64)
    found, seen = accelerator(), []
    model, optimizer, loader = found.prepare(
        nn.Sequential(frozen, head), torch.optim.AdamW(head.parameters(), 0.01), DataLoader(rows, batch_size=4)
    )
    for number, (batch,) in enumerate(loader):
        out = model(batch)
        seen += [each.cpu().tolist() for each in out.detach()]
        found.backward(out.square().mean())
        optimizer.step()
        optimizer.zero_grad()
        if number == 1 and attack:
            flip(frozen.weight if attack == "frozen" else optimizer.state[head.weight]["exp_avg"])
    seen += head.weight.detach().cpu().tolist()
    found.end_training()
    return seen


def flip(tensor: Any) -> None:
    """One bit, in the card's memory, behind torch's back."""
    torch.cuda.synchronize()
    ctypes.c_uint8.from_address(tensor.data_ptr() + 2).value ^= 16


if sys.argv[2:]:
    trained(sys.argv[2])
    sys.exit("the bit was not noticed")
right, found = trained(), {}
for back, (direction, rate) in enumerate((("to the card", 0.35), ("to the host", 0.15))):
    for name in ("flip", "zero", "stale", "drop"):
        before = card.lib.sim_count(9)
        card.lib.sim_harm(back, card.HARMS.index(name), rate, 64)
        same = trained() == right
        card.lib.sim_harm(back, 0, 0.0, 1)
        found[f"{name} {direction}"] = [same, card.lib.sim_count(9) - before]
print(json.dumps(found))
