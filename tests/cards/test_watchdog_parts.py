"""What the stall watchdog is made of: the kernel's word, the meeting place, the line that names a cause, lost peers."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from hf_rocm_tune.cards import stall_report
from hf_rocm_tune.cards.stall_report import ProcessState, Rank, explain, is_lost_peer, lost_peer, process_state
from hf_rocm_tune.cards.watchdog import Board, Standing, descendants
from hf_rocm_tune.errors import UsageError
from hf_rocm_tune.machine.process import start_ticks


def entry(root: Path, pid: int, **files: str) -> None:
    """A process in a made-up /proc."""
    (root / str(pid)).mkdir(parents=True)
    for name, text in files.items():
        (root / str(pid) / name).write_text(text)


def test_a_process_is_read_as_the_kernel_tells_it(tmp_path: Path) -> None:
    entry(
        tmp_path,
        40,
        wchan="amdgpu_fence_wait",
        stack="[<0>] dma_fence_wait+0x1/0x2\n[<0>] amdgpu_ioctl+0x3/0x4\n",
        status="Name:\tpython\nState:\tD (disk sleep)\nTracerPid:\t12\n",
    )
    assert process_state(40, tmp_path) == ProcessState(
        pid=40,
        state="D",
        waits_in="amdgpu_fence_wait",
        kernel_stack=("dma_fence_wait+0x1/0x2", "amdgpu_ioctl+0x3/0x4"),
        tracer=12,
    )


def test_what_may_not_be_read_is_left_out(tmp_path: Path) -> None:
    entry(tmp_path, 40, status="State:\tS (sleeping)\n")
    assert process_state(40, tmp_path) == ProcessState(pid=40, state="S")
    assert process_state(41, tmp_path) is None
    entry(tmp_path, 42, status="nonsense")
    assert process_state(42, tmp_path) is None


def test_a_process_is_alive_until_it_ends_and_another_of_its_number_is_not_it() -> None:
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    since = start_ticks(process.pid)
    assert stall_report.is_alive(process.pid, since) and not stall_report.is_alive(process.pid, since + 1)
    process.kill()
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    assert not stall_report.is_alive(process.pid, since), "a zombie"
    process.wait()
    assert not stall_report.is_alive(process.pid, since) and start_ticks(process.pid) == 0


def test_descendants_of_the_same_session() -> None:
    """The service of a logger leaves the session of its parent to outlive it."""
    code = (
        "import subprocess, sys, time\n"
        "sleep = [sys.executable, '-c', 'import time; time.sleep(600)']\n"
        "own = subprocess.Popen(sleep)\n"
        "apart = subprocess.Popen(sleep, start_new_session=True)\n"
        "print(own.pid, apart.pid, flush=True)\ntime.sleep(600)"
    )
    parent = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    own, apart = map(int, parent.stdout.readline().split())
    try:
        assert descendants(parent.pid) == [own]
        assert {parent.pid, own} <= set(descendants(os.getpid()))
    finally:
        for pid in (own, apart, parent.pid):
            os.kill(pid, 9)
        parent.communicate()
    assert descendants(parent.pid) == []


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
    second.withdraw()
    assert not (tmp_path / "place").exists()
    assert second.others() == [], "a rank may look while the last one leaves"


def test_one_rank_declares(boards: tuple[Board, Board]) -> None:
    first, second = boards
    assert not first.is_declared() and first.declared_by() is None
    assert second.declare() and not first.declare()
    assert first.succeed() and not second.succeed()
    assert first.is_declared() and first.declared_by() is not None
    assert first.statement(1) is None
    second.state({"a": 1})
    second.state({"a": 2})
    assert first.statement(1) == {"a": 2}


def test_what_a_killed_rank_left_is_taken_away(tmp_path: Path) -> None:
    code = (
        "import os, sys\nfrom pathlib import Path\nfrom hf_rocm_tune.cards.watchdog import Board\n"
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
    (tmp_path / "file").touch()
    for name in ("open", "link", "file"):
        with pytest.raises(UsageError, match="not a directory that only you can access"):
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


def standing(rank: int, pid: int, since: int) -> Standing:
    return Standing(rank=rank, pid=pid, born=since, tick=1, where="in step 2", silent_s=0.0, overdue=False)


def test_the_rank_that_is_gone_is_named(tmp_path: Path) -> None:
    ended = subprocess.Popen([sys.executable, "-c", ""])
    gone = standing(1, ended.pid, start_ticks(ended.pid))
    ended.wait()
    here = standing(2, os.getpid(), start_ticks(os.getpid()))
    error = RuntimeError("Connection closed by peer")
    message = str(lost_peer(error, [gone, here], elsewhere=0, where="in step 3"))
    assert f"broke in step 3: rank 1 (pid {ended.pid}) ended without a message" in message and "rank 2" not in message
    began = time.monotonic()
    assert "rank on another machine" in str(lost_peer(error, [here], elsewhere=2, where="in step 3"))
    assert "machine" not in str(lost_peer(error, [], elsewhere=0, where="in step 3")), "it has left its place already"
    assert time.monotonic() - began < 30
    late = RuntimeError("Timed out waiting 1800000ms for recv operation")
    assert "--ddp_timeout" in str(lost_peer(late, [], elsewhere=0, where="in step 3"))
    told = lost_peer(error, [gone], elsewhere=0, where="in step 3")
    assert told.exit_code == 4 and told.follows


# ---- statements ---------------------------------------------------------------------------------------------


def test_the_main_thread_comes_first_and_this_line_is_in_its_stack() -> None:
    import threading

    found: list[object] = []
    thread = threading.Thread(target=lambda: found.append(stall_report.stacks()))
    thread.start()
    thread.join()
    (stacks,) = found
    assert isinstance(stacks, list) and stacks[0]["main"]
    names = [frame["function"] for frame in stacks[0]["frames"]]
    assert test_the_main_thread_comes_first_and_this_line_is_in_its_stack.__name__ in names


def test_recorders_of_this_build_answer_and_the_others_are_named() -> None:
    """The private names of torch that are read: one that moves is seen here."""
    found = stall_report.collectives()
    assert found["pending"] == []
    rccl = "nccl: this build of torch has no _dump_nccl_trace_json"
    assert found["missing"] == ([] if dist.is_nccl_available() else [rccl])


TORCH = "/venv/lib/python3.11/site-packages/torch/"
ALL_REDUCE = (f"{TORCH}distributed/distributed_c10d.py", "all_reduce")
BACKWARD = (f"{TORCH}autograd/graph.py", "_engine_run_backward")
AGREE = ("/venv/lib/python3.11/site-packages/hf_rocm_tune/cards/agree.py", "highest")
USER = ("/home/me/collate.py", "collate")


def pending(name: str = "gloo:all_reduce", number: int = 7, recorder: str = "gloo") -> dict[str, Any]:
    return {
        "recorder": recorder,
        "profiling_name": name,
        "collective_seq_id": number,
        "process_group": ["0", "default"],
    }


def rank(
    number: int,
    *stack: tuple[str, str],
    waits: list[dict[str, Any]] | None = None,
    state: str | None = "S",
    where: str = "in step 3",
    **process: Any,
) -> Rank:
    """One that answers has a stack; ``state`` None: it is gone."""
    frames = [{"file": file, "line": 12, "function": function, "code": ""} for file, function in stack]
    statement = {"stacks": [{"thread": "MainThread", "main": True, "frames": frames}]}
    children = process.pop("children", [])
    return Rank(
        rank=number,
        pid=100 + number,
        where=where,
        silent_s=5.0,
        statement={**statement, "collectives": {"pending": waits or []}} if stack else None,
        process=ProcessState(pid=100 + number, state=state, **process) if state else None,
        children=children,
    )


WAITS = rank(0, AGREE, ALL_REDUCE, waits=[pending()])
WAITS_TEXT = "rank 0 (pid 100) waits for it in all_reduce (called by highest() in hf_rocm_tune/cards/agree.py:12)"


@pytest.mark.parametrize(
    ("bad", "said"),
    [
        (rank(1, state="T"), "is stopped (state T)"),
        (rank(1, state="t", tracer=55), "is held by a debugger (state t, pid 55)"),
        (rank(1, state=None), "has ended: it was killed, or it crashed"),
        (rank(1, state="Z"), "has ended: it was killed, or it crashed"),
        (rank(1, state="D", waits_in="amdgpu_fence_wait"), "hangs in the kernel (state D in amdgpu_fence_wait)"),
        (
            rank(1, USER, state="D", waits_in="nfs_wait"),
            "hangs in the kernel (state D in nfs_wait) in collate() in /home/me/collate.py:12",
        ),
        (rank(1, state="R"), "computes in a call that does not let Python answer (state R)"),
        (rank(1, state="S", waits_in="futex_wait"), "sleeps in futex_wait in a call that does not let Python answer"),
        (rank(1, AGREE, USER), "is in collate() in /home/me/collate.py:12 (called by highest() in hf_rocm_tune/"),
        (
            rank(1, USER, children=[ProcessState(pid=9, state="T"), ProcessState(pid=8, state="S")]),
            "is in collate() in /home/me/collate.py:12; its child process 9 is in state T",
        ),
        (rank(1, BACKWARD), "is in _engine_run_backward() in torch/autograd/graph.py:12"),
        (rank(1, ALL_REDUCE, waits=[pending()], state="D"), "hangs in the kernel (state D) in all_reduce()"),
    ],
)
def test_the_rank_that_does_not_wait_for_others_is_the_cause(bad: Rank, said: str) -> None:
    line = explain([WAITS, bad], elsewhere=0)
    assert line.startswith(f"rank 1 (pid 101) {said}")
    assert line.endswith(WAITS_TEXT)


def test_where_ranks_are_at_is_said_where_it_differs() -> None:
    line = explain([WAITS, rank(1, USER, where="in the evaluation after step 2")], elsewhere=0)
    assert "rank 1 (pid 101), in the evaluation after step 2, is in collate()" in line
    assert "rank 0 (pid 100), in step 3, waits for it in all_reduce" in line
    assert "in step 3" not in explain([WAITS, rank(1, USER)], elsewhere=0)


def test_backward_waits_only_where_a_collective_is_known_to_be_open() -> None:
    line = explain([rank(0, BACKWARD, waits=[pending()]), rank(1, USER)], elsewhere=0)
    assert "rank 0 (pid 100) waits for it in all_reduce of gradients" in line


def test_a_host_that_waits_for_its_device_waits_for_the_ranks_of_an_open_rccl_collective() -> None:
    open_one = [pending("nccl:broadcast", recorder="nccl")]
    line = explain([rank(0, AGREE, USER, waits=open_one), rank(1, state="T")], elsewhere=0)
    assert "rank 0 (pid 100) waits for it in broadcast (called by highest()" in line
    gloo_one = [pending("gloo:broadcast")]
    line = explain([rank(0, USER, waits=gloo_one), rank(1, state="T")], elsewhere=0)
    assert "rank 0 (pid 100) is in collate()" in line, "a gloo collective in another thread holds nobody up"


def test_ranks_that_wait_in_different_collectives_have_parted() -> None:
    other = rank(1, ALL_REDUCE, waits=[pending(number=8)])
    line = explain([WAITS, other], elsewhere=0)
    assert "these are different collectives, so each waits for ever" in line
    assert "rank 0 (pid 100) waits in" in line and "rank 1 (pid 101) waits in" in line


def test_ranks_that_wait_in_the_same_collective_blame_the_connection() -> None:
    line = explain([WAITS, rank(1, ALL_REDUCE, waits=[pending()])], elsewhere=0)
    assert "the same collective, so the connection between them does not deliver" in line


def test_of_ranks_elsewhere_nothing_is_claimed() -> None:
    line = explain([WAITS], elsewhere=1)
    assert line.startswith("rank 0 (pid 100) waits in all_reduce")
    assert "the state of the rank on other machines is unknown here" in line and "connection" not in line
    assert "the state of the 3 ranks on other machines is unknown here" in explain([WAITS], elsewhere=3)
    assert "is unknown here" in explain([WAITS, rank(1, state="T")], elsewhere=2)


def test_without_a_recorder_the_stack_names_the_collective() -> None:
    wrapper = (f"{TORCH}distributed/c10d_logger.py", "wrapper")
    line = explain(
        [rank(0, AGREE, (f"{TORCH}distributed/distributed_c10d.py", "barrier"), wrapper), rank(1, USER)], elsewhere=0
    )
    assert "rank 0 (pid 100) waits for it in barrier (called by highest()" in line


def test_a_process_alone() -> None:
    assert explain([rank(0, USER)], elsewhere=0) == "the process (pid 100) is in collate() in /home/me/collate.py:12"
