"""Whole trainings on the simulated card, through the real command line: the CPU's numbers, every byte accounted for.

The card's driver counts what crosses between host and card, and names who sent it. The engine's own ledger, in the
report, must give the same bytes; whatever else crosses is listed here by name, and anything that is not fails the test.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tests import simcard, tiny
from tests.e2e import conftest
from tests.e2e.command import CommandServer, Running
from tests.e2e.conftest import ADAPTER, done, flags, losses_of, report_of, sampled
from tests.simcard.log import Event, Log
from tests.two_ranks import environments

KILLED = {"HF_ROCM_TUNE_CRASH": "step=4,kind=kill"}
STEPS = 4

TO_CARD = {
    "transformers/trainer.py:Trainer._inner_training_loop": "the zero to which losses are added",
    "transformers/trainer_pt_utils.py:distributed_broadcast_scalars": "counted samples and tokens",
    "trainer/sft_trainer.py:SFTTrainer.compute_loss": "tokens of packed rows, counted for the log",
}
"""Scalars that upstream sends by itself: none of them is part of a model, a batch, or a state of the optimizer."""
FROM_CARD = {
    "transformers/trainer.py:Trainer._run_epoch": "the norm of the gradients, the loss",
    "transformers/trainer.py:Trainer._maybe_log_save_evaluate": "the loss, to be logged",
    "transformers/trainer.py:Trainer._finalize_training": "the mean loss",
    "transformers/trainer.py:Trainer.store_flos": "floating point operations, counted",
    "trainer/sft_trainer.py:SFTTrainer.compute_loss": "metrics of an epoch's last batch, where that is cut",
    "transformers/trainer_pt_utils.py:nested_numpify": "losses of an evaluation",
    "transformers/masking_utils.py:_ignore_causal_mask_sdpa": "whether a mask masks nothing",
    "update/clipping.py:_adds_in_sequence": "the norm of known numbers, once: how the device adds",
    "train/guard.py:TrainingGuard.require_finite": "whether a weight is finite",
    "transformers/masking_utils.py:find_packed_sequence_indices": "whether positions begin anew",
    "bitsandbytes/functional.py:QuantState.as_dict": "the offset of 4-bit scales, for a state dict that is thrown away",
    "default/ops.py:_": "whether a matrix has outliers, in 8-bit layers",
    "integrations/moe.py:_grouped_mm": "how many rows each expert has",
    "arithmetic/experts.py:ProductsWithin.__torch_function__": "likewise, where it calls the product that is checked",
    "arithmetic/attention.py:WatchedChoices.__torch_function__": "likewise, where a first step is watched for choices",
    "models/experts.py:_rows_of_each": "likewise",
    "train/replay.py:Replays._from_one_rank": "label tokens of a micro-batch that all ranks compute",
    "thread pt_autograd_0": "likewise, in backward",
}
"""Scalars, to be logged or looked at."""
SAVED = {
    "train/guard.py:_read_figures": "loss, norm, residuals of products, a sample of the last update, in one read",
    "train/update/checks.py:UpdateChecks.check_now": "a sample of the last update, before a save",
    "train/replay.py:_result_of": "loss, norms and sums of what was computed twice, in one read",
    "train/metrics.py:evaluate_deferred": "what TRL's trainer has noted since the last log, in one read",
    "safetensors/torch.py:_to_ndarray": "an adapter or a model, compared with its file afterwards",
    "survive/saved_state.py:State.write": "likewise",
}
GROUP = "simcard/ranks.py:"
"""Collectives of cards' tensors, where there are two ranks: RCCL's or gloo's own business. The adapters of rank 0 go
round so at the start, and are compared on all ranks afterwards."""
BETWEEN_RANKS = {
    "accelerate/accelerator.py:Accelerator.prepare_model": "DistributedDataParallel compares shapes",
    "thread pt_autograd_0": "which parameters were used, for DistributedDataParallel",
    "thread pt_autograd_1": "likewise",
    "cards/gradients.py:joined_words": "projections of gradients, by which averages are judged",
    "utils/operations.py:_gpu_gather.<locals>._gpu_gather_one": "counted tokens",
}
BETWEEN_RANKS_BYTES = 8192
"""Five numbers for each block of gradients: what is compared, not what is trained with."""
SCALAR_BYTES = 64
VERDICTS = "train/guard.py:_read_figures"  # norm, loss and one figure a checked product, once a step
VERDICTS_BYTES = 4096


@dataclass(frozen=True, kw_only=True)
class Method:
    """A way of training.

    Args:
        settings: flags.
        arch: of the model.
        tolerance: relative, of the losses against the CPU's.
        cards: how many; the CPU's run has as many logical ones where it is a split.
    """

    settings: dict[str, Any] = field(default_factory=dict)
    arch: str = "llama3"
    tolerance: float = 1e-5
    cards: int = 1

    @property
    def env(self) -> dict[str, str]:
        """Variables of the command."""
        return {"SIMCARD_DEVICES": str(self.cards)}


FLOAT32 = {"dtype": "float32", "bf16": False}
BF16 = {"bf16": True, "gradient_checkpointing": True, "optim": "adamw_torch_fused"}
METHODS = {
    "lora": Method(settings={**FLOAT32, "gradient_accumulation_steps": 2, "eval_strategy": "steps"}),
    "bf16": Method(settings={**BF16, "packing": True}, tolerance=1e-2),
    "qlora": Method(settings={"load_in_4bit": True}, tolerance=1e-2),
    "8bit": Method(settings={"load_in_8bit": True}, tolerance=1e-2),
    "full": Method(settings={"use_peft": False, **FLOAT32, "optim": "adamw_torch_fused"}),
    "one-pass loss": Method(settings={"one_pass_loss": True, **FLOAT32}),
    "dora": Method(settings={"use_dora": True, **FLOAT32}),
    "rslora": Method(settings={"use_rslora": True, **FLOAT32}),
    "pissa": Method(settings={"init_lora_weights": "pissa", **FLOAT32}),
    "modules to save": Method(settings={"lora_modules_to_save": "lm_head", **FLOAT32}),
    "experts": Method(settings={"lora_target_parameters": "mlp.experts.gate_up_proj", **FLOAT32}, arch="qwen3_moe"),
    "experts in 4 bit": Method(
        settings={"load_in_4bit": True, "lora_target_parameters": "experts.gate_up_proj"},
        arch="qwen3_moe",
        tolerance=1e-2,
    ),
    "experts in MXFP4": Method(settings=BF16, arch="gpt_oss-mxfp4", tolerance=1e-2),
    "packing": Method(settings={"packing": True, **FLOAT32}),
    "8-bit optimizer": Method(settings={"optim": "adamw_8bit", **FLOAT32}),
    "split": Method(settings={"split_layers": "auto", **FLOAT32}, cards=2),
    "split qlora": Method(settings={"split_layers": "auto", "load_in_4bit": True}, cards=2, tolerance=1e-2),
    **{
        f"{arch} {name}": Method(settings=settings, arch=arch, tolerance=1e-2)
        for arch in tiny.ARCHITECTURES
        for name, settings in (("lora", BF16), ("qlora", {"load_in_4bit": True}))
    },
}


def command_line(method: Method, model: Path, messages: Path, output: Path) -> list[str]:
    """A method's flags."""
    wanted = {
        "model_name_or_path": model,
        "dataset_name": messages,
        "output_dir": output,
        "max_steps": STEPS,
        "save_steps": 2,
        "eval_steps": 2,
        "per_device_train_batch_size": 2,
        "max_length": 64,
        "learning_rate": 0.01,
        "lora_dropout": 0.0,
        "logging_steps": 1,
        "disable_tqdm": True,
        "doctor": "off",
    }
    return flags(**wanted | method.settings)


