"""Loading of datasets by `datasets`: a Hub dataset, a folder, a `save_to_disk` folder or a single file, by one name.

Each user error is one line, except errors after the first row of a streamed source.
"""

from __future__ import annotations

import codecs
import dataclasses
import glob
import gzip
import json
import os
import re
import traceback
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from yaml import YAMLError

from hf_rocm_tune.data.formats import STREAMED_ROWS
from hf_rocm_tune.errors import UsageError, count_of
from hf_rocm_tune.foreign import parse_json, parse_yaml, read_text
from hf_rocm_tune.machine.caches import unwritable
from hf_rocm_tune.paths import expand_user

if TYPE_CHECKING:
    from datasets import Dataset, IterableDataset
    from trl import DatasetMixtureConfig

    from hf_rocm_tune.data.formats import RowFinding

    Rows: TypeAlias = Dataset | IterableDataset

_READERS: dict[str, str] = {
    **dict.fromkeys((".jsonl", ".json", ".ndjson"), "json"),
    **dict.fromkeys((".csv", ".tsv"), "csv"),
    ".parquet": "parquet",
    ".txt": "text",
}
"""Suffix of a data file, and the reader of `datasets` for it. All but parquet may be followed by ``.gz``."""
_AUTO_SHARE = 0.05
_AUTO_ROWS = 200
"""What ``eval_split_size`` auto splits off, at most so many rows: evaluations are to take little of a run's time."""
_SUPPORTED = " ".join(_READERS) + " (also with .gz, parquet excepted)"

#: Columns of pictures and of messages, as TRL names them; kinds of parts of a message that are no text.
COLUMNS = ("images", "image")
TURNS = ("messages", "prompt", "completion", "chosen", "rejected")
PICTURE_PARTS = ("image", "image_url", "input_image")
OTHER_MEDIA = ("video", "video_url", "audio", "audio_url", "input_audio")


@dataclass(frozen=True, kw_only=True)
class Splits:
    """Training rows, evaluation rows (None if not requested), and a line about both."""

    train: Rows
    eval: Rows | None
    description: str
    notes: Sequence[str] = ()  # about files that are not read
    in_csv: bool = False  # whose words for a missing value (NA, null) are read as they stand
    findings: Mapping[str, tuple[RowFinding, ...]] = field(default_factory=dict)  # by ``train`` and ``eval``
    pictures: Any = None  # a `job.pictures.JobPictures` where rows have some


def load_source(
    name: str,
    *,
    config: str | None = None,
    streaming: bool = False,
    train_split: str = "train",
    test_split: str = "test",
    need_eval: bool = False,
    eval_split_size: float | int | Literal["auto"] | None = None,
    seed: int = 42,
) -> Splits:
    """Load a file or a folder that exists, else a dataset on the Hub.

    ``eval_split_size``: a share below 1, or rows, that are split off for evaluation; auto: some if there is no split
    ``test``, and no other was named.
    """
    splits, read = _load_splits(name, config=config, streaming=streaming)
    if train_split not in splits and read.unread:
        raise UsageError(
            f"'{name}' has no split '{train_split}', only {', '.join(splits)}: the names of some files have a split's "
            f"name in them, and {_listed(read.unread)} belong to none: rename them (train.jsonl), or name one file"
        )
    train = _pick(splits, train_split, flag="--dataset_train_split", name=name)
    more: dict[str, Any] = {"notes": read.notes(name), "in_csv": "csv" in read.formats}
    if not need_eval:
        return Splits(train=train, eval=None, description=_describe(name, train, None), **more)
    is_named = test_split in splits or test_split != "test"
    if eval_split_size is not None and not (eval_split_size == "auto" and is_named):
        train, evaluation = _divide(train, eval_split_size, seed=seed, name=name)
        origin = f"split off from '{train_split}'"
    elif test_split in splits:
        evaluation = _pick(splits, test_split, flag="--dataset_test_split", name=name)
        origin = f"split '{test_split}'"
    else:
        raise UsageError(
            f"evaluation was requested, but '{name}' has no split '{test_split}', only {', '.join(splits)}: "
            "choose one with --dataset_test_split NAME, or split rows off with --eval_split_size 0.05"
        )
    return Splits(train=train, eval=evaluation, description=_describe(name, train, evaluation, origin), **more)


