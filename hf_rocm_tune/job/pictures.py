"""The pictures of a job: looked through before the model is loaded, and opened by the trainer's collator."""

from __future__ import annotations

import copy
import json
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from transformers import ProcessorMixin

from hf_rocm_tune.cards.agree import on_main_process
from hf_rocm_tune.data import pictures
from hf_rocm_tune.data.masks import template_is_marked
from hf_rocm_tune.data.picture_batches import PictureCollator, literals, placeholder_ids, takes_suffix
from hf_rocm_tune.data.picture_check import PictureSummary, check_pictures
from hf_rocm_tune.data.pictures import PictureRows
from hf_rocm_tune.data.sources import columns_of
from hf_rocm_tune.data.summary import DataSummary
from hf_rocm_tune.errors import UsageError
from hf_rocm_tune.paths import expand_user
from hf_rocm_tune.survive.atomic import write_text_atomic
from hf_rocm_tune.survive.run_directory import SMALL_PICTURES

if TYPE_CHECKING:
    from hf_rocm_tune.data.sources import Rows, Splits
    from hf_rocm_tune.settings.arguments import Arguments
    from hf_rocm_tune.train.trainer import VerifiedTransferMixin

TRAINED = ("sft", "dpo", "kto")  # methods with a collator for pictures
_BAR_ROWS = 200  # fewer rows need no progress


@dataclass(frozen=True, kw_only=True)
class JobPictures:
    """How the pictures of a job are read, and what was found in them."""

    rows: PictureRows
    placeholders: frozenset[int]
    loss_on_placeholders: bool
    mask_thinking: bool
    turns_only: bool  # the assistant's turns are found by their prefixes
    last_answer: bool  # only the last answer of a conversation can be learned
    tokens: Mapping[str, DataSummary]  # by split, ``train`` and ``eval``
    summaries: Mapping[str, PictureSummary]
    lengths: Mapping[str, Sequence[int]]  # tokens of each row after cutting
    largest: tuple[int, tuple[Any, ...]] = (0, ())  # of a row for training: its tokens of pictures, and their tensors
    small: Sequence[Mapping[str, Any]] = ()  # the first pictures for training, see `picture_check.CheckedPictures`

    def attach(self, trainer: VerifiedTransferMixin) -> None:
        """Put the trainer's collator behind ours, and the summaries where those of text rows are."""
        datasets = [rows for rows in (trainer.train_dataset, trainer.eval_dataset) if rows is not None]
        trainer.data_collator = self.around(trainer.data_collator, datasets)
        trainer.data_summaries = {**getattr(trainer, "data_summaries", {}), **self.tokens}

    def write_small(self, directory: Path, run_id: str) -> None:
        """Write the first pictures, small, for `hf-rocm-tune report`; the file is not part of the result."""
        content = {"run_id": run_id, "pictures": list(self.small)}
        write_text_atomic(directory / SMALL_PICTURES, json.dumps(content) + "\n")

    def around(self, stock: Any, datasets: list[Any]) -> PictureCollator:
        return PictureCollator(
            stock,
            self.rows,
            placeholders=self.placeholders,
            loss_on_placeholders=self.loss_on_placeholders,
            mask_thinking=self.mask_thinking,
            turns_only=self.turns_only,
            rows=datasets,
        )

    def lines(self) -> list[str]:
        """What is printed about the pictures."""
        lines: list[str] = []
        for summary in self.summaries.values():
            lines += summary.lines()
        if self.summaries and not self.loss_on_placeholders:
            lines.append("placeholder tokens of pictures do not count in the loss (TRL: --loss_on_picture_tokens)")
        if self.summaries and self.last_answer:
            lines.append(
                "this model reads all of a prompt at once: the last answer of a conversation is in the loss, and what "
                "stands before it is its prompt (TRL would show the model the answer that it learns)"
            )
        return lines


def undecoded(arguments: Arguments, splits: Splits, processor: Any) -> Splits:
    """The splits with their pictures as bytes or paths.

    UsageError: this model or method cannot be trained on pictures.
    """
    method = arguments.method
    if method == "grpo":
        return splits
    if not isinstance(processor, ProcessorMixin):
        name = arguments.model.model_name_or_path
        raise UsageError(f"the rows have pictures, and '{name}' is no vision-language model: give one, or rows of text")
    if method not in TRAINED:
        raise UsageError(f"the rows have pictures, which {method} does not train on: use {', '.join(TRAINED)}")
    if method != "sft" and takes_suffix(processor):
        raise UsageError(
            f"{type(processor).__name__} marks where a prompt ends, because its model reads all of a prompt at once; "
            f"TRL's {method} does not pass this on: train this model with sft"
        )
    train = pictures.undecoded(splits.train)
    evaluation = None if splits.eval is None else pictures.undecoded(splits.eval)
    return replace(splits, train=train, eval=evaluation)


