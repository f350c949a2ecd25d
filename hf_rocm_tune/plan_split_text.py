"""The plan of a split in words. Imports no torch."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from hf_rocm_tune.memory.plan import GIB, CardMemory, Estimate

if TYPE_CHECKING:
    from hf_rocm_tune.plan_split import SplitPlan

_WIDTH = 24
_LEAST = 0.005 * GIB


def memory_lines(counts: Sequence[int], estimates: Sequence[Estimate], cards: Sequence[CardMemory]) -> Iterator[str]:
    """One line for each card: its layers, and how much of it they take."""
    start = 0
    for number, (count, estimate, card) in enumerate(zip(counts, estimates, cards, strict=True)):
        beside = ", embeddings, head and loss" if number == 0 else ""
        rest = f"{estimate.spare / GIB:.1f} spare" if estimate.fits else f"{-estimate.spare / GIB:.1f} missing"
        yield (
            f"card {number}: layers {start} to {start + count - 1}{beside}: {estimate.total / GIB:.1f} of "
            f"{card.usable / GIB:.1f} GiB, {rest}"
        )
        start += count


def as_text(found: SplitPlan, command: str) -> str:
    """The plan for a reader: the choice, each card by parts, the command line."""
    plan, case = found.plan, found.option.estimate.case
    name = plan.request.model or plan.architecture
    how = "with" if case.checkpointing else "without"
    head = "choice" if found.cut.fits else "nothing fits; nearest"
    lines = [
        f"{name}: {plan.architecture}, {plan.parameters / 1e9:.2f} billion parameters, {plan.layers} layers",
        "",
        f"{head}: {found.option.estimate.variant}, micro-batch {case.micro_batch}{' packed' if case.packing else ''} x "
        f"{case.length} tokens, {how} checkpointing, accumulation {case.accumulation}, split over {len(found.cards)} "
        f"cards (effective batch {plan.request.effective_batch})",
        "  the cards compute one after the other: a second one makes room, not speed",
        "",
        *memory_lines(found.counts, found.estimates, found.cards),
        "",
        *_parts(found),
        "",
        "command:",
        f"  {command}",
    ]
    if plan.notes:
        lines += ["", *(f"note: {note}" for note in plan.notes)]
    return "\n".join(lines)


def as_values(found: SplitPlan, command: str) -> dict[str, Any]:
    """The plan as JSON values; memory in bytes."""
    return {
        "schema": 1,
        "model": found.plan.request.model,
        "parameters": found.plan.parameters,
        "layers": found.plan.layers,
        "method": found.option.estimate.variant,
        "case": vars(found.option.estimate.case),
        "fits": found.cut.fits,
        "cards": [
            {
                "name": card.name,
                "usable": card.usable,
                "layers": count,
                "total": estimate.total,
                "spare": estimate.spare,
                "moment": estimate.moment,
                "parts": dict(estimate.parts),
            }
            for card, count, estimate in zip(found.cards, found.counts, found.estimates, strict=True)
        ],
        "command": command,
        "notes": list(found.plan.notes),
    }


def as_json(found: SplitPlan, command: str) -> str:
    """`as_values` in one line."""
    return json.dumps(as_values(found, command))


def _parts(found: SplitPlan) -> Iterator[str]:
    columns = "".join(f"{f'card {number}':>9}" for number in range(len(found.cards)))
    yield f"{'part, GiB':<{_WIDTH}}{columns}"
    for name in found.estimates[0].parts:
        sizes = [estimate.parts.get(name, 0.0) for estimate in found.estimates]
        if max(sizes) >= _LEAST:
            yield f"{name:<{_WIDTH}}" + "".join(f"{size / GIB:>9.2f}" for size in sizes)
    yield f"{'total':<{_WIDTH}}" + "".join(f"{estimate.total / GIB:>9.2f}" for estimate in found.estimates)
    moments = ", ".join(
        f"card {number}: {each.moment.replace('of layer', 'of its layer')}"
        for number, each in enumerate(found.estimates)
    )
    yield f"at the peak of each card ({moments}); allocator slack, context and desktop are assumed or read"
