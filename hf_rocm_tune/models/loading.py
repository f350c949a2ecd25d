"""What happens around ``from_pretrained`` so that a loaded model is verified, and the features that reach into it.

Nothing in transformers is replaced for the verification. On a card every weight crosses at torch's dispatcher
(`transfer.interception`), where it is verified and tied to its file; what was computed there from verified tensors is
digested by `placement.mark_computed_in_load` as soon as the model is complete. On a CPU nothing crosses: tensors are
views of the mapped file, which `placement.place` digests and ties to it. `record_file_digests` digests what a file
holds and was cast or fused on the host.

Private places of transformers are replaced only for features: experts in 4 bit, quantised layers that are streamed.
"""

from __future__ import annotations

import logging
import os
import re
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial, wraps
from typing import TYPE_CHECKING, Any

import torch
from peft import PeftModel
from torch import Tensor, nn
from transformers.conversion_mapping import get_checkpoint_conversion_mapping
from transformers.core_model_loading import revert_weight_conversion
from transformers.pytorch_utils import Conv1D

from hf_rocm_tune import upstream
from hf_rocm_tune.errors import CorruptionError, device_shortage, shortage_in
from hf_rocm_tune.models.experts import is_expert_weight, mxfp4_code, pack_mxfp4, pack_nf4, routers_of
from hf_rocm_tune.models.files import MappedFile
from hf_rocm_tune.models.placement import (
    QUANTISED,
    Read,
    file_name,
    files_of,
    mark_loaded,
    quantised_again,
    remember_read,
)
from hf_rocm_tune.models.quantised import cast_targets, linear_in_name_only, too_narrow_on_cpu
from hf_rocm_tune.models.streamed import Streamed
from hf_rocm_tune.models.streaming import leave_device, streamer_of
from hf_rocm_tune.models.tensors import places_of, tensors_of
from hf_rocm_tune.transfer import QueuedDigests, digest
from hf_rocm_tune.transfer.mapped import in_file
from hf_rocm_tune.transfer.raw_bytes import storage_bytes

if TYPE_CHECKING:
    from pathlib import Path

    from hf_rocm_tune.transfer import Digest, Mover

# ---- after the load -------------------------------------------------------------------------------------------------


def record_host_tensors(model: nn.Module, mover: Mover) -> None:
    """Digest what a load has left on the host, until `placement.read_as`: it has to stay what it is now.

    A tensor whose memory is that of a mapped file is tied to the file's tensor.
    """
    if mover.settings.verify == "off":
        return
    for _, tensor in tensors_of(model):
        if tensor.device.type != "cpu" or mover.provenance(tensor) is not None or not tensor.nbytes:
            continue
        storage = storage_bytes(tensor)
        known = digest(storage)
        where = in_file(tensor)
        if where is None or storage.nbytes != tensor.nbytes:
            remember_read(tensor, Read(known))
        else:
            mover.read_from(where.file, where.tensor, known)
            remember_read(tensor, Read(known, where.file, where.tensor))


def record_file_digests(model: nn.Module, unexpected: Iterable[str], mover: Mover, *, as_loaded: bool = True) -> None:
    """Record digests of the tensors of a model's files that were loaded, for the comparison with the files' SHA-256.

    What crossed unchanged has been recorded. All else is read once more, and what was loaded must be equal to it: as it
    is, cast, quantised again, or converted back from what transformers fused or renamed.

    Args:
        model: loaded from files.
        unexpected: names for which the model has no place, as its loading reports them.
        mover: of the card, or of the host.
        as_loaded: nothing has changed a weight since the load.

    Raises:
        CorruptionError: what was loaded is not what the file holds.
    """
    if mover.settings.verify == "off":
        return
    is_left_out = _left_out(model, unexpected)
    is_converted = _converted(model)
    live = {file_name(name): tensor for name, tensor in tensors_of(model)}
    on_host: dict[str, Tensor] = {}  # the memory of streamed tensors
    streamer = streamer_of(model)
    if streamer is not None:
        for name, tensor, memory in streamer.read_apart():
            live[file_name(name)] = tensor if _is_quantised(tensor) else memory
            on_host[file_name(name)] = memory
    transposed = {  # GPT-2's, by bitsandbytes' layers in their place
        file_name(f"{path}.weight")
        for path, module in model.named_modules()
        if issubclass(getattr(module, "source_cls", nn.Linear), Conv1D)
    }
    read = {(os.path.realpath(file), name): known for (file, name), known in mover.loaded.items()}
    converted: dict[str, tuple[Path, Tensor]] = {}  # by names in the files, what the load fused or renamed on the host
    for file in files_of(model)[0]:
        where = os.path.realpath(file)
        for name, held in MappedFile(file).tensors.items():
            if is_left_out(name):
                continue
            seen = read.get((where, name), set())
            if not seen:
                mover.read_from(os.fspath(file), name, digest(held))
            if name in live and not is_converted(name):
                if as_loaded:
                    held = held.T if name in transposed else held
                    _require_as_in_file(file, name, held, live[name], on_host.get(name, live[name]), seen, mover)
            elif not seen:
                converted[name] = file, held
    if as_loaded and converted:
        _require_as_converted(model, converted, live)


