"""Batches of rows with pictures: TRL's collators, with opened pictures, checked cuts and masked placeholders."""

from __future__ import annotations

import copy
import dataclasses
import inspect
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from hf_rocm_tune.data import masks
from hf_rocm_tune.data.formats import MASKED
from hf_rocm_tune.data.loader import IN_ROW
from hf_rocm_tune.data.pictures import PictureRows
from hf_rocm_tune.data.sources import COLUMNS, TURNS
from hf_rocm_tune.data.trl_calls import with_flat_pictures
from hf_rocm_tune.errors import PictureError, UsageError

if TYPE_CHECKING:
    from hf_rocm_tune.data.sources import Rows

_PIXELS = ("pixel", "image_patches", "flattened_patches")
"""How names of pixels begin in what processors make."""
_LENGTHENED = frozenset({"input_ids", "attention_mask", "labels", "token_type_ids", "mm_token_type_ids"})
"""What TRL makes of a prompt's and a completion's tokens together."""
_IDS = ("image_token_id", "image_token_index", "video_token_id", "video_token_index", "audio_token_id")


def placeholder_ids(processor: Any, config: Any) -> frozenset[int]:
    """The token ids that stand for parts of a picture, a video or a sound, as the configuration names them.

    The processor is asked where the configuration names none: Gemma 3's names the token before a picture.
    """
    for owner in (config, processor):
        named = {getattr(owner, name, None) for name in _IDS}
        ids = {token for token in named if isinstance(token, int) and token >= 0}
        if ids:
            return frozenset(ids)
    return frozenset()


def literals(processor: Any, placeholders: frozenset[int]) -> tuple[str, ...]:
    """What the processor reads as a placeholder wherever it stands in a text."""
    names = (getattr(processor, name, None) for name in ("image_token", "boi_token", "video_token", "audio_token"))
    tokens = processor.tokenizer.convert_ids_to_tokens(sorted(placeholders))
    return tuple(sorted({text for text in (*names, *tokens) if isinstance(text, str) and text}))


def takes_suffix(processor: Any) -> bool:
    """Whether a model reads all of a prompt at once, also what follows a token, and learns the answer only: PaliGemma.

    Its processor marks both by ``token_type_ids``, 0 and 1, and takes the answer as ``suffix``.
    """
    return "suffix" in inspect.signature(type(processor).__call__).parameters


def _with_answers(processor: Any) -> Any:
    """A processor as `takes_suffix` has, which also takes answers without pictures, as TRL's collators give them."""
    kind = type(processor)

    def call(self: Any, images: Any = None, text: Any = None, **settings: Any) -> Any:
        if images is not None:
            return kind.__call__(self, images=images, text=text, **settings)
        made = self.tokenizer(text, **settings)
        made["token_type_ids"] = torch.ones_like(made["input_ids"])
        return made

    changed = copy.copy(processor)
    changed.__class__ = type(kind.__name__, (kind,), {"__call__": call})
    return changed


