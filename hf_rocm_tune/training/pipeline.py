"""Several micro-batches of a split model under way at once: its cards compute side by side, and not in turns.

The micro-batches of an accumulation window fly: each has a thread that runs upstream's own ``training_step``. Python
runs in one of them at a time (`_Tower`), since neither Trainer nor PEFT knows of threads; it changes at the crossings
between cards, where a flight waits for its copies and verdicts while the kernels of others run. The autograd graph is
cut at each crossing, so a flight's backward passes card by card as well, and no thread of autograd's ever waits.

At each crossing flights pass in the order of their micro-batches, so every weight's gradients add up in the order of a
run without a pipeline: losses, gradients and results are the same bits, but for weights that stand in two places (a
trained embedding that is the output head too: same sums, other order), and dropout on logical cards, which share a
random generator. Memory: activations of twice as many micro-batches as there are cards.

What goes wrong in a flight ends all of them and is raised where its micro-batch is asked for. After a shortage of
memory (`training.oom`) the step is done again one by one, and fewer are under way from then on.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from hf_rocm_tune.data.loader import AccumulationWindow
from hf_rocm_tune.models.quantised import writable_buffers
from hf_rocm_tune.models.split import Crossing, Hops, SplitMover
from hf_rocm_tune.plan.ways import IN_FLIGHT
from hf_rocm_tune.training.faults import StepFaultSpec
from hf_rocm_tune.transfer.copies import Fetcher
from hf_rocm_tune.transfer.redirect import READERS

logger = logging.getLogger(__name__)

Stock = Callable[[nn.Module, Any, Any], Tensor]


class _Abandoned(BaseException):
    """Another flight has failed."""


class _Tower:
    """Lets one flight run at a time, and each stretch between two places in the order of the flights."""

    def __init__(self, home: int) -> None:
        self._home = home  # the place behind which the first card computes the loss
        self._changed = threading.Condition()
        self._waiting: dict[int, int] = {}  # by flight: the place behind which it is to go on
        self._reached: dict[int, float] = {}  # by flight: the place behind which it is, and a half when it has left
        self._running: int | None = None
        self._failed = False

    def enter(self, flight: int, place: int) -> None:
        """Wait until it is this flight's turn. Of several the one goes first that is further on.

        Raises:
            _Abandoned: another flight has failed.
        """
        with self._changed:
            self._waiting[flight] = place
            self._changed.wait_for(lambda: self._failed or (self._running is None and self._next() == flight))
            del self._waiting[flight]
            if self._failed:
                raise _Abandoned
            self._running, self._reached[flight] = flight, place

    def _next(self) -> int | None:
        # The last card waits for a loss: no forward pass is begun in front of what is left of it on the first.
        loss_under_way = any(place in (self._home, self._home + 1) for place in self._reached.values())
        ready = [
            (-place, flight)
            for flight, place in self._waiting.items()
            if all(self._reached.get(earlier, -1.0) > place for earlier in range(flight))
            and not (place == 0 and loss_under_way)
        ]
        return min(ready)[1] if ready else None

    def leave(self, flight: int, *, for_good: bool = False) -> None:
        """The next stretch is reached: others may run, also on the one that lies behind."""
        with self._changed:
            self._running = None
            self._reached[flight] = float("inf") if for_good else self._reached[flight] + 0.5
            self._changed.notify_all()

    def pause(self, flight: int) -> int:
        """Others may run, but none overtakes: the place for `enter`."""
        with self._changed:
            assert self._running == flight, "nothing is read from a card while a flight crosses"
            self._running = None
            self._changed.notify_all()
            return int(self._reached[flight])

    def fail(self) -> None:
        """No flight goes on."""
        with self._changed:
            self._failed = True
            self._changed.notify_all()

    @property
    def failed(self) -> bool:
        """Whether one has failed."""
        return self._failed


class _Flight:
    """One micro-batch on its way; see `models.split.Flight`."""

    def __init__(self, pipeline: Pipeline, number: int, fetchers: Sequence[Fetcher]) -> None:
        self._pipeline, self.number, self._fetchers = pipeline, number, fetchers
        self._cuts: list[tuple[Tensor, Tensor, Crossing]] = []

    @contextmanager
    def cross(self, place: int) -> Iterator[Callable[[int], tuple[Fetcher, Any]]]:
        pipeline = self._pipeline
        marks = [card.mark() for card in pipeline.mover.cards]
        pipeline.tower.leave(self.number)
        yield lambda card: (self._fetchers[card], marks[card])
        pipeline.tower.enter(self.number, place)

    def wait(self, tensor: Tensor) -> None:
        """Wait for what its card has queued before it is read, and let others run meanwhile."""
        mark = next(card for card in self._pipeline.mover.cards if card.serves(tensor.device)).mark()
        place = self._pipeline.tower.pause(self.number)
        if mark is not None:
            mark.synchronize()
        self._pipeline.tower.enter(self.number, place)

    def cut(self, tensor: Tensor, moved: Tensor, way: Crossing) -> Tensor:
        leaf = moved.detach().requires_grad_()
        self._cuts.append((tensor, leaf, way))
        return leaf

    def backward(self) -> None:
        """The backward passes that are left when the last stage's is done: card by card, back to the first."""
        cards = len(self._pipeline.mover.cards)
        for card in range(cards - 1, -1, -1):
            mine = [cut for cut in self._cuts if cut[2].source == card]
            self._cuts = [cut for cut in self._cuts if cut[2].source != card]  # what is done with is not kept
            used = [(tensor, leaf.grad, way) for tensor, leaf, way in mine if leaf.grad is not None]
            if used:
                with self.cross(2 * cards + 1 - card) as crossing:
                    gradients = [way.backward(gradient, *crossing(way.target)) for _, gradient, way in used]
                torch.autograd.backward([tensor for tensor, _, _ in used], gradients)


