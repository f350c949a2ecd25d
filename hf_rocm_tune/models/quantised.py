"""bitsandbytes: whether it can run here, and what keeps its 4-bit and 8-bit weights trainable and watched."""

from __future__ import annotations

import importlib
import inspect
import re
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from hf_rocm_tune import upstream
from hf_rocm_tune.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from torch import Tensor

    from hf_rocm_tune.transfer import Mover


#: Formats that transformers converts to bfloat16 on loading: with ``dequantize``, and always on a CPU.
_DEQUANTISED = ("fp8", "mxfp8", "mxfp4")


def has_mxfp4(config: Any) -> bool:
    """Whether a checkpoint's experts are in MXFP4, and stay so when it is loaded (`models.experts`)."""
    values = _settings(config)
    return values.get("quant_method") == "mxfp4" and not values.get("dequantize")


def _settings(config: Any) -> dict[str, Any]:
    given = getattr(config, "quantization_config", None) or {}
    return given if isinstance(given, dict) else given.to_dict()


def checkpoint_bits(config: Any, name: str, *, on_card: bool) -> int | None:
    """How a checkpoint's weights are quantised: 4 bits (MXFP4: experts only) or 8; None: not quantised once loaded."""
    values = _settings(config)
    method = str(values.get("quant_method"))
    if not values or (method in _DEQUANTISED and not has_mxfp4(config) and (values.get("dequantize") or not on_card)):
        return None
    if has_mxfp4(config) or values.get("load_in_4bit"):
        return 4
    if values.get("load_in_8bit"):
        return 8
    more = " (`dequantize: true` in its quantization_config loads it as bfloat16)" if method in _DEQUANTISED else ""
    raise UsageError(
        f"model {name}: its weights are quantised by {method}, which cannot be trained here{more}: give the model "
        "that was quantised; --load_in_4bit saves memory"
    )


def require_bitsandbytes(device: torch.device, flag: str) -> None:
    try:
        importlib.import_module("bitsandbytes")
        cextension = importlib.import_module("bitsandbytes.cextension")
    except Exception as error:
        raise UsageError(
            f"{flag} needs bitsandbytes, which cannot be imported here ({type(error).__name__}: {error}): "
            f"install bitsandbytes>=0.50.2, or train without {flag}"
        ) from error
    if isinstance(cextension.lib, cextension.ErrorHandlerMockBNBNativeLibrary):
        runtime = f"ROCm {torch.version.hip}" if torch.version.hip else f"CUDA {torch.version.cuda}"
        raise UsageError(
            f"{flag}: bitsandbytes has no native library for {runtime if device.type == 'cuda' else device.type}: "
            f"install a version that carries one (`python -m bitsandbytes` lists them), or train without {flag}"
        )


_CAST_WEIGHT = re.compile(
    r"\bself\.([\w.]+)\.weight\.(?:dtype\b(?!\)*\.is_floating_point)|(?:data\.)?(?:type|to|float|clamp_?)\()"
)
_MULTIPLIED_WEIGHT = re.compile(r"\bself\.([\w.]+)\.weight *@")
_ASKED = "_is_quantized"  # with which a class chooses another way


def cast_targets(model: nn.Module) -> list[str]:
    """Names of linear layers to whose weight's dtype a module casts their input, or whose weight it casts, clamps or
    multiplies with itself.

    Quantised weights are bytes: a cast would destroy the input, or give no weight. So these are not quantised.
    """
    modules = dict(model.named_modules())
    names = {kind: _casts(kind) for kind in {type(module) for module in modules.values()}}
    return [
        f"{path}.{name}" if path else name
        for path, module in modules.items()
        for name in names[type(module)]
        if isinstance(_attribute(module, name), torch.nn.Linear)
    ]


def _casts(kind: Any) -> tuple[str, ...]:
    """The attributes of a class to whose weight's dtype its code casts, unless it is asked about first, or whose weight
    it casts, clamps or multiplies with itself."""
    found: list[str] = []
    for function in (kind.forward, *vars(kind).values()):
        code = getattr(inspect.unwrap(function), "__code__", None)  # without a decorator such as `torch.no_grad`
        if code is None or "weight" not in code.co_names:
            continue
        with suppress(OSError, TypeError):  # of no file
            source = inspect.getsource(code)
            found += _CAST_WEIGHT.findall(source)
            if _ASKED not in source:
                found += _MULTIPLIED_WEIGHT.findall(source)
    return tuple(dict.fromkeys(found))


def _attribute(module: Any, path: str) -> Any:
    for name in path.split("."):
        module = getattr(module, name, None)
    return module


def linear_in_name_only(model: nn.Module) -> list[str]:
    """Names of layers of a model's own code that derive from a linear one and give something else.

    Llama 4's router gives two tensors, the first output projection of DeepSeek V4 a product for each group of heads:
    4-bit weights would replace them by a linear layer, and an adapter would add what does not fit.
    """
    names = []
    for name, module in model.named_modules():
        kind = type(module)
        is_own = kind.__module__.startswith(("transformers.models.", "transformers_modules."))
        if not isinstance(module, nn.Linear) or not is_own or kind.forward is nn.Linear.forward:
            continue
        if not _is_linear(module):
            names.append(name)
    return names


