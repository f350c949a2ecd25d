"""What the owner of a card sends after `make evening`."""

from __future__ import annotations

import importlib.util
import json
import os
import tarfile
from pathlib import Path

import pytest


def test_the_archive_holds_results_and_nothing_private(
    checkout: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = importlib.util.spec_from_file_location("evening", checkout / "scripts/evening.py")
    assert spec is not None and spec.loader is not None
    evening = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(evening)
    monkeypatch.setitem(os.environ, "HF_TOKEN", "hf_" + "aB3" * 11)
    monkeypatch.setitem(os.environ, "USER", "gwendolyn")
    said = f"gwendolyn reads {tmp_path}/rows.jsonl with {os.environ['HF_TOKEN']} beside {checkout}/scripts"
    adapter = tmp_path / "out" / "adapter"
    adapter.mkdir(parents=True)
    for name in ("transfer_report.json", "../doctor.json", "../gpu-card.json"):
        (adapter / name).write_text(json.dumps({"verify": "full", "said": said}))
    for name in ("../recipe.txt", "adapter_model.safetensors", "trainer_state.json", "rows.jsonl"):
        (adapter / name).write_text(said)
    with tarfile.open(evening.archived(tmp_path / "out")) as packed:
        held = {member.name: packed.extractfile(member) for member in packed.getmembers()}
        texts = {name: file.read().decode() for name, file in held.items() if file is not None}
        assert {(member.uname, member.uid) for member in packed.getmembers()} == {("", 0)}
    assert set(texts) == {
        f"out/{name}" for name in ("doctor.json", "gpu-card.json", "recipe.txt", "transfer_report.json")
    }
    for text in texts.values():
        assert "reads" in text
        assert not any(secret in text for secret in ("gwendolyn", "aB3aB3", str(tmp_path), str(checkout)))
