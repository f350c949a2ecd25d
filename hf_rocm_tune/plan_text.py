"""A plan as text and as JSON values. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from hf_rocm_tune.memory.plan import GIB, Estimate
from hf_rocm_tune.memory.plan_choice import Option
from hf_rocm_tune.plan_job import Plan

_ASSUMED = frozenset({"allocator slack", "context"})
_DTYPES = {2: "bfloat16", 4: "float32"}
_WIDTH = 24
_LEAST = 0.005 * GIB  # less would be shown as 0.00


def as_text(plan: Plan, command: str) -> str:
    """The plan for a reader: the choice by parts, the grid, the command line."""
    lines = [*_head(plan), "", *_choice(plan), "", *_parts(plan), "", *_host(plan), "", *_grid(plan)]
    if plan.scales:
        lines += ["", _longest(plan)]
    lines += ["", "command:", f"  {command}"]
    if plan.notes:
        lines += ["", *(f"note: {note}" for note in plan.notes)]
    return "\n".join(lines)


def as_values(plan: Plan, command: str) -> dict[str, Any]:
    """The plan as JSON values; memory in bytes."""
    host = plan.host()
    return {
        "schema": 1,
        "model": plan.request.model,
        "architecture": plan.architecture,
        "parameters": plan.parameters,
        "layers": plan.layers,
        "card": vars(plan.card) | {"free": plan.card.free},
        "fits": plan.choice is not None,
        "choice": _option_values(plan.nearest),
        "settings": settings_of(plan),
        "host": {"parts": dict(host.parts), "total": host.total, "fits_gib": dict(host.fits)},
        "longest": {method: plan.longest(method) for method in plan.variants},
        "grid": [_option_values(each) for each in plan.grid],
        "command": command,
        "notes": list(plan.notes),
    }


def settings_of(plan: Plan) -> dict[str, Any]:
    """The settings for which the figures of the choice hold, by name."""
    request, method = plan.request, plan.nearest.estimate.variant
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
            "adapter_dtype": _DTYPES[trained.itemsize],
        }
    return found | {
        "weight_dtype": request.dtype_of(method),
        "autocast": "bfloat16" if request.autocast else None,
        "optimizer": request.optim,
        "attention": request.attention,
    }


def _option_values(option: Option) -> dict[str, Any]:
    estimate = option.estimate
    return {
        "method": estimate.variant,
        **vars(estimate.case),
        "fits": estimate.fits,
        "total": estimate.total,
        "spare": estimate.spare,
        "allocator_peak": estimate.allocated,
        "moment": estimate.moment,
        "parts": dict(estimate.parts),
        "moments": dict(estimate.moments),
        "estimated_tokens_per_second": option.speed.tokens_per_second,
    }


def _head(plan: Plan) -> Iterator[str]:
    card = plan.card
    name = plan.request.model or plan.architecture
    yield f"{name}: {plan.architecture}, {plan.parameters / 1e9:.2f} billion parameters, {plan.layers} layers"
    yield (
        f"{card.name}: {card.usable / GIB:.1f} GiB, of which others hold {card.desktop / GIB:.1f} "
        f"({card.desktop_source}) and the driver's context {card.context / GIB:.1f} (assumed)"
    )


def _choice(plan: Plan) -> Iterator[str]:
    found = plan.nearest
    case = found.estimate.case
    rows = f"{case.micro_batch} packed" if case.packing else f"{case.micro_batch}"
    how = "with" if case.checkpointing else "without"
    yield (
        f"{'choice' if plan.choice else 'nothing fits; nearest'}: {found.estimate.variant}, micro-batch {rows} x "
        f"{case.length} tokens, {how} checkpointing, accumulation {case.accumulation}"
        f"{f', {case.cards} cards' if case.cards > 1 else ''} (effective batch {plan.request.effective_batch})"
    )
    told = (
        f"{name.replace('_', ' ')} {', '.join(value) if isinstance(value, list) else value}"
        for name, value in settings_of(plan).items()
        if value not in (None, False, [])
    )
    yield f"  for {'; '.join(told)}"
    if plan.choice:
        yield f"  fastest of what fits, by estimate, not by measurement: {found.speed.why()}"


def _parts(plan: Plan) -> Iterator[str]:
    estimate = plan.nearest.estimate
    yield f"{'part':<{_WIDTH}} {'GiB':>6}  known by"
    for name, nbytes in estimate.parts.items():
        if nbytes < _LEAST:
            continue
        how = "assumed" if name in _ASSUMED else plan.card.desktop_source if name == "desktop" else "counted"
        if name == "working memory":
            how = f"counted: {estimate.moment}"
        yield f"{name:<{_WIDTH}} {nbytes / GIB:>6.2f}  {how}"
    rest = f"{estimate.spare / GIB:.2f} spare" if estimate.fits else f"{-estimate.spare / GIB:.2f} missing"
    yield f"{'total':<{_WIDTH}} {estimate.total / GIB:>6.2f}  of {plan.card.usable / GIB:.2f}: {rest}"
    yield ""
    levels = ", ".join(f"{name} {nbytes / GIB:.1f}" for name, nbytes in estimate.moments.items())
    yield f"allocated at most, by moment: {levels}"
    if twin := _other_way(plan):
        kept = twin.parts["activations kept"] + twin.parts["attention masks kept"]
        how = "with" if twin.case.checkpointing else "without"
        yield f"{how} checkpointing: {kept / GIB:.1f} GiB of activations kept, {twin.total / GIB:.1f} GiB in total"


def _other_way(plan: Plan) -> Estimate | None:
    """The same choice with checkpointing the other way round."""
    mine = plan.nearest.estimate
    wanted = replace(mine.case, checkpointing=not mine.case.checkpointing)
    same = (each.estimate for each in plan.grid if each.estimate.variant == mine.variant)
    return next((each for each in same if each.case == wanted), None)


def _host(plan: Plan) -> Iterator[str]:
    host = plan.host()
    parts = ", ".join(f"{name} {nbytes / GIB:.1f}" for name, nbytes in host.parts.items() if nbytes >= GIB / 20)
    fits = ", ".join(f"{'fits' if fits else 'does not fit'} {size} GiB" for size, fits in host.fits.items())
    yield f"host memory: {host.total / GIB:.1f} GiB, mostly assumed ({parts}): {fits}"


def _grid(plan: Plan) -> Iterator[str]:
    sizes = sorted({each.estimate.case.micro_batch for each in plan.grid})
    columns = "".join(f"{size:>9}" for size in sizes)
    best = plan.nearest.speed.tokens_per_second
    yield "peak in GiB by micro-batch: [does not fit], *choice; speed: the best that fits, the choice is 1"
    yield f"{'length':>6}  {'method':<6} {'checkpointing':<13}{columns}    speed"
    for row in _rows(plan.grid):
        case = row[0].estimate.case
        cells = {each.estimate.case.micro_batch: _cell(each, plan) for each in row}
        fitting = [each.speed.tokens_per_second for each in row if each.fits]
        speed = f"{max(fitting) / best:.2f}" if fitting else "-"
        yield (
            f"{case.length:>6}  {row[0].estimate.variant:<6} {'on' if case.checkpointing else 'off':<13}"
            + "".join(f"{cells.get(size, ''):>9}" for size in sizes)
            + f"{speed:>9}"
        )


def _rows(options: Sequence[Option]) -> list[list[Option]]:
    rows: dict[tuple[int, str, bool], list[Option]] = {}
    for each in options:
        case = each.estimate.case
        rows.setdefault((case.length, each.estimate.variant, case.checkpointing), []).append(each)
    return [rows[key] for key in sorted(rows, key=lambda key: key[0])]


def _cell(option: Option, plan: Plan) -> str:
    value = f"{option.estimate.total / GIB:.1f}"
    if option is plan.choice:
        return f"*{value}"
    return value if option.fits else f"[{value}]"


def _longest(plan: Plan) -> str:
    found = {method: plan.longest(method) for method in plan.variants}
    told = ", ".join(f"{method} {length or 'none'}" for method, length in found.items())
    return f"longest sequence that fits, micro-batch 1 with checkpointing: {told}"
