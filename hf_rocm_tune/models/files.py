"""Checks of a model directory before loading: which file is damaged, and how; and SHA-256 against recorded ones.

A safetensors file is eight bytes of header length (little-endian), a JSON header with dtype, shape and byte range of
each tensor, and the data (https://github.com/huggingface/safetensors#format).
"""

from __future__ import annotations

import hashlib
import json
import mmap
import os
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from huggingface_hub import hf_hub_download, snapshot_download
from huggingface_hub.errors import EntryNotFoundError, HfHubHTTPError, HFValidationError, LocalEntryNotFoundError
from safetensors import SafetensorError, safe_open

from hf_rocm_tune.errors import CorruptionError, UsageError
from hf_rocm_tune.foreign import RefusedName, check_printable, checked_name, checked_names, file_in, read_object
from hf_rocm_tune.page_cache import open_from_disk
from hf_rocm_tune.safetensors_header import parse_header
from hf_rocm_tune.transfer import Digest, combine, digest

if TYPE_CHECKING:
    from torch import Tensor

GENERATION_FILE = "generation_config.json"
_LFS = b"version https://git-lfs"


def check_model_directory(directory: Path) -> list[Path]:
    if not directory.is_dir():
        raise UsageError(f"model: {directory} is not a directory: give a model directory or a Hub id")
    if not (directory / "config.json").is_file() and (directory / "adapter_config.json").is_file():
        raise UsageError(
            f"model: {directory} is an adapter: give its base as --model, and it as --adapter_name_or_path, or merge "
            "it first (hf-rocm-tune merge)"
        )
    if not (directory / "config.json").is_file():
        raise UsageError(f"model: {directory} has no config.json: give the directory that save_pretrained wrote")
    if (directory / "adapter_config.json").is_file():  # transformers would load the base that it names
        raise UsageError(
            f"model: {directory} has config.json and adapter_config.json: move an adapter to a directory of its own"
        )
    check_beside(directory)
    _read_json(directory / "config.json")
    if (directory / GENERATION_FILE).is_file():
        _read_json(directory / GENERATION_FILE)
    files = _weight_files(directory)
    for file in files:
        check_safetensors(file)
    return files


_SETTINGS = ("tokenizer_config.json", "processor_config.json", "preprocessor_config.json", "special_tokens_map.json")
_READ_WITH_MODEL = re.compile(r".*\.(json|jinja|j2|txt|model|tiktoken|safetensors|bin|py)")
_NAMES_A_FILE = re.compile(r".*(_files?|_path|_dir|_paths)")


def check_beside(directory: Path) -> None:
    """Checks what libraries read of a model's directory beside its weights, tokenizer and templates: plain files, none
    of them a link to a file of another name, and no setting that names a file elsewhere.

    Raises:
        UsageError: names the file.
    """
    listed = [*directory.iterdir(), *(directory / "additional_chat_templates").glob("*")]
    for path in sorted(listed):
        if not _READ_WITH_MODEL.fullmatch(path.name) or path.is_dir():
            continue
        try:
            # A shared file of the same name is the user's own link; the Hub's cache links to what it downloaded.
            # Copies in this process's memory have been checked.
            checked = path.is_symlink() and os.readlink(path).startswith(f"/proc/{os.getpid()}/fd/")
            if path.is_symlink() and not checked and Path(os.path.realpath(path)).name != path.name:
                file_in(directory, path.relative_to(directory).as_posix())
            if not path.is_file():
                raise OSError("it is no plain file")
        except (OSError, ValueError) as error:
            raise UsageError(f"model file {path}: {error}: do not use this model, or copy it again") from error
        if path.name in _SETTINGS:
            _check_named_files(path)


def check_hub_settings(name: str, revision: str | None) -> None:
    """`check_beside` for the settings of a model on the Hub: downloaded, or in its cache."""
    for file in _SETTINGS[:3]:
        try:
            _check_named_files(Path(hf_hub_download(name, file, revision=revision)))
        except (EntryNotFoundError, HfHubHTTPError, HFValidationError, OSError):
            continue  # there is none, or the loader will say why it cannot be had


def _check_named_files(file: Path) -> None:
    """Refuse a path out of the directory that leads to a file of this machine. Authors' own paths, which are in the
    settings of many models, lead nowhere here."""
    content = _read_json(file)
    versions = content.get("fast_tokenizer_files", [])
    try:
        for name in checked_names(versions if isinstance(versions, list) else [versions]):
            if "/" in name:
                raise RefusedName(f"it names {name!r}, which is not a file beside it")
        level: list[Any] = [content]
        while level:
            part = level.pop()
            if isinstance(part, list):
                level += part
            if not isinstance(part, dict):
                continue
            level += part.values()
            for key, value in part.items():
                if _NAMES_A_FILE.fullmatch(str(key)) and isinstance(value, str) and key != "name_or_path":
                    _refuse_elsewhere(file.parent, value)
    except ValueError as error:
        raise UsageError(f"model file {file}: {error}: do not use this model") from error


