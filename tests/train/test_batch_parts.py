"""However a batch is cut, the parts are the batch: every row, token and label once, in order, nothing invented."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from trl.trainer.dpo_trainer import DataCollatorForPreference
from trl.trainer.kto_trainer import DataCollatorForUnpairedPreference
from trl.trainer.reward_trainer import DataCollatorForPreference as CollatorOfRewardModels
from trl.trainer.sft_trainer import DataCollatorForLanguageModeling

from hf_rocm_tune.train.oom import group, layout, split
from tests import pictures, tiny

# The long way round: which labels count, as `Trainer._get_num_items_in_batch` has it.
ROWS = [
    {"input_ids": list(range(5, 5 + n)), "labels": [-100] * (n // 2) + list(range(5, 5 + n - n // 2))}
    for n in (7, 3, 12, 5, 9)
]


def padded(**more: Any) -> dict[str, Any]:
    return {**DataCollatorForLanguageModeling(pad_token_id=0)(ROWS), **more}


def packed(**options: Any) -> dict[str, Any]:
    batch: dict[str, Any] = DataCollatorForLanguageModeling(pad_token_id=0, padding_free=True, **options)(ROWS)
    return batch


sizes = st.lists(st.integers(1, 300), min_size=1, max_size=40)


@given(sizes=sizes, parts=st.integers(1, 40))
@settings(deadline=None)
def test_parts_are_of_about_the_same_size(sizes: list[int], parts: int) -> None:
    groups = group(sizes, parts)
    assert [unit for each in groups for unit in each] == list(range(len(sizes))) and len(groups) <= parts
    assert max(sum(sizes[unit] for unit in each) for each in groups) <= sum(sizes) / parts + max(sizes)
    assert all(len(each) == 1 for each in group(sizes, sum(sizes))), "in the end each unit is alone"


@pytest.mark.parametrize("divisor", [1, 2, 3, 4, 8])
def test_the_parts_of_a_padded_batch_are_its_rows(divisor: int) -> None:
    batch = padded(use_cache=False)
    parts = split(batch, divisor, labels_shifted=True)
    assert len(parts) <= divisor
    for name in ("input_ids", "labels", "attention_mask"):
        assert torch.equal(torch.cat([part.inputs[name] for part in parts]), batch[name])
    assert all(part.inputs["use_cache"] is False for part in parts)
    assert max(len(part.units) for part in parts) == -(-len(ROWS) // divisor)
    assert [part.tokens for part in parts] == [part.inputs["input_ids"].numel() for part in parts]


@pytest.mark.parametrize("divisor", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("options", [{}, {"pad_to_multiple_of": 8}], ids=["tight", "padded"])
def test_a_part_of_a_packed_batch_is_what_the_collator_makes_of_its_rows(divisor: int, options: Any) -> None:
    batch = packed(**options)
    parts = split(batch, divisor, labels_shifted=True)
    seen = 0
    for part in parts:
        alone: dict[str, Any] = DataCollatorForLanguageModeling(pad_token_id=0, padding_free=True)(
            [ROWS[row] for row in part.units]
        )
        size = alone["input_ids"].shape[1]
        assert part.inputs.keys() == batch.keys()
        for name in {"input_ids", "labels", "position_ids", "seq_idx"} & batch.keys():
            assert torch.equal(part.inputs[name][:, :size], alone[name])
            assert part.inputs[name].dtype == batch[name].dtype
        for name in {"cu_seq_lens_q", "cu_seq_lens_k"} & batch.keys():  # TRL 1.13 leaves them to the model
            assert torch.equal(part.inputs[name][: len(alone[name])], alone[name])
            assert part.inputs[name].dtype == torch.int32 and part.inputs[name][-1] == part.tokens
        if "max_length_q" in batch:
            assert part.inputs["max_length_q"] == alone["max_length_q"] and type(part.inputs["max_length_q"]) is int
        seen += part.tokens
    assert seen == batch["input_ids"].numel()
    assert len(parts) == len(ROWS) or divisor < len(ROWS)


@pytest.mark.parametrize("batch", [padded(), packed(), packed(pad_to_multiple_of=8)], ids=["padded", "packed", "both"])
@pytest.mark.parametrize("divisor", [2, 4, 8])
def test_no_label_is_lost_or_counted_twice(batch: dict[str, Any], divisor: int) -> None:
    parts = split(batch, divisor, labels_shifted=True)
    counts = [int(part.inputs["labels"][:, 1:].ne(-100).sum()) for part in parts]
    whole = int(batch["labels"][:, 1:].ne(-100).sum())
    assert sum(counts) == whole
    assert [part.share for part in parts] == pytest.approx([count / whole for count in counts])


def test_shares_of_a_batch_without_any_label_are_by_size() -> None:
    batch = padded()
    batch["labels"] = torch.full_like(batch["labels"], -100)
    assert [part.share for part in split(batch, 2, labels_shifted=True)] == [3 / 5, 2 / 5]


def test_a_label_that_belongs_to_the_sequence_before_keeps_the_two_together() -> None:
    batch = packed()
    starts = (batch["position_ids"][0] == 0).nonzero().flatten().tolist()
    batch["labels"][0, starts[2]] = 7
    assert len(layout(batch).sizes) == len(ROWS) - 1
    if "cu_seq_lens_q" not in batch:
        pytest.skip("this TRL leaves the bounds of packed sequences to the model")
    for part in split(batch, 8, labels_shifted=True):
        assert torch.equal(part.inputs["cu_seq_lens_q"].diff().cumsum(0)[-1:], torch.tensor([part.tokens]))
    assert any(len(part.inputs["cu_seq_lens_q"]) == 3 for part in split(batch, 8, labels_shifted=True))


def preference() -> dict[str, Any]:
    rows = [{"prompt_ids": [5, 6], "chosen_ids": [7, 8, 9], "rejected_ids": [10]} for _ in range(4)]
    batch: dict[str, Any] = DataCollatorForPreference(pad_token_id=0)(rows)
    return batch


@pytest.mark.parametrize(
    ("batch", "reason"),
    [
        (preference(), "no labels"),
        ({**padded(), "pixel_values": torch.zeros(5, 3)}, "pixel_values"),
        ({**padded(), "attention_mask": torch.zeros(3, 12)}, "attention_mask"),
        ({**packed(), "image_grid_thw": torch.zeros(1, 3)}, "image_grid_thw"),
        ({}, "no input_ids"),
        ({"input_ids": ["text"], "labels": torch.zeros(2)}, "no input_ids"),
    ],
)
def test_what_might_belong_together_is_never_cut(batch: dict[str, Any], reason: str) -> None:
    assert reason in (layout(batch).reason or "")
    (whole,) = split(batch, 4, labels_shifted=True)
    assert whole.inputs == batch and whole.share == 1 and len(whole.units) == 1


PAIRS = [
    {"prompt_ids": [1] * n, "chosen_ids": list(range(5, 5 + n)), "rejected_ids": list(range(50, 52 + n))}
    for n in (2, 5, 3, 4, 1)
]
TOLD = {"ref_chosen_logps": -1.5, "ref_rejected_logps": -2.5}


@pytest.mark.parametrize("divisor", [2, 3, 4, 8])
@pytest.mark.parametrize("kind", ["dpo", "dpo, precomputed", "reward", "kto"])
def test_a_part_of_a_batch_of_pairs_holds_both_answers_of_each(kind: str, divisor: int) -> None:
    rows: list[dict[str, Any]] = [{**row, **(TOLD if "precomputed" in kind else {})} for row in PAIRS]
    collate: Any = DataCollatorForPreference(pad_token_id=0)
    if kind == "reward":
        rows = [{**row, "margin": float(number)} for number, row in enumerate(rows)]
        collate = CollatorOfRewardModels(pad_token_id=0)
    if kind == "kto":
        collate = DataCollatorForUnpairedPreference(pad_token_id=0)
        rows = [
            {
                **row,
                "completion_ids": row["chosen_ids"],
                "KL_completion_ids": row["rejected_ids"],
                "label": number % 2 > 0,
            }
            for number, row in enumerate(rows)
        ]
    batch = collate(rows)
    pairs = kind != "kto"
    parts = split(batch, divisor, labels_shifted=True, pairs=pairs)
    assert 1 < len(parts) <= divisor and sum(len(part.units) for part in parts) == len(PAIRS)
    for part in parts:
        alone = collate(rows[part.units.start : part.units.stop])
        assert part.share == len(part.units) / len(PAIRS) and part.inputs.keys() == alone.keys()
        for name, value in alone.items():
            found = part.inputs[name]
            assert torch.equal(found[:, : value.shape[1]] if value.dim() > 1 else found, value)
    assert layout({**batch, "pixel_values": torch.zeros(3)}, pairs=pairs).kind == "whole"


def test_the_parts_of_a_batch_with_pictures_have_their_own_pixels(tmp_path: Any) -> None:
    """LLaVA's processor: three pictures, none, one and none in a row; a part without pictures has no pixels at all."""
    from transformers import AutoProcessor
    from trl.trainer.dpo_trainer import DataCollatorForVisionPreference
    from trl.trainer.sft_trainer import DataCollatorForVisionLanguageModeling

    from hf_rocm_tune.data.picture_batches import IN_ROW, PictureCollator
    from hf_rocm_tune.data.pictures import PictureRows

    processor = AutoProcessor.from_pretrained(pictures.build_llava(tmp_path / "model"))
    image = processor.tokenizer.convert_tokens_to_ids("<image>")
    counts = (3, 0, 1, 0)  # as many as rows
    seen = [[pictures.picture(10 * row + number) for number in range(count)] for row, count in enumerate(counts)]
    for pairs in (False, True):
        stock = (DataCollatorForVisionPreference if pairs else DataCollatorForVisionLanguageModeling)(processor)
        collator = PictureCollator(stock, PictureRows(as_rgb=True), placeholders=frozenset([image]))
        rows: list[dict[str, Any]] = []
        for number in range(4):
            asked, said = pictures.turns(number)
            answers = {"prompt": [asked], "chosen": [said], "rejected": [{**said, "content": "No."}]}
            rows.append({"images": seen[number], **(answers if pairs else {"messages": [asked, said]})})
        batch = dict(collator(rows))
        assert batch[IN_ROW][:, 1].tolist() == [count * pictures.TOKENS for count in counts]
        pixels = batch["pixel_values"].split(4)  # of both answers of each pair
        assert len(pixels) == 1 + pairs
        parts = split(batch, 4, labels_shifted=True, pairs=pairs)
        for part, begin, count in zip(parts, (0, 3, 3, 4), counts, strict=True):
            if count:
                wanted = torch.cat([half[begin : begin + count] for half in pixels])
                assert torch.equal(part.inputs["pixel_values"], wanted)
                assert (part.inputs["input_ids"] == image).sum() == len(wanted) * pictures.TOKENS
            else:
                assert "pixel_values" not in part.inputs and IN_ROW not in part.inputs


