"""The planner: what it says of real architectures, and how a training job asks it."""

from __future__ import annotations

import functools
import shlex
from dataclasses import replace
from typing import Any

import pytest

from hf_rocm_tune.errors import UsageError
from hf_rocm_tune.machine.survey import Machine, survey
from hf_rocm_tune.plan import recorder
from hf_rocm_tune.plan.command import command
from hf_rocm_tune.plan.estimate import GIB, CardMemory, Case, ShortRows, Step, Weights, estimate, fastest
from hf_rocm_tune.plan.fit import Plan, _last_that_fits, plan_for
from hf_rocm_tune.plan.recordings import Recordings
from hf_rocm_tune.plan.request import (
    PUBLIC_MODELS,
    PlanRequest,
    PublicModel,
    card_memory,
    config_of,
    from_training,
    public_model,
)
from hf_rocm_tune.plan.sample import build
from hf_rocm_tune.plan.strategies import advice
from hf_rocm_tune.settings import arguments
from tests import tiny
from tests.small_models import EXPERTS, SMALL

CARD = CardMemory(name="Radeon RX 7900 XT", usable=int(19.9 * GIB), desktop=GIB // 2)
LLAMA = "meta-llama/Llama-3.1-8B"


@pytest.fixture(autouse=True)
def _environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")  # the command sets it; so it is taken back


@pytest.fixture(scope="module")
def nothing_there(tmp_path_factory: pytest.TempPathFactory) -> Machine:
    """A machine without a card."""
    return survey(tmp_path_factory.mktemp("root"))


def _shape(name: str) -> Any:
    model = public_model(name)
    assert model is not None
    return config_of(model.fields)


@pytest.fixture(scope="module")
def plan() -> Plan:
    return plan_for(PlanRequest(model=LLAMA, length=2048, effective_batch=8), card=CARD, config=_shape(LLAMA))


def _find(plan: Plan, method: str, micro_batch: int, *, checkpointing: bool, length: int = 2048) -> Any:
    return next(
        each
        for each in plan.every
        if (each.variant, each.case.micro_batch) == (method, micro_batch)
        and (each.case.checkpointing, each.case.length) == (checkpointing, length)
    )


# ---- what is said of an 8B model --------------------------------------------------------------------------------


def test_an_8b_model_fits_as_lora_and_as_qlora(plan: Plan) -> None:
    lora, qlora = (_find(plan, method, 2, checkpointing=True) for method in ("lora", "qlora"))
    assert lora.fits
    assert qlora.fits
    # torchtune publishes 16.2 and 7.4 GiB for this shape, packed and compiled, with adapters in bfloat16
    assert 16 < lora.allocated / GIB < 19
    assert 7 < qlora.allocated / GIB < 9
    assert lora.parts["weights"] == pytest.approx(2 * 8.03e9, rel=0.001)
    assert qlora.parts["weights"] == pytest.approx(2 * 2 * 128256 * 4096 + 6.98e9 / 2, rel=0.001)


def test_checkpointing_trades_memory_for_time(plan: Plan) -> None:
    for each in plan.grid:
        if each.case.checkpointing and each.case.recompute is None:
            twin = _find(plan, each.variant, each.case.micro_batch, checkpointing=False)
            assert each.total < twin.total
            assert 0.6 < each.tokens_per_second / twin.tokens_per_second < 0.8


def test_where_not_all_activations_fit_as_few_as_needs_be_are_recomputed(plan: Plan) -> None:
    """Beside the search: every mix of whole and selective is looked at, and none that fits is faster."""
    mixes = [each for each in plan.grid if each.case.recompute]
    assert {each.variant for each in mixes} == {"lora", "qlora"}
    for each in mixes:
        case = each.case
        off, on = (_find(plan, each.variant, case.micro_batch, checkpointing=way, length=case.length) for way in (0, 1))
        least = (2 if on.roomy else 0.7) * GIB
        assert off.spare < least <= each.spare and on.fits
        assert on.tokens_per_second < each.tokens_per_second < off.tokens_per_second
    for each in {each.variant: each for each in mixes}.values():
        every = [
            estimate(plan.variants[each.variant], replace(each.case, recompute=(whole, some)), CARD)
            for whole in range(0, 33, 2)
            for some in range(0 if whole else 1, 33 - whole)
        ]
        on = _find(plan, each.variant, each.case.micro_batch, checkpointing=True)
        best = max(one.tokens_per_second for one in every if one.spare >= (2 if on.roomy else 0.7) * GIB)
        assert each.tokens_per_second >= best


def test_the_longest_sequence_fits_and_the_next_does_not(plan: Plan) -> None:
    longest = plan.longest("lora")
    assert longest is not None
    case = Case(micro_batch=1, length=longest, checkpointing=True, accumulation=8)
    variant = plan.variants["lora"]
    fits = [estimate(variant, replace(case, length=longest + more), CARD).fits for more in (0, 128)]
    assert fits == [True, False]


def test_the_command_line_of_a_mix_is_one_flag_that_a_job_asks_with_again(plan: Plan) -> None:
    mix = next(each for each in plan.grid if each.case.recompute)
    line = command(plan.request, mix, "d")
    assert "checkpointing" not in line
    whole, some = mix.case.recompute
    assert f"--recompute_layers {whole},{some}" in line
    asked = arguments.parse([*shlex.split(line)[2:], "--use_cpu", "--bf16", "--dtype", "bfloat16"])
    assert from_training(asked.resolved()).recompute == (whole, some)


def test_more_adapters_and_trained_modules_take_more() -> None:
    config = _shape("meta-llama/Llama-3.2-1B")

    def total(**more: Any) -> float:
        asked = {"length": 128, "micro_batch": 1, "checkpointing": True, "effective_batch": 1, "evaluates": False}
        return plan_for(PlanRequest(methods=("lora",), **asked, **more), card=CARD, config=config).nearest.total

    plain = total()
    assert total(rank=64) > plain
    assert total(dora=True) > plain
    assert total(modules_to_save=("lm_head",)) > plain + 128256 * 2048 * 8  # a copy, its gradient, two states
    assert total(optim="adamw_8bit") < plain


def test_full_fine_tuning_of_1b_in_float32_takes_16_bytes_a_parameter() -> None:
    request = PlanRequest(methods=("full",), length=256, micro_batch=1, checkpointing=True, effective_batch=1)
    found = plan_for(request, card=CARD, config=_shape("meta-llama/Llama-3.2-1B")).nearest
    # weights, gradients and two states; on top the loss collects the head's gradient in float32
    assert 16 < found.allocated / 1.236e9 < 19
    assert not found.fits


#: Qwen3-Next: its linear attention loops over pieces of the sequence.
LOOPS = {**EXPERTS, "model_type": "qwen3_next", "architectures": ["Qwen3NextForCausalLM"], "num_hidden_layers": 4}
LOOPS |= {f"linear_num_{kind}_heads": 2 for kind in ("key", "value")}
LOOPS |= {"linear_key_head_dim": 32, "linear_value_head_dim": 32, "shared_expert_intermediate_size": 32}


def test_a_model_of_loops_over_the_sequence_is_planned_at_its_own_length() -> None:
    asked: dict[str, Any] = {"effective_batch": 1, "dropout": 0.0, "checkpointing": False, "targets": ("q_proj",)}
    totals: list[float] = []
    for length in (128, 256):
        asked |= {"length": length}
        found = plan_for(PlanRequest(methods=("lora",), **asked), card=CARD, config=config_of(LOOPS))
        totals.append(_find(found, "lora", 1, checkpointing=False, length=length).allocated)
    assert totals[0] < totals[1]


def test_more_tokens_than_the_model_was_made_for_are_planned_only_if_asked_for() -> None:
    config = config_of({"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"], "n_positions": 256, "n_layer": 2})
    asked = PlanRequest(methods=("lora",), length=512, effective_batch=1)
    for within, length in ((True, 256), (False, 512)):
        found = plan_for(asked, card=CARD, config=config, within_limit=within)
        assert found.request.length == length and any("made for 256 tokens" in note for note in found.notes)


