"""The Hub on loopback for tests in this process, and directories as runs leave them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from huggingface_hub import constants, hf_api
from safetensors.numpy import save_file

from hf_rocm_tune.integrity import manifest
from tests.publish.hub_server import TOKEN, LoopbackHub

BASE = "/home/planted-user/models/Tiny Llama"
DATA = "/mnt/planted-disk/chats.jsonl"
ATTEMPTS = 4  # of a push in this process


def use(server: LoopbackHub, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let huggingface_hub in this process talk to a server, with its token."""
    template = server.url + "/{repo_id}/resolve/{revision}/{filename}"
    monkeypatch.setattr(constants, "ENDPOINT", server.url)
    monkeypatch.setattr(hf_api.api, "endpoint", server.url)  # PEFT's, made when it is imported
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
    monkeypatch.setenv("HF_TOKEN", TOKEN)


def clean_report(**changes: Any) -> dict[str, Any]:
    """A transfer report of a run in which nothing went wrong, as far as it is looked at."""
    sound = {"mismatches": 0, "recovered": 0}
    stages = ("weights", "batches", "adapter", "optimizer", "casts", "gradients")
    return {
        "schema": 1,
        **{stage: dict(sound) for stage in stages},
        "incidents": [],
        "findings": [{"text": f"planted-user is not in the group render; {BASE}/x is slow"}],
        **changes,
    }


def write_run(out: Path, *, seed: int = 0, checkpoints: tuple[int, ...] = ()) -> Path:
    """What a run leaves whose base model and data are local, with their paths wherever upstream writes them."""
    out.mkdir(parents=True, exist_ok=True)
    write_model(out, seed=seed)
    (out / "transfer_report.json").write_text(json.dumps(clean_report(), indent=2) + "\n")
    (out / "training_args.bin").write_bytes(f"pickle {out} {TOKEN}".encode())
    settings = {"model_name_or_path": BASE, "dataset_name": DATA}
    (out / "run.json").write_text(json.dumps({"schema": 1, "settings": settings}))
    (out / "_run.lock").write_text("process 1 on planted-host")
    for step in checkpoints:
        write_checkpoint(out, step)
    listed = [n for n in names(out) if n not in ("run.json", "_run.lock", "integrity.json") and "/" not in n]
    manifest.write(out, run_id="run-1", step=8, status="final", files=listed, extra={"compared": True})
    return out


def write_model(folder: Path, *, seed: int) -> None:
    """An adapter, its tokenizer and a card."""
    weights = np.random.default_rng(seed).standard_normal((64, 512)).astype(np.float32)
    save_file(
        {"layer.lora_A.weight": weights, "layer.lora_B.weight": weights.T.copy()}, folder / "adapter_model.safetensors"
    )
    config = {"peft_type": "LORA", "r": 8, "base_model_name_or_path": BASE, "target_modules": ["q_proj"]}
    (folder / "adapter_config.json").write_text(json.dumps(config, indent=2))
    (folder / "tokenizer.json").write_text(json.dumps({"model": {"vocab": {"/root": 1, "/home/x/y": 2}}}))
    (folder / "tokenizer_config.json").write_text(json.dumps({"model_max_length": 256, "name_or_path": BASE}))
    (folder / "chat_template.jinja").write_text("{{ '<|im_start|>' }}")
    (folder / "README.md").write_text(
        f"---\nlibrary_name: peft\nbase_model: {BASE}\ndatasets:\n- {DATA}\ntags:\n- base_model:adapter:{BASE}\n"
        f"- lora\n---\n\n# Card\n\nTrained on `{DATA}` from `{BASE}`, written to {folder}.\n"
    )


def write_checkpoint(out: Path, step: int) -> Path:
    """``checkpoint-N`` with what a run needs to go on."""
    folder = out / f"checkpoint-{step}"
    folder.mkdir(parents=True, exist_ok=True)
    write_model(folder, seed=step)
    (folder / "optimizer.pt").write_bytes(np.random.default_rng(step).bytes(70_000))
    (folder / "scheduler.pt").write_bytes(b"PK\0scheduler %d" % step)
    (folder / "rng_state.pth").write_bytes(b"PK\0rng %d" % step)
    state = {"global_step": step, "best_model_checkpoint": str(out / f"checkpoint-{step}")}
    (folder / "trainer_state.json").write_text(json.dumps(state, indent=2))
    (folder / "training_args.bin").write_bytes(f"pickle {out} {TOKEN}".encode())
    manifest.write(folder, run_id="run-1", step=step, status="checkpoint")
    return folder


def names(folder: Path) -> list[str]:
    """Files below a directory, relative, sorted."""
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())


def bytes_of(folder: Path) -> dict[str, bytes]:
    """Every file below a directory."""
    return {name: (folder / name).read_bytes() for name in names(folder)}


def on_hub(hub: LoopbackHub, repo_id: str, revision: str = "main") -> dict[str, bytes]:
    """Every file of a repository, but for the one that the Hub makes itself."""
    files = hub.store.repos[repo_id].files(revision)
    return {path: hub.store.content_of(file) for path, file in files.items() if path != ".gitattributes"}
