"""Decides what a start does in its output directory: begin a run, resume it, or nothing because it is finished.

Two runs are the same if the settings that determine the trained model, and the content of the local files that they
name, are the same. In a run's directory only what its manifests list is ever deleted, and nothing changes before
`StartPlan.commit`, except that half-written files of killed processes are removed. Nothing here imports torch.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import logging
import os
import re
import secrets
import stat
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

from hf_rocm_tune.errors import UsageError, listed
from hf_rocm_tune.foreign import check_printable, read_object
from hf_rocm_tune.paths import kept_file
from hf_rocm_tune.redaction import redact_json, without_secrets
from hf_rocm_tune.survive import manifest
from hf_rocm_tune.survive.atomic import clean_leftovers, delete_directory, write_text_atomic
from hf_rocm_tune.survive.run_lock import LEASE_FILE, LOCK_FILE, RunLock

logger = logging.getLogger(__name__)

RUN_FILE = "run.json"
SCHEMA = 1
CHECKPOINT_NAME = re.compile(r"^checkpoint-(\d+)$")

IGNORED = frozenset([
    "output_dir", "overwrite_output_dir", "resume_from_checkpoint", "config", "accelerate_config", "run_name",
    "project", "report_to", "disable_tqdm", "verbose", "dry_run", "debug", "skip_memory_metrics", "push_to_hub",
    "on_corruption", "on_oom", "pipeline", "auto_fit_gib", "max_skipped_steps", "prefetch_batches", "doctor",
    "stall_timeout", "preflight", "grad_sync", "ddp_backend", "telemetry_every", "split_layers", "recompute_layers",
    "save_strategy", "one_pass_loss", "stream_weights", "sample_every", "sample_prompts",
    "sample_images", "save_steps", "save_total_limit", "save_only_model", "save_on_each_node", "enable_jit_checkpoint",
    "include_num_input_tokens_seen", "do_train", "do_eval", "do_predict", "local_rank", "ddp_timeout",
    "dataloader_pin_memory", "dataloader_prefetch_factor", "dataloader_persistent_workers",
])  # fmt: skip
"""Settings that do not affect the trajectory, beside those that begin with one of `IGNORED_PREFIXES`."""
IGNORED_PREFIXES = ("logging_", "log_", "hub_", "trackio_", "verify", "transfer_", "sentinel", "consent_")

SMALL_PICTURES = "pictures.json"
"""A few of the data's pictures, for the report page."""
_OWN = (
    "transfer_report.json", "training_log.json", "loss.png", "survival.jsonl", "stall_report.txt", "_crashes.json",
    "_step_down.json", SMALL_PICTURES,
)  # fmt: skip
"""Files that any run may write at the top of its directory, beside its result."""
_LENGTH = ("max_steps", "num_train_epochs")
"""Settings of which a larger value extends a run."""
_MODELS = ("model_name_or_path", "adapter_name_or_path", "reward_model_name_or_path")
_READ = (*_MODELS, "dataset_name", "chat_template_path")
"""Settings that may name a file or a directory to read."""
ADDED = {
    "loss_on_picture_tokens": True,
    "image_folder": None,
    "max_pixels": None,
    "train_vision_tower": "lora",
    "train_projector": "lora",
}
"""Settings that records of earlier versions lack, and what those versions did; a run begun so goes on so."""
_END_BYTES = 32 << 20
_MAY_BE_THERE = re.compile(rf"\..*|lost\+found|{LOCK_FILE}|{LEASE_FILE}.*|_(staging|replaced|deleted).*")
"""Names in a directory without a run that count as none: hidden ones, those of a volume, and ours before a run."""


# ---- which run it is ----------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class RunRecord:
    """Content of ``run.json``."""

    run_id: str  # also in every manifest that the run writes
    settings: Mapping[str, Any]  # `deciding_settings`, redacted: another run has others
    started: str  # UTC time, ISO 8601
    skipped_steps: tuple[int, ...] = ()  # optimizer steps that are left out; see `skip_step`
    auto_fit: Mapping[str, Any] | None = None  # the choice of --auto_fit, kept when the run resumes
    data: Sequence[Mapping[str, Any]] = ()  # what each split is trained on; see `data.summary.DataSummary`
    names: Mapping[str, str] = field(default_factory=dict)  # of local files that `settings` know by content


