"""The model card: valid for the Hub, true about the run, without anything private, and safe against what it quotes.

That its code really loads the model, with equal logits, is shown in ``tests/e2e/test_card.py``.
"""

from __future__ import annotations

import ast
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from huggingface_hub import ModelCard
from huggingface_hub.utils import validate_repo_id

from hf_rocm_tune.errors import UsageError
from hf_rocm_tune.publish.readme import build, clean_readme, is_ours, kept
from hf_rocm_tune.publish.training_log import shown_settings
from hf_rocm_tune.publish.verdict import coverage, judge, verdict_line
from hf_rocm_tune.redaction import Private
from tests.publish.hub_server import card_errors
from tests.publish.run_files import SETTINGS, TRAINED, incident, report, run, spoiled, stage

NOBODY = Private()
# Whatever a file name, a setting or an incident may bring along.
HOSTILE = "x\n---\nlicense: mit\n```\n# Heading | <script>alert(1)</script> [a](http://evil.example) `*_~$ <!-- \udcff"


def readme(
    private: Private = NOBODY,
    *,
    trained: dict[str, Any] | None = None,
    settings: dict[str, Any] | None = None,
    datasets: tuple[str, ...] = ("org/rows",),
    columns: tuple[str, ...] = (),
    picture: str | None = "loss.png",
    adapter: dict[str, Any] | None = None,
    **changed: Any,
) -> str:
    """The card of a run, changed."""
    made = run(trained=TRAINED | (trained or {}), settings=SETTINGS | (settings or {}))
    told = {"datasets": datasets, "columns": columns, "picture": picture, "adapter": adapter}
    return build(replace(made, **changed), private, **told)  # type: ignore[arg-type]


def metadata_of(text: str) -> dict[str, Any]:
    """The metadata as huggingface_hub reads it, and as plain YAML."""
    read: dict[str, Any] = ModelCard(text).data.to_dict()
    block = yaml.safe_load(text.split("---\n")[1])
    assert read.keys() == block.keys()
    return read


def code_of(text: str) -> list[str]:
    """The Python blocks of a card."""
    return re.findall(r"^```python\n(.*?)\n^```$", text, re.DOTALL | re.MULTILINE)


# ---- metadata -----------------------------------------------------------------------------------------------


def test_metadata_is_what_the_hub_asks_for() -> None:
    found = metadata_of(readme())
    assert found["base_model"] == "org/base" and found["base_model_relation"] == "adapter"
    assert found["datasets"] == ["org/rows"]
    assert (found["library_name"], found["pipeline_tag"]) == ("peft", "text-generation")
    assert {"lora", "sft", "trl", "hf-rocm-tune"} <= set(found["tags"])
    for name in (found["base_model"], *found["datasets"]):
        validate_repo_id(name)


def test_what_the_hub_refuses_is_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "org" / "rows").mkdir(parents=True)
    for name in (str(tmp_path / "model"), "./model", "~/model", "org/rows", "a/b/c", "-bad-", "with space"):
        found = metadata_of(readme(settings={"model_name_or_path": name}, datasets=(name,)))
        assert not {"base_model", "base_model_relation", "datasets", "model-index"} & found.keys(), name
    named = metadata_of(readme(settings={"model_name_or_path": "./model", "hub_base_model_id": "org/the-base"}))
    assert named["base_model"] == "org/the-base"


def test_uploading_it_changes_nothing() -> None:
    for text in (readme(), readme(finished=False, picture=None, trained={"adapter_dtype": None})):
        assert clean_readme(text, NOBODY) == text
    assert "6 steps so far (a checkpoint, not the result)" in text and "loss.png" not in text
    assert metadata_of(text)["library_name"] == "transformers" and "lora" not in metadata_of(text)["tags"]


# ---- the text -----------------------------------------------------------------------------------------------


