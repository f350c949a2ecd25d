"""Samples to figures: median and spread, ratios of pairs, and how they are written."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Spread:
    """What is said of a number of samples.

    Args:
        median, q1, q3, min, max: the quartiles are those of the samples themselves (inclusive method).
        n: number of samples.
    """

    median: float
    q1: float
    q3: float
    min: float
    max: float
    n: int

    @classmethod
    def of(cls, samples: Sequence[float]) -> Spread:
        """The spread of one or more samples."""
        q1, median, q3 = (
            statistics.quantiles(samples, n=4, method="inclusive") if len(samples) > 1 else [samples[0]] * 3
        )
        return cls(median=median, q1=q1, q3=q3, min=min(samples), max=max(samples), n=len(samples))

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values, to six significant digits."""
        return {name: value if name == "n" else float(f"{value:.6g}") for name, value in asdict(self).items()}

    def show(self, digits: int = 3, scale: float = 1.0) -> str:
        """``median (min .. max)``, each times `scale`."""
        low, middle, high = (f"{value * scale:.{digits}f}" for value in (self.min, self.median, self.max))
        return f"{middle} ({low} .. {high})"

    def show_quartiles(self, digits: int = 3, scale: float = 1.0) -> str:
        """``median (q1 .. q3)``, for samples of which there are many."""
        low, middle, high = (f"{value * scale:.{digits}f}" for value in (self.q1, self.median, self.q3))
        return f"{middle} ({low} .. {high})"


def ratios(samples: Sequence[float], reference: Sequence[float]) -> Spread:
    """The spread of ``samples[i] / reference[i]``: samples that were taken side by side are compared pair by pair."""
    return Spread.of([one / other for one, other in zip(samples, reference, strict=True)])


def show_bytes(nbytes: int) -> str:
    """``4 KiB``, ``64 MiB``, ``1 GiB``: powers of 1024, as sizes of buffers are given."""
    for unit, factor in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if nbytes >= factor:
            return f"{nbytes / factor:g} {unit}"
    return f"{nbytes} B"


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Columns padded to their widest cell; the first is aligned to the left, the others to the right."""
    lines = [list(header), *(list(row) for row in rows)]
    widths = [max(len(line[column]) for line in lines) for column in range(len(header))]
    return "\n".join(
        "  ".join(
            cell.ljust(width) if column == 0 else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in lines
    )
