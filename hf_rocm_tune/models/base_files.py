"""Which files a base model consists of, as a result's manifest records them, and whether files are still those.

Recorded are bytes and SHA-256 of the configuration and the tokenizer, and of weight files one digest over the tensors
that were loaded, with their number; their SHA-256, too, where it was on record (in the Hub's cache, or in a manifest).
"""

from __future__ import annotations

import hashlib
import re
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from hf_rocm_tune.foreign import check_printable, checked_name
from hf_rocm_tune.models.files import GENERATION_FILE, SHA256, recorded_sha256, sums
from hf_rocm_tune.redaction import hub_id_of
from hf_rocm_tune.transfer import Digest

TOKENIZER_FILE = re.compile(
    r"tokenizer.*|special_tokens_map\.json|added_tokens\.json|vocab\..*|merges\.txt|.*\.model|.*\.tiktoken"
    r"|chat_template.*|.*processor.*\.json"
)
"""Names of the files of a tokenizer or processor."""
TEMPLATE_FOLDER = "additional_chat_templates"
"""Where transformers writes the chat templates that stand beside the default one."""
CONFIG_FILES = ("config.json", GENERATION_FILE)

_COMMIT = re.compile(r"[0-9a-f]{40}")
_LARGEST_BYTES = 256 << 20  # of a file beside the weights; vocabularies have up to 40 MB


class BaseFile(NamedTuple):
    """What is recorded of one file; None and 0 where that is not known."""

    bytes: int
    sha256: str | None = None
    tensors: int = 0  # how many were loaded from it
    digest: str | None = None  # of these, 64 hexadecimal digits


class BaseRecord(NamedTuple):
    """What a result's manifest says of its base."""

    name: str  # id on the Hub, or the last part of a directory's path
    commit: str | None  # on the Hub
    files: Mapping[str, BaseFile]

    def to_json(self) -> dict[str, Any]:
        rows = {name: {k: v for k, v in file._asdict().items() if v} for name, file in self.files.items()}
        return {"name": self.name, "commit": self.commit, "files": rows}


def digest_of(rows: Iterable[tuple[str, Collection[Digest]]]) -> str:
    """One digest over the bytes of tensors, given by name."""
    lines = (" ".join([name, *sorted(digest.hex() for digest in digests)]) for name, digests in sorted(rows))
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


def by_file(loaded: Mapping[tuple[str, str], Collection[Digest]]) -> dict[Path, list[tuple[str, Collection[Digest]]]]:
    """Tensors and their digests, as a mover has loaded them, by the file that they came from."""
    by_file = defaultdict[Path, list[tuple[str, Collection[Digest]]]](list)
    for (file, name), digests in loaded.items():
        by_file[Path(file)].append((name, digests))
    return by_file


def record(loaded: Mapping[tuple[str, str], Collection[Digest]]) -> BaseRecord | None:
    """The model whose tensors were loaded first; None if none were. Reference and reward models come after it."""
    rows = by_file(loaded)
    if not rows:
        return None
    directory = next(iter(rows)).parent
    files = {
        path.name: BaseFile(path.stat().st_size, recorded_sha256(path), len(tensors), digest_of(tensors))
        for path, tensors in sorted(rows.items())
        if path.parent == directory
    }
    for name in names_beside(directory):
        path = directory / name
        if path.is_file() and path.stat().st_size <= _LARGEST_BYTES:
            files[name] = BaseFile(path.stat().st_size, _sha256(path))
    in_cache = hub_id_of(str(directory)) is not None and _COMMIT.fullmatch(directory.name) is not None
    name = hub_id_of(str(directory)) or directory.absolute().name
    return BaseRecord(name, directory.name if in_cache else None, files)


def is_beside(name: str) -> bool:
    """Whether a file of a model decides what its weights mean: configuration, tokenizer, the model's own code."""
    return name in CONFIG_FILES or name.endswith(".py") or TOKENIZER_FILE.fullmatch(name) is not None


def further_templates(directory: Path) -> list[str]:
    """Names of the chat templates beside the default one, with their folder."""
    return sorted(f"{TEMPLATE_FOLDER}/{path.name}" for path in (directory / TEMPLATE_FOLDER).glob("*.jinja"))


def names_beside(directory: Path) -> list[str]:
    """Names of what lies in a model's directory and decides what its weights mean; see `is_beside`."""
    return sorted(path.name for path in directory.iterdir() if is_beside(path.name)) + further_templates(directory)


def read(content: Any) -> BaseRecord | None:
    """The record in a foreign manifest, checked; None where it has none.

    Raises:
        ValueError: it has another form, or names a file outside of its directory.
    """
    if content is None:
        return None
    try:
        check_printable(content)
        rows = {checked_name(name): _read_file(row) for name, row in content["files"].items()}
        commit = content.get("commit")
        if commit is not None and not _COMMIT.fullmatch(commit):
            raise ValueError(f"its commit is {commit!r:.80}")
        return BaseRecord(str(content["name"]), commit, rows)
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"what it says of the base has another form ({type(error).__name__}: {error})") from error


def _read_file(row: Mapping[str, Any]) -> BaseFile:
    sha256 = row.get("sha256")
    digest = row.get("digest")
    for given in (sha256, digest):
        if given is not None and not SHA256.fullmatch(given):
            raise ValueError("it has a hash that is none")
    return BaseFile(int(row["bytes"]), sha256, int(row.get("tensors", 0)), digest)


def difference(wanted: BaseFile, file: Path) -> str | None:
    """What a file of the base has otherwise than recorded, in words; None if nothing.

    Raises:
        LookupError: it cannot be said, because of its tensors not all were loaded and no SHA-256 is recorded.
        OSError: the file cannot be read.
    """
    size = file.stat().st_size
    if size != wanted.bytes:
        return f"it has {size} bytes, {wanted.bytes} were recorded"
    if wanted.sha256 is not None:
        return None if _sha256(file) == wanted.sha256 else "its SHA-256 is not the recorded one"
    there = sums(file).tensors
    if wanted.digest is None or len(there) != wanted.tensors:
        raise LookupError(f"{wanted.tensors} of its {len(there)} tensors were loaded, and no SHA-256 is recorded")
    if digest_of((name, [tensor.digest]) for name, tensor in there.items()) == wanted.digest:
        return None
    return "its tensors have other values than were loaded"


def _sha256(file: Path) -> str:
    with file.open("rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()
