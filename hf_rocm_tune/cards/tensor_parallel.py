"""Tensor parallelism for LoRA: the cards of a machine compute each layer together, and every sum is checked.

transformers' own plan (``model.tp_plan``) cuts rows of a weight (``colwise``) or columns (``rowwise``); LoRA's B is cut
with the rows of its layer and A with the columns; all else is replicated. Partial sums go from each rank to all and are
added in the order of the ranks: the same bits on both. A wrong sum has been used when it is found: every rank stops.
Upstream's ``distributed_config`` is not used with PEFT: peft 0.21.2 builds A of a rowwise layer with half the inputs.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, ClassVar

import torch
import torch.distributed as dist
from accelerate import ParallelismConfig
from torch import Tensor, nn
from transformers.distributed.tensor_parallel import ColwiseParallel, RowwiseParallel, TensorParallelLayer
from typing_extensions import override

from hf_rocm_tune.cards.fsdp import CONFIGURATION
from hf_rocm_tune.cards.gradients import digest_words
from hf_rocm_tune.cards.sharded import Gathers, Sharded, declare_accelerators
from hf_rocm_tune.errors import UsageError
from hf_rocm_tune.host_group import host_group
from hf_rocm_tune.models.sharding import cut
from hf_rocm_tune.transfer import Mover
from hf_rocm_tune.transfer.report import BETWEEN_CARDS

if TYPE_CHECKING:
    from transformers import TrainingArguments
    from trl import ModelConfig

# torch 2.13 renamed it
_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor

RANKS = 2
"""The number of cards: with more, sending every partial sum to all ranks moves more bytes than an all-reduce."""
#: Styles whose module may be replicated instead: its inputs and outputs are not cut.
_LEFT_WHOLE = {"embedding_rowwise", "colwise_gather_output", "colwise_rep", "rowwise_split_input"}
_LEFT_WHOLE |= {"replicated_with_grad_allreduce"}


class Reductions(Gathers):
    """Sums over the ranks in forward and backward. The constructor is collective."""

    reported_as = "tensor_parallel"
    message = "partial sums of %s from the other card arrived wrong"
    advice = ", or train without --tensor_parallel"

    def __init__(self, mover: Mover, *, through_host: bool) -> None:
        super().__init__(mover)
        self._through_host = through_host
        self._judging = mover.settings.verify != "off"

    def total(self, summand: Tensor, name: str) -> Tensor:
        """The sum of all ranks' partial sums, bit-identical on each rank. Collective."""
        mine = summand.detach().contiguous()
        sent = digest_words(mine) if self._judging else None
        parts = self._exchanged(mine, name)
        self.made += 1
        if sent is None:
            self._bytes += parts.nbytes - mine.nbytes
        else:
            self.arrived(name, sent, parts)
        total = parts[0]
        for part in parts[1:]:
            total = total + part
        return total

    def _exchanged(self, mine: Tensor, name: str) -> Tensor:
        group = dist.group.WORLD if not self._through_host else host_group()
        assert group is not None
        if not self._through_host:
            parts = mine.new_empty((group.size(), *mine.shape))
            _gather(parts.view(-1), mine.view(-1), group=group)
            return parts
        with self._mover.fetched(mine, name=f"{name} to host", stage=BETWEEN_CARDS) as fetched:
            host = torch.empty((group.size(), *mine.shape), dtype=mine.dtype)
            _gather(host.view(-1), fetched.host.view(-1), group=group)
        return self._mover.move(host, name=f"{name} to device", stage=BETWEEN_CARDS, transient=True)

    @override
    def describe(self) -> dict[str, Any]:
        row = super().describe()
        if self._through_host:
            row["process_group"] = "gloo"
        row["judged"] = "digests" if self._judging else "no"
        row["sums"] = self.made
        return row


