"""Loading of datasets: one name for a Hub dataset, a folder, a `save_to_disk` folder or a single file.

`datasets` does the loading. This module selects its loader, picks the splits, and reports each user error in one line.

Not covered: errors after the first row of a streamed source.
"""

from __future__ import annotations

import dataclasses
import glob
import gzip
import io
import json
import os
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, TypeAlias

from hf_rocm_tune.errors import UsageError
from hf_rocm_tune.paths import expand_user

if TYPE_CHECKING:
    from datasets import Dataset, IterableDataset
    from trl import DatasetMixtureConfig
    from trl.scripts.utils import DatasetConfig

    Rows: TypeAlias = Dataset | IterableDataset

_READERS: dict[str, str] = {".jsonl": "json", ".json": "json", ".csv": "csv", ".parquet": "parquet", ".txt": "text"}
"""Suffix of a data file, and the reader of `datasets` for it. All but parquet may be followed by ``.gz``."""
_SUPPORTED = " ".join(_READERS) + " (also with .gz, parquet excepted)"


@dataclass(frozen=True, kw_only=True)
class Splits:
    """Training rows, evaluation rows (None if not requested), and a line about both."""

    train: Rows
    eval: Rows | None
    description: str


def load_source(
    name: str,
    *,
    config: str | None = None,
    streaming: bool = False,
    train_split: str = "train",
    test_split: str = "test",
    need_eval: bool = False,
    eval_split_size: float | int | None = None,
    seed: int = 42,
) -> Splits:
    """Load the dataset that the user has named.

    Args:
        name: a file or a folder that exists, or else the id of a dataset on the Hugging Face Hub.
        config: of a dataset with several configurations.
        streaming: return iterable datasets; only the first row is read now.
        train_split: split to train on. A single file is one split, called ``train``.
        test_split: split to evaluate on, when ``need_eval``.
        need_eval: whether evaluation rows are needed.
        eval_split_size: split this part off the training rows instead of using ``test_split``: a share below 1
            or a number of rows (streaming: a number only, and the first ones).
        seed: of that split.
    """
    splits = _load_splits(name, config=config, streaming=streaming)
    train = _pick(splits, train_split, flag="--dataset_train_split", name=name)
    if not need_eval:
        return Splits(train=train, eval=None, description=_describe(name, train, None))
    if eval_split_size is not None:
        train, evaluation = _divide(train, eval_split_size, seed=seed, name=name)
        origin = f"split off from '{train_split}'"
    elif test_split in splits:
        evaluation = _pick(splits, test_split, flag="--dataset_test_split", name=name)
        origin = f"split '{test_split}'"
    else:
        raise UsageError(
            f"evaluation was requested, but '{name}' has no split '{test_split}', only {_listed(splits)}: "
            "choose one with --dataset_test_split NAME, or split rows off with --eval_split_size 0.05"
        )
    return Splits(train=train, eval=evaluation, description=_describe(name, train, evaluation, origin))


def load_mixture(
    mixture: DatasetMixtureConfig, *, train_split: str, test_split: str, need_eval: bool, seed: int
) -> Splits:
    """Loads a recipe's mixture by TRL's ``get_dataset``; the path of a part may also be that of a data file."""
    from datasets import DatasetDict
    from trl import get_dataset

    names = ", ".join(part.path for part in mixture.datasets)
    parts = []
    for part in mixture.datasets:
        file = expand_user(part.path)
        reader = _reader_of(file) if os.path.isfile(file) else None
        as_file = {"path": reader, "data_files": glob.escape(str(file.absolute()))}
        parts.append(dataclasses.replace(part, **as_file) if reader else part)
    with _explained(names, files=[file for part in parts for file in _local_files(part)]):
        # TRL's own split has no seed: a resumed run would evaluate on other rows
        mixed: Any = get_dataset(dataclasses.replace(mixture, datasets=parts, test_split_size=None))
        if mixture.test_split_size is not None:
            mixed = DatasetDict(mixed["train"].train_test_split(test_size=mixture.test_split_size, seed=seed))
    if train_split not in mixed or (need_eval and test_split not in mixed):
        raise UsageError(
            f"the mixture of {names} has the splits {', '.join(mixed)}: set --test_split_size to split "
            "off rows for the evaluation"
        )
    train = _pick(mixed, train_split, flag="--dataset_train_split", name=names)
    evaluation = mixed[test_split] if need_eval else None
    description = _describe(f"mixture of {names}", train, evaluation, "split off")
    return Splits(train=train, eval=evaluation, description=description)


def _local_files(part: DatasetConfig) -> list[Path]:
    """The local files that a part names."""
    named = part.data_files or [part.path]
    names = [named] if isinstance(named, str) else list(named.values() if isinstance(named, dict) else named)
    return [Path(name) for name in names if os.path.isfile(name)]


