"""Checks all rows of a split before a model is loaded, and each row of a stream when it comes."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from itertools import islice
from typing import TYPE_CHECKING, Any

from hf_rocm_tune.data.formats.convert import changes_in_words
from hf_rocm_tune.data.formats.faults import fault_in
from hf_rocm_tune.data.formats.layout import FormatInfo, RowFinding, is_renamed
from hf_rocm_tune.data.formats.messages import standard_role
from hf_rocm_tune.data.formats.names import (
    BESIDE_IDS,
    CALL_ROLES,
    CHATS,
    FUNCTIONS,
    MESSAGE_KEYS,
    OF_TEMPLATE,
    READ_BY_TRL,
    STREAMED_ROWS,
    TEMPLATE_KWARGS,
    TRAINING,
    TURNS,
    Method,
)
from hf_rocm_tune.data.formats.recognise import layout_of
from hf_rocm_tune.data.formats.traits import RowTraits
from hf_rocm_tune.errors import UsageError

if TYPE_CHECKING:
    from hf_rocm_tune.data.formats.layout import Rows

_BATCH = 1000
_PICTURES = ("image", "images")
_PLACEHOLDER = re.compile(r"<\|?\w*(?:image|vision|img)\w*\|?>|\[IMG\]", re.IGNORECASE)


def check_format(
    dataset: Rows,
    *,
    method: Method = "sft",
    assistant_only_loss: bool = False,
    completion_only_loss: bool | None = None,
    dataset_text_field: str = "text",
    has_chat_template: bool,
    model_name: str,
    split: str = "train",
    vocabulary: int | None = None,
    in_csv: bool = False,
    opening: str | None = None,
) -> FormatInfo:
    """Recognise the format of the rows and check them.

    Args:
        dataset: rows of one split.
        method, assistant_only_loss, completion_only_loss, dataset_text_field: the verb, and TRL's flags.
        has_chat_template: of the tokenizer, or given.
        model_name, split: for messages.
        vocabulary: number of token ids of the model; None: unknown.
        in_csv: whether the rows come from CSV, where a word (`names.MISSING`) may stand for a missing value.
        opening: the token with which the tokenizer begins each text by itself; None: with none.

    Raises:
        UsageError: the columns fit no format, or a row does not; it names the row.
    """
    from datasets import Dataset

    first = next(iter(dataset), None)
    if first is None:
        raise UsageError(f"the '{split}' split is empty: there are no rows to check or to train on")
    columns = list(dataset.column_names or first)
    layout = layout_of(
        columns,
        first,
        method=method,
        text_field=dataset_text_field,
        split=split,
        needs_assistant=assistant_only_loss,
        vocabulary=vocabulary,
        in_csv=in_csv,
    )
    _check_flags(layout, columns, completion_only_loss, split)
    _check_mixed(layout, first, split)
    if is_renamed(layout.kind, layout.content):
        opening = None
    seen = RowTraits(opening)
    for number, row in enumerate(_rows(dataset, layout), start=1):
        fault = fault_in(row, layout)
        if fault:
            begins = repr({column: row[column] for column in layout.columns if column in row})[:120]
            raise UsageError(f"row {number} of the '{split}' split: {fault}; the row begins {begins}")
        seen.record(row, number, layout)
    if layout.messages and not has_chat_template:
        raise UsageError(
            f"the '{split}' rows are conversations, but the tokenizer of '{model_name}' has no chat template: name a "
            "template file, or a model whose template to take, with --chat_template_path"
        )
    if TEMPLATE_KWARGS in layout.beside and not isinstance(dataset, Dataset):  # later rows may lack them
        seen.kinds.add("uneven kwargs")
    return _completed(layout, seen, columns, first, has_chat_template)


def _check_mixed(layout: FormatInfo, first: dict[str, Any], split: str) -> None:
    """Refuses rows of two formats in one file, which Arrow fills up with nothing."""
    wanted = [*layout.content.values()]
    other = next((name for name in (*CHATS, "text", "prompt") if name not in wanted and first.get(name)), None)
    if other and all(first.get(name) is None for name in wanted):
        raise UsageError(
            f"the '{split}' rows are of two formats: row 1 has '{other}', others {' and '.join(map(repr, wanted))}: "
            "give each format a file of its own"
        )


def _check_flags(layout: FormatInfo, columns: list[str], completion_only_loss: bool | None, split: str) -> None:
    if layout.needs_assistant and not layout.messages:
        raise UsageError(
            f"--assistant_only_loss needs conversations, but the '{split}' rows are {layout.kind.replace('_', '/')}: "
            "drop the flag, or give rows with 'messages'"
        )
    masked = layout.kind == "prompt_completion" or (layout.kind == "tokenized" and "completion_mask" in columns)
    if completion_only_loss and not masked:
        raise UsageError(
            f"--completion_only_loss needs 'prompt' and 'completion', but the '{split}' rows are "
            f"{layout.kind}: drop the flag, or for conversations use --assistant_only_loss"
        )


def _rows(dataset: Rows, layout: FormatInfo) -> Iterator[dict[str, Any]]:
    from datasets import Dataset

    if not isinstance(dataset, Dataset):
        yield from islice(dataset, STREAMED_ROWS)
        return
    for batch in dataset.select_columns(layout.columns).with_format(None).iter(batch_size=_BATCH):
        for values in zip(*batch.values(), strict=True):
            yield dict(zip(batch, values, strict=True))


# ---- once all rows have been seen -----------------------------------------------------------------------------------


def _completed(
    layout: FormatInfo, seen: RowTraits, columns: list[str], first: Mapping[str, Any], has_chat_template: bool
) -> FormatInfo:
    """What `as_trl` has to change and what is printed, once all rows have been seen."""
    known = layout.columns
    layout = replace(
        layout,
        more=tuple(name for name in layout.more if name not in TURNS or name in seen.filled),
        unused=_columns_that_trl_might_read(layout, columns),
        joins_parts="text parts" in seen.kinds and "other parts" not in seen.kinds,
        uneven_kwargs="uneven kwargs" in seen.kinds,
    )
    becomes_chat = (
        is_renamed(layout.kind, layout.content)
        or not {*TURNS}.isdisjoint(layout.more)
        or (has_chat_template and _shows_pictures(layout, columns, first))
    )
    conversational = has_chat_template and (bool(layout.messages) or becomes_chat)
    layout = replace(layout, conversational=conversational)
    if not conversational:  # a chat template reads them
        known = [name for name in known if name not in OF_TEMPLATE]
        layout = replace(layout, beside=tuple(name for name in layout.beside if name not in OF_TEMPLATE))
    mapping = None
    if becomes_chat or _has_other_messages(layout, seen, first):
        mapping = changes_in_words(layout, conversational, seen)
    shapes: list[tuple[int, int]] = []
    if conversational:
        shapes = [(start, count) for start, count in seen.shapes.values()]
    return replace(
        layout,
        mapping=mapping,
        rows=seen.count,
        has_calls=not seen.kinds.isdisjoint({"tool_calls", *CALL_ROLES}),
        text_arguments="text arguments" in seen.kinds,
        marked="mark" in seen.kinds,
        findings=(*seen.findings(layout), *_unused(layout, known, columns, seen.count)),
        shapes=tuple(shapes),
    )


def _has_other_messages(layout: FormatInfo, seen: RowTraits, first: Mapping[str, Any]) -> bool:
    """Whether messages, calls, tools or labels are written otherwise than TRL reads them."""
    return bool(
        layout.dropped
        or layout.joins_parts
        or (layout.role_key, layout.content_key) != MESSAGE_KEYS
        or any(standard_role(role) != role for role in seen.roles)
        or (layout.messages and layout.texts)
        or layout.label not in (None, "label")
        or any(isinstance(first[column], dict) for column in layout.messages)
        or {*CALL_ROLES, FUNCTIONS, "padding", "bare tools", "uneven kwargs"} & seen.kinds
    )


def _shows_pictures(layout: FormatInfo, columns: list[str], first: Mapping[str, Any]) -> bool:
    """Whether pictures beside a prompt of text have no place in it: it has no placeholder of the model's own."""
    if layout.messages or "prompt" not in layout.content or {*_PICTURES}.isdisjoint(columns):
        return False
    placeholders = _PLACEHOLDER.findall(str(first[layout.content["prompt"]]))
    return all(placeholder == "<image>" for placeholder in placeholders)  # the toolkits', which no model reads