def load_mixture(
    mixture: DatasetMixtureConfig, *, train_split: str, test_split: str, need_eval: bool, seed: int
) -> Splits:
    """Loads a recipe's mixture by TRL's ``get_dataset``; the path of a part may also be that of a data file."""
    from datasets import DatasetDict
    from trl import get_dataset

    names = ", ".join(part.path for part in mixture.datasets)
    parts = []
    files = []
    notes: list[str] = []
    in_csv = False
    for part in mixture.datasets:
        path = expand_user(part.path)
        named = part.data_files or part.data_dir
        reader = _reader_of(path) if os.path.isfile(path) else None
        if reader:
            fault = _pointer_in(path)
            if fault:
                raise UsageError(fault)
            files.append(path)
            if reader in _OPTIONS:
                part = _as_arrow(part)
            else:
                part = dataclasses.replace(part, path=reader, data_files=glob.escape(str(path.absolute())))
            in_csv = in_csv or reader == "csv"
        elif os.path.isdir(path) and not named and not _is_saved(path):
            with _explained(part.path):
                _check_card(path / "README.md")
                read = _read_of(path, part.name)
            notes += read.notes(part.path)
            in_csv = in_csv or "csv" in read.formats
            part = _as_arrow(part) if read.options else part
        elif isinstance(part.data_files, str) and os.path.isfile(part.data_files):
            files.append(Path(part.data_files))
        parts.append(part)
    with _explained(names, files=files):
        # TRL's own split has no seed: a resumed run would evaluate on other rows
        mixed: Any = get_dataset(dataclasses.replace(mixture, datasets=parts, test_split_size=None))
        if mixture.test_split_size is not None:
            mixed = DatasetDict(mixed["train"].train_test_split(test_size=mixture.test_split_size, seed=seed))
        _validate(mixed.values())
    if train_split not in mixed or (need_eval and test_split not in mixed):
        raise UsageError(
            f"the mixture of {names} has the splits {', '.join(mixed)}: set --test_split_size to split "
            "off rows for the evaluation"
        )
    train = _pick(mixed, train_split, flag="--dataset_train_split", name=names)
    evaluation = mixed[test_split] if need_eval else None
    description = _describe(f"mixture of {names}", train, evaluation, "split off")
    return Splits(train=train, eval=evaluation, description=description, notes=notes, in_csv=in_csv)


# ---- pictures in rows -----------------------------------------------------------------------------------------------


def has_pictures(rows: Rows) -> bool:
    """Whether rows have pictures: in a column of TRL's, or in parts of their messages. Reads no pictures.

    Messages that are plain text by their types are not looked into.
    """
    columns = columns_of(rows)
    if any(name in columns for name in COLUMNS):
        return True
    typed = [name for name in (*TURNS, "conversations") if name in columns and _may_have_parts(rows, name)]
    if not typed:
        return False

    def has_part(row: Any) -> bool:
        return any(_has_part(row.get(name)) for name in typed)

    return any(has_part(row) for row in _first_rows(rows, typed))


def columns_of(rows: Rows) -> list[str]:
    return list(rows.column_names or next(iter(rows)))


def _may_have_parts(rows: Rows, column: str) -> bool:
    """Whether the type of a column of messages allows content that is not plain text."""
    from datasets import Value

    message = getattr((rows.features or {}).get(column), "feature", None)
    if not isinstance(message, Mapping):
        return not isinstance((rows.features or {}).get(column), Value)
    content = message.get("content", message.get("value"))
    return not (isinstance(content, Value) and content.dtype in ("string", "large_string"))


