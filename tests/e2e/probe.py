"""Logits of a model for fixed tokens, the same in every process. Imports nothing of ours."""

from __future__ import annotations

from typing import Any

import torch


def logits(model: Any) -> torch.Tensor:
    """Logits of fixed tokens.

    4-bit layers stay in training mode: in evaluation mode bitsandbytes repacks their weights on some CPUs and computes
    with other numbers than the training saw.

    Returns:
        Tensor of shape [2, 24, vocabulary], float32; of a reward model its scores, [2, 1].
    """
    torch.set_num_threads(1)
    generator = torch.Generator().manual_seed(3)
    tokens = torch.randint(5, 500, (2, 24), generator=generator)
    model.eval()
    for module in model.modules():
        if hasattr(module, "support_avx512bf16_for_cpu"):
            module.train()
    with torch.no_grad():
        # One row at a time: with more, a reward model asks for a padding token.
        return torch.cat([model(input_ids=row, use_cache=False).logits.float() for row in tokens.split(1)])
