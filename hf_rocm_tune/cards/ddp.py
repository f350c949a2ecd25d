"""Each rank has the whole model, and DistributedDataParallel averages gradients over the process group.

Replicas are compared before and after the model is wrapped, frozen weights are kept out of the start-up broadcast, and
averages are checked before they are clipped (`gradients`). `Host` averages without the link between the cards.
DeepSpeed's ranks come here too; what it exchanges is not checked, and the coverage names that.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, ClassVar

from torch import nn
from typing_extensions import override

from hf_rocm_tune import upstream
from hf_rocm_tune.cards.gradients import GradientCheck, watch
from hf_rocm_tune.cards.way import Compare, Way
from hf_rocm_tune.models.tensors import tensors_of


class Ddp(Way):
    name: ClassVar[str] = "ddp"
    _check: GradientCheck | None = None

    @override
    @contextmanager
    def wrapping(self, model: nn.Module, compare: Compare) -> Iterator[None]:
        compare(tensors_of(model), "before DistributedDataParallel")
        frozen = [name for name, parameter in model.named_parameters() if not parameter.requires_grad]
        _, _, ignore = upstream.resolve("ddp_ignore")
        ignore(model, [*frozen, *(name for name, _ in model.named_buffers())])
        yield
        compare(tensors_of(model), "after DistributedDataParallel")

    @override
    def start(self, wrapped: nn.Module, optimizer: Any, *, max_steps: int) -> None:
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
            self._check.settle(step=step)

    @override
    def describe(self, model: nn.Module) -> dict[str, Any]:
        unchecked = {"way": "ddp", "compression": "none", "judged": "no"}
        return {**super().describe(model), "grad_sync": self._check.describe() if self._check else unchecked}


class Host(Ddp):
    name: ClassVar[str] = "host"
