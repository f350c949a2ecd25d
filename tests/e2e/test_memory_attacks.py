"""Memory and files that change behind our back, in real commands: all found and recovered.

Each attack wraps upstream's functions and flips bits through raw pointers, see `tests.e2e.memory_attacks`. Not
covered: what README names as not verified.
"""

from __future__ import annotations

import itertools
import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from hf_rocm_tune.survive import manifest
from hf_rocm_tune.train.report import closing_line
from tests.e2e.command import CommandServer, Result
from tests.e2e.conftest import ADAPTER, Job, MakeJob, assert_covered, done, report_of, sampled
from tests.e2e.test_methods import rows_of
from tests.e2e.test_ranks import FSDP2

METHODS: dict[str, list[str]] = {
    "lora": [],
    "qlora": ["--load_in_4bit", "--use_bnb_nested_quant"],
    "bf16": ["--dtype", "bfloat16"],
    "full": ["--use_peft", "false"],
    "pissa": ["--init_lora_weights", "pissa", "--lora_dropout", "0"],
}
VERBS = ("dpo", "kto", "grpo")
"""Commands whose reference or reward model is a model of its own."""
SEEDS = range(10)


def weights_of(output: Path) -> bytes:
    return next(file for name in (ADAPTER, "model.safetensors") if (file := output / name).exists()).read_bytes()


class Bench(Job):
    """A command of four steps with accumulation, a checkpoint and an evaluation after the second."""

    def command(
        self, output: Path, method: str, *attacks: dict[str, Any], env: dict[str, str] | None = None, **changed: Any
    ) -> Result:
        """One run, attacked."""
        told = [{**each, "log": f"{output}.attacked"} for each in attacks]
        env = {**(env or {}), **({"MEMORY_ATTACK": json.dumps(told)} if told else {})}
        if method in VERBS:
            env["METHOD"] = method
            changed |= self.of_verb(method)
        return self.run(output, *METHODS.get(method, []), env=env, **changed)

    def of_verb(self, verb: str) -> dict[str, Any]:
        """The settings of another command in which a whole model is trained."""
        data = self.root / verb / "train.jsonl"
        data.parent.mkdir(parents=True, exist_ok=True)
        data.write_text("".join(json.dumps(row) + "\n" for row in rows_of(verb)), encoding="utf-8")
        made: dict[str, Any] = {"dataset_name": data.parent, "use_peft": False, "eval_strategy": None}
        made |= {"eval_steps": None, "lora_dropout": None, "learning_rate": 1e-4}
        if verb == "grpo":
            made |= {"reward_model_name_or_path": self.reward_model(), "num_generations": 2, "max_completion_length": 6}
            made |= {"max_length": None}
        return made

    def reward_model(self) -> Path:
        directory = self.root / "reward model"
        if not directory.exists():
            source = self.settings["model_name_or_path"]
            torch.manual_seed(1)
            model = AutoModelForSequenceClassification.from_pretrained(source, num_labels=1)
            model.config.pad_token_id = model.config.eos_token_id
            model.save_pretrained(directory)
            AutoTokenizer.from_pretrained(source).save_pretrained(directory)
        return directory

    def undisturbed(self, method: str, **changed: Any) -> bytes:
        """The adapter of a run that is not attacked; trained once."""
        output = self.root / f"clean {method} {sorted(changed.items())}"
        if not output.exists():
            done(self.command(output, method, **changed))
            report = report_of(output)
            assert report["incidents"] == [] and report["trained"]["checks"] >= 4
            assert report["trained"]["mismatches"] == report["trained"]["rewritten"] == 0
        return weights_of(output)

    def attacked(self, method: str, *attacks: dict[str, Any], **changed: Any) -> dict[str, Any]:
        """The report of an attacked run that has recovered: its result is the clean run's."""
        clean = self.undisturbed(method, **changed)
        output = self.root / "attacked"
        shutil.rmtree(output, ignore_errors=True)
        log = Path(f"{output}.attacked")
        log.unlink(missing_ok=True)
        result = self.command(output, method, *attacks, **changed)
        assert log.exists() and result.code == 0, f"{attacks}: {result.stderr[-3000:]}"
        happened = log.read_text().splitlines()
        assert len(happened) >= len(attacks) and weights_of(output) == clean, (attacks, happened)
        assert_covered(report := report_of(output))
        assert manifest.inspect(output).problems == []
        return report


