"""As `ddp`, but each bucket is averaged in host memory over gloo; see `averaging.HostAveraging`."""

from __future__ import annotations

from typing import ClassVar

from typing_extensions import override

from hf_rocm_tune.cards.averaging import SyncSettings
from hf_rocm_tune.cards.ddp import Ddp
from hf_rocm_tune.cards.way import CardSettings


class Host(Ddp):
    """Replicas whose gradients are averaged without the link between the cards."""

    name: ClassVar[str] = "host"

    def __init__(self, settings: CardSettings | None = None) -> None:
        super().__init__(settings or CardSettings(sync=SyncSettings(way="host")))

    @override
    @classmethod
    def wanted(cls, settings: CardSettings) -> bool:
        return settings.world_size > 1 and settings.sync.way == "host"
