"""Micro-batches of a split model side by side: the bits of a run one after the other, whatever goes wrong."""

from __future__ import annotations

import gc
import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from peft import LoraConfig
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, Trainer, TrainingArguments
from trl import DPOConfig, DPOTrainer, SFTConfig

from hf_rocm_tune import VerifiedSFTTrainer, VerifiedTransferMixin
from hf_rocm_tune.cards.split import Split
from hf_rocm_tune.cards.strategy import CardSettings
from hf_rocm_tune.errors import CorruptionError
from hf_rocm_tune.models import loss, recompute
from hf_rocm_tune.models.split import LayerSplit, SplitMover, set_device_map
from hf_rocm_tune.plan.estimate import GIB, CardMemory
from hf_rocm_tune.plan.fit import plan_for
from hf_rocm_tune.plan.request import PlanRequest
from hf_rocm_tune.plan.strategies import split_plan
from hf_rocm_tune.transfer import FaultSpec
from tests import simcard, tiny

pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")  # PEFT's
LAYERS, STEPS = 4, 2
Losses = list[float]


class Runs:
    """Trains the same small model on cards; on logical ones unless cards are given."""

    def __init__(self, place: Path, *devices: torch.device) -> None:
        self._place, self._devices = place, devices
        self._path = tiny.build("llama3", place / "models")
        self.trainer: VerifiedSFTTrainer
        self.config: Any = None
        self.attention = "sdpa"
        self.lengths = torch.randint(6, 16, (64,), generator=torch.Generator().manual_seed(2)).tolist()
        self.prepare: Callable[[Any], None] = lambda layers: None
        self.row_of: Callable[[list[int]], dict[str, Any]] = lambda row: {"input_ids": row, "labels": row}

    def __call__(
        self,
        *,
        pipeline: bool,
        counts: tuple[int, ...] = (2, 2),
        fault: str = "",
        lora: bool = True,
        one_pass_loss: bool = False,
        kind: Any = VerifiedSFTTrainer,
        config_class: Any = SFTConfig,
        **options: Any,
    ) -> tuple[Losses, dict[str, Tensor]]:
        """Losses and trained weights."""
        self.config = config = AutoConfig.from_pretrained(self._path)
        config.num_hidden_layers = LAYERS
        torch.manual_seed(5)
        model = AutoModelForCausalLM.from_config(config, attn_implementation=self.attention)
        self.prepare(model.model.layers)
        rows = [torch.randint(5, 500, (n,), generator=torch.Generator().manual_seed(n)).tolist() for n in self.lengths]
        devices = self._devices or (torch.device("cpu"),) * len(counts)
        faults = FaultSpec.parse(fault) if fault else None
        settings = {
            "output_dir": str(self._place / "out"),
            "per_device_train_batch_size": 2,
            "gradient_accumulation_steps": 5,
            "max_steps": STEPS,
            "learning_rate": 1e-2,
            "logging_steps": 1,
            "report_to": "none",
            "save_strategy": "no",
            "use_cpu": not self._devices,
            "bf16": False,
            "disable_tqdm": True,
            recompute.SETTING: False,
        } | options
        with SplitMover(LayerSplit("model.layers", counts), devices, faults=faults) as mover:
            set_device_map(model, mover)
            more: dict[str, Any] = {"one_pass_loss": one_pass_loss} if kind is VerifiedSFTTrainer else {}
            if kind is not VerifiedPlainTrainer:
                more["peft_config"] = LoraConfig(r=4, target_modules="all-linear") if lora else None
            self.trainer = kind(
                model=model,
                args=config_class(**settings),
                train_dataset=Dataset.from_list([self.row_of(row) for row in rows]),
                processing_class=AutoTokenizer.from_pretrained(self._path),
                mover=mover,
                strategy=Split(CardSettings(split=True, pipeline=pipeline)),
                **more,
                # What crosses is compared: of a pipeline no micro-batch is computed twice.
                check_arithmetic="sampled" if pipeline else "off",
            )
            self.trainer.train()
        losses = [row["loss"] for row in self.trainer.state.log_history if "loss" in row]
        named = self.trainer.model.named_parameters()
        return losses, {name: each.detach().cpu() for name, each in named if each.requires_grad}

    @property
    def crossed(self) -> dict[str, Any]:
        return self.trainer.transfer_report.to_dict()["activations"]

    @property
    def in_flight(self) -> int:
        return self.trainer.describe()["split"]["micro_batches_in_flight"]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    return Runs(tmp_path_factory.mktemp("pipeline"))


@pytest.fixture(scope="module")
def plain(runs: Runs) -> tuple[Losses, dict[str, Tensor]]:
    found = runs(pipeline=False)
    assert runs.in_flight == 1
    return found


