"""Layers that are streamed: the numbers of a resident run bit for bit, whatever goes wrong on the way."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests import simcard, tiny
from tests.e2e.command import CommandServer, Result
from tests.e2e.conftest import Job, MakeJob, done, losses_of, report_of, sampled
from tests.e2e.test_card_runs import ADAPTER, assert_census, assert_covered
from tests.simcard.log import Log

LAYERS = 5
STEPS = 2
#: What the CPU of the machine computes must not decide over bits: one thread each, and the same operators.
BF16 = {"dtype": "bfloat16", "bf16": True, "gradient_checkpointing": True, "optim": "adamw_torch_fused"}
METHODS: dict[str, dict[str, Any]] = {
    "lora": BF16,
    "without recomputation": {**BF16, "gradient_checkpointing": False},
    "adapters in one place": {**BF16, "lora_target_modules": "q_proj", "load_in_4bit": True},
    "some layers recomputed": {**BF16, "recompute_layers": "2,3"},
    "qlora": {**BF16, "load_in_4bit": True, "use_bnb_nested_quant": True},
    "8bit": {**BF16, "load_in_8bit": True},
    "experts": {**BF16, "lora_target_modules": "q_proj"},
}


@pytest.fixture(scope="module")
def deep(card_server: CommandServer, make_job: MakeJob, scratch: Path) -> Callable[[str], Job]:
    """The training of a model of five layers in bfloat16, on a simulated card."""
    usual = {"max_steps": STEPS, "save_steps": 1, "eval_strategy": "steps", "eval_steps": 2, "max_length": 48}
    plain = make_job("deep", server=card_server, train=48, test=9, lora_dropout=0.0, doctor="off", **usual)

    def make(method: str) -> Job:
        arch = "qwen3_moe" if method == "experts" else "llama3"
        model = tiny.build(arch, scratch / "deep", dtype=torch.bfloat16, num_hidden_layers=LAYERS)
        settings = plain.settings | {"model_name_or_path": model} | METHODS[method]
        return replace(plain, root=scratch / "deep" / method, settings=settings)

    return make


@dataclass
class Trial:
    """Runs of one training, streamed or not, in a directory of their own."""

    job: Job
    place: Path

    def run(self, name: str, env: dict[str, str] | None = None, code: int = 0, **more: Any) -> tuple[Path, Result]:
        output = self.place / name
        done = self.job.run(output, env={"SIMCARD_LOG": f"{output}.log"} | (env or {}), **more)
        assert done.code == code, done.stderr[-3000:]
        return output, done


@pytest.fixture
def trial(deep: Callable[[str], Job], tmp_path: Path) -> Callable[[str], Trial]:
    return lambda method: Trial(deep(method), tmp_path)


@pytest.fixture(scope="module")
def resident(deep: Callable[[str], Job]) -> Callable[[str], Path]:
    """The output of an undisturbed run that streams nothing, made once."""
    return lambda method: deep(method).clean()


@pytest.mark.parametrize("method", sampled(METHODS, "lora"))
def test_a_streamed_run_is_the_resident_run_bit_for_bit(
    method: str, trial: Callable[[str], Trial], resident: Callable[[str], Path]
) -> None:
    """Memory is poisoned when it is freed, and copies and kernels take random times: a layer that computes with
    another one's weights, or too early, is seen."""
    runs = trial(method)
    disturbed = {"SIMCARD_POISON": "1", "SIMCARD_DELAYS": "0,40,0,400"}
    for count in (4,) if method == "lora" else (LAYERS,):
        streamed, _ = runs.run(f"streamed{count}", disturbed, stream_weights=count)
        assert losses_of(streamed) == losses_of(resident(method))
        assert (streamed / ADAPTER).read_bytes() == (resident(method) / ADAPTER).read_bytes()
        report = report_of(streamed)
        assert_covered(report, fetched=method in ("qlora", "8bit"))
        assert_census(Log(Path(f"{streamed}.log")), report)
        told = report["streaming"]
        assert len(told["layers"]) == count and told["visits"] <= STEPS * 2 * (count + 1) + 40
        assert report["streamed"]["bytes"] > 0 == report["streamed"]["mismatches"]
        held = report["coverage"]["device_bytes"] - report_of(resident(method))["coverage"]["device_bytes"]
        assert held == told["layer_buffer_bytes"] - sum(told["host_bytes"].values())


