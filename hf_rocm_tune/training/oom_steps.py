"""Micro-steps that run out of memory are done again with smaller micro-batches, together on all ranks.

`StepDown.run` stands around every micro-step of an optimizer step. When one of them (forward, backward, or the
averaging at the end) finds no memory on the device on any rank (`errors.device_shortage`), all ranks put the step back
to its start, cut each micro-batch into more parts than before, and do the same samples again. Where not torch's
allocator was short but a library or the driver, which cannot use what that allocator keeps, the first try in an
optimizer step is done again as it was: its cache has been given back by then (pytorch#128601).

Each part's loss is scaled so that the parts add up to what the whole gives: the effective batch, the number of
optimizer steps and the learning rate stay, and so do the loss and the gradients up to rounding. Nothing is cut less
again until the run ends.

Exactly the whole's: losses that are normalised by the label tokens of the optimizer step (``num_items_in_batch``), and
means over a micro-batch, whose parts are weighed by their labels. Not the whole's: terms that are no sums over tokens,
such as the load-balancing loss of a mixture of experts (as with every change of the accumulation), random draws
(dropout), and TRL's logged entropy and accuracy, which are means over micro-batches of different sizes.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from hf_rocm_tune.errors import OutOfMemoryError, device_shortage
from hf_rocm_tune.memory.stepdown import Part, layout, split
from hf_rocm_tune.ranks.agree import highest
from hf_rocm_tune.training.oom_average import average
from hf_rocm_tune.training.oom_ranks import Meetings, PeerOutOfMemory
from hf_rocm_tune.training.oom_shortage import Shortage, note, refusal
from hf_rocm_tune.training.oom_state import write_divisor
from hf_rocm_tune.training.oom_window import Window

if TYPE_CHECKING:
    from hf_rocm_tune.training.mixin import VerifiedTransferMixin

logger = logging.getLogger(__name__)

Stock = Callable[[nn.Module, Any, Any], Tensor]
"""``Trainer.training_step`` as upstream has it: model, micro-batch, label tokens of the optimizer step."""


class StepDown:
    """See the module's description.

    Args:
        trainer: whose micro-steps these are, with model, optimizer and accelerator in place.
        averager: averages the gradients of several ranks; None with a single process.
        divisor: by what micro-batches are cut from the start.

    Attributes:
        divisor: by what micro-batches are cut, 1 or more; the same on all ranks.
        loss_factor: what the trainer has to multiply a loss with at the moment.
    """

    def __init__(
        self, trainer: VerifiedTransferMixin, *, averager: DistributedDataParallel | None, divisor: int
    ) -> None:
        self._trainer = trainer
        self._averager = averager
        self._meetings = Meetings(trainer.args.world_size)
        self._window: Window | None = None
        self._at: tuple[int, Part] | None = None  # number of the micro-step under way in the window, and its part
        self._shortages = 0
        self._cache_was_given_back = False  # in this optimizer step
        self.divisor = divisor
        self.loss_factor = 1.0

    def forget(self) -> None:
        """A new optimizer step begins, however the last one ended."""
        self._window = None
        self._cache_was_given_back = False

    def gather(self, stock: Callable[[Any], Any], tree: Any) -> Any:
        """``Accelerator.gather``: within a micro-step only after the ranks have met.

        Raises:
            PeerOutOfMemory: see `Meetings.gather`; within `run`, which catches it.
        """
        return stock(tree) if self._at is None else self._meetings.gather(stock, tree)

    def run(self, stock: Stock, model: nn.Module, inputs: Mapping[str, Any], num_items: Any) -> Tensor:
        """One micro-step, and after the last one of an optimizer step the average over all ranks.

        Args:
            stock: computes loss and gradients of a micro-batch.
            model: as the trainer has wrapped it.
            inputs: the micro-batch as the loader handed it out.
            num_items: label tokens of the whole optimizer step on all ranks; None where the loss is a mean.

        Returns:
            The loss of the micro-batch as upstream would give it, detached, shape [].

        Raises:
            OutOfMemoryError: on every rank, when a micro-batch that cannot be cut further finds no memory.
        """
        window = self._window = self._window or Window(self._trainer)
        window.batches.append(self._trainer.host_batch(inputs))
        shortages: list[Shortage] = []
        todo: Sequence[Mapping[str, Any]] = [inputs]
        while True:
            losses, short = self._attempt(stock, model, todo, num_items)
            if losses:
                break
            if short is not None:
                shortages.append(short)
            self._step_down(shortages, short)
            window.rewind(model)
            todo = window.batches
        self._report(shortages, "recovered")
        if self._trainer.accelerator.sync_gradients:
            self._window = None
        return losses[-1]

    # ---- one try --------------------------------------------------------------------------------------------

    def _attempt(
        self, stock: Stock, model: nn.Module, todo: Sequence[Mapping[str, Any]], num_items: Any
    ) -> tuple[list[Tensor], Shortage | None]:
        """The losses of the last micro-batches of the window; none when a rank was short, and how, if it was this."""
        assert self._window is not None
        first = len(self._window.batches) - len(todo)
        losses: list[Tensor] = []
        short = None
        try:
            for number, batch in enumerate(todo, start=first):
                losses.append(self._together(stock, model, number, batch, num_items))
        except PeerOutOfMemory:
            return [], None
        except RuntimeError as error:
            short = self._note(error)
        finally:
            self._at = None
        if short is None and self._averager is not None and self._trainer.accelerator.sync_gradients:
            short = self._average(self._averager)
            return ([], short) if self._meetings.end(short=short is not None) is None else (losses, None)
        if short is not None:
            self._meetings.end(short=True)
            return [], short
        return losses, None

    def _together(
        self, stock: Stock, model: nn.Module, number: int, batch: Mapping[str, Any], num_items: Any
    ) -> Tensor:
        """One micro-step, to the end of it on every rank.

        Raises:
            PeerOutOfMemory: another rank is short.
            RuntimeError: this one is, and the others have not heard of it; or something else went wrong.
        """
        assert self._window is not None
        before = self._window.tokens_logged()
        loss = self._micro_step(stock, model, number, batch, num_items)
        counted = self._window.tokens_logged() - before
        most = self._meetings.end(short=False, counted=counted)
        if most is None:
            raise PeerOutOfMemory
        self._window.log_more_tokens(most - counted)
        return loss

    def _micro_step(
        self, stock: Stock, model: nn.Module, number: int, batch: Mapping[str, Any], num_items: Any
    ) -> Tensor:
        """Gradients of one micro-batch, part by part, on this rank alone; its loss."""
        parts = self._parts(number)
        losses = []
        for part in parts:
            self._at = number, part
            with self._as_one_of(len(parts), part, num_items), self._trainer.step_fault(model, part), self._alone():
                losses.append(stock(model, batch if self.divisor == 1 else part.inputs, num_items))
            self._trainer.beat("step")
        return losses[0] if len(losses) == 1 else torch.stack(losses).sum()

    def _parts(self, number: int) -> list[Part]:
        assert self._window is not None
        return split(self._window.batches[number], self.divisor, labels_shifted=self._trainer._loss_shifts_labels)

    def _alone(self) -> Any:
        return nullcontext() if self._averager is None else self._averager.no_sync()

    @contextmanager
    def _as_one_of(self, parts: int, part: Part, num_items: Any) -> Iterator[None]:
        """Upstream divides by the accumulation steps what no token count has normalised: there are more steps now."""
        trainer = self._trainer
        steps = trainer.current_gradient_accumulation_steps
        trainer.current_gradient_accumulation_steps = steps * parts
        if parts > 1 and _takes_a_mean(trainer, num_items):
            self.loss_factor = part.share * parts
        elif parts > 1 and num_items is None:
            self.loss_factor = part.share
        try:
            yield
        finally:
            trainer.current_gradient_accumulation_steps = steps
            self.loss_factor = 1.0

    def _average(self, averager: DistributedDataParallel) -> Shortage | None:
        try:
            average(averager)
            if self._trainer._gradient_check is not None:
                self._trainer._gradient_check.collect()
        except RuntimeError as error:
            return self._note(error)
        return None

    # ---- after a try that failed ----------------------------------------------------------------------------

    def _note(self, error: RuntimeError) -> Shortage:
        """What is known of a shortage; any other error is raised again."""
        if device_shortage(error) is None:
            raise error
        assert self._window is not None
        first_outside = not (isinstance(error, torch.OutOfMemoryError) or self._cache_was_given_back)
        self._cache_was_given_back |= first_outside
        last = len(self._window.batches) - 1
        number, part = self._at or (last, self._parts(last)[-1])
        found = note(
            error,
            trainer=self._trainer,
            micro_step=number + 1,
            part=part,
            layout=layout(self._window.batches[number]),
            divisor=self.divisor,
            again=first_outside,
            number=self._shortages,
        )
        self._shortages += 1
        return found

    def _step_down(self, shortages: Sequence[Shortage], mine: Shortage | None) -> None:
        """Agree on smaller parts, or on the end. Collective.

        Raises:
            OutOfMemoryError: on every rank with the words of the one whose micro-batch cannot be made smaller.
        """
        args = self._trainer.args
        hopeless = mine is not None and mine.wanted is None
        wanted = self.divisor if mine is None or mine.wanted is None else mine.wanted
        divisor, speaker = highest([wanted, args.process_index + 1 if hopeless else 0])
        if speaker:
            self._report(shortages, "failed")
            told = refusal(mine, self._trainer) if mine is not None and hopeless else None
            text = self._meetings.told_by(speaker - 1, told)
            if not shortages and self._trainer.is_world_process_zero():  # the report of a failed run is this rank's
                row = {"step": self._trainer.state.global_step + 1, "stage": "memory", "kind": "out of memory"}
                self._trainer.transfer_report.incident({**row, "said": text, "outcome": "failed"})
            raise OutOfMemoryError(text)
        if mine is not None:
            cut = f"with micro-batches cut into up to {divisor} parts from now on (the effective batch stays)"
            logger.warning(
                "step %d: no memory for %s; the step is done again, %s",
                mine.incident["step"],
                mine.what,
                cut if divisor > self.divisor else "after the allocator's cache was given back",
            )
        self.divisor = divisor
        if self._trainer.is_world_process_zero():
            write_divisor(
                Path(args.output_dir),
                run_id=self._trainer.run_id,
                batch_size=args.per_device_train_batch_size,
                divisor=divisor,
            )

    def _report(self, shortages: Sequence[Shortage], outcome: str) -> None:
        if not shortages:
            return
        report = self._trainer.transfer_report
        report.count("memory", shortages=len(shortages), recovered=len(shortages) if outcome == "recovered" else 0)
        for each in shortages:
            report.incident({**each.incident, "outcome": outcome})


def _takes_a_mean(trainer: Any, num_items: Any) -> bool:
    """Whether upstream takes the loss for a mean over the micro-batch, and divides it by the accumulation steps."""
    if trainer.loss_is_scaled_for_ga is not None:
        return not trainer.loss_is_scaled_for_ga
    counted = trainer.model_accepts_loss_kwargs and num_items is not None
    return not counted and trainer.compute_loss_func is None
