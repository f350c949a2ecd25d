"""A trainer that trains on verified bytes only: every place where we stand in front of upstream, in call order.

    class VerifiedSFTTrainer(VerifiedTransferMixin, SFTTrainer): ...

is a complete definition, and a user can do the same with a trainer of their own. Batches, evaluation batches, weights,
adapters and optimizer state pass one door, the :class:`~hf_rocm_tune.transfer.Mover`; Accelerate places nothing.
Averages of gradients that DistributedDataParallel makes are judged before they are clipped and used.

Not covered: tensors that a data collator or a custom ``compute_loss`` puts on the device by itself (refused under
``verify="full"``), and weights that were on an accelerator before the model was handed over and are not equal to their
files (named in the coverage).
"""

from __future__ import annotations

import copy
import functools
import logging
import os
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from accelerate.utils import extract_model_from_parallel
from transformers import Trainer, TrainerCallback
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR, TrainOutput
from trl import SFTTrainer
from typing_extensions import override

from hf_rocm_tune import upstream
from hf_rocm_tune.data.loader import Prefetch, verify_loader
from hf_rocm_tune.errors import CorruptionError, SeamError, UsageError
from hf_rocm_tune.models.adapter import LearningRates, share_inputs
from hf_rocm_tune.models.loading import rewrites_base, verified_loading
from hf_rocm_tune.models.placement import (
    Coverage,
    attest,
    coverage,
    digests_before,
    mark_computed,
    mark_rewritten,
    place,
    tensors_of,
)
from hf_rocm_tune.models.quantised import (
    follow_bias_casts,
    follow_written_buffers,
    keep_trainable_on_cpu,
    writable_buffers,
)
from hf_rocm_tune.models.recompute import recompute
from hf_rocm_tune.models.shards import is_sharded, local
from hf_rocm_tune.models.split import SplitMover
from hf_rocm_tune.ranks.agree import everyone
from hf_rocm_tune.ranks.averaging import Compression, SyncSettings, Way
from hf_rocm_tune.training import ranks
from hf_rocm_tune.training.checkpoint import Checkpoints, Uploader
from hf_rocm_tune.training.device_memory import FragmentationCallback, read
from hf_rocm_tune.training.faults import Crashes, StepFaults, StepFaultSpec
from hf_rocm_tune.training.guard import MovementCallback, TrainingGuard
from hf_rocm_tune.training.interrupt import HeartbeatCallback, InterruptCallback, StopRequests
from hf_rocm_tune.training.metrics import Notes, is_tried
from hf_rocm_tune.training.offload import ActivationOffload
from hf_rocm_tune.training.oom import OutOfMemoryRecovery, parts_of, recovery_for
from hf_rocm_tune.training.pipeline import Pipeline, flies
from hf_rocm_tune.training.refusals import OptimizerTablesCallback, with_offloads
from hf_rocm_tune.training.saved_state import adapter_on_host
from hf_rocm_tune.training.sentinels import SentinelCallback, is_foreign
from hf_rocm_tune.training.supervised import Heartbeat, Phase, PulseListener
from hf_rocm_tune.training.telemetry import MetricsCallback, Telemetry
from hf_rocm_tune.transfer import (
    FaultSpec,
    Mover,
    TransferReport,
    TransferSettings,
    map_tensors,
    redirected,
    tree_tensors,
)

if TYPE_CHECKING:
    from torch import Tensor, nn
    from torch.utils.data import DataLoader

    from hf_rocm_tune.training.owner import Owner as _Base
    from hf_rocm_tune.training.ranks import ShardedModel, WholeState
    from hf_rocm_tune.transfer import Digest
else:
    _Base = object

logger = logging.getLogger(__name__)

Batch = dict[str, Any]


