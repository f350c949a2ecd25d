"""How gradients are averaged, from the flags to what TRL's settings must be for it."""

from __future__ import annotations

import pytest

from hf_rocm_tune.arguments import parse
from hf_rocm_tune.errors import UsageError
from hf_rocm_tune.ranks_arguments import RanksArguments, process_group
from hf_rocm_tune.training.run import fingerprint


@pytest.mark.parametrize(
    ("asked", "found", "way"),
    [
        ("auto", None, "ddp"),
        ("auto", "ddp", "ddp"),
        ("auto", "ddp_without_p2p", "ddp"),
        ("auto", "host", "host"),
        ("ddp", "host", "ddp"),
        ("host", "ddp", "host"),
        ("host", None, "host"),
    ],
)
def test_the_user_s_word_counts_before_the_preflight_s(asked: str, found: str | None, way: str) -> None:
    assert RanksArguments(grad_sync=asked).sync(found).way == way  # type: ignore[arg-type]


def test_through_the_host_the_process_group_is_gloo_and_only_then_ours_to_choose() -> None:
    host, ddp = RanksArguments(grad_sync="host").sync(None), RanksArguments().sync(None)
    several = {"WORLD_SIZE": "2"}
    for given in ({}, {"ddp_backend": "gloo"}, {"ddp_backend": None}):
        assert process_group(host, given, several) == {"ddp_backend": "gloo"}
    assert process_group(ddp, {}, several) == process_group(ddp, {"ddp_backend": "nccl"}, several) == {}
    assert process_group(host, {}, {}) == process_group(host, {}, {"WORLD_SIZE": "1"}) == {}  # there is no group
    with pytest.raises(UsageError, match=r"^--ddp_backend nccl does not go with .* drop --ddp_backend"):
        process_group(host, {"ddp_backend": "nccl"}, several)


def test_the_flags_reach_the_training_arguments(tmp_path: object) -> None:
    argv = ["--model_name_or_path", "none", "--dataset_name", "none", "--output_dir", str(tmp_path)]
    read = parse([*argv, "--grad_sync", "host", "--grad_compression", "bf16"], accelerator=False)
    assert (read.grad_sync.way, read.grad_sync.compression) == ("host", "bf16")
    assert read.training.world_size == 1 and read.training.ddp_backend is None
    for refused, said in (
        (("--grad_sync", "host", "--grad_compression", "powersgd"), "powersgd does not go with --grad_sync host"),
        (("--grad_sync", "rccl"), "invalid choice"),
    ):
        with pytest.raises(UsageError, match=said):
            parse([*argv, *refused], accelerator=False)


def test_a_run_may_go_on_with_its_gradients_averaged_in_another_way_but_not_otherwise_compressed() -> None:
    base = {"learning_rate": 1e-3, "grad_sync": "auto", "ddp_backend": None, "grad_compression": "none"}
    assert fingerprint(base) == fingerprint({**base, "grad_sync": "host", "ddp_backend": "gloo"})
    assert fingerprint(base) != fingerprint({**base, "grad_compression": "bf16"})