class _Total(torch.autograd.Function):
    """Sums over the ranks in forward; in backward every rank has the full gradient of the sum."""

    @staticmethod
    def forward(ctx: Any, summand: Tensor, reductions: Reductions, name: str) -> Tensor:
        return reductions.total(summand, name)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return gradients[0], None, None


class _TotalOfGradients(torch.autograd.Function):
    """Identity in forward, on a replicated input; in backward its gradients are summed over the ranks."""

    @staticmethod
    def forward(ctx: Any, whole: Tensor, reductions: Reductions, name: str) -> Tensor:
        ctx.reductions = reductions
        ctx.name = name
        return whole.view_as(whole)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return ctx.reductions.total(gradients[0], ctx.name), None, None


class _Summing:
    """What differs from upstream's style: plain tensors of this rank, and sums by `Reductions`."""

    def __init__(self, reductions: Reductions, name: str) -> None:
        super().__init__()
        self._reductions = reductions
        self._name = name

    def should_use_local_tensors(self, module: nn.Module) -> bool:
        return True

    def transform_inputs_pre_forward(self, module: nn.Module, args: Any, kwargs: Any, mesh: Any) -> Any:
        return args, kwargs

    def transform_output_post_forward(self, module: nn.Module, output: Tensor, mesh: Any) -> Tensor:
        return output


class _Columns(_Summing, ColwiseParallel):
    """Upstream's ``colwise``: the input is replicated, the output is this rank's part."""

    def transform_inputs_pre_forward(self, module: nn.Module, args: Any, kwargs: Any, mesh: Any) -> Any:
        whole = _TotalOfGradients.apply(args[0], self._reductions, f"{self._name}, gradient of its input")
        return (whole, *args[1:]), kwargs


class _Rows(_Summing, RowwiseParallel):
    """Upstream's ``rowwise``: the input is this rank's part, the output the sum over the ranks."""

    def transform_output_post_forward(self, module: nn.Module, output: Tensor, mesh: Any) -> Tensor:
        total: Tensor = _Total.apply(output, self._reductions, self._name)
        bias = dict(module.named_parameters(recurse=False)).get(
            "bias"
        )  # upstream hides it from the forward, so it is added here, once
        return total if bias is None else total + bias


def planned(model: nn.Module, ranks: int) -> Iterator[tuple[str, nn.Module, bool]]:
    """The layers that are cut: name, module (with or without LoRA), and whether by columns."""
    base: Any = model.get_base_model() if hasattr(model, "peft_config") else model  # type: ignore[operator]
    plan = dict(base.tp_plan or {})
    family = type(base).__name__
    text = base.config.get_text_config()
    others = sorted(set(plan.values()) - _LEFT_WHOLE - {"colwise", "rowwise"})
    if others:
        raise UsageError(f"--tensor_parallel: transformers' plan for {family} has {others[0]}, which is not supported")
    for heads in ("num_attention_heads", "num_key_value_heads"):
        if (getattr(text, heads, 0) or 0) % ranks:
            raise UsageError(f"--tensor_parallel: {getattr(text, heads)} {heads} cannot be shared by {ranks} cards")
    layers = []
    for name, module in base.named_modules():
        generic = re.sub(r"\.\d+(?=\.|$)", ".*", name)
        if plan.get(generic) in ("colwise", "rowwise"):
            layers.append((name, module, plan[generic] == "rowwise"))
    if not layers:
        raise UsageError(f"--tensor_parallel: transformers has no plan that cuts weights of {family}")
    yield from layers


