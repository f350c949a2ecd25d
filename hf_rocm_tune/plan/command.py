"""``hf-rocm-tune plan``: flags, the plan as one dictionary (``--json``), its text, and the command of the choice."""

from __future__ import annotations

import argparse
import itertools
import json
import shlex
from collections.abc import Callable, Iterator, Sequence
from dataclasses import fields, replace
from typing import Any

import numpy as np
import psutil

from hf_rocm_tune.errors import CommandParser, OutOfMemoryError, UsageError, checked, count_of
from hf_rocm_tune.machine.software import missing_for_triton
from hf_rocm_tune.models.streamed import AUTO
from hf_rocm_tune.models.streamed import FLAG as STREAM
from hf_rocm_tune.plan.estimate import GIB, LINK, NEAR, CardMemory, Case, Estimate, describe, host, little_room, missing
from hf_rocm_tune.plan.fit import Plan, plan_for
from hf_rocm_tune.plan.request import (
    METHODS,
    PUBLIC_MODELS,
    SAME,
    PlanRequest,
    as_targets,
    card_memory,
    config_of,
    quiet,
)
from hf_rocm_tune.plan.ways import THROUGH_HOST, advice, best_of, sentence, ways

_PROGRAM = "hf-rocm-tune"
_NO_DATA = "YOUR_DATA"
_OF_WAYS = ("name", "crossing", "flags")
ReadRows = Callable[[Sequence[str], Any], tuple[list[int], dict[str, Any], tuple[int, tuple[Any, ...]]]]


def main(argv: Sequence[str], *, prepare: Callable[[str | None], None], read_rows: ReadRows) -> int:
    """Plan a training job from the model's configuration. 0 if something fits; else the nearest case is printed, too.

    ``prepare`` prepares this process for Hugging Face's libraries, once the arguments are valid. ``read_rows`` gives
    tokens of each row, and the summary of the rows, of a training command and method.
    """
    wanted = _parser().parse_args(list(argv))
    if wanted.model is None and not wanted.largest:
        raise UsageError(f"give --model, a Hub id or a directory, or --largest; see `{_PROGRAM} plan --help`")
    given = {each.name: getattr(wanted, each.name) for each in fields(PlanRequest) if hasattr(wanted, each.name)}
    given = {name: tuple(each) if isinstance(each, list) else each for name, each in given.items() if each is not None}
    given |= {"targets": as_targets(given["targets"])} if "targets" in given else {}
    given |= {"methods": (wanted.method,)} if wanted.method else {}
    if wanted.stream and (wanted.cards or 1) > 1:
        raise UsageError(f"{STREAM} is planned for one card (of several, each streams for itself): leave out --cards")
    card = card_memory(name=wanted.gpu, vram_gib=wanted.vram, desktop_gib=wanted.desktop_gib)
    here = card.desktop_source.startswith("read")  # from a card of this machine
    request = PlanRequest(**given, triton=not here or not missing_for_triton())
    prepare(request.model)
    memory = None if wanted.gpu or wanted.vram else psutil.virtual_memory().total
    card = replace(card, host=memory if wanted.host_gib is None else int(wanted.host_gib * GIB))
    if wanted.link_gb_s:
        card = replace(card, link=wanted.link_gb_s * 1e9, link_source="given")
    with quiet():
        if wanted.largest:
            table = {"schema": 2, "length": request.length, "card": card.name, "largest": _largest(request, card)}
            print(json.dumps(table) if wanted.json else "\n".join(_largest_table(table)))
            return 0
        lengths: list[int] = []
        summary: dict[str, Any] = {}
        if wanted.dataset_name is not None:
            words = ["--model_name_or_path", request.model, "--model_revision", request.revision]
            words += ["--dataset_name", wanted.dataset_name, "--max_length", str(request.length)]
            words += ["--trust_remote_code"] if request.trust_remote_code else []
            words += ["--max_pixels", str(request.max_pixels)] if request.max_pixels else []
            words += ["--image_folder", request.image_folder] if request.image_folder else []
            lengths, summary, (placeholders, pictures) = read_rows(words, request.trainer)
            request = replace(request, placeholders=placeholders, pictures=pictures)
            longest = request.length if wanted.length is not None else min(request.length, max(2, *lengths))
            request = replace(request, rows=request.rows or len(lengths), length=longest)
        plan = plan_for(request, card=card, within_limit=wanted.length is None)
        found = _values(plan, wanted.dataset_name or _NO_DATA, lengths, summary)
        print(json.dumps(found) if wanted.json else "\n".join(_text(found, verbose=wanted.verbose)))
        if not found["fits"]:
            raise OutOfMemoryError(f"nothing fits: {missing(plan.nearest)}; {advice(plan)}")
    return 0


