"""Checkpoints that are verified before anything depends on them: save, read back, rename, push, rotate, in that order.

Upstream writes a checkpoint in place, pushes it and deletes older ones in one method, ``Trainer._save_checkpoint``.
`VerifiedCheckpointMixin` lets that method (with what TRL's trainers add to it) run inside a staging directory, which
``_get_output_dir`` names meanwhile; its push is held back, and its rotation finds nothing to delete there. Then the
files are compared with the live tensors, the manifest is written, and the directory is renamed into place.

Covered: adapters, whole models and optimizer state, on one process or several that share a file system; adapters that
FSDP2 has sharded, see `fsdp_state`. DeepSpeed: upstream's sharded files are staged and get a manifest (so a torn or
changed checkpoint is found), but are not compared with the live tensors, and upstream loads them; the manifest says so
(``extra.compared``).
"""

from __future__ import annotations

import logging
import shutil
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from accelerate.utils import broadcast_object_list
from transformers.trainer import OPTIMIZER_NAME, SCHEDULER_NAME, TRAINER_STATE_NAME
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from hf_rocm_tune.errors import CorruptionError, SeamError, UsageError
from hf_rocm_tune.integrity import manifest
from hf_rocm_tune.integrity.atomic import move_files, replace_directory
from hf_rocm_tune.models.shards import placer
from hf_rocm_tune.training import readback, restore
from hf_rocm_tune.training.checkpoint_push import PublishMixin
from hf_rocm_tune.training.fsdp_state import WholeState
from hf_rocm_tune.training.rotation import rotate
from hf_rocm_tune.training.run_record import mark_finished
from hf_rocm_tune.training.stage import Stage, drop_stage, failed, open_stage

if TYPE_CHECKING:
    from torch import Tensor, nn

logger = logging.getLogger(__name__)


