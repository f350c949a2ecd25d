"""``hf-rocm-tune plan``: flags, the plan as text and JSON, the choice as a command line and a recipe."""

from __future__ import annotations

import argparse
import json
import math
import shlex
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import yaml

from hf_rocm_tune.errors import CommandParser, OutOfMemoryError, UsageError, checked
from hf_rocm_tune.paths import can_be_file
from hf_rocm_tune.plan.estimate import GIB, OPTIMIZERS, TIGHT, CardMemory, Case, Estimate, host
from hf_rocm_tune.plan.fit import Plan, SplitPlan, largest_models, memory_lines, plan_for, split_plan
from hf_rocm_tune.plan.measure import measure
from hf_rocm_tune.plan.request import (
    ALL_LINEAR,
    ATTENTIONS,
    DEFAULT_OPTIMIZER,
    DTYPES,
    METHODS,
    PlanRequest,
    as_targets,
    card_memory,
    quiet,
)
from hf_rocm_tune.plan.ways import LINK, THROUGH_HOST, CardsWay, launcher_flags, sentence, ways

_PROGRAM = "hf-rocm-tune"
_NO_DATA = "YOUR_DATA"
#: Flags of a job that do not change the plan.
_PASSED_ON = ("dataset_name", "learning_rate", "num_train_epochs")


def main(argv: Sequence[str], *, prepare: Callable[[], None]) -> int:
    """Plan a training job from the model's configuration.

    Args:
        argv: the arguments after ``plan``.
        prepare: prepares this process for Hugging Face's libraries; called once the arguments are valid.

    Returns:
        0 if something fits.

    Raises:
        UsageError: the arguments are wrong, or this model cannot be planned.
        OutOfMemoryError: nothing fits; the plan is printed anyway.
    """
    wanted = _parser().parse_args(list(argv))
    if wanted.model is None and not wanted.largest:
        raise UsageError(f"give --model, a Hub id or a directory, or --largest; see `{_PROGRAM} plan --help`")
    if wanted.largest:
        for name in ("emit", "savings", "split"):
            if getattr(wanted, name):
                raise UsageError(f"--largest plans no job, so --{name} has no effect: leave out one of the two")
    if wanted.emit is not None:
        _check_recipe(wanted.emit, replace=wanted.force)
    fields = {name: value for name, value in vars(wanted).items() if name in PlanRequest.__dataclass_fields__}
    fields |= {"targets": as_targets(wanted.targets), "modules_to_save": tuple(wanted.modules_to_save)}
    fields |= {"methods": wanted.method and (wanted.method,), "cards": wanted.cards if wanted.split is None else 1}
    request = PlanRequest(**{name: value for name, value in fields.items() if value is not None})
    prepare()
    measured, note = measure() if wanted.measure else (None, "")
    card = card_memory(name=wanted.gpu, vram_gib=wanted.vram, desktop_gib=wanted.desktop_gib, measured=measured)
    if measured and measured["card"] != card.name:
        note += f"; the plan is for {card.name}, whose rates are {card.rates.source}"
    if note:
        print(f"{_PROGRAM}: {note}", file=sys.stderr)
    if wanted.largest:
        return _largest(request, card, as_json=wanted.json)
    return _plan(request, card, wanted) if wanted.split is None else _split(request, card, wanted)


def _plan(request: PlanRequest, card: CardMemory, wanted: argparse.Namespace) -> int:
    with quiet():
        plan = plan_for(request, card=card, within_limit=wanted.length is None)
        savings = _savings(plan) if wanted.savings else []
        several = ways(plan) if plan.request.cards > 1 else []
    line = command(plan.request, plan.nearest, _passed_on(wanted))
    if wanted.json:
        more: dict[str, Any] = {"savings": savings} if savings else {}
        more |= {"ways": list(map(_way_values, several)), "advice": sentence(plan, several)} if several else {}
        print(json.dumps(as_values(plan, line) | more))
    else:
        tables = [
            *(["", *_ways_table(plan, several)] if several else []),
            *(["", *_savings_table(savings)] if savings else []),
        ]
        print(as_text(plan, line), *tables, sep="\n")
    if plan.choice is None:
        missing = -plan.nearest.spare / GIB
        instead = ["--split" if way.name == "split" else way.flags for way in several if way.fits and way.flags]
        raise OutOfMemoryError(f"nothing fits: at least {missing:.1f} GiB are missing. {_advice(plan, instead)}")
    what = f"Planned for {plan.choice.total / GIB:.1f} GiB of the card; `{_PROGRAM} plan` lists the parts."
    _write_recipe(wanted, what, plan.request, plan.choice)
    return 0


