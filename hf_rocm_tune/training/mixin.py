"""The mixin that makes any ``transformers.Trainer`` train on verified bytes only.

    class VerifiedSFTTrainer(VerifiedTransferMixin, SFTTrainer): ...

is a complete definition, and a user can do the same with a trainer of their own. Batches, evaluation batches, weights,
adapters and optimizer state pass one door, the :class:`~hf_rocm_tune.transfer.Mover`; Accelerate places nothing.
Averages of gradients that DistributedDataParallel makes are judged before they are clipped and used.

Covered: everything that the stock trainer, TRL's SFT trainer and PEFT move to the device, through the seams listed in
:mod:`hf_rocm_tune.upstream`. Not covered: tensors that a data collator or a custom ``compute_loss`` puts on the device
by itself (refused under ``verify="full"``), and weights that were on the device before the model was handed over
(named in the coverage).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from transformers.trainer_utils import TrainOutput

from hf_rocm_tune import upstream
from hf_rocm_tune.data.loader import verify_loader
from hf_rocm_tune.data.prefetch import Prefetch
from hf_rocm_tune.errors import CorruptionError, UsageError
from hf_rocm_tune.models.attest import attest
from hf_rocm_tune.models.loading import host_adapters, initialised_on_device, rewrites_base, verified_loading
from hf_rocm_tune.models.placement import Coverage, coverage, mark_initialised, mark_rewritten, place
from hf_rocm_tune.models.quantised import keep_trainable_on_cpu, verify_tables
from hf_rocm_tune.training.batch_shares import BatchSharesMixin
from hf_rocm_tune.training.callbacks import SentinelCallback
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
from hf_rocm_tune.transfer import FaultSpec, Mover, TransferReport, TransferSettings, map_tensors, tree_tensors

if TYPE_CHECKING:
    from torch import Tensor, nn
    from torch.utils.data import DataLoader

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
        args = keywords.get("args", arguments[1] if len(arguments) > 1 else None)
        self.mover = mover or _new_mover(args, transfer_settings)
        self.transfer_report: TransferReport = self.mover.report
        self._prefetch_batches = prefetch_batches
        self._training_prefetch = Prefetch(self.mover, prefetch_batches)
        self._consent_unverified = consent_unverified
        if args is not None:
            args.dataloader_pin_memory = False  # the mover's ring is the pinned memory
        peft_config = keywords.get("peft_config")
        model = keywords.get("model", arguments[0] if arguments else None)
        if isinstance(model, torch.nn.Module):
            attest(model, self.mover)
        with ExitStack() as stack:
            stack.enter_context(verified_loading(self.mover))
            if not initialised_on_device(peft_config):
                stack.enter_context(host_adapters())
            super().__init__(*arguments, **keywords)
        if initialised_on_device(peft_config):
            mark_initialised(self.model, self.mover)
        if rewrites_base(peft_config):
            mark_rewritten(self.model, self.mover)
        self._place(self.model)
        self._sentinel = SentinelCallback(
            self.model,
            self.transfer_report,
            every=sentinel_every,
            compare_optimizer_every=compare_optimizer_every,
            arrived_with=self.mover.digest_of,
        )
        self.add_callback(self._sentinel)
        self.add_callback(OptimizerTablesCallback())
        self.add_callback(FragmentationCallback(self.mover.device, self.transfer_report))

    # ---- the model ------------------------------------------------------------------------------------------

    def _move_model_to_device(self, model: nn.Module, device: torch.device) -> None:
        del device  # the mover knows better: it has the trainer's, or those of a split
        self._place(model)

    def create_accelerator_and_postprocess(self) -> None:
        """As upstream; the accelerator then leaves models where the mover put them."""
        super().create_accelerator_and_postprocess()
        # Even with the device right, `model.to("cpu:0")` copies every weight that is on "cpu".
        stock = self.accelerator.prepare_model
        self.accelerator.prepare_model = partial(_prepare_in_place, stock)

    def _place(self, model: nn.Module) -> None:
        if self.is_fsdp_enabled:
            self.shard_model(model)
        else:
            place(model, self.mover)
        verify_tables(model)
        keep_trainable_on_cpu(model)

    def place_tensor(self, tensor: Tensor, *, name: str, stage: str) -> Tensor:
        """Brings one host tensor to the device, verified (adapter and optimizer state on resume)."""
        return self.mover.move(tensor, name=self.name_of_state(name), stage=stage)

    def weight_coverage(self) -> Coverage:
        """How much of what the model keeps on its device was verified on the way there, and what others offload."""
        found = with_offloads(coverage(self.model, self.mover), self.args)
        return with_deepspeed(found, enabled=self.is_deepspeed_enabled)

    # ---- batches --------------------------------------------------------------------------------------------

    def _get_dataloader(self, *arguments: Any, **keywords: Any) -> DataLoader[Any]:
        prefetch = Prefetch(self.mover, self._prefetch_batches)
        loader = verify_loader(super()._get_dataloader(*arguments, **keywords), prefetch)
        if keywords.get("is_training"):
            self._training_prefetch = prefetch
        key = keywords.get("dataloader_key")
        if key is not None and self.args.dataloader_persistent_workers:
            self._eval_dataloaders[key] = loader  # filled inside with the stock object
        return loader

    def get_batch_samples(
        self, epoch_iterator: Iterator[Any], num_batches: int, device: torch.device
    ) -> tuple[list[Any], Any]:
        """As upstream; the window is then a list that begins transfers as it is iterated."""
        batches, count = super().get_batch_samples(epoch_iterator, num_batches, device)
        return self._training_prefetch.window(batches), count

    def _get_num_items_in_batch(self, batch_samples: list[Batch], device: torch.device) -> Any:
        """Counts label tokens on the host source: the device's copies have no verdict yet."""
        sources = [map_tensors(batch, self._host_source) for batch in batch_samples]
        across = self.args.average_tokens_across_devices
        self.args.average_tokens_across_devices = False  # the gather follows below, on verified counts
        try:
            count = super()._get_num_items_in_batch(sources, torch.device("cpu"))
        finally:
            self.args.average_tokens_across_devices = across
        if not torch.is_tensor(count):
            return count
        count = self.mover.move(count, name="num_items_in_batch", stage="batches")
        return self.accelerator.gather(count).sum() if across and self.args.world_size > 1 else count

    def _host_source(self, tensor: Tensor) -> Tensor:
        source = self.mover.host_source(tensor)
        return tensor if source is None else source

    def _prepare_inputs(self, inputs: Batch) -> Batch:
        """The last guard: every tensor has its verdict before ``forward`` sees it."""
        self.mover.step = self.state.global_step + 1
        self.mover.settle(inputs)
        unknown = [tensor for tensor in tree_tensors(inputs) if self.mover.provenance(tensor) is None]
        if any(tensor.device.type != "cpu" for tensor in unknown):
            self._refuse(inputs)
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

    def train(self, *arguments: Any, **keywords: Any) -> TrainOutput:
        """Trains, after a look at the coverage; raises as :meth:`require_coverage` too."""
        self.require_coverage()
        return super().train(*arguments, **keywords)

    def before_save(self) -> None:
        """Looks at every weight before anything is written."""
        super().before_save()
        self._sentinel.check_all(self.state.global_step)


def _prepare_in_place(
    stock: Callable[..., nn.Module],
    model: nn.Module,
    device_placement: bool | None = None,
    evaluation_mode: bool = False,
) -> nn.Module:
    return stock(model, device_placement=bool(device_placement), evaluation_mode=evaluation_mode)


def _new_mover(args: Any, settings: TransferSettings | None) -> Mover:
    if args is None:
        from accelerate import PartialState

        device = PartialState().device
    else:
        device = args.device
    return Mover(device, settings=settings or TransferSettings(), faults=FaultSpec.from_environment())


def _not_covered(found: Coverage) -> str:
    share = 100 * found.verified_bytes / max(found.device_bytes, 1)
    first = ", ".join(f"{row['tensor']} ({row['reason']})" for row in found.unverified[:3])
    more = f" and {len(found.unverified) - 3} more" if len(found.unverified) > 3 else ""
    return (
        f"--verify full covers {share:.1f} % of the model's bytes; not verified: {first}{more}. Load the model through "
        "this package, or consent with --consent_unverified (consent_unverified=True)"
    )
