"""Checks of a model directory before anything is loaded: which file is damaged, and how.

A safetensors file is eight bytes of header length (little-endian), a JSON header with dtype, shape and byte range of
each tensor, and the data (format: https://github.com/huggingface/safetensors#format). A truncated download fails
here with the file's name instead of deep inside a loader.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

from safetensors import SafetensorError, safe_open

from hf_rocm_tune.errors import UsageError

_MAX_HEADER = 100_000_000  # bytes; the limit of the safetensors library itself


def check_model_directory(directory: Path) -> list[Path]:
    """Checks the weight files of a local model directory.

    Args:
        directory: holds ``config.json`` and weights.

    Returns:
        The safetensors files that belong to the model, in order.

    Raises:
        UsageError: no configuration, no weights, a missing shard, a truncated file or a damaged header.
    """
    if not directory.is_dir():
        raise UsageError(f"model: {directory} is not a directory: give a model directory or a Hub id")
    if not (directory / "config.json").is_file():
        raise UsageError(f"model: {directory} has no config.json: give the directory that save_pretrained wrote")
    _read_json(directory / "config.json")
    files = _weight_files(directory)
    for file in files:
        check_safetensors(file)
    return files


def check_safetensors(file: Path) -> None:
    """Checks the header of one file against its size; reads no tensor data.

    Raises:
        UsageError: truncated or damaged; the message names the file.
    """
    again = "download or copy it again"
    try:
        size = file.stat().st_size
        with file.open("rb") as stream:
            prefix = stream.read(8)
            length = int.from_bytes(prefix, "little")
            whole_header = len(prefix) == 8 and length <= min(size - 8, _MAX_HEADER)
            text = stream.read(length) if whole_header else b""
    except OSError as error:
        raise UsageError(
            f"model file {file}: cannot be read ({error.strerror}): check the disk and permissions"
        ) from error
    if not whole_header:
        raise UsageError(f"model file {file}: not a whole safetensors file ({size} bytes, damaged header): {again}")
    try:
        ends = [entry["data_offsets"][1] for name, entry in json.loads(text).items() if name != "__metadata__"]
        whole = 8 + length + max(ends, default=0)
    except (ValueError, TypeError, KeyError, IndexError, AttributeError, RecursionError) as error:
        raise UsageError(f"model file {file}: damaged safetensors header ({error}): {again}") from error
    if size != whole:
        raise UsageError(f"model file {file}: {size} bytes, but its header describes {whole}: truncated; {again}")
    try:
        with safe_open(file, framework="pt"):  # maps the file and checks each entry of the header
            pass
    except SafetensorError as error:
        raise UsageError(f"model file {file}: damaged safetensors header ({error}): {again}") from error


def _weight_files(directory: Path) -> list[Path]:
    index = directory / "model.safetensors.index.json"
    single = directory / "model.safetensors"
    if single.is_file():
        return [single]
    if index.is_file():
        files = [directory / name for name in _shard_names(index)]
        missing = [file.name for file in files if not os.path.isfile(file)]  # Path's own raises on some names
        if missing:
            raise UsageError(f"model: {directory} lacks {', '.join(missing)}, which {index.name} names")
        return files
    if any(directory.glob("pytorch_model*.bin")):
        return []
    raise UsageError(f"model: {directory} has no model.safetensors and no model.safetensors.index.json")


def _shard_names(index: Path) -> list[str]:
    weight_map = _read_json(index).get("weight_map")
    names = list(weight_map.values()) if isinstance(weight_map, dict) else []
    if not names or not all(isinstance(name, str) and name for name in names):
        raise UsageError(f"model file {index}: has no weight_map of tensor to file name: download or copy it again")
    outside = sorted({str(name) for name in names if Path(str(name)).name != name})
    if outside:
        raise UsageError(
            f"model file {index}: names {outside[0]!r}, which is not a file beside it: do not use this model"
        )
    return sorted(set(names))


def _read_json(file: Path) -> dict[str, object]:
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise UsageError(f"model file {file}: cannot be read as JSON ({error})") from error
    if not isinstance(content, dict):
        raise UsageError(f"model file {file}: expected a JSON object, got {type(content).__name__}")
    return content


def hub_snapshot(name: str, revision: str | None) -> Path | None:
    """Directory of a Hub model in the local cache, or None when it is not there. Never downloads."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(name, revision=revision, local_files_only=True))
    except (LocalEntryNotFoundError, HFValidationError, HfHubHTTPError):
        return None
