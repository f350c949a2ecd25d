"""``hf-rocm-tune plan`` as a command: its text, its JSON, its recipe, and what it refuses."""

from __future__ import annotations

import contextlib
import functools
import io
import json
import random
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hf_rocm_tune import cli
from hf_rocm_tune.plan import command
from hf_rocm_tune.plan.estimate import GIB, CardMemory
from hf_rocm_tune.plan.request import PUBLIC_MODELS, PlanRequest, from_training, public_model
from hf_rocm_tune.settings import arguments
from tests import tiny
from tests.small_models import EXPERTS

LLAMA = "meta-llama/Llama-3.1-8B"
LAYERS = 2
LINEAR = LAYERS * (2 * 2048 * 2048 + 2 * 2048 * 512 + 3 * 2048 * 8192)  # elements of the small model
QUICK = ("--seq", "64", "--effective_batch", "1", "--checkpointing", "--gpu", "rx7900xt")
TWO_METHODS = ("--seq", "512", "--effective_batch", "4", "--gpu", "rx7900xt")
Found = dict[str, Any]


@pytest.fixture(autouse=True)
def _environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")  # the command sets it; so it is taken back


def run(*words: str) -> tuple[int, str, str]:
    """Runs the command; gives its exit code, what it printed and its errors."""
    with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.redirect_stderr(io.StringIO()) as err:
        code = cli.main(["plan", *words])
    return code, out.getvalue(), err.getvalue()


def text_of(found: Found, *, verbose: bool = False) -> str:
    """What the command prints of a plan instead of its JSON."""
    return "\n".join(command._text(found, verbose=verbose))


def write(folder: Path, **fields: Any) -> str:
    """A directory with the configuration of a small Llama and nothing else; None leaves a field out."""
    model = public_model("meta-llama/Llama-3.2-1B")
    assert model is not None
    own = {**model.fields, "num_hidden_layers": LAYERS, "max_position_embeddings": 2048, **fields}
    (folder / "config.json").write_text(json.dumps({name: value for name, value in own.items() if value is not None}))
    return str(folder)


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def planned(small: str) -> Callable[..., Found]:
    """The plan of the small model; the same question is asked once."""

    @functools.cache
    def plan(*words: str) -> Found:
        code, out, err = run("--model", small, *words, "--json")
        assert (code, err) == (0, "")
        found: Found = json.loads(out)
        return found

    return plan


def test_the_verdict_is_first_and_the_rest_is_asked_for(small: str, planned: Any) -> None:
    found = planned(*TWO_METHODS)
    lines = text_of(found).splitlines()
    assert lines[0].startswith("FITS: ") and "of 19.9 GiB" in lines[0]
    assert lines[2].startswith(f"  hf-rocm-tune sft --model_name_or_path {small}")
    for word in ("evaluation: ", "for 1,000 rows (assumed: 512 tokens each)", "also fits: ", "assumed", "longest"):
        assert any(word in line for line in lines)
    assert not any("optimizer state" in line for line in lines) and len(lines) < 14
    speed = found["speed"]
    assert speed["least"] < speed["tokens_per_second"] < speed["most"]
    assert speed["hours"] == pytest.approx([1000 * 512 / 3600 / speed[name] for name in ("most", "least")])
    for word in ("weights", "optimizer state", "activations kept", "host memory"):
        assert word in text_of(found, verbose=True)
    assert run("--model", small, *TWO_METHODS, "-v") == (0, text_of(found, verbose=True) + "\n", "")


def test_no_speed_is_shown_where_no_rate_of_the_card_is_known(planned: Any) -> None:
    found = planned(*QUICK[:-1], "mi300x", "--method", "lora")
    assert found["speed"] is None and "tokens/s" not in text_of(found)