class VerifiedCheckpointMixin(PublishMixin):
    """Stands in front of a ``transformers.Trainer`` subclass; see the module's description.

    Attributes:
        run_id: goes into every manifest; the caller sets it.
        files_verified: weight and optimizer files that were read back and equal the live tensors.
        file_mismatches: tensors in files that did not, each time they were read.
        saved_files: names that the last `save_model` put into its directory.
        whole_state: brings together what is saved of a model that FSDP2 has sharded; None for any other.

    Raises:
        CorruptionError: a file differs from the live tensors after it was written twice; what was there before stays.
        UsageError: the disk is full at the final save. At a checkpoint this is one line, and the run goes on.
    """

    run_id: str = ""
    files_verified: int = 0
    file_mismatches: int = 0
    saved_files: tuple[str, ...] = ()
    whole_state: WholeState | None = None

    def before_save(self) -> None:
        """Called on every rank before anything is saved; what it raises prevents the save."""

    def place_tensor(self, tensor: Tensor, *, name: str, stage: str) -> Tensor:
        """Brings a host tensor of a checkpoint to the device; ``stage`` is "adapter" or "optimizer".

        Here it stays on the host, from where upstream copies it, unverified.
        """
        del name, stage
        return tensor

    # ---- a checkpoint ---------------------------------------------------------------------------------------

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        self.before_save()
        final = Path(self._get_output_dir(trial=trial)) / f"{PREFIX_CHECKPOINT_DIR}-{self.state.global_step}"
        best_before = self.state.best_model_checkpoint
        stage = self._open_stage(final)
        try:
            if stage.usable:
                self._stage = stage
                stage.attempt(super()._save_checkpoint, model, trial)
            self._stage = None
            lost = failed(stage)
            if not lost:
                stage.attempt(self._publish_checkpoint, stage, final)
                lost = failed(stage)
        except BaseException:
            self.state.best_model_checkpoint = best_before
            raise
        finally:
            self._stage = None
            self._forget_whole()
            drop_stage(stage, rank=self.args.process_index)
        if lost:
            self.state.best_model_checkpoint = best_before
            self._say_not_saved(final)
            return
        if stage.push_wanted:
            self._push_from_checkpoint(str(final))
        if self.is_world_process_zero():
            rotate(final, limit=self.args.save_total_limit, best=self.state.best_model_checkpoint)

    def _publish_checkpoint(self, stage: Stage, final: Path) -> None:
        """Verify what upstream wrote and rename it; every rank names the best checkpoint by its final place."""
        staged = stage.root / final.name
        best = self.state.best_model_checkpoint
        moved = best is not None and Path(best).parent == stage.root
        if moved:
            self.state.best_model_checkpoint = str(final.parent / Path(best).name)
        if not self.is_world_process_zero():
            return
        if not staged.is_dir():
            raise SeamError(
                f"transformers did not write {final.name} where Trainer._get_output_dir said: this version of "
                "transformers is not supported, install the one named in pyproject.toml"
            )
        if moved:
            self.state.save_to_json(str(staged / TRAINER_STATE_NAME))
        tensors = self._read_back(staged, lambda: self._write_again(staged))
        extra = {"compared": not self._is_sharded()}
        manifest.write(
            staged,
            run_id=self.run_id,
            step=self.state.global_step,
            status="checkpoint",
            tensors=tensors,
            extra=extra,
        )
        replace_directory(staged, final)

    def _write_again(self, staged: Path) -> None:
        super().save_model(str(staged), _internal_call=True)
        if (staged / OPTIMIZER_NAME).exists():
            self._write_optimizer(str(staged))

    # What upstream calls while it writes a checkpoint: directed into the staging directory, and a failure is kept
    # until all ranks can hear of it, because the others wait in upstream's barrier.

    def _get_output_dir(self, trial: Any) -> str:
        if self._stage is not None:
            return str(self._stage.root)
        return super()._get_output_dir(trial)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        self._attempt(self._write_optimizer, output_dir)

    def _write_optimizer(self, output_dir: str) -> None:
        if self.whole_state is None:
            super()._save_optimizer_and_scheduler(output_dir)
            return
        state = self.whole_state.optimizer_state()
        if self.args.should_save:
            torch.save(state, Path(output_dir) / OPTIMIZER_NAME)
            torch.save(self.lr_scheduler.state_dict(), Path(output_dir) / SCHEDULER_NAME)

    def _save_scaler(self, output_dir: str) -> None:
        self._attempt(super()._save_scaler, output_dir)

    def _save_rng_state(self, output_dir: str) -> None:
        self._attempt(super()._save_rng_state, output_dir)

    def create_model_card(self, *arguments: Any, **keywords: Any) -> None:
        """As upstream; a full disk in the middle of a checkpoint is handled with that checkpoint."""
        self._attempt(super().create_model_card, *arguments, **keywords)

    def _attempt(self, write: Callable[..., None], *arguments: Any, **keywords: Any) -> None:
        if self._stage is not None:
            self._stage.attempt(write, *arguments, **keywords)
        else:
            write(*arguments, **keywords)

    # ---- the result -----------------------------------------------------------------------------------------

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Save model, tokenizer and arguments: staged, compared with the live tensors, then renamed one by one.

        A manifest that calls ``output_dir`` finished is removed first; `seal_output` writes the new one. A directory
        that is sealed and holds the live tensors is left as it is when a push asks for a save. Nothing is pushed here,
        because what has no manifest is not published: see `push_to_hub`.
        """
        if self._stage is not None:
            self._stage.attempt(super().save_model, output_dir, _internal_call=True)
            return
        destination = Path(output_dir or self.args.output_dir)
        if not (_internal_call and self._is_sealed(destination)):
            self.before_save()
            self._save_result(destination, super().save_model)

    def seal_output(self, output_dir: str | None = None, *, also: Iterable[str] = ()) -> None:
        """Write the final ``integrity.json`` over the files of the last `save_model` and ``also``: the run is done.

        Raises:
            OSError: a named file is not there, or the disk is full; then the directory does not look finished.
        """
        if self.is_world_process_zero():
            directory = Path(output_dir or self.args.output_dir)
            manifest.write(
                directory,
                run_id=self.run_id,
                step=self.state.global_step,
                status="final",
                files=[*self.saved_files, *also],
                extra={"compared": not self._is_sharded()},
            )
            mark_finished(directory)
        self.accelerator.wait_for_everyone()

    def _save_result(self, destination: Path, write: Callable[..., None]) -> None:
        stage = self._open_stage(destination / "model")
        try:
            if stage.usable:
                stage.attempt(self._write_result, stage.root, destination, write)
            lost = failed(stage)
            if not lost and self.is_world_process_zero():
                stage.attempt(self._publish_result, stage.root, destination, write)
            lost = lost or failed(stage)
        finally:
            self._forget_whole()
            drop_stage(stage, rank=self.args.process_index)
        if lost:
            raise UsageError(
                f"no space left in {destination}: the result was not saved. The checkpoints are intact: free some "
                "space and start the same command again"
            )

    def _write_result(self, root: Path, destination: Path, write: Callable[..., None]) -> None:
        card = destination / "README.md"
        if self.is_world_process_zero() and card.is_file():
            shutil.copyfile(card, root / card.name)  # PEFT adds to the card that it finds
        write(str(root), _internal_call=True)

    def _publish_result(self, root: Path, destination: Path, write: Callable[..., None]) -> None:
        self._read_back(root, lambda: write(str(root), _internal_call=True))
        (destination / manifest.MANIFEST_NAME).unlink(missing_ok=True)
        self.saved_files = tuple(move_files(root, destination))

    def _is_sealed(self, destination: Path) -> bool:
        sealed = False
        live = self._whole_model()
        if self.is_world_process_zero() and not self._is_sharded():
            found = manifest.inspect(destination)
            sealed = found.manifest is not None and found.manifest.status == "final" and not found.problems
            sealed = sealed and not readback.compare_model(destination, self._bare_model(), live).differing
        self._forget_whole()
        return bool(broadcast_object_list([sealed])[0])

    # ---- resuming -------------------------------------------------------------------------------------------

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        load = super()._load_from_checkpoint
        self._load_verified(Path(resume_from_checkpoint), lambda: load(resume_from_checkpoint, model))

    def _load_best_model(self) -> None:
        self._load_verified(Path(self.state.best_model_checkpoint), super()._load_best_model)

    def _load_verified(self, directory: Path, load: Callable[[], None]) -> None:
        """Check the manifest, load, and compare what is now live with the files.

        Raises:
            UsageError: a file is missing, damaged, or of another model.
            CorruptionError: the live tensors are not those of the files.
        """
        problems = manifest.verify(directory) if (directory / manifest.MANIFEST_NAME).exists() else []
        if problems:
            raise UsageError(f"{directory}: {problems[0]}; name an older checkpoint, or start afresh")
        model = self._bare_model()
        if hasattr(model, "peft_config") and not self._is_sharded():
            restore.load_adapters(directory, model, self._placer())
        else:
            load()
        if self._is_sharded() or not any(directory.glob("*.safetensors")):
            return
        differing = self._differing_from(directory)
        if differing:
            raise CorruptionError(
                f"{len(differing)} tensors differ from {directory} after loading it ({differing[0]} first): "
                "start the same command again; if it stays, run the doctor's transfer checks"
            )

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        path = Path(checkpoint or "") / OPTIMIZER_NAME
        scheduler = path.with_name(SCHEDULER_NAME)
        if checkpoint is None or self._is_sharded() or not (path.is_file() and scheduler.is_file()):
            super()._load_optimizer_and_scheduler(checkpoint)
            return
        restore.load_optimizer(path, self.optimizer, self._placer())
        self.lr_scheduler.load_state_dict(torch.load(scheduler, map_location="cpu", weights_only=True))

    # ---- reading back ---------------------------------------------------------------------------------------

    def _read_back(self, directory: Path, write_again: Callable[[], None]) -> dict[str, str]:
        """Digests of the tensors in ``directory``, which equal the live ones; a difference is written again, once."""
        if self._is_sharded():
            return {}
        tensors, differing = self._compare(directory)
        if differing:
            logger.warning(
                "%d tensors in %s differ from the live ones (%s first): written again",
                len(differing),
                directory.name,
                differing[0],
            )
            write_again()
            tensors, differing = self._compare(directory)
        if differing:
            raise CorruptionError(
                f"what was saved at step {self.state.global_step} differs from the live tensors, twice: "
                f"{', '.join(differing[:3])} ({len(differing)} in all). It was discarded and earlier checkpoints are "
                "intact: check the disk and the memory, then start the same command again"
            )
        return tensors

    def _compare(self, directory: Path) -> tuple[dict[str, str], list[str]]:
        found = [readback.compare_model(directory, self._bare_model(), self._whole_model())]
        if (directory / OPTIMIZER_NAME).exists():
            live = self.optimizer if self.whole_state is None else self.whole_state.kept_optimizer()
            found.append(readback.compare_optimizer(directory / OPTIMIZER_NAME, live))
        differing = [name for one in found for name in one.differing]
        verified = sum(one.files for one in found if not one.differing)
        self.files_verified += verified
        self.file_mismatches += len(differing)
        if (report := getattr(self, "transfer_report", None)) is not None:
            report.files(verified=verified, mismatches=len(differing))
        return {name: value for one in found for name, value in one.tensors.items()}, differing

    def _bare_model(self) -> nn.Module:
        return self.accelerator.unwrap_model(self.model, keep_torch_compile=False)

    def _is_sharded(self) -> bool:
        fsdp = self.is_fsdp_enabled and self.whole_state is None
        return bool(self.is_deepspeed_enabled or fsdp or self.is_distributed_loading_by_transformers)

    # ---- what FSDP2 has sharded -----------------------------------------------------------------------------

    def _whole_model(self) -> dict[str, Tensor] | None:
        """Trained weights of a sharded model, on rank 0; collective unless a save has brought them together."""
        return None if self.whole_state is None else self.whole_state.model()

    def _forget_whole(self) -> None:
        if self.whole_state is not None:
            self.whole_state.forget()

    def _placer(self) -> Callable[..., Tensor]:
        return self.place_tensor if self.whole_state is None else placer(self._bare_model(), self.place_tensor)

    def _differing_from(self, directory: Path) -> list[str]:
        """Names of tensors in files that are not the live ones, on every rank."""
        live = self._whole_model()
        if self.whole_state is None:
            return readback.compare_model(directory, self._bare_model()).differing
        found: list[str] = []
        if self.is_world_process_zero():
            found = readback.compare_model(directory, self._bare_model(), live).differing
        self._forget_whole()
        return list(broadcast_object_list([found])[0])

    # ---- several ranks --------------------------------------------------------------------------------------

    def _open_stage(self, final: Path) -> Stage:
        if self.args.save_on_each_node and self.args.world_size > 1:
            raise UsageError(
                "--save_on_each_node makes checkpoints in parts: leave it out and share output_dir instead"
            )
        adapter = hasattr(self._bare_model(), "peft_config")
        written = (p for p in self.model.parameters() if p.requires_grad or not adapter)
        need_bytes = sum(parameter.numel() * parameter.element_size() for parameter in written)
        return open_stage(final, rank=self.args.process_index, need_bytes=need_bytes)

    def _say_not_saved(self, final: Path) -> None:
        if self.is_world_process_zero():
            logger.warning(
                "No space left in %s: %s was not saved. Earlier checkpoints are intact, training goes on, and the next "
                "save tries again: free some space.",
                final.parent,
                final.name,
            )
