"""What a job refuses before its model is loaded: one table of settings that exclude each other, with the reason; some
adapters and reward functions; and, by the preflight, ways to average gradients.

A parallel strategy names what it excludes in its own file (`ParallelStrategy.excludes`), in the same words.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import os
import runpy
from collections.abc import Callable, Iterable, Mapping, MutableMapping
from typing import TYPE_CHECKING, Any

import torch

from hf_rocm_tune.cards import preflight
from hf_rocm_tune.cards.strategy import is_on
from hf_rocm_tune.errors import StallError, UsageError
from hf_rocm_tune.job import announce
from hf_rocm_tune.machine.child import pci_address
from hf_rocm_tune.models import recompute
from hf_rocm_tune.models.experts import has_experts
from hf_rocm_tune.models.own_head import why_own_head
from hf_rocm_tune.models.quantised import has_mxfp4
from hf_rocm_tune.settings.arguments import Arguments, RanksArguments
from hf_rocm_tune.settings.verbs import VERBS

if TYPE_CHECKING:
    from torch import nn

    from hf_rocm_tune.survive.saved_adapter import Adapter


def _saves_between_generations(job: Arguments) -> bool:
    training: Any = job.training
    block = training.steps_per_generation * training.num_iterations
    micro_batches = training.save_steps * training.gradient_accumulation_steps
    return training.save_strategy == "steps" and training.save_steps >= 1 and bool(micro_batches % block)


_CHECKPOINTING = ("activation_checkpointing_kwargs", "gradient_checkpointing_kwargs")
_BETWEEN_GENERATIONS = "a checkpoint between two generations"
_REFERENCE = "--use_peft false with --beta and --model_revision"
_VLLM = "--use_vllm without --consent_unverified"
USES: Mapping[str, Callable[[Arguments], object]] = {
    "several processes": lambda job: job.training.world_size > 1,
    "FSDP": lambda job: job.training.fsdp or is_on("ACCELERATE_USE_FSDP"),
    "DeepSpeed": lambda job: job.training.deepspeed or is_on("ACCELERATE_USE_DEEPSPEED"),
    "FSDP2 or --tensor_parallel": lambda job: job.strategy().on_host,
    "--init_lora_weights": lambda job: job.tune.rewrites_base,
    "the CPU": lambda job: job.training.device.type == "cpu",
    "its `offload`": lambda job: recompute.options_of(job.training).get("offload"),
    "--gradient_checkpointing_kwargs": lambda job: {*_CHECKPOINTING} & job.given,
    "--gradient_checkpointing false": lambda job: not recompute.is_chosen(job.training),
    "--packing_strategy wrapped": lambda job: (
        getattr(job.training, "packing", False) and job.training.packing_strategy == "wrapped"
    ),
    _BETWEEN_GENERATIONS: _saves_between_generations,
    _VLLM: lambda job: getattr(job.training, "use_vllm", False) and not job.tune.consent_unverified,
    _REFERENCE: lambda job: job.training.beta and not job.model.use_peft and job.model.model_revision != "main",
}
"""Whether a job uses what is more than the value of a flag."""


def uses(job: Arguments, what: str) -> bool:
    """Whether a job uses a setting: one of `USES`, a flag that is on, or ``--flag value``."""
    if what in USES:
        return bool(USES[what](job))
    name, _, value = what.removeprefix("--").partition(" ")
    parts = (job.tune, job.ranks, job.model, job.training)
    setting = next((getattr(part, name) for part in parts if hasattr(part, name)), None)
    if value:
        return str(getattr(setting, "value", setting)).lower() == value
    return bool(setting) and setting not in ("off", "none")


_LOST = "the saved adapter would lack it"
_LORA = "it is for LoRA"
_OTHER_METHODS = {
    **dict.fromkeys(("FSDP", "DeepSpeed"), "untested; use --accelerate_config dual_rx7900xt"),
    **dict.fromkeys(("--split_layers", "--tensor_parallel"), "untested; leave it out"),
    **dict.fromkeys(("--mask_thinking", "--one_pass_loss"), "it is for supervised fine-tuning"),
    "--precompute_ref_log_probs": "its batches are moved unverified",
    _VLLM: "what it loads and answers is not verified",
    "--use_transformers_continuous_batching": "it casts the model in place",
    "--sync_ref_model": "no checkpoint has the moved reference model",
}
_UNPACKED = "vLLM takes weights with the adapter merged, which quantised ones cannot be"
PACKED = "a mixture whose experts are in 4 bit"
EXCLUDES: Mapping[str, Mapping[str, str]] = {
    "--auto_fit": {
        **dict.fromkeys(("FSDP", "DeepSpeed"), "it plans for cards that each hold the whole model"),
        "--auto_find_batch_size": "both choose the micro-batch",
    },
    "--auto_fit off": dict.fromkeys(("--effective_batch", "--auto_fit_gib"), "it works only with --auto_fit plan"),
    "--init_lora_weights": {
        **dict.fromkeys(("--use_dora", "--lora_modules_to_save", "--lora_target_parameters"), _LOST),
        **dict.fromkeys(("--load_in_4bit", "--load_in_8bit"), "it needs full-precision weights"),
    },
    "--use_peft false": {
        **dict.fromkeys(("--init_lora_weights", "--adapter_name_or_path", "--loraplus_lr_ratio"), _LORA),
        **dict.fromkeys(("--load_in_4bit", "--load_in_8bit"), "quantised weights are not trained, LoRA on them is"),
    },
    "--activation_offloading": {"the CPU": "it moves activations from a card to the host"},
    "--gradient_checkpointing_kwargs": {"its `offload`": "it is not listed as unverified"},
    "--mask_thinking": {"--packing_strategy wrapped": "it cuts examples"},
    "--one_pass_loss": {"--torch_compile": "untested"},
    "--recompute_layers": {
        "--gradient_checkpointing false": "it recomputes nothing",
        "--gradient_checkpointing_kwargs": "they apply to all layers",
        "--torch_compile": "untested",
    },
    "--sample_every": dict.fromkeys(
        ("FSDP", "DeepSpeed", "--split_layers", "--tensor_parallel"),
        "no process can answer alone there; use `hf-rocm-tune generate` on a checkpoint",
    ),
    "--save_on_each_node": {"several processes": "it splits checkpoints over the machines; share output_dir instead"},
    "--stream_weights": {
        "--use_peft false": "what is streamed cannot be trained",
        "--init_lora_weights": "it rewrites the weights",
        "--use_dora": "its magnitudes are computed from all weights at the start",
        **dict.fromkeys(("FSDP", "DeepSpeed"), "each card streams the whole model"),
        "--tensor_parallel": "untested",
        "--pipeline auto": "a layer's weights would have to stay for several micro-batches",
        "--torch_compile": "compiled layers do not wait for their weights",
    },
    "--use_vllm": dict.fromkeys(("--load_in_4bit", "--load_in_8bit"), _UNPACKED),
    PACKED: {
        "--use_peft false": "packed weights cannot be trained; adapters can",
        "--use_vllm": _UNPACKED,
        "FSDP2 or --tensor_parallel": "packed experts cannot be cut; use --split_layers auto",
        "--torch_compile": "untested",
    },
    **{verb: _OTHER_METHODS for verb in VERBS if verb != "sft"},
    "grpo": {
        **_OTHER_METHODS,
        _BETWEEN_GENERATIONS: "whose answers it would lack: --save_steps times --gradient_accumulation_steps must be a "
        "multiple of --steps_per_generation times --num_iterations",
        _REFERENCE: "TRL loads the reference model without the revision",
    },
    "reward": {
        **_OTHER_METHODS,
        "--sample_every": "a reward model gives no text",
        "--init_lora_weights": "the saved adapter would lack the reward head",
    },
}
"""For each setting or training method: what it does not go with, and why."""


def check(job: Arguments, config: Any) -> None:
    """Refuse settings that exclude each other or this model's ``config``, and what the parallel strategy excludes."""
    packed = has_mxfp4(config) or (job.model.load_in_4bit and has_experts(config))
    for what, excluded in EXCLUDES.items():
        if what == PACKED:
            applies = packed
        elif what.startswith("--"):
            applies = uses(job, what)
        else:
            applies = what == job.method
        if not applies:
            continue
        problems = [f"{flag} is not supported with {what} ({why})" for flag, why in excluded.items() if uses(job, flag)]
        if problems:
            raise UsageError("; ".join(problems))
    strategy = job.strategy()
    strategy.refuse(job.training, job.model, {flag: uses(job, flag) for flag in strategy.excludes}, os.environ)