def _is_linear(layer: nn.Linear) -> bool:
    """Whether a layer makes of a row what a linear one would, tried without values."""
    weights = {name: torch.empty_like(weight, device="meta") for name, weight in layer.named_parameters()}
    row = torch.empty(1, layer.in_features, dtype=layer.weight.dtype, device="meta")
    try:
        made = torch.func.functional_call(layer, weights, (row,))
    except (RuntimeError, ValueError, TypeError, IndexError):
        return False
    return isinstance(made, torch.Tensor) and made.shape == (1, layer.out_features)


def require_quantised(model: nn.Module, name: str) -> None:
    marks = {"Linear4bit": "quant_state", "Linear8bitLt": "CB"}
    for path, module in model.named_modules():
        mark = marks.get(type(module).__name__)
        if mark is not None and not hasattr(module.weight, mark):
            raise UsageError(
                f"model {name}: its config.json says that bitsandbytes quantised the weights, and {path}.weight in its "
                "files is not quantised: take quantization_config out of config.json, and give --load_in_4bit instead"
            )


_BLOCK = 64
"""Values of a 4-bit block, as bitsandbytes makes them here."""


def too_narrow_on_cpu(model: nn.Module) -> list[str]:
    """Names of linear layers whose rows are no multiple of a block, which bitsandbytes' code for CPUs would dequantise
    wrongly (see `require_right_on_cpu`): on a CPU they stay in 16 bits."""
    return [
        name
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear) and module.in_features % _BLOCK != 0
    ]


_LOOKED_AT = 1 << 16
"""Values of a 4-bit weight that are dequantised twice: of narrow rows the first ones may be right by chance."""


