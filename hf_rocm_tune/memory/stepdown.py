"""A micro-batch cut into smaller ones whose losses and gradients add up to those of the whole.

Two kinds of batch can be cut. A padded one has one sequence a row and is cut between rows. A packed one (padding-free)
has a single row in which the position starts again at 0 with each sequence; it is cut there, and what describes the
sequences (``cu_seq_lens``, ``max_length``, ``seq_idx``) is made anew. Everything else is left whole, with the reason:
a batch with tensors whose meaning is not known here might be cut between things that belong together, such as the
chosen and the rejected answers of a preference pair.

Nothing here knows a trainer. All tensors are host tensors, and the parts are views of them where that is possible.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

_BY_ROW = frozenset(
    [
        "input_ids",
        "attention_mask",
        "labels",
        "shift_labels",
        "position_ids",
        "token_type_ids",
        "inputs_embeds",
        "decoder_input_ids",
        "decoder_attention_mask",
        "decoder_inputs_embeds",
        "completion_mask",
        "assistant_masks",
        "special_tokens_mask",
        "global_attention_mask",
    ]
)
"""Tensors of shape [rows, ...] in which row ``i`` is about example ``i`` and no other."""

_BY_TOKEN = frozenset(
    ["input_ids", "labels", "shift_labels", "position_ids", "seq_idx", "completion_mask", "assistant_masks"]
)
"""Tensors of shape [1, tokens] of a packed batch."""

_BOUNDARIES = frozenset(["cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k"])
_IGNORED_LABEL = -100


@dataclass(frozen=True, kw_only=True)
class Layout:
    """How a batch may be cut.

    Attributes:
        kind: ``rows``, ``packed``, or ``whole``: it must not be cut.
        sizes: tokens of each unit in order, padding included: of the rows, of the sequences, or of all of it.
        reason: why it must not be cut; None where it may, as far as there are several units.
    """

    kind: Literal["rows", "packed", "whole"]
    sizes: tuple[int, ...]
    reason: str | None = None


@dataclass(frozen=True, kw_only=True)
class Part:
    """One part of a micro-batch.

    Attributes:
        inputs: what the trainer is given in place of the batch.
        units: which rows or sequences of the batch it holds.
        tokens: how many tokens, padding included.
        share: of the batch's labels that count in the loss, 0 to 1; the shares of all parts add up to 1.
    """

    inputs: dict[str, Any]
    units: range
    tokens: int
    share: float


def layout(batch: Mapping[str, Any]) -> Layout:
    """How this batch of host tensors may be cut."""
    first = batch.get("input_ids", batch.get("labels"))
    if not isinstance(first, Tensor) or first.dim() == 0:
        return Layout(kind="whole", sizes=(1,), reason="it has no input_ids")
    tokens = first.numel()
    if not isinstance(batch.get("labels"), Tensor):
        return Layout(kind="whole", sizes=(tokens,), reason="it has no labels by which its parts could be weighed")
    positions = batch.get("position_ids")
    if isinstance(positions, Tensor) and positions.shape == first.shape == (1, tokens):
        return _packed(batch, positions)
    rows = len(first)
    strange = [name for name, value in batch.items() if isinstance(value, Tensor) and not _is_by_row(name, value, rows)]
    if strange:
        return Layout(kind="whole", sizes=(tokens,), reason=f"it is not known how to cut its {strange[0]}")
    return Layout(kind="rows", sizes=(tokens // rows,) * rows)


def _packed(batch: Mapping[str, Any], positions: Tensor) -> Layout:
    tokens = positions.shape[1]
    for name, value in batch.items():
        shaped = isinstance(value, Tensor) and value.shape == positions.shape
        if isinstance(value, Tensor) and not (name in _BOUNDARIES or (name in _BY_TOKEN and shaped)):
            return Layout(kind="whole", sizes=(tokens,), reason=f"it is not known how to cut its {name}")
    starts = _starts(positions)
    if positions.any():
        # Padding at the end is zeros as well, each a sequence of its own: it stays with the last real one.
        starts[int(positions[0].nonzero()[-1]) + 1 :] = False
    if "shift_labels" not in batch:
        # A label at a start would belong to the last token of the sequence before: that pair must stay together.
        starts[1:] &= batch["labels"][0, 1:] == _IGNORED_LABEL
    begins = starts.nonzero().flatten().tolist()
    sizes = tuple(end - begin for begin, end in zip(begins, [*begins[1:], tokens], strict=True))
    return Layout(kind="packed", sizes=sizes)


def _starts(positions: Tensor) -> Tensor:
    """bool[tokens]: where a sequence begins; the first token always does."""
    starts = positions[0] == 0
    starts[0] = True
    return starts


def _is_by_row(name: str, value: Tensor, rows: int) -> bool:
    return name in _BY_ROW and value.dim() > 0 and len(value) == rows


def group(sizes: Sequence[int], parts: int) -> list[range]:
    """Neighbours joined into at most ``parts`` groups, so that the largest one is as small as it can be.

    Args:
        sizes: of the units, in order; positive.
        parts: how many groups there may be, 1 or more.

    Returns:
        The units of each group; together all of them, in order. Each is alone where there may be that many groups.
    """
    if parts >= len(sizes):
        return [range(number, number + 1) for number in range(len(sizes))]
    low, high = max(sizes), sum(sizes)
    while low < high:
        middle = (low + high) // 2
        if len(_fill(sizes, middle)) <= parts:
            high = middle
        else:
            low = middle + 1
    return _fill(sizes, low)


def _fill(sizes: Sequence[int], capacity: int) -> list[range]:
    """Groups of at most ``capacity``, each filled before the next is begun; no size is above it."""
    groups, begin, held = [], 0, 0
    for number, size in enumerate(sizes):
        if held + size > capacity:
            groups.append(range(begin, number))
            begin, held = number, 0
        held += size
    return [*groups, range(begin, len(sizes))]


def next_divisor(sizes: Sequence[int], divisor: int, units: range) -> int | None:
    """The next power of two times ``divisor`` that tears these units of a batch apart; None for a single one."""
    if len(units) < 2:
        return None
    while any(units[0] in each and units[-1] in each for each in group(sizes, divisor)):
        divisor *= 2
    return divisor


def split(batch: Mapping[str, Any], divisor: int, *, labels_shifted: bool) -> list[Part]:
    """Cut a batch of host tensors into at most ``divisor`` parts.

    Args:
        batch: as the data collator made it; not changed.
        divisor: 1 or more.
        labels_shifted: whether the loss compares each token with the label after it, so that the first label of a
            row counts for nothing (causal language models).

    Returns:
        The parts in order; a batch that cannot be cut is the only one.
    """
    found = layout(batch)
    groups = group(found.sizes, divisor)
    if len(groups) == 1:
        return [Part(inputs=dict(batch), units=groups[0], tokens=sum(found.sizes), share=1.0)]
    tokens = [sum(found.sizes[number] for number in each) for each in groups]
    if found.kind == "rows":
        inputs = [_rows(batch, each) for each in groups]
    else:
        ends = itertools.accumulate(tokens)
        inputs = [_sequences(batch, end - size, end) for end, size in zip(ends, tokens, strict=True)]
    counts = [_labels_that_count(one, shifted=labels_shifted) for one in inputs]
    weights = counts if any(counts) else tokens
    return [
        Part(inputs=one, units=each, tokens=size, share=weight / sum(weights))
        for one, each, size, weight in zip(inputs, groups, tokens, weights, strict=True)
    ]


def _labels_that_count(inputs: Mapping[str, Any], *, shifted: bool) -> int:
    if "shift_labels" in inputs:
        labels = inputs["shift_labels"]
    else:
        labels = inputs["labels"][..., 1:] if shifted and inputs["labels"].dim() > 1 else inputs["labels"]
    return int(labels.ne(_IGNORED_LABEL).sum())


def _rows(batch: Mapping[str, Any], rows: range) -> dict[str, Any]:
    return {
        name: value[rows.start : rows.stop] if isinstance(value, Tensor) else value for name, value in batch.items()
    }


def _sequences(batch: Mapping[str, Any], begin: int, end: int) -> dict[str, Any]:
    """The sequences that lie in tokens [begin, end) of a packed batch."""
    inputs = {
        name: value[:, begin:end] if isinstance(value, Tensor) and name in _BY_TOKEN else value
        for name, value in batch.items()
    }
    if "seq_idx" in inputs:
        inputs["seq_idx"] = inputs["seq_idx"] - inputs["seq_idx"][0, 0]
    starts = _starts(inputs["position_ids"]).nonzero().flatten()
    boundaries = torch.cat([starts, starts.new_tensor([end - begin])])
    for name in _BOUNDARIES & inputs.keys():
        inputs[name] = _like(boundaries if name.startswith("cu_seq_lens") else boundaries.diff().max(), batch[name])
    return inputs


def _like(value: Tensor, model: Any) -> Any:
    """``value`` as the batch had it: a tensor of that dtype, or a plain number."""
    return value.to(model.dtype) if isinstance(model, Tensor) else int(value)
