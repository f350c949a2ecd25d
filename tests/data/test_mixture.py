"""The `datasets:` list of a recipe becomes one dataset, and what cannot be read is named."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from trl import DatasetMixtureConfig
from trl.scripts.utils import DatasetConfig

from hf_rocm_tune.data.mixture import load_mixture
from hf_rocm_tune.errors import UsageError
from tests import tiny


@pytest.fixture
def part(tmp_path: Path) -> Any:
    """Makes a part of a mixture: a JSONL file of messages."""

    def make(name: str, rows: int) -> DatasetConfig:
        file = tiny.write_messages_jsonl(tmp_path / f"{name}.jsonl", rows, seed=rows)
        return DatasetConfig(path="json", data_files=str(file), split="train")

    return make


def load(*parts: DatasetConfig, need_eval: bool = False, **options: Any) -> Any:
    mixture = DatasetMixtureConfig(datasets=list(parts), **options)
    return load_mixture(mixture, train_split="train", test_split="test", need_eval=need_eval)


def test_every_row_of_every_part_is_there_once(part: Any) -> None:
    splits = load(part("a", 7), part("b", 5))
    assert len(splits.train) == 12
    assert splits.eval is None
    assert len({str(row["messages"]) for row in splits.train}) == 12


def test_a_part_is_split_off_for_the_evaluation(part: Any) -> None:
    splits = load(part("a", 12), part("b", 8), need_eval=True, test_split_size=0.25)
    assert (len(splits.train), len(splits.eval)) == (15, 5)
    train, held_out = ({str(row["messages"]) for row in rows} for rows in (splits.train, splits.eval))
    assert not train & held_out


def test_an_evaluation_without_a_split_says_how_to_get_one(part: Any) -> None:
    with pytest.raises(UsageError, match="test_split_size"):
        load(part("a", 4), need_eval=True)


@pytest.mark.parametrize("position", [0, 1])
def test_the_part_that_cannot_be_read_is_named_wherever_it_stands(part: Any, tmp_path: Path, position: int) -> None:
    parts = [part("a", 3)]
    parts.insert(position, DatasetConfig(path=str(tmp_path / "missing_rows"), split="train"))
    with pytest.raises(UsageError, match="missing_rows"):
        load(*parts)


def test_a_file_with_a_broken_line_is_named(part: Any, tmp_path: Path) -> None:
    (tmp_path / "broken.jsonl").write_text('{"messages": []}\n{"messages": [\n')
    broken = DatasetConfig(path="json", data_files=str(tmp_path / "broken.jsonl"), split="train")
    with pytest.raises(UsageError) as caught:
        load(part("a", 3), broken)
    assert "broken.jsonl" in str(caught.value)