@pytest.fixture(autouse=True)
def nothing_is_left(runs: Runs) -> Any:
    runs.prepare = lambda layers: None
    yield
    assert [thread.name for thread in threading.enumerate() if thread.name.startswith("flight")] == []


def assert_same(one: tuple[Losses, dict[str, Tensor]], other: tuple[Losses, dict[str, Tensor]]) -> None:
    assert one[0] == other[0] and len(one[0]) == STEPS
    assert one[1].keys() == other[1].keys()
    assert [name for name in one[1] if not torch.equal(one[1][name], other[1][name])] == []


@pytest.mark.parametrize(
    "settings",
    [{}, {recompute.SETTING: True}, {"lora": False}, {"counts": (1, 2, 1)}, {"one_pass_loss": loss.is_known()}],
    ids=["lora", "checkpointing", "all-weights", "three-cards", "one-pass-loss"],
)
def test_losses_and_weights_are_those_of_one_after_the_other(runs: Runs, settings: dict[str, Any]) -> None:
    one_by_one = runs(pipeline=False, **settings)
    crossed = runs.crossed
    assert_same(runs(pipeline=True, **settings), one_by_one)
    assert runs.in_flight == 2 * len(settings.get("counts", (2, 2)))
    assert runs.crossed["tensors"] == crossed["tensors"] and runs.crossed["verified_bytes"] == crossed["bytes"]


class VerifiedDPOTrainer(VerifiedTransferMixin, DPOTrainer):
    """As a user would define it."""


class VerifiedPlainTrainer(VerifiedTransferMixin, Trainer):
    """Likewise."""


@pytest.mark.parametrize("kind", [VerifiedPlainTrainer, VerifiedDPOTrainer])
def test_of_other_trainers_micro_batches_are_side_by_side_where_they_do_not_turn_adapters_off(
    runs: Runs, monkeypatch: pytest.MonkeyPatch, kind: Any
) -> None:
    """TRL computes DPO's reference by the model without its adapters: another micro-batch would compute without them"""
    settings: dict[str, Any] = {"kind": kind, recompute.SETTING: True}
    if kind is VerifiedDPOTrainer:
        settings["config_class"] = DPOConfig
        monkeypatch.setattr(
            runs, "row_of", lambda row: {"prompt": "is this", "chosen": f" row {sum(row)}", "rejected": " not"}
        )
    else:
        settings |= {"config_class": TrainingArguments, "lora": False}
        monkeypatch.setattr(runs, "lengths", [9] * 64)
    one_by_one = runs(pipeline=False, **settings)
    assert_same(runs(pipeline=True, **settings), one_by_one)
    assert runs.in_flight == (1 if kind is VerifiedDPOTrainer else 4)


def test_a_second_micro_batch_begins_before_the_first_ends(runs: Runs) -> None:
    began: list[str] = []

    def watch(layers: Any) -> None:
        def note(module: Any, card: str) -> None:
            if module.training:  # not when it is computed again beside the host
                began.append(card)

        layers[0].register_forward_pre_hook(lambda module, _: note(module, "first card"))
        layers[2].register_forward_pre_hook(lambda module, _: note(module, "second card"))

    runs.prepare = watch
    runs(pipeline=True, max_steps=1)
    assert len(began) == 10 and began[:3].count("first card") >= 2
    began.clear()
    runs(pipeline=False, max_steps=1)
    assert began == ["first card", "second card"] * 5


@pytest.mark.parametrize("way", ["forward", "backward"])
def test_a_fault_on_a_crossing_is_healed(runs: Runs, plain: Any, way: str) -> None:
    fault = f"kind=flip,stage=activations,tensor={way}.*,rate=0.3,seed=3"
    assert_same(runs(pipeline=True, fault=fault), plain)
    assert runs.crossed["mismatches"] == runs.crossed["recovered"] > 3


def test_a_fault_that_stays_ends_all_flights_before_the_optimizer(runs: Runs) -> None:
    fault = "kind=zero,stage=activations,tensor=backward.*,first=9,persist=1"
    with pytest.raises(CorruptionError, match=r"activations tensor 'backward\.layers"):
        runs(pipeline=True, fault=fault)
    assert runs.trainer.state.global_step == 0 or runs.trainer.state.global_step == 1


