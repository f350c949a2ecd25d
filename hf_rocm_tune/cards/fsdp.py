"""FSDP2: each card keeps its own rows of every weight, and gathers a layer when it computes; see `sharded`.

What FSDP2 sends is checked by `fsdp_traffic`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import nn
from typing_extensions import override

from hf_rocm_tune.cards.fsdp_traffic import Traffic
from hf_rocm_tune.cards.sharded import Sharded, declare_accelerators
from hf_rocm_tune.cards.way import CardSettings, is_on
from hf_rocm_tune.errors import SeamError, UsageError
from hf_rocm_tune.models.sharding import shard
from hf_rocm_tune.models.shards import fsdp_modules, rows_of
from hf_rocm_tune.transfer import Mover

if TYPE_CHECKING:
    from transformers import TrainingArguments
    from trl import ModelConfig

CONFIGURATION = "--accelerate_config dual_rx7900xt_fsdp2"


class Fsdp(Sharded):
    name: ClassVar[str] = "fsdp2"
    flag: ClassVar[str] = "FSDP2"
    excludes: ClassVar[Mapping[str, str]] = {
        **Sharded.excludes,
        **dict.fromkeys(("--grad_sync host", "--grad_compression"), "FSDP2 averages gradients by itself; leave it out"),
        "--split_layers": "it is the other way of training a model that is larger than a card; choose one",
        "--load_in_8bit": "use --load_in_4bit",
    }

    @override
    @classmethod
    def wanted(cls, settings: CardSettings) -> bool:
        return settings.fsdp

    @override
    def _refusals(
        self, args: TrainingArguments, model: ModelConfig, environ: Mapping[str, str]
    ) -> list[tuple[bool, str]]:
        names = ("CPU_RAM_EFFICIENT_LOADING", "OFFLOAD_PARAMS", "ACTIVATION_CHECKPOINTING")
        on = [is_on(f"FSDP_{name}", environ) for name in names]
        refusals = [
            (bool(args.fsdp), f"--fsdp is not used here: choose {CONFIGURATION}, and leave --fsdp out"),
            (args.world_size < 2, "there is one process, and FSDP2 shards over two or more: give --num_processes 2"),
            *_faults(environ.get("FSDP_VERSION", "1"), *on),
            *super()._refusals(args, model, environ),
        ]
        return refusals + (_quantised(args, model) if model.load_in_4bit else [])

    @override
    @contextmanager
    def configured(self, args: TrainingArguments) -> Iterator[None]:
        if args.world_size < 2:
            raise UsageError("FSDP2 shards over two or more processes, and there is one: give --num_processes 2")
        declare_accelerators(args)
        yield

    @override
    def attach(self, accelerator: Any, mover: Mover) -> None:
        super().attach(accelerator, mover)
        plugin = getattr(accelerator.state, "fsdp_plugin", None)
        if plugin is None:
            raise SeamError("accelerate has not enabled FSDP, as requested: use the version in pyproject.toml")
        check_plugin(plugin)
        # `FullState` gathers what is saved; with another type upstream does not save the model.
        plugin.set_state_dict_type("FULL_STATE_DICT")

    @override
    def _shard(self, model: nn.Module) -> None:
        plugin = self._accelerator.state.fsdp_plugin
        _require_rows(model, self._accelerator.num_processes)
        _require_storage(model, plugin)
        _reduce_as_trained(plugin, model)
        shard(model, self._accelerator, self.mover)
        if self.mover.settings.verify != "off":
            self._traffic = Traffic(model, fsdp_modules(model), self.mover)


def check_plugin(plugin: Any) -> None:
    """As `Fsdp.refuse` for a trainer built without our entry point, from accelerate's plugin."""
    from torch.distributed.fsdp import CPUOffloadPolicy

    offload = isinstance(plugin.cpu_offload, CPUOffloadPolicy)
    faults = _faults(plugin.fsdp_version, plugin.cpu_ram_efficient_loading, offload, plugin.activation_checkpointing)
    if wrong := [why for applies, why in faults if applies]:
        raise UsageError(f"FSDP2: {wrong[0]}")


def _faults(version: object, ram_efficient: bool, offload: bool, checkpointing: bool) -> list[tuple[bool, str]]:
    more = "is not supported: set it to false and use --activation_checkpointing instead"
    return [
        (str(version) != "2", f"fsdp_version {version} is not supported: use fsdp_version: 2, as in {CONFIGURATION}"),
        (
            ram_efficient,
            "fsdp_cpu_ram_efficient_loading makes rank 0 broadcast every weight between the cards, unverified: set it "
            "to false. Each rank reads only its own rows here, so it saves nothing",
        ),
        (offload, "fsdp_offload_params moves weights past the verification in every step: set it to false"),
        (checkpointing, f"fsdp_activation_checkpointing {more}"),
    ]


def _require_rows(model: nn.Module, ranks: int) -> None:
    """Refuse empty shards of trained tensors: accelerate identifies parameters by the address of their shards."""
    for name, each in model.named_parameters():
        first, last = rows_of(ranks - 1, ranks, each.shape[0])
        if each.requires_grad and first == last:
            raise UsageError(
                f"FSDP2: {name} has {each.shape[0]} rows, too few for {ranks} ranks: give a larger --lora_r, or train "
                "without FSDP2"
            )


def _require_storage(model: nn.Module, plugin: Any) -> None:
    """Refuse packed 4-bit weights that FSDP2 would convert: they are bytes stored with a float dtype."""
    computed = getattr(plugin.mixed_precision_policy, "param_dtype", None)
    for name, each in model.named_parameters():
        packed = getattr(each, "quant_state", None) is not None and each.is_floating_point()
        if packed and computed is not None and each.dtype != computed:
            raise UsageError(
                f"FSDP2 converts what it gathers to {computed}, and {name}, packed into {each.dtype}, would be "
                f"destroyed: use bnb_4bit_quant_storage={computed}"
            )


def _reduce_as_trained(plugin: Any, model: nn.Module) -> None:
    """Average gradients in the dtype of the trained weights: float32 adapters would lose bits in mixed precision."""
    policy = plugin.mixed_precision_policy
    if policy is None:
        return
    quantised = bool(getattr(model, "is_loaded_in_4bit", False))
    kinds = {each.dtype for each in model.parameters() if each.requires_grad}
    # accelerate converts trainable weights to float32 before, unless the model is quantised
    dtype = kinds.pop() if quantised and len(kinds) == 1 else torch.float32
    plugin.mixed_precision_policy = type(policy)(
        param_dtype=policy.param_dtype, reduce_dtype=dtype, output_dtype=policy.output_dtype
    )


def _quantised(args: TrainingArguments, model: ModelConfig) -> list[tuple[bool, str]]:
    """Refusals for 4-bit weights: only packed into a float dtype can they be sharded, and FSDP2 must not convert it."""
    storage, floats = model.bnb_4bit_quant_storage or "uint8", {"bfloat16", "float32", "float16"}
    whole = f"4-bit weights stored as {storage} cannot be sharded, so each card would hold all of them"
    lost = f"with --bf16 FSDP2 converts what it gathers to bfloat16, and 4-bit weights in {storage} would be destroyed"
    fix = f"give --bnb_4bit_quant_storage {'bfloat16' if args.bf16 else 'float32'}"
    return [(storage not in floats, f"{whole}: {fix}"), (args.bf16 and storage != "bfloat16", f"{lost}: {fix}")]
