"""Loading of weights through the mover.

``transformers`` reads every weight of ``from_pretrained`` in one function, in several threads, quantised models too
(bitsandbytes quantises what comes out of it). Inside :func:`verified_loading` that function sends the tensor through
the mover: read from the file on the host, digested there, copied through the ring, digested on the device. Casts are
made on the device from the verified tensor, and compared with the CPU's on a sample.

What no file holds (missing keys, rotary tables, other buffers) is initialised on the host and moved by
:func:`hf_rocm_tune.models.placement.place`.

Not covered: ``device_map`` entries on a device that the mover does not serve, and weights sharded at load time
(tensor parallel, FSDP): they keep no provenance, so the coverage names them as unverified.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

import torch

from hf_rocm_tune import upstream
from hf_rocm_tune.errors import CorruptionError, UsageError
from hf_rocm_tune.models.placement import mark_loaded
from hf_rocm_tune.transfer import digest, redirected

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedModel

    from hf_rocm_tune.transfer import Mover


SINGLE = "model.safetensors"
Names = dict[int, tuple[str, str | None]]
"""By identity of a checkpoint's lazy tensor: its name and the file that holds it."""


@contextmanager
def verified_loading(mover: Mover) -> Iterator[None]:
    """Within the block every weight that ``from_pretrained`` loads passes the mover.

    Args:
        mover: its device, or its cards, are those on which weights are verified.

    Raises:
        SeamError: transformers has moved one of the places where we stand.
    """
    names: Names = {}
    with ExitStack() as stack:
        stack.enter_context(upstream.replaced("materialize_weight", lambda stock: _materialize(stock, mover, names)))
        stack.enter_context(upstream.replaced("load_state_dict", lambda stock: _load_state_dict(stock, mover, names)))
        stack.enter_context(upstream.replaced("set_weight", lambda stock: _set_weight(stock, mover)))
        stack.enter_context(upstream.replaced("missing_keys", _initialise_on_host))
        stack.enter_context(redirected(mover, stage="weights"))  # what quantisation moves by itself
        yield


def rewrites_base(peft_config: Any) -> bool:
    """Whether this adapter's initialisation may change the base weights too (PiSSA, OLoRA, LoftQ ...)."""
    scheme = getattr(peft_config, "init_lora_weights", True)
    return isinstance(scheme, str) and scheme not in {"gaussian", "orthogonal"}


def _materialize(stock: Callable[..., Any], mover: Mover, names: Names) -> Callable[..., Any]:
    def materialize(tensor: Any, device: Any = None, dtype: torch.dtype | None = None) -> torch.Tensor:
        if device is None or not mover.serves(torch.device(device)):
            loaded: torch.Tensor = stock(tensor, device, dtype)
            return loaded
        source = tensor[...]
        name, file = names.get(id(tensor), ("a checkpoint tensor", None))
        moved = mover.move_to(torch.device(device), source, name=name, source=file)
        if dtype is None or dtype == moved.dtype:
            return moved
        return cast_verified(moved, source, dtype, name=name, mover=mover)

    return materialize


def _load_state_dict(stock: Callable[..., Any], mover: Mover, names: Names) -> Callable[..., Any]:
    def load(model: PreTrainedModel, state_dict: dict[str, Any], load_config: Any, *rest: Any, **more: Any) -> Any:
        shards = (load_config.sharded_metadata or {}).get("weight_map", {})
        whole = load_config.pretrained_model_name_or_path
        names.update((id(value), (key, f"{whole}/{shards.get(key, SINGLE)}")) for key, value in state_dict.items())
        try:
            result = stock(model, state_dict, load_config, *rest, **more)
        finally:
            names.clear()  # ids are only meaningful while the checkpoint's slices live
        _refuse_other_shapes(result[0].mismatched_keys, ignored=load_config.ignore_mismatched_sizes)
        return result

    return load


def _set_weight(stock: Callable[..., Any], mover: Mover) -> Callable[..., Any]:
    """What was cast, fused or quantised gets its digest as soon as it is there, before anything else is loaded."""

    def set_weight(model: PreTrainedModel, target_name: str, param_value: Any, *rest: Any, **more: Any) -> None:
        stock(model, target_name, param_value, *rest, **more)
        mark_loaded(model, target_name, mover)

    return set_weight