def _split(request: PlanRequest, card: CardMemory, wanted: argparse.Namespace) -> int:
    """``--split``: one model over several cards instead of one on each."""
    from hf_rocm_tune.models.split import parse

    try:
        given = parse(wanted.split)
    except UsageError as error:
        raise UsageError(str(error).replace("--split_layers", "--split")) from error
    most = max(wanted.cards, 2) if given is None else len(given) + 1
    found = split_plan(request, cards=[card] * most, counts=given, within_limit=wanted.length is None)
    if given is not None and wanted.cards not in (1, len(found.cards)):
        raise UsageError(f"--split {wanted.split} is for {len(found.cards)} cards, --cards says {wanted.cards}")
    layers = ",".join(map(str, found.counts))
    request = found.plan.request
    line = f"{command(request, found.option, _passed_on(wanted))} --split_layers {layers}"
    print(json.dumps(split_as_values(found, line)) if wanted.json else split_as_text(found, line))
    if not found.fits:
        missing = f"{-found.least_spare / GIB:.1f} GiB are missing on the fullest of {len(found.cards)} cards"
        raise OutOfMemoryError(f"nothing fits: {missing}. Try --method qlora, a shorter --seq, or more cards")
    what = f"One model split over several cards, in one process; `{_PROGRAM} plan --split` lists each card."
    _write_recipe(wanted, what, request, found.option, split_layers=layers)
    return 0


def _advice(plan: Plan, instead: list[str]) -> str:
    """What to try instead; ``instead`` are flags that fit on several cards."""
    request = plan.request
    helps = dict.fromkeys(instead, True) | {
        "--dtype bfloat16": request.methods == ("full",) and request.dtype is None,
        "--method qlora": "qlora" not in request.methods,
        "a shorter --seq": request.length > 512,
        "no --modules_to_save": bool(request.modules_to_save),
        "a smaller model": True,
    }
    some = ", ".join(what for what, may in helps.items() if may)
    return f"Try {some}; `{_PROGRAM} plan --largest` names the largest model that fits"


def _largest(request: PlanRequest, card: CardMemory, *, as_json: bool) -> int:
    found = largest_models(request, card=card)
    if as_json:
        print(json.dumps({"schema": 1, "length": request.length, "largest": found}))
        return 0
    print(f"largest of the known public models on {card.name}, one sequence of {request.length} tokens, checkpointed:")
    for method, name in found.items():
        print(f"  {method:<6} {name or 'none'}")
    return 0


# ---- text and JSON ---------------------------------------------------------------------------------------------

_WIDTH = 24
_LEAST = 0.005 * GIB  # smaller parts would be shown as 0.00
#: Common sizes of host memory, in GiB.
_HOSTS = (16, 32)


def as_text(plan: Plan, command: str) -> str:
    """The plan as text: the choice by parts, the grid, the command line."""
    card, found = plan.card, plan.nearest
    request, method = plan.request, found.variant
    adapters = f"rank {request.rank}, alpha {request.alpha}, dropout {request.dropout:g}, targets "
    adapters += request.targets if isinstance(request.targets, str) else ", ".join(request.targets)
    adapters += f", trained whole: {', '.join(request.modules_to_save)}" if request.modules_to_save else ""
    parts = [*([adapters] if method != "full" else []), f"weights {request.dtype_of(method)}", request.optim]
    parts += [f"{request.attention} attention"]
    lines = [
        _model(plan),
        f"{card.name}: {card.usable / GIB:.1f} GiB, of which other processes hold {card.desktop / GIB:.1f} "
        f"({card.desktop_source}) and the driver's context {card.context / GIB:.1f} ({card.context_source})",
        "",
        _choice(plan, found, plan.choice is not None, f", {found.case.cards} cards" if found.case.cards > 1 else ""),
        f"  with {'; '.join(parts)}",
    ]
    if plan.choice:
        lines += _speed_lines(plan)
    lines += ["", *_parts(plan), "", _host_line(plan), "", *_grid(plan)]
    longest = ", ".join(f"{method} {plan.longest(method) or 'none known'}" for method in plan.recordings)
    lines += ["", f"longest sequence that fits, micro-batch 1 with checkpointing: {longest}"]
    return "\n".join([*lines, *_end(plan, command)])


