"""``hf-rocm-tune plan``: flags, the plan as one dictionary (``--json``) and as text, a command line and a recipe."""

from __future__ import annotations

import argparse
import json
import math
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import yaml

from hf_rocm_tune.errors import CommandParser, OutOfMemoryError, UsageError, checked
from hf_rocm_tune.paths import can_be_file
from hf_rocm_tune.plan.estimate import GIB, OPTIMIZERS, CardMemory, Case, Estimate, host
from hf_rocm_tune.plan.fit import Plan, advice, largest_models, memory_lines, plan_for, split_plan
from hf_rocm_tune.plan.request import (
    ALL_LINEAR,
    ATTENTIONS,
    DEFAULT_OPTIMIZER,
    DTYPES,
    METHODS,
    TRAINERS,
    PlanRequest,
    as_targets,
    card_memory,
    quiet,
)
from hf_rocm_tune.plan.ways import LINK, THROUGH_HOST, CardsWay, best_of, sentence, ways

_PROGRAM = "hf-rocm-tune"
_NO_DATA = "YOUR_DATA"
#: Flags of a job that do not change the plan.
_PASSED_ON = ("dataset_name", "learning_rate", "num_train_epochs")
_LAUNCHERS = ("accelerate_config", "num_processes")


def main(argv: Sequence[str], *, prepare: Callable[[], None]) -> int:
    """Plan a training job from the model's configuration.

    Args:
        argv: the arguments after ``plan``.
        prepare: prepares this process for Hugging Face's libraries; called once the arguments are valid.

    Returns:
        0 if something fits.

    Raises:
        UsageError: the arguments are wrong, or this model cannot be planned.
        OutOfMemoryError: nothing fits; the nearest case is printed anyway.
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
    card = card_memory(name=wanted.gpu, vram_gib=wanted.vram, desktop_gib=wanted.desktop_gib)
    if wanted.largest:
        return _largest(request, card, as_json=wanted.json)
    with quiet():
        found, plan, option = (_plan if wanted.split is None else _split)(request, card, wanted)
    if wanted.json:
        print(json.dumps(found))
    else:
        print(*as_text(found, verbose=wanted.verbose), sep="\n")
    if not found["fits"]:
        with quiet():
            raise OutOfMemoryError(f"nothing fits: {-found['spare'] / GIB:.1f} GiB are missing; {advice(plan)}")
    _write_recipe(wanted, found, plan.request, option)
    return 0


# ---- the plan as a dictionary -----------------------------------------------------------------------------------

_Found = tuple[dict[str, Any], Plan, Estimate]


def _plan(request: PlanRequest, card: CardMemory, wanted: argparse.Namespace) -> _Found:
    """One card, or several of which the best way decides."""
    plan = plan_for(request, card=card, within_limit=wanted.length is None)
    if plan.request.cards == 1:
        found = plan.nearest
        more: dict[str, Any] = {"savings": _savings(plan)} if wanted.savings else {}
        return _values(plan, found, "", wanted, **more), plan, found
    several = ways(plan)
    best = best_of(several)
    way = best or min(several, key=lambda each: each.total)
    case = replace(way.option.case, eval_batch=plan.with_evaluation(way.option).case.eval_batch)
    option = replace(way.option, case=case, total=way.total, spare=card.usable - way.total, tight=way.tight)
    more = {"way": way.name, "ways": list(map(_way_values, several))}
    more |= {"advice": sentence(plan, several)} if best else {}
    return _values(plan, option, way.flags, wanted, **more), plan, option


def _split(request: PlanRequest, card: CardMemory, wanted: argparse.Namespace) -> _Found:
    """``--split``: one model over several cards instead of one on each."""
    from hf_rocm_tune.models.split import parse

    if request.trainer != "sft":
        raise UsageError(f"--split is for sft: {request.trainer} does not work with --split_layers")
    try:
        given = parse(wanted.split)
    except UsageError as error:
        raise UsageError(str(error).replace("--split_layers", "--split")) from error
    most = max(wanted.cards, 2) if given is None else len(given) + 1
    found = split_plan(request, cards=[card] * most, counts=given, within_limit=wanted.length is None)
    if given is not None and wanted.cards not in (1, len(found.cards)):
        raise UsageError(f"--split {wanted.split} is for {len(found.cards)} cards, --cards says {wanted.cards}")
    fullest = min(found.estimates, key=lambda each: each.spare)
    option = replace(fullest, case=found.plan.with_evaluation(found.option).case)
    option = replace(option, tokens_per_second=found.option.tokens_per_second, shares=found.option.shares)
    each = [
        {"name": one.name, "usable": one.usable, "layers": count, "total": has.total, "spare": has.spare}
        | {"moment": has.moment, "parts": dict(has.parts)}
        for one, count, has in zip(found.cards, found.counts, found.estimates, strict=True)
    ]
    flags = f"--split_layers {','.join(map(str, found.counts))}"
    more = {"way": "split", "cards": each, "card_lines": list(memory_lines(found))}
    return _values(found.plan, option, flags, wanted, **more), found.plan, option


def _values(plan: Plan, found: Estimate, flags: str, wanted: argparse.Namespace, **more: Any) -> dict[str, Any]:
    """The plan as JSON values; memory in bytes."""
    request, passed_on = (
        plan.request,
        {name: value for name in _PASSED_ON if (value := getattr(wanted, name)) is not None},
    )
    parts = host(plan.variants[found.variant], found.case, workers=request.workers)
    chosen = _choice(found)
    alone = request.cards == 1 and "way" not in more  # else the cases of one card are not those of the way
    longest = {method: plan.longest(method) for method in plan.recordings} if alone else {}
    return {
        "schema": 2,
        "model": request.model,
        "architecture": plan.architecture,
        "parameters": plan.parameters,
        "layers": plan.layers,
        "card": {name: value for name, value in vars(plan.card).items() if name != "rates"} | {"free": plan.card.free},
        "request": {"trainer": request.trainer, "length": request.length, "effective_batch": request.effective_batch},
        "fits": found.fits,
        "tight": found.tight,
        "total": found.total,
        "spare": found.spare,
        "choice": chosen,
        "flags": flags,
        "command": command(request, found, passed_on, flags) if found.fits else None,
        "calmer": _calmer(plan, found) if alone and found.fits else None,
        "others": _others(plan, found) if alone and found.fits else [],
        "speed": _speed(plan, found),
        "settings": settings(request, found.variant, found.case),
        "full_logits": plan.full_logits,
        "host": {"parts": parts, "total": sum(parts.values())},
        "longest": longest,
        "grid": [_choice(each) for each in plan.grid],
        "notes": list(plan.notes),
        **more,
    }


def _choice(option: Estimate) -> dict[str, Any]:
    names = ("fits", "tight", "total", "spare", "moment")
    found = {"method": option.variant, **vars(option.case), **{name: getattr(option, name) for name in names}}
    found |= {"parts": dict(option.parts), "moments": dict(option.moments), "allocator_peak": option.allocated}
    return found | {"estimated_tokens_per_second": option.tokens_per_second}


def _calmer(plan: Plan, found: Estimate) -> dict[str, Any] | None:
    """The same method with less memory, at nine tenths of the speed or more."""
    enough = [
        each
        for each in plan.wanted()
        if each.variant == found.variant
        and each.tokens_per_second >= 0.9 * found.tokens_per_second
        and each.total < found.total - GIB / 2
    ]
    return _choice(min(enough, key=lambda each: each.total)) if enough else None


def _others(plan: Plan, found: Estimate) -> list[dict[str, Any]]:
    """What else fits: the best of the other method, and of longer sequences."""
    groups: dict[tuple[str, int], list[Estimate]] = {}
    for each in plan.grid:
        if (each.variant != found.variant) != (each.case.length > found.case.length) and not each.tight and each.fits:
            groups.setdefault((each.variant, each.case.length), []).append(each)
    return [_choice(max(group, key=lambda each: each.tokens_per_second)) for group in groups.values()]


def _way_values(way: CardsWay) -> dict[str, Any]:
    own = {name: getattr(way, name) for name in ("name", "total", "fits", "tight", "longest", "crossing", "flags")}
    return (
        own
        | {"method": way.option.variant, **vars(way.option.case)}
        | {"estimated_tokens_per_second": way.option.tokens_per_second}
    )


def _speed(plan: Plan, found: Estimate) -> dict[str, Any] | None:
    """Tokens a second and hours for the rows, with bounds; None if this card's rates are not known."""
    rates = plan.card.rates
    if not rates.known:
        return None
    least, most = (share * found.tokens_per_second for share in (rates.least, rates.most))
    rows = plan.request.rows or 1000
    each = 2 if plan.request.trainer == "dpo" else 1
    tokens = rows * plan.request.length * each
    return {
        "tokens_per_second": found.tokens_per_second,
        "least": least,
        "most": most,
        "rows": rows,
        "hours": [tokens / rate / 3600 for rate in (most, least)],
        "shares": dict(found.shares),
    }


