"""Recording of one training step on the meta device: when each storage is allocated, and when it is freed.

The step is TRL's: the backbone, the fused head with its loss, and the backward pass. A storage counts once, however
many views it has; parameters and buffers do not count. Refused: control flow that depends on the content of tensors.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Iterable, Iterator
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
from hf_rocm_tune.models.experts import CHECKED_AT_ONCE
from hf_rocm_tune.models.incomplete import describe
from hf_rocm_tune.plan.estimate import WORK, Case, Tape, TapeSegment
from hf_rocm_tune.plan.request import quiet
from hf_rocm_tune.plan.sample import Sample

aten = torch.ops.aten

#: Torch decides in Python whether each result of a layer is kept, and again in recomputation: two more launches each.
_SELECTIVE_LAUNCHES = 3
#: Steps of more operations are not recorded, as that would take many seconds.
MOST_OPERATIONS = 20_000
#: Of steps with pictures: Qwen2.5-VL computes every window of a picture by itself.
MOST_WITH_PICTURES = 100_000


@quiet()
def record(sample: Sample, case: Case, batch: int, length: int) -> Tape:
    """Records one training step of a sample: the case's kind of rows and recomputation, at this batch and length."""
    name, model, request, tape = type(sample.base).__name__, sample.model, sample.request, Tape()
    platform, autocast = request.platform, request.autocast
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    most = MOST_WITH_PICTURES if request.pictures else MOST_OPERATIONS
    checked = bool(request.pictures)
    recorder = Recorder(tape, [*model.parameters(), *model.buffers()], platform, most=most, checks_tower=checked)
    mode = DeviceMode(
        platform=platform,
        autocast=autocast,
        content_is_plain=case.content == "plain",
        placeholders=_placeholders(request, batch),
    )
    _set_checkpointing(sample.base, mode if case.checkpointing else None, selective=case.recompute is not None)
    hooks = _watch(sample, trained, recorder)
    kernels = "cpu" if platform == "cpu" else "triton" if request.triton else "plain"
    head = partial(FusedHead.apply, recorder, kernels, request.one_pass_loss)
    forward = partial(_forward, sample, (batch, length), case.packing, head, compact=kernels == "triton")
    seen: list[dict[str, Tensor]] = [{}]
    try:
        with torch.enable_grad(), autocast_flags(platform, autocast), recorder:
            loss = other = None
            if request.pictures:  # the batch, and the one that is transferred ahead
                seen = [_pictures(sample, (batch, length)) for _ in range(2)]
            if not case.evaluation:
                with mode:
                    loss = forward(seen[0])
            if case.evaluation or case.trainer != "sft":
                with mode, _untrained(sample, recorder, reference=not case.evaluation):
                    mode.second_model = not case.evaluation and model is sample.base
                    other = forward(seen[0])
            mode.forget_casts()
            if loss is not None:
                recorder.segment("loss")
                loss.backward()
            del loss, other  # frees what only the graph still referenced
            seen.clear()
    except FOREIGN_ERRORS as error:
        why = describe(sample.base.config, error)
        raise UsageError(f"{name} cannot be planned: its step cannot be recorded ({why})") from error
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
    balanced = bool(getattr(sample.config, "router_aux_loss_coef", 0)) and hasattr(
        sample.config, "output_router_logits"
    )
    if balanced:
        extra["output_router_logits"] = True
    if sample.own_head:
        logits = sample.base(input_ids=ids, use_cache=False, **extra, **pictures).logits[:, :-1]
        logarithms = torch.log_softmax(logits.float(), dim=-1)
        chosen = logarithms.gather(-1, labels[:, 1:].clamp(min=0).unsqueeze(-1)).squeeze(-1)
        return -(chosen * (labels[:, 1:] != MASKED)).sum()
    outputs = sample.base.base_model(input_ids=ids, use_cache=False, **extra, **pictures)
    projection = sample.base.get_output_embeddings()
    states, targets = outputs.last_hidden_state[:, :-1], labels[:, 1:]
    mask = targets != MASKED
    # not `states[mask]`: the number of selected ones is unknown on the meta device
    rows = _Selected.apply(states) if compact else states.reshape(-1, states.shape[-1])
    per_token = head(projection.weight, getattr(projection, "bias", None), rows)
    loss: Tensor = -(per_token.view(mask.shape) * mask).sum()
    if balanced and outputs.router_logits:
        loss = loss + _balance(sample, list(outputs.router_logits), extra.get("attention_mask"))
    return loss


