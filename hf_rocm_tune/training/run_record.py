"""Which run a directory belongs to: ``run.json``, the settings that decide a trajectory, and the lock.

Two runs are the same when the settings that decide what the model becomes are the same. What is only shown, reported,
pushed, kept or checked may change between a start and a restart (`IGNORED`).
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import json
import os
import re
import secrets
import socket
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

from hf_rocm_tune.errors import UsageError
from hf_rocm_tune.integrity.atomic import open_in_place, read_plain, write_text_atomic
from hf_rocm_tune.redaction import redact_json, without_secrets

RUN_FILE = "run.json"
# The underscore keeps it out of transformers' uploads, which ignore "_*".
LOCK_FILE = "_run.lock"
SCHEMA = 1
_HOLDER = re.compile(rb"process \d+ on [^\n]*")

IGNORED = frozenset(
    [
        "output_dir",
        "overwrite_output_dir",
        "resume_from_checkpoint",
        "config",
        "accelerate_config",
        "run_name",
        "project",
        "report_to",
        "disable_tqdm",
        "debug",
        "skip_memory_metrics",
        "push_to_hub",
        "on_corruption",
        "on_oom",
        "auto_fit_gib",
        "max_skipped_steps",
        "prefetch_batches",
        "compare_optimizer_every",
        "doctor",
        "stall_timeout",
        "preflight",
        "grad_sync",
        "ddp_backend",
        "telemetry_every",
        "split_layers",
        "save_strategy",
        "save_steps",
        "save_total_limit",
        "save_only_model",
        "save_on_each_node",
        "enable_jit_checkpoint",
        "include_num_input_tokens_seen",
        "do_train",
        "do_eval",
        "do_predict",
        "local_rank",
        "ddp_timeout",
        "dataset_num_proc",
        "dataloader_pin_memory",
        "dataloader_prefetch_factor",
        "dataloader_persistent_workers",
    ]
)
"""Settings that do not decide the trajectory, beside those that begin with one of `IGNORED_PREFIXES`."""

IGNORED_PREFIXES = ("logging_", "log_", "hub_", "trackio_", "verify", "transfer_", "sentinel", "consent_")


@dataclass(frozen=True, kw_only=True)
class RunRecord:
    """Content of ``run.json``.

    Attributes:
        run_id: unique to this run; every manifest that it writes carries it.
        fingerprint: see `fingerprint`.
        settings: the settings behind the fingerprint, so that a difference can be named.
        status: "running", or "finished" when all of the result is in place.
        started: UTC time, ISO 8601.
        skipped_steps: optimizer steps that are left out, because the run died in them twice; see `skip_step`.
        auto_fit: what ``--auto_fit`` has chosen for this run, whatever memory is free when it goes on; None: nothing.
        files: names that the run's result has, or is about to have, in its directory.
    """

    run_id: str
    fingerprint: str
    settings: Mapping[str, Any]
    status: Literal["running", "finished"]
    started: str
    skipped_steps: tuple[int, ...] = ()
    auto_fit: Mapping[str, Any] | None = None
    files: tuple[str, ...] = ()


def new_record(settings: Mapping[str, Any]) -> RunRecord:
    """The record of a run that starts now, with an id of its own."""
    now = datetime.now(UTC)
    return RunRecord(
        run_id=f"{now:%Y%m%d-%H%M%S}-{secrets.token_hex(4)}",
        fingerprint=fingerprint(settings),
        settings=deciding_settings(settings),
        status="running",
        started=now.isoformat(timespec="seconds"),
    )


def write_record(directory: Path, record: RunRecord) -> None:
    """Write ``run.json`` atomically."""
    body = {"schema": SCHEMA, **redact_json(asdict(record))}
    write_text_atomic(directory / RUN_FILE, json.dumps(body, indent=1, sort_keys=True))


def read_record(directory: Path) -> RunRecord | None:
    """The record in ``directory``; None without one.

    Raises:
        UsageError: it is there and cannot be understood.
    """
    path = directory / RUN_FILE
    try:
        body = json.loads(read_plain(path))
        if body.pop("schema") != SCHEMA:
            raise ValueError("another schema")
        record = RunRecord(**body)
        if record.status not in ("running", "finished") or not isinstance(record.settings, dict):
            raise ValueError("fields of the wrong kind")
        steps, files = map(int, record.skipped_steps), map(str, record.files)
        return replace(record, skipped_steps=tuple(steps), files=tuple(files))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise UsageError(
            f"{path} cannot be read ({error}), so it is unknown which run this directory holds: choose another "
            "--output_dir, or move that file away"
        ) from error


def mark_finished(directory: Path) -> None:
    """Set the status in ``run.json``, after the final manifest is in place; nothing where no run was recorded."""
    record = read_record(directory)
    if record is not None:
        write_record(directory, replace(record, status="finished"))


def skip_step(directory: Path, step: int) -> None:
    """Leave an optimizer step (from 1 on) out of this run from now on: every start of it heeds ``run.json``.

    Raises:
        UsageError: ``run.json`` is not there or cannot be read.
    """
    record = read_record(directory)
    if record is None:
        raise UsageError(f"{directory} holds no {RUN_FILE}, so no step of its run can be left out")
    write_record(directory, replace(record, skipped_steps=tuple(sorted({*record.skipped_steps, step}))))


def fingerprint(settings: Mapping[str, Any]) -> str:
    """SHA-256 (64 hexadecimal digits) of the settings that decide the trajectory, whatever their order.

    Args:
        settings: resolved settings by name. Values that are not plain JSON count by their text. What the caller
            leaves out (package versions, the number of processes) does not count.
    """
    text = json.dumps(deciding_settings(settings), sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def deciding_settings(settings: Mapping[str, Any]) -> dict[str, Any]:
    """The settings that are not `IGNORED`, in the form in which JSON gives them back, without secrets."""
    kept = {k: v for k, v in settings.items() if k not in IGNORED and not k.startswith(IGNORED_PREFIXES)}
    plain: dict[str, Any] = json.loads(json.dumps(_plain(without_secrets(kept))))
    return plain


def differences(old: Mapping[str, Any], new: Mapping[str, Any], *, most: int = 5) -> str:
    """ "learning_rate 0.0002 -> 0.001, seed 1 -> 2 and 3 more": what differs between two `deciding_settings`."""
    old, new = redact_json(old), redact_json(new)  # as ``run.json`` has it
    changed = [key for key in sorted(old.keys() | new.keys()) if old.get(key) != new.get(key)]
    shown = ", ".join(f"{key} {old.get(key)!r} -> {new.get(key)!r}" for key in changed[:most])
    return shown + (f" and {len(changed) - most} more" if len(changed) > most else "")


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(k): _plain(v) for k, v in value.items()}
    if isinstance(value, set | frozenset):
        return sorted((_plain(item) for item in value), key=repr)
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    # An enum that is a string is its value in a settings file; a NaN equals itself as text.
    if isinstance(value, str):
        return str.__str__(value)
    if value is None or isinstance(value, bool | int) or (isinstance(value, float) and value - value == 0):
        return value
    return str(value)


class RunLock:
    """An exclusive hold on an output directory, released by `release` or by the end of the process, however it ends.

    A copy that is sent to another process (pickle) holds nothing.
    """

    def __init__(self, directory: Path) -> None:
        """Take the lock.

        Raises:
            UsageError: another process holds it.
            OSError: the lock file cannot be opened, or is not ours.
        """
        self.supported = True
        self._path = directory / LOCK_FILE
        self._descriptor: int | None = None
        while not self._taken():
            self._close()  # whoever held it has deleted it meanwhile
        # A data loading worker that outlives a killed parent by seconds must not keep the restart out.
        os.register_at_fork(after_in_child=self._close)
        assert self._descriptor is not None
        with contextlib.suppress(OSError):  # on a full disk the name of the holder is missing, nothing else
            os.ftruncate(self._descriptor, 0)
            os.pwrite(self._descriptor, f"process {os.getpid()} on {socket.gethostname()}".encode(), 0)

    def _taken(self) -> bool:
        """Opens and locks the file; whether it is the one that the directory has."""
        descriptor = self._descriptor = open_in_place(self._path, os.O_RDWR)
        content = os.pread(descriptor, 400, 0)
        if content and not _HOLDER.fullmatch(content):
            self._close()
            raise OSError(errno.EINVAL, f"{LOCK_FILE} in it is not a lock of ours: move it away")
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
        """Let the next run in, also when a process that was forked meanwhile lives on. May be called more than once."""
        if self._descriptor is not None:
            with contextlib.suppress(OSError):  # no locks on this file system, or a disk that is gone
                if self.supported and self._is_there():
                    self._path.unlink()
                fcntl.flock(self._descriptor, fcntl.LOCK_UN)
        self._close()

    def _close(self) -> None:
        """Closes this process's way to the lock; the processes that share it keep what they have."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    def __getstate__(self) -> dict[str, Any]:
        return {"supported": self.supported, "_path": self._path, "_descriptor": None}
