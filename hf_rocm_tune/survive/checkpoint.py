"""Checkpoints that are verified before use: save, read back, rename, push, rotate, in that order.

Upstream saves the model into a staging directory, and each `State` its file. Then every file is read once: its content
is compared with the live state, and its SHA-256 goes into the manifest. Not covered: DeepSpeed's sharded files get a
manifest but are not compared with the live state (``extra.compared``).
"""

from __future__ import annotations

import copy
import errno
import gc
import json
import logging
import os
import shutil
import tempfile
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from accelerate.utils import broadcast_object_list, gather_object
from safetensors import SafetensorError
from transformers.trainer import OPTIMIZER_NAME, SCALER_NAME, SCHEDULER_NAME, TRAINER_STATE_NAME
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR, SaveStrategy, get_last_checkpoint

from hf_rocm_tune.errors import CorruptionError, SeamError, TuneError, UsageError
from hf_rocm_tune.foreign import read_object
from hf_rocm_tune.models import base_files
from hf_rocm_tune.models.adapter import plain_lora, write_plain_lora
from hf_rocm_tune.models.shards import placer
from hf_rocm_tune.models.trainer_parts import OwningTrainer
from hf_rocm_tune.survive import manifest, saved_state
from hf_rocm_tune.survive.atomic import create_staging, move_files, replace_directory
from hf_rocm_tune.survive.run_directory import is_wholly_of, move_aside, rotate
from hf_rocm_tune.survive.run_lock import require_owned
from hf_rocm_tune.survive.saved_state import Place, Readback, State

if TYPE_CHECKING:
    from peft import PeftModel
    from torch import Tensor, nn

    from hf_rocm_tune.transfer import Digest


logger = logging.getLogger(__name__)

_WRITES = 6  # as many attempts as a transfer has
_READS = 3
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT)


@dataclass(kw_only=True)
class StagedSave:
    """A staging directory and what happened in it. A rank that fails keeps its error: the others wait in a barrier."""

    root: Path  # exists if `usable`
    usable: bool = False  # whether rank 0 could create it
    need_bytes: int  # approximate size of the weights on disk
    failure: Exception | None = None  # the first error on this rank

    def attempt(self, write: Callable[..., Any], *arguments: Any) -> None:
        """Call ``write`` and keep the error that it raises. torch.save reports a full disk as a RuntimeError."""
        try:
            write(*arguments)
        except (OSError, RuntimeError, SafetensorError, TuneError) as error:
            self.failure = self.failure or error

    def failed(self) -> bool:
        """Whether a rank found the disk full; raises any other error, of this or another rank. Collective."""
        own: list[tuple[bool, str, str]] = []
        if self.failure is not None:
            own.append((self.is_full(), type(self.failure).__name__, str(self.failure)))
        failures = gather_object(own)
        if self.failure is not None and not own[0][0]:
            raise self.failure
        for is_full, kind, text in failures:
            if is_full:
                continue
            if kind == CorruptionError.__name__:
                raise CorruptionError(text)
            raise TuneError(f"another rank: {text}")
        return bool(failures)

    def is_full(self) -> bool:
        """Whether the failure comes from a full disk. torch.save and safetensors hide the error's number."""
        if isinstance(self.failure, OSError):
            return self.failure.errno in _NO_ROOM
        return not isinstance(self.failure, TuneError) and shutil.disk_usage(self.root).free < self.need_bytes

    def drop(self, *, first: bool) -> None:
        """Delete what is left of the staging directory, on the ``first`` rank, and free its disk space."""
        if self.failure is not None:
            self.failure = None
            gc.collect()  # a failed torch.save leaves its file open in a reference cycle, which keeps the space
        if first and self.usable:
            shutil.rmtree(self.root, ignore_errors=True)


# ---- the checkpoints of one trainer -------------------------------------------------------------------------


