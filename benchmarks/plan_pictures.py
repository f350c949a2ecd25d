"""Planned against measured peak memory of trainings with pictures on the simulated card, by the command line.

    python benchmarks/plan_pictures.py MODELS ROWS [--names NAME...] [--cases TEXT...] [--json FILE]

MODELS has image-text models in folders, ROWS is a folder of data. Every run is given its micro-batch, and
``--auto_fit plan`` for the plan's figure; the other figure is the most that the card's allocator held at once, in steps
of 1 MiB. Attention is eager: the simulated card has no kernel of its own for it.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from tests import simcard  # noqa: E402
from tests.e2e.command import CommandServer  # noqa: E402

CHECKPOINTING = ["--gradient_checkpointing", "true"]
KEPT = ["--gradient_checkpointing", "false"]
TOWER = ["--train_vision_tower", "lora", "--train_projector", "lora"]
CASES: dict[str, list[str]] = {
    "LoRA, recomputed": CHECKPOINTING,
    "LoRA, kept": KEPT,
    "LoRA, float32, kept": [*KEPT, "--dtype", "float32", "--bf16", "false"],
    "tower with LoRA, recomputed": [*CHECKPOINTING, *TOWER],
    "tower with LoRA, kept": [*KEPT, *TOWER],
    "tower whole, kept": [*KEPT, "--train_vision_tower", "whole"],
    "QLoRA, recomputed": [*CHECKPOINTING, "--load_in_4bit"],
    "QLoRA, tower with LoRA, kept": [*KEPT, "--load_in_4bit", *TOWER],
    "smaller pictures, kept": [*KEPT, "--max_pixels", "40000"],
}


def longest(server: CommandServer, model: Path, rows: Path) -> int:
    """Tokens of the longest row, for which ``--auto_fit`` then plans."""
    argv = ["--model", str(model), "--dataset", str(rows), "--max_length", "2048", "--json"]
    planned = server.start(*argv, env={"VERB": "plan"}).wait(600)
    return int(json.loads(planned.stdout)["data"]["longest"]) if planned.stdout else 2048


def measured(
    server: CommandServer, model: Path, rows: Path, output: Path, case: str, *, batch: int, length: int
) -> dict[str, Any]:
    """One run: the plan's bytes, the allocator's, and the first over the second."""
    argv = ["--model_name_or_path", str(model), "--dataset_name", str(rows), "--output_dir", str(output)]
    argv += ["--per_device_train_batch_size", str(batch), "--gradient_accumulation_steps", "1", "--auto_fit", "plan"]
    argv += ["--max_steps", "2", "--max_length", str(length), "--attn_implementation", "eager", "--save_strategy", "no"]
    argv += ["--report_to", "none", "--disable_tqdm", "true", "--doctor", "off", *CASES[case]]
    result = server.start(*argv).wait(600)
    row: dict[str, Any] = {"model": model.name, "case": case}
    if result.code:
        return row | {"ended": f"{result.code}: {result.stderr.strip()[-400:]}"}
    report = json.loads((output / "transfer_report.json").read_text())
    planned = report["auto_fit"]["predicted_bytes"]
    peak = report["telemetry"][0]["torch_peak_allocated_gib"] * 2**30
    coverage = report["coverage"]
    row |= {"planned_mib": round(planned / 2**20, 1), "peak_mib": round(peak / 2**20, 1)}
    row |= {"planned_over_peak": round(planned / peak, 4)}
    return row | {"verified": coverage["verified_bytes"] / coverage["device_bytes"]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", type=Path)
    parser.add_argument("rows", type=Path)
    parser.add_argument("--names", nargs="*")
    parser.add_argument("--cases", nargs="*", default=list(CASES))
    parser.add_argument("--batch", type=int, default=2)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    found: list[dict[str, Any]] = []
    models = sorted(path for path in given.models.absolute().iterdir() if (path / "config.json").is_file())
    with tempfile.TemporaryDirectory() as scratch:
        server = CommandServer(Path(scratch) / "server", env=simcard.environment())
        for model in models:
            if given.names and model.name not in given.names:
                continue
            length = longest(server, model, given.rows.absolute())
            for number, case in enumerate(given.cases):
                output = Path(scratch) / f"{model.name}-{number}"
                how = {"batch": given.batch, "length": length}
                found.append(measured(server, model, given.rows.absolute(), output, case, **how))
                print(found[-1], flush=True)
        server.close()
    ratios = [row["planned_over_peak"] for row in found if "planned_over_peak" in row]
    content = json.dumps({"command": "plan_pictures", "lowest": min(ratios), "highest": max(ratios), "rows": found})
    if given.json:
        given.json.write_text(content + "\n")
    print(content)


if __name__ == "__main__":
    main()
