"""What each card holds when the layers of one model lie on several, and where to cut. Pure arithmetic: no torch.

Every card is planned like a card with a smaller model: its layers, and on the first card all that is no layer. A card
holds what its own layers keep for backward while the others compute; the peak of each is at a moment of its own. The
other cards hold copies of what their layers are given beside (masks, position embeddings) and of their first input.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from hf_rocm_tune.memory.plan import CardMemory, Estimate
from hf_rocm_tune.memory.plan_trace import LAYER_ROLES, Peak, Trace

Counts = tuple[int, ...]
Plan = Callable[[Counts], Sequence[Estimate]]
"""Plans every card for a number of layers on each."""


class LayersTrace(Trace):
    """A step as a card sees it that has layers and nothing else, beside copies of what they are given."""

    def peak(self, batch: int, length: int, *, accumulating: bool = False) -> Peak:
        """As `Trace.peak`, with the copies, and without the gradients of what is on the first card."""
        sizes = self._sizes.at(batch, length)
        outside = {
            role: stretch.levels(sizes, accumulating)
            for (role, _), stretch in zip(self._segments, self._stretches, strict=True)
            if role not in LAYER_ROLES
        }
        copies = max(0.0, outside["start"].net)  # what the embeddings and masks leave behind
        elsewhere = sum(each.gradients for each in outside.values())
        more = copies - (elsewhere if accumulating else 0.0)
        alone = super().peak(batch, length, accumulating=accumulating)
        return replace(
            alone,
            total=alone.total + more,
            kept=alone.kept + copies,
            gradients=alone.gradients - (elsewhere if accumulating else 0.0),
            by_role={role: level + more for role, level in alone.by_role.items()},
            all_gradients=alone.all_gradients - elsewhere,
        )

    def _timeline(self) -> list[tuple[str, int, int]]:
        return [each for each in super()._timeline() if each[0] in LAYER_ROLES]


@dataclass(frozen=True, kw_only=True)
class Cut:
    """A way to share out the layers.

    Args:
        counts: layers on each card.
        estimates: what each card takes.
    """

    counts: Counts
    estimates: tuple[Estimate, ...]

    @property
    def fits(self) -> bool:
        """Whether it fits on every card."""
        return all(estimate.fits for estimate in self.estimates)

    @property
    def least_spare(self) -> float:
        """Bytes left over on the fullest card; negative: missing."""
        return min(estimate.spare for estimate in self.estimates)


def even_counts(layers: int, weights: Sequence[float]) -> Counts:
    """Shares layers out in proportion, at least one to each.

    Args:
        layers: how many; at least as many as cards.
        weights: of the cards.
    """
    left, room = layers, sum(weights)
    counts = []
    for position, weight in enumerate(weights):
        later = len(weights) - position - 1
        share = round(left * weight / room) if room else 1
        counts.append(left if later == 0 else min(max(share, 1), left - later))
        left, room = left - counts[-1], room - weight
    return tuple(counts)


def best_cut(plan: Plan, *, layers: int, cards: Sequence[CardMemory]) -> Cut:
    """The cut that leaves most memory on the card that has least, found by moving one layer at a time.

    Args:
        plan: plans a cut.
        layers: of the model; at least as many as cards.
        cards: in the order of the stages.
    """
    counts = even_counts(layers, [card.free for card in cards])
    best = Cut(counts=counts, estimates=tuple(plan(counts)))
    while True:
        nearby = [Cut(counts=each, estimates=tuple(plan(each))) for each in _neighbours(best.counts)]
        better = max(nearby, key=lambda cut: cut.least_spare, default=best)
        if better.least_spare <= best.least_spare:
            return best
        best = better


def _neighbours(counts: Counts) -> list[Counts]:
    """One layer moved from one card to another; those between shift theirs along."""
    found = []
    for giver in range(len(counts)):
        for taker in range(len(counts)):
            if giver != taker and counts[giver] > 1:
                moved = list(counts)
                moved[giver] -= 1
                moved[taker] += 1
                found.append(tuple(moved))
    return found
