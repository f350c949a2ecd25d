"""One process splits a model by layers over several cards, which take turns or run a pipeline of micro-batches.

Every tensor between cards goes through the movers (`models.split`).
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grads_with_norm_
from torch.overrides import TorchFunctionMode
from typing_extensions import override

from hf_rocm_tune.cards.strategy import ParallelStrategy, Stock
from hf_rocm_tune.data.loader import AccumulationWindow
from hf_rocm_tune.models.quantised import running_statistics
from hf_rocm_tune.models.split import Crossing, Hops, SplitMover, layer_stack
from hf_rocm_tune.models.tensors import tensors_of
from hf_rocm_tune.models.trainer_parts import OwningTrainer
from hf_rocm_tune.transfer import Mover
from hf_rocm_tune.transfer.report import BETWEEN_CARDS
from hf_rocm_tune.transfer.to_host import Fetcher

logger = logging.getLogger(__name__)

_READERS = (Tensor.item, Tensor.__float__, Tensor.__int__, Tensor.__bool__, Tensor.tolist)
"""Calls that read numbers from a card, for which the caller waits."""
IN_FLIGHT = 2
"""Micro-batches in flight for each card."""


class Split(ParallelStrategy):
    """Layers of one model on several cards. The mover must be a `SplitMover`."""

    name: ClassVar[str] = "split"
    flag: ClassVar[str] = "--split_layers"
    mover: SplitMover
    _pipeline: Pipeline | None = None
    excludes: ClassVar[Mapping[str, str]] = {
        "several processes": "a split runs in one process; start it without --num_processes",
        "FSDP": "choose one of them",
        "DeepSpeed": "choose one of them",
        "--fp16": "its gradient scaler copies between cards; use --bf16",
        "--auto_fit": "it plans for one card; choose the batch with `hf-rocm-tune plan --cards 2`",
        "--activation_offloading": "it serves one card",
        "--torch_compile": "leave it out",
        "--init_lora_weights": "this is untested; leave it out",
        "--adapter_name_or_path": "this is untested; merge the adapter into the base first",
        "--attn_implementation flex_attention": "its masks are not tensors; leave it out",
    }

    @override
    def attach(self, accelerator: Any, mover: Mover) -> None:
        super().attach(accelerator, mover)
        accelerator.clip_grad_norm_ = self._clip

    @override
    def connect(self, trainer: OwningTrainer, *, one_by_one: bool) -> None:
        self._model = model = trainer.model
        base: Any = model.get_base_model() if hasattr(model, "peft_config") else model
        hops = Hops(self.mover)
        hops.install(base.base_model, layer_stack(base, base.config)[1])
        if self.settings.pipeline and not one_by_one and can_pipeline(trainer):
            self._pipeline = Pipeline(hops, self.mover)

    @override
    def begin_step(self, window: list[Any]) -> None:
        if self._pipeline is not None:
            self._pipeline.begin_step(window)

    @override
    def stepping(self, stock: Stock) -> Stock:
        return stock if self._pipeline is None else partial(self._pipeline.step, stock)

    @override
    def fewer_in_flight(self) -> bool:
        return self._pipeline is not None and self._pipeline.halve()

    @override
    def devices(self, first: torch.device) -> tuple[torch.device, ...]:
        return (first,) if self.mover.logical else tuple(card.device for card in self.mover.cards)

    def _clip(self, *given: Any, **more: Any) -> Tensor:
        card_of = self.mover.split.card_of
        cards = {id(parameter): card_of(name) for name, parameter in self._model.named_parameters()}
        return clip_over_cards(self.mover, cards, *given, **more)

    @override
    def describe(self, model: nn.Module) -> dict[str, Any]:
        mover = self.mover
        held = [0] * len(mover.cards)
        for name, tensor in tensors_of(model):
            held[mover.split.card_of(name)] += tensor.numel() * tensor.element_size()
        rows = []
        for number, (layers, card) in enumerate(zip(mover.split.ranges, mover.cards, strict=True)):
            counted = mover.card_reports[number].to_dict()
            device = str(card.device)
            if mover.logical:
                device += " (logical)"
            row = {
                "card": number,
                "device": device,
                "layers": [layers.start, layers.stop - 1],
                "model_bytes": held[number],
                "weights": counted["weights"],
                BETWEEN_CARDS: counted[BETWEEN_CARDS],
            }
            rows.append(row)
        in_flight = self._pipeline.in_flight if self._pipeline else 1
        split = {
            "layers": mover.split.stack,
            "method": "staged through the host",
            "micro_batches_in_flight": in_flight,
            "cards": rows,
        }
        return {**super().describe(model), "split": split}


@torch.no_grad()
def clip_over_cards(
    mover: SplitMover,
    card_of: Mapping[int, int],
    parameters: Iterable[nn.Parameter],
    max_norm: float,
) -> Tensor:
    """As ``torch.nn.utils.clip_grad_norm_``, which would copy the norms to the first card by peer copies.

    The norms of the gradients are summed in the same order, so the result is torch's bit for bit, except that the last
    sum is computed on the host.
    """
    trained = [parameter for parameter in parameters if parameter.grad is not None]
    on_card: dict[int, list[int]] = {0: []}  # numbers of the trained parameters
    for number, parameter in enumerate(trained):
        on_card.setdefault(card_of[id(parameter)], []).append(number)
    norms: dict[int, Tensor] = {}
    for card, mine in sorted(on_card.items()):
        if not mine:
            continue
        gradients = [trained[number].grad for number in mine]
        there = torch.stack([torch.linalg.vector_norm(gradient) for gradient in gradients if gradient is not None])
        with mover.cards[card].fetched(there, name=f"gradient_norms.from{card}", stage=BETWEEN_CARDS) as fetched:
            norms |= dict(zip(mine, fetched.host.clone(), strict=True))
    on_host = torch.zeros(1)
    if trained:
        on_host = torch.stack([norms[number] for number in range(len(trained))])
    total = torch.linalg.vector_norm(on_host)
    totals = {}
    for card, mine in sorted(on_card.items()):
        totals[card] = mover.cards[card].move(total, name=f"gradient_norm.to{card}", stage=BETWEEN_CARDS)
        clip_grads_with_norm_([trained[number] for number in mine], max_norm, totals[card])
    return totals[0]


# ---- a pipeline: the cards compute at the same time instead of taking turns --------------------------------------
#
# Each micro-batch of an accumulation window has a thread that runs upstream's own ``training_step``. Only one thread
# runs Python at a time (`_Scheduler`); they switch at the crossings between cards, where kernels of others run while a
# micro-batch waits for its copies. The autograd graph is cut at each crossing, so backward also runs card by card.
# Micro-batches pass each crossing in order, so results are bit-identical to those without a pipeline, except for
# weights used in two places and dropout on logical cards. Memory: activations of twice as many micro-batches as cards.


class _Cancelled(BaseException):
    """Another micro-batch has failed."""


class _Scheduler:
    """Lets one micro-batch run at a time, and lets micro-batches begin each stage in order.

    A stage is what runs between two crossings: forward on card 0, 1 ..., then ``loss_stage``, the loss on the first
    card, then backward.
    """

    def __init__(self, loss_stage: int) -> None:
        self._loss_stage = loss_stage
        self._changed = threading.Condition()
        self._waiting: dict[int, int] = {}  # by micro-batch: the stage that it waits for
        self._reached: dict[int, float] = {}  # by micro-batch: its current stage, plus a half when the stage is done
        self._running: int | None = None
        self.failed = False

    def enter(self, number: int, stage: int) -> None:
        """Wait until this micro-batch may run ``stage``. Of several that may run, the one furthest on goes first."""
        with self._changed:
            self._waiting[number] = stage
            self._changed.wait_for(lambda: self.failed or (self._running is None and self._next() == number))
            del self._waiting[number]
            if self.failed:
                raise _Cancelled
            self._running = number
            self._reached[number] = stage

    def _next(self) -> int | None:
        # The last card waits for a loss: no forward pass begins before the rest of it has run on the first card.
        loss_running = any(stage in (self._loss_stage, self._loss_stage + 1) for stage in self._reached.values())
        ready = []
        for number, stage in self._waiting.items():
            if stage == 0 and loss_running:
                continue
            if all(self._reached.get(earlier, -1.0) > stage for earlier in range(number)):
                ready.append((-stage, number))
        if not ready:
            return None
        _, number = min(ready)
        return number

    def leave(self, number: int, *, for_good: bool = False) -> None:
        """The micro-batch has ended its stage: others may run, in that stage too."""
        with self._changed:
            self._running = None
            self._reached[number] = float("inf") if for_good else self._reached[number] + 0.5
            self._changed.notify_all()

    def pause(self, number: int) -> int:
        """Let others run within the current stage, without overtaking. Returns the stage, for `enter`."""
        with self._changed:
            assert self._running == number, "nothing is read from a card during a crossing"
            self._running = None
            self._changed.notify_all()
            return int(self._reached[number])

    def fail(self) -> None:
        with self._changed:
            self.failed = True
            self._changed.notify_all()


class _Flight:
    def __init__(self, pipeline: Pipeline, number: int, fetchers: Sequence[Fetcher]) -> None:
        self._pipeline = pipeline
        self.number = number
        self._fetchers = fetchers
        self._cuts: list[tuple[Tensor, Tensor, Crossing]] = []

    @contextmanager
    def cross(self, stage: int) -> Iterator[Callable[[int], tuple[Fetcher, Any]]]:
        """Around all that crosses at one stage; gives, by card, what fetches from it, and the mark of its queue."""
        pipeline = self._pipeline
        marks = [card.mark() for card in pipeline.mover.cards]
        pipeline.scheduler.leave(self.number)
        yield lambda card: (self._fetchers[card], marks[card])
        pipeline.scheduler.enter(self.number, stage)

    def wait(self, tensor: Tensor) -> None:
        """Wait for the kernels that compute ``tensor`` before it is read, and let other micro-batches run meanwhile."""
        mark = next(card for card in self._pipeline.mover.cards if card.serves(tensor.device)).mark()
        stage = self._pipeline.scheduler.pause(self.number)
        if mark is not None:
            mark.synchronize()
        self._pipeline.scheduler.enter(self.number, stage)

    def cut(self, tensor: Tensor, moved: Tensor, crossing: Crossing) -> Tensor:
        leaf = moved.detach().requires_grad_()
        self._cuts.append((tensor, leaf, crossing))
        return leaf

    def backward(self) -> None:
        """Run the backward passes that remain after the last stage's: card by card, back to the first."""
        cards = len(self._pipeline.mover.cards)
        for card in range(cards - 1, -1, -1):
            mine = [cut for cut in self._cuts if cut[2].source == card]
            self._cuts = [cut for cut in self._cuts if cut[2].source != card]  # frees what is no longer needed
            used = [(tensor, leaf.grad, crossing) for tensor, leaf, crossing in mine if leaf.grad is not None]
            if used:
                with self.cross(2 * cards + 1 - card) as fetches:
                    gradients = [
                        crossing.backward(gradient, *fetches(crossing.target)) for _, gradient, crossing in used
                    ]
                torch.autograd.backward([tensor for tensor, _, _ in used], gradients)


