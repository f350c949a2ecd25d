"""``hf-rocm-tune plan``: flags, the plan as one dictionary (``--json``), its text, and the command of the choice."""

from __future__ import annotations

import argparse
import json
import shlex
from collections.abc import Callable, Iterable, Iterator, Sequence
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
    PublicModel,
    as_targets,
    card_memory,
    config_of,
    quiet,
)
from hf_rocm_tune.plan.strategies import THROUGH_HOST, advice, best_of, explain, strategies

_PROGRAM = "hf-rocm-tune"
_NO_DATA = "YOUR_DATA"
ReadRows = Callable[[Sequence[str], Any], tuple[list[int], dict[str, Any], tuple[int, tuple[Any, ...]]]]


def main(argv: Sequence[str], *, prepare: Callable[[str | None], None], read_rows: ReadRows) -> int:
    """Plan a training job from the model's configuration. 0 if something fits; else the nearest case is printed, too.

    ``prepare`` prepares this process for Hugging Face's libraries, once the arguments are valid. ``read_rows`` gives
    tokens of each row, and the summary of the rows, of a training command and method.
    """
    flags = _parser().parse_args(list(argv))
    if flags.model is None and not flags.largest:
        raise UsageError(f"give --model, a Hub id or a directory, or --largest; see `{_PROGRAM} plan --help`")
    if flags.stream and (flags.cards or 1) > 1:
        raise UsageError(f"{STREAM} is planned for one card (of several, each streams for itself): leave out --cards")
    card = card_memory(name=flags.gpu, vram_gib=flags.vram, desktop_gib=flags.desktop_gib)
    request = _request(flags, card)
    prepare(request.model)
    card = _with_host_and_link(card, flags)
    with quiet():
        if flags.largest:
            table = {"schema": 2, "length": request.length, "card": card.name, "largest": _largest(request, card)}
            _print(table, _largest_table(table), as_json=flags.json)
            return 0
        lengths: list[int] = []
        summary: dict[str, Any] = {}
        if flags.dataset_name is not None:
            request, lengths, summary = _with_rows(request, flags, read_rows)
        plan = plan_for(request, card=card, within_limit=flags.length is None)
        values = _values(plan, flags.dataset_name or _NO_DATA, lengths, summary)
        _print(values, _text(values, verbose=flags.verbose), as_json=flags.json)
        if not values["fits"]:
            raise OutOfMemoryError(f"nothing fits: {missing(plan.nearest)}; {advice(plan)}")
    return 0


def _print(values: dict[str, Any], lines: Iterable[str], *, as_json: bool) -> None:
    if as_json:
        print(json.dumps(values))
    else:
        print("\n".join(lines))


def _request(flags: argparse.Namespace, card: CardMemory) -> PlanRequest:
    """The request of these flags; a field whose flag is not given keeps its default."""
    given: dict[str, Any] = {}
    for field in fields(PlanRequest):
        value = getattr(flags, field.name, None)
        if isinstance(value, list):
            value = tuple(value)
        if value is not None:
            given[field.name] = value
    if "targets" in given:
        given["targets"] = as_targets(given["targets"])
    if flags.method:
        given["methods"] = (flags.method,)
    card_is_here = card.desktop_source.startswith("read")  # from a card of this machine
    triton = not card_is_here or not missing_for_triton()
    return PlanRequest(**given, triton=triton)


def _with_host_and_link(card: CardMemory, flags: argparse.Namespace) -> CardMemory:
    """The card with the memory of its host, which is unknown of a card that is named, and the speed of its link."""
    memory: int | None = None
    if flags.host_gib is not None:
        memory = int(flags.host_gib * GIB)
    elif not flags.gpu and not flags.vram:
        memory = psutil.virtual_memory().total
    card = replace(card, host=memory)
    if flags.link_gb_s:
        card = replace(card, link=flags.link_gb_s * 1e9, link_source="given")
    return card


