"""What is trained on, counted before the first step: rows, tokens, what ``--max_length`` cuts off, what is dropped.

Covered: rows that TRL tokenises before the run. Not covered: streamed rows, rows with pictures (`picture_check`),
prompts of GRPO. Rows that the reward trainer drops are counted, not measured.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
from trl import SFTTrainer
from typing_extensions import override

from hf_rocm_tune.data.formats import MASKED, RowFinding

if TYPE_CHECKING:
    from datasets import Dataset, IterableDataset

    Rows: TypeAlias = Dataset | IterableDataset
    Counts: TypeAlias = np.ndarray[tuple[int], np.dtype[np.int64]]

_BATCH = 10_000


@dataclass(frozen=True, kw_only=True)
class DataSummary:
    """The rows of one split, as they are tokenised and as they are trained on."""

    split: str  # ``train`` or ``eval``
    rows: int  # before anything is cut
    tokens: int  # before anything is cut; of a pair, those of both answers with their prompt
    median: int  # tokens of a row; of a pair, of its longer half
    p95: int
    longest: int
    histogram: tuple[tuple[int, int], ...]  # ten ranges of equal width: their longest row and the number of rows
    limit: int | None  # ``--max_length``, where longer rows are cut or dropped
    cut: int  # rows that are longer
    lost: int  # tokens cut off
    answers_cut: int  # rows of which tokens that count in the loss are cut off
    dropped: int  # rows that are left out: nothing that counts is left of them, or they are too long
    trained: int  # tokens that count in the loss, after cutting
    kept: int  # tokens after cutting
    unlearned: int = 0  # tokens at the first position of a row, which have a label and nothing that predicts them
    findings: tuple[RowFinding, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """As JSON values, with ``loss_share``: tokens that count in the loss over all that are read."""
        share = 0.0
        if self.kept:
            share = round(self.trained / self.kept, 4)
        return {**asdict(self), "loss_share": share}

    def line(self) -> str:
        """One line about size and lengths."""
        per_cent = 100 * self.trained / max(self.kept, 1)
        share = "all" if self.trained + self.unlearned == self.kept else f"{per_cent:.3g} % of the"
        return (
            f"{self.split} rows: {self.rows:,} with {self.tokens:,} tokens (median {self.median:,}, 95 % up to "
            f"{self.p95:,}, longest {self.longest:,}); {share} tokens count in the loss"
        )

    def warnings(self) -> list[str]:
        """Lines about what is cut or dropped, and about rows that are not trained as they say; none for most rows."""
        parts = []
        if self.lost:
            parts.append(
                f"{_of(self.cut, self.rows)} {self.split} rows are cut to {self.limit:,} tokens and lose "
                f"{_of(self.lost, self.tokens)} tokens"
            )
        if self.answers_cut:
            parts.append(f"{_of(self.answers_cut, self.rows)} rows lose tokens that count in the loss")
        if self.dropped:
            what = "of which nothing that counts is left" if self.lost else "too long or without tokens that count"
            parts.append(f"{_of(self.dropped, self.rows)} {self.split} rows are dropped, {what}")
        lines = []
        if parts:
            fix = ""
            if self.limit and self.longest > self.limit:
                fix = f": --max_length {self.longest} keeps all"
            lines.append(f"warning: {'; '.join(parts)}{fix}")
        lines += [finding.line(self.split, self.rows) for finding in self.findings]
        return lines


class CountedSFTTrainer(SFTTrainer):
    """TRL's trainer, which notes in `data_summaries` what of each split is trained on (not of a stream)."""

    data_summaries: dict[str, DataSummary]

    @override
    def _prepare_dataset(
        self, dataset: Rows, processing_class: Any, args: Any, packing: bool, formatting_func: Any, dataset_name: str
    ) -> Rows:
        """TRL's in two steps, the whole rows counted between them: it leaves rows that have labels as they are."""
        from datasets import Dataset

        stock = super()._prepare_dataset
        if not isinstance(dataset, Dataset):
            return stock(dataset, processing_class, args, packing, formatting_func, dataset_name)
        whole = copy.copy(args)
        whole.max_length = None
        whole.shuffle_dataset = False
        dataset = stock(dataset, processing_class, whole, False, formatting_func, dataset_name)
        cuts = not packing or args.packing_strategy == "bfd"  # the other strategies split long rows
        ends = args.truncation_mode == "keep_end" and not packing
        limit = args.max_length if cuts else None
        counted = _of_rows(dataset, dataset_name, limit, ends=ends, drops=not packing)
        self.data_summaries = {**getattr(self, "data_summaries", {}), dataset_name: counted}
        return stock(dataset, processing_class, args, packing, None, dataset_name)


def of_pairs(dataset: Any, args: Any, before: Any, split: str) -> DataSummary | None:
    """The summary of rows that DPO's, KTO's or the reward trainer has tokenised; None for others."""
    from datasets import Dataset

    if not isinstance(dataset, Dataset) or not isinstance(before, Dataset) or not len(dataset):
        return None
    lengths = _halves(dataset)
    if lengths is None:
        return None
    begun, halves = lengths
    limit = args.max_length or int(halves.max())
    kept = np.minimum(halves, limit)
    if getattr(args, "truncation_mode", "keep_start") == "keep_end":
        trained = np.minimum(halves - begun, limit)
    else:
        trained = np.maximum(kept - begun, 0)
    counts = (halves, kept, halves - begun, trained)
    answers = 1
    if "completion_ids" in dataset.column_names and "chosen" in before.column_names:
        answers = 2  # KTO's trainer makes two rows of a pair
    return summarised(split, args.max_length, *counts, dropped=answers * len(before) - len(dataset))


