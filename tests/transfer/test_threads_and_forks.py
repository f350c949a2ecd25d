"""A mover in threads that know no device, and in processes that were forked from the one that made it."""

from __future__ import annotations

import gc
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, Dataset

from hf_rocm_tune.data.loader import Prefetch, verify_loader
from hf_rocm_tune.errors import UsageError
from hf_rocm_tune.transfer import Mover
from tests import simcard

CPU = torch.device("cpu")


def test_threads_of_rank_1_leave_nothing_on_card_0() -> None:
    try:
        environment = simcard.environment()
    except simcard.NoCompiler as missing:
        pytest.skip(str(missing))
    script = Path(__file__).with_name("threads_on_cards.py")
    done = subprocess.run(
        [sys.executable, str(script)],
        env={**os.environ, **environment, "SIMCARD_DEVICES": "2"},
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert json.loads(done.stdout.splitlines()[-1]) == {"threads": [1], "averaging": [1]}


def in_a_fork(work: Any) -> str:
    """What `work` says in a forked process; it is killed after 20 s."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reader)
        try:
            said = repr(work())
        except BaseException as error:
            said = f"{type(error).__name__}: {error}"
        os.write(writer, said.encode())
        os._exit(0)
    os.close(writer)
    watch = subprocess.Popen(["sh", "-c", f"sleep 20; kill -9 {child}"])
    with os.fdopen(reader) as stream:
        said = stream.read()
    watch.kill()
    watch.wait()
    os.waitpid(child, 0)
    return said


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
@pytest.mark.parametrize("held", [False, True], ids=["idle", "slots-in-use"])
def test_a_mover_of_the_process_before_the_fork_says_so_at_once(held: bool) -> None:
    with Mover(CPU) as mover:
        begun = mover.begin([torch.arange(9)])
        if held:
            mover._sender._ring._changed.acquire()  # as by a thread that was in the ring at the fork
        uses = {
            "move": lambda: mover.move(torch.ones(3), name="w"),
            "begin": lambda: mover.begin([torch.ones(3)]),
            "wait_verified": lambda: mover.wait_verified(begun),
            "fetched": lambda: mover.fetched(torch.ones(3), name="w", stage="adapter"),
        }
        said = {name: in_a_fork(use) for name, use in uses.items()}
        closed = in_a_fork(mover.close)
        if held:
            mover._sender._ring._changed.release()
        mover.wait_verified(begun)
    assert closed == "None"
    for text in said.values():
        assert text.startswith(f"{UsageError.__name__}: this mover was created by process {os.getpid()}, and process ")
        assert text.endswith("Create one mover in each process, after the fork")


class Frozen(Dataset[dict[str, torch.Tensor]]):
    """Rows that say how many objects the garbage collector of the worker passes over."""

    def __len__(self) -> int:
        return 2

    def __getitem__(self, row: int) -> dict[str, torch.Tensor]:
        return {"frozen": torch.tensor(gc.get_freeze_count())}


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_loader_workers_pass_over_what_they_inherited() -> None:
    gc.unfreeze()
    with Mover(CPU) as mover:
        loader = verify_loader(DataLoader(Frozen(), num_workers=1), Prefetch(mover))
        inherited = len(gc.get_objects())
        for batch in loader:
            mover.wait_verified(batch)
            assert int(batch["frozen"]) > inherited * 0.9
    assert gc.get_freeze_count() == 0