class VerifiedTransferMixin(_Base):
    """Stands in front of a trainer class; see the module's description.

    Args:
        mover: the door through which the model was loaded, so that its verdicts are known. Without one a mover is
            made, and a model that is already on an accelerator counts as unverified.
        transfer_settings: how to verify, when no mover is given.
        sentinel_every: steps in which each frozen tensor is looked at once; 0 for never. Before a save all are.
        prefetch_batches: batches beyond the one in use that may be on their way to the device; 0: none, no overlap.
        compare_optimizer_every: steps between two comparisons of the optimizer's state over all ranks; 0 for never.
        consent_unverified: train although ``verify="full"`` did not reach every byte.
        recompute_layers: where checkpointing is on, of how many layers, from the first on, activations are recomputed
            whole, and of how many but for products and attention; None: of all, whole. See `models.recompute`.
        pipeline: of a split model several micro-batches are under way at once, where that can be; only for losses
            that run the model once, all of its layers as they are. See :mod:`~hf_rocm_tune.training.pipeline`.
        on_oom: ``step_down``: a step that runs out of memory is done again with smaller micro-batches, see
            :mod:`~hf_rocm_tune.training.oom`; ``stop``: it ends the run.
        max_skipped_steps: how many of the last 100 steps may be left out because they are not finite.
        grad_sync: how several ranks average gradients: ``ddp``, over the process group; ``host``, through host memory
            over a gloo group, whatever the process group is.
        grad_compression: what travels between the ranks: ``none``, ``fp16``, ``bf16``, or ``powersgd`` (with ``ddp``).
        tensor_parallel: the ranks compute each layer together, see `ranks.tensor_parallel`; ``grad_sync`` says how
            they send what is added up.
        run_id: goes into every manifest.
        skip_steps: numbers of optimizer steps, from 1 on, that are left out, equal on all ranks: they are counted and
            take their batches from the loader, but nothing is computed.
        publisher: who uploads, on the first rank; needed for ``push_to_hub``.
        card_writer: writes ``README.md`` into each directory that is saved, on rank 0, when its tensors have been
            compared and before its manifest is made; None for upstream's cards.
        telemetry: of the card of this process, for the logs.
        listener: hears each sign of life, beside the supervisor.
        plain_lora: save the result of an adapter that began with a part of the weights (PiSSA, OLoRA) as plain LoRA for
            the original weights.
        rates: learning rates that differ; see `LearningRates`.

    Attributes:
        mover, recompute_layers, run_id, skip_steps: see above.
        transfer_report: counters and incidents.
        grad_sync: averages gradients.
        stop_requests: the signals that end a training early; its ``installed`` may be entered around more than `train`.

    Raises:
        SeamError: an upstream library has moved a place on which verification depends.
        CorruptionError: a tensor could not be brought to the device right.
        MemoryFaultError: from `train`, a weight is not what it was.
        DivergedError: from `train`, nothing is learned, or weights that are to be saved are not finite.
        OutOfMemoryError: from `train`, when a micro-batch that cannot be made smaller does not fit.
        Interrupted: from `train`, after the checkpoint, when a signal asked for the end.
        UsageError: settings that do not go together, or ``HF_ROCM_TUNE_STEP_FAULT`` or ``HF_ROCM_TUNE_CRASH`` is wrong.
    """

    def __init__(
        self,
        *arguments: Any,
        mover: Mover | None = None,
        transfer_settings: TransferSettings | None = None,
        sentinel_every: int = 50,
        prefetch_batches: int = 1,
        compare_optimizer_every: int = 0,
        consent_unverified: bool = False,
        recompute_layers: tuple[int, int] | None = None,
        pipeline: bool = False,
        on_oom: Literal["step_down", "stop"] = "step_down",
        max_skipped_steps: int = 5,
        grad_sync: Way = "ddp",
        grad_compression: Compression = "none",
        tensor_parallel: bool = False,
        run_id: str = "",
        skip_steps: Collection[int] = (),
        publisher: Uploader | None = None,
        card_writer: Callable[[Path], None] | None = None,
        telemetry: Telemetry | None = None,
        listener: PulseListener | None = None,
        plain_lora: bool = False,
        rates: LearningRates | None = None,
        **keywords: Any,
    ) -> None:
        upstream.check_all()
        upstream.check_overrides(type(self))
        args = keywords.get("args", arguments[1] if len(arguments) > 1 else None)
        self.mover = mover or _new_mover(args, transfer_settings)
        self.transfer_report: TransferReport = self.mover.report
        self.run_id, self.skip_steps = run_id, frozenset(skip_steps)
        self.stop_requests = StopRequests()
        self.grad_sync = ranks.GradientSync(SyncSettings(way=grad_sync, compression=grad_compression))
        self._checkpoints = Checkpoints(self, publisher)
        self._card_writer = card_writer
        self._consent_unverified, self._on_oom = consent_unverified, on_oom
        self.recompute_layers = recompute_layers
        self._crashes, self._heartbeat = Crashes(), Heartbeat(listener=listener)
        self._guard = TrainingGuard(self, max_skipped=max_skipped_steps)
        self._interrupts = InterruptCallback(self.stop_requests)
        self._prefetch_batches = prefetch_batches
        self._training_prefetch = Prefetch(self.mover, prefetch_batches)
        self._recovery: OutOfMemoryRecovery | None = None
        self._references: list[nn.Module] = []  # models that are only evaluated, as DPO's reference
        self._tensor_parallel = tensor_parallel
        self._shards: ShardedModel | None = None
        self._pipeline: Pipeline | None = None
        self._operations: int | None = None  # floating point operations a token
        step_faults = StepFaultSpec.from_environment()
        offloads = bool(getattr(args, "activation_offloading", False))
        filters_losses = args is not None and args.logging_nan_inf_filter and is_tried("transformers")
        if args is not None:
            args = _own_arguments(args)
            args.logging_nan_inf_filter &= not filters_losses
            if "args" in keywords:
                keywords["args"] = args
            else:
                arguments = (arguments[0], args, *arguments[2:])
        model = keywords.get("model", arguments[0] if arguments else None)
        before: dict[str, Digest] = {}
        if isinstance(model, torch.nn.Module):
            attest(model, self.mover)
            before = digests_before(model, self.mover) if rewrites_base(keywords.get("peft_config")) else {}
        with ExitStack() as stack:
            stack.enter_context(verified_loading(self.mover))
            stack.enter_context(redirected(self.mover, stage="adapter"))  # PEFT moves fresh adapters by itself
            super().__init__(*arguments, **keywords)
        if isinstance(self.mover, SplitMover):
            hops = ranks.carry_between_cards(self.model, self.mover)
            if pipeline and flies(self):
                self._pipeline = Pipeline(hops, self.mover)
        self._offload: ActivationOffload | None = None
        if offloads:
            self.args.activation_offloading = True
            self._offload = ActivationOffload(self.model, self.mover)
        self._notes = Notes(self, filters_losses=filters_losses)
        self.step_faults = StepFaults(step_faults, rank=self.args.process_index, report=self.transfer_report)
        mark_rewritten(self.model, before, self.mover)
        self._rates = rates or LearningRates()
        mark_computed(self.model, self.mover)
        share_inputs(self.model)
        self._place(self.model)
        if before and plain_lora:
            self._checkpoints.start = adapter_on_host(self.model, self.mover, None)
        self._sentinel = SentinelCallback(
            self.model,
            self.mover,
            every=sentinel_every,
            compare_optimizer_every=compare_optimizer_every,
            excuse_writes=is_foreign(type(self)),
            references=() if getattr(self.args, "sync_ref_model", False) else self._references,
        )
        for callback in (
            MovementCallback(self.model, self._guard.tell),
            self._interrupts,
            HeartbeatCallback(self._heartbeat),
            self._sentinel,
            OptimizerTablesCallback(),
            FragmentationCallback(self.mover.device, self.transfer_report),
        ):
            self.add_callback(callback)
        # Before all others: services hear only what a callback before them has added to a log.
        self.callback_handler.callbacks.insert(0, MetricsCallback(self.transfer_report, telemetry, self._memory))
        self.callback_handler.call_event = partial(self._call_event, self.callback_handler.call_event)

    # ---- while the trainer is built -------------------------------------------------------------------------

    @override
    def create_accelerator_and_postprocess(self) -> None:
        """As upstream; the accelerator then leaves models where the mover put them, and clips over all of them."""
        with ranks.before_accelerator(self.args, tensor_parallel=self._tensor_parallel):
            super().create_accelerator_and_postprocess()
        # Even with the device right, `model.to("cpu:0")` copies every weight that is on "cpu".
        self.accelerator.prepare_model = partial(self._prepare_in_place, self.accelerator.prepare_model)
        if isinstance(self.mover, SplitMover):
            self.accelerator.clip_grad_norm_ = partial(self._clip_over_cards, self.mover)
        if self._tensor_parallel:
            self._shards = ranks.TensorParallelModel(
                self.accelerator, self.mover, self.args.world_size, through_host=self.grad_sync.way == "host"
            )
        elif self.is_fsdp_enabled:
            self._shards = ranks.ShardedModel(self.accelerator, self.mover, self.args.world_size)
        elif ranks.is_wanted(os.environ):
            raise SeamError("FSDP was asked for and accelerate has not made it: use the version in pyproject.toml")

    @override
    def _move_model_to_device(self, model: nn.Module, device: torch.device) -> None:
        del device  # the mover knows better: it has the trainer's, or those of a split
        self._place(model)

    @override
    def init_hf_repo(self, token: str | None = None, private: bool | None = None) -> None:
        """Upstream makes the repository here; whoever uploads has made it, or will."""
        del token, private
        self.hub_model_id = self.args.hub_model_id

    def _prepare_in_place(
        self,
        stock: Callable[..., nn.Module],
        model: nn.Module,
        device_placement: bool | None = None,
        evaluation_mode: bool = False,
    ) -> nn.Module:
        plain = extract_model_from_parallel(model, keep_torch_compile=False)
        if evaluation_mode:
            device_placement = False  # GRPO asks for its reward models to be moved: they are below
        if evaluation_mode and not any(plain is known for known in (self.model, *self._references)):
            attest(model, self.mover)
            place(model, self.mover)
            follow_bias_casts(model, self.mover)
            self._references.append(model)
        return stock(model, device_placement=bool(device_placement), evaluation_mode=evaluation_mode)

    def _place(self, model: nn.Module) -> None:
        if self._shards is not None:
            self._shards.shard(model)
        else:
            place(model, self.mover)
        keep_trainable_on_cpu(model)
        follow_bias_casts(model, self.mover)
        follow_written_buffers(model, self.mover)

    @override
    def create_optimizer(self, *arguments: Any, **keywords: Any) -> Any:
        """As upstream; parameters with a learning rate of their own then have groups of their own."""
        optimizer = super().create_optimizer(*arguments, **keywords)
        self._rates.split(self.model, optimizer)
        return optimizer

    # ---- a training begins ----------------------------------------------------------------------------------

    @override
    def train(self, resume_from_checkpoint: Any = None, *arguments: Any, **keywords: Any) -> TrainOutput:
        """As upstream, where the coverage is complete; Ctrl-C and SIGTERM write a checkpoint and end the training."""
        self.require_coverage()
        with self.stop_requests.installed():
            self._strike("start", 0)
            resume_from_checkpoint = self._checkpoints.check_start(resume_from_checkpoint)
            return super().train(resume_from_checkpoint, *arguments, **keywords)

    @override
    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        self._load_weights(
            resume_from_checkpoint, partial(super()._load_from_checkpoint, resume_from_checkpoint, model)
        )

    @override
    def _prepare_for_training(self, max_steps: int, train_dataloader: Any, resume_from_checkpoint: Any) -> Any:
        self._choose_recomputed()
        replicated = self.args.world_size > 1 and not is_sharded(self.model)
        if replicated:
            self.grad_sync.before_wrapping(self.model, self._sentinel)
        prepared = super()._prepare_for_training(max_steps, train_dataloader, resume_from_checkpoint)
        if replicated:
            self._sentinel.check_replicas(tensors_of(self.model), "after DistributedDataParallel")
        if self.args.world_size > 1:
            traffic = self._shards.traffic if self._shards is not None else None
            self.grad_sync.start(self.model_wrapped, self.mover, traffic, max_steps=max_steps)
        if self.whole_state is not None:
            self.whole_state.optimizer = self.optimizer
        self._recovery = recovery_for(self, on_oom=self._on_oom, resumed=bool(resume_from_checkpoint))
        return prepared

    @override
    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        self._checkpoints.load_optimizer(checkpoint, super()._load_optimizer_and_scheduler)

    @override
    def _load_scaler(self, checkpoint: str | None) -> None:
        self._checkpoints.load_scaler(checkpoint)

    @override
    def _load_rng_state(self, checkpoint: str | None) -> None:
        self._checkpoints.load_random_state(checkpoint, super()._load_rng_state)

    # ---- batches --------------------------------------------------------------------------------------------

    @override
    def _get_dataloader(self, *arguments: Any, **keywords: Any) -> DataLoader[Any]:
        prefetch = Prefetch(self.mover, self._prefetch_batches)
        loader = verify_loader(super()._get_dataloader(*arguments, **keywords), prefetch)
        if keywords.get("is_training"):
            self._training_prefetch = prefetch
        key = keywords.get("dataloader_key")
        if key is not None and self.args.dataloader_persistent_workers:
            self._eval_dataloaders[key] = loader  # filled inside with the stock object
        return loader

    @override
    def get_batch_samples(
        self, epoch_iterator: Iterator[Any], num_batches: int, device: torch.device
    ) -> tuple[list[Any], Any]:
        """As upstream: an optimizer step begins; its window is a list that begins transfers as it is iterated."""
        self._guard.begin_step()
        if self._recovery is not None:
            self._recovery.begin_step()
        batches, count = super().get_batch_samples(epoch_iterator, num_batches, device)
        window = self._training_prefetch.window(batches)
        if self._pipeline is not None:
            self._pipeline.begin_step(window)
        return window, count

    @override
    def _get_num_items_in_batch(self, batch_samples: list[Batch], device: torch.device) -> Any:
        """Counts label tokens on the host source, for the device's copies have no verdict yet.

        Like upstream's, a tensor on the device; but nothing crosses and nothing is waited for: ranks add up over gloo,
        and the number reaches the device as an argument of the kernel that fills the tensor.
        """
        sources = [map_tensors(batch, self._source_of) for batch in batch_samples]
        across = self.args.average_tokens_across_devices
        self.args.average_tokens_across_devices = False  # added up below
        try:
            count = super()._get_num_items_in_batch(sources, torch.device("cpu"))
        finally:
            self.args.average_tokens_across_devices = across
        self.mover.require_unchanged(sources)
        if not torch.is_tensor(count):
            return count
        counted = everyone([count.item()]) if across else [[count.item()]]
        return torch.full((), sum(row[0] for row in counted), dtype=count.dtype, device=self.mover.device)

    @override
    def training_step(self, model: nn.Module, inputs: Any, num_items_in_batch: Any = None) -> Tensor:
        """As upstream, again and smaller if need be; averages of gradients are judged before they are clipped.

        The batch of a step that is left out gets its verdict and is not used.
        """
        if self.state.global_step + 1 in self.skip_steps:
            self._prepare_inputs(inputs)
            self._give_the_scaler_something()
            return torch.zeros((), device=self.args.device)
        self._strike("step", self.state.global_step + 1)
        stock = super().training_step
        if self._pipeline is not None and (self._recovery is None or self._recovery.divisor == 1):
            stock = partial(self._pipeline.step, stock)
        if not isinstance(inputs, Mapping):  # prompts from which a trainer generates its batch: not ours to cut
            loss: Tensor = stock(model, inputs, num_items_in_batch)
        elif self._recovery is not None:
            loss = self._recovery.run(stock, model, inputs, num_items_in_batch)
        else:
            (part,) = parts_of(self, self.host_batch(inputs), 1)
            with self.step_fault(model, rows=len(part.units), tokens=part.tokens):
                loss = stock(model, inputs, num_items_in_batch)
        self.grad_sync.settle(step=self.state.global_step + 1, synced=self.accelerator.sync_gradients)
        self._guard.remember(loss)
        return self._notes.loss_to_log(loss)

    @override
    def _prepare_inputs(self, inputs: Batch) -> Batch:
        """The last guard: every tensor has its verdict before ``forward`` sees it."""
        self.mover.step = self.state.global_step + 1
        self.mover.settle(inputs)
        unknown = [tensor for tensor in tree_tensors(inputs) if self.mover.provenance(tensor) is None]
        if any(tensor.device.type != "cpu" for tensor in unknown):
            self._refuse_stray(inputs)
        if unknown:
            self.mover.require_unchanged(unknown)
            inputs = self.mover.begin(inputs)
            self.mover.settle(inputs)
        # Of prompts a trainer makes its batch by itself: generates, reads, scores and sends it, in this thread.
        makes = not isinstance(inputs, Mapping)
        with redirected(self.mover, stage="batches") if makes else nullcontext():
            batch: Batch = super()._prepare_inputs(inputs)
        if makes:
            self._choose_recomputed()  # for the generation checkpointing was off, and on again for all layers
        return batch

    @override
    def compute_loss(self, *arguments: Any, **keywords: Any) -> Any:
        """As upstream; a mean over a part of a micro-batch counts by the part's labels."""
        with self._notes.taken(), self._steady_checkpointing(), self._offload or nullcontext():
            result = super().compute_loss(*arguments, **keywords)
        factor = 1.0 if self._recovery is None else self._recovery.loss_factor
        if factor == 1.0:
            return result
        return (result[0] * factor, *result[1:]) if isinstance(result, tuple) else result * factor

    @override
    def _get_grad_norm(self, model: nn.Module, grad_norm: Any = None) -> Any:
        """As upstream. Trained state is looked at here, before the optimizer uses it, and the step is judged."""
        self._sentinel.look()
        norm = super()._get_grad_norm(model, grad_norm=grad_norm)
        self._guard.judge(model, norm, self._sentinel.settle)
        return norm

    @override
    def floating_point_ops(self, inputs: Batch) -> int:
        """As upstream, which walks over all modules in each micro-step: here they are counted once."""
        stock = super().floating_point_ops
        name = getattr(self.model, "main_input_name", "input_ids")
        if stock.__func__ is not Trainer.floating_point_ops or name not in inputs or not inputs[name].numel():
            return int(stock(inputs))
        if self._operations is None:
            self._operations = stock(inputs) // inputs[name].numel()
        return int(inputs[name].numel() * self._operations)

    @override
    def evaluation_loop(self, *arguments: Any, **keywords: Any) -> Any:
        """As upstream; its first batch may take its time."""
        self.beat("evaluate")
        if self._tensor_parallel:
            # Each rank has all rows; of gathered ones upstream would count those of a short last batch half.
            self.gather_function = self._own_rows
        return super().evaluation_loop(*arguments, **keywords)

    @override
    def prediction_step(self, *arguments: Any, **keywords: Any) -> Any:
        """As upstream; the weights that FSDP2 brought together for it are judged."""
        result = super().prediction_step(*arguments, **keywords)
        if self._shards is not None and self._shards.traffic is not None:
            self._shards.traffic.settle(step=self.state.global_step)
        return result

    @override
    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """As upstream; what TRL has noted since the last log is computed and read now."""
        self._notes.settle()
        super().log(logs, start_time)

    @override
    def _determine_best_metric(self, metrics: dict[str, float], trial: Any) -> bool:
        # With save_strategy="best" this alone decides about the save, and would undo one that was asked for.
        return bool(super()._determine_best_metric(metrics, trial)) or self._interrupts.save_wanted

    # ---- saving ---------------------------------------------------------------------------------------------

    @override
    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        self.beat("save")
        self._strike("save", self.state.global_step)
        final = Path(self._get_output_dir(trial=trial)) / f"{PREFIX_CHECKPOINT_DIR}-{self.state.global_step}"
        self._checkpoints.save(partial(super()._save_checkpoint, model, trial), final)
        self.beat("between")

    @override
    def _get_output_dir(self, trial: Any) -> str:
        staging = self._checkpoints.staging
        return str(staging) if staging is not None else super()._get_output_dir(trial)

    @override
    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        self._checkpoints.save_optimizer(super()._save_optimizer_and_scheduler, output_dir)

    @override
    def _save_scaler(self, output_dir: str) -> None:
        self._checkpoints.attempt(super()._save_scaler, output_dir)

    @override
    def _save_rng_state(self, output_dir: str) -> None:
        self._checkpoints.save_random_state(super()._save_rng_state, output_dir)

    @override
    def create_model_card(self, *arguments: Any, **keywords: Any) -> None:
        """As upstream, where nobody else writes the card."""
        if self._card_writer is None:
            self._checkpoints.attempt(partial(super().create_model_card, *arguments, **keywords))

    @override
    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Save model, tokenizer and arguments: staged, compared with what is live, then renamed one by one.

        A manifest that calls ``output_dir`` finished is removed first; `seal_output` writes the new one. Nothing is
        pushed here, because what has no manifest is not published: see `push_to_hub`.
        """
        self._checkpoints.save_model(output_dir, for_push=_internal_call)

    @override
    def _push_from_checkpoint(self, checkpoint_folder: str) -> None:
        self._checkpoints.push_checkpoint(Path(checkpoint_folder))

    @override
    def _load_best_model(self) -> None:
        self._load_weights(self.state.best_model_checkpoint, super()._load_best_model)

    @override
    def push_to_hub(self, *arguments: Any, **keywords: Any) -> Any:
        """Save and seal the result where that has not been done, and have the publisher upload it. Collective."""
        del arguments, keywords  # the publisher has its own
        return self._checkpoints.push_result()

    # ---- for whoever runs the trainer -----------------------------------------------------------------------

    def require_coverage(self) -> None:
        """Refuses to train when ``verify="full"`` does not reach every byte of the model, unless the user consents."""
        if (missing := self._not_covered()) is not None:
            raise UsageError(missing)

    def weight_coverage(self) -> Coverage:
        """How much of what the models keep on their device was verified on the way there, and what others offload."""
        found = coverage(self.model, self.mover)
        for model in self._references:
            found += coverage(model, self.mover)
        return with_offloads(found, self.args, deepspeed=self.is_deepspeed_enabled)

    def seal_output(self, output_dir: str | None = None, *, also: Iterable[str] = ()) -> None:
        """Write the final ``integrity.json`` over the files of the last `save_model` and ``also``: the run is done.

        Raises:
            OSError: a named file is not there, or the disk is full; then the directory does not look finished.
            CorruptionError: files of the result change again and again.
        """
        self._checkpoints.seal(Path(output_dir or self.args.output_dir), also)

    def beat(self, phase: Phase) -> None:
        """One sign of life for the watchdog, and for the supervisor where there is one."""
        self._heartbeat.beat(step=self.state.global_step, phase=phase)

    def describe(self) -> dict[str, Any]:
        """What the report says of this training beside the counters, as this rank saw it."""
        return {
            "grad_sync": self.grad_sync.describe(self.model, self.args.world_size),
            "split": ranks.describe_split(self.mover, self.model, self._pipeline.in_flight if self._pipeline else 1)
            if isinstance(self.mover, SplitMover)
            else None,
            "memory": {
                "steps_down": self._recovery is not None,
                "micro_batch_divisor": 1 if self._recovery is None else self._recovery.divisor,
                "recompute_layers": self.recompute_layers,
                "offload_host_bytes": self._offload.host_bytes if self._offload else 0,
            },
            "crash_injection": self._crashes.text,
            "shard_seconds": 0.0 if self._shards is None else self._shards.seconds,
        }

    # ---- for the objects that the trainer owns --------------------------------------------------------------

    @property
    def devices(self) -> tuple[torch.device, ...]:
        """Where the model is: the trainer's device, or those of all cards of a split."""
        cards = self.mover if isinstance(self.mover, SplitMover) and not self.mover.logical else None
        return tuple(card.device for card in cards.cards) if cards else (self.args.device,)

    def fewer_in_flight(self) -> bool:
        """Fewer micro-batches are under way at once from now on; False where each is alone already."""
        return self._pipeline is not None and self._pipeline.fewer()

    @property
    def is_sharded(self) -> bool:
        """Whether each rank holds its part of the model."""
        elsewhere = self.is_deepspeed_enabled or self.is_fsdp_enabled or self.is_distributed_loading_by_transformers
        return bool(elsewhere or self._tensor_parallel)

    @property
    def whole_state(self) -> WholeState | None:
        """Brings together what is saved of a model that FSDP2 has sharded; None for any other."""
        return None if self._shards is None else self._shards.whole

    def host_batch(self, inputs: Mapping[str, Any]) -> dict[str, Any]:
        """The host tensors that a batch came from; what came from nowhere that is known here stays as it is."""
        return dict(map_tensors(inputs, self._source_of))

    def unchanged(self, batch: Mapping[str, Any]) -> Mapping[str, Any]:
        """A batch of host tensors that hold what the loader gave; what it did not give is not looked at."""
        self.mover.require_unchanged(batch)
        return batch

    def step_fault(self, model: nn.Module, *, rows: int, tokens: int) -> AbstractContextManager[None]:
        """Within it the step that is under way is harmed, where that was asked for."""
        return self.step_faults.during(model, step=self.state.global_step + 1, rows=rows, tokens=tokens)

    def place_tensor(self, tensor: Tensor, *, name: str, stage: str) -> Tensor:
        """Brings one host tensor of a checkpoint to the device, verified; ``stage`` is "adapter" or "optimizer".

        State of the optimizer is called after its parameter, by which a split knows its card.
        """
        if found := re.match(r"optimizer\.state\.(\d+)\.(.*)", name):
            names = {id(parameter): each for each, parameter in self.model.named_parameters()}
            parameters = [parameter for group in self.optimizer.param_groups for parameter in group["params"]]
            name = f"{names.get(id(parameters[int(found[1])]), found[1])}/{found[2]}"
        return self.mover.move(tensor, name=name, stage=stage)

    def before_save(self) -> None:
        """Looks at every weight, on every rank, before anything is written; what it raises prevents the save."""
        self._guard.require_finite(self.model)
        self._sentinel.check_all(self.state.global_step)
        if (missing := self._not_covered()) is not None:
            raise CorruptionError(f"since the start of the training {missing}")

    def before_manifest(self, directory: Path) -> None:
        """The files in ``directory`` are what is live: is that what the last update has made?"""
        if self._card_writer is not None and self.is_world_process_zero():
            self._card_writer(directory)
        self._sentinel.check_trained(f"while saving at step {self.state.global_step}", self.state.global_step)

    def write_model(self, directory: str) -> None:
        if self._tensor_parallel and self.whole_state is not None:  # upstream would save each rank's parts
            state = self.whole_state.model()
            if self.args.should_save:
                self._save(directory, state_dict=state)
            return
        super().save_model(directory, _internal_call=True)

    # ---- details --------------------------------------------------------------------------------------------

    def _choose_recomputed(self) -> None:
        if self.recompute_layers is not None and self.args.activation_checkpointing:
            recompute(self.model, self.recompute_layers)

    @contextmanager
    def _steady_checkpointing(self) -> Iterator[None]:
        """TRL turns checkpointing off and on again round a reference's forward, which only ``use_reentrant`` asks for.

        Each time the choice of layers would be lost, and one more hook be left at the embeddings.
        """
        model: Any = self.model
        if isinstance(self, SFTTrainer) or (self.args.activation_checkpointing_kwargs or {}).get("use_reentrant"):
            yield
            return
        model.gradient_checkpointing_disable = model.gradient_checkpointing_enable = lambda *_, **__: None
        try:
            yield
        finally:
            del model.gradient_checkpointing_disable, model.gradient_checkpointing_enable

    def _load_weights(self, checkpoint: str, stock: Callable[[], None]) -> None:
        directory = Path(checkpoint)
        self._checkpoints.load_weights(directory, stock)
        for parameter in self.model.parameters():
            if parameter.requires_grad:
                self.mover.mark_derived(local(parameter), f"loaded from {directory.name}")
        for buffer in writable_buffers(self.model):
            self.mover.mark_derived(buffer, f"loaded from {directory.name}")
        self._sentinel.take()

    def _source_of(self, tensor: Tensor) -> Tensor:
        source = self.mover.host_source(tensor)
        return tensor if source is None else source

    def _refuse_stray(self, inputs: Batch) -> None:
        stray = [
            name
            for name, value in inputs.items()
            if torch.is_tensor(value) and value.device.type != "cpu" and self.mover.provenance(value) is None
        ]
        if self.mover.settings.verify == "full":
            raise CorruptionError(
                f"batch tensors {', '.join(stray)} were put on the device by something else than the mover, so their "
                "bytes cannot be verified: return host tensors from the data collator, or choose --verify sample"
            )

    def _clip_over_cards(self, mover: SplitMover, *given: Any, **more: Any) -> Tensor:
        return ranks.clip_over_cards(mover, ranks.cards_of_parameters(self.model, mover), *given, **more)

    def _own_rows(self, data: Any) -> Any:
        """As ``Accelerator.gather_for_metrics`` with a single process: rows that fill up the last batch are dropped."""
        state = self.accelerator.gradient_state
        last = state.remainder if state.end_of_dataloader and state.remainder > 0 else None
        return map_tensors(data, lambda each: each[:last])

    def _memory(self) -> dict[str, float]:
        return read(self.args.device).for_log() if self.args.device.type == "cuda" else {}

    def _call_event(self, stock: Callable[..., Any], event: str, *arguments: Any, **keywords: Any) -> Any:
        """Tells callbacks of an event. What a user's callback writes to trained weights is right from then on."""
        written = _has_writer(event, *map(type, self.callback_handler.callbacks))
        if written and event != "on_optimizer_step":  # the update has just changed them
            self._sentinel.look()
        result = stock(event, *arguments, **keywords)
        if written:
            self._sentinel.take()
        return result

    def _strike(self, at: str, step: int) -> None:
        if self._crashes.text is not None:
            self._crashes.strike(at, step, directory=Path(self.args.output_dir), run_id=self.run_id)

    def _give_the_scaler_something(self) -> None:
        """The gradient scaler of fp16 refuses a step without any gradient: zeros let only the moments decay."""
        if self.accelerator.scaler is None:
            return
        for parameter in self.model.parameters():
            if parameter.requires_grad and parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)

    def _not_covered(self) -> str | None:
        """What ``verify="full"`` does not reach, and the user has not consented to; None for nothing."""
        found = self.weight_coverage()
        if self.mover.settings.verify != "full" or found.complete or self._consent_unverified:
            return None
        share = 100 * found.verified_bytes / max(found.device_bytes, 1)
        by_reason: dict[str, list[str]] = {}
        for row in found.unverified:
            by_reason.setdefault(row["reason"], []).append(row["tensor"])
        named = [
            f"{names[0]}{f' and {len(names) - 1} more' if len(names) > 1 else ''} ({reason})"
            for reason, names in by_reason.items()
        ]
        return (
            f"--verify full covers {share:.4g} % of the model's bytes; not verified: {', '.join(named[:3])}. Hand the "
            "model over by name, or on the host (loaded without device_map and without .to()): the trainer moves it, "
            "verified; or consent with --consent_unverified (consent_unverified=True)"
        )


