"""Are the weight files themselves the ones that were published? Their SHA-256 against what was recorded of them.

A verified transfer proves that the device has what the file has; it cannot know that the file is right. Two records can
tell: the Hub's cache keeps large files under the SHA-256 that the Hub announced for them, and a directory that this
package wrote has it in ``integrity.json``. A file with neither is *not attested*, which is said and is no error.

Hashing reads every byte once. A file that was found right is remembered by path, size, inode and times of change, so
only a file that is new or was touched is read again.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from hf_rocm_tune.errors import UsageError

_SHA256 = re.compile(r"[0-9a-f]{64}")
_MANIFEST = "integrity.json"
_THREADS = 4


@dataclass(frozen=True, kw_only=True)
class FileRecords:
    """What was found out about weight files.

    Args:
        attested: files whose content has the SHA-256 that was recorded of them.
        unknown: names of files of which nothing is recorded.
    """

    attested: int
    unknown: tuple[str, ...]


def check_files(files: Sequence[Path], memory: Path) -> FileRecords:
    """Compares weight files with what was recorded of them.

    Args:
        files: to be compared.
        memory: JSON file in which files that were found right are remembered; made when missing.

    Raises:
        UsageError: a file has other content than was recorded: the file is at fault, not a transfer.
    """
    recorded = {file: recorded_sha256(file) for file in files}
    known = {file: value for file, value in recorded.items() if value is not None}
    seen = _read_memory(memory)
    fresh = [file for file, value in known.items() if seen.get(str(file.resolve())) != _state(file, value)]
    with ThreadPoolExecutor(max_workers=_THREADS) as pool:
        found = dict(zip(fresh, pool.map(_sha256, fresh), strict=True))
    for file, value in found.items():
        if value != known[file]:
            raise UsageError(
                f"model file {file}: its SHA-256 is {value[:12]}..., but {known[file][:12]}... was recorded of it: the "
                "file is damaged on this disk, not in a transfer; download or copy it again"
            )
    if fresh:
        _remember(memory, {str(file.resolve()): _state(file, known[file]) for file in fresh})
    return FileRecords(attested=len(known), unknown=tuple(file.name for file in files if file not in known))


def recorded_sha256(file: Path) -> str | None:
    """The SHA-256 that somebody recorded of this file before: the Hub's cache, or our manifest beside it."""
    blob = file.resolve()
    if blob.parent.name == "blobs" and _SHA256.fullmatch(blob.name):
        return blob.name
    try:
        entry = json.loads((file.parent / _MANIFEST).read_text(encoding="utf-8"))["files"][file.name]["sha256"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return entry if isinstance(entry, str) and _SHA256.fullmatch(entry) else None


def default_memory() -> Path:
    """Where files that were found right are remembered: beside the Hub's cache."""
    from huggingface_hub.constants import HF_HOME

    return Path(HF_HOME) / "hf_rocm_tune" / "attested_files.json"


def _sha256(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _state(file: Path, sha256: str) -> list[object]:
    found = file.stat()
    return [sha256, found.st_size, found.st_ino, found.st_mtime_ns, found.st_ctime_ns]


def _read_memory(memory: Path) -> dict[str, object]:
    try:
        content = json.loads(memory.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}


def _remember(memory: Path, states: dict[str, list[object]]) -> None:
    # Only a saving of time: a home that cannot be written costs the hashing again, nothing else.
    try:
        memory.parent.mkdir(parents=True, exist_ok=True)
        partial = memory.with_name(f"{memory.name}.{os.getpid()}")
        partial.write_text(json.dumps({**_read_memory(memory), **states}), encoding="utf-8")
        partial.replace(memory)
    except OSError:
        return
