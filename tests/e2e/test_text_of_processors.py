"""Rows of text for models whose processor makes no rows of tokens of them: trained as with the tokenizer alone."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from hf_rocm_tune.data.trl_calls import as_trl_calls
from tests import pictures
from tests.e2e.command import CommandServer
from tests.e2e.conftest import ADAPTER, done, flags

PROCESSOR = "processor_config.json"


def _flat(directory: Path) -> Any:
    """A processor that gives the tokens of a text without a list around them."""
    from transformers import AutoTokenizer, TrOCRProcessor, ViTImageProcessorPil

    return TrOCRProcessor(ViTImageProcessorPil(), AutoTokenizer.from_pretrained(directory))


def _refusing(directory: Path) -> Any:
    """One that refuses a text without a picture."""
    from transformers import AutoTokenizer, Kosmos2_5ImageProcessorPil, Kosmos2_5Processor

    ends = {"boi_token": "<|bos|>", "eoi_token": "<|im_end|>", "image_token": "<|unk|>"}
    tokenizer = AutoTokenizer.from_pretrained(directory, extra_special_tokens=ends)
    return Kosmos2_5Processor(Kosmos2_5ImageProcessorPil(), tokenizer, num_image_tokens=4)


def _joining(directory: Path) -> Any:
    """One that takes several texts for one."""
    from transformers import AutoTokenizer, IdeficsImageProcessorPil, IdeficsProcessor

    return IdeficsProcessor(IdeficsImageProcessorPil(), AutoTokenizer.from_pretrained(directory))


@pytest.fixture(params=[_flat, _refusing, _joining])
def model(request: pytest.FixtureRequest, model_of: Callable[[str], Path], tmp_path: Path) -> Path:
    """Llama with such a processor."""
    directory = tmp_path / "model"
    shutil.copytree(model_of("llama3"), directory)
    request.param(directory).save_pretrained(directory)
    return directory


@pytest.fixture
def texts(tmp_path: Path) -> Path:
    """Prompts and completions."""
    rows = [{"prompt": pictures.question(number), "completion": pictures.answer(number)} for number in range(16)]
    return pictures.write_jsonl(tmp_path / "texts" / "train.jsonl", rows).parent


@pytest.mark.parametrize("layout", ["pairs", "conversations"])
def test_rows_of_text_are_those_of_the_tokenizer(
    server: CommandServer,
    model: Path,
    model_of: Callable[[str], Path],
    messages: Path,
    texts: Path,
    base_flags: list[str],
    tmp_path: Path,
    layout: str,
) -> None:
    """Conversations by the tokenizer's chat template, as the processor has none. The result has the processor."""
    data = {"pairs": texts, "conversations": messages}[layout]
    shown: dict[str, Any] = {}
    for name, base in (("processor", model), ("tokenizer", model_of("llama3"))):
        given = [*base_flags, *flags(model_name_or_path=base, dataset_name=data, output_dir=tmp_path / name)]
        preview = json.loads(done(server.run(*given, "--dry_run", "json")).stdout)
        shown[name] = (preview["rows"], preview["summaries"])
        done(server.run(*given))
    assert shown["processor"] == shown["tokenizer"]
    ours, expected = (load_file(tmp_path / name / ADAPTER) for name in ("processor", "tokenizer"))
    assert all(torch.equal(ours[name], expected[name]) for name in {*ours, *expected})

    written = json.loads((tmp_path / "processor" / PROCESSOR).read_text())
    assert written["processor_class"] == json.loads((model / PROCESSOR).read_text())["processor_class"]
    merged = tmp_path / "merged"
    done(server.run(str(tmp_path / "processor"), str(merged), env={"VERB": "merge"}))
    assert (merged / PROCESSOR).read_bytes() == (model / PROCESSOR).read_bytes()


def test_the_kinds_of_tokens_are_given_to_a_model_that_takes_them(tmp_path: Path) -> None:
    """Cosmos 3 Edge takes no picture without them, and its processor names them and gives them on request only."""
    from transformers import AutoProcessor, Cosmos3EdgeForConditionalGeneration, LlavaForConditionalGeneration

    processor = AutoProcessor.from_pretrained(pictures.build_llava(tmp_path / "llava"))
    assert as_trl_calls(processor, Cosmos3EdgeForConditionalGeneration) is processor
    kind = type(processor)
    names = property(lambda self: [*kind.model_input_names.fget(self), "mm_token_type_ids"])
    processor.__class__ = type(kind.__name__, (kind,), {"model_input_names": names})
    given = as_trl_calls(processor, Cosmos3EdgeForConditionalGeneration)(
        text=["<image>a"], images=[[pictures.picture(0)]]
    )
    assert sum(given["mm_token_type_ids"][0]) == pictures.TOKENS
    assert as_trl_calls(processor, LlavaForConditionalGeneration) is processor
