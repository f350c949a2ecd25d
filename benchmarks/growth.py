"""What grows with the work: a job of one step over rows, length and parameters, a checkpoint over rank.

Each point over rows is a whole job of one step (``python -m hf_rocm_tune.sft --max_steps 1``) on a tiny model: with
rows that were never seen before (``anew``: read and tokenised), the same again (``cached``), and streamed. Rows may
cost time only where they are tokenised for the first time, and memory nowhere. Over length and parameters the job (two
rows of full length) should grow in proportion, after what every job costs. A checkpoint's time should follow the size
of the adapter and its optimizer state.

    python benchmarks/growth.py [--rows 1000 ...] [--lengths 128 ...] [--widths 256 ...] [--ranks 8 ...]
                                [--json FILE] [--png FILE]

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

from common import describe  # noqa: E402
from datasets import Dataset  # noqa: E402
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM  # noqa: E402
from trl import SFTConfig  # noqa: E402

from hf_rocm_tune import VerifiedSFTTrainer  # noqa: E402
from tests import tiny  # noqa: E402

WAYS = ("anew", "cached", "streamed")
REPEATS = 5  # of a checkpoint


def write_rows(file: Path, count: int) -> None:
    """Texts of some 150 characters, all different."""
    texts = tiny.training_text()
    with file.open("w", encoding="utf-8") as out:
        for number in range(count):
            out.write(json.dumps({"text": f"{number} {texts[number % len(texts)][:140]}"}) + "\n")


def job(model: Path, data: Path, scratch: Path, *, length: int = 64, streamed: bool = False) -> dict[str, float]:
    """A job of one step: its CPU seconds, seconds and highest memory in MB."""
    flags = {
        "model_name_or_path": model, "dataset_name": data, "output_dir": scratch / "out", "max_steps": 1,
        "per_device_train_batch_size": 2, "max_length": length, "save_strategy": "no", "eval_strategy": "no",
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


def llama(width: int, vocabulary: int) -> LlamaForCausalLM:
    """Eight layers; a seventh of a million parameters a layer at a width of 128, four times that at 256."""
    torch.manual_seed(0)
    sizes = {"hidden_size": width, "intermediate_size": width * 11 // 4, "num_attention_heads": width // 64}
    more = {"num_hidden_layers": 8, "max_position_embeddings": 8192, "use_cache": False}
    return LlamaForCausalLM(LlamaConfig(vocab_size=vocabulary, **sizes, **more))


def over_sizes(widths: list[int], lengths: list[int], tokenizer: Path, scratch: Path) -> list[dict[str, Any]]:
    """A job for each width at the first length, and for each length at the first width."""
    found = []
    words = AutoTokenizer.from_pretrained(tokenizer)
    for width, length in dict.fromkeys([(width, lengths[0]) for width in widths] + [(widths[0], n) for n in lengths]):
        folder, data = scratch / f"width-{width}", scratch / f"length-{length}"
        if not folder.exists():
            llama(width, len(words)).save_pretrained(folder)
            words.save_pretrained(folder)
        data.mkdir(exist_ok=True)
        ids = torch.randint(3, len(words), (2, length), generator=torch.Generator().manual_seed(0)).tolist()
        (data / "train.jsonl").write_text("".join(json.dumps({"input_ids": row}) + "\n" for row in ids))
        parameters = sum(file.stat().st_size for file in folder.glob("*.safetensors")) // 4
        row = {"width": width, "length": length, "parameters": parameters, **job(folder, data, scratch, length=length)}
        print(f"{parameters / 1e6:7.1f} M parameters {length:6} tokens {row['cpu_s']:8.1f} CPU s {row['own_mb']:6} MB")
        found.append(row)
    return found


def over_ranks(ranks: list[int], tokenizer: Path, scratch: Path) -> list[dict[str, Any]]:
    from peft import LoraConfig

    found = []
    words = AutoTokenizer.from_pretrained(tokenizer)
    for rank in ranks:
        model = llama(512, len(words))
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
    """Two rows of plots: CPU seconds above; memory, or megabytes written, below."""
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(2, 4, figsize=(17, 7), layout="constrained")
    sizes, ranks = result["sizes"], result["ranks"]
    narrow, short = sizes[0]["width"], sizes[0]["length"]
    curves: list[tuple[str, str, list[tuple[str, list[dict[str, Any]]]]]] = [
        ("rows", "own_mb", [(way, [row for row in result["rows"] if row["way"] == way]) for way in WAYS]),
        ("length", "own_mb", [(f"width {narrow}", [row for row in sizes if row["width"] == narrow])]),
        ("parameters", "own_mb", [(f"{short} tokens", [row for row in sizes if row["length"] == short])]),
        ("rank", "mb", [("checkpoint", ranks)]),
    ]
    for column, (over, size, lines) in zip(axes.T, curves, strict=True):
        for axis, key, title in zip(column, ("cpu_s", size), ("CPU seconds", "MB"), strict=True):
            for label, points in lines:
                axis.plot([row[over] for row in points], [row[key] for row in points], marker="o", label=label)
            axis.set(xlabel=over, title=title, xscale="log" if over == "rows" else "linear")
            axis.set_ylim(bottom=0)
            axis.legend()
    figure.savefig(file, dpi=90)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, nargs="*", default=[1_000, 10_000, 100_000, 1_000_000])
    parser.add_argument("--lengths", type=int, nargs="+", default=[128, 512, 1024, 2048, 4096])
    parser.add_argument("--widths", type=int, nargs="+", default=[256, 512, 768, 1024])
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
            "sizes": over_sizes(wanted.widths, wanted.lengths, model, scratch),
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
