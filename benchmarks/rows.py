"""What the command line says of a folder of odd data files, and what is trained of them, in this checkout or another.

    python benchmarks/rows.py run --cases DIR --json after.json
    python benchmarks/rows.py run --cases DIR --json before.json --checkout OTHER
    python benchmarks/rows.py run --cases DIR --json after-2.json --part 2/3
    python benchmarks/rows.py table --cases DIR --before before.json --after after.json --tokenizer FILE --out table.md
    python benchmarks/rows.py many --before OTHER --rows 100000 --json many.json

Each case is run as ``--dry_run json`` and as one step of a tiny model, by the real command line in a process of its own
(forked, so that a command takes a second or two). `rows_probe.py` notes the batches that the model reads.
`rows_expected.py` says, without importing the package, which tokens and labels are right, or that a case has to be
refused.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from typing import Any

from rows_expected import TEMPLATES, Expected, expected_of
from tokenizers import Tokenizer

_HERE = Path(__file__).resolve()


@dataclass(frozen=True, kw_only=True)
class Case:
    """A data file, and the flags with which it is trained."""

    name: str
    method: str = "sft"
    flags: dict[str, Any] = field(default_factory=dict)
    template: str = ""  # a name of `TEMPLATES`; "": the tokenizer's own

    @property
    def label(self) -> str:
        """The file, with what differs from the usual settings."""
        method = [] if self.method == method_of(self.name) else [self.method]
        template = [self.template] if self.template else []
        more = [*method, *template, *(name for name in self.flags if name != "max_steps")]
        return self.name + (f" ({', '.join(more)})" if more else "")


_TURNS = {"assistant_only_loss": True}
_THINK = {**_TURNS, "mask_thinking": True}
_MORE: dict[str, list[dict[str, Any]]] = {
    "first_assistant.jsonl": [{"flags": _TURNS}, {"flags": _TURNS, "template": "unmarked"}],
    "weights.jsonl": [{"flags": _TURNS}],
    "train_flag.jsonl": [{"flags": _TURNS, "template": "unmarked"}],
    "think_one.jsonl": [{"flags": _THINK}, {"flags": _THINK, "template": "unmarked"}],
    "think_multi.jsonl": [{"flags": _THINK}, {"template": "earlier thinking dropped"}],
    "think_open.jsonl": [{"flags": _THINK}],
    "no_think_close.jsonl": [{"flags": _THINK}],
    "system.jsonl": [{"template": "known roles"}, {"template": "no system"}],
    "roles_bot.jsonl": [{"template": "known roles"}, {"flags": _TURNS}],
    "roles_model.jsonl": [{"template": "known roles"}],
    "roles_weird.jsonl": [{"template": "known roles"}],
    "reasoning_content.jsonl": [{"template": "with tools"}],
    "tools_two.jsonl": [{"template": "with tools"}],
    "tools_str.jsonl": [{"template": "with tools"}],
    "openai_functions.jsonl": [{"template": "with tools"}],
    "leading_space_answer.jsonl": [{"template": "trims"}],
    "chats.jsonl": [{"template": "trims"}, {"template": "no end"}, {"template": "another end"}, {"flags": _TURNS}],
    "stream12.jsonl": [{"flags": {"dataset_streaming": True, "max_steps": 3}}],
    "only_user.jsonl": [{"flags": _TURNS}],
    "ends_user.jsonl": [{"flags": _TURNS}],
    "two_users.jsonl": [{"flags": _TURNS, "template": "unmarked"}],
    "kto_pairs.jsonl": [{"method": "dpo"}],
    "kto_messages.jsonl": [{"method": "sft"}],
}


def method_of(name: str) -> str:
    """The verb that a file is for, by the beginning of its name."""
    return next((each for each in ("dpo", "kto") if name.startswith(f"{each}_")), "sft")


def cases_of(folder: Path) -> Iterator[Case]:
    """A case for each file and directory, and further ones with other flags or another chat template."""
    for path in sorted(folder.iterdir()):
        method = method_of(path.name)
        flags = {"dataset_streaming": True, "max_steps": 80} if path.name.startswith("stream_") else {}
        yield Case(name=path.name, method=method, flags=flags)
        for more in _MORE.get(path.name, ()):
            yield Case(**{"name": path.name, "method": method, **more})


def _argv(case: Case, folder: Path, model: Path, room: Path) -> list[str]:
    settings = {
        "model_name_or_path": model,
        "dataset_name": folder / case.name,
        "output_dir": room / "out",
        "max_steps": 1,
        "per_device_train_batch_size": 4,
        "max_length": 256,
        "save_strategy": "no",
        "doctor": "off",
        "disable_tqdm": True,
        "use_cpu": True,
        **case.flags,
    }
    if case.template:
        file = room / "template.jinja"
        file.write_text(TEMPLATES[case.template], encoding="utf-8")
        settings["chat_template_path"] = file
    return [part for name, value in settings.items() for part in (f"--{name}", str(value))]


def _said(text: str) -> list[str]:
    """Lines that may say something about the rows."""
    words = ("row", "column", "warning", "template", "error", "not read", "split", "token", "Traceback", "answer")
    lines = (line.strip() for line in text.splitlines())
    return [line for line in lines if any(word in line for word in words) and "tokens/s" not in line][:40]


def _one(case: Case, folder: Path, model: Path, server: Any, room: Path) -> dict[str, Any]:
    shutil.rmtree(room, ignore_errors=True)
    room.mkdir()
    argv, probe = _argv(case, folder, model, room), room / "read.json"
    env = {"METHOD": case.method}
    dry = server.run(*argv, "--dry_run", "json", env=env, cwd=room)
    try:
        shown = json.loads(dry.stdout)
    except json.JSONDecodeError:
        shown = None
    shutil.rmtree(room / "out", ignore_errors=True)
    script = {"SCRIPT": str(_HERE.with_name("rows_probe.py")), "ROWS_PROBE": str(probe)}
    run = server.run(*argv, env={**env, **script}, cwd=room)
    report = room / "out" / "transfer_report.json"
    return {
        "case": case.label,
        "dry": {"code": dry.code, "said": _said(dry.stderr), "shown": shown},
        "run": {
            "code": run.code,
            "said": _said(run.stderr),
            "printed": _said(run.stdout),
            "read": json.loads(probe.read_text()) if probe.is_file() else [],
            "data": json.loads(report.read_text()).get("data") if report.is_file() else None,
        },
        "last": (dry.stderr + run.stderr).splitlines()[-3:],
        "traceback": "Traceback" in dry.stderr + run.stderr,
    }


def run(wanted: argparse.Namespace) -> None:
    """Runs all cases, and writes what was seen."""
    sys.path.insert(0, str(wanted.checkout))
    from tests import tiny
    from tests.e2e.command import CommandServer

    found = []
    with tempfile.TemporaryDirectory(prefix="rows-", dir=wanted.scratch) as scratch:
        room = Path(scratch)
        model = tiny.build("llama3", room / "models")
        server = CommandServer(room / "server")
        part, parts = map(int, wanted.part.split("/"))
        for number, case in enumerate(cases_of(wanted.cases)):
            left_out = wanted.only and not any(word in case.label for word in wanted.only)
            if left_out or number % parts != part - 1:
                continue
            found.append(_one(case, wanted.cases, model, server, room / "case"))
            print(case.label, found[-1]["dry"]["code"], found[-1]["run"]["code"], flush=True)
        server.close()
    wanted.json.write_text(json.dumps(found, ensure_ascii=False, indent=1), encoding="utf-8")


# ---- the table -------------------------------------------------------------------------------------------------------


def verdict(seen: dict[str, Any], right: Expected) -> str:
    """In a few words, what was wrong with what was seen; ``right`` if nothing was."""
    dry, ran = seen["dry"], seen["run"]
    faults = ["traceback"] if seen["traceback"] else []
    streamed = any("--dataset_streaming reads them on the way" in line for line in dry["said"])
    if (dry["code"] == 0) != (ran["code"] == 0) and not streamed:  # of a stream no rows are counted beforehand
        faults.append(f"dry run ends with {dry['code']}, run with {ran['code']}")
    if right.refused:
        faults += ["trained"] * (ran["code"] == 0)
    elif ran["code"]:
        faults.append("refused")
    else:
        faults += _faults_of_rows(dry, ran, right)
    text = " ".join([*dry["said"], *ran["said"], *ran["printed"], json.dumps(ran["data"])])
    faults += [f"does not say {word!r}" for word in right.says if word.lower() not in text.lower()]
    return ", ".join(faults) or "right"


def _faults_of_rows(dry: dict[str, Any], ran: dict[str, Any], right: Expected) -> list[str]:
    """What the preview showed and what the run read, against what is right."""
    faults = []
    wanted = [_runs(row.labels) for row in right.rows]
    previewed = [
        [(piece["tokens"], piece["counts"]) for piece in pieces]
        for row in (dry["shown"] or {}).get("rows", ())
        for pieces in row["parts"].values()
    ]
    read = [_runs(row["labels"]) for row in ran["read"]]
    for what, found in (("preview", previewed), ("run", read)):
        lengths = [sum(count for count, _ in runs) for runs in wanted]
        if any(sum(count for count, _ in runs) not in lengths for runs in found):
            faults.append(f"{what}: other tokens")
        elif any(runs not in wanted for runs in found):
            faults.append(f"{what}: other tokens in the loss")
    if any(row["ids"] not in [each.ids for each in right.rows] for row in ran["read"]):
        faults.append("run: other tokens")
    texts = ["".join(row.pieces) for row in right.rows if row.pieces]
    for row in (dry["shown"] or {}).get("rows", ()):
        for pieces in row["parts"].values():
            shown = "".join(piece["text"] for piece in pieces)
            if texts and shown not in texts and not any(text.startswith(shown) for text in texts):
                faults.append("preview: other text")
    counted = [content for content in ((dry["shown"] or {}).get("summaries"), ran["data"]) if content]
    if len(counted) == 2 and counted[0] != counted[1]:
        faults.append("preview and run differ")
    return list(dict.fromkeys(faults))


def _runs(labels: list[int]) -> list[tuple[int, bool]]:
    """Lengths of the runs of tokens that count in a loss, or do not."""
    return [(len([*group]), counts) for counts, group in groupby(label != -100 for label in labels)]


def _words(seen: dict[str, Any]) -> str:
    """What a user reads: the error, or what was said of the rows, and how many rows and tokens count."""
    ran = seen["run"]
    errors = [line for line in ran["said"] if line.startswith("hf-rocm-tune: error:")]
    if errors:
        return errors[0].removeprefix("hf-rocm-tune: error: ")
    words = ("warning", "become", "rows:")
    told = [line for line in [*ran["printed"], *ran["said"]] if any(word in line for word in words)]
    return " / ".join(dict.fromkeys(told)) or ("exit code " + str(ran["code"]))


def table(wanted: argparse.Namespace) -> None:
    """Writes the table of both runs."""
    before, after = (
        {one["case"]: one for path in paths for one in json.loads(path.read_text(encoding="utf-8"))}
        for paths in (wanted.before, wanted.after)
    )
    lines, counts = [], {"before": 0, "after": 0}
    encode = Tokenizer.from_file(str(wanted.tokenizer)).encode
    for case in cases_of(wanted.cases):
        if case.label not in after:
            continue
        right = expected_of(case.name, wanted.cases / case.name, case.method, case.template, case.flags, encode)
        cells = []
        for name, seen in (("before", before.get(case.label)), ("after", after[case.label])):
            if seen is None:
                cells += ["not run"]
                continue
            said = verdict(seen, right)
            counts[name] += said == "right"
            cells.append(said)
        must = "refused" if right.refused else "trained"
        words = _words(after[case.label]).replace("|", "\\|").replace(str(wanted.cases), "DIR")
        words = re.sub(r"/\S*/(models|case)/", "", words)[:400]
        lines.append(f"| `{case.label}` | {case.method} | {must} | {cells[0]} | {cells[1]} | {words} |")
    head = [
        "# Data files from the field, before and after",
        "",
        f"Made by `benchmarks/rows.py`; right of {len(lines)}: {counts['before']} before, {counts['after']} after.",
        "",
        "| case | verb | has to be | before | after | what the run says now |",
        "|---|---|---|---|---|---|",
    ]
    wanted.out.write_text("\n".join([*head, *lines]) + "\n", encoding="utf-8")
    print(head[2])


# ---- many rows -------------------------------------------------------------------------------------------------------


def many(wanted: argparse.Namespace) -> None:
    """Measures jobs of one step over many rows, in both checkouts by turns, with nothing cached."""
    sys.path.insert(0, str(_HERE.parents[1]))
    from tests import tiny

    found: dict[str, list[dict[str, float]]] = {"before": [], "after": []}
    with tempfile.TemporaryDirectory(prefix="rows-", dir=wanted.scratch) as scratch:
        room = Path(scratch)
        model = tiny.build("llama3", room / "models")
        data = tiny.write_messages_jsonl(room / "many.jsonl", wanted.rows)
        for _ in range(wanted.repeats):
            for name, checkout in (("before", wanted.before), ("after", _HERE.parents[1])):
                shutil.rmtree(room / "home", ignore_errors=True)
                shutil.rmtree(room / "out", ignore_errors=True)
                found[name].append(_measured(checkout, room, model, data))
                print(name, found[name][-1], flush=True)
    text = {"rows": wanted.rows, "runs": found, "command": " ".join(["python", *sys.argv])}
    wanted.json.write_text(json.dumps(text) + "\n", encoding="utf-8")


def _measured(checkout: Path, room: Path, model: Path, data: Path) -> dict[str, float]:
    """CPU seconds and peak memory of one job."""
    settings = {"model_name_or_path": model, "dataset_name": data, "output_dir": room / "out", "max_steps": 1}
    settings |= {"max_length": 128, "save_strategy": "no", "doctor": "off", "disable_tqdm": True, "use_cpu": True}
    argv = [part for name, value in settings.items() for part in (f"--{name}", str(value))]
    quiet = {"HF_HOME": str(room / "home"), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    env = {**os.environ, **quiet, "PYTHONPATH": str(checkout), "TOKENIZERS_PARALLELISM": "false"}
    command = [sys.executable, "-m", "hf_rocm_tune.sft", *argv]
    with open(room / "log", "wb") as log:
        process = subprocess.Popen(command, env=env, cwd=room, stdout=log, stderr=log)
        _, status, used = os.wait4(process.pid, 0)
    if status:
        raise SystemExit((room / "log").read_text()[-2000:])
    return {"cpu_seconds": round(used.ru_utime + used.ru_stime, 2), "peak_mib": round(used.ru_maxrss / 1024, 1)}


def main() -> None:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    verbs = parser.add_subparsers(dest="verb", required=True)
    runs, tables, lots = verbs.add_parser("run"), verbs.add_parser("table"), verbs.add_parser("many")
    lots.add_argument("--before", type=Path, required=True, help="the other checkout")
    lots.add_argument("--rows", type=int, default=100_000)
    lots.add_argument("--repeats", type=int, default=3)
    lots.add_argument("--scratch", type=Path)
    lots.add_argument("--json", type=Path, required=True)
    for each in (runs, tables):
        each.add_argument("--cases", type=Path, required=True)
    runs.add_argument("--checkout", type=Path, default=_HERE.parents[1])
    runs.add_argument("--scratch", type=Path)
    runs.add_argument("--only", nargs="*", help="parts of names")
    runs.add_argument("--part", default="1/1", help="every so many case: 2/3 is the second of three parts")
    runs.add_argument("--json", type=Path, required=True)
    for name in ("before", "after"):
        tables.add_argument(f"--{name}", type=Path, nargs="+", required=True)
    tables.add_argument("--out", type=Path, required=True)
    tables.add_argument("--tokenizer", type=Path, required=True, help="tokenizer.json of the run's model")
    wanted = parser.parse_args()
    {"run": run, "table": table, "many": many}[wanted.verb](wanted)


if __name__ == "__main__":
    main()
