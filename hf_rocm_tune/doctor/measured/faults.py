"""Faults on purpose in a measured check, so that a user can see that it would find one.

``HF_ROCM_TUNE_DOCTOR_FAULT="check=round_trip,kind=zeros,where=page-locked"``
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from hf_rocm_tune.doctor.measured import MEASURED
from hf_rocm_tune.errors import UsageError
from hf_rocm_tune.machine.child import ENDINGS

VARIABLE = "HF_ROCM_TUNE_DOCTOR_FAULT"

_KEYS = ("check", "kind", "where")


@dataclass(frozen=True, kw_only=True)
class DoctorFault:
    """Which check is harmed, and how.

    Attributes:
        check: a key of ``MEASURED``.
        kind: one of that check's faults, or an ending of its process (``child_main.ENDINGS``).
        where: only where these words are part of what the check says it is doing.

    Raises:
        UsageError: the check or the kind does not exist.
    """

    check: str
    kind: str
    where: str = ""

    def __post_init__(self) -> None:
        if self.check not in MEASURED:
            raise UsageError(f"{VARIABLE}: check={self.check} is not valid; expected one of {' '.join(MEASURED)}")
        kinds = (*MEASURED[self.check].faults, *ENDINGS)
        if self.kind not in kinds:
            raise UsageError(
                f"{VARIABLE}: kind={self.kind} is not valid for {self.check}; expected one of {' '.join(kinds)}"
            )

    @classmethod
    def parse(cls, text: str) -> DoctorFault:
        """Read ``key=value`` pairs joined by commas.

        Raises:
            UsageError: names what is unknown, missing, given twice or not valid, and what is valid.
        """
        values: dict[str, str] = {}
        for item in filter(None, (piece.strip() for piece in text.split(","))):
            key, separator, value = (piece.strip() for piece in item.partition("="))
            if not separator or key not in _KEYS or key in values:
                raise UsageError(f"{VARIABLE}: '{item}' is not understood; give each of {' '.join(_KEYS)} once")
            values[key] = value
        missing = [key for key in ("check", "kind") if key not in values]
        if missing:
            raise UsageError(f"{VARIABLE}: '{missing[0]}' is missing; for example check=round_trip,kind=zeros")
        return cls(**values)

    @classmethod
    def from_environment(cls, environ: Mapping[str, str]) -> DoctorFault | None:
        """The fault that the variable asks for; None where it is unset or empty.

        Raises:
            UsageError: see `parse`.
        """
        text = environ.get(VARIABLE, "").strip()
        return cls.parse(text) if text else None

    def request(self) -> dict[str, str]:
        """As a check's child takes it."""
        return {"kind": self.kind, "where": self.where}