FAULTS = ("zero", "zero_range", "flip", "bits", "stride", "stale", "swap", "drop", "late", "after")


def assert_recovered(output: Path, resident: Path) -> dict[str, Any]:
    report = report_of(output)
    assert report["incidents"] and {row["outcome"] for row in report["incidents"]} == {"recovered"}
    assert (output / ADAPTER).read_bytes() == (resident / ADAPTER).read_bytes()
    assert losses_of(output) == losses_of(resident)
    return report


@pytest.mark.long
@pytest.mark.parametrize("kind", FAULTS)
def test_a_fault_on_a_visit_leaves_no_trace(
    kind: str, trial: Callable[[str], Trial], resident: Callable[[str], Path]
) -> None:
    """`after`: a layer changes on the card after its arrival; it is found once, when the next one takes its place.

    `late`: tensors of two visits are hit; all of a visit have arrived when it is examined: one incident each.
    """
    fault = f"kind={kind},stage=streamed,rate=0.3,seed=3,first=20,count=5"
    output, _ = trial("lora").run("out", {"HF_ROCM_TUNE_FAULT": fault}, stream_weights=4)
    report = assert_recovered(output, resident("lora"))
    assert report["fault_injection"]["injected"] >= 5
    assert report["streamed"]["mismatches"] >= {"late": 2, "after": 1}.get(kind, 5)


@pytest.mark.parametrize(
    ("place", "method"),
    [
        pytest.param("mapped", "lora", marks=pytest.mark.long),
        ("anonymous", "qlora"),
        pytest.param("card", "lora", marks=pytest.mark.long),
    ],
)
def test_a_layer_that_changes_where_it_is_is_found_and_loaded_again(
    place: str, method: str, trial: Callable[[str], Trial], resident: Callable[[str], Path]
) -> None:
    """A mapped layer is read from its file again, a quantised one with the whole model, from the last checkpoint on."""
    output, done = trial(method).run("out", memory_attack(f"{place}", step=2), stream_weights=4)
    report = assert_recovered(output, resident(method))
    kinds = {row["kind"] for row in report["incidents"] if row["stage"] == "streamed"}
    assert kinds >= {"changed on the device" if place == "card" else "source_changed"}
    assert ("all weights are loaded again" in done.stdout) == (place != "mapped")


def memory_attack(place: str, *, step: int) -> dict[str, str]:
    return {"MEMORY_ATTACK": json.dumps({"kind": "streamed", "place": place, "step": step})}


@pytest.mark.long
def test_a_killed_run_goes_on_with_other_layers_streamed(
    trial: Callable[[str], Trial], resident: Callable[[str], Path]
) -> None:
    """Before and after, fetches arrive wrong."""
    runs = trial("lora")
    fault = {"HF_ROCM_TUNE_FAULT": "kind=stale,stage=streamed,rate=0.3,seed=3,first=20,count=5"}
    runs.run("out", {**fault, "HF_ROCM_TUNE_CRASH": "step=2,kind=kill"}, code=-9, stream_weights=3)
    output, done = runs.run("out", fault, stream_weights=LAYERS)
    assert "checkpoint-1" in done.stdout
    assert_recovered(output, resident("lora"))