def _has_part(messages: Any) -> bool:
    """Whether a message has a part that is a picture or another medium."""
    if not isinstance(messages, list):
        return False
    for message in messages:
        if not isinstance(message, Mapping):
            continue
        content = message.get("content", message.get("value"))
        if not isinstance(content, list):
            continue
        for part in content:
            if isinstance(part, Mapping) and part.get("type") in (*PICTURE_PARTS, *OTHER_MEDIA):
                return True
    return False


def _first_rows(rows: Rows, columns: list[str]) -> Iterator[Mapping[str, Any]]:
    """These columns of all rows, or of the first ones of a stream."""
    from datasets import Dataset

    if isinstance(rows, Dataset):
        yield from rows.select_columns(columns)
    else:
        yield from rows.take(STREAMED_ROWS)


# ---- files ----------------------------------------------------------------------------------------------------------


def _as_arrow(part: Any) -> Any:
    """A part of a mixture whose reader needs options, which TRL does not give, as files of Arrow."""
    from datasets import Value

    splits, _ = _load_splits(part.path, config=part.name, streaming=False)
    files = {}
    for split, rows in splits.items():
        for name, kind in rows.features.items():
            if kind == Value("large_string"):  # CSV's text, which JSON's could not follow
                rows = rows.cast_column(name, Value("string"))
        files[split] = [file["filename"] for file in rows.cache_files]
    return dataclasses.replace(part, path="arrow", name=None, data_files=files)


def _load_splits(name: str, *, config: str | None, streaming: bool) -> tuple[dict[str, Rows], _Read]:
    """The splits, and what of a file or folder was read."""
    from datasets import DatasetDict, load_dataset, load_from_disk

    path = expand_user(name)
    read = _Read(formats=frozenset())
    if os.path.isfile(path) and _reader_of(path) is None:
        raise UsageError(f"'{name}' has an unsupported suffix; supported: {_SUPPORTED}")
    fault = _cannot_be_opened(path) or _pointer_in(path)  # `datasets` often names its cache instead
    if fault:
        raise UsageError(fault)
    with _explained(name):
        if os.path.isfile(path):
            # `datasets` treats a file name as a pattern: brackets must be escaped
            files = {"train": glob.escape(str(path.absolute()))}
            read = _Read(formats=frozenset({str(_reader_of(path))}))
            splits = dict(load_dataset(str(_reader_of(path)), data_files=files, streaming=streaming, **_options(path)))
        elif _is_saved(path):
            try:
                saved = load_from_disk(str(path))
            except IndexError as error:  # what `datasets` raises for a saved table of no rows
                raise UsageError(f"the dataset saved in '{path}' is empty") from error
            splits = dict(saved) if isinstance(saved, DatasetDict) else {"train": saved}
            if streaming:
                splits = {key: rows.to_iterable_dataset() for key, rows in splits.items()}
        elif os.path.isdir(path):
            _check_card(path / "README.md")
            if not any(_data_in(path)):
                raise UsageError(f"the folder '{name}' has no data files; supported: {_SUPPORTED}")
            read = _read_of(path, config)
            splits = dict(load_dataset(str(path), name=config, streaming=streaming, **read.options))
        else:
            refuse_missing(name)
            return _load_from_hub(name, config=config, streaming=streaming), read
        _validate(splits.values())
    return splits, read


def _validate(splits: Iterable[Rows]) -> None:
    """Arrow's JSON reader accepts invalid UTF-8, which would fail during tokenizing."""
    from datasets import Dataset

    for rows in splits:
        if isinstance(rows, Dataset):
            rows.data.table.validate(full=True)


