"""What grows with the work: CPU seconds and memory of a first step over rows, CPU seconds of a checkpoint over rank.

Each point over rows is a whole job of one step (``python -m hf_rocm_tune.sft --max_steps 1``) on a tiny model: with
rows that were never seen before (``anew``: read and tokenised), the same again (``cached``), and streamed. Rows may
cost time only where they are tokenised for the first time, and memory nowhere. A checkpoint's time should follow the
size of the adapter and its optimizer state.

    python benchmarks/growth.py [--rows 1000 10000 100000 1000000] [--ranks 8 32 128 512] [--json FILE] [--png FILE]

Prints a table and, as the last line, one JSON object. CPU seconds are those of the job and its children, whatever else
the machine does; memory is what the job holds of its own at its highest, in brackets with pages of mapped files, which
the kernel takes back where memory is short.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from datasets import Dataset  # noqa: E402
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM  # noqa: E402
from trl import SFTConfig  # noqa: E402

from hf_rocm_tune import VerifiedSFTTrainer  # noqa: E402
from hf_rocm_tune.bench.report import describe  # noqa: E402
from tests import tiny  # noqa: E402

WAYS = ("anew", "cached", "streamed")
REPEATS = 5  # of a checkpoint


def write_rows(file: Path, count: int) -> None:
    """Texts of some 150 characters, all different."""
    texts = tiny.training_text()
    with file.open("w", encoding="utf-8") as out:
        for number in range(count):
            out.write(json.dumps({"text": f"{number} {texts[number % len(texts)][:140]}"}) + "\n")


def job(model: Path, data: Path, scratch: Path, *, streamed: bool) -> dict[str, float]:
    """A job of one step: its CPU seconds, seconds and highest memory in MB."""
    flags = {
        "model_name_or_path": model, "dataset_name": data, "output_dir": scratch / "out", "max_steps": 1,
        "per_device_train_batch_size": 2, "max_length": 64, "save_strategy": "no", "eval_strategy": "no",
        "doctor": "off", "disable_tqdm": "true", "overwrite_output_dir": "true", "bf16": "false",
        "dataset_streaming": str(streamed).lower(),
    }  # fmt: skip
    command = [sys.executable, "-m", "hf_rocm_tune.sft", *(f"--{name}={value}" for name, value in flags.items())]
    environment = {**os.environ, "HF_HOME": str(scratch / "cache"), "HF_HUB_OFFLINE": "1", "PYTHONPATH": str(ROOT)}
    begun = time.perf_counter()
    with (scratch / "log").open("w") as log:
        child = subprocess.Popen(command, env=environment, stdout=log, stderr=subprocess.STDOUT)
        own, ended = 0, 0
        while not ended:
            time.sleep(0.1)
            own = max(own, anonymous_kb(child.pid))
            ended, status, used = os.wait4(child.pid, os.WNOHANG)
    if status:
        raise SystemExit((scratch / "log").read_text()[-3000:])
    seconds = time.perf_counter() - begun
    return {
        "cpu_s": round(used.ru_utime + used.ru_stime, 2),
        "wall_s": round(seconds, 2),
        "rss_mb": round(used.ru_maxrss / 1e3),
        "own_mb": round(own / 1e3),
    }


def anonymous_kb(process: int) -> int:
    """Memory of its own that a process holds: not pages of files, which the kernel may take back at any time."""
    with suppress(OSError):
        for line in Path(f"/proc/{process}/status").read_text().splitlines():
            if line.startswith("RssAnon:"):
                return int(line.split()[1])
    return 0


def over_rows(counts: list[int], model: Path, scratch: Path) -> list[dict[str, Any]]:
    found = []
    for count in counts:
        data = scratch / f"rows-{count}"
        data.mkdir()
        write_rows(data / "train.jsonl", count)
        for way in WAYS:
            row = {"rows": count, "way": way, **job(model, data, scratch, streamed=way == "streamed")}
            print(
                f"{count:9,} rows {way:9} {row['cpu_s']:8.1f} CPU s {row['own_mb']:6} MB ({row['rss_mb']})", flush=True
            )
            found.append(row)
    return found


def over_ranks(ranks: list[int], tokenizer: Path, scratch: Path) -> list[dict[str, Any]]:
    from peft import LoraConfig

    found = []
    words = AutoTokenizer.from_pretrained(tokenizer)
    for rank in ranks:
        torch.manual_seed(0)
        sizes = {"hidden_size": 512, "intermediate_size": 1408, "num_hidden_layers": 8, "num_attention_heads": 8}
        model = LlamaForCausalLM(LlamaConfig(vocab_size=len(words), use_cache=False, **sizes))
        more = {"max_steps": 1, "per_device_train_batch_size": 1, "report_to": "none", "bf16": False, "use_cpu": True}
        args = SFTConfig(output_dir=str(scratch / f"rank-{rank}"), save_strategy="no", disable_tqdm=True, **more)
        trainer = VerifiedSFTTrainer(
            model=model,
            args=args,
            train_dataset=Dataset.from_list([{"text": "a few words"}] * 2),
            processing_class=words,
            peft_config=LoraConfig(r=rank, target_modules="all-linear", task_type="CAUSAL_LM"),
        )
        trainer.train()
        seconds = []
        for _ in range(REPEATS):
            trainer.state.global_step += 1
            begun = time.process_time()
            trainer._save_checkpoint(trainer.model, None)
            seconds.append(time.process_time() - begun)
        last = scratch / f"rank-{rank}" / f"checkpoint-{trainer.state.global_step}"
        size = sum(file.stat().st_size for file in last.iterdir())
        found.append({"rank": rank, "mb": round(size / 1e6, 1), "cpu_s": round(statistics.median(seconds), 3)})
        print(f"rank {rank:4} {size / 1e6:8.1f} MB a checkpoint {found[-1]['cpu_s']:8.2f} CPU s", flush=True)
    return found


def draw(result: dict[str, Any], file: Path) -> None:
    import matplotlib.pyplot as plt

    figure, (time_axis, memory_axis, checkpoint_axis) = plt.subplots(1, 3, figsize=(14, 4), layout="constrained")
    for way in WAYS:
        rows = [row for row in result["rows"] if row["way"] == way]
        for axis, key in ((time_axis, "cpu_s"), (memory_axis, "own_mb")):
            axis.plot([row["rows"] for row in rows], [row[key] for row in rows], marker="o", label=way)
    for axis, title in (
        (time_axis, "CPU seconds of a job of one step"),
        (memory_axis, "highest memory of its own, MB"),
    ):
        axis.set(xscale="log", xlabel="rows", title=title)
        axis.set_ylim(bottom=0)
        axis.legend()
    points = result["ranks"]
    checkpoint_axis.plot([row["mb"] for row in points], [row["cpu_s"] for row in points], marker="o")
    for row in points:
        checkpoint_axis.annotate(f"rank {row['rank']}", (row["mb"], row["cpu_s"]))
    checkpoint_axis.set(xlabel="MB of a checkpoint", title="CPU seconds of a checkpoint")
    checkpoint_axis.set_ylim(bottom=0)
    figure.savefig(file, dpi=100)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, nargs="*", default=[1_000, 10_000, 100_000, 1_000_000])
    parser.add_argument("--ranks", type=int, nargs="*", default=[8, 32, 128, 512])
    parser.add_argument("--json", type=Path)
    parser.add_argument("--png", type=Path)
    wanted = parser.parse_args()
    machine = describe(torch.device("cpu"))
    with tempfile.TemporaryDirectory() as made:
        scratch = Path(made)
        model = tiny.build("llama3", scratch / "model")
        result = {
            "benchmark": "growth",
            "machine": machine,
            "rows": over_rows(wanted.rows, model, scratch),
            "ranks": over_ranks(wanted.ranks, model, scratch),
        }
    if wanted.png:
        draw(result, wanted.png)
    line = json.dumps(result)
    if wanted.json:
        wanted.json.write_text(line + "\n", encoding="utf-8")
    print(line)


if __name__ == "__main__":
    main()
