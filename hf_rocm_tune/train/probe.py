"""One worst-case step before the run, to see whether a micro-batch fits; all of its effects are undone.

A micro-batch of copies of the longest row goes through the trainer's own step: verified transfer, mixed precision,
loss, backward, twice with gradient accumulation, beside as much memory as the optimizer state and
DistributedDataParallel's buckets will take. Then gradients, random state, what the trainer logs, and the preparation of
the model are restored, so that the following run is bit-identical to one without the probe. Ranks communicate only
between steps, over gloo: one that runs out of memory leaves no other waiting.

Not covered: evaluation, ``torch_compile``, kernels that take workspace only at other lengths, buffers that a model
changes in ``forward``, and on a CPU the peak itself, which is not counted there.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

import torch
from datasets import Dataset
from torch import nn

from hf_rocm_tune.cards.agree import highest
from hf_rocm_tune.errors import UsageError, device_shortage
from hf_rocm_tune.models.placement import release_memory
from hf_rocm_tune.models.recompute import recompute
from hf_rocm_tune.plan.candidates import Candidate, Trial, Way, with_slack
from hf_rocm_tune.plan.estimate import TrainedTensor, optimizer
from hf_rocm_tune.train.oom import StepWindow, local_gathers, parts_of
from hf_rocm_tune.train.refusals import optimizer_name

if TYPE_CHECKING:
    from hf_rocm_tune.train.trainer import VerifiedTransferMixin

_ROWS_AT_ONCE = 10_000


def try_on_all_ranks(trainer: VerifiedTransferMixin, candidate: Candidate, *, budget: int) -> Trial:
    """Try one worst-case step of a candidate on every rank. Collective.

    Args:
        trainer: before its ``train``.
        candidate: micro-batch, accumulation and recomputation to try.
        budget: bytes for torch's allocator; a peak that leaves no room for the allocator's slack does not fit.
    """
    fits_here, peak_here = probe(trainer, candidate)
    short, peak = highest([int(not fits_here), peak_here or 0])
    fits = not short and with_slack(peak) <= budget
    return Trial(candidate=candidate, fits=fits, measured=peak if peak and not short else None)


def probe(trainer: VerifiedTransferMixin, candidate: Candidate) -> tuple[bool, int | None]:
    """Try one worst-case step on this rank; only the report's transfer counters keep a trace of it.

    Returns:
        Whether it fits, and the allocator's peak in bytes; None if it does not fit, or on a CPU.
    """
    device = trainer.args.device
    accelerator = device.type == "cuda"
    rows = worst_rows(trainer.train_dataset, candidate.micro_batch, limit=trainer.args.max_length)
    with _restored(trainer):
        set_checkpointing(trainer, candidate.checkpointing, candidate.recompute)
        if accelerator:
            torch.cuda.reset_peak_memory_stats(device)
        fits = _step_fits(trainer, rows, micro_steps=min(2, candidate.accumulation))
        peak = torch.cuda.max_memory_allocated(device) if accelerator and fits else None
    return fits, peak


def set_way(trainer: VerifiedTransferMixin, way: Way) -> None:
    """Set micro-batch, accumulation and recomputation of a trainer that has not trained, as if built with them."""
    args = trainer.args
    args.per_device_train_batch_size, args.gradient_accumulation_steps = way.micro_batch, way.accumulation
    trainer._train_batch_size = args.train_batch_size
    set_checkpointing(trainer, way.checkpointing, way.recompute)


def set_checkpointing(trainer: VerifiedTransferMixin, on: bool, layers: tuple[int, int] | None = None) -> None:
    """Turn activation checkpointing on or off in arguments and model, as TRL and transformers do."""
    args, model = trainer.args, trainer.model
    args.activation_checkpointing = args.gradient_checkpointing = on
    trainer.recompute_layers = layers
    model.disable_input_require_grads()  # enabling them again would leave the earlier hooks in place
    if not on:
        model.activation_checkpointing_disable()
        return
    settings = dict(args.activation_checkpointing_kwargs or {})
    every, offload = settings.pop("every_n_layers", 1), settings.pop("offload", False)
    model.activation_checkpointing_enable(
        activation_checkpointing_kwargs=settings or None, every_n_layers=every, offload=offload
    )
    if hasattr(model, "peft_config"):
        model.disable_input_require_grads()
        model.enable_input_require_grads()
    if layers is not None:
        recompute(model, layers)


# ---- the rows -----------------------------------------------------------------------------------------------


def worst_rows(rows: Any, count: int, *, limit: int | None) -> list[dict[str, Any]]:
    """The longest row ``count`` times; the last copy is one token shorter, so that a padded batch has padding.

    ``limit``: tokens of the longest row of a stream, which cannot be searched.
    """
    longest = _longest(rows) if isinstance(rows, Dataset) else _first_stretched(rows, limit)
    length = len(longest["input_ids"])
    last = longest if count == 1 or length == 1 else _of_length(longest, length - 1)
    return [*([longest] * (count - 1)), last]


def _longest(rows: Dataset) -> dict[str, Any]:
    import pyarrow.compute as compute

    best, longest, seen = -1, 0, 0
    for table in rows.with_format("arrow").select_columns(["input_ids"]).iter(_ROWS_AT_ONCE):
        lengths = compute.list_value_length(table.column("input_ids").combine_chunks())
        most = compute.max(lengths).as_py()
        if most > best:
            best, longest = most, seen + compute.index(lengths, most).as_py()
        seen += len(table)
    if best < 0:
        raise UsageError("--auto_fit probe: no row is left to train on")
    row: dict[str, Any] = rows.with_format(None)[longest]
    return row


def _first_stretched(rows: Any, limit: int | None) -> dict[str, Any]:
    first = next(iter(rows), None)
    if first is None:
        raise UsageError("--auto_fit probe: no row is left to train on")
    return _of_length(first, limit or len(first["input_ids"]))


def _of_length(row: Mapping[str, Any], length: int) -> dict[str, Any]:
    """The row truncated or repeated to ``length`` tokens, with matching lengths of packed sequences."""
    had = len(row["input_ids"])
    made = {
        name: list(itertools.islice(itertools.cycle(value), length)) if _is_by_token(value, had) else value
        for name, value in row.items()
    }
    if "seq_lengths" in row:
        made["seq_lengths"] = _lengths_up_to(row["seq_lengths"], length)
    return made


def _is_by_token(value: Any, tokens: int) -> bool:
    return isinstance(value, list) and len(value) == tokens


def _lengths_up_to(lengths: list[int], total: int) -> list[int]:
    """The lengths of sequences that fill a row of ``total`` tokens, repeated as needed."""
    made: list[int] = []
    left = total
    for size in itertools.cycle(lengths):
        if left <= 0:
            break
        made.append(min(size, left))
        left -= size
    return made


# ---- the step -----------------------------------------------------------------------------------------------


def _step_fits(trainer: VerifiedTransferMixin, rows: list[dict[str, Any]], *, micro_steps: int) -> bool:
    from hf_rocm_tune.train.trainer import VerifiedTransferMixin

    stock = super(VerifiedTransferMixin, trainer).training_step  # the mixin's would save evidence and step down
    try:
        beside = _reserve(trainer, "state")
        for _ in range(micro_steps):
            batch = trainer.data_collator(rows)
            (part,) = parts_of(trainer, batch, 1)
            with trainer.step_fault(trainer.model, rows=len(part.units), tokens=part.tokens):
                stock(trainer.model, batch)
            trainer.beat("start")
        del batch, part
        step = _reserve(trainer, "step")
        del beside, step
    except RuntimeError as error:  # the tensors it refers to are freed with this frame
        if device_shortage(error) is None:
            raise
        return False
    return True


def _reserve(trainer: VerifiedTransferMixin, what: str) -> torch.Tensor:
    """Allocate as much as the optimizer (and the buckets of several ranks) keeps ("state") or needs in its "step"."""
    kind = optimizer(optimizer_name(trainer.args))
    trained = [TrainedTensor(elements=one.numel(), itemsize=one.element_size()) for one in _trained(trainer.model)]
    if what == "step":
        nbytes = int(kind.taken(trained))
    else:
        buckets = sum(one.nbytes for one in trained) if trainer.args.world_size > 1 else 0
        nbytes = buckets + (0 if kind.paged else kind.kept(trained))
    return torch.empty(nbytes, dtype=torch.uint8, device=trainer.args.device)


def _trained(model: nn.Module) -> Iterator[nn.Parameter]:
    return (parameter for parameter in model.parameters() if parameter.requires_grad)


# ---- restoring the trainer ----------------------------------------------------------------------------------


@contextmanager
def _restored(trainer: VerifiedTransferMixin) -> Iterator[None]:
    """Prepare the model as for training, without DistributedDataParallel; afterwards everything is as before."""
    model, accelerator, args = trainer.model, trainer.accelerator, trainer.args
    window = StepWindow(trainer)
    training, checkpointing = model.training, bool(args.activation_checkpointing)
    with ExitStack() as stack:
        stack.callback(release_memory)
        stack.enter_context(_kept(trainer, "current_gradient_accumulation_steps"))
        # `_is_accelerate_prepared` would make accelerate skip DistributedDataParallel and autocast in the run.
        stack.enter_context(_kept(model, "forward", "_original_forward", "_is_accelerate_prepared"))
        stack.enter_context(_kept(accelerator, "_models"))
        stack.callback(model.train, training)
        stack.callback(set_checkpointing, trainer, checkpointing, trainer.recompute_layers)
        stack.callback(window.rewind, model)
        trainer.current_gradient_accumulation_steps = 1
        stack.enter_context(local_gathers(accelerator))  # a rank out of memory would leave the others waiting in it
        accelerator._models = []
        accelerator.prepare_model(model, evaluation_mode=True)  # mixed precision, and no DistributedDataParallel
        yield


_ABSENT = object()


@contextmanager
def _kept(holder: Any, *names: str) -> Iterator[None]:
    """Restore instance attributes after the block; those that did not exist are deleted."""
    before = {name: vars(holder).get(name, _ABSENT) for name in names}
    try:
        yield
    finally:
        for name, value in before.items():
            if value is not _ABSENT:
                setattr(holder, name, value)
            elif name in vars(holder):
                delattr(holder, name)
