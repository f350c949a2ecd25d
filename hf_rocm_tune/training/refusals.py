"""What cannot work is refused before anything is loaded, and what upstream refuses becomes one line for the user.

Offloading that others do (TRL's of activations, bitsandbytes' paged optimizers) does not pass the mover. What can be
compared afterwards is (the code tables of 8-bit optimizers); the rest is named in the coverage, and ``--verify full``
then asks for consent like for a weight that was not verified: a damaged activation becomes a damaged gradient, and
nothing later would show it.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from accelerate.utils import str_to_bool
from jinja2 import TemplateError
from transformers import TrainerCallback

from hf_rocm_tune.errors import CorruptionError, UsageError
from hf_rocm_tune.models.quantised import require_bitsandbytes
from hf_rocm_tune.training.ranks import CHECKPOINTING, OFFLOAD, RAM_EFFICIENT, is_wanted
from hf_rocm_tune.transfer import digest

if TYPE_CHECKING:
    from transformers import TrainerControl, TrainerState, TrainingArguments
    from trl import ModelConfig

    from hf_rocm_tune.models.placement import Coverage

FSDP_CONFIGURATION = "--accelerate_config dual_rx7900xt_fsdp2"
_OUR_UPSTREAM = frozenset({"trl", "peft", "transformers", "accelerate"})


_NOT_WITH_SHARDS = {
    "--auto_fit": "it does not know of shards; set --per_device_train_batch_size yourself",
    "--compare_optimizer_every": "a shard of the optimizer's state has no replica to compare it with",
    "--grad_sync host": "FSDP2 averages gradients by itself; leave it out",
    "--grad_compression": "FSDP2 averages gradients by itself; leave it out",
    "--recompute_layers": "FSDP2's layers are recomputed all, or none; use --activation_checkpointing",
    "--split_layers": "it is the other way of training a model that is larger than a card; choose one",
}
_SHARDED_OPTIMIZERS = frozenset({"adamw_torch", "adamw_torch_fused", "sgd"})


@contextmanager
def as_usage_errors() -> Iterator[None]:
    """Within the block a ``ValueError`` or ``ImportError`` that upstream raises itself becomes a ``UsageError``.

    They check combinations of settings there that no parser sees (an ``eos_token`` outside the vocabulary, an adapter
    on ``lm_head``, ``padding_free`` with ``max_length``). One raised elsewhere is a bug and keeps its traceback. A chat
    template that does not take the rows, and a Hub that cannot be reached, are the user's to change as well.
    """
    try:
        yield
    except TemplateError as error:
        raise UsageError(
            f"the chat template cannot render these rows: {error}; change the rows, or give another template with "
            "--chat_template_path"
        ) from error
    except ConnectionError as error:
        raise UsageError(f"{error}; check the network, or leave --push_to_hub away") from error
    except (ValueError, ImportError) as error:
        if _raised_by(error) not in _OUR_UPSTREAM:
            raise
        raise UsageError(f"these settings do not go together: {' '.join(str(error).split())}") from error


def _raised_by(error: BaseException) -> str:
    """The top-level package of the function that raised an error."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    name = trace.tb_frame.f_globals.get("__name__", "") if trace is not None else ""
    return str(name).partition(".")[0]


#: Packages of services that have another name than transformers gives the service.
_PACKAGES = {"azure_ml": "azureml-core", "comet_ml": "comet-ml", "flyte": "flytekit"}


def check_loggers(names: str | Iterable[str] | None) -> None:
    """Checks that transformers can report to each of these, before anything is loaded.

    Args:
        names: ``report_to`` of the training arguments, where "none" and "all" stand for themselves or are resolved.

    Raises:
        UsageError: one is unknown or not installed; names those that are.
    """
    from transformers.integrations.integration_utils import (
        INTEGRATION_TO_CALLBACK,
        get_available_reporting_integrations,
    )

    available = get_available_reporting_integrations()
    wanted = [names] if isinstance(names, str) else list(names or ())
    lacking = [name for name in wanted if name not in (*available, "none", "all")]
    if not lacking:
        return
    there = ", ".join(available) or "none of those that transformers knows"
    if any("," in name or " " in name for name in lacking):
        cure = "Give several as a list in a --config file, or `all`"
    elif all(name in INTEGRATION_TO_CALLBACK for name in lacking):
        packages = " ".join(_PACKAGES.get(name, name) for name in lacking)
        raise UsageError(
            f"--report_to {' '.join(lacking)}: not installed; installed here: {there}. Install it "
            f"(`pip install {packages}`), or leave the flag away"
        )
    else:
        cure = (
            "Install it (`pip install 'hf-rocm-tune[loggers]'` brings tensorboard and trackio), or leave the flag away"
        )
    raise UsageError(f"--report_to {' '.join(lacking)}: unknown or not installed; installed here: {there}. {cure}")


def check_offloads(args: TrainingArguments) -> None:
    """Refuse, before anything is loaded, what cannot work on this device.

    Raises:
        UsageError: activation offloading without an accelerator, or a bitsandbytes optimizer without its library.
    """
    if getattr(args, "activation_offloading", False) and args.device.type == "cpu":
        raise UsageError(
            "--activation_offloading moves activations from an accelerator to host memory, and this job runs on the "
            "CPU: leave it out"
        )
    if _of_bitsandbytes(args):
        require_bitsandbytes(args.device, f"--optim {_optimizer(args)}")


