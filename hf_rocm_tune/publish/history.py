"""A run, finished or not, as its ``README.md`` and its page show it, and the verdict on its transfer report.

A file that is missing, truncated or invalid is reported, and the others are still read. Missing entries of a report
count as unknown, never as good.
"""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cache, partial
from pathlib import Path
from typing import Any, Literal

import jinja2
from rich.filesize import decimal as size

from hf_rocm_tune.counters import SECTIONS
from hf_rocm_tune.errors import UsageError
from hf_rocm_tune.foreign import read_object
from hf_rocm_tune.redaction import Private, scrub_json
from hf_rocm_tune.survive import manifest
from hf_rocm_tune.survive.atomic import write_text_atomic
from hf_rocm_tune.survive.run_directory import SMALL_PICTURES

LOG_NAME = "training_log.json"
REPORT_NAME = "transfer_report.json"

Row = Mapping[str, Any]
_ACTIVE = re.compile(r"([\\`*_\[\]<>|#~$])")  # in Markdown


@dataclass(frozen=True, kw_only=True)
class Run:
    """What is known of a run; empty or None if unknown."""

    directory: Path
    run_id: str = ""
    rows: Sequence[Row] = ()  # the log history, oldest first
    step: int | None = None  # optimizer steps done
    max_steps: int | None = None
    trained: Mapping[str, Any] = field(default_factory=dict)  # what was trained, without names and paths
    report: Mapping[str, Any] = field(default_factory=dict)  # the transfer report
    settings: Mapping[str, Any] = field(default_factory=dict)
    finished: bool = False
    written: str = ""  # UTC time of the manifest, ISO 8601
    damaged: Sequence[str] = ()  # files that differ from what was written, in words
    missing: Sequence[str] = ()  # files that are missing or could not be read, in words
    pictures: Sequence[Mapping[str, Any]] = ()  # a few of the data: ``row``, ``size``, ``jpeg`` in base64

    @property
    def verdict(self) -> Verdict:
        return judge(self.report, finished=self.finished, damaged=self.damaged)

    def without(self, private: Private) -> Run:
        """What may be published."""
        shown = ("rows", "trained", "report", "settings", "missing")
        return replace(self, **{name: scrub_json(getattr(self, name), private) for name in shown})


def write_log(run: Run) -> Path:
    """Write ``training_log.json``, in which numbers that are not finite are null. It names no file and no directory."""
    log = [
        {key: None if isinstance(one, float) and not math.isfinite(one) else one for key, one in row.items()}
        for row in run.rows
    ]
    content = {"schema": 1, "run_id": run.run_id, "step": run.step, "max_steps": run.max_steps, "trained": run.trained}
    write_text_atomic(run.directory / LOG_NAME, json.dumps(content | {"log": log}, indent=1) + "\n")
    return run.directory / LOG_NAME


def render(template: str, *, html: bool = False, **values: Any) -> str:
    """A template of this package, with the functions of this module. In HTML every value is escaped; in Markdown each
    foreign value must pass ``prose``, ``code``, ``json`` or ``literal``."""
    return compiled(template, html=html).render(values)


