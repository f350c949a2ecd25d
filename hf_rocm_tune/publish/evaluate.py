"""Perplexity of a model on rows, weighted by tokens: exp of the mean negative log-likelihood of the counted tokens.

A token counts once, whatever the length of its row and the size of the batch; a mean of batch means, as trainers log
it as ``eval_loss``, weighs tokens in short rows more. Logits come in the model's dtype; the log-softmax is taken in
float32 and the sum in float64. Batches pass the mover as in training. Base and adapter see the same batches.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch.nn import functional

from hf_rocm_tune.errors import OutOfMemoryError, UsageError, device_shortage
from hf_rocm_tune.publish.evaluate_rows import TokenRow, batches, split_of, token_rows

if TYPE_CHECKING:
    from torch import Tensor

    from hf_rocm_tune.publish.evaluate_settings import PerplexitySettings
    from hf_rocm_tune.publish.generate_model import Loaded

IGNORED = -100


@dataclass(frozen=True, kw_only=True)
class Score:
    """Negative log-likelihood of all counted tokens, in nats, and their number."""

    nll: float
    tokens: int

    @property
    def loss(self) -> float:
        """Mean a token."""
        return self.nll / self.tokens

    @property
    def perplexity(self) -> float:
        """exp of `loss`; infinite where that is beyond a double."""
        return math.exp(self.loss) if self.loss < 709 else math.inf


def perplexity(loaded: Loaded, settings: PerplexitySettings, *, compare: bool) -> dict[str, Any]:
    """Measure, on the model and where wanted on its base too.

    Returns:
        The result as plain values: rows, tokens, ``loss`` (nats a token) and ``perplexity``, of the base under
        ``without_adapter``; a value that is not finite is None.

    Raises:
        UsageError: the rows cannot be read, or none has a token to count.
        OutOfMemoryError: a batch does not fit.
        CorruptionError: a batch could not be brought over right.
    """
    rows = token_rows(settings, loaded.tokenizer, loaded.name)
    kept = [row for row in rows if row.count]
    if not kept:
        raise UsageError("no row has a token to count: rows need at least two tokens, and something that is predicted")
    begun = time.perf_counter()
    mine, base = score(loaded, kept, settings.batch_size, compare=compare)
    result = {
        "dataset": settings.dataset,
        "split": split_of(settings),
        "counted": _what(settings, kept),
        "max_length": settings.max_length,
        "rows": len(kept),
        "rows_without_counted_tokens": len(rows) - len(kept),
        "rows_cut": sum(row.cut for row in kept),
        "tokens": mine.tokens,
        **_plain(mine),
        "without_adapter": _plain(base) if base else None,
        "seconds": round(time.perf_counter() - begun, 3),
    }
    sent = loaded.mover.report.to_dict()["batches"]
    return {**result, "batches": {name: sent[name] for name in ("tensors", "bytes", "mismatches", "recovered")}}


def score(loaded: Loaded, rows: Sequence[TokenRow], batch_size: int, *, compare: bool) -> tuple[Score, Score | None]:
    """Sum over all rows; the second is the base's, where wanted."""
    sums = [0.0, 0.0]
    padding = loaded.tokenizer.pad_token_id or 0
    for batch in batches(list(rows), batch_size):
        inputs, labels = _padded(batch, padding)
        placed = loaded.place({**inputs, "labels": labels})
        labels = placed.pop("labels")
        sums[0] += _nll(loaded, placed, labels)
        if compare:
            with loaded.without_adapter():
                sums[1] += _nll(loaded, placed, labels)
    tokens = sum(row.count for row in rows)
    return Score(nll=sums[0], tokens=tokens), Score(nll=sums[1], tokens=tokens) if compare else None


def _nll(loaded: Loaded, inputs: dict[str, Tensor], labels: Tensor) -> float:
    try:
        with torch.inference_mode():
            logits = loaded.model(**inputs, use_cache=False).logits
            # Row by row: a float32 copy of all logits would be the largest tensor of the whole evaluation.
            sums = [
                functional.cross_entropy(row[:-1].float(), wanted[1:], ignore_index=IGNORED, reduction="none").sum(
                    dtype=torch.float64
                )
                for row, wanted in zip(logits, labels, strict=True)
            ]
            return float(torch.stack(sums).sum())
    except RuntimeError as error:
        if (said := device_shortage(error)) is None:
            raise
        raise OutOfMemoryError(f"{said}: lower --batch_size or --max_length, or add --load_in_4bit") from error


def _padded(batch: Sequence[TokenRow], padding: int) -> tuple[dict[str, Tensor], Tensor]:
    """int64[batch, longest] ids and mask, padded on the right, and labels, `IGNORED` where a token is not counted."""
    longest = max(len(row.ids) for row in batch)
    ids = torch.full((len(batch), longest), padding)
    mask, labels = torch.zeros_like(ids), torch.full_like(ids, IGNORED)
    for at, row in enumerate(batch):
        size = len(row.ids)
        ids[at, :size] = torch.tensor(row.ids)
        mask[at, :size] = 1
        counted = torch.tensor(row.counted)
        labels[at, :size] = torch.where(counted, ids[at, :size], IGNORED)
    return {"input_ids": ids, "attention_mask": mask}, labels


def _what(settings: PerplexitySettings, rows: Sequence[TokenRow]) -> str:
    if settings.assistant_only:
        return "what the assistant says"
    return "every token but the first" if all(all(row.counted[1:]) for row in rows) else "completions"


def _plain(score: Score) -> dict[str, float | None]:
    values = {"loss": score.loss, "perplexity": score.perplexity}
    return {name: value if math.isfinite(value) else None for name, value in values.items()}
