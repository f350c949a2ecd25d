"""The private places of upstream libraries on which verification depends.

A place that upstream has moved is a `SeamError`, never a transfer that is silently not verified. Names and parameters
do not show whether upstream still calls a place: `make drift` tries the versions of `TESTED` and a run says which of
the installed ones are newer.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import inspect
import re
import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from packaging.specifiers import SpecifierSet
from packaging.version import Version

from hf_rocm_tune.errors import SeamError


@dataclass(frozen=True)
class Seam:
    """One private place of an upstream library."""

    name: str  # ours
    module: str
    attribute: str  # dotted, inside the module
    leading: str  # the parameters that our replacement or override relies on, in order
    why: str  # what passes there
    patched: bool = False  # replaced in place (otherwise it is overridden in a subclass)
    rare: bool = False  # checked at its first use: most runs do not import its module

    @property
    def parameters(self) -> tuple[str, ...]:
        return tuple(self.leading.split())


TESTED = {
    "torch": ("2.10.0", "2.14.1"),
    "transformers": ("5.19.0", "5.24.0"),
    "accelerate": ("1.13.0", "1.15.0"),
    "peft": ("0.20.0", "0.21.2"),
    "trl": ("1.13.0", "1.16.0"),
    "bitsandbytes": ("0.50.0", "0.50.2"),
}
"""The oldest and the newest version of each library with which runs were tried: docs/compatibility.md."""
LEFT_OUT = {"trl": SpecifierSet("==1.15.*")}
"""Versions between them that do not work: TRL 1.15 computes its loss with Triton on every device, the CPU too."""

_PACKAGE = __name__.partition(".")[0]
_TRAINER = "transformers.trainer"
_LOADING = "transformers.core_model_loading"
_FSDP = "accelerate.utils.fsdp_utils"
_COLLECTIVES = "torch.distributed.fsdp._fully_shard._fsdp_collectives"

SEAMS = (
    Seam("materialize_weight", _LOADING, "_materialize_copy", "tensor device dtype", patched=True,
         why="every weight of from_pretrained is read and placed here, quantised models too"),
    Seam("open_weights", "transformers.modeling_utils", "safe_open", "filename framework", patched=True,
         why="opens the weight files: what is loaded are the mapped file's bytes, not what its reader returns"),
    Seam("load_state_dict", "transformers.modeling_utils", "convert_and_load_state_dict_in_model",
         "model state_dict load_config", patched=True,
         why="maps checkpoint tensors to parameters"),
    Seam("set_weight", _LOADING, "set_param_for_module", "model target_name param_value", patched=True,
         why="every weight is set here once it is cast, fused or quantised: it gets its digest at this moment"),
    Seam("missing_keys", "transformers.modeling_utils", "PreTrainedModel._move_missing_keys_from_meta_to_device",
         "self missing_keys device_map device_mesh hf_quantizer", patched=True,
         why="weights and buffers that no file holds are initialised here; we keep them on the host until they move"),
    Seam("reserve_memory", "transformers.modeling_utils", "caching_allocator_warmup",
         "model expanded_device_map hf_quantizer", patched=True,
         why="reserves memory for the whole model, of which a streamed one has only a part on the card"),
    Seam("conversion_errors", "transformers.core_model_loading", "log_conversion_errors",
         "first_target_key loading_info extras op", patched=True,
         why="collects the errors of a load, which ends with the first one here, a shortage of memory as such"),
    Seam("unquantised_layers", "transformers.quantizers.base", "HfQuantizer.get_modules_to_not_convert",
         "model skip_modules keep_in_fp32_modules", patched=True,
         why="names the layers that are not quantised: routers are added"),
    Seam("quantised_weights", "transformers.quantizers.quantizer_bnb_4bit",
         "Bnb4BitHfQuantizer.param_needs_quantization", "self model param_name", patched=True,
         why="chooses the weights that are quantised as they arrive: fused experts are added"),
    Seam("quantise", "transformers.integrations.bitsandbytes", "Bnb4bitQuantize.convert",
         "self input_dict full_layer_name model", patched=True,
         why="quantises a weight that has arrived: fused experts are added"),
    Seam("dequantise_mxfp4", "transformers.integrations.mxfp4", "Mxfp4Dequantize.convert",
         "self input_dict model full_layer_name missing_keys", patched=True,
         why="would turn gpt-oss's experts into bfloat16: they stay packed"),
    Seam("expert_weights", "peft.tuners.lora.layer", "ParamWrapper.get_param", "self", patched=True,
         why="an adapter of experts asks here for their weights: packed ones are described"),
    Seam("expert_adapters", "peft.tuners.lora.layer", "ParamWrapper._activate_lora",
         "self active_adapters", patched=True,
         why="adds an adapter's product to the experts' weights: to packed ones it is not added"),
    Seam("dequantise", "bitsandbytes.functional", "dequantize_4bit", "A quant_state", patched=True,
         why="dequantises a 4-bit weight for backward: it is checked there"),
    Seam("packed_sequences", "transformers.masking_utils", "find_packed_sequence_indices", "position_ids", patched=True,
         why="tells where packed examples begin: a model that never asks would let them see each other"),
    Seam("vllm_weights", "trl.generation.vllm_generation", "VLLMGeneration._iter_named_params", "self", patched=True,
         rare=True,
         why="merges the adapter into the frozen weights to send them to vLLM, and takes it out again with a rounding"),
    Seam("dispatch", "transformers.modeling_utils", "accelerate_dispatch",
         "model hf_quantizer device_map", patched=True,
         why="puts hooks on a model of several devices that copy activations between them unverified"),
    Seam("send_to_device", "accelerate.data_loader", "send_to_device", "tensor device non_blocking", patched=True,
         why="DataLoaderDispatcher places its batches through this, whatever its device is"),
    Seam("skip_first_batches", _TRAINER, "skip_first_batches", "dataloader num_batches", patched=True,
         why="the loader of a resumed epoch is a new stock object made here"),
    Seam("shard_iteration", "accelerate.data_loader", "DataLoaderShard.__iter__", "self",
         why="reads one batch ahead of the one it delivers: the transfer of the next batch starts there"),
    Seam("prepare_model", "accelerate.accelerator", "Accelerator.prepare_model",
         "self model device_placement evaluation_mode",
         why="would move the whole model again; called with device_placement off"),
    Seam("gather", "accelerate.accelerator", "Accelerator.gather", "self tensor",
         why="trainers gather metrics in a micro-step: no rank may wait there for one that is out of memory"),
    Seam("gather_for_metrics", "accelerate.accelerator", "Accelerator.gather_for_metrics", "self input_data",
         why="trainers gather metrics in a micro-step: those only logged wait until they are"),
    Seam("fsdp2_prepare", _FSDP, "fsdp2_prepare_model", "accelerator model",
         why="decides which modules FSDP2 gathers together, and shards them"),
    Seam("fsdp2_load", _FSDP, "fsdp2_load_full_state_dict", "accelerator model full_sd cpu_offload", patched=True,
         why="broadcasts every weight from rank 0: each rank brings its own rows through the mover instead"),
    Seam("fsdp2_gather", _COLLECTIVES, "foreach_all_gather", "fsdp_params group async_op",
         why="weights come from the other cards here, in each forward and backward"),
    Seam("fsdp2_reduce", _COLLECTIVES, "foreach_reduce", "fsdp_params unsharded_grads reduce_scatter_group",
         why="gradients of all cards are averaged here, each card's part of them"),
    Seam("fsdp2_norm", "accelerate.accelerator", "Accelerator.clip_grad_norm_", "self parameters max_norm norm_type",
         why="computes the norm of sharded gradients over the cards"),
    Seam("full_state", "accelerate.accelerator", "Accelerator.get_state_dict", "self model unwrap",
         why="gathers a sharded model over the cards to save it, frozen weights too"),
    Seam("ddp_ignore", "torch.nn.parallel.distributed",
         "DistributedDataParallel._set_params_and_buffers_to_ignore_for_model", "module params_and_buffers_to_ignore",
         why="keeps frozen weights out of the start-up broadcast"),
)  # fmt: skip

_BY_NAME = {seam.name: seam for seam in SEAMS}
_LOCK = threading.RLock()


def resolve(name: str) -> tuple[Any, str, Callable[..., Any]]:
    """Finds a seam in the installed libraries."""
    row = _BY_NAME[name]
    try:
        owner: Any = importlib.import_module(row.module)
        *path, last = row.attribute.split(".")
        for part in path:
            owner = getattr(owner, part)
        value = getattr(owner, last)
    except (ImportError, AttributeError) as error:
        raise _moved(f"{row.module}.{row.attribute} ({row.why})", f"it is missing ({error})") from error
    found = tuple(inspect.signature(value).parameters)
    if found[: len(row.parameters)] != row.parameters:
        what = f"its parameters are {found}, expected {row.parameters} first"
        raise _moved(f"{row.module}.{row.attribute} ({row.why})", what)
    return owner, last, value


def check_all() -> None:
    """Resolves every seam but rare ones."""
    for row in SEAMS:
        if not row.rare:
            resolve(row.name)


def check_overrides(trainer: type) -> None:
    """Compares the methods that our classes override with those that they override."""
    for ours, name, theirs in overrides(trainer):
        where = f"what {ours.__name__}.{name} overrides"
        if not theirs:
            raise _moved(where, "the method that it overrides is missing")
        wanted, found = (_parameters(vars(owner)[name]) for owner in (ours, theirs[-1]))
        if found[: len(wanted)] != wanted:
            raise _moved(where, f"{theirs[-1].__name__} has the parameters {found}, expected {wanted} first")


def overrides(trainer: type) -> Iterator[tuple[type, str, list[type]]]:
    """(class of ours, method marked with ``@override``, classes behind it that define it), of a trainer's bases."""
    bases = [(base, base.__module__.partition(".")[0] == _PACKAGE) for base in trainer.__mro__]
    for place, (base, is_ours) in enumerate(bases):
        for name, method in vars(base).items() if is_ours else ():
            if getattr(method, "__override__", False):
                yield base, name, [other for other, own in bases[place:] if not own and name in vars(other)]