def _columns_that_trl_might_read(layout: FormatInfo, columns: list[str]) -> tuple[str, ...]:
    if layout.kind == "prompt":  # reward functions read them
        return ()
    ours = (*layout.columns, *layout.content, *layout.dropped)
    return tuple(name for name in columns if name in (*READ_BY_TRL, *BESIDE_IDS) and name not in ours)


def _unused(layout: FormatInfo, known: list[str], columns: list[str], rows: int) -> list[RowFinding]:
    """Columns that nothing reads, of those not ``known``: a warning for training data in another format."""
    pictures = _PICTURES if layout.messages or layout.conversational else ()
    unused = [name for name in columns if name not in (*known, *layout.dropped, *pictures)]
    what = "not used"
    if layout.kind == "prompt":  # reward functions read all columns
        unused = [name for name in unused if name in OF_TEMPLATE]
        what = "not in the prompt, but given to the reward functions"
    findings = []
    for trains in (True, False):
        names = [name for name in unused if (name in TRAINING) == trains]
        if names:
            plural = "s" if len(names) > 1 else ""
            phrase = f"{what}: column{plural} {', '.join(map(repr, names))}"
            findings.append(RowFinding(what=phrase, rows=rows, first=1, by_design=not trains))
    return findings


# ---- a stream -------------------------------------------------------------------------------------------------------


