"""A plan, of one card or of a split, as text and as JSON values. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from hf_rocm_tune.plan.estimate import GIB, CardMemory, Case, Estimate, host
from hf_rocm_tune.plan.fit import Plan
from hf_rocm_tune.plan.split import SplitPlan, memory_lines

_ASSUMED = frozenset({"allocator slack", "context"})
_WIDTH = 24
_LEAST = 0.005 * GIB  # less would be shown as 0.00
#: Sizes of host memory that are common, in GiB.
_HOSTS = (16, 32)


def as_text(plan: Plan, command: str) -> str:
    """The plan for a reader: the choice by parts, the grid, the command line."""
    card, found = plan.card, plan.nearest
    cards = f", {found.case.cards} cards" if found.case.cards > 1 else ""
    told = (
        f"{name.replace('_', ' ')} {', '.join(value) if isinstance(value, list) else value}"
        for name, value in settings_of(plan).items()
        if value not in (None, False, [])
    )
    speed = found.speed
    lines = [
        _model(plan),
        f"{card.name}: {card.usable / GIB:.1f} GiB, of which others hold {card.desktop / GIB:.1f} "
        f"({card.desktop_source}) and the driver's context {card.context / GIB:.1f} (assumed)",
        "",
        _choice(plan, found, fits=plan.choice is not None, how=cards),
        f"  for {'; '.join(told)}",
    ]
    if plan.choice:
        lines.append(
            f"  fastest of what fits, by estimate, not by measurement: {100 * speed.products:.0f} % matrix products, "
            f"{100 * speed.traffic:.0f} % memory traffic, {100 * speed.launches:.0f} % launches"
        )
    lines += ["", *_parts(plan), "", _host_line(plan), "", *_grid(plan)]
    if plan.scales:
        longest = ", ".join(f"{method} {plan.longest(method) or 'none'}" for method in plan.variants)
        lines += ["", f"longest sequence that fits, micro-batch 1 with checkpointing: {longest}"]
    return "\n".join([*lines, *_end(plan, command)])


def as_values(plan: Plan, command: str) -> dict[str, Any]:
    """The plan as JSON values; memory in bytes."""
    parts = _host(plan)
    return {
        "schema": 1,
        "model": plan.request.model,
        "architecture": plan.architecture,
        "parameters": plan.parameters,
        "layers": plan.layers,
        "card": vars(plan.card) | {"free": plan.card.free},
        "fits": plan.choice is not None,
        "choice": _values(plan.nearest),
        "settings": settings_of(plan),
        "host": {"parts": parts, "total": sum(parts.values()), "fits_gib": _hosts(parts)},
        "longest": {method: plan.longest(method) for method in plan.variants},
        "grid": [_values(each) for each in plan.grid],
        "command": command,
        "notes": list(plan.notes),
    }


def settings_of(plan: Plan) -> dict[str, Any]:
    """The settings for which the figures of the choice hold, by name."""
    request, method = plan.request, plan.nearest.variant
    found: dict[str, Any] = {}
    if method != "full":
        trained = max(plan.variants[method].weights.trained, key=lambda each: each.elements * each.count)
        found = {
            "rank": request.rank,
            "alpha": request.alpha,
            "dropout": request.adapter_dropout,
            "targets": request.targets if isinstance(request.targets, str) else list(request.targets),
            "modules_to_save": list(request.modules_to_save),
            "dora": request.dora,
            "adapter_dtype": {2: "bfloat16", 4: "float32"}[trained.itemsize],
        }
    return found | {
        "weight_dtype": request.dtype_of(method),
        "autocast": "bfloat16" if request.autocast else None,
        "optimizer": request.optim,
        "attention": request.attention,
    }


def split_as_text(found: SplitPlan, command: str) -> str:
    """The plan of a split for a reader: the choice, each card by parts, the command line."""
    lines = [
        _model(found.plan),
        "",
        _choice(found.plan, found.option, fits=found.cut.fits, how=f", split over {len(found.cards)} cards"),
        "  the cards compute one after the other: a second one makes room, not speed",
        "",
        *memory_lines(found.counts, found.estimates, found.cards),
        "",
        *_split_parts(found),
    ]
    return "\n".join([*lines, *_end(found.plan, command)])


def split_as_values(found: SplitPlan, command: str) -> dict[str, Any]:
    """The plan of a split as JSON values; memory in bytes."""

    def on_card(card: CardMemory, count: int, estimate: Estimate) -> dict[str, Any]:
        own = {name: getattr(estimate, name) for name in ("total", "spare", "moment")}
        return {"name": card.name, "usable": card.usable, "layers": count, **own, "parts": dict(estimate.parts)}

    return {
        "schema": 1,
        "model": found.plan.request.model,
        "parameters": found.plan.parameters,
        "layers": found.plan.layers,
        "method": found.option.variant,
        "case": vars(found.option.case),
        "fits": found.cut.fits,
        "cards": [on_card(*each) for each in zip(found.cards, found.counts, found.estimates, strict=True)],
        "command": command,
        "notes": list(found.plan.notes),
    }


def _model(plan: Plan) -> str:
    name = plan.request.model or plan.architecture
    return f"{name}: {plan.architecture}, {plan.parameters / 1e9:.2f} billion parameters, {plan.layers} layers"


def _choice(plan: Plan, found: Estimate, *, fits: bool, how: str) -> str:
    case = found.case
    return (
        f"{'choice' if fits else 'nothing fits; nearest'}: {found.variant}, micro-batch {case.micro_batch}"
        f"{' packed' if case.packing else ''} x {case.length} tokens, {_with(case)} checkpointing, "
        f"accumulation {case.accumulation}{how} (effective batch {plan.request.effective_batch})"
    )


def _with(case: Case) -> str:
    return "with" if case.checkpointing else "without"


def _end(plan: Plan, command: str) -> list[str]:
    notes = ["", *(f"note: {note}" for note in plan.notes)] if plan.notes else []
    return ["", "command:", f"  {command}", *notes]


def _values(option: Estimate) -> dict[str, Any]:
    return {
        "method": option.variant,
        **vars(option.case),
        "fits": option.fits,
        "total": option.total,
        "spare": option.spare,
        "allocator_peak": option.allocated,
        "moment": option.moment,
        "parts": dict(option.parts),
        "moments": dict(option.moments),
        "estimated_tokens_per_second": option.speed.tokens_per_second,
    }


def _parts(plan: Plan) -> Iterator[str]:
    found = plan.nearest
    yield f"{'part':<{_WIDTH}} {'GiB':>6}  known by"
    for name, nbytes in found.parts.items():
        if nbytes < _LEAST:
            continue
        how = "assumed" if name in _ASSUMED else plan.card.desktop_source if name == "desktop" else "counted"
        if name == "working memory":
            how = f"counted: {found.moment}"
        yield f"{name:<{_WIDTH}} {nbytes / GIB:>6.2f}  {how}"
    rest = f"{found.spare / GIB:.2f} spare" if found.fits else f"{-found.spare / GIB:.2f} missing"
    yield f"{'total':<{_WIDTH}} {found.total / GIB:>6.2f}  of {plan.card.usable / GIB:.2f}: {rest}"
    yield ""
    levels = ", ".join(f"{name} {nbytes / GIB:.1f}" for name, nbytes in found.moments.items())
    yield f"allocated at most, by moment: {levels}"
    other = replace(found.case, checkpointing=not found.case.checkpointing)
    for twin in plan.grid:
        if (twin.variant, twin.case) == (found.variant, other):
            kept = (twin.parts["activations kept"] + twin.parts["attention masks kept"]) / GIB
            total = f"{twin.total / GIB:.1f} GiB in total"
            yield f"{_with(other)} checkpointing: {kept:.1f} GiB of activations kept, {total}"


def _split_parts(found: SplitPlan) -> Iterator[str]:
    yield f"{'part, GiB':<{_WIDTH}}" + "".join(f"{f'card {number}':>9}" for number in range(len(found.cards)))
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


def _host(plan: Plan) -> dict[str, float]:
    found = plan.nearest
    return host(plan.variants[found.variant], found.case, workers=plan.request.workers)


def _hosts(parts: dict[str, float]) -> dict[int, bool]:
    return {size: sum(parts.values()) <= size * GIB for size in _HOSTS}


def _host_line(plan: Plan) -> str:
    found = _host(plan)
    parts = ", ".join(f"{name} {nbytes / GIB:.1f}" for name, nbytes in found.items() if nbytes >= GIB / 20)
    fits = ", ".join(f"{'fits' if fits else 'does not fit'} {size} GiB" for size, fits in _hosts(found).items())
    return f"host memory: {sum(found.values()) / GIB:.1f} GiB, mostly assumed ({parts}): {fits}"


def _grid(plan: Plan) -> Iterator[str]:
    sizes = sorted({each.case.micro_batch for each in plan.grid})
    columns = "".join(f"{size:>9}" for size in sizes)
    best = plan.nearest.speed.tokens_per_second
    yield "peak in GiB by micro-batch: [does not fit], *choice; speed: the best that fits, the choice is 1"
    yield f"{'length':>6}  {'method':<6} {'checkpointing':<13}{columns}    speed"
    rows: dict[tuple[int, str, bool], list[Estimate]] = {}
    for each in sorted(plan.grid, key=lambda each: each.case.length):
        rows.setdefault((each.case.length, each.variant, each.case.checkpointing), []).append(each)
    for (length, method, checkpointing), row in rows.items():
        cells = {}
        for each in row:
            value = f"{each.total / GIB:.1f}"
            cells[each.case.micro_batch] = f"*{value}" if each is plan.choice else value if each.fits else f"[{value}]"
        fitting = [each.speed.tokens_per_second for each in row if each.fits]
        speed = f"{max(fitting) / best:.2f}" if fitting else "-"
        shown = "".join(f"{cells.get(size, ''):>9}" for size in sizes)
        yield f"{length:>6}  {method:<6} {'on' if checkpointing else 'off':<13}{shown}{speed:>9}"
