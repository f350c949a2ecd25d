"""Where the rows come from: one name for a Hub dataset, a folder, a `save_to_disk` folder or a single file.

`datasets` does the loading. This module decides which of its doors to use, picks the splits, and turns each mistake
of the user into one line with what was found and what to do.

Not covered: errors further on in a streamed source. Only its first row is read here; `explain_read_error` puts a
later one into words.
"""

from __future__ import annotations

import glob
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from hf_rocm_tune.data.filefaults import READERS, find_fault, reader_of
from hf_rocm_tune.errors import UsageError

if TYPE_CHECKING:
    from datasets import Dataset, IterableDataset

    Rows: TypeAlias = Dataset | IterableDataset

_SUPPORTED = " ".join(READERS) + " (also with .gz, parquet excepted)"


@dataclass(frozen=True, kw_only=True)
class Splits:
    """The rows to train on, those to evaluate on (None where that was not asked for), and a line about both."""

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
        config: of a dataset that has several.
        streaming: give iterable datasets, and read nothing but the first row now.
        train_split: split to train on. A single file is one split, called ``train``.
        test_split: split to evaluate on, when ``need_eval``.
        need_eval: whether rows to evaluate on are wanted at all.
        eval_split_size: split this part off the training rows instead of using ``test_split``: a share below 1
            or a number of rows (streaming: a number only, and the first ones).
        seed: of that division.

    Raises:
        UsageError: nothing by that name, unreadable, damaged, empty, or without the split that is needed.
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
            f"an evaluation was asked for, but '{name}' has no split '{test_split}', only {_listed(splits)}: "
            "choose one with --dataset_test_split NAME, or split rows off with --eval_split_size 0.05"
        )
    return Splits(train=train, eval=evaluation, description=_describe(name, train, evaluation, origin))


def explain_read_error(error: BaseException, name: str, *, files: Sequence[Path] | None = None) -> UsageError:
    """Put an error of `datasets` while reading ``name`` into words, with file and line where they can be found."""
    for file in _data_files(Path(name).expanduser()) if files is None else files:
        if fault := find_fault(file):
            return UsageError(fault)
    cause = error.__cause__ or error
    text = str(cause).strip() or type(cause).__name__
    return UsageError(f"the dataset '{name}' could not be read: {text.splitlines()[0]}")


def _load_splits(name: str, *, config: str | None, streaming: bool) -> dict[str, Rows]:
    path = Path(name).expanduser()
    _check_readable(path, name)
    with explained(name):
        if path.is_file():
            splits = _load_file(path, streaming=streaming)
        elif _is_saved(path):
            splits = _load_saved(path, streaming=streaming)
        elif path.is_dir():
            splits = _load(str(path), name=config, streaming=streaming)
        else:
            _refuse_missing_path(name)
            return _load_from_hub(name, config=config, streaming=streaming)
        _check_encoding(splits)
    return splits


def _is_saved(path: Path) -> bool:
    """Whether `Dataset.save_to_disk` or `DatasetDict.save_to_disk` wrote this folder."""
    return (path / "dataset_dict.json").exists() or (path / "state.json").exists()


def _check_readable(path: Path, name: str) -> None:
    """Try before `datasets` does, whose own error for this names its cache as often as the file."""
    try:
        if path.is_file():
            path.open("rb").close()
            if reader_of(path) is None:
                raise UsageError(f"'{name}' has an unsupported suffix; supported: {_SUPPORTED}")
        elif path.is_dir():
            next(path.iterdir(), None)
    except PermissionError as error:
        raise UsageError(f"'{name}' may not be read (permission denied)") from error


def _load(source: str, **arguments: Any) -> dict[str, Rows]:
    from datasets import load_dataset

    return dict(load_dataset(source, **arguments))


def _load_file(path: Path, *, streaming: bool) -> dict[str, Rows]:
    if path.stat().st_size == 0:
        raise UsageError(f"{path} is empty (0 bytes)")
    # `datasets` takes a file name for a pattern: brackets in it have to be escaped.
    files = {"train": glob.escape(str(path.absolute()))}
    return _load(str(reader_of(path)), data_files=files, streaming=streaming)


def _load_saved(path: Path, *, streaming: bool) -> dict[str, Rows]:
    from datasets import DatasetDict, load_from_disk

    try:
        saved = load_from_disk(str(path))
    except IndexError as error:  # what `datasets` raises for a saved table of no rows
        raise UsageError(f"the dataset saved in '{path}' is empty") from error
    splits = dict(saved) if isinstance(saved, DatasetDict) else {"train": saved}
    return {key: rows.to_iterable_dataset() if streaming else rows for key, rows in splits.items()}


def _load_from_hub(name: str, *, config: str | None, streaming: bool) -> dict[str, Rows]:
    from datasets.exceptions import DatasetNotFoundError
    from huggingface_hub.errors import HFValidationError

    try:
        return _load(name, name=config, streaming=streaming)
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


def _refuse_missing_path(name: str) -> None:
    """A Hub id is ``name`` or ``owner/name``; whatever else does not exist is a path that is wrong."""
    path = Path(name)
    if path.is_absolute() or name.startswith((".", "~")) or len(path.parts) > 2 or reader_of(path) is not None:
        raise UsageError(f"no such file or folder: '{name}' (looked in {Path.cwd()})")


@contextmanager
def explained(name: str, *, files: Sequence[Path] | None = None) -> Iterator[None]:
    """Errors of `datasets` become one line; its own log of the same error is held back meanwhile.

    Args:
        name: what is being read.
        files: where to look for the fault; by default the files that ``name`` stands for.
    """
    import pyarrow as pa
    from datasets.exceptions import DatasetsError
    from datasets.utils import logging

    foreign = (DatasetsError, pa.ArrowException, OSError, ValueError, TypeError, EOFError, StopIteration, RuntimeError)
    level = logging.get_verbosity()
    logging.set_verbosity(logging.CRITICAL)
    try:
        yield
    except foreign as error:
        raise explain_read_error(error, name, files=files) from error
    finally:
        logging.set_verbosity(level)


def _check_encoding(splits: dict[str, Rows]) -> None:
    """Arrow's JSON reader lets bytes through that are no UTF-8; they would fail in the middle of tokenizing.

    Raises:
        pyarrow.ArrowInvalid: for the caller to explain.
    """
    from datasets import Dataset

    for rows in splits.values():
        if isinstance(rows, Dataset):
            rows.data.table.validate(full=True)


def _data_files(path: Path) -> list[Path]:
    if path.is_file():
        return [path]
    if not path.is_dir() or _is_saved(path):
        return []
    return sorted(file for file in path.rglob("*") if file.is_file() and reader_of(file))


def _pick(splits: dict[str, Rows], split: str, *, flag: str, name: str) -> Rows:
    from datasets import Dataset

    if split not in splits:
        raise UsageError(f"'{name}' has no split '{split}', only {_listed(splits)}: choose one with {flag} NAME")
    rows = splits[split]
    with explained(name):
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
