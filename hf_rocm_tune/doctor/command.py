"""``hf-rocm-tune doctor``: one line a group and whatever is wrong; with ``-v`` everything; JSON for programs and for
issue reports. Names of users and machines, secrets and serial numbers are redacted in all forms (``redaction``)."""

from __future__ import annotations

import argparse
import json
import math
import os
import re
import shutil
import sys
import textwrap
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from hf_rocm_tune.doctor.diagnose import NOTHING_THERE, Diagnosis, all_checks, diagnose, listing, select
from hf_rocm_tune.doctor.findings import GROUPS, Check, Evidence, Finding, Status, read_here
from hf_rocm_tune.errors import CommandParser, CorruptionError, UsageError, checked
from hf_rocm_tune.machine.sources import links_of
from hf_rocm_tune.machine.survey import Gpu
from hf_rocm_tune.paths import can_be_file
from hf_rocm_tune.redaction import Private, map_strings, one_line, scrub_text
from hf_rocm_tune.version import __version__

PROGRAM = "hf-rocm-tune doctor"
# Columns of the report in a terminal.
NARROWEST = 60
WIDEST = 120
# The mark of a line, and the word of a count; the gravest first.
_MARKS: dict[Status, str] = {"fail": "FAIL", "warn": "WARN", "unknown": "?", "info": "note", "ok": "ok", "skipped": "-"}
_COUNTED = {"fail": "failure", "warn": "warning", "info": "note", "ok": "ok", "unknown": "unknown"}
_WORST = tuple(_MARKS)
_VERDICTS = ("no problem found in what was checked", "check the warnings", "not ready to train")
_INDENT = 6
_LABEL = 8
_SERIAL = re.compile(
    r"\b((?:[0-9a-fA-F]{2}:){5}[0-9a-fA-F]{2}|[0-9a-fA-F]{8}-(?:[0-9a-fA-F]{4}-){3}[0-9a-fA-F]{12}|GPU-[0-9a-fA-F]{8,32})\b"
)


def main(argv: Sequence[str]) -> int:
    """Run the command on the arguments after ``doctor``: 0 ok, 1 warnings, 2 failures."""
    wanted = _parser().parse_args(list(argv))
    if wanted.drill:
        return _drill(wanted)
    for name in ("device", "faults", "clean", "seed"):
        if getattr(wanted, name) is not None:
            raise UsageError(f"--{name} is an option of --drill: add --drill, or leave it out")
    # ``--only links,bar variables`` is three names.
    only = list(filter(None, ",".join(wanted.only).split(",")))
    checks = select(all_checks(), only)
    seconds_at_most = math.inf if wanted.seconds is None else wanted.seconds
    began = time.monotonic()
    console = Console(stderr=True)
    with console.status("reading the machine, and querying torch") as shown:

        def show_progress(check: Check) -> None:
            shown.update(check.about)
            if check.measure and not console.is_terminal:  # a log has no line that changes
                print(f"{PROGRAM}: measuring {check.about}", file=sys.stderr, flush=True)

        evidence = read_here()
        diagnosis = diagnose(
            evidence,
            checks,
            full=wanted.full,
            only=only,
            seconds_at_most=seconds_at_most,
            on_check=show_progress,
        )
    private = Private.of_this_machine(os.environ)

    def clean(text: str) -> str:
        return _SERIAL.sub("(redacted)", scrub_text(text, private))

    seconds = time.monotonic() - began
    if wanted.json is not None:
        content = to_dict(diagnosis, about(evidence), seconds)
        _write(wanted.json, json.dumps(map_strings(content, clean, str), indent=2))
        return diagnosis.exit_code
    width = min(max(shutil.get_terminal_size((100, 24)).columns, NARROWEST), WIDEST)
    _show(clean("\n".join(lines(diagnosis, about(evidence), seconds, width, verbose=wanted.verbose))))
    return diagnosis.exit_code


