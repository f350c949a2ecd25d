"""What of FSDP can be verified here, and what is refused, before anything is loaded where that is possible."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from accelerate.utils import str_to_bool

from hf_rocm_tune.errors import UsageError

if TYPE_CHECKING:
    from transformers import TrainingArguments
    from trl import ModelConfig

CONFIGURATION = "--accelerate_config dual_rx7900xt_fsdp2"
_WHY = {
    "--auto_fit": "it does not know of shards; set --per_device_train_batch_size yourself",
    "--compare_optimizer_every": "a shard of the optimizer's state has no replica to compare it with",
    "--grad_sync host": "FSDP2 averages gradients by itself; leave it out",
    "--grad_compression": "FSDP2 averages gradients by itself; leave it out",
    "--split_layers": "it is the other way of training a model that is larger than a card; choose one",
}
_OPTIMIZERS = frozenset({"adamw_torch", "adamw_torch_fused", "sgd"})


def is_wanted(environ: Mapping[str, str]) -> bool:
    """Whether the launcher was told to use FSDP, which it says in the environment."""
    return bool(str_to_bool(environ.get("ACCELERATE_USE_FSDP", "false")))


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
        raise UsageError(f"--fsdp is not used here: choose FSDP2 with {CONFIGURATION}, and leave --fsdp out")
    if not is_wanted(environ):
        return False
    version = environ.get("FSDP_VERSION", "1")
    refusals = [
        (version != "2", f"fsdp_version {version} is not supported: use fsdp_version: 2, as in {CONFIGURATION}"),
        (args.world_size < 2, "there is one process, and FSDP2 shards over two or more: give --num_processes 2"),
        (_is_on(environ, "FSDP_CPU_RAM_EFFICIENT_LOADING"), _RAM_EFFICIENT),
        (_is_on(environ, "FSDP_OFFLOAD_PARAMS"), _OFFLOAD),
        (_is_on(environ, "FSDP_ACTIVATION_CHECKPOINTING"), _CHECKPOINTING),
        (not model.use_peft, "FSDP2 is for adapters here: train with LoRA (--use_peft true)"),
        (model.load_in_8bit, "--load_in_8bit cannot be sharded by FSDP2: use --load_in_4bit"),
        (bool(args.fp16), "--fp16 is not supported with FSDP2: use --bf16, or neither"),
        (bool(args.torch_compile), "--torch_compile is not supported with FSDP2: leave it out"),
        _optimizer(args),
        *((used, f"{flag} works only without it: {_WHY[flag]}") for flag, used in others.items()),
    ]
    if model.load_in_4bit:
        refusals += _quantised(args, model)
    for wrong, why in refusals:
        if wrong:
            raise UsageError(f"FSDP2: {why}")
    return True


def check_plugin(plugin: Any) -> None:
    """The same for a trainer that was built without our entry point, from what accelerate has understood.

    Raises:
        UsageError: see `check_fsdp`.
    """
    from torch.distributed.fsdp import CPUOffloadPolicy

    for wrong, why in (
        (plugin.fsdp_version != 2, f"fsdp_version {plugin.fsdp_version} is not supported: use fsdp_version: 2"),
        (plugin.cpu_ram_efficient_loading, _RAM_EFFICIENT),
        (isinstance(plugin.cpu_offload, CPUOffloadPolicy), _OFFLOAD),
        (plugin.activation_checkpointing, _CHECKPOINTING),
    ):
        if wrong:
            raise UsageError(f"FSDP2: {why}")


def _optimizer(args: TrainingArguments) -> tuple[bool, str]:
    name = str(getattr(args.optim, "value", args.optim))
    return name not in _OPTIMIZERS, f"--optim {name} is not known to work on shards: use adamw_torch_fused"


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


_RAM_EFFICIENT = (
    "fsdp_cpu_ram_efficient_loading makes rank 0 broadcast every weight between the cards, unverified: set it to "
    "false. Each rank reads only its own rows here, so it saves nothing"
)
_OFFLOAD = "fsdp_offload_params moves weights past the verification in every step: set it to false"
_CHECKPOINTING = (
    "fsdp_activation_checkpointing is not supported: set it to false and use --activation_checkpointing instead"
)
