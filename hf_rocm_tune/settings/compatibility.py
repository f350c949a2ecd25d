"""Settings that exclude each other: the flags, whether a job uses them, and what each does not go with.

A way over cards names what it excludes in its own file (`cards.way.Way.excludes`), by the names of `USES`.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Any

from accelerate.utils import str_to_bool

from hf_rocm_tune.errors import UsageError
from hf_rocm_tune.settings.arguments import Arguments

Uses = Callable[[Arguments], object]


def launched_with(engine: str, environ: Mapping[str, str] = os.environ) -> bool:
    """Whether the launcher asks for ``FSDP`` or ``DEEPSPEED``."""
    return bool(str_to_bool(environ.get(f"ACCELERATE_USE_{engine}") or "no"))


def _training(name: str) -> Uses:
    return lambda job: getattr(job.training, name, False)


def _model(name: str) -> Uses:
    return lambda job: getattr(job.model, name, False)


USES: Mapping[str, Uses] = {
    "several processes": lambda job: job.training.world_size > 1,
    "FSDP": lambda job: job.training.fsdp or launched_with("FSDP"),
    "DeepSpeed": lambda job: job.training.deepspeed or launched_with("DEEPSPEED"),
    "--auto_fit": lambda job: job.tune.auto_fit != "off",
    "--auto_find_batch_size": _training("auto_find_batch_size"),
    "--grad_sync host": lambda job: job.ranks.grad_sync == "host",
    "--grad_compression": lambda job: job.ranks.grad_compression != "none",
    "--split_layers": lambda job: job.ranks.split_layers is not None,
    "--pipeline auto": lambda job: job.ranks.pipeline == "auto",
    "--tensor_parallel": lambda job: job.ranks.tensor_parallel,
    "--recompute_layers": lambda job: job.tune.recompute is not None,
    "--init_lora_weights": lambda job: job.tune.rewrites_base,
    "--adapter_name_or_path": lambda job: job.tune.adapter_name_or_path is not None,
    "--mask_thinking": lambda job: job.tune.mask_thinking,
    "--one_pass_loss": lambda job: bool(job.tune.one_pass_loss),
    "--sample_every": lambda job: job.tune.sample_every is not None,
    "--stream_weights": lambda job: job.tune.stream_weights != "off",
    "--loraplus_lr_ratio": lambda job: job.tune.loraplus_lr_ratio is not None,
    "--use_peft false": lambda job: not job.model.use_peft,
    "--use_dora": _model("use_dora"),
    "--lora_modules_to_save": _model("lora_modules_to_save"),
    "--lora_target_parameters": _model("lora_target_parameters"),
    "--load_in_4bit": _model("load_in_4bit"),
    "--load_in_8bit": _model("load_in_8bit"),
    "--attn_implementation flex_attention": lambda job: job.model.attn_implementation == "flex_attention",
    "--fp16": _training("fp16"),
    "--torch_compile": _training("torch_compile"),
    "--activation_offloading": _training("activation_offloading"),
    "--activation_checkpointing false": lambda job: not job.training.activation_checkpointing,
    "--activation_checkpointing_kwargs": lambda job: bool(
        job.given.intersection(("activation_checkpointing_kwargs", "gradient_checkpointing_kwargs"))
    ),
    "--packing_strategy wrapped": lambda job: (
        getattr(job.training, "packing", False) and job.training.packing_strategy == "wrapped"
    ),
    "--precompute_ref_log_probs": _training("precompute_ref_log_probs"),
    "--use_vllm": _training("use_vllm"),
    "--use_transformers_continuous_batching": _training("use_transformers_continuous_batching"),
    "--sync_ref_model": _training("sync_ref_model"),
}
"""Each flag or setting, and whether a job uses it."""

_LOST = "the saved adapter would lack it"
_LORA = "it is for LoRA"
_OTHER_METHODS = {
    "FSDP": "it was never tried; use --accelerate_config dual_rx7900xt",
    "DeepSpeed": "it was never tried; use --accelerate_config dual_rx7900xt",
    "--split_layers": "it was never tried; leave it out",
    "--tensor_parallel": "it was never tried; leave it out",
    "--mask_thinking": "it is for supervised fine-tuning",
    "--one_pass_loss": "it is for supervised fine-tuning",
    "--precompute_ref_log_probs": "its batches are moved unverified",
    "--use_vllm": "its weights and answers are not verified",
    "--use_transformers_continuous_batching": "it casts the model in place",
    "--sync_ref_model": "no checkpoint has the moved reference model",
}
EXCLUDES: Mapping[str, Mapping[str, str]] = {
    "--auto_fit": {
        "FSDP": "it plans for cards that each hold the whole model",
        "DeepSpeed": "it plans for cards that each hold the whole model",
        "--auto_find_batch_size": "both choose the micro-batch",
    },
    "--init_lora_weights": {
        **dict.fromkeys(("--use_dora", "--lora_modules_to_save", "--lora_target_parameters"), _LOST),
        **dict.fromkeys(("--load_in_4bit", "--load_in_8bit"), "it needs full-precision weights"),
    },
    "--use_peft false": {
        **dict.fromkeys(("--init_lora_weights", "--adapter_name_or_path", "--loraplus_lr_ratio"), _LORA),
        **dict.fromkeys(("--load_in_4bit", "--load_in_8bit"), "quantised weights are not trained, LoRA on them is"),
    },
    "--mask_thinking": {"--packing_strategy wrapped": "it cuts examples"},
    "--one_pass_loss": {"--torch_compile": "it was never tried"},
    "--recompute_layers": {
        "--activation_checkpointing false": "it recomputes nothing",
        "--activation_checkpointing_kwargs": "they apply to all layers",
        "--torch_compile": "it was never tried",
    },
    "--sample_every": dict.fromkeys(
        ("FSDP", "DeepSpeed", "--split_layers", "--tensor_parallel", "--stream_weights"),
        "no process can answer alone there; use `hf-rocm-tune generate` on a checkpoint",
    ),
    "--stream_weights": {
        "--use_peft false": "what is streamed cannot be trained",
        "--init_lora_weights": "it rewrites the weights",
        "--use_dora": "its magnitudes are computed from all weights at the start",
        "FSDP": "each card streams the whole model",
        "DeepSpeed": "each card streams the whole model",
        "--tensor_parallel": "it was never tried",
        "--pipeline auto": "a layer's weights would have to stay for several micro-batches",
        "--torch_compile": "compiled layers do not wait for their weights",
    },
    **dict.fromkeys(("dpo", "kto", "orpo", "grpo"), _OTHER_METHODS),
    "reward": {
        **_OTHER_METHODS,
        "--sample_every": "a reward model gives no text",
        "--init_lora_weights": "the saved adapter would lack the reward head",
    },
}
"""For each flag or training method: what it does not go with, and why."""


def check(job: Arguments) -> None:
    """Refuse settings that exclude each other, and what the way over cards excludes."""
    uses = {flag: bool(used(job)) for flag, used in USES.items()}
    for what, excluded in EXCLUDES.items():
        if uses.get(what) or what == job.method:
            refuse(what, {f"{flag} ({why})": uses[flag] for flag, why in excluded.items()})
    job.way().refuse(job.training, job.model, uses, os.environ)


def refuse(what: str, reasons: Mapping[str, Any]) -> None:
    """Refuse `what` together with settings that it excludes: the description of each, and whether it applies."""
    if found := [reason for reason, applies in reasons.items() if applies]:
        raise UsageError(f"{what} does not work with {'; nor with '.join(found)}")