@pytest.mark.parametrize("source", ["read from the card at 0000:03:00.0", "assumed"])
def test_a_card_of_this_machine_is_planned_with_the_kernels_that_run_here(
    source: str, small: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    card = CardMemory(name="a card", usable=20 * GIB, desktop_source=source)
    monkeypatch.setattr(command, "card_memory", lambda **_: card)
    monkeypatch.setattr(command, "missing_for_triton", lambda: "no compiler")
    out = run("--model", small, *QUICK[:-2], "--method", "lora")[1]
    assert ("planned without Triton's kernels" in out) == (source != "assumed")


@pytest.mark.parametrize("trainer", ["dpo", "kto"])
def test_preferences_are_planned_with_their_second_pass(trainer: str, small: str, planned: Any) -> None:
    words = ("--seq", "256", "--effective_batch", "2", "--micro_batch", "2", "--checkpointing", "--gpu", "rx7900xt")
    alone, found = planned(*words, "--method", "lora"), planned(*words, "--method", "lora", "--trainer", trainer)
    assert found["command"].startswith(f"hf-rocm-tune {trainer} --model_name_or_path")
    more = found["choice"]["moments"]
    assert more.keys() >= {"reference pass", "evaluation"} and "--packing" not in found["command"]
    ratio = more["loss"] / alone["choice"]["moments"]["loss"]
    assert ratio > 1 if trainer == "dpo" else ratio == pytest.approx(1, rel=0.01)
    # A preference has two sequences, a row of KTO's one.
    speed, passes = found["speed"], {"dpo": 2, "kto": 1}[trainer]
    assert speed["hours"] == pytest.approx([passes * 1000 * 256 / 3600 / speed[name] for name in ("most", "least")])
    full = planned(*words, "--method", "full", "--dtype", "bfloat16", "--trainer", trainer)
    parts = full["choice"]["parts"]
    assert parts["reference model"] == parts["weights"]
    code, _, err = run("--model", small, *words, "--trainer", trainer, "--packing")
    assert code == 2 and "are for sft" in err


def test_workers_that_load_data_are_in_the_memory_of_the_host(planned: Any) -> None:
    alone, loaded = (planned(*QUICK, "--method", "lora", *more)["host"] for more in ((), ("--workers", "3")))
    assert loaded["parts"].pop("data loader workers") == 3 * GIB / 2
    assert loaded["parts"] == alone["parts"] and loaded["total"] == alone["total"] + 3 * GIB / 2


def test_what_leaves_less_than_is_assumed_wrong_is_called_tight(planned: Any) -> None:
    words = ("--seq", "64", "--effective_batch", "1", "--method", "lora", "--desktop_gib", "3", "--no-checkpointing")
    total = planned(*words, "--vram", "20")["total"] / GIB
    for spare, tight in ((0.6, True), (0.8, False)):
        first = text_of(planned(*words, "--vram", f"{(total + spare) / (19.9 / 20):.3f}")).splitlines()[0]
        assert first.startswith("FITS: ") and (" GiB (tight): " in first) == tight


#: 1 to 8 rows of 2,048 tokens of the small model, where other programs leave about 4 GiB of a card's 20.
ROWS = ("--seq", "2048", "--effective_batch", "8", "--method", "lora", "--vram", "20", "--desktop_gib")


def _case(found: Found) -> tuple[int, bool, str]:
    return found["micro_batch"], found["checkpointing"], str(found["recompute"] or "all alike")


def test_a_choice_that_leaves_2_gib_is_preferred_and_is_never_a_condition(planned: Any) -> None:
    """The fastest case leaves less here: it is named, as is how it compares; alone, it fits, with a line."""
    plenty = planned(*ROWS, "0")
    full = next(each for each in plenty["grid"] if _case(each) == (8, False, "all alike"))
    desktop = full["spare"] / GIB - 1.4
    found = planned(*ROWS, f"{desktop:.3f}")
    text = text_of(found)
    assert found["roomy"] and found["spare"] >= 2 * GIB and "preferred" not in text
    grid = {_case(each): each for each in found["grid"]}
    passed = grid[8, False, "all alike"]
    assert passed["fits"] and not passed["roomy"] and passed["spare"] == pytest.approx(1.4 * GIB, abs=0.01 * GIB)
    assert found["choice"]["estimated_tokens_per_second"] < passed["estimated_tokens_per_second"]

    alone = planned(*ROWS, f"{desktop:.3f}", "--micro_batch", "8", "--gradient_checkpointing", "false")
    said = text_of(alone).splitlines()
    assert said[0].startswith("FITS: ") and _case(alone["choice"]) == (8, False, "all alike")
    assert [line for line in said if line.startswith("leaves 1.4 GiB free; 2.0 are preferred until an AMD card")]


def test_what_was_passed_over_for_its_memory_is_named_with_its_speed(planned: Any) -> None:
    """One row at a time is far slower: where only that leaves 2 GiB, the faster one is among what else fits."""
    words = ("--seq", "64", *ROWS[2:])
    plenty = planned(*words, "0", "--no-checkpointing")
    sizes = {each["micro_batch"]: each for each in plenty["grid"]}
    between = (sizes[1]["spare"] + sizes[8]["spare"]) / 2 - 2 * GIB
    found = planned(*words, f"{between / GIB:.4f}", "--no-checkpointing")
    assert found["roomy"] and found["choice"]["micro_batch"] < 8
    assert any(line.startswith("also fits: ") and "micro-batch 8 x 1" in line for line in text_of(found).splitlines())


def test_of_nearly_equal_choices_the_smaller_micro_batch_is_taken(planned: Any) -> None:
    for desktop in ("0", "12", "15.5"):
        found = planned(*ROWS, desktop)
        roomy = [each for each in found["grid"] if each["roomy"] and not each["recompute"]]
        top = max(each["estimated_tokens_per_second"] for each in roomy)
        equal = [each for each in roomy if each["estimated_tokens_per_second"] >= 0.95 * top]
        assert found["choice"]["recompute"] is None and len(roomy) > len(equal)
        assert found["choice"]["micro_batch"] == min(each["micro_batch"] for each in equal)


def test_rows_of_a_dataset_give_length_padding_and_hours(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    model, data = tiny.build("llama3", tmp_path), tmp_path / "rows.jsonl"
    lengths = list(range(4, 196, 3))
    data.write_text("".join(json.dumps({"input_ids": list(range(5, 5 + n))}) + "\n" for n in lengths))
    words = ["--model", str(model), "--dataset", str(data), "--gpu", "rx7900xt", "--method", "lora"]
    words += ["--effective_batch", "4", "--micro_batch", "4"]
    found = json.loads(run(*words, "--json")[1])
    read, speed = found["data"], found["speed"]
    assert (read["rows"], read["tokens"], found["request"]["length"]) == (64, sum(lengths), 193)
    hours = [read["computed"] / 3600 / speed[name] for name in ("most", "least")]
    assert speed["hours"] == pytest.approx(hours) and f"--dataset_name {data}" in found["command"]
    chooser, tried = random.Random(0), []
    for _ in range(300):
        chooser.shuffle(lengths)
        tried.append(sum(4 * max(lengths[at : at + 4]) for at in range(0, 64, 4)))
    assert read["computed"] == pytest.approx(sum(tried) / len(tried), rel=0.02)
    assert read["padding"] == pytest.approx(1 - read["tokens"] / read["computed"])
    packed = run(*words, "--packing", "--seq", "100")[1]
    assert "31 longer than 100 and cut; packed, so that none is padding" in packed
    code, out, err = run(*words, "--dataset", str(tmp_path / "nowhere.jsonl"))
    assert (code, out, err.count("\n")) == (2, "", 1) and "nowhere.jsonl" in err
    assert sorted(path.name for path in tmp_path.iterdir()) == [model.name, "rows.jsonl"]


@pytest.mark.long
def test_the_largest_models_are_what_their_own_plans_say() -> None:
    words = ("--gpu", "rx7900xt", "--desktop_gib", "1", "--seq", "1024")
    rows = json.loads(run("--largest", *words, "--json")[1])["largest"]
    methods = [*["lora"] * 3, "lora, streamed", *["qlora"] * 3, "qlora, streamed"]
    assert [row["method"] for row in rows] == methods
    size = {model.name: model.billions for model in PUBLIC_MODELS}
    assert size[rows[0]["model"]] < size[rows[4]["model"]] < size[rows[7]["model"]]  # four bits, streamed: larger ones
    dense = rows[5]
    more = ("--method", "qlora", "--effective_batch", "16", "--micro_batch", "1", "--checkpointing")
    found = json.loads(run("--model", dense["model"], *words, *more, "--json")[1])
    assert dense["total"] == pytest.approx(found["total"], rel=0.01)
    assert dense["longest"] == found["longest"]["qlora"] >= 1024
    text = run("--largest", *words)[1]
    assert all(row["model"] in text for row in rows)


def test_four_bits_are_never_rated_faster_than_published_runs_were(planned: Any) -> None:
    """Of the same case, tokens a second of QLoRA over LoRA: 0.49 to 1.01 in published runs."""
    speeds: dict[tuple[Any, ...], dict[str, float]] = {}
    for row in planned(*TWO_METHODS)["grid"]:
        case = row["micro_batch"], row["checkpointing"]
        speeds.setdefault(case, {})[row["method"]] = row["estimated_tokens_per_second"]
    ratios = {case: pair["qlora"] / pair["lora"] for case, pair in speeds.items()}
    assert len(ratios) == 6
    assert all(0.49 < ratio <= 1.01 for ratio in ratios.values()), ratios
    assert ratios[1, False] < ratios[4, False]  # unpacking costs the same for few tokens as for many


def test_a_card_that_is_named_says_nothing_of_this_machines_memory(planned: Any) -> None:
    assert planned("--seq", "384", "--gpu", "rx7900xt")["card"]["host"] is None
    assert planned("--seq", "384", "--vram", "20")["card"]["host"] is None


def test_on_several_cards_the_evaluation_batch_is_planned_too(planned: Any) -> None:
    flags = ("--seq", "384", "--gpu", "rx7900xt", "--effective_batch", "8")
    one, two = planned(*flags)["choice"]["eval_batch"], planned(*flags, "--cards", "2")["choice"]["eval_batch"]
    assert one > 0 and two > 0


def test_host_memory_limits_only_what_is_streamed(planned: Any) -> None:
    found = planned("--seq", "384", "--gpu", "rx7900xt", "--host_gib", "0.01")
    assert found["fits"] and not any(choice["host_missing"] for choice in found["grid"])


def test_the_command_is_the_planned_job(small: str, planned: Any, tmp_path: Path) -> None:
    data = tiny.write_messages_jsonl(tmp_path / "rows.jsonl", 2)
    flags = ["--seq", "384", "--effective_batch", "6", "--rank", "8", "--targets", "q_proj", "--gpu", "rx7900xt"]
    found = planned(*flags, "--modules_to_save", "lm_head", "--packing", "--dora", "--method", "qlora")
    words = [*shlex.split(found["command"]), "--dataset_name", str(data), "--output_dir", str(tmp_path / "out")]
    assert words[:2] == ["hf-rocm-tune", "sft"]
    # what follows from the card is said, because there is none here
    resolved = arguments.parse([*words[2:], "--use_cpu", "--bf16", "--dtype", "bfloat16"]).resolved()
    choice = found["choice"]
    for flag, name in (
        ("per_device_train_batch_size", "micro_batch"),
        ("gradient_accumulation_steps", "accumulation"),
        ("gradient_checkpointing", "checkpointing"),
        ("per_device_eval_batch_size", "eval_batch"),
    ):
        assert resolved[flag] == choice[name]
    asked = {"model": small, "methods": ("qlora",), "length": 384, "effective_batch": 6, "rank": 8}
    asked |= {"targets": ("q_proj",), "modules_to_save": ("lm_head",), "dora": True, "packing": True}
    assert from_training(resolved) == PlanRequest(dtype="bfloat16", **asked)


@pytest.mark.parametrize(
    ("words", "advised"),
    [
        (("--vram", "1.7", "--method", "full"), "--method lora"),
        pytest.param(
            ("--vram", "1.45", "--method", "lora", "--micro_batch", "2"), "another micro-batch", marks=pytest.mark.long
        ),
        (("--vram", "1.0", "--method", "lora"), "a smaller model"),
    ],
)
def test_where_nothing_fits_only_what_would_is_advised(words: tuple[str, ...], advised: str, small: str) -> None:
    more = ("--model", small, "--seq", "512", "--effective_batch", "2", "--desktop_gib", "0")
    code, out, err = run(*more, *words)
    assert code == 5 and out.startswith("DOES NOT FIT: ") and "hf-rocm-tune sft" not in out
    assert len(err.splitlines()) == 1 and advised in err
    dropped, least = ("--method", "full", "lora", "--micro_batch", "2"), ("--micro_batch", "1", "--checkpointing")
    for flags in (each.strip() for each in err.partition("would fit: ")[2].partition("; or")[0].split("|")):
        if flags.startswith("--"):
            assert run(*more, *[word for word in words if word not in dropped], *least, *flags.split())[0] == 0


@pytest.mark.parametrize(
    ("words", "named"),
    [
        ((), "--model"),
        (("--model", "nobody/nothing"), "nobody/nothing"),
        (("--model", "/nowhere/at/all"), "config.json"),
        (("--model", LLAMA, "--gpu", "rtx4090"), "7900xt"),
        (("--model", LLAMA, "--seq", "many"), "--seq"),
        (("--model", LLAMA, "--effective_batch", "3", "--cards", "2"), "2 cards"),
        (("--model", LLAMA, "--targets", "query"), "q_proj"),
        (("--model", LLAMA, "--method", "lora", "--targets", "lm_head"), "output head is never trained"),
        (("--model", LLAMA, "--method", "lora", "--modules_to_save", "foo"), "foo match no module"),
        (("--model", LLAMA, "--method", "full", "--dora"), "are for adapters"),
        (("--model", LLAMA, "--trainer", "kto", "--micro_batch", "1"), "kto needs two or more"),
        (("--model", LLAMA, "--trainer", "grpo"), "--trainer"),
        (("--model", LLAMA, "--desktop_gib", "nan"), "--desktop_gib: it must be from 0"),
        (("--model", LLAMA, "--rank", "0"), "it must be 1 or more, got 0"),
        (("--model", LLAMA, "--dropout", "1.0"), "--dropout"),
        (("--model", LLAMA, "--effective_batch", "6", "--micro_batch", "4"), "4 does not divide"),
        (("--model", "x" * 300), "its configuration cannot be read"),
        (("--model", LLAMA, "--effective_batch", "9" * 20), "--effective_batch must be 65536 or less"),
    ],
)
def test_wrong_words_are_one_line(words: tuple[str, ...], named: str) -> None:
    code, out, err = run(*words)
    assert (code, out, len(err.splitlines())) == (2, "", 1)
    assert named in err


# ---- what the configuration says -------------------------------------------------------------------------------------


def test_a_bitsandbytes_checkpoint_is_planned_as_it_is(planned: Any, tmp_path: Path) -> None:
    """Its weights take what its bits say, without the flag as with it; the command trains adapters on them."""
    whole = planned(*QUICK, "--method", "lora")["choice"]["parts"]["weights"]
    for bits, method in ((8, "lora"), (4, "qlora")):
        given = {"quant_method": "bitsandbytes", f"load_in_{bits}bit": True, "bnb_4bit_use_double_quant": True}
        model = write(tmp_path, quantization_config=given)
        code, out, err = run("--model", model, *QUICK, "--method", "lora", "--json")
        assert (code, err) == (0, "")
        found = json.loads(out)
        assert found["choice"]["method"] == method
        assert any(f"{bits}-bit in its files" in note for note in found["notes"])
        assert ("--load_in_4bit" in found["command"]) == (bits == 4)
        assert whole - found["choice"]["parts"]["weights"] == pytest.approx(LINEAR * (2 - bits / 8), rel=0.001)
    code, out, err = run("--model", model, *QUICK, "--method", "full")
    assert (code, out) == (2, "") and "only adapters can be trained" in err


def test_what_transformers_makes_bfloat16_is_planned_so(tmp_path: Path) -> None:
    model = write(tmp_path, quantization_config={"quant_method": "fp8", "dequantize": True})
    code, out, _ = run("--model", model, *QUICK)
    assert code == 0 and "become bfloat16" in out
    assert "--load_in_4bit" not in out  # transformers refuses it for such a checkpoint
    code, out, err = run("--model", model, *QUICK, "--method", "qlora")
    assert (code, out) == (2, "") and "is bfloat16 when it is loaded, not --method qlora; give --method lora" in err


BOTH_WIDTHS = {"quant_method": "bitsandbytes", "load_in_4bit": True, "load_in_8bit": True}


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"architectures": ["set_seed"]}, "config.json names set_seed, which is no architecture"),
        ({"architectures": ["NobodyForCausalLM"]}, "NobodyForCausalLM cannot be planned: transformers"),
        ({"quantization_config": {"quant_method": "awq"}}, "its weights are quantised by awq"),
        ({"quantization_config": {"quant_method": "fp8"}}, "its weights are quantised by fp8"),
        ({"model_type": "bert", "architectures": ["BertForMaskedLM"]}, "it is no causal language model"),
        ({"model_type": "t5", "architectures": ["T5ForConditionalGeneration"]}, "cannot be planned"),
        ({"quantization_config": BOTH_WIDTHS}, "the quantization_config of its config.json is wrong"),
        ({"model_type": "deepseek_v2", "architectures": ["DeepseekV2ForCausalLM"]}, "num_experts_per_tok is missing"),
    ],
    ids=lambda value: value.split()[0] if isinstance(value, str) else "",
)
def test_a_configuration_that_is_no_job_is_one_line(fields: dict[str, Any], named: str, tmp_path: Path) -> None:
    model = write(tmp_path, **({"num_key_value_heads": None} if "model_type" in fields else {}), **fields)
    code, out, err = run("--model", model, *QUICK, "--method", "lora")
    assert (code, out, len(err.splitlines())) == (2, "", 1)
    assert named in err


