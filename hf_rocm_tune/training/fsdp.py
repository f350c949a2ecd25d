"""A trainer whose model FSDP2 has sharded over the ranks: each card keeps its own rows of every weight.

The model is sharded when the trainer is built (`models.sharding`), not when training begins, so that everything that
looks at it (coverage, sentinels, reports) sees what will be trained. Accelerate finds it sharded and leaves it so.

What upstream does over the path between cards without a check, and what is done here instead:

    broadcast of all weights from rank 0         each rank reads the files and sends its own rows through the mover
    gathering weights, averaging gradients       upstream's, judged before the optimizer (`ranks.fsdp`)
    norm over all gradients                      added up over gloo
    gathering the whole model for each save      only what is trained and the optimizer's state, over gloo, compared

Checkpoints have the form of a single process: they are the same with any number of ranks, with or without FSDP2.

Not covered: shortages of memory (the step is not done again), comparison of replicas (a shard has none).
"""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING, Any

import torch
from accelerate import PartialState
from accelerate.utils import DistributedType
from torch.distributed.tensor import DTensor
from typing_extensions import override

from hf_rocm_tune.errors import SeamError, UsageError
from hf_rocm_tune.integrity.replicas import compare_replicas
from hf_rocm_tune.models.placement import tensors_of
from hf_rocm_tune.models.sharding import shard
from hf_rocm_tune.models.shards import fsdp_modules, is_sharded, rows_of
from hf_rocm_tune.ranks.agree import everyone
from hf_rocm_tune.ranks.fsdp import Traffic
from hf_rocm_tune.training.fsdp_settings import check_plugin, is_wanted
from hf_rocm_tune.training.fsdp_state import WholeState

if TYPE_CHECKING:
    from torch import Tensor, nn
    from transformers import Trainer as _Base

    from hf_rocm_tune.transfer import Mover
else:
    _Base = object


class ShardsMixin(_Base):
    """See the module's description; for a trainer that has ``mover``. Without FSDP2 nothing here does anything.

    Attributes:
        shard_seconds: that sharding took, with its verification.
        whole_state: brings together what is saved; None without FSDP2.

    Raises:
        UsageError: FSDP2 is asked for in a way that cannot work, or not be verified.
        SeamError: FSDP was asked for, and accelerate has not made it.
    """

    mover: Mover
    shard_seconds: float = 0.0
    whole_state: WholeState | None = None
    _traffic: Traffic | None = None

    @override
    def create_accelerator_and_postprocess(self) -> None:
        """As upstream, which knows no FSDP on the CPU: there the ranks are called ranks of accelerators."""
        wanted = is_wanted(os.environ)
        if wanted and self.args.world_size < 2:
            raise UsageError("FSDP2 shards over two or more processes, and there is one: give --num_processes 2")
        if wanted and self.args.device.type == "cpu":
            PartialState._shared_state["distributed_type"] = DistributedType.MULTI_GPU
        super().create_accelerator_and_postprocess()
        if wanted and not self.is_fsdp_enabled:
            raise SeamError("FSDP was asked for and accelerate has not made it: use the version in pyproject.toml")
        if self.is_fsdp_enabled:
            check_plugin(self.accelerator.state.fsdp_plugin)
            # What is saved is ours to bring together; upstream writes nothing at all where this is another one.
            self.accelerator.state.fsdp_plugin.set_state_dict_type("FULL_STATE_DICT")
            self.accelerator.clip_grad_norm_ = self._clip_sharded
            self.accelerator.get_state_dict = self._state_to_save

    def shard_model(self, model: nn.Module) -> None:
        """Shards the model and begins to watch what FSDP2 sends. Collective.

        Raises:
            CorruptionError: see `models.sharding.shard`, or ranks that hold other buffers than each other.
        """
        if is_sharded(model):
            return
        _require_rows(model, self.args.world_size)
        _require_storage(model, self.accelerator.state.fsdp_plugin)
        begun = time.perf_counter()
        _reduce_as_trained(self.accelerator.state.fsdp_plugin, model)
        shard(model, self.accelerator, self.mover)
        self.shard_seconds = time.perf_counter() - begun
        self.whole_state = WholeState(model, self.mover)
        if self.mover.settings.verify == "off":
            return
        sharded = {name for name, each in model.named_parameters() if isinstance(each, DTensor)}
        compare_replicas(((n, each) for n, each in tensors_of(model) if n not in sharded), "after sharding")
        self._traffic = Traffic(model, fsdp_modules(model), self.mover)

    @override
    def _prepare_for_training(self, max_steps: int, train_dataloader: Any, resume_from_checkpoint: Any) -> Any:
        prepared = super()._prepare_for_training(max_steps, train_dataloader, resume_from_checkpoint)
        if self.whole_state is not None:
            self.whole_state.optimizer = self.optimizer
        return prepared

    @override
    def prediction_step(self, *arguments: Any, **keywords: Any) -> Any:
        """As upstream; the weights that it was computed with are judged."""
        result = super().prediction_step(*arguments, **keywords)
        if self._traffic is not None:
            self._traffic.settle(step=self.state.global_step)
        return result

    def _state_to_save(self, model: nn.Module, unwrap: bool = True) -> dict[str, Tensor]:
        """In place of ``Accelerator.get_state_dict``. Collective, unless it has been brought together for this save."""
        del model, unwrap
        assert self.whole_state is not None
        return self.whole_state.model()

    def _clip_sharded(self, parameters: Any, max_norm: float, norm_type: float = 2) -> Tensor:
        """In place of ``Accelerator.clip_grad_norm_``: the norm is added up over gloo, alike on all ranks."""
        if self._traffic is not None:
            self._traffic.require_averages()
        gradients = [each.grad for each in parameters if each.grad is not None]
        parts = [each._local_tensor if isinstance(each, DTensor) else each for each in gradients]
        norms = torch.stack(torch._foreach_norm(parts, norm_type, dtype=torch.float32)) if parts else torch.zeros(1)
        power = norm_type if norm_type != float("inf") else None
        mine = norms.double().max() if power is None else (norms.double() ** power).sum()
        rows = [row[0] for row in everyone([mine.item()])]
        total = max(rows, key=lambda one: (one != one, one)) if power is None else sum(rows) ** (1 / power)
        factor = max_norm / (total + 1e-6)
        if factor < 1 or factor != factor:
            torch._foreach_mul_(parts, factor)
        return torch.tensor(total, dtype=torch.float32, device=self.args.device)