def check_router_loss(job: Arguments, config: Any) -> None:
    """Sets ``--router_aux_loss_coef 0`` where TRL cannot compute the loss of a router, and the router is frozen.

    TRL 1.16 reads `num_experts` of the configuration, which Granite's call ``num_local_experts`` only.

    Raises:
        UsageError: the router is trained, so that its loss has an effect.
    """
    training: Any = job.training
    text = config.get_text_config()
    coefficient = getattr(training, "router_aux_loss_coef", 0.0)
    if coefficient is None:
        coefficient = getattr(text, "router_aux_loss_coef", 0.0)
    computed = hasattr(text, "output_router_logits") and coefficient and has_experts(config)
    if job.method != "sft" or not computed or hasattr(text, "num_experts"):
        return
    targets = job.model.lora_target_modules or ()
    if isinstance(targets, str):
        targets = (targets,)
    trained = [*targets, *(job.model.lora_modules_to_save or ())]
    if not job.model.use_peft or any("router" in name or name == "gate" for name in trained):
        raise UsageError(
            f"TRL cannot compute the balancing loss of the router of {config.architectures[0]}, which is trained: give "
            "--router_aux_loss_coef 0, or leave the router out"
        )
    training.router_aux_loss_coef = 0.0
    announce.say("the balancing loss of the router is left out (--router_aux_loss_coef 0): the router is frozen")