def _refuse_elsewhere(directory: Path, name: str) -> None:
    try:
        checked_name(name)
    except RefusedName:
        if "\0" in name:
            raise
        if any(os.path.lexists(os.path.normpath(start / name)) for start in (directory, Path.cwd())):
            raise


def is_lfs_pointer(file: Path) -> bool:
    """Whether Git has written the note that stands for a large file until Git LFS fetches it."""
    with file.open("rb") as stream:
        return stream.read(len(_LFS)) == _LFS


def check_safetensors(file: Path) -> None:
    """Checks the header of one file, each entry of it, and the file's size; reads no tensor data."""
    try:
        with safe_open(file, framework="pt") as opened:
            _check_tensor_names(opened.keys())
    except OSError as error:
        raise UsageError(f"model file {file}: cannot be read ({error}): check the disk and permissions") from error
    except SafetensorError as error:
        if is_lfs_pointer(file):
            raise UsageError(
                f"model file {file}: a pointer of Git LFS and not the file itself: run `git lfs pull` there"
            ) from error
        raise UsageError(f"model file {file}: damaged or truncated ({error}): download or copy it again") from error


def _check_tensor_names(names: Collection[str]) -> None:
    """Names of tensors are shown, by us and by transformers."""
    try:
        check_printable([*names])
    except ValueError as error:
        raise SafetensorError(f"the name of a tensor: {error}") from error


_DTYPES = {
    "BOOL": torch.bool, "U8": torch.uint8, "I8": torch.int8, "U16": torch.uint16, "I16": torch.int16,
    "U32": torch.uint32, "I32": torch.int32, "U64": torch.uint64, "I64": torch.int64,
    "F16": torch.float16, "BF16": torch.bfloat16, "F32": torch.float32, "F64": torch.float64, "C64": torch.complex64,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2, "F8_E8M0": torch.float8_e8m0fnu,
    "F8_E4M3FNUZ": torch.float8_e4m3fnuz, "F8_E5M2FNUZ": torch.float8_e5m2fnuz,
}  # fmt: skip


class MappedFile:
    """A safetensors file's tensors by the offsets in its header, as the bytes of the mapped file.

    In place of the library's reader, which returns tensors that nothing ties to the file. Writing to one does not
    change it.
    """

    def __init__(self, file: Path | str) -> None:
        with safe_open(file, framework="pt") as opened:  # checks each entry of the header
            _check_tensor_names(opened.keys())
        with open(file, "rb") as stream:
            memory = mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_COPY)
        self.tensors = dict(tensors_in(memory))

    def keys(self) -> list[str]:
        return list(self.tensors)

    def get_slice(self, name: str) -> Tensor:
        return self.tensors[name]

    def __exit__(self, *_: object) -> None:
        self.tensors = {}


def tensors_in(content: bytearray | mmap.mmap) -> Iterator[tuple[str, Tensor]]:
    """Name and tensor of each entry of a safetensors file's content, which they share."""
    data = 8 + int.from_bytes(content[:8], "little")
    for begin, end, name, kind, shape in parse_header(content[8:data]):
        dtype = _DTYPES.get(kind)
        if dtype is None:
            raise SafetensorError(f"{name} has the dtype {kind}, which cannot be loaded")
        if begin == end:
            yield name, torch.empty(shape, dtype=dtype)
            continue
        flat = torch.frombuffer(content, dtype=torch.uint8, offset=begin, count=end - begin)
        if begin % dtype.itemsize:
            flat = flat.clone()
        yield name, flat.view(dtype).view(shape)


def _weight_files(directory: Path) -> list[Path]:
    index = directory / "model.safetensors.index.json"
    single = directory / "model.safetensors"
    if single.is_file():
        return [single]
    if index.is_file():
        names = _shard_names(index)
        missing = [name for name in names if not os.path.lexists(directory / name)]
        if missing:
            raise UsageError(f"model: {directory} lacks {', '.join(missing)}, which {index.name} names")
        try:
            return [file_in(directory, name) for name in names]
        except (OSError, ValueError) as error:
            raise UsageError(f"model file {index}: {error}") from error
    if any(directory.glob("pytorch_model*.bin")):
        pickled = directory / "pytorch_model.bin.index.json"
        if pickled.is_file():
            _shard_names(pickled)  # checked: the loader opens what it names
        return []
    raise UsageError(f"model: {directory} has no model.safetensors and no model.safetensors.index.json")


