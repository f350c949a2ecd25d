"""One door for a model that lies on several cards: a mover for each card, and one in front that knows which.

Batches and whatever else is not of a layer go to the first card. Each card has its own ring, queue, ladder and
counters; the counters add up in one report, and its incidents say which card.

On a machine without accelerators the cards are logical: all of them are host memory, and each has a mover of its own
all the same, so everything between them is really copied and verified.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from hf_rocm_tune import upstream
from hf_rocm_tune.models.split import Split
from hf_rocm_tune.transfer import Digest, FaultSpec, Mover, TransferReport, TransferSettings
from hf_rocm_tune.transfer.fetch import Fetched

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel

    from hf_rocm_tune.transfer import Mover


class CardReport(TransferReport):
    """The counters of one card, which go into the report of the whole as well.

    Args:
        whole: the report of all cards.
        card: number of this one.
    """

    def __init__(self, whole: TransferReport, card: int) -> None:
        super().__init__()
        self._whole, self._card = whole, card

    def add(self, stage: str, **increments: float) -> None:
        """As `TransferReport.add`, here and in the whole."""
        super().add(stage, **increments)
        self._whole.add(stage, **increments)

    def incident(self, row: Mapping[str, Any]) -> None:
        """Into the whole, with the card's number."""
        self._whole.incident({**row, "card": self._card})


