"""What FSDP2 and tensor parallelism have in common: each rank holds a part of the model.

The model is sharded when the trainer is built, so that coverage, sentinels and reports see what will be trained. Each
rank reads the files and sends its own rows through the mover (upstream broadcasts from rank 0); what is gathered and
averaged is checked before the optimizer; the norm of the gradients is summed over gloo; a save gathers trained weights
and optimizer state over gloo, compared, in the format of a single process. Not covered: out-of-memory recovery.
"""

from __future__ import annotations

import time
from abc import abstractmethod
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, ClassVar

import torch
import torch.distributed as dist
from accelerate import PartialState
from accelerate.utils import DistributedType
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from typing_extensions import override

from hf_rocm_tune.cards.agree import compare_replicas, everyone, highest
from hf_rocm_tune.cards.fsdp_traffic import Gathers
from hf_rocm_tune.cards.way import CardSettings, Way
from hf_rocm_tune.errors import CorruptionError
from hf_rocm_tune.host_group import host_group
from hf_rocm_tune.models.placement import tensors_of
from hf_rocm_tune.models.shards import cut_of, is_sharded, reshard, shard_digest
from hf_rocm_tune.transfer import Digest, Mover, combine, digest, host_copy, map_tensors, named_tensors

if TYPE_CHECKING:
    from transformers import TrainingArguments
    from trl import ModelConfig

_BATCH_BYTES = 64 << 20


class Sharded(Way):
    """A model of which each rank has a part; replaces accelerate's gradient clipping and saving."""

    on_host: ClassVar[bool] = True
    excludes: ClassVar[Mapping[str, str]] = {
        "--auto_fit": "it does not support shards; set --per_device_train_batch_size yourself",
        "--recompute_layers": "all layers are recomputed, or none; use --activation_checkpointing",
        "--init_lora_weights": "the part that moves into the adapter is computed from full weights",
        "--adapter_name_or_path": "the adapter is read after the weights are cut; merge it into the base first",
        "--use_peft false": "it is for adapters here; train with LoRA",
        "--fp16": "use --bf16, or neither",
        **dict.fromkeys(("--torch_compile", "--activation_offloading"), "leave it out"),
    }

    def __init__(self, settings: CardSettings | None = None) -> None:
        super().__init__(settings)
        self._traffic: Gathers | None = None  # None before `place`, and where nothing is checked
        self._accelerator: Any = None

    @override
    def _refusals(
        self, args: TrainingArguments, model: ModelConfig, environ: Mapping[str, str]
    ) -> list[tuple[bool, str]]:
        optim, tried = str(getattr(args.optim, "value", args.optim)), ("adamw_torch", "adamw_torch_fused", "sgd")
        return [(optim not in tried, f"--optim {optim} is not known to work on shards: use adamw_torch_fused")]

    @override
    def attach(self, accelerator: Any, mover: Mover) -> None:
        super().attach(accelerator, mover)
        accelerator.clip_grad_norm_ = self._clip
        accelerator.get_state_dict = self._state_to_save
        self._accelerator = accelerator

    @override
    def place(self, model: nn.Module) -> None:
        if is_sharded(model):
            return
        begun = time.perf_counter()
        self._shard(model)
        self.seconds = time.perf_counter() - begun
        self.state = FullState(model)
        if self.mover.settings.verify == "off":
            return
        cuts = {
            name for name, each in model.named_parameters() if isinstance(each, DTensor) and cut_of(each) is not None
        }
        compare_replicas(((n, each) for n, each in tensors_of(model) if n not in cuts), "after sharding")

    @abstractmethod
    def _shard(self, model: nn.Module) -> None:
        """Shard the model and begin to check what the ranks send. Collective."""

    @override
    def start(self, wrapped: nn.Module, optimizer: Any, *, max_steps: int) -> None:
        if self.state is not None:
            self.state.optimizer = optimizer

    @override
    def check(self, *, step: int, synced: bool) -> None:
        if self._traffic is not None and (self._traffic.pending or synced):
            self._traffic.settle(step=step)

    @override
    def check_evaluation(self, *, step: int) -> None:
        if self._traffic is not None:
            self._traffic.settle(step=step)

    @override
    def describe(self, model: nn.Module) -> dict[str, Any]:
        unchecked = {"way": self.name, "compression": "none", "judged": "no"}
        return {**super().describe(model), "grad_sync": self._traffic.describe() if self._traffic else unchecked}

    def _state_to_save(self, model: nn.Module, unwrap: bool = True) -> dict[str, Tensor]:
        """Replaces ``Accelerator.get_state_dict``. Collective, unless the state was gathered for this save already."""
        found: dict[str, Tensor] = self.state.model()
        return found

    def _clip(self, parameters: Any, max_norm: float) -> Tensor:
        """Replaces ``Accelerator.clip_grad_norm_``: the norm is summed over gloo, the same on all ranks."""
        if self._traffic is not None:
            self._traffic.require_averages()
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
        return torch.tensor(total, dtype=torch.float32, device=self.mover.device)


def declare_accelerators(args: Any) -> None:
    """Upstream does not shard on the CPU: there the ranks are declared as ranks of accelerators."""
    if args.device.type == "cpu":
        PartialState._shared_state["distributed_type"] = DistributedType.MULTI_GPU


class FullState:
    """The full (unsharded) state of a sharded model for a save: gathered once, kept until `forget`."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self.optimizer: Any = None  # accelerate's wrapper; set when training begins
        self._kept_model: dict[str, Tensor] | None = None
        self._kept_optimizer: dict[str, Any] | None = None

    def model(self) -> dict[str, Tensor]:
        """Full trained weights by name, on rank 0's host; empty on others. Collective the first time."""
        if self._kept_model is None:
            reshard(self._model)
            trained = {name: each.data for name, each in self._model.named_parameters() if each.requires_grad}
            self._kept_model = self._gather(trained)
        return self._kept_model

    def optimizer_state(self) -> dict[str, Any]:
        if self._kept_optimizer is None:
            state = self.optimizer.state_dict()
            sharded = {path: each for path, each in named_tensors(state) if isinstance(each, DTensor)}
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
        group = host_group()
        for names in _batches(tensors):
            mine = {name: self._on_host(tensors[name]) for name in names}
            parts: list[Any] | None = [None] * group.size() if group.rank() == 0 else None
            dist.gather_object(mine, parts, dst=0, group=group)
            for name in names if parts else ():
                result[name], right = _joined([each[name] for each in parts or ()], tensors[name])
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


def _joined(parts: list[tuple[Tensor, str]], like: Tensor) -> tuple[Tensor, bool]:
    if not isinstance(like, DTensor):
        whole, text = parts[0]
        return whole, digest(whole).hex() == text
    dim = cut_of(like)
    whole = parts[0][0] if dim is None else torch.cat([part for part, _ in parts], dim)
    return whole, digest(whole) == combine(Digest.from_hex(text) for _, text in parts)


def _batches(tensors: Mapping[str, Tensor]) -> Iterator[list[str]]:
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
