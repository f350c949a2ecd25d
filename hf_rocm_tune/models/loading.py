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
from hf_rocm_tune.errors import UsageError
from hf_rocm_tune.models.casts import cast_verified
from hf_rocm_tune.models.placement import mark_loaded
from hf_rocm_tune.transfer import redirected

if TYPE_CHECKING:
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
