"""The loss of a frozen output head, with its gradient computed in the forward pass.

TRL's fused head computes the logits tile by tile in forward and again in backward. Each token's log-probability is
multiplied by one number in backward, so the gradient for a factor of 1 is computed while a tile of logits is there:
two products with the head instead of three. Values agree with TRL's to rounding. Left to TRL where the head is trained
or is cast for the product, and in float16, in which small probabilities would be zero.
"""

from __future__ import annotations

import functools
import importlib.util
import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from typing import Any

import torch
import trl
from torch import Tensor
from trl.trainer import utils as upstream_losses

from hf_rocm_tune.errors import SeamError, UsageError
from hf_rocm_tune.models import products
from hf_rocm_tune.transfer import triton_refusal

_HELPERS = (
    "OPTIONAL_OUTPUTS", "TOKEN_CHUNK_SIZE", "_BLOCK_SIZE", "_addmm_fp32", "_backward_tile", "_forward_tile",
    "_use_triton",
)  # fmt: skip
PLAIN_TOKENS = 1024
_OTHER_TRL = "install TRL 1.16, or Triton with a C compiler and Python's headers"


def _fused_head() -> Any:
    """TRL's module of the fused head; None before TRL 1.15, whose losses multiply with the head in another way."""
    try:
        return importlib.import_module("trl.kernels.chunked_logprob")
    except ModuleNotFoundError as error:
        if error.name in ("trl.kernels", "trl.kernels.chunked_logprob"):
            return None
        raise SeamError(f"the fused head of TRL {trl.__version__} does not load ({error}): {_OTHER_TRL}") from error


upstream_head = _fused_head()
_WANTED: ContextVar[bool] = ContextVar("one_pass_loss", default=False)


def is_known() -> bool:
    """Whether TRL's head has the parameters that ours take, behind ``stock``, and the functions that ours call."""
    if upstream_head is None:
        return False
    head = upstream_head.ChunkedLogProbFunction
    pairs: list[tuple[Any, Any]] = [(head.forward, _forward), (head.backward, _backward)]
    names = [[list(inspect.signature(function).parameters) for function in pair] for pair in pairs]
    return all(stock == ours[1:] for stock, ours in names) and all(
        hasattr(upstream_head, function) for function in _HELPERS
    )


def install() -> None:
    """Let TRL's fused head heed `one_pass_loss`, in this process. A second call does nothing."""
    if not is_known():
        raise UsageError(f"--one_pass_loss does not know the fused head of TRL {trl.__version__}: give false")
    head = upstream_head.ChunkedLogProbFunction
    for name, ours in (("forward", _forward), ("backward", _backward)):
        stock = getattr(head, name)
        if not hasattr(stock, "heeds_one_pass_loss"):
            replacement: Any = functools.wraps(stock)(partial(ours, stock))
            replacement.heeds_one_pass_loss = True
            setattr(head, name, staticmethod(replacement))


def fit_to(device: torch.device, *, compiled: bool) -> None:
    """Let TRL's losses compute in a way that runs, and runs fast, on this device, in this process.

    TRL asks whether Triton can be imported, which it can where its driver does not compile: there it gets plain torch.
    On an AMD card its float32 sums are computed by the faster library (`products`), but not in a `compiled` graph.
    """
    if device.type == "cpu":
        if upstream_head is not None and not hasattr(upstream_head, "_use_triton"):
            raise UsageError(f"the losses of TRL {trl.__version__} need Triton on every device, and there is no card")
        return
    if triton_refusal(device):
        _avoid_triton(device)
    if upstream_head is None or not hasattr(upstream_head, "_addmm_fp32"):
        return
    choice = products.choose(device)
    if choice is not None and not compiled:
        stock = getattr(upstream_head._addmm_fp32, "stock", upstream_head._addmm_fp32)

        def add(total: Tensor, left: Tensor, right: Tensor) -> None:
            if left.dtype != torch.bfloat16 or left.device.type == "cpu":
                stock(total, left, right)
            else:
                products.add(total, left, right, library=choice.library)

        add.stock = stock  # type: ignore[attr-defined]
        upstream_head._addmm_fp32 = add