def _refuse_other_shapes(mismatched: Iterable[tuple[str, Any, Any]], *, ignored: bool) -> None:
    """Instead of transformers' own refusal, which comes later as a bare RuntimeError after a table."""
    rows = sorted(mismatched)
    if ignored or not rows:
        return
    name, in_file, expected = rows[0]
    raise UsageError(
        f"model: {len(rows)} tensors have other shapes in the weight files than config.json says, {name} first "
        f"({list(in_file)} instead of {list(expected)}): use the config.json that belongs to these weights"
    )


def _initialise_on_host(stock: Callable[..., Any]) -> Callable[..., Any]:
    def move_missing(self: Any, missing_keys: Any, device_map: Any, device_mesh: Any, hf_quantizer: Any) -> Any:
        return stock(self, missing_keys, {"": "cpu"} if device_map else device_map, device_mesh, hf_quantizer)

    return move_missing


# ----------------------------------------------------------------------------------------------------
# Casts of weights, made on the device from verified tensors and compared there with the CPU's on a sample.
#
# A conversion kernel that is wrong comes after the digest of the transfer and would go unseen (pytorch#16448 was one
# that gave zeros). The sample is the beginning, the middle and the end of each tensor, compared by digest. Payloads
# of NaN may differ: processors choose them freely. Not covered: elements outside the sample; ``hf-rocm-tune doctor
# --full`` casts every bit pattern.

SAMPLE_ELEMENTS = 64 << 10
"""Elements of each of the three pieces of a sample."""


def cast_verified(moved: Tensor, source: Tensor, dtype: torch.dtype, *, name: str, mover: Mover) -> Tensor:
    """Casts a weight on its device; under ``verify="full"`` a sample must be bit for bit what the CPU makes of it.

    Args:
        moved: the weight on the device, verified.
        source: the same weight on the host.
        dtype: to cast to.
        name: for incidents.
        mover: through which it came; its report counts casts that were compared.

    Returns:
        The cast, on the device, known to the mover as derived.

    Raises:
        CorruptionError: the device casts wrongly, the second time as well.
    """
    cast = cast_on_device(moved, dtype)
    if mover.settings.verify == "full":
        expected = _sample(source).to(dtype)
        right = _same(_sample(cast), expected)
        mover.report.count("casts", checked=1, mismatches=int(not right))
        if not right:
            cast = cast_on_device(moved, dtype)
            _judge_again(cast, expected, f"{moved.dtype} to {dtype}", name, mover)
    mover.mark_derived(cast, "cast on the device")
    return cast


def cast_on_device(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """The cast itself."""
    return tensor.to(dtype=dtype)


def _judge_again(cast: Tensor, expected: Tensor, pair: str, name: str, mover: Mover) -> None:
    right = _same(_sample(cast), expected)
    row = {"stage": "weights", "tensor": name, "kind": "wrong cast", "outcome": "recovered" if right else "stopped"}
    mover.report.incident(row)
    if not right:
        raise CorruptionError(
            f"weights tensor '{name}': {mover.device} casts {pair.replace('torch.', '')} wrongly, twice, but its bytes "
            "arrived right: arithmetic, not transfer. Nothing of it was used; run hf-rocm-tune doctor --full"
        )
    mover.report.count("casts", recovered=1)


def _sample(tensor: Tensor) -> Tensor:
    """First, middle and last elements; all of a small tensor."""
    flat = tensor.reshape(-1)
    if flat.numel() <= 3 * SAMPLE_ELEMENTS:
        return flat
    middle = (flat.numel() - SAMPLE_ELEMENTS) // 2
    return torch.cat([flat.narrow(0, start, SAMPLE_ELEMENTS) for start in (0, middle, flat.numel() - SAMPLE_ELEMENTS)])


def _same(found: Tensor, expected: Tensor) -> bool:
    return digest(found) == digest(expected) or digest(_plain_nan(found)) == digest(_plain_nan(expected))


def _plain_nan(tensor: Tensor) -> Tensor:
    return tensor.masked_fill(tensor.isnan(), float("nan")) if tensor.is_floating_point() else tensor
