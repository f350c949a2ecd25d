"""Recording of one training step on the meta device: when each storage is allocated, and when it is freed.

The step is TRL's: the backbone, the fused head with its loss, and the backward pass. A storage counts once, however
many views it has; parameters and buffers do not count. Refused: control flow that depends on the content of tensors,
but for loops over the experts that have tokens: all have, and equally many; and masks by which tensors are indexed: all
of a mask is selected.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from hf_rocm_tune.data.formats import MASKED
from hf_rocm_tune.errors import FOREIGN_ERRORS, UsageError
from hf_rocm_tune.models import recompute
from hf_rocm_tune.models.experts import CHECKED_AT_ONCE, experts_of, is_packed
from hf_rocm_tune.models.incomplete import describe
from hf_rocm_tune.plan.estimate import WORK, Case, Tape, TapeSegment
from hf_rocm_tune.plan.request import EmbeddingsWrittenError, PlanRequest, quiet
from hf_rocm_tune.plan.sample import Sample

aten = torch.ops.aten


class TooManyOperations(RuntimeError):
    """A step of more operations than are recorded."""


class LongStepError(UsageError):
    """A model cannot be planned, as its step takes too many operations to be recorded."""


#: Torch decides in Python whether each result of a layer is kept, and again in recomputation: two more launches each.
_SELECTIVE_LAUNCHES = 3
#: Steps of more operations are not recorded, as that would take many seconds.
MOST_OPERATIONS = 20_000
#: Of steps with pictures (Qwen2.5-VL computes every window by itself), of models that are recorded whole, and of
#: experts in 4 bits, which are multiplied one by one: Qwen3-Next has 512.
MOST_OF_MANY = 100_000


@quiet()
def record(sample: Sample, case: Case, batch: int, length: int, *, most: int | None = None) -> Tape:
    """Records one training step of a sample: the case's kind of rows and recomputation, at this batch and length.

    UsageError: its code depends on the content of tensors, or fails on the meta device. LongStepError: it takes more
    operations than ``most``, by default 20,000 (100,000 for some models, see `MOST_OF_MANY`).
    """
    model, request = sample.model, sample.request
    platform, autocast = request.platform, request.autocast
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    tape = Tape()
    recorder = Recorder(
        tape,
        existing=[*model.parameters(), *model.buffers()],
        platform=platform,
        most=most or _most_operations(sample),
        checks_tower=bool(request.pictures),
    )
    mode = DeviceMode(
        platform=platform,
        autocast=autocast,
        content_is_plain=case.content == "plain",
        placeholders=_placeholders(request, batch),
    )
    _set_checkpointing(sample.base, mode if case.checkpointing else None, selective=case.recompute is not None)
    hooks = _watch(sample, trained, recorder)
    kernels = _kernels_of_the_loss(request)
    head = partial(FusedHead.apply, recorder, kernels, request.one_pass_loss)
    forward = partial(_forward, sample, (batch, length), case.packing, head, compact=kernels == "triton")
    batches: list[dict[str, Tensor]] = [{}]  # their pictures
    try:
        with torch.enable_grad(), autocast_flags(platform, autocast), recorder:
            loss = untrained_loss = None
            if request.pictures:  # the batch, and the one that is transferred ahead
                batches = [_pictures(sample, (batch, length)) for _ in range(2)]
            if not case.evaluation:
                with mode:
                    loss = forward(batches[0])
            if case.evaluation or case.trainer != "sft":
                with mode, _untrained(sample, recorder, reference=not case.evaluation):
                    mode.second_model = not case.evaluation and model is sample.base
                    untrained_loss = forward(batches[0])
            mode.forget_casts()
            if loss is not None:
                recorder.segment("loss")
                loss.backward()
            del loss, untrained_loss  # frees what only the graph still referenced
            batches.clear()
    except TooManyOperations as error:
        name = type(sample.base).__name__
        raise LongStepError(f"{name} cannot be planned: its step cannot be recorded ({error})") from error
    except FOREIGN_ERRORS as error:
        name = type(sample.base).__name__
        why = describe(sample.base.config, error)
        if case.checkpointing and "a leaf Variable that requires grad" in str(error):
            raise EmbeddingsWrittenError(f"{name} cannot be planned with recomputation ({why})") from error
        fix = ""
        if not request.pictures and "vision" in " ".join(sample.base.config.sub_configs):
            fix = "; some models need pictures: give --dataset with rows that have some"
        raise UsageError(f"{name} cannot be planned: its step cannot be recorded ({why}){fix}") from error
    finally:
        for hook in hooks:
            hook.remove()
        for parameter in trained:
            parameter.grad = None
    for segment in tape.segments:
        if case.recompute is not None and segment.role == "forward":
            segment.launches *= _SELECTIVE_LAUNCHES
        if case.trainer == "kto" and segment.role.startswith("reference"):  # its KL estimate takes two more passes
            for work in WORK:
                setattr(segment, work, 3 * getattr(segment, work))
    return tape


def _kernels_of_the_loss(request: PlanRequest) -> str:
    """``cpu``, ``triton``, or ``plain`` on a card where Triton's do not run."""
    if request.platform == "cpu":
        return "cpu"
    if request.triton:
        return "triton"
    return "plain"


