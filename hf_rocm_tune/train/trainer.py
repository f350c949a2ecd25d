"""A mixin for `transformers.Trainer` subclasses that trains on verified data only. Overrides stand in call order.

Batches, weights, adapters and optimizer state go to the device through the :class:`~hf_rocm_tune.transfer.Mover`;
Accelerate no longer moves tensors to the device. Not covered: tensors that a data collator or a custom
``compute_loss`` puts on the device itself (refused under ``verify="full"``), and weights that were on an accelerator
before the model was handed over and differ from their files (listed in the coverage).
"""

from __future__ import annotations

import itertools
import logging
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import torch
from accelerate.utils import extract_model_from_parallel
from transformers import TrainingArguments
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR, TrainOutput
from trl import SFTTrainer
from typing_extensions import override

from hf_rocm_tune import upstream
from hf_rocm_tune.cards.agree import all_gather_floats
from hf_rocm_tune.cards.strategies import strategy_of
from hf_rocm_tune.cards.strategy import ParallelStrategy, Stock
from hf_rocm_tune.data.loader import IN_ROW, Prefetch, verify_loader
from hf_rocm_tune.data.summary import CountedSFTTrainer
from hf_rocm_tune.errors import CorruptionError, UsageError
from hf_rocm_tune.lifecycle.heartbeat import Heartbeat, Phase
from hf_rocm_tune.models import loss, recompute
from hf_rocm_tune.models.adapter import keep_weights_from_vllm, share_inputs
from hf_rocm_tune.models.adapter_settings import AdapterSettings
from hf_rocm_tune.models.file_comparison import attest, record_file_digests
from hf_rocm_tune.models.loading import LoadReport, packed_experts, rewrites_base
from hf_rocm_tune.models.placement import (
    Coverage,
    coverage,
    digests_before,
    mark_computed,
    mark_computed_in_load,
    mark_rewritten,
    place,
)
from hf_rocm_tune.models.quantised import (
    follow_bias_casts,
    keep_trainable_on_cpu,
    running_statistics,
)
from hf_rocm_tune.models.shards import local
from hf_rocm_tune.models.streaming import streamer_of
from hf_rocm_tune.survive.checkpoint import Checkpoints
from hf_rocm_tune.survive.saved_state import HostCopy, adapter_on_host
from hf_rocm_tune.train.arithmetic import ArithmeticChecks, StepVerdict
from hf_rocm_tune.train.arithmetic.attention import AttentionChecks
from hf_rocm_tune.train.arithmetic.layers import HostLayers
from hf_rocm_tune.train.device_memory import FragmentationCallback
from hf_rocm_tune.train.events import surround
from hf_rocm_tune.train.faults import Crashes, StepFaults, StepFaultSpec
from hf_rocm_tune.train.guard import MovementCallback, TrainingGuard
from hf_rocm_tune.train.interrupt import HeartbeatCallback, InterruptCallback, StopRequests
from hf_rocm_tune.train.metrics import DeferredMetrics
from hf_rocm_tune.train.oom import OutOfMemoryRecovery, evaluated
from hf_rocm_tune.train.refusals import (
    OptimizerTablesCallback,
    as_usage_errors,
    missing_metric_as_usage_error,
    new_mover,
    own_arguments,
    require_isolation,
    with_offloads,
)
from hf_rocm_tune.train.replay import Replays
from hf_rocm_tune.train.report import write_report
from hf_rocm_tune.train.sentinels import SentinelCallback, has_writer, is_foreign
from hf_rocm_tune.train.settings import JobServices, TrainerSettings, with_keywords
from hf_rocm_tune.train.telemetry import MetricsCallback, Telemetry, show
from hf_rocm_tune.train.update import Schedule, UpdateChecks
from hf_rocm_tune.transfer import (
    Mover,
    TransferReport,
    TransferSettings,
    map_tensors,
    named_tensors,
)

if TYPE_CHECKING:
    from torch import Tensor, nn
    from torch.utils.data import DataLoader
    from transformers import Trainer as _Base

    from hf_rocm_tune.transfer import Digest
else:
    _Base = object

logger = logging.getLogger(__name__)

Batch = dict[str, Any]
_HOST = torch.device("cpu")