class PictureCollator:
    """TRL's collator of rows with pictures, around which these things differ.

    Pictures are opened here, by the `PictureRows`, so that a bad one is named. Rows are cut to ``max_length`` here,
    after all pictures were expanded, and a cut into a picture is refused. The labels of placeholder tokens are masked,
    unless ``loss_on_placeholders``: TRL counts those of ``messages`` in the loss. With ``turns_only``, or where
    messages say themselves whether they are in the loss, the messages of a row are found by their prefixes.
    For a model that `takes_suffix` the last answer is learned, and the rest of the conversation is its prompt.

    Batches are TRL's: ``input_ids``, ``attention_mask`` and ``labels`` (or ``completion_mask``) int64 of shape (rows,
    tokens), pixels as the processor makes them.
    """

    def __init__(
        self,
        stock: Any,
        pictures: PictureRows,
        *,
        placeholders: frozenset[int],
        loss_on_placeholders: bool = False,
        mask_thinking: bool = False,
        turns_only: bool = False,
        rows: Sequence[Rows] = (),
    ) -> None:
        self.max_length: int | None = stock.max_length
        changed: dict[str, Any] = {"max_length": None}
        self._suffix = takes_suffix(stock.processor)
        changed["processor"] = with_flat_pictures(stock.processor)
        if self._suffix:
            changed["processor"] = _with_answers(stock.processor)
            if hasattr(stock, "completion_only_loss"):
                changed["completion_only_loss"] = True
        self.stock = dataclasses.replace(stock, **changed)
        self._turns_only = turns_only
        self._stacking: bool | None = None  # not known yet
        self._joins: bool | None = None  # likewise
        self.pictures = pictures
        self._placeholders = torch.tensor(sorted(placeholders), dtype=torch.int64)
        self._loss_on_placeholders = loss_on_placeholders
        self._mask_thinking = mask_thinking
        self._rows = tuple(rows)  # in which a bad picture is looked for

    def __call__(self, examples: Sequence[Mapping[str, Any]], return_tensors: str | None = None) -> Any:
        opened = [self._opened(example) for example in examples]
        pictures = [len(row["images"]) for row in opened]
        several = next((dict(row) for row in opened if len(row["images"]) > 1), None)  # TRL changes the rows
        batch = self.cut(self.whole(opened), examples)
        if any(pictures):
            placeholders = self.is_placeholder(batch["input_ids"]).sum(dim=1)[: len(pictures)]
            stacks = torch.full_like(placeholders, several is not None and self._stacks(several))
            batch[IN_ROW] = torch.stack([torch.tensor(pictures), placeholders, stacks], dim=1)
        return batch

    def whole(self, opened: list[dict[str, Any]]) -> Any:
        """The batch of rows whose pictures are opened, before it is cut."""
        seen = any(row["images"] for row in opened)
        if self._suffix:
            opened = [self._as_completion(row) for row in opened]
        turns = [row.get("messages") for row in opened]  # TRL changes the rows
        batch = self._joined(opened) if self._must_join(opened) else self.stock(opened)
        if seen and not any(name.startswith(_PIXELS) for name in batch):
            raise PictureError("rows have pictures, and the model's processor made no pixels of them", kind="pixels")
        if "labels" in batch:
            for number, messages in enumerate(turns):
                if isinstance(messages, list) and (self._turns_only or masks.has_marks(messages)):
                    self._mask_turns(batch, number, messages)
        if "labels" in batch and not self._loss_on_placeholders:
            batch["labels"][self.is_placeholder(batch["input_ids"])] = MASKED
        if "labels" in batch and self._mask_thinking:
            rows = zip(batch["input_ids"].tolist(), batch["labels"].tolist(), strict=True)
            tokenizer = self.stock.processor.tokenizer
            masked = [masks.thinking_masked({"input_ids": ids, "labels": labels}, tokenizer) for ids, labels in rows]
            batch["labels"] = torch.tensor([row["labels"] for row in masked])
        return batch

    def _must_join(self, opened: list[dict[str, Any]]) -> bool:
        """Whether the processor makes more for each token than TRL lengthens by the completions (`_LENGTHENED`).

        So do Llama 3.2 Vision's, Idefics' and Kosmos-2's, each a mask. Found out once, by the first row with pictures.
        """
        seen = [row for row in opened if row["images"]]
        if self._suffix or not seen or "completion" not in seen[0] or not hasattr(self.stock, "completion_only_loss"):
            return False
        if self._joins is None:
            short, long = (self._of_texts([text], [seen[0]]) for text in self._texts(seen[0]))
            tokens = [made["input_ids"].shape[1] for made in (short, long)]
            if tokens[0] == tokens[1]:  # of an empty completion
                return False
            names = {name for name, value in short.items() if torch.is_tensor(value) and value.ndim > 1}
            by_token = {name for name in names if [short[name].shape[1], long[name].shape[1]] == tokens}
            self._joins = not by_token <= _LENGTHENED
        return self._joins

    def _joined(self, opened: list[dict[str, Any]]) -> Any:
        """The batch of prompts and completions, each row's a single text to the processor."""
        texts = [self._texts(row) for row in opened]
        batch = self._of_texts([whole for _, whole in texts], opened)
        if self.stock.completion_only_loss:
            prompts = self._of_texts([prompt for prompt, _ in texts], opened)
            for number, ids in enumerate(prompts["input_ids"]):
                length = int(prompts["attention_mask"][number].sum())
                same = (ids[:length] == batch["input_ids"][number][:length]).long().cumprod(dim=0)
                batch["labels"][number][: int(same.sum())] = MASKED
        return batch

    def _texts(self, row: Mapping[str, Any]) -> tuple[str, str]:
        """A row's prompt, and with its completion, as TRL renders them."""
        from trl.data_utils import apply_chat_template, is_conversational, prepare_multimodal_messages

        shown = dict(row)
        if is_conversational(shown):
            shown["prompt"] = prepare_multimodal_messages(row["prompt"], images=row["images"])
            shown["completion"] = prepare_multimodal_messages(row["completion"])
            shown = apply_chat_template(shown, self.stock.processor)
        return shown["prompt"], shown["prompt"] + shown["completion"]

    def _of_texts(self, texts: list[str], opened: list[dict[str, Any]]) -> Any:
        """TRL's batch of whole texts, all of whose tokens count in the loss."""
        stock = dataclasses.replace(self.stock, completion_only_loss=False)
        rows = zip(texts, opened, strict=True)
        return stock([{stock.dataset_text_field: text, "images": list(row["images"])} for text, row in rows])

    def _stacks(self, several: dict[str, Any]) -> bool:
        """Whether pixels have an entry for each row, as SmolVLM's, and not for each picture; of a row with several."""
        if self._stacking is None:
            row = self._as_completion(several) if self._suffix else several
            batch = self.stock([row])
            pixels = next(value for name, value in batch.items() if name.startswith(_PIXELS))
            answers = 1 if len(batch["input_ids"]) == 1 else 2
            self._stacking = len(pixels) == answers
        return self._stacking

    def _as_completion(self, row: dict[str, Any]) -> dict[str, Any]:
        """A conversation as its last answer and what stands before it."""
        if not row["images"]:
            raise PictureError(
                "it has no picture, and this model's processor takes none without: leave the row out", kind="without"
            )
        messages = row.get("messages")
        if not isinstance(messages, list):
            return row
        *prompt, last = messages
        if last.get("role") != "assistant" or not prompt:
            raise PictureError(
                "it does not end with an answer, and this model learns the last answer only: leave the row out",
                kind="answer last",
            )
        rest = {name: value for name, value in row.items() if name != "messages"}
        return {**rest, "prompt": prompt, "completion": [last]}

    def _mask_turns(self, batch: Any, number: int, messages: list[Any]) -> None:
        """Mask the labels of a row's messages that are not in the loss."""
        processor = self.stock.processor
        in_parts = []
        for message in messages:
            content = message.get("content")
            if isinstance(content, str):
                message = {**message, "content": [{"type": "text", "text": content}]}
            in_parts.append(message)

        def text(turns: list[Any], *, prompt: bool = False) -> str:
            template = getattr(self.stock, "chat_template", None)
            shown: str = processor.apply_chat_template(
                turns, tokenize=False, add_generation_prompt=prompt, chat_template=template
            )
            return shown

        kept = batch["attention_mask"][number].bool()
        ids = batch["input_ids"][number][kept].tolist()
        labels = batch["labels"][number][kept].tolist()
        try:
            masked = masks.labels_among(ids, labels, in_parts, processor.tokenizer, text, turns_only=self._turns_only)
        except UsageError as error:
            raise PictureError(str(error), kind="turns") from error
        batch["labels"][number][kept] = torch.tensor(masked)

    def cut(self, batch: Any, examples: Sequence[Mapping[str, Any]] = ()) -> Any:
        """The batch with at most ``max_length`` tokens a row; refused where a picture would be cut."""
        ids: Tensor = batch["input_ids"]
        if self.max_length is None or ids.shape[1] <= self.max_length:
            return batch
        beyond = self.is_placeholder(ids[:, self.max_length :]).any(dim=1)
        if bool(beyond.any()):
            lengths = batch["attention_mask"].sum(dim=1)[beyond]
            raise PictureError(
                f"--max_length {self.max_length} cuts into a picture: a row has {int(lengths.max())} tokens; give "
                f"--max_length {int(lengths.max())}, or fewer tokens a picture with --max_pixels",
                kind="cut",
            )
        step = getattr(self.stock, "pad_to_multiple_of", None)
        for name, value in list(batch.items()):
            if torch.is_tensor(value) and value.ndim > 1 and value.shape[:2] == ids.shape:
                batch[name] = _padded(value[:, : self.max_length], name, step, self.stock)
        return batch

    def is_placeholder(self, ids: Tensor) -> Tensor:
        """A bool tensor of the shape of ``ids``."""
        return torch.isin(ids, self._placeholders)

    def _opened(self, example: Mapping[str, Any]) -> dict[str, Any]:
        try:
            return self.pictures.example(example)
        except PictureError as error:
            raise self._with_row(error, example) from error

    def _with_row(self, error: PictureError, example: Mapping[str, Any]) -> PictureError:
        """The error with the number of the row, which is looked up by its content."""
        for rows in self._rows:
            columns = [name for name in (*COLUMNS, *TURNS) if name in example and name in (rows.column_names or ())]
            if not hasattr(rows, "__len__") or not columns:
                continue  # a stream
            wanted = {name: example[name] for name in columns}
            for number, row in enumerate(rows.select_columns(columns), start=1):
                if row == wanted:
                    return PictureError(f"row {number}: {error}", kind=error.kind, picture=error.picture)
        return error


def _padded(value: Tensor, name: str, step: int | None, stock: Any) -> Tensor:
    missing = -value.shape[1] % step if step else 0
    if not missing:
        return value
    pad = {"input_ids": stock.processor.tokenizer.pad_token_id, "labels": MASKED}.get(name, 0)
    return torch.nn.functional.pad(value, (*(0, 0) * (value.ndim - 2), 0, missing), value=pad)