def new_record(settings: Mapping[str, Any]) -> RunRecord:
    now = datetime.now(UTC)
    kept = redact_json(deciding_settings(settings))
    run_id = f"{now:%Y%m%d-%H%M%S}-{secrets.token_hex(4)}"
    names = {name: Path(settings[name]).name for name in _READ if _is_content(kept.get(name))}
    return RunRecord(run_id=run_id, settings=kept, started=now.isoformat(timespec="seconds"), names=names)


def write_record(directory: Path, record: RunRecord) -> None:
    body = {"schema": SCHEMA, **redact_json(asdict(record))}
    write_text_atomic(directory / RUN_FILE, json.dumps(body, indent=1, sort_keys=True))


def read_record(directory: Path) -> RunRecord | None:
    """The record in ``directory``; None without one."""
    path = directory / RUN_FILE
    try:
        body = read_object(path)
        if body.pop("schema") != SCHEMA:
            raise ValueError("another schema")
        record = RunRecord(**body)
        check_printable([record.run_id, record.started])
        return replace(record, settings=dict(record.settings), skipped_steps=tuple(map(int, record.skipped_steps)))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise UsageError(
            f"{path} cannot be read ({error}), so it is unknown which run this directory holds: choose another "
            "--output_dir, or move that file elsewhere"
        ) from error


def skip_step(directory: Path, step: int) -> None:
    """Leave an optimizer step (from 1) out of this run, at this and every later start."""
    record = read_record(directory)
    if record is not None:
        skipped = sorted({*record.skipped_steps, step})
        write_record(directory, replace(record, skipped_steps=tuple(skipped)))


def deciding_settings(settings: Mapping[str, Any]) -> dict[str, Any]:
    """The settings that are not `IGNORED`, as JSON represents them, without secrets; local files by their content."""
    kept = {}
    for name, value in settings.items():
        if name not in IGNORED and not name.startswith(IGNORED_PREFIXES):
            kept[name] = value
    if not kept.get("packing"):  # how the rows are divided over processes decides how they are packed
        kept.pop("dataset_num_proc", None)
    for name in _READ:
        if isinstance(kept.get(name), str):
            kept[name] = _content(name, kept[name])
    as_json = json.dumps(without_secrets(kept), default=_sorted_or_text)
    deciding: dict[str, Any] = json.loads(as_json, parse_constant=str)  # NaN equals itself only as text
    return deciding


def _sorted_or_text(value: Any) -> list[Any] | str:
    """For JSON, which has no sets."""
    if isinstance(value, set):
        return sorted(value)
    return str(value)


_CONTENT = "content "


def _is_content(recorded: Any) -> bool:
    """Whether a recorded setting is the digest of a local file or directory, see `_content`."""
    return str(recorded).startswith(_CONTENT)


def _content(setting: str, text: str) -> str:
    """What stands for a local file or directory: a digest of names, sizes and contents of its files. An id of the Hub,
    or what does not exist, stands for itself. Of the model's weights it has the ends: `checkpoint` compares the rest,
    when it has been loaded."""
    top = os.path.expanduser(text)
    if not text or not os.path.exists(top):  # unlike Path.exists, never raises
        return text
    files = [top]
    if os.path.isdir(top):
        files = []
        for folder, _, names in os.walk(top):
            files += [os.path.join(folder, name) for name in names]
        files.sort()
    known = _FileDigests()
    content = hashlib.sha256()
    for file in filter(os.path.isfile, files):
        name = file[len(top) :]
        if "/." in name:
            continue
        size = os.path.getsize(file)
        content.update(f"{name} {size}\n".encode())
        if size <= 2 * _END_BYTES or (setting == _MODELS[0] and name.endswith(".safetensors")):
            with open(file, "rb") as opened:
                content.update(opened.read(_END_BYTES))
                opened.seek(max(size - _END_BYTES, opened.tell()))
                content.update(opened.read())
        else:
            content.update(known.digest_of(file))
    known.write()
    return f"{_CONTENT}{content.hexdigest()[:32]}"


