"""Layers of the model, computed again on the host in float32 at a run's start: kernels that are always wrong.

The call of a layer of each kind in the first micro-batch is cut to one row of at most `TOKENS` tokens. The device
computes it once more, forward and backward from a random gradient, without dropout, and so does the host: from the same
inputs, the weights that were verified (4-bit ones dequantised by us) and the same adapters, of which matrices that are
zero, as LoRA's B is at first, get random values in both. A thread of low priority computes the host's, in float32 and
rounded at random (`rounding`); the trainer reads the result when it is there, and waits for it before a save. What
differs by more than rounding explains is computed once more on the device. A second time wrong is named, in the log,
the report and the verdict; with ``--check_arithmetic every`` it ends the run. No card of AMD's has shown yet how wide
the bounds must be there, and a run that ends for nothing is worse than a line.

Not found: what is within the bound, and kernels that only other lengths use. Not computed: what `HostLayers.prepare`
lists, layers without a version for the host (their refusal says why), and gradients of large trained matrices.
"""

from __future__ import annotations

import logging
import os
import re
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import psutil
import torch
from torch import Tensor, nn
from transformers import PretrainedConfig

from hf_rocm_tune.errors import FOREIGN_ERRORS, CorruptionError, device_shortage
from hf_rocm_tune.models.split import find_layers
from hf_rocm_tune.train.arithmetic.bounds import roundoff
from hf_rocm_tune.train.arithmetic.checks import ArithmeticChecks, Mode
from hf_rocm_tune.train.arithmetic.checksums import HostWeights
from hf_rocm_tune.train.arithmetic.layer_copy import EightBit, LayerCopy
from hf_rocm_tune.train.arithmetic.rounding import (
    WIDE,
    Chosen,
    Key,
    LayerDifference,
    OnHost,
    Rounding,
    compare,
    worst_choice,
    worst_side,
)
from hf_rocm_tune.train.arithmetic.verdict import StepVerdict
from hf_rocm_tune.transfer import host_copy, map_tensors, tree_tensors

logger = logging.getLogger(__name__)

TOKENS = 256
KINDS = 2
"""Layers of different structure that are computed: the first of each, of a hybrid or a mixture."""
GRADIENTS = 64 << 20
"""Bytes of trained weights' gradients that are compared, the smallest tensors first."""
_ROUNDED = 2  # runs that are rounded at random
_MEMORY = 1.25  # of a layer's bytes in float32: its activations beside it
_NICE = 10
_OUTPUT = "its output"


@dataclass(kw_only=True)
class LayerCall:
    """One call of a layer, cut to a prefix of one row; tensors on the device, without gradient history."""

    name: str
    layer: nn.Module
    arguments: tuple[Any, ...]
    keywords: dict[str, Any]
    hidden: int | str  # which of them are the hidden states [1, tokens, width]


@dataclass(kw_only=True)
class PassResult:
    """What one pass through a layer gave: the output and the gradients by name, and what it chose.

    On the device ``chosen`` and ``sides`` are as of `Chosen`, on the host the ``scores`` and ``above`` of `OnHost`.
    """

    tensors: dict[str, Tensor]
    chosen: list[Tensor] = field(default_factory=list)
    sides: dict[Key, list[Tensor]] = field(default_factory=dict)


@dataclass(kw_only=True)
class LayerTask:
    """A layer's call, what the device made of it, and the host's part, which is computed by a thread."""

    call: LayerCall
    copy: LayerCopy
    gradient: Tensor  # of the output, float32 on the host
    dtype: torch.dtype  # the coarsest in which the layer computes
    unit: float  # its unit roundoff
    random_values: dict[str, Tensor] = field(default_factory=dict)  # of weights that are zero, on the host
    on_device: PassResult = field(default_factory=lambda: PassResult(tensors={}))
    on_host: list[PassResult] = field(default_factory=list)  # in float32, then rounded at random
    trained: dict[str, Tensor] = field(default_factory=dict)  # weights of the first pass, on the host
    future: Future[None] | None = None
    seconds: float = 0.0