class _Patient(TorchFunctionMode):
    """Lets others run while a flight would wait for its card to read a number, as transformers does of each mask."""

    def __init__(self, flight: _Flight) -> None:
        super().__init__()
        self._flight = flight

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in READERS and args[0].device.type != "cpu":
            self._flight.wait(args[0])
        return func(*args, **(kwargs or {}))


class Pipeline:
    """Flights of a trainer whose model is split.

    Args:
        hops: the crossings of the model.
        mover: of the cards.

    Attributes:
        in_flight: how many micro-batches may be under way at once; fewer after a shortage of memory.
    """

    def __init__(self, hops: Hops, mover: SplitMover) -> None:
        self.mover, self._hops = mover, hops
        # Measured: with one more than there are cards they still wait for each other.
        self.in_flight = IN_FLIGHT * len(mover.cards)
        # For each thread: in a queue that they share, one's fetch would wait behind what another waits for.
        self._fetchers = [[card.another_fetcher() for card in mover.cards] for _ in range(self.in_flight)]
        self.tower = _Tower(len(mover.cards))
        self._window: list[Any] = []
        self._asked = 0
        self._threads: list[threading.Thread] = []

    def begin_step(self, window: list[Any]) -> None:
        """An optimizer step begins, with these micro-batches."""
        self._window, self._asked = window, 0

    def step(self, stock: Stock, model: nn.Module, inputs: Any, num_items: Any) -> Tensor:
        """One micro-step, as ``Trainer.training_step``; the first of a window sends all of them off.

        Raises:
            BaseException: what went wrong in any flight.
        """
        if self.in_flight == 1 or len(self._window) < 2:
            return stock(model, inputs, num_items)
        if self._asked == 0:
            self._start(stock, model, inputs, num_items)
        number, self._asked = self._asked, self._asked + 1
        try:
            with self._finished:
                self._finished.wait_for(lambda: self._errors or number in self._losses)
            if self._asked == len(self._window) or self._errors:
                self._join()
            if self._errors:
                raise self._errors[min(self._errors)]
            return self._losses.pop(number)
        except BaseException:
            self.tower.fail()  # an interruption of this thread, too
            self._join()
            self._errors.clear()  # they hold on to activations
            self._losses.clear()
            self._window = []  # what is left of this step, or done again, does not fly
            raise

    def fewer(self) -> bool:
        """Halve what is under way at once, after a shortage of memory; False where it was one already."""
        if self.in_flight == 1:
            return False
        logger.warning("no memory for %d micro-batches under way at once: %d", self.in_flight, self.in_flight // 2)
        self.in_flight //= 2
        return True

    def _start(self, stock: Stock, model: nn.Module, first: Any, num_items: Any) -> None:
        self.tower = _Tower(len(self.mover.cards))
        self._finished = threading.Condition()
        self._losses: dict[int, Tensor] = {}
        self._errors: dict[int, BaseException] = {}
        self._left = iter(range(len(self._window)))
        if isinstance(self._window, AccumulationWindow):
            self._window.begin_all()
        batches = [first, *(self._window[number] for number in range(1, len(self._window)))]
        job = (stock, model, batches, num_items)
        self._threads = [
            threading.Thread(target=self._fly, args=(fetchers, *job), name=f"flight {number}", daemon=True)
            for number, fetchers in enumerate(self._fetchers[: min(self.in_flight, len(batches))])
        ]
        for thread in self._threads:
            thread.start()

    def _fly(
        self, fetchers: Sequence[Fetcher], stock: Stock, model: nn.Module, batches: list[Any], num_items: Any
    ) -> None:
        """One thread: one micro-batch after the other, as long as some are left."""
        if self.mover.device.type == "cuda":
            torch.cuda.set_device(self.mover.device)  # a new thread is on card 0, whichever is ours
        while not self.tower.failed:
            with self._finished:
                number = next(self._left, None)
            if number is None:
                return
            flight = _Flight(self, number, fetchers)
            try:
                self.tower.enter(number, 0)
                with self._hops.flying(flight), _Patient(flight):
                    loss = stock(model, batches[number], num_items)
                flight.backward()
                self.tower.leave(number, for_good=True)
                batches[number] = None
                self._end(self._losses, number, loss)
            except _Abandoned:
                return
            except BaseException as error:  # raised where the micro-batch is asked for
                self.tower.fail()
                self._end(self._errors, number, error)

    def _end(self, results: dict[int, Any], number: int, result: Any) -> None:
        with self._finished:
            results[number] = result
            self._finished.notify_all()

    def _join(self) -> None:
        for thread in self._threads:
            thread.join()
        self._threads = []


def flies(trainer: Any) -> bool:
    """Whether micro-batches of this trainer may be under way side by side: there are several, nothing is harmed in a
    step on purpose, and no module writes to its buffers or offloads what it keeps for backward."""
    args, config = trainer.args, trainer.model.config
    return (
        args.gradient_accumulation_steps > 1
        and not getattr(args, "activation_offloading", False)
        and not getattr(config.get_text_config(), "output_router_logits", False)
        and StepFaultSpec.from_environment() is None
        and not any(True for _ in writable_buffers(trainer.model))
    )