@functools.cache
def _has_writer(event: str, *callbacks: type) -> bool:
    """Whether one of these classes of callbacks has code of a user's for this event, which may write to weights."""
    stock = getattr(TrainerCallback, event, None)
    return any(is_foreign(each) and getattr(each, event, None) is not stock for each in callbacks)


class VerifiedSFTTrainer(VerifiedTransferMixin, SFTTrainer):
    """Supervised fine-tuning in which every weight and batch is verified on its way to the device."""


def _new_mover(args: Any, settings: TransferSettings | None) -> Mover:
    if args is None:
        from accelerate import PartialState

        device = PartialState().device
    else:
        device = args.device
    return Mover(device, settings=settings or TransferSettings(), faults=FaultSpec.from_environment())


def _own_arguments(args: Any) -> Any:
    args = copy.copy(args)
    args.dataloader_pin_memory = False  # the mover's ring is the pinned memory
    if args.enable_jit_checkpoint:
        # Upstream's own writes in place, and takes the end for a finished run.
        logger.warning("enable_jit_checkpoint is set to False: SIGTERM writes a verified checkpoint here without it")
        args.enable_jit_checkpoint = False
    if getattr(args, "activation_offloading", False):
        args.activation_offloading = False  # TRL's own goes round the mover
    return args