def _savings(plan: Plan) -> list[dict[str, Any]]:
    """The choice of the same method after each of several single changes."""
    request = replace(plan.request, methods=(plan.nearest.variant,))
    adapters, sft = plan.nearest.variant != "full", request.trainer == "sft"
    changes: list[tuple[str, dict[str, Any], bool]] = [
        ("as asked", {}, True),
        ("--dropout 0", {"dropout": 0.0}, adapters and request.dropout > 0),
        ("--one_pass_loss", {"one_pass_loss": True}, adapters and sft and not request.modules_to_save),
        ("--packing", {"packing": True}, sft and not request.packing),
        ("--optim adamw_8bit", {"optim": "adamw_8bit"}, request.optim == DEFAULT_OPTIMIZER),
        ("--cards 2", {"cards": 2}, request.cards == 1 and request.effective_batch % 2 == 0),
    ]
    rows = []
    for name, change, applies in changes:
        if applies:
            other = plan_for(replace(request, **change), card=plan.card, config=plan.config, grid=False)
            rows.append((name, other.nearest, other.nearest.total, other.choice is not None))
    if request.cards == 1 and sft:
        split = split_plan(request, cards=[plan.card] * 2, config=plan.config)
        rows.append(("--split", split.option, max(each.total for each in split.estimates), split.fits))
    return [
        {"change": name, "micro_batch": found.case.micro_batch, "checkpointing": found.case.checkpointing}
        | {"total": total, "fits": fits, "tokens_per_second": found.tokens_per_second}
        for name, found, total, fits in rows
    ]


