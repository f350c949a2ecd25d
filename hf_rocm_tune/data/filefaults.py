"""Why a local data file cannot be read: the line, the byte, the cause, in one sentence.

This runs only after `datasets` has failed, so a good file costs nothing. It reads the file in Python from its start,
because the parsers of `datasets` report positions within a block, or none.
"""

from __future__ import annotations

import csv
import gzip
import io
import json
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import BinaryIO

READERS: dict[str, str] = {".jsonl": "json", ".json": "json", ".csv": "csv", ".parquet": "parquet", ".txt": "text"}
"""Suffix of a data file, and the reader of `datasets` for it. All but parquet may be followed by ``.gz``."""


def reader_of(path: Path) -> str | None:
    """The `datasets` reader for this file name, or None where the suffix is not supported."""
    suffixes = [suffix.lower() for suffix in path.suffixes]
    if suffixes and suffixes[-1] == ".gz":
        reader = READERS.get(suffixes[-2]) if len(suffixes) > 1 else None
        return None if reader == "parquet" else reader
    return READERS.get(suffixes[-1]) if suffixes else None


def find_fault(path: Path) -> str | None:
    """Say what is wrong with a data file, or None if nothing was found.

    Args:
        path: an existing file with a supported suffix.

    Returns:
        A sentence that names the file and, where there is one, the line or the byte offset (counted from 0).
    """
    try:
        if path.stat().st_size == 0:
            return f"{path} is empty (0 bytes)"
        reader = reader_of(path)
        return _FINDERS[reader](path) if reader else None
    except PermissionError:
        return f"{path} may not be read (permission denied)"
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        return f"{path} is cut off or damaged: {error}"


def _open(path: Path) -> BinaryIO:
    return io.BufferedReader(gzip.open(path)) if path.suffix.lower() == ".gz" else path.open("rb")


def _lines(path: Path) -> Iterator[tuple[int, int, bytes]]:
    """Line number from 1, byte offset of its start, and its bytes."""
    offset = 0
    with _open(path) as file:
        for number, line in enumerate(file, start=1):
            yield number, offset, line
            offset += len(line)


def _encoding_fault(path: Path) -> str | None:
    for number, offset, line in _lines(path):
        try:
            line.decode("utf-8")
        except UnicodeDecodeError as error:
            return (
                f"{path} is not UTF-8: byte 0x{line[error.start]:02x} in line {number}, byte offset "
                f"{offset + error.start}; convert it, for example with `iconv -f latin1 -t utf-8`"
            )
    return None


def _json_fault(path: Path) -> str | None:
    if fault := _encoding_fault(path):
        return fault
    with _open(path) as file:
        if file.read(1024).lstrip(b"\xef\xbb\xbf \t\r\n").startswith(b"["):
            return _json_array_fault(path)
    for number, _, line in _lines(path):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except json.JSONDecodeError as error:
            return f"{path}, line {number}, column {error.colno}: not valid JSON ({error.msg})"
        if not isinstance(row, dict):
            return f"{path}, line {number}: a row has to be a JSON object, this is a {type(row).__name__}"
    return None


def _json_array_fault(path: Path) -> str | None:
    with _open(path) as file:
        text = file.read().decode("utf-8-sig")
    try:
        rows = json.loads(text)
    except json.JSONDecodeError as error:
        return f"{path}, line {error.lineno}, column {error.colno}: not valid JSON ({error.msg})"
    if not rows:
        return f"{path} has no rows: it is an empty list"
    for number, row in enumerate(rows, start=1):
        if not isinstance(row, dict):
            return f"{path}, row {number}: a row has to be a JSON object, this is a {type(row).__name__}"
    return None


def _csv_fault(path: Path) -> str | None:
    if fault := _encoding_fault(path):
        return fault
    with _open(path) as file:
        rows = csv.reader(io.TextIOWrapper(file, encoding="utf-8-sig", newline=""))
        header = next(rows, [])
        for row in rows:
            if len(row) > len(header):
                return f"{path}, line {rows.line_num}: {len(row)} fields, but the header has {len(header)}"
        if rows.line_num <= 1:
            return f"{path} has a header and no rows"
    return None


def _parquet_fault(path: Path) -> str | None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        with pq.ParquetFile(path) as file:
            for group in range(file.num_row_groups):
                file.read_row_group(group)
            return None if file.metadata.num_rows else f"{path} has no rows"
    except (pa.ArrowException, OSError) as error:
        return f"{path} is cut off or damaged, or not a parquet file: {str(error).splitlines()[0]}"


_FINDERS: dict[str, Callable[[Path], str | None]] = {
    "json": _json_fault,
    "csv": _csv_fault,
    "parquet": _parquet_fault,
    "text": _encoding_fault,
}
