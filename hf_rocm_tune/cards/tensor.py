"""Tensor parallelism: the cards compute each layer together; see `tensor_parallel` and `sharded`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, ClassVar

from accelerate import ParallelismConfig
from torch import nn
from typing_extensions import override

from hf_rocm_tune.cards.fsdp import CONFIGURATION
from hf_rocm_tune.cards.sharded import TRIED_OPTIMIZERS, Sharded, declare_accelerators
from hf_rocm_tune.cards.tensor_parallel import RANKS, Reductions, dims_of, install
from hf_rocm_tune.cards.way import CardSettings
from hf_rocm_tune.models.sharding import cut

if TYPE_CHECKING:
    from transformers import TrainingArguments
    from trl import ModelConfig

_PACKED = (
    "packed weights cannot be cut by rows and columns (transformers and PEFT fail on them as well); use "
    f"{CONFIGURATION} with --load_in_4bit, or --split_layers auto"
)


class Tensor(Sharded):
    """A model whose weights are cut by transformers' plan. Reasons in the model itself are found when it is cut."""

    name: ClassVar[str] = "tensor_parallel"
    flag: ClassVar[str] = "--tensor_parallel"
    shares_rows: ClassVar[bool] = True
    excludes: ClassVar[Mapping[str, str]] = {
        "FSDP": "choose one of them",
        "DeepSpeed": "choose one of them",
        "--auto_fit": "it does not support shards; set --per_device_train_batch_size yourself",
        "--grad_compression": "no gradients are averaged; leave it out",
        "--recompute_layers": "it was never tried; use --activation_checkpointing",
        "--split_layers": "choose one of them",
        "--init_lora_weights": "the part that moves into the adapter is computed from full weights",
        "--adapter_name_or_path": "the adapter is read after the weights are cut; merge it into the base first",
        "--use_peft false": "it is for adapters; train with LoRA",
        "--use_dora": "DoRA computes with whole weights; leave it out",
        "--load_in_4bit": _PACKED,
        "--load_in_8bit": _PACKED,
        "--fp16": "use --bf16, or neither",
        "--torch_compile": "leave it out",
    }

    @override
    @classmethod
    def wanted(cls, settings: CardSettings) -> bool:
        return settings.tensor_parallel

    @override
    def _refusals(
        self, args: TrainingArguments, model: ModelConfig, environ: Mapping[str, str]
    ) -> list[tuple[bool, str]]:
        found, optim = args.world_size, str(getattr(args.optim, "value", args.optim))
        return [
            (found != RANKS, f"it takes {RANKS} processes, and there are {found}: give --num_processes 2"),
            (optim not in TRIED_OPTIMIZERS, f"--optim {optim} is not known to work on shards: use adamw_torch_fused"),
        ]

    @override
    @contextmanager
    def configured(self, args: TrainingArguments) -> Iterator[None]:
        declare_accelerators(args)
        args.parallelism_config = ParallelismConfig(tp_size=args.world_size)
        yield
        args.parallelism_config = None  # it holds a mesh now, which cannot be saved with the arguments

    @override
    def _shard(self, model: nn.Module) -> None:
        mesh = self._accelerator.torch_device_mesh["tp"]
        cut(model, mesh, self.mover, dims_of(model, self._accelerator.num_processes))
        self._traffic = Reductions(self.mover, through_host=self.settings.sync.way == "host")
        install(model, mesh, self._traffic)
