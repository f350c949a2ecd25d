"""What a start of a run does in its output directory: begin, resume, or nothing because it is finished.

The same command in the same directory continues from its newest verified checkpoint; that is all that a restart after
a crash has to do. Another run is refused unless it may overwrite. Nothing here imports torch, so a wrong directory is
reported before anything heavy is loaded. Before `Plan.commit` nothing changes in the directory, except that what
killed processes left half written is cleaned up.

Only rank 0 calls `prepare_output_dir`; the plan can be pickled and sent to the others.
"""

from __future__ import annotations

import errno
import os
import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from hf_rocm_tune.errors import UsageError
from hf_rocm_tune.integrity import manifest
from hf_rocm_tune.integrity.atomic import clean_leftovers
from hf_rocm_tune.training import supervised
from hf_rocm_tune.training.artefacts import evidence_of_a_run, is_checkpoint, remove, to_be_overwritten
from hf_rocm_tune.training.rotation import list_checkpoints
from hf_rocm_tune.training.run_record import (
    RunLock,
    RunRecord,
    deciding_settings,
    differences,
    fingerprint,
    new_record,
    read_record,
    write_record,
)


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What to do, decided and not yet done.

    Attributes:
        directory: the output directory; it exists.
        action: "fresh" from step 0, "resume" from ``checkpoint``, or "finished": there is nothing left to do.
        checkpoint: to resume from; None unless the action is "resume".
        record: what ``run.json`` says or will say.
        notes: lines for the user: damaged checkpoints, fallbacks, what is not attested.
        damaged: checkpoints of this run that fail verification; `commit` moves them aside.
        overwritten: what `commit` deletes.
        lock: held by this process until its end.
    """

    directory: Path
    action: Literal["fresh", "resume", "finished"]
    checkpoint: Path | None
    record: RunRecord
    notes: tuple[str, ...]
    damaged: tuple[Path, ...]
    overwritten: tuple[Path, ...]
    lock: RunLock

    @property
    def run_id(self) -> str:
        """The id that goes into every manifest."""
        return self.record.run_id

    def commit(self) -> None:
        """Carry the plan out, at the last moment before training: rank 0 only, and nothing when finished.

        Raises:
            UsageError: the directory cannot be changed.
        """
        if self.action == "finished":
            return
        try:
            for path in self.overwritten:
                remove(path)
            for path in self.damaged:
                path.rename(_free_name(path.with_name(f"damaged-{path.name}")))
            # A result that is not sound any more must not look finished while it is made again.
            (self.directory / manifest.MANIFEST_NAME).unlink(missing_ok=True)
            write_record(self.directory, self.record)
        except OSError as error:
            raise _unusable(self.directory, error) from error


def prepare_output_dir(
    path: str | Path,
    settings: Mapping[str, Any],
    *,
    overwrite: bool = False,
    resume: str | bool | None = None,
    restarted: bool | None = None,
) -> Plan:
    """Decide what a start with these settings does in ``path``.

    Args:
        settings: resolved settings by name; see `fingerprint` for those that count.
        overwrite: ``--overwrite_output_dir``: begin again whatever is there.
        resume: ``--resume_from_checkpoint``: a checkpoint, or true for the newest one, which must then be there.
        restarted: whether a launcher or our supervisor started this command again, so that ``overwrite`` and a
            checkpoint that is named were honoured before; by default what they say (TORCHELASTIC_RESTART_COUNT,
            `supervised.is_restart_of`).

    Raises:
        UsageError: the directory cannot be used, holds another run or is in use; the checkpoint named is not one or is
            damaged; or overwriting would delete what the run is to read.
    """
    directory = Path(path)
    _probe(directory)
    lock = _lock(directory)
    try:
        named, newest_wanted = _parse_resume(resume)
        notes = [f"{directory}: {line} (left by a process that was killed)" for line in clean_leftovers(directory)]
        if not lock.supported:
            notes.append(f"{directory} is on a file system without locks: a second run in it would not be noticed")
        record = _record(directory, overwrite=overwrite)
        same = record is not None and record.fingerprint == fingerprint(settings)
        if restarted is None:
            restarted = _is_restart(record)
        if overwrite and not (same and restarted):
            return _overwriting(directory, settings, named, newest_wanted, notes, lock)
        if record is not None and same and restarted and named is not None:
            again = _continue(directory, record, False, notes, lock)
            return again if again.action != "fresh" else _resume_named(directory, named, record, notes, lock)
        if named is not None:
            _refuse_other_run(directory, settings, record, same, adopted=named.resolve().parent == directory.resolve())
            return _resume_named(directory, named, record or new_record(settings), notes, lock)
        _refuse_other_run(directory, settings, record, same, adopted=False)
        return _continue(directory, record or new_record(settings), newest_wanted, notes, lock)
    except BaseException:
        lock.release()
        raise


def _continue(directory: Path, record: RunRecord, newest_wanted: bool, notes: list[str], lock: RunLock) -> Plan:
    """The same command again: finished, or from the newest verified checkpoint, or from the beginning."""
    if not newest_wanted and _is_finished(directory, record, notes):
        return _plan(directory, "finished", None, record, notes, lock)
    newest, damaged = _newest_verified(directory, record, notes)
    if newest is None and newest_wanted:
        found = f"none of its checkpoints is sound ({notes[-1]})" if damaged else "it holds no checkpoint of this run"
        raise UsageError(f"--resume_from_checkpoint true: {directory}: {found}; leave the flag out to start at step 0")
    if damaged:
        notes.append(f"continuing from {newest.name}" if newest else "no sound checkpoint is left: starting at step 0")
    return _plan(directory, "resume" if newest else "fresh", newest, record, notes, lock, damaged=damaged)


def _newest_verified(directory: Path, record: RunRecord, notes: list[str]) -> tuple[Path | None, list[Path]]:
    """The newest good checkpoint, and the bad ones that are newer than it. Adds a note on each that is passed over."""
    damaged = []
    for _, path in reversed(list_checkpoints(directory)):
        found = manifest.inspect(path)
        if found.manifest is None and found.problems[0].kind == "missing":
            notes.append(
                f"{path.name} is not attested and is passed over; --resume_from_checkpoint {path} would use it"
            )
        elif found.problems:
            damaged.append(path)
            notes.append(f"{path.name} is damaged and is set aside: {found.problems[0]}")
        elif found.manifest is not None and found.manifest.run_id != record.run_id:
            damaged.append(path)
            notes.append(f"{path.name} belongs to run {found.manifest.run_id} and is set aside")
        else:
            return path, damaged
    return None, damaged


def _is_finished(directory: Path, record: RunRecord, notes: list[str]) -> bool:
    found = manifest.inspect(directory)
    if found.manifest is None or found.manifest.status != "final" or found.manifest.run_id != record.run_id:
        return False
    # A model card is there to be edited.
    lost = [problem for problem in found.problems if not problem.file.endswith(".md")]
    if lost:
        notes.append(f"the result in {directory} is not sound any more, it is made again: {lost[0]}")
    return not lost


def _resume_named(directory: Path, checkpoint: Path, record: RunRecord, notes: list[str], lock: RunLock) -> Plan:
    if not os.path.isdir(checkpoint) or not is_checkpoint(checkpoint):
        inside = list_checkpoints(checkpoint)
        hint = f"did you mean {inside[-1][1]}?" if inside else "name a checkpoint-N directory that a run has written"
        raise UsageError(f"--resume_from_checkpoint {checkpoint}: there is no checkpoint; {hint}")
    found = manifest.inspect(checkpoint)
    if found.manifest is None and found.problems[0].kind == "missing":
        notes.append(f"{checkpoint} has no {manifest.MANIFEST_NAME}: its files are not attested")
    elif found.problems:
        raise UsageError(
            f"--resume_from_checkpoint {checkpoint}: {found.problems[0]}; name an older checkpoint, or leave the flag "
            "out to continue from the newest sound one"
        )
    return _plan(directory, "resume", checkpoint, record, notes, lock)


def _overwriting(
    directory: Path,
    settings: Mapping[str, Any],
    named: Path | None,
    newest_wanted: bool,
    notes: list[str],
    lock: RunLock,
) -> Plan:
    doomed = to_be_overwritten(directory)
    if newest_wanted:
        raise UsageError("--overwrite_output_dir deletes what --resume_from_checkpoint true asks for: give one of them")
    _refuse_to_delete_inputs(directory, doomed, settings, named)
    record = new_record(settings)
    if named is None:
        return _plan(directory, "fresh", None, record, notes, lock, overwritten=doomed)
    plan = _resume_named(directory, named, record, notes, lock)
    return _plan(directory, "resume", plan.checkpoint, record, list(plan.notes), lock, overwritten=doomed)


def _refuse_to_delete_inputs(
    directory: Path, doomed: Iterable[Path], settings: Mapping[str, Any], named: Path | None
) -> None:
    targets = [path.resolve() for path in doomed]
    texts = {key: value for key, value in settings.items() if isinstance(value, str) and value and key != "output_dir"}
    if named is not None:
        texts["resume_from_checkpoint"] = str(named)
    for key, text in texts.items():
        if not os.path.exists(text):  # unlike Path.exists, never raises: most values are no paths at all
            continue
        source = Path(text).resolve()
        if source == directory.resolve() or any(t == source or t in source.parents for t in targets):
            raise UsageError(
                f"--overwrite_output_dir would delete what --{key} {text} names: choose another --output_dir"
            )


def _refuse_other_run(
    directory: Path, settings: Mapping[str, Any], record: RunRecord | None, same: bool, *, adopted: bool
) -> None:
    """Raise unless ``directory`` is this run's, or nobody's. A checkpoint named in it adopts what another tool left."""
    cure = "choose another --output_dir, or give --overwrite_output_dir to delete that run"
    if record is not None and not same:
        changed = differences(record.settings, deciding_settings(settings))
        raise UsageError(f"{directory} holds another run, which differs in {changed}: {cure}")
    if record is None and not adopted and (found := evidence_of_a_run(directory)):
        shown = ", ".join(found[:4]) + (" ..." if len(found) > 4 else "")
        raise UsageError(f"{directory} holds another run ({shown}, without a run.json of ours): {cure}")


def _record(directory: Path, *, overwrite: bool) -> RunRecord | None:
    try:
        return read_record(directory)
    except UsageError:
        if overwrite:
            return None
        raise


def _is_restart(record: RunRecord | None) -> bool:
    if os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") not in ("", "0"):
        return True
    return record is not None and supervised.is_restart_of(record.run_id)


def _parse_resume(resume: str | bool | None) -> tuple[Path | None, bool]:
    """(checkpoint named, whether the newest one is asked for). The flag's text "true" and "false" are not paths."""
    if resume is None or isinstance(resume, bool):
        return None, bool(resume)
    word = resume.strip().lower()
    if word in ("true", "yes", "1", "false", "no", "0", ""):
        return None, word in ("true", "yes", "1")
    return Path(resume), False


