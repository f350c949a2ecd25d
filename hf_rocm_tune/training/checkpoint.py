"""Checkpoints that are verified before anything depends on them: save, read back, rename, push, rotate, in that order.

Upstream writes a checkpoint in place, pushes it and deletes older ones in one method, ``Trainer._save_checkpoint``.
`VerifiedCheckpointMixin` lets that method (with what TRL's trainers add to it) run inside a staging directory, which
``_get_output_dir`` names meanwhile; its push is held back, and its rotation finds nothing to delete there. Then every
file is read once: what was read is compared with what is live, and its SHA-256 goes into the manifest together with the
digests of what was live. A file that differs is written again, another way each time, while the training waits. The
directory is renamed into place at the end. A resumed run compares what it holds after loading with those digests.

Covered: adapters, whole models and the state of optimizer, scheduler, scaler and random generators, on one process or
several that share a file system; adapters that FSDP2 has sharded, see `fsdp_state`. DeepSpeed: upstream's sharded files
are staged and get a manifest (so a torn or changed checkpoint is found), but are not compared with what is live, and
upstream loads them; the manifest says so (``extra.compared``).
"""

from __future__ import annotations

import logging
import os
import shutil
from collections.abc import Callable, Collection, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import torch
from accelerate.utils import broadcast_object_list, gather_object
from transformers.trainer import OPTIMIZER_NAME, SCALER_NAME, SCHEDULER_NAME, TRAINER_STATE_NAME
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR, SaveStrategy, get_last_checkpoint
from typing_extensions import override

from hf_rocm_tune.errors import CorruptionError, SeamError, TuneError, UsageError
from hf_rocm_tune.integrity import manifest
from hf_rocm_tune.integrity.atomic import create_staging, move_files, replace_directory
from hf_rocm_tune.models.shards import placer
from hf_rocm_tune.training import readback, restore
from hf_rocm_tune.training.artefacts import claim, make_room
from hf_rocm_tune.training.fsdp_state import WholeState
from hf_rocm_tune.training.readback import Readback
from hf_rocm_tune.training.rotation import rotate
from hf_rocm_tune.training.run_record import mark_finished
from hf_rocm_tune.training.stage import Stage, drop_stage, failed, open_stage

if TYPE_CHECKING:
    from torch import Tensor, nn
    from transformers import Trainer as _Base
else:
    _Base = object

logger = logging.getLogger(__name__)

