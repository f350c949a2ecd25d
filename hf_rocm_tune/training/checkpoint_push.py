"""Pushing while a run lasts and at its end: only directories that were verified and have a manifest, by a publisher.

Upstream pushes from within its saves; here whoever uploads is given a directory when it is complete.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from accelerate.utils import broadcast_object_list

from hf_rocm_tune.errors import UsageError
from hf_rocm_tune.training.stage import Stage

if TYPE_CHECKING:
    from transformers import Trainer as _Base
else:
    _Base = object


class Publisher(Protocol):
    """Who uploads; what is uploaded is a directory that has been verified and has its manifest."""

    def checkpoint(self, directory: Path) -> None:
        """A checkpoint is in place; a Hub that fails must not end the training."""

    def result(self, directory: Path) -> Any:
        """The run is finished; raises where the result is not on the Hub when this returns."""


class PublishMixin(_Base):
    """What `checkpoint.VerifiedCheckpointMixin` does about the Hub; it saves and seals.

    Attributes:
        publisher: who uploads, on the first rank; the caller sets it before a training with ``push_to_hub``.
    """

    publisher: Publisher | None = None
    _stage: Stage | None = None

    if TYPE_CHECKING:

        def _is_sealed(self, destination: Path) -> bool: ...

        def seal_output(self, output_dir: str | None = None, *, also: Iterable[str] = ()) -> None: ...

    def train(self, *arguments: Any, **keywords: Any) -> Any:
        """As upstream; a push for which nobody is there is refused at the beginning, not at the first checkpoint."""
        if self.args.push_to_hub:
            self._require_publisher()
        return super().train(*arguments, **keywords)

    def init_hf_repo(self, token: str | None = None, private: bool | None = None) -> None:
        """Upstream makes the repository here, while the trainer is built; whoever uploads has made it, or will."""
        del token, private
        self.hub_model_id = self.args.hub_model_id

    def push_to_hub(self, *arguments: Any, **keywords: Any) -> Any:
        """Save and seal the result where that has not been done, and have the publisher upload it. Collective.

        Upstream's arguments are not used: the publisher has its own.
        """
        del arguments, keywords
        self._require_publisher()
        output_dir = Path(self.args.output_dir)
        if not self._is_sealed(output_dir):
            self.save_model(_internal_call=True)
            self.seal_output()
        if self.publisher is None or not self.is_world_process_zero():
            return None
        self.callback_handler.on_push_begin(self.args, self.state, self.control)
        return self.publisher.result(output_dir)

    def _push_from_checkpoint(self, checkpoint_folder: str) -> None:
        if self._stage is not None:
            self._stage.push_wanted = True
        elif self.publisher is not None and self.is_world_process_zero():
            self.callback_handler.on_push_begin(self.args, self.state, self.control)
            self.publisher.checkpoint(Path(checkpoint_folder))

    def _require_publisher(self) -> None:
        if not broadcast_object_list([self.publisher is not None])[0]:
            raise UsageError(
                "push_to_hub needs a publisher: set trainer.publisher to a hf_rocm_tune.publish.hub_during.Publisher, "
                "or train without it and run `hf-rocm-tune push` on the result"
            )