def _probe(directory: Path) -> None:
    """Create the directory and really write to it: permission bits do not tell (quotas, read-only mounts, root)."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=directory, prefix="_probe") as file:
            file.write(b"\0" * 4096)
            file.flush()
            os.fsync(file.fileno())
    except (OSError, ValueError) as error:
        raise _unusable(directory, error) from error


def _lock(directory: Path) -> RunLock:
    try:
        return RunLock(directory)
    except OSError as error:
        raise _unusable(directory, error) from error


def _unusable(directory: Path, error: OSError | ValueError) -> UsageError:
    code = error.errno if isinstance(error, OSError) else None
    reasons = {
        errno.EEXIST: "it, or a part of its path, is a file",
        errno.ENOTDIR: "it, or a part of its path, is a file",
        errno.EACCES: "no permission to write there",
        errno.EPERM: "no permission to write there",
        errno.EROFS: "the file system is read-only",
        errno.ENOSPC: "no space left on the device",
        errno.EDQUOT: "the disk quota is used up",
    }
    return UsageError(
        f"--output_dir {directory} cannot be written: {reasons.get(code or 0, error)}; choose another one"
    )


def _free_name(path: Path) -> Path:
    number = 1
    candidate = path
    while candidate.exists():
        candidate, number = path.with_name(f"{path.name}.{number}"), number + 1
    return candidate


def _plan(
    directory: Path,
    action: Literal["fresh", "resume", "finished"],
    checkpoint: Path | None,
    record: RunRecord,
    notes: list[str],
    lock: RunLock,
    *,
    damaged: Iterable[Path] = (),
    overwritten: Iterable[Path] = (),
) -> Plan:
    if record.skipped_steps and action != "finished":
        left_out = ", ".join(map(str, record.skipped_steps))
        notes = [*notes, f"left out as run.json says, because the run died in them twice: steps {left_out}"]
    return Plan(
        directory=directory,
        action=action,
        checkpoint=checkpoint,
        record=record,
        notes=tuple(notes),
        damaged=tuple(damaged),
        overwritten=tuple(overwritten),
        lock=lock,
    )
