"""The private places of upstream libraries on which verification depends, in one table.

Each :class:`Seam` names one function or method, the parameters that we rely on, why we stand there, and the version
that it was checked with. :func:`resolve` finds it or raises :class:`~hf_rocm_tune.errors.SeamError`: a seam that
upstream has moved is an error with a clear line, never a transfer that silently goes unverified.

Seams that are *methods of* ``transformers.Trainer`` are overridden in the mixin and stand here only to be checked;
those marked ``patched`` are replaced, for the length of a :func:`replaced` block or by :func:`replace_for_good`.
"""

from __future__ import annotations

import importlib
import inspect
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from hf_rocm_tune.errors import SeamError


@dataclass(frozen=True, kw_only=True)
class Seam:
    """One private place of an upstream library.

    Args:
        name: our name for it.
        module: importable module that holds it.
        attribute: dotted attribute inside the module.
        parameters: leading parameter names that our replacement or override relies on, in order.
        why: what passes there.
        checked: distribution and version with which it was read and tried.
        patched: whether we replace it in place (otherwise it is overridden in a subclass).
    """

    name: str
    module: str
    attribute: str
    parameters: tuple[str, ...]
    why: str
    checked: str
    patched: bool = False


_TRAINER = "transformers.trainer"
_LOADING = "transformers.core_model_loading"
_TRANSFORMERS = "transformers 5.23.0"
_ACCELERATE = "accelerate 1.15.0"
_TORCH = "torch 2.13.0"
_FSDP = "accelerate.utils.fsdp_utils"
_COLLECTIVES = "torch.distributed.fsdp._fully_shard._fsdp_collectives"