# ---- a question from a training job -----------------------------------------------------------------------------


def test_a_training_job_asks_for_all_its_cards() -> None:
    asked = {"use_peft": True, "load_in_4bit": True, "lora_dropout": 0.0, "max_length": 512}
    asked |= {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 3}
    request = from_training(asked, cards=2, platform="cuda")
    assert (request.methods, request.effective_batch, request.per_card) == (("qlora",), 24, 12)


@pytest.mark.parametrize(
    "settings",
    [{"load_in_8bit": True}, {"max_length": None}, {"max_length": 512, "label_smoothing_factor": 0.1}],
    ids=lambda settings: list(settings)[-1],
)
def test_what_the_planner_cannot_answer_is_said(settings: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match=list(settings)[-1]):
        from_training(settings)


@pytest.mark.parametrize("wrong", ["x", "3,", "-1", "1,2,3", "0,0", ""])
def test_a_mix_that_cannot_be_is_refused_in_one_line(wrong: str) -> None:
    with pytest.raises(UsageError, match="--recompute_layers") as caught:
        arguments.parse(["--model_name_or_path", "m", "--dataset_name", "d", "--recompute_layers", wrong])
    assert "\n" not in str(caught.value)


# ---- the card ---------------------------------------------------------------------------------------------------


def test_cards_by_name_by_size_and_by_default(nothing_there: Machine) -> None:
    named = [card_memory(name=name, machine=nothing_there) for name in ("rx7900xt", "RX 7900 XT", "7900-xt")]
    assert {card.name for card in named} == {"Radeon RX 7900 XT"}
    assert named[0].usable / GIB == pytest.approx(19.9, abs=0.001)
    assert card_memory(vram_gib=16, machine=nothing_there).usable < 16 * GIB
    default = card_memory(machine=nothing_there)
    assert (default.name, default.desktop, default.desktop_source) == ("Radeon RX 7900 XT", GIB, "assumed")
    assert card_memory(desktop_gib=0, machine=nothing_there).desktop == 0
    rates = {name: card_memory(name=name, machine=nothing_there).rates.known for name in ("rx7900xtx", "9070xt")}
    assert rates == {"rx7900xtx": True, "9070xt": False}


