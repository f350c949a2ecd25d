"""Runs as they lie in a directory, made by hand: whole ones, and a report with everything that a report can hold."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from hf_rocm_tune.publish.history import LOG_NAME, REPORT_NAME, Run, write_log
from hf_rocm_tune.survive import manifest

RUN_ID = "20260101-000000-0badcafe"
TRAINED: dict[str, Any] = {
    "method": "LoRA, r=16, alpha=32",
    "model_class": "LlamaForCausalLM",
    "trainable": 100,
    "parameters": 1000,
    "dtype": "bfloat16",
    "adapter_dtype": "float32",
    "quantization": None,
    "resized_to": None,
    "chat_template": True,
    "packed_experts": False,
}
SETTINGS: dict[str, Any] = {
    "model_name_or_path": "org/base",
    "dataset_name": "org/rows",
    "learning_rate": 2e-4,
    "per_device_train_batch_size": 2,
    "gradient_accumulation_steps": 4,
    "world_size": 2,
    "max_steps": -1,
    "num_train_epochs": 3.0,
    "lora_r": 16,
    "use_peft": True,
    "packing": False,
    "seed": 42,
}


def stage(**changed: Any) -> dict[str, Any]:
    """Counters of one stage."""
    usual = {"tensors": 10, "bytes": 4000, "verified_bytes": 4000, "mismatches": 0, "recovered": 0}
    return {**usual, "seconds": 0.1, "gb_per_s": 0.01, **changed}


def report(**changed: Any) -> dict[str, Any]:
    """A transfer report of a run in which nothing went wrong."""
    nothing = {"mismatches": 0, "recovered": 0}
    return {
        "schema": 1,
        "run_id": RUN_ID,
        "verify": "full",
        "fault_injection": None,
        "step_fault_injection": None,
        "device": {"type": "hip", "name": "AMD Radeon RX 7900 XT", "memory_bytes": 21458059264, "arch": "gfx1100"},
        "digest": {"host": {"name": "native", "reason": "compiled"}, "device": {"name": "triton", "reason": ""}},
        "ranks": 1,
        "versions": {"python": "3.11.7", "torch": "2.13.0", "hip": None},
        "coverage": {"verified_bytes": 8000, "device_bytes": 8000, "unverified": []},
        "weights": {**stage(), "load_seconds": 1.5, "attested_files": 2, "not_attested": []},
        "batches": {**stage(), "verify_share_of_step": 0.004},
        "adapter": stage(tensors=0, bytes=0, verified_bytes=0),
        "optimizer": stage(tensors=0, bytes=0, verified_bytes=0),
        "casts": {"checked": 0, **nothing},
        "gradients": {"buckets": 0, **nothing},
        "frozen": {"passes": 3, "tensors": 20, "mismatches": 0},
        "replicas": {"checks": 0, "mismatches": 0},
        "files": {"verified": 4, "mismatches": 0},
        "memory": {"shortages": 0, "recovered": 0, "steps_down": True, "micro_batch_divisor": 1},
        "guard": {"skipped_steps": 0, "warnings": 0},
        "incidents": [],
        "events": {},
        "survival": {"supervised": False, "starts": 1, "ends": [], "skipped_steps": [], "crash_injection": None},
        "findings": [],
        "telemetry": [],
        **changed,
    }


def incident(**changed: Any) -> dict[str, Any]:
    """One transfer that arrived wrong and was sent again."""
    return {
        "step": 2,
        "stage": "batches",
        "tensor": "input_ids",
        "kind": "zeros",
        "first_offset": 64,
        "length": 1024,
        "causes": ["fresh mapping visible late"],
        "retry": "fresh_slot",
        "outcome": "recovered",
        **changed,
    }


def spoiled(value: Any, hostile: str) -> Any:
    """A JSON value with every string and key replaced by a hostile one, beside the ones that are looked for."""
    if isinstance(value, str):
        return hostile
    if isinstance(value, dict):
        return {key: spoiled(one, hostile) for key, one in value.items()} | {hostile: hostile}
    return [spoiled(one, hostile) for one in value] if isinstance(value, list) else value


def rows(count: int = 6) -> list[dict[str, Any]]:
    """A log with evaluations."""
    logged: list[dict[str, Any]] = [
        {"step": step, "epoch": step / count, "loss": 3.0 / step, "learning_rate": 1e-4, "num_tokens": 100.0 * step}
        | {"speed/seconds_per_step": 15.0}
        for step in range(1, count + 1)
    ]
    logged += [{"step": count, "samples": [{"prompt": "What is a sum?", "text": "A number."}]}]
    return [*logged, {"step": count, "eval_loss": 0.75}, {"step": count, "train_loss": 1.0}]


def run(**changed: Any) -> Run:
    """A finished run."""
    usual = {"rows": rows(), "step": 6, "max_steps": 6, "trained": TRAINED, "settings": SETTINGS, "report": report()}
    return Run(**{"directory": Path("my-adapter"), "run_id": RUN_ID, "finished": True, **usual, **changed})


def write_run(directory: Path, *, finished: bool = True, **changed: Any) -> Path:
    """A run with its files; ``changed`` goes into the report."""
    directory.mkdir(parents=True)
    record = {"schema": 1, "run_id": RUN_ID, "settings": SETTINGS, "status": "finished" if finished else "running"}
    (directory / "run.json").write_text(json.dumps(record))
    (directory / REPORT_NAME).write_text(json.dumps(report(**changed)))
    write_log(run(directory=directory))
    (directory / "adapter_config.json").write_text("{}")
    (directory / "README.md").write_text("# a card\n")
    if finished:
        files = [REPORT_NAME, LOG_NAME, "adapter_config.json", "README.md"]
        manifest.write(directory, run_id=RUN_ID, step=6, status="final", files=files)
    return directory