class VerifiedTransferMixin(_Base):
    """Goes in front of a trainer class: ``class VerifiedSFTTrainer(VerifiedTransferMixin, SFTTrainer): ...`` is a
    complete definition.

    Args:
        mover: the mover that loaded the model and so knows which tensors are verified. Without one, a mover is created
            and a model that is already on an accelerator counts as unverified.
        transfer_settings: how to verify, when no mover is given.
        strategy: of training over several ranks or cards, for this trainer alone; None: what the launcher's variables
            and the mover ask for. See `cards.strategy.ParallelStrategy`.
        settings: how steps are computed and checked; its fields may also be given as keywords.
        services: what a job of the command line does for its trainer; likewise.

    A step, by the methods that upstream calls in this order::

        get_batch_samples   label tokens are counted on the host; the batches' transfers begin
        training_step       for each micro-batch, repeated in smaller parts where memory runs out:
          _verified_inputs    waits until its bytes are verified on the device
          compute_loss        upstream's forward, its products sampled (`arithmetic`); then backward
          replays.compare     where a replay is due: the same micro-batch gives the same bits
          strategy.check      averages of gradients over the ranks
        _clip               the norm is kept
        host_layers.compute in the first step: a layer is computed again, here and on the host
        _check_step         before the optimizer: frozen weights, trained state and used batches have the digests they
                            had; loss and norm are finite; a step that is wrong is computed again, once
        optimizer.step      elements of the update are computed again on the host (`update`)
        log, evaluate, _save_checkpoint

    Attributes:
        mover, strategy, settings: see above.
        run_id, recompute_layers: of the settings.
        skip_steps: likewise, a set.
        transfer_report: counters and incidents.
        streamer: brings layers that are streamed to the card; None: there are none.
        stop_requests: the signals that end training early; its ``installed`` may be entered around more than `train`.

    Raises:
        SeamError: an upstream library has moved a place on which verification depends.
        CorruptionError: a tensor could not be transferred correctly.
        MemoryFaultError: from `train`, a weight changed in memory.
        DivergedError: from `train`, nothing is learned, or weights to be saved are not finite.
        OutOfMemoryError: from `train`, a micro-batch that cannot be split further does not fit.
        Interrupted: from `train`, after the checkpoint, when a signal asked for the end.
        UsageError: settings that do not go together, or ``HF_ROCM_TUNE_STEP_FAULT`` or ``HF_ROCM_TUNE_CRASH`` is wrong.
    """

    def __init__(
        self,
        *arguments: Any,
        mover: Mover | None = None,
        transfer_settings: TransferSettings | None = None,
        strategy: ParallelStrategy | None = None,
        settings: TrainerSettings | None = None,
        services: JobServices | None = None,
        **keywords: Any,
    ) -> None:
        upstream.check_all()
        upstream.check_overrides(type(self))
        step_faults = StepFaultSpec.from_environment()
        args = keywords.get("args")
        if args is None:
            args = next((argument for argument in arguments if isinstance(argument, TrainingArguments)), None)
        self.mover = mover or new_mover(args, transfer_settings)
        self.transfer_report: TransferReport = self.mover.report
        self.settings = settings = with_keywords(settings or TrainerSettings(), keywords)
        self._services = services = with_keywords(services or JobServices(), keywords)
        self.run_id = settings.run_id
        self.skip_steps = frozenset(settings.skip_steps)
        self.recompute_layers = settings.recompute_layers
        self.strategy = strategy or strategy_of(args, self.mover)
        self.loss_context = self._fit_upstream(args, settings.one_pass_loss)
        self._create_parts(settings, services)

        # Upstream's constructor loads a model that is given by name, and makes the adapter.
        own_args = own_arguments(args)
        if "args" in keywords:
            keywords["args"] = own_args
        arguments = tuple(own_args if argument is args else argument for argument in arguments)
        model = keywords.get("model", next(iter(arguments), None))
        peft_config = keywords.get("peft_config")
        self._handed_over = _modules_in(keywords.values())
        digests = self._digests_before(model, peft_config)
        with self._loading(model):
            super().__init__(*arguments, **keywords)

        self._given_scheduler = self.lr_scheduler  # None: upstream makes the one that the arguments name
        self.strategy.connect(self, one_by_one=step_faults is not None)
        self._metrics_queue = DeferredMetrics(self, filters_losses=getattr(own_args, "filters_losses", False))
        self.step_faults = StepFaults(step_faults, rank=self.args.process_index, report=self.transfer_report)
        self._place_verified(is_loaded_here=isinstance(model, str), digests_before=digests, peft_config=peft_config)
        self._watch_weights(settings)
        self._add_callbacks(services.telemetry)

    # ---- while the trainer is built -------------------------------------------------------------------------

    def _create_parts(self, settings: TrainerSettings, services: JobServices) -> None:
        """What the trainer owns and that needs no model yet, and its own state."""
        self.stop_requests = StopRequests()
        self._interrupts = InterruptCallback(self.stop_requests)
        self._heartbeat = Heartbeat(listener=services.listener)
        self._crashes = Crashes()
        self._checkpoints = Checkpoints(self, services.publisher)
        self._result_writer = services.write_result or partial(write_report, self)

        # Batches.
        self._training_prefetch = Prefetch(self.mover, settings.prefetch_batches)
        self._verified_loaders: WeakKeyDictionary[Any, DataLoader[Any]] = WeakKeyDictionary()  # by upstream's loader
        self._recovery = OutOfMemoryRecovery(self)

        # The checks of a step.
        checks_arithmetic = settings.check_arithmetic != "off"
        self._guard = TrainingGuard(self, max_skipped=settings.max_skipped_steps)
        self._arithmetic = ArithmeticChecks(settings.check_arithmetic, self.mover)
        self._attention = AttentionChecks(self, on=checks_arithmetic)
        self._replays = Replays(self, self._arithmetic, on=checks_arithmetic)
        self._updates = UpdateChecks(self.mover.report, on=checks_arithmetic)
        self._host_layers = HostLayers(self, self._arithmetic, mode=settings.check_arithmetic)
        self._adapter_settings: AdapterSettings | None = None  # of a training

        # The state of a step.
        self._num_items: Any = None  # label tokens
        self._norm: Any = None  # of the gradients, once they are clipped
        self._keeping_checkpointing = 0  # micro-batches that are in their loss now: several in a pipeline
        self._generation: ExitStack | None = None  # while GRPO makes its batch
        self._tr_loss: Tensor
        self._watches_training = False  # model, optimizer and scheduler of a training are made
        self._references: list[nn.Module] = []  # models that are only evaluated, as DPO's reference

    def _fit_upstream(self, args: Any, one_pass_loss: bool) -> Callable[[], AbstractContextManager[None]]:
        """Fit TRL's loss and its weights for vLLM to this run; returns the context in which a loss is computed."""
        loss.fit_to(self.mover.device, compiled=bool(args is not None and args.torch_compile))
        if getattr(args, "use_vllm", False):
            keep_weights_from_vllm()
        if not one_pass_loss:
            return nullcontext
        loss.install()
        return loss.one_pass_loss

    @contextmanager
    def _loading(self, model: Any) -> Iterator[None]:
        """Around the trainer's own loading, of a model that is given by name, and the making of an adapter."""
        by_name = isinstance(model, str)
        stage = "weights" if by_name else "adapter"
        report = LoadReport(self.mover)
        with (
            packed_experts(self.mover, nf4=by_name, report=report),
            self.mover.copies_as(stage),
            report.reading() if by_name else nullcontext(),
        ):
            yield

    def _digests_before(self, model: Any, peft_config: Any) -> dict[str, Digest]:
        """Attest a model that was handed over. Returns its digests if the adapter's initialisation changes weights."""
        if not isinstance(model, torch.nn.Module):
            return {}
        attest(model, self.mover)
        return digests_before(model, self.mover) if rewrites_base(peft_config) else {}

    def _place_verified(self, *, is_loaded_here: bool, digests_before: Mapping[str, Digest], peft_config: Any) -> None:
        """Have all of the model on its device, and known where each tensor came from.

        Args:
            is_loaded_here: upstream's constructor has loaded the model.
            digests_before: of a given model's weights before the adapter was made; empty: that changes none.
            peft_config: of the adapter; None: it was there before, or there is none.
        """
        mark_rewritten(self.model, digests_before, self.mover)
        mark_computed(self.model, self.mover)
        if is_loaded_here:
            is_quantised = getattr(self.model, "hf_quantizer", None) is not None  # PEFT casts its norms to float32
            as_loaded = not is_quantised and not rewrites_base(peft_config)
            record_file_digests(self.model, (), self.mover, as_loaded=as_loaded)
        share_inputs(self.model)
        require_isolation(self.model, self.args)
        self._place(self.model)
        if is_loaded_here:
            mark_computed_in_load(self.model, self.mover)
        if digests_before and self.settings.plain_lora:
            self._checkpoints.start = HostCopy(adapter_on_host(self.model, self.mover, None))

    def _watch_weights(self, settings: TrainerSettings) -> None:
        """From here on changes of weights that no update explains are found."""
        self.streamer = streamer_of(self.model)
        if self.streamer is not None:
            self.streamer.require_frozen()
        references = self._references
        if getattr(self.args, "sync_ref_model", False):  # the trained weights are copied into it
            references = []
        excuse = is_foreign(type(self))
        self._sentinel = SentinelCallback(
            self.model, self.mover, every=settings.sentinel_every, excuse_writes=excuse, references=references
        )

    def _add_callbacks(self, telemetry: Telemetry | None) -> None:
        for callback in (
            MovementCallback(self.model, self._guard.report),
            self._interrupts,
            HeartbeatCallback(self._heartbeat),
            self._sentinel,
            OptimizerTablesCallback(),
            FragmentationCallback(self.mover.device, self.transfer_report),
        ):
            self.add_callback(callback)
        # Before all others: a logging service sees only what an earlier callback has added to a log.
        self.callback_handler.callbacks.insert(0, MetricsCallback(self.transfer_report, telemetry))
        show(self)
        surround(self, self._before_event, self._after_event)

    @override
    def create_accelerator_and_postprocess(self) -> None:
        """As upstream; the accelerator then leaves models where the mover put them and clips over all cards."""
        with self.strategy.configured(self.args):
            super().create_accelerator_and_postprocess()
        # Even with the device right, `model.to("cpu:0")` copies every weight that is on "cpu".
        self.accelerator.prepare_model = partial(self._prepare_in_place, self.accelerator.prepare_model)
        self.strategy.attach(self.accelerator, self.mover)
        clip = self._updates.clipping(self.accelerator.clip_grad_norm_, self._loss_scale)
        self.accelerator.clip_grad_norm_ = partial(self._clip, clip)

    @override
    def _move_model_to_device(self, model: nn.Module, device: torch.device) -> None:
        del device  # the mover has it, or the devices of a split
        self._place(model)

    @override
    def init_hf_repo(self, *_: Any, **__: Any) -> None:
        """Upstream creates the repository here; the publisher does that."""
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
            device_placement = False  # GRPO asks for its reward models to be moved; they are placed below
        if evaluation_mode and not any(plain is known for known in (self.model, *self._references)):
            if not any(plain is module for module in self._handed_over):
                record_file_digests(plain, (), self.mover)
            attest(model, self.mover)
            place(model, self.mover)
            follow_bias_casts(model, self.mover)
            model.requires_grad_(False)  # or the sentinel would take its weights for trained ones
            self._references.append(model)
        return stock(model, device_placement=bool(device_placement), evaluation_mode=evaluation_mode)

    def _place(self, model: nn.Module) -> None:
        self.strategy.place(model)
        keep_trainable_on_cpu(model)
        follow_bias_casts(model, self.mover)

    @override
    def create_optimizer(self, *arguments: Any, **keywords: Any) -> Any:
        """As upstream, before it wraps the model; parameters with a learning rate of their own get their own groups."""
        self._choose_recomputed()
        optimizer = super().create_optimizer(*arguments, **keywords)
        self.settings.rates.split(self.model, optimizer)
        return optimizer

    # ---- a training begins ----------------------------------------------------------------------------------

    @override
    def train(self, resume_from_checkpoint: Any = None, *arguments: Any, **keywords: Any) -> TrainOutput:
        """As upstream, if the coverage is complete; Ctrl-C and SIGTERM write a checkpoint and end training."""
        self.require_coverage()
        self._sentinel.enter(self.state.global_step, "training")
        with self.stop_requests.installed(), missing_metric_as_usage_error():
            resume_from_checkpoint = self._checkpoints.check_start(resume_from_checkpoint)
            self._watches_training = False
            with self._checkpoints.resuming(resume_from_checkpoint) as given:
                result = super().train(given, *arguments, **keywords)
        self._host_layers.check_now()
        return result

    @override
    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        stock = partial(super()._load_from_checkpoint, resume_from_checkpoint, model)
        self._load_weights(self._checkpoints.resumed or resume_from_checkpoint, stock)

    def _begin_training(self) -> None:
        """Model, optimizer and scheduler are made: load their states, and watch them from here on."""
        self._watches_training = True
        resumed = self._checkpoints.resumed
        step = self.state.global_step
        max_steps = self.state.max_steps
        if resumed is not None:
            self._checkpoints.load_states(resumed, "optimizer", "scheduler", "scaler")
        self.strategy.start(self.model_wrapped, self.optimizer, self._sentinel.check_replicas, max_steps=max_steps)
        self._metrics_queue.logged_at(step)
        self._attention.prepare()
        self._replays.prepare()
        names = {id(parameter): name for name, parameter in self.model.named_parameters()}
        own = is_foreign(type(self)) or any(is_foreign(type(callback)) for callback in self.callback_handler.callbacks)
        of_args = self.lr_scheduler is not self._given_scheduler
        schedule = Schedule(self.lr_scheduler, self.optimizer, self.args, max_steps, of_args=of_args, excused=own)
        self._updates.watch(self.optimizer, names, schedule)
        self._updates.watch_scaler(self.accelerator.scaler if self.accelerator.mixed_precision == "fp16" else None)
        self._adapter_settings = AdapterSettings(self.model)
        changed = partial(self._sentinel.check_all, step, "their checksums are computed")
        self._arithmetic.prepare(self, changed)
        self._host_layers.prepare(changed)
        self._recovery.prepare(stop=self.settings.on_oom == "stop", resumed=resumed is not None)

    # ---- batches --------------------------------------------------------------------------------------------

    @override
    def get_train_dataloader(self) -> DataLoader[Any]:
        """As upstream; the next batch crosses while one is used."""
        self._training_prefetch = Prefetch(self.mover, self.settings.prefetch_batches)
        return verify_loader(super().get_train_dataloader(), self._training_prefetch)

    @override
    def get_eval_dataloader(self, *arguments: Any, **keywords: Any) -> DataLoader[Any]:
        """Likewise."""
        return self._verified(super().get_eval_dataloader(*arguments, **keywords))

    @override
    def get_test_dataloader(self, *arguments: Any, **keywords: Any) -> DataLoader[Any]:
        """Likewise."""
        return self._verified(super().get_test_dataloader(*arguments, **keywords))

    def _verified(self, loader: DataLoader[Any]) -> DataLoader[Any]:
        verified = self._verified_loaders.get(loader)
        if verified is None:
            verified = verify_loader(loader, Prefetch(self.mover, self.settings.prefetch_batches))
            if verified is not loader:
                self._verified_loaders[loader] = verified
        return verified

    @override
    def get_batch_samples(
        self, epoch_iterator: Iterator[Any], num_batches: int, device: torch.device
    ) -> tuple[list[Any], Any]:
        """As upstream, at the start of an optimizer step; iterating over the list starts the transfers."""
        if self.is_in_train and not self._watches_training:
            raise UsageError("the callbacks that the trainer was made with are gone: add_callback and remove_callback")
        self._guard.begin_step()
        self._require_settings()
        self._arithmetic.begin_step(self.state.global_step + 1)
        self._attention.begin_step()
        self._replays.begin_step(self.state.global_step + 1)
        self._loss_before = self._tr_loss.clone()  # upstream adds each micro-step's loss to it in place
        self._recovery.begin_step()
        batches = list(itertools.islice(epoch_iterator, num_batches))
        self._num_items = self._count_items(batches)
        window = self._training_prefetch.window(batches)
        self.strategy.begin_step(window)
        self._checkpoints.restore_random(within_epoch=True)
        return window, self._num_items

    def _count_items(self, batches: list[Batch]) -> Any:
        """Count label tokens in the host tensors, twice, from two memories: the device copies are not verified yet.

        Returns a device tensor of shape [], as upstream does, without a copy or a wait: ranks add up over gloo, and the
        number reaches the device as an argument of the kernel that fills the tensor.
        """
        sources = [map_tensors(batch, self._source_of) for batch in batches]
        copies = [_with_own_labels(batch) for batch in sources]
        across = self.args.average_tokens_across_devices
        self.args.average_tokens_across_devices = False  # added up below
        try:
            _, count = super().get_batch_samples(iter(sources), len(sources), _HOST)
            _, again = super().get_batch_samples(iter(copies), len(copies), _HOST)
        finally:
            self.args.average_tokens_across_devices = across
        self.mover.require_unchanged(sources)
        if not torch.is_tensor(count):
            return count
        if count.item() != again.item():
            raise self.mover.changed("labels", "while its labels were counted")
        counted = all_gather_floats([count.item()]) if across else [[count.item()]]
        return torch.full((), sum(row[0] for row in counted), dtype=count.dtype, device=self.mover.device)

    @override
    def training_step(self, model: nn.Module, inputs: Any, num_items_in_batch: Any = None) -> Tensor:
        """As upstream; repeated with smaller parts if memory runs out. Gradient averages are checked before clipping.

        The batch of a skipped step is verified and not used.
        """
        step = self.state.global_step + 1
        if step in self.skip_steps:
            self._verified_inputs(inputs)
            self._zero_missing_gradients()
            return torch.zeros((), device=self.args.device)
        self._crashes.crash_if_due(step, directory=Path(self.args.output_dir), run_id=self.run_id)
        stock: Stock = self._verified_step
        if self._recovery.divisor == 1:  # no micro-batch is split
            of_strategy = self.strategy.stepping(stock)
            if of_strategy is stock:
                self._replays.run_ahead(stock, model, inputs, num_items_in_batch)
            stock = of_strategy
        with self._attention.watching(inputs):
            if not isinstance(inputs, Mapping):  # prompts from which the trainer generates its batch: cannot be split
                loss: Tensor = stock(model, inputs, num_items_in_batch)
            else:
                loss = self._recovery.run(stock, model, inputs, num_items_in_batch)
        if self._recovery.divisor == 1:
            self._replays.compare(model, loss)
        self._sentinel.queue_batch_check()
        self.strategy.check(step=step, synced=self.accelerator.sync_gradients)
        self._guard.add_loss(loss)
        return self._metrics_queue.loss_to_log(loss)

    def _verified_step(self, model: nn.Module, inputs: Any, num_items: Any = None) -> Tensor:
        """Upstream's micro-step, with verified inputs."""
        inputs = self._verified_inputs(inputs)
        with self._generating(inputs):
            loss: Tensor = super().training_step(model, inputs, num_items)
        return loss

    def _verified_inputs(self, inputs: Any) -> Any:
        """The last check: every tensor is verified before ``forward`` sees it. Returns the inputs on the device."""
        self.mover.step = self.state.global_step + 1
        self.mover.wait_verified(inputs)
        unknown = {name: tensor for name, tensor in named_tensors(inputs) if self.mover.provenance(tensor) is None}
        outside = [name for name, tensor in unknown.items() if tensor.device.type != "cpu"]
        if outside and self.mover.settings.verify == "full":
            raise CorruptionError(
                f"batch tensors {', '.join(outside)} were put on the device by something other than the mover, so "
                "their bytes cannot be verified: return host tensors from the data collator, or choose --verify sample"
            )
        if unknown:
            self.mover.require_unchanged(unknown)
            inputs = self.mover.begin(inputs)
            self.mover.wait_verified(inputs)
        if not isinstance(inputs, Mapping):  # prompts
            return inputs
        if IN_ROW in inputs:  # not the model's
            kept = {name: value for name, value in inputs.items() if name != IN_ROW}
            inputs = type(inputs)(kept)  # type: ignore[call-arg]  # as transformers does
        self._sentinel.use_batch(inputs)
        return inputs

    @contextmanager
    def _generating(self, inputs: Any) -> Iterator[None]:
        """GRPO builds its batch from prompts in this thread, before the loss: it generates, reads, scores and sends."""
        if isinstance(inputs, Mapping):
            yield
            return
        with ExitStack() as self._generation:
            self._generation.callback(setattr, self, "_generation", None)
            self._generation.enter_context(self.mover.copies_as("batches"))
            self._generation.enter_context(self._arithmetic.paused())
            yield

    def _end_generation(self, batch: Any) -> None:
        if self._generation is not None:
            self._generation.close()
            self._sentinel.use_batch(batch)
            self._choose_recomputed()  # generation turned checkpointing off and on again, for all layers

    @override
    def compute_loss(self, model: nn.Module, inputs: Any, *arguments: Any, **keywords: Any) -> Any:
        """As upstream; the mean of a part of a micro-batch is weighted by the part's labels."""
        self._end_generation(inputs)
        with (
            self._metrics_queue.deferring(),
            self._keep_checkpointing_choice(),
            self.loss_context(),
            as_usage_errors({"trl"}),  # TRL checks --loss_type and the like here
        ):
            result = super().compute_loss(model, inputs, *arguments, **keywords)
        factor = self._recovery.loss_factor
        if factor == 1.0:
            return result
        return (result[0] * factor, *result[1:]) if isinstance(result, tuple) else result * factor

    def _clip(self, clip: Callable[..., Any], *arguments: Any, **keywords: Any) -> Any:
        """``Accelerator.clip_grad_norm_``, whose norm is judged before the update."""
        self._norm = clip(*arguments, **keywords)
        return self._norm

    def _check_step(self) -> None:
        """The last function before the optimizer: the trained state is checked, and the step is judged."""
        model = self.model_wrapped
        norm = self._norm
        self._norm = None
        if norm is None:  # upstream has its own clipping for tensors that are sharded in different ways
            norm = _norm_of(model, self.args.device)
        self._sentinel.queue_check()
        self._require_settings()
        self._host_layers.compute()  # no micro-batch is in the layer now, as others are in a pipeline before
        checks = self._updates, self._arithmetic, self._attention, self._replays, self._host_layers
        judge = partial(
            self._guard.judge,
            model,
            norm,
            self._sentinel.wait_verified,
            checks,
            can_repeat=self._recovery.has_start,
        )
        while judge() == StepVerdict.REPEAT:
            again = self._repeat_step(model)
            with torch.no_grad():
                norm.copy_(again)  # device: within one; it is the tensor that upstream logs

    def _repeat_step(self, model: nn.Module) -> Any:
        """Compute the optimizer step again, as if for the first time. Returns the norm of its clipped gradients."""
        if self.accelerator.scaler is not None:
            # It refuses to unscale gradients twice in a step.
            upstream.read("float16_scaling", self.accelerator.scaler).clear()
        compare = partial(self._replays.compare, model, again=True)
        with self._attention.watching():
            losses = self._recovery.repeat(self._verified_step, model, self._num_items, compare)
        self._sentinel.queue_batch_check()
        self.strategy.check(step=self.state.global_step + 1, synced=True)
        self._tr_loss = self._loss_before.clone()
        for micro_loss in losses:
            self._guard.add_loss(micro_loss)
            self._tr_loss += self._metrics_queue.loss_to_log(micro_loss)
        norm = self.accelerator.clip_grad_norm_(model.parameters(), self.args.max_grad_norm or math.inf)
        self._norm = None
        return norm

    @override
    def evaluate(self, *arguments: Any, **keywords: Any) -> Any:
        """As upstream; repeated with fewer rows at a time if memory runs out.

        Outside of a training all weights are checked before.
        """
        if not self.is_in_train:
            self._sentinel.enter(self.state.global_step, "evaluating")
        return evaluated(
            self,
            lambda: super(VerifiedTransferMixin, self).evaluate(*arguments, **keywords),
            on_oom=self.settings.on_oom,
        )

    @override
    def predict(self, *arguments: Any, **keywords: Any) -> Any:
        """As upstream; weights are checked before, as for `evaluate`."""
        if not self.is_in_train:
            self._sentinel.enter(self.state.global_step, "predicting")
        return super().predict(*arguments, **keywords)

    @override
    def evaluation_loop(self, *arguments: Any, **keywords: Any) -> Any:
        """As upstream; the heartbeat allows more time for the first batch."""
        self.beat("evaluate")
        if self.strategy.shares_rows:
            # Each rank has all rows: gathered, they are duplicates, and upstream miscounts those of a short last batch.
            self.gather_function = self._own_rows
        with self._sentinel.keeping_rates(self.state.global_step):
            result = super().evaluation_loop(*arguments, **keywords)
        self._sentinel.wait_for_batches(self.state.global_step)
        return result

    @override
    def prediction_step(self, model: Any, inputs: Any, *arguments: Any, **keywords: Any) -> Any:
        """As upstream; the weights that FSDP2 gathered for it are checked."""
        inputs = self._verified_inputs(inputs)
        with self._generating(inputs):
            result = super().prediction_step(model, inputs, *arguments, **keywords)
        self._sentinel.queue_batch_check()
        self._sentinel.wait_for_older(self.state.global_step)
        self.strategy.check(step=self.state.global_step, synced=False)
        return result

    @override
    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """As upstream; metrics that TRL has recorded since the last log are computed and read first."""
        self._metrics_queue.evaluate()
        if "loss" in logs and start_time is not None:  # upstream's own, not a callback's
            self._metrics_queue.logged_at(self.state.global_step)
        super().log(logs, start_time)

    # ---- saving ---------------------------------------------------------------------------------------------

    @override
    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        self.beat("save")
        self._interrupts.saving(self.args)
        final = Path(self.args.output_dir) / f"{PREFIX_CHECKPOINT_DIR}-{self.state.global_step}"
        self._checkpoints.save(partial(super()._save_checkpoint, model, trial), final)
        self.beat("between")

    @override
    def create_model_card(self, *arguments: Any, **keywords: Any) -> None:
        """As upstream, unless a writer of ours was given."""
        if self._services.write_readme is None:
            self._checkpoints.write_card(super().create_model_card, *arguments, **keywords)

    @override
    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Save model, tokenizer, arguments and report: written to a staging directory, compared with the live tensors,
        renamed, and listed in ``integrity.json``, which marks the run as finished. Collective.

        Raises:
            CorruptionError: the files do not hold the live tensors, or keep changing.
            UsageError: the disk is full; the directory does not look finished then.
        """
        self._checkpoints.save_model(Path(output_dir or self.args.output_dir), self._result_writer)

    @override
    def _load_best_model(self) -> None:
        self._load_weights(self.state.best_model_checkpoint, super()._load_best_model)

    @override
    def push_to_hub(self, *arguments: Any, **keywords: Any) -> Any:
        """Save and seal the result if that has not been done, and have the publisher upload it. Collective."""
        del arguments, keywords  # the publisher has its own settings
        return self._checkpoints.push_result()

    # ---- for the caller -------------------------------------------------------------------------------------

    def require_coverage(self) -> None:
        """Refuse to train when ``verify="full"`` does not reach every byte of the model, unless the user consents.

        Raises:
            UsageError: names what is not covered.
        """
        missing = self._not_covered()
        if missing is not None:
            raise UsageError(missing)

    def weight_coverage(self) -> Coverage:
        """The share of the models' bytes on their devices that is verified, and what is moved outside the mover."""
        covered = coverage(self.model, self.mover)
        for model in self._references:
            covered += coverage(model, self.mover)
        return with_offloads(covered, self.args, deepspeed=self.is_deepspeed_enabled)

    def beat(self, phase: Phase) -> None:
        """Send one heartbeat to the watchdog, and to the supervisor if there is one."""
        self._heartbeat.beat(step=self.state.global_step, phase=phase)

    def describe(self) -> dict[str, Any]:
        """What the report says of this training in addition to the counters, as seen by this rank."""
        return {
            **self.strategy.describe(self.model),
            "memory": {
                "steps_down": self._recovery.on,
                "micro_batch_divisor": self._recovery.divisor,
                "recompute_layers": self.recompute_layers,
            },
            "streaming": None if self.streamer is None else self.streamer.describe(),
            "crash_injection": self._crashes.text,
            "arithmetic": {
                **self._arithmetic.describe(),
                **self._replays.describe(),
                **self._attention.describe(),
                **self._updates.describe(),
                **self._host_layers.describe(),
            },
        }

    # ---- for the objects that the trainer owns --------------------------------------------------------------

    @property
    def devices(self) -> tuple[torch.device, ...]:
        """The devices of the model: the trainer's, or those of all cards of a split."""
        return self.strategy.devices(self.args.device)

    @property
    def is_sharded(self) -> bool:
        """Whether each rank holds only a part of the model."""
        elsewhere = self.is_deepspeed_enabled or self.is_distributed_loading_by_transformers
        return bool(elsewhere or self.strategy.state)

    @property
    def full_state(self) -> Any:
        """Gathers what is saved of a sharded model; None for a model that is not sharded."""
        return self.strategy.state

    def host_batch(self, inputs: Mapping[str, Any]) -> dict[str, Any]:
        """A batch with each device tensor replaced by the host tensor it was copied from, where that is known."""
        return dict(map_tensors(inputs, self._source_of))

    def place_tensor(self, tensor: Tensor, *, name: str, stage: str) -> Tensor:
        """Move one host tensor of a checkpoint to the device, verified; ``stage`` is "adapter" or "optimizer".

        Optimizer state is named after its parameter, which tells a split model its card.
        """
        match = re.match(r"optimizer\.state\.(\d+)\.(.*)", name)
        if match:
            number, value = match.groups()
            parameters: list[Any] = []
            for group in self.optimizer.param_groups:
                parameters += group["params"]
            names = {id(parameter): own_name for own_name, parameter in self.model.named_parameters()}
            owner = names.get(id(parameters[int(number)]), number)
            name = f"{owner}/{value}"
        return self.mover.move(tensor, name=name, stage=stage)

    def before_save(self) -> None:
        """Check every weight, on every rank, before anything is written; what it raises prevents the save."""
        self._updates.check_now()
        self._host_layers.check_now()
        if self.mover.failure is not None:  # whoever asked for that copy went on without it
            raise self.mover.failure
        self._guard.require_finite(self.model)
        self._sentinel.check_all(self.state.global_step)
        if self.streamer is not None:
            self.streamer.check()
        missing = self._not_covered()
        if missing is not None:
            raise CorruptionError(f"since the start of the training {missing}")

    def before_manifest(self, directory: Path) -> None:
        """Write the ``README.md``, then check that the live weights are still those of the last update."""
        if self._services.write_readme is not None and self.is_world_process_zero():
            self._services.write_readme(directory)
        self._sentinel.check_trained(f"while saving at step {self.state.global_step}", self.state.global_step)

    def write_model(self, directory: str) -> None:
        if self.strategy.state is not None:  # upstream would save each rank's parts
            state = self.strategy.state.model()
            if self.args.should_save:
                self._save(directory, state_dict=state)
            return
        super().save_model(directory, _internal_call=True)

    # ---- details --------------------------------------------------------------------------------------------

    def _choose_recomputed(self) -> None:
        if self.recompute_layers is not None and recompute.is_chosen(self.args):
            recompute.recompute(self.model, self.recompute_layers)

    @contextmanager
    def _keep_checkpointing_choice(self) -> Iterator[None]:
        """Keep TRL from turning checkpointing off and on around a reference's forward: only ``use_reentrant`` needs it.

        Each time the choice of layers would be lost, and one more hook left at the embeddings.
        """
        model: Any = self.model
        if isinstance(self, SFTTrainer) or recompute.options_of(self.args).get("use_reentrant"):
            yield
            return
        self._keeping_checkpointing += 1
        model.gradient_checkpointing_disable = model.gradient_checkpointing_enable = lambda *_, **__: None
        try:
            yield
        finally:
            self._keeping_checkpointing -= 1
            if not self._keeping_checkpointing:
                del model.gradient_checkpointing_disable, model.gradient_checkpointing_enable

    def _load_weights(self, checkpoint: str | Path, stock: Callable[[], None]) -> None:
        directory = Path(checkpoint)
        self._checkpoints.load_weights(directory, stock)
        for parameter in self.model.parameters():
            if parameter.requires_grad:
                self.mover.mark_derived(local(parameter), f"loaded from {directory.name}")
        for _, buffer in running_statistics(self.model):
            self.mover.mark_derived(buffer, f"loaded from {directory.name}")
        self._sentinel.take()

    def _source_of(self, tensor: Tensor) -> Tensor:
        source = self.mover.host_source(tensor)
        return tensor if source is None else source

    def _own_rows(self, data: Any) -> Any:
        """As ``Accelerator.gather_for_metrics`` with a single process: padding rows of the last batch are dropped."""
        state = self.accelerator.gradient_state
        last = None
        if state.end_of_dataloader and state.remainder > 0:
            last = state.remainder
        return map_tensors(data, lambda tensor: tensor[:last])

    def _before_event(self, event: str) -> None:
        if event == "on_train_begin":
            self._begin_training()
        elif event == "on_pre_optimizer_step":
            self._check_step()
        if self._has_writer(event):
            if event != "on_optimizer_step":  # the update has just changed them
                self._sentinel.queue_check()
            self._sentinel.mark()

    def _after_event(self, event: str) -> None:
        """What a user's callback has written to trained weights becomes their new state."""
        if self._has_writer(event):
            self._sentinel.take(event)
            if self._adapter_settings is not None:
                self._adapter_settings.adopt()
        if event == "on_epoch_begin":
            self._checkpoints.restore_random(within_epoch=False)

    def _has_writer(self, event: str) -> bool:
        return has_writer(event, *map(type, self.callback_handler.callbacks))

    def _not_covered(self) -> str | None:
        """A message on what ``verify="full"`` does not reach and the user has not consented to; None if nothing."""
        covered = self.weight_coverage()
        if self.mover.settings.verify != "full" or covered.complete or self.settings.consent_unverified:
            return None
        return (
            f"--verify full covers {covered.describe()}. Pass the model by name, or on the host (loaded without "
            "device_map and without .to()), so that the trainer moves and verifies it; or consent with "
            "--consent_unverified (consent_unverified=True)"
        )

    def _loss_scale(self) -> Tensor | None:
        """What fp16's scaler has multiplied gradients with, shape []; None without one. It stays on the device."""
        accelerator = self.accelerator
        if accelerator.mixed_precision != "fp16" or accelerator.scaler is None:
            return None
        return accelerator.scaler.scale(torch.ones((), device=self.args.device))

    def _require_settings(self) -> None:
        """Refuse a step whose LoRA layers have other settings than before. What a callback sets is taken for right."""
        settings = self._adapter_settings
        if settings is None:
            return
        difference = settings.wrong_at_start or settings.wrong()
        if difference is None:
            return
        step = self.state.global_step + 1
        self.transfer_report.incident(
            {"step": step, "stage": "trained", "kind": "settings", "text": difference, "outcome": "stopped"}
        )
        raise CorruptionError(f"step {step}: {difference}. Nothing was saved since: start the same command again")

    def _zero_missing_gradients(self) -> None:
        """The gradient scaler of fp16 refuses a step without gradients; with zeros only the moments decay."""
        if self.accelerator.scaler is None:
            return
        self.accelerator.scaler.scale(torch.zeros((), device=self.args.device))  # creates its scale at the first step
        for parameter in self.model.parameters():
            if parameter.requires_grad and parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)


class VerifiedSFTTrainer(VerifiedTransferMixin, CountedSFTTrainer):
    """Supervised fine-tuning in which every weight and batch is verified on its way to the device."""


def _norm_of(model: nn.Module, device: torch.device) -> Tensor:
    """The norm of this rank's parts of all gradients, shape []."""
    gradients = [local(parameter.grad) for parameter in model.parameters() if parameter.grad is not None]
    if not gradients:
        return torch.zeros((), device=device)
    norms = [torch.linalg.vector_norm(gradient) for gradient in gradients]
    return torch.linalg.vector_norm(torch.stack(norms))


def _modules_in(values: Iterable[Any]) -> list[nn.Module]:
    """The modules among a trainer's arguments, also those in lists."""
    modules = []
    for value in values:
        for item in value if isinstance(value, list) else [value]:
            if isinstance(item, torch.nn.Module):
                modules.append(item)
    return modules


def _with_own_labels(batch: Any) -> Any:
    if not isinstance(batch, Mapping):  # prompts
        return batch
    mine = [name for name, value in batch.items() if name.endswith("labels") and torch.is_tensor(value)]
    return {**batch, **{name: batch[name].clone() for name in mine}}
