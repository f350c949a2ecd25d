"""The small model of the notebooks stands in where it must, says why, and touches nothing in the notebook's process."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from hf_rocm_tune.demo import stand_in

LLAMA = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}


def test_a_model_in_the_variable_wins(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv(stand_in.VARIABLE, "org/other")
    assert stand_in.choose("org/model", "org/data") == ("org/other", "org/data", False)
    assert "org/other instead of org/model" in capsys.readouterr().out


def test_without_a_gpu_or_on_request_the_small_one_stands_in(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert stand_in._why_not("org/model") == "torch sees no GPU here, so this is not org/model"
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    assert stand_in._why_not(stand_in.DEMO) == f"{stand_in.VARIABLE}=demo"
    missing = stand_in._why_not("/no/such/model")
    assert missing is not None and "/no/such/model" in missing


def test_with_a_gpu_and_a_model_that_is_there_nothing_stands_in(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr(sys, "argv", ["stand_in", str(tmp_path), str(tmp_path / "folder")])
    stand_in.main()
    assert capsys.readouterr().out.splitlines()[-1] == "null"
    assert not (tmp_path / "folder").exists()


def test_choosing_imports_no_torch_and_a_failure_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "assets").mkdir()  # not the demo's: it is left alone, and that ends the choice
    code = (
        "import sys; from hf_rocm_tune.demo import stand_in; from hf_rocm_tune.errors import UsageError\n"
        f"try: stand_in.choose('org/model', 'org/data', folder={str(tmp_path)!r})\n"
        "except UsageError as error: print(error)\n"
        "assert 'torch' not in sys.modules\n"
    )
    env = {**os.environ, stand_in.VARIABLE: stand_in.DEMO}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, env=env)
    assert done.returncode == 0, done.stderr
    assert "could not be created" in done.stdout and str(tmp_path / "assets") in done.stdout