def _with_rows(
    request: PlanRequest, flags: argparse.Namespace, read_rows: ReadRows
) -> tuple[PlanRequest, list[int], dict[str, Any]]:
    """Read the rows of ``--dataset``: the request with what follows from them, their lengths, and their summary.

    Without ``--max_length`` no more tokens are planned than the longest row has.
    """
    words = ["--model_name_or_path", request.model, "--model_revision", request.revision]
    words += ["--dataset_name", flags.dataset_name, "--max_length", str(request.length)]
    if request.trust_remote_code:
        words += ["--trust_remote_code"]
    if request.max_pixels:
        words += ["--max_pixels", str(request.max_pixels)]
    if request.image_folder:
        words += ["--image_folder", request.image_folder]
    lengths, summary, (placeholders, pictures) = read_rows(words, request.trainer)
    request = replace(request, placeholders=placeholders, pictures=pictures)
    longest = request.length
    if flags.length is None:
        longest = min(request.length, max(2, *lengths))
    request = replace(request, rows=request.rows or len(lengths), length=longest)
    return request, lengths, summary


# ---- the plan as values -----------------------------------------------------------------------------------------


def _values(plan: Plan, dataset: str, lengths: Sequence[int], summary: dict[str, Any]) -> dict[str, Any]:
    """The plan as JSON values; memory in bytes. On several cards the fastest strategy that fits is the choice."""
    request = plan.request
    flags = ""
    if request.cards > 1:
        option, flags, more = _choice_of_strategy(plan)
    else:
        option = plan.nearest
        more = {"longest": {method: plan.longest(method) for method in plan.recordings}, "others": []}
        if option.fits:
            more["others"] = _alternatives(plan, option)
    data = None
    if lengths:
        data = _data(lengths, summary, option.case)
    room = training_command = None
    if option.fits:
        room = little_room(option.spare, plan.card)
        training_command = command(request, option, dataset, flags)
    variant = plan.variants[option.variant]
    host_parts = host(variant, option.case, workers=request.workers)
    card = {name: value for name, value in vars(plan.card).items() if name != "rates"}
    return {
        "schema": 3,
        "model": request.model,
        "architecture": type(plan.sample.base).__name__,
        "parameters": variant.weights.parameters,
        "layers": plan.layers,
        "card": {**card, "free": plan.card.free},
        "request": {"trainer": request.trainer, "length": request.length, "effective_batch": request.effective_batch},
        "fits": option.fits,
        "tight": option.tight,
        "roomy": option.roomy,
        "total": option.total,
        "spare": option.spare,
        "room": room,
        "choice": _choice(option),
        "flags": flags,
        "command": training_command,
        "data": data,
        "speed": _speed(plan, option, data, len(lengths)),
        "streaming": _streaming(plan, option),
        "host": {"parts": host_parts, "total": sum(host_parts.values())},
        "grid": [_choice(case) for case in plan.grid],
        "notes": list(plan.notes),
        **more,
    }


def _choice(option: Estimate) -> dict[str, Any]:
    """A case with its estimate, as JSON values."""
    values = {"method": option.variant, **vars(option.case)}
    for name in ("fits", "tight", "roomy", "total", "spare", "moment", "host_missing"):
        values[name] = getattr(option, name)
    values["parts"] = dict(option.parts)
    values["moments"] = dict(option.moments)
    values["allocator_peak"] = option.allocated
    values["estimated_tokens_per_second"] = option.tokens_per_second
    return values


def _choice_of_strategy(plan: Plan) -> tuple[Estimate, str, dict[str, Any]]:
    """On several cards: the choice with its evaluation batch, its flags, and what is said of all strategies."""
    compared = strategies(plan)
    best = best_of(compared) or min(compared, key=lambda strategy: strategy.option.total)
    eval_batch = plan.with_evaluation(best.option).case.eval_batch
    option = replace(best.option, case=replace(best.option.case, eval_batch=eval_batch))
    more: dict[str, Any] = {"way": best.name, "card_lines": list(best.lines), "ways": []}
    for strategy in compared:
        of_strategy = {"name": strategy.name, "crossing": strategy.crossing, "flags": strategy.flags}
        more["ways"].append({**_choice(strategy.option), **of_strategy})
    if option.fits:
        more["advice"] = explain(plan, best)
    return option, best.flags, more


