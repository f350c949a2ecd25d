"""``hf-rocm-tune plan``: its flags, and the choice as a command line and as a recipe. Imports no torch."""

from __future__ import annotations

import argparse
import json
import shlex
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import yaml

from hf_rocm_tune.errors import CommandParser, OutOfMemoryError, UsageError
from hf_rocm_tune.plan import text
from hf_rocm_tune.plan.estimate import GIB, OPTIMIZERS, CardMemory, Estimate
from hf_rocm_tune.plan.fit import Plan, largest_models, plan_for, worthwhile
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
from hf_rocm_tune.plan.split import split_plan

_PROGRAM = "hf-rocm-tune"
_NO_DATA = "YOUR_DATA"
_TWO_CARDS = "dual_rx7900xt"


def main(argv: Sequence[str], *, prepare: Callable[[], None]) -> int:
    """Plan a training job, from the model's configuration alone.

    Args:
        argv: the arguments behind ``plan``.
        prepare: prepares this process for Hugging Face's libraries; called when the question is known to be right.

    Returns:
        0 where something fits.

    Raises:
        UsageError: the question is wrong, or this model cannot be planned.
        OutOfMemoryError: nothing fits; the plan is printed nevertheless.
    """
    wanted = _parser().parse_args(list(argv))
    if wanted.model is None and not wanted.largest:
        raise UsageError(f"give --model, a Hub id or a directory, or --largest; see `{_PROGRAM} plan --help`")
    if wanted.emit is not None:
        _check_recipe(wanted.emit, replace=wanted.force)
    request = _request(wanted)
    prepare()
    card = card_memory(name=wanted.gpu, vram_gib=wanted.vram, desktop_gib=wanted.desktop_gib)
    if wanted.largest:
        return _largest(request, card, as_json=wanted.json)
    return _plan(request, card, wanted) if wanted.split is None else _split(request, card, wanted)


def _plan(request: PlanRequest, card: CardMemory, wanted: argparse.Namespace) -> int:
    with quiet():  # of kernels that would be faster, for example
        plan = plan_for(request, card=card, within_limit=wanted.length is None, at_once=worthwhile())
    request = plan.request
    line = command(request, plan.nearest, wanted.dataset_name)
    print(json.dumps(text.as_values(plan, line)) if wanted.json else text.as_text(plan, line))
    if plan.choice is None:
        missing = -plan.nearest.spare / GIB
        raise OutOfMemoryError(f"nothing fits: {missing:.1f} GiB are missing at the least. {_advice(plan)}")
    if wanted.emit is not None:
        head = f"# Planned for {plan.choice.total / GIB:.1f} GiB of the card; `{_PROGRAM} plan` says what takes it.\n"
        _write_recipe(wanted, head, settings(request, plan.choice, wanted.dataset_name), cards=request.cards)
    return 0


def _split(request: PlanRequest, card: CardMemory, wanted: argparse.Namespace) -> int:
    """``--split``: one model over several cards instead of one on each."""
    from hf_rocm_tune.models.split import parse

    given = parse(wanted.split)
    most = max(wanted.cards, 2) if given is None else len(given) + 1
    found = split_plan(request, cards=[card] * most, counts=given, within_limit=wanted.length is None)
    if given is not None and wanted.cards not in (1, len(found.cards)):
        raise UsageError(f"--split {wanted.split} is for {len(found.cards)} cards, --cards says {wanted.cards}")
    layers = ",".join(map(str, found.counts))
    request = found.plan.request
    line = f"{command(request, found.option, wanted.dataset_name)} --split_layers {layers}"
    print(json.dumps(text.split_as_values(found, line)) if wanted.json else text.split_as_text(found, line))
    if not found.cut.fits:
        missing = f"{-found.cut.least_spare / GIB:.1f} GiB are missing on the fullest of {len(found.cards)} cards"
        raise OutOfMemoryError(f"nothing fits: {missing}. Try --method qlora, a shorter --seq, or more cards")
    if wanted.emit is not None:
        head = (
            f"# One model split over several cards, in one process; `{_PROGRAM} plan --split` says what each takes.\n"
        )
        _write_recipe(wanted, head, settings(request, found.option, wanted.dataset_name) | {"split_layers": layers})
    return 0


