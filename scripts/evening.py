"""The first evening with a card: `make evening`. Runs the doctor, `make gpu` and a recipe, and packs the results.

    python scripts/evening.py [--out DIRECTORY] [--minutes 10] [--model ID] [--dataset FILE] [--max_steps 50]

A step that fails does not stop the next one. What each printed is kept with the results; one archive has all of it,
without names of users and machines and without local paths, and nothing of the trained rows or weights. Started again,
the recipe continues from its last checkpoint, and the two other steps are run again. Exit code 1 where a step failed.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tarfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from hf_rocm_tune.redaction import Private

ROOT = Path(__file__).resolve().parent.parent
RECIPE = "gemma_1b_lora"  # its settings; with a model that needs no licence
MODEL = "Qwen/Qwen3-0.6B"


class Step(NamedTuple):
    """A step of the evening: its name, its command, and the exit codes that mean that it ran to its end."""

    name: str
    command: list[str]
    accepted: tuple[int, ...] = (0,)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("first-evening"), help="directory of the results")
    parser.add_argument("--minutes", default="10", help="for `make gpu` (default: 10)")
    parser.add_argument("--model", default=MODEL, help="model of the recipe (default: %(default)s)")
    parser.add_argument("--dataset", help="your rows; by default the recipe's conversations, from the Hub")
    parser.add_argument("--max_steps", default="50", help="steps of the recipe (default: 50)")
    wanted = parser.parse_args()
    out: Path = wanted.out
    out.mkdir(parents=True, exist_ok=True)
    failed = []
    for step in steps(wanted):
        code = run(step, out / f"{step.name}.txt")
        if code not in step.accepted:
            failed.append(f"{step.name} (exit code {code})")
    archive = archived(out)
    print(f"\nattach {archive} to an issue; read it before: a program removed names and paths, and may miss one")
    if failed:
        print(f"failed: {', '.join(failed)}: worth as much as a success; add `sudo dmesg | grep -i amdgpu | tail -30`")
    return int(bool(failed))


def steps(wanted: argparse.Namespace) -> list[Step]:
    """What is run, the shortest first."""
    ours, out = [sys.executable, "-m", "hf_rocm_tune"], wanted.out
    recipe = [*ours, "sft", "--config", RECIPE, "--model", wanted.model, "--max_steps", wanted.max_steps]
    recipe += ["--output_dir", str(out / "adapter")]
    recipe += ["--dataset", wanted.dataset] if wanted.dataset else []
    gpu = [sys.executable, str(ROOT / "scripts/gpu.py"), "--minutes", wanted.minutes, "--out", str(out)]
    return [
        Step("doctor", [*ours, "doctor", "--json", str(out / "doctor.json")], accepted=(0, 1, 2)),
        Step("gpu", gpu),
        Step("recipe", recipe),
    ]


def run(step: Step, log: Path) -> int:
    """The step's exit code; what it prints is shown as it comes, and kept."""
    print(f"\n== {step.name}: {' '.join(step.command[1:])}", flush=True)
    began, said = time.monotonic(), []
    with subprocess.Popen(step.command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as child:
        assert child.stdout is not None
        try:
            for line in child.stdout:
                print(line, end="", flush=True)
                said.append(line)
        except KeyboardInterrupt:  # the step has it too, and ends in order: the recipe writes a checkpoint
            sys.stdout.writelines(child.stdout)
            child.wait()
            raise
        code = child.wait()
    said.append(f"exit code {code} after {time.monotonic() - began:.0f} s\n")
    log.write_text("".join(said), encoding="utf-8")
    return code


def archived(out: Path) -> Path:
    """An archive of the results: texts and reports, without rows, weights and checkpoints."""
    report = out / "adapter" / "transfer_report.json"
    if report.exists():
        shutil.copy(report, out)
    archive = out.with_suffix(".tar.gz")
    with tarfile.open(archive, "w:gz") as packing:
        for file in sorted([*out.glob("*.json"), *out.glob("*.txt")]):
            _scrub(file)
            packing.add(file, f"{out.name}/{file.name}", filter=_without_owner)
    return archive


def _scrub(file: Path) -> None:
    """Take names of users and machines, secrets and local paths out of a result."""
    from hf_rocm_tune.redaction import scrub_json, scrub_text

    text = file.read_text(encoding="utf-8")
    if file.suffix == ".json":
        text = json.dumps(scrub_json(json.loads(text), _private()), indent=1) + "\n"
    else:
        text = scrub_text(text, _private())
    file.write_text(text, encoding="utf-8")


def _private() -> Private:
    from hf_rocm_tune.redaction import Private

    return Private.of_this_machine(os.environ, paths={str(ROOT): "."})


def _without_owner(member: tarfile.TarInfo) -> tarfile.TarInfo:
    member.uid = member.gid = 0
    member.uname = member.gname = ""
    return member


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        print("make evening: interrupted; the same command runs it again", file=sys.stderr)
        sys.exit(130)