@cache
def compiled(template: str, *, html: bool) -> jinja2.Template:
    found = jinja2.Environment(
        loader=jinja2.PackageLoader("hf_rocm_tune.publish", ""),
        autoescape=html,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    found.filters |= {each.__name__: each for each in (plain, figure, data_row, data_findings, prose, code)}
    found.filters |= {"json": json.dumps, "literal": repr}
    shared = (text, number, count, items, mapping, figures, shown_settings, counted, coverage, crossed)
    found.globals |= {each.__name__: each for each in shared} | {"size": size}
    return found.get_template(template)


# ---- the log ---------------------------------------------------------------------------------------------------------


_LAST_STEP, _LEAST, _LARGEST = 1e15, 1e-100, 1e100


def series(rows: Iterable[Row], key: str) -> list[tuple[float, float]]:
    """(step, value) of one metric in the order of the steps; the newest of a step counts, NaN is a gap in a curve.

    Left out are steps that no run reaches, and a value that cannot be drawn beside others is a gap.
    """
    known: dict[float, float] = {}
    for row in rows:
        step, value = number(row, "step"), number(row, key)
        if key in row and step is not None and 0 <= step <= _LAST_STEP:
            known[step] = math.nan if value is None or abs(value) > _LARGEST else 0.0 if abs(value) < _LEAST else value
    return sorted(known.items())


def last(rows: Iterable[Row], key: str) -> float | None:
    """The newest finite value of a metric."""
    return next((value for _, value in reversed(series(rows, key)) if not math.isnan(value)), None)


_FIGURES = {
    "training loss (last)": "loss",
    "evaluation loss (last)": "eval_loss",
    "token accuracy (last)": "mean_token_accuracy",
    "evaluation, token accuracy": "eval_mean_token_accuracy",
    "reward (last)": "reward",
    "reward margin (last)": "rewards/margins",
    "evaluation, reward margin": "eval_rewards/margins",
    "epochs": "epoch",
    "tokens": "num_tokens",
    "tokens a second (last)": "speed/tokens_per_second",
    "training time (s), from the last start": "train_runtime",
}


def figures(rows: Sequence[Row]) -> list[tuple[str, str]]:
    """The key figures of a log, by name."""
    found = {name: last(rows, key) for name, key in _FIGURES.items()}
    return [(name, figure(value)) for name, value in found.items() if value is not None]


_SHOWN_SETTINGS = (
    *("learning_rate", "lr_scheduler_type", "warmup_steps", "optim", "weight_decay", "max_grad_norm"),
    *("per_device_train_batch_size", "gradient_accumulation_steps", "world_size", "num_train_epochs", "max_steps"),
    *("max_length", "packing", "bf16", "fp16", "dtype"),
    *("load_in_4bit", "load_in_8bit", "bnb_4bit_quant_type", "use_bnb_nested_quant"),
    *("lora_r", "lora_alpha", "lora_dropout", "lora_target_modules", "lora_modules_to_save", "use_dora", "use_rslora"),
    *("loss_type", "assistant_only_loss", "completion_only_loss", "gradient_checkpointing", "neftune_noise_alpha"),
    "seed",
)


def shown_settings(settings: Mapping[str, Any]) -> dict[str, Any]:
    """The settings that decide the result and have an effect, by name, and the effective batch."""
    idle = {"num_train_epochs" if count(settings, "max_steps") > 0 else "max_steps"}
    idle |= {name for name in _SHOWN_SETTINGS if name.startswith("lora_") and settings.get("use_peft") is False}
    idle |= set() if settings.get("load_in_4bit") is True else {"bnb_4bit_quant_type", "use_bnb_nested_quant"}
    given = {name: settings.get(name) for name in _SHOWN_SETTINGS if name not in idle}
    found = {name: value for name, value in given.items() if value is not None and value is not False and value != []}
    batch = ["per_device_train_batch_size", "gradient_accumulation_steps"]
    batch += [] if settings.get("tensor_parallel") is True else ["world_size"]  # there all ranks get the same rows
    rows = math.prod(count(settings, name) for name in batch)
    return found | ({"effective_batch_size": rows} if rows else {})


# ---- values out of JSON that may be of any form ----------------------------------------------------------------------


def find(content: Any, *path: str) -> Any:
    """The value at a path of keys; None if a part of the path is missing."""
    for key in path:
        content = content.get(key) if isinstance(content, dict) else None
    return content


def number(content: Any, *path: str) -> float | None:
    """A finite number; None for anything else."""
    value = find(content, *path)
    with suppress(OverflowError):  # a whole number that no float holds
        if isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value):
            return float(value)
    return None


def count(content: Any, *path: str) -> int:
    """A count; 0 if there is none."""
    return int(number(content, *path) or 0)


def text(content: Any, *path: str) -> str:
    """A string; empty for anything else."""
    return value if isinstance(value := find(content, *path), str) else ""


def mapping(content: Any, *path: str) -> dict[str, Any]:
    """An object; empty for anything else."""
    return value if isinstance(value := find(content, *path), dict) else {}


def items(content: Any, *path: str) -> list[Any]:
    """A list; empty for anything else."""
    return value if isinstance(value := find(content, *path), list) else []


