"""What comes before, and what comes after, all other callbacks at each event of a trainer."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from transformers import TrainerCallback

if TYPE_CHECKING:
    from transformers import Trainer

EVENTS = tuple(name for name in dir(TrainerCallback) if name.startswith("on_"))


class EventCallback(TrainerCallback):
    """Calls ``notify`` with the name of each event. Takes no decision: upstream's control stays as it is."""

    def __init__(self, notify: Callable[[str], None]) -> None:
        for event in EVENTS:
            setattr(self, event, partial(_call, notify, event))


def surround(trainer: Trainer, before: Callable[[str], None], after: Callable[[str], None]) -> None:
    """Calls ``before`` and ``after`` around all callbacks of the trainer, also those that are added later."""
    callbacks, last = trainer.callback_handler.callbacks, EventCallback(after)

    def begin(event: str) -> None:
        if callbacks[-1] is not last:  # one was added; a list may be changed behind the place where it is read
            callbacks.remove(last)
            callbacks.append(last)
        before(event)

    callbacks.insert(0, EventCallback(begin))
    callbacks.append(last)


def _call(notify: Callable[[str], None], event: str, *_: Any, **__: Any) -> None:
    notify(event)