def _load_splits(name: str, *, config: str | None, streaming: bool) -> dict[str, Rows]:
    from datasets import Dataset, DatasetDict, load_dataset, load_from_disk

    path = expand_user(name)
    _check_readable(path, name)
    with _explained(name):
        if os.path.isfile(path):
            if path.stat().st_size == 0:
                raise UsageError(f"{path} is empty (0 bytes)")
            # `datasets` treats a file name as a pattern: brackets must be escaped
            files = {"train": glob.escape(str(path.absolute()))}
            splits = dict(load_dataset(str(_reader_of(path)), data_files=files, streaming=streaming))
        elif _is_saved(path):
            try:
                saved = load_from_disk(str(path))
            except IndexError as error:  # what `datasets` raises for a saved table of no rows
                raise UsageError(f"the dataset saved in '{path}' is empty") from error
            splits = dict(saved) if isinstance(saved, DatasetDict) else {"train": saved}
            if streaming:
                splits = {key: rows.to_iterable_dataset() for key, rows in splits.items()}
        elif os.path.isdir(path):
            splits = dict(load_dataset(str(path), name=config, streaming=streaming))
        else:
            refuse_missing(name)
            return _load_from_hub(name, config=config, streaming=streaming)
        # Arrow's JSON reader accepts invalid UTF-8, which would fail during tokenizing
        for rows in splits.values():
            if isinstance(rows, Dataset):
                rows.data.table.validate(full=True)
    return splits


def _is_saved(path: Path) -> bool:
    """Whether `Dataset.save_to_disk` or `DatasetDict.save_to_disk` wrote this folder."""
    return any(os.path.isfile(path / name) for name in ("dataset_dict.json", "state.json"))


def _check_readable(path: Path, name: str) -> None:
    """Checked before `datasets`, whose error often names its cache instead of the file."""
    try:
        if os.path.isfile(path):
            path.open("rb").close()
            if _reader_of(path) is None:
                raise UsageError(f"'{name}' has an unsupported suffix; supported: {_SUPPORTED}")
        elif os.path.isdir(path):
            next(path.iterdir(), None)
            if not path.absolute().name:  # `datasets` needs one
                raise UsageError(f"'{name}' is the root of the file system: name a folder in it")
    except PermissionError as error:
        raise UsageError(f"'{name}' may not be read (permission denied)") from error


def _load_from_hub(name: str, *, config: str | None, streaming: bool) -> dict[str, Rows]:
    from datasets import load_dataset
    from datasets.exceptions import DatasetNotFoundError
    from huggingface_hub.errors import HFValidationError

    try:
        return dict(load_dataset(name, name=config, streaming=streaming))
    except (ConnectionError, DatasetNotFoundError, FileNotFoundError, HFValidationError) as error:
        raise UsageError(
            f"no dataset '{name}': there is no file or folder of that name, and the Hugging Face Hub either does not "
            f"have it (check the spelling, log in if it is private or gated) or cannot be reached "
            f"(check the network and HF_HUB_OFFLINE): {str(error).splitlines()[0]}"
        ) from error
    except ValueError as error:
        if "config" not in str(error).lower():
            raise
        raise UsageError(f"'{name}': choose a configuration with --dataset_config NAME: {error}") from error


def refuse_missing(name: str) -> None:
    """Refuses a name that is no Hub id (``name`` or ``owner/name``) and does not exist."""
    path = Path(name)
    is_path = path.is_absolute() or name.startswith((".", "~")) or len(path.parts) > 2 or _reader_of(path) is not None
    if is_path and not os.path.exists(expand_user(name)):
        raise UsageError(f"no such file or folder: '{name}' (looked in {Path.cwd()})")


@contextmanager
def _explained(name: str, *, files: Sequence[Path] | None = None) -> Iterator[None]:
    """Turns errors of `datasets` while reading `name` into one line, and silences its log."""
    import pyarrow as pa
    from datasets.exceptions import DatasetsError
    from datasets.utils import logging

    foreign = (DatasetsError, pa.ArrowException, OSError, ValueError, TypeError, EOFError, StopIteration, RuntimeError)
    level = logging.get_verbosity()
    logging.set_verbosity(logging.CRITICAL)
    try:
        yield
    except foreign as error:
        path = expand_user(name)
        if files is None:
            whole = os.path.isfile(path) or _is_saved(path)
            every = [path] if whole else sorted(path.rglob("*")) if os.path.isdir(path) else []
            files = [file for file in every if file.is_file() and _reader_of(file)]
        for file in files:
            if fault := _find_fault(file):
                raise UsageError(fault) from error
        cause = error.__cause__ or error
        text = str(cause).strip() or type(cause).__name__
        raise UsageError(f"the dataset '{name}' could not be read: {text.splitlines()[0]}") from error
    finally:
        logging.set_verbosity(level)