class HostLayers:
    """See the module's description. The trainer owns one, and calls it in the order of the methods.

    Attributes:
        refusal: why no layer's call is kept; None if it is.
        failure: the sentence on the layer that ended the run.
    """

    def __init__(self, trainer: Any, products: ArithmeticChecks, *, mode: Mode) -> None:
        self._trainer = trainer
        self._products = products
        self._mode = mode
        self._weights = HostWeights(trainer.mover)
        self._handles: list[Any] = []
        self._kept: set[int] = set()  # numbers of handles whose layers were called
        self._calls: list[LayerCall] = []
        self._tasks: list[LayerTask] = []
        self._rows: list[dict[str, Any]] = []  # of the report
        self._worker: ThreadPoolExecutor | None = None
        self.failure = ""
        self.refusal: str | None = "training has not begun"

    def prepare(self, changed: Any) -> None:
        """A training begins: have the first call of a layer of each kind kept. ``changed``: as of `HostWeights`."""
        trainer = self._trainer
        self._weights.changed = changed
        self._weights.streamer = trainer.streamer
        self.refusal = self._why_not()
        if self.refusal is not None:
            return
        streamed: Sequence[int] = ()
        if trainer.streamer is not None:
            streamed = trainer.streamer.layers
        layers = list(_layers_of(trainer.model, streamed))
        self.refusal = "no layer was called" if layers else "the model has no list of its layers"
        for name, layer in layers:
            keep = partial(self._keep, name, len(self._handles))
            self._handles.append(layer.register_forward_pre_hook(keep, with_kwargs=True))

    def _why_not(self) -> str | None:
        trainer = self._trainer
        if self._mode == "off":
            return "--check_arithmetic off"
        if self._mode != "every" and _is_host(trainer.mover.device):
            return "the processor trains, by the kernels that would check it"
        if self._rows:
            return "it has been computed in an earlier training"
        if trainer.args.torch_compile:
            return "--torch_compile"
        if trainer.is_sharded or trainer.get_tp_size() > 1:
            return "the weights are sharded over ranks"
        return None

    def _keep(self, name: str, number: int, layer: nn.Module, arguments: Any, keywords: dict[str, Any]) -> None:
        if not layer.training or number in self._kept:
            return
        self._kept.add(number)  # at once: in a pipeline several threads call the layer
        self._handles[number].remove()
        with torch.no_grad():
            call = _cut(name, layer, arguments, keywords)
        if call is None:
            self.refusal = f"{name} is not called with hidden states of rows and tokens"
        else:
            self._calls.append(call)

    # ---- on the device ------------------------------------------------------------------------------------------

    def compute(self) -> None:
        """Before the first update: compute the layers once more on the device, and have the host begin."""
        for call in self._calls:
            try:
                self._tasks.append(self._begin(call))
            except FOREIGN_ERRORS as error:  # upstream's layers, of any architecture
                self._record_refusal(call.name, error)
        self._calls = []

    def _record_refusal(self, name: str, error: Exception) -> None:
        why = f"{type(error).__name__}: {error}"
        if device_shortage(error):
            why = "there is no memory for it"
        text = f"{name} cannot be computed on the host: {why.splitlines()[0][:200]}"
        self._rows.append({"layer": name, "refusal": text})
        logger.info("%s", text)

    def _begin(self, call: LayerCall) -> LayerTask:
        """Compute a call on the device, and have the worker compute it on the host."""
        copied = LayerCopy(call.layer, self._weights.verified_copy, self._autocast())
        if _MEMORY * copied.nbytes > psutil.virtual_memory().available:
            raise ValueError(f"it takes {copied.nbytes / 2**30:.1f} GiB of host memory, which is not free")
        dtype = self._dtype_of(call)
        random = torch.Generator().manual_seed(0x5EED)
        hidden = _hidden(call)
        # Exact in all dtypes
        gradient = torch.randint(-128, 129, hidden.shape, generator=random, device="cpu").float() / 2048
        host_call = map_tensors((call.arguments, call.keywords), host_copy)
        gradient[:, _unseen(host_call, hidden.shape[1])] = 0
        task = LayerTask(call=call, copy=copied, gradient=gradient, unit=roundoff(dtype), dtype=dtype)
        task.random_values = dict(copied.fill_zeros(random))
        task.on_device = self._on_device(task, task.random_values)
        if self._worker is None:
            self._worker = ThreadPoolExecutor(max_workers=1, thread_name_prefix="layer on the host")
        task.future = self._worker.submit(_on_host, task, host_call)
        return task

    def _on_device(self, task: LayerTask, weights: Mapping[str, Tensor]) -> PassResult:
        """One pass; ``weights``: values of trained weights by name, in place of the layer's own."""
        call = task.call
        device = _hidden(call).device
        move = self._trainer.mover.move_to
        chosen = Chosen()
        with ExitStack() as stack:
            stack.enter_context(_evaluated(call.layer))
            stack.enter_context(self._products.paused())
            for name, values in weights.items():
                stack.enter_context(_replaced(call.layer, name, move(device, values, name="a layer's check")))
            stack.enter_context(self._trainer.accelerator.autocast())
            stack.enter_context(chosen)
            gradient = move(device, task.gradient, name="a layer's check")
            tensors = _through(call.layer, call, gradient)
        return PassResult(
            tensors={name: host_copy(tensor) for name, tensor in tensors.items()},
            chosen=[host_copy(indices) for indices in chosen.indices],
            sides={key: [host_copy(side) for side in sides] for key, sides in chosen.sides.items()},
        )

    def _autocast(self) -> torch.dtype | None:
        dtypes = {"fp16": torch.float16, "bf16": torch.bfloat16}
        return dtypes.get(self._trainer.accelerator.mixed_precision)

    def _dtype_of(self, call: LayerCall) -> torch.dtype:
        """The coarsest dtype in which the layer computes."""
        dtypes = {_hidden(call).dtype, self._autocast() or torch.float32}
        module: Any
        for module in call.layer.modules():
            quantised = hasattr(getattr(module, "weight", None), "quant_state")
            if quantised and getattr(module, "compute_dtype", None) is not None:
                dtypes.add(module.compute_dtype)
        return max(dtypes, key=lambda dtype: torch.finfo(dtype).eps)

    # ---- the result ---------------------------------------------------------------------------------------------

    def pending(self) -> list[Tensor]:
        """Nothing: the host computes in the background."""
        return []

    def judge(self, _figures: Sequence[Sequence[float]], *, can_repeat: bool) -> StepVerdict:
        """The verdict by the layers that are ready; a wrong one is computed again here, so no step is repeated."""
        return self._collect(wait=False)

    def _collect(self, *, wait: bool) -> StepVerdict:
        """What the layers that the host has computed until now say of the run, on this rank; ``wait``: for all."""
        tasks, self._tasks = self._tasks, []
        verdict = StepVerdict.GO_ON
        for task in tasks:
            assert task.future is not None
            if not wait and not task.future.done():
                self._tasks.append(task)
                continue
            try:
                task.future.result()
                verdict = max(verdict, self._compare_layer(task))
            except FOREIGN_ERRORS as error:  # as upstream's layers whose kernels have no version for the host
                self._record_refusal(task.call.name, error)
        if not self._tasks and self._worker is not None:
            self._worker.shutdown()
            self._worker = None
        return verdict

    def _compare_layer(self, task: LayerTask) -> StepVerdict:
        """Compare the device's pass with the host's; where they differ, the device computes once more."""
        self._trainer.transfer_report.count("arithmetic", layers=1)
        differences = _differences(task)
        self._rows.append(_row_of(task, differences))
        wrong = _wrong(differences)
        if not wrong:
            return StepVerdict.GO_ON
        try:
            task.on_device = self._on_device(task, task.trained)
            again = _wrong(_differences(task))
        except torch.OutOfMemoryError:
            again = wrong
        if not again:
            self._record_difference(task, wrong, "transient", "recovered", "right when it was computed again")
            return StepVerdict.GO_ON
        advice = "wrong each time: run hf-rocm-tune doctor --full"
        if self._mode == "every":
            self._record_difference(task, again, "repeatable", "stopped", advice)
            return StepVerdict.END
        self._rows[-1]["differs_in"] = [difference.name for difference in again]
        advice += "; --check_arithmetic every would end the run"
        self._record_difference(task, again, "repeatable", "named", advice)
        return StepVerdict.GO_ON

    def check_now(self) -> None:
        """Wait for the layers that are being computed: before a save, and at the end."""
        if self._collect(wait=True) == StepVerdict.END:
            raise CorruptionError(self.failure)

    def _record_difference(
        self, task: LayerTask, wrong: Sequence[LayerDifference], kind: str, outcome: str, text: str
    ) -> None:
        """An incident in the report, and a warning; sets `failure`."""
        what = ", ".join(f"{difference.name} ({difference.ratio:.3g} times)" for difference in wrong[:3])
        if len(wrong) > 3:
            what += f" and {len(wrong) - 3} more"
        self.failure = (
            f"{task.call.name}, computed again on the host, differs by more than rounding explains in {what}: {text}"
        )
        row = {"stage": "arithmetic", "tensor": task.call.name, "kind": kind, "text": self.failure, "outcome": outcome}
        self._trainer.transfer_report.incident({"step": self._trainer.state.global_step + 1, **row})
        if outcome != "named":
            counts = {"disagreements": 1, "recovered": int(outcome == "recovered")}
            self._trainer.transfer_report.count("arithmetic", **counts)
        logger.warning("%s", self.failure)

    def describe(self) -> dict[str, Any]:
        refusal = self.refusal
        if self._rows:  # None if one layer was computed
            refusals = [row.get("refusal") for row in self._rows]
            refusal = refusals[0] if all(refusals) else None
        return {"host_layers": list(self._rows), "host_layers_refusal": refusal}


