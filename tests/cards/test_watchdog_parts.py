"""The parts of the watchdog: the directory where ranks meet, and broken connections."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch.distributed as dist

from hf_rocm_tune.cards.watchdog import Board, Standing, descendants, is_alive, is_lost_peer, lost_peer
from hf_rocm_tune.errors import UsageError
from hf_rocm_tune.machine.process import start_ticks


def test_a_process_is_alive_until_it_ends_and_another_of_its_number_is_not_it() -> None:
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    since = start_ticks(process.pid)
    assert is_alive(process.pid, since) and not is_alive(process.pid, since + 1)
    process.kill()
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    assert not is_alive(process.pid, since), "a zombie"
    process.wait()
    assert not is_alive(process.pid, since) and start_ticks(process.pid) == 0


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
    assert first.declared_by() is None
    assert second.declare() and not first.declare()
    assert first.declared_by() == 1 and first.read("stacks-1") is None
    second.write("stacks-1", "a")
    second.write("stacks-1", "b")
    assert first.read("stacks-1") == "b"


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
