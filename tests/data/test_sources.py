"""A mistake in the dataset argument is one exact line; every kind of source gives the same rows."""

from __future__ import annotations

import gc
import gzip
import json
import os
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from datasets import Dataset, DatasetDict, IterableDataset, config, disable_progress_bars
from trl import DatasetMixtureConfig
from trl.scripts.utils import DatasetConfig

from hf_rocm_tune.data.sources import has_pictures, load_mixture, load_source
from hf_rocm_tune.errors import UsageError
from tests import tiny

disable_progress_bars()


@pytest.fixture(autouse=True)
def private_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`datasets` reads its cache folder at import, so the variable would come too late."""
    monkeypatch.setattr(config, "HF_DATASETS_CACHE", tmp_path / "cache")


def refusal(name: str | Path, **arguments: object) -> str:
    with pytest.raises(UsageError) as caught:
        load_source(str(name), **arguments)  # type: ignore[arg-type]
    message = str(caught.value)
    assert caught.value.exit_code == 2
    assert "\n" not in message
    return message


TEXTS = ["first", "second", "third"]


def _write_csv(path: Path) -> None:
    path.write_text("text\n" + "\n".join(TEXTS) + "\n")


def _write_parquet(path: Path) -> None:
    Dataset.from_dict({"text": TEXTS}).to_parquet(str(path))


def _jsonl() -> str:
    return "".join(json.dumps({"text": text}) + "\n" for text in TEXTS)


WRITERS: dict[str, Callable[[Path], object]] = {
    "rows.jsonl": lambda path: path.write_text(_jsonl()),
    "rows.JSONL": lambda path: path.write_text(_jsonl()),
    "odd [1] name*.jsonl": lambda path: path.write_text(_jsonl()),
    "rows.json": lambda path: path.write_text(json.dumps([{"text": text} for text in TEXTS])),
    "rows.csv": _write_csv,
    "rows.tsv": lambda path: path.write_text("text\tmore\n" + "".join(f"{text}\tx\n" for text in TEXTS)),
    "rows.ndjson": lambda path: path.write_text(_jsonl()),
    "rows.parquet": _write_parquet,
    "rows.txt": lambda path: path.write_text("\n".join(TEXTS) + "\n"),
    "rows.jsonl.gz": lambda path: path.write_bytes(gzip.compress(_jsonl().encode())),
    "folder": lambda path: (path.mkdir(), (path / "train.jsonl").write_text(_jsonl())),
    "saved": lambda path: Dataset.from_dict({"text": TEXTS}).save_to_disk(str(path)),
    "saved_dict": lambda path: DatasetDict(train=Dataset.from_dict({"text": TEXTS})).save_to_disk(str(path)),
}


# The streaming CSV reader of `datasets` leaves its file to the garbage collector:
# https://github.com/huggingface/datasets/pull/2635
@pytest.mark.filterwarnings("ignore:Exception ignored in.*rows.[ct]sv:pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize("name", WRITERS)
def test_every_kind_of_source_gives_its_rows_in_order(tmp_path: Path, name: str, streaming: bool) -> None:
    WRITERS[name](tmp_path / name)
    splits = load_source(str(tmp_path / name), streaming=streaming)
    assert isinstance(splits.train, IterableDataset if streaming else Dataset)
    assert [row["text"] for row in splits.train] == TEXTS
    assert splits.eval is None
    del splits
    gc.collect()  # so that a file left open is reported here, and not in a later test


@pytest.mark.parametrize(("size", "expected"), [(0.25, 4), (3, 3), (0.001, 1)])
def test_rows_split_off_are_disjoint_complete_and_repeatable(tmp_path: Path, size: float, expected: int) -> None:
    path = tiny.write_text_jsonl(tmp_path / "a.jsonl", 16)
    first, second = (load_source(str(path), need_eval=True, eval_split_size=size, seed=3) for _ in range(2))
    train, evaluation = set(first.train["text"]), set(first.eval["text"])
    assert len(evaluation) == expected
    assert not train & evaluation
    assert len(train | evaluation) == 16
    assert list(first.eval["text"]) == list(second.eval["text"])


def test_streamed_rows_split_off_are_the_first_ones(tmp_path: Path) -> None:
    path = tiny.write_text_jsonl(tmp_path / "a.jsonl", 8)
    splits = load_source(str(path), streaming=True, need_eval=True, eval_split_size=2)
    assert (len(list(splits.train)), len(list(splits.eval))) == (6, 2)


@pytest.mark.parametrize(
    ("size", "streaming", "part"),
    [(8, False, "takes 8 of the 8 rows"), (0.5, True, "give a number of rows")],
)
def test_impossible_split_sizes_are_refused(tmp_path: Path, size: float, streaming: bool, part: str) -> None:
    path = tiny.write_text_jsonl(tmp_path / "a.jsonl", 8)
    message = refusal(path, need_eval=True, eval_split_size=size, streaming=streaming)
    assert part in message
    assert f"--eval_split_size {size}" in message


def test_missing_splits_are_listed_with_the_flag(tmp_path: Path) -> None:
    folder = tiny.write_dataset_dir(tmp_path / "chat")
    assert refusal(folder, train_split="trian") == (
        f"'{folder}' has no split 'trian', only train, test: choose one with --dataset_train_split NAME"
    )
    single = tiny.write_text_jsonl(tmp_path / "a.jsonl", 3)
    message = refusal(single, need_eval=True)
    assert "has no split 'test', only train" in message
    assert "--dataset_test_split NAME" in message
    assert "--eval_split_size 0.05" in message


@pytest.mark.parametrize(("rows", "expected"), [(2, 1), (200, 10), (9_000, 200)])
def test_an_automatic_share_is_split_off_where_there_is_no_split(tmp_path: Path, rows: int, expected: int) -> None:
    (tmp_path / "mine.jsonl").write_text("".join(f'{{"text": "row {number}"}}\n' for number in range(rows)))
    loaded = load_source(str(tmp_path / "mine.jsonl"), need_eval=True, eval_split_size="auto")
    assert (len(loaded.train), len(loaded.eval or ())) == (rows - expected, expected)
    assert "split off from 'train'" in loaded.description


def test_an_automatic_share_leaves_a_split_that_is_there_or_named(tmp_path: Path) -> None:
    folder = tmp_path / "chats"
    folder.mkdir()
    for split, count in (("train", 40), ("test", 3)):
        (folder / f"{split}.jsonl").write_text('{"text": "a"}\n' * count)
    loaded = load_source(str(folder), need_eval=True, eval_split_size="auto")
    assert (len(loaded.train), len(loaded.eval or ())) == (40, 3)
    message = refusal(folder / "train.jsonl", need_eval=True, eval_split_size="auto", test_split="validation")
    assert "has no split 'validation'" in message


@pytest.mark.parametrize("name", ["./nowhere", "/no/such/folder/at/all", "missing.jsonl", "data/missing.parquet"])
def test_a_missing_path_is_not_looked_for_on_the_hub(name: str) -> None:
    assert refusal(name).startswith(f"no such file or folder: '{name}'")


def test_an_unknown_hub_id_names_both_possibilities(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(config, "HF_HUB_OFFLINE", True)
    message = refusal("nobody/nothing-of-the-kind")
    assert "no dataset 'nobody/nothing-of-the-kind': there is no file or folder of that name" in message
    assert "either does not have it" in message
    assert "HF_HUB_OFFLINE" in message


BOM = b"\xef\xbb\xbf"
TABLES: dict[str, tuple[str, bytes, list[dict[str, Any]]]] = {
    "a byte order mark is no text": (
        "a.txt",
        BOM + b"moles\nworms\n",
        [{"text": "moles"}, {"text": "worms"}],
    ),
    "words that other programs take for nothing": (
        "a.csv",
        b"prompt,input,completion\nNA,null,None\nq,,a\n",
        [
            {"prompt": "NA", "input": "null", "completion": "None"},
            {"prompt": "q", "input": None, "completion": "a"},
        ],
    ),
    "such words between tabs": ("a.tsv", b"prompt\tcompletion\nq\tnan\n", [{"prompt": "q", "completion": "nan"}]),
}


@pytest.mark.parametrize("place", ["file", "folder", "mixture"])
@pytest.mark.parametrize("case", TABLES)
def test_text_is_read_as_it_stands(tmp_path: Path, case: str, place: str) -> None:
    name, content, rows = TABLES[case]
    (tmp_path / "rows").mkdir()
    file = tmp_path / "rows" / name
    file.write_bytes(content)
    source = file if place == "file" else file.parent
    read = load(DatasetConfig(path=str(file))) if place == "mixture" else load_source(str(source))
    assert list(read.train) == rows
    assert read.in_csv == (name != "a.txt")


def test_tables_and_other_files_are_parts_of_one_mixture(tmp_path: Path) -> None:
    (tmp_path / "a.tsv").write_text("prompt\tcompletion\nmoles\tdig\n")
    (tmp_path / "b.csv").write_text("prompt,completion\nworms,turn\n")
    (tmp_path / "c.jsonl").write_text('{"prompt": "roots", "completion": "grow"}\n')
    mixed = load(*(DatasetConfig(path=str(tmp_path / name)) for name in ("a.tsv", "b.csv", "c.jsonl")))
    assert list(mixed.train["completion"]) == ["dig", "turn", "grow"] and mixed.in_csv


@pytest.mark.parametrize(("name", "in_csv"), [("a.csv", True), ("a.jsonl", False)])
def test_rows_of_a_mixture_count_as_a_table_where_one_of_its_folders_has_one(
    tmp_path: Path, name: str, in_csv: bool
) -> None:
    folders = [tmp_path / "first", tmp_path / "second"]
    for folder, file in zip(folders, (name, "b.jsonl"), strict=True):
        folder.mkdir()
        (folder / file).write_text("text\nworms\n" if file.endswith("csv") else '{"text": "moles"}\n')
    mixed = load(*(DatasetConfig(path=str(folder)) for folder in folders))
    assert len(mixed.train) == 2 and mixed.in_csv == in_csv


def test_a_part_that_is_not_utf_8_is_named(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(b'{"text": "taupini\xe8re"}\n')
    (tmp_path / "b.jsonl").write_text(_jsonl())
    with pytest.raises(UsageError, match=r"a\.jsonl is not UTF-8: byte 0xe8 in line 1"):
        load(*(DatasetConfig(path=str(tmp_path / name)) for name in ("a.jsonl", "b.jsonl")))


def test_a_mixture_tells_of_its_folders_what_is_not_read(tmp_path: Path) -> None:
    for name in ("train.jsonl", "moles.jsonl", "other/a.txt", "other/b.txt"):
        (tmp_path / "rows" / name).parent.mkdir(exist_ok=True, parents=True)
        (tmp_path / "rows" / name).write_text(_jsonl() if "jsonl" in name else "moles\n")
    mixed = load(DatasetConfig(path=str(tmp_path / "rows")))
    assert mixed.notes == [
        f"warning: the folder '{tmp_path / 'rows'}': not read are moles.jsonl, other/a.txt, other/b.txt",
    ]
    assert len(mixed.train) == len(TEXTS)
    texts = load(DatasetConfig(path=str(tmp_path / "rows" / "other")))
    assert list(texts.train["text"]) == ["moles", "moles"] and not texts.notes
    (tmp_path / "rows" / "worms.csv").write_text("text\nworms\n")
    with pytest.raises(UsageError, match=r"leaves out .*worms\.csv"):
        load(DatasetConfig(path=str(tmp_path / "rows")))


def test_columns_that_another_toolkit_would_rename_are_told(tmp_path: Path) -> None:
    folder = tmp_path / "rows"
    folder.mkdir()
    (folder / "moles.json").write_text(_jsonl())
    described = {"moles": {"file_name": "moles.json", "columns": {"prompt": "text"}}}
    for content, said in (
        (described, True),
        ({"moles": {"file_name": "moles.json"}}, False),
        ({"features": {}}, False),
    ):
        (folder / "dataset_info.json").write_text(json.dumps(content))
        assert ("dataset_info.json says" in " ".join(load_source(str(folder)).notes)) == said


BROKEN: dict[str, tuple[str, bytes, list[str]]] = {
    "broken line": ("a.jsonl", b'{"text":"a"}\n\n{"text": oops}\n', ["a.jsonl, line 3, column 10: not valid JSON"]),
    "rows are numbers": ("a.jsonl", b"1\n2\n", ["line 1: a row has to be a JSON object, this is a int"]),
    "cut off array": ("a.json", b'[{"text":"a"},\n{"text":"b"', ["a.json, line 2, column 12: not valid JSON"]),
    "a list a line": ("a.jsonl", b'[{"a": 1}, {"b": 2}]\n[]\n', ["line 1: a row has to be a JSON object", "a list"]),
    "not compressed": ("a.csv.gz", b"text\na\n", ["a.csv.gz is not compressed, as its name says"]),
    "array of nothing": ("a.json", b"[]", ["a.json has no rows, an empty list"]),
    "no bytes": ("a.jsonl", b"", ["a.jsonl is empty (0 bytes)"]),
    "ragged csv": ("a.csv", b"a,b\n1,2\n3,4,5\n", ["Expected 2 fields in line 3, saw 3"]),
    "csv header only": ("a.csv", b"text\n", ["a.csv has a header and no rows"]),
    "latin-1 jsonl": ("a.jsonl", b'{"text":"a"}\n{"text":"caf\xe9"}\n', ["byte 0xe9 in line 2"]),
    "a key given twice": (
        "a.jsonl",
        b'{"text": "a"}\n{"text": "a", "text": "b"}\n',
        ["line 2: the key 'text' is given"],
    ),
    "a broken surrogate": ("a.jsonl", b'{"text": "a"}\n{"text": "\\ud83d"}\n', ["line 2: The surrogate"]),
    "UTF-16": ("a.jsonl", _jsonl().encode("utf-16"), ["`iconv -f utf-16 -t utf-8`"]),
    "Windows-1252": ("a.jsonl", b'{"text": "\x93moles\x94"}\n', ["`iconv -f windows-1252 -t utf-8`"]),
    "UTF-32": ("a.jsonl", _jsonl().encode("utf-32"), ["`iconv -f utf-32 -t utf-8`"]),
    "UTF-16 without a mark": ("a.csv", "text\nmoles\n".encode("utf-16-be"), ["`iconv -f utf-16be -t utf-8`"]),
    "Cyrillic": ("a.txt", "кроты".encode("koi8-r"), ["byte 0xcb in line 1", "find its encoding", "iconv -f ENCODING"]),
    "a pointer to a parquet": ("a.parquet", b"version https://git-lfs.github.com/spec/v1\n", ["git lfs pull"]),
    "latin-1 text": ("a.txt", b"ok\ncaf\xe9\n", ["a.txt is not UTF-8: byte 0xe9 in line 2", "iconv"]),
    "cut off gzip": ("a.jsonl.gz", gzip.compress(_jsonl().encode())[:-8], ["a.jsonl.gz is cut off or damaged"]),
    "files put together": (
        "a.jsonl",
        BOM + b'{"text": "a"}\n' + BOM + b'{"text": "b"}\n',
        ["a.jsonl, line 2 begins with a byte order mark"],
    ),
    "not a parquet": ("a.parquet", b"text,text,text,text", ["a.parquet", "Parquet magic bytes not found"]),
    "unsupported suffix": ("a.xlsx", b"x", ["unsupported suffix", ".jsonl .json .ndjson .csv .tsv .parquet .txt"]),
}


UNREAD: dict[str, tuple[str, str]] = {
    "a table of another program": ("moles.ods", "not read are moles.ods"),
    "a name of its own": ("moles.part2", "not read are moles.part2"),
    "what `datasets` writes": ("dataset_infos.json", ""),
    "a picture": ("mole.JPG", ""),
    "in a hidden folder": (".git/moles.jsonl", ""),
}


@pytest.mark.parametrize("case", UNREAD)
def test_files_of_a_folder_that_may_hold_rows_and_are_not_read_are_named(tmp_path: Path, case: str) -> None:
    name, said = UNREAD[case]
    folder = tmp_path / "rows"
    (folder / name).parent.mkdir(parents=True)
    (folder / name).write_text("{}\n")
    (folder / "moles.jsonl").write_text(_jsonl())
    notes = " ".join(load_source(str(folder)).notes)
    assert said in notes if said else not notes


FOLDERS: dict[str, tuple[dict[str, str], str]] = {
    "unlike columns": (
        {"a.jsonl": '{"text": "a"}\n', "b.jsonl": '{"text": "a", "at": "b"}\n'},
        "b.jsonl also has 'at'",
    ),
    "unlike messages": (
        {"a.jsonl": '{"m": [{"role": "a"}]}\n', "b.jsonl": '{"m": [{"role": "a", "weight": 1}]}\n'},
        "b.jsonl holds objects with other keys than in",
    ),
    "several formats": ({"a.jsonl": '{"text": "a"}\n', "b.csv": "text\nmoles\n"}, "leaves out b.csv"),
    "notes that outvote the rows": ({"a.jsonl": '{"text": "a"}\n', "b.txt": "x", "c.txt": "y"}, "leaves out a.jsonl"),
    "only a test split": (
        {"a.jsonl": '{"text": "a"}\n', "mole_eval.jsonl": '{"text": "a"}\n'},
        "a.jsonl belong to none: rename them",
    ),
}


@pytest.mark.parametrize("case", FOLDERS)
def test_files_of_a_folder_that_do_not_belong_together_are_named(tmp_path: Path, case: str) -> None:
    files, said = FOLDERS[case]
    folder = tmp_path / "rows"
    folder.mkdir()
    for name, text in files.items():
        (folder / name).write_text(text)
    assert said in refusal(folder)


def test_tables_separated_by_tabs_and_by_commas_are_two_formats(tmp_path: Path) -> None:
    folder = tmp_path / "rows"
    folder.mkdir()
    (folder / "moles.csv").write_text("text,more\na,b\n")
    (folder / "worms.tsv").write_text("text\tmore\na\tb\n")
    assert "worms.tsv is separated by tabs, unlike" in refusal(folder)


@pytest.mark.parametrize("case", BROKEN)
def test_a_damaged_file_is_named_with_the_place(tmp_path: Path, case: str) -> None:
    name, content, parts = BROKEN[case]
    (tmp_path / name).write_bytes(content)
    message = refusal(tmp_path / name)
    assert all(part in message for part in parts), message


def test_the_damaged_file_of_a_folder_is_the_one_named(tmp_path: Path) -> None:
    folder = tiny.write_dataset_dir(tmp_path / "chat")
    (folder / "test.jsonl").write_text('{"messages": [}\n')
    assert f"{folder / 'test.jsonl'}, line 1" in refusal(folder)


def test_a_saved_dataset_without_its_data_is_refused(tmp_path: Path) -> None:
    Dataset.from_dict({"text": TEXTS}).save_to_disk(str(tmp_path / "saved"))
    next((tmp_path / "saved").glob("*.arrow")).unlink()
    assert "could not be read" in refusal(tmp_path / "saved")


@pytest.fixture
def open_folder() -> Iterator[Path]:
    """A folder that other users may enter, unlike pytest's own."""
    with tempfile.TemporaryDirectory() as name:
        Path(name).chmod(0o755)
        yield Path(name)