def _alternatives(plan: Plan, choice: Estimate) -> list[dict[str, Any]]:
    """What else is worth showing beside the choice: a faster one that fills the card more, the fastest of each other
    method with room, and the one of the same method that leaves the most."""
    same_method = [option for option in plan.grid if option.variant == choice.variant]
    clearly_faster = choice.tokens_per_second * (1 + NEAR)
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
        if option.variant != choice.variant and option.fits and not option.tight:
            fastest[option.variant] = option
    others += fastest.values()
    calmest = max(same_method, key=lambda option: option.spare)
    if calmest.spare > choice.spare + GIB / 2:
        others.append(calmest)
    return [_choice(option) for option in others]


def _speed_of(option: Estimate) -> float:
    return option.tokens_per_second


def _data(lengths: Sequence[int], summary: dict[str, Any], case: Case) -> dict[str, Any]:
    """The rows' summary, tokens that they take in random micro-batches, and the share of padding in these.

    Each row is padded to the longest beside it, or packed. The longest of b rows is the i-th shortest of n with a
    probability of (i / n)^b - ((i - 1) / n)^b.
    """
    rows = len(lengths)
    kept = np.sort(np.minimum(np.array(lengths, dtype=np.float64), case.length))
    tokens = float(kept.sum())
    computed = tokens
    if not case.packing:
        at_most = (np.arange(rows + 1) / rows) ** case.micro_batch
        computed = float(rows * (kept * np.diff(at_most)).sum())
    data = dict(summary)
    longer = sum(length > case.length for length in lengths)
    if longer:
        data |= {"limit": case.length, "cut": longer}
    return {**data, "computed": computed, "padding": 1 - tokens / computed}


def _speed(plan: Plan, option: Estimate, data: dict[str, Any] | None, rows_read: int) -> dict[str, Any] | None:
    """Tokens a second and hours for the rows, with bounds; None if this card's rates are not known."""
    rates = plan.card.rates
    request = plan.request
    if not rates.known:
        return None
    least = rates.least * option.tokens_per_second
    most = rates.most * option.tokens_per_second
    rows = request.rows or 1000
    if data is None:
        tokens = float(rows * request.length)
        assumed = f"assumed: {request.length:,} tokens each"
    else:
        tokens = data["computed"] * rows / rows_read
        assumed = "as read"
        if rows != rows_read:
            assumed = "assumed: as long as those of the dataset"
    tokens *= request.epochs * request.rows_a_unit
    if request.epochs != 1:
        assumed += f", {request.epochs:g} epochs"
    return {
        "tokens_per_second": option.tokens_per_second,
        "least": least,
        "most": most,
        "rows": rows,
        "assumed": assumed,
        "hours": [tokens / most / 3600, tokens / least / 3600],
        "shares": dict(option.shares),
    }


def _streaming(plan: Plan, option: Estimate) -> dict[str, Any] | None:
    """What is streamed, and how long it takes beside the rest of a step; None: nothing is."""
    case = option.case
    if not case.streamed:
        return None
    seconds = case.cards * case.micro_batch * case.length * case.accumulation / option.tokens_per_second
    return {
        "layers": case.streamed,
        "host_bytes": sum(plan.variants[option.variant].weights.streamed(case.streamed)),
        "bytes_a_step": option.visiting,
        "link_seconds": option.visiting / plan.card.link,
        "compute_seconds": seconds * (1 - option.shares["waiting for streamed weights"]),
    }