class _FileDigests:
    """SHA-256 of large files, kept from start to start by size, inode and times of change."""

    def __init__(self) -> None:
        self._path = kept_file("contents.json")
        self._rows: dict[str, Any] = {}
        self._is_changed = False
        with suppress(OSError, ValueError):
            self._rows = read_object(self._path)

    def digest_of(self, file: str) -> bytes:
        path = os.path.realpath(file)
        details = os.stat(file)
        state = [details.st_size, details.st_dev, details.st_ino, details.st_mtime_ns, details.st_ctime_ns]
        row = self._rows.get(path)
        if not isinstance(row, dict) or row.get("state") != state or not isinstance(row.get("sha256"), str):
            with open(file, "rb") as opened:
                row = {"state": state, "sha256": hashlib.file_digest(opened, "sha256").hexdigest()}
            self._rows[path] = row
            self._is_changed = True
        return str(row["sha256"]).encode()

    def write(self) -> None:
        """Only saves time: without a writable home the files are read again."""
        if self._is_changed:
            with suppress(OSError):
                self._path.parent.mkdir(parents=True, exist_ok=True)
                write_text_atomic(self._path, json.dumps(self._rows))


def _restore(old: Mapping[str, Any], new: Mapping[str, Any]) -> str:
    """What to do where two records differ only in what local files have: they may have changed by a fault."""
    changed = [key for key in old.keys() | new.keys() if old.get(key) != new.get(key)]
    if not all(_is_content(old.get(key)) and _is_content(new.get(key)) for key in changed):
        return ""
    return "; if it was not meant to change on disk, restore it, and the same command goes on"


def differences(old: Mapping[str, Any], new: Mapping[str, Any]) -> str:
    """ "learning_rate 0.0002 -> 0.001, seed 1 -> 2 and 3 more": differences between two records' settings."""
    rows = []
    for key in sorted(old.keys() | new.keys()):
        before, after = old.get(key), new.get(key)
        if before == after:
            continue
        if _is_content(before) or _is_content(after):
            rows.append(f"the content of {key}")
        else:
            rows.append(f"{key} {before!r} -> {after!r}")
    return listed(rows, 5)


# ---- checkpoints --------------------------------------------------------------------------------------------


def list_checkpoints(directory: Path) -> list[tuple[int, Path]]:
    """(step, path) of each ``checkpoint-N`` in ``directory``, by step; empty if it does not exist."""
    if not directory.is_dir():
        return []
    checkpoints = []
    for path in directory.iterdir():
        match = CHECKPOINT_NAME.match(path.name)
        if match and path.is_dir():
            checkpoints.append((int(match[1]), path))
    return sorted(checkpoints)


def run_settings(directory: Path) -> dict[str, Any]:
    """Settings of the run that wrote a directory, or the directory above a checkpoint; empty if they cannot be read."""
    for folder in (directory, directory.parent):
        with suppress(OSError, ValueError):
            settings = read_object(folder / RUN_FILE).get("settings")
            if isinstance(settings, dict) and settings:
                return settings
    return {}


def rotate(newest: Path, *, limit: int | None, best: str | None) -> None:
    """Delete the oldest checkpoints of a run until ``limit`` are left; None or below 1 keeps all.

    ``newest`` has just been verified and identifies the run; it is kept whatever its number, and so is ``best``.
    """
    run_id = manifest.run_of(newest)
    if limit is None or limit < 1 or run_id is None:
        return
    protected = {newest.name, Path(best or newest).name}
    checkpoints = [path for _, path in list_checkpoints(newest.parent) if is_wholly_of(path, run_id)]
    surplus = max(len(checkpoints) - max(limit, len(protected)), 0)
    for path in [path for path in checkpoints if path.name not in protected][:surplus]:
        delete_directory(path)


def is_wholly_of(directory: Path, run_id: str) -> bool:
    """Whether a run has written all that is in a directory, by its manifest."""
    written = manifest.read(directory)
    if directory.is_symlink() or isinstance(written, manifest.FileProblem) or written.run_id != run_id:
        return False
    return {*manifest.list_files(directory)} <= {*written.files}


def move_aside(path: Path, why: str) -> Path:
    """Rename to ``WHY-NAME``, or the first of ``WHY-NAME.1``, ``WHY-NAME.2`` ... that does not exist."""
    target = path.with_name(f"{why}-{path.name}")
    for number in itertools.count(1):
        if not os.path.lexists(target):
            break
        target = path.with_name(f"{why}-{path.name}.{number}")
    return path.rename(target)


