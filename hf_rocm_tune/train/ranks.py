"""Training on several ranks or cards: DistributedDataParallel, FSDP2, tensor parallelism, and models split by layers.

Under DistributedDataParallel: replicas are compared before and after the model is wrapped, frozen weights are kept out
of its start-up broadcast, and gradient averages are checked (`GradientSync`).

Under FSDP2 each card keeps its own rows of every weight (`ShardedModel`). The model is sharded when the trainer is
built, not when training begins, so that coverage, sentinels and reports see what will be trained; accelerate leaves a
sharded model as it is. What upstream does between cards unchecked, and what is done here instead:

    broadcast of all weights from rank 0         each rank reads the files and sends its own rows through the mover
    gathering weights, averaging gradients       upstream's, checked before the optimizer (`ranks.fsdp`)
    norm over all gradients                      summed over gloo
    gathering the full model for each save       only trained weights and optimizer state, over gloo, compared

Checkpoints have the format of a single process: they are the same with any number of ranks, with or without FSDP2.

Not covered with FSDP2: out-of-memory recovery (the step is not repeated), comparison of replicas (shards have none).
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from accelerate import ParallelismConfig, PartialState
from accelerate.utils import DistributedType, str_to_bool
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.utils import clip_grads_with_norm_

from hf_rocm_tune import upstream
from hf_rocm_tune.cards.agree import everyone, highest
from hf_rocm_tune.cards.averaging import SyncSettings, Way
from hf_rocm_tune.cards.fsdp import Traffic
from hf_rocm_tune.cards.gradients import GradientCheck, watch
from hf_rocm_tune.cards.tensor_parallel import RANKS, Reductions, dims_of, install
from hf_rocm_tune.errors import CorruptionError, SeamError, UsageError
from hf_rocm_tune.models.placement import tensors_of
from hf_rocm_tune.models.sharding import cut, shard
from hf_rocm_tune.models.shards import TENSOR_PARALLEL, cut_of, fsdp_modules, is_sharded, reshard, rows_of, shard_digest
from hf_rocm_tune.models.split import Hops, SplitMover, layer_stack
from hf_rocm_tune.survive.saved_state import host_copy, leaves
from hf_rocm_tune.train.refusals import optimizer_name
from hf_rocm_tune.train.sentinels import compare_replicas
from hf_rocm_tune.transfer import Digest, Mover, combine, digest, map_tensors
from hf_rocm_tune.transfer.host_group import host_group
from hf_rocm_tune.transfer.report import BETWEEN_CARDS

if TYPE_CHECKING:
    from transformers import TrainingArguments
    from trl import ModelConfig

    from hf_rocm_tune.train.sentinels import SentinelCallback

_BATCH_BYTES = 64 << 20
RAM_EFFICIENT = (
    "fsdp_cpu_ram_efficient_loading makes rank 0 broadcast every weight between the cards, unverified: set it to "
    "false. Each rank reads only its own rows here, so it saves nothing"
)
OFFLOAD = "fsdp_offload_params moves weights past the verification in every step: set it to false"
FSDP_CONFIGURATION = "--accelerate_config dual_rx7900xt_fsdp2"
CHECKPOINTING = (
    "fsdp_activation_checkpointing is not supported: set it to false and use --activation_checkpointing instead"
)


class GradientSync:
    """How the ranks average gradients, and the check of the averages.

    PowerSGD begins after a tenth of the run's steps. Its state is not saved: a resumed run begins with plain averages.
    """

    def __init__(self, settings: SyncSettings) -> None:
        self._settings = settings
        # None before training, and where nothing is checked
        self.check: GradientCheck | Traffic | Reductions | None = None

    @property
    def way(self) -> Way:
        """``ddp`` or ``host``."""
        return self._settings.way

    def before_wrapping(self, model: nn.Module, sentinel: SentinelCallback) -> None:
        """Compare the replicas, and keep frozen weights out of DistributedDataParallel's broadcast. Collective."""
        sentinel.check_replicas(tensors_of(model), "before DistributedDataParallel")
        frozen = [name for name, parameter in model.named_parameters() if not parameter.requires_grad]
        buffers = [name for name, _ in model.named_buffers()]
        _, _, ignore = upstream.resolve("ddp_ignore")
        ignore(model, [*frozen, *buffers])

    def start(self, wrapped: nn.Module, mover: Mover, traffic: Traffic | Reductions | None, *, max_steps: int) -> None:
        """Begin to check DistributedDataParallel's averages, or the traffic of a sharded model. Collective."""
        if TENSOR_PARALLEL in wrapped.__dict__:
            self.check = traffic
            return
        settings = replace(self._settings, powersgd_after=max(2, -(-max_steps // 10)))
        earlier = self.check if isinstance(self.check, GradientCheck) else None
        self.check = watch(wrapped, mover, earlier, settings) or traffic

    def settle(self, *, step: int, synced: bool) -> None:
        """Check the averages of this step before they are clipped. Collective."""
        if self.check is not None and (self.check.pending or synced):
            self.check.settle(step=step)

    def describe(self, model: nn.Module, ranks: int) -> dict[str, Any] | None:
        """For the report: how gradients were averaged, as seen by this rank; None with a single process."""
        if ranks == 1:
            return None
        if self.check is None:
            way = "tensor_parallel" if TENSOR_PARALLEL in model.__dict__ else "fsdp2" if is_sharded(model) else "ddp"
            return {"way": way, "compression": "none", "judged": "no"}
        return self.check.describe()


# ---- FSDP2 --------------------------------------------------------------------------------------------------


def is_wanted(environ: Mapping[str, str]) -> bool:
    """Whether the launcher's environment variables ask for FSDP."""
    return bool(str_to_bool(environ.get("ACCELERATE_USE_FSDP", "false")))


@contextmanager
def before_accelerator(args: TrainingArguments, *, tensor_parallel: bool) -> Iterator[None]:
    """Configure how the ranks share the model, for the accelerator that is created within the block.

    Upstream does not shard on the CPU: there the ranks are declared as ranks of accelerators.
    """
    if tensor_parallel:
        _declare_accelerators(args)
        args.parallelism_config = ParallelismConfig(tp_size=args.world_size)
        yield
        args.parallelism_config = None  # it holds a mesh now, which cannot be saved with the arguments
        return
    if not is_wanted(os.environ):
        yield
        return
    if args.world_size < 2:
        raise UsageError("FSDP2 shards over two or more processes, and there is one: give --num_processes 2")
    _declare_accelerators(args)
    yield


def _declare_accelerators(args: TrainingArguments) -> None:
    if args.device.type == "cpu":
        PartialState._shared_state["distributed_type"] = DistributedType.MULTI_GPU


class ShardedModel:
    """A model sharded by FSDP2, and replacements of accelerate's gradient clipping and saving.

    Attributes:
        seconds: time that sharding took, with its verification.
        full_state: gathers what is saved; None before `shard`.
        traffic: checks what FSDP2 sends; None before `shard` and with ``verify="off"``.

    Raises:
        UsageError: the FSDP2 configuration cannot work or cannot be verified.
        SeamError: FSDP was asked for, and accelerate has no FSDP plugin.
    """

    def __init__(self, accelerator: Any, mover: Mover, world_size: int) -> None:
        plugin = getattr(accelerator.state, "fsdp_plugin", None)
        if plugin is None:
            raise SeamError("accelerate has not enabled FSDP, as requested: use the version in pyproject.toml")
        check_plugin(plugin)
        # `FullState` gathers what is saved; with another type upstream does not save the model.
        plugin.set_state_dict_type("FULL_STATE_DICT")
        self._take(accelerator, mover, world_size)

    def _take(self, accelerator: Any, mover: Mover, world_size: int) -> None:
        accelerator.clip_grad_norm_ = self._clip
        accelerator.get_state_dict = self._state_to_save
        self._accelerator, self._mover, self._ranks = accelerator, mover, world_size
        self.seconds = 0.0
        self.full_state: FullState | None = None
        self.traffic: Traffic | Reductions | None = None

    def shard(self, model: nn.Module) -> None:
        """Shard the model and begin to check what FSDP2 sends. Collective."""
        if is_sharded(model):
            return
        plugin = self._accelerator.state.fsdp_plugin
        _require_rows(model, self._ranks)
        _require_storage(model, plugin)
        begun = time.perf_counter()
        _reduce_as_trained(plugin, model)
        shard(model, self._accelerator, self._mover)
        self._sharded(model, begun)
        if self._mover.settings.verify != "off":
            self.traffic = Traffic(model, fsdp_modules(model), self._mover)

    def _sharded(self, model: nn.Module, begun: float) -> None:
        self.seconds = time.perf_counter() - begun
        self.full_state = FullState(model)
        if self._mover.settings.verify == "off":
            return
        cuts = {
            name for name, each in model.named_parameters() if isinstance(each, DTensor) and cut_of(each) is not None
        }
        compare_replicas(((n, each) for n, each in tensors_of(model) if n not in cuts), "after sharding")

    def _state_to_save(self, model: nn.Module, unwrap: bool = True) -> dict[str, Tensor]:
        """Replaces ``Accelerator.get_state_dict``. Collective, unless the state was gathered for this save already."""
        del model, unwrap
        assert self.full_state is not None
        return self.full_state.model()

    def _clip(self, parameters: Any, max_norm: float) -> Tensor:
        """Replaces ``Accelerator.clip_grad_norm_``: the norm is summed over gloo, the same on all ranks."""
        if self.traffic is not None:
            self.traffic.require_averages()
        gradients = [each.grad for each in parameters if each.grad is not None]
        parts = [each._local_tensor if isinstance(each, DTensor) else each for each in gradients]
        norms = torch.stack(torch._foreach_norm(parts, dtype=torch.float32)) if parts else torch.zeros(1)
        if host_group().rank() > 0:  # gradients that every rank holds completely count once
            whole = [isinstance(each, DTensor) and cut_of(each) is None for each in gradients]
            norms[torch.tensor(whole, device=norms.device)] = 0
        mine = (norms.double() ** 2).sum()
        total = sum(row[0] for row in everyone([mine.item()])) ** 0.5
        factor = max_norm / (total + 1e-6)
        if factor < 1 or factor != factor:
            torch._foreach_mul_(parts, factor)
        return torch.tensor(total, dtype=torch.float32, device=self._mover.device)


class TensorParallelModel(ShardedModel):
    """A model whose ranks compute each layer together; see `ranks.tensor_parallel`.

    Args:
        accelerator: configured for tensor parallelism.
        through_host: see `Reductions`.
    """

    def __init__(self, accelerator: Any, mover: Mover, world_size: int, *, through_host: bool) -> None:
        self._take(accelerator, mover, world_size)
        self._through_host = through_host

    def shard(self, model: nn.Module) -> None:
        """Cut the model and install the sums over the ranks. Collective."""
        if is_sharded(model):
            return
        begun, mesh = time.perf_counter(), self._accelerator.torch_device_mesh["tp"]
        cut(model, mesh, self._mover, dims_of(model, self._ranks))
        self.traffic = Reductions(self._mover, through_host=self._through_host)
        install(model, mesh, self.traffic)
        self._sharded(model, begun)


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


_NOT_WITH_SHARDS = {
    "--auto_fit": "it does not support shards; set --per_device_train_batch_size yourself",
    "--grad_sync host": "FSDP2 averages gradients by itself; leave it out",
    "--grad_compression": "FSDP2 averages gradients by itself; leave it out",
    "--recompute_layers": "with FSDP2 all layers are recomputed, or none; use --activation_checkpointing",
    "--split_layers": "it is the other way of training a model that is larger than a card; choose one",
    "--init_lora_weights": "the part that moves into the adapter is computed from full weights",
    "--adapter_name_or_path": "the adapter is read after the weights are cut; merge it into the base first",
}
_SHARDED_OPTIMIZERS = frozenset({"adamw_torch", "adamw_torch_fused", "sgd"})


def check_fsdp(
    args: TrainingArguments,
    model: ModelConfig,
    environ: Mapping[str, str],
    *,
    others: Mapping[str, bool],
) -> bool:
    """Refuse, before the model is loaded, what does not work with FSDP2 or could not be verified.

    ``others``: our flags that are incompatible with FSDP2, and whether they are in use.

    Returns:
        Whether FSDP2 is used.

    Raises:
        UsageError: the first reason that applies.
    """
    if args.fsdp:
        raise UsageError(f"--fsdp is not used here: choose FSDP2 with {FSDP_CONFIGURATION}, and leave --fsdp out")
    if not is_wanted(environ):
        return False
    version, optim = environ.get("FSDP_VERSION", "1"), optimizer_name(args)
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
        (bool(getattr(args, "activation_offloading", False)), "--activation_offloading is not supported: leave it out"),
        (optim not in _SHARDED_OPTIMIZERS, f"--optim {optim} is not known to work on shards: use adamw_torch_fused"),
        *((used, f"{flag} works only without it: {_NOT_WITH_SHARDS[flag]}") for flag, used in others.items()),
    ]
    if model.load_in_4bit:
        refusals += _quantised(args, model)
    for wrong, why in refusals:
        if wrong:
            raise UsageError(f"FSDP2: {why}")
    return True


def check_tensor_parallel(
    args: TrainingArguments, model: ModelConfig, environ: Mapping[str, str], *, others: Mapping[str, bool]
) -> None:
    """As `check_fsdp`, for ``--tensor_parallel``. Reasons in the model itself are found when it is cut.

    Raises:
        UsageError: the first reason that applies.
    """
    optim = optimizer_name(args)
    refusals = [
        (is_wanted(environ) or bool(args.deepspeed), "it does not go with FSDP or DeepSpeed: choose one of them"),
        (args.world_size != RANKS, f"it takes {RANKS} processes, and there are {args.world_size}: --num_processes 2"),
        (not model.use_peft, "it is for adapters: train with LoRA (--use_peft true)"),
        (
            model.load_in_4bit or model.load_in_8bit,
            "4-bit and 8-bit weights are packed and cannot be cut by rows and columns (transformers and PEFT fail on "
            f"them as well): use {FSDP_CONFIGURATION} with --load_in_4bit, or --split_layers auto",
        ),
        (bool(getattr(model, "use_dora", False)), "DoRA computes with whole weights: leave --use_dora out"),
        (bool(args.fp16), "--fp16 is not supported: use --bf16, or neither"),
        (bool(args.torch_compile), "--torch_compile is not supported: leave it out"),
        (optim not in _SHARDED_OPTIMIZERS, f"--optim {optim} is not known to work on shards: use adamw_torch_fused"),
        *((used and flag != "--grad_sync host", f"it does not go with {flag}") for flag, used in others.items()),
    ]
    for wrong, why in refusals:
        if wrong:
            raise UsageError(f"--tensor_parallel: {why}")


def _quantised(args: TrainingArguments, model: ModelConfig) -> list[tuple[bool, str]]:
    """Refusals for 4-bit weights: only packed into a float dtype can they be sharded, and FSDP2 must not convert it."""
    storage = model.bnb_4bit_quant_storage or "uint8"
    computed = "bfloat16" if args.bf16 else None
    fitting = computed or "float32"
    return [
        (
            storage not in {"bfloat16", "float32", "float16"},
            f"4-bit weights stored as {storage} cannot be sharded, so each card would hold all of them: "
            f"give --bnb_4bit_quant_storage {fitting}",
        ),
        (
            computed is not None and storage != computed,
            f"with --bf16 FSDP2 converts what it gathers to bfloat16, and 4-bit weights stored as {storage} would be "
            "destroyed: give --bnb_4bit_quant_storage bfloat16",
        ),
    ]


def _is_on(environ: Mapping[str, str], name: str) -> bool:
    return bool(str_to_bool(environ.get(name, "false")))


def check_plugin(plugin: Any) -> None:
    """As `check_fsdp` for a trainer built without our entry point, from accelerate's plugin."""
    from torch.distributed.fsdp import CPUOffloadPolicy

    for wrong, why in (
        (plugin.fsdp_version != 2, f"fsdp_version {plugin.fsdp_version} is not supported: use fsdp_version: 2"),
        (plugin.cpu_ram_efficient_loading, RAM_EFFICIENT),
        (isinstance(plugin.cpu_offload, CPUOffloadPolicy), OFFLOAD),
        (plugin.activation_checkpointing, CHECKPOINTING),
    ):
        if wrong:
            raise UsageError(f"FSDP2: {why}")


class FullState:
    """The full (unsharded) state of a sharded model for a save: gathered once, kept until `forget`."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self.optimizer: Any = None  # accelerate's wrapper; set when training begins
        self._kept_model: dict[str, Tensor] | None = None
        self._kept_optimizer: dict[str, Any] | None = None

    def model(self) -> dict[str, Tensor]:
        """Full trained weights by name, on rank 0's host; empty on other ranks. Collective the first time.

        Raises:
            CorruptionError: on every rank, when a part did not arrive correctly.
        """
        if self._kept_model is None:
            reshard(self._model)
            trained = {name: each.data for name, each in self._model.named_parameters() if each.requires_grad}
            self._kept_model = self._gather(trained)
        return self._kept_model

    def optimizer_state(self) -> dict[str, Any]:
        """As `model`, for the optimizer: the ``state_dict`` of a single process."""
        if self._kept_optimizer is None:
            state = self.optimizer.state_dict()
            sharded = {path: each for path, each in leaves(state) if isinstance(each, DTensor)}
            full = self._gather(sharded)
            if host_group().rank() == 0:
                by_id = {id(each): full[path] for path, each in sharded.items()}
                self._kept_optimizer = map_tensors(state, lambda each: by_id.get(id(each), each))
            else:
                self._kept_optimizer = {}
        return self._kept_optimizer

    def forget(self) -> None:
        self._kept_model = self._kept_optimizer = None

    def _gather(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        result: dict[str, Tensor] = {}
        bad: list[str] = []
        for names in _batches(tensors):
            mine = {name: self._on_host(tensors[name]) for name in names}
            parts = _gathered(mine)
            for name in names if parts else ():
                result[name], right = _joined([each[name] for each in parts], tensors[name])
                bad += [] if right else [name]
        if highest([len(bad)])[0] > 0:
            raise CorruptionError(
                f"parts of a tensor were gathered with errors{f' ({bad[0]} first)' if bad else ''}, so nothing was "
                "saved; checkpoints already written are intact: start the same command again to continue from the "
                "newest one"
            )
        return result

    def _on_host(self, tensor: Tensor) -> tuple[Tensor, str]:
        """This rank's part on the host, and the digest of the device's part at its offset in the full tensor."""
        part = tensor._local_tensor.detach() if isinstance(tensor, DTensor) else tensor.detach()
        found = shard_digest(tensor) if isinstance(tensor, DTensor) else digest(part)
        return host_copy(part), found.hex()  # one that stayed wrong is found on rank 0


def _gathered(mine: dict[str, tuple[Tensor, str]]) -> list[dict[str, tuple[Tensor, str]]]:
    group = host_group()
    parts: list[Any] | None = [None] * group.size() if group.rank() == 0 else None
    dist.gather_object(mine, parts, dst=0, group=group)
    return parts or []


def _joined(parts: list[tuple[Tensor, str]], like: Tensor) -> tuple[Tensor, bool]:
    if not isinstance(like, DTensor):
        whole, text = parts[0]
        return whole, digest(whole).hex() == text
    dim = cut_of(like)
    whole = parts[0][0] if dim is None else torch.cat([part for part, _ in parts], dim)
    return whole, digest(whole) == combine(Digest.from_hex(text) for _, text in parts)


def _batches(tensors: Mapping[str, Tensor]) -> Iterator[list[str]]:
    """Names in order, in groups of at most 64 MiB of tensors, so that the host holds no second copy of everything."""
    batch: list[str] = []
    size = 0
    for name, tensor in tensors.items():
        nbytes = tensor.numel() * tensor.element_size()
        if batch and size + nbytes > _BATCH_BYTES:
            yield batch
            batch, size = [], 0
        batch.append(name)
        size += nbytes
    if batch:
        yield batch


# ---- one process, several cards -----------------------------------------------------------------------------


def install_hops(model: nn.Module, mover: SplitMover) -> Hops:
    """Let tensors pass from one card's layers to another's through the movers, in forward and backward."""
    base: Any = model.get_base_model() if hasattr(model, "peft_config") else model  # type: ignore[operator]
    _, layers = layer_stack(base, base.config)
    hops = Hops(mover)
    hops.install(base.base_model, layers)
    return hops


def cards_of_parameters(model: nn.Module, mover: SplitMover) -> dict[int, int]:
    return {id(parameter): mover.split.card_of(name) for name, parameter in model.named_parameters()}


@torch.no_grad()
def clip_over_cards(
    mover: SplitMover,
    card_of: Mapping[int, int],
    parameters: Iterable[nn.Parameter],
    max_norm: float,
) -> Tensor:
    """As ``torch.nn.utils.clip_grad_norm_``, which would copy the norms to the first card by peer copies.

    The norms of the gradients are summed in the same order, so the result is torch's bit for bit, except that the last
    sum is computed on the host.

    Returns:
        The norm before clipping, shape [], on the first card.
    """
    trained = [parameter for parameter in parameters if parameter.grad is not None]
    owners = [card_of[id(parameter)] for parameter in trained]
    norms: dict[int, Tensor] = {}
    for card in sorted(set(owners)):
        mine = [index for index, owner in enumerate(owners) if owner == card]
        gradients = [trained[index].grad for index in mine]
        there = torch.stack([torch.linalg.vector_norm(each) for each in gradients if each is not None])
        with mover.cards[card].fetched(there, name=f"gradient_norms.from{card}", stage=BETWEEN_CARDS) as fetched:
            norms |= dict(zip(mine, fetched.host.clone(), strict=True))
    on_host = torch.stack([norms[index] for index in range(len(trained))]) if trained else torch.zeros(1)
    total = torch.linalg.vector_norm(on_host)
    totals = {}
    for card in sorted({0, *owners}):
        name = f"gradient_norm.to{card}"
        totals[card] = mover.cards[card].move(total, name=name, stage=BETWEEN_CARDS)
        mine = [index for index, owner in enumerate(owners) if owner == card]
        clip_grads_with_norm_([trained[index] for index in mine], max_norm, totals[card])
    return totals[0]


def describe_split(mover: SplitMover, model: nn.Module, in_flight: int) -> dict[str, Any]:
    """For the report: what each card holds, and what was moved between the cards."""
    held = [0] * len(mover.cards)
    for name, tensor in tensors_of(model):
        held[mover.split.card_of(name)] += tensor.numel() * tensor.element_size()
    rows = []
    for number, (layers, card, report) in enumerate(
        zip(mover.split.ranges, mover.cards, mover.card_reports, strict=True)
    ):
        counted = report.to_dict()
        rows.append(
            {
                "card": number,
                "device": f"{card.device}{' (logical)' if mover.logical else ''}",
                "layers": [layers.start, layers.stop - 1],
                "model_bytes": held[number],
                "weights": counted["weights"],
                BETWEEN_CARDS: counted[BETWEEN_CARDS],
            }
        )
    way = {"layers": mover.split.stack, "way": "staged through the host", "micro_batches_in_flight": in_flight}
    return {**way, "cards": rows}
