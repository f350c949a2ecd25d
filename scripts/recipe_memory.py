"""Writes the planner's choice and its word on memory into recipes: ``python scripts/recipe_memory.py [NAME ...]``.

Micro-batch, accumulation and checkpointing are the plan's for a card with a desktop session on it, at the recipe's own
method, length and effective batch: `hf-rocm-tune plan` and the recipe give the same job. A model whose configuration
cannot be read (no network) is planned by its published shape, which gives the same.
"""

from __future__ import annotations

import os
import re
import sys
from dataclasses import replace
from typing import Any

from hf_rocm_tune.configs import MEMORY, RECIPES, start_of
from hf_rocm_tune.machine import process
from hf_rocm_tune.models.split import parse
from hf_rocm_tune.plan import GIB, CardMemory, PlanRequest, card_memory, from_training, plan_for, split_plan
from hf_rocm_tune.plan.estimate import Case
from hf_rocm_tune.settings import arguments

DESKTOP_GIB = 1.0
#: Of a recipe for grpo: tokens of a prompt, assumed; the planner has no trainer of its own for it.
PROMPT_TOKENS = 1024
#: Of a recipe with pictures: Qwen's vision tower reads patches of 16 x 16 pixels, of 2 frames and 3 colours, and joins
#: 2 x 2 of them to one token.
PATCH, JOINED, VALUES = 16, 2, 2 * 3 * 16 * 16


def main() -> int:
    """Brings all recipes up to date and says what changed. Returns 0."""
    process.prepare_process(os.environ)
    card = card_memory(name="rx7900xt", desktop_gib=DESKTOP_GIB)
    for name in sys.argv[1:] or RECIPES.names():
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
    request = _request(settings, verb, cards)
    if settings["split_layers"]:
        return _planned_split(name, request, str(settings["split_layers"]), card)
    plan = plan_for(replace(request, mixes=False), card=card)  # a mix of recomputation is for one model only
    choice = plan.choice
    if choice is None:
        raise ValueError(f"{name} does not fit {card.name}")
    if verb == "grpo":
        step = choice.parts["activations kept"] + choice.parts["working memory"]
        generated = int(str(settings["num_generations"])) * choice.case.length
        if _cache_bytes(plan.config, generated) > step:
            raise ValueError(f"{name}: generating takes more than the step that is planned")
    each = " on each card" if cards > 1 else ""
    little = "" if choice.roomy else " (nothing leaves 2 GiB free)"
    memory = (
        f"{choice.total / GIB:.1f} of {card.usable / GIB:.1f} GiB{each}, {DESKTOP_GIB:g} GiB of a desktop included"
        f"{little}; planned, not measured on a card."
    )
    return memory, choice.case


def _request(settings: dict[str, Any], verb: Any, cards: int) -> PlanRequest:
    """What to plan for a recipe: that of its job, with the largest picture that it allows; for grpo a step of sft of
    the same rows, which computes the same products and keeps the same activations."""
    if verb == "grpo":
        settings = settings | {"max_length": PROMPT_TOKENS + settings["max_completion_length"]}
        verb = "sft"
    request = from_training(settings, trainer=verb, cards=cards)
    if request.max_pixels is None:
        return request
    side = int(request.max_pixels**0.5) // (PATCH * JOINED) * JOINED  # patches of a square picture
    pixels = ("pixel_values", (side * side, VALUES), "float32", None)
    grid = ("image_grid_thw", (1, 3), "int64", [[1, side, side]])
    return replace(request, pictures=(pixels, grid), placeholders=side * side // JOINED**2)


def _cache_bytes(config: Any, tokens: int) -> int:
    """Bytes of keys and values of so many tokens in 16 bits, which generating needs beside the weights."""
    return int(2 * 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim * tokens)


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