def _largest(request: PlanRequest, card: CardMemory, *, as_json: bool) -> int:
    found = largest_models(request, card=card)
    if as_json:
        print(json.dumps({"schema": 1, "length": request.length, "largest": found}))
        return 0
    print(f"largest of the known public models on {card.name}, one sequence of {request.length} tokens, checkpointed:")
    for method, name in found.items():
        print(f"  {method:<6} {name or 'none'}")
    return 0


# ---- text -------------------------------------------------------------------------------------------------------

_LEAST = 0.005 * GIB  # smaller parts would be shown as 0.00


def as_text(found: dict[str, Any], *, verbose: bool) -> Iterator[str]:
    """The lines of a plan: whether it fits, the command, what else fits; ``verbose``: all figures."""
    card, choice, request = found["card"], found["choice"], found["request"]
    of = f"{_gib(found['total'])} of {_gib(card['usable'])} GiB"
    verdict = f"FITS: {of}{' (tight)' if found['tight'] else ''}"
    if not found["fits"]:
        verdict = f"DOES NOT FIT: {_gib(-found['spare'])} GiB missing ({of})"
    name = found["model"] or found["architecture"]
    yield f"{verdict}: {name}, {found['parameters'] / 1e9:.2f} billion parameters, on {card['name']}"
    case = f"{choice['method']}, {_case(choice)}, effective batch {request['effective_batch']}"
    if request["trainer"] != "sft":
        case = f"{request['trainer']}, {case}"
    if not found["fits"]:
        yield f"nearest: {case}"
    else:
        yield from ("", f"  {found['command']}", "", case)
        yield from _fitting_lines(found)
    yield (
        f"of this, other programs {_gib(card['desktop'])} GiB ({card['desktop_source']}), the runtime "
        f"{_gib(card['context'])} (assumed); -v lists all parts"
    )
    yield from found.get("card_lines", ())
    if verbose:
        yield from _details(found)
    if "savings" in found:
        yield from _savings_table(found["savings"])
    yield from (f"note: {note}" for note in found["notes"])


def _fitting_lines(found: dict[str, Any]) -> Iterator[str]:
    choice, speed, request = found["choice"], found["speed"], found["request"]
    if choice["eval_batch"]:
        evaluation = choice["moments"].get("evaluation")
        peak = f", {_gib(evaluation)} GiB at its peak" if evaluation else ""
        yield f"evaluation: {choice['eval_batch']} rows at a time{peak}"
    if speed:
        low, high = speed["hours"]
        yield (
            f"{low:.2g} to {high:.2g} hours for {speed['rows']:,} rows of {request['length']:,} tokens: about "
            f"{speed['tokens_per_second']:,.0f} tokens/s, estimated, not measured"
        )
    else:
        yield f"no speed: no measured rate of {found['card']['name']} is known"
    if "advice" in found:
        yield found["advice"]

    def line(other: dict[str, Any]) -> str:
        ratio = other["estimated_tokens_per_second"] / choice["estimated_tokens_per_second"]
        return f"{_gib(other['total'])} GiB, {ratio:.2f} of the speed: {other['method']}, {_case(other)}"

    if found["calmer"]:
        yield f"calmer: {line(found['calmer'])}"
    yield from (f"also fits: {line(other)}" for other in found["others"])
    for way in found.get("ways", ()):
        if way["fits"] and way["name"] != found["way"]:
            yield f"also fits: {way['name']}, {line(way)} ({way['flags']})"
    if longest := ", ".join(f"{method} {most:,}" for method, most in found["longest"].items() if most):
        yield f"longest sequence, one row at a time, recomputed: {longest} tokens"