def dims_of(model: nn.Module, ranks: int) -> dict[str, int | None]:
    """The dimension along which each parameter of the planned layers is cut, by name; see `models.sharding.cut`."""
    names = {id(module): name for name, module in model.named_modules()}
    dims: dict[str, int | None] = {}
    for _, module, by_columns in planned(model, ranks):
        path = names[id(module)]
        layer = getattr(module, "base_layer", module)
        if type(layer) is not nn.Linear or getattr(module, "lora_variant", None):
            what = f"{path} has DoRA"
            if type(layer) is not nn.Linear:
                what = f"{path} is a {type(layer).__name__}"
            raise UsageError(f"--tensor_parallel: {what}; only plain LoRA of linear layers can be cut")
        own = path
        if layer is not module:
            own = f"{path}.base_layer"
        for name, parameter in layer.named_parameters():
            if not by_columns:
                dims[f"{own}.{name}"] = 0
            elif parameter.dim() == 2:
                dims[f"{own}.{name}"] = 1
            else:  # the bias
                dims[f"{own}.{name}"] = None
        of_adapter = {"lora_A": 1, "lora_B": None} if by_columns else {"lora_A": None, "lora_B": 0}
        for side, dim in of_adapter.items():
            for adapter in getattr(module, side, ()):
                dims[f"{path}.{side}.{adapter}.weight"] = dim
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and name not in dims:
            raise UsageError(f"--tensor_parallel: {name} is trained but is not a LoRA weight of a layer that is cut")
    return dims


def summed(model: nn.Module, ranks: int, *, recomputed: bool) -> Iterator[tuple[nn.Module, int]]:
    """For each layer that is cut, the elements that a rank sends per token, forward and backward; for the planner.

    Without checkpointing the first block's inputs have no gradient, but are counted here.
    """
    for _, module, by_columns in planned(model, ranks):
        layer: Any = getattr(module, "base_layer", module)
        rank = sum(lora_a.out_features for lora_a in getattr(module, "lora_A", {}).values())
        if not by_columns:
            yield module, layer.in_features + rank
            continue
        forwards = 2 if recomputed else 1
        yield module, forwards * (layer.out_features + rank)


class _Local(TensorParallelLayer):
    """Computes with a module's own weights as plain tensors; transformers has it since 5.23."""

    @override
    def should_use_local_tensors(self, module: nn.Module) -> bool:
        return True


def install(model: nn.Module, mesh: Any, reductions: Reductions) -> None:
    for name, module, by_columns in planned(model, mesh.size()):
        layer = getattr(module, "base_layer", module)
        style = _Rows if by_columns else _Columns
        style(reductions, name).install_forward(layer, mesh)
        part, whole = ("lora_A", "lora_B") if by_columns else ("lora_B", "lora_A")
        for adapter in getattr(module, part, ()):
            style(reductions, f"{name}.{part}").install_forward(getattr(module, part)[adapter], mesh)
            _Local().install_forward(getattr(module, whole)[adapter], mesh)


_PACKED = (
    "packed weights cannot be cut by rows and columns (transformers and PEFT fail on them as well); use "
    f"{CONFIGURATION} with --load_in_4bit, or --split_layers auto"
)


class TensorParallel(Sharded):
    """A model whose weights are cut by transformers' plan. Reasons in the model itself are found when it is cut."""

    name: ClassVar[str] = "tensor_parallel"
    flag: ClassVar[str] = "--tensor_parallel"
    shares_rows: ClassVar[bool] = True
    excludes: ClassVar[Mapping[str, str]] = {
        **Sharded.excludes,
        **dict.fromkeys(("FSDP", "DeepSpeed", "--split_layers"), "choose one of them"),
        "--grad_compression": "no gradients are averaged; leave it out",
        "--use_dora": "DoRA computes with whole weights; leave it out",
        **dict.fromkeys(("--load_in_4bit", "--load_in_8bit"), _PACKED),
    }

    @override
    def _refusals(
        self, args: TrainingArguments, model: ModelConfig, environ: Mapping[str, str]
    ) -> list[tuple[bool, str]]:
        words = f"it takes {RANKS} processes, and there are {args.world_size}: give --num_processes 2"
        return [(args.world_size != RANKS, words), *super()._refusals(args, model, environ)]

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
        self._traffic = Reductions(self.mover, through_host=self.settings.sync.method == "host")
        install(model, mesh, self._traffic)
