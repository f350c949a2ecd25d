"""Checks of the settings before anything is loaded, one-line errors for upstream's own checks, and what is unverified.

The pages of bitsandbytes' paged optimizers do not pass through the mover. The code tables of 8-bit optimizers are
compared afterwards; the rest is listed in the coverage, and ``--verify full`` then asks for consent.
"""

from __future__ import annotations

import copy
import importlib
import importlib.util
import logging
import os
import re
import shutil
from collections.abc import Collection, Iterable, Iterator, Sized
from contextlib import contextmanager
from dataclasses import replace
from traceback import walk_tb
from typing import TYPE_CHECKING, Any

import torch
from jinja2 import TemplateError
from torch import nn
from transformers import TrainerCallback, get_scheduler, masking_utils
from transformers.integrations.integration_utils import get_available_reporting_integrations

from hf_rocm_tune.errors import CorruptionError, UsageError
from hf_rocm_tune.models import recompute
from hf_rocm_tune.models.quantised import require_bitsandbytes
from hf_rocm_tune.transfer import FaultSpec, Mover, TransferSettings, digest, triton_refusal

if TYPE_CHECKING:
    from transformers import Trainer, TrainerControl, TrainerState, TrainingArguments

    from hf_rocm_tune.models.placement import Coverage

logger = logging.getLogger(__name__)

_OUR_UPSTREAM = frozenset({"trl", "peft", "transformers", "accelerate"})


@contextmanager
def as_usage_errors(packages: Collection[str] = _OUR_UPSTREAM) -> Iterator[None]:
    """Within the block errors that upstream raises itself about settings become a ``UsageError``, and so do a template
    that cannot render the rows and a Hub that cannot be reached. One raised elsewhere is a bug."""
    try:
        yield
    except (TemplateError, TypeError, ConnectionError, ValueError, ImportError) as error:
        said = _said(error, packages)
        if said is None:
            raise
        raise UsageError(said) from error


@contextmanager
def missing_metric_as_usage_error() -> Iterator[None]:
    """Within the block, which is a training, a metric that no evaluation gives becomes a ``UsageError``."""
    try:
        yield
    except KeyError as error:
        if "metric_for_best_model" not in str(error):
            raise
        raise UsageError(f"--metric_for_best_model: {error.args[0]}") from error