def with_offloads(found: Coverage, args: TrainingArguments, *, deepspeed: bool = False) -> Coverage:
    """The coverage of a model, with what these settings send to the device past the mover."""
    rows = []
    if deepspeed:
        reason = "DeepSpeed broadcasts weights from rank 0 and averages gradients by itself"
        rows.append({"tensor": "weights and gradients under DeepSpeed", "reason": reason})
    if args.device.type != "cpu" and getattr(args, "activation_offloading", False):
        rows.append(
            {
                "tensor": "offloaded activations",
                "reason": "--activation_offloading: TRL copies them to host memory and back by itself",
            }
        )
    if args.device.type != "cpu" and _of_bitsandbytes(args) and "paged" in _optimizer(args):
        rows.append(
            {
                "tensor": "paged optimizer state",
                "reason": f"--optim {_optimizer(args)}: the driver moves its pages between host and device",
            }
        )
    return replace(found, unverified=[*found.unverified, *rows])


class OptimizerTablesCallback(TrainerCallback):
    """Compares the code tables of an 8-bit optimizer, once it has made them, with tables made on the host.

    bitsandbytes sends them to the device by itself at the first step. On resume they come through the mover.

    Raises:
        CorruptionError: a table on the device is not the one that was sent; its 8-bit state is useless.
    """

    def __init__(self) -> None:
        self._compared = False

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **more: Any) -> None:
        """Compares after the first step of this process."""
        if self._compared:
            return
        self._compared = True
        optimizer = more["optimizer"]
        for name, table in getattr(getattr(optimizer, "optimizer", optimizer), "name2qmap", {}).items():
            functional = importlib.import_module("bitsandbytes.functional")
            expected = functional.create_dynamic_map(signed=name == "dynamic")
            if digest(table) != digest(expected.to(table.dtype)):
                raise CorruptionError(
                    f"the {name} code table of the 8-bit optimizer arrived wrong on the device, so its state decodes "
                    "to other values. Nothing was saved since: start the same command again; if it returns, run "
                    "`hf-rocm-tune drill`"
                )


def _optimizer(args: TrainingArguments) -> str:
    return str(getattr(args.optim, "value", args.optim))


def _of_bitsandbytes(args: TrainingArguments) -> bool:
    """By the names in transformers 5.23, ``trainer_optimizer.py``; torchao's and GaLore's 8-bit ones are others."""
    name = _optimizer(args)
    return name.startswith(("paged_", "ademamix", "lion", "rmsprop_bnb")) or name in ("adamw_bnb_8bit", "adamw_8bit")


def check_fsdp(
    args: TrainingArguments,
    model: ModelConfig,
    environ: Mapping[str, str],
    *,
    others: Mapping[str, bool],
) -> bool:
    """Refuse, before the model is loaded, what does not work with FSDP2 or could not be verified.

    Args:
        args: the trainer's.
        model: the model's.
        environ: where the launcher says what it was told.
        others: flags of ours that do not go with FSDP2, and whether they are in use.

    Returns:
        Whether FSDP2 is used.

    Raises:
        UsageError: what does not go together, and what to do.
    """
    if args.fsdp:
        raise UsageError(f"--fsdp is not used here: choose FSDP2 with {FSDP_CONFIGURATION}, and leave --fsdp out")
    if not is_wanted(environ):
        return False
    version, optim = environ.get("FSDP_VERSION", "1"), _optimizer(args)
    refusals = [
        (version != "2", f"fsdp_version {version} is not supported: use fsdp_version: 2, as in {FSDP_CONFIGURATION}"),
        (args.world_size < 2, "there is one process, and FSDP2 shards over two or more: give --num_processes 2"),
        (_is_on(environ, "FSDP_CPU_RAM_EFFICIENT_LOADING"), RAM_EFFICIENT),
        (_is_on(environ, "FSDP_OFFLOAD_PARAMS"), OFFLOAD),
        (_is_on(environ, "FSDP_ACTIVATION_CHECKPOINTING"), CHECKPOINTING),
        (not model.use_peft, "FSDP2 is for adapters here: train with LoRA (--use_peft true)"),
        (model.load_in_8bit, "--load_in_8bit cannot be sharded by FSDP2: use --load_in_4bit"),
        (bool(args.fp16), "--fp16 is not supported with FSDP2: use --bf16, or neither"),
        (bool(args.torch_compile), "--torch_compile is not supported with FSDP2: leave it out"),
        (optim not in _SHARDED_OPTIMIZERS, f"--optim {optim} is not known to work on shards: use adamw_torch_fused"),
        *((used, f"{flag} works only without it: {_NOT_WITH_SHARDS[flag]}") for flag, used in others.items()),
    ]
    if model.load_in_4bit:
        refusals += _quantised(args, model)
    for wrong, why in refusals:
        if wrong:
            raise UsageError(f"FSDP2: {why}")
    return True


def _quantised(args: TrainingArguments, model: ModelConfig) -> list[tuple[bool, str]]:
    """4-bit weights are bytes in the dress of floats: only a float dtype can be sharded, and none may be converted."""
    storage = model.bnb_4bit_quant_storage or "uint8"
    computed = "bfloat16" if args.bf16 else None
    fitting = computed or "float32"
    return [
        (
            storage not in {"bfloat16", "float32", "float16"},
            f"4-bit weights that are stored as {storage} cannot be sharded, so that each card would hold all of them: "
            f"give --bnb_4bit_quant_storage {fitting}",
        ),
        (
            computed is not None and storage != computed,
            f"with --bf16 FSDP2 converts what it gathers to bfloat16, and 4-bit weights that are stored as {storage} "
            "would be destroyed: give --bnb_4bit_quant_storage bfloat16",
        ),
    ]


def _is_on(environ: Mapping[str, str], name: str) -> bool:
    return bool(str_to_bool(environ.get(name, "false")))
