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
import re
import tempfile
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from hf_rocm_tune.errors import UsageError
from hf_rocm_tune.integrity import manifest
from hf_rocm_tune.integrity.atomic import clean_leftovers
from hf_rocm_tune.training import supervised
from hf_rocm_tune.training.artefacts import (
    CHECKPOINT_NAME,
    free_name,
    in_the_way,
    is_checkpoint,
    listed_by,
    not_ours,
    remove,
    written_by,
)
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
        overwritten: files that `commit` deletes.
        lock: held by this process until `close`.
        made: directories that were made for the run, the outermost first.
    """

    directory: Path
    action: Literal["fresh", "resume", "finished"]
    checkpoint: Path | None
    record: RunRecord
    notes: tuple[str, ...]
    damaged: tuple[Path, ...]
    overwritten: tuple[Path, ...]
    lock: RunLock
    made: tuple[Path, ...] = ()

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
            remove(self.overwritten, self.directory)
            for path in self.damaged:
                path.rename(free_name(path.with_name(f"damaged-{path.name}")))
            write_record(self.directory, self.record)
            # A result that is not sound any more must not look finished while it is made again.
            if listed_by(self.directory, self.run_id) is not None:
                (self.directory / manifest.MANIFEST_NAME).unlink()
        except OSError as error:
            raise _unusable(self.directory, error) from error

    def close(self) -> None:
        """Let go of the directory, and take away the directories that were made for a run that never began."""
        self.lock.release()
        _unmake(self.made)


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
    named, newest_wanted = _parse_resume(resume)
    _refuse_inputs(directory, settings)
    if os.path.isdir(directory) and read_record(directory) is None:
        _refuse_foreign(directory, None, named)  # before anything is made there
    made: list[Path] = []
    lock = None
    try:
        _probe(directory, made)
        lock = _lock(directory)
        notes = [f"{directory}: {line} (left by a process that was killed)" for line in clean_leftovers(directory)]
        if not lock.supported:
            notes.append(f"{directory} is on a file system without locks: a second run in it would not be noticed")
        plan = _decide(directory, settings, overwrite, named, newest_wanted, restarted, notes, lock)
        if plan.action != "finished":
            _refuse_foreign(directory, read_record(directory), named)
        return replace(plan, made=tuple(made))
    except BaseException:
        if lock is not None:
            lock.release()
        _unmake(made)
        raise


def _decide(
    directory: Path,
    settings: Mapping[str, Any],
    overwrite: bool,
    named: Path | None,
    newest_wanted: bool,
    restarted: bool | None,
    notes: list[str],
    lock: RunLock,
) -> Plan:
    record = read_record(directory)
    same = record is not None and record.fingerprint == fingerprint(settings)
    if restarted is None:
        restarted = _is_restart(record)
    if overwrite and not (same and restarted):
        return _overwriting(directory, settings, record, named, newest_wanted, notes, lock)
    if record is not None and not same:
        changed = differences(record.settings, deciding_settings(settings))
        raise UsageError(
            f"{directory} holds another run, which differs in {changed}: choose another --output_dir, or give "
            "--overwrite_output_dir to delete that run"
        )
    if record is not None and restarted and named is not None:
        again = _continue(directory, record, False, notes, lock)
        return again if again.action != "fresh" else _resume_named(directory, named, record, notes, lock)
    if named is not None:
        return _resume_named(directory, named, record or new_record(settings), notes, lock)
    return _continue(directory, record or new_record(settings), newest_wanted, notes, lock)


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
    old: RunRecord | None,
    named: Path | None,
    newest_wanted: bool,
    notes: list[str],
    lock: RunLock,
) -> Plan:
    if newest_wanted:
        raise UsageError("--overwrite_output_dir deletes what --resume_from_checkpoint true asks for: give one of them")
    doomed = written_by(directory, old.run_id, _owned(directory, old)) if old is not None else []
    if named is not None and any(named.resolve() in path.resolve().parents for path in doomed):
        raise UsageError(
            f"--overwrite_output_dir would delete what --resume_from_checkpoint {named} names: choose another "
            "--output_dir"
        )
    if doomed:
        notes = [*notes, f"--overwrite_output_dir deletes in {directory}: {_listed(doomed, directory)}"]
    kept = {"README.md"} & set(old.files if old is not None else ())
    record = replace(new_record(settings), files=tuple(kept))
    if named is None:
        return _plan(directory, "fresh", None, record, notes, lock, overwritten=doomed)
    plan = _resume_named(directory, named, record, notes, lock)
    return replace(plan, overwritten=tuple(doomed))


def _listed(paths: Iterable[Path], directory: Path) -> str:
    """The names at the top, with the number of files in each folder."""
    counts = Counter(path.relative_to(directory).parts[0] for path in paths)
    return ", ".join(
        name if (directory / name).is_file() else f"{name} ({count} files)" for name, count in counts.items()
    )


def _refuse_inputs(directory: Path, settings: Mapping[str, Any]) -> None:
    """Raise where the run would read what it writes, now or when it goes on."""
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
        if flag != "model_name_or_path" and found in (out, *out.parents):
            raise UsageError(
                f"--output_dir {directory} lies in --{flag} {text}: what the run writes would be read as data when it "
                "goes on; choose another --output_dir"
            )


def _inputs(settings: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """(flag, value) of whatever names a file or a directory that is read."""
    for name in ("model_name_or_path", "dataset_name", "chat_template_path"):
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


def _refuse_foreign(directory: Path, record: RunRecord | None, named: Path | None) -> None:
    """Raise where a run would replace what none of ours has written.

    A checkpoint that is named in it adopts the checkpoints that another tool left there, and nothing else.
    """
    found = in_the_way(directory, None if record is None else _owned(directory, record))
    if named is not None and named.resolve().parent == directory.resolve():
        found = [name for name in found if not (CHECKPOINT_NAME.match(name) and (directory / name).is_dir())]
    if found:
        raise UsageError(not_ours(directory, found))


def _owned(directory: Path, record: RunRecord) -> tuple[str, ...]:
    """Names at the top of ``directory`` that the run in it has written, beside those that every run writes."""
    return (*record.files, *(listed_by(directory, record.run_id) or ()))


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


def _probe(directory: Path, made: list[Path]) -> None:
    """Create the directory and really write to it: permission bits do not tell (quotas, read-only mounts, root).

    Args:
        directory: to write to.
        made: takes the directories that had to be made.
    """
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


def _unmake(made: Iterable[Path]) -> None:
    for path in reversed(tuple(made)):
        with suppress(OSError):  # it is used now
            path.rmdir()


def _lock(directory: Path) -> RunLock:
    try:
        return RunLock(directory)
    except OSError as error:
        raise _unusable(directory, error) from error


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
