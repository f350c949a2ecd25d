"""Merged, pushed, and answered from by its id on the Hub (a server on loopback); adapters by their id too."""

from __future__ import annotations

from pathlib import Path

import pytest
from huggingface_hub import snapshot_download

from hf_rocm_tune import cli
from hf_rocm_tune.integrity import manifest
from tests import tiny
from tests.publish.hub_server import USER, LoopbackHub
from tests.publish.merge_cases import build_base, lora, merged, write_adapter

# huggingface_hub 2.4 hands bytes to its HTTP client in a way that the client calls outdated.
pytestmark = pytest.mark.filterwarnings("ignore:Use 'content=:DeprecationWarning")

ASK = ["--prompt", "What comes next?", "--max_new_tokens", "8", "--temperature", "0"]


def said(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    capsys.readouterr()
    assert cli.main(["generate", *argv, *ASK]) == 0
    return capsys.readouterr().out


def test_a_merged_model_is_pushed_and_answers_by_its_id(
    hub: LoopbackHub, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    base = build_base(lora("llama3"), tmp_path)
    adapter = write_adapter(lora("llama3"), base, tmp_path / "adapter")
    repo = f"{USER}/merged"
    argv = ["merge", str(adapter), str(tmp_path / "merged"), "--base", str(base), "--push", repo, "--private"]
    assert cli.main(argv) == 0, capsys.readouterr().err
    assert said(capsys, repo) == said(capsys, str(tmp_path / "merged"))


def test_an_adapter_answers_by_its_id_and_is_merged_by_it(
    hub: LoopbackHub, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    base, adapter, out, _ = merged(lora("llama3"), tmp_path, "adapter")
    tiny.build_tokenizer().save_pretrained(adapter)
    (adapter / "README.md").write_text("---\nlibrary_name: peft\n---\n\n# Card\n")
    manifest.write(adapter, run_id="run-9", step=5, status="final")
    repo = f"{USER}/adapter"
    assert cli.main(["push", str(adapter), repo]) == 0, capsys.readouterr().err
    assert said(capsys, repo, "--base", str(base)) == said(capsys, str(out))
    pulled = Path(snapshot_download(repo))
    assert manifest.verify(pulled) == [], "a user can verify what was pulled with the manifest that came along"
    assert cli.main(["merge", repo, str(tmp_path / "again"), "--base", str(base)]) == 0
    assert "run run-9, step 5" in capsys.readouterr().err
    found, wanted = manifest.read(tmp_path / "again"), manifest.read(out)
    assert isinstance(found, manifest.Manifest) and isinstance(wanted, manifest.Manifest)
    assert found.tensors == wanted.tensors


def test_an_id_that_is_not_there_is_one_line(hub: LoopbackHub, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["generate", f"{USER}/nothing", *ASK]) == 2
    errors = [line for line in capsys.readouterr().err.splitlines() if line.startswith("hf-rocm-tune: error:")]
    assert len(errors) == 1 and f"{USER}/nothing" in errors[0]