@pytest.fixture
def argv(model_of: Callable[[str], Path], messages: Path) -> Callable[[Method, Path], list[str]]:
    """The command line of a method."""
    return lambda method, output: command_line(method, model_of(method.arch), messages, output)


@pytest.fixture(scope="module")
def whole(
    card_server: CommandServer, model_of: Callable[[str], Path], messages: Path, scratch: Path
) -> Callable[[str], Path]:
    """The output of a method's uninterrupted run on the card, made once, with the driver's log beside it."""

    def run(name: str) -> Path:
        output = scratch / "card-runs" / name.replace(" ", "-")
        if not output.exists():
            output.parent.mkdir(exist_ok=True)
            env = {**METHODS[name].env, "SIMCARD_LOG": str(output.with_suffix(".log"))}
            argv = command_line(METHODS[name], model_of(METHODS[name].arch), messages, output)
            done(card_server.run(*argv, env=env))
        return output

    return run


def weights(output: Path) -> bytes:
    """The file that was trained."""
    found = output / ADAPTER
    return (found if found.exists() else output / "model.safetensors").read_bytes()


def assert_census(log: Log, report: dict[str, Any]) -> None:
    """Every byte that the driver counted is in the engine's ledger, or was moved by somebody who is listed."""
    crossed = report["crossings"]
    assert log.engine_bytes("to_card") == crossed["to_device_bytes"] > 0
    assert log.engine_bytes("to_host") == crossed["to_host_bytes"] > 0
    others = [event for event in log.events if event.kind in ("to_card", "to_host") and not event.engine]
    stray = {(event.kind, event.caller, event.nbytes) for event in others if not _listed(event, report["ranks"])}
    assert stray == set()


