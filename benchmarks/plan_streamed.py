"""Plans of models larger than the card at 20 GB: what is streamed, why, and what the link costs.

    python benchmarks/plan_streamed.py [--json FILE]

Each model with LoRA and QLoRA, 16 rows of 2,048 tokens a step, and several sizes of host memory. **Reason**: why no
larger micro-batch, and what a smaller one would cost. **Wait**: the share of a step in which the card waits for the
link, at three rates of it. **Gain**: by how much a step would be faster if a fetch served several micro-batches (layers
outside, micro-batches inside, each of which keeps its activations at the layers' borders), with the best number of them
that fits. Nothing here was measured.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from hf_rocm_tune.models.streamed import AUTO  # noqa: E402
from hf_rocm_tune.plan import CardMemory, PlanRequest, card_memory, config_of, plan_for, public_model  # noqa: E402
from hf_rocm_tune.plan.estimate import GIB, Estimate, Variant, estimate, fastest, host, missing  # noqa: E402
from hf_rocm_tune.plan.grid import grid_of  # noqa: E402

MODELS = ("Qwen/Qwen2.5-32B", "meta-llama/Llama-3.3-70B-Instruct", "Qwen/Qwen3-30B-A3B")
HOSTS = (32, 64, 128, 192)  # GiB
LINKS = (25, 13, 6.5)  # 10^9 bytes a second: PCIe 4.0 x16, x8 and x4
WAITING = "waiting for streamed weights"


def seconds(option: Estimate) -> float:
    """Of an optimizer step."""
    case = option.case
    return case.micro_batch * case.length * case.accumulation / option.tokens_per_second


def shared(options: list[Estimate], variant: Variant, card: CardMemory) -> tuple[float, int]:
    """The most tokens a second where a fetch serves several micro-batches, and how many."""
    best = 0.0, 1
    for option, each in itertools.product(options, (1, 2, 4, 8, 16)):
        layers = len(variant.weights.streams)
        if option.case.accumulation % each:
            continue
        cases = [replace(option.case, flights=each, streamed=count) for count in range(1, layers + 1)]
        fitting = (found for case in cases if (found := estimate(variant, case, card)).spare >= card.room)
        if (found := next(fitting, None)) is not None:
            computing = seconds(found) * (1 - found.shares[WAITING])
            step = max(computing, found.visiting / each / card.link)
            best = max(best, (16 * 2048 / step, each))
    return best


def with_card(grid: tuple[Estimate, ...], variant: Variant, card: CardMemory) -> list[Estimate]:
    """The same cases for another link, which does not change how many layers must leave the card."""
    return [estimate(variant, each.case, card) for each in grid]


def reason(options: list[Estimate], chosen: Estimate) -> str:
    """Why no larger micro-batch, and what the next smaller one costs."""
    own = chosen.case.micro_batch
    told = []
    if larger := min(
        (each for each in options if each.case.micro_batch > own), key=lambda e: e.case.micro_batch, default=None
    ):
        told.append(f"{larger.case.micro_batch} rows at a time: {missing(larger) if not larger.fits else 'not faster'}")
    if smaller := max(
        (each for each in options if each.case.micro_batch < own), key=lambda e: e.case.micro_batch, default=None
    ):
        share = 1 - smaller.tokens_per_second / chosen.tokens_per_second
        told.append(f"{smaller.case.micro_batch}: {share:.0%} slower, {smaller.case.streamed} layers streamed")
    return "; ".join(told)


def row_of(options: list[Estimate], variant: Variant, gib: int, model: str, method: str) -> dict[str, Any]:
    """What is planned for one host."""
    chosen = fastest(options)
    shown = chosen or min(options, key=lambda each: (each.host_missing, -each.spare))
    found = {"model": model, "method": method, "host_gib": gib, "fits": chosen is not None}
    found |= {"micro_batch": shown.case.micro_batch, "streamed": shown.case.streamed}
    found |= {"recomputed": shown.case.checkpointing, "needs_card": shown.total, "bytes_a_step": shown.visiting}
    found |= {"needs_host": sum(host(variant, shown.case).values()), "seconds": seconds(shown)}
    wait = seconds(shown) * shown.shares[WAITING]
    found |= {"wait_seconds": wait, "tokens_per_second": shown.tokens_per_second}
    why = reason(options, shown) if chosen else f"nothing fits: {missing(shown)}"
    return found | {"reason": why if shown.case.streamed or not chosen else "fits without streaming"}


def main() -> None:
    """Plans and prints."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    wanted = parser.parse_args()
    os.environ["ACCELERATE_USE_CPU"] = "true"
    card, rows, links = card_memory(name="rx7900xt"), [], []
    for model in MODELS:
        known = public_model(model)
        assert known is not None
        for method in ("lora", "qlora"):
            request = PlanRequest(model=model, methods=(method,), stream=AUTO, length=2048)
            plan = plan_for(request, card=card, config=config_of(known.fields))
            variant, layers = plan.variants[method], plan.layers
            for gib in HOSTS:
                here = replace(card, host=gib * GIB)  # with less, fewer layers may leave the card
                options = [one for each in plan.recordings.values() for one in grid_of(each, here, plan.request)]
                rows.append(row_of(options, variant, gib, model, method) | {"layers": layers})
            for rate in LINKS:
                linked = replace(card, link=rate * 1e9)
                options = with_card(plan.grid, variant, linked)
                if (chosen := fastest(options)) and chosen.case.streamed:
                    best, each = shared([one for one in options if one.case.checkpointing], variant, linked)
                    found = {"model": model, "method": method, "link": rate, "micro_batch": chosen.case.micro_batch}
                    found |= {"wait": chosen.shares[WAITING], "gain": max(0.0, best / chosen.tokens_per_second - 1)}
                    links.append(found | {"micro_batches_a_fetch": each})
    titles = (
        "host GiB | rows at a time | streamed | card GiB | of host | GB a step | link s / step s | tokens/s | reason"
    )
    print(f"| model | method | {titles} |\n{'|---' * 11}|")
    for row in rows:
        link = row["bytes_a_step"] / card.link
        print(
            f"| {row['model'].split('/')[1]} | {row['method']} | {row['host_gib']} | {row['micro_batch']} | "
            f"{row['streamed']} of {row['layers']} | {row['needs_card'] / GIB:.1f} | {row['needs_host'] / GIB:.1f} | "
            f"{row['bytes_a_step'] / 1e9:.0f} | {link:.0f} / {row['seconds']:.0f} | "
            f"{row['tokens_per_second']:.0f} | {'' if row['fits'] else '**does not fit** '}{row['reason']} |"
        )
    print(f"\n| model | method | link GB/s | rows at a time | wait | gain | with |\n{'|---' * 7}|")
    for row in links:
        print(
            f"| {row['model'].split('/')[1]} | {row['method']} | {row['link']:g} | {row['micro_batch']} | "
            f"{row['wait']:.0%} | {row['gain']:.0%} | {row['micro_batches_a_fetch']} |"
        )
    text = json.dumps(
        {"benchmark": "plan_streamed", "length": 2048, "effective_batch": 16, "rows": rows, "links": links}
    )
    print(text)
    if wanted.json is not None:
        wanted.json.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