def test_what_a_desktop_holds_is_read_where_the_card_is_there(nothing_there: Machine) -> None:
    recorded = _machine_with_a_card(nothing_there, used=700 << 20, total=20 << 30)
    found = card_memory(machine=recorded)
    assert found.desktop == 700 << 20
    assert "read" in found.desktop_source
    # it says nothing of a card of another size
    assert card_memory(vram_gib=48, machine=recorded).desktop_source == "assumed"


def test_memory_that_the_card_table_lacks_is_read_from_the_card(nothing_there: Machine) -> None:
    recorded = _machine_with_a_card(nothing_there, used=0, total=12 << 30, pci=(0x7550, 0xC2))
    found = card_memory(machine=recorded)
    assert (found.name, found.usable / GIB) == ("Radeon RX 9070 GRE", pytest.approx(12, rel=0.01))


def _machine_with_a_card(machine: Machine, *, used: int, total: int, pci: tuple[int, int] = (0x744C, 0xCC)) -> Machine:
    from unittest.mock import Mock

    from hf_rocm_tune.machine.cards import identify
    from hf_rocm_tune.machine.gpus import Sensors

    sensors = Sensors(vram_used_bytes=used, vram_total_bytes=total)
    known = identify(arch=None, vram_bytes=total, pci=pci)
    card = Mock(sensors=sensors, card=known, integrated=False, address="0000:03:00.0")
    return replace(machine, gpus=(card,))


@pytest.mark.parametrize("wrong", [{"name": "rtx4090"}, {"name": "rx7900xt", "vram_gib": 20}])
def test_a_card_that_cannot_be_is_refused(wrong: dict[str, Any], nothing_there: Machine) -> None:
    with pytest.raises(UsageError):
        card_memory(machine=nothing_there, **wrong)


# ---- several methods -------------------------------------------------------------------------------------------------

