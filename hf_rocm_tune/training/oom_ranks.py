"""How the ranks stay together when one of them runs out of memory in the middle of a micro-step.

Whoever calls a collective waits for all, so a rank that is short of memory must be heard before the others enter one.
Every rank therefore meets the others, over gloo on the host, at two kinds of place: before each gather that the
trainer makes inside a micro-step (TRL's metrics), and at the end of its micro-steps. It says there which of the two it
has reached, or that it is short. Since each of them says something at each meeting, the n-th meeting of one rank is the
n-th of all, however unequal their speed; all of them know afterwards whether the gather can take place.

The ranks need not cut their batches into equally many parts: a rank that has ended goes on meeting the others until
all have ended, and a gather among some is made of what those have, through the host.

Guarantee: no rank waits for one that ran out of memory in forward, in backward or while averages of gradients were
made. Not covered: collectives that a trainer calls itself, other than ``Accelerator.gather`` and what is built on it
(``gather_for_metrics``); a rank that runs out of memory elsewhere (evaluation, clipping, the optimizer) ends, and the
launcher then ends the others.

Cost: one all-reduce of three numbers on the host per gather and per micro-step.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from accelerate.utils import concatenate

from hf_rocm_tune.ranks.agree import highest
from hf_rocm_tune.transfer import map_tensors, tree_tensors
from hf_rocm_tune.transfer.host_group import host_group

_AT_A_GATHER, _ENDED, _SHORT = 0, 1, 2


class PeerOutOfMemory(Exception):
    """Another rank has run out of memory: what this one is doing will be done again. Never leaves the step."""


class Meetings:
    """The meetings of one rank with the others; with a single process there are none to meet.

    Args:
        ranks: how many there are.
    """

    def __init__(self, ranks: int) -> None:
        self._ranks = ranks

    def gather(self, stock: Callable[[Any], Any], tree: Any) -> Any:
        """``stock(tree)`` when all ranks are here, else what those have that are, on the host.

        Args:
            stock: gathers tensors of all ranks along their first dimension. Collective.
            tree: tensors on the device, alike on all ranks.

        Raises:
            PeerOutOfMemory: on every other rank, when one is short.
        """
        for tensor in tree_tensors(tree):
            # The allocator keeps this block, so the gather itself cannot be the one that finds no memory.
            torch.empty(tensor.numel() * self._ranks, dtype=tensor.dtype, device=tensor.device)
        last, first, _ = self._meet(_AT_A_GATHER)
        if last == _SHORT:
            raise PeerOutOfMemory
        return stock(tree) if last == first else self._among_some(tree)

    def end(self, *, short: bool, counted: int = 0) -> int | None:
        """A micro-step is done, or given up because this rank is short.

        Args:
            short: whether it is given up.
            counted: what this rank has counted in its gathers; whoever took part in the most has counted the most.

        Returns:
            The most that any rank has counted, or None when a rank is short.
        """
        while True:
            last, first, most = self._meet(_SHORT if short else _ENDED, counted)
            if last == _SHORT:
                return None
            if first == _ENDED:
                return most
            self._among_some(None)

    def _meet(self, state: int, counted: int = 0) -> tuple[int, int, int]:
        """The furthest state of any rank, the least far, and the most counted."""
        last, first, most = highest([state, -state, counted])
        return last, -first, most

    def _among_some(self, tree: Any) -> Any:
        """What the ranks have, joined; None says that this one has nothing."""
        mine = None if tree is None else map_tensors(tree, lambda tensor: torch.atleast_1d(tensor.detach().cpu()))
        everyone: list[Any] = [None] * self._ranks
        dist.all_gather_object(everyone, mine, group=host_group())
        return concatenate([each for each in everyone if each is not None])

    def told_by(self, rank: int, text: str | None) -> str:
        """What one rank has to say, on every rank. Collective.

        Args:
            rank: who speaks.
            text: there what it says; elsewhere it does not count.
        """
        said: list[Any] = [text]
        if self._ranks > 1:
            dist.broadcast_object_list(said, src=rank, group=host_group())
        return str(said[0])