def plain(value: Any) -> str:
    """One value in a line: numbers to four digits, texts of a list side by side, what else is in one as JSON."""
    if isinstance(value, bool) or value is None:
        return {True: "yes", False: "no", None: "none"}[value]
    if isinstance(value, dict):
        return ", ".join(f"{key}={one if isinstance(one, str) else json.dumps(one)}" for key, one in value.items())
    if isinstance(value, list):
        return ", ".join(value) if all(isinstance(one, str) for one in value) else json.dumps(value)
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def figure(value: float | None) -> str:
    """A number to four digits, whole ones in full; empty for None."""
    return "" if value is None else f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def prose(value: str) -> str:
    """A foreign text, escaped for Markdown, in one line."""
    return _ACTIVE.sub(r"\\\1", " ".join(value.split()))


def code(value: str) -> str:
    """A foreign value as code, also within a table."""
    return f"`{' '.join(value.split()).replace('`', chr(39)).replace('|', chr(92) + '|')}`" if value.strip() else ""


# ---- a directory -----------------------------------------------------------------------------------------------------


_STATE = "trainer_state.json"


def collect(directory: Path) -> Run:
    """Read the files of a run; a ``UsageError`` if there are none."""
    if not os.path.isdir(directory):  # unlike Path.is_dir, never raises
        raise UsageError(f"{directory} is not a directory: name the --output_dir of a run")
    found, missing = checkpoints(directory), list[str]()
    problems, sealed = manifest.inspect(directory)
    record = read_json(directory / "run.json", missing)
    run_id = text(record, "run_id") or (sealed.run_id if sealed else "")
    report, log = (read_json(directory / name, missing, run_id) for name in (REPORT_NAME, LOG_NAME))
    for path in [directory / _STATE, *(path / _STATE for path in found[-1:])]:  # of a user's script; of a killed run
        state = read_json(path, missing) if path.is_file() else {}
        if count(state, "global_step") > max(count(log, "step"), 0):
            if path.parent == directory:
                missing = [line for line in missing if not line.startswith(LOG_NAME)]
            log |= {
                "max_steps": state.get("max_steps"),
                "step": state.get("global_step"),
                "log": state.get("log_history"),
            }
    if not (found or sealed or record or report or log):
        raise UsageError(f"{directory} has no file of a training run: name the --output_dir of a run")
    # A README.md may be edited.
    damaged = [str(one) for one in problems if not one.file.endswith(".md") and (sealed or one.kind != "missing")]
    if sealed is None:
        missing += damaged or [f"{manifest.MANIFEST_NAME}: the run has not finished"]
    return Run(
        directory=directory,
        run_id=run_id or text(log, "run_id"),
        rows=[row for row in items(log, "log") if isinstance(row, dict)],
        step=count(log, "step") if number(log, "step") is not None else None,
        max_steps=count(log, "max_steps") or None,
        trained=mapping(log, "trained"),
        report=report,
        settings=mapping(record, "settings") | mapping(record, "names"),
        finished=sealed is not None and sealed.status == "final",
        written=sealed.created if sealed else "",
        damaged=damaged,
        missing=missing,
        pictures=_small_pictures(directory, run_id),
    )


def _small_pictures(directory: Path, run_id: str) -> list[dict[str, Any]]:
    """The small pictures that a run with pictures has written; what is no picture of ours is left out."""
    content = read_json(directory / SMALL_PICTURES, run_id=run_id)
    found = [row for row in items(content, "pictures") if isinstance(row, dict)]
    known = re.compile(r"/9j/[A-Za-z0-9+/]{16,40000}={0,2}")
    return [row for row in found[:8] if known.fullmatch(text(row, "jpeg"))]


def read_json(path: Path, missing: list[str] | None = None, run_id: str = "") -> dict[str, Any]:
    """A JSON object of this run, or nothing and a line about why."""
    try:
        content = read_object(path)
        other = text(content, "run_id")
        if run_id and other and other != run_id:
            raise ValueError(f"it belongs to another run, {other}")
        return content
    except (OSError, ValueError) as error:
        why = "it is missing" if isinstance(error, FileNotFoundError) else f"it is not used ({error})"
        if missing is not None:
            missing.append(f"{path.name}: {why}")
        return {}


def run_settings(directory: Path) -> dict[str, Any]:
    """Of the run that wrote a directory, or the directory above a checkpoint; empty if unknown."""
    found = (mapping(read_json(folder / "run.json"), "settings") for folder in (directory, directory.parent))
    return next(filter(None, found), {})