def _most_operations(sample: Sample) -> int:
    many = sample.request.pictures or sample.is_one_layer or sample.is_whole
    if many or any(is_packed(experts) for _, experts in experts_of(sample.base)):
        return MOST_OF_MANY
    return MOST_OPERATIONS


def _forward(
    sample: Sample,
    shape: tuple[int, int],
    packed: bool,
    head: Callable[..., Tensor],
    pictures: dict[str, Tensor],
    *,
    compact: bool,
) -> Tensor:
    """The loss, as in TRL's fused forward: with Triton (``compact``) only positions that have a label are projected."""
    ids, labels, second = (torch.empty(shape, dtype=torch.int64, device="meta") for _ in range(3))
    extra: dict[str, Any] = {"position_ids" if packed else "attention_mask": second}
    has_router_loss = bool(getattr(sample.config, "router_aux_loss_coef", 0))
    balanced = has_router_loss and hasattr(sample.config, "output_router_logits")
    if balanced:
        extra["output_router_logits"] = True
    targets = labels[:, 1:]
    if sample.own_head:
        logits = sample.base(input_ids=ids, use_cache=False, **extra, **pictures).logits[:, :-1]
        log_probabilities = torch.log_softmax(logits.float(), dim=-1)
        chosen = log_probabilities.gather(-1, targets.clamp(min=0).unsqueeze(-1)).squeeze(-1)
        return -(chosen * (targets != MASKED)).sum()
    outputs = sample.base.base_model(input_ids=ids, use_cache=False, **extra, **pictures)
    projection = sample.base.get_output_embeddings()
    states = outputs.last_hidden_state[:, :-1]
    mask = targets != MASKED
    if compact:  # not `states[mask]`: the number of selected ones is unknown on the meta device
        rows = _Selected.apply(states)
    else:
        rows = states.reshape(-1, states.shape[-1])
    per_token = head(projection.weight, getattr(projection, "bias", None), rows)
    loss: Tensor = -(per_token.view(mask.shape) * mask).sum()
    if balanced and outputs.router_logits:
        loss = loss + _balance(sample, list(outputs.router_logits), extra.get("attention_mask"))
    return loss


def _pictures(sample: Sample, shape: tuple[int, int]) -> dict[str, Any]:
    """The tensors of the pictures of a batch, as large as those of the data's largest row in every row.

    Sizes and masks are host tensors with their values, by which models arrange the patches.
    """
    rows = shape[0] // sample.request.rows_a_unit
    tensors: dict[str, Any] = {}
    for name, of_row, dtype_name, values in sample.request.pictures:
        dtype = getattr(torch, dtype_name)
        if of_row is None:  # an entry for each token
            tensors[name] = torch.empty(shape, dtype=dtype, device="meta")
        elif of_row[0] < 0:  # more for each token
            tensors[name] = torch.empty((*shape, *of_row[1:]), dtype=dtype, device="meta")
        elif values is None:
            tensors[name] = torch.empty((rows * of_row[0], *of_row[1:]), dtype=dtype, device="meta")
        else:
            once = [1] * (len(of_row) - 1)  # in all dimensions but the first
            tensors[name] = torch.tensor(values, dtype=dtype).repeat(rows, *once)
    if hasattr(sample.base.base_model, "get_rope_index"):  # it reads the content
        tensors["position_ids"] = torch.empty((3, *shape), dtype=torch.int64, device="meta")
    return tensors


def _placeholders(request: PlanRequest, batch: int) -> int:
    if not request.pictures:
        return 0
    return request.placeholders * batch


def _balance(sample: Sample, logits: list[Tensor], mask: Tensor | None) -> Any:
    """The auxiliary loss of experts, by the function that TRL calls, of each sparse layer of the real model."""
    from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

    sparse = []  # the recorded layers that have experts
    for i, layer in enumerate(sample.layers):
        if any("expert" in name for name, _ in layer.named_modules()):
            sparse.append(i)
    if len(sparse) == len(logits):
        by_layer = dict(zip(sparse, logits, strict=True))
        logits = [by_layer[i] for i in sample.layer_of if i in by_layer]
    experts = getattr(sample.config, "num_experts", None) or sample.config.num_local_experts
    return load_balancing_loss_func(tuple(logits), experts, sample.config.num_experts_per_tok, mask)


@contextmanager
def _untrained(sample: Sample, recorder: Recorder, *, reference: bool) -> Iterator[None]:
    """A pass without gradients, in evaluation or of the reference model; that of adapters is the model without them."""
    without_adapters: Any = nullcontext
    recorder.roles = {}
    if reference:
        without_adapters = getattr(sample.model, "disable_adapter", nullcontext)
        recorder.roles = {"start": "reference start", "forward": "reference", "head": "reference head"}
    recorder.segment("start")
    sample.model.eval()
    try:
        with torch.no_grad(), without_adapters():
            yield
    finally:
        sample.model.train()