def test_it_says_how_the_model_was_made_on_which_data_and_what_went_wrong() -> None:
    data = {"split": "train", "rows": 300, "tokens": 39_600, "cut": 300, "lost": 34_800, "dropped": 2, "kept": 4_800}
    found = report(
        data=[data],
        batches=stage(mismatches=12, recovered=12),
        incidents=[incident(step=step) for step in range(12)],
        fault_injection={"kind": "zero", "rate": 0.1, "injected": 12},
        step_fault_injection={"kind": "nan"},
        survival={"crash_injection": "step=4,kind=kill"},
        events={"restarts by the supervisor": "2"},
        coverage={"verified_bytes": 7999, "device_bytes": 8000, "unverified": [{"tensor": "a.b", "reason": "why"}]},
    )
    text = readme(report=found, columns=("prompt", "chosen", "rejected"))
    for words in (
        "# my-adapter\n",
        "[org/base](https://huggingface.co/org/base)",
        "LoRA, r=16, alpha=32",
        "100 of 1,000 parameters",
        "![Loss over optimizer steps](loss.png)",
        "| evaluation loss (last) | 0.75 |",
        "| epochs | 1 |",
        "| learning_rate | `0.0002` |",
        "| effective_batch_size | `16` |",
        "https://huggingface.co/datasets/org/rows",
        "| name | `AMD Radeon RX 7900 XT` |",
        "| torch | `2.13.0` |",
        "| frozen weights in memory | 3 passes | 0 |  |",
        "columns `prompt`, `chosen`, `rejected`.",
        "- train: 300 rows, 39,600 tokens; 300 rows cut (34,800 tokens lost), 2 rows dropped; 0 % of the tokens count",
        "**Integrity:** 99.9875 % of the bytes on the device were verified. Corruption was found 12 times",
        "Faults were injected on request: kind=zero, rate=0.1, injected=12.",
        "Faults of steps were injected on request: kind=nan.",
        "Crashes were injected on request: step=4,kind=kill.",
        "Not every byte was verified",
        "restarts by the supervisor: 2",
    ):
        assert words in text, words
    assert "max_steps" not in text and "packing" not in text and "| hip " not in text
    assert "[More Information Needed]" not in text


# ---- the code -----------------------------------------------------------------------------------------------

# What was trained, what must be in the code and what must not: kinds that no real run of `tests/e2e/test_card.py` has.
KINDS: dict[str, tuple[dict[str, Any], list[str], list[str]]] = {
    "8 bit": (
        {"adapter_dtype": "bfloat16", "quantization": {"load_in_8bit": True}},
        ["BitsAndBytesConfig(\n        load_in_8bit=True,\n    ),\n", "autocast_adapter_dtype=False"],
        [],
    ),
    "another class": (
        {"model_class": "SmolVLMForConditionalGeneration"},
        ["SmolVLMForConditionalGeneration.from_pretrained("],
        ["AutoModel", "autocast_adapter_dtype"],
    ),
    "new tokens": ({"resized_to": 903}, ["model.resize_token_embeddings(903, mean_resizing=False)\nmodel = Peft"], []),
    "no chat template": ({"chat_template": False}, ['tokenizer("A checksum is"'], ["apply_chat_template"]),
}


@pytest.mark.parametrize("kind", KINDS)
def test_the_code_suits_what_was_trained(kind: str) -> None:
    changed, there, absent = KINDS[kind]
    blocks = code_of(readme(trained=changed))
    assert len(blocks) == 2
    code = "\n".join(blocks)
    names = {node.id for node in ast.walk(ast.parse(code)) if isinstance(node, ast.Name)}
    assert {"model", "tokenizer", "device"} <= names
    assert all(word in code for word in there), code
    assert not [word for word in absent if word in code], code
    assert "device_map=device" in code


def test_experts_in_4_bit_are_said() -> None:
    for config, command in (({"load_in_4bit": True}, "generate --load_in_4bit`"), (None, "generate`")):
        text = readme(trained={"packed_experts": True, "quantization": config})
        assert "The experts were in 4 bit" in text and f"`hf-rocm-tune {command} loads them" in text
        assert "give the outputs of the training" not in text