# ---- the start of a run -------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class StartPlan:
    """What a start will do. It can be pickled and sent to the other ranks."""

    directory: Path  # the output directory; it exists
    action: Literal["fresh", "resume", "finished"]
    checkpoint: Path | None = None  # to resume from
    record: RunRecord  # present or future content of run.json
    notes: tuple[str, ...]  # for the user: damaged checkpoints, fallbacks, files without a recorded hash
    lock: RunLock  # held by this process until `close`
    damaged: tuple[Path, ...] = ()  # checkpoints of this run that fail verification; `commit` renames them
    overwritten: tuple[Path, ...] = ()  # what `commit` deletes
    made: tuple[Path, ...] = ()  # directories that were created for the run, the innermost first

    @property
    def run_id(self) -> str:
        return self.record.run_id

    def commit(self) -> None:
        """Carry out the plan, just before training, on rank 0; does nothing for a finished run."""
        if self.action == "finished":
            return
        try:
            for path in self.overwritten:
                delete_directory(path) if path.is_dir() else path.unlink(missing_ok=True)
            for path in self.damaged:
                move_aside(path, "damaged")
            write_record(self.directory, self.record)
            # A damaged result must not look finished while it is trained again.
            if manifest.run_of(self.directory) == self.run_id:
                (self.directory / manifest.MANIFEST_NAME).unlink()
        except OSError as error:
            raise _unusable(self.directory, error) from error

    def close(self) -> None:
        """Release the lock, and remove empty directories that were created for a run that never began."""
        self.lock.release()
        _remove_empty(self.made)


def prepare_output_dir(
    path: str | Path,
    settings: Mapping[str, Any],
    *,
    overwrite: bool = False,
    resume: str | bool | None = None,
    restarted: bool = False,
    restart_of: str | None = None,
) -> StartPlan:
    """Decide what a start with these settings does in ``path`` (``--output_dir``).

    ``restarted``: a launcher started this command again, so that ``overwrite`` and a named checkpoint have been applied
    already. ``restart_of``: our supervisor started it again, after this run; for another run it says nothing.
    """
    directory = Path(path)
    lock = None
    made: tuple[Path, ...] = ()
    try:
        _refuse_inputs(directory, settings)
        _refuse_foreign_content(directory)
        made = tuple(folder for folder in (directory, *directory.parents) if not folder.exists())
        directory.mkdir(parents=True, exist_ok=True)
        lock = RunLock(directory)
        return replace(_Start(directory, settings, lock, resume).decide(overwrite, restarted, restart_of), made=made)
    except BaseException as error:
        if lock is not None:
            lock.release()
        _remove_empty(made)
        if isinstance(error, OSError | ValueError):
            raise _unusable(directory, error) from error
        raise


def _remove_empty(made: tuple[Path, ...]) -> None:
    for path in made:
        with suppress(OSError):
            path.rmdir()