SEAMS: tuple[Seam, ...] = (
    Seam(
        name="materialize_weight",
        module=_LOADING,
        attribute="_materialize_copy",
        parameters=("tensor", "device", "dtype"),
        why="every weight of from_pretrained is read and placed here, quantised models too",
        checked=_TRANSFORMERS,
        patched=True,
    ),
    Seam(
        name="load_state_dict",
        module="transformers.modeling_utils",
        attribute="convert_and_load_state_dict_in_model",
        parameters=("model", "state_dict", "load_config"),
        why="says which checkpoint tensor is which, and which parameters were filled from the checkpoint",
        checked=_TRANSFORMERS,
        patched=True,
    ),
    Seam(
        name="missing_keys",
        module="transformers.modeling_utils",
        attribute="PreTrainedModel._move_missing_keys_from_meta_to_device",
        parameters=("self", "missing_keys", "device_map", "device_mesh", "hf_quantizer"),
        why="weights and buffers that no file holds are initialised here; we keep them on the host until they move",
        checked=_TRANSFORMERS,
        patched=True,
    ),
    Seam(
        name="dispatch",
        module="transformers.modeling_utils",
        attribute="accelerate_dispatch",
        parameters=("model", "hf_quantizer", "device_map"),
        why="puts hooks on a model of several devices that copy activations between them unverified",
        checked=_TRANSFORMERS,
        patched=True,
    ),
    Seam(
        name="adapter_device",
        module="peft.tuners.tuners_utils",
        attribute="BaseTunerLayer._move_adapter_to_device_of_base_layer",
        parameters=("self", "adapter_name", "device"),
        why="PEFT moves fresh adapter weights to the device of their base layer here",
        checked="peft 0.21.2",
        patched=True,
    ),
    Seam(
        name="send_to_device",
        module="accelerate.data_loader",
        attribute="send_to_device",
        parameters=("tensor", "device", "non_blocking"),
        why="DataLoaderDispatcher places its batches through this, whatever its device is",
        checked=_ACCELERATE,
        patched=True,
    ),
    Seam(
        name="skip_first_batches",
        module=_TRAINER,
        attribute="skip_first_batches",
        parameters=("dataloader", "num_batches"),
        why="the loader of a resumed epoch is a new stock object made here",
        checked=_TRANSFORMERS,
        patched=True,
    ),
    Seam(
        name="shard_iteration",
        module="accelerate.data_loader",
        attribute="DataLoaderShard.__iter__",
        parameters=("self",),
        why="reads one batch ahead of the one it delivers: the transfer of the next batch starts there",
        checked=_ACCELERATE,
    ),
    Seam(
        name="prepare_model",
        module="accelerate.accelerator",
        attribute="Accelerator.prepare_model",
        parameters=("self", "model", "device_placement", "evaluation_mode"),
        why="would move the whole model once more; told not to place anything",
        checked=_ACCELERATE,
    ),
    Seam(
        name="get_dataloader",
        module=_TRAINER,
        attribute="Trainer._get_dataloader",
        parameters=("self", "dataset", "description", "batch_size", "sampler_fn", "is_training", "dataloader_key"),
        why="every loader of training, evaluation and prediction is made here",
        checked=_TRANSFORMERS,
    ),
    Seam(
        name="prepare_inputs",
        module=_TRAINER,
        attribute="Trainer._prepare_inputs",
        parameters=("self", "inputs"),
        why="the last guard: nothing reaches forward without a verdict",
        checked=_TRANSFORMERS,
    ),
    Seam(
        name="accumulation_window",
        module=_TRAINER,
        attribute="Trainer.get_batch_samples",
        parameters=("self", "epoch_iterator", "num_batches", "device"),
        why="reads a whole accumulation window: how many of its batches are on their way at once is decided here",
        checked=_TRANSFORMERS,
    ),
    Seam(
        name="count_items",
        module=_TRAINER,
        attribute="Trainer._get_num_items_in_batch",
        parameters=("self", "batch_samples", "device"),
        why="counts labels before the first forward of an accumulation window: must count the host source",
        checked=_TRANSFORMERS,
    ),
    Seam(
        name="move_model",
        module=_TRAINER,
        attribute="Trainer._move_model_to_device",
        parameters=("self", "model", "device"),
        why="moves the whole model",
        checked=_TRANSFORMERS,
    ),
    Seam(
        name="training_step",
        module=_TRAINER,
        attribute="Trainer.training_step",
        parameters=("self", "model", "inputs", "num_items_in_batch"),
        why="runs out of memory, and is done again; averaged gradients are compared when it returns, not clipped yet",
        checked=_TRANSFORMERS,
    ),
    Seam(
        name="compute_loss",
        module=_TRAINER,
        attribute="Trainer.compute_loss",
        parameters=("self", "model", "inputs", "return_outputs", "num_items_in_batch"),
        why="the loss of a part of a micro-batch is weighed here, where upstream takes a mean",
        checked=_TRANSFORMERS,
    ),
    Seam(
        name="grad_norm",
        module=_TRAINER,
        attribute="Trainer._get_grad_norm",
        parameters=("self", "model", "grad_norm"),
        why="the last place before the optimizer at which a step that is not finite can be left out",
        checked=_TRANSFORMERS,
    ),
    Seam(
        name="gather",
        module="accelerate.accelerator",
        attribute="Accelerator.gather",
        parameters=("self", "tensor"),
        why="trainers gather metrics in a micro-step: no rank may wait there for one that is out of memory",
        checked=_ACCELERATE,
    ),
    Seam(
        name="prepare_training",
        module=_TRAINER,
        attribute="Trainer._prepare_for_training",
        parameters=("self", "max_steps", "train_dataloader", "resume_from_checkpoint"),
        why="wraps the model in DistributedDataParallel, which broadcasts from rank 0",
        checked=_TRANSFORMERS,
    ),
    Seam(
        name="save_checkpoint",
        module=_TRAINER,
        attribute="Trainer._save_checkpoint",
        parameters=("self", "model", "trial"),
        why="writes in place, pushes and rotates: replaced by save, verify, rename, push, rotate",
        checked=_TRANSFORMERS,
    ),
    Seam(
        name="best_metric",
        module=_TRAINER,
        attribute="Trainer._determine_best_metric",
        parameters=("self", "metrics", "trial"),
        why='with save_strategy="best" it alone decides about a save, and would drop one that a signal asks for',
        checked=_TRANSFORMERS,
    ),
    Seam(
        name="load_checkpoint",
        module=_TRAINER,
        attribute="Trainer._load_from_checkpoint",
        parameters=("self", "resume_from_checkpoint", "model"),
        why="reads adapter weights back on resume",
        checked=_TRANSFORMERS,
    ),
    Seam(
        name="load_optimizer",
        module=_TRAINER,
        attribute="Trainer._load_optimizer_and_scheduler",
        parameters=("self", "checkpoint"),
        why="reads optimizer state back on resume",
        checked=_TRANSFORMERS,
    ),
    Seam(
        name="fsdp2_prepare",
        module=_FSDP,
        attribute="fsdp2_prepare_model",
        parameters=("accelerator", "model"),
        why="decides which modules FSDP2 gathers together, and shards them",
        checked=_ACCELERATE,
    ),
    Seam(
        name="fsdp2_load",
        module=_FSDP,
        attribute="fsdp2_load_full_state_dict",
        parameters=("accelerator", "model", "full_sd", "cpu_offload"),
        why="broadcasts every weight from rank 0: each rank brings its own rows through the mover instead",
        checked=_ACCELERATE,
        patched=True,
    ),
    Seam(
        name="fsdp2_gather",
        module=_COLLECTIVES,
        attribute="foreach_all_gather",
        parameters=("fsdp_params", "group", "async_op"),
        why="weights come from the other cards here, in each forward and backward",
        checked=_TORCH,
    ),
    Seam(
        name="fsdp2_reduce",
        module=_COLLECTIVES,
        attribute="foreach_reduce",
        parameters=("fsdp_params", "unsharded_grads", "reduce_scatter_group"),
        why="gradients of all cards are averaged here, each card's part of them",
        checked=_TORCH,
    ),
    Seam(
        name="fsdp2_norm",
        module="accelerate.accelerator",
        attribute="Accelerator.clip_grad_norm_",
        parameters=("self", "parameters", "max_norm", "norm_type"),
        why="adds up the norm of sharded gradients over the cards by itself",
        checked=_ACCELERATE,
    ),
    Seam(
        name="full_state",
        module="accelerate.accelerator",
        attribute="Accelerator.get_state_dict",
        parameters=("self", "model", "unwrap"),
        why="brings a sharded model together to be saved, frozen weights too, over the cards",
        checked=_ACCELERATE,
    ),
    Seam(
        name="ddp_ignore",
        module="torch.nn.parallel.distributed",
        attribute="DistributedDataParallel._set_params_and_buffers_to_ignore_for_model",
        parameters=("module", "params_and_buffers_to_ignore"),
        why="keeps frozen weights out of the start-up broadcast",
        checked="torch 2.13.0",
    ),
    Seam(
        name="ddp_post_forward",
        module="torch.nn.parallel.distributed",
        attribute="DistributedDataParallel._post_forward",
        parameters=("self", "output"),
        why="makes the next backward average gradients: it computes nothing, after all ranks have computed theirs",
        checked="torch 2.13.0",
    ),
)

