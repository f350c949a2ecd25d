"""The line that names the cause of a stall says what is known of each rank, and no more."""

from __future__ import annotations

from typing import Any

import pytest

from hf_rocm_tune.ranks.stall_report import ProcessState, Rank, explain

TORCH = "/venv/lib/python3.11/site-packages/torch/"
ALL_REDUCE = (f"{TORCH}distributed/distributed_c10d.py", "all_reduce")
BACKWARD = (f"{TORCH}autograd/graph.py", "_engine_run_backward")
AGREE = ("/venv/lib/python3.11/site-packages/hf_rocm_tune/ranks/agree.py", "highest")
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
WAITS_TEXT = "rank 0 (pid 100) waits for it in all_reduce (called by highest() in hf_rocm_tune/ranks/agree.py:12)"


@pytest.mark.parametrize(
    ("bad", "said"),
    [
        (rank(1, state="T"), "is stopped (state T)"),
        (rank(1, state="t", tracer=55), "is held by a debugger (state t, pid 55)"),
        (rank(1, state=None), "is gone: it was killed, or it crashed"),
        (rank(1, state="Z"), "is gone: it was killed, or it crashed"),
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
    assert "of the rank on other machines nothing is known here" in line and "connection" not in line
    assert "of the 3 ranks on other machines nothing is known here" in explain([WAITS], elsewhere=3)
    assert "nothing is known" in explain([WAITS, rank(1, state="T")], elsewhere=2)


def test_without_a_recorder_the_stack_names_the_collective() -> None:
    wrapper = (f"{TORCH}distributed/c10d_logger.py", "wrapper")
    line = explain(
        [rank(0, AGREE, (f"{TORCH}distributed/distributed_c10d.py", "barrier"), wrapper), rank(1, USER)], elsewhere=0
    )
    assert "rank 0 (pid 100) waits for it in barrier (called by highest()" in line


def test_a_process_alone() -> None:
    assert explain([rank(0, USER)], elsewhere=0) == "the process (pid 100) is in collate() in /home/me/collate.py:12"
