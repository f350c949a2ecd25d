"""Checkpoints that are verified before use: save, read back, rename, push, rotate, in that order.

Upstream's ``Trainer._save_checkpoint`` runs inside a staging directory. Then every file is read once: its content is
compared with the live state, and its SHA-256 goes into the manifest with the digests of the live tensors. A rank that
fails must not leave a save at once, because the others wait for it in a barrier: the failure is kept in the
`StagedSave`, and all ranks decide together in `failed`. Not covered: DeepSpeed's sharded files get a manifest but are
not compared with the live state (``extra.compared``).
"""

from __future__ import annotations

import errno
import gc
import logging
import os
import shutil
import tempfile
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, cast

import torch
from accelerate.utils import broadcast_object_list, gather_object
from safetensors import SafetensorError
from transformers.trainer import OPTIMIZER_NAME, SCALER_NAME, SCHEDULER_NAME, TRAINER_STATE_NAME
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR, SaveStrategy, get_last_checkpoint

from hf_rocm_tune.errors import CorruptionError, SeamError, TuneError, UsageError
from hf_rocm_tune.models.adapter import plain_lora, write_plain_lora
from hf_rocm_tune.models.shards import placer
from hf_rocm_tune.survive import manifest, saved_state
from hf_rocm_tune.survive.atomic import create_staging, move_files, replace_directory
from hf_rocm_tune.survive.run_directory import move_aside, rotate
from hf_rocm_tune.survive.saved_state import Readback
from hf_rocm_tune.transfer import host_copy, map_tensors

if TYPE_CHECKING:
    from peft import PeftModel
    from torch import Tensor, nn


logger = logging.getLogger(__name__)

_WRITES = 6  # as many attempts as a transfer has
_READS = 3
_PROBE_BYTES = 1 << 20
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT)
_FULL = "disk full"


class Uploader(Protocol):
    """Uploads directories that have been verified and have their manifest; only `result` raises if that fails."""

    def checkpoint(self, directory: Path) -> None: ...
    def result(self, directory: Path) -> Any: ...


# ---- one save in progress -----------------------------------------------------------------------------------


@dataclass(kw_only=True)
class StagedSave:
    """A staging directory and what happened in it."""

    root: Path  # exists if `usable`
    usable: bool = False  # whether rank 0 could create it
    need_bytes: int  # approximate size of the weights on disk
    failure: Exception | None = None  # the first error on this rank
    push_wanted: bool = False  # upstream asked for a push of the checkpoint

    def attempt(self, write: Callable[..., Any], *arguments: Any, **keywords: Any) -> None:
        """Call ``write`` and keep the error that it raises. torch.save reports a full disk as a RuntimeError."""
        try:
            write(*arguments, **keywords)
        except (OSError, RuntimeError, SafetensorError, TuneError) as error:
            self.failure = self.failure or error

    def drop(self, *, first: bool) -> None:
        """Delete what is left of the staging directory, on the ``first`` rank, and free its disk space."""
        if self.failure is not None:
            self.failure = None
            gc.collect()  # a failed torch.save leaves its file open in a reference cycle, which keeps the space
        if first and self.usable:
            shutil.rmtree(self.root, ignore_errors=True)


def failed(stage: StagedSave) -> bool:
    """Whether a rank found the disk full; raises any other error, of this or another rank. Collective."""
    error, own = stage.failure, []
    if error is not None:
        full = is_disk_full(error, stage.root, stage.need_bytes)
        own = [(_FULL if full else type(error).__name__, str(error))]
    failures = gather_object(own)
    if error is not None and own[0][0] != _FULL:
        raise error
    for kind, text in failures:
        if kind != _FULL:
            raise CorruptionError(text) if kind == CorruptionError.__name__ else TuneError(f"another rank: {text}")
    return bool(failures)


def is_disk_full(error: BaseException, directory: Path, need_bytes: int) -> bool:
    """Whether ``error``, raised while writing below ``directory``, comes from a full disk or an exhausted quota.

    torch.save and safetensors hide the error number, so ``need_bytes`` (at least 1 MiB) are allocated on the disk: that
    much, because safetensors has already removed the file that did not fit.
    """
    if isinstance(error, TuneError):
        return False
    if isinstance(error, OSError):
        return error.errno in _NO_ROOM
    try:
        with tempfile.TemporaryFile(dir=directory) as probe:
            os.posix_fallocate(probe.fileno(), 0, max(need_bytes, _PROBE_BYTES))
    except OSError as found:
        return found.errno in _NO_ROOM
    return False