def as_values(plan: Plan, command: str) -> dict[str, Any]:
    """The plan as JSON values; memory in bytes."""
    parts, fits = _host(plan)
    return {
        "schema": 1,
        "model": plan.request.model,
        "architecture": plan.architecture,
        "parameters": plan.parameters,
        "layers": plan.layers,
        "card": vars(plan.card) | {"free": plan.card.free, "rates": vars(plan.card.rates)},
        "fits": plan.choice is not None,
        "choice": _values(plan.nearest),
        "speed": _speed(plan),
        "settings": settings(plan.request, plan.nearest.variant, plan.nearest.case),
        "full_logits": plan.full_logits,
        "host": {"parts": parts, "total": sum(parts.values()), "fits_gib": fits},
        "longest": {method: plan.longest(method) for method in plan.recordings},
        "grid": [_values(each) for each in plan.grid],
        "command": command,
        "notes": list(plan.notes),
    }


def split_as_text(found: SplitPlan, command: str) -> str:
    """The plan of a split as text: the choice, each card, the command line."""
    lines = [
        _model(found.plan),
        "",
        _choice(found.plan, found.option, found.fits, f", split over {len(found.cards)} cards"),
        "  the cards compute one after the other: a second one adds memory, not speed",
        "",
        *memory_lines(found),
        "allocator slack, context and desktop are assumed or read; --json lists the parts on each card",
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
        "fits": found.fits,
        "cards": [on_card(*each) for each in zip(found.cards, found.counts, found.estimates, strict=True)],
        "command": command,
        "notes": list(found.plan.notes),
    }


def _speed(plan: Plan) -> dict[str, Any]:
    """Tokens a second of the nearest case and hours for the dataset, with bounds."""
    found, rates = plan.nearest, plan.card.rates
    least, most = (share * found.tokens_per_second for share in (rates.least, rates.most))
    tokens = plan.request.rows * plan.request.length
    return {
        "tokens_per_second": found.tokens_per_second,
        "least": least,
        "most": most,
        "hours": [tokens / each / 3600 for each in (most, least)] if tokens else None,
        "shares": dict(found.shares),
        "rates": rates.source,
    }


def _speed_lines(plan: Plan) -> Iterator[str]:
    found, request = _speed(plan), plan.request
    shares = ", ".join(f"{100 * share:.0f} % {name}" for name, share in found["shares"].items() if share >= 0.005)
    yield (
        f"  the fastest that fits: about {found['tokens_per_second']:,.0f} tokens/s ({found['least']:,.0f} to "
        f"{found['most']:,.0f}), with rates {found['rates']}: {shares}"
    )
    if found["hours"]:
        low, high = found["hours"]
        yield f"  {low:.1f} to {high:.1f} hours for one pass over {request.rows} rows padded to {request.length} tokens"


def _savings(plan: Plan) -> list[dict[str, Any]]:
    """The choice of the same method after each of several single changes."""
    request = replace(plan.request, methods=(plan.nearest.variant,))
    changes: dict[str, dict[str, Any]] = {"as asked": {}}
    if plan.nearest.variant != "full" and request.dropout:
        changes["--dropout 0"] = {"dropout": 0.0}
    if plan.nearest.variant != "full" and not request.modules_to_save:
        changes["--one_pass_loss true"] = {"one_pass_loss": True}
    if not request.packing:
        changes["--packing"] = {"packing": True}
    if request.optim == DEFAULT_OPTIMIZER:
        changes["--optim adamw_8bit"] = {"optim": "adamw_8bit"}
    if request.cards == 1 and request.effective_batch % 2 == 0:
        changes["--cards 2"] = {"cards": 2}
    rows = []
    for name, change in changes.items():
        other = plan_for(replace(request, **change), card=plan.card, grid=False)
        rows.append((name, other.nearest, other.nearest.total, other.choice is not None))
    if request.cards == 1:
        split = split_plan(request, cards=[plan.card] * 2)
        rows.append(("--split", split.option, max(each.total for each in split.estimates), split.fits))
    return [
        {"change": name, "micro_batch": found.case.micro_batch, "checkpointing": found.case.checkpointing}
        | {"total": total, "fits": fits, "tokens_per_second": found.tokens_per_second}
        for name, found, total, fits in rows
    ]


