"""A step that finds no memory on the device is done again with smaller micro-batches.

`OutOfMemoryRecovery.run` stands around every micro-step. In one process the optimizer step is put back to its start,
each micro-batch is cut into more parts than before, and the same samples are done again. Where not torch's allocator
was short but a library or the driver, which cannot use what that allocator keeps, the first try is repeated as it was:
the cache has been given back by then (pytorch#128601). With several ranks the others wait in a collective that cannot
be taken back, so the job ends with one line (code 5) and a note in the output directory: the same command goes on from
the newest checkpoint with smaller parts.

Each part's loss is scaled so that the parts add up to the whole: effective batch, number of optimizer steps and
learning rate stay, and so do loss and gradients up to rounding. Exact for losses normalised by the label tokens of the
optimizer step (``num_items_in_batch``) and for means over a micro-batch, whose parts are weighed by their labels. Not
exact: terms that are no sums over tokens (the load-balancing loss of a mixture of experts), random draws (dropout),
TRL's logged entropy and accuracy, and losses that look at a micro-batch as a whole (KTO's estimate of the KL
divergence, DPO's ``aot`` and ``sft``).

A padded batch is cut between rows, preference pairs between pairs, KTO's rows with their mismatched ones. A packed
batch has a single row in which the position starts again at 0 with each sequence: it is cut there, and what describes
the sequences (``cu_seq_lens``, ``max_length``, ``seq_idx``) is made anew. Batches with tensors of unknown meaning
(images), and those that a trainer generates, are not cut: for them one shortage is the end.

Not covered, where the error ends the run: evaluation, clipping, the optimizer's own step; FSDP, DeepSpeed, tensor and
context parallelism, static graphs; memory of the host; buffers of a model that change in ``forward``.
"""

from __future__ import annotations

import itertools
import json
import logging
import pickle
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from hf_rocm_tune.errors import OutOfMemoryError, device_shortage
from hf_rocm_tune.integrity.atomic import write_text_atomic
from hf_rocm_tune.models.placement import release_memory
from hf_rocm_tune.ranks.agree import everyone, on_main_process
from hf_rocm_tune.training.run import EVIDENCE_DIRECTORY
from hf_rocm_tune.transfer import map_tensors

if TYPE_CHECKING:
    from hf_rocm_tune.training.owner import Owner

logger = logging.getLogger(__name__)

Stock = Callable[[nn.Module, Any, Any], Tensor]
"""``Trainer.training_step`` as upstream has it: model, micro-batch, label tokens of the optimizer step."""

STATE_FILE = "_step_down.json"


# ---- cutting a micro-batch ----------------------------------------------------------------------------------

_BY_ROW = frozenset([
    "input_ids", "attention_mask", "labels", "shift_labels", "position_ids", "token_type_ids", "inputs_embeds",
    "decoder_input_ids", "decoder_attention_mask", "decoder_inputs_embeds", "completion_mask", "assistant_masks",
    "special_tokens_mask", "global_attention_mask",
])  # fmt: skip
"""Tensors of shape [rows, ...] in which row ``i`` is about example ``i`` and no other."""
_BY_TOKEN = frozenset([
    "input_ids", "labels", "shift_labels", "position_ids", "seq_idx", "completion_mask", "assistant_masks",
])  # fmt: skip
"""Tensors of shape [1, tokens] of a packed batch."""
_BY_PAIR = frozenset(
    ["input_ids", "attention_mask", "completion_mask", "ref_chosen_logps", "ref_rejected_logps", "margin"]
)
"""Tensors of a batch of pairs: of shape [2 * pairs, ...], chosen before rejected, or [pairs]."""
_UNPAIRED = frozenset([
    "input_ids", "attention_mask", "completion_mask", "KL_input_ids", "KL_attention_mask", "KL_completion_mask",
    "label", "ref_logps", "ref_KL_logps",
])  # fmt: skip
"""Tensors of shape [rows, ...] of KTO's batch."""
_BOUNDARIES = frozenset(["cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k"])
_IGNORED_LABEL = -100


@dataclass(frozen=True, kw_only=True)
class Layout:
    """How a batch may be cut."""

    kind: Literal["rows", "pairs", "unpaired", "packed", "whole"]
    sizes: tuple[int, ...]  # tokens of each unit in order, padding included: rows, pairs, sequences, or all of it
    reason: str | None = None  # why it must not be cut