@pytest.mark.parametrize("kind", ["patches", "rows", "unknown"])
def test_pixels_are_known_by_their_ratio_to_the_placeholders(kind: str) -> None:
    """Patches with the sizes of each picture (Qwen-VL), pixels of a row (SmolVLM), and what nobody can tell apart."""
    from hf_rocm_tune.data.picture_batches import IN_ROW

    ids = torch.arange(30).view(3, 10)
    batch = {
        "input_ids": ids,
        "labels": ids,
        "attention_mask": ids,
    }
    batch[IN_ROW] = torch.tensor([[1, 2, 0], [0, 0, 0], [2, 4, 0]]) + torch.tensor([0, 0, kind == "rows"])
    if kind == "rows":
        pixels = {"pixel_values": torch.arange(3 * 2 * 5).view(3, 2, 5), "pixel_attention_mask": torch.ones(3, 2)}
        wanted: Any = [[0], [1], [2]]
    else:
        patches = 24 if kind == "patches" else 25
        pixels = {"pixel_values": torch.arange(patches), "image_grid_thw": torch.tensor([[1, 2, 4]] * 3)}
        wanted = [range(8), [], range(8, 24)]
    parts = split({**batch, **pixels}, 3, labels_shifted=True)
    if kind == "unknown":
        assert len(parts) == 1 and parts[0].layout.reason == "it is not known how to split its pixel_values"
        return
    for number, (part, own) in enumerate(zip(parts, wanted, strict=True)):
        assert torch.equal(part.inputs["input_ids"], ids[number : number + 1])
        if number == 1:
            assert not {"pixel_values", IN_ROW} & part.inputs.keys()
        else:
            assert torch.equal(part.inputs["pixel_values"], pixels["pixel_values"][list(own)])
    if kind == "patches":
        assert [len(part.inputs.get("image_grid_thw", ())) for part in parts] == [1, 0, 2]


