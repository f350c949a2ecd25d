"""``hf-rocm-tune doctor``: a table for a terminal, Markdown for an issue report, JSON for a program."""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import sys
import textwrap
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text

from hf_rocm_tune.doctor import capture
from hf_rocm_tune.doctor.diagnose import VARIABLE, Diagnosis, DoctorFault, all_checks, diagnose, listing, select
from hf_rocm_tune.doctor.findings import GROUPS, Check, Evidence, Finding, Status, link_of, read_here
from hf_rocm_tune.errors import CommandParser, UsageError
from hf_rocm_tune.version import __version__

PROGRAM = "hf-rocm-tune doctor"
NARROWEST, WIDEST = 60, 120
_COUNTED: Mapping[Status, tuple[str, str]] = {
    "fail": ("failure", "failures"),
    "warn": ("warning", "warnings"),
    "info": ("note", "notes"),
    "ok": ("fine", "fine"),
    "unknown": ("not known", "not known"),
    "skipped": ("not looked at", "not looked at"),
}
_MARKS: Mapping[Status, tuple[str, str]] = {
    "ok": ("ok", "green"),
    "info": ("note", "cyan"),
    "warn": ("WARN", "bold yellow"),
    "fail": ("FAIL", "bold red"),
    "unknown": ("?", "magenta"),
    "skipped": ("-", "dim"),
}
_VERDICTS = ("nothing that was looked at stands against training", "look at the warnings", "not fit to train as it is")
_INDENT, _LABEL = 6, 8
# What a text must not do in an issue report: open HTML, mention a user, start a table, an image or an emphasis.
_SPECIAL = re.compile(r"([\\*_\[\]<>|~#@!])")


def main(argv: Sequence[str]) -> int:
    """Run the command on the arguments behind ``doctor``: 0 fine, 1 warnings, 2 failures.

    Raises:
        UsageError: a flag, a file or the variable for faults is wrong.
    """
    wanted = _parser().parse_args(list(argv))
    # ``--only links,bar variables`` is three names.
    only, skip = (list(filter(None, ",".join(given).split(","))) for given in (wanted.only, wanted.skip))
    checks = select(all_checks(), only=only, skip=skip)
    if wanted.list:
        _show(listing(checks))
        return 0
    if wanted.capture is not None:
        return _capture(wanted.capture)
    report = _examine(checks, full=wanted.full, recording=wanted.recording)
    if wanted.json or wanted.markdown:  # these are made to be given to others; the table is for who sits here
        report = without_names(report, capture.Identity.of_this_machine(os.environ))
    if wanted.json:
        _show(json.dumps(report.to_dict(), indent=2))
    elif wanted.markdown:
        _show(markdown(report))
    else:
        width = shutil.get_terminal_size((100, 24)).columns
        console = Console(width=min(max(width, NARROWEST), WIDEST), highlight=False)
        with console.capture() as printed:
            table(report, console)
        _show(printed.get().removesuffix("\n"))
    return report.diagnosis.exit_code


def _examine(checks: Sequence[Check], *, full: bool, recording: Path | None) -> Report:
    began = time.monotonic()
    fault = None if recording else DoctorFault.from_environment(os.environ)
    if recording:
        evidence, source = capture.read(recording)
    else:
        _say("reading the machine, and asking torch")
        evidence, source = read_here()[0], ""
    diagnosis = diagnose(evidence, checks, full=full, on_check=_announce)
    _say("")
    return Report(
        diagnosis=diagnosis,
        about=about(evidence),
        source=source,
        fault=f"{VARIABLE}={os.environ[VARIABLE]}" if fault else "",
        seconds=time.monotonic() - began,
    )


def _capture(file: Path) -> int:
    if file.is_dir() or not file.parent.is_dir():
        raise UsageError(f"--capture {file} is not a file in a directory that exists; choose another")
    evidence, recording = read_here()
    things = capture.write(file, evidence, recording)
    _show(
        f"{file}: {things} things that were read of this machine, without names, secrets and serial numbers. Look "
        f"through it before you send it; `{PROGRAM} --from {file}` diagnoses it anywhere."
    )
    return 0


def _show(text: str) -> None:
    encoding = sys.stdout.encoding or "utf-8"
    # A name in a stranger's file may hold what the stream here has no letter for.
    shown = text.encode(encoding, "backslashreplace").decode(encoding)
    try:
        print(shown, flush=True)
    except BrokenPipeError:
        # Who reads it (head, a pager) has seen enough; Python would complain again when it ends.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _announce(check: Check) -> None:
    if check.measured:
        _say(f"{check.about} (about {max(check.seconds, 1):.0f} s)")


def _say(text: str) -> None:
    """What is done at the moment, on a terminal, over what was said before."""
    if sys.stderr.isatty():
        sys.stderr.write(f"\r\x1b[K{text}")
        sys.stderr.flush()