def require_right_on_cpu(model: nn.Module, name: str) -> None:
    """Refuses 4-bit weights that bitsandbytes' code for CPUs dequantises wrongly.

    Seen with bitsandbytes 0.50.2 where the values of a row are no multiple of a block; other widths are not looked at.
    """
    seen = set[int]()
    for path, module in model.named_modules():
        weight = getattr(module, "weight", None)
        state = getattr(weight, "quant_state", None)
        if state is None or weight is None or weight.device.type != "cpu":
            continue
        rows, columns = state.shape[0], state.shape[-1]
        if columns % state.blocksize == 0 or columns in seen:
            continue
        seen.add(columns)
        first_rows = [slice(0, min(rows, max(8, _LOOKED_AT // columns)))]
        part, wanted = next(rows_of_4_bit(weight.data, state, lambda tensor: tensor, first_rows))
        if not torch.allclose(dequantised(module)[part].float(), wanted, atol=0.02 * float(wanted.abs().max())):
            raise UsageError(
                f"model {name}: on a CPU this bitsandbytes dequantises {path}.weight wrongly, whose rows of {columns} "
                f"values are no multiple of its blocks of {state.blocksize}: use a GPU, or give the model that was "
                "quantised"
            )


def keep_trainable_on_cpu(model: nn.Module) -> None:
    """Stops bitsandbytes from repacking 4-bit weights on a CPU with AVX512-BF16.

    One evaluation under ``no_grad`` would repack them in place, lossily, and later training steps would use a kernel
    without autograd (tried with bitsandbytes 0.50.2: 26 of 28 adapter gradients changed by more than 1 %).
    """
    for module in model.modules():
        weight = getattr(module, "weight", None)
        on_cpu = isinstance(weight, torch.Tensor) and weight.device.type == "cpu"
        if on_cpu and hasattr(module, "support_avx512bf16_for_cpu"):
            setattr(module, "support_avx512bf16_for_cpu", False)  # noqa: B010  # a plain flag, not a parameter


_HOOKED = "_hf_rocm_tune_follows_bias"  # of a module


def follow_bias_casts(model: nn.Module, mover: Mover) -> None:
    """Marks a verified, frozen bias as derived when bitsandbytes casts it in ``forward`` to the compute dtype."""
    for module in model.modules():
        if not type(module).__module__.startswith("bitsandbytes."):
            continue
        bias = getattr(module, "bias", None)
        hooked = getattr(module, _HOOKED, False)
        if bias is not None and not bias.requires_grad and not hooked and mover.was_verified(bias):
            module.register_forward_hook(_BiasCast(mover, bias.dtype))
            setattr(module, _HOOKED, True)


class _BiasCast:
    def __init__(self, mover: Mover, dtype: torch.dtype) -> None:
        self._mover, self._dtype = mover, dtype

    def __call__(self, module: Any, *_: Any) -> None:
        if module.bias.dtype != self._dtype:
            self._dtype = module.bias.dtype
            self._mover.mark_derived(module.bias, "cast by bitsandbytes from a verified tensor")


_ELEMENTS = 1 << 20  # of a weight, widened at once: they stay in the processor's cache


def host_weight(
    module: Any, dtype: torch.dtype | None, copy: Callable[[Tensor], Tensor]
) -> Iterator[tuple[slice, Tensor]]:
    """The weight of a linear layer, ``[out, in]`` in float32, some rows at a time; dequantised without bitsandbytes.

    ``dtype``: to which a weight that is not quantised is rounded; ``copy``: gives a host copy of a tensor.
    """
    weight = module.weight
    state = getattr(weight, "quant_state", None)
    state_of_8_bit = getattr(module, "state", None)
    if state is not None:
        rows, columns = state.shape
        yield from rows_of_4_bit(copy(weight), state, copy, _parts(rows, columns, multiple=state.blocksize))
    elif state_of_8_bit is not None:
        holder = state_of_8_bit if state_of_8_bit.SCB is not None else weight
        scale = copy(holder.SCB).float()[:, None] / 127
        holder = state_of_8_bit if state_of_8_bit.CB is not None else weight
        codes = copy(holder.CB)
        for part in _parts(*codes.shape):
            yield part, codes[part].float() * scale[part]
    else:
        whole = copy(weight)
        if isinstance(module, Conv1D):
            whole = whole.T
        for part in _parts(*whole.shape):
            yield part, whole[part].to(dtype).float()


def _parts(rows: int, columns: int, multiple: int = 1) -> Iterator[slice]:
    """Slices of rows; with ``multiple`` rows each begins with a block of that many values."""
    step = max(1, _ELEMENTS // columns // multiple) * multiple
    return (slice(begin, min(begin + step, rows)) for begin in range(0, rows, step))


def rows_of_4_bit(
    packed: Tensor, state: Any, copy: Callable[[Tensor], Tensor], parts: Iterable[slice]
) -> Iterator[tuple[slice, Tensor]]:
    """Rows that begin with a block, float32; of experts (experts, rows, columns) the rows of all are counted.

    Two values a byte, the first in the high bits: code[value] * scale of its block; the layout of bitsandbytes.
    """
    columns = state.shape[-1]
    data = packed.flatten().view(torch.uint8)
    code = copy(state.code).float()
    size = state.blocksize
    scales = copy(state.absmax)
    if state.nested:
        inner = state.state2
        outer = copy(inner.absmax).float().repeat_interleave(inner.blocksize)[: scales.numel()]
        scales = copy(inner.code).float()[scales.int()] * outer + copy(state.offset).float()
    for part in parts:
        first, last = part.start * columns, part.stop * columns
        pairs = data[first // 2 : -(-last // 2)]
        values = code[torch.stack([pairs >> 4, pairs & 15], dim=1).flatten()[: last - first].int()]
        values *= scales[first // size : -(-last // size)].repeat_interleave(size)[: last - first]
        yield part, values.to(state.dtype).float().view(-1, columns)


def dequantised(module: Any) -> Tensor:
    """The weight of a `Linear4bit`, ``[out, in]``, dequantised by bitsandbytes."""
    functional: Any = importlib.import_module("bitsandbytes.functional")
    values: Tensor = functional.dequantize_4bit(module.weight.data.view(-1, 1), module.weight.quant_state)
    return values


def on_dequantised(weight: Any, observer: Callable[..., None]) -> Watch:
    """Have what is dequantised from this weight looked at, before it is multiplied with; of packed experts each one."""
    if weight.quant_state.quant_type != "mxfp4":
        upstream.replace_for_good("dequantise", _observed)
    return Watch(weight.quant_state, observer)


def _observed(stock: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def dequantize_4bit(A: Tensor, quant_state: Any = None, *arguments: Any, **keywords: Any) -> Tensor:
        values = stock(A, quant_state, *arguments, **keywords)
        observer = getattr(quant_state, "observer", None)
        if observer is not None:
            observer(values)
        return values

    return dequantize_4bit


class Watch:
    """Has what is computed with a weight given to ``observer``, until it is removed."""

    def __init__(self, holder: Any, observer: Callable[..., None]) -> None:
        self._holder = holder
        holder.observer = observer

    def remove(self) -> None:
        self._holder.observer = None


_WITH_STATISTICS = (
    torch.nn.BatchNorm1d, torch.nn.BatchNorm2d, torch.nn.BatchNorm3d, torch.nn.SyncBatchNorm,
    torch.nn.InstanceNorm1d, torch.nn.InstanceNorm2d, torch.nn.InstanceNorm3d,
)  # fmt: skip


def running_statistics(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Names and tensors; torch's kernels update them without a version count, and a checkpoint restores them."""
    for path, module in model.named_modules():
        if isinstance(module, _WITH_STATISTICS):
            yield from ((f"{path}.{name}".lstrip("."), buffer) for name, buffer in module.named_buffers(recurse=False))
