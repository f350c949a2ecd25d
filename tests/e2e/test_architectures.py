"""LoRA and QLoRA on every architecture, through the command line: what was trained is what was saved."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests import tiny
from tests.e2e.command import CommandServer
from tests.e2e.conftest import flags, report_of

METHODS = ("lora", "qlora")


@pytest.fixture(scope="module")
def trained(
    server: CommandServer, model_of: Callable[[str], Path], messages: Path, scratch: Path
) -> dict[tuple[str, str], Path]:
    """Trains every architecture with both methods; output directories by (architecture, method)."""
    outputs = {}
    for arch in tiny.ARCHITECTURES:
        for method in METHODS:
            output = scratch / "architectures" / f"{arch}-{method}"
            result = server.run(
                *flags(
                    model_name_or_path=model_of(arch),
                    dataset_name=messages,
                    output_dir=output,
                    max_steps=2,
                    per_device_train_batch_size=2,
                    max_length=48,
                    learning_rate=0.01,
                    lora_dropout=0.0,
                    save_strategy="no",
                    disable_tqdm=True,
                ),
                *(["--load_in_4bit"] if method == "qlora" else []),
                env={"DUMP_LOGITS": str(output) + ".logits"},
            )
            assert result.code == 0, (arch, method, result.stderr[-3000:])
            outputs[arch, method] = output
    return outputs


def test_plain_peft_gives_the_same_logits_bit_for_bit(
    trained: dict[tuple[str, str], Path], model_of: Callable[[str], Path]
) -> None:
    jobs = [
        {
            "base": str(model_of(arch)),
            "adapter": str(output),
            "logits": str(output) + ".logits",
            "four_bit": method == "qlora",
        }
        for (arch, method), output in trained.items()
    ]
    finished = subprocess.run(
        [sys.executable, "-m", "tests.e2e.plain_peft"],
        input="".join(json.dumps(job) + "\n" for job in jobs),
        capture_output=True,
        text=True,
        cwd=Path(__file__).parents[2],
        check=False,
    )
    assert finished.returncode == 0, finished.stderr[-3000:]
    answers = [json.loads(line) for line in finished.stdout.splitlines() if line.startswith("{")]
    assert len(answers) == len(jobs)
    for key, answer in zip(trained, answers, strict=True):
        assert answer["our_modules"] == []
        assert answer["equal"], (key, answer["difference"])


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("arch", tiny.ARCHITECTURES)
def test_every_byte_on_the_device_was_verified(
    trained: dict[tuple[str, str], Path], model_of: Callable[[str], Path], arch: str, method: str
) -> None:
    report = report_of(trained[arch, method])
    covered = report["coverage"]
    assert covered["unverified"] == []
    assert covered["verified_bytes"] == covered["device_bytes"] > 0
    # every tensor of the file passed the mover, whatever was fused or quantised from it afterwards
    in_file = sum(path.stat().st_size for path in model_of(arch).glob("*.safetensors"))
    assert report["weights"]["bytes"] > 0.95 * in_file
    assert report["batches"]["tensors"] > 0
    assert report["batches"]["mismatches"] == report["weights"]["mismatches"] == 0
