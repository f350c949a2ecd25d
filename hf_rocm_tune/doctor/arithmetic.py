"""What the checks of arithmetic share: inputs, how far a right result may be from float64, and the count of wrong ones.

Two kinds of inputs. *Exact* ones leave no room at all: every product and every partial sum, in whatever order, is an
integer that the narrowest format in use can hold, so each correct implementation gives the same bits. All others are
compared with float64 on the CPU:

- a matrix product by the bound of its sums. With the unit roundoff u of float32, n rounded operations are off by at
  most ``gamma(n) = n u / (1 - n u)`` (Higham, Accuracy and Stability of Numerical Algorithms, 2nd ed. 2002, lemma 3.1),
  relative to the sum of absolute values. Matrix units cut addends off instead of rounding them, which costs at most
  ``4 u n`` (measured on tensor cores: Fasi and others 2021, PeerJ CS 7:e330); `product` allows that much.
- layers by what their own formula loses in the same dtype: it is computed on the CPU step by step in that dtype, and an
  element may be `FACTOR` times as far from float64 as the worst of those. This is how fused attention kernels are
  tested by their authors (flash-attention, tests/test_flash_attn.py, with a factor of 2 to 3).

A wrong result is read back a second time: where the two differ, the readback is at fault and not arithmetic.

Faults on purpose: ``wrong`` negates one element and takes one off, ``nan`` makes one NaN (``wrong`` among integers),
``zeros`` zeroes a whole result, ``gradient`` is ``wrong`` in a gradient only. The first result is harmed whose case
contains the request's ``where`` (any, where that is empty).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from hf_rocm_tune.doctor.findings import Finding, from_row
from hf_rocm_tune.machine.child import device_of, step
from hf_rocm_tune.transfer import Mover

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
FACTOR = 4.0
SMALLEST = 2.0**-6
"""Least magnitude of inputs: products of two are normal numbers in float16, which a device that flushes subnormal
numbers to zero handles like any other."""
_EXACT_FLOAT32 = 64
_SHOWN = 3
_KEPT_PROBLEMS = 12
_BEYOND = 1e9
"""What stands for an error beyond all bounds, NaN among them."""


def name_of(dtype: torch.dtype) -> str:
    """``bfloat16``, without the package."""
    return str(dtype).removeprefix("torch.")


def spread(shape: Sequence[int], dtype: torch.dtype, generator: torch.Generator, *, scale: float = 1.0) -> Tensor:
    """Normally distributed values of ``dtype`` with magnitudes of at least ``SMALLEST``."""
    values = torch.randn(tuple(shape), generator=generator) * scale
    return torch.where(values.abs() < SMALLEST, torch.full_like(values, SMALLEST).copysign(values), values).to(dtype)


def signs(shape: Sequence[int], generator: torch.Generator) -> Tensor:
    """Ones and minus ones, int64."""
    return torch.randint(0, 2, tuple(shape), generator=generator) * 2 - 1


def exact_factors(m: int, k: int, n: int, dtype: torch.dtype, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Factors ``(m, k)`` and ``(k, n)`` of small integers whose product is exact in ``dtype``, in any order of sums.

    float32: integers of at most 64 in magnitude, so that sums stay below 2^24 for k up to 4096. float16 and bfloat16:
    ones and minus ones, in each row of the left factor at most as many as the format's largest run of integers (2048
    and 256), zeros elsewhere. int8: all values, for int32 sums.
    """
    if dtype in (torch.int8, torch.float32):
        low, high = (-128, 128) if dtype is torch.int8 else (-_EXACT_FLOAT32, _EXACT_FLOAT32 + 1)
        left, right = (torch.randint(low, high, shape, generator=generator) for shape in ((m, k), (k, n)))
        return left.to(dtype), right.to(dtype)
    left, most = signs((m, k), generator), round(2 / torch.finfo(dtype).eps)
    if k > most:
        ranks = torch.rand((m, k), generator=generator).argsort(dim=1)
        left = torch.where(ranks < most, left, 0)
    return left.to(dtype), signs((k, n), generator).to(dtype)


def product(left: Tensor, right: Tensor, dtype: torch.dtype, *, roundings: int = 1) -> tuple[Tensor, Tensor]:
    """The product of two matrices, to be computed with float32 sums and stored as ``dtype``, and its bound.

    Args:
        left: ``(..., m, k)`` on the CPU, with the values that the device gets.
        right: ``(..., k, n)`` likewise.
        dtype: of the result.
        roundings: how often the factors may have been rounded to ``dtype`` on the way, the result included.

    Returns:
        float64 values, and by how much each may be missed.
    """
    left, right = left.double(), right.double()
    exact, sizes = left @ right, left.abs() @ right.abs()
    u = 4 * left.shape[-1] * torch.finfo(torch.float32).eps / 2
    info = torch.finfo(dtype)
    error = (u / (1 - u) + (roundings - 1) * info.eps) * sizes
    # What is below the smallest normal number may be flushed to zero.
    return exact, error + info.eps / 2 * (exact.abs() + error) + info.tiny


