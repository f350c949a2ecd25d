"""FSDP and DeepSpeed: what could not be verified, or would go wrong silently, is refused before anything is loaded."""

from __future__ import annotations

import importlib.util
from types import SimpleNamespace
from typing import Any

import pytest

from hf_rocm_tune.errors import UsageError
from hf_rocm_tune.machine import process
from hf_rocm_tune.train.ranks import check_fsdp

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


def test_nothing_is_refused_where_no_fsdp_is_asked_for() -> None:
    assert check_fsdp(args(optim="adamw_8bit"), model(load_in_8bit=True), {}, others={"--auto_fit": True}) is False


@pytest.mark.parametrize("changes", [{}, {"load_in_4bit": True, "bnb_4bit_quant_storage": "bfloat16"}])
def test_lora_and_qlora_go_through(changes: dict[str, Any]) -> None:
    assert check_fsdp(args(), model(**changes), FSDP2, others={"--auto_fit": False}) is True


@pytest.mark.parametrize("storage", ["bfloat16", "float16", "float32"])
def test_without_mixed_precision_any_float_may_hold_4_bit_weights(storage: str) -> None:
    four = model(load_in_4bit=True, bnb_4bit_quant_storage=storage)
    assert check_fsdp(args(bf16=False), four, FSDP2, others={})


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"env": {"FSDP_VERSION": "1"}}, "use fsdp_version: 2"),
        ({"env": {"FSDP_CPU_RAM_EFFICIENT_LOADING": "true"}}, "broadcast every weight"),
        ({"env": {"FSDP_OFFLOAD_PARAMS": "true"}}, "fsdp_offload_params"),
        ({"env": {"FSDP_ACTIVATION_CHECKPOINTING": "true"}}, "--activation_checkpointing"),
        ({"args": {"world_size": 1}}, "--num_processes 2"),
        ({"args": {"fp16": True}}, "--bf16"),
        ({"args": {"torch_compile": True}}, "--torch_compile"),
        ({"args": {"optim": "paged_adamw_8bit"}}, "adamw_torch_fused"),
        ({"args": {"fsdp": "full_shard"}}, "dual_rx7900xt_fsdp2"),
        ({"model": {"use_peft": False}}, "LoRA"),
        ({"model": {"load_in_8bit": True}}, "--load_in_4bit"),
        ({"model": {"load_in_4bit": True}}, "--bnb_4bit_quant_storage bfloat16"),
        ({"model": {"load_in_4bit": True, "bnb_4bit_quant_storage": "float32"}}, "would be destroyed"),
        ({"others": {"--grad_sync host": True}}, "--grad_sync host"),
        ({"others": {"--auto_fit": True}}, "--per_device_train_batch_size"),
        ({"others": {"--init_lora_weights": True}}, "--init_lora_weights works only without it"),
        ({"others": {"--adapter_name_or_path": True}}, "merge it into the base first"),
    ],
)
def test_each_refusal_says_what_to_do(change: dict[str, dict[str, Any]], says: str) -> None:
    with pytest.raises(UsageError, match="FSDP2") as refused:
        check_fsdp(
            args(**change.get("args", {})),
            model(**change.get("model", {})),
            FSDP2 | change.get("env", {}),
            others=change.get("others", {}),
        )
    assert says in str(refused.value)


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
