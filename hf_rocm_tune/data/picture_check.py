"""All rows with pictures are looked at before a model is loaded: what cannot be used, lengths with their pictures.

Every picture's header is read. Rows are also made into batches, as training will make them, for a stated time: then
their pictures are decoded and their tokens counted exactly. What is only found later ends the run at its step.
"""

from __future__ import annotations

import base64
import io
import os
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from itertools import islice
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

from hf_rocm_tune.data.formats import MASKED, STREAMED_ROWS
from hf_rocm_tune.data.pictures import name_of
from hf_rocm_tune.data.summary import DataSummary, summarised
from hf_rocm_tune.errors import FOREIGN_ERRORS, PictureError, count_of, first_line
from hf_rocm_tune.transfer import tree_tensors

if TYPE_CHECKING:
    from hf_rocm_tune.data.picture_batches import PictureCollator
    from hf_rocm_tune.data.sources import Rows

SECONDS = 60.0  # of decoding and counting, for a split
_AHEAD = 16  # rows that are being decoded
_SHOWN = 5
# Pictures for the report page, and their longer side in pixels.
_SMALL_COUNT = 4
_SMALL_SIDE = 96
_TRANSPARENT = ("RGBA", "LA", "PA")


@dataclass(frozen=True, kw_only=True)
class PictureSummary:
    """The pictures of one split."""

    split: str
    rows: int
    without: int  # rows that have no picture
    pictures: int
    counted: int  # rows whose tokens were counted, from the first
    tokens: int  # placeholder tokens of those rows
    median: int  # placeholder tokens of a picture, in those rows
    most: int
    share: float  # of all tokens of those rows
    in_loss: float  # share of the tokens in the loss that are placeholders
    largest: tuple[int, int]  # width and height in pixels
    largest_row: int  # from 1
    transparent: int
    animated: int

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    def lines(self) -> list[str]:
        """What is printed about them."""
        width, height = self.largest
        without = f", {count_of(self.without, 'row')} without" if self.without else ""
        loss = f"{100 * self.in_loss:.3g} % of those in the loss"
        lines = [
            f"{self.split} pictures: {self.pictures:,} in {count_of(self.rows - self.without, 'row')}{without}; the "
            f"largest has {width} x {height} pixels (row {self.largest_row}); a picture is "
            f"{count_of(self.median, 'token')} (median, up to {self.most:,}), {100 * self.share:.3g} % of all tokens "
            f"and {loss}"
        ]
        if self.counted < self.rows:
            lines.append(
                f"{self.counted:,} of {self.rows:,} {self.split} rows were decoded and counted in {SECONDS:g} seconds, "
                "of the others only the pictures' headers were read"
            )
        if self.transparent:
            lines.append(
                f"{count_of(self.transparent, f'{self.split} picture')} with transparency: the model is shown the "
                "colours stored under transparent pixels, or what its processor puts there, as in inference; "
                "`mogrify -background white -alpha remove FILE` makes them white"
            )
        if self.animated:
            lines.append(f"{count_of(self.animated, f'animated {self.split} picture')}: only the first frame is used")
        return lines


@dataclass
class _Tally:
    """What is counted while rows are looked at."""

    rows: int = 0
    without: int = 0
    pictures: int = 0
    transparent: int = 0
    animated: int = 0
    largest: tuple[int, int] = (0, 0)
    largest_row: int = 0
    counts: list[tuple[int, int, int, int, int, int]] = field(default_factory=list)  # see `_counted`
    per_picture: list[int] = field(default_factory=list)  # placeholder tokens over pictures, of a row
    largest_batch: tuple[int, tuple[Any, ...]] = (0, ())  # placeholder tokens of a row, and its `described` tensors
    small: list[dict[str, Any]] = field(default_factory=list)  # see `CheckedPictures`
    faults: dict[str, list[tuple[int, str]]] = field(default_factory=dict)  # rows and what is wrong, by kind

    def fault(self, number: int, error: PictureError) -> None:
        self.faults.setdefault(error.kind, []).append((number, str(error)))


class CheckedPictures(NamedTuple):
    """What was found in the rows of a split."""

    tokens: DataSummary | None  # None where nothing could be counted
    pictures: PictureSummary | None
    lengths: list[int]  # tokens of each row that was counted, after cutting
    largest: tuple[int, tuple[Any, ...]]  # of the row with the most tokens of pictures: their number, and its tensors
    small: list[dict[str, Any]]  # the first pictures, small: ``row`` from 1, ``size`` in pixels, ``jpeg`` in base64