def summarised(
    split: str, limit: int | None, whole: Any, kept: Any, counted: Any, trained: Any, *, dropped: int
) -> DataSummary:
    """From tokens (answers, rows) before and after cutting: all, and those that count in the loss."""
    lengths = whole.max(axis=0)
    heights, edges = np.histogram(lengths, bins=min(10, int(lengths.max() - lengths.min()) + 1))
    return DataSummary(
        split=split,
        rows=len(lengths) + dropped,
        tokens=int(whole.sum()),
        histogram=tuple((int(edge), int(count)) for edge, count in zip(edges[1:], heights, strict=True)),
        median=int(np.median(lengths)),
        p95=int(np.quantile(lengths, 0.95, method="higher")),
        longest=int(lengths.max()),
        limit=limit,
        cut=int((whole > kept).any(axis=0).sum()),
        lost=int((whole - kept).sum()),
        answers_cut=int((trained < counted).any(axis=0).sum()),
        dropped=dropped,
        trained=int(trained.sum()),
        kept=int(kept.sum()),
    )


def lengths_of(dataset: Dataset) -> list[int]:
    """Tokens of each row as it is trained on; of a pair, of its longer half."""
    of_pairs = _halves(dataset)
    if of_pairs is not None:
        _, halves = of_pairs
        return [int(length) for length in halves.max(axis=0)]
    lengths: list[int] = []
    for counts, _ in _lists(dataset.select_columns(["input_ids"])):
        lengths += [int(count) for count in counts]
    return lengths


def _halves(dataset: Dataset) -> tuple[Counts, Any] | None:
    """Tokens of the prompts, and with these of each answer (answers, rows); None for rows without answers apart."""
    answers = [name for name in ("chosen_ids", "rejected_ids", "completion_ids") if name in dataset.column_names]
    if not answers:
        return None

    def tokens_of(name: str) -> Any:
        return np.concatenate([counts for counts, _ in _lists(dataset.select_columns([name]))])

    begun: Any = np.zeros(len(dataset), dtype=np.int64)
    if "prompt_ids" in dataset.column_names:
        begun = tokens_of("prompt_ids")
    return begun, np.stack([begun + tokens_of(name) for name in answers])


def of_trained(dataset: Any, summary: DataSummary, lost: int) -> DataSummary:
    """The summary with the tokens that count in the loss counted again, after labels were masked, which has left
    nothing of ``lost`` rows."""
    pieces = list(_of_labels(dataset))
    trained = sum(int(after[-1]) for _, after, _ in pieces)
    kept = sum(int(counts.sum()) for counts, _, _ in pieces)
    unlearned = sum(int(begun.sum()) for _, _, begun in pieces)
    return replace(summary, trained=trained, kept=kept, unlearned=unlearned, dropped=summary.dropped + lost)


def _of_rows(dataset: Dataset, split: str, limit: int | None, *, ends: bool, drops: bool) -> DataSummary:
    pieces = []
    for counts, before, begun in _of_labels(dataset):
        stop = np.cumsum(counts)
        start = stop - counts
        kept = counts if limit is None else np.minimum(counts, limit)
        if ends:
            first, last = stop - kept, stop
        else:
            first, last = start, start + kept
        counted = before[stop] - before[start]
        trained = before[last] - before[first]
        if ends:  # the first token that is kept may not have been the first of the row
            cut = (kept > 0) & (first > start)
            begun = np.where(cut, before[np.minimum(first + 1, last)] - before[first], begun)
            trained = np.where(cut, trained - begun, trained)
        pieces.append((counts, kept, counted, trained, begun))
    whole, kept, counted, trained, begun = (np.concatenate(part)[None] for part in zip(*pieces, strict=True))
    summary = summarised(split, limit, whole, kept, counted, trained, dropped=0)
    gone = (trained == 0) & (begun == 0) & drops & (limit is not None)
    return replace(summary, dropped=int(gone.sum()), kept=int(kept[~gone].sum()), unlearned=int(begun[~gone].sum()))


def _lists(dataset: Dataset) -> Iterator[tuple[Counts, Any]]:
    """Lengths and values of a column of lists, batch by batch."""
    for table in dataset.with_format("arrow").iter(batch_size=_BATCH):
        column = table.column(0).combine_chunks()
        yield column.value_lengths().to_numpy(zero_copy_only=False).astype(np.int64), column.flatten()


def _of_labels(dataset: Dataset) -> Iterator[tuple[Counts, Counts, Counts]]:
    """By batch: lengths of rows, how many tokens before each position count in the loss, and whether the first token of
    a row has a label: it does not count, because nothing predicts it."""
    packed = "seq_lengths" in dataset.column_names
    for counts, values in _lists(dataset.select_columns(["labels"])):
        counted = values.to_numpy(zero_copy_only=False) != MASKED
        starts = (np.cumsum(counts) - counts)[counts > 0]
        begun: Counts = np.zeros(len(counts), dtype=np.int64)
        if not packed:
            begun[counts > 0] = counted[starts]
            counted[starts] = False
        yield counts, np.concatenate([[0], np.cumsum(counted)]), begun


def _of(count: int, all_of_them: int) -> str:
    return f"{count:,} of {all_of_them:,}"