def _avoid_triton(device: torch.device) -> None:
    """Lets TRL's losses compute with plain torch on this device; SeamError: they would not."""
    if upstream_head is not None:
        if not hasattr(upstream_head, "_TRITON_AVAILABLE"):
            raise SeamError(f"the fused head of TRL {trl.__version__} cannot be computed without Triton: {_OTHER_TRL}")
        upstream_head._TRITON_AVAILABLE = False
        # plain torch holds up to seven float32 copies of a tile: 0.9 instead of 3.5 GiB, nearer to what is planned
        upstream_head.TOKEN_CHUNK_SIZE = min(upstream_head.TOKEN_CHUNK_SIZE, PLAIN_TOKENS)
        if upstream_head._use_triton(device):
            raise SeamError(f"the fused head of TRL {trl.__version__} ignores `_TRITON_AVAILABLE`: {_OTHER_TRL}")
    # log-probabilities of whole logits, as in ORPO
    if hasattr(upstream_losses, "is_triton_available"):
        upstream_losses.is_triton_available = lambda: False
    elif hasattr(upstream_losses, "_fused_logprob_entropy"):  # TRL 1.14
        upstream_losses._fused_logprob_entropy = None
    elif importlib.util.find_spec("trl.kernels") is not None:
        raise SeamError(f"the losses of TRL {trl.__version__} cannot be computed without Triton: {_OTHER_TRL}")


@contextmanager
def one_pass_loss() -> Iterator[None]:
    """Within the block, and its thread, TRL's fused head computes its gradient in forward; see `install`."""
    before = _WANTED.set(True)
    try:
        yield
    finally:
        _WANTED.reset(before)


class _Head:
    """The products with the output head: ``logits`` (rows, V) of hidden states, and what goes back (rows, H)."""

    def __init__(self, weight: Tensor, bias: Tensor | None, dtype: torch.dtype, chunk_size: int) -> None:
        choice = products.choose(weight.device)
        self._rounded = choice is not None and choice.rounded and dtype == torch.bfloat16
        self._weight, self._bias, self._dtype, self._chunk_size = weight, bias, dtype, chunk_size
        self.dtype_back = dtype if self._rounded else torch.float32

    def logits(self, hidden: Tensor) -> Tensor:
        product = torch.mm(hidden, self._weight.t())
        if self._bias is not None:
            product += self._bias.to(self._dtype)
        return product

    def add_back(self, sum_: Tensor, tile: Tensor) -> None:
        """Add ``tile @ weight`` to a float32 sum."""
        if self._rounded:
            products.add(sum_, tile, self._weight, library=products.ROUNDED)
            return
        vocabulary = self._weight.shape[0]
        columns = vocabulary if tile.is_cuda else self._chunk_size  # elsewhere the product is of copies in float32
        for start in range(0, vocabulary, columns):
            words = slice(start, start + columns)
            upstream_head._addmm_fp32(sum_, tile[:, words], self._weight[words])

    def back(self, tile: Tensor) -> Tensor:
        gradient = torch.zeros(len(tile), self._weight.shape[1], dtype=torch.float32, device=tile.device)
        self.add_back(gradient, tile.to(self._dtype))
        return gradient