def _largest(request: PlanRequest, card: CardMemory) -> list[dict[str, Any]]:
    """By method, the three largest public models that fit with one sequence and checkpointing, and the largest one
    that fits streamed."""
    models = [model for model in PUBLIC_MODELS if model.listed]
    models.sort(key=lambda model: -model.billions)
    rows: list[dict[str, Any]] = []
    for method in request.methods:
        rows += _largest_of(method, models, request, card, stream=0, count=3)
        if method != "full" and not request.dora:
            rows += _largest_of(method, models, request, card, stream=AUTO, count=1)
    return rows


def _largest_of(
    method: str, models: Sequence[PublicModel], request: PlanRequest, card: CardMemory, *, stream: int, count: int
) -> list[dict[str, Any]]:
    """So many of these models, of which the largest is first, that fit with this method."""
    single = replace(request, methods=(method,), micro_batch=1, checkpointing=True, mixes=False, stream=stream)
    rows: list[dict[str, Any]] = []
    for model in models:
        plan = plan_for(single, card=card, config=config_of(model.fields))
        choice = plan.choice
        if choice is None or choice.variant != method:  # it does not fit, or its files are quantised
            continue
        speed = None
        if card.rates.known:
            speed = choice.tokens_per_second
        row: dict[str, Any] = {"method": method, "model": model.name, "total": choice.total}
        if stream:
            row["method"] = f"{method}, streamed"
        rows.append({**row, "tokens_per_second": speed, "longest": plan.longest(method)})
        if len(rows) == count:
            break
    return rows


# ---- text -------------------------------------------------------------------------------------------------------


def _text(values: dict[str, Any], *, verbose: bool) -> Iterator[str]:
    card, choice, request = values["card"], values["choice"], values["request"]
    name = values["model"] or values["architecture"]
    yield f"{_verdict(values)}: {name}, {values['parameters'] / 1e9:.3g} billion parameters, on {card['name']}"
    case = f"{choice['method']}, {describe(choice)}, effective batch {request['effective_batch']}"
    if request["trainer"] != "sft":
        case = f"{request['trainer']}, {case}"
    if values["fits"]:
        yield from ("", f"  {values['command']}", "", case)
        if values["room"]:
            yield values["room"]
        yield from _fitting_lines(values)
    else:
        yield f"nearest: {case}"
    desktop = f"{_gib(card['desktop'])} GiB for other programs"
    runtime = f"{_gib(card['context'])} GiB for the runtime"
    included = f"{desktop} ({card['desktop_source']}) and {runtime} (assumed)"
    if card["desktop_source"] == "assumed":
        included = f"{desktop} and {runtime} (both assumed)"
    yield f"includes {included}; -v lists all parts"
    yield from values.get("card_lines", ())
    if verbose:
        yield from _details(values)
    for note in values["notes"]:
        yield f"note: {note}"


def _verdict(values: dict[str, Any]) -> str:
    memory = f"{_gib(values['total'])} of {_gib(values['card']['usable'])} GiB"
    if not values["fits"]:
        of_host = values["choice"]["host_missing"]
        lacks = f"{_gib(of_host)} GiB of host memory" if of_host else f"{_gib(-values['spare'])} GiB"
        return f"DOES NOT FIT: {lacks} missing ({memory})"
    if values["tight"]:
        return f"FITS: {memory} (tight)"
    return f"FITS: {memory}"


def _fitting_lines(values: dict[str, Any]) -> Iterator[str]:
    """What is said of a choice that fits, and of what else does."""
    choice = values["choice"]
    if values["data"]:
        yield _data_line(values)
    if values["streaming"]:
        yield _streaming_line(values)
    if choice["eval_batch"]:
        yield f"evaluation: {count_of(choice['eval_batch'], 'row')} at a time"
    if values["speed"]:
        yield _speed_line(values["speed"])
    else:
        yield f"no speed: no measured rate of {values['card']['name']} is known"
    if "advice" in values:
        yield values["advice"]
    for other in values.get("others", ()):
        yield _other_line(other["method"], other, choice)
    for strategy in values.get("ways", ()):
        if strategy["fits"] and strategy["name"] != values["way"]:
            name = f"{strategy['name']}, {strategy['method']}"
            yield f"{_other_line(name, strategy, choice)} ({strategy['flags']})"
    longest = [f"{method} {tokens:,}" for method, tokens in values.get("longest", {}).items() if tokens]
    if longest:
        yield f"longest sequence, one row at a time, recomputed: {', '.join(longest)} tokens"