def _row_of(task: LayerTask, differences: Sequence[LayerDifference]) -> dict[str, Any]:
    """What the report has of a layer."""
    judged = [difference for difference in differences if difference.width <= WIDE]
    return {
        "layer": task.call.name,
        "tokens": task.gradient.shape[1],
        "largest": max((difference.ratio for difference in judged), default=None),
        "widest": max((difference.width for difference in judged), default=None),
        "tensors": len(differences),
        "says_nothing_of": [difference.name for difference in differences if difference.width > WIDE],
        "seconds": round(task.seconds, 2),
    }


def _is_host(device: torch.device) -> bool:
    return device.type == "cpu"


# ---- the layers and their calls ---------------------------------------------------------------------------------


def _layers_of(model: Any, streamed: Sequence[int]) -> Iterator[tuple[str, nn.Module]]:
    """The first layer of each structure, one that is not streamed where there is one, with its name."""
    config = getattr(model, "config", None)
    if not isinstance(config, PretrainedConfig):
        return
    stack = find_layers(model, config.get_text_config())
    if stack is None:
        return
    path, layers, _ = stack
    first_of_kind: dict[tuple[Any, ...], int] = {}
    resident_first = sorted(range(len(layers)), key=lambda number: number in streamed)
    for number in resident_first:
        structure = tuple((name, type(module)) for name, module in layers[number].named_modules())
        first_of_kind.setdefault(structure, number)
    for number in list(first_of_kind.values())[:KINDS]:
        yield f"{path}.{number}", layers[number]