def _parser() -> argparse.ArgumentParser:
    parser = CommandParser(
        prog=PROGRAM,
        description="Is this machine fit to train, and if not, what exactly is wrong and how is it fixed? "
        "Exit code: 0 fine, 1 warnings, 2 failures.",
    )
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--json", action="store_true", help="print JSON, without names of users and secrets")
    form.add_argument("--markdown", action="store_true", help="the same as Markdown, for an issue report")
    name = "NAME"
    parser.add_argument("--only", nargs="+", default=[], metavar=name, help="run these checks or groups only")
    parser.add_argument("--skip", nargs="+", default=[], metavar=name, help="leave these checks or groups out")
    parser.add_argument("--full", action="store_true", help="run the long measured checks as well; minutes")
    action = parser.add_mutually_exclusive_group()
    action.add_argument("--list", action="store_true", help="name the checks and stop")
    action.add_argument("--capture", type=Path, metavar="FILE", help="write what was read to a file and stop")
    of_file = "diagnose a file of --capture instead of this machine"
    action.add_argument("--from", type=Path, dest="recording", metavar="FILE", help=of_file)
    return parser


@dataclass(frozen=True, kw_only=True)
class Report:
    """A diagnosis and its surroundings.

    Attributes:
        diagnosis: what was found.
        about: the machine in one line.
        source: where a recording comes from; empty for this machine.
        fault: the fault that was put in on request; empty without one.
        seconds: that all of it took.
    """

    diagnosis: Diagnosis
    about: str
    source: str
    fault: str
    seconds: float

    def by_group(self) -> dict[str, list[Finding]]:
        """Titles of groups to their findings, in order; what was not run is left out, see ``not_run``."""
        found: dict[str, list[Finding]] = {title: [] for title in GROUPS.values()}
        for finding in self.diagnosis.findings:
            if finding.status != "skipped":
                found[GROUPS[_groups()[finding.check]]].append(finding)
        return {title: findings for title, findings in found.items() if findings}

    def not_run(self) -> dict[str, list[str]]:
        """Reasons to the checks that were not run for them."""
        found: dict[str, list[str]] = {}
        for finding in self.diagnosis.findings:
            if finding.status == "skipped":
                found.setdefault(finding.text, []).append(finding.check)
        return found

    def summary(self) -> str:
        """The counts in one line."""
        counts = {status: self.diagnosis.count(status) for status in _COUNTED}
        shown = [f"{count} {_COUNTED[status][count != 1]}" for status, count in counts.items() if count]
        return ", ".join(shown) or "nothing was looked at"

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        findings = [
            finding.to_dict()
            | {
                "group": _groups()[finding.check],
                "links": [link for source in finding.sources if (link := link_of(source))],
            }
            for finding in self.diagnosis.findings
        ]
        return {
            "schema": 1,
            "version": __version__,
            "machine": self.about,
            "recorded": self.source or None,
            "fault_injection": self.fault or None,
            "exit_code": self.diagnosis.exit_code,
            "counts": {status: self.diagnosis.count(status) for status in _COUNTED},
            "seconds": round(self.seconds, 1),
            "seconds_by_check": self.diagnosis.seconds,
            "findings": findings,
        }


@cache
def _groups() -> dict[str, str]:
    return {check.name: check.group for check in all_checks()}


def without_names(report: Report, identity: capture.Identity) -> Report:
    """A report to be given to others."""

    def cleaned(finding: Finding) -> Finding:
        clean = identity.out_of_variable if finding.check == "variables" else identity.out_of
        return replace(
            finding,
            title=clean(finding.title),
            text=clean(finding.text),
            evidence=tuple(map(clean, finding.evidence)),
            cure=clean(finding.cure),
            subject=clean(finding.subject),
        )

    return replace(
        report,
        diagnosis=replace(report.diagnosis, findings=tuple(map(cleaned, report.diagnosis.findings))),
        about=identity.out_of(report.about),
        source=identity.out_of(report.source),
        fault=identity.out_of_variable(report.fault),
    )


def about(evidence: Evidence) -> str:
    """The machine in one line: what it computes on, its processor, kernel and torch."""
    machine, software = evidence.machine, evidence.software
    cards = [gpu.identity.card.name if gpu.identity.card else f"AMD {gpu.arch or 'GPU'}" for gpu in evidence.candidates]
    cards = cards or [device.name for device in evidence.devices] or ["no card"]
    version = software.torch_version.value if software else None
    kernel = machine.kernel.release.value
    parts = [
        " + ".join(f"{count} x {name}" if count > 1 else name for name, count in Counter(cards).items()),
        machine.host.cpu.value or "unknown processor",
        f"{machine.host.platform} {kernel}" if kernel else machine.host.platform,
        f"torch {version}" if version else "no torch",
    ]
    return ", ".join(parts)


def plain(text: str) -> str:
    """One line of printable text; what comes from a stranger's file may hold anything."""
    return " ".join("".join(letter if letter.isprintable() else " " for letter in text).split())


def table(report: Report, console: Console) -> None:
    """Print the diagnosis for a reader; the console decides on the width and on colours."""
    for line in _lines(report, console):
        console.print(line, no_wrap=True, overflow="ignore", crop=False)


