"""One optimizer step as it is under way: what must be put back before its samples are done again.

Put back: gradients (there are none at the start of a step), the random state of python, numpy, torch and the device,
and what the trainer has logged since (TRL's metrics and token count). TRL's activation offloading forgets by itself
what it holds of a forward whose backward never came, when the next micro-step begins. Not covered: buffers of a model
that change in ``forward``, and what a trainer of the user's own counts in ``compute_loss``.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

import numpy
import torch
from torch import nn

from hf_rocm_tune.models.placement import release_memory


class Window:
    """The micro-batches of one optimizer step so far, and the state in which the step began.

    Args:
        trainer: a ``transformers.Trainer``.

    Attributes:
        batches: of the micro-steps so far, as host tensors.
        random_state: at the start of the step.
    """

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self.batches: list[Mapping[str, Any]] = []
        self.random_state = RandomState(*trainer.devices)
        self._logged = _LogMark(trainer)

    def tokens_logged(self) -> int:
        """What TRL's trainers have counted in the run so far; 0 for a trainer that counts none."""
        return self._logged.tokens

    def log_more_tokens(self, number: int) -> None:
        """Add tokens that other ranks have counted in gathers in which this one took no part."""
        if number:
            self._logged.tokens += number

    def rewind(self, model: nn.Module) -> None:
        """Back to the start of the step, with all memory given back that the tries since have taken."""
        model.zero_grad()
        release_memory()
        self._logged.restore()
        self.random_state.restore()


class RandomState:
    """The random state of this process and its devices, as it is now.

    Args:
        devices: whose generators count beside those of the host.
    """

    def __init__(self, *devices: torch.device) -> None:
        self._python = random.getstate()
        self._numpy = numpy.random.get_state()
        self._torch = torch.get_rng_state()
        self._accelerators = [(torch.cuda.get_rng_state(each), each) for each in devices if each.type == "cuda"]

    def restore(self) -> None:
        """As it was."""
        random.setstate(self._python)
        numpy.random.set_state(self._numpy)
        torch.set_rng_state(self._torch)
        for state, device in self._accelerators:
            torch.cuda.set_rng_state(state, device)


class _LogMark:
    """How far TRL's trainers had come in what they log: lists of numbers by name, and a count of tokens."""

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self._metrics: dict[str, list[float]] = getattr(trainer, "_metrics", {}).get("train", {})
        self._lengths = {name: len(values) for name, values in self._metrics.items()}
        self._tokens = self.tokens

    @property
    def tokens(self) -> int:
        """The trainer's count, which it logs under the name of ``num_tokens``."""
        return int(getattr(self._trainer, "_total_train_tokens", 0))

    @tokens.setter
    def tokens(self, number: int) -> None:
        self._trainer._total_train_tokens = number
        if "num_tokens" in self._metrics:
            self._metrics["num_tokens"] = [number]

    def restore(self) -> None:
        for name in list(self._metrics):
            del self._metrics[name][self._lengths.get(name, 0) :]
            if name not in self._lengths:
                del self._metrics[name]
        if self.tokens != self._tokens:
            self.tokens = self._tokens
