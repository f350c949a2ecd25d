"""In one process on the simulated card: every way of copying a tensor, its result, and how it was verified."""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import hf_rocm_tune
from hf_rocm_tune.transfer.report import crossings

transfers = hf_rocm_tune.VerifiedTransfers("cuda")
host, pinned = torch.randn(5, 7), torch.randn(64, 3).pin_memory()
image = torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last)
card = torch.zeros(5, 7, device="cuda")


def filled(value: Any) -> Tensor:
    return torch.zeros(4, 6, device="cuda").copy_(value)


def strided() -> bool:
    target = torch.zeros(10, 10, device="cuda")
    target[:, ::2].copy_(torch.arange(5.0))
    return torch.equal(target.cpu()[:, ::2], torch.arange(5.0).expand(10, 5)) and not target.cpu()[:, 1::2].any()


def strided_on_host() -> bool:
    target, source = torch.zeros(4, 6)[:, ::2], torch.randn(4, 3, device="cuda")
    target.copy_(source)
    return torch.equal(target, source.cpu())


def large() -> bool:
    sent = torch.randn(10 << 20)  # more than a slot, in both directions
    return torch.equal(sent.to("cuda").cpu(), sent)


def backward() -> bool:
    leaf = torch.ones(3, requires_grad=True)
    (leaf.to("cuda") * 2).sum().backward()  # its gradient comes back in autograd's thread
    return leaf.grad.tolist() == [2, 2, 2]


def in_threads() -> bool:
    wrong: list[int] = []

    def copy(seed: int) -> None:
        for size in range(1, 40):
            sent = torch.full((size * 97,), float(seed * size))
            if not torch.equal(sent.to("cuda").cpu(), sent):
                wrong.append(seed)

    threads = [threading.Thread(target=copy, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return not wrong


def inference() -> bool:
    with torch.inference_mode():
        return torch.equal(host.to("cuda").cpu(), host)


def foreach() -> bool:
    targets = [torch.zeros(3, device="cuda"), torch.zeros(2, 2, device="cuda")]
    torch._foreach_copy_(targets, [torch.ones(3), torch.ones(2, 2)])
    return all(bool(target.cpu().eq(1).all()) for target in targets)


def assigned_storage() -> bool:
    card.untyped_storage().copy_(host.untyped_storage())
    return torch.equal(card.cpu(), host)


def loaded_state() -> bool:
    layer, state = nn.Linear(3, 2).to("cuda"), nn.Linear(3, 2).state_dict()
    layer.load_state_dict(state)
    return all(torch.equal(layer.state_dict()[name].cpu(), value) for name, value in state.items())


def default_device() -> bool:
    with torch.device("cuda"):  # also where the hooks of an optimizer digest what it trains
        layer = nn.Linear(3, 2)
        optimizer = torch.optim.SGD(layer.parameters(), 0.1)
        transfers.watch(layer, optimizer)
        layer(torch.ones(1, 3)).sum().backward()
        optimizer.step()
        transfers.check()
        return torch.equal(host.to("cuda").cpu(), host)


CALLS: dict[str, Callable[[], bool]] = {
    "to": lambda: torch.equal(host.to("cuda").cpu(), host),
    "cuda": lambda: torch.equal(nn.Parameter(host).cuda().detach().cpu(), host),
    "pinned": lambda: torch.equal(pinned.to("cuda", non_blocking=True).cpu(), pinned),
    "cast to the card": lambda: torch.equal(host.to("cuda", torch.float16).cpu(), host.half()),
    "cast to the host": lambda: torch.equal(host.to("cuda").to("cpu", torch.bfloat16), host.bfloat16()),
    "channels_last": lambda: torch.equal(image.to("cuda").cpu(), image),
    "tensor": lambda: torch.tensor([1.0, 2.0], device="cuda").tolist() == [1, 2],
    "integer": lambda: filled(3).cpu().unique().tolist() == [3],
    "float": lambda: filled(0.5).cpu().unique().tolist() == [0.5],
    "boolean": lambda: filled(True).cpu().unique().tolist() == [1],
    "no dimension": lambda: filled(torch.tensor(7.0)).cpu().unique().tolist() == [7],
    "broadcast": lambda: torch.equal(filled(torch.arange(6.0)).cpu(), torch.arange(6.0).expand(4, 6)),
    "empty": lambda: torch.empty(0).to("cuda").cpu().shape == (0,),
    "bool tensor": lambda: torch.tensor([True, False, True]).to("cuda").tolist() == [True, False, True],
    "item": lambda: host.to("cuda")[2, 3].item() == host[2, 3].item(),
    "index of the host": lambda: torch.equal(host.to("cuda")[torch.tensor([2, 0])].cpu(), host[[2, 0]]),
    "new_tensor": lambda: torch.equal(card.new_tensor(host.tolist()).cpu(), host),
    **{
        function.__name__: function
        for function in (
            strided, strided_on_host, large, backward, in_threads, inference, foreach, assigned_storage, loaded_state,
            default_device,
        )
    },
}  # fmt: skip

found: dict[str, Any] = {}
for name, call in CALLS.items():
    before = transfers.describe()["coverage"]
    right = call()
    after = transfers.describe()["coverage"]
    found[name] = {
        "right": right,
        "crossed": after["crossed_bytes"] - before["crossed_bytes"],
        "verified": after["verified_bytes"] - before["verified_bytes"],
    }
mismatches, served_by = transfers.report.to_dict()["copies"]["mismatches"], transfers.describe()["copies_on_card"]
transfers.close()
content = {"calls": found, "crossings": crossings(), "mismatches": mismatches, "copies_on_card": served_by}
print(json.dumps(content))
sys.stdout.flush()
