"""Which versions of the libraries work: `make drift`. Writes docs/compatibility.md, with date and result of every cell.

    python scripts/drift.py [--only NAME ...] [--torch VERSION] [--cells NAME ...] [--sample] [--directory DIR] [--keep]
    python scripts/drift.py --sources           the seam table against the newest releases, without installing them
    python scripts/drift.py --page              writes the page again from the results that are there

An environment is the Python that runs this, with other versions of some libraries in a directory in front of its own:
the oldest of each, the newest of each, mixtures, and upstream's main branches (``main``, only by name). ``--torch``
puts another torch in front, too. In each of them run: all imports and seams, the tests of the rooms `models` and
`train`, those of experts in 4 bit, and a LoRA and a QLoRA run with injected faults on the simulated card, which is
built against that torch (on a processor nothing crosses). A build of torch for CUDA or ROCm has a card type of its own,
so there these two runs are on the processor, where the same engine serves the batches; it is installed without the
vendor's libraries, and empty ones of their names let it start. ``--sample`` takes some files of
each room. Results are kept in benchmarks/results/compatibility.json by environment, so that one may be run at a time;
each takes about ten minutes on two cores. ``--cells`` runs some of them, and keeps the others if the versions are the
same. torch comes from PyTorch's index of CPU builds where that can be reached, otherwise from the index that pip knows.

Exit code 1 where something failed in an environment that was run.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results" / "compatibility.json"
PAGE = ROOT / "docs" / "compatibility.md"
LIBRARIES = ("transformers", "trl", "peft", "accelerate", "bitsandbytes")
OLDEST = {
    "transformers": "5.19.0",
    "trl": "1.13.0",
    "peft": "0.20.0",
    "accelerate": "1.13.0",
    "bitsandbytes": "0.50.0",
}
MAIN = {
    "transformers": "transformers @ git+https://github.com/huggingface/transformers",
    "trl": "trl @ git+https://github.com/huggingface/trl",
    "peft": "peft @ git+https://github.com/huggingface/peft",
    "accelerate": "accelerate @ git+https://github.com/huggingface/accelerate",
}
#: Environment: requirements of the libraries that are put in front; a name alone is the newest release.
ENVIRONMENTS: dict[str, tuple[str, ...]] = {
    "installed": (),
    "oldest": tuple(f"{name}=={version}" for name, version in OLDEST.items()),
    "newest": LIBRARIES,
    "oldest transformers and accelerate, newest others": (
        f"transformers=={OLDEST['transformers']}",
        f"accelerate=={OLDEST['accelerate']}",
        *("trl", "peft", "bitsandbytes"),
    ),
    "newest transformers and accelerate, oldest others": (
        *("transformers", "accelerate"),
        *(f"{name}=={OLDEST[name]}" for name in ("trl", "peft", "bitsandbytes")),
    ),
    "main": tuple(MAIN.values()),
}
ROOMS = {
    "seams": ("tests/test_upstream.py",),
    "models": ("tests/models",),
    "train": ("tests/train",),
    "experts in 4 bit": ("tests/e2e/test_experts.py",),
}
#: With ``--sample``: what loads, trains, counts, saves and resumes.
SAMPLE = {
    "models": ("tests/models/test_loading.py", "tests/models/test_one_pass_loss.py", "tests/models/test_split.py"),
    "train": ("tests/train/test_mixin.py", "tests/train/test_metrics.py", "tests/train/test_checkpoint.py"),
}
FAULTS = "kind=zero,rate=0.05,seed=7"
RUNS = {"LoRA, faults on a card": (), "QLoRA, faults on a card": ("--load_in_4bit", "true")}
IMPORTS = """
import importlib, json, sys
from hf_rocm_tune import upstream
from hf_rocm_tune.settings import start
import hf_rocm_tune.cards.strategies, hf_rocm_tune.models.experts, hf_rocm_tune.train.trainer as trainer
upstream.check_all()
upstream.check_overrides(trainer.VerifiedSFTTrainer)
for module in ("sft", "dpo", "kto", "orpo", "reward", "grpo"):
    importlib.import_module(f"hf_rocm_tune.{module}")