def _data(lengths: Sequence[int], summary: dict[str, Any], case: Case) -> dict[str, Any]:
    """The rows' summary, tokens that they take in random micro-batches, and the share of padding in these.

    Each row is padded to the longest beside it, or packed. The longest of b rows is the i-th shortest of n with a
    probability of (i / n)^b - ((i - 1) / n)^b.
    """
    kept = np.sort(np.minimum(np.array(lengths, dtype=np.float64), case.length))
    at_most = (np.arange(len(kept) + 1) / len(kept)) ** case.micro_batch
    computed = float(kept.sum() if case.packing else len(kept) * (kept * np.diff(at_most)).sum())
    longer = sum(each > case.length for each in lengths)
    cut = {"limit": case.length, "cut": longer} if longer else {}
    return {**summary, **cut, "computed": computed, "padding": 1 - float(kept.sum()) / computed}


def _values(plan: Plan, dataset: str, lengths: Sequence[int], summary: dict[str, Any]) -> dict[str, Any]:
    """The plan as JSON values; memory in bytes. On several cards the fastest way that fits is the choice."""
    request = plan.request
    if request.cards > 1:
        found, flags, more = _choice_of_ways(plan)
    else:
        found, flags = plan.nearest, ""
        more = {
            "longest": {method: plan.longest(method) for method in plan.recordings},
            "others": _alternatives(plan, found) if found.fits else [],
        }
    data = _data(lengths, summary, found.case) if lengths else None
    variant = plan.variants[found.variant]
    parts = host(variant, found.case, workers=request.workers)
    card = {name: value for name, value in vars(plan.card).items() if name != "rates"}
    return {
        "schema": 3,
        "model": request.model,
        "architecture": type(plan.sample.base).__name__,
        "parameters": variant.weights.parameters,
        "layers": plan.layers,
        "card": {**card, "free": plan.card.free},
        "request": {"trainer": request.trainer, "length": request.length, "effective_batch": request.effective_batch},
        "fits": found.fits,
        "tight": found.tight,
        "roomy": found.roomy,
        "total": found.total,
        "spare": found.spare,
        "room": little_room(found.spare, plan.card) if found.fits else None,
        "choice": _choice(found),
        "flags": flags,
        "command": command(request, found, dataset, flags) if found.fits else None,
        "data": data,
        "speed": _speed(plan, found, data, len(lengths)),
        "streaming": _streaming(plan, found),
        "host": {"parts": parts, "total": sum(parts.values())},
        "grid": [_choice(option) for option in plan.grid],
        "notes": list(plan.notes),
        **more,
    }


def _choice_of_ways(plan: Plan) -> tuple[Estimate, str, dict[str, Any]]:
    """On several cards: the choice with its evaluation batch, its flags, and what is said of all ways."""
    every = ways(plan)
    best = best_of(every) or min(every, key=lambda way: way.option.total)
    eval_batch = plan.with_evaluation(best.option).case.eval_batch
    found = replace(best.option, case=replace(best.option.case, eval_batch=eval_batch))
    more: dict[str, Any] = {"way": best.name, "card_lines": list(best.lines), "ways": []}
    for way in every:
        more["ways"].append({**_choice(way.option), **{name: getattr(way, name) for name in _OF_WAYS}})
    if found.fits:
        more["advice"] = sentence(plan, best)
    return found, best.flags, more


def _alternatives(plan: Plan, found: Estimate) -> list[dict[str, Any]]:
    """What else is worth showing beside the choice: a faster one that fills the card more, the fastest of each other
    method with room, and the one of the same method that leaves the most."""
    same_method = [option for option in plan.grid if option.variant == found.variant]
    clearly_faster = found.tokens_per_second * (1 + NEAR)
    fuller = [
        option
        for option in same_method
        if option.fits
        and not (option.tight or option.roomy or option.case.recompute)
        and option.tokens_per_second > clearly_faster
    ]
    others = sorted(fuller, key=_speed_of)[-1:]
    fastest: dict[str, Estimate] = {}
    for option in sorted(plan.grid, key=_speed_of):
        if option.variant != found.variant and option.fits and not option.tight:
            fastest[option.variant] = option
    others += fastest.values()
    calmest = max(same_method, key=lambda option: option.spare)
    if calmest.spare > found.spare + GIB / 2:
        others.append(calmest)
    return [_choice(option) for option in others]


def _speed_of(option: Estimate) -> float:
    return option.tokens_per_second