def _savings_table(rows: list[dict[str, Any]]) -> Iterator[str]:
    yield "the fastest that fits after one change, on the fullest card; with packing no token is padding"
    yield f"{'change':<20} {'GiB':>6} {'tokens/s':>9}  case"
    for row in rows:
        way = f"micro-batch {row['micro_batch']}, {'with' if row['checkpointing'] else 'without'} checkpointing"
        gib = f"{row['total'] / GIB:.1f}" if row["fits"] else f"[{row['total'] / GIB:.1f}]"
        yield f"{row['change']:<20} {gib:>6} {row['tokens_per_second']:>9,.0f}  {way}"


def _way_values(way: CardsWay) -> dict[str, Any]:
    own = {name: getattr(way, name) for name in ("name", "fits", "total", "longest", "crossing", "flags")}
    return (
        own
        | {"method": way.option.variant, **vars(way.option.case)}
        | {"estimated_tokens_per_second": way.option.tokens_per_second}
    )


def _ways_table(plan: Plan, found: list[CardsWay]) -> Iterator[str]:
    rates = f"assumed: {LINK / 1e9:.0f} GB/s between cards, {THROUGH_HOST / 1e9:.0f} through the host"
    yield f"{plan.request.cards} cards ({rates}); case: micro-batch x accumulation"
    yield f"{'way':<9} {'method':<6} {'GiB':>6} {'longest':>8} {'tokens/s':>9} {'GiB a step':>11}  case"
    for way in found:
        gib = f"{way.total / GIB:.1f}" if way.fits else f"[{way.total / GIB:.1f}]"
        case, speed = way.option.case, f"{way.option.tokens_per_second:,.0f}" if way.fits else "-"
        how = f"{case.micro_batch} x {case.accumulation}, {_recomputation(case)}"
        yield (
            f"{way.name:<9} {way.option.variant:<6} {gib:>6} {way.longest or '-':>8} {speed:>9} "
            f"{way.crossing / GIB:>11.2f}  {how}"
        )
    yield sentence(plan, found)


def _model(plan: Plan) -> str:
    name = plan.request.model or plan.architecture
    return f"{name}: {plan.architecture}, {plan.parameters / 1e9:.2f} billion parameters, {plan.layers} layers"


def _choice(plan: Plan, found: Estimate, fits: bool, how: str) -> str:
    case = found.case
    return (
        f"{'choice' if fits else 'nothing fits; nearest'}: {found.variant}, micro-batch {case.micro_batch}"
        f"{' packed' if case.packing else ''} x {case.length} tokens, {_recomputation(case)}, "
        f"accumulation {case.accumulation}{how} (effective batch {plan.request.effective_batch})"
    )


def _recomputation(case: Case) -> str:
    if case.recompute is not None:
        return "{} layers recomputed whole and {} selectively".format(*case.recompute)
    return f"{'with' if case.checkpointing else 'without'} checkpointing"


def _end(plan: Plan, command: str) -> list[str]:
    notes = ["", *(f"note: {note}" for note in plan.notes)] if plan.notes else []
    return ["", "command:", f"  {command}", *notes]


def _values(option: Estimate) -> dict[str, Any]:
    names = ("fits", "tight", "total", "spare", "moment")
    found = {"method": option.variant, **vars(option.case), **{name: getattr(option, name) for name in names}}
    found |= {"parts": dict(option.parts), "moments": dict(option.moments), "allocator_peak": option.allocated}
    return found | {"estimated_tokens_per_second": option.tokens_per_second}