def test_the_code_names_what_else_was_asked_for() -> None:
    more = {"attn_implementation": "sdpa", "trust_remote_code": True, "push_to_hub": True, "hub_model_id": "me/mine"}
    code = code_of(readme(settings={**more, "model_revision": "v2"}))[0]
    for words in ('revision="v2"', 'attn_implementation="sdpa"', "trust_remote_code=True", 'adapter = "me/mine"\n'):
        assert words in code
    assert "revision" not in code_of(readme(settings={"model_revision": "main"}))[0]


def test_it_says_where_the_adapter_can_be_served_and_where_it_must_be_merged() -> None:
    config = {"peft_type": "LORA", "r": 32, "target_modules": ["q_proj"]}
    pushed = {"push_to_hub": True, "hub_model_id": "me/mine"}
    text = readme(settings=pushed, adapter=config)
    assert "NAME=me/mine --max-lora-rank 32\n" in text and "must be merged" not in text
    text = readme(adapter=config | {"modules_to_save": ["lm_head", HOSTILE]})
    (line,) = [line for line in text.splitlines() if "must be merged" in line]
    assert "vLLM cannot take it" in line and "llama.cpp and Ollama cannot take it" in line
    assert "<script>" not in text and "merge . OUT" in line
    assert "can be served" not in readme()


# ---- hostile and private content ----------------------------------------------------------------------------


def test_hostile_strings_stay_text() -> None:
    worst = report(
        incidents=[incident(), "x"],
        findings=[{"status": "x"}],
        telemetry=[{"rank": "x", "hotspot_c": "x"}],
        batches=stage(mismatches=1, recovered=1),
        events={"x": "x"},
    )
    text = readme(
        directory=Path(HOSTILE.replace("/", "")),
        datasets=(HOSTILE,),
        trained={
            "method": HOSTILE,
            "dtype": HOSTILE,
            "adapter_dtype": HOSTILE,
            "quantization": {"load_in_4bit": HOSTILE},
        },
        settings=spoiled({**SETTINGS, "attn_implementation": "x", "model_revision": "x"}, HOSTILE),
        report={
            **spoiled(worst, HOSTILE),
            "verify": "full",
            "findings": [{"status": "warn", "title": HOSTILE, "text": HOSTILE}],
        },
    )
    assert "license" not in metadata_of(text)
    blocks = code_of(text)
    assert len(blocks) == 2 and all(ast.parse(block) for block in blocks)
    headings = [line for line in text.splitlines() if line.startswith("#") and line not in blocks[0]]
    assert not [line for line in headings if line.lstrip("#").startswith(" Heading")]
    outside = re.sub(r"^```.*?^```$", "", text, flags=re.DOTALL | re.MULTILINE)
    outside = re.sub(r"`[^`\n]*`", "", outside)  # code spans show what they hold
    assert not re.search(r"(?<!\\)<(?!!-- hf-rocm-tune)", outside.partition("\n---\n\n")[2])
    assert not re.search(r"(?<!\\)\]\(http://evil", outside)
    for line in outside.splitlines():
        if line.startswith("| "):
            assert line.count("|") - line.count("\\|") <= 8
    assert is_ours(text)


def test_nothing_private_is_in_it(tmp_path: Path) -> None:
    secret = "hf_" + "s" * 34
    environ = {"HOME": str(tmp_path / "gudrun"), "USER": "gudrun", "HOSTNAME": "mycastle", "HF_TOKEN": secret}
    private = Private.of_this_machine(environ, paths={str(tmp_path / "work"): ""})
    words = f"{tmp_path}/work/x of gudrun on mycastle with {secret}, /mnt/disk/gudrun/y"
    settings = {"lr_scheduler_type": words, "attn_implementation": words}
    text = readme(
        private,
        directory=tmp_path / "work" / "out of gudrun",
        datasets=(f"{tmp_path}/work/rows",),
        settings={**settings, "model_name_or_path": f"{tmp_path}/work/base"},
        report=report(
            incidents=[incident(tensor=words, kind=words)],
            findings=[{"status": "fail", "title": words, "text": words}],
            device={"name": words},
            fault_injection=words,
        ),
    )
    for word in (str(tmp_path), "gudrun", "mycastle", secret, "/mnt/disk"):
        assert word not in text
    assert 'base_model = "base"' in text