def _watch(sample: Sample, trained: list[nn.Parameter], recorder: Recorder) -> list[Any]:
    """Hooks that begin a segment at each layer, in both directions, and record the gradients of these parameters."""

    def before(layer: int, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        recorder.segment("forward", layer)
        hidden = kwargs.get("hidden_states")
        if args:
            hidden = args[0]
        if layer == 0 and isinstance(hidden, Tensor) and hidden.requires_grad:
            hidden.register_hook(lambda gradient: recorder.segment("end"))

    def after(layer: int, module: Any, args: tuple[Any, ...], output: Any) -> None:
        hidden = output if isinstance(output, Tensor) else output[0]
        if hidden.requires_grad:
            hidden.register_hook(lambda gradient: recorder.segment("backward", layer))
        if layer == len(sample.layers) - 1:
            recorder.segment("head")

    hooks: list[Any] = []
    for position, layer in enumerate(sample.layers):
        hooks.append(layer.register_forward_pre_hook(partial(before, position), with_kwargs=True))
        hooks.append(layer.register_forward_hook(partial(after, position)))
    for parameter in trained:
        hooks.append(parameter.register_post_accumulate_grad_hook(lambda owner: recorder.record_gradient(owner.grad)))
    return hooks


def _set_checkpointing(base: Any, mode: DeviceMode | None, *, selective: bool) -> None:
    """As ``transformers.Trainer`` does, which makes the embeddings' output require a gradient."""
    if recompute.is_enabled(base):
        recompute.disable(base)
        base.disable_input_require_grads()
    if mode is None:
        return

    def contexts() -> tuple[Any, Any]:  # recomputation runs in the mode, too
        if not selective:
            return nullcontext(), mode.again(nullcontext())
        first, second = recompute.contexts()
        return first, mode.again(second)

    recompute.enable(base, use_reentrant=False, context_fn=contexts)


# ---- storages --------------------------------------------------------------------------------------------------------


class Recorder(TorchDispatchMode):
    """Records the operations inside its ``with`` block on a tape, below autograd.

    ``existing`` tensors do not count; ``platform``: whose kernels count; ``most``: operations, `TooManyOperations`
    beyond.
    ``checks_tower``: outside of the language model's layers, where a tower may have the peak, the float32 copies count
    that the checks of products make (``train/arithmetic/``).
    """

    def __init__(
        self,
        tape: Tape,
        existing: Iterable[Tensor],
        platform: str,
        *,
        most: int = MOST_OPERATIONS,
        checks_tower: bool = False,
    ) -> None:
        super().__init__()
        self.tape = tape
        self._platform = platform
        self._most = most
        self._checks_tower = checks_tower
        self._known: dict[int, object] = {}  # storages, or weak references to them, by their ids
        for tensor in existing:
            storage = tensor.untyped_storage()
            self._known[id(storage)] = storage
        self._index: dict[int, int] = {}  # the place of a known storage on the tape
        self._gradients: set[int] = set()  # the places of parameters' gradients
        self._operations = 0
        self._next: TapeSegment | None = None
        self.roles: dict[str, str] = {}  # other names of the segments of a pass
        self.segment("start")

    def segment(self, role: str, layer: int = -1) -> None:
        """Start a segment with the next operation: what is freed before it belongs to the segment before."""
        self._next = TapeSegment(role=self.roles.get(role, role), layer=layer)

    def record_gradient(self, gradient: Tensor) -> None:
        """Record that this tensor is a parameter's gradient; one that is added to an earlier gradient is freed now."""
        index = self._index.get(id(gradient.untyped_storage()))
        if index is not None and index not in self._gradients:
            self._gradients.add(index)
            self._event(index, 0)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None) -> Any:
        kwargs = kwargs or {}
        if self._next is not None:
            self.tape.segments.append(self._next)
            self._next = None
        segment = self.tape.segments[-1]
        written = segment.written
        self._operations += 1
        if self._operations > self._most:
            raise TooManyOperations(f"more than {self._most:,} operations, as loops over tokens or windows take")
        _, _, name, has_a_rate = _operator(func)
        workspace: int | None = None
        workspace_bytes = _workspace(name, self._platform, args, kwargs)
        if workspace_bytes:
            workspace = self._new(workspace_bytes)
        out, flops = cached(func, args, kwargs)
        new = [tensor for tensor in _tensors_in(out) if self._enter(tensor)]
        if new or "out" in kwargs:
            segment.launches += 1
            segment.flops += flops
            segment.products += flops > 0
            if name == "bitsandbytes::gemm_4bit":
                segment.unpacked += math.prod(args[2])
            elif name == "bitsandbytes::dequantize_4bit":
                segment.unpacked += out.numel()
            if self._checks_tower and segment.role in ("start", "end") and name in _CHECKED:
                operand = args[_CHECKED[name]]
                elements = max(operand.numel(), out.numel())
                self._event(self._new(4 * min(elements, CHECKED_AT_ONCE)), -1)
            if has_a_rate:
                segment.written = written
        if workspace is not None:
            self._event(workspace, -1)
        return out

    def _event(self, index: int, sign: int) -> None:
        self.tape.events.append((len(self.tape.segments) - 1, index, sign))

    def _enter(self, tensor: Tensor) -> bool:
        """Record the allocation of a tensor's storage, and its release once it is freed; False: it is known."""
        storage = tensor.untyped_storage()
        key = id(storage)
        if key in self._known:
            return False
        index = self._index[key] = self._new(storage.nbytes())
        self._known[key] = weakref.ref(storage, partial(self._leave, key, index))
        return True

    def _new(self, nbytes: int) -> int:
        """Record an allocation; returns its place on the tape."""
        index = len(self.tape.sizes)
        self.tape.sizes.append(nbytes)
        self.tape.owners.append(len(self.tape.segments) - 1)
        self._event(index, 1)
        self.tape.segments[-1].written += nbytes
        return index

    def _leave(self, key: int, index: int, _: object) -> None:
        del self._known[key], self._index[key]
        self._event(index, -1)