SMALL_LLAMA = {**SMALL, "model_type": "llama", "architectures": ["LlamaForCausalLM"]}


def _small(**more: Any) -> Plan:
    return plan_for(PlanRequest(length=512, effective_batch=4, **more), card=CARD, config=config_of(SMALL_LLAMA))


def test_a_refusal_of_one_method_is_told_and_the_other_planned(monkeypatch: pytest.MonkeyPatch) -> None:
    record = recorder.record

    def refuse(sample: Any, case: Case, *rest: Any) -> Any:
        if getattr(sample.base, "is_loaded_in_4bit", False):
            raise UsageError("not in four bits")
        return record(sample, case, *rest)

    monkeypatch.setattr(recorder, "record", refuse)
    found = _small()
    assert list(found.variants) == ["lora"]
    assert any("not in four bits" in note for note in found.notes)


def test_advice_to_a_training_job_is_in_its_own_flags() -> None:
    asked = PlanRequest(length=512, effective_batch=4, methods=("full", "lora"), evaluates=False)
    bare, config = replace(CARD, desktop=0, context=0), config_of(SMALL_LLAMA)
    least = {"full": 0.0, "lora": 0.0}
    for option in plan_for(asked, card=bare, config=config).every:
        least[option.variant] = min(least[option.variant] or option.total, option.total)
    between = int((least["full"] + least["lora"]) / 2)
    assert least["lora"] < between < least["full"]
    plan = plan_for(replace(asked, methods=("full",)), card=replace(bare, usable=between), config=config)
    said = advice(plan, training=True)
    assert plan.choice is None and "--use_peft true" in said and "--load_in_4bit" in said
    assert "--method" not in said and "--seq" not in said


def test_a_case_is_recorded_once_and_at_its_own_size(monkeypatch: pytest.MonkeyPatch) -> None:
    record, seen = recorder.record, []

    def note(sample: Any, case: Case, *shape: int) -> Any:
        seen.append((case.checkpointing, *shape))
        return record(sample, case, *shape)

    monkeypatch.setattr(recorder, "record", note)
    found = _small(methods=("lora",), mixes=False)
    wanted = {(each.case.checkpointing, *each.case.shape) for each in found.grid}
    assert wanted <= set(seen)
    assert len(seen) == len(set(seen)) + 1  # the first recording is not kept


_LOOPED = {"hidden_size": 64, "num_hidden_layers": 6, "vocab_size": 512}
#: Models whose code loops over the tokens of a row.
LOOPS_OVER_TOKENS: dict[str, dict[str, Any]] = {
    "rwkv": {**_LOOPED, "model_type": "rwkv", "architectures": ["RwkvForCausalLM"], "attention_hidden_size": 64},
    "jamba": {
        **_LOOPED,
        "model_type": "jamba",
        "architectures": ["JambaForCausalLM"],
        "intermediate_size": 128,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "num_experts": 2,
        "attn_layer_period": 3,
        "attn_layer_offset": 2,
    },
}


@pytest.mark.parametrize("kind", LOOPS_OVER_TOKENS)
def test_a_loop_over_the_tokens_of_long_rows_is_planned_from_shorter_rows(kind: str) -> None:
    """Jamba's mask for each layer is chosen by a list that its configuration computes."""
    recordings = Recordings(config_of(LOOPS_OVER_TOKENS[kind]), PlanRequest(length=256, dropout=0.0), "lora")
    sample = recordings.sample
    assert len(sample.layers) < len(sample.layer_of) == 6
    for case in (
        Case(micro_batch=4, length=256, checkpointing=False),
        Case(micro_batch=2, length=256, checkpointing=True),
    ):
        planned = recordings(case)
        assert isinstance(planned.runs[0][0], ShortRows)
        whole = Step(((recorder.record(sample, case, *case.shape, most=10**6), sample.layer_of),))
        assert planned.peak().total == pytest.approx(whole.peak().total, rel=0.005)
        assert planned.work() == pytest.approx(whole.work(), rel=0.01)
    assert any("loops over tokens" in note for note in recordings.notes)


