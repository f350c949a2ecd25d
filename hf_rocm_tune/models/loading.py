"""What happens around ``from_pretrained``: its errors, and the features that reach into it.

Nothing in transformers is replaced for the verification. On a card every weight crosses at torch's dispatcher
(`transfer.interception`), where it is verified and tied to its file; what was computed there from verified tensors is
digested by `placement.mark_computed_in_load` as soon as the model is complete. On a CPU nothing crosses: tensors are
views of the mapped file, which `placement.place` digests and ties to it. `file_comparison.record_file_digests` digests
what a file holds and was cast or fused on the host.

Private places of transformers are replaced only for features: experts in 4 bit, quantised layers that are streamed.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial, wraps
from typing import TYPE_CHECKING, Any

import torch

from hf_rocm_tune import upstream
from hf_rocm_tune.errors import device_shortage, shortage_in
from hf_rocm_tune.models.experts import is_expert_weight, mxfp4_code, pack_mxfp4, pack_nf4, routers_of
from hf_rocm_tune.models.placement import mark_loaded
from hf_rocm_tune.models.quantised import cast_targets, linear_in_name_only, too_narrow_on_cpu
from hf_rocm_tune.models.streamed import Streamed
from hf_rocm_tune.models.streaming import leave_device

if TYPE_CHECKING:
    from hf_rocm_tune.transfer import Mover

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
