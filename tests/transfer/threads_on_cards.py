"""Rank 1 of a machine with two cards: what its threads leave on card 0. Prints the cards with a context as JSON.

Batches, weights and fetches cross in threads that were never told a device, as those that load weights are; gradients
are averaged in the threads of `HostAveraging`.
"""

from __future__ import annotations

import json
import sys
import tempfile
import threading

import torch
import torch.distributed as dist

from hf_rocm_tune.cards.averaging import HostAveraging, SyncSettings
from hf_rocm_tune.transfer import Mover, digest

CARD = torch.device("cuda", 1)


def contexts() -> list[int]:
    return sorted(sys.modules["simcard"].cuda.contexts())


def work(mover: Mover, wrong: list[str]) -> None:
    try:
        source = torch.randn(3000)
        arrived = mover.begin({"x": source})
        mover.wait_verified(arrived)
        moved = mover.move(source, name="w")
        with mover.fetched(moved, name="w", stage="adapter") as found:
            assert torch.equal(found.host, source)
        assert digest(moved) == digest(source) == digest(arrived["x"])
        mover.mark_derived(moved.bfloat16(), "cast")
        assert torch.cuda.current_device() == 0, "a thread that is not ours keeps its device"
    except BaseException as error:
        wrong.append(repr(error))


def main() -> None:
    torch.cuda.set_device(CARD)
    dist.init_process_group("gloo", init_method=f"file://{tempfile.mkdtemp()}/store", rank=0, world_size=1)
    mover, wrong, seen = Mover(CARD), list[str](), {}
    running = [threading.Thread(target=work, args=(mover, wrong)) for _ in range(3)]
    for thread in running:
        thread.start()
    for thread in running:
        thread.join()
    seen["threads"] = contexts()
    local = torch.randn(5000, device=CARD)
    averaging = HostAveraging(mover, SyncSettings())
    average = averaging.begin(local, name="bucket", number=0).wait()
    assert torch.equal(average.cpu(), local.cpu()), averaging.failures
    averaging.check()
    seen["averaging"] = contexts()
    assert not wrong, wrong
    dist.destroy_process_group()
    print(json.dumps(seen))


if __name__ == "__main__":
    main()
