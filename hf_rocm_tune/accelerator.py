"""`VerifiedAccelerator`: Accelerate's `Accelerator` with verified transfers, for loops written for it.

    accelerator = VerifiedAccelerator(mixed_precision="bf16")   # in place of Accelerator(...); the rest stays

Every copy between host and card is verified (`engine.VerifiedTransfers`), also of what is never prepared: VAE, text
encoders, EMA. A prepared loader sends the next batch while one is in use, a prepared optimizer is watched, and
`save_state` and `load_state` seal and check what they write and read. Not covered: batches that rank 0 broadcasts to
other ranks (``dispatch_batches``), and collectives.
"""

from __future__ import annotations

import logging
import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.data_loader import DataLoaderShard
from accelerate.utils import DistributedType
from torch import nn
from typing_extensions import override

from hf_rocm_tune.data.loader import Prefetch, verify_loader
from hf_rocm_tune.engine import REPORT_NAME, VerifiedTransfers
from hf_rocm_tune.errors import CorruptionError, listed
from hf_rocm_tune.models.files import sums
from hf_rocm_tune.saved_result import digests_in, digests_of
from hf_rocm_tune.survive import manifest
from hf_rocm_tune.survive.atomic import create_staging, move_files
from hf_rocm_tune.transfer import Digest, named_tensors

logger = logging.getLogger(__name__)

_REPLICAS = (DistributedType.NO, DistributedType.MULTI_GPU, DistributedType.MULTI_CPU)  # each process has all weights


