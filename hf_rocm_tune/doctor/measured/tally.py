"""The child's side of every check of arithmetic: results against what they should be, and what is wrong with them.

A result is wrong where it is not the right value (`Tally.exact`) or further from it than its bound (`Tally.close`); NaN
always is. A wrong result is read back a second time: where the two differ, the way back is at fault and not arithmetic,
and the problem says so.

Faults on purpose: ``wrong`` negates one element and takes one off, ``nan`` makes one NaN (``wrong`` among integers),
``zeros`` zeroes a whole result, ``gradient`` is ``wrong`` in a gradient only. The first result is harmed whose case
contains the request's ``where`` (any, where that is empty).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from hf_rocm_tune.doctor.measured.rounding import Reference
from hf_rocm_tune.machine.child import step

KEPT_PROBLEMS = 12
_BEYOND = 1e9
"""What stands for an error beyond all bounds, NaN among them: JSON has no infinity."""


class Tally:
    """Counts results and keeps the first wrong ones.

    Args:
        request: with ``fault``, where one was asked for.

    Attributes:
        cases, elements: compared so far.
        worst: largest error, as a share of its bound.
    """

    def __init__(self, request: Mapping[str, Any]) -> None:
        fault = request.get("fault") or {}
        self._kind, self._where = fault.get("kind", ""), fault.get("where", "")
        self._harmed = False
        self._problems: list[dict[str, Any]] = []
        self._wrong = 0
        self.cases = self.elements = 0
        self.worst = 0.0

    def exact(self, case: str, result: Tensor, right: Tensor, *, gradient: bool = False) -> bool:
        """Compare with the only right values; a zero may have either sign.

        Args:
            case: what was computed.
            result: on the device.
            right: on the CPU, same dtype and shape.
            gradient: the result is one.
        """
        return self._compare(case, result, right, None, gradient)

    def close(self, case: str, result: Tensor, reference: Reference, *, gradient: bool = False) -> bool:
        """Compare with float64 values that may be missed by a bound; the arguments are those of `exact`."""
        return self._compare(case, result, reference.right, reference.bound, gradient)

    def refused(self, case: str, error: Exception) -> None:
        """Note that a case raised instead of giving a result."""
        self.cases += 1
        self._keep({"case": case, "error": " ".join(f"{type(error).__name__}: {error}".split())[:300]})

    def result(self, **more: Any) -> dict[str, Any]:
        """What the parent gets."""
        counts = {"cases": self.cases, "elements": self.elements, "wrong": self._wrong, "worst": self.worst}
        return {**counts, "problems": self._problems, **more}

    def _compare(self, case: str, result: Tensor, right: Tensor, bound: Tensor | None, gradient: bool) -> bool:
        assert result.shape == right.shape, (case, result.shape, right.shape)
        result = self._harm(case, result.detach(), gradient)
        step(f"comparing {case}")
        found = result.cpu()
        self.cases += 1
        self.elements += found.numel()
        wrong = _wrong(found, right, bound)
        if bound is not None and found.numel():
            error = (found.double() - right).abs()
            share = torch.where(error == 0, 0, error / bound).nan_to_num(nan=_BEYOND).clamp_max(_BEYOND)
            self.worst = max(self.worst, float(share.max()))
        if not wrong.any():
            return True
        again = result.cpu()
        self._keep({"case": case, **_describe(found, right, bound, wrong), "reads_agree": _same_bits(found, again)})
        return False

    def _keep(self, problem: dict[str, Any]) -> None:
        self._wrong += 1
        if len(self._problems) < KEPT_PROBLEMS:
            self._problems.append(problem)

    def _harm(self, case: str, result: Tensor, gradient: bool) -> Tensor:
        wanted = self._kind in ("wrong", "nan", "zeros") or (self._kind == "gradient" and gradient)
        if self._harmed or not wanted or self._where not in case or not result.numel():
            return result
        self._harmed = True
        return harmed(result, self._kind)


def harmed(result: Tensor, kind: str) -> Tensor:
    """A copy of a result with a fault in it; see the module."""
    broken = result.clone(memory_format=torch.contiguous_format)
    if kind == "zeros":
        return broken.zero_()
    flat = broken.view(-1)
    place = flat.numel() // 2
    flat[place] = float("nan") if kind == "nan" and flat.is_floating_point() else -flat[place] - 1
    return broken


def _wrong(found: Tensor, right: Tensor, bound: Tensor | None) -> Tensor:
    if bound is None:
        return found != right
    return ~((found.double() - right).abs() <= bound)  # NaN is within no bound


def _same_bits(first: Tensor, second: Tensor) -> bool:
    return torch.equal(*(read.reshape(-1).view(torch.uint8) for read in (first, second)))


def _describe(found: Tensor, right: Tensor, bound: Tensor | None, wrong: Tensor) -> dict[str, Any]:
    places = wrong.nonzero()
    at = tuple(places[0].tolist())
    values = found[wrong].double()
    return {
        "wrong": places.shape[0],
        "of": found.numel(),
        "first": list(at),
        "box": [[int(column.min()), int(column.max()) + 1] for column in places.t()],
        "found": _written(found[at]),
        "right": _written(right[at]),
        "bound": None if bound is None else float(bound[at]),
        "zeros": int((values == 0).sum()),
        "nans": int(values.isnan().sum()),
    }


def _written(value: Tensor) -> str:
    return f"{value.item():.7g}" if value.is_floating_point() else str(value.item())