@dataclass(frozen=True, kw_only=True)
class _Read:
    """What `datasets` reads of a file or a folder."""

    formats: frozenset[str]  # readers
    unread: tuple[str, ...] = ()  # data files that are in no split, relative to the folder
    odd: tuple[str, ...] = ()  # files that are read by a suffix before their last one, such as ``.jsonl.old``
    mapped: bool = False  # the folder has LLaMA-Factory's descriptions of columns

    @property
    def options(self) -> dict[str, Any]:
        """Of the reader, where it is the only one."""
        (reader,) = self.formats if len(self.formats) == 1 else ("",)
        return _OPTIONS.get(reader, {})

    def notes(self, name: str) -> list[str]:
        """Lines about what is read, or is not, of a folder."""
        begin = f"warning: the folder '{name}':"
        notes = []
        if self.unread:
            notes.append(f"{begin} not read are {_listed(self.unread)}")
        if self.odd:
            notes.append(f"{begin} read as well are {_listed(self.odd)}")
        if self.mapped:
            notes.append(f"{begin} columns are not renamed as its dataset_info.json says, which is not read")
        return notes


def _read_of(path: Path, config: str | None) -> _Read:
    """What `datasets` reads of a folder.

    Raises:
        UsageError: they have another format than those that it reads, and are no mere notes.
    """
    from datasets import load_dataset_builder

    files = load_dataset_builder(str(path), name=config).config.data_files or {}
    read = set()
    for of_split in files.values():
        read |= {os.path.realpath(str(file)) for file in of_split}
    unread = [file for file in _data_in(path) if os.path.realpath(file) not in read]
    formats = {_format_of(Path(file)) for file in read}
    readers = {str(_reader_of(Path(file))) for file in read}
    others = {_format_of(file) for file in unread if _reader_of(file)} - {None, *formats}
    if others - {"text"} or (others and formats == {"text"}):
        names = _listed([file.relative_to(path).as_posix() for file in unread if _format_of(file) in others])
        raise UsageError(
            f"the folder '{path}' has files of several formats, of which `datasets` reads only one "
            f"({', '.join(sorted(map(str, formats)))}) and leaves out {names}: name one file, or move the others"
        )
    odd = []
    for file in map(Path, sorted(read)):
        if _reader_of(file) is None and _inner_reader(file):
            odd.append(file.name)
    return _Read(
        formats=frozenset(readers),
        unread=tuple(file.relative_to(path).as_posix() for file in unread),
        odd=tuple(odd),
        mapped=_has_columns(path / "dataset_info.json"),
    )


def _has_columns(file: Path) -> bool:
    """Whether a file describes data sets for LLaMA-Factory, and other columns than those of its own formats."""
    try:
        described = parse_json(read_text(file))
    except (OSError, ValueError):
        return False
    if not isinstance(described, dict):
        return False
    for dataset in described.values():
        if isinstance(dataset, dict) and "file_name" in dataset and ("columns" in dataset or "tags" in dataset):
            return True
    return False


def _inner_reader(file: Path) -> bool:
    return any(suffix.lower() in _READERS for suffix in file.suffixes[:-1])


def _data_in(path: Path) -> list[Path]:
    """Files of a folder that may hold rows, those of formats that are not read among them."""
    there = []
    for file in sorted(path.rglob("*")):
        inside = file.relative_to(path)
        hidden = any(part.startswith(".") for part in inside.parts[:-1])
        if file.name not in _ABOUT_DATA and not hidden and file.is_file():
            there.append(file)
    return [file for file in there if _reader_of(file) or file.suffix.lower() not in _NO_DATA]


_ABOUT_DATA = ("config.json", "dataset_info.json", "dataset_infos.json", "dataset_dict.json", "state.json")
_PICTURES = ("jpg", "jpeg", "png", "gif", "webp", "bmp", "tif", "tiff", "svg", "mp3", "wav", "flac", "mp4")
_NOTES = ("md", "rst", "py", "sh", "ipynb", "html", "lock", "gitattributes", "gitignore", "yaml", "yml")
_NO_DATA = frozenset({"", *(f".{name}" for name in (*_PICTURES, *_NOTES))})