def _parts(plan: Plan) -> Iterator[str]:
    found = plan.nearest
    sources = {"allocator slack": "assumed", "context": plan.card.context_source, "desktop": plan.card.desktop_source}
    sources["working memory"] = f"counted: {found.moment}"
    yield f"{'part':<{_WIDTH}} {'GiB':>6}  source"
    for name, nbytes in found.parts.items():
        if nbytes >= _LEAST:
            yield f"{name:<{_WIDTH}} {nbytes / GIB:>6.2f}  {sources.get(name, 'counted')}"
    rest = f"{found.spare / GIB:.2f} spare" if found.fits else f"{-found.spare / GIB:.2f} missing"
    tight = f", tight: the assumed parts may be {TIGHT / GIB:.1f} GiB larger" if found.tight else ""
    yield f"{'total':<{_WIDTH}} {found.total / GIB:>6.2f}  of {plan.card.usable / GIB:.2f}: {rest}{tight}"
    yield ""
    levels = ", ".join(f"{name} {nbytes / GIB:.1f}" for name, nbytes in found.moments.items())
    yield f"peak allocation by phase: {levels}"
    yield f"TRL's fused loss is assumed; full logits would take {plan.full_logits / GIB:.1f} GiB more at the loss"
    for twin in plan.grid:
        others = replace(found.case, checkpointing=twin.case.checkpointing, recompute=twin.case.recompute)
        if (twin.variant, twin.case) == (found.variant, others) and twin is not found:
            kept = twin.parts["activations kept"] / GIB
            total = f"{twin.total / GIB:.1f} GiB in total"
            yield f"{_recomputation(twin.case)}: {kept:.1f} GiB of activations kept, {total}"


def _host(plan: Plan) -> tuple[dict[str, float], dict[int, bool]]:
    """Host memory of the training processes by part, and whether it fits common sizes."""
    found = plan.nearest
    parts = host(plan.variants[found.variant], found.case, workers=plan.request.workers)
    return parts, {size: sum(parts.values()) <= size * GIB for size in _HOSTS}


def _host_line(plan: Plan) -> str:
    found, fitting = _host(plan)
    parts = ", ".join(f"{name} {nbytes / GIB:.1f}" for name, nbytes in found.items() if nbytes >= GIB / 20)
    fits = ", ".join(f"{'fits' if fits else 'does not fit'} {size} GiB" for size, fits in fitting.items())
    return f"host memory: {sum(found.values()) / GIB:.1f} GiB, mostly assumed ({parts}): {fits}"


def _grid(plan: Plan) -> Iterator[str]:
    sizes = sorted({each.case.micro_batch for each in plan.grid})
    best = plan.nearest.tokens_per_second
    yield "peak in GiB by micro-batch: [does not fit], ~tight, *choice; speed of the best that fits: the choice is 1"
    yield f"{'length':>6}  {'method':<6} {'checkpointing':<13}{''.join(f'{size:>9}' for size in sizes)}    speed"
    rows: dict[tuple[int, str, str], list[Estimate]] = {}
    for each in sorted(plan.grid, key=lambda each: each.case.length):
        how = "some" if each.case.recompute else "on" if each.case.checkpointing else "off"
        rows.setdefault((each.case.length, each.variant, how), []).append(each)
    for (length, method, checkpointing), row in rows.items():
        cells = {}
        for each in row:
            value = f"{'~' * each.tight}{each.total / GIB:.1f}"
            cells[each.case.micro_batch] = f"*{value}" if each is plan.choice else value if each.fits else f"[{value}]"
        fitting = [each.tokens_per_second for each in row if each.fits]
        speed = f"{max(fitting) / best:.2f}" if fitting else "-"
        shown = "".join(f"{cells.get(size, ''):>9}" for size in sizes)
        yield f"{length:>6}  {method:<6} {checkpointing:<13}{shown}{speed:>9}"


# ---- flags ------------------------------------------------------------------------------------------------------


def _passed_on(wanted: argparse.Namespace) -> dict[str, Any]:
    return {name: value for name in _PASSED_ON if (value := getattr(wanted, name)) is not None}


