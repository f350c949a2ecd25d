"""Faults on purpose in the preflight of a real run, so that a user can see what it would decide.

``HF_ROCM_TUNE_PREFLIGHT_FAULT="trial=ddp,kind=hang"`` harms one kind of trial:

==================== =========================================================================================
trial                kinds
==================== =========================================================================================
``pairs``            a copy from card to card: ``zeros zero_range flip stale drop unstable``, or an ending
``ddp``              the sums over the process group as it is: ``wrong zeros own absent``, or an ending
``ddp_without_p2p``  the same with ``NCCL_P2P_DISABLE=1``
``host``             the same over gloo
``ranks``            the ranks of the run themselves: ``absent``: one never joins; ``kill``, ``stop``: the one that
                     makes the trials of its machine is killed, or stopped
==================== =========================================================================================

Endings of the trial's child: ``hang stop kill crash garbage silent`` (see ``hardware.child_main``). ``where`` are words
of what is harmed (``cuda:0 to cuda:1``, ``cold``, ``repeat 1``), ``rank`` is the rank, the last unless given. Without
cards there are no pairs: ``trial=pairs`` then copies from memory to memory through the same code, so that the decision
can be seen.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from hf_rocm_tune.errors import UsageError
from hf_rocm_tune.machine.child import ENDINGS

VARIABLE = "HF_ROCM_TUNE_PREFLIGHT_FAULT"

# The kinds of transfer.raw_copies and of preflight_ranks, which import torch.
_COPY_FAULTS = ("zeros", "zero_range", "flip", "stale", "drop", "unstable")
_SUM_FAULTS = ("wrong", "zeros", "own", "absent")
_KINDS: Mapping[str, tuple[str, ...]] = {
    "pairs": (*_COPY_FAULTS, *ENDINGS),
    "ddp": (*_SUM_FAULTS, *ENDINGS),
    "ddp_without_p2p": (*_SUM_FAULTS, *ENDINGS),
    "host": (*_SUM_FAULTS, *ENDINGS),
    "ranks": ("absent", "kill", "stop"),
}
_KEYS = ("trial", "kind", "where", "rank")


@dataclass(frozen=True, kw_only=True)
class PreflightFault:
    """What is harmed.

    Attributes:
        trial, kind: see the module's description.
        where: only what has these words in it.
        rank: whom it hits; None: the last rank.

    Raises:
        UsageError: there is no such trial, or it has no such kind.
    """

    trial: str
    kind: str
    where: str = ""
    rank: int | None = None

    def __post_init__(self) -> None:
        if self.trial not in _KINDS:
            raise UsageError(f"{VARIABLE}: trial={self.trial} is not valid; expected one of {' '.join(_KINDS)}")
        if self.kind not in _KINDS[self.trial]:
            kinds = " ".join(_KINDS[self.trial])
            raise UsageError(f"{VARIABLE}: kind={self.kind} is not valid for {self.trial}; expected one of {kinds}")

    @classmethod
    def from_environment(cls, environ: Mapping[str, str]) -> PreflightFault | None:
        """The fault that the variable asks for; None where it is unset or empty.

        Raises:
            UsageError: names what is unknown, missing, given twice or not valid, and what is valid.
        """
        values: dict[str, str] = {}
        for item in filter(None, (piece.strip() for piece in environ.get(VARIABLE, "").split(","))):
            key, separator, value = (piece.strip() for piece in item.partition("="))
            if not separator or key not in _KEYS or key in values:
                raise UsageError(f"{VARIABLE}: '{item}' is not understood; give each of {' '.join(_KEYS)} once")
            values[key] = value
        if not values:
            return None
        missing = [key for key in ("trial", "kind") if key not in values]
        if missing:
            raise UsageError(f"{VARIABLE}: '{missing[0]}' is missing; for example trial=ddp,kind=hang")
        rank = values.pop("rank", None)
        if rank is not None and not rank.isdecimal():
            raise UsageError(f"{VARIABLE}: rank={rank} is not valid; give the number of a rank")
        return cls(**values, rank=None if rank is None else int(rank))

    def of(self, trial: str) -> dict[str, Any] | None:
        """The fault as the child of a trial takes it; None where it is for another trial."""
        if trial != self.trial:
            return None
        # An ending without words would come before anything was tried.
        first = "copying" if trial == "pairs" else "summing"
        where = self.where or (first if self.kind in ENDINGS else "")
        return {"kind": self.kind, "where": where} | ({} if self.rank is None else {"rank": self.rank})

    def text(self) -> str:
        """As it was asked for."""
        given = {"trial": self.trial, "kind": self.kind, "where": self.where, "rank": self.rank}
        return ",".join(f"{key}={value}" for key, value in given.items() if value not in ("", None))