def test_two_pictures_in_one_row_of_two_are_an_entry_of_that_row() -> None:
    """Idefics3's processor stacks the pictures of a row, so that two rows and two pictures both make two entries."""
    from transformers import Idefics3ImageProcessorPil, Idefics3Processor
    from trl.trainer.sft_trainer import DataCollatorForVisionLanguageModeling

    from hf_rocm_tune.data.picture_batches import IN_ROW, PictureCollator
    from hf_rocm_tune.data.pictures import PictureRows

    tokenizer = tiny.build_tokenizer()
    special = ["<image>", "<fake_token_around_image>", "<global-img>", "<end_of_utterance>"]
    tokenizer.add_special_tokens({"additional_special_tokens": special})
    sizes = {"size": {"longest_edge": 32}, "max_image_size": {"longest_edge": 32}}
    processor = Idefics3Processor(
        image_processor=Idefics3ImageProcessorPil(**sizes, do_image_splitting=False),
        tokenizer=tokenizer,
        image_seq_len=4,
        chat_template=pictures.TEMPLATE,
    )
    image = tokenizer.convert_tokens_to_ids("<image>")
    stock = DataCollatorForVisionLanguageModeling(processor)
    collator = PictureCollator(stock, PictureRows(as_rgb=True), placeholders=frozenset([image]))
    shown = [pictures.picture(number) for number in range(2)]
    rows = [{"images": [], "messages": pictures.turns(0)}, {"images": shown, "messages": pictures.turns(1)}]
    batch = dict(collator(rows))
    pixels = batch["pixel_values"]
    assert pixels.shape[:2] == (2, 2)  # rows, and the most pictures of a row
    without, whole = split(batch, 2, labels_shifted=True)
    assert not {"pixel_values", IN_ROW} & without.inputs.keys()
    assert torch.equal(whole.inputs["pixel_values"], pixels[1:])