def leave_out_missing_routers(job: Arguments, model: nn.Module) -> None:
    """Sets ``--router_aux_loss_coef 0`` where the configuration has a router's loss, and no layer has a router.

    A dense model of an architecture that also makes mixtures (Doge, or Flint with dense layers only) would otherwise
    end in transformers' loss, which reads the first router's logits.
    """
    recorded = getattr(model, "can_record_outputs", {}).get("router_logits")
    if job.method != "sft" or recorded is None:
        return
    recorders: list[Any] = recorded if isinstance(recorded, list) else [recorded]
    kinds: tuple[Any, ...] = tuple(getattr(recorder, "target_class", recorder) for recorder in recorders)
    if not any(isinstance(module, kinds) for module in model.modules()):
        training: Any = job.training
        training.router_aux_loss_coef = 0.0


def check_model(method: str, model: nn.Module) -> None:
    """Refuses what is no language model, and methods whose loss does not fit a model, see `models.own_head`."""
    if method == "reward":  # a classifier, with a loss of its own
        return
    name = type(model).__name__
    if not hasattr(model, "prepare_inputs_for_generation"):  # PEFT's measure
        raise UsageError(f"{name} is no causal language model: {method} cannot train it")
    if method == "sft":
        return
    why = why_own_head(model)
    if why:
        raise UsageError(f"{method} cannot train {name}: TRL's loss does not fit it ({why}); sft does")


# ---- adapters and rewards -------------------------------------------------------------------------------------------


def check_adapter(method: str, adapter: Adapter | None) -> None:
    """Refuses to train a reward model on with an adapter that has no reward head: a new one would not be saved."""
    if adapter is None or method != "reward":
        return
    kind = adapter.config.task_type
    if kind != "SEQ_CLS":
        raise UsageError(
            f"--adapter_name_or_path {adapter.name} is no adapter of a reward model (its task_type is {kind}, not "
            "SEQ_CLS): give one that `reward` has trained, or drop the flag"
        )


def reward_functions(script: Any) -> list[Any]:
    """The reward functions and reward model that the flags name: TRL's, dotted paths of installed modules, or, as
    ``./rewards.length``, `length` of ``rewards.py`` in the working directory.
    """
    from trl import rewards

    known = {name: getattr(rewards, name) for name in _REWARDS_OF_TRL}
    known["get_soft_overlong_punishment"] = rewards.get_soft_overlong_punishment(1280, 256)  # TRL's numbers
    wanted: list[Any] = []
    if script.reward_model_name_or_path:
        wanted.append(script.reward_model_name_or_path)
    for name in script.reward_funcs or ():
        if name in known:
            wanted.append(known[name])
        else:
            wanted.append(_imported(name, known))
    if not wanted:
        raise UsageError(
            f"no reward: give --reward_funcs ({', '.join(known)}, or module.function), or --reward_model_name_or_path"
        )
    return wanted