print("newer than tested:", upstream.untested() or "nothing")
"""
SECONDS = 1800
CPU_BUILDS = "https://download.pytorch.org/whl/cpu"
CELLS = ("imports", *ROOMS, *RUNS)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=list(ENVIRONMENTS), help="try these environments only")
    parser.add_argument("--torch", metavar="VERSION", help="install another torch, with what it requires, in front")
    parser.add_argument("--cells", nargs="+", choices=CELLS, default=CELLS, help="run these cells only")
    parser.add_argument("--sample", action="store_true", help="run some files of each room only")
    parser.add_argument("--directory", type=Path, help="make the environments here (default: a temporary directory)")
    parser.add_argument("--keep", action="store_true", help="leave the environments there")
    parser.add_argument("--sources", action="store_true", help="only the seam table against the newest releases")
    parser.add_argument("--page", action="store_true", help="only write the page")
    wanted = parser.parse_args()
    results: dict[str, Any] = json.loads(RESULTS.read_text(encoding="utf-8")) if RESULTS.exists() else {}
    if wanted.page:
        write(results)
        return 0
    with tempfile.TemporaryDirectory(prefix="hf-rocm-tune-drift-") as scratch:
        directory = wanted.directory or Path(scratch)
        directory.mkdir(parents=True, exist_ok=True)
        results["sources"] = {"date": today(), "rows": sources(directory / "wheels")}
        bad = [row for row in results["sources"]["rows"] if row["result"] != "ok"]
        if not wanted.sources:
            for name in wanted.only or [name for name in ENVIRONMENTS if name != "main"]:
                label = name if wanted.torch is None else f"{name}, torch {wanted.torch}"
                with environment(name, wanted.torch, directory, keep=wanted.keep) as (environ, versions):
                    row = row_of(results, label, versions)
                    for cell in wanted.cells:
                        found = {**run_cell(cell, environ, sample=wanted.sample), "date": today()}
                        row["cells"][cell] = found
                        bad += [found] if found["result"] != "ok" else []
                        print(f"  {cell}: {found['text']}", flush=True)
                        write(results)
        write(results)
    return int(bool(bad))


def today() -> str:
    return datetime.now(UTC).date().isoformat()


# ---- one environment ------------------------------------------------------------------------------------------------


@contextmanager
def environment(
    name: str, torch: str | None, directory: Path, *, keep: bool
) -> Iterator[tuple[Mapping[str, str], dict[str, str]]]:
    """Makes an environment: the variables that select it, and the versions in it."""
    front = directory / re.sub(r"\W+", "-", f"{name} {torch or ''}").strip("-")
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--target", str(front)]
    if ENVIRONMENTS[name] and not front.exists():
        subprocess.run([*pip, "--no-deps", *ENVIRONMENTS[name]], check=True)
    if torch is not None and not (front / "torch").exists():
        cpu_build = [*pip, "--retries", "0", "--timeout", "15", "--index-url", CPU_BUILDS, f"torch=={torch}"]
        if subprocess.run(cpu_build, check=False).returncode:
            subprocess.run([*pip, "--no-deps", f"torch=={torch}"], check=True)
            subprocess.run(
                [sys.executable, ROOT / "scripts" / "empty_libraries.py", front / "torch" / "lib"], check=True
            )
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join([str(front), str(ROOT)]), "TOKENIZERS_PARALLELISM": "false"}
    versions = json.loads(
        subprocess.run(
            [sys.executable, "-c", f"import json; from importlib.metadata import version as v; print(json.dumps("
             f"{{name: v(name) for name in {('torch', *LIBRARIES)!r}}}))"],
            env=environ, capture_output=True, text=True, check=True,
        ).stdout
    )  # fmt: skip
    print(f"{name}: {', '.join(f'{library} {version}' for library, version in versions.items())}", flush=True)
    try:
        yield environ, versions
    finally:
        if not keep:
            shutil.rmtree(front, ignore_errors=True)


def row_of(results: dict[str, Any], label: str, versions: dict[str, str]) -> dict[str, Any]:
    """The environment's row in the results, of today; cells of other versions are dropped from it."""
    rows: dict[str, Any] = results.setdefault("environments", {})
    kept = rows.get(label, {})
    cells = kept["cells"] if kept.get("versions") == versions else {}
    cells = {name: {"date": kept["date"], **cell} for name, cell in cells.items()}
    rows[label] = {"date": today(), "python": platform.python_version(), "versions": versions, "cells": cells}
    row: dict[str, Any] = rows[label]
    return row