def _require_as_in_file(
    file: Path, name: str, held: Tensor, loaded: Tensor, memory: Tensor, seen: Collection[Digest], mover: Mover
) -> None:
    """Compare a loaded tensor with its file's, cast as a load casts it; a quantised one has other bytes.

    ``memory``: where its bytes are, on the host if it is streamed. ``seen``: digests of the file's tensor where it was
    digested as it was loaded.

    Raises:
        CorruptionError: what was loaded is something else.
    """
    if _is_quantised(loaded):
        _require_as_quantised(file, name, held, loaded, memory, seen, mover)
        return
    if loaded.shape != held.shape or not loaded.is_floating_point():
        return
    known = mover.digest_of(loaded)  # of when it was verified: later changes are no fault of the reading
    if known is None and loaded.device.type == "cpu":
        known = digest(loaded.detach())
    if known is not None and known not in seen and known != digest(held.to(loaded.dtype)):
        raise _misread(file, name)


def _require_as_converted(
    model: nn.Module, converted: Mapping[str, tuple[Path, Tensor]], live: Mapping[str, Tensor]
) -> None:
    """Compare tensors that transformers renamed or fused with the file's, converted back as a save does it.

    One layer at a time: a fused tensor is copied for it. Not compared: what a quantisation has packed, and a checkpoint
    that was saved quantised.

    Raises:
        CorruptionError: another tensor was loaded.
    """
    base = model.get_base_model() if isinstance(model, PeftModel) else model
    dense: dict[str, dict[str, Tensor]] = defaultdict(dict)  # by layer
    for name, tensor in live.items():
        if tensor.is_floating_point() and not _is_quantised(tensor) and ".quant_state." not in name:
            dense[_LAYER.match(name)[0]][name] = tensor.detach()  # type: ignore[index]
    for of_layer in dense.values():
        try:
            as_saved = revert_weight_conversion(base, of_layer)
        except NotImplementedError:  # the conversions of a checkpoint that was saved quantised have no way back
            return
        for name, tensor in as_saved.items():
            if name not in converted:
                continue
            file, held = converted[name]
            loaded = tensor.clone(memory_format=torch.contiguous_format)
            (found,) = QueuedDigests([storage_bytes(loaded)]).confirmed()
            if loaded.shape == held.shape and found != digest(held.to(loaded.dtype)):
                raise _misread(file, name)


def _is_quantised(tensor: Tensor) -> bool:
    """Whether a tensor is a weight of bitsandbytes' in 4 or 8 bits."""
    return hasattr(tensor, "quant_state") or hasattr(tensor, "CB")


def _require_as_quantised(
    file: Path, name: str, held: Tensor, loaded: Tensor, memory: Tensor, seen: Collection[Digest], mover: Mover
) -> None:
    """Compare a weight of 4 or 8 bits with the file's, quantised again on its device.

    On a card only what was no part of the mapped file as it crossed: the rest is compared with the file by ``seen``.

    Raises:
        CorruptionError: another tensor was quantised.
    """
    on_card = loaded.device.type != "cpu"
    if on_card and seen:
        return
    again = quantised_again(name, loaded, held, mover).get(name)
    if again is None:
        return
    if on_card:
        (expected,) = QueuedDigests([storage_bytes(again)]).confirmed()
        (found,) = QueuedDigests([storage_bytes(memory)]).confirmed()
        if expected != found:
            raise _misread(file, name)
    else:  # a change since it was quantised is found where frozen weights are watched
        mover.mark_derived(loaded, QUANTISED, digest=digest(again))


_LAYER = re.compile(r"(.*?\.\d+\.)?")
"""Of a tensor's name what names its layer; empty outside of layers."""


