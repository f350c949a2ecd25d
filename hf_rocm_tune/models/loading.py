"""Loading of weights through the mover.

Inside :func:`verified_loading` the one function in which transformers reads every weight sends the mapped file's bytes
through the mover; casts run on the device from the verified tensor. What no file holds is initialised on the host and
moved by `placement.place`. Not covered: ``device_map`` entries on a device that the mover does not serve, and weights
sharded at load time: the coverage lists them as unverified.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial, wraps
from typing import TYPE_CHECKING, Any

import torch

from hf_rocm_tune import upstream
from hf_rocm_tune.errors import UsageError
from hf_rocm_tune.models.experts import is_expert_weight, mxfp4_code, pack_mxfp4, pack_nf4, routers_of
from hf_rocm_tune.models.files import MappedFile
from hf_rocm_tune.models.placement import Read, mark_loaded, remember_read
from hf_rocm_tune.models.streamed import Streamed
from hf_rocm_tune.models.streaming import leave_device
from hf_rocm_tune.transfer import digest

if TYPE_CHECKING:
    from hf_rocm_tune.transfer import Mover


@contextmanager
def verified_loading(
    mover: Mover, *, on_host: bool = False, streamed: Streamed | None = None, packed: bool = False
) -> Iterator[None]:
    """Within the block every weight that ``from_pretrained`` loads passes the mover.

    ``on_host``: all stay on the host; ``streamed``: the layers whose matrices stay there; ``packed``: so do MXFP4
    experts.
    """
    loading = _Loading(mover, on_host, streamed)
    with ExitStack() as stack:
        stack.enter_context(upstream.replaced("open_weights", partial(partial, loading.open)))
        stack.enter_context(upstream.replaced("materialize_weight", partial(partial, loading.materialize)))
        stack.enter_context(upstream.replaced("load_state_dict", partial(partial, loading.load)))
        if on_host:
            yield
            return
        stack.enter_context(upstream.replaced("set_weight", partial(partial, loading.set_weight)))
        if streamed is not None or packed:
            stack.enter_context(upstream.replaced("reserve_memory", lambda stock: lambda *_: None))
        stack.enter_context(upstream.replaced("conversion_errors", _errors_as_they_come))
        stack.enter_context(upstream.replaced("missing_keys", _initialise_on_host))
        stack.enter_context(upstream.replaced("unquantised_layers", _and_routers))
        stack.enter_context(upstream.replaced("quantised_weights", _or_experts))
        stack.enter_context(upstream.replaced("quantise", _quantise))
        if packed:
            stack.enter_context(upstream.replaced("dequantise_mxfp4", lambda stock: _keep_mxfp4(mover)))
        stack.enter_context(mover.copies_as("weights"))  # tensors that quantisation moves
        yield


class _Loading:
    """What stands in the place of transformers' functions during a load; each is given the ``stock`` one first."""

    def __init__(self, mover: Mover, on_host: bool, streamed: Streamed | None) -> None:
        self._mover, self._on_host, self._streamed = mover, on_host, streamed
        self._names: dict[int, tuple[str, str | None]] = {}  # and files, by the id of a lazy checkpoint tensor

    def open(self, stock: Callable[..., Any], filename: str, framework: str, *given: Any, **more: Any) -> Any:
        if "backend" not in more:  # not for `_load_pretrained_model`, but for DeepSpeed's sharded loading
            return stock(filename, framework, *given, **more)
        mapped = MappedFile(filename)
        self._names.update((id(tensor), (name, os.fspath(filename))) for name, tensor in mapped.tensors.items())
        return mapped

    def materialize(
        self, stock: Callable[..., torch.Tensor], tensor: Any, device: Any = None, dtype: torch.dtype | None = None
    ) -> torch.Tensor:
        name, file = self._names.get(id(tensor), ("a checkpoint tensor", None))
        mover, streamed = self._mover, self._streamed
        stays = streamed is not None and streamed.from_files and streamed.has(name)
        if not (self._on_host or stays or device is None) and mover.serves(torch.device(device)):
            return mover.move_to(torch.device(device), tensor[...], name=name, source=file, dtype=dtype)
        loaded = stock(tensor, "cpu" if stays else device, dtype)
        if file is not None and loaded.device.type == "cpu" and mover.settings.verify != "off":
            mover.read_from(file, name, known := digest(tensor))
            remember_read(loaded, Read(known, file, name) if loaded.data_ptr() == tensor.data_ptr() else None)
        return loaded

    def load(self, stock: Callable[..., Any], model: Any, state_dict: Any, load_config: Any, **more: Any) -> Any:
        for key, value in state_dict.items():
            self._names.setdefault(id(value), (key, None))  # not from a safetensors file
        try:
            result = stock(model, state_dict, load_config, **more)
        finally:
            self._names.clear()  # ids are valid only while the checkpoint's tensors live
        rows = sorted(result[0].mismatched_keys)
        if rows and not load_config.ignore_mismatched_sizes:
            name, in_file, expected = rows[0]
            raise UsageError(
                f"model: {len(rows)} tensors have other shapes in the weight files than config.json says, {name} first "
                f"({list(in_file)} instead of {list(expected)}): use the config.json that belongs to these weights"
            )
        return result

    def set_weight(
        self, stock: Callable[..., None], model: Any, target_name: str, param_value: Any, *rest: Any, **more: Any
    ) -> None:
        """Cast, fused and quantised weights get their digest immediately, before the next weight is loaded."""
        stock(model, target_name, param_value, *rest, **more)
        if self._streamed is None or not self._streamed.has(target_name):
            mark_loaded(model, target_name, self._mover)
        elif not self._streamed.from_files:  # else it is on the host
            mark_loaded(model, target_name, self._mover)
            leave_device(model, target_name, self._mover)


