"""FSDP2: each card keeps its own rows of every weight, and gathers a layer when it computes; see `sharded`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultAllGather, DefaultReduceScatter
from torch.distributed.tensor import DTensor
from typing_extensions import override

from hf_rocm_tune.cards.averaging import SyncSettings
from hf_rocm_tune.cards.gradients import STAGE, Average, AverageCheck, digest_words, project
from hf_rocm_tune.cards.sharded import Gathers, Sharded, declare_accelerators
from hf_rocm_tune.cards.strategy import is_on
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
    def _refusals(
        self, args: TrainingArguments, model: ModelConfig, environ: Mapping[str, str]
    ) -> list[tuple[bool, str]]:
        names = ("CPU_RAM_EFFICIENT_LOADING", "OFFLOAD_PARAMS", "ACTIVATION_CHECKPOINTING")
        on = [is_on(f"FSDP_{name}", environ) for name in names]
        packed = model.load_in_4bit
        storage = model.bnb_4bit_quant_storage or "uint8"
        fitting = "bfloat16" if args.bf16 else "float32"
        fix = f"give --bnb_4bit_quant_storage {fitting}"
        whole = f"4-bit weights stored as {storage} cannot be sharded, so each card would hold all of them"
        lost = f"--bf16 converts what is gathered to bfloat16, and 4-bit weights in {storage} would be destroyed"
        return [
            (bool(args.fsdp), f"--fsdp is not used here: choose {CONFIGURATION}, and leave --fsdp out"),
            (args.world_size < 2, "there is one process, and FSDP2 shards over two or more: give --num_processes 2"),
            *_faults(environ.get("FSDP_VERSION", "1"), *on),
            *super()._refusals(args, model, environ),
            (packed and storage not in {"bfloat16", "float32", "float16"}, f"{whole}: {fix}"),
            (packed and args.bf16 and storage != "bfloat16", f"{lost}: {fix}"),
        ]

    @override
    @contextmanager
    def configured(self, args: TrainingArguments) -> Iterator[None]:
        declare_accelerators(args)
        yield

    @override
    def attach(self, accelerator: Any, mover: Mover) -> None:
        super().attach(accelerator, mover)
        plugin = accelerator.state.fsdp_plugin
        check_plugin(plugin)
        # `FullState` gathers what is saved; with another type upstream does not save the model.
        plugin.set_state_dict_type("FULL_STATE_DICT")

    @override
    def _shard(self, model: nn.Module) -> None:
        plugin = self._accelerator.state.fsdp_plugin
        _require_shardable(model, plugin, self._accelerator.num_processes)
        _reduce_as_trained(plugin, model)
        shard(model, self._accelerator, self.mover)
        if self.mover.settings.verify != "off":
            self._traffic = Traffic(model, self.mover)


class Traffic(Gathers):
    """Checks the collectives of a model that FSDP2 has sharded, inside wrappers that FSDP2's extension points take.

    A wrong average is computed again through the host. Cost: one read of what is gathered, memory of one copy of the
    gradients. Not covered: the copies that FSDP2 makes on the card; wrong averages within the rounding bound.
    """

    reported_as = "fsdp2"
    message = "weights of %s that FSDP2 gathered from the other cards arrived wrong"
    advice = ", or train without FSDP2"

    def __init__(self, model: nn.Module, mover: Mover) -> None:
        super().__init__(mover)
        self._model = model
        self.check = AverageCheck(mover, SyncSettings(method="host"), collective="reduce_scatter", advice=self.advice)
        for name, module in fsdp_modules(model):
            module.set_custom_all_gather(_AllGather(name or "root", self))
            module.set_custom_reduce_scatter(_ReduceScatter(name or "root", self))

    def averaged(self, name: str, sent: Tensor, projected: Tensor, average: Tensor) -> None:
        """Remember an average: what was sent and its projections, and the memory that FSDP2 reads."""
        number = next(self.numbers)
        self._mover.inject(average, name=name, stage=STAGE, number=number, attempt=0)
        record = Average(
            name=name,
            number=number,
            sent=sent,
            wire=sent.dtype,
            projected=projected,
            averaged=lambda: average,
            write=partial(self._write, average),
            row={"tensor": name},
        )
        self.averages.append(record)

    @override
    def describe(self) -> dict[str, Any]:
        judged = {"judged": "projections", "gathered_judged": "digests", "averages": self.made}
        return {**super().describe(), **judged}

    def _write(self, read: Tensor, average: Tensor) -> str | None:
        memory = read.untyped_storage().data_ptr()
        for parameter in self._model.parameters():
            gradient = parameter.grad
            if isinstance(gradient, DTensor) and gradient._local_tensor.untyped_storage().data_ptr() == memory:
                read.copy_(average)  # device: from this device's memory to itself
                return None
        return "its gradients were converted since, so it cannot replace them"


class _AllGather(DefaultAllGather):
    def __init__(self, name: str, traffic: Traffic) -> None:
        self._name, self._traffic = name, traffic

    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, group: Any, async_op: bool = False) -> Any:
        sent = digest_words(input_tensor)
        work = super().__call__(output_tensor, input_tensor, group, async_op)
        if work is not None:
            work.wait()  # on an accelerator: the stream waits, not the host
        self._traffic.arrived(self._name, sent, output_tensor.view(group.size(), -1))
        return work


class _ReduceScatter(DefaultReduceScatter):
    def __init__(self, name: str, traffic: Traffic) -> None:
        self._name, self._traffic = name, traffic

    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, group: Any, op: Any, async_op: bool = False) -> Any:
        if op != dist.ReduceOp.AVG:
            raise SeamError(
                f"cannot verify: FSDP2 reduces gradients by {op} instead of averaging them; train with --bf16"
            )
        projected = torch.stack([project(part) for part in input_tensor.view(group.size(), -1)])
        sent = input_tensor.clone()
        work = super().__call__(output_tensor, input_tensor, group, op, async_op)
        if work is not None:
            work.wait()
        self._traffic.averaged(self._name, sent, projected, output_tensor)
        return work


def check_plugin(plugin: Any) -> None:
    """As `Fsdp.refuse` for a trainer built without our entry point, from accelerate's plugin."""
    from torch.distributed.fsdp import CPUOffloadPolicy

    offload = isinstance(plugin.cpu_offload, CPUOffloadPolicy)
    faults = _faults(plugin.fsdp_version, plugin.cpu_ram_efficient_loading, offload, plugin.activation_checkpointing)
    for applies, why in faults:
        if applies:
            raise UsageError(f"FSDP2: {why}")


