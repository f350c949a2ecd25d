"""Transfers with no fault put in: whatever is reported here is a false alarm, or a fault of the machine itself."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

import torch

from hf_rocm_tune.doctor.catalogue import SIZES, SLOT_BYTES, Samples
from hf_rocm_tune.doctor.poisoned import poisoned
from hf_rocm_tune.doctor.sending import Listener, begin, same_bytes
from hf_rocm_tune.errors import CorruptionError
from hf_rocm_tune.transfer import STAGES, Mover, TransferSettings

_ORDINARY_BYTES = 1024
_LARGE_EVERY = 50


@dataclass(kw_only=True)
class CleanTransfers:
    """What became of transfers that nobody harmed.

    Attributes:
        transfers: how many; a batch of three tensors is one.
        false_alarms: reports of tensors whose bytes, read back, were right.
        corrupted: reports of tensors whose bytes were really different: this machine corrupts transfers.
        missed: tensors that counted as verified and, read back, were wrong.
        example: the first report, for the user.
    """

    transfers: int = 0
    false_alarms: int = 0
    corrupted: int = 0
    missed: int = 0
    example: str | None = None

    @property
    def good(self) -> bool:
        """Whether nothing was reported and nothing was wrong."""
        return not (self.false_alarms or self.corrupted or self.missed)


def send_clean(
    device: torch.device, *, transfers: int, seed: int, on_transfer: Callable[[], None], mover: Mover | None = None
) -> CleanTransfers:
    """Send tensors of every dtype and size, through all stages in turn, and compare what arrived byte by byte.

    Args:
        device: ``cuda`` or ``cpu``.
        transfers: how many.
        seed: of what is sent.
        on_transfer: called after each.
        mover: sends instead of a new one; its report must be a `Listener`.
    """
    found = CleanTransfers()
    samples, rng = Samples(seed + 1), random.Random(seed)
    settings = TransferSettings(slot_bytes=SLOT_BYTES, slots=3)
    with mover or Mover(device, settings=settings, report=Listener(), backend=poisoned(device)) as sender:
        for number in range(transfers):
            # Most are small: it is the number of verdicts that shows how rare a false alarm is.
            largest = SIZES[-1] if rng.randrange(_LARGE_EVERY) == 0 else _ORDINARY_BYTES
            _one(sender, STAGES[number % len(STAGES)], samples, largest, found)
            on_transfer()
    return found


def _one(mover: Mover, stage: str, samples: Samples, largest: int, found: CleanTransfers) -> None:
    tensor = samples.tensor(largest=largest)
    tensors = samples.batch(tensor, "tensor") if stage == "batches" else {"tensor": tensor}
    arrived: dict[str, torch.Tensor] = {}
    try:
        arrived = begin(mover, stage, tensors)
        mover.settle(arrived)
    except CorruptionError as error:
        found.example = found.example or str(error)
    assert isinstance(mover.report, Listener)
    for row in mover.report.take():
        # "late": it was right when it was read again, which is also how a wrong verdict looks.
        found.false_alarms += row["kind"] == "late"
        found.corrupted += row["kind"] != "late"
        found.example = found.example or f"{row['stage']} tensor: {row['kind']}, {row['outcome']}"
    found.missed += sum(not same_bytes(tensor, tensors[name]) for name, tensor in arrived.items())
    found.transfers += 1
