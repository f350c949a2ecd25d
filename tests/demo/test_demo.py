"""The demo's text is real, fixed and free of leaks, and its model is one that plain transformers loads."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from hf_rocm_tune.demo import __main__ as demo
from hf_rocm_tune.demo import assets
from hf_rocm_tune.errors import UsageError

RECIPE = assets.BaseRecipe(hidden=64, layers=1, steps=2, batch=2)


@pytest.fixture(scope="module")
def pairs() -> list[assets.Pair]:
    return assets.read_pairs()


@pytest.fixture(scope="module")
def made(pairs: list[assets.Pair], tmp_path_factory: pytest.TempPathFactory) -> assets.Assets:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(assets, "read_pairs", lambda: pairs)
        return assets.prepare(tmp_path_factory.mktemp("demo") / "assets", recipe=RECIPE)


@pytest.mark.parametrize("flags", [["--steps", "0"], ["--setps", "3"], ["--output_dir", f"{__file__}/x"]])
def test_wrong_flags_are_one_line(flags: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert demo.main(flags) == 2
    err = capsys.readouterr().err
    assert err.startswith("demo: error: ") and flags[0] in err and err.count("\n") == 1


def test_there_are_thousands_of_pairs_from_the_running_python(pairs: list[assets.Pair]) -> None:
    assert len(pairs) > 1500
    answers = {pair.question: pair.answer for pair in pairs}
    assert answers["What does json.dumps do?"] == " ".join((json.dumps.__doc__ or "").split("\n\n")[0].split())
    assert len(answers) == len(pairs)


def test_sources_are_read_and_not_run(tmp_path: Path) -> None:
    (tmp_path / "trap.py").write_text('"""A module that must not be imported."""\nraise SystemExit(9)\n')
    (tmp_path / "broken.py").write_text("def (:\n")
    (tmp_path / "_private.py").write_text('"""A private module, left out."""\n')
    (tmp_path / "test").mkdir()
    (tmp_path / "test" / "a.py").write_text('"""A test package, left out."""\n')
    assert [(pair.question, pair.answer) for pair in assets.read_pairs(tmp_path)] == [
        ("What is the module trap for?", "A module that must not be imported.")
    ]


def test_no_answer_is_on_both_sides_of_the_split(pairs: list[assets.Pair], tmp_path: Path) -> None:
    assets.write_splits(tmp_path, pairs)
    sides = [
        {json.loads(line)["messages"][1]["content"] for line in (tmp_path / name).read_text("utf-8").splitlines()}
        for name in ("train.jsonl", "test.jsonl")
    ]
    assert not sides[0] & sides[1]
    assert len(sides[1]) > 50


def test_plain_transformers_loads_model_and_tokenizer(made: assets.Assets) -> None:
    model = AutoModelForCausalLM.from_pretrained(made.model)
    tokenizer = AutoTokenizer.from_pretrained(made.model)
    text = "Return the naïve path – as ‘bytes’."
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text
    chat = [{"role": "user", "content": "What?"}, {"role": "assistant", "content": "That."}]
    encoded = tokenizer.apply_chat_template(chat, return_dict=True, return_assistant_tokens_mask=True)
    spoken = [token for token, mask in zip(encoded["input_ids"], encoded["assistant_masks"], strict=True) if mask]
    assert tokenizer.decode(spoken) == "That.<|im_end|>"
    with torch.no_grad():
        logits = model(torch.tensor([encoded["input_ids"]])).logits
    assert logits.shape[-1] == assets.VOCABULARY
    assert bool(logits.isfinite().all())


@pytest.fixture
def read_once(pairs: list[assets.Pair], monkeypatch: pytest.MonkeyPatch) -> None:
    """To read the whole standard library takes seconds."""
    monkeypatch.setattr(assets, "read_pairs", lambda: pairs)


@pytest.mark.usefixtures("read_once")
def test_the_same_recipe_gives_the_same_bytes(made: assets.Assets, tmp_path: Path) -> None:
    again = assets.prepare(tmp_path / "assets", recipe=RECIPE)
    for name in ("model/model.safetensors", "model/tokenizer.json", "data/train.jsonl", "data/test.jsonl"):
        assert (again.model.parent / name).read_bytes() == (made.model.parent / name).read_bytes(), name


def test_a_folder_of_someone_else_is_not_replaced(tmp_path: Path) -> None:
    (tmp_path / "assets").mkdir()
    (tmp_path / "assets" / "thesis.txt").write_text("years of work")
    with pytest.raises(UsageError, match="was not created by the demo"):
        assets.prepare(tmp_path / "assets", recipe=RECIPE, fresh=True)
    assert (tmp_path / "assets" / "thesis.txt").read_text() == "years of work"


@pytest.mark.usefixtures("read_once")
def test_a_failure_on_the_way_leaves_nothing_that_looks_finished(tmp_path: Path) -> None:
    def stop(line: str) -> None:
        if line.startswith("base model"):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        assets.prepare(tmp_path / "assets", recipe=RECIPE, say=stop)
    assert list(tmp_path.iterdir()) == []
