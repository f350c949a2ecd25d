"""Out-of-memory recovery: a step that runs out of memory is retried with the same samples in smaller micro-batches.

With several ranks the others wait in a collective that cannot be undone: the job ends (code 5), and the same command
continues from the newest checkpoint with smaller parts. The parts add up to the whole exactly for losses normalised by
label tokens and means over a micro-batch; not for terms over a micro-batch as a whole (balance of experts, KTO's KL,
DPO's ``aot`` and ``sft``), random draws, TRL's logged entropy and accuracy. Not covered: clipping, the optimizer's
step; FSDP, DeepSpeed, tensor and context parallelism, static graphs; batches with unknown tensors.
"""

from __future__ import annotations

import itertools
import json
import logging
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

import numpy
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from hf_rocm_tune import upstream
from hf_rocm_tune.cards.agree import all_gather_floats, on_main_process
from hf_rocm_tune.cards.strategy import Stock
from hf_rocm_tune.data.loader import IN_ROW
from hf_rocm_tune.errors import OutOfMemoryError, device_shortage
from hf_rocm_tune.models.placement import release_memory
from hf_rocm_tune.models.trainer_parts import OwningTrainer
from hf_rocm_tune.survive.atomic import write_text_atomic
from hf_rocm_tune.transfer import map_tensors

logger = logging.getLogger(__name__)

STATE_FILE = "_step_down.json"


# ---- splitting a micro-batch --------------------------------------------------------------------------------

# By row, pair or sequence: [units, ...], of pairs also [2 * units, ...] (chosen, then rejected); packed [1, tokens].
_KNOWN = frozenset([
    "input_ids", "attention_mask", "labels", "shift_labels", "position_ids", "token_type_ids", "inputs_embeds",
    "completion_mask", "assistant_masks", "seq_idx", "ref_chosen_logps", "ref_rejected_logps", "margin", "label",
    "KL_input_ids", "KL_attention_mask", "KL_completion_mask", "ref_logps", "ref_KL_logps", "mm_token_type_ids", IN_ROW,
])  # fmt: skip
_BOUNDARIES = frozenset(["cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k"])
_IGNORED_LABEL = -100


class Layout(NamedTuple):
    """How a batch may be split."""

    kind: str  # rows, pairs, unpaired, packed, whole
    sizes: tuple[int, ...]  # tokens of each unit (row, pair, sequence, or the batch) in order, padding included
    reason: str | None = None  # why it cannot be split
    owned: Mapping[
        str, tuple[int, ...]
    ] = {}  # of tensors of pictures: their length in each unit, of pairs in both halves


class BatchPart(NamedTuple):
    """One part of a micro-batch."""

    layout: Layout
    inputs: dict[str, Any]  # given to the trainer instead of the batch
    units: range  # the rows, pairs or sequences of the batch that it holds
    tokens: int  # padding included
    share: float  # of the batch's labels that count in the loss; the shares of all parts add up to 1