_REWARDS_OF_TRL = ("accuracy_reward", "reasoning_accuracy_reward", "think_format_reward")
_OF_TRL = ("prompts", "completions", "completion_ids", "trainer_state", "log_extra", "log_metric")


def check_rewards(rewards: Iterable[Any], columns: Iterable[str] | None) -> None:
    """Refuses a reward function that TRL cannot call with these columns (None: they are not known) or packages."""
    functions = list(filter(callable, rewards))
    if columns is not None:
        _check_arguments(functions, columns)
    for function in functions:
        compares = getattr(function, "__module__", "") == "trl.rewards.accuracy_rewards"
        if compares and importlib.util.find_spec("math_verify") is None:
            raise UsageError(
                f"--reward_funcs {function.__name__} needs the package math_verify: `pip install math-verify`"
            )


def _check_arguments(functions: Iterable[Callable[..., Any]], columns: Iterable[str]) -> None:
    given = dict.fromkeys((*_OF_TRL, *(set(columns) - {"prompt", "completion", "completion_ids"})))
    for function in functions:
        try:
            inspect.signature(function).bind(**given)
        except TypeError as error:
            raise UsageError(
                f"--reward_funcs {function.__name__}: {error}; its arguments are the columns of the rows "
                f"({', '.join(columns)}) and {', '.join(_OF_TRL)}"
            ) from error


def _imported(name: str, known: Iterable[str]) -> Any:
    here = name.startswith("./")
    module, _, function = name.removeprefix("./").rpartition(".")
    if not module:
        raise UsageError(f"--reward_funcs {name}: give {', '.join(known)}, or a path module.function")
    try:
        if here:
            reward = runpy.run_path(f"{module.replace('.', os.sep)}.py", run_name=module)[function]
        else:
            reward = getattr(importlib.import_module(module), function)
    except Exception as error:  # the user's code runs here
        local = "" if here else " (begin with ./ for a file in the working directory)"
        raise UsageError(f"--reward_funcs {name} cannot be imported: {type(error).__name__}: {error}{local}") from error
    if not callable(reward):
        raise UsageError(f"--reward_funcs {name} is a {type(reward).__name__}, not a function")
    return reward


# ---- several ranks ---------------------------------------------------------------------------------------------------


def decide(
    ranks: RanksArguments,
    accelerator: bool,
    accumulation: int,
    *,
    environ: MutableMapping[str, str],
    say: Callable[..., None],
) -> preflight.Preflight | None:
    """Run the preflight if there are several ranks and it is enabled. Every rank calls it."""
    world = int(environ.get("WORLD_SIZE", "1"))
    if world < 2 or ranks.preflight == "off" or (ranks.preflight == "auto" and not accelerator):
        return None
    rank = int(environ["LOCAL_RANK"])
    device = {"device": "cpu", "address": None}
    if accelerator:  # by Accelerate's rule the card of this number; if it is missing, its trials say so
        address = pci_address(rank) if rank < torch.cuda.device_count() else None
        device = {"device": f"cuda:{rank}", "address": address}
    done = preflight.run(asked=ranks.grad_sync, device=device, environ=environ)
    say(*done.lines())
    config = "single_rx7900xt" if accelerator else "cpu"
    one_card = (
        f"`hf-rocm-tune sft --accelerate_config {config} --gradient_accumulation_steps {world * accumulation}` and "
        "your other flags (the same effective batch)"
    )
    preflight.insist(done, one_card=one_card)
    sharded = is_on("ACCELERATE_USE_FSDP", environ) or is_on("ACCELERATE_USE_DEEPSPEED", environ)
    if done.method == "host" and sharded:
        raise StallError(
            f"gradients can only be averaged through host memory here ({done.reason}), which FSDP and DeepSpeed "
            f"do not support: train without them (--accelerate_config dual_rx7900xt), or on one card with {one_card}"
        )
    several_machines = environ.get("LOCAL_WORLD_SIZE", str(world)) != str(world)
    if done.method == "host" and ranks.grad_sync != "host" and several_machines:
        raise StallError(
            f"gradients can only be averaged through host memory on this machine ({done.reason}), and the "
            "other machines may average differently: start all of them again with --grad_sync host"
        )
    if done.method == "ddp_without_p2p":
        environ[preflight.P2P_VARIABLE] = "1"
    return done