def test_a_model_that_names_no_backbone_is_planned_with_its_whole_logits(tmp_path: Path) -> None:
    llama4 = {"model_type": "llama4_text", "architectures": ["Llama4ForCausalLM"], "num_local_experts": 2}
    model = write(tmp_path, intermediate_size_mlp=128, **llama4)
    code, out, _ = run("--model", model, *QUICK, "--method", "lora", "--json")
    assert code == 0 and json.loads(out)["architecture"] == "Llama4ForCausalLM"


def test_targets_that_peft_refuses_are_one_line_and_are_left_out_by_default(tmp_path: Path) -> None:
    mamba = {"model_type": "mamba", "architectures": ["MambaForCausalLM"], "state_size": 16}
    model = write(tmp_path, num_key_value_heads=None, **mamba)
    code, out, err = run("--model", model, *QUICK, "--method", "lora", "--targets", "out_proj")
    assert (code, out, len(err.splitlines())) == (2, "", 1)
    assert "PEFT does not adapt out_proj of MambaForCausalLM: give --targets in_proj" in err
    code, out, _ = run("--model", model, *QUICK, "--method", "lora", "--json")
    assert code == 0 and json.loads(out)["choice"]["method"] == "lora"


def test_a_model_that_sees_is_planned_for_text_and_says_so(tmp_path: Path) -> None:
    text = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "vocab_size": 512}
    text |= {"num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 32, "max_position_embeddings": 512}
    fields = {"model_type": "gemma3", "architectures": ["Gemma3ForConditionalGeneration"], "text_config": text}
    fields["vision_config"] = {"hidden_size": 32, "num_hidden_layers": 1, "intermediate_size": 64, "image_size": 28}
    fields["vision_config"] |= {"num_attention_heads": 2, "patch_size": 14}
    (tmp_path / "config.json").write_text(json.dumps(fields))
    code, out, err = run("--model", str(tmp_path), *QUICK, "--method", "lora")
    assert (code, err) == (0, "") and "note: only text is counted, not vision input" in out


def test_code_of_the_model_itself_is_planned_with_consent_only(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(
        "from transformers import LlamaConfig, LlamaForCausalLM\n"
        "class OwnConfig(LlamaConfig):\n    model_type = 'own'\n"
        "class OwnForCausalLM(LlamaForCausalLM):\n    config_class = OwnConfig\n"
    )
    own = {"AutoConfig": "own.OwnConfig", "AutoModelForCausalLM": "own.OwnForCausalLM"}
    model = write(tmp_path, model_type="own", architectures=["OwnForCausalLM"], auto_map=own)
    code, out, err = run("--model", model, *QUICK, "--method", "lora", "--trust_remote_code")
    assert (code, err) == (0, "") and "--trust_remote_code" in out
    code, out, err = run("--model", model, *QUICK, "--method", "lora")
    assert (code, out, err.count("\n")) == (2, "", 1)


# ---- several cards --------------------------------------------------------------------------------------------------


def ways_of(found: Found) -> dict[str, Found]:
    return {way["name"]: way for way in found["ways"]}


def test_ways_to_use_two_cards_are_what_their_own_plans_say(planned: Any) -> None:
    words = ("--seq", "512", "--effective_batch", "8", "--method", "lora", "--gpu", "rx7900xt")
    found = planned(*words, "--cards", "2")
    way = ways_of(found)
    assert list(way) == ["ddp", "host", "fsdp2", "split", "pipeline", "tensor"]
    assert way["ddp"]["total"] == way["host"]["total"] == found["total"] and found["way"] == "ddp"
    gradients = found["choice"]["parts"]["gradient buckets"]
    assert way["ddp"]["crossing"] == pytest.approx(2 * gradients)  # each of two cards sends half of them, twice
    assert way["host"]["crossing"] == pytest.approx(4 * gradients)  # all of it, there and back
    speed = {name: each["estimated_tokens_per_second"] for name, each in way.items()}
    assert speed["split"] < speed["host"] < speed["ddp"] == found["speed"]["tokens_per_second"]
    assert way["split"]["flags"] == "--split_layers 1,1"
    assert 1 < speed["pipeline"] / speed["split"] < 2
    assert way["pipeline"]["flags"] == "--split_layers auto --pipeline auto"
    layers = (LINEAR + LAYERS * 2 * 2048) * 2  # bytes in bfloat16
    embeddings = 2 * 128256 * 2048
    # by both cards the half that each lacks: of layers and embeddings twice, of adapters too, of the last norm once
    gathered = way["fsdp2"]["accumulation"] * 2 * (layers + embeddings + gradients)
    assert way["fsdp2"]["crossing"] == pytest.approx(gathered + gradients, rel=0.01)
    # each card sends, for each token: outputs of o and down, and the gradients of the inputs of the five others
    again = 2 if way["tensor"]["checkpointing"] else 1
    a_token = LAYERS * 2 * (2 * again + 5) * (2048 + 16)
    assert way["tensor"]["crossing"] == 2 * 8 * 512 * a_token
    assert speed["tensor"] < speed["ddp"] and way["tensor"]["method"] == "lora"
    assert found["advice"].startswith("ddp: lora fits on each card, so 2 batches are computed at once")
    assert found["advice"] in text_of(found) and "pipeline" in text_of(found)


def test_every_way_over_two_cards_is_called_tight_by_the_margin_of_one_card(planned: Any) -> None:
    words = ("--seq", "64", "--effective_batch", "4", "--method", "lora", "--desktop_gib", "3", "--micro_batch", "1")
    words += ("--no-checkpointing", "--cards", "2")
    totals = {way["name"]: way["total"] for way in planned(*words, "--vram", "20")["ways"]}
    assert len(totals) == 6
    for least, spare, tight in ((min(totals.values()), 0.6, True), (max(totals.values()), 0.8, False)):
        found = planned(*words, "--vram", f"{(least / GIB + spare) / (19.9 / 20):.4f}")
        for name, way in ways_of(found).items():
            assert way["total"] == pytest.approx(totals[name])
            assert way["tight"] == (0 <= way["spare"] < 0.7 * GIB), name
            assert least != totals[name] or (way["fits"] and way["tight"] == tight), name
        assert found["tight"] == tight


def test_a_way_that_fits_decides_verdict_command_and_code(tmp_path: Path) -> None:
    words = ("--seq", "512", "--effective_batch", "4", "--method", "full", "--dtype", "bfloat16")
    words += ("--cards", "2", "--vram", "9.6", "--desktop_gib", "0", "--json")
    code, out, err = run("--model", write(tmp_path, num_hidden_layers=16), *words)
    found = json.loads(out)
    way = ways_of(found)
    assert (code, err) == (0, "") and found["fits"] and not way["ddp"]["fits"]
    assert way[found["way"]]["fits"] and found["advice"].startswith(f"{found['way']}: full does not fit on one card")
    assert way[found["way"]]["flags"] in found["command"]
    assert text_of(found).startswith("FITS: ")


# ---- models of which a recording needs more than shapes ------------------------------------------------------------

_SIZES = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "vocab_size": 512}
_OWN = {
    "loops over its experts": {
        "architectures": ["DbrxForCausalLM"],
        "model_type": "dbrx",
        "d_model": 64,
        "n_heads": 4,
        "n_layers": 6,
        "attn_config": {"kv_n_heads": 2, "rope_theta": 1e4, "clip_qkv": 8},
        "ffn_config": {"ffn_hidden_size": 128, "moe_num_experts": 4, "moe_top_k": 2},
        "vocab_size": 512,
    },
    "splits tokens by expert": {
        **_SIZES,
        "architectures": ["JetMoeForCausalLM"],
        "model_type": "jetmoe",
        "num_hidden_layers": 6,
        "num_key_value_heads": 2,
        "kv_channels": 32,
        "num_local_experts": 4,
    },
    "asks for the precision of autocast": {
        **_SIZES,
        "architectures": ["NemotronForCausalLM"],
        "model_type": "nemotron",
        "num_hidden_layers": 6,
        "num_key_value_heads": 2,
    },
    "counts its tokens to check them": {
        "architectures": ["XLMWithLMHeadModel"],
        "model_type": "xlm",
        "emb_dim": 64,
        "n_heads": 2,
        "n_layers": 6,
        "vocab_size": 512,
    },
    "makes parameters by older calls": {
        "architectures": ["XLNetLMHeadModel"],
        "model_type": "xlnet",
        "d_model": 64,
        "d_inner": 128,
        "n_head": 2,
        "n_layer": 6,
        "vocab_size": 512,
    },
    "runs two stacks in turns": {
        **_SIZES,
        "architectures": ["HrmTextForCausalLM"],
        "model_type": "hrm_text",
        "num_layers_per_stack": 1,
        "num_hidden_layers": 8,
    },
}


@pytest.mark.parametrize("what", _OWN)
def test_a_model_is_planned_that(what: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(_OWN[what]))
    code, out, err = run("--model", str(tmp_path), "--seq", "64", "--gpu", "rx7900xt", "--method", "lora", "--json")
    assert (code, err) == (0, "")
    found = json.loads(out)
    assert found["fits"] and found["layers"] == (1 if "stacks" in what else 6)


def test_a_model_without_a_stack_of_layers_is_not_streamed(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(_OWN["runs two stacks in turns"]))
    code, out, err = run(
        "--model", str(tmp_path), "--seq", "64", "--gpu", "rx7900xt", "--stream_weights", "1", "--json"
    )
    assert (code, out) == (2, "") and err.endswith(
        "cannot identify the decoder layers of HrmTextForCausalLM; leave the flag out\n"
    )


def test_where_a_model_needs_pictures_the_flag_is_named(tmp_path: Path) -> None:
    """BLIP-2's forward takes no text alone."""
    from transformers import Blip2Config

    part = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
    text = {"model_type": "opt", "hidden_size": 64, "ffn_dim": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = Blip2Config(
        vision_config={**part, "image_size": 28},
        qformer_config={**part, "encoder_hidden_size": 64, "vocab_size": 64},
        text_config={**text, "vocab_size": 512, "word_embed_proj_dim": 64},
        image_token_index=500,
    )
    config.architectures = ["Blip2ForConditionalGeneration"]
    config.save_pretrained(tmp_path)
    code, out, err = run("--model", str(tmp_path), "--seq", "64", "--gpu", "rx7900xt", "--method", "lora")
    assert (code, out) == (2, "") and len(err.splitlines()) == 1
    assert "'pixel_values'" in err and "give --dataset with rows that have some" in err


def test_many_experts_in_4_bits_are_planned(tmp_path: Path) -> None:
    """They are multiplied one by one: Qwen3-Next-80B has 512, and was offered streaming in 16 bits only."""
    fields = {**EXPERTS, "num_hidden_layers": 3, "num_experts": 512, "num_experts_per_tok": 8}
    (tmp_path / "config.json").write_text(json.dumps(fields))
    words = ("--seq", "64", "--gpu", "rx7900xt", "--method", "qlora", "--effective_batch", "1")
    code, out, err = run("--model", str(tmp_path), *words, "--json")
    assert (code, err) == (0, "")
    assert json.loads(out)["choice"]["method"] == "qlora"