def _choice(option: Estimate) -> dict[str, Any]:
    names = ("fits", "tight", "roomy", "total", "spare", "moment", "host_missing")
    found = {"method": option.variant, **vars(option.case), **{name: getattr(option, name) for name in names}}
    found |= {"parts": dict(option.parts), "moments": dict(option.moments), "allocator_peak": option.allocated}
    return found | {"estimated_tokens_per_second": option.tokens_per_second}


def _speed(plan: Plan, found: Estimate, data: dict[str, Any] | None, read: int) -> dict[str, Any] | None:
    """Tokens a second and hours for the rows, with bounds; None if this card's rates are not known."""
    rates, request = plan.card.rates, plan.request
    if not rates.known:
        return None
    least, most = (share * found.tokens_per_second for share in (rates.least, rates.most))
    count = request.rows or 1000
    tokens, assumed = float(count * request.length), f"assumed: {request.length:,} tokens each"
    if data:
        tokens = data["computed"] * count / read
        assumed = "as read" if count == read else "assumed: as long as those of the dataset"
    tokens *= request.epochs * (2 if request.trainer == "dpo" else 1)
    assumed += "" if request.epochs == 1 else f", {request.epochs:g} epochs"
    hours = [tokens / rate / 3600 for rate in (most, least)]
    told = {"least": least, "most": most, "rows": count, "assumed": assumed, "hours": hours}
    return {"tokens_per_second": found.tokens_per_second, **told, "shares": dict(found.shares)}


def _streaming(plan: Plan, found: Estimate) -> dict[str, Any] | None:
    """What is streamed, and how long it takes beside the rest of a step; None: nothing is."""
    if not found.case.streamed:
        return None
    case = found.case
    seconds = case.cards * case.micro_batch * case.length * case.accumulation / found.tokens_per_second
    return {
        "layers": case.streamed,
        "host_bytes": sum(plan.variants[found.variant].weights.streamed(case.streamed)),
        "bytes_a_step": found.visiting,
        "link_seconds": found.visiting / plan.card.link,
        "compute_seconds": seconds * (1 - found.shares["waiting for streamed weights"]),
    }


def _largest(request: PlanRequest, card: CardMemory) -> list[dict[str, Any]]:
    """By method, the largest public models that fit with one sequence and checkpointing, and the largest streamed."""
    rows: list[dict[str, Any]] = []
    for method, stream in itertools.product(request.methods, (0, AUTO)):
        if stream and (method == "full" or request.dora):
            continue
        single = replace(request, methods=(method,), micro_batch=1, checkpointing=True, mixes=False, stream=stream)
        left = 1 if stream else 3
        for model in sorted((each for each in PUBLIC_MODELS if each.listed), key=lambda each: -each.billions):
            plan = plan_for(single, card=card, config=config_of(model.fields))
            if plan.choice is not None and plan.choice.variant == method:  # else its files are quantised
                speed = plan.choice.tokens_per_second if card.rates.known else None
                name = f"{method}, streamed" if stream else method
                row = {"method": name, "model": model.name, "total": plan.choice.total, "tokens_per_second": speed}
                rows.append(row | {"longest": plan.longest(method)})
                left -= 1
            if not left:
                break
    return rows


# ---- text -------------------------------------------------------------------------------------------------------


def _text(found: dict[str, Any], *, verbose: bool) -> Iterator[str]:
    card, choice, request = found["card"], found["choice"], found["request"]
    of = f"{_gib(found['total'])} of {_gib(card['usable'])} GiB"
    verdict = f"FITS: {of}{' (tight)' if found['tight'] else ''}"
    if not found["fits"]:
        short = choice["host_missing"]
        lacks = f"{_gib(short)} GiB of host memory" if short else f"{_gib(-found['spare'])} GiB"
        verdict = f"DOES NOT FIT: {lacks} missing ({of})"
    name = found["model"] or found["architecture"]
    yield f"{verdict}: {name}, {found['parameters'] / 1e9:.3g} billion parameters, on {card['name']}"
    case = f"{choice['method']}, {describe(choice)}, effective batch {request['effective_batch']}"
    case = case if request["trainer"] == "sft" else f"{request['trainer']}, {case}"
    if found["fits"]:
        yield from ("", f"  {found['command']}", "", case)
        if found["room"]:
            yield found["room"]
        yield from _fitting_lines(found)
    else:
        yield f"nearest: {case}"
    desktop, source = f"{_gib(card['desktop'])} GiB for other programs", card["desktop_source"]
    runtime = f"{_gib(card['context'])} GiB for the runtime"
    both = f"{desktop} and {runtime} (both assumed)"
    included = both if source == "assumed" else f"{desktop} ({source}) and {runtime} (assumed)"
    yield f"includes {included}; -v lists all parts"
    yield from found.get("card_lines", ())
    if verbose:
        yield from _details(found)
    yield from (f"note: {note}" for note in found["notes"])