def _gib(nbytes: float) -> str:
    return f"{nbytes / GIB:.1f}"


def _case(case: dict[str, Any]) -> str:
    packed = " packed" if case["packing"] else ""
    return (
        f"{case['micro_batch']}{packed} x {case['length']} tokens x {case['accumulation']} accumulated, "
        f"{_recomputation(case)}"
    )


def _recomputation(case: dict[str, Any]) -> str:
    if case["recompute"] is not None:
        return "{} layers recomputed whole and {} selectively".format(*case["recompute"])
    return f"activations {'recomputed' if case['checkpointing'] else 'kept'}"


def _details(found: dict[str, Any]) -> Iterator[str]:
    choice, card = found["choice"], found["card"]
    sources = {"allocator slack": "assumed", "context": "assumed", "desktop": card["desktop_source"]}
    sources["working memory"] = f"counted: {choice['moment']}"
    if "ways" in found:
        yield from _ways_table(found)
    elif "cards" not in found:
        yield from ("", f"{'part':<24} {'GiB':>6}  source")
        for name, nbytes in choice["parts"].items():
            if nbytes >= _LEAST:
                yield f"{name:<24} {nbytes / GIB:>6.2f}  {sources.get(name, 'counted')}"
        yield f"{'total':<24} {choice['total'] / GIB:>6.2f}  of {card['usable'] / GIB:.2f}"
        levels = ", ".join(f"{name} {_gib(nbytes)}" for name, nbytes in choice["moments"].items())
        yield from ("", f"peak allocation by phase: {levels}")
        yield f"TRL's fused loss is assumed; full logits would take {_gib(found['full_logits'])} GiB more at the loss"
    if speed := found["speed"]:
        shares = ", ".join(f"{100 * share:.0f} % {name}" for name, share in speed["shares"].items() if share >= 0.005)
        yield f"time of a step: {shares}"
    hosts = ", ".join(f"{name} {_gib(nbytes)}" for name, nbytes in found["host"]["parts"].items() if nbytes >= GIB / 20)
    yield f"host memory: {_gib(found['host']['total'])} GiB, mostly assumed ({hosts})"
    if "way" not in found:
        yield from ("", *_grid(found))


def _grid(found: dict[str, Any]) -> Iterator[str]:
    grid, choice = found["grid"], found["choice"]
    sizes = sorted({each["micro_batch"] for each in grid})
    yield "peak in GiB by micro-batch: [does not fit], ~tight; speed of the best that fits: the choice is 1"
    yield f"{'length':>6}  {'method':<6} {'recomputed':<10}{''.join(f'{size:>9}' for size in sizes)}    speed"
    rows: dict[tuple[int, str, str], list[dict[str, Any]]] = {}
    for each in sorted(grid, key=lambda each: int(each["length"])):
        how = "some" if each["recompute"] else "all" if each["checkpointing"] else "none"
        rows.setdefault((each["length"], each["method"], how), []).append(each)
    for (length, method, how), row in rows.items():
        cells = {
            each["micro_batch"]: f"{'~' * each['tight']}{_gib(each['total'])}"
            if each["fits"]
            else f"[{_gib(each['total'])}]"
            for each in row
        }
        speeds = [each["estimated_tokens_per_second"] for each in row if each["fits"]]
        speed = f"{max(speeds) / choice['estimated_tokens_per_second']:.2f}" if speeds else "-"
        shown = "".join(f"{cells.get(size, ''):>9}" for size in sizes)
        yield f"{length:>6}  {method:<6} {how:<10}{shown}{speed:>9}"


def _ways_table(found: dict[str, Any]) -> Iterator[str]:
    rates = f"assumed: {LINK / 1e9:.0f} GB/s between cards, {THROUGH_HOST / 1e9:.0f} through the host"
    yield from ("", f"ways over the cards ({rates})")
    yield f"{'way':<9} {'method':<6} {'GiB':>6} {'longest':>8} {'speed':>6} {'GiB a step':>11}  case"
    for way in found["ways"]:
        gib = _gib(way["total"]) if way["fits"] else f"[{_gib(way['total'])}]"
        ratio = way["estimated_tokens_per_second"] / found["choice"]["estimated_tokens_per_second"]
        yield (
            f"{way['name']:<9} {way['method']:<6} {gib:>6} {way['longest'] or '-':>8} {ratio:>6.2f} "
            f"{way['crossing'] / GIB:>11.2f}  {_case(way)}"
        )


