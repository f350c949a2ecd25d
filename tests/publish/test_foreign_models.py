"""Models, tokenizers and rows of a stranger: one line, code 2, in time; nothing acts on the terminal."""

from __future__ import annotations

import json
import os
import re
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.publish.strangers import DEEP, ESCAPES, READERS, Place, by_verb, edit, sampled

ACTS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")

# Found in models on the Hub, or close to such ones: each is answered or refused, and never a traceback.
ORDINARY: dict[str, dict[str, Any]] = {
    "beams": {"num_beams": 4, "early_stopping": True, "length_penalty": 0.8},
    "several": {"num_return_sequences": 3, "do_sample": True},
    "groups": {"num_beams": 4, "num_beam_groups": 2, "diversity_penalty": 0.5},
    "dictionary": {"return_dict_in_generate": True, "output_scores": True, "output_attentions": True},
    "strings": {"stop_strings": ["a", "no such"]},
    "lookup": {"prompt_lookup_num_tokens": 4},
    "contrast": {"penalty_alpha": 0.6, "top_k": 4},
    "cache": {"cache_implementation": "static", "max_length": 4096, "min_length": 2},
    "dola": {"dola_layers": "low"},
    "guidance": {"guidance_scale": 1.5},
    "healing": {"token_healing": True, "max_time": 0.001},
}
BROKEN: dict[str, dict[str, Any]] = {
    "text": {"top_p": "much", "do_sample": True},
    "negative": {"temperature": -1.0, "do_sample": True},
    "penalty": {"repetition_penalty": -3},
    "list": {"top_k": [1], "do_sample": True},
    "words": {"bad_words_ids": "x"},
    "bias": {"sequence_bias": [[7]]},
}


@pytest.mark.parametrize("kind", sampled(ORDINARY, 4))
def test_a_generation_configuration_of_an_ordinary_model(place: Place, kind: str) -> None:
    (place.base / "generation_config.json").write_text(json.dumps(ORDINARY[kind]))
    done = place.run("generate")
    assert done.code == 0 and done.stdout, done.stderr[-2000:]


@pytest.mark.parametrize("kind", sampled(BROKEN, 2))
def test_a_generation_configuration_that_cannot_be_used(place: Place, kind: str) -> None:
    (place.base / "generation_config.json").write_text(json.dumps(BROKEN[kind]))
    place.refused("generate")


ABSURD: dict[str, dict[str, Any]] = {
    "negative": {"hidden_size": -64},
    "no heads": {"num_attention_heads": 0},
    "text": {"hidden_size": "wide"},
    "vocabulary": {"vocab_size": 10**12},
    "wide": {"intermediate_size": 10**13},
    "no head size": {"head_dim": 0},
    "activation": {"hidden_act": "nothing"},
    "rope": {"rope_parameters": {"rope_type": "nothing"}},
    "rope list": {"rope_parameters": [1, 2]},
    "odd heads": {"num_key_value_heads": 3},
    "list": {"num_hidden_layers": [2]},
    "no layers": {"num_hidden_layers": -1},
    "dtype": {"dtype": "float9"},
    "types": {"layer_types": ["no_such_attention"] * 2},
    "quantised": {"quantization_config": {"quant_method": "nothing"}},
    "quantised list": {"quantization_config": [1]},
    "padding": {"pad_token_id": 10**9},
    "ends": {"eos_token_id": {"a": 1}},
}


@pytest.mark.parametrize(("verb", "kind"), by_verb(ABSURD, (*READERS, "dry run"), short=6))
def test_an_absurd_model_configuration(place: Place, verb: str, kind: str) -> None:
    edit(place.base / "config.json", **ABSURD[kind])
    if verb != "dry run":
        place.refused(verb)
        return
    done = place.run("sft", *_stock(place), "--dry_run", "text")  # it needs no weights
    assert "Traceback" not in done.stderr, done.stderr[-3000:]
    assert (done.code, len(done.error_lines)) in ((0, 0), (2, 1)), done.stderr[-2000:]


