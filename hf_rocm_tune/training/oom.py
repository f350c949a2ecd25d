"""A trainer that survives running out of memory in mid-run: see `oom_steps`, which does it.

`StepDownMixin` stands in front of a ``transformers.Trainer`` subclass, behind the mixins that leave steps out or look
at their results: what they see is the micro-step that succeeded.

Covered: training on one process, and on several under DistributedDataParallel. Not covered, where the error ends the
run: evaluation, clipping and the optimizer's own step; FSDP, DeepSpeed, tensor and context parallelism, static graphs;
memory of the host. Batches that `memory.stepdown` does not know (preference pairs, images) are not cut: for them, one
shortage is the end.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from typing_extensions import override

from hf_rocm_tune.memory.fragmentation import read
from hf_rocm_tune.memory.stepdown import Part, split
from hf_rocm_tune.ranks.agree import on_main_process
from hf_rocm_tune.training.oom_average import averager
from hf_rocm_tune.training.oom_faults import StepFaults, StepFaultSpec
from hf_rocm_tune.training.oom_state import read_divisor
from hf_rocm_tune.training.oom_steps import StepDown
from hf_rocm_tune.transfer import map_tensors

if TYPE_CHECKING:
    from torch import Tensor, nn
    from transformers import Trainer as _Base

    from hf_rocm_tune.ranks.fsdp import Traffic
    from hf_rocm_tune.ranks.gradients import GradientCheck
else:
    _Base = object


class StepDownMixin(_Base):
    """See the module's description.

    Args:
        on_oom: ``step_down``: a step that runs out of memory is done again with smaller micro-batches; ``stop``: it
            ends the run, and gradients are averaged during the last backward of a step instead of after it.

    Raises:
        UsageError: ``HF_ROCM_TUNE_STEP_FAULT`` is wrong.
        OutOfMemoryError: from `train`, when a micro-batch that cannot be made smaller does not fit.
    """

    _gradient_check: GradientCheck | Traffic | None  # the ranks have it
    _step_down: StepDown | None = None

    def __init__(self, *arguments: Any, on_oom: Literal["step_down", "stop"] = "step_down", **keywords: Any) -> None:
        self._on_oom = on_oom
        spec = StepFaultSpec.from_environment()
        super().__init__(*arguments, **keywords)
        self.step_faults = StepFaults(spec, rank=self.args.process_index, report=self.transfer_report)

    def micro_batches(self) -> dict[str, Any]:
        """For the report: whether they are cut when memory is short, and by what they are cut at present."""
        divisor = 1 if self._step_down is None else self._step_down.divisor
        return {"steps_down": self._step_down is not None, "micro_batch_divisor": divisor}

    @override
    def log(self, logs: dict[str, float], *arguments: Any, **keywords: Any) -> None:
        """As upstream; on an accelerator the allocator's figures stand beside the training loss."""
        if "loss" in logs and self.args.device.type == "cuda":
            logs.update(read(self.args.device).for_log())
        super().log(logs, *arguments, **keywords)

    @override
    def create_accelerator_and_postprocess(self) -> None:
        """As upstream; what is gathered in a micro-step then waits for no rank that is out of memory."""
        super().create_accelerator_and_postprocess()
        if self.args.world_size > 1:
            self.accelerator.gather = partial(self._gather, self.accelerator.gather)

    @override
    def _prepare_for_training(self, max_steps: int, train_dataloader: Any, resume_from_checkpoint: Any) -> Any:
        prepared = super()._prepare_for_training(max_steps, train_dataloader, resume_from_checkpoint)
        self._step_down = self._new_step_down(resumed=bool(resume_from_checkpoint))
        return prepared

    def _new_step_down(self, *, resumed: bool) -> StepDown | None:
        ddp = averager(self.model_wrapped)
        shared = max(self.get_tp_size(), self.get_cp_size(), self.get_sp_size(), self.args.n_gpu) > 1
        if self._on_oom == "stop" or shared or self._is_sharded() or (self.args.world_size > 1 and ddp is None):
            return None
        divisor = on_main_process(
            lambda: read_divisor(
                Path(self.args.output_dir),
                run_id=self.run_id,
                batch_size=self.args.per_device_train_batch_size,
                resumed=resumed,
            )
        )
        return StepDown(self, averager=ddp, divisor=divisor)

    @override
    def get_batch_samples(self, epoch_iterator: Iterator[Any], num_batches: int, device: Any) -> tuple[list[Any], Any]:
        """As upstream: an optimizer step begins."""
        if self._step_down is not None:
            self._step_down.forget()
        return super().get_batch_samples(epoch_iterator, num_batches, device)

    @override
    def training_step(self, model: nn.Module, inputs: Any, num_items_in_batch: Any = None) -> Tensor:
        """As upstream, again and smaller if need be; averages of gradients are judged before they are clipped."""
        stock = super().training_step
        if not isinstance(inputs, Mapping):  # prompts from which a trainer generates its batch: not ours to cut
            loss: Tensor = stock(model, inputs, num_items_in_batch)
        elif self._step_down is not None:
            loss = self._step_down.run(stock, model, inputs, num_items_in_batch)
        else:
            (part,) = split(self.host_batch(inputs), 1, labels_shifted=self._loss_shifts_labels)
            with self.step_fault(model, part):
                loss = stock(model, inputs, num_items_in_batch)
        check = self._gradient_check
        if check is not None and (check.pending or self.accelerator.sync_gradients):
            check.settle(step=self.state.global_step + 1)
        return loss

    @override
    def compute_loss(self, *arguments: Any, **keywords: Any) -> Any:
        """As upstream; a mean over a part of a micro-batch counts by the part's labels."""
        result = super().compute_loss(*arguments, **keywords)
        factor = 1.0 if self._step_down is None else self._step_down.loss_factor
        if factor == 1.0:
            return result
        return (result[0] * factor, *result[1:]) if isinstance(result, tuple) else result * factor

    def step_fault(self, model: nn.Module, part: Part) -> AbstractContextManager[None]:
        """Within it the step that is under way is harmed, where that was asked for."""
        step = self.state.global_step + 1
        return self.step_faults.during(model, step=step, rows=len(part.units), tokens=part.tokens)

    def host_batch(self, inputs: Mapping[str, Any]) -> dict[str, Any]:
        """The host tensors that a batch came from; what came from nowhere that is known here stays as it is."""
        return dict(map_tensors(inputs, self._host_source))

    def _gather(self, stock: Callable[[Any], Any], tree: Any) -> Any:
        return stock(tree) if self._step_down is None else self._step_down.gather(stock, tree)
