"""What stands from <think> to </think> in an answer is read and not learnt, by a loss computed without this package."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.e2e.command import CommandServer
from tests.e2e.conftest import flags, losses_of

QUESTION = "What does <think> mean?"
ANSWERS = (
    "<think>It is a tag, so the path matters.</think>A tag.",
    "Nothing.",
    "<think>\nOne\n</think>\n\nTwo <think>x",
)
ROWS = [
    [{"role": "user", "content": QUESTION}, {"role": "assistant", "content": answer}, {"role": "user", "content": "ok"}]
    for answer in ANSWERS
]


def expected_loss(model: Path, assistant_only: bool, masked: bool) -> float:
    """Mean over the tokens that are learnt; spans are found in the text, by the tokenizer's own offsets."""
    tokenizer, net = AutoTokenizer.from_pretrained(model), AutoModelForCausalLM.from_pretrained(model)
    total, count = 0.0, 0
    for answer, row in zip(ANSWERS, ROWS, strict=True):
        text = tokenizer.apply_chat_template(row, tokenize=False)
        coded = tokenizer(text, return_offsets_mapping=True, add_special_tokens=False)
        begin = text.index(answer, text.index("assistant\n"))
        answer_end = begin + len(answer) + len("<|im_end|>")
        spans = [(begin + m.start(), begin + m.end()) for m in re.finditer(r"(?s)<think>.*?(</think>|$)", answer)]
        if spans and not answer.endswith("</think>") and spans[-1][1] == begin + len(answer):
            spans[-1] = (spans[-1][0], len(text))  # never closed: to the end of the example
        ids = torch.tensor([coded["input_ids"]])
        with torch.no_grad():
            losses = torch.nn.functional.cross_entropy(net(ids).logits[0, :-1], ids[0, 1:], reduction="none")
        for (start, end), loss in zip(coded["offset_mapping"][1:], losses.tolist(), strict=True):
            thought = masked and any(start < stop and end > first for first, stop in spans)
            inside = begin <= start < answer_end or not assistant_only
            if inside and not thought:
                total, count = total + loss, count + 1
    return total / count


@pytest.mark.parametrize(
    ("more", "masked"),
    [
        pytest.param({"assistant_only_loss": True}, True, marks=pytest.mark.long),
        ({"packing": True, "assistant_only_loss": True}, True),
        ({"assistant_only_loss": True}, False),
    ],
)
def test_the_loss_is_that_of_all_other_tokens_of_the_answer(
    server: CommandServer,
    model_of: Callable[[str], Path],
    base_flags: list[str],
    tmp_path: Path,
    masked: bool,
    more: dict[str, bool],
) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps({"messages": row}) + "\n" for row in ROWS))
    settings = {"max_steps": 1, "per_device_train_batch_size": 3, "max_length": 256, "save_strategy": "steps"}
    settings |= {"dataset_name": file, "model_name_or_path": model_of("llama3"), "mask_thinking": masked, **more}
    result = server.run(*base_flags, *flags(**settings))
    assert result.code == 0, result.stderr[-3000:]
    found = losses_of(tmp_path / "out")[0]
    model = model_of("llama3")
    assert found == pytest.approx(expected_loss(model, True, masked), abs=2e-4)
    assert abs(found - expected_loss(model, True, not masked)) > 5e-3


def test_rows_of_nothing_but_thinking_are_one_line(
    server: CommandServer, model_of: Callable[[str], Path], base_flags: list[str], tmp_path: Path
) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text(json.dumps({"messages": ROWS[0]}) + "\n")
    settings = {"dataset_name": file, "model_name_or_path": model_of("llama3"), "max_length": 24}
    result = server.run(*base_flags, *flags(**settings, mask_thinking=True, assistant_only_loss=True))
    assert result.code == 2 and result.stderr.count("\n") == 1, result.stderr[-2000:]
    assert "masks all labels of the 'train' rows" in result.stderr
