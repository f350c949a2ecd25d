"""Layers that are streamed: the numbers of a resident run bit for bit, whatever goes wrong on the way."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests import tiny
from tests.e2e.command import CommandServer, Result
from tests.e2e.conftest import flags, losses_of, report_of, sampled
from tests.e2e.test_card_runs import ADAPTER, assert_census, assert_covered
from tests.simcard.log import Log

LAYERS = 7
STEPS = 4
#: What the CPU of the machine computes must not decide over bits: one thread each, and the same operators.
BF16 = {"dtype": "bfloat16", "bf16": True, "activation_checkpointing": True, "optim": "adamw_torch_fused"}
METHODS: dict[str, dict[str, Any]] = {
    "lora": BF16,
    "without recomputation": {**BF16, "activation_checkpointing": False},
    "adapters in one place": {**BF16, "lora_target_modules": "q_proj"},
    "some layers recomputed": {**BF16, "recompute_layers": "2,3"},
    "qlora": {**BF16, "load_in_4bit": True, "use_bnb_nested_quant": True},
    "8bit": {**BF16, "load_in_8bit": True},
    "experts": {**BF16, "lora_target_modules": "q_proj"},
}


class Job:
    """The same training, streamed or not."""

    def __init__(
        self, server: CommandServer, model: Path, messages: Path, scratch: Path, settings: dict[str, Any]
    ) -> None:
        self._server, self._scratch, self._settings = server, scratch, settings
        self._base = {
            "model_name_or_path": model,
            "dataset_name": messages,
            "max_steps": STEPS,
            "save_steps": 2,
            "eval_strategy": "steps",
            "eval_steps": 2,
            "per_device_train_batch_size": 2,
            "max_length": 48,
            "learning_rate": 0.01,
            "lora_dropout": 0.0,
            "logging_steps": 1,
            "disable_tqdm": True,
            "doctor": "off",
        }

    def run(self, name: str, env: dict[str, str] | None = None, code: int = 0, **more: Any) -> tuple[Path, Result]:
        output = self._scratch / name
        argv = flags(**self._base | {"output_dir": output} | self._settings | more)
        done = self._server.run(*argv, env={"SIMCARD_LOG": f"{output}.log"} | (env or {}))
        assert done.code == code, done.stderr[-3000:]
        return output, done


@pytest.fixture(scope="session")
def deep(scratch: Path) -> Callable[[str], Path]:
    """A model of seven layers in bfloat16."""
    return lambda arch: tiny.build(arch, scratch / "deep", dtype=torch.bfloat16, num_hidden_layers=LAYERS)


@pytest.fixture
def job(
    card_server: CommandServer, deep: Callable[[str], Path], messages: Path, tmp_path: Path
) -> Callable[[str], Job]:
    def make(method: str) -> Job:
        model = deep("qwen3_moe" if method == "experts" else "llama3")
        return Job(card_server, model, messages, tmp_path, METHODS[method])

    return make


@pytest.mark.parametrize("method", sampled(METHODS, "lora", "qlora"))
def test_a_streamed_run_is_the_resident_run_bit_for_bit(method: str, job: Callable[[str], Job]) -> None:
    """Memory is poisoned when it is freed, and copies and kernels take random times: a layer that computes with
    another one's weights, or too early, is seen."""
    trial = job(method)
    resident, _ = trial.run("resident")
    disturbed = {"SIMCARD_POISON": "1", "SIMCARD_DELAYS": "0,40,0,400"}
    for count in (4, LAYERS):
        streamed, _ = trial.run(f"streamed{count}", disturbed, stream_weights=count)
        assert losses_of(streamed) == losses_of(resident)
        assert (streamed / ADAPTER).read_bytes() == (resident / ADAPTER).read_bytes()
        report = report_of(streamed)
        assert_covered(report, fetched=method in ("qlora", "8bit"))
        assert_census(Log(Path(f"{streamed}.log")), report)
        told = report["streaming"]
        assert len(told["layers"]) == count and told["visits"] <= STEPS * 2 * (count + 1) + 40
        assert report["streamed"]["bytes"] > 0 == report["streamed"]["mismatches"]
        held = report["coverage"]["device_bytes"] - report_of(resident)["coverage"]["device_bytes"]
        assert held == told["landing_bytes"] - sum(told["host_bytes"].values())