def _misread(file: Path, name: str) -> CorruptionError:
    return CorruptionError(
        f"model file {file}: {name} was loaded from it with other bytes than another reading gave: a read from the "
        "disk or from the page cache was wrong. It was not used: start the same command again; if it happens again, "
        "test this machine's memory"
    )


def _converted(model: nn.Module) -> Callable[[str], bool]:
    """Whether a load computes weights of these names in the files from others, instead of taking them as they are."""
    model_type = getattr(getattr(model, "config", None), "model_type", None)
    patterns = [
        re.compile(pattern.replace("*", ".*"))
        for conversion in get_checkpoint_conversion_mapping(model_type) or ()
        if getattr(conversion, "operations", None)
        for pattern in conversion.source_patterns
    ]
    return lambda name: any(pattern.search(name) for pattern in patterns)


def _left_out(model: nn.Module, unexpected: Iterable[str]) -> Callable[[str], bool]:
    """Whether a file's tensor has no place in the model: so its loading reports, or its class without a report.

    A class's patterns may fit weights that do have a place. Names in a file may lack the model's prefix, or have it.
    """
    patterns = [re.compile(pattern) for pattern in upstream.read("ignored_weights", model) or ()]
    reported, prefix = set(unexpected), f"{getattr(model, 'base_model_prefix', '')}."
    places = {name for where in places_of(model) for name in (where.name, where.name.removeprefix(prefix))}

    def is_left_out(name: str) -> bool:
        if name in reported:
            return True
        return name.removeprefix(prefix) not in places and any(pattern.search(name) for pattern in patterns)

    return is_left_out


# ---- what a load reports --------------------------------------------------------------------------------------------


class LoadReport:
    """Holds back transformers' table of what went wrong in a load, and turns its errors into those behind them.

    transformers collects the errors of a load in that table, and ends with one that only refers to it.
    """

    def __init__(self, mover: Mover) -> None:
        self._mover = mover
        self._held: list[tuple[logging.Handler, logging.LogRecord]] = []
        self._said: list[str] = []
        # Raised by what stands in the place of transformers' functions, see `packed_experts`.
        self.errors: list[Exception] = []

    @contextmanager
    def reading(self) -> Iterator[LoadReport]:
        """Within the block; the table is shown at its end, unless it ends with an error."""
        filters = [(handler, partial(self._hold, handler)) for handler in logging.getLogger("transformers").handlers]
        for handler, filter_ in filters:
            handler.addFilter(filter_)
        try:
            yield self
        except Exception as error:
            self._raise_cause(error)
            raise
        finally:
            for handler, filter_ in filters:
                handler.removeFilter(filter_)
        self._show()

    def _hold(self, handler: logging.Handler, record: logging.LogRecord) -> bool:
        text = record.getMessage()
        self._said.append(text)
        if "LOAD REPORT" not in text:
            return True
        self._held.append((handler, record))
        return False

    def _show(self) -> None:
        held, self._held = self._held, []
        for handler, record in held:
            handler.handle(record)

    def _raise_cause(self, error: Exception) -> None:
        self._mover.raise_swallowed(error)
        if self.errors:
            raise self.errors[0] from error
        if isinstance(error, RuntimeError) and device_shortage(error) is None:
            for text in self._said:
                line = shortage_in(text)
                if line is not None:
                    raise torch.OutOfMemoryError(line) from error


# ---- features that reach into a load --------------------------------------------------------------------------------


@contextmanager
def packed_experts(
    mover: Mover,
    *,
    nf4: bool = False,
    mxfp4: bool = False,
    cast: bool = False,
    narrow: bool = False,
    report: LoadReport,
) -> Iterator[None]:
    """Within the block experts become packed: ``nf4``: quantised as they arrive; ``mxfp4``: as they are in the files.

    ``cast``: layers to whose weight's dtype their input is cast stay unquantised; ``narrow``: and those that
    bitsandbytes would dequantise wrongly on a CPU.

    Raises:
        SeamError: transformers has moved a place on which this feature stands.
    """
    noting = partial(_noting, report)
    with ExitStack() as stack:
        if nf4 or cast:
            staying = partial(_and_what_must_stay, routers=nf4, narrow=narrow)
            stack.enter_context(upstream.replaced("unquantised_layers", staying))
        if nf4:
            stack.enter_context(upstream.replaced("quantised_weights", _or_experts))
            stack.enter_context(upstream.replaced("quantise", lambda stock: noting(_quantise(stock))))
        if mxfp4:
            stack.enter_context(upstream.replaced("reserve_memory", lambda stock: lambda *_: None))
            stack.enter_context(upstream.replaced("dequantise_mxfp4", lambda stock: noting(_keep_mxfp4(mover))))
        yield