class _YieldOnRead(TorchFunctionMode):
    """Lets others run while a micro-batch waits to read a number from its card, as transformers does for each mask."""

    def __init__(self, flight: _Flight) -> None:
        super().__init__()
        self._flight = flight

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _READERS and args[0].device.type != "cpu":
            self._flight.wait(args[0])
        return func(*args, **(kwargs or {}))


class Pipeline:
    def __init__(self, hops: Hops, mover: SplitMover) -> None:
        self.mover = mover
        self._hops = hops
        # Measured: with only one more than there are cards, the cards still wait for each other.
        self.in_flight = IN_FLIGHT * len(mover.cards)
        # One set a thread: in a shared queue a fetch would wait behind copies that another micro-batch waits for.
        self._fetchers = []
        for _ in range(self.in_flight):
            self._fetchers.append([card.another_fetcher() for card in mover.cards])
        self.scheduler = _Scheduler(len(mover.cards))
        self._window: list[Any] = []
        self._asked = 0
        self._threads: list[threading.Thread] = []

    def begin_step(self, window: list[Any]) -> None:
        self._window = window
        self._asked = 0

    def step(self, stock: Stock, model: nn.Module, inputs: Any, num_items: Any) -> Tensor:
        """One micro-step, as ``Trainer.training_step``; the first of a window starts all of its micro-batches."""
        if self.in_flight == 1 or len(self._window) < 2:
            return stock(model, inputs, num_items)
        if self._asked == 0:
            self._start(stock, model, inputs, num_items)
        number = self._asked
        self._asked += 1
        try:
            with self._finished:
                self._finished.wait_for(lambda: self._errors or number in self._losses)
            if self._asked == len(self._window) or self._errors:
                self._join()
            if self._errors:
                raise self._errors[min(self._errors)]
            return self._losses.pop(number)
        except BaseException:
            self.scheduler.fail()  # also if this thread was interrupted
            self._join()
            self._errors.clear()  # they keep activations alive
            self._losses.clear()
            self._window = []  # the rest of this step, and its repetition, run one by one
            raise

    def halve(self) -> bool:
        """Halve the number of concurrent micro-batches, after running out of memory; False if it is one already."""
        if self.in_flight == 1:
            return False
        logger.warning(
            "no memory for %d concurrent micro-batches; continuing with %d", self.in_flight, self.in_flight // 2
        )
        self.in_flight //= 2
        return True

    def _start(self, stock: Stock, model: nn.Module, first: Any, num_items: Any) -> None:
        self.scheduler = _Scheduler(len(self.mover.cards))
        self._finished = threading.Condition()
        self._losses: dict[int, Tensor] = {}
        self._errors: dict[int, BaseException] = {}
        self._left = iter(range(len(self._window)))
        if isinstance(self._window, AccumulationWindow):
            self._window.begin_all()
        batches = [first, *(self._window[number] for number in range(1, len(self._window)))]
        self._threads = [
            threading.Thread(target=self._run, args=(fetchers, stock, model, batches, num_items), daemon=True)
            for fetchers in self._fetchers[: min(self.in_flight, len(batches))]
        ]
        for thread in self._threads:
            thread.start()

    def _run(
        self, fetchers: Sequence[Fetcher], stock: Stock, model: nn.Module, batches: list[Any], num_items: Any
    ) -> None:
        if self.mover.device.type == "cuda":
            torch.cuda.set_device(self.mover.device)  # a new thread's current device is card 0
        while not self.scheduler.failed:
            with self._finished:
                number = next(self._left, None)
            if number is None:
                return
            flight = _Flight(self, number, fetchers)
            try:
                self.scheduler.enter(number, 0)
                self._hops.fly(flight)
                with _YieldOnRead(flight):
                    loss = stock(model, batches[number], num_items)
                flight.backward()
                self.scheduler.leave(number, for_good=True)
                batches[number] = None
                with self._finished:
                    self._losses[number] = loss
                    self._finished.notify_all()
            except _Cancelled:
                return
            except BaseException as error:  # raised where the micro-batch is requested
                self.scheduler.fail()
                with self._finished:
                    self._errors[number] = error
                    self._finished.notify_all()

    def _join(self) -> None:
        for thread in self._threads:
            thread.join()
        self._threads = []


def can_pipeline(trainer: OwningTrainer) -> bool:
    """Whether micro-batches may run concurrently.

    Not with a router's auxiliary loss, or where buffers are written; nor with a reference: TRL may compute it by the
    same model with its adapters turned off, for all micro-batches at once.
    """
    args = trainer.args
    config = trainer.model.config
    return (
        args.gradient_accumulation_steps > 1
        and not hasattr(trainer, "ref_model")
        and not getattr(args, "activation_offloading", False)
        and not getattr(config.get_text_config(), "output_router_logits", False)
        and not any(True for _ in running_statistics(trainer.model))
    )