class _Start:
    """One start in a directory: the request, and what is found there."""

    def __init__(self, directory: Path, settings: Mapping[str, Any], lock: RunLock, resume: str | bool | None) -> None:
        self._directory = directory
        self._lock = lock
        self._new = new_record(settings)
        value = str(resume or False).strip().lower()
        self._newest_wanted = value in ("true", "yes", "1")
        self._named: Path | None = None
        if value not in ("true", "yes", "1", "false", "no", "0", ""):
            self._named = Path(str(resume))
        self._notes: list[str] = []
        clean_leftovers(directory)

    def decide(self, overwrite: bool, restarted: bool, restart_of: str | None) -> StartPlan:
        record = read_record(self._directory)
        same = False
        if record is not None:
            record = self._with_added(record)
            same = record.settings == self._new.settings
            restarted = restarted or restart_of == record.run_id
        if overwrite and not (same and restarted):
            return self._begin_again(record)
        extended = None
        if record is not None and not same:
            extended = self._extended(record)
            if extended is None:
                raise self._another_run(record)
        record = extended or record or self._new
        if self._named is not None and not restarted:
            return self._resume(self._named, record)
        plan = self._continue(record, may_be_finished=extended is None)
        if self._named is not None and plan.action == "fresh":
            return self._resume(self._named, record)
        return plan

    def _another_run(self, record: RunRecord) -> UsageError:
        """The directory holds a run with other settings."""
        onward = ""
        checkpoints = list_checkpoints(self._directory)
        if checkpoints:
            onward = f", with --resume_from_checkpoint {checkpoints[-1][1]} to go on from there"
        restore = _restore(record.settings, self._new.settings)
        return UsageError(
            f"{self._directory} holds another run, which differs in "
            f"{differences(record.settings, self._new.settings)}: choose another --output_dir"
            f"{onward}, or give --overwrite_output_dir to delete that run{restore}"
        )

    def _with_added(self, record: RunRecord) -> RunRecord:
        """The record with the settings of `ADDED`, which this start takes from it where the user leaves them out."""
        settings = {**ADDED, **record.settings}
        asked = self._new.settings
        left_out = {name: settings[name] for name in ADDED if name in asked and asked[name] is None}
        self._new = replace(self._new, settings={**asked, **left_out})
        compared = {name: value for name, value in settings.items() if name in asked or name not in ADDED}
        return replace(record, settings=compared)

    def _extended(self, record: RunRecord) -> RunRecord | None:
        """The record of this run with more steps; None if it is another run, or its rates depend on their number."""
        before, now = record.settings, self._new.settings
        longer = {name: now[name] for name in _LENGTH if name in now and _is_longer(before.get(name), now[name])}
        schedule = now.get("lr_scheduler_type")
        warmup = now.get("warmup_steps") or 0  # below 1: a share of all steps
        constant = schedule == "constant" or (schedule == "constant_with_warmup" and warmup >= 1)
        if {**before, **longer} != now or not constant or now.get("grad_compression") == "powersgd":
            return None
        self._notes.append(f"the run is extended: {differences(before, now)}")
        return replace(record, settings=now)

    def _plan(self, action: Literal["fresh", "resume", "finished"], record: RunRecord, **more: Any) -> StartPlan:
        if record.skipped_steps and action != "finished":
            steps = ", ".join(map(str, record.skipped_steps))
            self._notes.append(f"left out, because the run died in them twice (run.json): steps {steps}")
        return StartPlan(
            directory=self._directory, action=action, record=record, notes=(*self._notes,), lock=self._lock, **more
        )

    def _continue(self, record: RunRecord, *, may_be_finished: bool) -> StartPlan:
        """Plan for the same command: finished, or from the newest verified checkpoint, or from the beginning."""
        if may_be_finished and not self._newest_wanted and self._is_finished(record):
            return self._plan("finished", record)
        damaged: list[Path] = []
        newest = None
        for _, path in reversed(list_checkpoints(self._directory)):
            inspected = manifest.inspect(path)
            problems, written = inspected.problems, inspected.manifest
            if written is None and problems[0].kind == "missing":
                self._notes.append(f"{path.name} is skipped: it has no {manifest.MANIFEST_NAME}, it is not attested")
            elif problems or written is None or written.run_id != record.run_id:
                why = problems[0] if problems else "it belongs to another run"
                self._notes.append(f"{path.name} is damaged and is renamed: {why}")
                damaged.append(path)
            else:
                newest = path
                break
        if newest is None and self._newest_wanted:
            raise UsageError(
                f"--resume_from_checkpoint true: {self._directory} holds no intact checkpoint of this run"
                f"{''.join(f'; {note}' for note in self._notes)}; leave the flag out to start at step 0"
            )
        if damaged:
            start = f"continuing from {newest.name}" if newest else "no intact checkpoint is left: starting at step 0"
            self._notes.append(start)
        action: Literal["resume", "fresh"] = "resume" if newest else "fresh"
        return self._plan(action, record, checkpoint=newest, damaged=tuple(damaged))

    def _is_finished(self, record: RunRecord) -> bool:
        inspected = manifest.inspect(self._directory)
        written = inspected.manifest
        if written is None or written.status != "final" or written.run_id != record.run_id:
            return False
        # Users may edit the model card.
        lost = [problem for problem in inspected.problems if not problem.file.endswith(".md")]
        if lost:
            self._notes.append(f"the result in {self._directory} is damaged and is trained again: {lost[0]}")
        return not lost

    def _resume(self, checkpoint: Path, record: RunRecord, **more: Any) -> StartPlan:
        named = f"--resume_from_checkpoint {checkpoint}"
        if not (checkpoint / "trainer_state.json").is_file():
            inside = list_checkpoints(checkpoint)
            hint = f"did you mean {inside[-1][1]}?" if inside else "give a checkpoint-N that a run has written"
            raise UsageError(f"{named}: there is no checkpoint; {hint}")
        if not (checkpoint / manifest.MANIFEST_NAME).exists():
            self._notes.append(f"{checkpoint} has no {manifest.MANIFEST_NAME}: its files are not attested")
        else:
            problems = manifest.verify(checkpoint)
            if problems:
                raise UsageError(f"{named}: {problems[0]}; give an older checkpoint, or leave the flag out")
        return self._plan("resume", record, checkpoint=checkpoint, **more)

    def _begin_again(self, old: RunRecord | None) -> StartPlan:
        deleted = tuple(self._written_by(old.run_id)) if old is not None else ()
        if self._newest_wanted or (self._named and self._named.resolve() in {path.resolve() for path in deleted}):
            named = self._named or "true"
            raise UsageError(
                f"--overwrite_output_dir would delete --resume_from_checkpoint {named}: choose another --output_dir"
            )
        if deleted:
            what = ", ".join(path.relative_to(self._directory).as_posix() for path in deleted)
            self._notes.append(f"--overwrite_output_dir deletes in {self._directory}: {what}")
        if self._named is None:
            return self._plan("fresh", self._new, overwritten=deleted)
        return self._resume(self._named, self._new, overwritten=deleted)

    def _written_by(self, run_id: str) -> Iterator[Path]:
        """What a run has written. Its result's manifest comes first, so that a half-deleted result does not look
        finished; ``README.md``, which the user may have edited, is excluded."""
        written = manifest.read(self._directory)
        inside = self._directory.resolve()
        names: set[str] = set()
        if isinstance(written, manifest.Manifest) and written.run_id == run_id:
            yield self._directory / manifest.MANIFEST_NAME
            names = {name for name in written.files if (inside / name).resolve().is_relative_to(inside)}
        for name in sorted({*names, *_OWN} - {"README.md"}):
            path = self._directory / name
            if path.is_file() and not path.is_symlink():
                yield path
        for path in sorted(self._directory.iterdir()):
            name = re.sub(r"^(damaged|kept)-|\.\d+$", "", path.name)
            if path.is_dir() and CHECKPOINT_NAME.match(name) and is_wholly_of(path, run_id):
                yield path