def _shard_names(index: Path) -> list[str]:
    weight_map = _read_json(index).get("weight_map")
    names = list(weight_map.values()) if isinstance(weight_map, dict) else []
    if not names or not all(isinstance(name, str) and name for name in names):
        raise UsageError(f"model file {index}: has no weight_map of tensor to file name: download or copy it again")
    try:
        checked_names(names)
    except ValueError as error:
        raise UsageError(f"model file {index}: {error}: do not use this model") from error
    for name in names:
        if "/" in name:
            raise UsageError(f"model file {index}: names {name!r}, which is not a file beside it: do not use it")
    return sorted(set(names))


def _read_json(file: Path) -> dict[str, object]:
    try:
        return read_object(file)
    except (OSError, ValueError) as error:
        raise UsageError(f"model file {file}: cannot be read as JSON ({error})") from error


def hub_snapshot(name: str, revision: str | None) -> Path | None:
    """Directory of a Hub model in the local cache, or None when it is not there. Never downloads."""
    try:
        return Path(snapshot_download(name, revision=revision, local_files_only=True))
    except (LocalEntryNotFoundError, HFValidationError, HfHubHTTPError):
        return None


# ---- attestation: the weight files' SHA-256 against that of the Hub's cache or our ``integrity.json`` ----
#
# Hashing takes each tensor's digest from the same read; what was loaded, in another read, is compared with it, also
# where nothing is on record. Intact files are cached by path, size, inode and times of change, so that only new or
# changed files are read again.

SHA256 = re.compile(r"[0-9a-f]{64}")
_MANIFEST = "integrity.json"
_THREADS = 4
_PIECE_BYTES = 4 << 20
_WORTH_KEEPING = 64 << 20  # smaller files without a record are read again at each start


@dataclass(frozen=True, kw_only=True)
class FileRecords:
    attested: int  # files whose SHA-256 equals the recorded one
    unknown: tuple[str, ...]  # names of files without a recorded SHA-256


def check_files(
    files: Sequence[Path], memory: Path, loaded: Mapping[tuple[str, str], Collection[Digest]] | None = None
) -> FileRecords:
    """Hash the files that have a recorded SHA-256, and read all of them a second time, past the page cache where the
    file system allows that: what was loaded has to be equal to it.

    ``memory``: where results are kept by path, size, inode and times of change.

    Raises:
        UsageError: a file differs from its record.
        CorruptionError: a tensor was loaded with other bytes than the second reading has.
    """
    recorded: dict[Path, str] = {}
    for file in files:
        sha256 = recorded_sha256(file)
        if sha256 is not None:
            recorded[file] = sha256
    states = {file: _state(file, recorded.get(file)) for file in files}
    seen = _read_memory(memory)

    fresh = [file for file in files if seen.get(str(file.resolve()), {}).get("state") != states[file]]
    with ThreadPoolExecutor(max_workers=_THREADS) as pool:
        read_again = dict(zip(fresh, pool.map(_read_again, fresh), strict=True))
    for file, read in read_again.items():
        if file in recorded and read.sha256 != recorded[file]:
            raise UsageError(
                f"model file {file}: its SHA-256 is {read.sha256[:12]}..., but {recorded[file][:12]}... is on record: "
                "the file is damaged on this disk; download or copy it again"
            )
        digests = {name: tensor.digest.hex() for name, tensor in read.tensors.items()}
        seen[str(file.resolve())] = {"state": states[file], "tensors": digests}
    if fresh:
        not_kept = set()
        for file in fresh:
            if file not in recorded and file.stat().st_size < _WORTH_KEEPING:
                not_kept.add(str(file.resolve()))
        _remember(memory, {path: row for path, row in seen.items() if path not in not_kept})

    of_files = {str(file.resolve()): seen[str(file.resolve())]["tensors"] for file in files}
    for (path, tensor), digests_loaded in (loaded or {}).items():
        readings = {digest.hex() for digest in digests_loaded}
        path_on_disk = os.path.realpath(path)
        again = of_files.get(path_on_disk, {}).get(tensor)
        if again:
            readings.add(again)
        if len(readings) > 1:
            if of_files and seen.pop(path_on_disk, None) is not None:
                _remember(memory, seen)  # the second reading may be the wrong one
            raise CorruptionError(
                f"model file {path}: {tensor} was loaded from it with other bytes than another reading gave: a read "
                "from the disk or from the page cache was wrong. Start the same command again; if it happens again, "
                "test this machine's memory"
            )
    return FileRecords(attested=len(recorded), unknown=tuple(file.name for file in files if file not in recorded))


def _state(file: Path, sha256: str | None) -> list[Any]:
    """What a kept result of a file is known by: the same record, size, inode and times of change."""
    stats = file.stat()
    return [sha256, stats.st_size, stats.st_ino, stats.st_mtime_ns, stats.st_ctime_ns]