class VerifiedAccelerator(Accelerator):
    """As `Accelerator`, with every copy verified.

    Args:
        transfers: the engine; None: a new one for this process's device, closed by `end_training`.

    Attributes:
        transfers: the engine, for `VerifiedTransfers.check`, `VerifiedTransfers.save` and the report.

    Raises, from what copies, prepares, steps, saves or loads:
        CorruptionError: a tensor could not be transferred correctly, or a saved state is not what was written.
        MemoryFaultError: a watched tensor changed in memory.
    """

    def __init__(self, *arguments: Any, transfers: VerifiedTransfers | None = None, **keywords: Any) -> None:
        super().__init__(*arguments, **keywords)
        self._saved_models: list[nn.Module] = []  # in the order in which upstream saves them
        self._saved_optimizers: list[Any] = []
        self.transfers = transfers or VerifiedTransfers(self.device)

    @override
    def prepare_data_loader(
        self, data_loader: Any, device_placement: Any = None, slice_fn_for_dispatch: Any = None
    ) -> Any:
        """As upstream; each batch is handed out verified, and the next one crosses meanwhile."""
        loader = super().prepare_data_loader(data_loader, device_placement, slice_fn_for_dispatch)
        places = self.device_placement if device_placement is None else device_placement
        if not places or not isinstance(loader, DataLoaderShard) or isinstance(loader, _VerifiedBatches):
            return loader
        return _verified(loader, self.transfers)

    @override
    def prepare_model(self, model: nn.Module, device_placement: Any = None, evaluation_mode: bool = False) -> nn.Module:
        """As upstream; its frozen weights are watched."""
        prepared: nn.Module = super().prepare_model(model, device_placement, evaluation_mode)
        self.transfers.watch(model)
        if all(known is not prepared for known in self._saved_models):
            self._saved_models.append(prepared)
        return prepared

    @override
    def prepare_optimizer(self, optimizer: torch.optim.Optimizer, device_placement: Any = None) -> Any:
        """As upstream; what it trains and its state are watched."""
        prepared = super().prepare_optimizer(optimizer, device_placement)
        self.transfers.watch(prepared)
        if all(known is not prepared for known in self._saved_optimizers):
            self._saved_optimizers.append(prepared)
        return prepared

    @override
    def skip_first_batches(self, dataloader: Any, num_batches: int = 0) -> Any:
        """As upstream; the rest of the batches is handed out verified, too."""
        rest = super().skip_first_batches(dataloader, num_batches)
        if isinstance(dataloader, _VerifiedBatches) and isinstance(rest, DataLoaderShard):
            return _verified(rest, self.transfers)
        return rest

    @override
    def save_state(self, output_dir: str | None = None, safe_serialization: bool = True, **keywords: Any) -> Any:
        """As upstream; what is watched is checked first, and what was written is compared and sealed.

        A single process writes aside, and the files take their place when they are right.
        """
        self.transfers.check()
        if output_dir is None or self.num_processes > 1 or self.project_configuration.automatic_checkpoint_naming:
            written = super().save_state(output_dir, safe_serialization, **keywords)
            self.wait_for_everyone()
            if self.is_main_process:
                self._seal(Path(written), Path(written))
            return written
        final = Path(output_dir)
        staging = create_staging(final)
        try:
            super().save_state(str(staging), safe_serialization, **keywords)
            self._seal(staging, final)
            move_files(staging, final)
        finally:
            shutil.rmtree(staging, ignore_errors=True)
        return str(final)

    @override
    def load_state(self, input_dir: str | None = None, load_kwargs: Any = None, **keywords: Any) -> None:
        """As upstream, after the files were compared with their manifest."""
        directory = Path(input_dir) if input_dir is not None else self._newest_state()
        if directory is not None:
            self._require_intact(directory)
        super().load_state(input_dir, load_kwargs, **keywords)

    @override
    def free_memory(self, *objects: Any) -> Any:
        """As upstream; nothing is watched any more."""
        self.transfers.forget()
        self._saved_models, self._saved_optimizers = [], []
        return super().free_memory(*objects)

    @override
    def end_training(self) -> None:
        """As upstream, after a last check of everything that is watched; copies are torch's own from then on."""
        self.transfers.check()
        super().end_training()
        if self.is_main_process and self.project_dir is not None:
            self.transfers.write_report(self.project_dir)
        self.transfers.close()

    # ---- saved states ---------------------------------------------------------------------------------------

    def _seal(self, directory: Path, final: Path) -> None:
        """Compare what was written with the live tensors, then write the manifest.

        A file that a hook of the program has written in its own way, and shards of FSDP and DeepSpeed, are sealed
        without a comparison.
        """
        wrong: list[str] = []
        if self.distributed_type in _REPLICAS:
            for number, model in enumerate(self._saved_models):
                file = directory / f"model{'' if number == 0 else f'_{number}'}.safetensors"
                if file.is_file():
                    stored = {name: row.digest for name, row in sums(file, from_disk=True).tensors.items()}
                    wrong += _differing(self.get_state_dict(model, unwrap=False), stored, file.name)
            for number, optimizer in enumerate(self._saved_optimizers):
                file = directory / f"optimizer{'' if number == 0 else f'_{number}'}.bin"
                if file.is_file():
                    wrong += _differing(dict(named_tensors(optimizer.state_dict())), digests_in(file), file.name)
        if wrong:
            raise CorruptionError(
                f"{final}: the saved state is not what is in memory: {listed(wrong)} differ when they are read "
                "back. Older states are intact; run the doctor and check the disk"
            )
        manifest.write(directory, run_id="", step=self.transfers.step, status="checkpoint", files=_files(directory))

    def _require_intact(self, directory: Path) -> None:
        if not directory.is_dir():
            return  # upstream says so
        problems, written = manifest.inspect(directory)
        if written is None and problems and problems[0].kind == "missing":
            logger.warning("%s has no %s: its files cannot be checked", directory, manifest.MANIFEST_NAME)
        elif problems:
            raise CorruptionError(
                f"{directory} is not what was saved: {listed([str(problem) for problem in problems])}. It was not "
                "loaded: load an older state"
            )

    def _newest_state(self) -> Path | None:
        """Where upstream loads from without a directory: the checkpoint with the highest number."""
        folder = Path(self.project_dir or ".") / "checkpoints"
        if not folder.is_dir():
            return None
        numbered: dict[int, str] = {}
        for name in os.listdir(folder):
            number = re.search(r"\d+$", name)
            if number:
                numbered.setdefault(int(number[0]), name)
        if not numbered:
            return None
        return folder / numbered[max(numbered)]


class _VerifiedBatches(DataLoaderShard):
    """A ``DataLoaderShard`` that no longer moves tensors to the device: its inner loader starts the transfers."""

    _transfers: VerifiedTransfers
    _prefetch: Prefetch

    def __iter__(self) -> Iterator[Any]:
        for batch in super().__iter__():
            yield self._transfers.deliver(self._prefetch.begin(batch))


def _verified(loader: DataLoaderShard, transfers: VerifiedTransfers) -> Any:
    prefetch = Prefetch(transfers.mover)
    verified: Any = verify_loader(loader, prefetch, shard=_VerifiedBatches)
    verified._transfers, verified._prefetch = transfers, prefetch
    return verified


def _files(directory: Path) -> list[str]:
    return [name for name in manifest.list_files(directory) if name != REPORT_NAME]


def _differing(live: dict[str, torch.Tensor], stored: dict[str, Digest], file: str) -> list[str]:
    """The tensors that a file holds with other bytes, or lacks: of several that share memory it has one."""
    digests = digests_of(live)
    kept = {live[name].untyped_storage()._cdata for name in stored.keys() & live.keys()}
    lacking = [name for name in live if name not in stored and live[name].untyped_storage()._cdata not in kept]
    other = [name for name, digest in stored.items() if digests.get(name) != digest]
    return [f"{name} in {file}" for name in (*lacking, *other)]