def check_later(
    dataset: Rows,
    info: FormatInfo,
    split: str,
    check_structure: Callable[..., None],
    report: Callable[[RowFinding], None],
) -> Rows:
    """A stream that refuses a bad row when it comes to it: `check_format` reads only the first ones.

    Args:
        dataset: a stream, not yet converted.
        info: of its first rows.
        split: for messages.
        check_structure: called with a row and its number for each structure that was not among the first rows.
        report: called with what is found in later rows, once for each kind.

    Raises:
        UsageError: while the rows are read; it names the row.
    """
    arguments = {
        "layout": info,
        "split": split,
        "seen": RowTraits(),
        "check_structure": check_structure,
        "report": report,
    }
    return dataset.map(_checked, with_indices=True, fn_kwargs=arguments, features=dataset.features)


def place_of(number: int, split: str) -> str:
    """A row in words, such as ``row 7 of the 'train' split``; a worker of a loader counts only what it reads itself."""
    from torch.utils.data import get_worker_info

    worker = get_worker_info()
    counted = "" if worker is None else f" as loader worker {worker.id + 1} of {worker.num_workers} counts them"
    return f"row {number:,} of the '{split}' split{counted}"


def _checked(
    row: dict[str, Any],
    index: int,
    *,
    layout: FormatInfo,
    split: str,
    seen: RowTraits,
    check_structure: Callable[..., None],
    report: Callable[[RowFinding], None],
) -> dict[str, Any]:
    fault = fault_in(row, layout)
    if fault:
        raise UsageError(f"{place_of(index + 1, split)}: {fault}")
    known_shapes = len(seen.shapes)
    known_findings = len(seen.empty)
    seen.record(row, index + 1, layout)
    if index >= STREAMED_ROWS:
        if len(seen.shapes) > known_shapes:
            check_structure(row, index + 1)
        for what in [*seen.empty][known_findings:]:
            report(RowFinding(what=what, rows=1, first=index + 1))
    return row
