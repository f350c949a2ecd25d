"""FSDP and DeepSpeed: what could not be verified, or would go wrong silently, is refused before anything is loaded."""

from __future__ import annotations

import importlib.util
import re
from types import SimpleNamespace
from typing import Any

import pytest

from hf_rocm_tune.cards.fsdp import Fsdp
from hf_rocm_tune.cards.strategies import STRATEGIES
from hf_rocm_tune.cards.strategy import CardSettings, ParallelStrategy
from hf_rocm_tune.errors import UsageError
from hf_rocm_tune.job import refusals
from hf_rocm_tune.lifecycle import launcher_flags
from hf_rocm_tune.machine import process
from hf_rocm_tune.settings import flags
from hf_rocm_tune.settings.verbs import VERBS

FSDP2 = {
    "ACCELERATE_USE_FSDP": "true",
    "FSDP_VERSION": "2",
    "FSDP_CPU_RAM_EFFICIENT_LOADING": "false",
    "FSDP_OFFLOAD_PARAMS": "false",
    "FSDP_ACTIVATION_CHECKPOINTING": "false",
}


def args(**changes: Any) -> Any:
    values = {"fsdp": None, "world_size": 2, "fp16": False, "bf16": True, "torch_compile": False}
    return SimpleNamespace(**(values | {"optim": "adamw_torch_fused"} | changes))


def model(**changes: Any) -> Any:
    values = {"use_peft": True, "load_in_4bit": False, "load_in_8bit": False, "bnb_4bit_quant_storage": None}
    return SimpleNamespace(**(values | changes))


def refuse(args: Any, model: Any, environ: dict[str, str], **uses: bool) -> None:
    Fsdp(CardSettings(world_size=2, fsdp=True)).refuse(args, model, uses, environ)


@pytest.mark.parametrize("changes", [{}, {"load_in_4bit": True, "bnb_4bit_quant_storage": "bfloat16"}])
def test_lora_and_qlora_go_through(changes: dict[str, Any]) -> None:
    refuse(args(), model(**changes), FSDP2)


@pytest.mark.parametrize("storage", ["bfloat16", "float16", "float32"])
def test_without_mixed_precision_any_float_may_hold_4_bit_weights(storage: str) -> None:
    refuse(args(bf16=False), model(load_in_4bit=True, bnb_4bit_quant_storage=storage), FSDP2)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"env": {"FSDP_VERSION": "1"}}, "use fsdp_version: 2"),
        ({"env": {"FSDP_CPU_RAM_EFFICIENT_LOADING": "true"}}, "broadcast every weight"),
        ({"env": {"FSDP_OFFLOAD_PARAMS": "true"}}, "fsdp_offload_params"),
        ({"env": {"FSDP_ACTIVATION_CHECKPOINTING": "true"}}, "--gradient_checkpointing"),
        ({"args": {"world_size": 1}}, "--num_processes 2"),
        ({"args": {"optim": "paged_adamw_8bit"}}, "adamw_torch_fused"),
        ({"args": {"fsdp": "full_shard"}}, "dual_rx7900xt_fsdp2"),
        ({"model": {"load_in_4bit": True}}, "--bnb_4bit_quant_storage bfloat16"),
        ({"model": {"load_in_4bit": True, "bnb_4bit_quant_storage": "float32"}}, "would be destroyed"),
    ],
)
def test_each_refusal_says_what_to_do(change: dict[str, dict[str, Any]], says: str) -> None:
    with pytest.raises(UsageError, match="FSDP2") as refused:
        refuse(args(**change.get("args", {})), model(**change.get("model", {})), FSDP2 | change.get("env", {}))
    assert says in str(refused.value)


@pytest.mark.parametrize("strategy", STRATEGIES, ids=lambda strategy: strategy.name)
def test_every_flag_that_a_strategy_excludes_exists_and_is_refused(strategy: type[ParallelStrategy]) -> None:
    for flag, why in strategy.excludes.items():
        assert flag in refusals.USES or launcher_flags.bare(flag.split()[0]) in flags.flags("sft")
        with pytest.raises(UsageError, match=re.escape(f"it does not work with {flag}: {why}")):
            strategy().refuse(args(), model(), {flag: True}, FSDP2)


def test_deepspeed_that_is_not_installed_is_one_line_with_the_better_way(monkeypatch: pytest.MonkeyPatch) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "deepspeed" else find(name))
    with pytest.raises(UsageError, match=r"pip install deepspeed.*For LoRA it gains nothing.*dual_rx7900xt"):
        process.prepare_process({"ACCELERATE_USE_DEEPSPEED": "true"})


def test_deepspeed_without_a_gpu_is_refused_where_accelerate_would_train_with_ddp(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(process, "require_deepspeed", lambda: None)
    monkeypatch.setattr(process, "has_accelerator", lambda: False)
    with pytest.raises(UsageError, match="sees no GPU"):
        process.prepare_process({"ACCELERATE_USE_DEEPSPEED": "true"})


def test_every_flag_of_the_table_exists() -> None:
    known = {flag for verb in VERBS for flag in flags.flags(verb)}
    told = {flag for what, excluded in refusals.EXCLUDES.items() for flag in (what, *excluded)}
    for flag in told - refusals.USES.keys() - VERBS.keys() - {refusals.PACKED}:
        assert launcher_flags.bare(flag.split()[0]) in known