# ---- the checkpoints of one trainer -------------------------------------------------------------------------


class Checkpoints:
    """Saves and loads the checkpoints and the result of a trainer; see the module's description."""

    def __init__(self, trainer: Any, publisher: Uploader | None) -> None:
        self._trainer, self._publisher = trainer, publisher
        self._stage: StagedSave | None = None
        self._saved: Mapping[str, manifest.FileEntry] = {}
        self._saved_digests: Mapping[str, str] = {}
        self.start: saved_state.HostCopy | None = None
        """Initial state of an adapter whose result is saved as plain LoRA; None for all others."""

    def check_start(self, resume_from: Any) -> Any:
        """Refuse a push without a publisher and an incomplete checkpoint. Returns what to resume from."""
        args = self._trainer.args
        if args.push_to_hub:
            self._require_publisher()
        if resume_from is True:
            resume_from = get_last_checkpoint(args.output_dir) or True
        if isinstance(resume_from, str | os.PathLike) and not self._saves_shards:
            saved_state.require_complete(Path(resume_from))
        return resume_from

    @property
    def staging(self) -> Path | None:
        """The directory into which upstream writes the current checkpoint; None between saves."""
        return None if self._stage is None else self._stage.root

    def attempt(self, write: Callable[..., None], *arguments: Any) -> None:
        """Call ``write`` for a part of a checkpoint; during a save its error is kept until all ranks are done."""
        if self._stage is None:
            write(*arguments)
        else:
            self._stage.attempt(write, *arguments)

    # ---- a checkpoint ---------------------------------------------------------------------------------------

    def save(self, write: Callable[[], None], final: Path) -> None:
        """Save a checkpoint in ``final`` with upstream's ``write``. Collective."""
        trainer, state = self._trainer, self._trainer.state
        saved_state.settle_prompts(self._bare_model())
        trainer.before_save()
        best_before, saved = state.best_model_checkpoint, False
        stage = self._open_stage(final)
        try:
            if stage.usable:
                self._stage = stage
                stage.attempt(write)
            self._stage = None
            saved = not failed(stage) and self._publish_checkpoint(stage, final)
        finally:
            if not saved:
                state.best_model_checkpoint = best_before
            self._close(stage)
        if saved and stage.push_wanted:
            self.push_checkpoint(final)
        if saved and self._first:
            rotate(final, limit=trainer.args.save_total_limit, best=state.best_model_checkpoint)
        elif self._first:
            logger.warning(
                "No space left in %s: %s was not saved. Earlier checkpoints are intact, training continues, and the "
                "next save tries again: free some space.",
                final.parent,
                final.name,
            )

    def _publish_checkpoint(self, stage: StagedSave, final: Path) -> bool:
        """Verify what upstream wrote, each rank its own files, and rename it; False if the disk is full. Collective."""
        staged = stage.root / final.name
        stage.attempt(self._record_best, staged, final)
        found: dict[str, Readback] = {}
        stage.attempt(lambda: found.update(self._verified(staged, self._live_states())))
        if failed(stage):
            return False
        for others in gather_object([found]):
            found |= others
        if self._first:
            stage.attempt(self._seal_checkpoint, staged, final, found)
        return not failed(stage)

    def _record_best(self, staged: Path, final: Path) -> None:
        """Set the best checkpoint in the state: upstream looks for it beside the staged one, where it is not."""
        trainer, state = self._trainer, self._trainer.state
        if state.best_global_step and trainer.args.save_strategy != SaveStrategy.NO:
            best = final.with_name(f"{PREFIX_CHECKPOINT_DIR}-{state.best_global_step}")
            if best == final or best.is_dir():
                state.best_model_checkpoint = str(best)
        if self._first:
            if not staged.is_dir():
                raise SeamError(
                    f"transformers did not write {final.name} where Trainer._get_output_dir said: this version of "
                    "transformers is not supported, install the one named in pyproject.toml"
                )
            state.save_to_json(str(staged / TRAINER_STATE_NAME))
            if (prompts := saved_state.prompts_of(self._bare_model())) is not None:
                torch.save(prompts, staged / saved_state.PROMPTS_FILE)

    def _seal_checkpoint(self, staged: Path, final: Path, found: Mapping[str, Readback]) -> None:
        manifest.write(
            staged,
            run_id=self._trainer.run_id,
            step=self._trainer.state.global_step,
            status="checkpoint",
            entries={name: one.entry for name, one in found.items() if one.entry is not None},
            tensors={label: value for one in found.values() for label, value in one.digests.items()},
            extra={"compared": not self._saves_shards},
        )
        if (aside := move_aside(final, self._trainer.run_id)) is not None:
            logger.warning("%s exists and is not from this run: renamed to %s", final.name, aside.name)
        replace_directory(staged, final)

    def _live_states(self) -> dict[str, Any]:
        trainer, states = self._trainer, dict[str, Any]()
        if self._first:
            states[TRAINER_STATE_NAME] = trainer.state
            if (prompts := saved_state.prompts_of(self._bare_model())) is not None:
                states[saved_state.PROMPTS_FILE] = prompts
        if trainer.args.save_only_model:
            return states
        states |= self._random_states()
        if self._first and not self._saves_shards:
            states[OPTIMIZER_NAME] = self._optimizer_state()
            states[SCHEDULER_NAME] = trainer.lr_scheduler.state_dict()
        if self._first and (scaler := getattr(trainer.accelerator, "scaler", None)) is not None:
            states[SCALER_NAME] = scaler.state_dict()
        return states

    def _random_states(self) -> dict[str, Any]:
        args, cards = self._trainer.args, self._trainer.devices
        states: dict[str, Any] = {saved_state.rng_file(args): saved_state.random_states(all_cards=args.world_size > 1)}
        if len(cards) > 1:
            states[saved_state.RNG_OF_CARDS] = [torch.cuda.get_rng_state(card) for card in cards]
        return states

    def _optimizer_state(self) -> dict[str, Any]:
        full = self._trainer.full_state
        return cast("dict[str, Any]", (full.optimizer_state if full else self._trainer.optimizer.state_dict)())

    def save_optimizer(self, stock: Callable[[str], None], directory: str) -> None:
        self.attempt(stock if self._trainer.full_state is None else self._write_full_optimizer, directory)

    def _write_full_optimizer(self, directory: str) -> None:
        state = self._optimizer_state()  # collective
        if self._trainer.args.should_save:
            torch.save(state, Path(directory) / OPTIMIZER_NAME)
            torch.save(self._trainer.lr_scheduler.state_dict(), Path(directory) / SCHEDULER_NAME)

    def save_random_state(self, stock: Callable[[str], None], directory: str) -> None:
        """Write the random state as upstream does, and those of all cards of a split model."""
        self.attempt(stock, directory)
        if len(self._trainer.devices) > 1:
            states = self._random_states()[saved_state.RNG_OF_CARDS]
            self.attempt(torch.save, states, Path(directory) / saved_state.RNG_OF_CARDS)

    # ---- the result -----------------------------------------------------------------------------------------

    def save_model(self, directory: Path) -> bool:
        """Write a result, which has to be sealed; returns False for a part of a checkpoint."""
        if self._stage is not None:
            self._stage.attempt(self._trainer.write_model, str(directory))
        else:
            self._save_result(directory)
        return self._stage is None

    def seal(self, directory: Path, also: Iterable[str]) -> None:
        """Write the manifest of the saved result and of the files ``also``, which the run wrote beside it.

        Until the manifest is written, another process could change the files: they are compared once more with what was
        verified, and saved again if they differ. Collective.
        """
        trainer = self._trainer
        entries: dict[str, manifest.FileEntry] = {}
        if self._first:
            entries = {name: manifest.entry_of(directory / name) for name in also}
        for _ in range(_WRITES):
            saved = {name: entry for name, entry in self._saved.items() if name not in entries}
            changed = [problem.file for problem in manifest.compare(directory, saved)]
            changed = broadcast_object_list([changed])[0]
            if not changed:
                break
            logger.warning("%s changed after it was verified: saved again", ", ".join(changed))
            trainer.transfer_report.count("files", mismatches=len(changed))
            self._save_result(directory, keep=entries)
        else:
            raise CorruptionError(
                f"{', '.join(changed)} in {directory} changed after {_WRITES} verified saves: find out what writes "
                "there, check the disk, and start the same command again"
            )
        if self._first:
            manifest.write(
                directory,
                run_id=trainer.run_id,
                step=trainer.state.global_step,
                status="final",
                files=[*saved, *entries],
                entries=saved | entries,
                tensors=self._saved_digests,
                extra={"compared": not self._saves_shards},
            )
        trainer.accelerator.wait_for_everyone()

    def _save_result(self, destination: Path, *, keep: Collection[str] = ()) -> None:
        self._trainer.before_save()
        stage = self._open_stage(destination / "model")
        try:
            if stage.usable:
                stage.attempt(self._write_result, stage.root, destination)
            lost = failed(stage)
            if not lost and self._first:
                stage.attempt(self._publish_result, stage.root, destination, keep)
            lost = lost or failed(stage)
        finally:
            self._close(stage)
        if lost:
            raise UsageError(
                f"no space left in {destination}: the result was not saved. The checkpoints are intact: free some "
                "space and start the same command again"
            )

    def _write_result(self, root: Path, destination: Path) -> None:
        card = destination / "README.md"
        if self._first and card.is_file():
            shutil.copyfile(card, root / card.name)  # PEFT adds to an existing card
        self._trainer.write_model(str(root))
        self._convert(root)

    def _convert(self, directory: Path) -> None:
        if self.start is not None and self._first:
            start = self.start.tensors()
            write_plain_lora(cast("PeftModel", self._bare_model()), directory, start, self._trainer.mover)

    def _plain_lora(self) -> dict[str, Tensor] | None:
        """What the result has to hold where it is plain LoRA; on rank 0."""
        if self.start is None or self._saves_shards or not self._first:
            return None
        now = saved_state.adapter_on_host(self._bare_model(), self._trainer.mover, self._full_model())
        return plain_lora(now, self.start.tensors())

    def _publish_result(self, root: Path, destination: Path, keep: Collection[str]) -> None:
        found = self._verified(root, {}, plain=self._plain_lora())
        for name in keep:
            (root / name).unlink(missing_ok=True)
        known = {name: one.entry for name, one in found.items()}
        self._saved = {name: known.get(name) or manifest.entry_of(root / name) for name in manifest.list_files(root)}
        self._saved_digests = {label: value for one in found.values() for label, value in one.digests.items()}
        (destination / manifest.MANIFEST_NAME).unlink(missing_ok=True)
        move_files(root, destination)

    # ---- pushing --------------------------------------------------------------------------------------------

    def push_result(self) -> Any:
        """Save and seal the result if that has not been done, and have the publisher upload it. Collective."""
        trainer, output_dir = self._trainer, Path(self._trainer.args.output_dir)
        self._require_publisher()
        trainer.save_model()
        if self._publisher is None or not self._first:
            return None
        trainer.callback_handler.on_push_begin(trainer.args, trainer.state, trainer.control)
        return self._publisher.result(output_dir)

    def push_checkpoint(self, directory: Path) -> None:
        """Have the publisher upload a checkpoint; during a save the push is delayed to its end."""
        trainer = self._trainer
        if self._stage is not None:
            self._stage.push_wanted = True
        elif self._publisher is not None and self._first:
            trainer.callback_handler.on_push_begin(trainer.args, trainer.state, trainer.control)
            self._publisher.checkpoint(directory)

    def _require_publisher(self) -> None:
        if not broadcast_object_list([self._publisher is not None])[0]:
            raise UsageError(
                "push_to_hub needs a publisher: pass publisher=hf_rocm_tune.publish.push.Publisher(...) to the "
                "trainer, or train without push_to_hub and run `hf-rocm-tune push` on the result"
            )

    # ---- resuming -------------------------------------------------------------------------------------------

    def load_weights(self, directory: Path, stock: Callable[[], None]) -> None:
        """Check the manifest, load, and compare the loaded weights with the manifest's digests, or with the files.

        ``stock``: upstream's way to load sharded checkpoints.
        """
        problems = manifest.verify(directory) if (directory / manifest.MANIFEST_NAME).exists() else []
        if problems:
            raise UsageError(f"{directory}: {problems[0]}; choose an older checkpoint, or start a new run")
        if self._saves_shards:
            stock()
            return
        model, place = self._bare_model(), self._trainer.place_tensor
        if self._trainer.full_state is not None:
            place = placer(model, place)
        load = saved_state.load_adapters if hasattr(model, "peft_config") else saved_state.load_model

        def load_once() -> list[str]:
            if (path := directory / saved_state.PROMPTS_FILE).is_file():
                prompts = partial(saved_state.prompts_of, model)
                self._restore(path, partial(saved_state.load_prompts, model=model, place=place), prompts)
            else:
                load(directory, model, place)
            return self._differing_from(directory)

        _until_equal(load_once, str(directory))

    def load_optimizer(self, checkpoint: str | None, stock: Callable[[str | None], None]) -> None:
        trainer, path = self._trainer, Path(checkpoint or "") / OPTIMIZER_NAME
        if checkpoint is None or self._saves_shards or not path.is_file():
            stock(checkpoint)
            return
        optimizer, scheduler, place = trainer.optimizer, trainer.lr_scheduler, trainer.place_tensor
        if trainer.full_state is not None:
            parameters = [each for group in optimizer.param_groups for each in group["params"]]
            place = placer(self._bare_model(), place, parameters)
        self._restore(path, lambda state: saved_state.load_optimizer(state, optimizer, place), optimizer.state_dict)
        self._restore(path.with_name(SCHEDULER_NAME), scheduler.load_state_dict, scheduler.state_dict)

    def load_scaler(self, checkpoint: str | None) -> None:
        path = Path(checkpoint or "") / SCALER_NAME
        if checkpoint is None or not path.is_file():
            return
        scaler = getattr(self._trainer.accelerator, "scaler", None)
        if scaler is None:
            raise UsageError(f"{path.parent} was trained with a gradient scaler: resume it with --fp16 true")
        self._restore(path, scaler.load_state_dict, scaler.state_dict)

    def load_random_state(self, checkpoint: str | None, stock: Callable[[str | None], None]) -> None:
        path = Path(checkpoint or "") / saved_state.rng_file(self._trainer.args)
        if checkpoint is None or not path.is_file():  # upstream warns of a checkpoint of another number of ranks
            stock(checkpoint)
            return

        def set_here(states: Any) -> None:
            stock(checkpoint)
            if not torch.cuda.is_available():
                states.pop("cuda", None)  # saved on a card

        def set_all(states: Any) -> None:
            for device, state in zip(self._trainer.devices, states, strict=True):
                torch.cuda.set_rng_state(state, device)

        self._restore(path, set_here, lambda: self._random_states()[path.name])
        cards = path.with_name(saved_state.RNG_OF_CARDS)
        if len(self._trainer.devices) > 1 and cards.is_file():
            self._restore(cards, set_all, lambda: self._random_states()[cards.name])

    def _restore(self, path: Path, load: Callable[[Any], Any], live: Callable[[], Any]) -> None:
        """Read a saved state, check it against the manifest, load it, and compare the live state with it."""
        found = manifest.read(path.parent)
        wanted = found.tensors if isinstance(found, manifest.Manifest) else {}
        recorded = {label: value for label, value in wanted.items() if label.startswith(f"{path.name}:")}

        def load_once() -> list[str]:
            state, read = saved_state.read_state(path)
            if read.entry is None and not recorded:
                raise UsageError(f"{path.parent}: {read.differing[0]}; choose an older checkpoint, or start a new run")
            differing = [label for label in recorded if read.digests.get(label) != recorded[label]]
            if differing:
                return read.differing or differing
            try:
                load(state)
            except (TuneError, torch.OutOfMemoryError):
                raise
            except (RuntimeError, ValueError, KeyError, TypeError, AttributeError) as error:
                raise UsageError(
                    f"{path} cannot be resumed from: {error}; choose another checkpoint or start a new run"
                ) from error
            differing = [f"{path.name}:{name}" for name in saved_state.not_loaded(state, live())]
            # Last: what was loaded and compared must still be what was read.
            again = saved_state.state_digests(path.name, state)
            return differing or [label for label in again if read.digests.get(label) != again[label]]

        _until_equal(load_once, str(path.parent))

    def _differing_from(self, directory: Path) -> list[str]:
        """Names of live tensors that differ from a checkpoint, the same on every rank."""
        sharded, live = self._trainer.full_state is not None, self._full_model()
        found: list[str] = []
        if not sharded or self._first:
            found = _differing(saved_state.compare_model(directory, self._bare_model(), live))
        self._forget_full()
        return list(broadcast_object_list([found])[0]) if sharded else found

    # ---- reading back ---------------------------------------------------------------------------------------

    def _verified(
        self, directory: Path, states: Mapping[str, Any], *, plain: Mapping[str, Tensor] | None = None
    ) -> dict[str, Readback]:
        """Compare this rank's files in ``directory`` with the live state; files that differ are written again.

        Each attempt writes to another directory, so that a bad block of the disk stays occupied meanwhile; from the
        third attempt on it writes host copies that were compared with the device.
        """
        found = self._compare(directory, states, plain)
        for again in range(1, _WRITES):
            bad = [name for name, one in found.items() if one.differing]
            if not bad:
                break
            logger.warning(
                "%s differs from the live state (%s first): written again", directory.name, found[bad[0]].differing[0]
            )
            scratch = create_staging(directory)
            try:
                self._write_again(scratch, states, fetched=again > 1)
                if plain is not None:
                    self._convert(scratch)
                for name, one in self._compare(scratch, states, plain).items():
                    if name in bad and not one.differing:
                        (directory / name).parent.mkdir(exist_ok=True)
                        os.replace(scratch / name, directory / name)
                    if name in bad:
                        found[name] = one
            finally:
                shutil.rmtree(scratch, ignore_errors=True)
        if differing := _differing(found):
            raise CorruptionError(
                f"what was saved at step {self._trainer.state.global_step} differs from the live state after {_WRITES} "
                f"attempts to write it: {', '.join(differing[:3])} ({len(differing)} in all). It was discarded and "
                "earlier checkpoints are intact: check the disk and the memory, then start the same command again"
            )
        self._trainer.before_manifest(directory)
        return found

    def _write_again(self, directory: Path, states: Mapping[str, Any], *, fetched: bool) -> None:
        trainer = self._trainer
        if self._first and not self._saves_shards:
            if fetched and trainer.full_state is None:
                trainer._save(str(directory), state_dict=saved_state.model_on_host(self._bare_model()))
            else:
                trainer.write_model(str(directory))
        for name, state in states.items():
            if name == TRAINER_STATE_NAME:
                trainer.state.save_to_json(str(directory / name))
            else:
                torch.save(map_tensors(state, host_copy) if fetched else state, directory / name)

    def _compare(
        self, directory: Path, states: Mapping[str, Any], plain: Mapping[str, Tensor] | None
    ) -> dict[str, Readback]:
        found: dict[str, Readback] = {}
        if self._first and not self._saves_shards:
            found |= saved_state.compare_model(directory, self._bare_model(), self._full_model(), plain)
        found |= {name: saved_state.compare_state(directory / name, state) for name, state in states.items()}
        verified = sum(not one.differing for one in found.values())
        self._trainer.transfer_report.count("files", verified=verified, mismatches=len(_differing(found)))
        return found

    @property
    def _first(self) -> bool:
        return bool(self._trainer.is_world_process_zero())

    def _bare_model(self) -> nn.Module:
        model: nn.Module = self._trainer.accelerator.unwrap_model(self._trainer.model, keep_torch_compile=False)
        return model

    @property
    def _saves_shards(self) -> bool:
        """Whether each rank writes its own files, in upstream's format."""
        return self._trainer.is_sharded and self._trainer.full_state is None

    def _full_model(self) -> dict[str, Any] | None:
        """Trained weights of a sharded model, on rank 0; collective unless they were gathered for this save."""
        full = self._trainer.full_state
        return None if full is None else full.model()

    def _forget_full(self) -> None:
        if self._trainer.full_state is not None:
            self._trainer.full_state.forget()

    def _open_stage(self, final: Path) -> StagedSave:
        """Create a staging directory beside ``final`` on rank 0; every rank checks that it sees it. Collective."""
        args = self._trainer.args
        if args.save_on_each_node and args.world_size > 1:
            raise UsageError(
                "--save_on_each_node splits checkpoints over the machines: leave it out and share output_dir instead"
            )
        adapter = hasattr(self._bare_model(), "peft_config")
        written = (p for p in self._trainer.model.parameters() if p.requires_grad or not adapter)
        stage = StagedSave(root=final.parent, need_bytes=sum(each.nbytes for each in written))
        name = None
        if args.process_index == 0:
            try:
                name = str(create_staging(final))
            except OSError as error:
                stage.failure = error
        name = broadcast_object_list([name])[0]
        if name is not None:
            stage.root, stage.usable = Path(name), True
            if not stage.root.is_dir():
                who = f"rank {args.process_index}"
                stage.failure = UsageError(f"{who} does not see {name}: put output_dir on a disk that all nodes share")
        return stage

    def _close(self, stage: StagedSave) -> None:
        self._stage = None
        self._forget_full()
        stage.drop(first=self._first)


def _differing(found: Mapping[str, Readback]) -> list[str]:
    return [name for one in found.values() for name in one.differing]


def _until_equal(load: Callable[[], list[str]], where: str) -> None:
    for _ in range(_READS):
        differing = load()
        if not differing:
            return
        logger.warning("%d values differ from %s after loading (%s first)", len(differing), where, differing[0])
    raise CorruptionError(
        f"{len(differing)} values differ from {where} after loading it {_READS} times ({differing[0]} first): start "
        "the same command again; if it happens again, run the doctor's transfer checks"
    )