def _require_rows(model: nn.Module, ranks: int) -> None:
    """Refuse what would leave a rank without a part of a trained tensor.

    Accelerate tells the optimizer's parameters by the address of their parts, and all empty ones have the same.
    """
    for name, each in model.named_parameters():
        first, last = rows_of(ranks - 1, ranks, each.shape[0])
        if each.requires_grad and first == last:
            raise UsageError(
                f"FSDP2: {name} has {each.shape[0]} rows, too few for {ranks} ranks: give a larger --lora_r, or train "
                "without FSDP2"
            )


def _require_storage(model: nn.Module, plugin: Any) -> None:
    """Refuse 4-bit weights that FSDP2 would convert: they are bytes in the dress of floats."""
    computed = getattr(plugin.mixed_precision_policy, "param_dtype", None)
    for name, each in model.named_parameters():
        packed = getattr(each, "quant_state", None) is not None and each.is_floating_point()
        if packed and computed is not None and each.dtype != computed:
            raise UsageError(
                f"FSDP2 converts what it gathers to {computed}, and {name}, packed into {each.dtype}, would be "
                f"destroyed: use bnb_4bit_quant_storage={computed}"
            )


def _reduce_as_trained(plugin: Any, model: nn.Module) -> None:
    """Average gradients in the dtype of what is trained.

    Accelerate averages in the dtype of the mixed precision, which loses bits of a float32 adapter's gradients that
    DistributedDataParallel keeps.
    """
    policy = plugin.mixed_precision_policy
    if policy is None:
        return
    quantised = bool(getattr(model, "is_loaded_in_4bit", False))
    kinds = {each.dtype for each in model.parameters() if each.requires_grad}
    # accelerate makes trainable weights float32 first, unless the model is quantised
    dtype = kinds.pop() if quantised and len(kinds) == 1 else torch.float32
    plugin.mixed_precision_policy = type(policy)(
        param_dtype=policy.param_dtype, reduce_dtype=dtype, output_dtype=policy.output_dtype
    )
