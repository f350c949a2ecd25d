"""A training command that also writes the batches that its model reads to the file in ``ROWS_PROBE``.

Started by `rows.py`; the method of training is in ``METHOD``.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
from pathlib import Path
from typing import Any

_MASKED = -100


def _rows_of(inputs: dict[str, Any]) -> list[dict[str, list[int]]]:
    """Token ids and labels of each row of a batch, without its padding."""
    rows = []
    for number, ids in enumerate(inputs["input_ids"]):
        mask = inputs.get("attention_mask")
        kept = mask[number].bool() if mask is not None else ids == ids
        if "labels" in inputs:
            labels = inputs["labels"][number]
            kept = kept | (labels != _MASKED)
        elif "completion_mask" not in inputs:  # of the reward trainer
            labels = ids
        else:
            counts = inputs["completion_mask"][number].bool()
            labels = ids.masked_fill(~counts, _MASKED)
        rows.append({"ids": ids[kept].tolist(), "labels": labels[kept].tolist()})
    return rows


def main() -> int:
    """Runs the command with a trainer that notes what it computes a loss of."""
    from transformers import Trainer

    stock = Trainer.training_step
    noted: list[Any] = []

    def training_step(self: Any, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Any:
        loss_of = self.compute_loss

        def compute_loss(model: Any, inputs: Any, *more: Any, **named: Any) -> Any:  # of a batch that has arrived
            noted.extend(_rows_of(inputs))
            Path(os.environ["ROWS_PROBE"]).write_text(json.dumps(noted), encoding="utf-8")
            return loss_of(model, inputs, *more, **named)

        self.compute_loss = compute_loss
        try:
            return stock(self, model, inputs, num_items_in_batch)
        finally:
            del self.compute_loss

    Trainer.training_step = training_step  # type: ignore[method-assign]
    code: int = importlib.import_module(f"hf_rocm_tune.{os.environ['METHOD']}").main()
    return code


if __name__ == "__main__":
    sys.exit(main())