def allowance(right: Tensor, rounded: Tensor) -> Tensor:
    """How far each element may be from float64; see the module.

    Args:
        right: float64.
        rounded: the same formula in the dtype of the result.
    """
    info = torch.finfo(rounded.dtype)
    return FACTOR * ((rounded.double() - right).abs().max() + info.eps / 2 * right.abs()) + info.tiny


class Bench:
    """Computes on one device, compares, counts results and keeps the first wrong ones.

    Args:
        request: of a check; ``device``, ``address``, ``seed``, ``fault``.

    Attributes:
        device: that is tried; `move` brings tensors there.
        generator: of all inputs.
        cases, elements: compared so far.
        wrong: results that are.
        worst: largest error, as a share of its bound.
        problems: the first wrong results.
    """

    def __init__(self, request: Mapping[str, Any]) -> None:
        self.name = request["device"]
        self.device = device_of(request)
        self.generator = torch.Generator().manual_seed(request.get("seed", 0))
        fault = request.get("fault") or {}
        self._kind, self._where = fault.get("kind", ""), fault.get("where", "")
        self.cases = self.elements = self.wrong = 0
        self.worst = 0.0
        self.problems: list[dict[str, Any]] = []
        self._mover = Mover(self.device)

    def __enter__(self) -> Bench:
        return self

    def __exit__(self, *_: object) -> None:
        self._mover.close()

    def move(self, tensor: Tensor) -> Tensor:
        """A host tensor on the device, verified."""
        return self._mover.move(tensor, name="input")

    def move_all(self, tensors: Iterable[Tensor]) -> list[Tensor]:
        """Several."""
        return [self.move(tensor) for tensor in tensors]

    def exact(self, case: str, result: Tensor, right: Tensor, *, gradient: bool = False) -> bool:
        """Compare with the only right values; a zero may have either sign.

        Args:
            case: what was computed.
            result: on the device.
            right: on the CPU, same dtype and shape.
            gradient: the result is one.
        """
        return self._compare(case, result, right, None, gradient)

    def close(self, case: str, result: Tensor, right: Tensor, bound: Tensor, *, gradient: bool = False) -> bool:
        """Compare with float64 values that may be missed by a bound; the other arguments are those of `exact`."""
        return self._compare(case, result, right, bound, gradient)

    def layer(
        self,
        name: str,
        layer: Callable[..., Tensor],
        formula: Callable[..., Tensor],
        inputs: Sequence[Tensor],
        upstream: Tensor,
        labels: Sequence[str],
    ) -> None:
        """Compare a layer and its gradients with its formula.

        Args:
            name: of the layer, in words.
            layer: takes the inputs on the device.
            formula: takes them on the CPU, in float64 and once more in their own dtype.
            inputs: on the CPU; each gets a gradient.
            upstream: gradient of the output.
            labels: of the inputs, in words.
        """
        step(f"computing {name}")
        try:
            found = _both_ways(layer, self.move_all(inputs), self.move(upstream))
        except RuntimeError as error:  # every device has these: a refusal is a fault of the installation
            self.refused(name, error)
            return
        right = _both_ways(formula, [tensor.double() for tensor in inputs], upstream.double())
        self.results(name, found, right, _both_ways(formula, inputs, upstream), labels)

    def results(
        self,
        name: str,
        found: Sequence[Tensor],
        right: Sequence[Tensor],
        rounded: Sequence[Tensor],
        labels: Sequence[str],
    ) -> None:
        """Compare an output and the gradients behind it, by `allowance`."""
        words = ("output", *(f"gradient of {label}" for label in labels))
        for what, result, exact, narrow in zip(words, found, right, rounded, strict=True):
            self.close(f"{name}: {what}", result, exact, allowance(exact, narrow), gradient=what != "output")

    def refused(self, case: str, error: Exception) -> None:
        """Note that a case raised instead of giving a result."""
        self.cases += 1
        self._keep({"case": case, "error": " ".join(f"{type(error).__name__}: {error}".split())[:300]})

    def verdict(self, right: str, wrong: str, evidence: Iterable[str] = ()) -> Finding:
        """The finding on all results.

        Args:
            right, wrong: rows for all right, and for something wrong; both take ``cases``, the latter ``wrong``. A
                result that reads back in two ways has a row of its own, and so has one that the device refused to
                compute where nothing else is wrong.
            evidence: more lines.
        """
        cases = f"{self.cases:,}"
        if not self.wrong:
            compared = f"{self.elements:,} elements of {cases} results compared"
            compared += f", the largest error {100 * self.worst:.0f} % of its bound" if self.worst else ""
            return from_row(right, subject=self.name, evidence=[compared, *evidence], cases=cases)
        lines = [*self.problem_lines(), *evidence]
        if not all(problem.get("reads_agree", True) for problem in self.problems):
            return from_row("arithmetic_read_back", subject=self.name, evidence=lines)
        row = "arithmetic_refused" if all("error" in problem for problem in self.problems) else wrong
        return from_row(row, subject=self.name, evidence=lines, wrong=f"{self.wrong:,}", cases=cases)

    def problem_lines(self) -> list[str]:
        """The first problems, one line each, and how many more there are."""
        lines = [_line(problem) for problem in self.problems[:_SHOWN]]
        left = self.wrong - len(lines)
        return [*lines, f"and {left:,} more results"] if left > 0 else lines

    def _compare(self, case: str, result: Tensor, right: Tensor, bound: Tensor | None, gradient: bool) -> bool:
        assert result.shape == right.shape, (case, result.shape, right.shape)
        wanted = self._kind in ("wrong", "nan", "zeros") or (self._kind == "gradient" and gradient)
        result = result.detach()
        if wanted and self._where in case and result.numel():
            result, self._kind = harmed(result, self._kind), ""
        step(f"comparing {case}")
        found = result.cpu()
        self.cases += 1
        self.elements += found.numel()
        if bound is None:
            wrong = found != right
        else:
            error = (found.double() - right).abs()
            wrong = ~(error <= bound)  # NaN is within no bound
            share = torch.where(error == 0, 0, error / bound).nan_to_num(nan=_BEYOND).clamp_max(_BEYOND)
            self.worst = max(self.worst, float(share.max()))
        if not wrong.any():
            return True
        again = result.cpu()
        same = torch.equal(*(read.reshape(-1).view(torch.uint8) for read in (found, again)))
        self._keep({"case": case, **_describe(found, right, bound, wrong), "reads_agree": same})
        return False

    def _keep(self, problem: dict[str, Any]) -> None:
        self.wrong += 1
        if len(self.problems) < _KEPT_PROBLEMS:
            self.problems.append(problem)