def test_what_is_far_from_fitting_is_not_recorded_and_the_choice_is_that_of_all_cases() -> None:
    """Of a card that only recomputation fits; a split, which holds a part of the layers, still has every case."""
    asked = PlanRequest(length=512, effective_batch=4, methods=("lora",), evaluates=False)
    bare, config = replace(CARD, desktop=0, context=0), config_of(SMALL_LLAMA)
    least = min(each.total for each in plan_for(asked, card=bare, config=config).grid)
    card = replace(bare, usable=int(1.001 * least))
    found = plan_for(asked, card=card, config=config)
    kept = {each.case.micro_batch for each in found.grid if not each.case.checkpointing}
    recorded = {how for _, how, rows, _ in found.recordings["lora"].recorded if rows == 4}
    assert kept == {1} and "none" not in recorded
    assert {each.case.micro_batch for each in found.every if not each.case.checkpointing} == {1, 2, 4}
    assert found.choice == fastest(found.every) is not None


@pytest.mark.parametrize("bent", [0.0, 3e-4], ids=["line", "curve"])
def test_the_search_for_the_longest_row_finds_it_in_few_tries(bent: float) -> None:
    """As memory falls with the length: by every number in turn the same is found."""
    most, tries = 300, []

    def spare(number: int, left: float) -> float:
        tries.append(number)
        return left - 0.7 * number - bent * number**2

    for left in (-1.0, 0.5, 0.7, 1.5, 33.3, 140.0, 209.9, 210.0, 1e6):
        fits = [number for number in range(1, most + 1) if spare(number, left) >= 0]
        tries.clear()
        assert _last_that_fits(functools.partial(spare, left=left), most, known=16) == max(fits, default=0)
        assert len(tries) <= (6 if not bent else 12) and len(tries) == len(set(tries))


# ---- shapes and configurations ------------------------------------------------------------------------------------


@pytest.mark.parametrize("model", PUBLIC_MODELS, ids=lambda model: model.name)
def test_the_shape_has_the_published_number_of_parameters(model: PublicModel) -> None:
    sample = build(config_of(model.fields), PlanRequest(dtype="bfloat16"), "full")
    total = Weights.total(sample.weights(), sample.layer_of)
    assert total.parameters / 1e9 == pytest.approx(model.billions, abs=0.006)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("meta-llama/Llama-3.1-8B-Instruct", "meta-llama/Llama-3.1-8B"),
        ("mistralai/Mistral-Small-24B-Instruct-2501", "mistralai/Mistral-Small-24B-Base-2501"),
        ("qwen/qwen3-8b", "Qwen/Qwen3-8B"),
        ("someone/Llama-3.1-8B", None),
    ],
)
def test_only_a_name_of_the_same_shape_is_taken_for_it(name: str, expected: str | None) -> None:
    found = public_model(name)
    assert (found.name if found else None) == expected


@pytest.mark.parametrize(
    ("name", "arch", "joined"), [("qwen3_moe", "Qwen3Moe", True), ("gpt_oss", "GptOss", False)], ids=["joined", "fused"]
)
def test_experts_that_files_have_one_by_one_take_twice_their_memory_while_they_are_joined(
    name: str, arch: str, joined: bool
) -> None:
    config = tiny.config_of(name, tiny.build_tokenizer(), architectures=[f"{arch}ForCausalLM"])
    of_experts = 2 * config.hidden_size * getattr(config, "moe_intermediate_size", config.intermediate_size)
    fused = 4 * of_experts  # elements of gate and up of 4 experts
    asked = {"length": 32, "micro_batch": 1, "checkpointing": True, "targets": ("q_proj",), "evaluates": False}
    plans = {
        method: plan_for(PlanRequest(methods=(method,), **asked), card=CARD, config=config)
        for method in ("lora", "qlora")
    }
    loading = {method: each.variants[method].weights.loading for method, each in plans.items()}
    assert loading == {
        "lora": 2 * fused if joined else 0,
        "qlora": 4 * fused - fused // 2 if joined else 2 * fused,
    }