def run_cell(cell: str, environ: Mapping[str, str], *, sample: bool) -> dict[str, Any]:
    """One cell of an environment."""
    if cell == "imports":
        return of_imports(environ)
    if cell in RUNS:
        return of_faults(RUNS[cell], environ)
    part = SAMPLE.get(cell) if sample else None
    found = of_tests(part or ROOMS[cell], environ)
    if part is not None:
        found["text"] += f" (of {', '.join(Path(one).stem for one in part)})"
    return found


def of_imports(environ: Mapping[str, str]) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", IMPORTS],
        env=environ, capture_output=True, text=True, cwd=ROOT, check=False,
    )  # fmt: skip
    if done.returncode:
        return failed(last_line(done.stderr))
    return {"result": "ok", "text": last_line(done.stdout)}


def of_tests(files: tuple[str, ...], environ: Mapping[str, str]) -> dict[str, Any]:
    """The tests of some files; a test that compares with the tested versions fails with others, and is left out."""
    left_out = "not test_the_installed_versions_are_tested_ones"
    command = [sys.executable, "-m", "pytest", "-q", "-n", "2", "--dist", "loadfile", "-k", left_out, *files]
    began = time.monotonic()
    try:
        done = subprocess.run(
            command, env=environ, capture_output=True, text=True, cwd=ROOT, check=False, timeout=SECONDS
        )
    except subprocess.TimeoutExpired:
        return failed(f"no end within {SECONDS} s")
    names = re.findall(r"^(?:FAILED|ERROR) (.+?)(?: - (.*))?$", done.stdout, re.MULTILINE)
    text = re.sub(r" in [0-9.]+s.*$", "", last_line(done.stdout)).strip("= ")
    cell: dict[str, Any] = {"result": "ok" if done.returncode == 0 else "failed", "text": text}
    cell["seconds"] = round(time.monotonic() - began)
    if names:
        cell["failures"] = [f"{test}: {why}"[:300] for test, why in names]
    return cell


def of_faults(flags: tuple[str, ...], environ: Mapping[str, str]) -> dict[str, Any]:
    """A clean run on the simulated card and one with injected faults, whose adapter must be the same."""
    program = [sys.executable, "-c", CARD, str(ROOT), FAULTS, *flags]
    done = subprocess.run(program, env=environ, capture_output=True, text=True, cwd=ROOT, check=False, timeout=SECONDS)
    if done.returncode:
        return failed(last_line(done.stderr or done.stdout))
    cell: dict[str, Any] = json.loads(last_line(done.stdout))
    return cell


CARD = """
import json, os, subprocess, sys, tempfile
from pathlib import Path
root, faults, *flags = sys.argv[1:]
sys.path.insert(0, root)
import torch
for_cards = bool(torch.version.cuda or torch.version.hip)  # the simulated card needs a CPU build
from safetensors.torch import load_file
from tests import simcard, tiny
environ = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_ROCM_TUNE_QUIET": "1"}
environ |= {} if for_cards else simcard.environment()
with tempfile.TemporaryDirectory() as made:
    place = Path(made)
    model, data = tiny.build("llama3", place / "models"), tiny.write_dataset_dir(place / "data", train=24, test=2)
    common = [sys.executable, "-m", "hf_rocm_tune.sft", "--model_name_or_path", str(model), "--dataset_name", str(data)]
    common += ["--max_steps", "4", "--per_device_train_batch_size", "2", "--max_length", "64", "--doctor", "off"]
    common += ["--lora_dropout", "0", "--eval_strategy", "no", "--save_steps", "2", *flags]
    reports, adapters = [], []
    for name, fault in (("clean", None), ("faults", faults)):
        more = {} if fault is None else {"HF_ROCM_TUNE_FAULT": fault}
        out = place / name
        command = [*common, "--output_dir", str(out)]
        done = subprocess.run(command, env={**environ, **more}, capture_output=True, text=True)
        if done.returncode:
            sys.exit(f"{name}: exit code {done.returncode}: {(done.stderr.strip().splitlines() or ['nothing'])[-1]}")
        reports.append(json.loads((out / "transfer_report.json").read_text()))
        adapters.append(load_file(out / "adapter_model.safetensors"))
stages = ("weights", "batches", "frozen", "files")
found, mended = (sum(reports[1][stage].get(key, 0) for stage in stages) for key in ("mismatches", "recovered"))
same = all(torch.equal(value, adapters[1][key]) for key, value in adapters[0].items())
coverage = [report["coverage"]["verified_bytes"] / report["coverage"]["device_bytes"] for report in reports]
adapter = "the same adapter" if same else "another adapter"
where = " (on the processor: a build for cards)" if for_cards else ""
text = f"{found} faults found, {mended} recovered, {adapter}, {100 * min(coverage):g} % verified{where}"
right = same and found > 0 and found == mended and min(coverage) == 1
print(json.dumps({"result": "ok" if right else "failed", "text": text}))
"""