def rewrites_base(peft_config: Any) -> bool:
    """Whether this adapter's initialisation may change the base weights too (PiSSA, OLoRA, LoftQ ...)."""
    scheme = getattr(peft_config, "init_lora_weights", True)
    return isinstance(scheme, str) and scheme not in {"gaussian", "orthogonal"}


def _errors_as_they_come(stock: Callable[..., Any]) -> Callable[..., Any]:
    return wraps(stock)(lambda *given, **more: nullcontext())


def _and_routers(stock: Callable[..., list[str]]) -> Callable[..., list[str]]:
    def get_modules_to_not_convert(
        model: Any, skip_modules: Any = None, keep_in_fp32_modules: Any = None, *rest: Any
    ) -> list[str]:
        return [*stock(model, skip_modules, keep_in_fp32_modules, *rest), *routers_of(model)]

    return staticmethod(get_modules_to_not_convert)


def _or_experts(stock: Callable[..., bool]) -> Callable[..., bool]:
    def needs_quantization(self: Any, model: Any, param_name: str, **more: Any) -> bool:
        return stock(self, model, param_name, **more) or is_expert_weight(model, param_name)

    return needs_quantization


def _quantise(stock: Callable[..., Any]) -> Callable[..., Any]:
    def convert(self: Any, input_dict: Any, full_layer_name: Any = None, model: Any = None, **more: Any) -> Any:
        ((name, weights),) = input_dict.items()
        if not is_expert_weight(model, name):
            return stock(self, input_dict, full_layer_name, model, **more)
        weights = weights[0] if isinstance(weights, list) else weights
        return {name: pack_nf4(name, weights, self.hf_quantizer.quantization_config)}

    return convert


def _keep_mxfp4(mover: Mover) -> Callable[..., Any]:
    def convert(
        self: Any, input_dict: Any, model: Any = None, full_layer_name: str = "", missing_keys: Any = None, **more: Any
    ) -> Any:
        del self, more
        found = {name.rpartition("_")[2]: value for name, value in input_dict.items()}
        blocks, scales = (each[0] if isinstance(each, list) else each for each in (found["blocks"], found["scales"]))
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


def _initialise_on_host(stock: Callable[..., Any]) -> Callable[..., Any]:
    def move_missing(self: Any, missing_keys: Any, device_map: Any, device_mesh: Any, hf_quantizer: Any) -> Any:
        return stock(self, missing_keys, {"": "cpu"} if device_map else device_map, device_mesh, hf_quantizer)

    return move_missing