def _hidden(call: LayerCall) -> Tensor:
    hidden: Tensor
    if isinstance(call.hidden, int):
        hidden = call.arguments[call.hidden]
    else:
        hidden = call.keywords[call.hidden]
    return hidden


def _cut(name: str, layer: nn.Module, arguments: Sequence[Any], keywords: Mapping[str, Any]) -> LayerCall | None:
    """A call's first row, and of it the first `TOKENS` tokens; None where no argument has rows, tokens and a width."""
    given: list[tuple[Any, Any]] = [*enumerate(arguments), *keywords.items()]
    for key, value in given:
        if isinstance(value, Tensor) and value.dim() == 3 and value.is_floating_point():
            where, hidden = key, value
            break
    else:
        return None
    rows, length, _ = hidden.shape

    def cut(tensor: Tensor) -> Tensor:
        dims = [dim for dim in range(tensor.dim()) if tensor.shape[dim] == length]
        if tensor is hidden:
            dims = [1]
        elif tensor.dim() > 2 and tensor.is_floating_point() and tensor.dim() - 2 not in dims:
            dims = [dim for dim in dims if dim < tensor.dim() - 1]  # the last one is the width of a head
        for dim in dims:
            tensor = tensor.narrow(dim, 0, min(length, TOKENS))
        by_row = [dim for dim in range(min(2, tensor.dim() - 1)) if tensor.shape[dim] == rows]
        if by_row:
            tensor = tensor.narrow(by_row[0], 0, 1)
        elif tensor.dim() == 3 and tensor.shape[0] % rows == 0:  # of each row and head, as Bloom's biases
            tensor = tensor.narrow(0, 0, tensor.shape[0] // rows)
        return tensor.detach().clone()

    own: dict[str, Any] = {}  # the keywords, without a cache of keys and values
    for key, value in keywords.items():
        if _is_plain(value) or not re.search("past|cache", key):
            own[key] = map_tensors(value, cut)
    return LayerCall(
        name=name,
        layer=layer,
        arguments=tuple(map_tensors(value, cut) for value in arguments),
        keywords=own,
        hidden=where,
    )


def _is_plain(value: Any) -> bool:
    return value is None or isinstance(value, bool | Tensor)


def _unseen(call: Any, length: int) -> Tensor:
    """Which rows attend to nothing, by the masks [1, heads or 1, rows, keys] of a call on the host; bool [rows]."""
    unseen = torch.zeros(length, dtype=torch.bool)
    for mask in tree_tensors(call):
        if mask.dim() == 4 and mask.shape[2:] == (length, length):
            hidden = ~mask if mask.dtype == torch.bool else mask < -1e4
            unseen |= hidden.all(-1).any(1).any(0)
    return unseen


@contextmanager
def _evaluated(layer: nn.Module) -> Iterator[None]:
    """Within the block the layer is without dropout and keeps its activations."""
    modes = [(module, module.training) for module in layer.modules()]
    layer.eval()
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training


@contextmanager
def _replaced(layer: nn.Module, name: str, values: Tensor) -> Iterator[None]:
    """Within the block the parameter of this name has other values."""
    path, _, key = name.rpartition(".")
    owner = layer.get_submodule(path)
    before = getattr(owner, key)
    setattr(owner, key, nn.Parameter(values))
    try:
        yield
    finally:
        setattr(owner, key, before)


def _through(layer: nn.Module, call: LayerCall, gradient: Tensor) -> dict[str, Tensor]:
    """The layer's output, and the gradients of its input and of its trained weights, by name."""
    with torch.enable_grad():
        hidden = _hidden(call).detach().requires_grad_()
        arguments, keywords = list(call.arguments), dict(call.keywords)
        holder: Any = arguments if isinstance(call.hidden, int) else keywords
        holder[call.hidden] = hidden
        outputs = tree_tensors(layer(*arguments, **keywords))
        output = next(tensor for tensor in outputs if tensor.is_floating_point())
        names = ["the gradient of its input"]
        wanted = [hidden]
        room = GRADIENTS
        for name, parameter in sorted(layer.named_parameters(), key=lambda named: named[1].numel()):
            nbytes = 4 * parameter.numel()
            if parameter.requires_grad and nbytes <= room:
                names.append(f"the gradient of {name}")
                wanted.append(parameter)
                room -= nbytes
        gradients = torch.autograd.grad(output, wanted, gradient.to(output.dtype), allow_unused=True)
    tensors = {_OUTPUT: output.detach()}
    for name, own_gradient in zip(names, gradients, strict=True):
        if own_gradient is not None:
            tensors[name] = own_gradient
    return tensors


# ---- on the host ------------------------------------------------------------------------------------------------


def _on_host(task: LayerTask, host_call: Any) -> None:
    """Compute the layer in float32, and rounded at random; in a thread of its own."""
    with suppress(OSError, AttributeError):
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICE)
    begun = time.thread_time()
    layer = task.copy.build()
    task.trained = {name: weight.detach() for name, weight in layer.named_parameters() if weight.requires_grad}
    arguments, keywords = map_tensors(host_call, _widened)
    call = LayerCall(name="", layer=layer, arguments=arguments, keywords=keywords, hidden=task.call.hidden)
    finfo = torch.finfo(task.dtype)
    least = 0.0
    if task.dtype == torch.float16:
        least = finfo.smallest_normal * finfo.eps / 2
    for number in range(1 + _ROUNDED):
        host = OnHost(task.on_device.chosen, task.on_device.sides)
        with ExitStack() as stack:
            stack.enter_context(host)
            if number > 0:
                rounding = Rounding(task.unit, least, number, [*layer.parameters(), *layer.buffers()])
                for module in layer.modules():
                    if isinstance(module, EightBit):
                        module.rounding = rounding
                stack.enter_context(rounding)
            tensors = _through(layer, call, task.gradient)
        host.require_matched()
        task.on_host.append(PassResult(tensors=tensors, chosen=host.scores, sides=host.above))
    task.seconds = time.thread_time() - begun


