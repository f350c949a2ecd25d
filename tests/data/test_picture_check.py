"""What the planner is told of a batch with pictures."""

from __future__ import annotations

import torch

from hf_rocm_tune.data.picture_check import described


def test_pictures_of_several_sizes_are_described_as_one_tensor() -> None:
    """Unlimited-OCR's processor gives a list of them."""
    ids = torch.ones((1, 5), dtype=torch.int64)
    pictures = [torch.ones(3, 4, 4), torch.ones(3, 2, 2)]
    found = described({"input_ids": ids, "pixel_values": pictures, "mm_token_type_ids": ids, "names": ["a"]})
    assert found == (("pixel_values", (60,), "float32", None), ("mm_token_type_ids", None, "int64", None))


def test_what_a_picture_has_for_each_token_is_described_without_their_number() -> None:
    """Llama 3.2 Vision's mask: an entry for each token, picture and tile."""
    ids = torch.ones((1, 5), dtype=torch.int64)
    found = described({"input_ids": ids, "cross_attention_mask": torch.ones(1, 5, 2, 4, dtype=torch.int64)})
    assert found == (("cross_attention_mask", (-1, 2, 4), "int64", None),)
