"""From a dataset's name to the rows that are trained on: one path for a run, ``--dry_run`` and `plan --dataset`.

`load_rows` reads, checks and converts them; a trainer tokenises them; `finish_rows` masks what the flags and the rows
themselves leave out of the loss, refuses what teaches nothing, and counts the rest.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from datasets import IterableDataset

from hf_rocm_tune.data import masks, rendering
from hf_rocm_tune.data.formats import RowFinding, as_trl, check_format, check_later, place_of, with_decoded_calls
from hf_rocm_tune.data.sources import Splits, has_pictures, load_mixture, load_source
from hf_rocm_tune.data.summary import DataSummary, of_pairs, of_trained
from hf_rocm_tune.data.trl_calls import render_by_tokenizer
from hf_rocm_tune.errors import UsageError
from hf_rocm_tune.job import announce
from hf_rocm_tune.models.factory import ModelSource, read_config, stop_ids
from hf_rocm_tune.train.refusals import check_rows

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from hf_rocm_tune.data.sources import Rows
    from hf_rocm_tune.settings.arguments import Arguments
    from hf_rocm_tune.train.trainer import VerifiedTransferMixin


_COUNTED = {"messages": "the assistant's answers", "prompt_completion": "completions", "text": "all tokens"}
"""What counts in the loss of `sft` by default, and of conversations with ``--assistant_only_loss``."""


def load_rows(
    arguments: Arguments, tokenizer: PreTrainedTokenizerBase, source: ModelSource, vocabulary: int | None
) -> Splits:
    """The rows, checked, with the columns that the trainer reads; a change of columns is printed.

    ``tokenizer``: of rows of text, a processor without a chat template is given its tokenizer's.
    """
    script, training = arguments.script, arguments.training
    seed = training.data_seed
    if seed is None:
        seed = training.seed
    splits: dict[str, Any] = {
        "train_split": script.dataset_train_split,
        "test_split": script.dataset_test_split,
        "need_eval": training.eval_strategy != "no",
        "seed": seed,
    }
    if arguments.mixture.datasets:
        loaded = load_mixture(arguments.mixture, **splits)
    else:
        loaded = load_source(
            script.dataset_name,
            config=script.dataset_config,
            streaming=script.dataset_streaming,
            eval_split_size=arguments.tune.eval_rows,
            **splits,
        )
    announce.say(*loaded.notes)
    if arguments.is_streamed:
        several = training.dataloader_num_workers > 1
        order = "by several loader workers, each reading files of its own" if several else "in the order of the files"
        announce.say(f"streamed rows are trained on {order}: shuffle them there")
    pictured = any(has_pictures(rows) for rows in (loaded.train, loaded.eval) if rows is not None)
    if pictured:
        from hf_rocm_tune.job import pictures  # not imported for rows of text

        loaded = pictures.undecoded(arguments, loaded, tokenizer)
    else:
        render_by_tokenizer(tokenizer)
    prepare = partial(_prepared, arguments, tokenizer, vocabulary, loaded.in_csv)
    train, train_findings, conversational = prepare(loaded.train, "train")
    findings = {"train": train_findings}
    if conversational:
        check_turn_end(arguments, tokenizer, source)
    evaluation = None
    if loaded.eval is not None:
        evaluation, findings["eval"], _ = prepare(loaded.eval, "evaluation")
    if getattr(training, "assistant_only_loss", False) and "labels" in (train.column_names or next(iter(train))):
        training.assistant_only_loss = False  # done, see `masks`; TRL would ask its template for marks
    loaded = replace(loaded, train=train, eval=evaluation, findings=findings)
    if not pictured or arguments.method == "grpo":  # whose trainer reads pictures itself
        return loaded
    return pictures.with_checked_pictures(arguments, loaded, tokenizer, read_config(source), announce.say)


class _LateFindings:
    """Prints findings in rows of a stream behind those that were checked before the start, once for each kind."""

    def __init__(self, split: str, reported: set[str]) -> None:
        self._split = split
        self._reported = reported

    def report(self, finding: RowFinding) -> None:
        if finding.what in self._reported:
            return
        self._reported.add(finding.what)
        begin = "" if finding.by_design else "warning: "
        announce.say(f"{begin}{place_of(finding.first, self._split)}: {finding.what}")

    def report_row(self, check: Callable[..., list[RowFinding]], row: Any, number: int) -> None:
        for finding in check(row, number):
            self.report(finding)


def _accept(row: Any, number: int) -> None:
    """No check: a row of text has no structure."""


def check_turn_end(arguments: Arguments, tokenizer: PreTrainedTokenizerBase, source: ModelSource) -> None:
    """Says so where the chat template ends an answer with another token than those at which the base stops.

    Raises:
        UsageError: the template ends an answer with no token, or with one that the tokenizer does not have.
    """
    training: Any = arguments.training
    renderer = rendering.Renderer.of(tokenizer, training)
    if renderer is None or arguments.method != "sft" or not is_plain_template(training):
        return
    given = training.eos_token
    stops = stop_ids(source) | {tokenizer.eos_token_id if given is None else tokenizer.convert_tokens_to_ids(given)}
    end = rendering.turn_end(renderer, stops)
    if end is not None and end.stops and not end.after_last:
        announce.say(
            "warning: the chat template writes no end after the last answer of a row; generation stops at "
            f"{end.token}, which only rows with a further question teach"
        )
    if end is None or end.stops:
        return
    if end.token is not None:
        announce.say(
            f"the chat template ends an answer with {end.token}, at which the base does not stop: the result's "
            "generation_config.json has it"
        )
        return
    if end.like_token and end.pieces == 1:
        raise UsageError(
            f"the chat template writes nothing after an answer but '{end.like_token}', which opens the next question, "
            f"and at which {source.name} does not stop: let it stop there by --eos_token '{end.like_token}', or give a "
            "template that ends each answer with a token"
        )
    if end.like_token:
        raise UsageError(
            f"the chat template ends an answer with '{end.like_token}', which is {end.pieces} pieces of text to the "
            f"tokenizer of {source.name}, so that nothing would stop: give --chat_template_path a template for this "
            "tokenizer, a model whose template and tokens to take, or chatml, whose tokens are added"
        )
    raise UsageError(
        "the chat template ends an answer with no token, so that nothing would stop: give --chat_template_path a "
        "template that writes one, such as {{ eos_token }}, after each answer"
    )


def is_plain_template(training: Any) -> bool:
    """Whether the template is the tokenizer's or a file: of a model's, TRL takes the end token too."""
    path = getattr(training, "chat_template_path", None)
    return not path or path.endswith((".jinja", ".j2"))


def _opening(tokenizer: PreTrainedTokenizerBase) -> str | None:
    """The token with which a tokenizer, or that of a processor, begins each text."""
    tokenizer = getattr(tokenizer, "tokenizer", tokenizer)  # Llama 3.2 Vision's processor has the token, not its number
    begin = getattr(tokenizer, "bos_token", None)
    added = bool(begin) and tokenizer(text="a")["input_ids"][:1] == [tokenizer.bos_token_id]
    return str(begin) if added else None


def _prepared(
    arguments: Arguments,
    tokenizer: PreTrainedTokenizerBase,
    vocabulary: int | None,
    in_csv: bool,
    rows: Rows,
    split: str,
) -> tuple[Rows, tuple[RowFinding, ...], bool]:
    training = arguments.training
    template = getattr(training, "chat_template_path", None)
    turns_only = getattr(training, "assistant_only_loss", False)
    info = check_format(
        rows,
        method=arguments.method,
        assistant_only_loss=turns_only is True,
        completion_only_loss=getattr(training, "completion_only_loss", None),
        dataset_text_field=getattr(training, "dataset_text_field", "text"),
        has_chat_template=bool(template or getattr(tokenizer, "chat_template", None)),
        model_name=arguments.model.model_name_or_path,
        split=split,
        vocabulary=vocabulary,
        in_csv=in_csv,
        opening=_opening(tokenizer),
    )
    is_auto = turns_only == "auto"
    if is_auto:
        training.assistant_only_loss = turns_only = info.kind == "messages"
    rendered = rendering.Renderer.of(tokenizer, training)
    if info.text_arguments and rendered is not None and rendering.quotes_arguments(rendered):
        info = with_decoded_calls(info)
    if info.mapping:
        announce.say(f"the {split} rows become {info.description}: {info.mapping}")
    if is_auto:
        counted = _COUNTED.get(info.kind, "the tokens that they mark")
        announce.say(f"the rows are {info.description}: {counted} count in the loss (--assistant_only_loss auto)")
    if info.kind == "tokenized" and "completion_mask" in info.beside and training.completion_only_loss is None:
        training.completion_only_loss = True  # TRL would leave the column unread
    findings = info.findings
    pictures = {"image", "images"} & {*(rows.column_names or ())}
    readable = rendered is not None and is_plain_template(training)
    marked_pairs = info.kind == "prompt_completion" and info.marked and bool(info.messages)
    labelled = (info.kind == "messages" or marked_pairs) and readable and arguments.method == "sft"
    if info.conversational and rendered is not None and not pictures:
        findings += rendering.left_out(rows, info, rendered, split, marks_are_read=labelled)
    if isinstance(rows, IterableDataset):
        late = _LateFindings(split, {finding.what for finding in findings})
        renders: Callable[..., None] = _accept
        if info.conversational and rendered is not None and not pictures:
            check = partial(
                rendering.left_out_of_row, info=info, renderer=rendered, split=split, marks_are_read=labelled
            )
            renders = partial(late.report_row, check)
        rows = check_later(rows, info, split, renders, late.report)
    rows = as_trl(rows, info)
    if not labelled:
        return rows, findings, info.conversational
    unmarked = turns_only and not masks.template_is_marked(tokenizer)
    if unmarked:
        announce.say(
            f"the chat template has no marks: the assistant's turns of the {split} rows are found by their prefixes"
        )
    if unmarked or info.marked:
        rows = masks.with_labels(rows, tokenizer, split, turns_only=turns_only)
    return rows, findings, True


def finish_rows(arguments: Arguments, trainer: VerifiedTransferMixin, data: Splits) -> dict[str, DataSummary]:
    """What of each split a trainer will train on, after it has tokenised the rows.

    Rows that only have thinking are left out if that is masked. Not counted: streamed rows.

    Raises:
        UsageError: no row has a token to learn from.
    """
    masked = arguments.tune.mask_thinking and data.pictures is None  # whose collator masks it
    lost: dict[str, int] = {}
    if masked:
        for split in ("train", "eval"):
            rows = getattr(trainer, f"{split}_dataset")
            if rows is not None:
                rows, lost[split] = masks.without_thinking(rows, trainer.processing_class, split)
                setattr(trainer, f"{split}_dataset", rows)
    check_rows(trainer)
    summaries = _summaries(trainer, data)
    if masked:
        summaries = {
            name: of_trained(getattr(trainer, f"{name}_dataset"), row, lost[name]) for name, row in summaries.items()
        }
    if "train" in summaries and not summaries["train"].trained:
        raise UsageError(
            "no token of the train rows is in the loss, so that nothing would be learned: give rows with answers"
        )
    return {name: replace(row, findings=data.findings.get(name, ())) for name, row in summaries.items()}


def _summaries(trainer: VerifiedTransferMixin, data: Splits) -> dict[str, DataSummary]:
    """As TRL's trainer counted the rows, or from the rows of pairs that it made."""
    summaries: dict[str, DataSummary] = dict(getattr(trainer, "data_summaries", {}))
    for split in ("train", "eval"):
        before = getattr(data, split)
        after = getattr(trainer, f"{split}_dataset")
        if split in summaries or after is None:
            continue
        summary = of_pairs(after, trainer.args, before, split)
        if summary:
            summaries[split] = summary
    return summaries


def report_rows(summaries: dict[str, DataSummary], data: Splits, say: Callable[..., None]) -> None:
    """Says what is trained on; of streamed rows only what was found in those that were checked."""
    if data.pictures is not None:
        say(*data.pictures.lines())
    for summary in summaries.values():
        say(summary.line(), *summary.warnings())
    for split, findings in data.findings.items():
        if split not in summaries:
            say(*(f"{finding.line(split, finding.rows)}, of the rows that were checked" for finding in findings))