def _advice(plan: Plan) -> str:
    request, ways = plan.request, []
    if request.methods == ("full",) and request.dtype is None:
        ways.append("--dtype bfloat16")
    if "qlora" not in request.methods or any("--method qlora" in note for note in plan.notes):
        ways.append("--method qlora")
    if request.length > 512:
        ways.append("a shorter --seq")
    if request.modules_to_save:
        ways.append("no --modules_to_save")
    return f"Try {', '.join([*ways, 'a smaller model'])}; `{_PROGRAM} plan --largest` names the largest that fits"


def _largest(request: PlanRequest, card: CardMemory, *, as_json: bool) -> int:
    found = largest_models(request, card=card)
    if as_json:
        print(json.dumps({"schema": 1, "length": request.length, "largest": found}))
        return 0
    print(f"largest of the known public models on {card.name}, one sequence of {request.length} tokens, checkpointed:")
    for method, name in found.items():
        print(f"  {method:<6} {name or 'none'}")
    return 0


# ---- flags ------------------------------------------------------------------------------------------------------


def _request(wanted: argparse.Namespace) -> PlanRequest:
    fields = PlanRequest.__dataclass_fields__
    given = {name: value for name, value in vars(wanted).items() if name in fields and value is not None}
    if wanted.split is not None:
        given["cards"] = 1  # one process
    if wanted.method is not None:
        given["methods"] = (wanted.method,)
    given["targets"] = as_targets(wanted.targets)
    given["modules_to_save"] = tuple(wanted.modules_to_save)
    return PlanRequest(**given)


def _parser() -> argparse.ArgumentParser:
    what = "What a training job takes of the card, and the fastest way that fits."
    parser = CommandParser(prog=f"{_PROGRAM} plan", description=what)
    usual = PlanRequest()

    def flag(*names: str, help: str, **settings: Any) -> None:
        parser.add_argument(*names, help=help, **settings)

    flag("--model", "--model_name_or_path", help="Hub id or directory; only its configuration is read")
    flag("--revision", "--model_revision", default=usual.revision, help="branch, tag or commit of a Hub id")
    flag("--trust_remote_code", action="store_true", help="run the model's own configuration code")
    flag("--gpu", help="a card by name, as rx7900xt (default: the card in this machine, else rx7900xt)")
    flag("--vram", type=float, metavar="GIB", help="plan for a card of this size instead")
    flag("--desktop_gib", type=float, help="held by others (default: read from the card, else 1; headless: 0)")
    flag("--method", choices=METHODS, help="default: the faster of lora and qlora that fits")
    flag("--seq", "--max_length", dest="length", type=int, help="tokens of a sequence (2048, or the model's limit)")
    flag("--effective_batch", type=int, default=usual.effective_batch, help="sequences a step, all cards (16)")
    flag("--cards", type=int, default=1, help="cards, each with the whole model unless --split (1)")
    over = "share out the layers of one model over the cards instead: evenly by memory, or as said (18 or 18,22)"
    flag("--split", nargs="?", const="auto", metavar="N,N", help=over)
    flag("--packing", action="store_true", help="several short sequences to a row")
    flag("--rank", "--lora_r", type=int, default=usual.rank, help="of the adapters (16)")
    flag("--alpha", "--lora_alpha", type=int, default=usual.alpha, help="of the adapters (32)")
    flag("--dropout", "--lora_dropout", type=float, help="of the adapters (0.05; 0 where PEFT allows no other)")
    names = f"modules with adapters, or {ALL_LINEAR}, the default"
    flag("--targets", "--lora_target_modules", nargs="+", default=[ALL_LINEAR], help=names)
    flag("--modules_to_save", "--lora_modules_to_save", nargs="+", default=[], help="modules trained as a whole")
    flag("--dora", "--use_dora", action="store_true", help="DoRA")
    flag("--rslora", "--use_rslora", action="store_true", help="rank-stabilised LoRA")
    flag("--dtype", choices=DTYPES, help="of weights that are not quantised (bfloat16; float32 with --method full)")
    flag("--optim", choices=tuple(OPTIMIZERS), default=usual.optim, help=f"optimizer ({usual.optim})")
    flag("--attention", "--attn_implementation", choices=ATTENTIONS, default=usual.attention, help="(sdpa)")
    flag("--workers", "--dataloader_num_workers", type=int, default=0, help="data loader workers of a process (0)")
    flag("--dataset_name", help="put into the command line and the recipe")
    recipe = "write the choice as a recipe for `hf-rocm-tune sft --config`"
    flag("--emit", type=Path, metavar="RECIPE.yaml", help=recipe)
    flag("--force", action="store_true", help="replace a recipe that is there")
    flag("--json", action="store_true", help="print JSON; memory in bytes")
    flag("--largest", action="store_true", help="name the largest known public model that fits instead")
    return parser