def _format_of(file: Path) -> str | None:
    """The reader of a file, one of their own for those that are separated by tabs."""
    if _is_tabbed(file):
        return "tsv"
    return _reader_of(file) or file.suffix.lower().removeprefix(".") or None


_OPTIONS: dict[str, dict[str, Any]] = {
    "text": {"encoding": "utf-8-sig"},  # a mark of the order of bytes is no text
    "csv": {"keep_default_na": False, "na_values": [""]},  # a word such as NA or null is a word
}
"""What a reader is told beside the names of its files."""


def _options(file: Path) -> dict[str, Any]:
    options: dict[str, Any] = {**_OPTIONS.get(str(_reader_of(file)), {})}
    if _is_tabbed(file):
        options["sep"] = "\t"
    return options


def _is_tabbed(file: Path) -> bool:
    return ".tsv" in [suffix.lower() for suffix in file.suffixes[-2:]]


def _listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - 5} more" if len(names) > 5 else ""
    return ", ".join(names[:5]) + more


def _check_card(card: Path, named: str = "") -> None:
    """Refuse the metadata of a README.md, which `datasets` reads, before its aliases or its types do harm.

    ``named``: what to call it; without, by its path.
    """
    if not os.path.lexists(card):
        return
    try:
        front = re.match(r"\s*---[ ]*\n(.*?)\n---", read_text(card), re.DOTALL)
        parse_yaml(front[1] if front else "")
    except (OSError, ValueError, YAMLError) as error:
        problem = getattr(error, "problem", None) or error
        fix = "correct it, or move it away"
        if named:
            fix = "take another dataset, or download its data files and name one"
        raise UsageError(f"{named or card}: its metadata cannot be read: {problem}; {fix}") from error


def _check_hub_card(name: str) -> None:
    """`_check_card` for a dataset on the Hub, or in its cache, which `datasets` reads from there."""
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError

    try:
        card = hf_hub_download(name, "README.md", repo_type="dataset")
    except (HfHubHTTPError, HFValidationError, OSError):
        return  # there is none, or `load_dataset` says why it cannot be had
    _check_card(Path(card), f"{name}: README.md")


def _is_saved(path: Path) -> bool:
    """Whether `Dataset.save_to_disk` or `DatasetDict.save_to_disk` wrote this folder."""
    return any(os.path.isfile(path / name) for name in ("dataset_dict.json", "state.json"))


def _load_from_hub(name: str, *, config: str | None, streaming: bool) -> dict[str, Rows]:
    from datasets import load_dataset
    from datasets.exceptions import DatasetNotFoundError
    from huggingface_hub.errors import HFValidationError

    _check_hub_card(name)
    try:
        return dict(load_dataset(name, name=config, streaming=streaming))
    except (ConnectionError, DatasetNotFoundError, FileNotFoundError, HFValidationError) as error:
        why = unwritable("datasets")
        if why:
            raise UsageError(f"the dataset '{name}' could not be read, for the cache {why}") from error
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

    foreign = (
        *(DatasetsError, pa.ArrowException, OSError, ValueError, TypeError, EOFError, StopIteration, RuntimeError),
        YAMLError,  # of its README.md
    )
    level = logging.get_verbosity()
    logging.set_verbosity(logging.CRITICAL)
    try:
        yield
    except foreign as error:
        cause = error.__cause__ or error
        raise UsageError(_explanation(name, _files_of(name) if files is None else files, cause)) from error
    finally:
        logging.set_verbosity(level)


def _explanation(name: str, files: Sequence[Path], cause: BaseException) -> str:
    """One line for an error of `datasets` while reading `name`: the fault of its files where one is found."""
    if isinstance(cause, OSError):
        why = unwritable("datasets")
        if why:
            return f"the dataset '{name}' could not be read, for the cache {why}"
    for file in files:
        fault = _find_fault(file, str(cause))
        if fault:
            return fault
    if len(files) > 1:
        unlike = _unlike_columns(files)
        if unlike:
            return f"the dataset '{name}' could not be read: {unlike}"
    text = " ".join(str(cause).split())[:300] or type(cause).__name__
    path = expand_user(name)
    if os.path.isdir(path):
        odd = [file.name for file in _data_in(path) if not _reader_of(file)]
        if odd:
            text += f" (files that are not supported: {_listed(odd)})"
    return f"the dataset '{name}' could not be read: {text}"


