"""One rank of a pair of which the second is killed when its first bucket is about to come to the host."""

from __future__ import annotations

import os
import signal
import sys

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from hf_rocm_tune.ranks.averaging import SyncSettings
from hf_rocm_tune.ranks.gradients import watch
from hf_rocm_tune.transfer import Mover
from tests.ranks.gradient_rank import CPU, Net


def main(rank: int, store: str) -> None:
    """The first rank prints the error in which its step ends."""
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    net = Net()
    net.unused.requires_grad_(False)
    model = DistributedDataParallel(net, bucket_cap_mb=0.02)
    with Mover(CPU) as mover:
        check = watch(model, mover, None, SyncSettings(way="host"))
        assert check is not None
        if rank:
            net.narrow.weight.register_hook(lambda _: os.kill(os.getpid(), signal.SIGKILL))
        try:
            model(torch.ones(2, 64)).sum().backward()
            check.settle(step=1)
        except RuntimeError as error:
            print(f"{type(error).__name__}: {error}", flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])