@contextmanager
def first_step_as_usage_error(trainer: Trainer) -> Iterator[None]:
    """Within the block, which is a training, what a model's own code raises in the first step becomes a ``UsageError``.

    Such a model cannot be trained in this way, whatever the rows. An error of a device is none of the model's.
    """
    start = trainer.state.global_step
    try:
        yield
    except (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
        of_device = isinstance(error, torch.AcceleratorError) or _OF_DEVICE.search(str(error))
        module, place = next((place for place in _places(error) if not _HELPS.match(place[0])), ("", ""))
        if trainer.state.global_step == start and _NO_GRADIENT in str(error):
            raise UsageError(
                f"{_name_of(trainer.model)} cannot be trained with these settings: its loss depends on no weight that "
                "is trained: give adapters to other layers with --lora_target_modules, or train all weights with "
                "--use_peft false"
            ) from error
        if trainer.state.global_step > start or of_device or not module.startswith(_CODE_OF_MODELS):
            raise
        what = " ".join(str(error).split())
        fix = ""
        of_length = _OF_LENGTH.search(what)
        if "a leaf Variable that requires grad" in what and recompute.is_chosen(trainer.args):
            fix = (
                ": it writes into the embeddings' output, as recomputation forbids: give --gradient_checkpointing false"
            )
        elif _OF_PRECISION.search(what) and not (trainer.args.bf16 or trainer.args.fp16):  # XLNet in 4 bits
            fix = ": it multiplies bfloat16 with float32: give --bf16 true, which computes such products in bfloat16"
        elif "mixed dtype (CPU)" in what:  # Gemma 4 unified in 4 bits
            fix = ": it normalises float32 by weights in bfloat16, which a CPU cannot: give --dtype float32"
        elif of_length is not None:  # Reformer
            fix = f": give --pad_to_multiple_of {of_length[1]}"
        whose = "TRL's loss" if module.startswith("trl.") else "its own code"
        raise UsageError(
            f"{_name_of(trainer.model)} cannot be trained with these settings: {whose} fails in the first step "
            f"with {type(error).__name__}: {what[:300]} ({place}){fix}"
        ) from error


_NO_GRADIENT = "does not require grad and does not have a grad_fn"
_OF_DEVICE = re.compile(r"\b(HIP|CUDA|out of memory)\b")
_OF_PRECISION = re.compile(
    r"expected scalar type Float but found BFloat16|the same dtype, but got.*\bBFloat16"
    r"|Input type \((float|torch\.FloatTensor)\) and (weight|bias) type \(.*BFloat16.*\) should be the same"
)
_OF_LENGTH = re.compile(r"sequence length \d+ has to be a multiple of \D*(\d+)")
_HELPS = re.compile(r"torch\b|transformers\.(configuration_utils|utils|integrations|modeling_\w+)\b")
_CODE_OF_MODELS = ("transformers.models.", "transformers_modules.", "timm.", "trl.kernels.")


def _places(error: BaseException) -> Iterator[tuple[str, str]]:
    """The modules in which an error was raised and passed on, the innermost first, with file and line.

    Not what stands between a model and torch: the modes of ours, and the check of attention.
    """
    for frame, line in reversed([*walk_tb(error.__traceback__)]):
        if frame.f_code.co_name in ("__torch_function__", "__torch_dispatch__", "checked"):
            continue
        name = frame.f_globals.get("__name__", "")
        yield name, f"{os.path.basename(frame.f_code.co_filename)}, line {line}"


def _name_of(model: Any) -> str:
    return type(model.get_base_model() if hasattr(model, "peft_config") else model).__name__


def _said(error: Exception, packages: Collection[str]) -> str | None:
    """The message of an error that is the user's to mend; None: it is a bug."""
    text = " ".join(str(error).split())
    frames = [frame for frame, _ in walk_tb(error.__traceback__)]
    in_template = any(frame.f_code.co_filename == "<template>" for frame in frames)
    if isinstance(error, TemplateError) or (isinstance(error, TypeError) and in_template):
        fix = "change the rows, or give another template with --chat_template_path"
        return f"the chat template cannot render these rows: {text}; {fix}"
    if isinstance(error, ConnectionError):
        return f"{text}; check the network, or leave --push_to_hub out"
    if "incompatible with Mamba" in text:  # their kernels read the weights of these layers themselves
        return (
            "--lora_target_modules: PEFT puts no adapters on out_proj and conv1d of Mamba's layers: name the others, "
            "such as in_proj x_proj dt_proj"
        )
    raised_by = frames[-1].f_globals.get("__name__", "").partition(".")[0]
    if isinstance(error, ValueError | ImportError) and raised_by in packages:
        return f"these settings do not go together: {text}"
    return None


_OPTIMIZERS = {  # transformers 5.23, ``trainer_optimizer.py``: the package that a family needs; None: never tried here
    **dict.fromkeys(("galore", "apollo", "lomo", "adalomo"), None),
    "adamw_anyprecision": "torchdistx",
    "adamw_torch_4bit": "torchao",
    "adamw_torch_8bit": "torchao",
    "grokadamw": "grokadamw",
    "schedule_free": "schedulefree",
    "stable_adamw": "optimi",
}


def check_settings(args: TrainingArguments) -> None:
    """Refuse what upstream would find only while it trains: an optimizer, a schedule, a logger, a compiled kernel."""
    check_optimizer(args)
    check_loggers(args.report_to)
    check_compiled(args)
    optimizer, schedule = torch.optim.SGD([torch.zeros(1)]), args.lr_scheduler_type
    try:
        get_scheduler(schedule, optimizer, 0, 1000, args.lr_scheduler_kwargs)
    except (TypeError, ValueError) as error:
        raise UsageError(
            f"--lr_scheduler_type {getattr(schedule, 'value', schedule)} does not work with --lr_scheduler_kwargs "
            f"{args.lr_scheduler_kwargs}: {error}"
        ) from error


def check_optimizer(args: TrainingArguments) -> None:
    """Refuse an optimizer that was never tried here, or whose package is missing or does not run on this device."""
    name = optimizer_name(args)
    instead = "choose adamw_torch_fused, adamw_8bit, paged_adamw_8bit or another of --help_all"
    for family, package in _OPTIMIZERS.items():
        if name.startswith(family) and package is None:
            why = "is not supported: it is untested with verified averages and checkpoints"
            raise UsageError(f"--optim {name} {why}; {instead}")
        if name.startswith(family) and importlib.util.find_spec(str(package)) is None:
            raise UsageError(f"--optim {name} needs the package {package}, which is not installed; {instead}")
    if is_of_bitsandbytes(optimizer_name(args)):
        require_bitsandbytes(args.device, f"--optim {name}")


def check_loggers(names: str | Iterable[str] | None) -> None:
    """Check that transformers can report to each of these services (``report_to``)."""
    available = get_available_reporting_integrations()
    wanted = [names] if isinstance(names, str) else list(names or ())
    lacking = [name for name in wanted if name not in (*available, "none", "all")]
    if lacking:
        there = ", ".join(available) or "none"
        fix = "give several as a list in a --config file; `pip install 'hf-rocm-tune[loggers]'` brings two"
        raise UsageError(f"--report_to {' '.join(lacking)}: unknown or not installed; installed here: {there}; {fix}")


def check_rows(trainer: Trainer) -> None:
    args: Any = trainer.args
    for split, rows in (("training", trainer.train_dataset), ("evaluation", trainer.eval_dataset)):
        if isinstance(rows, Sized) and not len(rows):
            raise UsageError(
                f"no {split} rows remain: with --max_length {getattr(args, 'max_length', None)} no row has a token "
                "that is in the loss; give rows with answers, or a larger length if it cut them off"
            )


def require_isolation(model: nn.Module, args: Any) -> None:
    """Have the first packed forward refused where its examples would see each other: masks that ignore positions.

    Without FlashAttention transformers makes the mask of packed examples from ``position_ids``, if the model's own code
    hands them on; that of gpt-oss, Falcon and OPT in 5.23 does not. Wrapped rows are not meant to be isolated.
    """
    if getattr(args, "packing", False) and getattr(args, "packing_strategy", "") == "wrapped":
        return
    packed = getattr(args, "packing", False) or getattr(args, "padding_free", False)
    if not packed or args.torch_compile:  # whose graph would hold the hooks
        return
    stock, heeded = masking_utils.find_packed_sequence_indices, list[bool]()

    def heeds(*arguments: Any, **keywords: Any) -> Any:
        heeded.append(True)
        return stock(*arguments, **keywords)

    def before(*_: Any) -> None:
        masking_utils.find_packed_sequence_indices = heeds

    def after(module: nn.Module, arguments: Any, keywords: Any, output: Any) -> None:
        masking_utils.find_packed_sequence_indices = stock
        positions = keywords.get("position_ids")
        if output is None or positions is None or not (positions[:, 1:] == 0).any():
            return  # it failed, or held one example
        for handle in handles:
            handle.remove()
        config: Any = module.config
        if not (heeded or "flash" in str(config._attn_implementation)):
            raise UsageError(
                f"packed examples attend to each other in {config.architectures[0]} with {config._attn_implementation} "
                "attention, whose masks ignore where an example begins; give --packing false"
            )

    handles = [
        model.register_forward_pre_hook(before),
        model.register_forward_hook(after, with_kwargs=True, always_call=True),
    ]


def check_compiled(args: TrainingArguments) -> None:
    """Refuse kernels that cannot be compiled here: Liger's, and those of torch.compile."""
    if args.use_liger_kernel:
        if importlib.util.find_spec("liger_kernel") is None:
            fix = "`pip install liger-kernel`, or leave it out"
            raise UsageError(f"--use_liger_kernel needs the package liger-kernel, which is not installed: {fix}")
        _require_triton("--use_liger_kernel", args.device)
    if args.torch_compile and args.torch_compile_backend in (None, "inductor"):
        if args.device.type != "cpu":
            _require_triton("--torch_compile", args.device)
        elif not any(map(shutil.which, filter(None, (os.environ.get("CXX"), "g++", "clang++")))):
            raise UsageError(
                "--torch_compile on a CPU needs a C++ compiler, and there is no g++: install it, or leave it out"
            )


def _require_triton(flag: str, device: torch.device) -> None:
    refusal = triton_refusal(device)
    if refusal:
        raise UsageError(f"{flag} needs Triton, which does not run here ({refusal}): leave it out")


def with_offloads(coverage: Coverage, args: TrainingArguments, *, deepspeed: bool = False) -> Coverage:
    """The coverage of a model, with what these settings move to the device outside the mover."""
    rows = {}
    on_card = args.device.type != "cpu"
    optimizer = optimizer_name(args)
    if deepspeed:
        name = "weights and gradients under DeepSpeed"
        rows[name] = "DeepSpeed broadcasts weights from rank 0 and averages gradients by itself"
    if on_card and is_of_bitsandbytes(optimizer) and "paged" in optimizer:
        rows["paged optimizer state"] = f"--optim {optimizer}: the driver moves its pages between host and device"
    if on_card and getattr(args, "activation_offloading", False):
        rows["activations in host memory"] = "--activation_offloading: TRL copies them to the host and back by itself"
    if getattr(args, "use_vllm", False):
        rows["weights and answers of vLLM"] = "--use_vllm: TRL sends vLLM the weights and takes its answers by itself"
    if on_card and optimizer == "adafactor":
        rows["new optimizer state"] = "--optim adafactor creates it on the host and copies it at the first step"
    named = [{"tensor": name, "reason": reason} for name, reason in rows.items()]
    return replace(coverage, unverified=[*coverage.unverified, *named])


class OptimizerTablesCallback(TrainerCallback):
    """Compares the code tables that an 8-bit optimizer copies to the device at its first step with the host's."""

    def __init__(self) -> None:
        self._compared = False

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **more: Any) -> None:
        if self._compared:
            return
        self._compared = True
        optimizer = more["optimizer"]
        for name, table in getattr(getattr(optimizer, "optimizer", optimizer), "name2qmap", {}).items():
            functional = importlib.import_module("bitsandbytes.functional")
            expected = functional.create_dynamic_map(signed=name == "dynamic")
            if digest(table) != digest(expected.to(table.dtype)):
                raise CorruptionError(
                    f"the {name} code table of the 8-bit optimizer arrived wrong on the device. Nothing was saved "
                    "since: start the same command again; if it happens again, run `hf-rocm-tune doctor --drill`"
                )


