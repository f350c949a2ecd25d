"""What several processes that train one model must agree on: the same weights before and after the model is wrapped,
frozen ones out of DistributedDataParallel's start-up broadcast, and averages of gradients that are judged.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from typing_extensions import override

from hf_rocm_tune import upstream
from hf_rocm_tune.models.placement import tensors_of
from hf_rocm_tune.models.shards import is_sharded
from hf_rocm_tune.ranks.averaging import Compression, SyncSettings, Way
from hf_rocm_tune.ranks.fsdp import Traffic
from hf_rocm_tune.ranks.gradients import GradientCheck, watch

if TYPE_CHECKING:
    from transformers import Trainer as _Base

    from hf_rocm_tune.training.callbacks import SentinelCallback
    from hf_rocm_tune.transfer import Mover
else:
    _Base = object


class RanksMixin(_Base):
    """See the module's description; for a trainer that has ``mover`` and the callback of the sentinels.

    Args:
        grad_sync: how several ranks average gradients: ``ddp``, over the process group; ``host``, through host memory
            over a gloo group, whatever the process group is. Without RCCL at all only where that is gloo as well
            (``ddp_backend="gloo"`` in the training arguments).
        grad_compression: what travels between the ranks: ``none``, ``fp16``, ``bf16``, or ``powersgd`` (with ``ddp``).
            PowerSGD begins after a tenth of the run's steps, and its state is in no checkpoint: a run that is continued
            begins with plain averages again.

    Raises:
        UsageError: the two do not go together; from `train`, when something else than DistributedDataParallel averages
            gradients and they are not left at ``ddp`` and ``none``.
    """

    mover: Mover
    _sentinel: SentinelCallback
    _gradient_check: GradientCheck | Traffic | None = None
    _traffic: Traffic | None = None  # FSDP2's, where that averages

    def __init__(
        self, *arguments: Any, grad_sync: Way = "ddp", grad_compression: Compression = "none", **keywords: Any
    ) -> None:
        self._grad_sync = SyncSettings(way=grad_sync, compression=grad_compression)
        super().__init__(*arguments, **keywords)

    def describe_grad_sync(self) -> dict[str, Any] | None:
        """For the report: how gradients were averaged, as this rank saw it; None with a single process."""
        if self.args.world_size == 1:
            return None
        if self._gradient_check is None:
            way = "fsdp2" if is_sharded(self.model) else "ddp"
            return {"way": way, "compression": "none", "judged": "no"}
        return self._gradient_check.describe()

    @override
    def _prepare_for_training(self, max_steps: int, train_dataloader: Any, resume_from_checkpoint: Any) -> Any:
        distributed = self.args.world_size > 1 and not is_sharded(self.model)
        if distributed:
            self._sentinel.check_replicas(tensors_of(self.model), "before DistributedDataParallel")
            frozen = [name for name, parameter in self.model.named_parameters() if not parameter.requires_grad]
            buffers = [name for name, _ in self.model.named_buffers()]
            _, _, ignore = upstream.resolve("ddp_ignore")
            ignore(self.model, [*frozen, *buffers])
        prepared = super()._prepare_for_training(max_steps, train_dataloader, resume_from_checkpoint)
        if distributed:
            self._sentinel.check_replicas(tensors_of(self.model), "after DistributedDataParallel")
        if self.args.world_size > 1:
            settings = replace(self._grad_sync, powersgd_after=max(2, -(-max_steps // 10)))
            earlier = self._gradient_check if isinstance(self._gradient_check, GradientCheck) else None
            self._gradient_check = watch(self.model_wrapped, self.mover, earlier, settings) or self._traffic
        return prepared