#: Products of linear layers, and which of their arguments is the layer's input.
_CHECKED = {"aten::mm": 0, "aten::addmm": 1}
#: Products that torch's table lacks.
_PRODUCTS = frozenset({"bitsandbytes::gemm_4bit", "bitsandbytes::int8_scaled_mm", "aten::_grouped_mm"})


#: Results of operators, by their arguments.
RESULTS: dict[Any, tuple[bool, list[Any], int]] = {}


@cache
def _operator(func: Any) -> tuple[bool, bool, str, bool]:
    """Whether its results are new, whether it is a product, its name, and whether it has a rate of its own."""
    name = func.name()
    aliases = any(value.alias_info for value in (*func._schema.arguments, *func._schema.returns))
    is_product = func._overloadpacket in flop_registry or name in _PRODUCTS
    has_a_rate = is_product or func is aten._to_copy.default or func.namespace == "bitsandbytes"
    return not aliases, is_product, name, has_a_rate


def cached(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, int]:
    """The result of an operator on the meta device, and the floating point operations of its matrix product.

    torch computes an output's shape in Python, which takes longer than the rest of a recording, and layers repeat the
    same operators. Operators that return or change their arguments are called each time.
    """
    is_new, is_product, name, _ = _operator(func)
    if not is_new:
        out = func(*args, **kwargs)
        return out, _flops(func, args, kwargs, out) if is_product else 0
    key = (name, _key(args), _key(tuple(kwargs.items())))
    if key in RESULTS:
        return _as_recorded(*RESULTS[key])
    out = func(*args, **kwargs)
    flops = _flops(func, args, kwargs, out) if is_product else 0
    outputs = out if isinstance(out, tuple) else (out,)
    described = _describe_outputs(outputs, (args, kwargs))
    if described:
        RESULTS[key] = isinstance(out, Tensor), described, flops
    return out, flops