class Checkpoints:
    """Saves and loads the checkpoints and the result of a trainer; see the module's description."""

    def __init__(self, trainer: OwningTrainer, publisher: Any) -> None:
        """``publisher`` uploads what has its manifest: a `checkpoint` or the `result`; only the latter raises."""
        self._trainer = trainer
        self._publisher = publisher
        self._stage: StagedSave | None = None  # while upstream writes
        self._given_args: Any = None  # the trainer's arguments meanwhile
        self._written_in: Path | None = None  # where in the staging directory it has written the model
        self.resumed: Path | None = None
        """The checkpoint from which this training goes on."""
        self._random_restored = False
        self._saved: Mapping[str, Readback] = {}  # the result's files
        self.start: saved_state.HostCopy | None = None
        """Initial state of an adapter whose result is saved as plain LoRA; None for all others."""
        self._recorded: base_files.BaseRecord | None = None

    def check_start(self, resume_from: Any) -> Any:
        """Refuse a push without a publisher and an incomplete checkpoint. Returns what to resume from."""
        args = self._trainer.args
        if args.push_to_hub:
            self._require_publisher()
        if resume_from is True:
            resume_from = get_last_checkpoint(args.output_dir) or True
        if isinstance(resume_from, str | os.PathLike) and not self.saves_shards:
            saved_state.require_complete(Path(resume_from))
            self._require_same_base(Path(resume_from))
            if (Path(resume_from) / SCALER_NAME).is_file() and self._trainer.accelerator.scaler is None:
                raise UsageError(f"{resume_from} was trained with a gradient scaler: resume it with --fp16 true")
        return resume_from

    @contextmanager
    def resuming(self, resume_from: Any) -> Iterator[Any]:
        """Around a training: gives what upstream is to resume from, a directory with the trainer's state alone.

        All else is loaded by `load_weights`, `load_states` and `restore_random`; but sharded checkpoints by upstream.
        """
        self._random_restored = False
        if not isinstance(resume_from, str | os.PathLike):
            yield resume_from
            return
        self.resumed = Path(resume_from)
        try:
            with tempfile.TemporaryDirectory(prefix="hf_rocm_tune_") as state_only:
                shutil.copyfile(self.resumed / TRAINER_STATE_NAME, Path(state_only) / TRAINER_STATE_NAME)
                yield resume_from if self.saves_shards else state_only
        finally:
            self.resumed = None

    def write_card(self, write: Callable[..., None], *arguments: Any, **keywords: Any) -> None:
        """Upstream's model card. During a save, into the run's own directory as ever, and an error is kept."""
        if self._stage is None:
            write(*arguments, **keywords)
            return
        if keywords.get("model_name") == self._stage.root.name:
            keywords["model_name"] = Path(self._given_args.output_dir).name
        self._stage.attempt(self._with_given_args, partial(write, *arguments, **keywords))

    def _staged(self, final: Path, *steps: Callable[[Path], object]) -> bool:
        """Take steps, the first of them upstream's, in a directory beside ``final``; False if the disk is full.

        After each step all ranks agree that it did not fail. Collective.
        """
        stage = self._open_stage(final)
        try:
            for step in steps:
                self._stage = None
                if step is steps[0]:
                    self._stage = stage
                if stage.usable:
                    stage.attempt(step, stage.root)
                if stage.failed():
                    return False
            return True
        finally:
            self._stage = None
            self._forget_full()
            stage.drop(first=self._first)

    def _write_manifest(self, directory: Path, status: manifest.Status, readbacks: Mapping[str, Readback]) -> None:
        require_owned(Path(self._trainer.args.output_dir))
        files = None
        if status == "final":  # a result may lie beside other files
            files = readbacks
        manifest.write(
            directory,
            run_id=self._trainer.run_id,
            step=self._trainer.state.global_step,
            status=status,
            files=files,
            entries=_entries(readbacks),
            tensors=_digests(readbacks),
            extra={"compared": not self.saves_shards, "base": self._base(), "base_files": self._base_record()},
        )

    def _base_tensors(self) -> dict[tuple[str, str], set[Digest]]:
        """What was loaded here of a model's files, but not of a checkpoint's: digests by file and tensor."""
        inside = Path(self._trainer.args.output_dir).resolve()

        def is_own(path: Path) -> bool:
            return path.resolve().is_relative_to(inside) or (path.parent / TRAINER_STATE_NAME).exists()

        loaded = self._trainer.mover.loaded
        files = {file for file, _ in loaded}
        of_base = {file for file in files if not is_own(Path(file))}
        return {(file, name): digests for (file, name), digests in loaded.items() if file in of_base}

    def _base(self) -> dict[str, str]:
        """Of each weight file that was loaded here, but a checkpoint's, one digest over those of its tensors' bytes."""
        rows = base_files.by_file(self._base_tensors())
        return {path.name: base_files.digest_of(tensors) for path, tensors in rows.items()}

    def _base_record(self) -> dict[str, Any] | None:
        """What the base consisted of when it was first recorded; None where that is not one directory of files."""
        if self._recorded is None:
            try:
                self._recorded = base_files.record(self._base_tensors())
            except OSError as error:  # it was moved away meanwhile
                logger.warning("the files of the base are not recorded: %s", error)
        if self._recorded is None:
            return None
        return self._recorded.to_json()

    def _require_same_base(self, checkpoint: Path) -> None:
        """Refuse a base whose bytes are not those that the run has begun with."""
        written = manifest.read(checkpoint)
        if not isinstance(written, manifest.Manifest):
            return
        before = written.extra.get("base")
        if not isinstance(before, dict):
            return
        changed = [file for file, digest in self._base().items() if before.get(file, digest) != digest]
        if changed:
            raise UsageError(
                f"{changed[0]} of the model has other weights than when {checkpoint.name} was saved: the file has "
                "changed since, or was read wrongly. Restore it, or begin a new run in another --output_dir"
            )

    # ---- a checkpoint ---------------------------------------------------------------------------------------

    def save(self, write: Callable[[], None], final: Path) -> None:
        """Save a checkpoint in ``final`` with upstream's ``write``. Collective."""
        trainer = self._trainer
        state = trainer.state
        read_back: dict[str, Readback] = {}
        saved_state.stabilise_prompts(self._bare_model())
        trainer.before_save()
        best_before = state.best_model_checkpoint
        saved = False

        def write_by_upstream(_root: Path) -> None:
            self._write_by_upstream(write)

        def write_states(root: Path) -> None:
            nonlocal final
            if self._written_in is None:
                self._written_in = root / final.name
            final = final.parent / self._written_in.relative_to(root)  # a search of hyperparameters has one a trial
            self._write_states(self._written_in, final)

        def verify(_root: Path) -> None:
            assert self._written_in is not None
            read_back.update(self._verified(self._written_in, self._own_states()))

        def seal(_root: Path) -> None:
            assert self._written_in is not None
            self._seal_checkpoint(self._written_in, final, read_back)

        self._written_in = None
        try:
            saved = self._staged(final, write_by_upstream, write_states, verify, seal)
        finally:
            if not saved:
                state.best_model_checkpoint = best_before
        if saved and trainer.args.push_to_hub and self._announces_push():
            self._publisher.checkpoint(final)
        if saved and self._first:
            rotate(final, limit=trainer.args.save_total_limit, best=state.best_model_checkpoint)
        elif self._first:
            kept = "Earlier checkpoints are intact, training continues, and the next save tries again: free some space."
            logger.warning("No space left in %s: %s was not saved. %s", final.parent, final.name, kept)

    def _write_by_upstream(self, write: Callable[[], None]) -> None:
        """Have upstream write the model and the trainer's state, and sharded optimizer state.

        The other states are written by `_write_states`, and a checkpoint is pushed when it is in its place.
        """
        self._given_args = self._trainer.args
        args = copy.copy(self._given_args)
        assert self._stage is not None
        args.output_dir = str(self._stage.root)
        args.push_to_hub = False
        args.save_only_model = args.save_only_model or not self.saves_shards
        self._trainer.args = args
        try:
            write()
        finally:
            self._trainer.args = self._given_args
            self._given_args = None

    def _write_model(self, directory: Path) -> None:
        """A part of a checkpoint; the arguments beside it are those of the run."""
        self._written_in = directory
        self._with_given_args(partial(self._trainer.write_model, str(directory)))

    def _with_given_args(self, write: Callable[[], None]) -> None:
        inside = self._trainer.args
        self._trainer.args = self._given_args
        try:
            write()
        finally:
            self._trainer.args = inside

    def _write_states(self, staged: Path, final: Path) -> None:
        """Write what belongs to a checkpoint beside the model, each rank its own files. Collective."""
        trainer = self._trainer
        state = trainer.state
        if trainer.full_state is not None and not trainer.args.save_only_model:
            trainer.full_state.optimizer_state()
        # upstream looks for the best checkpoint beside the staged one, where it is not
        if state.best_global_step and trainer.args.save_strategy != SaveStrategy.NO:
            best = final.with_name(f"{PREFIX_CHECKPOINT_DIR}-{state.best_global_step}")
            if best == final or best.is_dir():
                state.best_model_checkpoint = str(best)
        if not staged.is_dir():
            raise SeamError(
                f"transformers did not write {final.name} into output_dir: this version of "
                "transformers is not supported, install the one named in pyproject.toml"
            )
        for own_state in self._own_states():
            own_state.write_to(staged)

    def _seal_checkpoint(self, staged: Path, final: Path, readbacks: dict[str, Readback]) -> None:
        for others in gather_object([readbacks]):
            readbacks |= others
        if not self._first:
            return
        self._write_manifest(staged, "checkpoint", readbacks)
        if os.path.lexists(final) and not is_wholly_of(final, self._trainer.run_id):
            aside = move_aside(final, "kept")
            logger.warning("%s exists and is not from this run: renamed to %s", final.name, aside.name)
        replace_directory(staged, final)

    def _own_states(self) -> list[State]:
        """The files that this rank writes."""
        states = self._states()
        if self._trainer.args.save_only_model:
            states = [state for state in states if state.of_model]
        if not self._first:
            states = [state for state in states if state.every_rank]
        return states

    def _states(self) -> list[State]:
        """All files of a checkpoint beside the model; a new one is one row."""
        trainer = self._trainer
        args = trainer.args
        several = args.world_size > 1
        random_name = "rng_state.pth"
        if several:
            random_name = f"rng_state_{args.process_index}.pth"
        rows = [
            State(
                name=TRAINER_STATE_NAME,
                live=lambda: json.loads(json.dumps(asdict(trainer.state))),
                save=lambda _, path: trainer.state.save_to_json(str(path)),
                of_model=True,
            ),
            State(
                name=random_name,
                live=partial(saved_state.random_states, all_cards=several or len(trainer.devices) > 1),
                load=saved_state.set_random_states,
                every_rank=True,
            ),
        ]
        if not self.saves_shards:
            rows += [
                State(
                    name=OPTIMIZER_NAME,
                    live=self._live_optimizer,
                    load=lambda state: saved_state.load_optimizer(state, trainer.optimizer, self._place()),
                    loaded=lambda: trainer.optimizer.state_dict(),
                ),
                State(
                    name=SCHEDULER_NAME,
                    live=lambda: trainer.lr_scheduler.state_dict(),
                    load=lambda state: trainer.lr_scheduler.load_state_dict(state),
                ),
            ]
        scaler = getattr(trainer.accelerator, "scaler", None)
        if scaler is not None:
            rows.append(State(name=SCALER_NAME, live=scaler.state_dict, load=scaler.load_state_dict))
        prompts = self._prompts()
        if prompts is not None:
            rows.append(prompts)
        return rows

    def _live_optimizer(self) -> Any:
        """The optimizer's state; of a sharded model gathered from all ranks."""
        if self._trainer.full_state is not None:
            return self._trainer.full_state.optimizer_state()
        return self._trainer.optimizer.state_dict()

    def _prompts(self) -> State | None:
        """What PEFT's prompt methods train: an adapter file has only the prompts that their encoders compute."""
        model = self._bare_model()
        if not getattr(model, "prompt_encoder", None):
            return None
        load = partial(saved_state.load_prompts, model=model, place=self._place())
        return State(name="prompt_encoder.pt", live=partial(saved_state.prompts_of, model), load=load, of_model=True)

    def _place(self) -> Place:
        """Moves one tensor of a checkpoint to the device: its part, where the model is sharded."""
        if self._trainer.full_state is None:
            return cast("Place", self._trainer.place_tensor)
        parameters = []
        if self._trainer.optimizer is not None:
            for group in self._trainer.optimizer.param_groups:
                parameters += group["params"]
        return placer(self._bare_model(), self._trainer.place_tensor, parameters)

    # ---- the result -----------------------------------------------------------------------------------------

    def save_model(self, directory: Path, write_beside: Callable[[Path], Iterable[str]]) -> None:
        """Write a part of a checkpoint, or a result, with the manifest of it and of the files that are written beside.

        Until the manifest is written, another process could change the files: they are compared once more with what was
        verified, and saved again if they differ. Collective.
        """
        if self._stage is not None:
            self._stage.attempt(self._write_model, directory)
            return
        self._save_result(directory)
        also = self._written_beside(directory, write_beside)
        trainer = self._trainer
        beside: dict[str, Readback] = {}
        if self._first:
            beside = {name: Readback(manifest.entry_of(directory / name)) for name in also}
        for _ in range(_WRITES):
            saved = {name: readback for name, readback in self._saved.items() if name not in beside}
            changed = [problem.file for problem in manifest.compare(directory, _entries(saved))]
            changed = broadcast_object_list([changed])[0]
            if not changed:
                break
            logger.warning("%s changed after it was verified: saved again", ", ".join(changed))
            trainer.transfer_report.count("files", mismatches=len(changed))
            self._save_result(directory, keep=beside)
        else:
            raise CorruptionError(
                f"{', '.join(changed)} in {directory} changed after {_WRITES} verified saves: another process writes "
                "to this directory, or the disk is faulty; look for both, then rerun the same command"
            )
        if self._first:
            self._write_manifest(directory, "final", saved | beside)
        trainer.accelerator.wait_for_everyone()

    def _written_beside(self, directory: Path, write: Callable[[Path], Iterable[str]]) -> list[str]:
        """The names of the files that are written beside a result; its JSON can be read again. Collective."""
        for _ in range(_READS):
            names = list(write(directory))
            broken: list[str] = []
            if self._first:
                broken = [name for name in names if name.endswith(".json") and not _is_json(directory / name)]
            broken = broadcast_object_list([broken])[0]
            if not broken:
                return names
            logger.warning("%s is no JSON any more after it was written: written again", ", ".join(broken))
            self._trainer.transfer_report.count("files", mismatches=len(broken))
        raise CorruptionError(
            f"{', '.join(broken)} in {directory} cannot be read back as JSON, {_READS} times: check the disk, and "
            "start the same command again"
        )

    def _save_result(self, destination: Path, *, keep: Collection[str] = ()) -> None:
        self._trainer.before_save()
        write = partial(self._write_result, destination)
        publish = partial(self._publish_result, destination, keep)
        if not self._staged(destination / "model", write, publish):
            raise UsageError(
                f"no space left in {destination}: the result was not saved. The checkpoints are intact: free some "
                "space and start the same command again"
            )

    def _write_result(self, destination: Path, root: Path) -> None:
        readme = destination / "README.md"
        if self._first and readme.is_file():
            shutil.copyfile(readme, root / readme.name)  # PEFT adds to an existing one
        self._trainer.write_model(str(root))
        self._convert(root)

    def _convert(self, directory: Path) -> None:
        if self.start is not None and self._first:
            start = self.start.tensors()
            write_plain_lora(cast("PeftModel", self._bare_model()), directory, start, self._trainer.mover)

    def _publish_result(self, destination: Path, keep: Collection[str], root: Path) -> None:
        if not self._first:
            return
        require_owned(Path(self._trainer.args.output_dir))
        plain = None
        if self.start is not None and not self.saves_shards:
            now = saved_state.adapter_on_host(self._bare_model(), self._trainer.mover, self._full_model())
            plain = plain_lora(now, self.start.tensors())
        readbacks = self._verified(root, (), plain=plain)
        for name in keep:
            (root / name).unlink(missing_ok=True)
        for name in manifest.list_files(root):
            if name not in readbacks:
                readbacks[name] = Readback(manifest.entry_of(root / name))
        self._saved = readbacks
        (destination / manifest.MANIFEST_NAME).unlink(missing_ok=True)
        move_files(root, destination)

    # ---- pushing --------------------------------------------------------------------------------------------

    def push_result(self) -> Any:
        """Save and seal the result if that has not been done, and have the publisher upload it. Collective."""
        self._require_publisher()
        self._trainer.save_model()
        if not self._announces_push():
            return None
        return self._publisher.result(Path(self._trainer.args.output_dir))

    def _announces_push(self) -> bool:
        """Tell the callbacks of a push; False on a rank that does not push."""
        if self._publisher is None or not self._first:
            return False
        trainer = self._trainer
        trainer.callback_handler.on_push_begin(trainer.args, trainer.state, trainer.control)
        return True

    def _require_publisher(self) -> None:
        if not broadcast_object_list([self._publisher is not None])[0]:
            raise UsageError(
                "push_to_hub needs a publisher: pass publisher=hf_rocm_tune.publish.push.Publisher(...) to the "
                "trainer, or train without push_to_hub and run `hf-rocm-tune push` on the result"
            )

    # ---- resuming -------------------------------------------------------------------------------------------

    def load_weights(self, directory: Path, stock: Callable[[], None]) -> None:
        """Check the manifest, load, and compare the loaded weights with the files, and these with its digests.

        ``stock``: upstream's way to load sharded checkpoints.
        """
        if (directory / manifest.MANIFEST_NAME).exists():
            problems = manifest.verify(directory)
            if problems:
                raise UsageError(f"{directory}: {problems[0]}; choose an older checkpoint, or start a new run")
        if self.saves_shards:
            stock()
            return
        model = self._bare_model()
        prompts = self._prompts()
        load = saved_state.load_model
        if hasattr(model, "peft_config"):
            load = saved_state.load_adapters

        def load_once() -> list[str]:
            if prompts is not None and (directory / prompts.name).is_file():
                self._restore(directory, prompts)
            else:
                load(directory, model, self._place())
            return self._differing_from(directory)

        _until_equal(load_once, str(directory))

    def load_states(self, directory: Path, *prefixes: str) -> None:
        """Load, verified, the states whose files begin so, as far as a checkpoint has them."""
        for state in self._states():
            if state.name.startswith(prefixes) and (directory / state.name).is_file():
                self._restore(directory, state)

    def restore_random(self, *, within_epoch: bool) -> None:
        """Restore random states, once, where upstream does: as an epoch begins, or after the first batches
        ``within_epoch``, because those before them were skipped."""
        if self.resumed is None or self._random_restored:
            return
        skips_batches = not self._trainer.args.ignore_data_skip
        if within_epoch == (skips_batches and not float(self._trainer.state.epoch or 0).is_integer()):
            self._random_restored = True
            self.load_states(self.resumed, "rng_state")

    def _restore(self, directory: Path, wanted: State) -> None:
        """Read a saved state, check it against the manifest, load it, and compare the live state with it."""
        path = directory / wanted.name
        tensors = _recorded_digests(directory)
        recorded = {label: digest for label, digest in tensors.items() if label.startswith(f"{path.name}:")}

        def load_once() -> list[str]:
            state, read = saved_state.read_state(path)
            if read.entry is None and not recorded:
                raise UsageError(f"{directory}: {read.differing[0]}; choose an older checkpoint, or start a new run")
            differing = [label for label in recorded if read.digests.get(label) != recorded[label]]
            if differing:
                return read.differing or differing
            try:
                wanted.load(state)
            except (TuneError, torch.OutOfMemoryError):
                raise
            except (RuntimeError, ValueError, KeyError, TypeError, AttributeError) as error:
                raise UsageError(
                    f"{path} cannot be resumed from: {error}; choose another checkpoint or start a new run"
                ) from error
            read_live = wanted.loaded or wanted.live
            not_loaded = saved_state.not_loaded(state, read_live())
            if not_loaded:
                return [f"{path.name}:{name}" for name in not_loaded]
            # Last: what was loaded and compared must still be what was read.
            again = saved_state.state_digests(path.name, state)
            return [label for label in again if read.digests.get(label) != again[label]]

        _until_equal(load_once, str(directory))

    def _differing_from(self, directory: Path) -> list[str]:
        """Names of live tensors that differ from a checkpoint's files, or of files' tensors that differ from its
        manifest's digests, the same on every rank."""
        is_sharded = self._trainer.full_state is not None
        live = self._full_model()
        differing: list[str] = []
        if not is_sharded or self._first:
            compared = saved_state.compare_model(directory, self._bare_model(), live)
            differing = _differing(compared) + _not_as_recorded(directory, compared)
        self._forget_full()
        if is_sharded:
            differing = list(broadcast_object_list([differing])[0])
        return differing

    # ---- reading back ---------------------------------------------------------------------------------------

    def _verified(
        self, directory: Path, states: Sequence[State], *, plain: Mapping[str, Tensor] | None = None
    ) -> dict[str, Readback]:
        """Compare this rank's files in ``directory`` with the live state; files that differ are written again.

        Each attempt writes to another directory, so that a bad block of the disk stays occupied meanwhile; from the
        third attempt on it writes host copies that were compared with the device.
        """
        readbacks = self._compare(directory, states, plain)
        for again in range(1, _WRITES):
            bad = [name for name, readback in readbacks.items() if readback.differing]
            if not bad:
                break
            first = readbacks[bad[0]].differing[0]
            logger.warning("%s differs from the live state (%s first): written again", directory.name, first)
            scratch = create_staging(directory)
            try:
                self._write_again(scratch, states, fetched=again > 1)
                if plain is not None:
                    self._convert(scratch)
                for name, readback in self._compare(scratch, states, plain).items():
                    if name not in bad:
                        continue
                    if not readback.differing:
                        (directory / name).parent.mkdir(exist_ok=True)
                        os.replace(scratch / name, directory / name)
                    readbacks[name] = readback
            finally:
                shutil.rmtree(scratch, ignore_errors=True)
        differing = _differing(readbacks)
        if differing:
            raise CorruptionError(
                f"what was saved at step {self._trainer.state.global_step} differs from the live state after {_WRITES} "
                f"attempts to write it: {', '.join(differing[:3])} ({len(differing)} in all). It was discarded and "
                "earlier checkpoints are intact: check the disk and the memory, then start the same command again"
            )
        self._trainer.before_manifest(directory)
        return readbacks

    def _write_again(self, directory: Path, states: Sequence[State], *, fetched: bool) -> None:
        trainer = self._trainer
        if self._first and not self.saves_shards:
            if fetched and trainer.full_state is None:
                trainer._save(str(directory), state_dict=saved_state.model_on_host(self._bare_model()))
            else:
                trainer.write_model(str(directory))
        for state in states:
            state.write_to(directory, fetched=fetched)

    def _compare(
        self, directory: Path, states: Sequence[State], plain: Mapping[str, Tensor] | None
    ) -> dict[str, Readback]:
        readbacks: dict[str, Readback] = {}
        if self._first and not self.saves_shards:
            readbacks |= saved_state.compare_model(directory, self._bare_model(), self._full_model(), plain)
        for state in states:
            readbacks[state.name] = saved_state.compare_state(directory / state.name, state.live())
        equal = [name for name, readback in readbacks.items() if not readback.differing]
        self._trainer.transfer_report.count("files", verified=len(equal), mismatches=len(_differing(readbacks)))
        return readbacks

    @property
    def _first(self) -> bool:
        return bool(self._trainer.is_world_process_zero())

    def _bare_model(self) -> nn.Module:
        model: nn.Module = self._trainer.accelerator.unwrap_model(self._trainer.model, keep_torch_compile=False)
        return model

    @property
    def saves_shards(self) -> bool:
        """Whether each rank writes its own files, in upstream's format."""
        return self._trainer.is_sharded and self._trainer.full_state is None

    def _full_model(self) -> dict[str, Any] | None:
        """Trained weights of a sharded model, on rank 0; collective unless they were gathered for this save."""
        if self._trainer.full_state is None:
            return None
        model: dict[str, Any] | None = self._trainer.full_state.model()
        return model

    def _forget_full(self) -> None:
        if self._trainer.full_state is not None:
            self._trainer.full_state.forget()

    def _open_stage(self, final: Path) -> StagedSave:
        """Create a staging directory beside ``final`` on rank 0; every rank checks that it sees it. Collective."""
        parameters = list(self._trainer.model.parameters())
        if hasattr(self._bare_model(), "peft_config"):  # an adapter is saved alone
            parameters = [parameter for parameter in parameters if parameter.requires_grad]
        stage = StagedSave(root=final.parent, need_bytes=sum(parameter.nbytes for parameter in parameters))
        made: list[Path] = []
        if self._first:
            stage.attempt(lambda: made.append(create_staging(final)))
        (made,) = broadcast_object_list([made])
        if made:
            stage.root = made[0]
            stage.usable = True
            if not stage.root.is_dir():
                who = f"rank {self._trainer.args.process_index} does not see {stage.root}"
                stage.failure = UsageError(f"{who}: put output_dir on a disk that all nodes share")
        return stage