def optimizer_name(args: TrainingArguments) -> str:
    return str(getattr(args.optim, "value", args.optim))


def is_of_bitsandbytes(name: str) -> bool:
    """Whether ``--optim`` of this name is an optimizer of bitsandbytes, by transformers' way of naming them."""
    families = ("paged_", "ademamix_", "lion_", "rmsprop_bnb", "adamw_bnb")
    return name.startswith(families) or name in ("ademamix", "adamw_8bit")


def new_mover(args: Any, settings: TransferSettings | None) -> Mover:
    from accelerate import PartialState

    device = PartialState().device if args is None else args.device
    return Mover(device, settings=settings or TransferSettings(), faults=FaultSpec.from_environment())


def own_arguments(args: Any) -> Any:
    """A copy of the arguments without what the mixin does in its own way."""
    if args is None:
        return None
    args = copy.copy(args)
    if args.logging_nan_inf_filter:  # see `DeferredMetrics.loss_to_log`
        args.logging_nan_inf_filter, args.filters_losses = False, True  # the latter for a trainer made with this copy
    args.dataloader_pin_memory = False  # the mover's ring is the pinned memory
    if args.enable_jit_checkpoint:
        # Upstream's own writes in place and lets the run look finished.
        logger.warning("enable_jit_checkpoint is set to False: SIGTERM writes a verified checkpoint without it")
        args.enable_jit_checkpoint = False
    return args
