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
