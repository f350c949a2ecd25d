"""Which commands are supervised, and what is started for them."""

from __future__ import annotations

import shlex
import sys

import pytest

from hf_rocm_tune.errors import UsageError
from hf_rocm_tune.supervisor.command import ENTRIES, shown, to_start

THIS = [sys.executable, "-m"]
THROUGH = [*THIS, "hf_rocm_tune.supervisor.accelerate_launch"]


@pytest.mark.parametrize(
    ("given", "started"),
    [
        ("hf-rocm-tune sft --lora_r 8", [*THIS, "hf_rocm_tune", "sft", "--lora_r", "8"]),
        ("/x/bin/hf-rocm-tune sft", [*THIS, "hf_rocm_tune", "sft"]),
        (
            "accelerate launch --cpu -m hf_rocm_tune.sft --a b",
            [*THROUGH, "--cpu", "-m", "hf_rocm_tune.sft", "--a", "b"],
        ),
        ("accelerate-launch --module hf_rocm_tune.sft", [*THROUGH, "--module", "hf_rocm_tune.sft"]),
        ("python3 -m accelerate.commands.launch -m hf_rocm_tune.sft", [*THROUGH, "-m", "hf_rocm_tune.sft"]),
        ("python -m hf_rocm_tune.sft --a", ["python", "-m", "hf_rocm_tune.sft", "--a"]),
        ("/v/python3.12 -u -m hf_rocm_tune sft", ["/v/python3.12", "-u", "-m", "hf_rocm_tune", "sft"]),
        ("torchrun --nproc-per-node 2 -m hf_rocm_tune.sft", None),
        ("python -m torch.distributed.run -m hf_rocm_tune.sft", None),
    ],
)
def test_what_trains_through_us_is_started(given: str, started: list[str] | None) -> None:
    assert to_start(shlex.split(given)) == (started if started is not None else shlex.split(given))


@pytest.mark.parametrize(
    "given",
    [
        "",
        "hf-rocm-tune",
        "hf-rocm-tune run -- hf-rocm-tune sft",
        "hf-rocm-tune env",
        "accelerate",
        "accelerate config",
        "accelerate launch",
        "accelerate launch train.py",
        "accelerate launch train.py --method -m",
        "accelerate launch -m trl.scripts.sft",
        "accelerate launch -m hf_rocm_tune",
        "torchrun train.py",
        "python",
        "python -m",
        "python train.py",
        "python -m hf_rocm_tune env",
        "python -m hf_rocm_tune.sftx",
        "python -m torch.distributed.run train.py",
        "trl sft",
        "CUDA_VISIBLE_DEVICES=0 hf-rocm-tune sft",
    ],
)
def test_anything_else_is_refused_with_what_would_do(given: str) -> None:
    with pytest.raises(UsageError, match="run supervises `accelerate launch") as caught:
        to_start(shlex.split(given))
    assert (given or "nothing") in str(caught.value)


def test_every_entry_is_a_module_and_a_verb() -> None:
    import importlib.util

    from hf_rocm_tune.cli import VERBS

    assert set(VERBS) >= ENTRIES
    assert all(importlib.util.find_spec(f"hf_rocm_tune.{name}") for name in ENTRIES)


@pytest.mark.parametrize("flag", ["--hub_token hf_s3cret", "--hub-token=hf_s3cret", "--push_to_hub_token hf_s3cret"])
def test_a_token_on_the_command_line_is_never_shown(flag: str) -> None:
    line = f"hf-rocm-tune sft {flag} --lora_r 8"
    assert "s3cret" not in shown(shlex.split(line))
    assert shown(shlex.split(line)).endswith("--lora_r 8")
    with pytest.raises(UsageError) as refused:
        to_start(shlex.split(f"echo {flag}"))
    assert "s3cret" not in str(refused.value)