def _data_line(values: dict[str, Any]) -> str:
    data = values["data"]
    cut = ""
    if data["cut"]:
        cut = f", {data['cut']:,} longer than {data['limit']:,} and cut"
    if values["choice"]["packing"]:
        padding = "packed, so that none is padding"
    else:
        padding = f"{100 * data['padding']:.0f} % of the computed tokens are padding"
        if values["request"]["trainer"] == "sft" and data["padding"] > 0.1:
            padding += ": --packing avoids it"
    lengths = f"median {data['median']:,}, 95 % up to {data['p95']:,}, longest {data['longest']:,}"
    return f"data: {count_of(data['rows'], 'row')}, {data['tokens']:,} tokens ({lengths}){cut}; {padding}"


def _streaming_line(values: dict[str, Any]) -> str:
    streaming, card = values["streaming"], values["card"]
    memory = f"{_gib(streaming['host_bytes'])} GiB of host memory"
    if card["host"]:
        memory += f" of {_gib(card['host'])}"
    return (
        f"streams {streaming['layers']} of {values['layers']} layers: {memory}; "
        f"{streaming['bytes_a_step'] / 1e9:,.0f} GB a step, {streaming['link_seconds']:,.1f} s at "
        f"{card['link'] / 1e9:.3g} GB/s ({card['link_source']}) beside {streaming['compute_seconds']:,.1f} s of "
        "computing"
    )


def _speed_line(speed: dict[str, Any]) -> str:
    low, high = speed["hours"]
    if high > 2:
        unit, in_an_hour = "hours", 1
    elif high > 1 / 60:
        unit, in_an_hour = "minutes", 60
    else:
        unit, in_an_hour = "seconds", 3600
    return (
        f"{low * in_an_hour:.2g} to {high * in_an_hour:.2g} {unit} for {count_of(speed['rows'], 'row')} "
        f"({speed['assumed']}): about {speed['tokens_per_second']:,.0f} tokens/s, estimated, not measured"
    )


def _other_line(name: str, other: dict[str, Any], choice: dict[str, Any]) -> str:
    ratio = other["estimated_tokens_per_second"] / choice["estimated_tokens_per_second"]
    return f"also fits: {name}, {_gib(other['total'])} GiB, {100 * ratio:.0f} % of the speed: {describe(other)}"


def _gib(nbytes: float) -> str:
    return f"{nbytes / GIB:.1f}"


def _details(values: dict[str, Any]) -> Iterator[str]:
    """What ``--verbose`` adds: every part at the peak, the levels of all phases, and the host's memory."""
    choice, card = values["choice"], values["card"]
    sources = {"allocator slack": "assumed", "context": "assumed", "desktop": card["desktop_source"]}
    sources["working memory"] = f"counted: {choice['moment']}"
    for name, nbytes in choice["parts"].items():
        if nbytes > 5e6:
            yield f"  {name:<30}{nbytes / GIB:>6.2f} GiB  {sources.get(name, 'counted')}"
    yield f"peak allocation by phase: {_sizes(choice['moments'])}"
    host_memory = values["host"]
    yield f"host memory: {_gib(host_memory['total'])} GiB, mostly assumed ({_sizes(host_memory['parts'])})"
    if "ways" in values:
        yield f"assumed: {LINK / 1e9:.0f} GB/s between cards, {THROUGH_HOST / 1e9:.0f} through the host"


def _sizes(parts: dict[str, float]) -> str:
    return ", ".join(f"{name} {_gib(nbytes)}" for name, nbytes in parts.items())