def _pick(splits: dict[str, Rows], split: str, *, flag: str, name: str) -> Rows:
    from datasets import Dataset

    if split not in splits:
        raise UsageError(f"'{name}' has no split '{split}', only {_listed(splits)}: choose one with {flag} NAME")
    rows = splits[split]
    with _explained(name):
        count = len(rows) if isinstance(rows, Dataset) else len(list(islice(rows, 1)))
    if count == 0:
        raise UsageError(f"the dataset '{name}' is empty: its split '{split}' has no rows")
    return rows


def _divide(rows: Rows, size: float | int, *, seed: int, name: str) -> tuple[Rows, Rows]:
    from datasets import Dataset

    share = isinstance(size, float) and size < 1
    count = int(size) if not share else 0
    if size <= 0 or (not share and count != size):
        raise UsageError(f"--eval_split_size {size}: give a share between 0 and 1, or a number of rows")
    if not isinstance(rows, Dataset):
        if share:
            raise UsageError(f"--eval_split_size {size}: a streamed dataset has no known length, give a number of rows")
        return rows.skip(count), rows.take(count)
    count = max(1, round(size * len(rows))) if share else count
    if count >= len(rows):
        raise UsageError(f"--eval_split_size {size} takes {count} of the {len(rows)} rows of '{name}': none are left")
    parts = rows.train_test_split(test_size=count, seed=seed)
    return parts["train"], parts["test"]


def _listed(splits: dict[str, Rows]) -> str:
    return ", ".join(f"'{split}'" for split in splits)


def _describe(name: str, train: Rows, evaluation: Rows | None, origin: str = "") -> str:
    from datasets import Dataset

    def size(rows: Rows) -> str:
        return f"{len(rows)} rows" if isinstance(rows, Dataset) else "streamed rows"

    tail = f", evaluation on {size(evaluation)} ({origin})" if evaluation is not None else ""
    return f"{name}: training on {size(train)}{tail}"


# ---- why a local data file cannot be read ----------------------------------------------------------------------------
#
# Runs only after `datasets` has failed. Reads the file in Python from its start, because the parsers of `datasets`
# report positions within a block, or none.


def _reader_of(path: Path) -> str | None:
    """The `datasets` reader for this file name, or None where the suffix is not supported."""
    suffixes = [suffix.lower() for suffix in path.suffixes]
    if suffixes and suffixes[-1] == ".gz":
        reader = _READERS.get(suffixes[-2]) if len(suffixes) > 1 else None
        return None if reader == "parquet" else reader
    return _READERS.get(suffixes[-1]) if suffixes else None


def _find_fault(path: Path) -> str | None:
    """What is wrong with a data file, with the line or byte offset (from 0); None if nothing was found."""
    try:
        if path.stat().st_size == 0:
            return f"{path} is empty (0 bytes)"
        reader = _reader_of(path)
        if reader == "parquet":
            return None
        return _encoding_fault(path) or {"json": _json_fault, "csv": _csv_fault}.get(reader or "", lambda _: None)(path)
    except PermissionError:
        return f"{path} may not be read (permission denied)"
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        return f"{path} is cut off or damaged: {error}"


def _open(path: Path) -> BinaryIO:
    return io.BufferedReader(gzip.open(path)) if path.suffix.lower() == ".gz" else path.open("rb")


def _encoding_fault(path: Path) -> str | None:
    offset = 0
    with _open(path) as file:
        for number, line in enumerate(file, start=1):
            try:
                line.decode("utf-8")
            except UnicodeDecodeError as error:
                return (
                    f"{path} is not UTF-8: byte 0x{line[error.start]:02x} in line {number}, byte offset "
                    f"{offset + error.start}; convert it, for example with `iconv -f latin1 -t utf-8`"
                )
            offset += len(line)
    return None


def _json_fault(path: Path) -> str | None:
    """For a file that is one array, or has a row on each line."""
    with _open(path) as file:
        array = file.read(1024).lstrip(b"\xef\xbb\xbf \t\r\n").startswith(b"[")
        file.seek(0)
        for number, text in enumerate([file.read()] if array else file, start=1):
            if not text.strip():
                continue
            try:
                found = json.loads(text)
            except json.JSONDecodeError as error:
                line = error.lineno if array else number
                return f"{path}, line {line}, column {error.colno}: not valid JSON ({error.msg})"
            if array and not found:
                return f"{path} has no rows: it is an empty list"
            for count, row in enumerate(found if array else [found], start=1):
                if not isinstance(row, dict):
                    place = f"row {count}" if array else f"line {number}"
                    return f"{path}, {place}: a row has to be a JSON object, this is a {type(row).__name__}"
    return None


def _csv_fault(path: Path) -> str | None:
    with _open(path) as file:
        return f"{path} has a header and no rows" if len(list(islice(file, 2))) == 1 else None