def failed(text: str) -> dict[str, Any]:
    return {"result": "failed", "text": text[:300]}


def last_line(text: str) -> str:
    return (text.strip().splitlines() or ["nothing was printed"])[-1]


# ---- the seam table against sources ---------------------------------------------------------------------------------


def sources(wheels: Path) -> list[dict[str, str]]:
    """Every row of the seam table looked up in the newest releases' wheels, which are read and not installed."""
    sys.path.insert(0, str(ROOT))
    from hf_rocm_tune.upstream import SEAMS

    releases = {name: release(name, wheels) for name in LIBRARIES}
    rows = []
    for seam in SEAMS:
        library = seam.module.partition(".")[0]
        if library not in releases or seam.kind == "read":
            continue  # torch's wheel has gigabytes, attributes are of objects: tests look for them as installed
        files, version = releases[library]
        found = parameters(files, seam.module, seam.attribute)
        if found is None:
            result = f"{seam.module}.{seam.attribute} is missing"
        elif found and tuple(found[: len(seam.parameters)]) != seam.parameters:
            result = f"its parameters are {', '.join(found)}, expected {', '.join(seam.parameters)} first"
        else:
            result = "ok"
        rows.append({"seam": seam.name, "library": library, "version": version, "result": result})
    return rows


def release(name: str, wheels: Path) -> tuple[Mapping[str, str], str]:
    """The Python files of a library's newest release by path, and its version."""
    target = wheels / name
    if not target.exists():
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(target), name]
        subprocess.run(command, check=True)
    (wheel,) = target.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = [one for one in archive.namelist() if one.endswith(".py")]
        return {one: archive.read(one).decode("utf-8") for one in names}, wheel.name.split("-")[1]


def parameters(files: Mapping[str, str], module: str, attribute: str) -> list[str] | None:
    """The parameters of a function or method; empty for a class, a value, or what is imported; None: it is missing."""
    path = module.replace(".", "/")
    text = files.get(f"{path}.py") or files.get(f"{path}/__init__.py")
    if text is None:
        return None
    scope: list[ast.stmt] = ast.parse(text).body
    *classes, last = attribute.split(".")
    for name in classes:
        owner = next(
            (node for node in definitions(scope) if isinstance(node, ast.ClassDef) and node.name == name), None
        )
        if owner is None:
            return None
        if not any(getattr(node, "name", None) == last for node in owner.body) and owner.bases:
            return []  # a base may define it, which the installed seam tests decide
        scope = owner.body
    for node in definitions(scope):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) and node.name == last:
            return [one.arg for one in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)]
        if isinstance(node, (ast.Import, ast.ImportFrom)) and any(
            (one.asname or one.name) == last for one in node.names
        ):
            return []
        if isinstance(node, ast.ClassDef) and node.name == last:
            return []
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        if any(isinstance(one, ast.Name) and one.id == last for one in targets):
            return []
    return None


def definitions(scope: list[ast.stmt]) -> Iterator[ast.stmt]:
    """The statements of a module or class, those under its conditions too."""
    for node in scope:
        yield node
        for part in ("body", "orelse", "handlers", "finalbody"):
            if isinstance(node, (ast.If, ast.Try)):
                for inner in getattr(node, part, []):
                    yield from definitions(inner.body if isinstance(inner, ast.ExceptHandler) else [inner])


# ---- the page -------------------------------------------------------------------------------------------------------


def write(results: dict[str, Any]) -> None:
    RESULTS.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    PAGE.write_text(page(results), encoding="utf-8")