def test_after_a_shortage_of_memory_fewer_fly_and_none_is_cut(runs: Runs, plain: Any) -> None:
    calls: list[int] = []

    def once(module: Any, arguments: Any) -> None:
        calls.append(1)
        if len(calls) == 8:  # in the second step
            raise torch.OutOfMemoryError("no memory, because a test asks for it")

    runs.prepare = lambda layers: layers[3].register_forward_pre_hook(once)
    assert_same(runs(pipeline=True), plain)
    memory = runs.trainer.transfer_report.to_dict()["memory"]
    assert memory["shortages"] == memory["recovered"] == 1 and runs.in_flight == 2
    assert runs.trainer.describe()["memory"]["micro_batch_divisor"] == 1


def test_what_a_step_needs_to_be_alone_for_is_not_pipelined(runs: Runs, monkeypatch: pytest.MonkeyPatch) -> None:
    runs(pipeline=True, gradient_accumulation_steps=1, max_steps=1)
    assert runs.in_flight == 1
    monkeypatch.setenv("HF_ROCM_TUNE_STEP_FAULT", "kind=oom,rate=0")
    runs(pipeline=True, max_steps=1)
    assert runs.in_flight == 1


@pytest.fixture(scope="module")
def on_two_cards(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What `main` finds in a process that has two simulated cards."""
    try:
        environment = simcard.environment()
    except simcard.NoCompiler as missing:
        pytest.skip(str(missing))
    done = subprocess.run(
        [sys.executable, "-m", "tests.train.test_pipeline", str(tmp_path_factory.mktemp("cards"))],
        env={**os.environ, **environment, "SIMCARD_DEVICES": "2"},
        capture_output=True,
        text=True,
        check=False,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


@pytest.mark.long
def test_on_two_cards_whose_kernels_and_copies_are_late(on_two_cards: dict[str, Any]) -> None:
    assert on_two_cards["late"] == {"differ": [], "losses": True, "mismatches": 0}


IN_FLIGHT = 0.55
"""Of the planned memory of four flights, the least that one of a few runs reaches."""


@pytest.mark.parametrize("flights", [1, 4])
def test_the_memory_of_each_card_is_what_was_planned(on_two_cards: dict[str, Any], flights: int) -> None:
    """Of torch's allocator at the peak. Planned is every flight at its highest: fewer coincide in a single run."""
    found = on_two_cards[f"memory of {flights}"]
    for measured, planned in zip(found["measured"], found["planned"], strict=True):
        least = IN_FLIGHT if flights > 1 else 0.97
        assert least * planned <= measured <= 1.03 * planned, found


def main(place: Path) -> dict[str, Any]:
    """What the tests of two cards ask of them."""
    found: dict[str, Any] = {f"memory of {flights}": _memory(place, flights) for flights in (1, 4)}
    os.environ |= {"SIMCARD_POISON": "1", "SIMCARD_DELAYS": "0,40,0,400"}
    sys.modules["simcard"].configure()
    runs = Runs(place, torch.device("cuda", 0), torch.device("cuda", 1))
    results = [runs(pipeline=which, **{recompute.SETTING: True}, max_steps=1) for which in (False, True)]
    differing = [name for name, each in results[0][1].items() if not torch.equal(each, results[1][1][name])]
    same = results[0][0] == results[1][0]
    return found | {"late": {"differ": differing, "losses": same, "mismatches": runs.crossed["mismatches"]}}


def _memory(place: Path, flights: int) -> dict[str, Any]:
    runs, batch, length, steps = Runs(place, torch.device("cuda", 0), torch.device("cuda", 1)), 2, 320, 6
    runs.lengths, runs.attention = [length] * batch * steps, "eager"  # the simulated card has no fused attention
    sizes = {"per_device_train_batch_size": batch, "gradient_accumulation_steps": steps, "max_length": length}
    request = PlanRequest(
        methods=("lora",), length=length, effective_batch=batch * steps, micro_batch=batch, checkpointing=False, rank=4,
        dtype="float32", autocast=False,
        platform="cuda", triton=False,
        attention="eager", evaluates=False,
    )  # fmt: skip
    for card in range(2):
        torch.cuda.reset_peak_memory_stats(card)
    for _ in range(5):  # how many flights coincide is a matter of time
        runs(pipeline=flights > 1, max_steps=1, **sizes)
        cards = [CardMemory(name="a card", usable=GIB, desktop=0, context=0)] * 2
        whole = plan_for(request, card=cards[0], config=runs.config)
        plan = split_plan(whole, cards=cards, counts=(2, 2), flights=flights)
        planned = [each.allocated for each in plan.estimates]
        measured = [torch.cuda.max_memory_allocated(card) for card in range(2)]
        if flights == 1 or all(most >= IN_FLIGHT * least for most, least in zip(measured, planned, strict=True)):
            break
    del runs
    gc.collect()
    return {"measured": measured, "planned": planned}


if __name__ == "__main__":
    print(json.dumps(main(Path(sys.argv[1]))))
