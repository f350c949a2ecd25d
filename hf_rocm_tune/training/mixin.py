"""The mixin that makes any ``transformers.Trainer`` train on verified bytes only.

    class VerifiedSFTTrainer(VerifiedTransferMixin, SFTTrainer): ...

is a complete definition, and a user can do the same with a trainer of their own. Batches, evaluation batches, weights,
adapters and optimizer state pass one door, the :class:`~hf_rocm_tune.transfer.Mover`; Accelerate places nothing.
Averages of gradients that DistributedDataParallel makes are judged before they are clipped and used.

Covered: everything that the stock trainer, TRL's SFT trainer and PEFT move to the device, through the seams listed in
:mod:`hf_rocm_tune.upstream`. Not covered: tensors that a data collator or a custom ``compute_loss`` puts on the device
by itself (refused under ``verify="full"``), and weights that were on an accelerator before the model was handed over
and are not equal to their files (named in the coverage).
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from accelerate.utils import extract_model_from_parallel
from transformers import TrainerCallback
from transformers.trainer_utils import TrainOutput
from typing_extensions import override

from hf_rocm_tune import upstream
from hf_rocm_tune.data.loader import verify_loader
from hf_rocm_tune.data.prefetch import Prefetch, require_unchanged
from hf_rocm_tune.distributed.agree import everyone
from hf_rocm_tune.errors import CorruptionError, UsageError
from hf_rocm_tune.models.attest import attest
from hf_rocm_tune.models.loading import rewrites_base, verified_loading
from hf_rocm_tune.models.placement import Coverage, coverage, digests_before, mark_computed, mark_rewritten, place
from hf_rocm_tune.models.quantised import follow_bias_casts, keep_trainable_on_cpu
from hf_rocm_tune.models.shards import local
from hf_rocm_tune.models.written import follow_written_buffers, writable_buffers
from hf_rocm_tune.training.batch_shares import BatchSharesMixin
from hf_rocm_tune.training.callbacks import SentinelCallback, is_foreign
from hf_rocm_tune.training.cards import CardMixin
from hf_rocm_tune.training.checkpoint import VerifiedCheckpointMixin
from hf_rocm_tune.training.deepspeed import with_deepspeed
from hf_rocm_tune.training.fsdp import ShardsMixin
from hf_rocm_tune.training.guard_mixin import GuardMixin
from hf_rocm_tune.training.offload import OptimizerTablesCallback, with_offloads
from hf_rocm_tune.training.oom import StepDownMixin
from hf_rocm_tune.training.oom_fragmentation import FragmentationCallback
from hf_rocm_tune.training.ranks import RanksMixin
from hf_rocm_tune.training.split import SplitMixin
from hf_rocm_tune.training.survival import SurvivalMixin
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

    from hf_rocm_tune.training.readback import Readback
    from hf_rocm_tune.transfer import Digest

Batch = dict[str, Any]


class VerifiedTransferMixin(
    SurvivalMixin,
    GuardMixin,
    StepDownMixin,
    RanksMixin,
    ShardsMixin,
    CardMixin,
    VerifiedCheckpointMixin,
    SplitMixin,
    BatchSharesMixin,
):
    """Stands in front of a trainer class; see the module's description.

    Args:
        mover: the door through which the model was loaded, so that its verdicts are known. Without one a mover is
            made, and a model that is already on an accelerator counts as unverified.
        transfer_settings: how to verify, when no mover is given.
        sentinel_every: steps in which each frozen tensor is looked at once; 0 for never. Before a save all are.
        prefetch_batches: batches beyond the one in use that may be on their way to the device; 0: none, no overlap.
        compare_optimizer_every: steps between two comparisons of the optimizer's state over all ranks; 0 for never.
        consent_unverified: train although ``verify="full"`` did not reach every byte.
        on_oom: see :class:`~hf_rocm_tune.training.oom.StepDownMixin`.
        max_skipped_steps: see :class:`~hf_rocm_tune.training.guard_mixin.GuardMixin`.

    Raises:
        SeamError: an upstream library has moved a place on which verification depends.
        CorruptionError: a tensor could not be brought to the device right.
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
        **keywords: Any,
    ) -> None:
        upstream.check_all()
        upstream.check_overrides(type(self))
        args = keywords.get("args", arguments[1] if len(arguments) > 1 else None)
        self.mover = mover or _new_mover(args, transfer_settings)
        self.transfer_report: TransferReport = self.mover.report
        self._prefetch_batches = prefetch_batches
        self._training_prefetch = Prefetch(self.mover, prefetch_batches)
        self._consent_unverified = consent_unverified
        self._references: list[nn.Module] = []  # models that are only evaluated, as DPO's reference
        if args is not None:
            args = copy.copy(args)  # what is changed in it is not the user's
            args.dataloader_pin_memory = False  # the mover's ring is the pinned memory
            if "args" in keywords:
                keywords["args"] = args
            else:
                arguments = (arguments[0], args, *arguments[2:])
        peft_config = keywords.get("peft_config")
        model = keywords.get("model", arguments[0] if arguments else None)
        before: dict[str, Digest] = {}
        if isinstance(model, torch.nn.Module):
            attest(model, self.mover)
            before = digests_before(model, self.mover) if rewrites_base(peft_config) else {}
        with ExitStack() as stack:
            stack.enter_context(verified_loading(self.mover))
            stack.enter_context(redirected(self.mover, stage="adapter"))  # PEFT moves fresh adapters by itself
            super().__init__(*arguments, **keywords)
        mark_rewritten(self.model, before, self.mover)
        mark_computed(self.model, self.mover)
        self._place(self.model)
        self._sentinel = SentinelCallback(
            self.model,
            self.mover,
            every=sentinel_every,
            compare_optimizer_every=compare_optimizer_every,
            excuse_writes=is_foreign(type(self)),
        )
        self.add_callback(self._sentinel)
        self.callback_handler.call_event = partial(self._call_event, self.callback_handler.call_event)
        self.add_callback(OptimizerTablesCallback())
        self.add_callback(FragmentationCallback(self.mover.device, self.transfer_report))

    # ---- the model ------------------------------------------------------------------------------------------

    @override
    def _move_model_to_device(self, model: nn.Module, device: torch.device) -> None:
        del device  # the mover knows better: it has the trainer's, or those of a split
        self._place(model)

    @override
    def create_accelerator_and_postprocess(self) -> None:
        """As upstream; the accelerator then leaves models where the mover put them."""
        super().create_accelerator_and_postprocess()
        # Even with the device right, `model.to("cpu:0")` copies every weight that is on "cpu".
        stock = self.accelerator.prepare_model
        self.accelerator.prepare_model = partial(self._prepare_in_place, stock)

    def _prepare_in_place(
        self,
        stock: Callable[..., nn.Module],
        model: nn.Module,
        device_placement: bool | None = None,
        evaluation_mode: bool = False,
    ) -> nn.Module:
        plain = extract_model_from_parallel(model, keep_torch_compile=False)
        if evaluation_mode and not any(plain is known for known in (self.model, *self._references)):
            attest(model, self.mover)
            place(model, self.mover)
            follow_bias_casts(model, self.mover)
            self._references.append(model)
        return stock(model, device_placement=bool(device_placement), evaluation_mode=evaluation_mode)

    def _place(self, model: nn.Module) -> None:
        if self.is_fsdp_enabled:
            self.shard_model(model)
        else:
            place(model, self.mover)
        keep_trainable_on_cpu(model)
        follow_bias_casts(model, self.mover)
        follow_written_buffers(model, self.mover)

    def place_tensor(self, tensor: Tensor, *, name: str, stage: str) -> Tensor:
        """Brings one host tensor to the device, verified (adapter and optimizer state on resume)."""
        return self.mover.move(tensor, name=self.name_of_state(name), stage=stage)

    def weight_coverage(self) -> Coverage:
        """How much of what the models keep on their device was verified on the way there, and what others offload."""
        found = coverage(self.model, self.mover)
        for model in self._references:
            found += coverage(model, self.mover)
        found = with_offloads(found, self.args)
        return with_deepspeed(found, enabled=self.is_deepspeed_enabled)

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
        """As upstream; the window is then a list that begins transfers as it is iterated."""
        batches, count = super().get_batch_samples(epoch_iterator, num_batches, device)
        return self._training_prefetch.window(batches), count

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
        for tensor in tree_tensors(sources):
            require_unchanged(tensor, self.mover)  # what was counted
        if not torch.is_tensor(count):
            return count
        ranks = everyone([count.item()]) if across else [[count.item()]]
        return torch.full((), sum(row[0] for row in ranks), dtype=count.dtype, device=self.mover.device)

    def _source_of(self, tensor: Tensor) -> Tensor:
        source = self.mover.host_source(tensor)
        return tensor if source is None else source

    def _host_source(self, tensor: Tensor) -> Tensor:
        return require_unchanged(self._source_of(tensor), self.mover)

    @override
    def _prepare_inputs(self, inputs: Batch) -> Batch:
        """The last guard: every tensor has its verdict before ``forward`` sees it."""
        self.mover.step = self.state.global_step + 1
        self.mover.settle(inputs)
        unknown = [tensor for tensor in tree_tensors(inputs) if self.mover.provenance(tensor) is None]
        if any(tensor.device.type != "cpu" for tensor in unknown):
            self._refuse(inputs)
        for tensor in unknown:
            require_unchanged(tensor, self.mover)
        if unknown:
            inputs = self.mover.begin(inputs)
            self.mover.settle(inputs)
        return super()._prepare_inputs(inputs)

    def _refuse(self, inputs: Batch) -> None:
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

    # ---- the run --------------------------------------------------------------------------------------------

    def require_coverage(self) -> None:
        """Refuses to train when ``verify="full"`` does not reach every byte of the model.

        Raises:
            UsageError: it does not, and the user has not consented; the message names what is not verified.
        """
        found = self.weight_coverage()
        if self.mover.settings.verify == "full" and not found.complete and not self._consent_unverified:
            raise UsageError(_not_covered(found))

    @override
    def train(self, *arguments: Any, **keywords: Any) -> TrainOutput:
        """Trains, after a look at the coverage; raises as :meth:`require_coverage` too."""
        self.require_coverage()
        return super().train(*arguments, **keywords)

    @override
    def _get_grad_norm(self, model: nn.Module, grad_norm: Any = None) -> Any:
        """As upstream. Trained state is looked at here, before the optimizer uses it; the guard waits for the norm."""
        self._sentinel.look()
        return super()._get_grad_norm(model, grad_norm=grad_norm)

    def _judge_step(self, model: nn.Module, loss: float, norm: float) -> None:
        self._sentinel.settle(self.state.global_step + 1)
        super()._judge_step(model, loss, norm)

    def _call_event(self, stock: Callable[..., Any], event: str, *arguments: Any, **keywords: Any) -> Any:
        """Tells callbacks of an event. What a user's callback writes to trained weights is right from then on."""
        written = any(
            is_foreign(type(each)) and getattr(type(each), event, None) is not getattr(TrainerCallback, event, None)
            for each in self.callback_handler.callbacks
        )
        if written and event != "on_optimizer_step":  # the update has just changed them
            self._sentinel.look()
        result = stock(event, *arguments, **keywords)
        if written:
            self._sentinel.take()
        return result

    def _verified(self, directory: Path, states: Mapping[str, Any]) -> dict[str, Readback]:
        found = super()._verified(directory, states)
        # The files are what is live: is that what the last update has made?
        self._sentinel.check_trained(f"while saving at step {self.state.global_step}", self.state.global_step)
        return found

    def _load_verified(self, directory: Path, load: Callable[[], None]) -> None:
        super()._load_verified(directory, load)
        for parameter in self.model.parameters():
            if parameter.requires_grad:
                self.mover.mark_derived(local(parameter), f"loaded from {directory.name}")
        for buffer in writable_buffers(self.model):
            self.mover.mark_derived(buffer, f"loaded from {directory.name}")
        self._sentinel.take()

    def before_save(self) -> None:
        """Looks at every weight before anything is written.

        Raises:
            MemoryFaultError: one is not what it was.
            CorruptionError: something unverified has come to the model since the start.
        """
        super().before_save()
        self._sentinel.check_all(self.state.global_step)
        found = self.weight_coverage()
        if self.mover.settings.verify == "full" and not found.complete and not self._consent_unverified:
            raise CorruptionError(f"since the start of the training {_not_covered(found)}")


def _new_mover(args: Any, settings: TransferSettings | None) -> Mover:
    if args is None:
        from accelerate import PartialState

        device = PartialState().device
    else:
        device = args.device
    return Mover(device, settings=settings or TransferSettings(), faults=FaultSpec.from_environment())


def _not_covered(found: Coverage) -> str:
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
