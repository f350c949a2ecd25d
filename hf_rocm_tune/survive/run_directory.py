"""Decides what a start does in its output directory: begin a run, resume it, or nothing because it is finished.

The same command in the same directory continues from its newest verified checkpoint, which is all a restart after a
crash has to do. Another run is refused unless it may overwrite. Two runs are the same if the settings that determine
the trained model are the same; settings for display, reports, pushes, retention and checks may change (`IGNORED`).

A run owns the files that its ``run.json`` and its manifests list. Other files belong to the user and are never touched,
whatever their names. Nothing here imports torch. Before `StartPlan.commit` nothing changes in the directory, except
that half-written files of killed processes are removed. Only rank 0 calls `prepare_output_dir`.
"""

from __future__ import annotations

import errno
import fcntl
import filecmp
import hashlib
import json
import logging
import os
import re
import secrets
import socket
import stat
import tempfile
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

from hf_rocm_tune.errors import UsageError, listed
from hf_rocm_tune.redaction import redact_json, without_secrets
from hf_rocm_tune.survive import manifest
from hf_rocm_tune.survive.atomic import (
    clean_leftovers,
    delete_directory,
    open_in_place,
    read_plain,
    write_text_atomic,
)
from hf_rocm_tune.survive.heartbeat import Supervised

logger = logging.getLogger(__name__)

RUN_FILE = "run.json"
LOCK_FILE = "_run.lock"
SCHEMA = 1
CHECKPOINT_NAME = re.compile(r"^checkpoint-(\d+)$")

IGNORED = frozenset([
    "output_dir", "overwrite_output_dir", "resume_from_checkpoint", "config", "accelerate_config", "run_name",
    "project", "report_to", "disable_tqdm", "verbose", "dry_run", "debug", "skip_memory_metrics", "push_to_hub",
    "on_corruption", "on_oom", "pipeline",
    "auto_fit_gib", "max_skipped_steps", "prefetch_batches", "doctor", "stall_timeout",
    "preflight", "grad_sync", "ddp_backend", "telemetry_every", "split_layers", "recompute_layers", "save_strategy",
    "one_pass_loss", "stream_weights",
    "save_steps", "save_total_limit", "save_only_model", "save_on_each_node", "enable_jit_checkpoint",
    "include_num_input_tokens_seen", "do_train", "do_eval", "do_predict", "local_rank", "ddp_timeout",
    "dataloader_pin_memory", "dataloader_prefetch_factor", "dataloader_persistent_workers",
])  # fmt: skip
"""Settings that do not affect the trajectory, beside those that begin with one of `IGNORED_PREFIXES`."""
IGNORED_PREFIXES = ("logging_", "log_", "hub_", "trackio_", "verify", "transfer_", "sentinel", "consent_")

_OWN = frozenset([
    "run.json", "integrity.json", "transfer_report.json", "training_log.json", "loss.png", "survival.jsonl",
    "stall_report.txt", "_crashes.json", "_step_down.json",
])  # fmt: skip
"""Files that any run may write at the top of its directory, beside its result."""
_WEIGHTS = re.compile(
    r"^(adapter_model\.(safetensors|bin)"
    r"|model(-\d+-of-\d+)?\.safetensors|model\.safetensors\.index\.json"
    r"|pytorch_model(-\d+-of-\d+)?\.bin|pytorch_model\.bin\.index\.json)$"
)
_MAY_BE_THERE = re.compile(rf"\..*|lost\+found|{LOCK_FILE}|_(probe|staging|replaced|deleted).*")
"""Names in a directory without a run that count as none: hidden ones, those of a volume, and ours before a run."""
_LISTED_DIRECTORY = re.compile(r"^(damaged-|kept-)?checkpoint-\d+(\.\d+)?$")
_LOCK_HOLDER = re.compile(rb"process \d+ on [^\n]*")


# ---- which run it is ----------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class RunRecord:
    """Content of ``run.json``."""

    run_id: str  # also in every manifest that the run writes
    fingerprint: str
    settings: Mapping[str, Any]  # the fingerprinted settings, to name differences
    started: str  # UTC time, ISO 8601
    skipped_steps: tuple[int, ...] = ()  # optimizer steps that are left out; see `skip_step`
    auto_fit: Mapping[str, Any] | None = None  # the choice of --auto_fit, kept when the run resumes
    files: tuple[str, ...] = ()  # names of the result's files in the directory, or that are about to be written


