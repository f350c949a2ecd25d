"""The flags of ``hf-rocm-tune plan``."""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

from hf_rocm_tune import plan_beside
from hf_rocm_tune.errors import OutOfMemoryError, UsageError
from hf_rocm_tune.machine import process
from hf_rocm_tune.memory.plan import GIB, CardMemory
from hf_rocm_tune.memory.plan_optimizers import OPTIMIZERS
from hf_rocm_tune.plan_card import card_memory
from hf_rocm_tune.plan_recipe import check_recipe, command, write_recipe
from hf_rocm_tune.plan_request import ALL_LINEAR, ATTENTIONS, DTYPES, METHODS, PlanRequest, as_targets
from hf_rocm_tune.plan_split_command import plan_over_cards

_PROGRAM = "hf-rocm-tune plan"


def main(argv: Sequence[str]) -> int:
    """Plan a training job, from the model's configuration alone.

    Args:
        argv: the arguments behind ``plan``.

    Returns:
        0 where something fits.

    Raises:
        UsageError: the question is wrong, or this model cannot be planned.
        OutOfMemoryError: nothing fits; the plan is printed nevertheless.
    """
    wanted = _parser().parse_args(list(argv))
    if wanted.model is None and not wanted.largest:
        raise UsageError(f"give --model, a Hub id or a directory, or --largest; see `{_PROGRAM} --help`")
    if wanted.emit is not None:
        check_recipe(wanted.emit, replace=wanted.force)
    request = _request(wanted)
    process.prepare_process(os.environ)  # or libraries remark on this machine's lack of a GPU while they are imported
    process.check_bitsandbytes()  # PEFT imports it
    card = card_memory(name=wanted.gpu, vram_gib=wanted.vram, desktop_gib=wanted.desktop_gib)
    if wanted.largest:
        return _largest(request, card, as_json=wanted.json)
    return _plan(request, card, wanted) if wanted.split is None else plan_over_cards(request, card, wanted)


def _plan(request: PlanRequest, card: CardMemory, wanted: argparse.Namespace) -> int:
    from hf_rocm_tune.models.shapes_config import quiet
    from hf_rocm_tune.plan_job import plan_for
    from hf_rocm_tune.plan_text import as_text, as_values

    with quiet():  # of kernels that would be faster, for example
        plan = plan_for(request, card=card, within_limit=wanted.length is None, at_once=plan_beside.worthwhile())
    request = plan.request
    line = command(request, plan.nearest, wanted.dataset_name)
    print(json.dumps(as_values(plan, line)) if wanted.json else as_text(plan, line))
    if plan.choice is None:
        missing = -plan.nearest.estimate.spare / GIB
        raise OutOfMemoryError(
            f"nothing fits: {missing:.1f} GiB are missing at the least. {_advice(request, plan.notes)}"
        )
    if wanted.emit is not None:
        write_recipe(wanted.emit, request, plan.choice, dataset=wanted.dataset_name, replace=wanted.force)
        if not wanted.json:
            print(f"\nrecipe: {wanted.emit}")
    return 0


def _advice(request: PlanRequest, notes: Sequence[str]) -> str:
    ways = []
    if request.methods == ("full",) and request.dtype is None:
        ways.append("--dtype bfloat16")
    if "qlora" not in request.methods or any("--method qlora" in note for note in notes):
        ways.append("--method qlora")
    if request.length > 512:
        ways.append("a shorter --seq")
    if request.modules_to_save:
        ways.append("no --modules_to_save")
    return f"Try {', '.join([*ways, 'a smaller model'])}; `{_PROGRAM} --largest` names the largest that fits"


def _largest(request: PlanRequest, card: CardMemory, *, as_json: bool) -> int:
    from hf_rocm_tune.plan_job import largest_models

    found = largest_models(request, card=card)
    if as_json:
        print(json.dumps({"schema": 1, "length": request.length, "largest": found}))
        return 0
    print(f"largest of the known public models on {card.name}, one sequence of {request.length} tokens, checkpointed:")
    for method, name in found.items():
        print(f"  {method:<6} {name or 'none'}")
    return 0


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
    parser = _Parser(prog=_PROGRAM, description="What a training job takes of the card, and the fastest way that fits.")
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
    flag(
        "--emit", type=Path, metavar="RECIPE.yaml", help="write the choice as a recipe for `hf-rocm-tune sft --config`"
    )
    flag("--force", action="store_true", help="replace a recipe that is there")
    flag("--json", action="store_true", help="print JSON; memory in bytes")
    flag("--largest", action="store_true", help="name the largest known public model that fits instead")
    return parser


class _Parser(argparse.ArgumentParser):
    """argparse with its errors as ``UsageError``."""

    def error(self, message: str) -> NoReturn:
        """Say it in one line; the usage is one ``--help`` away."""
        raise UsageError(f"{message}; see `{self.prog} --help`")