def _fitting_lines(found: dict[str, Any]) -> Iterator[str]:
    choice, speed = found["choice"], found["speed"]
    if data := found["data"]:
        cut = f", {data['cut']:,} longer than {data['limit']:,} and cut" if data["cut"] else ""
        padding = f"{100 * data['padding']:.0f} % of the computed tokens are padding"
        padding += ": --packing avoids it" if found["request"]["trainer"] == "sft" and data["padding"] > 0.1 else ""
        padding = "packed, so that none is padding" if choice["packing"] else padding
        yield (
            f"data: {count_of(data['rows'], 'row')}, {data['tokens']:,} tokens (median {data['median']:,}, 95 % up to "
            f"{data['p95']:,}, longest {data['longest']:,}){cut}; {padding}"
        )
    if told := found["streaming"]:
        card = found["card"]
        of = f" of {_gib(card['host'])}" if card["host"] else ""
        yield (
            f"streams {told['layers']} of {found['layers']} layers: {_gib(told['host_bytes'])} GiB of host memory{of}; "
            f"{told['bytes_a_step'] / 1e9:,.0f} GB a step, {told['link_seconds']:,.1f} s at {card['link'] / 1e9:.3g} "
            f"GB/s ({card['link_source']}) beside {told['compute_seconds']:,.1f} s of computing"
        )
    if choice["eval_batch"]:
        yield f"evaluation: {count_of(choice['eval_batch'], 'row')} at a time"
    if speed:
        low, high = speed["hours"]
        unit, each = ("hours", 1) if high > 2 else ("minutes", 60) if high > 1 / 60 else ("seconds", 3600)
        yield (
            f"{low * each:.2g} to {high * each:.2g} {unit} for {count_of(speed['rows'], 'row')} ({speed['assumed']}): "
            f"about {speed['tokens_per_second']:,.0f} tokens/s, estimated, not measured"
        )
    else:
        yield f"no speed: no measured rate of {found['card']['name']} is known"
    if "advice" in found:
        yield found["advice"]
    others = [(other, other["method"], "") for other in found.get("others", ())]
    ways = [each for each in found.get("ways", ()) if each["fits"] and each["name"] != found["way"]]
    others += [(each, f"{each['name']}, {each['method']}", f" ({each['flags']})") for each in ways]
    for other, name, flags in others:
        ratio = other["estimated_tokens_per_second"] / choice["estimated_tokens_per_second"]
        figures = f"{_gib(other['total'])} GiB, {100 * ratio:.0f} % of the speed"
        yield f"also fits: {name}, {figures}: {describe(other)}{flags}"
    if longest := ", ".join(f"{method} {most:,}" for method, most in found.get("longest", {}).items() if most):
        yield f"longest sequence, one row at a time, recomputed: {longest} tokens"


def _gib(nbytes: float) -> str:
    return f"{nbytes / GIB:.1f}"


def _details(found: dict[str, Any]) -> Iterator[str]:
    choice, card = found["choice"], found["card"]
    sources = {"allocator slack": "assumed", "context": "assumed", "desktop": card["desktop_source"]}
    sources["working memory"] = f"counted: {choice['moment']}"
    for name, nbytes in choice["parts"].items():
        if nbytes > 5e6:
            yield f"  {name:<30}{nbytes / GIB:>6.2f} GiB  {sources.get(name, 'counted')}"
    levels = ", ".join(f"{name} {_gib(nbytes)}" for name, nbytes in choice["moments"].items())
    yield f"peak allocation by phase: {levels}"
    hosts = ", ".join(f"{name} {_gib(nbytes)}" for name, nbytes in found["host"]["parts"].items())
    yield f"host memory: {_gib(found['host']['total'])} GiB, mostly assumed ({hosts})"
    if "ways" in found:
        yield f"assumed: {LINK / 1e9:.0f} GB/s between cards, {THROUGH_HOST / 1e9:.0f} through the host"


def _largest_table(found: dict[str, Any]) -> Iterator[str]:
    yield f"largest known models that fit {found['card']}, one sequence of {found['length']:,} tokens, recomputed"
    for row in found["largest"]:
        speed = "" if row["tokens_per_second"] is None else f", {row['tokens_per_second']:,.0f} tokens/s (estimated)"
        longest = f", up to {row['longest']:,} tokens" if row["longest"] else ""
        yield f"  {row['method']:<16} {row['model']:<36} {_gib(row['total'])} GiB{longest}{speed}"