_BY_NAME = {seam.name: seam for seam in SEAMS}
_LOCK = threading.RLock()


def seam(name: str) -> Seam:
    """The row of the table with this name."""
    return _BY_NAME[name]


def resolve(name: str) -> tuple[Any, str, Callable[..., Any]]:
    """Finds a seam in the installed libraries.

    Returns:
        The object that owns the attribute (module or class), the attribute's last name, and its present value.

    Raises:
        SeamError: the module, the attribute or one of the parameters is not there.
    """
    row = _BY_NAME[name]
    try:
        owner: Any = importlib.import_module(row.module)
        *path, last = row.attribute.split(".")
        for part in path:
            owner = getattr(owner, part)
        value = getattr(owner, last)
    except (ImportError, AttributeError) as error:
        raise SeamError(_message(row, f"it is not there ({error})")) from error
    found = tuple(inspect.signature(value).parameters)
    if found[: len(row.parameters)] != row.parameters:
        raise SeamError(_message(row, f"its parameters are {found}, expected {row.parameters} first"))
    return owner, last, value


def check_all() -> None:
    """Resolves every seam.

    Raises:
        SeamError: for the first one that upstream has moved.
    """
    for row in SEAMS:
        resolve(row.name)


@contextmanager
def replaced(name: str, make: Callable[[Callable[..., Any]], Callable[..., Any]]) -> Iterator[None]:
    """Replaces a seam for the length of the block, process-wide.

    Args:
        name: a seam that is marked ``patched``.
        make: given the present function, returns the one that stands in its place.

    Raises:
        SeamError: see :func:`resolve`.
    """
    assert _BY_NAME[name].patched, name
    with _LOCK:
        owner, last, _ = resolve(name)
        original = inspect.getattr_static(owner, last)
        setattr(owner, last, make(original))
    try:
        yield
    finally:
        with _LOCK:
            setattr(owner, last, original)


def replace_for_good(name: str, make: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    """Replaces a seam once for the life of the process; a second call with the same name does nothing.

    For replacements that pass everything through unless the call concerns an object of ours.
    """
    assert _BY_NAME[name].patched, name
    with _LOCK:
        owner, last, value = resolve(name)
        if getattr(value, "_hf_rocm_tune_seam", None) == name:
            return
        replacement = make(value)
        replacement.__wrapped__ = value  # type: ignore[attr-defined]  # keeps inspect.signature truthful
        replacement._hf_rocm_tune_seam = name  # type: ignore[attr-defined]
        setattr(owner, last, replacement)


def _message(row: Seam, what: str) -> str:
    return (
        f"cannot verify: upstream moved {row.module}.{row.attribute} ({row.why}): {what}. "
        f"Checked with {row.checked}: install that version"
    )