def _entries(readbacks: Mapping[str, Readback]) -> dict[str, manifest.FileEntry]:
    return {name: readback.entry for name, readback in readbacks.items() if readback.entry is not None}


def _digests(readbacks: Mapping[str, Readback]) -> dict[str, str]:
    """The digests of all tensors of these files, by ``file:name``."""
    digests: dict[str, str] = {}
    for readback in readbacks.values():
        digests |= readback.digests
    return digests


def _recorded_digests(directory: Path) -> Mapping[str, str]:
    """The tensors' digests in the manifest of a directory, by ``file:name``; none without one."""
    written = manifest.read(directory)
    if not isinstance(written, manifest.Manifest):
        return {}
    return written.tensors


def _differing(readbacks: Mapping[str, Readback]) -> list[str]:
    names: list[str] = []
    for readback in readbacks.values():
        names += readback.differing
    return names


def _not_as_recorded(directory: Path, readbacks: Mapping[str, Readback]) -> list[str]:
    """Names of tensors whose digests in the manifest are others than those of the files.

    The files were verified before they were loaded, and may have changed since.
    """
    recorded = _recorded_digests(directory)
    return [label for label, digest in _digests(readbacks).items() if recorded.get(label, digest) != digest]


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


def _is_json(file: Path) -> bool:
    try:
        read_object(file)
    except (OSError, ValueError):
        return False
    return True