def check_pictures(
    rows: Rows,
    collator: PictureCollator,
    split: str,
    *,
    seconds: float = SECONDS,
    progress: Callable[[int], None] = lambda done: None,
) -> CheckedPictures:
    """Look at every row of a split (of a stream: at the first 100).

    PictureError: rows that cannot be used, a line with the rows of each kind of fault.
    """
    tally = _Tally()
    looked_at: Any = rows
    if not hasattr(rows, "__len__"):
        looked_at = islice(rows, STREAMED_ROWS)
    numbered = enumerate(looked_at, start=1)
    threads = min(4, os.cpu_count() or 1)
    until = time.monotonic() + seconds
    with ThreadPoolExecutor(threads, thread_name_prefix="pictures") as pool:
        for number, row, opened in _opened_ahead(numbered, pool, collator, until):
            tally.rows = number
            progress(number)
            try:
                heads, example = opened.result()
            except PictureError as error:
                tally.fault(number, error)
                continue
            _record_headers(tally, number, heads)
            if example is None:
                continue
            if example["images"] and len(tally.small) < _SMALL_COUNT:
                tally.small.append(_small(number, example["images"][0]))
            try:
                counts = _counted(collator, example, tally)
            except PictureError as error:
                tally.fault(number, error)
            except (*FOREIGN_ERRORS, StopIteration) as error:  # of the model's processor, its template or TRL
                tally.fault(number, _refused(error, row, collator))
            else:
                tally.counts.append(counts)
                if heads:
                    tally.per_picture.append(counts[4] // len(heads))
    if tally.faults:
        raise PictureError(_faults_in_words(tally.faults, split))
    tokens, pictures = _summaries(tally, split, collator.max_length)
    return CheckedPictures(tokens, pictures, [counts[1] for counts in tally.counts], tally.largest_batch, tally.small)


def _small(number: int, picture: Any) -> dict[str, Any]:
    """A picture for the report page."""
    small = picture.convert("RGB")
    content = io.BytesIO()
    small.thumbnail((_SMALL_SIDE, _SMALL_SIDE))
    small.save(content, "JPEG")
    return {"row": number, "size": list(picture.size), "jpeg": base64.b64encode(content.getvalue()).decode()}


def _opened_ahead(
    numbered: Iterator[tuple[int, Mapping[str, Any]]], pool: ThreadPoolExecutor, collator: PictureCollator, until: float
) -> Iterator[tuple[int, Mapping[str, Any], Future[Any]]]:
    """Each row, in order, while the pictures of the next ones are being opened."""
    waiting: list[tuple[int, Mapping[str, Any], Future[Any]]] = []
    for number, row in numbered:
        decode = time.monotonic() < until
        waiting.append((number, row, pool.submit(_read, collator, row, decode)))
        if len(waiting) > _AHEAD:
            yield waiting.pop(0)
    yield from waiting


def _read(collator: PictureCollator, row: Mapping[str, Any], decode: bool) -> tuple[list[Any], dict[str, Any] | None]:
    """Size, mode and frames of each picture of a row, and the row with its pictures opened if ``decode``."""
    _, sources = collator.pictures.arranged(row)
    heads = []
    for source in sources:
        image = collator.pictures.header(source)
        transparent = image.mode in _TRANSPARENT or "transparency" in image.info
        heads.append((image.size, transparent, _animated(image)))
    return heads, collator.pictures.example(row) if decode else None


def _animated(image: Any) -> bool:
    """Whether a picture has further frames, of which none is used."""
    try:
        return bool(getattr(image, "is_animated", False))
    except Exception:  # of a frame that cannot be read
        return True


def _record_headers(tally: _Tally, number: int, heads: list[Any]) -> None:
    tally.pictures += len(heads)
    if not heads:
        tally.without += 1
    for size, transparent, animated in heads:
        tally.transparent += transparent
        tally.animated += animated
        if size[0] * size[1] > tally.largest[0] * tally.largest[1]:
            tally.largest = size
            tally.largest_row = number


def _counted(collator: PictureCollator, example: dict[str, Any], tally: _Tally) -> tuple[int, int, int, int, int, int]:
    """Of one row: tokens, tokens after cutting, both of those in the loss; placeholder tokens, and those in the loss.

    Of a pair both answers with their prompt are added up, and its placeholders are counted once.
    """
    batch = collator.whole([example])
    ids = batch["input_ids"]
    mask = batch["attention_mask"].bool()
    if "labels" in batch:
        in_loss = batch["labels"] != MASKED
    else:
        in_loss = batch["completion_mask"].bool()
    collator.cut({"input_ids": ids, "attention_mask": batch["attention_mask"]})  # refuses a cut into a picture
    limit = collator.max_length or ids.shape[1]
    placeholders = collator.is_placeholder(ids) & mask
    count = int(placeholders[0].sum())
    # the first of all, where a model's configuration names no placeholder: Kosmos-2
    is_first = bool(example["images"]) and not tally.largest_batch[1]
    if count > tally.largest_batch[0] or is_first:
        tally.largest_batch = count, described(batch)
    return (
        int(mask.sum()),
        int(mask[:, :limit].sum()),
        int((in_loss & mask).sum()),
        int((in_loss & mask)[:, :limit].sum()),
        count,
        int((placeholders & in_loss).sum()),
    )


def described(batch: Mapping[str, Any]) -> tuple[Any, ...]:
    """The tensors of pictures of a batch, for the planner: name, shape, dtype, and the values of integers.

    A shape of None: an entry for each token; one that begins with -1: what follows for each token. A list of tensors,
    of pictures of several sizes, is given as one.
    """
    ids = batch["input_ids"]
    tensors: list[Any] = []
    for name, value in batch.items():
        if name in ("input_ids", "attention_mask", "labels", "completion_mask"):
            continue
        if not isinstance(value, torch.Tensor):
            pictures = list(tree_tensors(value))
            if not pictures:
                continue
            value = torch.cat([each.flatten() for each in pictures])
        dtype = str(value.dtype).removeprefix("torch.")
        if value.shape == ids.shape:
            tensors.append((name, None, dtype, None))
        elif value.shape[:2] == ids.shape:
            tensors.append((name, (-1, *value.shape[2:]), dtype, None))
        else:
            values = None if value.is_floating_point() else value.tolist()
            tensors.append((name, tuple(value.shape), dtype, values))
    return tuple(tensors)


def _refused(error: Exception, row: Mapping[str, Any], collator: PictureCollator) -> PictureError:
    """What the model's processor, its chat template or TRL refused, as a fault of the row."""
    _, sources = collator.pictures.arranged(row)
    names = ", ".join(name_of(source) for source in sources[:2])
    about = f" ({names})" if names else ""
    return PictureError(
        f"the model's processor refuses it{about}: {first_line(error)}", kind=f"refused {type(error).__name__}"
    )


def _faults_in_words(faults: Mapping[str, list[tuple[int, str]]], split: str) -> str:
    lines = []
    for rows in faults.values():
        number, what = rows[0]
        others = ", ".join(str(other) for other, _ in rows[1:_SHOWN])
        more = f" and {len(rows) - _SHOWN:,} more" if len(rows) > _SHOWN else ""
        also = f" (also rows {others}{more})" if others else ""
        lines.append(f"row {number} of the '{split}' split: {what}{also}")
    return "; ".join(lines)


def _summaries(tally: _Tally, split: str, limit: int | None) -> tuple[DataSummary | None, PictureSummary | None]:
    if not tally.counts:
        return None, None
    columns = np.array(tally.counts, dtype=np.int64).T
    whole, kept, in_loss, trained, placeholders, in_loss_too = columns[:, None, :]
    tokens = summarised(split, limit, whole, kept, in_loss, trained, dropped=0)
    per_picture = np.array(tally.per_picture or [0])
    pictures = PictureSummary(
        split=split,
        rows=tally.rows,
        without=tally.without,
        pictures=tally.pictures,
        counted=len(tally.counts),
        tokens=int(placeholders.sum()),
        median=int(np.median(per_picture)),
        most=int(per_picture.max()),
        share=float(placeholders.sum() / max(1, int(whole.sum()))),
        in_loss=float(in_loss_too.sum() / max(1, int(in_loss.sum()))),
        largest=tally.largest,
        largest_row=tally.largest_row,
        transparent=tally.transparent,
        animated=tally.animated,
    )
    return tokens, pictures