def _listed(event: Event, ranks: int) -> bool:
    if ranks > 1 and (event.caller.startswith(GROUP) or event.caller in BETWEEN_RANKS):
        return event.caller.startswith(GROUP) or event.nbytes <= BETWEEN_RANKS_BYTES
    if event.kind == "to_host" and event.caller in SAVED:
        return True
    if event.kind == "to_host" and event.caller.startswith(VERDICTS):  # a split reads one from each card
        return event.nbytes <= VERDICTS_BYTES
    return event.nbytes <= SCALAR_BYTES and event.caller in (TO_CARD if event.kind == "to_card" else FROM_CARD)


def assert_covered(report: dict[str, Any], *, fetched: bool = False) -> None:
    """Nothing on the card is unverified, and the report does not take it for a GPU.

    ``fetched``: weights came back to the host too, as transformers wants them for 8 bits: the report counts both ways.
    """
    conftest.assert_covered(report)
    assert report["device"]["name"] == simcard.NAME
    crossed = report["crossings"]["to_device_bytes"] + fetched * report["crossings"]["to_host_bytes"]
    assert crossed >= report["weights"]["bytes"] + report["batches"]["bytes"]


@pytest.mark.parametrize("name", sampled(METHODS, "qlora"))
def test_a_method_trains_as_on_the_cpu_and_goes_on_after_a_kill(
    name: str,
    argv: Callable[[Method, Path], list[str]],
    whole: Callable[[str], Path],
    server: CommandServer,
    card_server: CommandServer,
    tmp_path: Path,
) -> None:
    method, card, cpu, again = METHODS[name], whole(name), tmp_path / "cpu", tmp_path / "again"
    fetched = "load_in_8bit" in method.settings
    assert_covered(report_of(card), fetched=fetched)
    assert_census(Log(card.with_suffix(".log")), report_of(card))
    done(server.run(*argv(method, cpu), env=method.env))
    assert losses_of(card) == pytest.approx(losses_of(cpu), rel=method.tolerance)
    assert len(losses_of(card)) == STEPS and max(losses_of(card)) - min(losses_of(card)) > 0.01

    killed = card_server.run(*argv(method, again), env={**method.env, **KILLED})
    assert killed.code == -9 and not (again / ADAPTER).exists()
    log = tmp_path / "resumed.log"
    done(card_server.run(*argv(method, again), env={**method.env, **KILLED, "SIMCARD_LOG": str(log)}))
    assert losses_of(again) == losses_of(card)
    assert weights(again) == weights(card)
    assert_covered(report_of(again), fetched=fetched)
    assert_census(Log(log), report_of(again))


