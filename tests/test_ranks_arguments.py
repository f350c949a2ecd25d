"""How gradients are averaged: from the flags to TRL's settings, and what several ranks agree on before they join."""

from __future__ import annotations

from typing import Any

import pytest

from hf_rocm_tune.cards import preflight
from hf_rocm_tune.cards.preflight import Preflight, SyncMethod
from hf_rocm_tune.errors import StallError, UsageError
from hf_rocm_tune.job import refusals
from hf_rocm_tune.settings.arguments import RanksArguments, parse
from hf_rocm_tune.survive.run_directory import deciding_settings


@pytest.mark.parametrize(
    ("asked", "found", "way"),
    [
        ("auto", None, "ddp"),
        ("auto", "ddp_without_p2p", "ddp"),
        ("auto", "host", "host"),
        ("ddp", "host", "ddp"),
        ("host", "ddp", "host"),
    ],
)
def test_the_user_s_word_counts_before_the_preflight_s(asked: str, found: str | None, way: str) -> None:
    assert RanksArguments(grad_sync=asked).sync(found).method == way  # type: ignore[arg-type]


def test_a_process_group_of_rccl_is_refused_where_the_host_averages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    argv = ["--model_name_or_path", "none", "--dataset_name", "none", "--grad_sync", "host", "--ddp_backend", "nccl"]
    with pytest.raises(UsageError, match=r"^--ddp_backend nccl does not work with .* drop it"):
        parse(argv, accelerator=False)


def test_a_run_may_go_on_with_its_gradients_averaged_in_another_way_but_not_otherwise_compressed() -> None:
    base = {"learning_rate": 1e-3, "grad_sync": "auto", "ddp_backend": None, "grad_compression": "none"}
    assert deciding_settings(base) == deciding_settings({**base, "grad_sync": "host", "ddp_backend": "gloo"})
    assert deciding_settings(base) != deciding_settings({**base, "grad_compression": "bf16"})


# ---- the preflight ---------------------------------------------------------------------------------------------

TWO = {"WORLD_SIZE": "2", "RANK": "0", "LOCAL_RANK": "0"}


def decided(monkeypatch: pytest.MonkeyPatch, way: SyncMethod) -> list[dict[str, Any]]:
    """The preflight finds this; returns what it was asked."""
    asked: list[dict[str, Any]] = []

    def run(**wanted: Any) -> Preflight:
        asked.append(wanted)
        return Preflight(asked=wanted["asked"], method=way, reason="the reason", evidence=("a trial",))

    monkeypatch.setattr(preflight, "run", run)
    return asked


def decide(environ: dict[str, str], said: list[str], *, accelerator: bool = False, **flags: Any) -> Any:
    def say(*lines: str) -> None:
        said.extend(lines)

    return refusals.decide(RanksArguments(**flags), accelerator, 4, environ=environ, say=say)


@pytest.mark.parametrize(
    ("environ", "accelerator", "flags"),
    [
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
        done = decide(environ, said, preflight="always")
        assert done.method == way and "the reason" in said[0]
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
    with pytest.raises(StallError, match="FSDP and DeepSpeed do not"):
        decide(TWO | {name: "true"}, [], preflight="always")


def test_other_machines_do_not_hear_of_the_host_so_the_user_has_to_say_it(monkeypatch: pytest.MonkeyPatch) -> None:
    decided(monkeypatch, "host")
    two_machines = TWO | {"WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2"}
    with pytest.raises(StallError, match="--grad_sync host"):
        decide(dict(two_machines), [], preflight="always")
    assert decide(dict(two_machines), [], preflight="always", grad_sync="host") is not None
