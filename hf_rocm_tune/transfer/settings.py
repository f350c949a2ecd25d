"""Settings of the transfer engine."""

from __future__ import annotations

from dataclasses import dataclass

from hf_rocm_tune.errors import UsageError

VERIFY_MODES = ("full", "sample", "off")
CORRUPTION_MODES = ("recover", "stop")


@dataclass(frozen=True, kw_only=True)
class TransferSettings:
    """How transfers are verified, and what happens on a mismatch.

    Attributes:
        verify: ``full``: every transfer; ``sample``: the first and every `sample_every`-th of each stage; ``off``:
            none. What is not verified is counted as such.
        on_corruption: ``recover`` sends again in other ways until it is right; ``stop`` raises at the first mismatch.
        sample_every: see `verify`.
        slots: staging slots in the ring.
        slot_bytes: bytes of a slot, a multiple of 256; None: 32 MiB page-locked on an accelerator, up to 8 MiB on the
            host. Host memory of the ring is at most ``slots * slot_bytes``.
        keep_route_after: recoveries by the same way of sending after which it is used from the start.

    Raises:
        UsageError: a value that is not valid, naming it.
    """

    verify: str = "full"
    on_corruption: str = "recover"
    sample_every: int = 16
    slots: int = 4
    slot_bytes: int | None = None
    keep_route_after: int = 3

    def __post_init__(self) -> None:
        if self.verify not in VERIFY_MODES:
            raise UsageError(f"verify is '{self.verify}'; choose one of {', '.join(VERIFY_MODES)}")
        if self.on_corruption not in CORRUPTION_MODES:
            raise UsageError(f"on_corruption is '{self.on_corruption}'; choose one of {', '.join(CORRUPTION_MODES)}")
        for name in ("sample_every", "slots", "keep_route_after"):
            value = getattr(self, name)
            if value < 1:
                raise UsageError(f"{name} is {value}; give a whole number from 1 on")
        if self.slot_bytes is not None and (self.slot_bytes < 4096 or self.slot_bytes % 256):
            raise UsageError(f"slot_bytes is {self.slot_bytes}; give a multiple of 256, at least 4096")
