"""Wrong products with frozen weights: found before the optimizer uses them, and the run ends where a clean one ends."""

from __future__ import annotations

import itertools
import json
import random
import re
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from torch import Tensor
from transformers import AutoModelForCausalLM, BitsAndBytesConfig

from hf_rocm_tune.errors import CorruptionError
from hf_rocm_tune.models import experts, loss
from hf_rocm_tune.models.factory import ModelSource, load_model
from hf_rocm_tune.plan import CardMemory, PlanRequest, plan_for
from hf_rocm_tune.train.arithmetic import layers
from hf_rocm_tune.transfer import Mover
from tests import tiny
from tests.e2e.conftest import sampled
from tests.train.faulty_products import ANOTHER, DEQUANTISED, KINDS, Faults
from tests.train.trainers import VerifiedSFT, build, two_ranks

FOUND = [kind for kind in KINDS if kind not in ("low mantissa bit", DEQUANTISED, ANOTHER)]


@pytest.fixture(scope="module", autouse=True)
def no_layers() -> Iterator[None]:
    """Faults count calls, of which a layer that is computed again would take some: see `test_host_layers`."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(layers, "KINDS", 0)
        yield


@pytest.fixture(scope="module")
def tokens() -> Dataset:
    """Token rows with labels."""
    rows = torch.randint(5, 500, (64, 32), generator=torch.Generator().manual_seed(1)).tolist()
    return Dataset.from_list([{"input_ids": row, "labels": row} for row in rows])


@pytest.fixture(scope="module")
def run(model_path: Path, tokens: Dataset, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Any]:
    """Trains six steps of two micro-batches with dropout; returns the trainer."""

    def train(faults: Faults | None = None, mode: str = "every", *, ours: Any = None, **options: Any) -> Any:
        ours = {"consent_unverified": True, "check_arithmetic": mode, **(ours or {})}
        settings = {"max_steps": 6, "gradient_accumulation_steps": 2, **options}
        out = tmp_path_factory.mktemp("run")
        trainer = build(VerifiedSFT, model_path, tokens, out, ours=ours, lora={"lora_dropout": 0.1}, **settings)
        if faults is None:
            trainer.train()
        else:
            with faults:
                trainer.train()
        return trainer

    return train


@pytest.fixture(scope="module")
def clean(run: Callable[..., Any]) -> Any:
    """Without checks."""
    return run(mode="off")


@pytest.fixture(scope="module")
def one_pass(run: Callable[..., Any]) -> Any:
    """Without checks, by the one-pass loss."""
    return run(mode="off", ours={"one_pass_loss": True})


@pytest.fixture(autouse=True)
def libraries() -> Any:
    """Whatever a run has chosen is undone."""
    yield
    torch.backends.mkldnn.enabled = True  # type: ignore[assignment]


def result(trainer: Any) -> tuple[list[tuple[float, float]], dict[str, Tensor]]:
    """Losses and gradient norms, and the adapter."""
    rows = [(row["loss"], row["grad_norm"]) for row in trainer.state.log_history if "loss" in row]
    return rows, {name: each.detach() for name, each in trainer.model.named_parameters() if each.requires_grad}


def assert_same(trainer: Any, other: Any) -> None:
    """Bit for bit."""
    (losses, weights), (others, theirs) = result(trainer), result(other)
    assert losses == others
    assert all(torch.equal(weights[name], theirs[name]) for name in theirs)


def counted(trainer: Any) -> dict[str, int]:
    return dict(trainer.transfer_report.to_dict()["arithmetic"])


@pytest.mark.parametrize("mode", ["sampled", "every"])
def test_checks_change_nothing_and_find_nothing_in_a_clean_run(run: Any, clean: Any, mode: str) -> None:
    trainer = run(mode=mode)
    assert_same(trainer, clean)
    found = counted(trainer)
    assert found["cleared"] == found["disagreements"] == 0
    assert found["checked"] == (6 if mode == "every" else 2) * 14 + (0 if mode == "every" else 4)
    assert found["residuals"] >= 2 * found["checked"]


@pytest.mark.parametrize("kind", sampled(FOUND, "zero tile", "previous output"))
def test_a_wrong_product_now_and_then_changes_nothing(run: Any, clean: Any, kind: str) -> None:
    faults = Faults(kind=kind, rate=0.01, seed=3, first=20)
    trainer = run(faults)
    assert faults.done > 2
    assert_same(trainer, clean)
    found = counted(trainer)
    assert found["disagreements"] == found["recovered"] > 0
    rows = [row for row in trainer.transfer_report.incidents if row["stage"] == "arithmetic"]
    assert {row["outcome"] for row in rows} == {"recovered"}
    assert all("base_layer" in row["tensor"] and row["side"] in ("forward", "backward") for row in rows)


def test_what_one_library_computes_wrong_is_left_to_the_other(run: Any, clean: Any) -> None:
    trainer = run(Faults(kind="swapped columns", shape=(64, 128), library="oneDNN"))
    assert_same(trainer, clean)
    assert not torch.backends.mkldnn.enabled
    assert "oneDNN computes it so: BLAS is used" in trainer.transfer_report.incidents[0]["text"]


def test_a_step_that_cannot_be_computed_again_is_skipped(run: Any, clean: Any) -> None:
    trainer = run(Faults(kind="zero tile", count=1, first=100), ours={"on_oom": "stop"})
    assert trainer.state.global_step == 6
    assert counted(trainer)["disagreements"] == 1
    with pytest.raises(CorruptionError, match="no library computes it right"):
        run(Faults(kind="zero tile", shape=(64, 128), first=50), ours={"on_oom": "stop"})


# ---- 4-bit weights as bitsandbytes dequantises them ----------------------------------------------------------------


def test_a_wrong_dequantised_block_is_found_apart_from_its_product(
    model_path: Path, tokens: Dataset, tmp_path: Path
) -> None:
    def train(faults: Faults, mode: str = "every") -> Any:
        quantised = BitsAndBytesConfig(
            load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True,
            bnb_4bit_compute_dtype=torch.bfloat16,
        )  # fmt: skip
        model = AutoModelForCausalLM.from_pretrained(model_path, quantization_config=quantised, device_map="cpu")
        ours = {"consent_unverified": True, "check_arithmetic": mode}
        trainer = build(VerifiedSFT, model, tokens, tmp_path, ours=ours, max_steps=3)
        with faults:
            trainer.train()
        return trainer

    clean = train(Faults(rate=0.0), mode="off")
    faults = Faults(kind=DEQUANTISED, operators=("bitsandbytes::dequantize_4bit",), first=20, count=1)
    trainer = train(faults)
    assert faults.done == 1
    assert_same(trainer, clean)
    sides = {row["side"]: row["outcome"] for row in trainer.transfer_report.incidents if row["stage"] == "arithmetic"}
    assert sides["dequantised"] == "recovered"
    with pytest.raises(CorruptionError, match=r"the dequantised weight of .* is wrong"):
        train(Faults(kind=DEQUANTISED, operators=("bitsandbytes::dequantize_4bit",)))


# ---- experts ------------------------------------------------------------------------------------------------------

GROUPED, BATCHED = ("aten::_grouped_mm",), ("aten::bmm",)
WITH_ADAPTERS = {"target_modules": ["q_proj", "o_proj"], "target_parameters": ["gate_up_proj", "down_proj"]}
MIXTURES: dict[str, dict[str, Any]] = {
    "grouped": {"arch": "qwen3_moe", "operators": GROUPED},
    "eager": {"arch": "gpt_oss", "how": "eager", "dtype": torch.bfloat16},
    "batched": {"arch": "qwen3_moe", "how": "batched_mm", "operators": BATCHED},
    "batched, transposed": {"arch": "gpt_oss", "how": "batched_mm", "dtype": torch.bfloat16, "operators": BATCHED},
    "adapters": {"arch": "qwen3_moe", "dtype": torch.bfloat16, "lora": WITH_ADAPTERS, "operators": GROUPED},
    "adapters, transposed": {"arch": "gpt_oss", "lora": WITH_ADAPTERS, "operators": GROUPED},
    "nf4": {"arch": "qwen3_moe", "dtype": torch.bfloat16, "nf4": True, "lora": WITH_ADAPTERS},
    "nf4, transposed": {"arch": "gpt_oss", "dtype": torch.bfloat16, "nf4": True},
    "mxfp4": {"arch": "mxfp4", "dtype": torch.bfloat16},
}
"""Where no operators are named, products are told by their shapes from those of other layers."""
SAMPLE = [
    ("grouped", "forward", ANOTHER), ("grouped", "backward", "zero tile"), ("adapters", "forward", "zero tile"),
    ("adapters", "backward", ANOTHER), ("nf4", "forward", "NaN"), ("nf4", "backward", "zero tile"),
    ("mxfp4", "forward", "zero tile"), ("mxfp4", "backward", "NaN"),
]  # fmt: skip
WRONG = [
    pytest.param(case, side, kind, marks=() if (case, side, kind) in SAMPLE else pytest.mark.long)
    for case, side, kind in itertools.product(MIXTURES, ("forward", "backward"), [*FOUND, ANOTHER])
    if kind != ANOTHER or "operators" in MIXTURES[case]  # one operator has several experts
]


@pytest.fixture(scope="module")
def mixture(tokens: Dataset, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Any]:
    """Trains a mixture of `MIXTURES` for four steps; returns the trainer."""
    models = tmp_path_factory.mktemp("mixtures")

    def train(case: str, faults: Faults | None = None, mode: str = "every", **options: Any) -> Any:
        wanted = MIXTURES[case]
        arch = wanted["arch"]
        path = tiny.build_mxfp4(models) if arch == "mxfp4" else tiny.build(arch, models)
        quantised = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True)
        init = {"dtype": wanted.get("dtype", torch.float32), "experts_implementation": wanted.get("how")}
        with Mover(torch.device("cpu")) as mover:
            source = ModelSource(name=str(path), init=init, quantization=quantised if wanted.get("nf4") else None)
            model, _ = load_model(source, mover)
            lora = wanted.get("lora", {"target_modules": ["q_proj", "o_proj"]})
            ours = {"consent_unverified": True, "check_arithmetic": mode, "mover": mover}
            out = tmp_path_factory.mktemp("run")
            trainer = build(VerifiedSFT, model, tokens, out, lora=lora, ours=ours, **{"max_steps": 4, **options})
            with faults or Faults(rate=0.0):
                trainer.train()
        return trainer

    return train


@pytest.fixture(scope="module")
def clean_mixture(mixture: Callable[..., Any]) -> Callable[[str], Any]:
    """Without checks."""
    return cache(lambda case: mixture(case, mode="off"))


def of_experts(trainer: Any) -> list[tuple[str, str, str]]:
    """Side, kind and outcome of the incidents, all of experts."""
    rows = [row for row in trainer.transfer_report.incidents if row["stage"] == "arithmetic"]
    assert all("mlp.experts" in row["tensor"] and row["tensor"].endswith("_proj") for row in rows), rows
    return [(row["side"], row["kind"], row["outcome"]) for row in rows]


@pytest.mark.parametrize(("case", "side", "kind"), WRONG)
def test_a_wrong_product_of_an_expert_leaves_no_trace(
    mixture: Any, clean_mixture: Any, case: str, side: str, kind: str
) -> None:
    operators = MIXTURES[case].get("operators")
    if operators is None:  # one product an expert
        where = {"operators": ("aten::mm",), "shape": (64, 128) if side == "forward" else (128, 64), "first": 10}
    else:  # four products in forward, and four in backward
        where = {"operators": operators, "first": 9 if side == "forward" else 13}
    faults = Faults(kind=kind, count=1, **where)
    trainer = mixture(case, faults)
    assert faults.done == 1
    assert of_experts(trainer) == [(side, "transient", "recovered")]
    assert_same(trainer, clean_mixture(case))
    assert counted(trainer)["cleared"] == trainer._arithmetic.describe()["never_seen"] == 0


def test_experts_that_one_library_computes_wrong_are_left_to_the_other(mixture: Any) -> None:
    trainer = mixture("adapters", Faults(kind="swapped columns", operators=GROUPED, library="oneDNN"))
    assert {outcome for _, _, outcome in of_experts(trainer)} == {"recovered"}
    assert "oneDNN computes it so: BLAS is used" in trainer.transfer_report.incidents[0]["text"]
    assert not torch.backends.mkldnn.enabled
    assert_same(trainer, mixture("adapters", mode="off"))  # by the other library, too


@pytest.mark.parametrize(("case", "first"), [("grouped", 0), ("adapters", 6)])
def test_experts_that_are_wrong_for_good_end_the_run(mixture: Any, case: str, first: int) -> None:
    with pytest.raises(CorruptionError, match=r"step 1: the \w+ product of .*experts.*no library computes it right"):
        mixture(case, Faults(kind="zero tile", operators=MIXTURES[case]["operators"], first=first), mode="sampled")


@pytest.mark.parametrize("case", ["nf4", "mxfp4"])
def test_a_wrong_block_of_an_unpacked_expert_is_found_apart_from_its_product(
    mixture: Any, clean_mixture: Any, case: str, caplog: pytest.LogCaptureFixture
) -> None:
    operator = ("aten::mul_",) if case == "mxfp4" else ("bitsandbytes::dequantize_4bit",)
    first = 16 if case == "mxfp4" else 0  # the host's own, of its checksums
    faults = Faults(kind=DEQUANTISED, operators=operator, first=first, count=1)
    trainer = mixture(case, faults)
    assert faults.done == 1
    assert ("dequantised", "transient", "recovered") in of_experts(trainer)
    assert_same(trainer, clean_mixture(case))
    if case != "mxfp4":  # which the host unpacks with the same operator
        with pytest.raises(CorruptionError, match=r"the dequantised weight of .* is wrong"):
            mixture(case, Faults(kind=DEQUANTISED, operators=operator))
        assert re.search(r"the dequantised weight of .*experts.* is wrong .*: no library", caplog.text)


def test_checksums_of_many_experts_are_on_the_device_in_turn(
    mixture: Any, clean_mixture: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(experts, "CHECKSUMS_OF_EXPERTS", 10_000)  # of one product
    trainer = mixture("grouped", mode="sampled", max_steps=12)
    products = [each for each in trainer._arithmetic._products if each.experts]
    sides = [each.sides["forward"] for each in products if each.sides]
    assert len([side for side in sides if side.checksum.numel()]) <= 1 < len([side for side in sides if side.seen])
    faults = Faults(kind=ANOTHER, operators=GROUPED, count=1)
    assert of_experts(mixture("grouped", faults, mode="sampled")) == [("forward", "transient", "recovered")]


# ---- the head of the one-pass loss ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("side", "shape", "kind"), [("forward", (64, 512), "NaN"), ("backward", (512, 64), "zero tile")]
)
@pytest.mark.skipif(not loss.is_known(), reason="TRL before 1.15 has no fused head")
def test_wrong_products_of_the_one_pass_loss(
    run: Any, one_pass: Any, side: str, shape: tuple[int, int], kind: str
) -> None:
    here: dict[str, Any] = {"kind": kind, "shape": shape, "sizes": range(17, 1024)}
    trainer = run(Faults(count=1, first=2, **here), ours={"one_pass_loss": True})
    assert_same(trainer, one_pass)
    (row,) = [row for row in trainer.transfer_report.incidents if row["stage"] == "arithmetic"]
    assert (row["tensor"].endswith("lm_head"), row["side"], row["outcome"]) == (True, side, "recovered")
    with pytest.raises(
        CorruptionError, match=f"step 1: the {side} product of .*lm_head .*no library computes it right"
    ):
        run(Faults(**here), ours={"one_pass_loss": True}, mode="sampled")


# ---- memory ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ours", [{}, {"one_pass_loss": True}], ids=["linear layers", "and the head"])
def test_the_plan_counts_the_checksums_that_a_run_holds(run: Any, model_path: Path, ours: dict[str, Any]) -> None:
    sides = [side for each in run(max_steps=1, ours=ours)._arithmetic._products for side in each.sides.values()]
    held = {each.data_ptr(): each.nbytes for side in sides for each in (side.vectors, side.checksum)}
    request = PlanRequest(model=str(model_path), methods=("lora",), length=32, effective_batch=2, **ours)
    plan = plan_for(request, card=CardMemory(name="any", usable=1 << 40, desktop=0, context=0))
    counted = plan.grid[0].parts["checksums"]
    assert counted == pytest.approx(sum(held.values()), abs=12 * len(sides))  # a layer's three numbers for its bias
    assert sum(held.values()) > 100 * len(sides)


# ---- what is no product with a frozen weight -----------------------------------------------------------------------


@pytest.mark.parametrize("first", [130, 165], ids=["replay", "real turn"])
def test_a_wrong_product_of_the_adapter_is_found_by_the_replay_of_its_step(run: Any, clean: Any, first: int) -> None:
    faults = Faults(kind="scaled block", sizes=range(4, 257), shape=(64, 4), first=first, count=1)
    trainer = run(faults, mode="sampled")
    assert faults.done == 1
    assert_same(trainer, clean)
    (row,) = trainer.transfer_report.incidents
    assert (row["tensor"], row["kind"], row["outcome"]) == ("gradients", "transient", "recovered")


@pytest.mark.parametrize("harmed", [torch.nn.functional.silu, torch.rsqrt], ids=["SiLU", "RMSNorm"])
def test_a_fault_that_differs_from_call_to_call_is_not_taken_for_a_kernel_without_an_order(
    run: Any, harmed: Callable[..., Tensor]
) -> None:
    """By a hundredth of what such kernels are allowed, each time in another place: a CPU gives the same bits twice."""
    chooser = random.Random(5)

    class Differing(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            found = func(*args, **(kwargs or {}))
            if func is not harmed:
                return found
            factors = torch.ones(found.numel())
            factors[chooser.randrange(found.numel())] = 1 + 1e-4
            return found * factors.view(found.shape)

    with pytest.raises(CorruptionError, match="step 3"):
        run(Differing(), mode="sampled")


def test_attention_is_compared_with_plain_products_at_the_first_step(run: Any) -> None:
    attention = torch.nn.functional.scaled_dot_product_attention

    class Wrong(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            found = func(*args, **(kwargs or {}))
            if func is attention:
                found = torch.cat([found[:, :, :-1], 1.2 * found[:, :, -1:]], dim=2)
            return found

    with pytest.raises(CorruptionError, match=r"step 1: attention over 32 tokens: .* times what rounding"):
        run(Wrong())


# ---- two ranks ----------------------------------------------------------------------------------------------

RANK_CASES: dict[str, dict[str, Any]] = {
    "clean": {"rate": 0.0},
    "base product": {"kind": "zero tile", "count": 1, "first": 60},
    "adapter product": {"kind": "scaled block", "sizes": range(4, 257), "shape": (64, 4), "first": 130, "count": 1},
}
"""Faults of rank 1."""


@pytest.fixture(scope="module")
def on_two_ranks(model_path: Path, tokens: Dataset, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """For each rank and case, the losses, a digest of the adapter, and the incidents and counters."""
    place = tmp_path_factory.mktemp("ranks")

    def work(rank: int) -> None:
        found = {}
        for case, options in RANK_CASES.items():
            ours = {"consent_unverified": True, "check_arithmetic": "every"}
            settings = {"max_steps": 4, "gradient_accumulation_steps": 2, "ddp_backend": "gloo"}
            trainer = build(VerifiedSFT, model_path, tokens, place / case, ours=ours, **settings)
            with Faults(**(options if rank else {"rate": 0.0})):
                trainer.train()
            losses, weights = result(trainer)
            sums = [float(each.double().sum()) for each in weights.values()]
            report = trainer.transfer_report
            found[case] = [[losses, sums], report.incidents, report.to_dict()["arithmetic"]]
        (place / f"{rank}.json").write_text(json.dumps(found))

    two_ranks(work, place)
    return [json.loads((place / f"{rank}.json").read_text()) for rank in range(2)]


@pytest.mark.filterwarnings("ignore:This process.*is multi-threaded:DeprecationWarning")
def test_two_ranks_compute_a_step_again_together(on_two_ranks: list[dict[str, Any]]) -> None:
    for rank in on_two_ranks:
        clean, incidents, counters = rank["clean"]
        assert incidents == [] and counters["replays"] == 1
        assert rank["base product"][0] == rank["adapter product"][0] == clean
    first, second = on_two_ranks
    assert first["base product"][1] == []
    (row,) = second["base product"][1]
    assert (row["stage"], row["outcome"]) == ("arithmetic", "recovered") and "base_layer" in row["tensor"]
    (row,) = first["adapter product"][1]
    assert row["tensor"] == "gradients" and "wrong on rank 1, and right when repeated" in row["text"]
