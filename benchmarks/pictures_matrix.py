"""Sets of rows with pictures, good and bad, by the command line: dry run, plan and run of each.

    python benchmarks/pictures_matrix.py MODELS ROWS [--tree TREE] [--json FILE] [--texts FOLDER]

MODELS has image-text models in folders, ROWS has data sets in folders. Every set is given to the first model of
``--model``; the sets of ``--every`` to each model. ``--tree`` is a checkout whose command is run (default: this
one), so that an earlier commit can be put beside. All that commands print goes to ``--texts``.
Where no torchvision fits torch, its Python part with declared but empty operators will do: processors use only that.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

PHASES = ("dry run", "plan", "run")


def flags_of(phase: str, model: Path, rows: Path, output: Path) -> tuple[dict[str, str], list[str]]:
    """Variables and arguments of one command."""
    method = "dpo" if rows.name == "dpo" else "sft"
    common = ["--model_name_or_path", str(model), "--max_length", "512", "--per_device_train_batch_size", "2"]
    if phase == "plan":
        env = {"VERB": "plan"}
        return env, ["--model", str(model), "--dataset", str(rows), "--max_length", "512", "--trainer", method]
    argv = [*common, "--dataset_name", str(rows), "--output_dir", str(output), "--report_to", "none"]
    argv += ["--lora_target_modules", "all-linear"] if os.environ.get("ALL_LINEAR") else []
    if phase == "dry run":
        return {"METHOD": method}, [*argv, "--dry_run", "text"]
    steps = ["--max_steps", "2", "--logging_steps", "1", "--save_strategy", "no", "--disable_tqdm", "True"]
    return {"METHOD": method}, [*argv, *steps]


def verdict(code: int, said: str) -> str:
    """One line for the table."""
    errors = re.findall(r"^hf-rocm-tune: (?:\[rank \d+\] )?error: (.*)$", said, re.M)
    if "Traceback (most recent call last)" in said:
        last = [
            line for line in said.strip().splitlines() if re.match(r"\w+(\.\w+)*(Error|Exception|Iteration)\b", line)
        ]
        return f"traceback: {(last or said.strip().splitlines())[-1][:110]}"
    if code:
        return f"{code}: {errors[-1] if errors else (said.strip().splitlines() or ['?'])[-1]}"
    return "0"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", type=Path)
    parser.add_argument("rows", type=Path)
    parser.add_argument("--tree", type=Path, default=Path(__file__).resolve().parent.parent)
    parser.add_argument("--model", default="qwen3_vl")
    parser.add_argument("--every", nargs="*", default=["single", "mixed"])
    parser.add_argument("--sets", nargs="*")
    parser.add_argument("--phases", nargs="*", default=list(PHASES))
    parser.add_argument("--json", type=Path)
    parser.add_argument("--texts", type=Path)
    given = parser.parse_args()
    given.models, given.rows = given.models.absolute(), given.rows.absolute()
    sys.path.insert(0, str(given.tree))
    from tests.e2e.command import CommandServer

    models = sorted(path for path in given.models.iterdir() if (path / "config.json").is_file())
    sets = sorted(path for path in given.rows.iterdir() if any(path.glob("train.*")))
    cells = [(given.models / given.model, each) for each in sets if not given.sets or each.name in given.sets]
    cells += [(model, given.rows / name) for name in given.every for model in models if model.name != given.model]
    found: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as scratch:
        server = CommandServer(Path(scratch))
        for number, (model, rows) in enumerate(cells):
            row: dict[str, Any] = {"model": model.name, "rows": rows.name}
            for phase in given.phases:
                env, argv = flags_of(phase, model, rows, Path(scratch) / f"out{number}")
                begun = time.monotonic()
                result = server.start(*argv, env=env).wait(timeout=600)
                said = result.stderr + result.stdout
                row[phase] = verdict(result.code, said)
                if given.texts:
                    given.texts.mkdir(parents=True, exist_ok=True)
                    text = f"{result.stderr}\n---- standard output, code {result.code}\n{result.stdout}"
                    text = text.replace(str(given.rows), "ROWS").replace(str(given.models), "MODELS")
                    (given.texts / f"{model.name}-{rows.name}-{phase.replace(' ', '_')}.txt").write_text(text)
                row[f"{phase} seconds"] = round(time.monotonic() - begun, 1)
            found.append(row)
            told = " | ".join(str(row[phase]) for phase in given.phases).replace(str(given.rows), "ROWS")
            print(f"| {row['model']} | {row['rows']} | {told} |", flush=True)
            content = json.dumps({"command": "pictures_matrix", "cells": found}).replace(str(given.rows), "ROWS")
            if given.json:
                given.json.write_text(content.replace(str(given.models), "MODELS") + "\n")
        server.close()


if __name__ == "__main__":
    main()