@pytest.mark.long
@pytest.mark.parametrize(("method", "share"), [("lora", 3), ("qlora", 4)])
def test_a_card_with_a_third_of_the_model_s_bytes_trains_it(
    method: str, share: int, deep: Callable[[str], Job], scratch: Path, tmp_path: Path
) -> None:
    """With the losses and the adapter of a large card; what is resident in the other run does not fit there.

    Of the bytes in the files. QLoRA's own are a quarter of them: plain torch operators, which quantise and unpack on
    this card, take as much again.
    """
    wide = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 40}
    model = tiny.build("llama3", scratch / "wide", dtype=torch.bfloat16, **wide)
    few = {"lora_target_modules": "q_proj", "lora_r": 2, "per_device_train_batch_size": 1, "max_length": 32}
    few |= {"max_steps": 1, "save_steps": 1, "eval_strategy": "no"}
    job = deep(method)
    job = replace(job, settings=job.settings | few | {"model_name_or_path": model})
    trial = Trial(job, tmp_path)
    large, _ = trial.run("large")
    left = (model / "model.safetensors").stat().st_size // share
    small = {"SIMCARD_OCCUPIED": str(simcard.card.capacity() - left)}
    _, failed = trial.run("resident", small, code=5)
    assert len(failed.error_lines) == 1 and "out of memory" in failed.stderr
    streamed, _ = trial.run("streamed", small, stream_weights=wide["num_hidden_layers"])
    assert losses_of(streamed) == losses_of(large)
    assert (streamed / ADAPTER).read_bytes() == (large / ADAPTER).read_bytes()
    assert_covered(report_of(streamed), fetched=method == "qlora")


@pytest.mark.long
def test_each_of_two_ranks_streams_for_itself(deep: Callable[[str], Job], tmp_path: Path) -> None:
    ranks: dict[str, Any] = {"grad_sync": "host", "preflight": "off"}
    found = []
    for count in ("off", "4"):
        outputs, env = tmp_path / f"two-{count}", {"SIMCARD_DEVICES": "2"}
        for each in deep("lora").ranks(outputs, each=[env, env], stream_weights=count, **ranks):
            done(each)
        report = report_of(outputs)
        assert report["ranks"] == 2
        assert_covered(report)
        found.append((losses_of(outputs), (outputs / ADAPTER).read_bytes()))
    assert found[0] == found[1]


@pytest.mark.long
@pytest.mark.parametrize(
    ("cards", "more"), [("2", {"split_layers": "3,2"}), ("1", {"sample_every": 2, "sample_prompts": "Hello"})]
)
def test_the_parts_of_a_split_stream_and_a_streamed_model_answers(
    cards: str, more: dict[str, Any], trial: Callable[[str], Trial]
) -> None:
    found = []
    for count in ("off", "4"):
        output, _ = trial("lora").run(f"stream-{count}", {"SIMCARD_DEVICES": cards}, stream_weights=count, **more)
        assert_covered(report_of(output))
        log = json.loads((output / "training_log.json").read_text())["log"]
        answers = [row["samples"] for row in log if "samples" in row]
        assert len(answers) == STEPS // 2 * ("sample_every" in more)
        found.append((losses_of(output), (output / ADAPTER).read_bytes(), answers))
    assert found[0] == found[1]


@pytest.mark.long
def test_a_step_that_runs_out_of_memory_is_repeated_in_parts(trial: Callable[[str], Trial]) -> None:
    shortage = {"HF_ROCM_TUNE_STEP_FAULT": "kind=oom,rate=1,count=1"}
    whole, _ = trial("lora").run("resident", shortage)
    streamed, _ = trial("lora").run("streamed", shortage, stream_weights=4)
    assert report_of(streamed)["memory"]["recovered"] > 0
    assert (streamed / ADAPTER).read_bytes() == (whole / ADAPTER).read_bytes()


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        (
            {"use_peft": False},
            "--use_peft false is not supported with --stream_weights (what is streamed",
        ),
        ({"stream_weights": 8}, "this model has 5 layers"),
        ({"stream_weights": "some"}, "give auto, off or the number of layers"),
        ({"lora_modules_to_save": "q_proj", "lora_target_modules": "v_proj"}, "--lora_modules_to_save q_proj"),
    ],
)
def test_what_cannot_be_streamed_is_refused_in_one_line(
    settings: dict[str, Any], reason: str, trial: Callable[[str], Trial], tmp_path: Path
) -> None:
    output, done = trial("lora").run("out", code=2, **{"stream_weights": 2} | settings)
    (line,) = done.error_lines
    assert reason in line and not output.exists()
