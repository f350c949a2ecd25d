"""What several ranks settle before they join: only where it is wanted, and so that the run keeps to it."""

from __future__ import annotations

from typing import Any

import pytest

from hf_rocm_tune import ranks_start
from hf_rocm_tune.distributed import preflight
from hf_rocm_tune.distributed.choice import GradSyncChoice, SyncWay
from hf_rocm_tune.distributed.preflight import Preflight
from hf_rocm_tune.errors import StallError
from hf_rocm_tune.ranks_arguments import RanksArguments

TWO = {"WORLD_SIZE": "2", "RANK": "0", "LOCAL_RANK": "0"}


def decided(monkeypatch: pytest.MonkeyPatch, way: SyncWay) -> list[dict[str, Any]]:
    """The preflight finds this; returns what it was asked."""
    asked: list[dict[str, Any]] = []

    def run(**wanted: Any) -> tuple[Preflight, None]:
        asked.append(wanted)
        choice = GradSyncChoice(way=way, reason="the reason", evidence=("a trial",))
        return Preflight(asked=wanted["asked"], choice=choice, machines={"here": choice}, seconds=1.0), None

    monkeypatch.setattr(preflight, "run", run)
    return asked


def decide(environ: dict[str, str], said: list[str], *, accelerator: bool = False, **flags: Any) -> Any:
    def say(*lines: str) -> None:
        said.extend(lines)

    return ranks_start.decide(RanksArguments(**flags), accelerator, 4, environ=environ, say=say)


@pytest.mark.parametrize(
    ("environ", "accelerator", "flags"),
    [
        ({}, True, {"preflight": "always"}),
        (TWO | {"WORLD_SIZE": "1"}, True, {"preflight": "always"}),
        (TWO, True, {"preflight": "off"}),
        (TWO, False, {}),
    ],
)
def test_nothing_is_tried_where_nothing_is_to_be_decided(
    environ: dict[str, str], accelerator: bool, flags: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = decided(monkeypatch, "ddp")
    assert decide(dict(environ), [], accelerator=accelerator, **flags) is None and not asked


def test_rccl_that_works_only_without_peers_is_told_so_before_it_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    for way in ("ddp", "ddp_without_p2p", "host"):
        decided(monkeypatch, way)  # type: ignore[arg-type]  # a way each
        environ, said = dict(TWO), list[str]()
        done, _ = decide(environ, said, preflight="always")
        assert done.choice.way == way and "the reason" in said[0]
        assert environ.get("NCCL_P2P_DISABLE") == ("1" if way == "ddp_without_p2p" else None)


def test_the_command_for_one_card_keeps_the_effective_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    decided(monkeypatch, "one_card")
    said: list[str] = []
    with pytest.raises(StallError, match="--accelerate_config cpu --gradient_accumulation_steps 8"):
        decide(dict(TWO), said, preflight="always")
    assert "a trial" in said, "the evidence is told before the end"


@pytest.mark.parametrize("name", ["ACCELERATE_USE_FSDP", "ACCELERATE_USE_DEEPSPEED"])
def test_what_cannot_average_through_the_host_is_refused_when_nothing_else_works(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    decided(monkeypatch, "host")
    with pytest.raises(StallError, match="FSDP and DeepSpeed cannot do"):
        decide(TWO | {name: "true"}, [], preflight="always")
