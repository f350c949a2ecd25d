"""The diagnosis as the command shows it: a table for a terminal, Markdown for an issue report, JSON for a program."""

from __future__ import annotations

import re
import textwrap
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from rich.console import Console
from rich.text import Text

from hf_rocm_tune.doctor.diagnose import Diagnosis
from hf_rocm_tune.doctor.evidence import GROUPS, Evidence
from hf_rocm_tune.doctor.findings import Finding, Status, link_of
from hf_rocm_tune.version import __version__

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


@dataclass(frozen=True, kw_only=True)
class Report:
    """A diagnosis and its surroundings.

    Attributes:
        diagnosis: what was found.
        groups: check name to group.
        about: the machine in one line.
        source: where a recording comes from; empty for this machine.
        fault: the fault that was put in on request; empty without one.
        seconds: that all of it took.
    """

    diagnosis: Diagnosis
    groups: Mapping[str, str]
    about: str
    source: str
    fault: str
    seconds: float

    def by_group(self) -> dict[str, list[Finding]]:
        """Titles of groups to their findings, in order; what was not run is left out, see ``not_run``."""
        found: dict[str, list[Finding]] = {title: [] for title in GROUPS.values()}
        for finding in self.diagnosis.findings:
            if finding.status != "skipped":
                found[GROUPS[self.groups[finding.check]]].append(finding)
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
                "group": self.groups[finding.check],
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
