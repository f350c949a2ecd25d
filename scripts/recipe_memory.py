"""Writes into each recipe what the planner chooses and says of its memory: ``python scripts/recipe_memory.py``.

Micro-batch, accumulation and checkpointing are the plan's for a card with a desktop session on it, at the recipe's own
method, length and effective batch: `hf-rocm-tune plan` and the recipe give the same job. A model whose configuration
cannot be read (no network) is planned by its published shape, which gives the same.
"""

from __future__ import annotations

import os
import re
import sys
from typing import Any

from hf_rocm_tune.configs import MEMORY, RECIPES, start_of
from hf_rocm_tune.machine import process
from hf_rocm_tune.models.split import parse
from hf_rocm_tune.plan import GIB, CardMemory, PlanRequest, card_memory, from_training, plan_for, split_plan
from hf_rocm_tune.plan.estimate import Case
from hf_rocm_tune.settings import arguments

DESKTOP_GIB = 1.0


def main() -> int:
    """Brings all recipes up to date and says what changed. Returns 0."""
    process.prepare_process(os.environ)
    card = card_memory(name="rx7900xt", desktop_gib=DESKTOP_GIB)
    for name in RECIPES.names():
        file = RECIPES.path(name)
        before = file.read_text(encoding="utf-8")
        after = updated(before, *planned(name, card))
        if after != before:
            file.write_text(after, encoding="utf-8")
        print(f"{name}: {'written; read what its comment says of it' if after != before else 'up to date'}")
    return 0


def updated(text: str, memory: str, case: Case) -> str:
    """A recipe with the planner's choice and word in their places."""
    settings = {
        "per_device_train_batch_size": case.micro_batch,
        "per_device_eval_batch_size": case.eval_batch,
        "gradient_accumulation_steps": case.accumulation,
        "gradient_checkpointing": str(case.checkpointing).lower(),
    }
    for name, value in settings.items():
        text = re.sub(rf"^{name}:.*$", f"{name}: {value}", text, flags=re.MULTILINE)
    batch = f"Effective batch: {case.micro_batch} x {case.accumulation} accumulated"
    text = re.sub(r"Effective batch: \d+ x \d+ accumulated", batch, text)
    return re.sub(rf"^{re.escape(MEMORY)}.*$", f"{MEMORY}  {memory}", text, flags=re.MULTILINE)


def verb_of(name: str) -> Any:
    """The training verb that a recipe's comment names."""
    return start_of(RECIPES.path(name).read_text(encoding="utf-8")).split()[1]


def planned(name: str, card: CardMemory) -> tuple[str, Case]:
    """The planner's word on the memory of one recipe, in one line, and its choice.

    Raises:
        ValueError: it does not fit; such a recipe must not ship.
    """
    verb = verb_of(name)
    job = arguments.parse(["--config", name], accelerator=False, method=verb)
    settings = job.resolved() | {"bf16": True}  # as on the card, whatever this machine is
    if "dtype" not in job.given:
        settings["dtype"] = "bfloat16"
    cards = 2 if "dual_rx7900xt" in RECIPES.path(name).read_text(encoding="utf-8") else 1
    request = from_training(settings, trainer=verb, cards=cards)
    if settings["split_layers"]:
        return _planned_split(name, request, str(settings["split_layers"]), card)
    choice = plan_for(request, card=card).choice
    if choice is None:
        raise ValueError(f"{name} does not fit {card.name}")
    if choice.case.recompute:
        raise ValueError(f"{name}: the plan chooses a mix of recomputation, which is for one model only")
    each = " on each card" if cards > 1 else ""
    little = "" if choice.roomy else " (nothing leaves 2 GiB free)"
    memory = (
        f"{choice.total / GIB:.1f} of {card.usable / GIB:.1f} GiB{each}, {DESKTOP_GIB:g} GiB of a desktop included"
        f"{little}; planned, not measured on a card."
    )
    return memory, choice.case


def _planned_split(name: str, request: PlanRequest, layers: str, card: CardMemory) -> tuple[str, Case]:
    """The same for a model that lies on two cards."""
    whole = plan_for(request, card=card)
    found = split_plan(whole, cards=(card, card), counts=parse(layers))
    if not found.fits:
        raise ValueError(f"{name} does not fit two of {card.name}")
    each = " and ".join(f"{estimate.total / GIB:.1f}" for estimate in found.estimates)
    little = "" if found.least_spare >= card.room else " (nothing leaves 2 GiB free)"
    memory = (
        f"{each} of {card.usable / GIB:.1f} GiB on the two cards, {DESKTOP_GIB:g} GiB of a desktop on each included"
        f"{little}; planned, not measured on a card."
    )
    return memory, whole.with_evaluation(found.option).case


if __name__ == "__main__":
    sys.exit(main())