def bench_of(make_job: MakeJob, name: str, server: CommandServer) -> Bench:
    settings = {"max_steps": 4, "save_steps": 2, "eval_steps": 2, "eval_strategy": "steps", "lora_dropout": 0.1}
    return Bench(**vars(make_job(name, train=24, server=server, gradient_accumulation_steps=2, **settings)))


@pytest.fixture(scope="module")
def cpu(server: CommandServer, make_job: MakeJob) -> Bench:
    return bench_of(make_job, "memory-attacks", server)


@pytest.fixture(scope="module")
def card(card_server: CommandServer, make_job: MakeJob) -> Bench:
    """On the simulated card."""
    return bench_of(make_job, "memory-attacks-card", card_server)


@pytest.fixture
def bench(request: pytest.FixtureRequest) -> Bench:
    """On the CPU or on the simulated card."""
    found: Bench = request.getfixturevalue(request.param)
    return found


def matrix(*samples: tuple[Any, ...], method: tuple[str, ...], **axes: tuple[Any, ...]) -> Any:
    """Parametrizes: ten seeds for each method on each device, over which the values of the other axes go round.

    The samples are in the normal suite, everything is in the long one.
    """
    rows = [
        (
            device,
            name,
            *(v[(seed + number + at * (seed // len(v))) % len(v)] for at, v in enumerate(axes.values())),
            seed,
        )
        for number, (device, name) in enumerate(itertools.product(("cpu", "card"), method))
        for seed in SEEDS
    ]
    marked = [pytest.param(*row, marks=pytest.mark.long) for row in rows if row not in samples]
    return pytest.mark.parametrize(("bench", "method", *axes, "seed"), [*samples, *marked], indirect=["bench"])


def the_incident(report: dict[str, Any]) -> dict[str, Any]:
    """The only one, but for a guard that saw it too (a flipped exponent may give NaN); the run went on after it."""
    rows = [row for row in report["incidents"] if row["stage"] != "guard"]
    assert len(rows) == 1, report["incidents"]
    row = rows[0]
    assert row["outcome"] == "recovered"
    return dict(row)


# ---- several in one run -------------------------------------------------------------------------------------

FROZEN, TRAINED, USED = (
    ("frozen", "changed in memory"),
    ("trained", "changed in memory"),
    ("batches", "changed in memory"),
)
CHANGED = ("batches", "source_changed")
TOGETHER: dict[str, list[tuple[dict[str, Any], tuple[str, str]]]] = {
    "batches": [
        ({"kind": "counted batch", "step": 1}, CHANGED),
        ({"kind": "used batch", "step": 2}, USED),
        ({"kind": "miscounted batch", "step": 3}, CHANGED),
    ],
    "updates": [
        ({"kind": "trained", "moment": "after backward", "what": "exp_avg", "step": 2}, TRAINED),
        ({"kind": "rate", "step": 3}, TRAINED),  # while the model is evaluated
        ({"kind": "trained", "moment": "before clipping", "what": "weight", "step": 4}, TRAINED),
    ],
    "saves": [
        ({"kind": "trained", "moment": "before evaluation", "what": "step", "step": 2}, TRAINED),
        ({"kind": "trained", "moment": "while saving", "what": "weight", "step": 2}, TRAINED),
        ({"kind": "trained", "moment": "while saving the result", "what": "weight", "step": 4}, TRAINED),
    ],
    "frozen": [
        ({"kind": "after load"}, FROZEN),
        ({"kind": "replaced", "way": "set_", "step": 1}, FROZEN),
        ({"kind": "replaced", "way": "attribute", "step": 3}, ("frozen", "replaced")),
    ],
    "waiting": [
        ({"kind": "waiting batch", "number": 1, "step": 1}, CHANGED),
        ({"kind": "trained", "moment": "before forward", "what": "exp_avg_sq", "step": 3}, TRAINED),
        ({"kind": "rate", "step": 4}, TRAINED),
    ],
}
"""What is attacked in one run, in order, each found and undone before the next one; its incident's stage and kind."""


@matrix(
    ("cpu", "lora", "updates", 1), ("cpu", "lora", "saves", 1), ("cpu", "qlora", "frozen", 1),
    ("card", "lora", "batches", 1),
    method=("lora", "qlora", "bf16"), group=tuple(TOGETHER),
)  # fmt: skip
def test_memory_that_changes_is_not_used(bench: Bench, method: str, group: str, seed: int) -> None:
    attacks = [({**attack, "seed": seed}, expected) for attack, expected in TOGETHER[group]]
    report = bench.attacked(method, *(attack for attack, _ in attacks))
    assert {row["outcome"] for row in report["incidents"]} == {"recovered"}
    # The guard sees a NaN of a flipped exponent, too, and the checks of products another weight.
    rows = [row for row in report["incidents"] if row["stage"] not in ("guard", "arithmetic")]
    assert [row["stage"] for row in rows] == [stage for _, (stage, _) in attacks], rows
    for row, (attack, (_, kind)) in zip(rows, attacks, strict=True):
        assert row["kind"] == kind or attack["kind"] in ("replaced", "waiting batch"), row
        if attack["kind"] == "trained":
            what = attack["what"]
            assert row["tensor"] == ("trained weights" if what == "weight" else f"optimizer state {what}")
        elif attack["kind"] == "rate":
            assert row["tensor"] == "learning rates"
        elif attack["kind"].endswith("counted batch"):
            assert "labels" in row["tensor"]
    if group == "updates":
        assert "faults of trained state, undone by going back: 3" in closing_line(report)


# ---- frozen weights -----------------------------------------------------------------------------------------


@matrix(("cpu", "lora", 0), method=("lora", "qlora"))
def test_a_frozen_tensor_that_is_replaced_by_its_equal_stays_covered(bench: Bench, method: str, seed: int) -> None:
    attack = {"kind": "replaced", "seed": seed, "way": "data", "same": True, "step": 1 + seed % 3}
    report = bench.attacked(method, attack)
    assert report["incidents"] == []
    (row,) = report["rebaselined"]
    assert row["reason"] == "equal to the tensor that it replaces"


@matrix(
    ("cpu", "dpo", "before forward", 3),
    ("cpu", "grpo", "after backward", 4),
    method=VERBS, moment=("before forward", "after backward", "while saving"),
)  # fmt: skip
def test_a_model_that_is_only_evaluated_is_watched(bench: Bench, method: str, moment: str, seed: int) -> None:
    report = bench.attacked(method, {"kind": "reference", "seed": seed, "moment": moment, "step": 1 + seed % 4})
    row = the_incident(report)
    assert row["stage"] == "frozen" and "reference 0" in row["tensor"], row


@matrix(("cpu", "grpo", 1), method=("grpo",))
def test_a_model_that_changes_before_the_trainer_has_it_is_not_used(bench: Bench, method: str, seed: int) -> None:
    """Refused at once where it waited on the host; found at the first step where it was on the device already."""
    clean, output = bench.undisturbed(method), bench.root / "changed early"
    shutil.rmtree(output, ignore_errors=True)
    result = bench.command(output, method, {"kind": "host model", "seed": seed})
    if result.code == 3:
        told = ("weights changed in host memory after they were read", "was loaded from it with other bytes")
        assert any(line in result.error_lines[0] for line in told), result.stderr[-2000:]
        assert not list(output.glob("*.safetensors"))
    else:
        assert result.code == 0 and weights_of(output) == clean, result.stderr[-2000:]
        assert the_incident(report_of(output))["stage"] == "frozen"


@matrix(("cpu", "dpo", 2), ("cpu", "grpo", 3), method=("lora", "qlora", *VERBS))
def test_what_the_reader_of_weight_files_returns_is_not_used(bench: Bench, method: str, seed: int) -> None:
    """Refused, or read again. In DPO and KTO the second time that the files are opened is the reference model's."""
    attack: dict[str, Any] = {"kind": "misreading", "seed": seed, "nth": 2 if method in ("dpo", "kto") else 1}
    attack["directory"] = str(bench.reward_model() if method == "grpo" else bench.settings["model_name_or_path"])
    clean, output = bench.undisturbed(method), bench.root / "misread weights"
    shutil.rmtree(output, ignore_errors=True)
    result = bench.command(output, method, attack)
    assert Path(f"{output}.attacked").exists()
    if result.code == 3:
        assert "was loaded from it with other bytes" in result.error_lines[0], result.stderr[-2000:]
        assert not (output / ADAPTER).exists()
    else:
        assert result.code == 0 and weights_of(output) == clean, result.stderr[-2000:]


MISREAD: dict[str, tuple[str, bool, dict[str, Any]]] = {
    "experts": ("qwen3_moe", False, {}),
    "streamed": ("llama3", True, {"stream_weights": 2}),
    "4 bits": ("llama3", True, {"load_in_4bit": True}),
    "4 bits, streamed": ("llama3", True, {"load_in_4bit": True, "stream_weights": 2}),
    "8 bits": ("llama3", True, {"load_in_8bit": True}),
}
"""Architecture, whether on the simulated card, and flags: what was read is fused, waits on the host, is quantised."""


@pytest.mark.parametrize("way", sampled(MISREAD, "experts", "streamed"))
def test_a_matrix_that_was_misread_is_not_used_in_whatever_form_it_is_kept(
    make_job: MakeJob, server: CommandServer, card_server: CommandServer, tmp_path: Path, way: str
) -> None:
    arch, on_card, settings = MISREAD[way]
    job = make_job(f"misread {way}", arch=arch, server=card_server if on_card else server, max_steps=1, doctor="off")
    attack = {"kind": "misreading", "directory": str(job.settings["model_name_or_path"]), "log": str(tmp_path / "log")}
    attack |= {"seed": 3, "tensor": "layers.1.mlp.experts.1.up_proj" if way == "experts" else "layers.1.mlp.up_proj"}
    ended = job.run(tmp_path / "out", env={"MEMORY_ATTACK": json.dumps(attack)}, **settings)
    assert (tmp_path / "log").exists() and ended.code == 3, ended.stderr[-2000:]
    assert f"{attack['tensor']}.weight was loaded from it with other bytes" in ended.error_lines[0]
    assert not (tmp_path / "out" / ADAPTER).exists()


WAYS: dict[str, tuple[dict[str, str], list[str]]] = {
    "fsdp2": (FSDP2, []),
    "fsdp2 qlora": (FSDP2, ["--load_in_4bit", "--bnb_4bit_quant_storage", "float32"]),
    "tensor": ({}, ["--tensor_parallel", "true"]),
}


def two_ranks(bench: Bench, way: str, output: Path, attack: dict[str, Any] | None, victim: int = 0) -> list[Result]:
    """A job of two ranks, one of which is attacked."""
    env, more = WAYS[way]
    each = [dict(env), dict(env)]
    if attack is not None:
        each[victim]["MEMORY_ATTACK"] = json.dumps({**attack, "log": f"{output}.attacked"})
    return bench.ranks(output, *more, each=each)


@pytest.mark.parametrize(
    ("way", "kind", "seed"),
    [
        pytest.param(way, kind, seed, marks=() if (way, kind, seed) == ("fsdp2", "mapped", 1) else pytest.mark.long)
        for way, kind, seed in itertools.product(WAYS, ("misreading", "mapped", "after load"), SEEDS)
    ],
)
def test_weights_that_one_of_two_ranks_has_otherwise_are_not_used(cpu: Bench, way: str, kind: str, seed: int) -> None:
    """The reader of a file or the mapped file has given it other bytes, or a weight has changed since."""
    clean, output = cpu.root / f"clean {way}", cpu.root / "one of two"
    if not clean.exists():
        for each in two_ranks(cpu, way, clean, None):
            done(each)
    shutil.rmtree(output, ignore_errors=True)
    attack: dict[str, Any] = {"kind": kind, "seed": seed}
    if kind == "misreading":
        attack["directory"] = str(cpu.settings["model_name_or_path"])
    ended = two_ranks(cpu, way, output, attack, seed % 2)
    assert Path(f"{output}.attacked").exists(), [each.stderr[-1500:] for each in ended]
    Path(f"{output}.attacked").unlink()
    codes = sorted(each.code for each in ended)
    if codes == [0, 0]:
        assert weights_of(output) == weights_of(clean)
        assert_covered(report_of(output))
    else:
        said = "".join(each.stderr for each in ended)
        assert codes in ([3, 3], [1, 3]) and len(re.findall("^hf-rocm-tune: .*error: ", said, re.MULTILINE)) == 1, said
        assert not list(output.glob("*.safetensors"))


# ---- trained state ------------------------------------------------------------------------------------------


@matrix(("cpu", "lora", 1), method=("lora", "qlora"))
def test_optimizer_state_that_changes_after_its_comparison_is_read_again(bench: Bench, method: str, seed: int) -> None:
    clean = bench.undisturbed(method)
    output = bench.root / "resumed"
    shutil.rmtree(output, ignore_errors=True)
    killed = {"HF_ROCM_TUNE_CRASH": "step=3,kind=kill"}
    assert bench.command(output, method, env=killed).code < 0 and (output / "checkpoint-2").is_dir()
    result = bench.command(output, method, {"kind": "resumed state", "seed": seed})
    assert Path(f"{output}.attacked").exists() and result.code == 0, result.stderr[-2000:]
    assert weights_of(output) == clean


@matrix(("cpu", "pissa", 1), method=("pissa",))
def test_an_initial_adapter_that_changes_on_the_host_is_not_subtracted(bench: Bench, method: str, seed: int) -> None:
    output, attack = bench.root / "pissa", {"kind": "initial adapter", "seed": seed, "step": 1 + seed % 4}
    clean = bench.undisturbed(method)
    shutil.rmtree(output, ignore_errors=True)
    result = bench.command(output, method, attack)
    assert Path(f"{output}.attacked").exists()
    assert result.code == 0 and weights_of(output) == clean, result.stderr[-2000:]


# ---- batches ------------------------------------------------------------------------------------------------


@matrix(("cpu", "grpo", 1), method=("full", *VERBS))
def test_a_batch_that_changes_after_its_verdict_is_not_used(bench: Bench, method: str, seed: int) -> None:
    row = the_incident(bench.attacked(method, {"kind": "used batch", "seed": seed, "step": 1 + seed % 4}))
    assert (row["stage"], row["kind"]) == ("batches", "changed in memory")


# ---- files --------------------------------------------------------------------------------------------------


@matrix(("cpu", "lora", 0), method=("lora", "qlora"))
def test_tensors_of_another_reading_than_the_hashed_one_are_refused(bench: Bench, method: str, seed: int) -> None:
    model = bench.root / "recorded model"
    if not model.exists():
        shutil.copytree(bench.settings["model_name_or_path"], model)
        manifest.write(model, run_id="0", step=0, status="final")
    clean = bench.undisturbed(method, model_name_or_path=model)
    output = bench.root / "misread"
    shutil.rmtree(output, ignore_errors=True)
    attack = {"kind": "file misread", "seed": seed, "file": str(model / "model.safetensors")}
    result = bench.command(output, method, attack, model_name_or_path=model)
    assert Path(f"{output}.attacked").exists()
    if result.code == 0:  # tensors are views of the mapped file, whose bytes were right again when they were used
        assert weights_of(output) == clean, result.stderr[-2000:]
        return
    assert result.code == 3 and "was loaded from it with other bytes" in result.error_lines[0], result.stderr[-2000:]
    assert not (output / ADAPTER).exists()
