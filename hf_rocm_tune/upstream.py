"""The private places of upstream libraries on which verification depends.

A place that upstream has moved is a `SeamError` with a clear line, never a transfer that is silently not verified.

- Trainer methods that our classes override are marked there with ``@override``. `check_overrides` compares them with
  upstream's: a marked method that overrides nothing, or has other parameters, is an error.
- The table lists all other places: each `Seam` names one function or method, the parameters on which we rely, the
  reason, and the version with which it was checked. Those marked ``patched`` are replaced in a `replaced` block or by
  `replace_for_good`.

Names and parameters do not show whether upstream still calls a place: `pyproject.toml` bounds the versions, and a run
says which of them are newer than `TESTED`.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import inspect
import re
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


TESTED = {
    "torch": "2.13.0",
    "transformers": "5.23.0",
    "accelerate": "1.15.0",
    "peft": "0.21.2",
    "trl": "1.16.0",
    "bitsandbytes": "0.50.2",
}
"""The version of each library with which all seams were read and tried."""

_TRAINER = "transformers.trainer"
_LOADING = "transformers.core_model_loading"
_TRANSFORMERS = f"transformers {TESTED['transformers']}"
_ACCELERATE = f"accelerate {TESTED['accelerate']}"
_PEFT = f"peft {TESTED['peft']}"
_TORCH = f"torch {TESTED['torch']}"
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
        name="open_weights",
        module="transformers.modeling_utils",
        attribute="safe_open",
        parameters=("filename", "framework"),
        why="opens the weight files: what is loaded are the mapped file's bytes, not what its reader returns",
        checked=_TRANSFORMERS,
        patched=True,
    ),
    Seam(
        name="load_state_dict",
        module="transformers.modeling_utils",
        attribute="convert_and_load_state_dict_in_model",
        parameters=("model", "state_dict", "load_config"),
        why="maps checkpoint tensors to parameters",
        checked=_TRANSFORMERS,
        patched=True,
    ),
    Seam(
        name="set_weight",
        module=_LOADING,
        attribute="set_param_for_module",
        parameters=("model", "target_name", "param_value"),
        why="every weight is set here once it is cast, fused or quantised: it gets its digest at this moment",
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
        name="reserve_memory",
        module="transformers.modeling_utils",
        attribute="caching_allocator_warmup",
        parameters=("model", "expanded_device_map", "hf_quantizer"),
        why="reserves memory for the whole model, of which a streamed one has only a part on the card",
        checked=_TRANSFORMERS,
        patched=True,
    ),
    Seam(
        name="unquantised_layers",
        module="transformers.quantizers.base",
        attribute="HfQuantizer.get_modules_to_not_convert",
        parameters=("model", "skip_modules", "keep_in_fp32_modules"),
        why="names the layers that are not quantised: routers are added",
        checked=_TRANSFORMERS,
        patched=True,
    ),
    Seam(
        name="quantised_weights",
        module="transformers.quantizers.quantizer_bnb_4bit",
        attribute="Bnb4BitHfQuantizer.param_needs_quantization",
        parameters=("self", "model", "param_name"),
        why="chooses the weights that are quantised as they arrive: fused experts are added",
        checked=_TRANSFORMERS,
        patched=True,
    ),
    Seam(
        name="quantise",
        module="transformers.integrations.bitsandbytes",
        attribute="Bnb4bitQuantize.convert",
        parameters=("self", "input_dict", "full_layer_name", "model"),
        why="quantises a weight that has arrived: fused experts are added",
        checked=_TRANSFORMERS,
        patched=True,
    ),
    Seam(
        name="dequantise_mxfp4",
        module="transformers.integrations.mxfp4",
        attribute="Mxfp4Dequantize.convert",
        parameters=("self", "input_dict", "model", "full_layer_name", "missing_keys"),
        why="would turn gpt-oss's experts into bfloat16: they stay packed",
        checked=_TRANSFORMERS,
        patched=True,
    ),
    Seam(
        name="expert_weights",
        module="peft.tuners.lora.layer",
        attribute="ParamWrapper.get_param",
        parameters=("self",),
        why="an adapter of experts asks here for their weights: packed ones are described",
        checked=_PEFT,
        patched=True,
    ),
    Seam(
        name="expert_adapters",
        module="peft.tuners.lora.layer",
        attribute="ParamWrapper._activate_lora",
        parameters=("self", "active_adapters"),
        why="adds an adapter's product to the experts' weights: to packed ones it is not added",
        checked=_PEFT,
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
        why="would move the whole model again; called with device_placement off",
        checked=_ACCELERATE,
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
        name="gather_for_metrics",
        module="accelerate.accelerator",
        attribute="Accelerator.gather_for_metrics",
        parameters=("self", "input_data"),
        why="trainers gather metrics in a micro-step: the gather of metrics that are only logged waits until they are",
        checked=_ACCELERATE,
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
        why="computes the norm of sharded gradients over the cards",
        checked=_ACCELERATE,
    ),
    Seam(
        name="full_state",
        module="accelerate.accelerator",
        attribute="Accelerator.get_state_dict",
        parameters=("self", "model", "unwrap"),
        why="gathers a sharded model over the cards to save it, frozen weights too",
        checked=_ACCELERATE,
    ),
    Seam(
        name="ddp_ignore",
        module="torch.nn.parallel.distributed",
        attribute="DistributedDataParallel._set_params_and_buffers_to_ignore_for_model",
        parameters=("module", "params_and_buffers_to_ignore"),
        why="keeps frozen weights out of the start-up broadcast",
        checked=_TORCH,
    ),
)

_BY_NAME = {seam.name: seam for seam in SEAMS}
_LOCK = threading.RLock()


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
        raise SeamError(_message(row, f"it is missing ({error})")) from error
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


def check_overrides(trainer: type) -> None:
    """Compares the methods that our classes override with those that they override.

    Args:
        trainer: a class with ours and upstream's among its bases.

    Raises:
        SeamError: upstream has no such method any more, or another parameter in a place on which we rely.
    """
    for ours, name, theirs in overrides(trainer):
        where = f"{ours.__name__}.{name}"
        if not theirs:
            raise SeamError(_moved(where, "the method that it overrides is missing"))
        wanted, found = (_parameters(vars(owner)[name]) for owner in (ours, theirs[-1]))
        if found[: len(wanted)] != wanted:
            raise SeamError(_moved(where, f"{theirs[-1].__name__} has the parameters {found}, expected {wanted} first"))


def overrides(trainer: type) -> Iterator[tuple[type, str, list[type]]]:
    """(class of ours, method marked with ``@override``, classes behind it that define it), of a trainer's bases."""
    package = __name__.partition(".")[0]
    bases = [(base, base.__module__.partition(".")[0] == package) for base in trainer.__mro__]
    for place, (base, is_ours) in enumerate(bases):
        for name, method in vars(base).items() if is_ours else ():
            if getattr(method, "__override__", False):
                yield base, name, [other for other, own in bases[place:] if not own and name in vars(other)]


def untested() -> list[str]:
    """Installed libraries newer than those the seams were checked with, such as "peft 0.22.0"."""
    installed = {name: importlib.metadata.version(name) for name in TESTED}
    return [f"{name} {version}" for name, version in installed.items() if _numbers(version) > _numbers(TESTED[name])]


def _numbers(version: str) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", version.partition("+")[0])]


def _parameters(method: Callable[..., Any]) -> tuple[str, ...]:
    kinds = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.POSITIONAL_ONLY)
    return tuple(name for name, each in inspect.signature(method).parameters.items() if each.kind in kinds)


def _moved(where: str, what: str) -> str:
    known = ", ".join(f"{name} {version}" for name, version in TESTED.items())
    return f"cannot verify: upstream changed what {where} overrides: {what}. Checked with {known}: install these"


@contextmanager
def replaced(name: str, make: Callable[[Callable[..., Any]], Callable[..., Any]]) -> Iterator[None]:
    """Replaces a seam for the length of the block, process-wide.

    Args:
        name: a seam that is marked ``patched``.
        make: given the present function, returns its replacement.

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

    For replacements that call through unless an object of ours is concerned.
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