def _faults(version: object, ram_efficient: bool, offload: bool, checkpointing: bool) -> list[tuple[bool, str]]:
    more = "is not supported: set it to false and use --gradient_checkpointing instead"
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


def _require_shardable(model: nn.Module, plugin: Any, ranks: int) -> None:
    """Refuse empty shards of trained tensors, by whose addresses accelerate identifies them, and packed 4-bit weights
    (bytes stored with a float dtype) that FSDP2 would convert.
    """
    computed = getattr(plugin.mixed_precision_policy, "param_dtype", None)
    for name, parameter in model.named_parameters():
        rows = parameter.shape[0]
        first, last = rows_of(ranks - 1, ranks, rows)
        if parameter.requires_grad and first == last:
            raise UsageError(
                f"FSDP2: {name} has {rows} rows, too few for {ranks} ranks: give a larger --lora_r, or train "
                "without FSDP2"
            )
        packed = getattr(parameter, "quant_state", None) is not None and parameter.is_floating_point()
        if packed and computed is not None and parameter.dtype != computed:
            raise UsageError(
                f"FSDP2 converts what it gathers to {computed}, and {name}, packed into {parameter.dtype}, would be "
                f"destroyed: use bnb_4bit_quant_storage={computed}"
            )


def _reduce_as_trained(plugin: Any, model: nn.Module) -> None:
    """Average gradients in the dtype of the trained weights: float32 adapters would lose bits in mixed precision."""
    policy = plugin.mixed_precision_policy
    if policy is None:
        return
    quantised = bool(getattr(model, "is_loaded_in_4bit", False))
    trained = {parameter.dtype for parameter in model.parameters() if parameter.requires_grad}
    dtype = torch.float32  # accelerate converts trainable weights to it before, unless the model is quantised
    if quantised and len(trained) == 1:
        dtype = trained.pop()
    plugin.mixed_precision_policy = type(policy)(
        param_dtype=policy.param_dtype, reduce_dtype=dtype, output_dtype=policy.output_dtype
    )