def _parser() -> argparse.ArgumentParser:
    what = "Memory that a training job needs on the card, and the fastest settings that fit."
    parser = CommandParser(prog=f"{_PROGRAM} plan", description=what)
    usual = PlanRequest()

    def flag(*names: str, help: str, **settings: Any) -> None:
        parser.add_argument(*names, help=help, **settings)

    flag("--model", "--model_name_or_path", help="Hub id or directory; only its configuration is read")
    flag("--revision", "--model_revision", default=usual.revision, help="branch, tag or commit of a Hub id")
    flag("--trust_remote_code", action="store_true", help="run the model's own configuration code")
    flag("--gpu", help="a card by name, as rx7900xt (default: the card in this machine, else rx7900xt)")
    flag("--vram", type=float, metavar="GIB", help="plan for a card of this size")
    flag(
        "--desktop_gib", type=float, help="memory of other processes (default: read from the card, else 1; headless: 0)"
    )
    flag("--method", choices=METHODS, help="default: the faster of lora and qlora that fits")
    names = ("--seq", "--max_length", "--max_seq_length")
    flag(*names, dest="length", type=int, help="tokens of a sequence (2048, or the model's limit)")
    flag("--effective_batch", type=int, default=usual.effective_batch, help="sequences per step, over all cards (16)")
    names = ("--batch_size", "--micro_batch", "--per_device_train_batch_size")
    flag(*names, dest="micro_batch", type=int, help="sequences in one pass on a card (default: the fastest)")
    several = "number of cards; with several, DDP, FSDP2, split and pipeline are compared (1)"
    flag("--cards", type=int, default=1, help=several)
    over = "split the layers of one model over the cards: balanced by memory, or as given (18 or 18,22)"
    flag("--split", nargs="?", const="auto", metavar="N,N", help=over)
    flag("--measure", action="store_true", help="time this machine's card first, and keep the result for later plans")
    flag(
        "--savings",
        action="store_true",
        help="compare single changes, as dropout 0, packing or a second card",
    )
    flag("--rows", type=int, default=0, help="rows of the dataset, to estimate hours; each counts as --seq tokens")
    recompute = "only with, or only without, checkpointing (default: the faster that fits)"
    flag("--checkpointing", action=argparse.BooleanOptionalAction, default=None, help=recompute)
    flag("--packing", action="store_true", help="several short sequences in a row")
    flag("--rank", "--lora_r", type=int, default=usual.rank, help="of the adapters (16)")
    flag("--alpha", "--lora_alpha", type=int, default=usual.alpha, help="of the adapters (32)")
    flag("--dropout", "--lora_dropout", type=float, default=usual.dropout, help="of the adapters (0)")
    which = f"modules with adapters, or {ALL_LINEAR}, the default"
    flag("--targets", "--lora_target_modules", nargs="+", default=[ALL_LINEAR], help=which)
    flag("--modules_to_save", "--lora_modules_to_save", nargs="+", default=[], help="modules that are trained whole")
    flag("--dora", "--use_dora", action="store_true", help="DoRA")
    flag("--rslora", "--use_rslora", action="store_true", help="rank-stabilised LoRA")
    flag("--dtype", choices=DTYPES, help="of weights that are not quantised (bfloat16; float32 with --method full)")
    flag("--optim", choices=tuple(OPTIMIZERS), default=usual.optim, help=f"optimizer ({usual.optim})")
    flag("--attention", "--attn_implementation", choices=ATTENTIONS, default=usual.attention, help="(sdpa)")
    flag("--workers", "--dataloader_num_workers", type=int, default=0, help="data loader workers of a process (0)")
    put = "added to the command line and the recipe"
    flag("--dataset", "--dataset_name", dest="dataset_name", help=put)
    rate = checked(float, lambda value: 0 <= value < math.inf, "0 or more, and finite")
    flag("--lr", "--learning_rate", dest="learning_rate", type=rate, help=put)
    epochs = checked(float, lambda value: 0 < value < math.inf, "more than 0, and finite")
    flag("--epochs", "--num_train_epochs", dest="num_train_epochs", type=epochs, help=put)
    recipe = "write the choice as a recipe for `hf-rocm-tune sft --config`"
    flag("--emit", type=Path, metavar="RECIPE.yaml", help=recipe)
    flag("--force", action="store_true", help="replace an existing recipe")
    flag("--json", action="store_true", help="print JSON; memory in bytes")
    flag("--largest", action="store_true", help="print the largest known public model that fits")
    return parser