@pytest.mark.parametrize("kind", ["file", "folder"])
def test_a_source_without_permission_says_so(open_folder: Path, kind: str) -> None:
    path = open_folder / ("a.jsonl" if kind == "file" else "rows")
    tiny.write_text_jsonl(path if kind == "file" else path / "train.jsonl", 3)
    path.chmod(0)
    user = os.geteuid()
    if user == 0:  # the superuser reads everything: step down for the attempt
        os.seteuid(65534)
    try:
        assert refusal(path) == f"'{path}' may not be read (permission denied)"
    finally:
        os.seteuid(user)
        path.chmod(0o755)


# ---- pictures -------------------------------------------------------------------------------------------------


PICTURED: dict[str, tuple[dict[str, Any], bool]] = {
    "a column": ({"text": "what?", "images": []}, True),
    "a part of a message": ({"messages": [{"role": "user", "content": [{"type": "image", "text": None}]}]}, True),
    "a part of a conversation's turn": ({"conversations": [{"from": "human", "value": [{"type": "video"}]}]}, True),
    "a part of a prompt": ({"prompt": [{"role": "user", "content": [{"type": "image_url"}]}], "completion": []}, True),
    "a part of a rejected answer": (
        {"prompt": "q", "chosen": "a", "rejected": [{"role": "assistant", "content": [{"type": "image"}]}]},
        True,
    ),
    "parts of text": ({"messages": [{"role": "user", "content": [{"type": "text", "text": "image"}]}]}, False),
    "text": ({"messages": [{"role": "user", "content": "image"}]}, False),
    "no messages": ({"text": "image"}, False),
}


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize("case", PICTURED)
def test_pictures_are_found_in_columns_and_in_parts_of_messages(tmp_path: Path, case: str, streaming: bool) -> None:
    row, pictured = PICTURED[case]
    (tmp_path / "rows.jsonl").write_text(json.dumps(row) + "\n")
    rows = load_source(str(tmp_path / "rows.jsonl"), streaming=streaming).train
    assert has_pictures(rows) == pictured