def _lines(report: Report, console: Console) -> Iterator[Text]:
    def wrapped(text: str, head: Text | None = None, style: str = "") -> Iterator[Text]:
        """The text behind a head, which stands in the first line only; no word is cut."""
        head = head or Text()
        indent, width = len(head), max(console.width - len(head), 1)
        lines = textwrap.wrap(plain(text), width, break_on_hyphens=False, break_long_words=False) or [""]
        for number, line in enumerate(lines):
            yield Text.assemble(" " * indent if number else head, (line, style))

    def first(finding_status: Status, text: str, style: str = "") -> Iterator[Text]:
        mark, colour = _MARKS[finding_status]
        yield from wrapped(text, Text(f"{mark:<{_INDENT}}", style=colour), style)

    def labelled(label: str, text: str) -> Iterator[Text]:
        yield from wrapped(text, Text(" " * _INDENT + f"{label:<{_LABEL}}", style="dim"))

    yield Text(f"hf-rocm-tune doctor {__version__}", style="bold")
    yield from wrapped(report.about)
    if report.source:
        yield from wrapped(f"recorded: {report.source}; nothing here is about the machine that shows it")
    if report.fault:
        yield from wrapped(f"A FAULT IS PUT IN ON REQUEST: {report.fault}")
    for title, findings in report.by_group().items():
        yield from (Text(), Text(title, style="bold"))
        for one in findings:
            if one.status == "unknown":
                yield from first("unknown", f"{one.check}{_subject(one)}: {one.text}")
            elif one.status == "ok":
                yield from first("ok", f"{one.title}: {one.text}")
            else:
                yield from first(one.status, f"{one.title}{_subject(one)}", "bold")
                yield from wrapped(one.text, Text(" " * _INDENT))
            for line in one.evidence:
                yield from labelled("read", line)
            if one.status in ("ok", "unknown"):
                continue
            if one.cure:
                yield from labelled("fix", one.cure)
            yield from labelled("source", "; ".join(one.sources) + (f" ({one.confidence})" if one.confidence else ""))
            for link in dict.fromkeys(filter(None, map(link_of, one.sources))):
                yield Text(" " * (_INDENT + _LABEL) + link, style="dim")
    if report.not_run():
        yield from (Text(), Text("Not looked at", style="bold"))
    for reason, checks in report.not_run().items():
        yield from first("skipped", f"{', '.join(checks)}: {reason}")
    yield Text()
    # What the verdict rests on, once more where a reader of a long table is.
    for status in ("fail", "warn"):
        for one in report.diagnosis.findings:
            if one.status == status:
                yield from first(one.status, f"{one.title}{_subject(one)}")
    verdict = _VERDICTS[report.diagnosis.exit_code]
    yield from wrapped(f"{report.summary()}; {report.seconds:.0f} s. Verdict: {verdict}.")


def _subject(finding: Finding) -> str:
    return f" [{finding.subject}]" if finding.subject and finding.subject not in finding.title else ""


def markdown(report: Report) -> str:
    """The whole report, to be pasted into an issue."""
    lines = [f"## hf-rocm-tune doctor {__version__}", "", _escaped(report.about), "", f"**{report.summary()}**"]
    if report.source:
        lines += ["", f"Recorded: {_escaped(report.source)}"]
    if report.fault:
        lines += ["", f"**A fault was put in on request:** {_code(report.fault)}"]
    for title, findings in report.by_group().items():
        lines += ["", f"### {_escaped(title)}", ""]
        for one in findings:
            subject = f" {_code(one.subject)}" if one.subject else ""
            title = _escaped(one.check if one.status == "unknown" else one.title)
            lines.append(f"- **{one.status}** {_code(one.check)}{subject}: **{title}**. {_escaped(one.text)}")
            lines += [f"  - read: {_code(line)}" for line in one.evidence]
            if one.cure:
                lines.append(f"  - fix: {_escaped(one.cure)}")
            if one.sources:
                trust = f" ({one.confidence})" if one.confidence else ""
                lines.append(f"  - source: {'; '.join(map(_linked, one.sources))}{trust}")
    reasons = report.not_run()
    if reasons:
        lines += ["", "### Not looked at", ""]
        lines += [f"- {', '.join(map(_code, checks))}: {_escaped(reason)}" for reason, checks in reasons.items()]
    return "\n".join(lines)


def _escaped(text: str) -> str:
    """Text that reads in Markdown as it stands; what is in backticks stays code."""
    parts = plain(text).split("`")
    if len(parts) % 2 == 0:  # a backtick without a partner opens nothing
        return _SPECIAL.sub(r"\\\1", "'".join(parts))
    return "`".join(part if number % 2 else _SPECIAL.sub(r"\\\1", part) for number, part in enumerate(parts))


def _code(text: str) -> str:
    """Text as code; a backtick in it would end it."""
    return f"`{plain(text).replace('`', chr(39))}`"


def _linked(source: str) -> str:
    link = link_of(source)
    return f"[{_escaped(source)}]({link})" if link else _escaped(source)
