"""Checkpoints that are verified before anything depends on them: save, read back, rename, push, rotate, in that order.

Upstream writes a checkpoint in place, pushes it and deletes older ones in one method, ``Trainer._save_checkpoint``.
`VerifiedCheckpointMixin` lets that method (with what TRL's trainers add to it) run inside a staging directory, which
``_get_output_dir`` names meanwhile; its push is held back, and its rotation finds nothing to delete there. Then the
files are compared with the live tensors, the manifest is written, and the directory is renamed into place.

Covered: adapters, whole models and optimizer state, on one process or several that share a file system. DeepSpeed and
FSDP: upstream's sharded files are staged and get a manifest (so a torn or changed checkpoint is found), but are not
compared with the live tensors, and upstream loads them; the manifest says so (``extra.compared``).
"""

from __future__ import annotations

import logging
import shutil
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import torch
from accelerate.utils import broadcast_object_list
from transformers.trainer import OPTIMIZER_NAME, SCHEDULER_NAME, TRAINER_STATE_NAME
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from hf_rocm_tune.errors import CorruptionError, SeamError, UsageError
from hf_rocm_tune.integrity import manifest
from hf_rocm_tune.integrity.atomic import move_files, replace_directory
from hf_rocm_tune.training import readback, restore
from hf_rocm_tune.training.rotation import rotate
from hf_rocm_tune.training.run_record import mark_finished
from hf_rocm_tune.training.stage import Stage, drop_stage, failed, open_stage

if TYPE_CHECKING:
    from torch import Tensor, nn
    from transformers import Trainer as _Base
else:
    _Base = object

logger = logging.getLogger(__name__)


class Publisher(Protocol):
    """Who uploads; what is uploaded is a directory that has been verified and has its manifest."""

    def checkpoint(self, directory: Path) -> None:
        """A checkpoint is in place; a Hub that fails must not end the training."""

    def result(self, directory: Path) -> Any:
        """The run is finished; raises where the result is not on the Hub when this returns."""


class VerifiedCheckpointMixin(_Base):
    """Stands in front of a ``transformers.Trainer`` subclass; see the module's description.

    Attributes:
        run_id: goes into every manifest; the caller sets it.
        files_verified: weight and optimizer files that were read back and equal the live tensors.
        file_mismatches: tensors in files that did not, each time they were read.
        saved_files: names that the last `save_model` put into its directory.
        publisher: who uploads, on the first rank; the caller sets it before a training with ``push_to_hub``.

    Raises:
        CorruptionError: a file differs from the live tensors after it was written twice; what was there before stays.
        UsageError: the disk is full at the final save. At a checkpoint this is one line, and the run goes on.
    """

    run_id: str = ""
    files_verified: int = 0
    file_mismatches: int = 0
    saved_files: tuple[str, ...] = ()
    publisher: Publisher | None = None
    _stage: Stage | None = None

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
            super()._save_optimizer_and_scheduler(str(staged))

    # What upstream calls while it writes a checkpoint: directed into the staging directory, and a failure is kept
    # until all ranks can hear of it, because the others wait in upstream's barrier.

    def _get_output_dir(self, trial: Any) -> str:
        if self._stage is not None:
            return str(self._stage.root)
        return super()._get_output_dir(trial)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        self._attempt(super()._save_optimizer_and_scheduler, output_dir)

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
        if self.is_world_process_zero() and not self._is_sharded():
            found = manifest.inspect(destination)
            sealed = found.manifest is not None and found.manifest.status == "final" and not found.problems
            sealed = sealed and not readback.compare_model(destination, self._bare_model()).differing
        return bool(broadcast_object_list([sealed])[0])

    # ---- the Hub --------------------------------------------------------------------------------------------

    def train(self, *arguments: Any, **keywords: Any) -> Any:
        """As upstream; a push for which nobody is there is refused at the beginning, not at the first checkpoint."""
        if self.args.push_to_hub:
            self._require_publisher()
        return super().train(*arguments, **keywords)

    def init_hf_repo(self, token: str | None = None, private: bool | None = None) -> None:
        """Upstream makes the repository here, while the trainer is built; whoever uploads has made it, or will."""
        del token, private
        self.hub_model_id = self.args.hub_model_id

    def push_to_hub(self, *arguments: Any, **keywords: Any) -> Any:
        """Save and seal the result where that has not been done, and have the publisher upload it. Collective.

        Upstream's arguments are not used: the publisher has its own.
        """
        del arguments, keywords
        self._require_publisher()
        output_dir = Path(self.args.output_dir)
        if not self._is_sealed(output_dir):
            self.save_model(_internal_call=True)
            self.seal_output()
        if self.publisher is None or not self.is_world_process_zero():
            return None
        self.callback_handler.on_push_begin(self.args, self.state, self.control)
        return self.publisher.result(output_dir)

    def _push_from_checkpoint(self, checkpoint_folder: str) -> None:
        if self._stage is not None:
            self._stage.push_wanted = True
        elif self.publisher is not None and self.is_world_process_zero():
            self.callback_handler.on_push_begin(self.args, self.state, self.control)
            self.publisher.checkpoint(Path(checkpoint_folder))

    def _require_publisher(self) -> None:
        if not broadcast_object_list([self.publisher is not None])[0]:
            raise UsageError(
                "push_to_hub needs a publisher: set trainer.publisher to a hf_rocm_tune.publish.hub_during.Publisher, "
                "or train without it and run `hf-rocm-tune push` on the result"
            )

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
            restore.load_adapters(directory, model, self.place_tensor)
        else:
            load()
        if self._is_sharded() or not any(directory.glob("*.safetensors")):
            return
        differing = readback.compare_model(directory, model).differing
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
        restore.load_optimizer(path, self.optimizer, self.place_tensor)
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
        found = [readback.compare_model(directory, self._bare_model())]
        if (directory / OPTIMIZER_NAME).exists():
            found.append(readback.compare_optimizer(directory / OPTIMIZER_NAME, self.optimizer))
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
        return bool(self.is_deepspeed_enabled or self.is_fsdp_enabled or self.is_distributed_loading_by_transformers)

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