# ---- flags ------------------------------------------------------------------------------------------------------


def _gib_from(least: int) -> Callable[[str], Any]:
    return checked(float, lambda gib: least <= gib <= 1024, f"from {least} to 1024 GiB")


def _parser() -> argparse.ArgumentParser:
    what = "Memory that a training job needs on the card, and the fastest settings that fit."
    parser = CommandParser(prog=f"{_PROGRAM} plan", description=what)

    def flag(names: str, help: str, **settings: Any) -> None:
        parser.add_argument(*names.split(), help=help, **settings)

    for each in fields(PlanRequest):
        if each.metadata:
            own = {name: value for name, value in each.metadata.items() if name != "names"}
            parser.add_argument(*each.metadata["names"], dest=each.name, default=None, **own)
    flag("--gpu", "a card by name, as rx7900xt (default: the card in this machine, else rx7900xt)")
    flag("--vram", "plan for a card of this size", type=_gib_from(1), metavar="GIB")
    flag(
        "--desktop_gib",
        "memory of other processes (default: read from the card, else 1; headless: 0)",
        type=_gib_from(0),
    )
    flag("--method", "train with this method (default: the faster of lora and qlora that fits)", choices=METHODS)
    flag(
        "--host_gib",
        "memory of the host (default: that of this machine, if its card is planned)",
        type=float,
        metavar="GIB",
    )
    link = "speed from host memory to the card, as `hf-rocm-tune doctor` measures it (13, assumed)"
    flag("--link_gb_s", link, type=checked(float, lambda rate: rate > 0, "above 0"), metavar="GB/S")
    flag(
        "--no-checkpointing --no_gradient_checkpointing",
        "keep activations instead of recomputing them",
        dest="checkpointing",
        action="store_const",
        const=False,
    )
    rate = "accepted as in a training command; it takes no memory and no time"
    flag("--lr --learning_rate", rate, type=float)
    flag("--dataset --dataset_name", "rows to read for lengths, padding and hours", dest="dataset_name")
    flag("-v --verbose", "print all parts; --json has all cases and ways", action="store_true")
    flag("--json", "print JSON; memory in bytes", action="store_true")
    flag("--largest", "list the largest known public models that fit, by method", action="store_true")
    return parser


def command(request: PlanRequest, option: Estimate, dataset: str = _NO_DATA, flags: str = "") -> str:
    """The command line of a choice, without flags that have their default; ``flags``: of the way over the cards."""
    words = [_PROGRAM, request.trainer, *flags.split()]
    nothing = Case(micro_batch=0, length=0, checkpointing=True, accumulation=0, eval_batch=8)
    usual = _settings(PlanRequest(), "qlora", nothing) | {"load_in_4bit": False}
    model, *rest = _settings(request, option.variant, option.case).items()
    for name, value in (model, ("dataset_name", dataset), *rest):
        if value is not None and value != usual.get(name):
            given = value if isinstance(value, list) else [] if value is True else [value]
            words += [f"--{name}", *("false" if each is False else str(each) for each in given)]
    return shlex.join(words)


def _settings(request: PlanRequest, method: str, case: Case) -> dict[str, Any]:
    same = {flag: getattr(request, name) for name, flag in SAME.items()}
    found = same | {
        "max_length": case.length,
        "packing": case.packing if request.trainer == "sft" else None,
        "one_pass_loss": request.one_pass_loss or None,
        "per_device_eval_batch_size": case.eval_batch,
        "per_device_train_batch_size": case.micro_batch,
        "gradient_accumulation_steps": case.accumulation,
        "gradient_checkpointing": case.checkpointing,
        "stream_weights": case.streamed or None,
        "recompute_layers": None if case.recompute is None else "{},{}".format(*case.recompute),
        "use_peft": method != "full",
        "load_in_4bit": method == "qlora",
        "use_bnb_nested_quant": request.nested if method == "qlora" else None,
        "dtype": request.dtype_of(method),
        "attn_implementation": None if request.attention == "sdpa" else request.attention,
        "lora_r": request.rank if method != "full" else None,
        "lora_target_parameters": [*request.target_parameters] or None,
        "lora_modules_to_save": [*request.modules_to_save] or None,
        "use_dora": request.dora,
    }
    if method != "full":
        targets = [request.targets] if isinstance(request.targets, str) else [*request.targets]
        found |= {"lora_dropout": request.dropout, "lora_target_modules": targets}
    return found