TOKENIZERS: dict[str, Any] = {
    "merges": {"model": {"type": "BPE", "vocab": {"a": 0}, "merges": [["b", "c"]]}},
    "empty": {"model": {"type": "Unigram", "vocab": [], "unk_id": 7}},
    "no unknown": {"model": {"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "[UNK]"}},
    "pieces": {"model": {"type": "WordPiece", "vocab": {"a": 0}, "unk_token": "[UNK]", "max_input_chars_per_word": 9}},
    "stride": {"truncation": {"direction": "Right", "max_length": 2, "strategy": "LongestFirst", "stride": 9}},
    "charsmap": {"normalizer": {"type": "Precompiled", "precompiled_charsmap": "AAAA"}},
    "kind": {"pre_tokenizer": {"type": "Nothing"}},
}


@pytest.mark.parametrize(("verb", "kind"), by_verb([*TOKENIZERS, "deep", "list", "text"], short=4))
def test_a_tokenizer_that_cannot_be_used(place: Place, verb: str, kind: str) -> None:
    file = place.adapter / "tokenizer.json"
    if kind in TOKENIZERS:
        edit(file, **TOKENIZERS[kind])
    else:
        file.write_text({"deep": DEEP, "list": "[1]", "text": '"x"'}[kind])
    place.seal()
    if verb == "sft":  # it has the base's tokenizer
        file.replace(place.base / "tokenizer.json")
        place.seal()
    done = place.run(verb)
    assert "Traceback" not in done.stderr, done.stderr[-3000:]
    assert (done.code, len(done.error_lines)) in ((0, 0), (2, 1)), done.stderr[-2000:]


@pytest.mark.parametrize("form", ["safetensors", "pickle"])
def test_names_of_tensors_do_not_act_on_the_terminal(place: Place, form: str) -> None:
    file = place.base / "model.safetensors"
    tensors = load_file(file)
    tensors[f"model.layers.0.{ESCAPES}"] = tensors["model.norm.weight"].clone()
    if form == "safetensors":
        save_file(tensors, file, metadata={"format": "pt"})
        for verb in READERS:
            assert "control characters" in place.refused(verb)
        return
    file.unlink()
    torch.save(tensors, place.base / "pytorch_model.bin")
    done = place.run("generate")
    said = re.sub(r"\x1b\[[0-9;]*m", "", done.stdout + done.stderr).replace("\r", "")
    assert "LOAD REPORT" in said and not ACTS.search(said), said


# ---- rows -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", ["text", "html", "json"])
def test_rows_do_not_act_on_the_terminal(place: Place, form: str) -> None:
    row = {
        "messages": [{"role": "user", "content": f"a{ESCAPES}"}, {"role": "assistant", "content": f"b\u202e{ESCAPES}"}]
    }
    (place.rows / "train.jsonl").write_text(json.dumps(row) + "\n")
    done = place.run("sft", *_stock(place), "--dry_run", form)
    assert done.code == 0, done.stderr[-2000:]
    assert not ACTS.search(done.stdout.replace("\r", "")) and "\u202e" not in done.stdout
    if form == "json":
        assert ESCAPES in "".join(
            part["text"] for row in json.loads(done.stdout)["rows"] for part in row["parts"]["row"]
        )


def _stock(place: Place) -> list[str]:
    """The command without the adapter."""
    argv = place.argv("sft")
    at = argv.index("--adapter_name_or_path")
    return [*argv[:at], *argv[at + 2 :]]


ROWS = {
    "deep list": f'{{"messages": {DEEP}}}',
    "deep object": '{"messages": ' + '{"a":' * 5000 + "1" + "}" * 5001,
    "deep tools": json.dumps({"messages": [{"role": "user", "content": "x"}], "tools": DEEP}),
    "deep content": '{"messages": [{"role": "user", "content": ' + DEEP + "}]}",
    "moderately deep": '{"messages": ' + "[" * 90 + "]" * 90 + "}",
}


@pytest.mark.parametrize("kind", sampled(ROWS, 3))
def test_rows_that_are_nested_too_deeply(place: Place, kind: str) -> None:
    (place.rows / "train.jsonl").write_text(ROWS[kind] + "\n")
    place.refused("sft", *_stock(place))


BOMB = "a: &a [x, x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"{name}: &{name} [{', '.join([f'*{before}'] * 10)}]\n" for before, name in zip("abcdefgh", "bcdefghi", strict=True)
)
MERGES = "a: &a {x: 1}\n" + "".join(
    f"{name}: &{name} {{<<: [{', '.join([f'*{before}'] * 9)}]}}\n"
    for before, name in zip("abcdefgh", "bcdefghi", strict=True)
)
CARDS = {
    "python": "configs: !!python/object/apply:os.system ['touch victim/run']",
    "aliases": BOMB,
    "merges": MERGES,
    "itself": "a: &a [*a]",
    "deep": f"configs: {DEEP}",
    "invalid": "configs: [",
}


@pytest.mark.parametrize("kind", sampled(CARDS, 2))
def test_the_card_of_a_data_set(place: Place, kind: str) -> None:
    (place.rows / "README.md").write_text(f"---\n{CARDS[kind]}\n---\n\n# Rows\n")
    assert "README.md" in place.refused("sft", *_stock(place))


@pytest.mark.parametrize("kind", sampled(CARDS, 3))
def test_a_recipe(place: Place, kind: str) -> None:
    (place.room / "recipe.yaml").write_text(CARDS[kind] + "\n")
    assert "recipe" in place.refused("sft", "--config", str(place.room / "recipe.yaml"))


@pytest.mark.parametrize(
    "name", ["transfer_report.json", "training_log.json", "loss.png", "run.json", "integrity.json"]
)
def test_a_link_where_a_run_will_write_is_refused_at_its_start(place: Place, name: str) -> None:
    (place.room / "out").mkdir()
    (place.room / "out" / name).symlink_to(place.victim / "secret.model")
    assert name in place.refused("sft", *_stock(place))


def test_the_prompts_of_a_file_that_are_nested_too_deeply(place: Place) -> None:
    (place.room / "prompts.jsonl").write_text(f'{{"messages": {DEEP}}}\n')
    argv = place.argv("generate")
    at = argv.index("--prompt")
    place.refused("generate", *argv[:at], *argv[at + 2 :], "--file", str(place.room / "prompts.jsonl"))


def test_a_prompt_is_a_pipe(place: Place) -> None:
    os.mkfifo(place.adapter / "chat_template.jinja.pipe")
    done = place.run("generate")
    assert done.code == 0, done.stderr
