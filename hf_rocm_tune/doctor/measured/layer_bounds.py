"""Normalisation layers, softmax and cross entropy with their gradients in float64, with rounding bounds by element.

Right is an implementation that computes in float32, in any order of sums, and rounds what it stores; a composed one may
store a few intermediate results in the dtype as well, which is the ``2 u`` and ``3 u`` below. u is the unit roundoff of
the dtype, e that of float32, A(n) `rounding.accumulation`. 64e: an exponential or reciprocal root of a GPU's or a CPU's
vector library is good to a few ulp, torch's fastest one to 20. First-order analysis as in Higham 2002, chapter 3.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hf_rocm_tune.doctor.measured.rounding import FLOAT32_ROUNDOFF, Reference, accumulation, gamma, roundoff, stored

_E = FLOAT32_ROUNDOFF
_LIBRARY = 64 * _E
"""Error of a function of a vector library."""


def normalised(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    upstream: Tensor,
    eps: float,
    dtype: torch.dtype,
    *,
    centred: bool,
    narrow_sums: bool = False,
) -> dict[str, Reference]:
    """Layer normalisation (``centred``) or root-mean-square normalisation over the last axis.

    y = (x - m) r, r = 1 / sqrt(variance + eps). The variance may come from two sums (``E x^2 - m^2``), so its error
    is at most ``4 A(n) E x^2``, and that of r, relatively, at most that over variance + eps. For the backward pass, m
    and r may have been stored in the dtype (torch does so on CPUs).

    Args:
        x, upstream: ``(rows, width)`` float64 on the CPU.
        weight, bias: ``(width,)``; no bias for RMS.
        eps: of the layer.
        dtype: of inputs and results.
        centred: subtract the mean.
        narrow_sums: the gradients of weight and bias may be summed over rows in the dtype, as torch does on CPUs.

    Returns:
        ``output`` and the gradients of ``input``, ``weight`` and, where there is one, ``bias``.
    """
    rows, width = x.shape
    u, sums = roundoff(dtype), accumulation(width)
    mean = x.mean(-1, keepdim=True) if centred else torch.zeros(rows, 1, dtype=x.dtype)
    square = (x * x).mean(-1, keepdim=True)
    spread = ((x - mean) ** 2).mean(-1, keepdim=True) + eps
    root = spread.rsqrt()
    root_error = 4 * sums * square / spread + _LIBRARY
    mean_error = sums * x.abs().mean(-1, keepdim=True) if centred else torch.zeros_like(mean)
    y = (x - mean) * root
    y_error = root * (1 + root_error) * (mean_error + 2 * _E * (x.abs() + mean.abs())) + y.abs() * root_error

    shift = torch.zeros_like(weight) if bias is None else bias
    size = (weight * y).abs() + shift.abs()
    out = weight * y + shift
    found = {"output": Reference(out, stored(out, weight.abs() * y_error + (8 * _E + 2 * u) * size, dtype))}

    root_error = root_error + u
    y_error = y_error + u * (root * (1 + root_error) * mean.abs() + y.abs())
    h = upstream * weight
    h_error = 2 * u * h.abs()
    first = h.mean(-1, keepdim=True) if centred else torch.zeros_like(mean)
    first_error = (h_error + sums * h.abs()).mean(-1, keepdim=True) if centred else torch.zeros_like(mean)
    second = (h * y).mean(-1, keepdim=True)
    second_error = (h_error * y.abs() + h.abs() * y_error + sums * (h * y).abs()).mean(-1, keepdim=True)
    inner = h - first - y * second
    inner_error = h_error + first_error + y_error * (second.abs() + second_error) + y.abs() * second_error
    inner_error = inner_error + 4 * u * (h.abs() + first.abs() + (y * second).abs())
    gradient = root * inner
    found["input"] = Reference(
        gradient, stored(gradient, root * (1 + root_error) * inner_error + root_error * gradient.abs(), dtype)
    )
    found["weight"] = _column_sums(upstream * y, upstream.abs() * y_error, dtype, narrow_sums)
    if bias is not None:
        found["bias"] = _column_sums(upstream, torch.zeros_like(upstream), dtype, narrow_sums)
    return found


def softmax(x: Tensor, upstream: Tensor, dtype: torch.dtype) -> dict[str, Reference]:
    """Softmax over the last axis: ``output`` and the gradient of ``input``, which is taken from the stored output.

    Args:
        x, upstream: ``(rows, width)`` float64 on the CPU.
        dtype: of inputs and results.
    """
    u, sums = roundoff(dtype), accumulation(x.shape[-1])
    p = x.softmax(-1)
    p_error = p * torch.expm1(4 * _E * (x.abs() + x.abs().amax(-1, keepdim=True)) + _LIBRARY + 2 * sums)
    out = Reference(p, stored(p, p_error, dtype))
    mean = (p * upstream).sum(-1, keepdim=True)
    mean_error = (out.bound * upstream.abs() + sums * (p * upstream).abs()).sum(-1, keepdim=True)
    gradient = p * (upstream - mean)
    error = out.bound * ((upstream - mean).abs() + mean_error) + p * mean_error
    error = error + 3 * u * p * (upstream.abs() + mean.abs())
    return {"output": out, "input": Reference(gradient, stored(gradient, error, dtype))}


def cross_entropy(x: Tensor, target: Tensor, dtype: torch.dtype) -> dict[str, Reference]:
    """Mean cross entropy over rows: ``output`` (a scalar) and the gradient of ``input``.

    torch stores the logarithms of the probabilities in the dtype and takes the gradient from them; the mean may be
    taken in the dtype too.

    Args:
        x: ``(rows, classes)`` float64 on the CPU.
        target: ``(rows,)`` class numbers.
        dtype: of inputs and results.
    """
    rows, classes = x.shape
    u = roundoff(dtype)
    logs = x.log_softmax(-1)
    log_sizes = x.abs() + x.abs().amax(-1, keepdim=True) + logs.abs()
    log_error = stored(logs, 4 * _E * log_sizes + _LIBRARY + accumulation(classes), dtype)
    at = target[:, None]
    picked, picked_error = logs.gather(1, at), log_error.gather(1, at)
    loss = -picked.mean()
    loss_error = picked_error.mean() + (rows + 2) * u * (picked.abs() + picked_error).mean()

    p, hot = logs.exp(), torch.zeros_like(logs).scatter(1, at, 1.0)
    gradient = (p - hot) / rows
    error = (p * torch.expm1(log_error + _LIBRARY + 2 * u) + 3 * u * (p + hot)) / rows
    return {
        "output": Reference(loss, stored(loss, loss_error, dtype)),
        "input": Reference(gradient, stored(gradient, error, dtype)),
    }


def _column_sums(terms: Tensor, error: Tensor, dtype: torch.dtype, narrow: bool) -> Reference:
    """Gradients of a parameter: sums over rows of terms that may have been rounded to the dtype."""
    total, rows, u = terms.sum(0), terms.shape[0], roundoff(dtype)
    # Where so many narrow additions have no bound, nothing is wrong that is not larger than all terms together.
    sums = accumulation(rows) if not narrow else gamma(rows, u) if 2 * rows * u < 1 else 1.0
    return Reference(total, stored(total, error.sum(0) + (sums + 2 * u) * terms.abs().sum(0), dtype))