# ---- the choice as a job ----------------------------------------------------------------------------------------

#: What `hf-rocm-tune sft` does unasked; the command line leaves it out, the recipe states it.
_USUAL: dict[str, Any] = {
    "use_peft": True,
    "load_in_4bit": False,
    "use_bnb_nested_quant": True,
    "dtype": "bfloat16",
    "bf16": True,
    "gradient_checkpointing": True,
    "lora_r": 16,
    "lora_alpha": 32,
    "lora_dropout": 0.05,
    "lora_target_modules": [ALL_LINEAR],
    "lora_modules_to_save": None,
    "use_dora": False,
    "use_rslora": False,
    "packing": False,
    "optim": DEFAULT_OPTIMIZER,
    "attn_implementation": None,
    "model_revision": "main",
    "trust_remote_code": False,
    "dataloader_num_workers": 0,
}


def settings(request: PlanRequest, option: Estimate, dataset: str | None = None) -> dict[str, Any]:
    """The settings of a choice, by the names of the flags of ``hf-rocm-tune sft``; None: not set."""
    case, method = option.case, option.variant
    found: dict[str, Any] = {"model_name_or_path": request.model}
    if dataset is not None:
        found["dataset_name"] = dataset
    found |= {
        "model_revision": request.revision,
        "trust_remote_code": request.trust_remote_code,
        "max_length": case.length,
        "packing": case.packing,
        "per_device_train_batch_size": case.micro_batch,
        "gradient_accumulation_steps": case.accumulation,
        "gradient_checkpointing": case.checkpointing,
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
            "lora_dropout": request.adapter_dropout,
            "lora_target_modules": [request.targets] if isinstance(request.targets, str) else list(request.targets),
            "lora_modules_to_save": list(request.modules_to_save) or None,
            "use_dora": request.dora,
            "use_rslora": request.rslora,
        }
    return found


def command(request: PlanRequest, option: Estimate, dataset: str | None = None) -> str:
    """The command line of a choice; flags with their usual values are left out."""
    words = [_PROGRAM, "sft"]
    if request.cards > 1:
        words += ["--accelerate_config", _TWO_CARDS]
    for name, value in settings(request, option, dataset or _NO_DATA).items():
        if value is None or (name in _USUAL and value == _USUAL[name]):
            continue
        words.append(f"--{name}")
        if isinstance(value, list):
            words += map(str, value)
        elif value is not True:
            words.append("false" if value is False else str(value))
    return shlex.join(words)


def _check_recipe(path: Path, *, replace: bool) -> None:
    """Refuses a file that cannot be written, or is there, before anything is planned."""
    if path.is_dir() or not path.parent.is_dir():
        raise UsageError(f"--emit {path} is not a file in a directory that exists; choose another")
    if path.exists() and not replace:
        raise UsageError(f"--emit {path}: that file exists; choose another, or give --force to replace it")


def _write_recipe(wanted: argparse.Namespace, head: str, content: dict[str, Any], *, cards: int = 1) -> None:
    path: Path = wanted.emit
    _check_recipe(path, replace=wanted.force)
    head += (
        f"# Start: {_PROGRAM} sft {f'--accelerate_config {_TWO_CARDS} ' if cards > 1 else ''}--config {path.name}"
        f"{'' if wanted.dataset_name else f' --dataset_name {_NO_DATA}'}\n"
    )
    given = {name: value for name, value in content.items() if value is not None}
    try:
        path.write_text(head + yaml.safe_dump(given, sort_keys=False, allow_unicode=True), encoding="utf-8")
    except OSError as error:
        raise UsageError(f"--emit {path} cannot be written: {error.strerror}; choose another file") from error
    if not wanted.json:
        print(f"\nrecipe: {path}")
