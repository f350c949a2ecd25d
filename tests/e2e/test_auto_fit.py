"""``--auto_fit`` through the real command line.

A run whose way was chosen ends, bit for bit, where the run ends to which the same way was given: the probe leaves
nothing behind, dropout included. What the user set stays, the effective batch never changes, whoever continues a run
continues with its choice, and what cannot be fitted ends in one line.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from hf_rocm_tune.errors import OutOfMemoryError, TuneError, UsageError
from hf_rocm_tune.job.fit import before_loading
from hf_rocm_tune.plan import GIB, CardMemory, from_training, plan_for
from hf_rocm_tune.settings.arguments import parse
from hf_rocm_tune.train.faults import STEP_VARIABLE as VARIABLE
from tests import tiny
from tests.e2e.command import CommandServer, Result
from tests.e2e.conftest import flags, report_of
from tests.e2e.test_oom import _environments

PLENTY = 4.0
PACKED: dict[str, Any] = {"max_length": 224, "packing": True}


@dataclass(frozen=True, kw_only=True)
class Job:
    """Commands that differ in how their micro-batch comes about."""

    server: CommandServer
    argv: list[str]

    def run(self, output: Path, *, fault: str = "", env: dict[str, str] | None = None, **changed: object) -> Result:
        """One process."""
        return self.server.run(*self.argv, *flags(output_dir=output, **changed), env={VARIABLE: fault, **(env or {})})

    def given(self, output: Path, micro_batch: int, steps: int, checkpointing: bool, **changed: object) -> Path:
        """A run to which the way was given."""
        way = {
            "per_device_train_batch_size": micro_batch,
            "gradient_accumulation_steps": steps,
            "activation_checkpointing": checkpointing,
            "one_pass_loss": True,
        }
        done = self.run(output, **(way | changed))
        assert done.code == 0, done.stderr[-3000:]
        return output


@pytest.fixture(scope="module")
def job(server: CommandServer, model_of: Callable[[str], Path], scratch: Path) -> Job:
    """What all commands here share; dropout is on, so that the random state counts."""
    return Job(
        server=server,
        argv=flags(
            model_name_or_path=model_of("llama3"),
            dataset_name=tiny.write_dataset_dir(scratch / "auto_fit", train=64, test=4),
            max_steps=4,
            max_length=64,
            lora_dropout=0.1,
            learning_rate=1e-2,
            logging_steps=1,
            save_steps=2,
            eval_strategy="no",
            doctor="off",
            disable_tqdm=True,
        ),
    )


def adapter_of(output: Path) -> dict[str, torch.Tensor]:
    tensors: dict[str, torch.Tensor] = load_file(output / "adapter_model.safetensors")
    return tensors


def assert_same(one: Path, other: Path) -> None:
    """Same adapter and same log, bit for bit."""
    mine, theirs = adapter_of(one), adapter_of(other)
    assert mine.keys() == theirs.keys()
    assert all(torch.equal(mine[name], theirs[name]) for name in mine)
    assert logged(one) == logged(other)


def logged(output: Path) -> list[dict[str, float]]:
    history = json.loads((output / "checkpoint-4" / "trainer_state.json").read_text())["log_history"]
    names = ("loss", "grad_norm", "entropy", "num_tokens", "epoch")
    return [{name: row[name] for name in names} for row in history if "loss" in row]


def way_of(output: Path) -> tuple[int, int, bool]:
    chosen = report_of(output)["auto_fit"]
    return chosen["micro_batch"], chosen["accumulation"], chosen["checkpointing"]


def test_the_plan_chooses_and_the_run_is_the_one_to_which_that_was_given(job: Job, tmp_path: Path) -> None:
    done = job.run(tmp_path / "out", auto_fit="plan", auto_fit_gib=0.11, effective_batch=8)
    assert done.code == 0, done.stderr[-3000:]
    micro_batch, steps, checkpointing = way_of(tmp_path / "out")
    assert micro_batch * steps == 8
    assert steps > 1, "0.11 GiB less the allocator's slack are not enough for 8 rows"
    chosen = report_of(tmp_path / "out")["auto_fit"]
    assert chosen["predicted_bytes"] < chosen["budget_bytes"]
    assert chosen["measured_bytes"] is None and chosen["tries"] == 0
    assert f"batch {micro_batch} x {steps} accumulated x 1 = 8 effective" in done.stdout
    assert "predicted peak" in done.stdout
    assert_same(tmp_path / "out", job.given(tmp_path / "given", micro_batch, steps, checkpointing))


def test_the_loss_in_one_pass_trains_as_that_of_trl(job: Job, tmp_path: Path) -> None:
    """To rounding; a recipe and a flag can have it without a fit, and with one it can be left out."""
    way = (2, 4, False)
    one_pass = job.given(tmp_path / "one", *way)
    stock = job.given(tmp_path / "two", *way, one_pass_loss=False)
    for mine, theirs in zip(logged(one_pass), logged(stock), strict=True):
        assert mine == pytest.approx(theirs, rel=1e-4)
    mine, theirs = adapter_of(one_pass), adapter_of(stock)
    assert any(not torch.equal(tensor, theirs[name]) for name, tensor in mine.items())
    for name, tensor in mine.items():
        torch.testing.assert_close(tensor, theirs[name], rtol=1e-2, atol=1e-4)
    fitted = job.run(tmp_path / "out", auto_fit="plan", auto_fit_gib=PLENTY, one_pass_loss=False, **dict(zip(
        ("per_device_train_batch_size", "gradient_accumulation_steps", "activation_checkpointing"), way, strict=True
    )))  # fmt: skip
    assert fitted.code == 0, fitted.stderr[-3000:]
    assert_same(tmp_path / "out", stock)


def _room_for_some(job: Job, output: Path) -> float:
    """GiB with which 8 rows fit where some activations are recomputed, a margin left, and do not where none are."""
    settings = parse([*job.argv, *flags(output_dir=output, use_cpu=True)]).resolved()
    request = replace(from_training(settings, platform="cpu"), effective_batch=8, micro_batch=8, one_pass_loss=True)
    plan = plan_for(request, card=CardMemory(name="any", usable=1 << 40, desktop=0, context=0), grid=False)
    off, on = (each.total for each in plan.grid)
    return (on + 0.95 * (off - on)) / GIB


def test_a_mix_of_recomputation_trains_as_without_any(job: Job, tmp_path: Path) -> None:
    """Dropout included: what is not computed again draws no random numbers."""
    asked = {"auto_fit": "plan", "effective_batch": 8, "per_device_train_batch_size": 8}
    room = _room_for_some(job, tmp_path)
    killed = job.run(tmp_path / "out", env={"HF_ROCM_TUNE_CRASH": "step=4,kind=kill"}, auto_fit_gib=room, **asked)
    assert killed.code == -9, killed.stderr[-3000:]
    chosen = json.loads((tmp_path / "out" / "run.json").read_text())["auto_fit"]
    whole, selective = chosen["recompute"]
    assert whole + selective > 0 and chosen["predicted_bytes"] < chosen["budget_bytes"]
    assert f"of {whole} layers whole and of {selective} but for products and attention" in killed.stdout

    done = job.run(tmp_path / "out", auto_fit_gib=PLENTY, **asked)
    assert done.code == 0, done.stderr[-3000:]
    assert "as this run began" in done.stdout
    report = report_of(tmp_path / "out")
    assert report["auto_fit"] == chosen and report["memory"]["recompute_layers"] == [whole, selective]
    mine, given = adapter_of(tmp_path / "out"), adapter_of(job.given(tmp_path / "given", 8, 1, False))
    assert all(torch.equal(tensor, given[name]) for name, tensor in mine.items())


@pytest.mark.parametrize(
    "way",
    [
        {"recompute_layers": "1,1"},
        *(
            pytest.param(way, marks=pytest.mark.long)
            for way in (
                {"recompute_layers": "0,2", **PACKED},
                {"recompute_layers": "0,1", "load_in_4bit": True},
                {"recompute_layers": "1,1", "split_layers": "1,1"},
                {"recompute_layers": "1,1", "bf16": True},
                {"recompute_layers": "0,2", "use_dora": True, "bf16": True},
            )
        ),
    ],
    ids=lambda way: "-".join(f"{name}={value}" for name, value in way.items()),
)
def test_layers_that_are_recomputed_change_nothing(job: Job, tmp_path: Path, way: dict[str, Any]) -> None:
    rest = {name: value for name, value in way.items() if name != "recompute_layers"}
    done = job.run(tmp_path / "out", per_device_train_batch_size=4, gradient_accumulation_steps=2, **way)
    assert done.code == 0, done.stderr[-3000:]
    told = report_of(tmp_path / "out")["memory"]["recompute_layers"]
    assert ",".join(map(str, told)) == way["recompute_layers"]
    assert_same(tmp_path / "out", job.given(tmp_path / "given", 4, 2, False, one_pass_loss=False, **rest))


@pytest.mark.long
def test_a_step_down_goes_on_with_the_same_mix(job: Job, tmp_path: Path) -> None:
    asked = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2, "on_oom": "step_down"}
    fault = "kind=oom,rows=2,count=1"
    done = job.run(tmp_path / "out", fault=fault, recompute_layers="1,1", **asked)
    assert done.code == 0, done.stderr[-3000:]
    assert report_of(tmp_path / "out")["memory"]["shortages"] == 1
    other = job.run(tmp_path / "given", fault=fault, activation_checkpointing=False, **asked)
    assert other.code == 0, other.stderr[-3000:]
    assert_same(tmp_path / "out", tmp_path / "given")


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ({"recompute_layers": "1,7"}, "--recompute_layers 1,7 needs 8 layers, and this model can recompute 2"),
        ({"recompute_layers": "1", "activation_checkpointing": False}, "does not work with"),
        ({"one_pass_loss": True, "torch_compile": True}, "--one_pass_loss does not work with --torch_compile"),
        ({"auto_fit": "plan", "auto_find_batch_size": True}, "both choose the micro-batch"),
    ],
)
def test_what_cannot_be_recomputed_or_compiled_is_refused(
    job: Job, tmp_path: Path, asked: dict[str, Any], said: str
) -> None:
    done = job.run(tmp_path / "out", **asked)
    assert done.code == 2 and done.error_lines and said in done.error_lines[0]
    assert len(done.error_lines) == 1 and not (tmp_path / "out" / "run.json").exists()


@pytest.mark.parametrize("batches", [{}, pytest.param(PACKED, marks=pytest.mark.long)], ids=["padded", "packed"])
def test_a_probe_goes_down_and_leaves_nothing_behind(job: Job, tmp_path: Path, batches: dict[str, Any]) -> None:
    # Packed rows (by the plan 2 at a time here) become one of 448 tokens.
    fault, chosen = ("kind=oom,tokens=130", (2, 4, False)) if not batches else ("kind=oom,tokens=300", (1, 8, False))
    done = job.run(tmp_path / "out", fault=fault, auto_fit="probe", auto_fit_gib=PLENTY, effective_batch=8, **batches)
    assert done.code == 0, done.stderr[-3000:]
    assert "out of memory" in done.stdout
    micro_batch, steps, checkpointing = way_of(tmp_path / "out")
    assert (micro_batch, steps, checkpointing) == chosen
    assert report_of(tmp_path / "out")["memory"]["shortages"] == 0, "the run itself never ran out of memory"
    assert_same(tmp_path / "out", job.given(tmp_path / "given", micro_batch, steps, checkpointing, **batches))


@pytest.mark.long
def test_a_probe_turns_checkpointing_on_where_only_that_helps(job: Job, tmp_path: Path) -> None:
    done = job.run(
        tmp_path / "out",
        fault="kind=oom,count=1",
        auto_fit="probe",
        auto_fit_gib=PLENTY,
        effective_batch=4,
        per_device_train_batch_size=4,
    )
    assert done.code == 0, done.stderr[-3000:]
    assert way_of(tmp_path / "out") == (4, 1, True)
    assert "kept as given: micro-batch 4" in done.stdout
    assert_same(tmp_path / "out", job.given(tmp_path / "given", 4, 1, True))


@pytest.mark.long
def test_a_run_that_goes_on_keeps_its_choice_whatever_is_free_by_then(job: Job, tmp_path: Path) -> None:
    asked = {"auto_fit": "probe", "effective_batch": 8}
    killed = job.run(
        tmp_path / "out",
        fault="kind=oom,rows=2",
        env={"HF_ROCM_TUNE_CRASH": "step=4,kind=kill"},
        auto_fit_gib=PLENTY,
        **asked,
    )
    assert killed.code == -9
    done = job.run(tmp_path / "out", auto_fit_gib=0.2, **asked)
    assert done.code == 0, done.stderr[-3000:]
    assert "as this run began" in done.stdout and "tried micro-batch" not in done.stdout
    assert way_of(tmp_path / "out") == (2, 4, False)
    # TRL counts tokens anew after a resume, so the logs differ in that.
    given = adapter_of(job.given(tmp_path / "given", 2, 4, False))
    assert all(torch.equal(tensor, given[name]) for name, tensor in adapter_of(tmp_path / "out").items())

    other = job.run(tmp_path / "out", auto_fit="off", per_device_train_batch_size=8)
    assert other.code == 2 and "auto_fit 'probe' -> 'off'" in other.stderr


def test_without_a_card_nothing_is_chosen_and_the_effective_batch_stands(job: Job, tmp_path: Path) -> None:
    done = job.run(tmp_path / "out", auto_fit="probe", effective_batch=12)
    assert done.code == 0, done.stderr[-3000:]
    assert done.stdout.count("there is no card, so nothing is chosen") == 1
    assert "batch 6 x 2 accumulated x 1 = 12 effective" in done.stdout
    assert report_of(tmp_path / "out")["auto_fit"] is None


@pytest.mark.long
def test_ranks_take_the_same_way_though_only_one_is_out_of_memory(job: Job, tmp_path: Path) -> None:
    output = tmp_path / "out"
    asked = flags(output_dir=output, auto_fit="probe", auto_fit_gib=PLENTY, effective_batch=8)
    faults = ("kind=oom,rows=2,rank=1",) * 2
    running = [job.server.start(*job.argv, *asked, env=one) for one in _environments(output, faults)]
    results = [one.wait() for one in running]
    assert [result.code for result in results] == [0, 0], [result.stderr[-2000:] for result in results]
    assert way_of(output) == (2, 2, False)

    output = tmp_path / "given"
    way = flags(per_device_train_batch_size=2, gradient_accumulation_steps=2, activation_checkpointing=False)
    way += flags(one_pass_loss=True)
    running = [
        job.server.start(*job.argv, *flags(output_dir=output), *way, env=one) for one in _environments(output, ("", ""))
    ]
    assert {one.wait().code for one in running} == {0}
    assert_same(tmp_path / "out", output)


@pytest.mark.long
def test_a_probe_that_finds_no_way_ends_in_one_line(job: Job, tmp_path: Path) -> None:
    done = job.run(tmp_path / "out", fault="kind=oom", auto_fit="probe", auto_fit_gib=PLENTY)
    assert done.code == 5, done.stderr[-3000:]
    assert len(done.error_lines) == 1 and "a worst-case step does not fit" in done.error_lines[0]
    assert not (tmp_path / "out" / "run.json").exists()


@pytest.mark.parametrize(
    ("asked", "error", "said"),
    [
        ({"auto_fit": "plan", "auto_fit_gib": 0.101}, OutOfMemoryError, "nothing fits by estimate"),
        ({"effective_batch": 8}, UsageError, "--effective_batch works only with --auto_fit"),
        ({"auto_fit_gib": 8}, UsageError, "--auto_fit_gib works only with --auto_fit"),
        ({"auto_fit": "plan", "effective_batch": 0}, UsageError, "--effective_batch must be 1 or more"),
        ({"auto_fit": "plan", "auto_fit_gib": "nan"}, UsageError, "--auto_fit_gib must be more than 0"),
        (
            {"auto_fit": "plan", "effective_batch": 8, "per_device_train_batch_size": 3},
            UsageError,
            "cannot be made with --per_device_train_batch_size 3",
        ),
        ({"auto_fit": "plan", "auto_fit_gib": PLENTY, "optim": "adafactor"}, UsageError, "not known to the planner"),
    ],
)
def test_what_cannot_be_fitted_is_said_before_the_model_is_loaded(
    job: Job, tmp_path: Path, asked: dict[str, object], error: type[TuneError], said: str
) -> None:
    argv = [*job.argv, *flags(output_dir=tmp_path, use_cpu=True, **asked)]
    with pytest.raises(error) as caught:
        before_loading(parse(argv), None, libraries=0, say=lambda *lines: None)
    assert said in str(caught.value) and "\n" not in str(caught.value)