def _is_longer(had: Any, wanted: Any) -> bool:
    return isinstance(had, int | float) and isinstance(wanted, int | float) and 0 < had < wanted


def _refuse_inputs(directory: Path, settings: Mapping[str, Any]) -> None:
    """Raise if the run would read what it writes, now or when it resumes."""
    out = directory.resolve()
    instead = "choose another --output_dir"
    for flag in (*_READ, "datasets"):
        for text in _texts(settings.get(flag)):
            if not text or not os.path.exists(os.path.expanduser(text)):  # an id of the Hub
                continue
            given = Path(os.path.expanduser(text)).resolve()
            if given.is_relative_to(out):
                why = f"--{flag} {text} lies in --output_dir {directory}, where a run replaces and deletes files"
                raise UsageError(f"{why}: {instead}")
            if flag not in _MODELS and out.is_relative_to(given):
                why = f"--output_dir {directory} lies in --{flag} {text}"
                raise UsageError(f"{why}: its files would be read as data when it resumes: {instead}")


def _refuse_foreign_content(directory: Path) -> None:
    """Raise if the directory has files that no run has written, or something else in the place of a run's file."""
    if directory.is_dir() and read_record(directory) is None:
        names = sorted(name for name in os.listdir(directory) if not _MAY_BE_THERE.match(name))
        if names:
            raise UsageError(
                f"{directory} is not empty, and no run of hf-rocm-tune has written what is in it "
                f"({listed(names, 6)}): choose another --output_dir, or move that elsewhere"
            )
    for name in (*_OWN, RUN_FILE, manifest.MANIFEST_NAME):
        if os.path.lexists(directory / name) and not stat.S_ISREG(os.lstat(directory / name).st_mode):
            raise UsageError(
                f"{directory / name} is a link or no plain file, and a run writes a file of that name: move it away"
            )


def _texts(value: Any) -> Iterator[str]:
    """All texts in nested mappings and sequences."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        yield from _texts([*value.values()])
    elif isinstance(value, Iterable):
        for item in value:
            yield from _texts(item)


def _unusable(directory: Path, error: OSError | ValueError) -> UsageError:
    reason = str(error)
    if isinstance(error, OSError) and error.strerror:
        reason = error.strerror
    return UsageError(f"--output_dir {directory} cannot be written: {reason}; choose another one")
