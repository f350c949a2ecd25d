"""One worst-case step before the run, to see whether a micro-batch fits; afterwards nothing is left of it.

The longest row that the run can meet, as often as the micro-batch has rows, goes through the trainer's own step:
verified transfer, mixed precision, loss, backward, twice where gradients accumulate, beside as much memory as the
optimizer's state and DistributedDataParallel's buckets will take. Then gradients, random state, what the trainer logs,
and the way the model was prepared are put back, so that the run that follows is the one that would have been without
it, bit for bit. Ranks meet only between steps, over gloo: one that is out of memory leaves no other waiting.

Not covered: evaluation, ``torch_compile``, kernels that take workspace only at other lengths, buffers that a model
changes in ``forward``, and on a CPU the peak itself, which nothing there counts.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

import torch
from datasets import Dataset
from torch import nn

from hf_rocm_tune.errors import UsageError, device_shortage
from hf_rocm_tune.models.placement import release_memory
from hf_rocm_tune.models.recompute import recompute
from hf_rocm_tune.plan.candidates import Candidate, Trial, Way, with_slack
from hf_rocm_tune.plan.estimate import TrainedTensor, optimizer
from hf_rocm_tune.ranks.agree import highest
from hf_rocm_tune.training.oom import StepWindow, local_gathers, parts_of

if TYPE_CHECKING:
    from hf_rocm_tune.training.trainer import VerifiedTransferMixin

_ROWS_AT_ONCE = 10_000


def try_on_all_ranks(trainer: VerifiedTransferMixin, candidate: Candidate, *, budget: int) -> Trial:
    """One worst-case step of this way. Collective.

    Args:
        trainer: before its ``train``.
        candidate: the way.
        budget: bytes for torch's allocator; a peak that leaves no room for the allocator's slack does not fit.
    """
    went_through, peak_here = probe(trainer, candidate)
    short, peak = highest([int(not went_through), peak_here or 0])
    fits = not short and with_slack(peak) <= budget
    return Trial(candidate=candidate, fits=fits, measured=peak if peak and not short else None)


def probe(trainer: VerifiedTransferMixin, candidate: Candidate) -> tuple[bool, int | None]:
    """One worst-case step on this rank alone; nothing of it is left but counters of transfers in the report.

    Returns:
        Whether it went through, and the allocator's peak in bytes; None where it did not, or on a CPU.
    """
    device = trainer.args.device
    accelerator = device.type == "cuda"
    rows = worst_rows(trainer.train_dataset, candidate.micro_batch, limit=trainer.args.max_length)
    with _undone(trainer):
        set_checkpointing(trainer, candidate.checkpointing, candidate.recompute)
        if accelerator:
            torch.cuda.reset_peak_memory_stats(device)
        fits = _went_through(trainer, rows, micro_steps=min(2, candidate.accumulation))
        peak = torch.cuda.max_memory_allocated(device) if accelerator and fits else None
    return fits, peak


def set_way(trainer: VerifiedTransferMixin, way: Way) -> None:
    """Let a trainer that is built, and has not trained, train this way: as if it had been built with it."""
    args = trainer.args
    args.per_device_train_batch_size, args.gradient_accumulation_steps = way.micro_batch, way.accumulation
    trainer._train_batch_size = args.train_batch_size
    set_checkpointing(trainer, way.checkpointing, way.recompute)


def set_checkpointing(trainer: VerifiedTransferMixin, on: bool, layers: tuple[int, int] | None = None) -> None:
    """Turn the recomputation of activations on or off in arguments and model, as TRL and transformers do."""
    args, model = trainer.args, trainer.model
    args.activation_checkpointing = args.gradient_checkpointing = on
    trainer.recompute_layers = layers
    model.disable_input_require_grads()  # whoever sets these hooks anew forgets the ones before
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
    """The longest row as often as wanted; the last one a token shorter, so that a padded batch has padding.

    ``limit``: tokens of the longest row of a stream, which cannot be looked through.
    """
    longest = _longest(rows) if isinstance(rows, Dataset) else _stretched(rows, limit)
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


def _stretched(rows: Any, limit: int | None) -> dict[str, Any]:
    first = next(iter(rows), None)
    if first is None:
        raise UsageError("--auto_fit probe: no row is left to train on")
    return _of_length(first, limit or len(first["input_ids"]))


def _of_length(row: Mapping[str, Any], length: int) -> dict[str, Any]:
    """A row cut, or repeated, to so many tokens; the lengths of packed sequences follow."""
    had = len(row["input_ids"])
    made = {
        name: list(itertools.islice(itertools.cycle(value), length)) if _is_by_token(value, had) else value
        for name, value in row.items()
    }
    if "seq_lengths" in row:
        made["seq_lengths"] = _cut(row["seq_lengths"], length)
    return made


def _is_by_token(value: Any, tokens: int) -> bool:
    return isinstance(value, list) and len(value) == tokens


def _cut(lengths: list[int], total: int) -> list[int]:
    """Lengths of the sequences in a row of ``total`` tokens, repeated as often as need be."""
    made: list[int] = []
    left = total
    for size in itertools.cycle(lengths):
        if left <= 0:
            break
        made.append(min(size, left))
        left -= size
    return made


# ---- the step -----------------------------------------------------------------------------------------------


def _went_through(trainer: VerifiedTransferMixin, rows: list[dict[str, Any]], *, micro_steps: int) -> bool:
    from hf_rocm_tune.training.trainer import VerifiedTransferMixin

    stock = super(VerifiedTransferMixin, trainer).training_step  # its own would keep evidence and step down
    try:
        beside = _stand_in(trainer, "state")
        for _ in range(micro_steps):
            batch = trainer.data_collator(rows)
            (part,) = parts_of(trainer, batch, 1)
            with trainer.step_fault(trainer.model, rows=len(part.units), tokens=part.tokens):
                stock(trainer.model, batch)
            trainer.beat("start")
        del batch, part
        step = _stand_in(trainer, "step")
        del beside, step
    except RuntimeError as error:  # what it holds on to goes with this frame
        if device_shortage(error) is None:
            raise
        return False
    return True


def _stand_in(trainer: VerifiedTransferMixin, what: str) -> torch.Tensor:
    """As much memory as the optimizer, and the buckets of several ranks, will take: always, or while it steps."""
    kind = optimizer(str(getattr(trainer.args.optim, "value", trainer.args.optim)))
    trained = [TrainedTensor(elements=one.numel(), itemsize=one.element_size()) for one in _trained(trainer.model)]
    if what == "step":
        nbytes = int(kind.taken(trained))
    else:
        buckets = sum(one.nbytes for one in trained) if trainer.args.world_size > 1 else 0
        nbytes = buckets + (0 if kind.paged else kind.kept(trained))
    return torch.empty(nbytes, dtype=torch.uint8, device=trainer.args.device)


def _trained(model: nn.Module) -> Iterator[nn.Parameter]:
    return (parameter for parameter in model.parameters() if parameter.requires_grad)


# ---- putting back -------------------------------------------------------------------------------------------


@contextmanager
def _undone(trainer: VerifiedTransferMixin) -> Iterator[None]:
    """The model as it will be prepared for training, but for DistributedDataParallel; afterwards all is as before."""
    model, accelerator, args = trainer.model, trainer.accelerator, trainer.args
    window = StepWindow(trainer)
    training, checkpointing = model.training, bool(args.activation_checkpointing)
    with ExitStack() as stack:
        stack.callback(release_memory)
        stack.enter_context(_kept(trainer, "current_gradient_accumulation_steps"))
        # With the last of them a model counts as prepared: there would be no DistributedDataParallel, no autocast.
        stack.enter_context(_kept(model, "forward", "_original_forward", "_is_accelerate_prepared"))
        stack.enter_context(_kept(accelerator, "_models"))
        stack.callback(model.train, training)
        stack.callback(set_checkpointing, trainer, checkpointing, trainer.recompute_layers)
        stack.callback(window.rewind, model)
        trainer.current_gradient_accumulation_steps = 1
        stack.enter_context(local_gathers(accelerator))  # a rank without memory would leave the others waiting in it
        accelerator._models = []
        accelerator.prepare_model(model, evaluation_mode=True)  # mixed precision, and no DistributedDataParallel
        yield


_ABSENT = object()


@contextmanager
def _kept(holder: Any, *names: str) -> Iterator[None]:
    """Attributes of an object itself, as they were afterwards; those that it had not are gone again."""
    before = {name: vars(holder).get(name, _ABSENT) for name in names}
    try:
        yield
    finally:
        for name, value in before.items():
            if value is not _ABSENT:
                setattr(holder, name, value)
            elif name in vars(holder):
                delattr(holder, name)
