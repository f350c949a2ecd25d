"""Layers that are streamed: the numbers of a resident run bit for bit, whatever goes wrong on the way."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests import simcard, tiny
from tests.e2e.command import CommandServer, Result
from tests.e2e.conftest import flags, losses_of, report_of, sampled
from tests.e2e.test_card_runs import ADAPTER, assert_census, assert_covered
from tests.simcard.log import Log
from tests.two_ranks import environments

LAYERS = 5
STEPS = 4
#: What the CPU of the machine computes must not decide over bits: one thread each, and the same operators.
BF16 = {"dtype": "bfloat16", "bf16": True, "activation_checkpointing": True, "optim": "adamw_torch_fused"}
METHODS: dict[str, dict[str, Any]] = {
    "lora": BF16,
    "without recomputation": {**BF16, "activation_checkpointing": False},
    "adapters in one place": {**BF16, "lora_target_modules": "q_proj", "load_in_4bit": True},
    "some layers recomputed": {**BF16, "recompute_layers": "2,3"},
    "qlora": {**BF16, "load_in_4bit": True, "use_bnb_nested_quant": True},
    "8bit": {**BF16, "load_in_8bit": True},
    "experts": {**BF16, "lora_target_modules": "q_proj"},
}


class Job:
    """The same training, streamed or not."""

    def __init__(
        self, server: CommandServer, model: Path, messages: Path, scratch: Path, settings: dict[str, Any]
    ) -> None:
        self._server, self._scratch, self._settings = server, scratch, settings
        self._base = {
            "model_name_or_path": model,
            "dataset_name": messages,
            "max_steps": STEPS,
            "save_steps": 2,
            "eval_strategy": "steps",
            "eval_steps": 2,
            "per_device_train_batch_size": 2,
            "max_length": 48,
            "learning_rate": 0.01,
            "lora_dropout": 0.0,
            "logging_steps": 1,
            "disable_tqdm": True,
            "doctor": "off",
        }

    def run(self, name: str, env: dict[str, str] | None = None, code: int = 0, **more: Any) -> tuple[Path, Result]:
        output = self._scratch / name
        argv = flags(**self._base | {"output_dir": output} | self._settings | more)
        done = self._server.run(*argv, env={"SIMCARD_LOG": f"{output}.log"} | (env or {}))
        assert done.code == code, done.stderr[-3000:]
        return output, done

    def run_ranks(self, name: str, **more: Any) -> Path:
        output = self._scratch / name
        argv = flags(**self._base | {"output_dir": output} | self._settings | more)
        ranks = environments(output.with_suffix(".exit.json"), SIMCARD_DEVICES="2")
        for running in [self._server.start(*argv, env=environment) for environment in ranks]:
            done = running.wait()
            assert done.code == 0, done.stderr[-3000:]
        return output


@pytest.fixture(scope="session")
def deep(scratch: Path) -> Callable[[str], Path]:
    """A model of five layers in bfloat16."""
    return lambda arch: tiny.build(arch, scratch / "deep", dtype=torch.bfloat16, num_hidden_layers=LAYERS)


@pytest.fixture
def job(
    card_server: CommandServer, deep: Callable[[str], Path], messages: Path, tmp_path: Path
) -> Callable[[str], Job]:
    def make(method: str) -> Job:
        model = deep("qwen3_moe" if method == "experts" else "llama3")
        return Job(card_server, model, messages, tmp_path, METHODS[method])

    return make


@pytest.fixture(scope="module")
def resident(
    card_server: CommandServer, deep: Callable[[str], Path], messages: Path, scratch: Path
) -> Callable[[str], Path]:
    """The output of an undisturbed run that streams nothing, made once."""

    def make(method: str) -> Path:
        output = scratch / f"resident-{method}"
        if not output.exists():
            model = deep("qwen3_moe" if method == "experts" else "llama3")
            Job(card_server, model, messages, scratch, METHODS[method]).run(output.name)
        return output

    return make


@pytest.mark.parametrize("method", sampled(METHODS, "lora", "qlora"))
def test_a_streamed_run_is_the_resident_run_bit_for_bit(
    method: str, job: Callable[[str], Job], resident: Callable[[str], Path]
) -> None:
    """Memory is poisoned when it is freed, and copies and kernels take random times: a layer that computes with
    another one's weights, or too early, is seen."""
    trial = job(method)
    disturbed = {"SIMCARD_POISON": "1", "SIMCARD_DELAYS": "0,40,0,400"}
    for count in (4,) if method == "lora" else (LAYERS,):
        streamed, _ = trial.run(f"streamed{count}", disturbed, stream_weights=count)
        assert losses_of(streamed) == losses_of(resident(method))
        assert (streamed / ADAPTER).read_bytes() == (resident(method) / ADAPTER).read_bytes()
        report = report_of(streamed)
        assert_covered(report, fetched=method in ("qlora", "8bit"))
        assert_census(Log(Path(f"{streamed}.log")), report)
        told = report["streaming"]
        assert len(told["layers"]) == count and told["visits"] <= STEPS * 2 * (count + 1) + 40
        assert report["streamed"]["bytes"] > 0 == report["streamed"]["mismatches"]
        held = report["coverage"]["device_bytes"] - report_of(resident(method))["coverage"]["device_bytes"]
        assert held == told["landing_bytes"] - sum(told["host_bytes"].values())


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
    kind: str, job: Callable[[str], Job], resident: Callable[[str], Path]
) -> None:
    """`after`: a layer changes on the card after its arrival; it is found once, when the next one takes its place.

    `late`: tensors of two visits are hit; all of a visit have arrived when it is examined: one incident each.
    """
    fault = f"kind={kind},stage=streamed,rate=0.3,seed=3,first=20,count=5"
    output, _ = job("lora").run("out", {"HF_ROCM_TUNE_FAULT": fault}, stream_weights=4)
    report = assert_recovered(output, resident("lora"))
    assert report["fault_injection"]["injected"] >= 5
    assert report["streamed"]["mismatches"] >= {"late": 2, "after": 1}.get(kind, 5)
    if kind == "after":  # not only before the save, after the second step
        assert {row["step"] for row in report["incidents"]} == {1}