def checkpoints(directory: Path) -> list[Path]:
    """Directories of checkpoints, the oldest first."""
    found = [path for path in directory.glob("checkpoint-*") if re.fullmatch(r"checkpoint-\d+", path.name)]
    return sorted(filter(Path.is_dir, found), key=lambda path: int(path.name.rpartition("-")[2]))


# ---- the verdict -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Verdict:
    """The verdict on a run.

    "good": finished, all of it verified, nothing was wrong; "note": corruption that was recovered, or other remarks;
    "bad": the result contains corruption or differs from what was written; "unknown": no evidence.
    """

    level: Literal["good", "note", "bad", "unknown"]
    headline: str  # one sentence
    notes: tuple[str, ...]  # remarks, one sentence each


def judge(report: Mapping[str, Any], *, finished: bool, damaged: Sequence[str] = ()) -> Verdict:
    """The verdict on a run."""
    verdict = partial(Verdict, notes=_notes(report, finished=finished))
    if damaged:
        more = f" and {len(damaged) - 1} more" if len(damaged) > 1 else ""
        return verdict("bad", f"The result differs from what was written: {damaged[0]}{more}.")
    if not report:
        return verdict("unknown", "It is unknown what was verified: there is no transfer report.")
    try:
        wrong = _unrecovered(report)
    except (KeyError, TypeError, AttributeError):
        return verdict("unknown", "The transfer report does not have the expected form, so it is no evidence.")
    if wrong:
        return verdict("bad", f"Wrong bytes were found that could not be recovered: {'; '.join(wrong[:3])}.")
    share, found = coverage(report), mismatches(report)
    if share is None or text(report, "verify") == "off":
        return verdict("unknown", "Transfers were not verified in this run.")
    complete = finished and share >= 100 and text(report, "verify") == "full" and not found and not _varies(report)
    recovered = f". Corruption was found {_times(found)} and recovered before it was used"
    end = recovered if found else ", and none of them was wrong"
    return verdict("good" if complete else "note", f"{share:g} % of the bytes on the device were verified{end}.")


#: The verdict in a word, at the head of the page and of the closing line of a run.
LEVELS = {"good": "verified", "note": "verified, with remarks", "bad": "wrong bytes", "unknown": "not known"}


def verdict_line(report: Mapping[str, Any]) -> str:
    """The verdict on a finished run and, unless it is good, its reason: the head of the run's closing line."""
    verdict, share = judge(report, finished=True), coverage(report)
    if verdict.level == "good":
        return f"{LEVELS['good'].upper()}, nothing was wrong"
    reasons = [verdict.headline] if verdict.level != "note" else []
    if verdict.level == "note":
        found = mismatches(report)
        reasons += [f"corruption was found {_times(found)} and recovered before it was used"] if found else []
        reasons += [f"{share:g} % of the bytes on the device"] if share is not None and share < 100 else []
        reasons += ["a sample of the transfers only"] if text(report, "verify") == "sample" else []
        reasons += ["the same micro-batch gave different gradients"] if _varies(report) else []
    word, comma, rest = LEVELS[verdict.level].partition(",")
    return f"{word.upper()}{comma}{rest} ({'; '.join(reasons).rstrip('.')})"


def _times(count: int) -> str:
    return "once" if count == 1 else f"{count:,} times"


def _unrecovered(report: Mapping[str, Any]) -> list[str]:
    """Corruption that a report lists as not recovered; KeyError, TypeError or AttributeError for another form."""
    found = [
        f"{row['stage']}{' ' + str(row['tensor']) if 'tensor' in row else ''} at step {row.get('step', '?')}"
        for row in report["incidents"]
        if row.get("outcome") == "stopped"
    ]
    numbers = list[str]()
    for name, section in SECTIONS.items():
        if "recovered" not in section.counters or not section.wrong:
            continue
        counters = report[name] if section.needed else mapping(report, name)
        wrong = counters[section.wrong] if section.needed else count(counters, section.wrong)
        lost = wrong - (counters["recovered"] if section.needed else count(counters, "recovered"))
        if lost > 0:
            numbers.append(f"{name}: {lost} of {wrong} {section.wrong}")
    return found or numbers