@dataclass(frozen=True, kw_only=True)
class BatchPart:
    """One part of a micro-batch."""

    inputs: dict[str, Any]  # what the trainer is given in place of the batch
    units: range  # which rows or sequences of the batch it holds
    tokens: int  # padding included
    share: float  # of the batch's labels that count in the loss; those of all parts add up to 1


def layout(batch: Mapping[str, Any], *, pairs: bool = False) -> Layout:
    """How this batch of host tensors may be cut; ``pairs``: its rows are those of pairs, chosen before rejected."""
    first = batch.get("input_ids", batch.get("labels"))
    if not isinstance(first, Tensor) or first.dim() == 0:
        return Layout(kind="whole", sizes=(1,), reason="it has no input_ids")
    tokens = first.numel()
    unpaired = isinstance(batch.get("label"), Tensor) and "completion_mask" in batch
    if pairs or unpaired:
        units = len(first) // 2 if pairs else len(first)
        known, lengths = (_BY_PAIR, (units, 2 * units)) if pairs else (_UNPAIRED, (units,))
        for name, value in batch.items():
            if isinstance(value, Tensor) and (name not in known or value.dim() == 0 or len(value) not in lengths):
                return Layout(kind="whole", sizes=(tokens,), reason=f"it is not known how to cut its {name}")
        tokens += batch["KL_input_ids"].numel() if "KL_input_ids" in batch else 0
        return Layout(kind="pairs" if pairs else "unpaired", sizes=(tokens // units,) * units)
    if not isinstance(batch.get("labels"), Tensor):
        return Layout(kind="whole", sizes=(tokens,), reason="it has no labels by which its parts could be weighed")
    positions = batch.get("position_ids")
    tensors = {name: value for name, value in batch.items() if isinstance(value, Tensor)}
    if isinstance(positions, Tensor) and positions.shape == first.shape == (1, tokens):
        return _packed(batch, positions, tensors)
    rows = len(first)
    for name, value in tensors.items():
        if name not in _BY_ROW or value.dim() == 0 or len(value) != rows:
            return Layout(kind="whole", sizes=(tokens,), reason=f"it is not known how to cut its {name}")
    return Layout(kind="rows", sizes=(tokens // rows,) * rows)


def _packed(batch: Mapping[str, Any], positions: Tensor, tensors: Mapping[str, Tensor]) -> Layout:
    tokens = positions.numel()
    for name, value in tensors.items():
        if not (name in _BOUNDARIES or (name in _BY_TOKEN and value.shape == (1, tokens))):
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
    starts = positions[0] == 0
    starts[0] = True
    return starts


def group(sizes: Sequence[int], parts: int) -> list[range]:
    """Units of these sizes joined, in order, into at most ``parts`` groups, the largest one as small as can be."""
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


def split(batch: Mapping[str, Any], divisor: int, *, labels_shifted: bool, pairs: bool = False) -> list[BatchPart]:
    """Cut a batch of host tensors into at most ``divisor`` parts, which are views of it where that is possible.

    Args:
        batch: as the data collator made it; not changed.
        divisor: 1 or more.
        labels_shifted: whether the loss compares each token with the label after it (causal language models), so that
            the first label of a row counts for nothing.
        pairs: as in `layout`.

    Returns:
        The parts in order; a batch that cannot be cut is the only one.
    """
    found = layout(batch, pairs=pairs)
    groups = group(found.sizes, divisor)
    if len(groups) == 1:
        return [BatchPart(inputs=dict(batch), units=groups[0], tokens=sum(found.sizes), share=1.0)]
    tokens = [sum(found.sizes[number] for number in each) for each in groups]
    if found.kind != "packed":
        rows = len(found.sizes)
        inputs = [{name: _rows(value, each, rows) for name, value in batch.items()} for each in groups]
    else:
        ends = itertools.accumulate(tokens)
        inputs = [_sequences(batch, end - size, end) for end, size in zip(ends, tokens, strict=True)]
    if found.kind in ("pairs", "unpaired"):
        weights = [len(each) for each in groups]
    else:
        counts = [_labels_that_count(one, shifted=labels_shifted) for one in inputs]
        weights = counts if any(counts) else tokens
    return [
        BatchPart(inputs=one, units=each, tokens=size, share=weight / sum(weights))
        for one, each, size, weight in zip(inputs, groups, tokens, weights, strict=True)
    ]


def _rows(value: Any, units: range, count: int) -> Any:
    """Of a tensor of ``count`` units the rows of some; of one with twice as many rows those of both halves."""
    if not isinstance(value, Tensor):
        return value
    if len(value) == count:
        return value[units.start : units.stop]
    return value.unflatten(0, (2, count))[:, units.start : units.stop].flatten(0, 1)


def _labels_that_count(inputs: Mapping[str, Any], *, shifted: bool) -> int:
    if "shift_labels" in inputs:
        labels = inputs["shift_labels"]
    else:
        labels = inputs["labels"][..., 1:] if shifted and inputs["labels"].dim() > 1 else inputs["labels"]
    return int(labels.ne(_IGNORED_LABEL).sum())


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
        value, like = boundaries if name.startswith("cu_seq_lens") else boundaries.diff().max(), batch[name]
        inputs[name] = value.to(like.dtype) if isinstance(like, Tensor) else int(value)
    return inputs


def parts_of(trainer: Owner, batch: Mapping[str, Any], divisor: int) -> list[BatchPart]:
    """`split` for what this trainer's loss and collator do."""
    return split(batch, divisor, labels_shifted=trainer._loss_shifts_labels, pairs=has_pairs(trainer))


def has_pairs(trainer: Owner) -> bool:
    """Whether the rows of a batch are chosen answers, then as many rejected ones (TRL's DPO and reward models)."""
    return type(trainer.data_collator).__name__ == "DataCollatorForPreference"


# ---- an optimizer step that can be put back to its start ----------------------------------------------------


class RandomState:
    """The random state of this process and its devices, as it is now."""

    def __init__(self, *devices: torch.device) -> None:
        self._python = random.getstate()
        self._numpy = numpy.random.get_state()
        self._torch = torch.get_rng_state()
        self._accelerators = [(torch.cuda.get_rng_state(each), each) for each in devices if each.type == "cuda"]

    def restore(self) -> None:
        random.setstate(self._python)
        numpy.random.set_state(self._numpy)
        torch.set_rng_state(self._torch)
        for state, device in self._accelerators:
            torch.cuda.set_rng_state(state, device)


class StepWindow:
    """One optimizer step under way: its micro-batches so far, and what must be put back to do them again.

    Put back are gradients (there are none at the start of a step), random states, and what the trainer has logged since
    (TRL's metrics and token count). Offloaded activations go with the graph that has saved them.
    """

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self.batches: list[Mapping[str, Any]] = []  # of the micro-steps so far, as host tensors
        self._random = RandomState(*trainer.devices)
        self._metrics: dict[str, list[float]] = getattr(trainer, "_metrics", {}).get("train", {})
        self._lengths = {name: len(values) for name, values in self._metrics.items()}
        self._tokens = self.tokens

    @property
    def tokens(self) -> Any:
        """What TRL's trainers have counted in the run so far and log as ``num_tokens``; 0 for one that counts none."""
        return getattr(self._trainer, "_total_train_tokens", 0)

    @tokens.setter
    def tokens(self, number: Any) -> None:
        if number is not self.tokens:
            self._trainer._total_train_tokens = number
            if "num_tokens" in self._metrics:
                self._metrics["num_tokens"] = [number]

    def rewind(self, model: nn.Module) -> None:
        """Back to the start of the step, with all memory given back that the tries since have taken."""
        model.zero_grad()
        release_memory()
        for name in list(self._metrics):
            del self._metrics[name][self._lengths.get(name, 0) :]
            if name not in self._lengths:
                del self._metrics[name]
        self.tokens = self._tokens
        self._random.restore()


# ---- the recovery -------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class _Shortage:
    """A micro-batch, or a part of one, that ran out of memory."""

    wanted: int | None  # by what micro-batches must be cut so that this one gets smaller; None when it cannot be
    what: str  # it, in words
    said: str  # the allocator's words
    incident: dict[str, Any]  # for the report, but for its outcome


class OutOfMemoryRecovery:
    """See the module's description.

    Args:
        trainer: whose micro-steps these are, with model, optimizer and accelerator in place.
        resumed: whether a checkpoint is resumed from.

    Attributes:
        divisor: into how many parts micro-batches are cut at most; the same on all ranks; never less again.
        loss_factor: what the trainer has to multiply a loss with at the moment.
    """

    def __init__(self, trainer: Owner, *, resumed: bool) -> None:
        self._trainer = trainer
        self._window: StepWindow | None = None
        self._at: tuple[int, BatchPart] | None = None  # number of the micro-step under way in the window, and its part
        self._shortages = 0
        self._cache_was_given_back = False  # in this optimizer step
        self.loss_factor = 1.0
        self.divisor, incident = on_main_process(lambda: read_state(trainer, resumed=resumed))
        if incident is not None and trainer.is_world_process_zero():
            self._report([incident], "recovered")  # by this restart

    def begin_step(self) -> None:
        self._window = None
        self._cache_was_given_back = False

    def run(self, stock: Stock, model: nn.Module, inputs: Mapping[str, Any], num_items: Any) -> Tensor:
        """One micro-step: the loss of the micro-batch as upstream's ``stock`` would give it, detached, shape [].

        Raises:
            OutOfMemoryError: a micro-batch that cannot be cut further finds no memory, or there are several ranks.
        """
        window = self._window = self._window or StepWindow(self._trainer)
        window.batches.append(self._trainer.host_batch(inputs))
        shortages: list[dict[str, Any]] = []
        todo: Sequence[Mapping[str, Any]] = [inputs]
        while (found := self._try(window, stock, model, todo, num_items))[1] is not None:
            shortages.append(found[1].incident)
            self._step_down(shortages, found[1])
            window.rewind(model)
            todo = window.batches
        if shortages:
            self._report(shortages, "recovered")
        if self._trainer.accelerator.sync_gradients:
            self._window = None
        assert found[0] is not None
        return found[0]

    def _try(
        self, window: StepWindow, stock: Stock, model: nn.Module, todo: Sequence[Mapping[str, Any]], num_items: Any
    ) -> tuple[Tensor | None, _Shortage | None]:
        """The loss of the last of these micro-batches, which end the window; or what ran out of memory."""
        first = len(window.batches) - len(todo)
        loss = None
        try:
            for number, batch in enumerate(todo, start=first):
                loss = self._micro_step(window, stock, model, number, batch, num_items)
            check = self._trainer.grad_sync.check
            if check is not None and self._trainer.accelerator.sync_gradients:
                check.collect()
        except RuntimeError as error:
            return None, self._note(window, error)
        finally:
            self._at = None
        return loss, None

    def _micro_step(
        self, window: StepWindow, stock: Stock, model: nn.Module, number: int, batch: Mapping[str, Any], num_items: Any
    ) -> Tensor:
        """Gradients of one micro-batch, part by part; its loss."""
        trainer = self._trainer
        whole = window.batches[number]
        # What is used of it is looked at once more: as long as nothing is cut or repeated, its shapes are.
        used = self.divisor > 1 or batch is whole
        parts = parts_of(trainer, trainer.unchanged(whole) if used else whole, self.divisor)
        apart = self.divisor > 1 and trainer.args.world_size > 1
        before = window.tokens
        losses = []
        with local_gathers(trainer.accelerator, apart):  # ranks may have unequally many parts
            for part in parts:
                self._at = number, part
                with ExitStack() as stack:
                    stack.enter_context(self._as_one_of(len(parts), part, num_items))
                    stack.enter_context(trainer.step_fault(model, rows=len(part.units), tokens=part.tokens))
                    if part is not parts[-1]:
                        stack.enter_context(trainer.accelerator.no_sync(model))
                    losses.append(stock(model, batch if self.divisor == 1 else part.inputs, num_items))
                trainer.beat("step")
        if apart:
            counted = window.tokens - before
            window.tokens += round(sum(row[0] for row in everyone([counted]))) - counted
        return losses[0] if len(losses) == 1 else torch.stack(losses).sum()

    @contextmanager
    def _as_one_of(self, parts: int, part: BatchPart, num_items: Any) -> Iterator[None]:
        """Upstream divides by the accumulation steps what no token count has normalised: there are more steps now."""
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

    # ---- after a try that failed ----------------------------------------------------------------------------

    def _note(self, window: StepWindow, error: RuntimeError) -> _Shortage:
        """What is known of a shortage, and keeps nothing of the error, which holds on to every activation.

        Allocates no device memory. Any other error is raised again.
        """
        if device_shortage(error) is None:
            raise error
        trainer, args = self._trainer, self._trainer.args
        number, part = self._at or (len(window.batches) - 1, parts_of(trainer, window.batches[-1], 1)[0])
        found = layout(window.batches[number], pairs=has_pairs(trainer))
        alone = args.world_size == 1
        outside = not (isinstance(error, torch.OutOfMemoryError) or self._cache_was_given_back)
        self._cache_was_given_back |= outside
        again = trainer.fewer_in_flight() or outside
        wanted = self.divisor if alone and again else next_divisor(found.sizes, self.divisor, part.units)
        if wanted is not None and not alone:
            wanted *= 2  # every further shortage would cost another restart
        self._shortages += 1
        step, rank, said = trainer.state.global_step + 1, args.process_index, " ".join(str(error).split())
        units = {"packed": "sequence", "pairs": "pair"}.get(found.kind, "row")
        kept_in, name = Path(args.output_dir) / EVIDENCE_DIRECTORY, f"step-{step}-rank-{rank}-{self._shortages}"
        evidence = _keep_evidence(kept_in, name, part, found, args.device, said)
        return _Shortage(
            wanted=wanted,
            what=f"{len(part.units)} {units}{'s' if len(part.units) > 1 else ''} ({part.tokens} tokens)"
            + (f" ({found.reason})" if found.reason else ""),
            said=said.split(". ")[0],
            incident={
                "step": step,
                "stage": "memory",
                "kind": "out of memory",
                "micro_step": number + 1,
                "rows": len(part.units),
                "tokens": part.tokens,
                "shapes": {name: list(value.shape) for name, value in part.inputs.items() if torch.is_tensor(value)},
                "divisor": self.divisor,
                "said": said,
                "evidence": evidence,
            },
        )

    def _step_down(self, shortages: Sequence[dict[str, Any]], found: _Shortage) -> None:
        """Cut smaller from now on, or end the run."""
        args, step = self._trainer.args, found.incident["step"]
        several = args.world_size > 1
        who = f"rank {args.process_index}: " if several else ""
        if found.wanted is None:
            self._report(shortages, "failed")
            raise OutOfMemoryError(f"{who}{self._refusal(found)}")
        cut = f"micro-batches cut into up to {found.wanted} parts (the effective batch stays)"
        self._write_state(found.wanted, found.incident | {"on_rank": args.process_index} if several else None)
        if several:
            raise OutOfMemoryError(
                f"{who}no memory for {found.what} at step {step} ({found.said}): start the same command again, it goes "
                f"on from the newest checkpoint with {cut}"
            )
        now = f"with {cut} from now on" if found.wanted > self.divisor else "as it was"
        logger.warning("step %d: no memory for %s; the step is done again, %s", step, found.what, now)
        self.divisor = found.wanted

    def _refusal(self, found: _Shortage) -> str:
        args, model = self._trainer.args, self._trainer.model
        base = model.get_base_model() if hasattr(model, "get_base_model") else model
        advice = []
        if getattr(args, "max_length", None):
            advice.append(f"lower --max_length (it is {args.max_length})")
        if not args.activation_checkpointing:
            advice.append("turn --activation_checkpointing on")
        elif self._trainer.recompute_layers is not None:
            advice.append("recompute more layers (--recompute_layers)")
        if not getattr(base, "is_loaded_in_4bit", False) and hasattr(model, "peft_config"):
            advice.append("add --load_in_4bit")
        advice.append("see what fits with `hf-rocm-tune plan`")
        kept = found.incident["evidence"]
        seen = f"; the batch and the allocator's state are in {kept}" if kept else ""
        return (
            f"no memory for {found.what} at step {found.incident['step']}, and a micro-batch cannot be smaller "
            f"({found.said}): {', or '.join(advice)}{seen}"
        )

    def _report(self, shortages: Sequence[dict[str, Any]], outcome: str) -> None:
        report = self._trainer.transfer_report
        report.count("memory", shortages=len(shortages), recovered=len(shortages) if outcome == "recovered" else 0)
        for each in shortages:
            report.incident({**each, "outcome": outcome})

    def _write_state(self, divisor: int, incident: Mapping[str, Any] | None) -> None:
        """Record what this run has learned beside its checkpoints, so that a restart need not learn it again."""
        trainer = self._trainer
        directory, size = Path(trainer.args.output_dir), trainer.args.per_device_train_batch_size
        body = {"run_id": trainer.run_id, "batch_size": size, "divisor": divisor, "incident": incident}
        try:
            directory.mkdir(parents=True, exist_ok=True)
            write_text_atomic(directory / STATE_FILE, json.dumps(body) + "\n")
        except OSError as error:
            logger.warning(
                "%s could not be written (%s): a restart begins with whole micro-batches again", STATE_FILE, error
            )


def recovery_for(trainer: Owner, *, on_oom: str, resumed: bool) -> OutOfMemoryRecovery | None:
    """The recovery of a trainer that is prepared to train; None where a step is not done again. Collective."""
    wrapped = getattr(trainer.model_wrapped, "_orig_mod", trainer.model_wrapped)  # torch.compile stands around DDP
    shared = max(trainer.get_tp_size(), trainer.get_cp_size(), trainer.get_sp_size(), trainer.args.n_gpu) > 1
    plain = isinstance(wrapped, DistributedDataParallel) and not wrapped.static_graph
    if on_oom == "stop" or shared or trainer.is_sharded or (trainer.args.world_size > 1 and not plain):
        return None
    return OutOfMemoryRecovery(trainer, resumed=resumed)


def read_state(trainer: Any, *, resumed: bool) -> tuple[int, dict[str, Any] | None]:
    """Into how many parts this run cuts its micro-batches, and the incident that ended its last start, if one did.

    A trainer of the user's own has no run id: then what stands there counts where a checkpoint is resumed from.
    """
    file = Path(trainer.args.output_dir) / STATE_FILE
    try:
        body = json.loads(file.read_text(encoding="utf-8"))
        same = (body["run_id"], body["batch_size"]) == (trainer.run_id, trainer.args.per_device_train_batch_size)
        if same and (trainer.run_id or resumed):
            incident = body.get("incident")
            return max(1, int(body["divisor"])), incident if isinstance(incident, dict) else None
    except FileNotFoundError:
        pass
    except (OSError, ValueError, TypeError, KeyError) as error:
        logger.warning("%s cannot be read (%s): micro-batches are whole again", STATE_FILE, error)
    return 1, None


@contextmanager
def local_gathers(accelerator: Any, on: bool = True) -> Iterator[None]:
    """Within the block what a trainer gathers for its metrics is this rank's own: no rank waits for another there."""
    if not on:
        yield
        return
    accelerator.gather = lambda tree: map_tensors(tree, torch.atleast_1d)  # as upstream's shapes
    try:
        yield
    finally:
        del accelerator.gather


def _keep_evidence(
    directory: Path, name: str, part: BatchPart, found: Layout, device: torch.device, said: str
) -> str | None:
    """The directory with the batch and the allocator's snapshot (https://pytorch.org/memory_viz); None if it failed."""
    accelerator = device.type == "cuda"
    content = {
        "said": said,
        "inputs": map_tensors(part.inputs, torch.clone),  # not the whole batch, of which it is a view
        "layout": found.kind,
        "lengths": list(found.sizes),
        "units": [part.units.start, part.units.stop],
        "memory_stats": dict(torch.cuda.memory_stats(device)) if accelerator else None,
    }
    try:
        directory.mkdir(parents=True, exist_ok=True)
        torch.save(content, directory / f"{name}.pt")
        if accelerator:
            (directory / f"{name}.pickle").write_bytes(pickle.dumps(torch.cuda.memory._snapshot(device)))
    except (OSError, RuntimeError) as failure:  # torch.save raises RuntimeError when a disk is full
        logger.warning("the batch that ran out of memory could not be kept in %s: %s", directory, failure)
        return None
    return str(directory)


def _takes_a_mean(trainer: Any, num_items: Any) -> bool:
    """Whether upstream takes the loss for a mean over the micro-batch, and divides it by the accumulation steps."""
    if trainer.loss_is_scaled_for_ga is not None:
        return not trainer.loss_is_scaled_for_ga
    counted = trainer.model_accepts_loss_kwargs and num_items is not None
    return not counted and trainer.compute_loss_func is None
