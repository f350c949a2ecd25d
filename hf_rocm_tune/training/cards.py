"""Where model cards go: into every directory that is saved, in place of the ones that TRL and PEFT write.

TRL writes a card into the output directory at each checkpoint, over whatever is there; PEFT writes an empty form beside
each adapter. With a `CardMixin.card_writer` neither is left: it writes the card into each checkpoint and each result
when their tensors have been compared and before the manifest is made, so that the manifest covers it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from typing_extensions import override

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

    from hf_rocm_tune.training.checkpoint import VerifiedCheckpointMixin as _Base
    from hf_rocm_tune.training.readback import Readback
else:
    _Base = object


class CardMixin(_Base):
    """Stands in front of `VerifiedCheckpointMixin`; see the module's description.

    Attributes:
        card_writer: writes ``README.md`` into the directory that it is given, on rank 0; None for upstream's cards.
    """

    card_writer: Callable[[Path], None] | None = None

    @override
    def create_model_card(self, *arguments: Any, **keywords: Any) -> None:
        """As upstream, where nobody else writes the card."""
        if self.card_writer is None:
            super().create_model_card(*arguments, **keywords)

    def _verified(self, directory: Path, states: Mapping[str, Any]) -> dict[str, Readback]:
        # The last that is done before a directory gets its manifest or its name.
        found = super()._verified(directory, states)
        if self.card_writer is not None and self.is_world_process_zero():
            self.card_writer(directory)
        return found