def new_record(settings: Mapping[str, Any]) -> RunRecord:
    """The record of a run that starts now, with a new id."""
    now = datetime.now(UTC)
    return RunRecord(
        run_id=f"{now:%Y%m%d-%H%M%S}-{secrets.token_hex(4)}",
        fingerprint=fingerprint(settings),
        settings=deciding_settings(settings),
        started=now.isoformat(timespec="seconds"),
    )


def write_record(directory: Path, record: RunRecord) -> None:
    body = {"schema": SCHEMA, **redact_json(asdict(record))}
    write_text_atomic(directory / RUN_FILE, json.dumps(body, indent=1, sort_keys=True))


def read_record(directory: Path) -> RunRecord | None:
    """The record in ``directory``; None without one."""
    path = directory / RUN_FILE
    try:
        body = json.loads(read_plain(path))
        if body.pop("schema") != SCHEMA:
            raise ValueError("another schema")
        body.pop("status", None)  # of earlier versions; whether a run is finished is what its manifest says
        record = RunRecord(**body)
        if not isinstance(record.settings, dict):
            raise ValueError("fields of the wrong kind")
        steps, files = map(int, record.skipped_steps), map(str, record.files)
        return replace(record, skipped_steps=tuple(steps), files=tuple(files))
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
    if record is None:
        raise UsageError(f"{directory} holds no {RUN_FILE}, so no step of its run can be left out")
    write_record(directory, replace(record, skipped_steps=tuple(sorted({*record.skipped_steps, step}))))


def fingerprint(settings: Mapping[str, Any]) -> str:
    """SHA-256 (64 hexadecimal digits) of the settings that affect the trajectory, in any order."""
    text = json.dumps(deciding_settings(settings), sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def deciding_settings(settings: Mapping[str, Any]) -> dict[str, Any]:
    """The settings that are not `IGNORED`, as JSON represents them, without secrets."""
    kept = {k: v for k, v in settings.items() if k not in IGNORED and not k.startswith(IGNORED_PREFIXES)}
    # How the rows are divided over processes decides how they are packed; older runs did not record it.
    if not kept.get("packing") or kept.get("dataset_num_proc") is None:
        kept.pop("dataset_num_proc", None)
    plain: dict[str, Any] = json.loads(json.dumps(_plain(without_secrets(kept))))
    return plain


def differences(old: Mapping[str, Any], new: Mapping[str, Any]) -> str:
    """ "learning_rate 0.0002 -> 0.001, seed 1 -> 2 and 3 more": differences between two `deciding_settings`."""
    old, new = redact_json(old), redact_json(new)  # as in ``run.json``
    changed = [key for key in sorted(old.keys() | new.keys()) if old.get(key) != new.get(key)]
    return listed([f"{key} {old.get(key)!r} -> {new.get(key)!r}" for key in changed], 5)


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(k): _plain(v) for k, v in value.items()}
    if isinstance(value, set | frozenset):
        return sorted((_plain(item) for item in value), key=repr)
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    # A string enum is its value in a settings file; NaN equals itself only as text.
    if isinstance(value, str):
        return str.__str__(value)
    if value is None or isinstance(value, bool | int) or (isinstance(value, float) and value - value == 0):
        return value
    return str(value)


# ---- the lock -----------------------------------------------------------------------------------------------