def _pictures(sample: Sample, shape: tuple[int, int]) -> dict[str, Any]:
    """The tensors of the pictures of a batch, as large as those of the data's largest row in every row.

    Sizes and masks are host tensors with their values, by which models arrange the patches.
    """
    rows, found = shape[0] // sample.request.rows_a_unit, dict[str, Any]()
    for name, of_row, dtype, values in sample.request.pictures:
        if of_row is None:  # an entry for each token
            found[name] = torch.empty(shape, dtype=getattr(torch, dtype), device="meta")
        elif values is None:
            found[name] = torch.empty((rows * of_row[0], *of_row[1:]), dtype=getattr(torch, dtype), device="meta")
        else:
            found[name] = torch.tensor(values, dtype=getattr(torch, dtype)).repeat(rows, *(1,) * (len(of_row) - 1))
    if hasattr(sample.base.base_model, "get_rope_index"):  # it reads the content
        found["position_ids"] = torch.empty((3, *shape), dtype=torch.int64, device="meta")
    return found


def _placeholders(request: Any, batch: int) -> int:
    return int(request.placeholders * batch) if request.pictures else 0


def _balance(sample: Sample, logits: list[Tensor], mask: Tensor | None) -> Any:
    """The auxiliary loss of experts, by the function that TRL calls, of each sparse layer of the real model."""
    from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

    sparse = [i for i, layer in enumerate(sample.layers) if any("expert" in name for name, _ in layer.named_modules())]
    if len(sparse) == len(logits):
        by_layer = dict(zip(sparse, logits, strict=True))
        logits = [by_layer[i] for i in sample.layer_of if i in by_layer]
    experts = getattr(sample.config, "num_experts", None) or sample.config.num_local_experts
    return load_balancing_loss_func(tuple(logits), experts, sample.config.num_experts_per_tok, mask)


@contextmanager
def _untrained(sample: Sample, recorder: Recorder, *, reference: bool) -> Iterator[None]:
    """A pass without gradients, in evaluation or of the reference model; that of adapters is the model without them."""
    without: Any = getattr(sample.model, "disable_adapter", nullcontext) if reference else nullcontext
    names = {"start": "reference start", "forward": "reference", "head": "reference head"}
    recorder.roles = names if reference else {}
    recorder.segment("start")
    sample.model.eval()
    try:
        with torch.no_grad(), without():
            yield
    finally:
        sample.model.train()