def _files_of(name: str) -> list[Path]:
    path = expand_user(name)
    files: list[Path] = []
    if os.path.isfile(path) or _is_saved(path):
        files = [path]
    elif os.path.isdir(path):  # a name may be too long for a question of pathlib's
        files = sorted(path.rglob("*"))
    return [file for file in files if file.is_file() and _reader_of(file)]


def fault_of_stream(names: Sequence[str], error: Exception) -> UsageError | None:
    """What is wrong with the files of a stream, as one line, if `datasets` has raised the error while it read on.

    A loader's worker has the traceback in the text of its error.
    """
    frames = [frame.filename for frame in traceback.extract_tb(error.__traceback__)]
    worker = str(error).startswith("Caught ")
    if not any(name.endswith(_STREAMS) for name in frames) and not (worker and _STREAMS in str(error)):
        return None
    try:
        files: list[Path] = []
        for name in names:
            files += _files_of(name)
        with _explained(", ".join(names), files=files):
            raise error
    except UsageError as fault:
        return fault
    except Exception:  # of the rows' conversion: not the file's
        return None


_STREAMS = "datasets/iterable_dataset.py"


def _pick(splits: dict[str, Rows], split: str, *, flag: str, name: str) -> Rows:
    from datasets import Dataset

    if split not in splits:
        raise UsageError(f"'{name}' has no split '{split}', only {', '.join(splits)}: choose one with {flag} NAME")
    rows = splits[split]
    with _explained(name):
        count = len(rows) if isinstance(rows, Dataset) else len(list(islice(rows, 1)))
    if count == 0:
        raise UsageError(f"the dataset '{name}' is empty: its split '{split}' has no rows")
    return rows


def _divide(rows: Rows, size: float | int | Literal["auto"], *, seed: int, name: str) -> tuple[Rows, Rows]:
    from datasets import Dataset

    if size == "auto":
        few = isinstance(rows, Dataset) and round(_AUTO_SHARE * len(rows)) < _AUTO_ROWS
        size = _AUTO_SHARE if few else _AUTO_ROWS
    is_share = size < 1
    count = int(size)
    if not isinstance(rows, Dataset):
        if is_share:
            raise UsageError(f"--eval_split_size {size}: a streamed dataset has no known length, give a number of rows")
        return rows.skip(count), rows.take(count)
    if is_share:
        count = max(1, round(size * len(rows)))
    if count >= len(rows):
        raise UsageError(f"--eval_split_size {size} takes {count} of the {len(rows)} rows of '{name}': none are left")
    parts = rows.train_test_split(test_size=count, seed=seed)
    return parts["train"], parts["test"]


def _describe(name: str, train: Rows, evaluation: Rows | None, origin: str = "") -> str:
    text = f"{name}: training on {_size_of(train)}"
    if evaluation:
        text += f", evaluation on {_size_of(evaluation)} ({origin})"
    return text


def _size_of(rows: Rows) -> str:
    return count_of(len(rows), "row") if hasattr(rows, "__len__") else "streamed rows"


# ---- why a local data file cannot be read ----------------------------------------------------------------------------
#
# Only after `datasets` has failed, whose parsers report positions within a block, or none.


def _reader_of(path: Path) -> str | None:
    """The `datasets` reader for this file name, or None where the suffix is not supported."""
    suffixes = [suffix.lower() for suffix in path.suffixes]
    is_compressed = suffixes[-1:] == [".gz"]
    if is_compressed:
        suffixes.pop()
    if not suffixes:
        return None
    reader = _READERS.get(suffixes[-1])
    if is_compressed and reader == "parquet":
        return None
    return reader