# ---- the `datasets:` list of a recipe -------------------------------------------------------------------------


@pytest.fixture
def part(tmp_path: Path) -> Any:
    """Makes a part of a mixture: a JSONL file of messages."""

    def make(name: str, rows: int) -> DatasetConfig:
        file = tiny.write_messages_jsonl(tmp_path / f"{name}.jsonl", rows, seed=rows)
        return DatasetConfig(path="json", data_files=str(file), split="train")

    return make


def load(*parts: DatasetConfig, need_eval: bool = False, **options: Any) -> Any:
    mixture = DatasetMixtureConfig(datasets=list(parts), **options)
    return load_mixture(mixture, train_split="train", test_split="test", need_eval=need_eval, seed=42)


def test_a_part_is_split_off_for_the_evaluation_the_same_every_time(part: Any) -> None:
    parts = part("a", 12), part("b", 8)
    splits, again = (load(*parts, need_eval=True, test_split_size=0.25) for _ in range(2))
    assert (len(splits.train), len(splits.eval)) == (15, 5)
    train, held_out = ({str(row["messages"]) for row in rows} for rows in (splits.train, splits.eval))
    assert len(train) == 15 and not train & held_out and splits.eval["messages"] == again.eval["messages"]


def test_a_file_is_a_part_and_shares_are_kept(tmp_path: Path) -> None:
    files = [tiny.write_messages_jsonl(tmp_path / f"{name}.jsonl", 9, seed=at) for at, name in enumerate("ab")]
    rows = load(*(DatasetConfig(path=str(file), fraction=share) for file, share in zip(files, (2, 1), strict=True)))
    assert len(rows.train) == 9 + 4