def untested() -> list[str]:
    """Installed libraries newer than those the seams were checked with, such as "peft 0.22.0"."""
    found = {name: importlib.metadata.version(name).partition("+")[0] for name in TESTED}
    return [f"{name} {version}" for name, version in found.items() if Version(version) > Version(TESTED[name][1])]


def is_tested(library: str) -> bool:
    """Whether the installed version lies between the oldest and the newest that were tried."""
    oldest, newest = map(Version, TESTED[library])
    version = Version(importlib.metadata.version(library).partition("+")[0])
    return oldest <= version <= newest and version not in LEFT_OUT.get(library, ())


def failed_import(error: BaseException) -> SeamError | None:
    """What to say where an upstream library is absent, or lacks a name that we or another of them import.

    None for every other error, such as a failed import of ours.
    """
    chain = [error]
    while chain[-1].__cause__ is not None:  # lazy modules of TRL and transformers raise another error from it
        chain.append(chain[-1].__cause__)
    failed = next((link for link in chain if isinstance(link, ImportError)), None)
    if failed is None:
        return None
    library = (failed.name or "").partition(".")[0]
    importer, purpose = "", ""
    for frame, _ in traceback.walk_tb(failed.__traceback__):
        name = frame.f_globals.get("__name__", "")
        if not name.startswith("importlib"):
            importer, purpose = name, (frame.f_globals.get("__doc__") or name).splitlines()[0]
    user = importer.partition(".")[0]
    if library not in TESTED or user == library or user not in (_PACKAGE, *TESTED):
        return None
    try:
        versions = {name: importlib.metadata.version(name) for name in (library, *TESTED)}
    except importlib.metadata.PackageNotFoundError as missing:
        return SeamError(f"{missing.name} is not installed: pip install {missing.name}")
    where = f'"{re.split("[:.]", purpose)[0]}" ({importer})' if user == _PACKAGE else f"{user} {versions[user]}"
    oldest, newest = TESTED[library]
    return SeamError(
        f"{library} {versions[library]} does not have what {where} imports from it: {failed}. Install {library} "
        f"{oldest} to {newest}, or report this"
    )


def _parameters(method: Callable[..., Any]) -> tuple[str, ...]:
    kinds = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.POSITIONAL_ONLY)
    return tuple(name for name, each in inspect.signature(method).parameters.items() if each.kind in kinds)


def _moved(where: str, what: str) -> SeamError:
    known = ", ".join(f"{name} {oldest} to {newest}" for name, (oldest, newest) in TESTED.items())
    return SeamError(f"cannot verify: upstream changed {where}: {what}. Checked with {known}: install these")


@contextmanager
def replaced(name: str, make: Callable[[Callable[..., Any]], Callable[..., Any]]) -> Iterator[None]:
    """Replaces a seam for the length of the block, process-wide."""
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
