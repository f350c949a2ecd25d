"""Runs every data file of a directory through the command line, as a dry run and as a run of one step.

    python scripts/row_cases.py DIRECTORY results.json            # all cases
    python scripts/row_cases.py --table before.json after.json    # a Markdown table of two results

The method follows from the file's name: ``dpo_*`` is trained with `dpo`, ``kto_*`` with `kto`, all others with `sft`.
The model is `tests/tiny.py`'s Llama, whose chat template is ChatML with marks.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from tests import tiny
from tests.e2e.command import CommandServer, Result
from tests.e2e.conftest import flags

WORKERS = 2


def method_of(case: str) -> str:
    prefix = case.partition("_")[0]
    return prefix if prefix in ("dpo", "kto") else "sft"


def said(result: Result, room: Path, cases: Path) -> list[str]:
    """What concerns the rows among the lines of a command, without paths of this machine."""
    text = (result.stdout + "\n" + result.stderr).replace(f"{cases}/", "").replace(f"{room}/", "")
    lines = [line.removeprefix("hf-rocm-tune: ") for line in text.splitlines()]
    return [line for line in lines if "rows" in line or "row " in line or "error" in line or "warning" in line][:8]


def outcome(result: Result) -> str:
    if "Traceback" in result.stderr:
        return "traceback"
    return {0: "accepted", 2: "refused"}.get(result.code, f"exit {result.code}")


def measure(cases: Path, room: Path, only: set[str]) -> dict[str, Any]:
    model = tiny.build("llama3", room / "models")
    names = sorted(path.name for path in cases.iterdir() if not only or path.name in only)
    servers = [CommandServer(room / f"server{number}") for number in range(WORKERS)]

    def run(case: str, server: CommandServer) -> tuple[str, dict[str, Any]]:
        method = method_of(case)
        out = room / "out" / case
        shared = {
            "model_name_or_path": model,
            "dataset_name": cases / case,
            "output_dir": out,
            "max_steps": 1,
            "max_length": 256,
            "per_device_train_batch_size": 2,
            "save_strategy": "no",
            "disable_tqdm": True,
            "doctor": "off",
        }
        env = {} if method == "sft" else {"METHOD": method}
        dry = server.run(*flags(**shared), "--dry_run", "json", env=env, cwd=room)
        run = server.run(*flags(**shared), env=env, cwd=room)
        shown = json.loads(dry.stdout) if dry.code == 0 and dry.stdout.startswith("{") else {}
        report = out / "transfer_report.json"
        data = json.loads(report.read_text())["data"] if run.code == 0 and report.is_file() else []
        return case, {
            "method": method,
            "dry": outcome(dry),
            "run": outcome(run),
            "agree": outcome(dry) == outcome(run) and shown.get("summaries", []) == data,
            "data": data,
            "dry_said": said(dry, room, cases),
            "run_said": said(run, room, cases),
        }

    with ThreadPoolExecutor(WORKERS) as pool:
        parts = [names[number::WORKERS] for number in range(WORKERS)]
        done = pool.map(lambda part: [run(case, part[1]) for case in part[0]], zip(parts, servers, strict=True))
        results = dict(sorted(case for part in done for case in part))
    for server in servers:
        server.close()
    return results


def table(before: dict[str, Any], after: dict[str, Any]) -> str:
    """The cases with what a dry run and a run did, and the run's lines about the rows."""
    rows = ["| case | method | before: dry, run | after: dry, run | what the run says after |", "|---|---|---|---|---|"]
    for case, new in after.items():
        old = before.get(case, {"dry": "-", "run": "-"})
        lines = " / ".join(line for line in new["run_said"] if not line.startswith("train rows"))
        text = lines.replace("|", "\\|")[:300]
        agree = "" if new["agree"] else " (differ)"
        before_cell = f"{old['dry']}, {old['run']}{'' if old.get('agree', True) else ' (differ)'}"
        rows.append(f"| {case} | {new['method']} | {before_cell} | {new['dry']}, {new['run']}{agree} | {text} |")
    return "\n".join(rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("paths", nargs=2, type=Path)
    parser.add_argument("--table", action="store_true", help="print a table of two results")
    parser.add_argument("--only", nargs="*", default=[], help="names of cases")
    given = parser.parse_args()
    if given.table:
        before, after = (json.loads(path.read_text()) for path in given.paths)
        print(table(before, after))
        return
    cases, target = given.paths
    with tempfile.TemporaryDirectory() as room:
        results = measure(cases.resolve(), Path(room), set(given.only))
    target.write_text(json.dumps(results, indent=1, ensure_ascii=False))
    print(sum(1 for case in results.values() if case["agree"]), "of", len(results), "agree in dry run and run")


if __name__ == "__main__":
    main()