def _forward(
    stock: Callable[..., Any],
    ctx: Any,
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    temperature: float,
    chunk_size: int,
    final_logit_softcapping: float | None = None,
    logit_scale: float = 1.0,
    outputs: tuple[str, ...] | None = None,
) -> tuple[Tensor | None, ...]:
    """As ``ChunkedLogProbFunction.forward``: ``hidden`` (N, H), ``weight`` (V, H); returns tensors of shape (N,)."""
    kind, outputs = hidden.device.type, upstream_head.OPTIONAL_OUTPUTS if outputs is None else outputs
    dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else hidden.dtype
    only_hidden = ctx.needs_input_grad[:3] == (True, False, False)
    ctx.one_pass = _WANTED.get() and only_hidden and weight.dtype == dtype != torch.float16
    if not ctx.one_pass:
        given = (temperature, chunk_size, final_logit_softcapping, logit_scale, outputs)
        return tuple(stock(ctx, hidden, weight, bias, targets, *given))
    ctx.set_materialize_grads(False)
    tokens, vocabulary = hidden.shape[0], weight.shape[0]
    options = {
        "logit_scale": logit_scale,
        "softcap": final_logit_softcapping or 1.0,
        "inv_t": 1 / temperature,
        "HAS_SOFTCAP": final_logit_softcapping is not None,
        "BLOCK_SIZE": upstream_head._BLOCK_SIZE,
    }
    kept = {f"HAS_{name.upper()}": name in outputs for name in upstream_head.OPTIONAL_OUTPUTS}
    begun = (-torch.inf, 0.0, 0.0, 0.0, 0.0, -torch.inf, 0.0)
    statistics = [hidden.new_full((tokens,), value, dtype=torch.float32) for value in begun]
    highest, total, weighted, squares, plain, before_target, of_target = statistics
    normaliser, ones = torch.empty_like(highest), torch.ones_like(highest)
    gradient = torch.zeros_like(hidden, dtype=torch.float32)
    # a tile has no more elements than upstream's
    rows = max(1, min(tokens, upstream_head.TOKEN_CHUNK_SIZE) * chunk_size // max(vocabulary, chunk_size))
    head = _Head(weight, bias, dtype, chunk_size)
    observer = getattr(weight, "observer", None)  # of the checks of arithmetic
    for first in range(0, tokens, rows):
        part = slice(first, first + rows)
        tile = head.logits(hidden[part].to(dtype))
        if observer is not None:
            observer("forward", hidden[part], tile, dtype, head.logits)
        count, blocks = tile.shape[0], -(-vocabulary // upstream_head._BLOCK_SIZE)
        place = (tile, tile.stride(0), targets[part])
        fold = upstream_head._forward_tile
        turn = upstream_head._backward_tile
        if upstream_head._use_triton(hidden.device):
            fold = upstream_head._forward_kernel[(count,)]
            turn = upstream_head._backward_kernel[(count, blocks)]
        fold(*place, *(statistic[part] for statistic in statistics), 0, vocabulary, **kept, **options)
        normaliser[part] = highest[part] + torch.log(total[part])
        factors = (normaliser[part], normaliser[part], ones[part], ones[part])  # entropy has no gradient
        turn(*place, *factors, 0, vocabulary, HAS_LOGPROB_GRAD=True, HAS_ENTROPY_GRAD=False, **options)
        head.add_back(gradient[part], tile)
        if observer is not None:
            observer("backward", tile, gradient[part], head.dtype_back, head.logits, head.back)
        del tile, place  # before the next one
    ctx.save_for_backward(gradient)
    ctx.dtype = hidden.dtype
    constants = []
    results = {
        "entropy": lambda: normaliser - weighted / total,
        "log_sum_sq_probs": lambda: torch.log(squares) - 2 * torch.log(total),
        "mean_logits": lambda: plain / vocabulary,
        "is_top1": lambda: (of_target >= highest) & (of_target > before_target),
    }
    computed = {name: results[name]() if name in outputs else None for name in upstream_head.OPTIONAL_OUTPUTS}
    for name, output in computed.items():
        if output is not None and name != "entropy":
            constants.append(output)
    ctx.mark_non_differentiable(*constants)
    return of_target - normaliser, *computed.values()


def _backward(
    stock: Callable[..., Any], ctx: Any, grad_logprobs: Tensor | None, grad_entropy: Tensor | None, *_: Any
) -> tuple[Any, ...]:
    if not ctx.one_pass:
        return tuple(stock(ctx, grad_logprobs, grad_entropy, *_))
    if grad_entropy is not None:
        raise NotImplementedError("--one_pass_loss computes no gradient of the entropy: turn it off for this loss")
    (gradient,) = ctx.saved_tensors
    scaled = None if grad_logprobs is None else (gradient * grad_logprobs.float().unsqueeze(-1)).to(ctx.dtype)
    return (scaled, *[None] * 8)
