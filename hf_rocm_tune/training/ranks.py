"""What several processes that train one model must agree on: the same weights before and after the model is wrapped,
frozen ones out of DistributedDataParallel's start-up broadcast, and averages of gradients that are judged.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from hf_rocm_tune import upstream
from hf_rocm_tune.distributed.gradients import GradientCheck, watch
from hf_rocm_tune.models.placement import tensors_of

if TYPE_CHECKING:
    from transformers import Trainer as _Base

    from hf_rocm_tune.training.callbacks import SentinelCallback
    from hf_rocm_tune.transfer import Mover
else:
    _Base = object


class RanksMixin(_Base):
    """See the module's description; for a trainer that has ``mover`` and the callback of the sentinels."""

    mover: Mover
    _sentinel: SentinelCallback
    _gradient_check: GradientCheck | None = None

    def _prepare_for_training(self, max_steps: int, train_dataloader: Any, resume_from_checkpoint: Any) -> Any:
        distributed = self.args.world_size > 1
        if distributed:
            self._sentinel.check_replicas(tensors_of(self.model), "before DistributedDataParallel")
            frozen = [name for name, parameter in self.model.named_parameters() if not parameter.requires_grad]
            buffers = [name for name, _ in self.model.named_buffers()]
            _, _, ignore = upstream.resolve("ddp_ignore")
            ignore(self.model, [*frozen, *buffers])
        prepared = super()._prepare_for_training(max_steps, train_dataloader, resume_from_checkpoint)
        if distributed:
            self._sentinel.check_replicas(tensors_of(self.model), "after DistributedDataParallel")
            self._gradient_check = watch(self.model_wrapped, self.mover, self._gradient_check)
        return prepared