def _largest_table(values: dict[str, Any]) -> Iterator[str]:
    yield f"largest known models that fit {values['card']}, one sequence of {values['length']:,} tokens, recomputed"
    for row in values["largest"]:
        line = f"  {row['method']:<16} {row['model']:<36} {_gib(row['total'])} GiB"
        if row["longest"]:
            line += f", up to {row['longest']:,} tokens"
        if row["tokens_per_second"] is not None:
            line += f", {row['tokens_per_second']:,.0f} tokens/s (estimated)"
        yield line


# ---- flags ------------------------------------------------------------------------------------------------------


def _gib_from(least: int) -> Callable[[str], Any]:
    return checked(float, lambda gib: least <= gib <= 1024, f"from {least} to 1024 GiB")


def _parser() -> argparse.ArgumentParser:
    what = "Memory that a training job needs on the card, and the fastest settings that fit."
    parser = CommandParser(prog=f"{_PROGRAM} plan", description=what)

    def flag(names: str, help: str, **settings: Any) -> None:
        parser.add_argument(*names.split(), help=help, **settings)

    for field in fields(PlanRequest):
        if field.metadata:
            settings = {name: value for name, value in field.metadata.items() if name != "names"}
            parser.add_argument(*field.metadata["names"], dest=field.name, default=None, **settings)
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


# ---- the command of a choice ------------------------------------------------------------------------------------


def command(request: PlanRequest, option: Estimate, dataset: str = _NO_DATA, flags: str = "") -> str:
    """The command line of a choice, without flags that have their default; ``flags``: of the parallel strategy."""
    nothing = Case(micro_batch=0, length=0, checkpointing=True, accumulation=0, eval_batch=8)
    defaults = _settings(PlanRequest(), "qlora", nothing) | {"load_in_4bit": False}
    settings = _settings(request, option.variant, option.case)
    model = settings.pop("model_name_or_path")
    words = [_PROGRAM, request.trainer, *flags.split()]
    if model:
        words += ["--model_name_or_path", model]
    words += ["--dataset_name", dataset]
    for name, value in settings.items():
        if value is not None and value != defaults.get(name):
            words += [f"--{name}", *_flag_values(value)]
    return shlex.join(words)


def _flag_values(value: Any) -> list[str]:
    if value is True:
        return []
    if value is False:
        return ["false"]
    if isinstance(value, list):
        return [str(item) for item in value]
    return [str(value)]


def _settings(request: PlanRequest, method: str, case: Case) -> dict[str, Any]:
    """The settings of a training verb by the names of its flags; None: not given."""
    settings: dict[str, Any] = {flag: getattr(request, name) for name, flag in SAME.items()}
    settings |= {
        "max_length": case.length,
        "packing": None,
        "one_pass_loss": request.one_pass_loss or None,
        "per_device_eval_batch_size": case.eval_batch,
        "per_device_train_batch_size": case.micro_batch,
        "gradient_accumulation_steps": case.accumulation,
        "gradient_checkpointing": case.checkpointing,
        "stream_weights": case.streamed or None,
        "recompute_layers": None,
        "use_peft": method != "full",
        "load_in_4bit": method == "qlora",
        "use_bnb_nested_quant": None,
        "dtype": request.dtype_of(method),
        "attn_implementation": None,
        "lora_r": None,
        "lora_target_parameters": [*request.target_parameters] or None,
        "lora_modules_to_save": [*request.modules_to_save] or None,
        "use_dora": request.dora,
    }
    if request.trainer == "sft":
        settings["packing"] = case.packing
    if case.recompute is not None:
        settings["recompute_layers"] = "{},{}".format(*case.recompute)
    if method == "qlora":
        settings["use_bnb_nested_quant"] = request.nested
    if request.attention != "sdpa":
        settings["attn_implementation"] = request.attention
    if method != "full":
        targets = request.targets
        settings["lora_r"] = request.rank
        settings["lora_dropout"] = request.dropout
        settings["lora_target_modules"] = [targets] if isinstance(targets, str) else [*targets]
    return settings