@pytest.mark.parametrize(
    ("place", "method"),
    [
        pytest.param("mapped", "lora", marks=pytest.mark.long),
        ("anonymous", "qlora"),
        pytest.param("card", "lora", marks=pytest.mark.long),
    ],
)
def test_a_layer_that_changes_where_it_is_is_found_and_loaded_again(
    place: str, method: str, job: Callable[[str], Job], resident: Callable[[str], Path]
) -> None:
    """A mapped layer is read from its file again, a quantised one with the whole model, from the last checkpoint on."""
    output, done = job(method).run("out", memory_attack(f"{place}", step=4), stream_weights=4)
    report = assert_recovered(output, resident(method))
    kinds = {row["kind"] for row in report["incidents"] if row["stage"] == "streamed"}
    assert kinds >= {"changed on the device" if place == "card" else "source_changed"}
    assert ("all weights are loaded again" in done.stdout) == (place != "mapped")


def memory_attack(place: str, *, step: int) -> dict[str, str]:
    return {"MEMORY_ATTACK": json.dumps({"kind": "streamed", "place": place, "step": step})}


def test_a_killed_run_goes_on_with_other_layers_streamed(
    job: Callable[[str], Job], resident: Callable[[str], Path]
) -> None:
    """Before and after, fetches arrive wrong."""
    trial = job("lora")
    fault = {"HF_ROCM_TUNE_FAULT": "kind=stale,stage=streamed,rate=0.3,seed=3,first=20,count=5"}
    trial.run("out", {**fault, "HF_ROCM_TUNE_CRASH": "step=4,kind=kill"}, code=-9, stream_weights=3)
    output, done = trial.run("out", fault, stream_weights=LAYERS)
    assert "checkpoint-2" in done.stdout
    assert_recovered(output, resident("lora"))


@pytest.mark.long
@pytest.mark.parametrize(("method", "share"), [("lora", 3), ("qlora", 4)])
def test_a_card_with_a_third_of_the_model_s_bytes_trains_it(
    method: str, share: int, card_server: CommandServer, messages: Path, scratch: Path, tmp_path: Path
) -> None:
    """With the losses and the adapter of a large card; what is resident in the other run does not fit there.

    Of the bytes in the files. QLoRA's own are a quarter of them: plain torch operators, which quantise and unpack on
    this card, take as much again.
    """
    wide = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 40}
    model = tiny.build("llama3", scratch / "wide", dtype=torch.bfloat16, **wide)
    few = {"lora_target_modules": "q_proj", "lora_r": 2, "per_device_train_batch_size": 1, "max_length": 32}
    few |= {"max_steps": 1, "save_steps": 1, "eval_strategy": "no"}
    trial = Job(card_server, model, messages, tmp_path, METHODS[method] | few)
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
def test_each_of_two_ranks_streams_for_itself(job: Callable[[str], Job]) -> None:
    ranks: dict[str, Any] = {"grad_sync": "host", "preflight": "off"}
    found = []
    for count in ("off", "4"):
        outputs = job("lora").run_ranks(f"two-{count}", stream_weights=count, **ranks)
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
    cards: str, more: dict[str, Any], job: Callable[[str], Job]
) -> None:
    found = []
    for count in ("off", "4"):
        output, _ = job("lora").run(f"stream-{count}", {"SIMCARD_DEVICES": cards}, stream_weights=count, **more)
        assert_covered(report_of(output))
        log = json.loads((output / "training_log.json").read_text())["log"]
        answers = [row["samples"] for row in log if "samples" in row]
        assert len(answers) == STEPS // 2 * ("sample_every" in more)
        found.append((losses_of(output), (output / ADAPTER).read_bytes(), answers))
    assert found[0] == found[1]


@pytest.mark.long
def test_a_step_that_runs_out_of_memory_is_repeated_in_parts(job: Callable[[str], Job]) -> None:
    shortage = {"HF_ROCM_TUNE_STEP_FAULT": "kind=oom,rate=1,count=1"}
    whole, _ = job("lora").run("resident", shortage)
    streamed, _ = job("lora").run("streamed", shortage, stream_weights=4)
    assert report_of(streamed)["memory"]["recovered"] > 0
    assert (streamed / ADAPTER).read_bytes() == (whole / ADAPTER).read_bytes()


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"use_peft": False}, "--stream_weights does not work with --use_peft false"),
        ({"stream_weights": 8}, "this model has 5 layers"),
        ({"stream_weights": "some"}, "give auto, off or the number of layers"),
        ({"lora_modules_to_save": "q_proj", "lora_target_modules": "v_proj"}, "--lora_modules_to_save q_proj"),
    ],
)
def test_what_cannot_be_streamed_is_refused_in_one_line(
    settings: dict[str, Any], reason: str, job: Callable[[str], Job], tmp_path: Path
) -> None:
    output, done = job("lora").run("out", code=2, **{"stream_weights": 2} | settings)
    (line,) = done.error_lines
    assert reason in line and not output.exists()