def harmed(result: Tensor, kind: str) -> Tensor:
    """A copy of a result with a fault in it; see the module."""
    broken = result.clone(memory_format=torch.contiguous_format)
    if kind == "zeros":
        return broken.zero_()
    flat = broken.view(-1)
    place = flat.numel() // 2
    flat[place] = float("nan") if kind == "nan" and flat.is_floating_point() else -flat[place] - 1
    return broken


def _both_ways(layer: Callable[..., Tensor], inputs: Sequence[Tensor], upstream: Tensor) -> list[Tensor]:
    """The output, and the gradients of all inputs."""
    leaves = [tensor.detach().requires_grad_() for tensor in inputs]
    output = layer(*leaves)
    return [output.detach(), *torch.autograd.grad(output, leaves, upstream)]


def _describe(found: Tensor, right: Tensor, bound: Tensor | None, wrong: Tensor) -> dict[str, Any]:
    places, values = wrong.nonzero(), found[wrong].double()
    at = tuple(places[0].tolist())
    return {
        "wrong": places.shape[0],
        "of": found.numel(),
        "first": list(at),
        "box": [int(column.max() - column.min()) + 1 for column in places.t()],
        "found": f"{found[at].item():.7g}",
        "right": f"{right[at].item():.7g}",
        "bound": None if bound is None else float(bound[at]),
        "zeros": int((values == 0).sum()),
        "nans": int(values.isnan().sum()),
    }


def _line(problem: Mapping[str, Any]) -> str:
    if "error" in problem:
        return f"{problem['case']}: refused with {problem['error']}"
    wrong, allowed = problem["wrong"], "it is exact"
    if problem["bound"] is not None:
        allowed = f"it may differ by {problem['bound']:.3g}"
    # The smallest box that holds all wrong elements: a cut tile of a kernel is told by its sides.
    region = f", all within {' x '.join(map(str, problem['box']))}" if wrong > 1 else ""
    shares = "".join(
        f"; {100 * problem[key] / wrong:.0f} % of them {words}"
        for key, words in (("zeros", "zero"), ("nans", "NaN"))
        if problem[key]
    )
    reads = "" if problem["reads_agree"] else "; read back again, it was different"
    return (
        f"{problem['case']}: {wrong:,} of {problem['of']:,} elements wrong, the first at {problem['first']}{region}: "
        f"{problem['found']} instead of {problem['right']} ({allowed}){shares}{reads}"
    )