# ---- the choice as a job ----------------------------------------------------------------------------------------


def settings(
    request: PlanRequest, method: str, case: Case, passed_on: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """The settings of a choice by flag of ``hf-rocm-tune sft``; None: not set."""
    found: dict[str, Any] = {"model_name_or_path": request.model, **(passed_on or {})}
    found |= {
        "model_revision": request.revision,
        "trust_remote_code": request.trust_remote_code,
        "max_length": case.length,
        "packing": case.packing,
        "per_device_train_batch_size": case.micro_batch,
        "gradient_accumulation_steps": case.accumulation,
        "gradient_checkpointing": case.checkpointing,
        "recompute_layers": None if case.recompute is None else "{},{}".format(*case.recompute),
        "use_peft": method != "full",
        "dtype": request.dtype_of(method),
        "bf16": request.autocast,
        "optim": request.optim,
        "attn_implementation": None if request.attention == "sdpa" else request.attention,
        "dataloader_num_workers": request.workers,
    }
    if method == "qlora":
        found |= {"load_in_4bit": True, "use_bnb_nested_quant": request.nested}
    if method != "full":
        found |= {
            "lora_r": request.rank,
            "lora_alpha": request.alpha,
            "lora_dropout": request.dropout,
            "lora_target_modules": [request.targets] if isinstance(request.targets, str) else list(request.targets),
            "lora_modules_to_save": list(request.modules_to_save) or None,
            "use_dora": request.dora,
            "use_rslora": request.rslora,
        }
    return found


def _start(request: PlanRequest) -> list[str]:
    return [_PROGRAM, "sft", *(launcher_flags(request.cards).split() if request.cards > 1 else [])]


def command(request: PlanRequest, option: Estimate, passed_on: Mapping[str, Any]) -> str:
    """The command line of a choice, without flags that have their default."""
    words = _start(request)
    nothing = Case(micro_batch=0, length=0, checkpointing=True, accumulation=0)
    usual = settings(PlanRequest(), "qlora", nothing) | {"load_in_4bit": False}
    given = {"dataset_name": _NO_DATA, **passed_on}
    for name, value in settings(request, option.variant, option.case, given).items():
        if value is None or value == usual.get(name):
            continue
        words.append(f"--{name}")
        if isinstance(value, list):
            words += map(str, value)
        elif value is not True:
            words.append("false" if value is False else str(value))
    return shlex.join(words)


def _check_recipe(path: Path, *, replace: bool) -> None:
    """Refuses a file that cannot be written or exists, before anything is planned."""
    if not can_be_file(path):
        raise UsageError(f"--emit {path} is not a file in a directory that exists; choose another")
    if path.exists() and not replace:
        raise UsageError(f"--emit {path}: that file exists; choose another, or give --force to replace it")


def _write_recipe(wanted: argparse.Namespace, what: str, request: PlanRequest, option: Estimate, **more: Any) -> None:
    """Writes the choice as a recipe if ``--emit`` is given, with ``what`` as its first comment."""
    path: Path | None = wanted.emit
    if path is None:
        return
    start = shlex.join([*_start(request), "--config", path.name])
    data = "" if wanted.dataset_name else f" --dataset_name {_NO_DATA}"
    content = settings(request, option.variant, option.case, _passed_on(wanted)) | more
    content = {name: value for name, value in content.items() if value is not None}
    given = yaml.safe_dump(content, sort_keys=False, allow_unicode=True)
    try:
        with path.open("w" if wanted.force else "x", encoding="utf-8") as file:
            file.write(f"# {what}\n# Start: {start}{data}\n{given}")
    except OSError as error:
        raise UsageError(f"--emit {path} cannot be written: {error.strerror}; choose another file") from error
    if not wanted.json:
        print(f"\nrecipe: {path}")