# ---- ours or the user's -------------------------------------------------------------------------------------


def test_only_an_untouched_card_is_ours(tmp_path: Path) -> None:
    text = readme()
    assert is_ours(text) and is_ours(text + "\n\n")
    edits = [
        text.replace("my-adapter", "my adapter", 1),
        text.replace("\n", "\r\n"),
        text + "one line more\n",
        text.replace("<!--", "<!-- my note -->\n<!--"),
        " " + text,
        text.partition("\n\n<!--")[0],
        "",
        "# A card of TRL\n",
        text + text,
    ]
    file = tmp_path / "README.md"
    assert kept(file) is None
    file.write_text(text)
    assert kept(file) is None
    for edit in edits:
        assert not is_ours(edit)
        file.write_bytes(edit.encode())
        assert kept(file) == edit.encode()
    file.write_bytes(b"\xff\xfe no text")
    assert kept(file) == b"\xff\xfe no text"


# ---- one that a person may have edited, before it is published ----------------------------------------------


PRIVATE = Private.of_this_machine({}, paths={"/home/planted-user/models/Tiny Llama": ""})


def card(**metadata: object) -> str:
    return f"---\n{yaml.safe_dump(metadata, sort_keys=False)}---\n\n# Text\n"


def data_of(text: str) -> dict[str, object]:
    assert card_errors(text) == [], "the Hub would refuse it"
    return metadata_of(text)


@pytest.mark.parametrize(
    "base", ["/home/planted-user/models/Tiny Llama", "~/models/x", "./x", "/nowhere/at/all", "file:///x/y"]
)
def test_a_local_base_model_is_taken_out_or_named(base: str) -> None:
    text = card(base_model=base, tags=[f"base_model:adapter:{base}", "lora"], library_name="peft")
    assert card_errors(text)
    without = clean_readme(text, PRIVATE)
    assert "base_model" not in data_of(without) and data_of(without)["tags"] == ["lora"]
    assert data_of(without)["library_name"] == "peft"
    named = clean_readme(text, PRIVATE, base_model_id="org/tiny")
    assert data_of(named)["base_model"] == "org/tiny"
    assert data_of(named)["tags"] == ["lora"], "the Hub makes those of the base model itself"


def test_the_id_that_the_user_gives_is_added_to_a_card_without_one() -> None:
    assert data_of(clean_readme(card(tags=["x"]), PRIVATE, base_model_id="org/tiny"))["base_model"] == "org/tiny"
    other = card(base_model="org/other", datasets=["org/data", "squad"], tags=["lora"])
    assert clean_readme(other, PRIVATE, base_model_id="org/tiny") == other, "the card has the last word"


@pytest.mark.parametrize("block", ["a: [", "- a\n- b", "just words", "model-index: 3"])
def test_a_card_that_cannot_be_read_is_refused_in_one_line(block: str) -> None:
    with pytest.raises(UsageError, match=r"README\.md") as caught:
        clean_readme(f"---\n{block}\n---\ntext", PRIVATE)
    assert "\n" not in str(caught.value)


def test_settings_without_effect_are_left_out() -> None:
    found = shown_settings({**SETTINGS, "use_peft": False, "bnb_4bit_quant_type": "nf4", "max_steps": 10})
    assert not {"lora_r", "bnb_4bit_quant_type", "num_train_epochs", "packing"} & found.keys()
    assert found["max_steps"] == 10
    assert "effective_batch_size" not in shown_settings({})
    together = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2, "world_size": 2}
    assert shown_settings(together)["effective_batch_size"] == 16
    assert shown_settings({**together, "tensor_parallel": True})["effective_batch_size"] == 8
    assert shown_settings({"load_in_4bit": True, "bnb_4bit_quant_type": "nf4"})["bnb_4bit_quant_type"] == "nf4"