HARMS = ("flip", "zero", "drop", "stale")


@pytest.mark.parametrize("kind", sampled(HARMS, "flip"))
@pytest.mark.parametrize("name", sampled(("lora", "qlora", "full", "experts in 4 bit", "experts in MXFP4"), "qlora"))
def test_a_copy_that_the_driver_harms_leaves_no_trace_in_the_adapter(
    name: str,
    kind: str,
    argv: Callable[[Method, Path], list[str]],
    whole: Callable[[str], Path],
    card_server: CommandServer,
    tmp_path: Path,
) -> None:
    """Below our own code: whatever crosses may arrive wrong, upstream's scalars included."""
    output, log = tmp_path / "out", tmp_path / "log"
    rate = 0.25 if name == "full" else 0.1  # a full training makes 30 copies
    harm = {"SIMCARD_HARM": f"{kind},{rate}", "SIMCARD_POISON": "1", "SIMCARD_LOG": str(log)}
    done(card_server.run(*argv(METHODS[name], output), env=harm))
    assert sum(event.kind == "harm" for event in Log(log).events) > 3
    assert_recovered(output, whole(name))


def assert_recovered(output: Path, clean: Path) -> None:
    """There was something to recover from, all of it was, and the result is that of the clean run."""
    report = report_of(output)
    counted = [report[stage] for stage in ("weights", "batches", "adapter", "optimizer", "activations", "frozen")]
    assert sum(stage["mismatches"] for stage in counted) > 0 < len(report["incidents"])
    assert {row["outcome"] for row in report["incidents"]} == {"recovered"}
    assert_covered(report)
    assert weights(output) == weights(clean)


@pytest.mark.long
@pytest.mark.parametrize("settings", [{"dtype": "float32", "bf16": False}, {"load_in_4bit": True}])
def test_two_ranks_average_through_the_host(
    settings: dict[str, Any],
    argv: Callable[[Method, Path], list[str]],
    server: CommandServer,
    card_server: CommandServer,
    tmp_path: Path,
) -> None:
    """Each on its own card, which is the only one that it uses; as two ranks on the CPU; killed and gone on too."""
    method = Method(settings={**settings, "grad_sync": "host", "preflight": "off"}, cards=2)

    def start(by: CommandServer, output: Path, log: str = "", **more: str) -> list[Running]:
        each = [{"SIMCARD_LOG": f"{tmp_path / log}.{rank}"} if log else {} for rank in range(2)]
        ranks = environments(output.with_suffix(".exit.json"), each, SIMCARD_DEVICES="2", **more)
        return [by.start(*argv(method, output), env=environment) for environment in ranks]

    cpu, card, again = (tmp_path / each for each in ("cpu", "card", "again"))
    for rank in start(card_server, card, "whole"):
        done(rank.wait())
    assert_two_ranks(card, [tmp_path / f"whole.{rank}" for rank in range(2)])
    for rank in start(server, cpu):
        done(rank.wait())
    assert losses_of(card) == pytest.approx(losses_of(cpu), rel=1e-5 if "bf16" in settings else 1e-2)
    killed, left = start(card_server, again, **KILLED)
    assert killed.wait().code == -9
    left.kill()  # as a launcher does
    left.wait()
    for rank in start(card_server, again, "resumed"):
        done(rank.wait())
    assert_two_ranks(again, [tmp_path / f"resumed.{rank}" for rank in range(2)])
    assert losses_of(again) == losses_of(card)
    assert weights(again) == weights(card)


def assert_two_ranks(output: Path, logs: list[Path]) -> None:
    """The report of both is theirs together, and no rank makes a context on the other's card."""
    report = report_of(output)
    assert_covered(report)
    assert report["ranks"] == 2 and report["grad_sync"]["method"] == "host"
    assert report["gradients"]["buckets"] > 0 == report["gradients"]["mismatches"]
    assert_census(Log(*logs), report)
    assert [list(Log(log).cards.values()) for log in logs] == [[[0]], [[1]]]