def _savings_table(rows: list[dict[str, Any]]) -> Iterator[str]:
    yield from ("", f"{'single change':<22} {'GiB':>7}  {'speed':>5}  case")
    for row in rows:
        gib = _gib(row["total"]) if row["fits"] else f"[{_gib(row['total'])}]"
        speed = f"{row['tokens_per_second'] / rows[0]['tokens_per_second']:.2f}"
        how = "recomputed" if row["checkpointing"] else "kept"
        yield f"{row['change']:<22} {gib:>7}  {speed:>5}  micro-batch {row['micro_batch']}, activations {how}"


# ---- flags ------------------------------------------------------------------------------------------------------


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
    flag("--trainer", choices=TRAINERS, default=usual.trainer, help="the verb to plan (sft)")
    flag("--method", choices=METHODS, help="default: the faster of lora and qlora that fits")
    names = ("--seq", "--max_length", "--max_seq_length")
    flag(*names, dest="length", type=int, help="tokens of a sequence (2048, or the model's limit)")
    flag("--effective_batch", type=int, default=usual.effective_batch, help="sequences per step, over all cards (16)")
    names = ("--batch_size", "--micro_batch", "--per_device_train_batch_size")
    flag(*names, dest="micro_batch", type=int, help="sequences in one pass on a card (default: the fastest)")
    sizes = ("--eval_batch", "--per_device_eval_batch_size")
    flag(
        *sizes,
        type=int,
        dest="eval_batch",
        help="sequences at a time in evaluation (default: no more memory than a step)",
    )
    several = "number of cards; with several, DDP, FSDP2, split, pipeline and tensor parallelism are compared (1)"
    flag("--cards", type=int, default=1, help=several)
    over = "split the layers of one model over the cards: balanced by memory, or as given (18 or 18,22)"
    flag("--split", nargs="?", const="auto", metavar="N,N", help=over)
    flag(
        "--savings",
        action="store_true",
        help="compare single changes, as dropout 0, packing or a second card",
    )
    flag("--rows", type=int, default=0, help="rows of the dataset, for hours; each counts as --seq tokens (1000)")
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
    flag("--one_pass_loss", action="store_true", help="gradient of the loss in the forward pass")
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
    flag("-v", "--verbose", action="store_true", help="all parts, cases and ways")
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
        "packing": case.packing if request.trainer == "sft" else None,
        "one_pass_loss": request.one_pass_loss or None,
        "per_device_eval_batch_size": case.eval_batch,
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


def command(request: PlanRequest, option: Estimate, passed_on: Mapping[str, Any], flags: str = "") -> str:
    """The command line of a choice, without flags that have their default; ``flags``: of the way over the cards."""
    words = [_PROGRAM, request.trainer, *flags.split()]
    nothing = Case(micro_batch=0, length=0, checkpointing=True, accumulation=0, eval_batch=8)
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


def _write_recipe(wanted: argparse.Namespace, found: dict[str, Any], request: PlanRequest, option: Estimate) -> None:
    """Writes the choice as a recipe if ``--emit`` is given."""
    path: Path | None = wanted.emit
    if path is None:
        return
    words = found["flags"].replace("--", "").split()
    flags = dict(zip(words[::2], words[1::2], strict=True))
    launch = [word for name in _LAUNCHERS if name in flags for word in (f"--{name}", flags.pop(name))]
    start = shlex.join([_PROGRAM, request.trainer, *launch, "--config", path.name])
    data = "" if wanted.dataset_name else f" --dataset_name {_NO_DATA}"
    passed_on = {name: getattr(wanted, name) for name in _PASSED_ON}
    content = settings(request, option.variant, option.case, passed_on) | {
        name: yaml.safe_load(value) if value in ("true", "false") else value for name, value in flags.items()
    }
    content = {name: value for name, value in content.items() if value is not None}
    given = yaml.safe_dump(content, sort_keys=False, allow_unicode=True)
    what = f"Planned for {found['total'] / GIB:.1f} GiB of each card; `{_PROGRAM} plan -v` lists the parts."
    try:
        with path.open("w" if wanted.force else "x", encoding="utf-8") as file:
            file.write(f"# {what}\n# Start: {start}{data}\n{given}")
    except OSError as error:
        raise UsageError(f"--emit {path} cannot be written: {error.strerror}; choose another file") from error
    if not wanted.json:
        print(f"\nrecipe: {path}")