# ---- the verdict on a run is never better than what its report proves --------------------------------------


WRONG = stage(mismatches=2, recovered=1)


@pytest.mark.parametrize(
    ("changed", "level", "words"),
    [
        ({}, "good", "100 % of the bytes on the device were verified, and none of them was wrong."),
        ({"batches": stage(mismatches=1, recovered=1)}, "note", "Corruption was found once and recovered"),
        ({"batches": WRONG}, "bad", "could not be recovered: batches: 1 of 2 mismatches"),
        ({"gradients": WRONG}, "bad", "gradients: 1 of 2"),
        ({"incidents": [incident(outcome="stopped")]}, "bad", "batches input_ids at step 2"),
        ({"coverage": {"verified_bytes": 999_999, "device_bytes": 1_000_000}}, "note", "99.9999 %"),
        ({"coverage": {"verified_bytes": 10**12 - 1, "device_bytes": 10**12}}, "note", "99.9999 %"),
        ({"coverage": {"verified_bytes": 0, "device_bytes": 0}}, "unknown", "not verified"),
        ({"coverage": {}}, "unknown", "not verified"),
        ({"verify": "sample"}, "note", "100 %"),
        ({"verify": "off"}, "unknown", "not verified"),
        ({"verify": None}, "note", "100 %"),
        ({"incidents": None}, "unknown", "not have the expected form"),
        ({"weights": "none"}, "unknown", "not have the expected form"),
        ({"casts": {}}, "unknown", "not have the expected form"),
        ({"incidents": [5]}, "unknown", "not have the expected form"),
    ],
)
def test_of_a_finished_run(changed: dict[str, Any], level: str, words: str) -> None:
    found = judge(report(**changed), finished=True)
    assert (found.level, words in found.headline) == (level, True), found


@pytest.mark.parametrize(
    ("changed", "line"),
    [
        ({}, "VERIFIED, nothing was wrong"),
        (
            {"batches": stage(mismatches=12, recovered=12)},
            "VERIFIED, with remarks (corruption was found 12 times and recovered before it was used)",
        ),
        (
            {"coverage": {"verified_bytes": 999_999, "device_bytes": 1_000_000}},
            "VERIFIED, with remarks (99.9999 % of the bytes on the device)",
        ),
        ({"verify": "sample"}, "VERIFIED, with remarks (a sample of the transfers only)"),
        ({"verify": "off"}, "NOT KNOWN (Transfers were not verified in this run)"),
        (
            {"gradients": WRONG},
            "WRONG BYTES (Wrong bytes were found that could not be recovered: gradients: 1 of 2 mismatches)",
        ),
    ],
)
def test_the_closing_line_begins_with_one_verdict_and_its_reason(changed: dict[str, Any], line: str) -> None:
    assert verdict_line(report(**changed)) == line


def test_a_run_that_is_not_finished_or_was_changed_is_not_good() -> None:
    assert judge(report(), finished=False).level == "note"
    assert "has not finished" in judge(report(), finished=False).notes[0]
    damaged = judge(report(), finished=True, damaged=["a is changed (x)", "b is missing (y)"])
    assert (damaged.level, "a is changed (x) and 1 more" in damaged.headline) == ("bad", True)
    assert judge({}, finished=True).level == "unknown"


def test_coverage_is_never_rounded_up() -> None:
    assert coverage(report(coverage={"verified_bytes": 2**60 - 1, "device_bytes": 2**60})) == 99.9999
    assert coverage(report(coverage={"verified_bytes": 3, "device_bytes": 3})) == 100
    assert coverage(report(coverage={"verified_bytes": "3", "device_bytes": 3})) is None