@contextmanager
def leaving_layers(mover: Mover, streamed: Streamed) -> Iterator[None]:
    """Within the block matrices of streamed layers that are quantised on a card go back to the host one by one.

    Raises:
        SeamError: transformers has moved a place on which this feature stands.
    """

    if streamed.from_files:  # they never leave the host
        yield
        return

    def leaving(stock: Callable[..., None]) -> Callable[..., None]:
        def set_weight(model: Any, target_name: str, param_value: Any, *rest: Any, **more: Any) -> None:
            stock(model, target_name, param_value, *rest, **more)
            if streamed.has(target_name):
                mark_loaded(model, target_name, mover)
                leave_device(model, target_name, mover)

        return set_weight

    with (
        upstream.replaced("set_weight", leaving),
        upstream.replaced("reserve_memory", lambda stock: lambda *_: None),
    ):
        yield


def _noting(report: LoadReport, convert: Callable[..., Any]) -> Callable[..., Any]:
    """Keeps what a conversion of ours raises: transformers collects the errors of conversions as text."""

    @wraps(convert)
    def noting(*given: Any, **more: Any) -> Any:
        try:
            return convert(*given, **more)
        except Exception as error:
            report.errors.append(error)
            raise

    return noting


def rewrites_base(peft_config: Any) -> bool:
    """Whether this adapter's initialisation may change the base weights too (PiSSA, OLoRA, LoftQ ...)."""
    scheme = getattr(peft_config, "init_lora_weights", True)
    return isinstance(scheme, str) and scheme not in {"gaussian", "orthogonal"}


def _and_what_must_stay(stock: Callable[..., list[str]], *, routers: bool, narrow: bool) -> Callable[..., list[str]]:
    def get_modules_to_not_convert(
        model: Any, skip_modules: Any = None, keep_in_fp32_modules: Any = None, *rest: Any
    ) -> list[str]:
        kept = [*stock(model, skip_modules, keep_in_fp32_modules, *rest), *cast_targets(model)]
        kept += linear_in_name_only(model)
        if narrow:
            kept += too_narrow_on_cpu(model)
        return [*kept, *routers_of(model)] if routers else kept

    return staticmethod(get_modules_to_not_convert)


def _or_experts(stock: Callable[..., bool]) -> Callable[..., bool]:
    def needs_quantization(self: Any, model: Any, param_name: str, **more: Any) -> bool:
        return stock(self, model, param_name, **more) or is_expert_weight(model, param_name)

    return needs_quantization


def _quantise(stock: Callable[..., Any]) -> Callable[..., Any]:
    def convert(self: Any, input_dict: Any, full_layer_name: Any = None, model: Any = None, **more: Any) -> Any:
        made: dict[str, Any] = {}
        for name, weights in input_dict.items():  # several where files have them in one: Sarvam's queries, keys, values
            if is_expert_weight(model, name):
                whole = weights[0] if isinstance(weights, list) else weights
                made[name] = pack_nf4(name, whole, self.hf_quantizer.quantization_config)
            else:
                made |= stock(self, {name: weights}, full_layer_name, model, **more)
        return made

    return convert


def _keep_mxfp4(mover: Mover) -> Callable[..., Any]:
    def convert(
        self: Any, input_dict: Any, model: Any = None, full_layer_name: str = "", missing_keys: Any = None, **more: Any
    ) -> Any:
        del self, more
        packed = {name.rpartition("_")[2]: value for name, value in input_dict.items()}
        blocks, scales = packed["blocks"], packed["scales"]
        if isinstance(blocks, list):
            blocks = blocks[0]
        if isinstance(scales, list):
            scales = scales[0]
        path, _, key = full_layer_name.rpartition(".")
        experts = model.get_submodule(path)
        code = mxfp4_code()
        if mover.serves(blocks.device):
            code = mover.move_to(blocks.device, code, name="the values of MXFP4")
        setattr(experts, key, pack_mxfp4(blocks, scales, code, getattr(experts, key).dtype))
        getattr(experts, key)._is_hf_initialized = True
        missing_keys.discard(full_layer_name)
        mark_loaded(model, full_layer_name, mover)
        return {}

    return convert