def _parser() -> argparse.ArgumentParser:
    parser = CommandParser(
        prog=PROGRAM,
        description="Checks whether this machine is ready to train, and names the fix for each problem. "
        "Exit code: 0 ok, 1 warnings, 2 failures.",
        epilog=f"Groups and their checks: {listing()}.",
    )
    parser.add_argument("-v", "--verbose", action="store_true", help="print everything that was read and measured")
    json_help = "print JSON instead, or write it to a file"
    parser.add_argument("--json", nargs="?", type=Path, const=Path("-"), metavar="FILE", help=json_help)
    parser.add_argument("--only", nargs="+", default=[], metavar="NAME", help="run these groups or checks only")
    parser.add_argument("--full", action="store_true", help="measure for minutes (with --drill: inject more faults)")
    seconds_help = "stop measuring after this many seconds, and name what was not run"
    parser.add_argument("--seconds", type=checked(float, lambda value: value > 0, "above 0"), help=seconds_help)
    drill = parser.add_argument_group("drill", "inject faults into real transfers, and show that each is detected")
    drill.add_argument("--drill", action="store_true", help="run the drill instead of the checks")
    drill.add_argument(
        "--device", choices=("cpu", "cuda"), help="use this device (default: cuda, which is HIP too, if torch sees one)"
    )
    drill.add_argument("--faults", type=int, help="inject this many faults (default: 2000)")
    drill.add_argument("--clean", type=int, help="make this many transfers without a fault (default: 5000)")
    drill.add_argument("--seed", type=int, help="seed of the transfers and faults (default: 0)")
    return parser


def _drill(wanted: argparse.Namespace) -> int:
    if wanted.only:
        raise UsageError("--drill takes no --only: leave it out")
    if wanted.json is not None and wanted.json != Path("-") and not can_be_file(wanted.json):
        raise UsageError(f"--json {wanted.json} is not a file in a directory that exists; choose another")
    counts = {"faults": 10_000, "clean": 1_000_000} if wanted.full else {}
    for name in ("faults", "clean", "seed"):
        given = getattr(wanted, name)
        if given is not None:
            counts[name] = given
    for name, count in counts.items():
        least = int(name != "seed")
        if not least <= count < 1 << 32:
            raise UsageError(f"--{name} is {str(count)[:20]}; give a whole number from {least} on, below 2**32")
    from hf_rocm_tune.doctor.drill import run

    done = run(wanted.device, **counts)
    if wanted.json is None or wanted.json != Path("-"):
        print(done.table())
    if wanted.json is not None:
        _write(wanted.json, json.dumps(done.to_dict()))
    failures = done.failures()
    if failures:
        raise CorruptionError(f"the drill failed: {'; '.join(failures)}; do not train on this machine until it passes")
    return 0


def _write(file: Path, text: str) -> None:
    """To standard output for ``-``."""
    if file == Path("-"):
        _show(text)
        return
    try:
        file.write_text(text + "\n", encoding="utf-8")
    except OSError as error:
        raise UsageError(f"--json {file} cannot be written: {error.strerror}; choose another") from error


def _show(text: str) -> None:
    encoding = sys.stdout.encoding or "utf-8"
    # A name may have characters that this stream cannot encode.
    print(text.encode(encoding, "backslashreplace").decode(encoding), flush=True)


def to_dict(diagnosis: Diagnosis, machine: str, seconds: float) -> dict[str, Any]:
    """The report for programs; ``machine``: in one line."""
    groups = {check.name: check.group for check in all_checks()}
    return {
        "schema": 2,
        "version": __version__,
        "machine": machine,
        "exit_code": diagnosis.exit_code,
        "counts": {status: diagnosis.count(status) for status in (*_COUNTED, "skipped")},
        "seconds": round(seconds, 1),
        "seconds_by_check": diagnosis.seconds,
        "findings": [
            {**finding.to_dict(), "group": groups[finding.check], "links": list(links_of(finding.source))}
            for finding in diagnosis.findings
        ],
    }


def about(evidence: Evidence) -> str:
    """The machine in one line: cards, processor, kernel and torch."""
    machine = evidence.machine
    cards = [name_of(gpu) for gpu in evidence.candidates] or [device.name for device in evidence.devices] or ["no card"]
    named = []
    for name, count in Counter(cards).items():
        named.append(f"{count} x {name}" if count > 1 else name)
    version = evidence.software.torch_version
    torch = f"torch {version}" if version else "no torch"
    return ", ".join([" + ".join(named), machine.cpu, f"{machine.platform} {machine.release}", torch])


