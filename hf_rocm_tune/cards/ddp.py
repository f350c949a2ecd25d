"""Each rank has the whole model, and DistributedDataParallel averages gradients over the process group.

Nothing is broadcast when the model is wrapped; replicas are compared then, and averages before they are clipped
(`gradients`). `Host` averages without the link between the cards. DeepSpeed's ranks come here
too; what it exchanges is not checked, and the coverage names that.
"""

from __future__ import annotations

import inspect
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar

from accelerate.utils import DistributedDataParallelKwargs, extract_model_from_parallel
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from typing_extensions import override

from hf_rocm_tune.cards.gradients import GradientCheck, watch
from hf_rocm_tune.cards.strategy import Compare, ParallelStrategy
from hf_rocm_tune.models.tensors import tensors_of

if TYPE_CHECKING:
    from hf_rocm_tune.transfer import Mover


class _NothingBroadcast(DistributedDataParallelKwargs):
    """Rank 0 sends no weights when the model is wrapped, and no buffers in ``forward``.

    They would cross the link that is suspect, unverified; each rank has its own, verified, and replicas are compared.
    """

    def to_kwargs(self) -> dict[str, Any]:
        given = {name: value for name, value in super().to_kwargs().items() if name != "broadcast_buffers"}
        known = inspect.signature(DistributedDataParallel).parameters
        buffers = "forward_sync_buffers" if "forward_sync_buffers" in known else "broadcast_buffers"  # before 2.13
        return {**given, "init_sync": False, buffers: False}


class Ddp(ParallelStrategy):
    name: ClassVar[str] = "ddp"
    _check: GradientCheck | None = None

    @override
    def attach(self, accelerator: Any, mover: Mover) -> None:
        super().attach(accelerator, mover)
        given = accelerator.ddp_handler or DistributedDataParallelKwargs()
        accelerator.ddp_handler = _NothingBroadcast(**vars(given))

    @override
    def start(self, wrapped: nn.Module, optimizer: Any, compare: Compare, *, max_steps: int) -> None:
        compare(
            tensors_of(extract_model_from_parallel(wrapped, keep_torch_compile=False)), "after DistributedDataParallel"
        )
        # PowerSGD begins after a tenth of the run's steps. Its state is not saved: a resumed run begins with averages.
        settings = replace(self.settings.sync, powersgd_after=max(2, -(-max_steps // 10)))
        self._check = watch(wrapped, self.mover, self._check, settings)

    @override
    def collect(self) -> None:
        if self._check is not None:
            self._check.collect()

    @override
    def check(self, *, step: int, synced: bool) -> None:
        if self._check is not None and (self._check.pending or synced):
            self._check.wait_verified(step=step)

    @override
    def describe(self, model: nn.Module) -> dict[str, Any]:
        if self._check:
            grad_sync = self._check.describe()
        else:
            grad_sync = {"method": "ddp", "compression": "none", "judged": "no"}
        return {**super().describe(model), "grad_sync": grad_sync}


class Host(Ddp):
    name: ClassVar[str] = "host"