INTRODUCTION = """\
# Versions

Written by `make drift` (`scripts/drift.py`) from what ran, on a processor and on the simulated card. A run names the
installed libraries that are newer than the tested ones; a private place that has moved is one line, before the first
step, that names it.

A ceiling is raised when `make drift` is green with the new release: first `TESTED` in `hf_rocm_tune/upstream.py`, then
this page. TRL 1.15 is left out: its loss needs Triton on every device. With TRL below 1.15 `--one_pass_loss` is off and
losses agree with those of TRL 1.16 to 3e-5, not to the bit: it is TRL's own loss.

Builds of torch for CUDA (those of 2.10, 2.11, 2.14 and 2.15 here) ran on a processor, with empty libraries in place
of CUDA's (`scripts/empty_libraries.py`): the runs with faults are on the processor there.

With one library varied at a time and the others as tested (by hand, 2026-11-28, a CPU, up to ten runs each): torch
2.10.0 and 2.14.1, accelerate 1.13.0 and 1.14.0, bitsandbytes 0.50.0, PEFT 0.20.0, transformers 5.19.0 and 5.24.0 gave
the same bits. What the failures below mean for a run:

- `past_key_values` is deprecated in transformers 5.24 and used by PEFT's prefix tuning: a warning, an error in tests
  only; 5.40 removes it.
- With TRL below 1.15 `plan` assumes the fused head: it predicts more memory than the loss takes.
- With the oldest transformers a layer ran its hooks again when it was recomputed: a tensor crossed twice between two
  cards, and micro-batches side by side differed from one after the other. Layers of a split now recompute their
  `forward` only, and both tests pass there (2026-11-28).
- The failed seam with torch 2.15 expected no other library to be newer; it is mended, and was not run again there.
- TRL below 1.15 draws an adapter's first weights before it sets its seed: two trainers in one process begin alike only
  if the seed is set before each. A test did not (`test_a_loss_that_is_not_finite_is_logged_as_upstream_does`), and was
  taken for another loss until 2026-11-29; mended, it passes with TRL 1.13.
- With the oldest versions a rotary table that follows the length is reported in other words.
"""


def page(results: dict[str, Any]) -> str:
    """docs/compatibility.md: what is wanted, and a table of what ran."""
    names = ("torch", *LIBRARIES)
    found = results.get("environments", {})
    cells = list(dict.fromkeys(cell for one in found.values() for cell in one["cells"]))
    lines = [INTRODUCTION]
    if found:
        lines += ["## Versions tried together", "", f"| environment | date | Python | {' | '.join(names)} |"]
        lines += ["|" + "---|" * (3 + len(names))]
        for label, one in found.items():
            versions = " | ".join(one["versions"][name].partition("+")[0] for name in names)
            lines.append(f"| {label} | {one['date']} | {one['python']} | {versions} |")
        lines += [
            "",
            "## What ran in each",
            "",
            f"| environment | {' | '.join(cells)} |",
            "|" + "---|" * (1 + len(cells)),
        ]
        for label, one in found.items():
            row = (one["cells"].get(cell) for cell in cells)
            shown = ("not run" if cell is None else _shown(cell, one["date"]) for cell in row)
            lines.append(f"| {label} | {' | '.join(shown)} |")
        failures = {label: [line for cell in one["cells"].values() for line in cell.get("failures", ())]
                    for label, one in found.items()}  # fmt: skip
        for label, said in failures.items():
            if said:
                lines += ["", f"Failed in {label}:", ""]
                lines += [f"- `{line.strip().rstrip(':')}`" for line in said]
    if stated := results.get("sources"):
        bad = [row for row in stated["rows"] if row["result"] != "ok"]
        versions = ", ".join(dict.fromkeys(f"{row['library']} {row['version']}" for row in stated["rows"]))
        lines += ["", "## The seam table against the newest releases", "",
                  f"{stated['date']}: {len(stated['rows']) - len(bad)} of {len(stated['rows'])} rows resolve in the "
                  f"sources of {versions}."]  # fmt: skip
        lines += [f"- `{row['seam']}` ({row['library']} {row['version']}): {row['result']}" for row in bad]
    return "\n".join(lines) + "\n"


def _shown(cell: Mapping[str, Any], date: str) -> str:
    """A cell's text, with its date where it is not that of the row."""
    ran = cell.get("date", date)
    return cell["text"].replace("|", "/") + (f" ({ran})" if ran != date else "")


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        print("make drift: interrupted; what ran is on the page", file=sys.stderr)
        sys.exit(130)
    except subprocess.CalledProcessError as error:
        print(f"make drift: `{' '.join(map(str, error.cmd))[:200]}` failed", file=sys.stderr)
        sys.exit(2)