def name_of(gpu: Gpu) -> str:
    return gpu.card.name if gpu.card else f"AMD {gpu.arch or 'GPU'}"


def plain(text: str) -> str:
    """One line of printable text; a file of the kernel's may contain anything."""
    return " ".join(one_line(text).split())


def lines(diagnosis: Diagnosis, machine: str, seconds: float, width: int, *, verbose: bool) -> Iterator[str]:
    """The report for a terminal: a line for each group, then warnings and failures, then the verdict."""

    def wrapped(text: str, head: str = "") -> list[str]:
        """The text after a head, which is in the first line only; words are not split."""
        room = max(width - len(head), 1)
        first, *others = textwrap.wrap(plain(text), room, break_on_hyphens=False, break_long_words=False) or [""]
        indent = " " * len(head)
        return [(head + first).rstrip(), *((indent + line).rstrip() for line in others)]

    def whole(finding: Finding) -> Iterator[str]:
        title = finding.title
        if finding.subject and finding.subject not in f"{title} {finding.text}":
            title += f" [{finding.subject}]"
        yield from wrapped(title, f"{_MARKS[finding.status]:<{_INDENT}}")
        yield from wrapped(finding.text, " " * _INDENT)
        parts = [("read", line) for line in finding.read]
        parts += [("fix", finding.fix), ("source", finding.source)]
        parts += [("", link) for link in links_of(finding.source)]
        for label, text in parts:
            if text:
                yield from wrapped(text, " " * _INDENT + f"{label:<{_LABEL}}")

    groups = {check.name: check.group for check in all_checks()}
    by_group: dict[str, list[Finding]] = {}
    skipped: dict[str, list[str]] = {}
    for finding in diagnosis.findings:
        if finding.status != "skipped":
            by_group.setdefault(groups[finding.check], []).append(finding)
        elif verbose or finding.text != NOTHING_THERE:
            skipped.setdefault(finding.text, []).append(finding.check)
    yield from (f"hf-rocm-tune doctor {__version__}", *wrapped(machine), "")
    column = max((len(GROUPS[group]) for group in by_group), default=0)
    for group, findings in by_group.items():
        if verbose:
            yield from ("", GROUPS[group])
            for finding in findings:
                yield from whole(finding)
        else:
            yield _group_line(GROUPS[group].ljust(column), findings, width)
    if not verbose:
        grave = [finding for finding in diagnosis.findings if finding.status in ("fail", "warn")]
        for finding in sorted(grave, key=_gravity):
            yield from ("", *whole(finding))
    for reason, checks in skipped.items():
        yield from wrapped(f"not run: {', '.join(dict.fromkeys(checks))}: {reason}", f"{'-':<{_INDENT}}")
    more = "" if verbose else "; -v shows all of it"
    verdict = f"Verdict: {_VERDICTS[diagnosis.exit_code]}{more}."
    yield from ("", *wrapped(f"{_summary(diagnosis)}; {seconds:.0f} s. {verdict}"))


def _gravity(finding: Finding) -> int:
    """The worst first."""
    return _WORST.index(finding.status)


def _summary(diagnosis: Diagnosis) -> str:
    """How many findings there are of each status."""
    counts = []
    for status, word in _COUNTED.items():
        count = diagnosis.count(status)
        if count > 1 and status in ("fail", "warn", "info"):
            word += "s"
        if count:
            counts.append(f"{count} {word}")
    return ", ".join(counts) or "nothing was checked"


def _group_line(title: str, findings: Sequence[Finding], width: int) -> str:
    """One line: what is not in order first, then what is, as far as there is room, and how many more."""
    ordered = sorted(findings, key=_gravity)
    titles = []
    for finding in ordered:
        text = finding.title
        if finding.status == "unknown":
            text = f"{finding.check} unknown"
        if text not in titles:
            titles.append(text)
    room = width - _INDENT - len(title) - 2
    text = plain(", ".join(titles))
    more = 0
    while len(text) > room and len(titles) > 1:
        titles.pop()
        more += 1
        text = plain(", ".join([*titles, f"{more} more"]))
    text = textwrap.shorten(text, room, placeholder=" ...")
    return f"{_MARKS[ordered[0].status]:<{_INDENT}}{title}  {text}"
