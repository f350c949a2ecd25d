"""Machines that differ are told so before anything is trained: all ranks hear the same line, and no rank waits."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.distributed.pair import Outcomes, run_pair

HOST = os.uname().nodename


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory, checkout: Path) -> Outcomes:
    """What each rank reports, by case."""
    return run_pair("tests.distributed.machines_rank", tmp_path_factory.mktemp("machines") / "store", checkout)


def test_machines_that_are_alike_go_on_whatever_their_own_disks_are_called(outcomes: Outcomes) -> None:
    assert [rank["alike"]["said"] for rank in outcomes] == [None, None]


@pytest.mark.parametrize(
    ("case", "named"),
    [
        ("version", [f"rank 1 on {HOST} has torch 2.12.1, rank 0 on {HOST} has torch 2.13.0", "same versions"]),
        ("not installed", ["has peft 0.21.2, rank 0", "has peft not installed"]),
        ("setting", ["has --save_steps 50, rank 0", "has --save_steps 500", "same command"]),
        ("two settings", ["has --save_steps 50", "(2 differences in all)"]),
        ("fewer rows", ["has 199 train rows", "has 200 train rows", "same data"]),
        ("other rows", ["has 200 train rows with the digest", "same data"]),
        ("own directory", ["--output_dir", f"is not what {HOST} has there", "NFS"]),
    ],
)
def test_a_difference_is_named_on_every_rank(outcomes: Outcomes, case: str, named: list[str]) -> None:
    said = [rank[case]["said"] for rank in outcomes]
    assert said[0] is not None
    assert all(part in said[0] for part in named), said[0]
    if case != "own directory":  # there each names the path that it was given
        assert said[0] == said[1]


def test_nothing_is_left_in_the_output_directory(outcomes: Outcomes) -> None:
    assert [row["left"] for rank in outcomes for row in rank.values() if row["left"]] == []