def layout(batch: Mapping[str, Any], *, pairs: bool = False) -> Layout:
    """How this batch of host tensors may be split; ``pairs``: its rows are all chosen, then all rejected answers."""
    first = batch.get("input_ids", batch.get("labels"))
    tensors = {name: value for name, value in batch.items() if isinstance(value, Tensor)}
    if not isinstance(first, Tensor) or first.dim() == 0:
        return Layout("whole", (1,), "it has no input_ids")
    tokens = first.numel()
    positions = tensors.get("position_ids")
    kind = "rows"
    if pairs:
        kind = "pairs"
    elif "label" in tensors and "completion_mask" in tensors:
        kind = "unpaired"
    if kind == "rows" and "labels" not in tensors:
        return Layout("whole", (tokens,), "it has no labels by which to weight its parts")
    if kind == "rows" and positions is not None and positions.shape == first.shape == (1, tokens):
        kind = "packed"
    units = len(first) // 2 if pairs else len(first)
    owned: dict[str, tuple[int, ...]] = {}

    for name, value in tensors.items():
        if kind == "packed":
            fits = name in _BOUNDARIES or value.shape == (1, tokens)
        elif IN_ROW in tensors and name not in _KNOWN:
            lengths = _lengths_in_units(value, tensors[IN_ROW], halves=2 if pairs else 1)
            if lengths is not None:
                owned[name] = lengths
                continue
            fits = False
        else:
            fits = value.dim() > 0 and len(value) in (units, 2 * units if pairs else units)
        if not fits or name not in _KNOWN | _BOUNDARIES:
            return Layout("whole", (tokens,), f"it is not known how to split its {name}")
    if kind == "packed":
        return Layout(kind, _sizes_of_sequences(batch))
    if "KL_input_ids" in batch:
        tokens += batch["KL_input_ids"].numel()
    return Layout(kind, (tokens // units,) * units, owned=owned)


def _lengths_in_units(value: Tensor, in_row: Tensor, *, halves: int) -> tuple[int, ...] | None:
    """How many entries of a tensor of pictures belong to each row; None: it is not known.

    A tensor has an entry for each row (SmolVLM), for each picture (LLaVA, and sizes), or for each patch or tile, whose
    number is in the same ratio to the placeholder tokens in each row (Qwen-VL, InternVL). ``halves``: 2 where pixels
    are there twice, for chosen and for rejected answers; then the lengths are those in each half.
    """
    pictures, tokens, stacks = in_row.unbind(dim=1)
    count, uneven = divmod(len(value), halves) if value.dim() else (0, 1)
    total = int(pictures.sum())
    placeholders = int(tokens.sum())
    if uneven:
        return None
    if count == len(in_row) and (count != total or stacks.any()):
        return (1,) * len(in_row)
    if count == total:
        return tuple(pictures.tolist())
    shares = tokens * count
    if placeholders and not (shares % placeholders).any():
        return tuple((shares // placeholders).tolist())
    return None


def _sizes_of_sequences(batch: Mapping[str, Any]) -> tuple[int, ...]:
    positions: Tensor = batch["position_ids"]
    starts = _starts(positions)
    if positions.any():
        # Padding at the end has position 0 too; it stays with the last real sequence.
        starts[int(positions[0].nonzero()[-1]) + 1 :] = False
    if "shift_labels" not in batch:
        # A label at a start is predicted from the last token of the sequence before: those two stay together.
        starts[1:] &= batch["labels"][0, 1:] == _IGNORED_LABEL
    begins = starts.nonzero().flatten().tolist()
    return tuple(end - begin for begin, end in itertools.pairwise([*begins, positions.numel()]))


def _starts(positions: Tensor) -> Tensor:
    starts = positions[0] == 0
    starts[0] = True
    return starts


def group(sizes: Sequence[int], parts: int) -> list[range]:
    """Join units of these sizes, in order, into at most ``parts`` groups of about the same size, each unit by its
    middle."""
    total = 2 * sum(sizes)
    ends = itertools.accumulate(sizes)
    groups = [(2 * end - size - 1) * parts // total for end, size in zip(ends, sizes, strict=True)]
    begins = [0]
    for unit in range(1, len(sizes)):
        if groups[unit] != groups[unit - 1]:
            begins.append(unit)
    return [range(begin, end) for begin, end in itertools.pairwise([*begins, len(sizes)])]


def split(batch: Mapping[str, Any], divisor: int, *, labels_shifted: bool, pairs: bool = False) -> list[BatchPart]:
    """Split a batch of host tensors into at most ``divisor`` parts, which are views of it where possible."""
    how = layout(batch, pairs=pairs)
    groups = group(how.sizes, divisor)
    if len(groups) == 1:
        return [BatchPart(how, dict(batch), groups[0], sum(how.sizes), 1.0)]
    tokens = [sum(how.sizes[unit] for unit in units) for units in groups]
    if how.kind == "packed":
        ends = itertools.accumulate(tokens)
        inputs = [_sequences(batch, end - size, end) for end, size in zip(ends, tokens, strict=True)]
    else:
        inputs = [_units_of(batch, how, units) for units in groups]
    if how.kind in ("pairs", "unpaired"):
        weights = [len(units) for units in groups]
    else:
        weights = [_labels_that_count(part, shifted=labels_shifted) for part in inputs]
        if not any(weights):
            weights = tokens
    total = sum(weights)
    parts = []
    for part, units, size, weight in zip(inputs, groups, tokens, weights, strict=True):
        parts.append(BatchPart(how, part, units, size, weight / total))
    return parts


def _units_of(batch: Mapping[str, Any], how: Layout, units: range) -> dict[str, Any]:
    """Some rows or pairs of a batch, with their entries of tensors of pictures."""
    inputs: dict[str, Any] = {}
    for name, value in batch.items():
        if name in how.owned:
            inputs[name] = _entries(value, units, how.owned[name])
        else:
            inputs[name] = _rows(value, units, len(how.sizes))
    if IN_ROW in inputs and not inputs[IN_ROW][:, 0].any():
        # the model is given no pixels, instead of pixels of none
        for name in (*how.owned, IN_ROW):
            del inputs[name]
    return inputs


def _rows(value: Any, units: range, count: int) -> Any:
    """The rows of some units of a tensor with ``count`` rows, or with ``2 * count`` rows: then those of both halves."""
    if not isinstance(value, Tensor) or len(value) == count:
        return value[units.start : units.stop] if isinstance(value, Tensor) else value
    return value.unflatten(0, (2, count))[:, units.start : units.stop].flatten(0, 1)


def _entries(value: Tensor, units: range, lengths: Sequence[int]) -> Tensor:
    """The entries of some units of a tensor of pictures, of both halves if it has twice their lengths."""
    first = sum(lengths[: units.start])
    last = sum(lengths[: units.stop])
    halves = value.split(sum(lengths))
    parts = [half[first:last] for half in halves]
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _labels_that_count(inputs: Mapping[str, Any], *, shifted: bool) -> int:
    labels = inputs.get("shift_labels", inputs["labels"])
    if shifted and labels.dim() > 1 and "shift_labels" not in inputs:
        labels = labels[..., 1:]
    return int(labels.ne(_IGNORED_LABEL).sum())


def _sequences(batch: Mapping[str, Any], begin: int, end: int) -> dict[str, Any]:
    """The sequences in tokens [begin, end) of a packed batch."""
    inputs = dict(batch)
    for name, value in batch.items():
        if isinstance(value, Tensor) and name in _KNOWN:
            inputs[name] = value[:, begin:end]
    if "seq_idx" in inputs:
        inputs["seq_idx"] = inputs["seq_idx"] - inputs["seq_idx"][0, 0]
    starts = _starts(inputs["position_ids"]).nonzero().flatten()
    boundaries = torch.cat([starts, starts.new_tensor([end - begin])])
    for name in _BOUNDARIES & inputs.keys():
        value = boundaries if name.startswith("cu_seq_lens") else boundaries.diff().max()
        like = batch[name]
        inputs[name] = value.to(like.dtype) if isinstance(like, Tensor) else int(value)
    return inputs


# ---- rewinding an optimizer step ----------------------------------------------------------------------------


def metrics_of(trainer: OwningTrainer) -> dict[str, dict[str, list[Any]]]:
    """What TRL's trainers have recorded since the last log, by mode and name; empty for other trainers."""
    metrics: dict[str, dict[str, list[Any]]] | None = upstream.read("metrics", trainer)
    if metrics is None and any(base.__module__.startswith("trl.") for base in type(trainer).__mro__):
        _warn_of_metrics(metadata.version("trl"))
    return metrics or {}


@cache
def _warn_of_metrics(version: str) -> None:
    logger.warning(
        "TRL %s keeps its metrics where they are not known: those of a step that is repeated are logged twice", version
    )


class StepWindow:
    """The current optimizer step: its micro-batches so far, and the state needed to repeat them.

    Rewinding restores random states and what the trainer has logged (TRL's metrics and token count), and drops
    gradients (there are none at the start of a step). Offloaded activations are freed with the graph that saved them.
    """

    def __init__(self, trainer: OwningTrainer) -> None:
        self._trainer = trainer
        self.batches: list[Mapping[str, Any]] = []  # of the micro-steps so far, as host tensors
        cards = [device for device in trainer.devices if device.type == "cuda"]
        self._random = random.getstate(), numpy.random.get_state(), torch.get_rng_state()
        self._cards = [(torch.cuda.get_rng_state(card), card) for card in cards]
        self._metrics: dict[str, list[float]] = metrics_of(trainer).get("train", {})
        self._lengths = {name: len(values) for name, values in self._metrics.items()}
        self._tokens = self.tokens

    @property
    def tokens(self) -> Any:
        """The tokens that TRL's trainers have counted so far and log as ``num_tokens``; 0 for other trainers."""
        counted = upstream.read("trained_tokens", self._trainer)
        return 0 if counted is None else counted

    def set_tokens(self, number: Any) -> None:
        if upstream.read("trained_tokens", self._trainer) is not None:
            upstream.assign("trained_tokens", self._trainer, number)
        if "num_tokens" in self._metrics:
            self._metrics["num_tokens"] = [number]

    def rewind(self, model: nn.Module) -> None:
        """Return to the start of the step and release the memory that was taken since."""
        model.zero_grad()
        release_memory()
        self.restore(model)

    def restore(self, model: nn.Module) -> None:
        """As `rewind`, but memory stays in the cache."""
        model.zero_grad()
        for name in list(self._metrics):
            del self._metrics[name][self._lengths.get(name, 0) :]
            if name not in self._lengths:
                del self._metrics[name]
        self.set_tokens(self._tokens)
        random.setstate(self._random[0])
        numpy.random.set_state(self._random[1])
        torch.set_rng_state(self._random[2])
        for state, device in self._cards:
            torch.cuda.set_rng_state(state, device)


# ---- the recovery -------------------------------------------------------------------------------------------


class OutOfMemoryRecovery:
    """See the module's description. ``divisor``: the most parts into which micro-batches are split, the same on all
    ranks, never decreasing; ``loss_factor``: by which the trainer must multiply the loss of the current part; ``on``:
    whether steps are repeated."""

    def __init__(self, trainer: OwningTrainer) -> None:
        self._trainer = trainer
        self.on = False
        self.divisor = 1
        self._window: StepWindow | None = None
        self._at: tuple[int, BatchPart | None] = 0, None  # the micro-step in the window, and the part of it, if known
        self.loss_factor = 1.0

    def prepare(self, *, stop: bool, resumed: bool) -> None:
        """A training begins, with its model wrapped; ``stop``: an error ends the run. Collective."""
        trainer = self._trainer
        wrapped = getattr(trainer.model_wrapped, "_orig_mod", trainer.model_wrapped)  # torch.compile is around DDP
        shared = max(trainer.get_tp_size(), trainer.get_cp_size(), trainer.get_sp_size(), trainer.args.n_gpu) > 1
        plain = isinstance(wrapped, DistributedDataParallel) and not wrapped.static_graph
        self.on = not (stop or shared or trainer.is_sharded or (trainer.args.world_size > 1 and not plain))
        self.divisor = 1
        if self.on:
            self.divisor, incident = on_main_process(lambda: read_state(trainer, resumed=resumed))
            if incident is not None and trainer.is_world_process_zero():
                _count_shortages(trainer, [incident], "recovered")  # by this restart

    def begin_step(self) -> None:
        self._window = None

    def run(self, stock: Stock, model: nn.Module, inputs: Mapping[str, Any], num_items: Any) -> Tensor:
        """One micro-step: the loss of the micro-batch as upstream's ``stock`` would give it, detached, shape []."""
        trainer = self._trainer
        if not self.on:
            part = self._parts(trainer.host_batch(inputs), 1)[0] if trainer.step_faults.wanted else None
            with self._fault(model, part):
                return stock(model, inputs, num_items)
        window = self._window = self._window or StepWindow(trainer)
        window.batches.append(trainer.host_batch(inputs))
        last = len(window.batches) - 1
        shortages: list[dict[str, Any]] = []
        todo: list[tuple[int, Mapping[str, Any]]] = [(last, inputs)]
        while True:
            try:
                for number, batch in todo:
                    loss = self._micro_step(window, stock, model, number, batch, num_items)
                self._at = last, None
                if trainer.accelerator.sync_gradients:
                    trainer.strategy.collect()
                break
            except RuntimeError as error:  # it keeps every activation alive until this block ends
                shortage = device_shortage(error)
                if shortage is None:
                    raise
            self._step_down(window, shortage, shortages)
            window.rewind(model)
            todo = list(enumerate(window.batches))
        _count_shortages(trainer, shortages, "recovered")
        return loss

    @property
    def has_start(self) -> bool:
        """Whether `repeat` can compute the current step again: its batches did not need to be generated."""
        return self._window is not None

    def repeat(
        self, stock: Stock, model: nn.Module, num_items: Any, after_first: Callable[[Tensor], None]
    ) -> list[Tensor]:
        """Compute the whole optimizer step again, after its last micro-step. Returns the losses.

        Random states are those of its first time, and gradients are averaged over ranks again. ``after_first`` is given
        the loss of the first micro-step while there are no gradients but its own.
        """
        window = self._window
        accelerator = self._trainer.accelerator
        assert window is not None
        window.rewind(model)
        losses = []
        for number, batch in enumerate(window.batches):
            last = number == len(window.batches) - 1
            accelerator.sync_gradients = last
            with nullcontext() if last else accelerator.no_sync(model):
                losses.append(self._micro_step(window, stock, model, number, batch, num_items))
            if number == 0:
                after_first(losses[0])
        self._trainer.strategy.collect()
        return losses

    def _micro_step(
        self, window: StepWindow, stock: Stock, model: nn.Module, number: int, batch: Mapping[str, Any], num_items: Any
    ) -> Tensor:
        """Compute the gradients of one micro-batch, part by part. Returns its loss."""
        trainer = self._trainer
        whole = window.batches[number]
        # The host tensors are verified again if they are used: without a split or a repetition only their shapes are.
        if self.divisor > 1 or batch is whole:
            trainer.mover.require_unchanged(whole)
        # How a micro-batch could be split is looked up only where it is split; after an error `_step_down` does it.
        parts: Sequence[BatchPart | None] = [None]
        if self.divisor > 1 or trainer.step_faults.wanted:
            parts = self._parts(whole, self.divisor)
        apart = self.divisor > 1 and trainer.args.world_size > 1
        before = window.tokens
        losses = []
        with local_gathers(trainer.accelerator, apart):  # ranks may have different numbers of parts
            for part in parts:
                self._at = number, part
                with ExitStack() as stack:
                    stack.enter_context(self._as_one_of(len(parts), part, num_items))
                    stack.enter_context(self._fault(model, part))
                    if part is not parts[-1]:
                        stack.enter_context(trainer.accelerator.no_sync(model))
                    micro_batch = batch if part is None or self.divisor == 1 else part.inputs
                    losses.append(stock(model, micro_batch, num_items))
                trainer.beat("step")
        if apart:
            window.set_tokens(before + round(sum(row[0] for row in all_gather_floats([window.tokens - before]))))
        return losses[0] if len(losses) == 1 else torch.stack(losses).sum()

    def _parts(self, batch: Mapping[str, Any], divisor: int) -> list[BatchPart]:
        """`split` as it fits this trainer's loss and collator (that of TRL's DPO and reward models makes pairs)."""
        collator = self._trainer.data_collator
        kind = type(getattr(collator, "stock", collator)).__name__  # ours is around TRL's for pictures
        pairs = kind in ("DataCollatorForPreference", "DataCollatorForVisionPreference")
        shifted = bool(upstream.read("shifted_labels", self._trainer))
        return split(batch, divisor, labels_shifted=shifted, pairs=pairs)

    def _fault(self, model: nn.Module, part: BatchPart | None) -> AbstractContextManager[None]:
        if part is None:
            return nullcontext()
        step = self._trainer.state.global_step + 1
        return self._trainer.step_faults.during(model, step=step, rows=len(part.units))

    @contextmanager
    def _as_one_of(self, parts: int, part: BatchPart | None, num_items: Any) -> Iterator[None]:
        """Adjust upstream's division by the accumulation steps of losses that no token count has normalised."""
        if part is None:
            yield
            return
        trainer = self._trainer
        steps = trainer.current_gradient_accumulation_steps
        trainer.current_gradient_accumulation_steps = steps * parts
        if parts > 1 and _takes_a_mean(trainer, num_items):
            self.loss_factor = part.share * parts
        elif parts > 1 and num_items is None:
            self.loss_factor = part.share
        try:
            yield
        finally:
            trainer.current_gradient_accumulation_steps = steps
            self.loss_factor = 1.0

    def _step_down(self, window: StepWindow, shortage: str, shortages: list[dict[str, Any]]) -> None:
        """Use smaller parts from now on, or end the run, after a ``shortage`` in torch's words. Adds to ``shortages``.

        Until the memory is released it allocates none on the device.
        """
        trainer = self._trainer
        args = trainer.args
        step = trainer.state.global_step + 1
        number, part = self._at
        part = part or self._parts(window.batches[number], 1)[0]
        rows = len(part.units)
        several = args.world_size > 1
        incident = {
            "step": step,
            "stage": "memory",
            "kind": "out of memory",
            "micro_step": number + 1,
            "rows": rows,
            "tokens": part.tokens,
            "divisor": self.divisor,
            "said": shortage,
        }
        shortages.append(incident)
        pictures = _describe_pictures(part.inputs)
        unit = {"packed": "sequence", "pairs": "pair"}.get(part.layout.kind, "row")
        if rows > 1:
            unit += "s"
        what = f"out of memory with {rows} {unit} ({part.tokens} tokens{pictures}) at step {step}"
        if several:
            what = f"rank {args.process_index}: {what}"
        fewer = not several and trainer.strategy.fewer_in_flight()
        if not fewer and rows == 1:
            _count_shortages(trainer, shortages, "failed")
            why = part.layout.reason or "the micro-batch cannot be split further"
            largest = getattr(getattr(trainer.data_collator, "pictures", None), "max_pixels", None)
            fewer_pixels = f"give fewer tokens a picture with --max_pixels (it is {largest}), "
            raise OutOfMemoryError(
                f"{what}; {why} ({shortage}): {fewer_pixels if pictures else ''}lower --max_length (it is "
                f"{getattr(args, 'max_length', None)}), turn --gradient_checkpointing on, add --load_in_4bit, or see "
                "what fits with `hf-rocm-tune plan`"
            )
        if not fewer:
            self.divisor *= 4 if several else 2  # with several ranks each further shortage costs a restart
        cut = f"micro-batches split into up to {self.divisor} parts (the effective batch stays the same)"
        if several:
            self._write_state({**incident, "on_rank": args.process_index})
            raise OutOfMemoryError(
                f"{what} ({shortage}): start the same command again, it continues from the newest checkpoint with {cut}"
            )
        self._write_state(None)
        logger.warning("%s; the step is repeated, from now on with %s", what, cut)

    def _write_state(self, incident: Mapping[str, Any] | None) -> None:
        """Record the divisor beside the checkpoints, so that a restart begins with it."""
        trainer = self._trainer
        directory = Path(trainer.args.output_dir)
        size = trainer.args.per_device_train_batch_size
        body = {"run_id": trainer.run_id, "batch_size": size, "divisor": self.divisor, "incident": incident}
        with suppress(OSError):  # a restart then begins with undivided micro-batches
            directory.mkdir(parents=True, exist_ok=True)
            write_text_atomic(directory / STATE_FILE, json.dumps(body) + "\n")


def _describe_pictures(inputs: Mapping[str, Any]) -> str:
    """What a message says of the pictures of a part; empty: it has none."""
    in_row = inputs.get(IN_ROW)
    if not isinstance(in_row, Tensor):
        return ""
    pictures, tokens, _ = in_row.sum(dim=0).tolist()
    noun = "picture" if pictures == 1 else "pictures"
    return f", {tokens} of them of {pictures} {noun}"


def evaluated(trainer: OwningTrainer, evaluate: Callable[[], Any], *, on_oom: str) -> Any:
    """The result of an evaluation, repeated with half as many rows at a time while memory runs out."""
    args = trainer.args
    state = trainer.accelerator.gradient_state
    loaders = state.dataloader_references
    logged = metrics_of(trainer).get("eval", {})
    shortages: list[dict[str, Any]] = []
    while True:
        try:
            result = evaluate()
            _count_shortages(trainer, shortages, "recovered")
            return result
        except RuntimeError as error:  # the tensors it refers to are freed with this frame
            shortage = device_shortage(error)
            if shortage is None:
                raise
        size = args.per_device_eval_batch_size
        row = {"step": trainer.state.global_step, "stage": "memory", "kind": "out of memory in evaluation"}
        shortages.append({**row, "rows": size, "said": shortage})
        generates = hasattr(trainer, "num_generations")  # GRPO's batches are groups of answers
        if size == 1 or args.world_size > 1 or on_oom == "stop" or generates:
            _count_shortages(trainer, shortages, "failed")
            raise OutOfMemoryError(
                f"no memory to evaluate {size} rows at a time ({shortage}): give a smaller "
                "--per_device_eval_batch_size or --eval_strategy no"
            )
        state.dataloader_references = loaders  # the interrupted loader has not left them
        (upstream.read("evaluation_loaders", trainer) or {}).clear()  # of the former size
        logged.clear()
        release_memory()
        args.per_device_eval_batch_size = size // 2
        logger.warning("no memory to evaluate %d rows at a time (%s): %d from now on", size, shortage, size // 2)


def _count_shortages(trainer: OwningTrainer, shortages: Sequence[dict[str, Any]], outcome: str) -> None:
    report = trainer.transfer_report
    recovered = len(shortages) if outcome == "recovered" else 0
    report.count("memory", shortages=len(shortages), recovered=recovered)
    for shortage in shortages:
        report.incident({**shortage, "outcome": outcome})


def read_state(trainer: OwningTrainer, *, resumed: bool) -> tuple[int, dict[str, Any] | None]:
    """The divisor recorded for this run (1 without a record), and the incident that ended its last start, if any; a
    user's own trainer has no run id: then only what resumes counts."""
    with suppress(OSError, ValueError, TypeError, KeyError):  # a file that is not there, or not ours, says nothing
        body = json.loads((Path(trainer.args.output_dir) / STATE_FILE).read_text(encoding="utf-8"))
        same = (body["run_id"], body["batch_size"]) == (trainer.run_id, trainer.args.per_device_train_batch_size)
        if same and (trainer.run_id or resumed):
            return max(1, int(body["divisor"])), body.get("incident")
    return 1, None


@contextmanager
def local_gathers(accelerator: Any, on: bool = True) -> Iterator[None]:
    """Within the block gathering metrics returns this rank's values only, so that no rank waits for another."""
    if not on:
        yield
        return
    accelerator.gather = lambda tree: map_tensors(tree, torch.atleast_1d)  # as upstream's shapes
    try:
        yield
    finally:
        del accelerator.gather


def _takes_a_mean(trainer: OwningTrainer, num_items: Any) -> bool:
    """Whether upstream treats the loss as a mean over the micro-batch and divides it by the accumulation steps."""
    if trainer.loss_is_scaled_for_ga is not None:
        return not trainer.loss_is_scaled_for_ga
    counted = trainer.model_accepts_loss_kwargs and num_items is not None
    return not counted and trainer.compute_loss_func is None