class SplitMover(Mover):
    """Has the methods of a mover, and hands each call to the mover of the card that it concerns.

    Args:
        split: which layer is on which card.
        devices: one for each card; all ``cpu`` for logical cards.
        settings, faults: as for `Mover`, the same for each card. Faults are counted on each card by itself.

    Attributes:
        cards: the movers of the cards, in order.
        logical: the cards share one device.
        report: of all cards together.
    """

    # Not the base's: it would make a ring and a queue that nobody uses.
    def __init__(
        self,
        split: Split,
        devices: Sequence[torch.device],
        *,
        settings: TransferSettings | None = None,
        faults: FaultSpec | None = None,
    ) -> None:
        assert len(devices) == split.cards, "a device for each card"
        self.split = split
        self.settings = settings or TransferSettings()
        self.report = TransferReport()
        self.card_reports = tuple(CardReport(self.report, card) for card in range(split.cards))
        self.cards = tuple(
            Mover(device, settings=self.settings, report=report, faults=faults)
            for device, report in zip(devices, self.card_reports, strict=True)
        )
        self.device = self.cards[0].device
        self.logical = len({mover.device for mover in self.cards}) == 1

    # ---- moving ---------------------------------------------------------------------------------------------

    def move(self, tensor: Tensor, *, name: str, stage: str = "weights", source: str | None = None) -> Tensor:
        """As `Mover.move`, to the card that the name belongs to."""
        return self.cards[self.split.card_of(name)].move(tensor, name=name, stage=stage, source=source)

    def serves(self, device: torch.device) -> bool:
        """Whether one of the cards is this device."""
        return any(mover.serves(device) for mover in self.cards)

    def move_to(
        self, device: torch.device, tensor: Tensor, *, name: str, stage: str = "weights", source: str | None = None
    ) -> Tensor:
        """As `Mover.move` for a weight, to the card that is this device; among logical cards the name decides."""
        card = self if self.logical else next(mover for mover in self.cards if mover.serves(device))
        return card.move(tensor, name=name, stage=stage, source=source)

    def fetched(self, tensor: Tensor, *, name: str, stage: str) -> AbstractContextManager[Fetched]:
        """As `Mover.fetched`, from the card that the tensor is on; from the first among logical cards."""
        card = next((mover for mover in self.cards if mover.serves(tensor.device)), self.cards[0])
        return card.fetched(tensor, name=name, stage=stage)

    def begin(self, tree: Any, *, stage: str = "batches") -> Any:
        """As `Mover.begin`, to the first card."""
        return self.cards[0].begin(tree, stage=stage)

    def settle(self, tree: Any) -> None:
        """As `Mover.settle`."""
        self.cards[0].settle(tree)

    # ---- what is known --------------------------------------------------------------------------------------

    @property
    def loaded(self) -> dict[tuple[str, str], Digest]:  # type: ignore[override]  # of all cards
        """As `Mover.loaded`."""
        return {key: value for mover in self.cards for key, value in mover.loaded.items()}

    @property
    def step(self) -> int | None:
        """Training step that incidents carry."""
        return self.cards[0].step

    @step.setter
    def step(self, value: int | None) -> None:
        for mover in self.cards:
            mover.step = value

    def host_source(self, tensor: Tensor) -> Tensor | None:
        """As `Mover.host_source`."""
        return self.cards[0].host_source(tensor)

    def is_pending(self, tensor: Tensor) -> bool:
        """As `Mover.is_pending`."""
        return self.cards[0].is_pending(tensor)

    def provenance(self, tensor: Tensor) -> str | None:
        """As `Mover.provenance`, by whichever card knows the tensor."""
        return self._knower(tensor).provenance(tensor)

    def reason(self, tensor: Tensor) -> str | None:
        """As `Mover.reason`."""
        return self._knower(tensor).reason(tensor)

    def digest_of(self, tensor: Tensor) -> Digest | None:
        """As `Mover.digest_of`."""
        return self._knower(tensor).digest_of(tensor)

    def mark_derived(self, tensor: Tensor, reason: str, *, digest: Digest | None = None) -> None:
        """As `Mover.mark_derived`."""
        self._knower(tensor).mark_derived(tensor, reason, digest=digest)

    def mark_trained(self, tensor: Tensor, reason: str) -> None:
        """As `Mover.mark_trained`."""
        self._knower(tensor).mark_trained(tensor, reason)

    def mark_unverified(self, tensor: Tensor, reason: str) -> None:
        """As `Mover.mark_unverified`."""
        self._knower(tensor).mark_unverified(tensor, reason)

    def inject(self, tensor: Tensor, *, name: str, stage: str, number: int, attempt: int) -> None:
        """As `Mover.inject`."""
        self.cards[0].inject(tensor, name=name, stage=stage, number=number, attempt=attempt)

    def fault_injection(self) -> dict[str, Any] | None:
        """As `Mover.fault_injection`; faults of all cards are counted."""
        found = [row for mover in self.cards if (row := mover.fault_injection()) is not None]
        return {**found[0], "injected": sum(row["injected"] for row in found)} if found else None

    def close(self) -> None:
        """Close all of them."""
        for mover in self.cards:
            mover.close()

    def _knower(self, tensor: Tensor) -> Mover:
        return next((mover for mover in self.cards if mover.provenance(tensor) is not None), self.cards[0])


# ----------------------------------------------------------------------------------------------------
# Loading onto several cards: each weight goes to its card, and transformers attaches no copies of its own.
#
# ``from_pretrained`` with a device map of several devices lets Accelerate put hooks on the model that move
# activations between them by plain ``.to``. They are left out here: `split_hops` carries what has to cross.


def device_map(mover: Mover) -> dict[str, torch.device]:
    """What ``from_pretrained`` is told: one device, or the cards of a split."""
    if isinstance(mover, SplitMover) and not mover.logical:
        return mover.split.device_map([card.device for card in mover.cards])
    return {"": mover.device}


@contextmanager
def without_dispatch() -> Iterator[None]:
    """Within the block transformers leaves a model as it was loaded.

    Raises:
        SeamError: transformers has moved the place.
    """

    def make(stock: Callable[..., Any]) -> Callable[..., None]:
        del stock
        return lambda *arguments, **keywords: None

    with upstream.replaced("dispatch", make):
        yield


def tell_of_devices(model: PreTrainedModel, mover: Mover) -> None:
    """Says on the model where its parts are: transformers' Trainer then neither moves nor replicates it."""
    if isinstance(mover, SplitMover) and not mover.logical:
        model.hf_device_map = device_map(mover)