def _watch(sample: Sample, trained: list[nn.Parameter], recorder: Recorder) -> list[Any]:
    def before(layer: int, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        recorder.segment("forward", layer)
        hidden = args[0] if args else kwargs.get("hidden_states")
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
        hooks.append(parameter.register_post_accumulate_grad_hook(lambda each: recorder.landed(each.grad)))
    return hooks


def _set_checkpointing(base: Any, mode: DeviceMode | None, *, selective: bool) -> None:
    """As ``transformers.Trainer`` does, which makes the embeddings' output require a gradient."""
    if recompute.is_enabled(base):
        recompute.disable(base)
        base.disable_input_require_grads()
    if mode is None:
        return

    def contexts() -> tuple[Any, Any]:  # recomputation runs in the mode, too
        first, second = recompute.contexts() if selective else (nullcontext(), nullcontext())
        return first, mode.again(second)

    recompute.enable(base, use_reentrant=False, context_fn=contexts)


# ---- storages --------------------------------------------------------------------------------------------------------


class Recorder(TorchDispatchMode):
    """Records the operations inside its ``with`` block on a tape, below autograd.

    ``existing`` tensors do not count; ``platform``: whose kernels count; ``most``: operations, RuntimeError beyond.
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
        self._checks_tower = checks_tower
        self.tape, self._platform, self._most = tape, platform, most
        self._known: dict[int, object] = {id(storage): storage for storage in map(Tensor.untyped_storage, existing)}
        self._index: dict[int, int] = {}
        self._landed: set[int] = set()
        self._operations = 0
        self._next: TapeSegment | None = None
        self.roles: dict[str, str] = {}  # other names of the segments of a pass
        self.segment("start")

    def segment(self, role: str, layer: int = -1) -> None:
        """Start a segment with the next operation: what is freed before it belongs to the segment before."""
        self._next = TapeSegment(role=self.roles.get(role, role), layer=layer)

    def landed(self, gradient: Tensor) -> None:
        """Record that this tensor is a parameter's gradient; one that is added to an earlier gradient is freed now."""
        index = self._index.get(id(gradient.untyped_storage()))
        if index is not None and index not in self._landed:
            self._landed.add(index)
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
            raise RuntimeError(f"more than {self._most:,} operations, as loops over tokens or windows take")
        _, _, name, has_a_rate = _operator(func)
        nbytes = _workspace(name, self._platform, args, kwargs)
        workspace = self._new(nbytes) if nbytes else None
        out, flops = cached(func, args, kwargs)
        if sum([self._enter(each) for each in _tensors_in(out)]) or "out" in kwargs:
            segment.launches += 1
            segment.flops += flops
            segment.products += flops > 0
            if name == "bitsandbytes::gemm_4bit":
                segment.unpacked += math.prod(args[2])
            elif name == "bitsandbytes::dequantize_4bit":
                segment.unpacked += out.numel()
            if self._checks_tower and segment.role in ("start", "end") and name in _CHECKED:
                operand = args[_CHECKED[name]]
                self._event(self._new(4 * min(max(operand.numel(), out.numel()), CHECKED_AT_ONCE)), -1)
            if has_a_rate:
                segment.written = written
        if workspace is not None:
            self._event(workspace, -1)
        return out

    def _event(self, index: int, sign: int) -> None:
        self.tape.events.append((len(self.tape.segments) - 1, index, sign))

    def _enter(self, tensor: Tensor) -> bool:
        storage = tensor.untyped_storage()
        key = id(storage)
        if key in self._known:
            return False
        index = self._index[key] = self._new(storage.nbytes())
        self._known[key] = weakref.ref(storage, partial(self._leave, key, index))
        return True

    def _new(self, nbytes: int) -> int:
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
    aliases = any(each.alias_info for each in (*func._schema.arguments, *func._schema.returns))
    name, counted = func.name(), func._overloadpacket in flop_registry or func.name() in _PRODUCTS
    has_a_rate = counted or func is aten._to_copy.default or func.namespace == "bitsandbytes"
    return not aliases, counted, name, has_a_rate


def cached(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, int]:
    """The result of an operator on the meta device, and the floating point operations of its matrix product.

    torch computes an output's shape in Python, which takes longer than the rest of a recording, and layers repeat the
    same operators. Operators that return or change their arguments are called each time.
    """
    fresh, counted, name, _ = _operator(func)
    key = (name, _key(args), _key(tuple(kwargs.items()))) if fresh else None
    if key in RESULTS:
        alone, outputs, flops = RESULTS[key]
        made = [_empty(*each) if isinstance(each, tuple) else each for each in outputs]
        return made[0] if alone else tuple(made), flops
    out, flops = func(*args, **kwargs), 0
    if counted:  # rows times both sides of the weight, where torch has no count
        count = flop_registry.get(func._overloadpacket)
        flops = int(count(*args, **kwargs, out_val=out) if count else 2 * args[0].numel() * out.shape[-1])
    if key is not None and (described := _outputs(out if isinstance(out, tuple) else (out,), (args, kwargs))):
        RESULTS[key] = isinstance(out, Tensor), described, flops
    return out, flops


def _described(tensor: Tensor) -> tuple[Any, ...]:
    return tensor.shape, tensor.stride(), tensor.dtype


def _empty(shape: Any, stride: Any, dtype: torch.dtype) -> Tensor:
    return torch.empty_strided(shape, stride, dtype=dtype, device="meta")


def _key(value: Any) -> Any:
    """The properties of a value that an operator on the meta device depends on; 1, 1.0 and True differ."""
    if isinstance(value, Tensor):
        return value.shape, value.stride(), value.dtype, value.is_meta
    kind = type(value)
    return tuple([_key(each) for each in value]) if kind is tuple or kind is list else (kind, value)


def _outputs(outputs: Any, given: object) -> list[Any] | None:
    """An operator's results, tensors as shape, strides and dtype; None if a tensor is not new, dense and on meta.

    Some operators return a view although their schema does not say so. A result without tensors depends on content.
    """
    tensors = _tensors_in(outputs)
    storages = {id(each.untyped_storage()) for each in tensors}
    new = storages.isdisjoint(id(each.untyped_storage()) for each in _tensors_in(given))
    dense = all(each.is_meta and each.nbytes == each.untyped_storage().nbytes() for each in tensors)
    plain = all(isinstance(each, Tensor | int | float | None) for each in outputs)
    if not (tensors and new and dense and plain and len(storages) == len(tensors)):
        return None
    return [_described(each) if isinstance(each, Tensor) else each for each in outputs]


def _tensors_in(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    inside = value.values() if isinstance(value, dict) else value if isinstance(value, tuple | list) else ()
    return [tensor for each in inside for tensor in _tensors_in(each)]


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


#: An attribute of the sum of a mask on the meta device: how many of its entries were added up, all of them true.
_COUNTED = "_entries_counted"


def _on_meta(given: Any) -> Any:
    """Arguments of an operation, all on the meta device if one of them is; sizes of pictures are host tensors."""
    tensors = _tensors_in(given)
    if not any(each.is_meta for each in tensors) or all(each.is_meta or each.dim() == 0 for each in tensors):
        return given

    def moved(value: Any) -> Any:
        if isinstance(value, Tensor):
            return value if value.is_meta else torch.empty_like(value, device="meta")
        if type(value) is dict:
            return {name: moved(each) for name, each in value.items()}
        return type(value)([moved(each) for each in value]) if type(value) in (tuple, list) else value

    return moved(given)


def _mask_of(given: Any) -> Tensor | None:
    """The mask by which a tensor on the meta device is indexed; None: it is indexed otherwise."""
    tensor, index = given[:2]
    first = index[0] if isinstance(index, tuple) and index else index
    rest = index[1:] if isinstance(index, tuple) else ()
    found = isinstance(first, Tensor) and first.dtype == torch.bool and (first.is_meta or tensor.is_meta)
    return first if found and all(each is Ellipsis or each == slice(None) for each in rest) else None


def _kept_on_host(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor | None:
    """The sizes of pictures where a model moves them to its device: their values are needed. None: another call."""
    if name not in ("to", "as_tensor") or not isinstance(args[0], Tensor):
        return None
    sizes, given = args[0], (*args[1:], *kwargs.values())
    moves = any(isinstance(each, torch.device | str) and torch.device(each).type == "meta" for each in given)
    if not moves or sizes.is_meta or sizes.is_floating_point():
        return None
    return sizes.to(next((each for each in given if isinstance(each, torch.dtype)), sizes.dtype))


class DeviceMode(TorchFunctionMode):
    """Runs operations on meta tensors as on the device.

    ``content_is_plain``: the result of conditions on content; ``placeholders``: tokens of pictures in the batch, 0
    without pictures.
    """

    def __init__(self, *, platform: str, autocast: bool, content_is_plain: bool, placeholders: int = 0) -> None:
        super().__init__()
        self._placeholders = placeholders
        self._platform, self._autocast, self._plain = platform, autocast, content_is_plain
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
        kwargs, name, card = kwargs or {}, getattr(func, "__name__", ""), self._platform != "cpu"
        if name == "__bool__" and args[0].is_meta:
            return self._plain
        if self._placeholders:
            if name == "item" and args[0].is_meta and args[0].dtype == torch.bool:
                return True  # a check, as of as many placeholders as features
            if (sizes := _kept_on_host(name, args, kwargs)) is not None:
                return sizes
            if name == "tolist" and (count := getattr(args[0], _COUNTED, None)) is not None:
                return torch.full(args[0].shape, count).tolist()
            if name in ("__getitem__", "__setitem__") and (mask := _mask_of(args)) is not None:
                return self._masked(*args, mask=mask)
            args, kwargs = _on_meta((args, kwargs))
            if name == "sum" and args[0].is_meta and args[0].dtype == torch.bool:
                counts = func(*args, **kwargs)
                setattr(counts, _COUNTED, args[0].numel() // max(1, counts.numel()))
                return counts
        if self._autocast and any(isinstance(each, Tensor) and each.is_meta for each in args):
            if name in _LOWER or name == _HIDDEN:
                args, kwargs = self._cast((args, kwargs), torch.bfloat16)
            elif card and name in _UPPER:
                args, kwargs = self._cast((args, kwargs), torch.float32)
            elif card and name in _UPPER_BY_DTYPE and args[0].dtype in (torch.bfloat16, torch.float16):
                kwargs = {**kwargs, "dtype": kwargs.get("dtype") or torch.float32}  # it may be given as None
        if name == "scaled_dot_product_attention":
            return self._attention(func, *args, **kwargs)
        if name == "_grouped_mm" and args[0].dtype != torch.bfloat16:
            return _GroupedProduct.apply(*args[:2])  # on the meta device torch takes bfloat16 only
        if name == "dropout" and card:
            return _dropout(*args, **kwargs)
        return func(*args, **kwargs)

    def _cast(self, given: Any, dtype: torch.dtype) -> Any:
        if type(given) is dict:
            return {name: self._cast(each, dtype) for name, each in given.items()}
        if type(given) in (tuple, list):
            return type(given)([self._cast(each, dtype) for each in given])
        keeps = not isinstance(given, Tensor) or not given.is_floating_point()
        if keeps or given.dtype in (dtype, torch.float64):
            return given
        lasting = given.dtype == torch.float32 and given.is_leaf and given.requires_grad
        if not (self._caching and lasting and dtype == torch.bfloat16):
            return given.to(dtype)
        key = id(given), self.second_model
        if key not in self._casts:
            self._casts[key] = given, given.to(dtype)
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
        return flat[rows] if value is None else flat.index_put_((rows,), value)

    def _attention(self, stock: Any, query: Tensor, key: Tensor, value: Tensor, *rest: Any, **more: Any) -> Any:
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
            key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
        if mask is not None:
            if short := -mask.shape[-1] % 8:  # it needs rows at multiples of 8 elements, too: torch pads other masks
                mask = torch.nn.functional.pad(mask, (0, short))[..., : mask.shape[-1]]
            mask = mask.expand(*query.shape[:3], key.shape[2])
        wants_grad = query.requires_grad or key.requires_grad or value.requires_grad
        efficient = aten._scaled_dot_product_efficient_attention
        return efficient(query, key, value, mask, wants_grad, dropout_p, is_causal, scale=scale)[0]


@contextmanager
def autocast_flags(platform: str, enabled: bool) -> Iterator[None]:
    """Within the block PEFT and transformers see autocast enabled, which has no effect on meta tensors.

    ``torch.autocast("meta", enabled=False)``, which PEFT calls and torch refuses, does nothing.
    """
    name, stock = _autocast_device(platform), torch.autocast
    before = torch.is_autocast_enabled(name), torch.get_autocast_dtype(name)
    torch.set_autocast_enabled(name, enabled)
    torch.set_autocast_dtype(name, torch.bfloat16)

    def autocast(device_type: str, *rest: Any, **more: Any) -> Any:
        return nullcontext() if device_type == "meta" else stock(device_type, *rest, **more)

    torch.autocast = autocast  # type: ignore[misc, assignment]
    try:
        yield
    finally:
        torch.autocast = stock  # type: ignore[misc]
        torch.set_autocast_enabled(name, before[0])
        torch.set_autocast_dtype(name, before[1])


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
        wanted = zip(ctx.shapes, ctx.needs_input_grad, strict=True)
        return tuple(grad.new_empty(shape) if need else None for shape, need in wanted)


def _workspace(name: str, platform: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
    """Bytes of the workspace that the kernel of an operator allocates itself."""
    if name == "bitsandbytes::gemm_4bit":
        elements = math.prod(args[2])
        constants = 8 * (elements // 64) if kwargs.get("absmax_8bit") is not None else 0
        return elements * args[0].element_size() + constants
    if name == "bitsandbytes::int8_scaled_mm":  # the product itself, before it is scaled
        return int(4 * len(args[1]) * args[0].numel() // args[0].shape[-1])
    if platform == "cuda" and name == "aten::_scaled_dot_product_flash_attention_backward":
        query, key = args[1:3]  # flash attention 2 accumulates the gradient of the queries in float32
        groups = query.shape[1] // key.shape[1]
        return int(query.numel() * 4 + (2 * key.numel() * groups * key.element_size() if groups > 1 else 0))
    return 0


def _dropout(input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Any:
    return torch.native_dropout(input, p, True)[0] if training and p > 0 else input


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
        ctx.recorder, ctx.kernels = recorder, kernels
        tokens = hidden.shape[0]
        trained = any(each is not None and each.requires_grad for each in (weight, bias))
        ctx.one_pass = one_pass and not trained and weight.dtype == _computed_in(hidden, kernels) != torch.float16
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
            return (*[None] * 5, (gradient * grad.unsqueeze(-1)).to(ctx.dtype))
        hidden, weight, bias = ctx.saved_tensors
        wanted = list(zip((weight, bias, hidden), ctx.needs_input_grad[3:], strict=True))
        sums = [torch.empty_like(tensor, dtype=torch.float32) if need else None for tensor, need in wanted]
        products = 1 + wanted[0][1] + wanted[2][1]
        _project(ctx, hidden, weight, products=products, copies=_BACKWARD_TILES)
        cast = [total if total is None else total.to(each.dtype) for total, (each, _) in zip(sums, wanted, strict=True)]
        return (*[None] * 3, *cast)


def _computed_in(hidden: Tensor, kernels: str) -> torch.dtype:
    return torch.bfloat16 if torch.is_autocast_enabled(_autocast_device(kernels)) else hidden.dtype


def _project(ctx: Any, hidden: Tensor, weight: Tensor, *, products: int, copies: int, width: int = TILE_WIDTH) -> None:
    (tokens, inner), vocabulary, dtype = hidden.shape, weight.shape[0], _computed_in(hidden, ctx.kernels)
    most = min(tokens, PLAIN_TOKENS if ctx.kernels == "plain" else TILE_TOKENS)
    rows, columns = max(1, most * TILE_WIDTH // max(width, TILE_WIDTH)), min(vocabulary, width)
    tiles = [hidden.new_empty((rows, width), dtype=dtype)]
    casts = [piece.to(dtype) for piece in (hidden[:rows], weight[:columns])]
    if ctx.kernels != "triton":
        tiles += [hidden.new_empty((rows, columns), dtype=torch.float32) for _ in range(copies)]
        tiles.append(hidden.new_empty((rows, columns), dtype=torch.bool))
    segment, parts = ctx.recorder.tape.segments[-1], products * -(-tokens // rows) * -(-vocabulary // width)
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