def _cannot_be_opened(path: Path) -> str | None:
    try:
        if os.path.isdir(path):
            next(path.iterdir(), None)
        elif os.path.isfile(path):
            path.open("rb").close()
            if not path.stat().st_size:
                return f"{path} is empty (0 bytes)"
    except PermissionError:
        return f"'{path}' may not be read (permission denied)"
    return None


def _find_fault(path: Path, reported: str = "") -> str | None:
    """What is wrong with a data file, with the line; None if nothing was found. ``reported``: by `datasets`."""
    try:
        fault = _cannot_be_opened(path)
        if fault or _reader_of(path) == "parquet":
            return fault
        with gzip.open(path) if path.suffix.lower() == ".gz" else path.open("rb") as file:
            fault = _fault_in_text(file, _reader_of(path))
            if fault is None and "JSON parse error" in reported:
                file.seek(0)
                fault = _fault_for_arrow(file)
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        fault = f" is cut off or damaged: {error}"
        if "Not a gzipped file" in str(error):
            fault = " is not compressed, as its name says: rename it"
    if not fault:
        return None
    return f"{path}{fault}"


def _pointer_in(path: Path) -> str | None:
    """The first data file that is not there itself, which a clone without Git LFS leaves."""
    files = []
    if os.path.isfile(path):
        files = [path]
    elif os.path.isdir(path):
        files = sorted(path.rglob("*"))[:_COMPARED]
    for file in files:
        small = _reader_of(file) and file.is_file() and file.stat().st_size < _POINTER
        if small and file.read_bytes().startswith(b"version https://git-lfs"):
            return f"{file} is a pointer of Git LFS and not the file itself: run `git lfs pull` there"
    return None


_POINTER = 1024  # bytes; a pointer has about 130


def _fault_in_text(file: Any, reader: str | None) -> str | None:
    """JSON is one array, or has a row on each line."""
    head = file.read(1024)
    array = reader == "json" and head.lstrip(b"\xef\xbb\xbf \t\r\n").startswith(b"[") and not _are_lists(head)
    if _wide(head):
        return f" is not UTF-8: half of its bytes are zero; {_to_convert(head, head)}"
    file.seek(0)
    number = 0
    lines = [file.read()] if array else file
    for number, line in enumerate(lines, start=1):
        try:
            if number > 1 and line.startswith(codecs.BOM_UTF8):
                return f", line {number} begins with a byte order mark (files put together?): remove it there"
            text = line.decode("utf-8-sig").rstrip()
            content: Any = {}
            if reader == "json" and text:
                content = json.loads(text, object_pairs_hook=_without_doubles)
        except UnicodeDecodeError as error:
            at = number + line.count(b"\n", 0, error.start)
            return f" is not UTF-8: byte 0x{line[error.start]:02x} in line {at}; {_to_convert(head, line)}"
        except json.JSONDecodeError as error:
            return f", line {number + error.lineno - 1}, column {error.colno}: not valid JSON ({error.msg})"
        except _DoubleKeyError as error:
            return f", line {number}: the key {error.args[0]!r} is given twice in one object"
        except RecursionError:
            return f", line {number}: its lists and objects are nested too deeply"
        if array and not content:
            return " has no rows, an empty list"
        rows = content if array else [content]
        for row in rows:
            if not isinstance(row, dict):
                return f", line {number}: a row has to be a JSON object, this is a {type(row).__name__}"
    if reader == "csv" and number == 1:
        return " has a header and no rows"
    return None


def _are_lists(head: bytes) -> bool:
    """Whether the first line of a file is a list by itself, and another one follows."""
    lines = [line for line in head.lstrip(b"\xef\xbb\xbf").splitlines()[:2] if line.strip()]
    return len(lines) == 2 and all(line.startswith(b"[") for line in lines) and lines[0].rstrip().endswith(b"]")