_WRITES = 6  # as many as a transfer has
_READS = 3


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
        publisher: who uploads, on the first rank; the caller sets it before a training with ``push_to_hub``.
        files_verified: files that were read back and equal what is live.
        file_mismatches: tensors and values in files that did not, each time they were read.
        whole_state: brings together what is saved of a model that FSDP2 has sharded; None for any other.

    Raises:
        CorruptionError: a file still differs from what is live after all ways of writing it; what was there before
            stays. Or what is live after loading is not what was saved.
        UsageError: the disk is full at the final save. At a checkpoint this is one line, and the run goes on. Or the
            checkpoint to resume from is damaged, incomplete, or of another model.
    """

    run_id: str = ""
    publisher: Publisher | None = None
    files_verified: int = 0
    file_mismatches: int = 0
    whole_state: WholeState | None = None
    _stage: Stage | None = None
    _saved: Mapping[str, manifest.FileEntry] = {}
    _saved_digests: Mapping[str, str] = {}

    def before_save(self) -> None:
        """Called on every rank before anything is saved; what it raises prevents the save."""

    def place_tensor(self, tensor: Tensor, *, name: str, stage: str) -> Tensor:
        """Brings a host tensor of a checkpoint to the device; ``stage`` is "adapter" or "optimizer".

        Here it stays on the host, from where upstream copies it, unverified.
        """
        del name, stage
        return tensor

    @override
    def train(self, resume_from_checkpoint: Any = None, *arguments: Any, **keywords: Any) -> Any:
        """As upstream; what is certain to fail is refused at once: a push that nobody does, half a checkpoint."""
        if self.args.push_to_hub:
            self._require_publisher()
        if resume_from_checkpoint is True:
            resume_from_checkpoint = get_last_checkpoint(self.args.output_dir) or True
        if isinstance(resume_from_checkpoint, str | os.PathLike) and not self._is_sharded():
            restore.require_complete(Path(resume_from_checkpoint))
        return super().train(resume_from_checkpoint, *arguments, **keywords)

    # ---- a checkpoint ---------------------------------------------------------------------------------------

    @override
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
            lost = failed(stage) or self._publish_checkpoint(stage, final)
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

    def _publish_checkpoint(self, stage: Stage, final: Path) -> bool:
        """Verify what upstream wrote, each rank its own, and rename it; whether the disk is full. Collective."""
        staged = stage.root / final.name
        stage.attempt(self._name_best, staged, final)
        found: dict[str, Readback] = {}
        stage.attempt(lambda: found.update(self._verified(staged, self._live_states())))
        if failed(stage):
            return True
        for others in gather_object([found]):
            found |= others
        if self.is_world_process_zero():
            stage.attempt(self._seal_checkpoint, staged, final, found)
        return failed(stage)

    def _name_best(self, staged: Path, final: Path) -> None:
        """Upstream looks for the best checkpoint beside the one that it writes, where earlier ones are not now."""
        if self.state.best_global_step and self.args.save_strategy != SaveStrategy.NO:
            best = final.with_name(f"{PREFIX_CHECKPOINT_DIR}-{self.state.best_global_step}")
            if best == final or best.is_dir():
                self.state.best_model_checkpoint = str(best)
        if self.is_world_process_zero():
            if not staged.is_dir():
                raise SeamError(
                    f"transformers did not write {final.name} where Trainer._get_output_dir said: this version of "
                    "transformers is not supported, install the one named in pyproject.toml"
                )
            self.state.save_to_json(str(staged / TRAINER_STATE_NAME))

    def _seal_checkpoint(self, staged: Path, final: Path, found: Mapping[str, Readback]) -> None:
        manifest.write(
            staged,
            run_id=self.run_id,
            step=self.state.global_step,
            status="checkpoint",
            entries={name: one.entry for name, one in found.items() if one.entry is not None},
            tensors={label: value for one in found.values() for label, value in one.digests.items()},
            extra={"compared": not self._is_sharded()},
        )
        if (aside := make_room(final, self.run_id)) is not None:
            logger.warning("%s was there and not this run's: it is now %s", final.name, aside.name)
        replace_directory(staged, final)

    def _live_states(self) -> dict[str, Any]:
        """Content of the files beside the weights that this rank writes, by name, from what is live."""
        states: dict[str, Any] = {}
        if self.is_world_process_zero():
            states[TRAINER_STATE_NAME] = self.state
        if self.args.save_only_model:
            return states
        states |= self._random_states()
        if self.is_world_process_zero() and not self._is_sharded():
            states[OPTIMIZER_NAME] = self._optimizer_state()
            states[SCHEDULER_NAME] = self.lr_scheduler.state_dict()
        if self.is_world_process_zero() and (scaler := getattr(self.accelerator, "scaler", None)) is not None:
            states[SCALER_NAME] = scaler.state_dict()
        return states

    def _random_states(self) -> dict[str, Any]:
        several = self.args.world_size > 1
        states: dict[str, Any] = {restore.rng_file(self.args): restore.random_states(all_cards=several)}
        if len(cards := self._cards()) > 1:
            states[restore.RNG_OF_CARDS] = [torch.cuda.get_rng_state(card) for card in cards]
        return states

    def _cards(self) -> tuple[torch.device, ...]:
        return getattr(self, "devices", ())  # of a model whose layers are split, see `split`

    def _optimizer_state(self) -> dict[str, Any]:
        if self.whole_state is not None:
            return self.whole_state.optimizer_state()
        state: dict[str, Any] = self.optimizer.state_dict()
        return state

    # What upstream calls while it writes a checkpoint: directed into the staging directory, and a failure is kept
    # until all ranks can hear of it, because the others wait in upstream's barrier.

    @override
    def _get_output_dir(self, trial: Any) -> str:
        if self._stage is not None:
            return str(self._stage.root)
        return super()._get_output_dir(trial)

    @override
    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        if self.whole_state is None:
            self._attempt(super()._save_optimizer_and_scheduler, output_dir)
        else:
            self._attempt(self._write_whole_optimizer, Path(output_dir))

    def _write_whole_optimizer(self, directory: Path) -> None:
        state = self._optimizer_state()  # collective
        if self.args.should_save:
            torch.save(state, directory / OPTIMIZER_NAME)
            torch.save(self.lr_scheduler.state_dict(), directory / SCHEDULER_NAME)

    @override
    def _save_scaler(self, output_dir: str) -> None:
        self._attempt(super()._save_scaler, output_dir)

    @override
    def _save_rng_state(self, output_dir: str) -> None:
        self._attempt(super()._save_rng_state, output_dir)
        if len(self._cards()) > 1:
            states = self._random_states()[restore.RNG_OF_CARDS]
            self._attempt(torch.save, states, Path(output_dir) / restore.RNG_OF_CARDS)

    @override
    def create_model_card(self, *arguments: Any, **keywords: Any) -> None:
        """As upstream; a full disk in the middle of a checkpoint is handled with that checkpoint."""
        self._attempt(super().create_model_card, *arguments, **keywords)

    def _attempt(self, write: Callable[..., None], *arguments: Any, **keywords: Any) -> None:
        if self._stage is not None:
            self._stage.attempt(write, *arguments, **keywords)
        else:
            write(*arguments, **keywords)

    # ---- the result -----------------------------------------------------------------------------------------

    @override
    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Save model, tokenizer and arguments: staged, compared with what is live, then renamed one by one.

        A manifest that calls ``output_dir`` finished is removed first; `seal_output` writes the new one. A directory
        that is sealed and holds the live tensors is left as it is when a push asks for a save. Nothing is pushed here,
        because what has no manifest is not published: see `push_to_hub`.
        """
        if self._stage is not None:
            self._stage.attempt(super().save_model, output_dir, _internal_call=True)
            return
        destination = Path(output_dir or self.args.output_dir)
        if not (_internal_call and self._is_sealed(destination)):
            self._save_result(destination)

    def seal_output(self, output_dir: str | None = None, *, also: Iterable[str] = ()) -> None:
        """Write the final ``integrity.json`` over the files of the last `save_model` and ``also``: the run is done.

        A file that is no longer what `save_model` verified is saved again first.

        Raises:
            OSError: a named file is not there, or the disk is full; then the directory does not look finished.
            CorruptionError: files of the result change again and again.
        """
        directory, entries = Path(output_dir or self.args.output_dir), {}
        if self.is_world_process_zero():
            entries = {name: manifest.entry_of(directory / name) for name in also}
        for _ in range(_WRITES):
            saved = {name: entry for name, entry in self._saved.items() if name not in entries}
            changed = [problem.file for problem in manifest.compare(directory, saved)]
            changed = broadcast_object_list([changed])[0]
            if not changed:
                break
            logger.warning("%s changed after it was verified: saved again", ", ".join(changed))
            self.file_mismatches += len(changed)
            self._save_result(directory, only=changed)
        else:
            raise CorruptionError(
                f"{', '.join(changed)} in {directory} changed after {_WRITES} verified saves: find out what writes "
                "there, check the disk, and start the same command again"
            )
        if self.is_world_process_zero():
            manifest.write(
                directory,
                run_id=self.run_id,
                step=self.state.global_step,
                status="final",
                files=[*saved, *entries],
                entries={**saved, **entries},
                tensors=self._saved_digests,
                extra={"compared": not self._is_sharded()},
            )
            mark_finished(directory)
        self.accelerator.wait_for_everyone()

    def _save_result(self, destination: Path, *, only: Collection[str] | None = None) -> None:
        """Save into ``destination``, all files or some. Collective."""
        self.before_save()
        stage = self._open_stage(destination / "model")
        try:
            if stage.usable:
                stage.attempt(self._write_result, stage.root, destination)
            lost = failed(stage)
            if not lost and self.is_world_process_zero():
                stage.attempt(self._publish_result, stage.root, destination, only)
            lost = lost or failed(stage)
        finally:
            self._forget_whole()
            drop_stage(stage, rank=self.args.process_index)
        if lost:
            raise UsageError(
                f"no space left in {destination}: the result was not saved. The checkpoints are intact: free some "
                "space and start the same command again"
            )

    def _write_result(self, root: Path, destination: Path) -> None:
        card = destination / "README.md"
        if self.is_world_process_zero() and card.is_file():
            shutil.copyfile(card, root / card.name)  # PEFT adds to the card that it finds
        super().save_model(str(root), _internal_call=True)

    def _publish_result(self, root: Path, destination: Path, only: Collection[str] | None) -> None:
        found = self._verified(root, {})
        entries = {}
        for name in manifest.list_files(root):
            if only is None or name in only:
                known = found[name].entry if name in found else None
                entries[name] = known or manifest.entry_of(root / name)
            else:
                (root / name).unlink()
        claim(root, destination)
        (destination / manifest.MANIFEST_NAME).unlink(missing_ok=True)
        move_files(root, destination)
        self._saved = entries if only is None else {**self._saved, **entries}
        self._saved_digests = {label: value for one in found.values() for label, value in one.digests.items()}

    def _is_sealed(self, destination: Path) -> bool:
        sealed = False
        live = self._whole_model()
        if self.is_world_process_zero() and not self._is_sharded():
            found = manifest.inspect(destination)
            sealed = found.manifest is not None and found.manifest.status == "final" and not found.problems
            sealed = sealed and not _differing(readback.compare_model(destination, self._bare_model(), live))
        self._forget_whole()
        return bool(broadcast_object_list([sealed])[0])

    # ---- pushing --------------------------------------------------------------------------------------------

    @override
    def init_hf_repo(self, token: str | None = None, private: bool | None = None) -> None:
        """Upstream makes the repository here, while the trainer is built; whoever uploads has made it, or will."""
        del token, private
        self.hub_model_id = self.args.hub_model_id

    @override
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

    @override
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

    @override
    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        load = super()._load_from_checkpoint
        self._load_verified(Path(resume_from_checkpoint), lambda: load(resume_from_checkpoint, model))

    @override
    def _load_best_model(self) -> None:
        self._load_verified(Path(self.state.best_model_checkpoint), super()._load_best_model)

    def _load_verified(self, directory: Path, load: Callable[[], None]) -> None:
        """Check the manifest, load, and compare what is live then with what was live at the save, or with the files."""
        problems = manifest.verify(directory) if (directory / manifest.MANIFEST_NAME).exists() else []
        if problems:
            raise UsageError(f"{directory}: {problems[0]}; name an older checkpoint, or start afresh")
        if self._is_sharded():
            load()
            return
        model = self._bare_model()
        set_weights = restore.load_adapters if hasattr(model, "peft_config") else restore.load_model

        def load_once() -> list[str]:
            set_weights(directory, model, self._placer())
            return self._differing_from(directory)

        _until_equal(load_once, str(directory))

    @override
    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        path = Path(checkpoint or "") / OPTIMIZER_NAME
        if checkpoint is None or self._is_sharded() or not path.is_file():
            super()._load_optimizer_and_scheduler(checkpoint)
            return
        optimizer, scheduler = self.optimizer, self.lr_scheduler
        place = self._placer()
        self._restore(path, lambda state: restore.load_optimizer(state, optimizer, place), optimizer.state_dict)
        self._restore(path.with_name(SCHEDULER_NAME), scheduler.load_state_dict, scheduler.state_dict)

    @override
    def _load_scaler(self, checkpoint: str | None) -> None:
        path = Path(checkpoint or "") / SCALER_NAME
        if checkpoint is None or not path.is_file():
            return
        scaler = getattr(self.accelerator, "scaler", None)
        if scaler is None:
            raise UsageError(f"{path.parent} was trained with a gradient scaler: resume it with --fp16 true")
        self._restore(path, scaler.load_state_dict, scaler.state_dict)

    @override
    def _load_rng_state(self, checkpoint: str | None) -> None:
        load = super()._load_rng_state
        path = Path(checkpoint or "") / restore.rng_file(self.args)
        if checkpoint is None or not path.is_file():  # upstream tells of one that is of another number of ranks
            load(checkpoint)
            return

        def set_here(states: Any) -> None:
            load(checkpoint)
            if not torch.cuda.is_available():
                states.pop("cuda", None)  # saved on a card, and of no use here

        self._restore(path, set_here, lambda: self._random_states()[path.name])
        cards = path.with_name(restore.RNG_OF_CARDS)
        if len(self._cards()) > 1 and cards.is_file():

            def set_all(states: Any) -> None:
                for device, state in zip(self._cards(), states, strict=True):
                    torch.cuda.set_rng_state(state, device)

            self._restore(cards, set_all, lambda: self._random_states()[restore.RNG_OF_CARDS])

    def _restore(self, path: Path, load: Callable[[Any], Any], live: Callable[[], Any]) -> None:
        """Read saved state once, as it was saved, use it, and find it live."""
        found = manifest.read(path.parent)
        wanted = found.tensors if isinstance(found, manifest.Manifest) else {}
        recorded = {label: value for label, value in wanted.items() if label.startswith(f"{path.name}:")}

        def load_once() -> list[str]:
            state, read = readback.read_state(path)
            if read.entry is None and not recorded:
                raise UsageError(f"{path.parent}: {read.differing[0]}; name an older checkpoint, or start afresh")
            differing = [label for label in recorded if read.digests.get(label) != recorded[label]]
            if differing:
                return read.differing or differing
            try:
                load(state)
            except (TuneError, torch.OutOfMemoryError):
                raise
            except (RuntimeError, ValueError, KeyError, TypeError, AttributeError) as error:
                raise UsageError(
                    f"{path} cannot be resumed from: {error}; name another checkpoint or start afresh"
                ) from error
            return [f"{path.name}:{name}" for name in readback.not_taken_over(state, live())]

        _until_equal(load_once, str(path.parent))

    # ---- reading back ---------------------------------------------------------------------------------------

    def _verified(self, directory: Path, states: Mapping[str, Any]) -> dict[str, Readback]:
        """Every file of this rank in ``directory`` as it is found equal to what is live, written again where it is not.

        Each time all is written to another directory, so that a bad place on the disk stays taken meanwhile; from the
        third time on from copies that were compared with the device on their way to the host.
        """
        found = self._compare(directory, states)
        for again in range(1, _WRITES):
            bad = [name for name, one in found.items() if one.differing]
            if not bad:
                return found
            logger.warning("%s: not what is live (%s first): written again", directory.name, found[bad[0]].differing[0])
            scratch = create_staging(directory)
            try:
                self._write_again(scratch, states, fetched=again > 1)
                for name, one in self._compare(scratch, states).items():
                    if name in bad and not one.differing:
                        (directory / name).parent.mkdir(exist_ok=True)
                        os.replace(scratch / name, directory / name)
                    if name in bad:
                        found[name] = one
            finally:
                shutil.rmtree(scratch, ignore_errors=True)
        differing = _differing(found)
        if differing:
            raise CorruptionError(
                f"what was saved at step {self.state.global_step} differs from what is live after {_WRITES} ways of "
                f"writing it: {', '.join(differing[:3])} ({len(differing)} in all). It was discarded and earlier "
                "checkpoints are intact: check the disk and the memory, then start the same command again"
            )
        return found

    def _write_again(self, directory: Path, states: Mapping[str, Any], *, fetched: bool) -> None:
        if self.is_world_process_zero() and not self._is_sharded():
            if fetched and self.whole_state is None:
                self._save(str(directory), state_dict=readback.model_on_host(self._bare_model()))
            else:
                super().save_model(str(directory), _internal_call=True)
        for name, state in states.items():
            if name == TRAINER_STATE_NAME:
                self.state.save_to_json(str(directory / name))
            else:
                torch.save(readback.on_host(state) if fetched else state, directory / name)

    def _compare(self, directory: Path, states: Mapping[str, Any]) -> dict[str, Readback]:
        found: dict[str, Readback] = {}
        if self.is_world_process_zero() and not self._is_sharded():
            found |= readback.compare_model(directory, self._bare_model(), self._whole_model())
        for name, state in states.items():
            compare = readback.compare_trainer_state if name == TRAINER_STATE_NAME else readback.compare_state
            found[name] = compare(directory / name, state)
        verified, mismatches = sum(not one.differing for one in found.values()), len(_differing(found))
        self.files_verified += verified
        self.file_mismatches += mismatches
        if (report := getattr(self, "transfer_report", None)) is not None:
            report.files(verified=verified, mismatches=mismatches)
        return found

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
        """Names of live tensors that are not those of a checkpoint, on every rank."""
        live = self._whole_model()
        found: list[str] = []
        if self.whole_state is None or self.is_world_process_zero():
            model, recorded = self._bare_model(), manifest.read(directory)
            known = recorded.tensors if isinstance(recorded, manifest.Manifest) else {}
            differing = readback.compare_recorded(known, model, live)
            found = _differing(readback.compare_model(directory, model, live)) if differing is None else differing
        if self.whole_state is None:
            return found
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


def _differing(found: Mapping[str, Readback]) -> list[str]:
    return [name for one in found.values() for name in one.differing]


def _until_equal(load: Callable[[], list[str]], where: str) -> None:
    """Load until it names no difference, a few times."""
    for _ in range(_READS):
        differing = load()
        if not differing:
            return
        logger.warning("%d values differ from %s after loading (%s first)", len(differing), where, differing[0])
    raise CorruptionError(
        f"{len(differing)} values differ from {where} after loading it {_READS} times ({differing[0]} first): start "
        "the same command again; if it stays, run the doctor's transfer checks"
    )
