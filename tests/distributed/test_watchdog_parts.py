"""What the stall watchdog is made of: the kernel's word on a process, the meeting place, and broken connections."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch.distributed as dist

from hf_rocm_tune.distributed import watchdog_statement
from hf_rocm_tune.distributed.watchdog_board import Board, Standing
from hf_rocm_tune.distributed.watchdog_lost import is_lost_peer, lost_peer
from hf_rocm_tune.distributed.watchdog_proc import (
    ProcessState,
    Thread,
    born,
    descendants,
    is_alive,
    kill,
    process_state,
    wait_until_gone,
)
from hf_rocm_tune.errors import UsageError


def entry(root: Path, pid: int, *, state: str = "S", parent: int = 1, session: int = 7, **files: str) -> Path:
    """A process in a made-up /proc; its name has what parsers trip over."""
    folder = root / str(pid)
    folder.mkdir(parents=True)
    rest = " ".join(str(n) for n in range(16)) + f" {pid}000 0"
    (folder / "stat").write_text(f"{pid} (py) thon 1 (x) {state} {parent} 7 {session} {rest}")
    for name, text in files.items():
        (folder / name).write_text(text)
    return folder


def test_a_process_is_read_as_the_kernel_tells_it(tmp_path: Path) -> None:
    folder = entry(
        tmp_path,
        40,
        state="D",
        wchan="amdgpu_fence_wait",
        syscall="16 0x1 0x2\n",
        stack="[<0>] dma_fence_wait+0x1/0x2\n[<0>] amdgpu_ioctl+0x3/0x4\n",
        status="Name:\tpython\nTracerPid:\t12\n",
    )
    task = entry(folder / "task", 41, state="R", wchan="0", comm="gloo loop\n")
    assert task.exists()
    assert process_state(40, tmp_path) == ProcessState(
        pid=40,
        state="D",
        waits_in="amdgpu_fence_wait",
        syscall="16 0x1 0x2",
        kernel_stack=("dma_fence_wait+0x1/0x2", "amdgpu_ioctl+0x3/0x4"),
        tracer=12,
        threads=(Thread(name="gloo loop", state="R", waits_in=""),),
    )


def test_what_may_not_be_read_is_left_out(tmp_path: Path) -> None:
    entry(tmp_path, 40)
    assert process_state(40, tmp_path) == ProcessState(pid=40, state="S")
    assert process_state(41, tmp_path) is None
    (tmp_path / "42").mkdir()
    (tmp_path / "42" / "stat").write_text("nonsense")
    assert process_state(42, tmp_path) is None


def test_a_number_that_is_taken_again_is_another_process(tmp_path: Path) -> None:
    entry(tmp_path, 40)
    since = born(40, tmp_path)
    assert is_alive(40, since, tmp_path) and not is_alive(40, "1", tmp_path) and not is_alive(41, "", tmp_path)
    (tmp_path / "40" / "stat").write_text((tmp_path / "40" / "stat").read_text().replace(") S ", ") Z "))
    assert not is_alive(40, since, tmp_path)


def test_descendants_of_the_same_session(tmp_path: Path) -> None:
    """The service of a logger leaves the session of its parent to outlive it."""
    for pid, parent, session in ((40, 1, 7), (41, 40, 7), (42, 41, 7), (43, 40, 43), (44, 1, 7)):
        entry(tmp_path, pid, parent=parent, session=session)
    assert descendants(40, tmp_path) == [41, 42]
    assert descendants(99, tmp_path) == []


def test_a_killed_process_is_waited_for() -> None:
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    known = (process.pid, born(process.pid))
    assert wait_until_gone([known], 0.1) == [process.pid]
    kill([process.pid])
    assert wait_until_gone([known], 10) == []
    process.wait()
    kill([process.pid])  # gone already: nothing happens


# ---- the meeting place --------------------------------------------------------------------------------------


@pytest.fixture
def boards(tmp_path: Path) -> tuple[Board, Board]:
    return Board(tmp_path / "place", 0), Board(tmp_path / "place", 1)


def test_ranks_see_each_other_and_leave_nothing(boards: tuple[Board, Board], tmp_path: Path) -> None:
    first, second = boards
    second.show(tick=3, silent_s=1.5, overdue=True)
    second.mark("in step 4")
    (seen,) = first.others()
    assert (seen.rank, seen.tick, seen.silent_s, seen.overdue, seen.where) == (1, 3, 1.5, True, "in step 4")
    assert seen.alive
    second.mark("x")
    assert first.others()[0].where == "x"
    first.leave()
    assert (tmp_path / "place").exists()
    second.leave()
    assert not (tmp_path / "place").exists()


def test_one_rank_declares(boards: tuple[Board, Board]) -> None:
    first, second = boards
    assert not first.is_declared() and first.declared_by() is None
    assert second.declare() and not first.declare()
    assert first.is_declared() and first.declared_by() is not None
    assert first.statement(1) is None
    second.state({"a": 1})
    second.state({"a": 2})
    assert first.statement(1) == {"a": 2}


def test_what_a_killed_rank_left_is_taken_away(tmp_path: Path) -> None:
    code = (
        "import os, sys\nfrom pathlib import Path\nfrom hf_rocm_tune.distributed.watchdog_board import Board\n"
        "Board(Path(sys.argv[1]), 1).declare()\nos.kill(os.getpid(), 9)"
    )
    mine = Board(tmp_path / "place", 0)
    subprocess.run([sys.executable, "-c", code, str(tmp_path / "place")], check=False, timeout=60)
    (left,) = mine.others()
    assert not left.alive
    mine.leave()
    assert not (tmp_path / "place").exists()


def test_a_torn_file_is_nobody(boards: tuple[Board, Board], tmp_path: Path) -> None:
    for content in (b"", b'{"rank": 1', b"\xff" * 2000, b"[]"):
        (tmp_path / "place" / "rank-1").write_bytes(content)
        assert boards[0].others() == []


def test_a_place_that_others_can_enter_is_refused(tmp_path: Path) -> None:
    (tmp_path / "open").mkdir(mode=0o755)
    (tmp_path / "link").symlink_to(tmp_path)
    for name in ("open", "link"):
        with pytest.raises(UsageError, match="not a directory that only you can use"):
            Board(tmp_path / name, 0)


# ---- broken connections -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("error", "lost"),
    [
        (
            RuntimeError("[/x/third_party/gloo/gloo/transport/tcp/pair.cc:553] Connection closed by peer [::1]:38547"),
            True,
        ),
        (RuntimeError("[/x/gloo/transport/tcp/unbound_buffer.cc:78] Timed out waiting 1800000ms for recv"), True),
        (dist.DistNetworkError("The client socket has failed to connect"), True),
        (dist.DistStoreError("wait timeout after 300000ms"), True),
        (dist.DistBackendError("NCCL error: remote process exited or there was a network error"), True),
        (dist.DistBackendError("NCCL error: invalid usage"), False),
        (RuntimeError("mat1 and mat2 shapes cannot be multiplied"), False),
        (ValueError("Connection closed by peer"), False),
    ],
)
def test_a_broken_connection_is_told_from_a_bug(error: Exception, lost: bool) -> None:
    assert is_lost_peer(error) == lost


def standing(rank: int, pid: int, since: str) -> Standing:
    return Standing(rank=rank, pid=pid, born=since, tick=1, where="in step 2", silent_s=0.0, overdue=False)


def test_the_rank_that_is_gone_is_named(tmp_path: Path) -> None:
    ended = subprocess.Popen([sys.executable, "-c", ""])
    gone = standing(1, ended.pid, born(ended.pid))
    ended.wait()
    here = standing(2, os.getpid(), born(os.getpid()))
    error = RuntimeError("Connection closed by peer")
    message = str(lost_peer(error, [gone, here], where="in step 3"))
    assert f"broke in step 3: rank 1 (pid {ended.pid}) is gone without a word" in message and "rank 2" not in message
    began = time.monotonic()
    assert "rank on another machine" in str(lost_peer(error, [here], where="in step 3"))
    assert time.monotonic() - began < 30
    late = RuntimeError("Timed out waiting 1800000ms for recv operation")
    assert "--ddp_timeout" in str(lost_peer(late, [], where="in step 3"))
    told = lost_peer(error, [gone], where="in step 3")
    assert told.exit_code == 4 and told.follows


# ---- statements ---------------------------------------------------------------------------------------------


def test_the_main_thread_comes_first_and_this_line_is_in_its_stack() -> None:
    import threading

    found: list[object] = []
    thread = threading.Thread(target=lambda: found.append(watchdog_statement.stacks()))
    thread.start()
    thread.join()
    (stacks,) = found
    assert isinstance(stacks, list) and stacks[0]["main"]
    names = [frame["function"] for frame in stacks[0]["frames"]]
    assert test_the_main_thread_comes_first_and_this_line_is_in_its_stack.__name__ in names


def test_recorders_of_this_build_answer_and_the_others_are_named() -> None:
    """The private names of torch that are read: one that moves is seen here."""
    found = watchdog_statement.collectives()
    assert found["pending"] == []
    rccl = "nccl: this build of torch has no _dump_nccl_trace_json"
    assert found["missing"] == ([] if dist.is_nccl_available() else [rccl])
