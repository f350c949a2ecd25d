"""What faults to inject, parsed from the text that a user or a test gives.

``HF_ROCM_TUNE_FAULT="kind=zero,rate=0.02,seed=7,persist=0"``
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from hf_rocm_tune.errors import UsageError
from hf_rocm_tune.machine.variables import read_pairs
from hf_rocm_tune.transfer.report import BETWEEN_CARDS, STAGES

VARIABLE = "HF_ROCM_TUNE_FAULT"
KINDS = ("zero", "zero_range", "flip", "stale", "swap", "drop", "late", "after")
FAULT_STAGES = (*STAGES, BETWEEN_CARDS, "gradients", "gathered")
"""What can be harmed: all that crosses, and averages of gradients, which other libraries make."""


@dataclass(frozen=True, kw_only=True)
class FaultSpec:
    """Which transfers to harm, and how.

    Attributes:
        kind: ``zero`` the tensor, ``zero_range`` a part of it, ``flip`` one bit, ``stale`` bytes of an earlier
            transfer, ``swap`` two words, ``drop`` the copy, ``late``: it lands only after the digest was taken,
            ``after``: right when verified, one bit flipped just after the verdict.
        rate: share of matching tensors that is hit, 0 to 1.
        seed: the same seed hits the same transfers, whatever the order of the threads.
        persist: whether each retry of a transfer is hit as well.
        stage: only this stage; in ``gradients`` a bucket's average is harmed, by the kinds that need no copy of ours
            (``zero zero_range flip stale swap``), and so is in ``buckets`` what comes to the host, and in ``gathered``
            what FSDP2 gathers of a layer's weights.
        tensor: only names that match this pattern (``fnmatch``).
        first: the matching transfers before this one (counted from 1) are left alone.
        count: stop after this many injections.
    """

    kind: str
    rate: float = 1.0
    seed: int = 0
    persist: bool = False
    stage: str | None = None
    tensor: str = "*"
    first: int = 1
    count: int | None = None

    def __post_init__(self) -> None:
        _check("kind", self.kind, self.kind in KINDS, "one of " + " ".join(KINDS))
        _check("rate", self.rate, 0 <= self.rate <= 1, "a number from 0 to 1")
        _check(
            "stage", self.stage, self.stage is None or self.stage in FAULT_STAGES, "one of " + " ".join(FAULT_STAGES)
        )
        _check("first", self.first, self.first >= 1, "a number from 1 on")
        _check("count", self.count, self.count is None or self.count >= 1, "a number from 1 on")

    @classmethod
    def parse(cls, text: str) -> FaultSpec:
        """Read ``key=value`` pairs joined by commas.

        Raises:
            UsageError: names the key that is unknown, given twice, missing or has a wrong value, and what is valid.
        """
        values: dict[str, object] = {}
        kind = f"kind= one of {' '.join(KINDS)}"
        for key, value in read_pairs(VARIABLE, text, _READERS, required={"kind": kind}).items():
            try:
                values[key] = _READERS[key](value)
            except ValueError:
                raise UsageError(f"{VARIABLE}: {key}={value} is not valid; expected {_EXPECTED[key]}") from None
        return cls(**values)  # type: ignore[arg-type]  # each value was read by its own key's reader

    @classmethod
    def from_environment(cls, environ: Mapping[str, str] = os.environ) -> FaultSpec | None:
        """The faults that `HF_ROCM_TUNE_FAULT` asks for; None when it is unset or empty.

        Raises:
            UsageError: see `parse`.
        """
        text = environ.get(VARIABLE, "").strip()
        return cls.parse(text) if text else None


def _check(key: str, value: object, valid: bool, expected: str) -> None:
    if not valid:
        raise UsageError(f"{VARIABLE}: {key}={value} is not valid; expected {expected}")


def _flag(value: str) -> bool:
    if value not in ("0", "1"):
        raise ValueError(value)
    return value == "1"


_READERS: dict[str, Callable[[str], object]] = {
    "kind": str,
    "rate": float,
    "seed": int,
    "persist": _flag,
    "stage": str,
    "tensor": str,
    "first": int,
    "count": int,
}
_EXPECTED = {
    "rate": "a number from 0 to 1",
    "seed": "a whole number",
    "persist": "0 or 1",
    "first": "a whole number from 1 on",
    "count": "a whole number from 1 on",
}