def _varies(report: Mapping[str, Any]) -> str:
    """That a micro-batch gave different results twice, which faults may hide in; empty where it did not."""
    if find(report, "arithmetic", "deterministic") is not False:
        return ""
    bound = number(report, "arithmetic", "replay_bound")
    within = f" Replays were compared within {bound:.2g}, so smaller faults were not seen." if bound else ""
    return f"The same micro-batch gave different gradients when it was computed again.{within}"


def coverage(report: Mapping[str, Any]) -> float | None:
    """Verified bytes of those on the device in percent, never rounded up to 100; None where that is unknown."""
    verified, there = (find(report, "coverage", name) for name in ("verified_bytes", "device_bytes"))
    if not isinstance(verified, int) or not isinstance(there, int) or there <= 0:
        return None
    return verified * 10**6 // there / 1e4  # as floats, all but one byte of an exabyte would be everything


def crossed(report: Mapping[str, Any]) -> tuple[int, int] | None:
    """Bytes that crossed between host and card, and those of them that were verified; None in reports of schema 1."""
    there, verified = (find(report, "coverage", "crossed", name) for name in ("crossed_bytes", "verified_bytes"))
    if not isinstance(verified, int) or not isinstance(there, int):
        return None
    return there, verified


def mismatches(report: Mapping[str, Any]) -> int:
    """How often a check found something wrong: the counters together, or the incidents where these are more."""
    counted = sum(count(report, name, section.wrong) for name, section in SECTIONS.items() if section.wrong)
    return max(counted, len(items(report, "incidents")))


def counted(report: Mapping[str, Any]) -> list[tuple[str, str, str, str]]:
    """Every kind of check that ran: what, how much of it, how often it was wrong, and of these recovered."""
    rows = []
    for name, section in SECTIONS.items():
        if not section.is_check:
            continue
        counters = mapping(report, name)
        wrong, nbytes = count(counters, section.wrong), count(counters, "bytes")
        done = [f"{number:,} {key}" for key in section.done if (number := count(counters, key))]
        if done or wrong:
            much = ", ".join([*done, *([size(nbytes)] if nbytes else [])])
            recovered = f"{count(counters, 'recovered'):,}" if "recovered" in counters else ""
            rows.append((section.title, much, f"{wrong:,}", recovered))
    return rows


def data_row(row: Any) -> dict[str, str]:
    """What one split was trained on, in words."""
    share = 100 * count(row, "trained") / max(count(row, "kept"), 1)
    names = ("rows", "tokens", "median", "p95", "longest", "cut", "lost", "dropped")
    return {"split": text(row, "split"), **{name: f"{count(row, name):,}" for name in names}, "share": f"{share:.3g} %"}


def data_findings(row: Any) -> list[str]:
    """What of the rows of one split is not trained as they say, each in words."""
    return [
        f"{count(finding, 'rows'):,} rows: {text(finding, 'what')}"
        for finding in items(row, "findings")
        if text(finding, "what")
    ]


def _notes(report: Mapping[str, Any], *, finished: bool) -> tuple[str, ...]:
    notes = [] if finished else ["The run has not finished: these are its files so far."]
    asked = {"Faults": ("fault_injection",), "Faults of steps": ("step_fault_injection",)}
    for what, path in {**asked, "Crashes": ("survival", "crash_injection")}.items():
        notes += [f"{what} were injected on request: {plain(value)}." for value in [find(report, *path)] if value]
    mode, share = text(report, "verify"), coverage(report)
    if mode == "sample":
        notes.append("Only a sample of the transfers was verified (--verify sample).")
    elif mode == "full" and share is not None and share < 100:
        notes.append("Not every byte was verified; the run continued with the user's consent.")
    link = crossed(report)
    if mode == "full" and link is not None and link[1] < link[0]:
        names = [text(row, "origin") for row in items(report, "coverage", "crossed", "unverified")]
        notes.append(f"{size(link[0] - link[1])} crossed between host and card unverified: {', '.join(names[:3])}.")
    if varies := _varies(report):
        notes.append(varies)
    if names := items(report, "weights", "not_attested"):
        notes.append(f"Files of the base model without a recorded digest, so not attested: {len(names)}.")
    return tuple(notes)