class _DoubleKeyError(Exception):
    """The argument is the key."""


def _without_doubles(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """As Arrow, which refuses what Python's reader takes the last of."""
    content: dict[str, Any] = {}
    for key, value in pairs:
        if key in content:
            raise _DoubleKeyError(key)
        content[key] = value
    return content


def _encoding_of(head: bytes, line: bytes) -> str | None:
    """The likely encoding of text that is not UTF-8, by its bytes; None: it is not told by them."""
    for encoding, mark in (("utf-32", codecs.BOM_UTF32_LE), ("utf-32", codecs.BOM_UTF32_BE)):
        if head.startswith(mark):
            return encoding
    if head.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        return "utf-16"
    wide = _wide(head)
    if wide is not None:
        return wide
    if re.search(rb"[\x80-\xff]{4}", line):  # words of such letters: no alphabet of western Europe
        return None
    try:
        line.decode("cp1252")  # quotes, dashes and the euro from 0x80 to 0x9f; control characters in Latin-1
    except UnicodeDecodeError:
        return "latin1"
    return "windows-1252"


def _wide(head: bytes) -> str | None:
    """UTF-16 without a mark of its order, known by the zero bytes of ASCII's letters."""
    if head[1::2].count(0) > len(head) // 4:
        return "utf-16le"
    if head[::2].count(0) > len(head) // 4:
        return "utf-16be"
    return None


def _to_convert(head: bytes, line: bytes) -> str:
    """What to do about text that is not UTF-8."""
    encoding = _encoding_of(head, line)
    if encoding is None:
        return "it is of no alphabet of western Europe: find its encoding and convert it, `iconv -f ENCODING -t utf-8`"
    like = "" if encoding.startswith("utf") else ", or an encoding like it"
    return f"it looks like {encoding}{like}, convert it: `iconv -f {encoding} -t utf-8`"


def _fault_for_arrow(file: Any) -> str | None:
    """The first line that Arrow's reader does not take, by itself; its own numbers count from 0 within a block."""
    import pyarrow as pa
    from pyarrow import json as arrow_json

    for number, line in enumerate(file, start=1):
        if not line.strip():
            continue
        try:
            arrow_json.read_json(pa.BufferReader(line))
        except pa.ArrowInvalid as error:
            text = re.sub(r" in row \d+$", "", str(error).partition("JSON parse error: ")[2] or str(error))
            return f", line {number}: {text.rstrip('.')}"
    return None


def _unlike_columns(files: Sequence[Path]) -> str | None:
    """Which of several files has other columns than the first, or columns of another type; None: none has."""
    from datasets import load_dataset

    known: dict[str, Any] = {}
    for file in files[:_COMPARED]:
        if _is_tabbed(file) != _is_tabbed(files[0]):
            tabs, commas = (file, files[0]) if _is_tabbed(file) else (files[0], file)
            return f"{tabs} is separated by tabs, unlike {commas}: name one file, or move the others"
        try:
            named = glob.escape(str(file.absolute()))
            rows = load_dataset(str(_reader_of(file)), data_files=named, split="train", **_options(file))
        except (ValueError, OSError, RuntimeError):  # this file is what is wrong, and not beside the others
            continue
        types = {name: str(kind) for name, kind in rows.features.items()}
        if not known:
            first = file
            known = types
        lacking = known.keys() - types.keys()
        added = types.keys() - known.keys()
        if lacking or added:
            what = "lacks" if lacking else "also has"
            listed = ", ".join(repr(name) for name in sorted(lacking or added))
            return f"{file} {what} {listed}, unlike {first}: give all files the same columns"
        for name in known:
            if known[name] != types[name] and "List(" in known[name]:
                return f"'{name}' of {file} holds objects with other keys than in {first}: put the rows into one file"
            if known[name] != types[name]:
                return f"column '{name}' of {file} holds {types[name]}, and of {first} {known[name]}"
    return None


_COMPARED = 100  # files