def _widened(tensor: Tensor) -> Tensor:
    return tensor.float() if tensor.is_floating_point() else tensor


def _differences(task: LayerTask) -> list[LayerDifference]:
    """The device's errors in all that it computed and chose, over the tolerances for rounding."""
    device = task.on_device
    exact, *rounded = task.on_host  # in float32; with random rounding
    if exact.tensors.keys() != device.tensors.keys():
        raise ValueError("other weights have gradients on the host than on the device")
    largest = torch.finfo(task.dtype).max
    differences = []
    for name, tensor in exact.tensors.items():
        rounded_tensors = [run.tensors[name] for run in rounded]
        differences.append(compare(name, device.tensors[name], tensor, rounded_tensors, largest))
    for number, chosen in enumerate(device.chosen):
        scores = exact.chosen[number]
        if chosen.dim() and scores.shape[:-1] == chosen.shape[:-1]:
            rounded_scores = [run.chosen[number] for run in rounded]
            differences.append(worst_choice(chosen, scores, rounded_scores))
    for key, above_limits in exact.sides.items():
        function, _ = key
        for number, above in enumerate(above_limits):
            rounded_above = [run.sides[key][number] for run in rounded]
            differences.append(worst_side(function, device.sides[key][number], above, rounded_above))
    return differences


def _wrong(differences: Sequence[LayerDifference]) -> list[LayerDifference]:
    """Those above their tolerance: the output first, then the gradients, the worst first."""
    wrong = [difference for difference in differences if difference.width <= WIDE and not difference.ratio <= 1.0]
    return sorted(wrong, key=lambda difference: (difference.name != _OUTPUT, -difference.ratio))