def _flops(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> int:
    count = flop_registry.get(func._overloadpacket)
    if count is None:  # rows times both sides of the weight
        return int(2 * args[0].numel() * out.shape[-1])
    return int(count(*args, **kwargs, out_val=out))


def _as_recorded(alone: bool, described: list[Any], flops: int) -> tuple[Any, int]:
    """New results like those that are described; ``alone``: a tensor, not a tuple."""
    outputs = []
    for output in described:
        if isinstance(output, tuple):
            shape, stride, dtype = output
            output = torch.empty_strided(shape, stride, dtype=dtype, device="meta")
        outputs.append(output)
    return outputs[0] if alone else tuple(outputs), flops


def _key(value: Any) -> Any:
    """The properties of a value that an operator on the meta device depends on; 1, 1.0 and True differ."""
    if isinstance(value, Tensor):
        return value.shape, value.stride(), value.dtype, value.is_meta
    kind = type(value)
    if kind is tuple or kind is list:
        return tuple([_key(item) for item in value])
    return kind, value


def _describe_outputs(outputs: Any, given: object) -> list[Any] | None:
    """An operator's results, tensors as shape, strides and dtype; None if a tensor is not new, dense and on meta.

    Some operators return a view although their schema does not say so. A result without tensors depends on content.
    """
    given_storages = {id(tensor.untyped_storage()) for tensor in _tensors_in(given)}
    storages: set[int] = set()
    for tensor in _tensors_in(outputs):
        storage = tensor.untyped_storage()
        is_new = id(storage) not in given_storages and id(storage) not in storages
        is_dense = tensor.is_meta and tensor.nbytes == storage.nbytes()
        if not (is_new and is_dense):
            return None
        storages.add(id(storage))
    if not storages:
        return None
    described: list[Any] = []
    for output in outputs:
        if isinstance(output, Tensor):
            described.append((output.shape, output.stride(), output.dtype))
        elif isinstance(output, int | float | None):
            described.append(output)
        else:
            return None
    return described


def _tensors_in(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, dict):
        value = value.values()
    elif not isinstance(value, tuple | list):
        return []
    tensors: list[Tensor] = []
    for item in value:
        tensors += _tensors_in(item)
    return tensors


# ---- the device's kernels and autocast -------------------------------------------------------------------------------

_LOWER = {"linear", "matmul", "__matmul__", "__rmatmul__", "bmm", "mm", "mv", "einsum", "chain_matmul", "addmm"}
_LOWER |= {"addbmm", "baddbmm", "scaled_dot_product_attention", "conv1d", "conv2d", "conv3d", "conv_transpose1d"}
_LOWER |= {"conv_transpose2d"}
_HIDDEN = "multi_head_attention_forward"  # inside it no mode is asked, and its products are cast
# Only names that models use between their matrix products. The CPU's autocast list has none of them.
_UPPER = {"layer_norm", "group_norm", "rms_norm", "norm", "linalg_norm", "linalg_vector_norm", "cosine_similarity"}
_UPPER |= {"pow", "__pow__", "rsqrt", "reciprocal", "exp", "expm1", "log", "log10", "log1p", "log2", "logsumexp"}
_UPPER |= {"softplus", "nll_loss", "cross_entropy"}
_UPPER_BY_DTYPE = {"softmax", "log_softmax", "sum", "cumsum", "prod"}


# Attributes of tensors on the meta device, of whose content something is known.
#: Of the sum of a mask: how many true entries were added up for all its entries together.
_COUNTED = "_entries_counted"
#: Of the sum of a mask over some dimensions: how many entries there are of each, as if all were true.
_MOST = "_most_of_each"
#: Of the choice of experts, a 1 for each token that an expert has: the share of its entries that are set.
_SHARE = "_share_of_entries"
#: Of what `nonzero` finds: these are positions, of which the first is as good as any.
_POSITIONS = "_are_positions"
_REARRANGED = {"permute", "transpose", "squeeze", "unsqueeze", "view", "reshape", "flatten", "contiguous"}
_REARRANGED |= {"to", "long", "int", "bool", "float", "unbind", "__getitem__"}
_COMPARED = {"eq", "__eq__", "ge", "__ge__", "gt", "__gt__"}


def _of_content(stock: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The result of an operation that depends on content of which enough is known; NotImplemented: another operation.

    As experts that a model's own code loops over take their tokens: each has its share. And of the tokens of a row that
    are counted by a mask: there are none but real ones.
    """
    first = args[0] if args else None
    if not isinstance(first, Tensor) or not first.is_meta:
        return NotImplemented
    if name == "tolist" and (total := getattr(first, _COUNTED, None)) is not None:
        return _spread(total, first.shape)
    if getattr(first, _POSITIONS, False) and first.numel() == 1:
        if name in ("item", "__int__", "__index__"):
            return 0
        if name in _COMPARED:  # with the number of an expert that is none
            return False
    if name in ("max", "item") and len(args) == 1 and not kwargs and hasattr(first, _MOST):
        most = getattr(first, _MOST)
        if name == "item":
            return most
        greatest = stock(first)
        setattr(greatest, _MOST, most)
        return greatest
    if name == "nonzero" or (name in ("where", "argwhere") and len(args) == 1):
        count = max(1, round(getattr(first, _SHARE, 1) * first.numel()))
        if name == "where" or kwargs.get("as_tuple"):
            return tuple(_positions(count) for _ in range(max(1, first.dim())))
        return _positions(count, first.dim())
    if name in ("__getitem__", "__setitem__"):
        args = (first, _without_content(args[1]), *args[2:])
    elif name not in ("one_hot", "scatter", "sum") and not (name in _REARRANGED and _tagged(first)):
        return NotImplemented
    made = stock(*args, **kwargs)
    if name == "one_hot":
        setattr(made, _SHARE, 1 / made.shape[-1])
    elif name == "scatter" and not isinstance(args[-1], Tensor):
        setattr(made, _SHARE, args[2].numel() / made.numel())
    elif name == "sum" and hasattr(first, _SHARE):
        setattr(made, _COUNTED, round(getattr(first, _SHARE) * first.numel()))
    elif name == "sum" and first.dtype == torch.bool:  # the tokens of each row, say
        setattr(made, _MOST, first.numel() // max(1, made.numel()))
    elif name in _REARRANGED:
        for tensor in _tensors_in(made):
            vars(tensor).update(_tagged(first))
    return made


def _tagged(tensor: Tensor) -> dict[str, Any]:
    return {name: value for name, value in vars(tensor).items() if name in (_SHARE, _POSITIONS, _MOST)}


def _positions(*shape: int) -> Tensor:
    made = torch.empty(shape, dtype=torch.int64, device="meta")
    setattr(made, _POSITIONS, True)
    return made


def _without_content(index: Any) -> Any:
    """An index with 0 for a position, and with the positions of a mask, all of them, in its place."""
    found: list[Any] = []
    for each in index if isinstance(index, tuple) else (index,):
        if not isinstance(each, Tensor) or not each.is_meta:
            found.append(each)
        elif each.dtype == torch.bool and each.dim():
            found += [_positions(each.numel()) for _ in range(each.dim())]
        elif getattr(each, _POSITIONS, False) and each.dim() == 0:
            found.append(0)
        else:
            found.append(each)
    return tuple(found)


def _spread(total: int, shape: Sequence[int]) -> Any:
    """Nested lists of integers of a shape with this sum, as equal as can be."""
    count = math.prod(shape)
    even, rest = divmod(total, max(1, count))
    return torch.tensor([even + (number < rest) for number in range(count)]).reshape(tuple(shape)).tolist()


def _on_meta(given: Any) -> Any:
    """Arguments of an operation, all on the meta device if one of them is; sizes of pictures are host tensors."""
    tensors = _tensors_in(given)
    if not any(tensor.is_meta for tensor in tensors):
        return given
    if all(tensor.is_meta or tensor.dim() == 0 for tensor in tensors):
        return given
    return _with_tensors(given, lambda tensor: tensor if tensor.is_meta else torch.empty_like(tensor, device="meta"))


def _with_tensors(given: Any, replaced: Callable[[Tensor], Tensor]) -> Any:
    """Arguments of an operation, with each tensor replaced; other containers than dict, tuple and list stay."""
    if isinstance(given, Tensor):
        return replaced(given)
    if type(given) is dict:
        return {name: _with_tensors(value, replaced) for name, value in given.items()}
    if type(given) in (tuple, list):
        return type(given)([_with_tensors(value, replaced) for value in given])
    return given


def _mask_of(given: Any) -> Tensor | None:
    """The mask by which a tensor on the meta device is indexed; None: it is indexed otherwise."""
    tensor, index = given[:2]
    if not isinstance(index, tuple):
        index = (index,)
    if not index:
        return None
    mask, *others = index
    if not isinstance(mask, Tensor) or mask.dtype != torch.bool or not (mask.is_meta or tensor.is_meta):
        return None
    if not all(other is Ellipsis or other == slice(None) for other in others):
        return None
    return mask


def _kept_on_host(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor | None:
    """The sizes of pictures where a model moves them to its device: their values are needed. None: another call."""
    if name not in ("to", "as_tensor") or not isinstance(args[0], Tensor):
        return None
    sizes = args[0]
    moves = False
    dtype = sizes.dtype
    for value in (*args[1:], *kwargs.values()):
        if isinstance(value, torch.device | str):
            moves = moves or torch.device(value).type == "meta"
        elif isinstance(value, torch.dtype):
            dtype = value
    if not moves or sizes.is_meta or sizes.is_floating_point():
        return None
    return sizes.to(dtype)


class DeviceMode(TorchFunctionMode):
    """Runs operations on meta tensors as on the device.

    ``content_is_plain``: the result of conditions on content; ``placeholders``: tokens of pictures in the batch, 0
    without pictures.
    """

    def __init__(self, *, platform: str, autocast: bool, content_is_plain: bool, placeholders: int = 0) -> None:
        super().__init__()
        self._platform = platform
        self._on_card = platform != "cpu"
        self._autocast = autocast
        self._content_is_plain = content_is_plain
        self._placeholders = placeholders
        # a parameter and its cast, by the parameter's id and `second_model`
        self._casts: dict[tuple[int, bool], tuple[Tensor, Tensor]] = {}
        self._caching = True
        self.second_model = False  # a model of the same shape, recorded with the same parameters

    def forget_casts(self) -> None:
        """Free the cached casts of parameters at the end of the forward pass; backward caches none between layers."""
        self._casts.clear()
        self._caching = False

    @contextmanager
    def again(self, beside: Any) -> Iterator[None]:
        """Recompute a layer, in an autocast context of its own: each parameter is cast again."""
        self._caching = True
        try:
            with self, beside:
                yield
        finally:
            self.forget_casts()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if name == "__bool__" and args[0].is_meta:
            return self._content_is_plain
        if self._placeholders:
            known = self._result_with_pictures(name, args, kwargs)
            if known is not None:
                return known
            args, kwargs = _on_meta((args, kwargs))
            if name == "sum" and args[0].is_meta and args[0].dtype == torch.bool:
                counts = func(*args, **kwargs)
                setattr(counts, _COUNTED, args[0].numel())
                return counts
        made = _of_content(func, name, args, kwargs)
        if made is not NotImplemented:
            return made
        if self._autocast and any(isinstance(value, Tensor) and value.is_meta for value in args):
            args, kwargs = self._as_autocast(name, args, kwargs)
        if name == "scaled_dot_product_attention":
            return self._attention(func, *args, **kwargs)
        if name == "_grouped_mm" and args[0].dtype != torch.bfloat16:
            return _GroupedProduct.apply(*args[:2])  # on the meta device torch takes bfloat16 only
        if name == "dropout" and self._on_card:
            return _dropout(*args, **kwargs)
        return func(*args, **kwargs)

    def _result_with_pictures(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What an operation returns that depends on which tokens are pictures; None: any other operation."""
        if name == "item" and args[0].is_meta and args[0].dtype == torch.bool:
            return True  # a check, as of as many placeholders as features
        if name in ("__getitem__", "__setitem__"):
            mask = _mask_of(args)
            if mask is not None:
                return self._masked(*args, mask=mask)
        return _kept_on_host(name, args, kwargs)

    def _as_autocast(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The arguments as autocast gives them to an operation."""
        if name in _LOWER or name == _HIDDEN:
            return self._cast((args, kwargs), torch.bfloat16)
        if self._on_card and name in _UPPER:
            return self._cast((args, kwargs), torch.float32)
        if self._on_card and name in _UPPER_BY_DTYPE and args[0].dtype in (torch.bfloat16, torch.float16):
            return args, {**kwargs, "dtype": kwargs.get("dtype") or torch.float32}  # it may be given as None
        return args, kwargs

    def _cast(self, given: Any, dtype: torch.dtype) -> Any:
        return _with_tensors(given, lambda tensor: self._cast_tensor(tensor, dtype))

    def _cast_tensor(self, tensor: Tensor, dtype: torch.dtype) -> Tensor:
        if not tensor.is_floating_point() or tensor.dtype in (dtype, torch.float64):
            return tensor
        is_parameter = tensor.dtype == torch.float32 and tensor.is_leaf and tensor.requires_grad
        if not (self._caching and is_parameter and dtype == torch.bfloat16):
            return tensor.to(dtype)
        key = (id(tensor), self.second_model)
        if key not in self._casts:
            with torch.enable_grad():  # as torch's autocast: it may be used again where gradients are needed
                self._casts[key] = (tensor, tensor.to(dtype))
        return self._casts[key][1]

    def _masked(self, tensor: Tensor, index: Any, value: Any = None, *, mask: Tensor) -> Tensor:
        """``tensor[mask]``, of which the number of entries is not known here: of tokens those of pictures, else all."""
        flat = tensor.flatten(0, mask.dim() - 1)
        count = len(flat)
        if mask.dim() == 2:
            count = min(self._placeholders, count)
        elif mask.dim() == 3 and mask.stride(2) == 0:  # of tokens, made as wide as their embeddings
            count = min(self._placeholders * mask.shape[2], count)
        rows = torch.empty(count, dtype=torch.int64, device="meta")
        if value is None:
            return flat[rows]
        return flat.index_put_((rows,), value)

    def _attention(self, stock: Any, query: Tensor, key: Tensor, value: Tensor, *rest: Any, **more: Any) -> Any:
        """Attention by the kernel that the device would choose; ``stock``: torch's function."""
        given: dict[str, Any] = {"attn_mask": None, "dropout_p": 0.0, "is_causal": False, "scale": None}
        given |= dict(zip(given, rest, strict=False)) | more
        mask, dropout_p, is_causal, scale = (given[name] for name in ("attn_mask", "dropout_p", "is_causal", "scale"))
        same_width = query.shape[-1] == value.shape[-1]
        if self._platform == "cpu" and (dropout_p > 0 or not same_width):  # by plain products, as on the meta device
            return stock(query, key, value, *rest, **more)
        if mask is not None and mask.dtype == torch.bool:
            mask = torch.zeros(mask.shape, dtype=query.dtype, device="meta")
        if self._platform == "cpu":
            flash = aten._scaled_dot_product_flash_attention_for_cpu
            return flash(query, key, value, dropout_p, is_causal, attn_mask=mask, scale=scale)[0]
        if mask is None and query.dtype != torch.float32 and same_width:
            return aten._scaled_dot_product_flash_attention(query, key, value, dropout_p, is_causal, scale=scale)[0]
        if key.shape[1] != query.shape[1]:  # the memory-efficient kernel needs equal numbers of heads
            groups = query.shape[1] // key.shape[1]
            key = key.repeat_interleave(groups, 1)
            value = value.repeat_interleave(groups, 1)
        if mask is not None:
            short = -mask.shape[-1] % 8
            if short:  # it needs rows at multiples of 8 elements, too: torch pads other masks
                mask = torch.nn.functional.pad(mask, (0, short))[..., : mask.shape[-1]]
            mask = mask.expand(*query.shape[:3], key.shape[2])
        wants_grad = query.requires_grad or key.requires_grad or value.requires_grad
        efficient = aten._scaled_dot_product_efficient_attention
        return efficient(query, key, value, mask, wants_grad, dropout_p, is_causal, scale=scale)[0]


@contextmanager
def autocast_flags(platform: str, enabled: bool) -> Iterator[None]:
    """Within the block PEFT and transformers see autocast enabled, which has no effect on meta tensors.

    ``torch.autocast("meta", enabled=False)``, which PEFT calls and torch refuses, does nothing; the precision of "meta"
    is that of the device.
    """
    device = _autocast_device(platform)
    stock, stock_dtype = torch.autocast, torch.get_autocast_dtype
    enabled_before = torch.is_autocast_enabled(device)
    dtype_before = torch.get_autocast_dtype(device)
    torch.set_autocast_enabled(device, enabled)
    torch.set_autocast_dtype(device, torch.bfloat16)

    def autocast(device_type: str, *rest: Any, **more: Any) -> Any:
        if device_type == "meta":
            return nullcontext()
        return stock(device_type, *rest, **more)

    def dtype_of(device_type: str) -> torch.dtype:  # Nemotron's norms ask for it
        return stock_dtype(device if device_type == "meta" else device_type)

    torch.autocast, torch.get_autocast_dtype = autocast, dtype_of  # type: ignore[misc, assignment]
    try:
        yield
    finally:
        torch.autocast, torch.get_autocast_dtype = stock, stock_dtype  # type: ignore[misc]
        torch.set_autocast_enabled(device, enabled_before)
        torch.set_autocast_dtype(device, dtype_before)


def _autocast_device(platform: str) -> str:
    return "cpu" if platform == "cpu" else "cuda"  # HIP's too


class _GroupedProduct(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, weights: Tensor) -> Tensor:
        """(S, N): each row has one expert, so a product with one has the same number of operations."""
        ctx.shapes = rows.shape, weights.shape
        ctx.save_for_backward(rows if ctx.needs_input_grad[1] else None, weights)
        return rows @ weights[0]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        gradients = []
        for shape, needed in zip(ctx.shapes, ctx.needs_input_grad, strict=True):
            gradients.append(grad.new_empty(shape) if needed else None)
        return tuple(gradients)


def _workspace(name: str, platform: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
    """Bytes of the workspace that the kernel of an operator allocates itself."""
    if name == "bitsandbytes::gemm_4bit":
        elements = math.prod(args[2])
        constants = 0
        if kwargs.get("absmax_8bit") is not None:
            constants = 8 * (elements // 64)
        return elements * args[0].element_size() + constants
    if name == "bitsandbytes::int8_scaled_mm":  # the product itself, before it is scaled
        return int(4 * len(args[1]) * args[0].numel() // args[0].shape[-1])
    if platform == "cuda" and name == "aten::_scaled_dot_product_flash_attention_backward":
        query, key = args[1:3]
        nbytes = 4 * query.numel()  # flash attention 2 accumulates the gradient of the queries in float32
        groups = query.shape[1] // key.shape[1]
        if groups > 1:
            nbytes += 2 * key.numel() * groups * key.element_size()
        return int(nbytes)
    return 0


def _dropout(input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Any:
    if not training or p <= 0:
        return input
    return torch.native_dropout(input, p, True)[0]


# ---- the head and the loss -------------------------------------------------------------------------------------------

TILE_TOKENS, TILE_WIDTH = 4096, 32768
PLAIN_TOKENS = 1024  # on a card without Triton, see `models.loss.fit_to`
_STATISTICS = 7  # float32 values a token: running maximum, sums, the target's logit
# Float32 copies of a tile without Triton, besides one of booleans (TRL's `_forward_tile`, `_backward_tile`).
_FORWARD_TILES, _BACKWARD_TILES = 3, 7


class FusedHead(torch.autograd.Function):
    """Per-token log-probabilities; allocates as TRL's ``ChunkedLogProbFunction`` does, or as `models.loss`."""

    @staticmethod
    def forward(
        ctx: Any, recorder: Recorder, kernels: str, one_pass: bool, weight: Tensor, bias: Tensor | None, hidden: Tensor
    ) -> Tensor:
        """``hidden`` (N, H), ``weight`` (V, H), ``bias`` (V) or None; returns (N,) in float32."""
        ctx.recorder = recorder
        ctx.kernels = kernels
        tokens = hidden.shape[0]
        is_trained = weight.requires_grad or (bias is not None and bias.requires_grad)
        computed_in = _computed_in(hidden, kernels)
        ctx.one_pass = one_pass and not is_trained and weight.dtype == computed_in and computed_in != torch.float16
        statistics = [hidden.new_empty(tokens, dtype=torch.float32) for _ in range(_STATISTICS)]
        if ctx.one_pass:
            ctx.save_for_backward(torch.empty_like(hidden, dtype=torch.float32))
            ctx.dtype = hidden.dtype
            _project(ctx, hidden, weight, products=2, copies=_BACKWARD_TILES, width=weight.shape[0])
        else:
            ctx.save_for_backward(hidden, weight, bias)
            _project(ctx, hidden, weight, products=1, copies=_FORWARD_TILES)
        result = hidden.new_empty(tokens, dtype=torch.float32)
        ctx.kept = [hidden.new_empty(tokens, dtype=torch.float32) for _ in range(2)]  # log of the sum, entropy
        del statistics
        return result

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        if ctx.one_pass:
            (gradient,) = ctx.saved_tensors
            return None, None, None, None, None, (gradient * grad.unsqueeze(-1)).to(ctx.dtype)
        hidden, weight, bias = ctx.saved_tensors
        _, _, _, needs_weight, needs_bias, needs_hidden = ctx.needs_input_grad
        weight_sum = torch.empty_like(weight, dtype=torch.float32) if needs_weight else None
        bias_sum = torch.empty_like(bias, dtype=torch.float32) if needs_bias else None
        hidden_sum = torch.empty_like(hidden, dtype=torch.float32) if needs_hidden else None
        products = 1 + needs_weight + needs_hidden
        _project(ctx, hidden, weight, products=products, copies=_BACKWARD_TILES)
        gradients = []
        for total, tensor in ((weight_sum, weight), (bias_sum, bias), (hidden_sum, hidden)):
            gradients.append(None if total is None else total.to(tensor.dtype))
        return None, None, None, *gradients


def _computed_in(hidden: Tensor, kernels: str) -> torch.dtype:
    if torch.is_autocast_enabled(_autocast_device(kernels)):
        return torch.bfloat16
    return hidden.dtype


def _project(ctx: Any, hidden: Tensor, weight: Tensor, *, products: int, copies: int, width: int = TILE_WIDTH) -> None:
    """Allocate, and free, what a product with the head takes of temporary memory, and record its work.

    It is computed in tiles of logits. ``products``: how many there are of each tile; ``copies``: in float32, of a tile
    without Triton; ``width``: most columns of a tile.
    """
    tokens, inner = hidden.shape
    vocabulary = weight.shape[0]
    dtype = _computed_in(hidden, ctx.kernels)
    most = PLAIN_TOKENS if ctx.kernels == "plain" else TILE_TOKENS
    rows = max(1, min(tokens, most) * TILE_WIDTH // max(width, TILE_WIDTH))
    columns = min(vocabulary, width)
    tiles = [hidden.new_empty((rows, width), dtype=dtype)]
    casts = [hidden[:rows].to(dtype), weight[:columns].to(dtype)]
    if ctx.kernels != "triton":
        tiles += [hidden.new_empty((rows, columns), dtype=torch.float32) for _ in range(copies)]
        tiles.append(hidden.new_empty((rows, columns), dtype=torch.bool))
    parts = products * -(-tokens // rows) * -(-vocabulary // width)
    segment = ctx.recorder.tape.segments[-1]
    segment.flops += products * 2 * tokens * inner * vocabulary
    segment.products += parts
    segment.launches += parts
    del casts, tiles


class _Selected(torch.autograd.Function):
    """``states[mask]`` with a mask that is true everywhere: a copy, and int64 positions; backward into zeros."""

    @staticmethod
    def forward(ctx: Any, states: Tensor) -> Tensor:
        ctx.shape = states.shape
        tokens = states.shape[0] * states.shape[1]
        ctx.positions = [states.new_empty(tokens, dtype=torch.int64) for _ in range(2)]
        return states.new_empty(tokens, states.shape[-1])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return grad.new_zeros(ctx.shape)
