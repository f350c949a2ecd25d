"""What a pipeline brings to a model split over two cards: the time of an optimizer step with it and without it.

A tiny model's layers are made to last as long as asked for, forward once and backward twice that, by kernels that wait:
so the figures are those of the schedule, of copies, digests and Python, and not of a card's arithmetic. Losses must be
equal. Needs two cards; on the simulated card::

    SIMCARD=1 SIMCARD_DEVICES=2 PYTHONPATH=$PWD:$PWD/tests/simcard/boot python benchmarks/split_pipeline.py

Prints a table and, as the last line, one JSON object; ``busy`` is the share of a step in which a card's layers ran.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from transformers import AutoConfig, AutoModelForCausalLM, Trainer, TrainerCallback, TrainingArguments
from transformers import default_data_collator as collator

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # for tests.tiny

from hf_rocm_tune import VerifiedTransferMixin
from hf_rocm_tune.cards.split import Split
from hf_rocm_tune.cards.strategy import CardSettings
from hf_rocm_tune.models.split import LayerSplit, SplitMover, tell_of_devices
from tests import card_time, tiny


class Verified(VerifiedTransferMixin, Trainer):
    """In front of the plain trainer."""


class Clock(TrainerCallback):
    """Seconds from the start of each optimizer step to where its gradients are there."""

    def __init__(self) -> None:
        self.seconds: list[float] = []

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        self._begun = self._now()

    def on_pre_optimizer_step(self, *_: Any, **__: Any) -> None:
        self.seconds.append(self._now() - self._begun)

    def _now(self) -> float:
        for card in (0, 1):
            torch.cuda.synchronize(card)
        return time.perf_counter()


def wait(card: int, milliseconds: float) -> None:
    with torch.cuda.device(card):
        card_time.sleep(milliseconds)


def train(place: Path, wanted: argparse.Namespace, *, pipeline: bool) -> tuple[list[float], list[float]]:
    """Losses and seconds of the steps but the first."""
    config = AutoConfig.from_pretrained(tiny.build("llama3", place / "models"))
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config)
    rows = torch.randint(
        5, 500, (wanted.steps * wanted.window, 16), generator=torch.Generator().manual_seed(1)
    ).tolist()
    args = TrainingArguments(
        output_dir=str(place / "out"), per_device_train_batch_size=1, gradient_accumulation_steps=wanted.window,
        max_steps=wanted.steps, logging_steps=1, report_to="none", save_strategy="no", disable_tqdm=True,
    )  # fmt: skip
    clock = Clock()
    with SplitMover(LayerSplit("model.layers", (1, 1)), [torch.device("cuda", card) for card in (0, 1)]) as mover:
        tell_of_devices(model, mover)
        data = Dataset.from_list([{"input_ids": row, "labels": row} for row in rows])
        strategy = Split(CardSettings(split=True, pipeline=pipeline))
        made = Verified(
            model=model, args=args, train_dataset=data, data_collator=collator, mover=mover, strategy=strategy
        )
        for card, layer in enumerate(model.model.layers):
            layer.register_forward_hook(lambda _, __, output, card=card: slow(output, card, wanted))
        made.add_callback(clock)
        made.train()
    return [row["loss"] for row in made.state.log_history if "loss" in row], clock.seconds[1:]


def slow(output: Any, card: int, wanted: argparse.Namespace) -> None:
    wait(card, wanted.milliseconds)
    hidden = output[0] if isinstance(output, tuple) else output
    hidden.register_hook(lambda _: wait(card, 2 * wanted.milliseconds))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--window", type=int, default=8, help="micro-batches of an optimizer step")
    parser.add_argument("--milliseconds", type=float, default=150.0, help="that a layer lasts forward")
    parser.add_argument("--steps", type=int, default=4, help="of each kind; the first is not counted")
    parser.add_argument("--json", type=Path)
    wanted = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        ways = {name: train(Path(scratch), wanted, pipeline=name == "pipeline") for name in ("one by one", "pipeline")}
    assert ways["one by one"][0] == ways["pipeline"][0], "the losses differ"
    work = 3 * wanted.window * wanted.milliseconds / 1000  # of each card in a step
    rows = {}
    for name, (_, seconds) in ways.items():
        middle = statistics.median(seconds)
        rows[name] = {"seconds": round(middle, 3), "busy": round(work / middle, 3)}
        print(f"{name:12} {middle:8.2f} s a step ({min(seconds):.2f} .. {max(seconds):.2f}), {work / middle:.0%} busy")
    gain = round(rows["one by one"]["seconds"] / rows["pipeline"]["seconds"], 2)
    result = {"benchmark": "split_pipeline", "card": torch.cuda.get_device_name(0), "processor": platform.processor()}
    result |= {"torch": torch.__version__, "window": wanted.window, "milliseconds": wanted.milliseconds}
    line = json.dumps(
        {**result, "results": rows, "times_as_fast": gain, "ideal": round(2 * wanted.window / (wanted.window + 1), 2)}
    )
    if wanted.json:
        wanted.json.write_text(line + "\n", encoding="utf-8")
    print(line)


if __name__ == "__main__":
    main()