def recorded_sha256(file: Path) -> str | None:
    blob = file.resolve()
    if blob.parent.name == "blobs" and SHA256.fullmatch(blob.name):
        return blob.name
    try:
        entry = read_object(file.parent / _MANIFEST)["files"][file.name]["sha256"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    if isinstance(entry, str) and SHA256.fullmatch(entry):
        return entry
    return None


@dataclass(frozen=True, kw_only=True)
class StoredTensor:
    """What a file holds of a tensor. ``dtype`` is None where torch has no such type."""

    dtype: torch.dtype | None
    shape: tuple[int, ...]
    digest: Digest


@dataclass(frozen=True, kw_only=True)
class FileSums:
    """Size in bytes and SHA-256 of a file, and its tensors by name: none, where it is no safetensors file."""

    bytes: int
    sha256: str
    tensors: dict[str, StoredTensor]


def sums(file: Path, *, from_disk: bool = False) -> FileSums:
    """Read a file once, piece by piece: what is hashed and digested is the same bytes, and none of them are kept.

    ``from_disk``: as it lies there, not as the system's cache has it, where the file system can tell them apart.
    """
    if from_disk:
        with open_from_disk(file) as stream:
            return _sums(stream)
    with file.open("rb") as stream:
        return _sums(stream)


def _read_again(file: Path) -> FileSums:
    """As `sums`, from the disk itself: the page cache, which a mapped file is read from, may hold a wrong page."""
    try:
        with _FromDisk(file) as stream:
            return _sums(stream)
    except OSError:  # a file system without it, such as one in memory
        return sums(file)


class _FromDisk:
    """A file that is read past the page cache (O_DIRECT), into aligned memory."""

    def __init__(self, file: Path) -> None:
        self._descriptor = os.open(file, os.O_RDONLY | os.O_DIRECT | os.O_CLOEXEC)
        self._memory = mmap.mmap(-1, _PIECE_BYTES)  # at the begin of a page
        self._rest = b""

    def __enter__(self) -> _FromDisk:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._descriptor)
        self._memory.close()

    def fileno(self) -> int:
        return self._descriptor

    def read(self, nbytes: int) -> bytes:
        """As of a file; ``nbytes`` may be at most `_PIECE_BYTES`."""
        while len(self._rest) < nbytes:
            count = os.readv(self._descriptor, [self._memory])
            if not count:
                break
            self._rest += self._memory[:count]
        taken = self._rest[:nbytes]
        self._rest = self._rest[nbytes:]
        return taken


def _sums(stream: Any) -> FileSums:
    tensors: dict[str, StoredTensor] = {}
    reader = _HashingReader(stream)
    start = b"".join(reader.pieces(8))
    length = int.from_bytes(start, "little")
    header = b"".join(reader.pieces(length)) if length < os.fstat(stream.fileno()).st_size else b""
    try:
        entries = parse_header(header)
    except ValueError:
        entries = []  # loading reports it
    for begin, end, name, dtype, shape in entries:
        for _ in reader.pieces(begin - reader.bytes):
            pass  # a gap between two tensors
        parts = []
        word = 0
        for piece in reader.pieces(end - begin):
            parts.append(digest(torch.frombuffer(piece, dtype=torch.uint8), word_offset=word))
            word += len(piece) // 4
        tensors[name] = StoredTensor(dtype=_DTYPES.get(dtype), shape=shape, digest=combine(parts))
    for _ in reader.pieces(None):
        pass
    return FileSums(bytes=reader.bytes, sha256=reader.hashing.hexdigest(), tensors=tensors)


class _HashingReader:
    """Reads a stream in pieces, and hashes and counts what it reads."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream
        self.hashing = hashlib.sha256()
        self.bytes = 0

    def pieces(self, nbytes: int | None) -> Iterator[bytearray]:
        """The next ``nbytes`` of the stream, or fewer at its end; None: all that is left."""
        while nbytes is None or nbytes > 0:
            piece = bytearray(self._stream.read(min(_PIECE_BYTES, nbytes or _PIECE_BYTES)))
            if not piece:
                return
            self.hashing.update(piece)
            self.bytes += len(piece)
            yield piece
            nbytes = None if nbytes is None else nbytes - len(piece)


def _read_memory(memory: Path) -> dict[str, dict[str, Any]]:
    try:
        return {file: row for file, row in read_object(memory).items() if isinstance(row["tensors"], dict)}
    except (OSError, ValueError, AttributeError, TypeError, KeyError):
        return {}


def _remember(memory: Path, rows: dict[str, dict[str, Any]]) -> None:
    # Only saves time: without a writable home the files are hashed again.
    with suppress(OSError):
        memory.parent.mkdir(parents=True, exist_ok=True)
        partial = memory.with_name(f"{memory.name}.{os.getpid()}")
        partial.write_text(json.dumps(rows), encoding="utf-8")
        partial.replace(memory)