@pytest.mark.parametrize("changed", [{"split": "test"}, {"columns": ["nope"]}])
def test_a_part_that_lacks_its_split_or_column_is_named(changed: Any, tmp_path: Path) -> None:
    file = str(tiny.write_messages_jsonl(tmp_path / "rows.jsonl", 3))
    with pytest.raises(UsageError, match=rf"rows\.jsonl' could not be read: .*{next(iter(changed.values()))[0]}"):
        load(DatasetConfig(path=file, **changed))


def test_an_evaluation_without_a_split_says_how_to_get_one(part: Any) -> None:
    with pytest.raises(UsageError, match="test_split_size"):
        load(part("a", 4), need_eval=True)


def test_a_file_with_a_broken_line_is_named(part: Any, tmp_path: Path) -> None:
    (tmp_path / "broken.jsonl").write_text('{"messages": []}\n{"messages": [\n')
    broken = DatasetConfig(path="json", data_files=str(tmp_path / "broken.jsonl"), split="train")
    with pytest.raises(UsageError) as caught:
        load(part("a", 3), broken)
    assert "broken.jsonl" in str(caught.value)


@pytest.mark.parametrize("text", ["a: &a [*a]", "configs: !!python/object/apply:os.system [x]", "a: " + "[" * 99])
def test_the_card_of_a_dataset_on_the_hub_is_checked_before_datasets_reads_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str
) -> None:
    (tmp_path / "README.md").write_text(f"---\n{text}\n---\n")

    def downloaded(*wanted: str, repo_type: str = "model") -> str:
        if (*wanted, repo_type) != ("someone/rows", "README.md", "dataset"):
            raise FileNotFoundError(wanted)
        return str(tmp_path / "README.md")

    monkeypatch.setattr("huggingface_hub.hf_hub_download", downloaded)
    monkeypatch.setattr("datasets.load_dataset", lambda *_, **__: pytest.fail("it was read"))
    with pytest.raises(UsageError, match=r"someone/rows: README.md: its metadata"):
        load_source("someone/rows")