def with_checked_pictures(
    arguments: Arguments, splits: Splits, processor: Any, config: Any, say: Callable[..., None]
) -> Splits:
    """The splits as TRL takes rows with pictures, and their pictures, all of which were looked at. Collective."""
    train = pictures.with_column(splits.train)
    evaluation = None if splits.eval is None else pictures.with_column(splits.eval)
    splits = replace(splits, train=train, eval=evaluation)
    placeholders = placeholder_ids(processor, config)
    processor = copy.deepcopy(processor)  # TRL gives it a token for padding
    tokenizer = processor.tokenizer
    tokenizer.pad_token = getattr(arguments.training, "pad_token", None) or tokenizer.pad_token or tokenizer.eos_token
    columns = columns_of(train)
    args: Any = arguments.training
    turns_only = getattr(args, "assistant_only_loss", False) is True
    last_answer = takes_suffix(processor) and "messages" in columns
    if turns_only and (last_answer or not template_is_marked(processor)):
        args.assistant_only_loss = False  # TRL would ask its template for marks
        if not last_answer:
            say("the chat template has no marks: the assistant's turns are found by their prefixes")
    else:
        turns_only = False
    prepared = JobPictures(
        rows=PictureRows(
            folders=_folders(arguments),
            tags=any(pictures.tagged(rows) for rows in (train, evaluation) if rows is not None),
            max_pixels=arguments.tune.max_pixels,
            as_rgb=not getattr(getattr(processor, "image_processor", None), "do_convert_rgb", False),
            literals=literals(processor, placeholders),
        ),
        placeholders=placeholders,
        loss_on_placeholders=bool(arguments.tune.loss_on_picture_tokens),
        mask_thinking=arguments.tune.mask_thinking,
        turns_only=turns_only and not last_answer,
        last_answer=last_answer,
        tokens={},
        summaries={},
        lengths={},
    )
    tokens = {}
    summaries = {}
    lengths = {}
    for split, rows in (("train", train), ("eval", evaluation)):
        if rows is None:
            continue
        collator = prepared.around(_stock_collator(arguments, processor, rows), [])
        result = on_main_process(partial(_check_split, rows, collator, split, say))
        lengths[split] = result.lengths
        if split == "train":
            prepared = replace(prepared, largest=result.largest, small=result.small)
        if result.tokens is not None:
            tokens[split] = result.tokens
        if result.pictures is not None:
            summaries[split] = result.pictures
    return replace(splits, pictures=replace(prepared, tokens=tokens, summaries=summaries, lengths=lengths))


def _check_split(rows: Rows, collator: PictureCollator, split: str, say: Callable[..., None]) -> Any:
    """Look through one split, with a line that is rewritten in a terminal."""
    total = len(rows) if hasattr(rows, "__len__") else 0
    if total >= _BAR_ROWS:
        say(f"looking through the pictures of {total:,} {split} rows")
    shown = total >= _BAR_ROWS and sys.stderr.isatty()

    def progress(done: int) -> None:
        if shown and (done % 50 == 0 or done == total):
            end = "\n" if done == total else ""
            print(f"\r  {done:,} of {total:,} rows", end=end, file=sys.stderr, flush=True)

    return check_pictures(rows, collator, split, progress=progress)


def _folders(arguments: Arguments) -> tuple[Path, ...]:
    """Where relative paths of pictures are looked up: in ``--image_folder``, or beside the data files."""
    if arguments.tune.image_folder is not None:
        folder = expand_user(arguments.tune.image_folder)
        if not os.path.isdir(folder):
            raise UsageError(f"--image_folder {arguments.tune.image_folder} is no directory")
        return (folder.absolute(),)
    names = [arguments.script.dataset_name]
    for part in arguments.mixture.datasets or ():
        names += [part.data_dir, *_file_names(part.data_files), part.path]
    folders = []
    for name in names:
        path = expand_user(name).absolute() if name else None
        if path is not None and path.exists():
            folders.append(path if path.is_dir() else path.parent)
    return tuple(folders)


def _file_names(data_files: Any) -> list[Any]:
    """The files of a source in a mixture: one, a list, or one or a list for every split."""
    entries = [data_files]
    if isinstance(data_files, Mapping):
        entries = list(data_files.values())
    names: list[Any] = []
    for entry in entries:
        if isinstance(entry, list | tuple):
            names.extend(entry)
        else:
            names.append(entry)
    return names


def _stock_collator(arguments: Arguments, processor: Any, rows: Rows) -> Any:
    """The collator that TRL makes for these rows, see the constructors of its trainers in 1.16."""
    args: Any = arguments.training
    common = {"processor": processor, "max_length": args.max_length, "pad_to_multiple_of": args.pad_to_multiple_of}
    if arguments.method == "dpo":
        from trl.trainer.dpo_trainer import DataCollatorForVisionPreference

        return DataCollatorForVisionPreference(**common)
    if arguments.method == "kto":
        from trl.trainer.kto_trainer import DataCollatorForVisionUnpairedPreference

        return DataCollatorForVisionUnpairedPreference(calculate_kl=False, **common)
    from trl.chat_template_utils import get_training_chat_template, has_generation_markers
    from trl.trainer.sft_trainer import DataCollatorForVisionLanguageModeling

    columns = columns_of(rows)
    completion_only = args.completion_only_loss
    if completion_only is None:
        completion_only = "prompt" in columns and "completion" in columns
    template = None
    if args.assistant_only_loss and not has_generation_markers(processor.chat_template):
        template = get_training_chat_template(processor)
    return DataCollatorForVisionLanguageModeling(
        completion_only_loss=completion_only,
        dataset_text_field=args.dataset_text_field,
        assistant_only_loss=args.assistant_only_loss,
        chat_template=template,
        **common,
    )