class RunLock:
    """An exclusive lock on an output directory, until `release` or the end of the process, however it ends.

    A pickled copy holds no lock.
    """

    def __init__(self, directory: Path) -> None:
        """Take the lock."""
        self.supported = True
        self._path = directory / LOCK_FILE
        self._descriptor: int | None = None
        while not self._taken():
            self._close()  # the previous holder has deleted the file meanwhile
        # A data loader worker that outlives a killed parent by seconds must not block the restart.
        os.register_at_fork(after_in_child=self._close)
        assert self._descriptor is not None
        with suppress(OSError):  # on a full disk only the holder's name is missing
            os.ftruncate(self._descriptor, 0)
            os.pwrite(self._descriptor, f"process {os.getpid()} on {socket.gethostname()}".encode(), 0)

    def _taken(self) -> bool:
        """Open and lock the file. Returns whether it is still the file in the directory."""
        descriptor = self._descriptor = open_in_place(self._path, os.O_RDWR)
        content = os.pread(descriptor, 400, 0)
        if content and not _LOCK_HOLDER.fullmatch(content):
            self._close()
            raise OSError(errno.EINVAL, f"{LOCK_FILE} in it is not a lock file of this program: move it elsewhere")
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            holder = content.decode("utf-8", "replace") or "another process"
            self._close()
            raise UsageError(
                f"{self._path.parent} is in use by {holder}: wait for that run, stop it, or choose another --output_dir"
            ) from error
        except OSError as error:
            if error.errno not in (errno.ENOLCK, errno.ENOTSUP, errno.EINVAL, errno.ENOSYS):
                self._close()
                raise
            self.supported = False  # some network file systems have no locks
        return self._is_there()

    def _is_there(self) -> bool:
        assert self._descriptor is not None
        try:
            return os.path.samestat(os.fstat(self._descriptor), os.lstat(self._path))
        except FileNotFoundError:
            return False

    def release(self) -> None:
        """Release the lock, even if a forked process lives on. May be called more than once."""
        if self._descriptor is not None:
            with suppress(OSError):  # no locks on this file system, or the disk is gone
                if self.supported and self._is_there():
                    self._path.unlink()
                fcntl.flock(self._descriptor, fcntl.LOCK_UN)
        self._close()

    def _close(self) -> None:
        """Close this process's descriptor; processes that share it keep theirs."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    def __getstate__(self) -> dict[str, Any]:
        return {"supported": self.supported, "_path": self._path, "_descriptor": None}


# ---- which files belong to the run --------------------------------------------------------------------------


def written_by(directory: Path, run_id: str, names: Iterable[str]) -> list[Path]:
    """The files in ``directory`` that a run has written: ``names`` at the top and those in its checkpoints' manifests.

    The manifest of the result comes first, so that a half-deleted result does not look finished. Excluded are links and
    what they point to, ``run.json``, which identifies the rest, and ``README.md``, which the user may have edited.
    """
    found = [directory / name for name in sorted({*names, *_OWN} - {"README.md", RUN_FILE, manifest.MANIFEST_NAME})]
    if listed_by(directory, run_id) is not None:
        found.insert(0, directory / manifest.MANIFEST_NAME)
    for path in sorted(directory.iterdir()):
        if path.is_symlink() or not path.is_dir():
            continue
        if _LISTED_DIRECTORY.match(path.name) and (inside := listed_by(path, run_id)) is not None:
            found += [path / name for name in (manifest.MANIFEST_NAME, *inside)]
    return [path for path in found if _is_plain(path)]


def listed_by(directory: Path, run_id: str) -> tuple[str, ...] | None:
    """Names inside ``directory`` in its manifest of this run; None without such a manifest."""
    found = manifest.read(directory)
    if not isinstance(found, manifest.Manifest) or found.run_id != run_id:
        return None
    inside = directory.resolve()
    return tuple(name for name in found.files if "\0" not in name and (inside / name).resolve().is_relative_to(inside))


def remove(paths: Sequence[Path], top: Path) -> None:
    """Delete files, and the directories below ``top`` that become empty."""
    for path in paths:
        path.unlink(missing_ok=True)
    folders = {parent for path in paths for parent in path.parents if parent != top and top in parent.parents}
    for folder in sorted(folders, key=lambda each: len(each.parts), reverse=True):
        with suppress(OSError):  # other files are in it
            folder.rmdir()


def move_aside(final: Path, run_id: str) -> Path | None:
    """Rename what is in the place of a new checkpoint, unless the run has written all of it. Returns the new path."""
    if not os.path.lexists(final) or (not final.is_symlink() and not unlisted(final, run_id)):
        return None
    aside = free_name(final.with_name(f"kept-{final.name}"))
    final.rename(aside)
    return aside


def unlisted(directory: Path, run_id: str) -> list[str]:
    """Names below a directory that are not in its manifest of this run; all of them without such a manifest."""
    if not directory.is_dir():
        return [directory.name]
    inside = listed_by(directory, run_id)
    ours = set() if inside is None else {*inside, manifest.MANIFEST_NAME}
    found = []
    for folder, folders, files in os.walk(directory):
        links = [name for name in folders if os.path.islink(os.path.join(folder, name))]
        found += [Path(folder, name).relative_to(directory).as_posix() for name in (*files, *links)]
    return sorted(name for name in found if name not in ours)


def free_name(path: Path) -> Path:
    """``path``, or the first of ``path.1``, ``path.2`` ... that does not exist."""
    number, candidate = 1, path
    while os.path.lexists(candidate):
        candidate, number = path.with_name(f"{path.name}.{number}"), number + 1
    return candidate


def claim(staging: Path, directory: Path) -> None:
    """Record in ``run.json`` the files that are about to be moved from ``staging`` to ``directory``, if it holds a run.

    A file that is already there with the same bytes (a card edited by the user) is kept and removed from ``staging``.
    """
    record = read_record(directory)
    if record is None:
        return
    names = [path.relative_to(staging).as_posix() for path in staging.rglob("*") if path.is_file()]
    foreign, in_place = [], []
    for name in names:
        if name in record.files or not os.path.lexists(directory / name):
            continue
        if _is_plain(directory / name) and filecmp.cmp(staging / name, directory / name, shallow=False):
            (staging / name).unlink()
            in_place.append(name)
        else:
            foreign.append(name)
    if foreign:
        raise UsageError(f"{_would_replace(directory, foreign)}; then start the same command again")
    ours = {*record.files, *names} - set(in_place)
    write_record(directory, replace(record, files=tuple(sorted(ours))))


def _would_replace(directory: Path, names: Sequence[str]) -> str:
    return (
        f"{directory} holds files that no run of hf-rocm-tune has written and that this one would replace "
        f"({listed(names, 6)}): choose another --output_dir, or move them elsewhere"
    )


def _is_plain(path: Path) -> bool:
    try:
        return stat.S_ISREG(path.lstat().st_mode)
    except OSError:
        return False


def is_checkpoint(directory: Path) -> bool:
    """Whether the directory can be resumed from: it has a trainer state, and weights in a format the Trainer reads."""
    if not (directory / "trainer_state.json").is_file():
        return False
    for path in directory.iterdir():
        if _WEIGHTS.match(path.name) or path.name.startswith(("pytorch_model_fsdp", "global_step")):
            return True
        if path.is_dir() and any(_WEIGHTS.match(inner.name) for inner in path.iterdir()):
            return True
    return False


# ---- checkpoints --------------------------------------------------------------------------------------------


def list_checkpoints(directory: Path) -> list[tuple[int, Path]]:
    """(step, path) of each ``checkpoint-N`` in ``directory``, by step; empty if it does not exist."""
    if not directory.is_dir():
        return []
    found = [(CHECKPOINT_NAME.match(path.name), path) for path in directory.iterdir() if path.is_dir()]
    return sorted((int(match[1]), path) for match, path in found if match)


def rotate(newest: Path, *, limit: int | None, best: str | None) -> None:
    """Delete the oldest checkpoints of a run until ``limit`` are left; None or below 1 keeps all.

    ``newest`` has just been verified and identifies the run; it is kept whatever its number, and so is ``best``.
    """
    written = manifest.read(newest)
    if limit is None or limit < 1 or not isinstance(written, manifest.Manifest):
        return
    protected = {newest.name} | ({Path(best).name} if best else set())
    here = [path for _, path in list_checkpoints(newest.parent) if not path.is_symlink()]
    checkpoints = [path for path in here if listed_by(path, written.run_id) is not None]
    surplus = len(checkpoints) - max(limit, len(protected))
    for path in [path for path in checkpoints if path.name not in protected][: max(surplus, 0)]:
        _delete(path, written.run_id)


def _delete(checkpoint: Path, run_id: str) -> None:
    foreign = unlisted(checkpoint, run_id)
    if not foreign:
        delete_directory(checkpoint)
        return
    ours = [manifest.MANIFEST_NAME, *(listed_by(checkpoint, run_id) or ())]
    remove([checkpoint / name for name in ours], checkpoint)
    logger.warning(
        "%s was deleted, except for files that the run has not written: %s", checkpoint.name, ", ".join(foreign[:6])
    )


# ---- the start of a run -------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class StartPlan:
    """What a start will do. It can be pickled and sent to the other ranks."""

    directory: Path  # the output directory; it exists
    action: Literal["fresh", "resume", "finished"]
    checkpoint: Path | None  # to resume from
    record: RunRecord  # present or future content of run.json
    notes: tuple[str, ...]  # for the user: damaged checkpoints, fallbacks, files without a recorded hash
    damaged: tuple[Path, ...] = ()  # checkpoints of this run that fail verification; `commit` renames them
    overwritten: tuple[Path, ...] = ()  # files that `commit` deletes
    lock: RunLock  # held by this process until `close`
    made: tuple[Path, ...] = ()  # directories that were created for the run, the outermost first

    @property
    def run_id(self) -> str:
        return self.record.run_id

    def commit(self) -> None:
        """Carry out the plan, just before training, on rank 0; does nothing for a finished run."""
        if self.action == "finished":
            return
        try:
            remove(self.overwritten, self.directory)
            for path in self.damaged:
                path.rename(free_name(path.with_name(f"damaged-{path.name}")))
            write_record(self.directory, self.record)
            # A damaged result must not look finished while it is trained again.
            if listed_by(self.directory, self.run_id) is not None:
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
    restarted: bool | None = None,
) -> StartPlan:
    """Decide what a start with these settings does in ``path`` (``--output_dir``).

    Args:
        settings: resolved, by name.
        overwrite: ``--overwrite_output_dir``: delete the run in ``path`` and begin again.
        resume: ``--resume_from_checkpoint``: a checkpoint, or true for the newest one, which must then exist.
        restarted: whether a launcher or our supervisor started this command again, so that ``overwrite`` and a named
            checkpoint have been applied already; None: as their environment variables and files say.

    Raises:
        UsageError: the directory cannot be used, holds another run or is in use; the named checkpoint is damaged or
            not a checkpoint; or overwriting would delete what the run reads.
    """
    start = _Start(Path(path), settings, overwrite, resume)
    _refuse_inputs(start.directory, settings)
    if os.path.isdir(start.directory) and read_record(start.directory) is None:
        _refuse_files(start.directory)
    made: list[Path] = []
    lock = None
    try:
        _probe(start.directory, made)
        try:
            lock = RunLock(start.directory)
        except OSError as error:
            raise _unusable(start.directory, error) from error
        plan = start.decide(lock, restarted)
        return replace(plan, made=tuple(made))
    except BaseException:
        if lock is not None:
            lock.release()
        _remove_empty(made)
        raise


class _Start:
    """One start in a directory: the request, and what is found there."""

    def __init__(self, directory: Path, settings: Mapping[str, Any], overwrite: bool, resume: str | bool | None):
        self.directory, self._settings, self._overwrite = directory, settings, overwrite
        value = str(resume or False).strip().lower()
        self._newest_wanted = value in ("true", "yes", "1")
        self._named = None if self._newest_wanted or value in ("false", "no", "0", "") else Path(str(resume))
        self._notes: list[str] = []

    def decide(self, lock: RunLock, restarted: bool | None) -> StartPlan:
        self._lock = lock
        left = clean_leftovers(self.directory)
        self._notes += [f"{self.directory}: {line} (left by a process that was killed)" for line in left]
        if not lock.supported:
            self._notes.append(f"{self.directory} is on a file system without locks: a second run would not be noticed")
        record = read_record(self.directory)
        same = record is not None and record.fingerprint == fingerprint(self._settings)
        if restarted is None:
            supervised = Supervised.of()
            restarted = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") not in ("", "0") or (
                record is not None and supervised is not None and supervised.restart_of == record.run_id
            )
        if self._overwrite and not (same and restarted):
            return self._begin_again(record)
        if record is not None and not same:
            changed = differences(record.settings, deciding_settings(self._settings))
            raise UsageError(
                f"{self.directory} holds another run, which differs in {changed}: choose another --output_dir, or give "
                "--overwrite_output_dir to delete that run"
            )
        if self._named is None:
            return self._continue(record or new_record(self._settings), newest_wanted=self._newest_wanted)
        if record is not None and restarted:
            continued = self._continue(record, newest_wanted=False)
            if continued.action != "fresh":
                return continued
        return self._resume(self._named, record or new_record(self._settings))

    def _owned(self, record: RunRecord) -> tuple[str, ...]:
        """Names at the top that the run there has written, besides those that every run writes."""
        return (*record.files, *(listed_by(self.directory, record.run_id) or ()))

    def _plan(self, action: Literal["fresh", "resume", "finished"], record: RunRecord, **more: Any) -> StartPlan:
        if record.skipped_steps and action != "finished":
            steps = ", ".join(map(str, record.skipped_steps))
            self._notes.append(f"left out, because the run died in them twice (run.json): steps {steps}")
        rest = {"checkpoint": None, **more}
        return StartPlan(
            directory=self.directory, action=action, record=record, notes=tuple(self._notes), lock=self._lock, **rest
        )

    def _continue(self, record: RunRecord, *, newest_wanted: bool) -> StartPlan:
        """Plan for the same command: finished, or from the newest verified checkpoint, or from the beginning."""
        if not newest_wanted and self._is_finished(record):
            return self._plan("finished", record)
        newest, damaged = self._newest_verified(record)
        if newest is None and newest_wanted:
            found = (
                f"none of its checkpoints is usable ({self._notes[-1]})"
                if damaged
                else "it holds no checkpoint of this run"
            )
            raise UsageError(
                f"--resume_from_checkpoint true: {self.directory}: {found}; leave the flag out to start at step 0"
            )
        if damaged:
            kept = f"continuing from {newest.name}" if newest else "no intact checkpoint is left: starting at step 0"
            self._notes.append(kept)
        return self._plan("resume" if newest else "fresh", record, checkpoint=newest, damaged=tuple(damaged))

    def _newest_verified(self, record: RunRecord) -> tuple[Path | None, list[Path]]:
        """The newest intact checkpoint, and the damaged ones that are newer. Adds a note on each skipped one."""
        damaged = []
        for _, path in reversed(list_checkpoints(self.directory)):
            found = manifest.inspect(path)
            if found.manifest is None and found.problems[0].kind == "missing":
                self._notes.append(
                    f"{path.name} is not attested and is skipped; --resume_from_checkpoint {path} would use it"
                )
            elif found.problems:
                damaged.append(path)
                self._notes.append(f"{path.name} is damaged and is renamed: {found.problems[0]}")
            elif found.manifest is not None and found.manifest.run_id != record.run_id:
                damaged.append(path)
                self._notes.append(f"{path.name} belongs to run {found.manifest.run_id} and is renamed")
            else:
                return path, damaged
        return None, damaged

    def _is_finished(self, record: RunRecord) -> bool:
        found = manifest.inspect(self.directory)
        if found.manifest is None or found.manifest.status != "final" or found.manifest.run_id != record.run_id:
            return False
        # Users may edit the model card.
        lost = [problem for problem in found.problems if not problem.file.endswith(".md")]
        if lost:
            self._notes.append(f"the result in {self.directory} is damaged and is trained again: {lost[0]}")
        return not lost

    def _resume(self, checkpoint: Path, record: RunRecord, **more: Any) -> StartPlan:
        if not os.path.isdir(checkpoint) or not is_checkpoint(checkpoint):
            inside = list_checkpoints(checkpoint)
            hint = (
                f"did you mean {inside[-1][1]}?" if inside else "give a checkpoint-N directory that a run has written"
            )
            raise UsageError(f"--resume_from_checkpoint {checkpoint}: there is no checkpoint; {hint}")
        found = manifest.inspect(checkpoint)
        if found.manifest is None and found.problems[0].kind == "missing":
            self._notes.append(f"{checkpoint} has no {manifest.MANIFEST_NAME}: its files are not attested")
        elif found.problems:
            raise UsageError(
                f"--resume_from_checkpoint {checkpoint}: {found.problems[0]}; give an older checkpoint, or leave the "
                "flag out to continue from the newest intact one"
            )
        return self._plan("resume", record, checkpoint=checkpoint, **more)

    def _begin_again(self, old: RunRecord | None) -> StartPlan:
        if self._newest_wanted:
            raise UsageError(
                "--overwrite_output_dir deletes what --resume_from_checkpoint true asks for: give one of them"
            )
        deleted = written_by(self.directory, old.run_id, self._owned(old)) if old is not None else []
        if self._named is not None and any(self._named.resolve() in path.resolve().parents for path in deleted):
            raise UsageError(
                f"--overwrite_output_dir would delete --resume_from_checkpoint {self._named}: choose another "
                "--output_dir"
            )
        if deleted:
            counts = Counter(path.relative_to(self.directory).parts[0] for path in deleted)
            listed = ", ".join(
                name if (self.directory / name).is_file() else f"{name} ({count} files)"
                for name, count in counts.items()
            )
            self._notes.append(f"--overwrite_output_dir deletes in {self.directory}: {listed}")
        kept = {"README.md"} & set(old.files if old is not None else ())
        record = replace(new_record(self._settings), files=tuple(kept))
        if self._named is None:
            return self._plan("fresh", record, overwritten=tuple(deleted))
        return self._resume(self._named, record, overwritten=tuple(deleted))


_MODELS = ("model_name_or_path", "adapter_name_or_path", "reward_model_name_or_path")


def _refuse_inputs(directory: Path, settings: Mapping[str, Any]) -> None:
    """Raise if the run would read what it writes, now or when it resumes."""
    out = directory.resolve()
    for flag, text in _inputs(settings):
        before_pattern, *pattern = re.split(r"[*?\[]", text, maxsplit=1)
        source = os.path.expanduser(os.path.dirname(before_pattern) if pattern else text)
        if not source or not os.path.exists(source):  # unlike Path.exists, never raises: it may be an id of the Hub
            continue
        found = Path(source).resolve()
        if not pattern and (found == out or out in found.parents):
            raise UsageError(
                f"--{flag} {text} lies in --output_dir {directory}, where a run replaces and deletes files: choose "
                "another --output_dir"
            )
        if flag not in _MODELS and found in (out, *out.parents):
            raise UsageError(
                f"--output_dir {directory} lies in --{flag} {text}: what the run writes would be read as data when it "
                "resumes; choose another --output_dir"
            )


def _refuse_files(directory: Path) -> None:
    """Raise if a directory without a run has files."""
    if names := sorted(each for each in os.listdir(directory) if not _MAY_BE_THERE.match(each)):
        raise UsageError(
            f"{directory} is not empty, and no run of hf-rocm-tune has written what is in it ({listed(names, 6)}): "
            "choose another --output_dir, or move that elsewhere"
        )


def _inputs(settings: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """(flag, value) of all settings that may name a file or a directory to read."""
    for name in (*_MODELS, "dataset_name", "chat_template_path"):
        if isinstance(value := settings.get(name), str) and value:
            yield name, value
    for part in settings.get("datasets") or ():
        for key in ("path", "data_dir", "data_files"):
            yield from (("datasets", text) for text in _texts(part.get(key) if isinstance(part, Mapping) else part))


def _texts(value: Any) -> list[str]:
    if isinstance(value, str):
        return [value] if value else []
    each: Iterable[Any] = value.values() if isinstance(value, Mapping) else value or ()
    return [text for one in each for text in _texts(one)] if isinstance(each, Iterable) else []


def _probe(directory: Path, made: list[Path]) -> None:
    """Create the directory and write to it: permission bits are not enough (quotas, read-only mounts, root)."""
    try:
        for path in reversed([each for each in (directory, *directory.parents) if not each.exists()]):
            path.mkdir(exist_ok=True)
            made.append(path)
        with tempfile.NamedTemporaryFile(dir=directory, prefix="_probe") as file:
            file.write(b"\0" * 4096)
            file.flush()
            os.fsync(file.fileno())
    except (OSError, ValueError) as error:
        raise _unusable(directory, error) from error


def _remove_empty(made: Iterable[Path]) -> None:
    for path in reversed(tuple(made)):
        with suppress(OSError):  # it is in use
            path.rmdir()


def _unusable(directory: Path, error: OSError | ValueError) -> UsageError:
    code, said = (error.errno, error.strerror or error) if isinstance(error, OSError) else (None, error)
    reasons = {
        errno.EEXIST: "it, or a part of its path, is a file",
        errno.ENOTDIR: "it, or a part of its path, is a file",
        errno.EACCES: "no permission to write there",
        errno.EPERM: "no permission to write there",
        errno.EROFS: "the file system is read-only",
        errno.ENOSPC: "no space left on the device",
        errno.EDQUOT: "the disk quota is used up",
    }
    return UsageError(f"--output_dir {directory} cannot be written: {reasons.get(code or 0, said)}; choose another one")
