"""The diagnosis as text for a terminal."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Mapping

from hf_rocm_tune.doctor.finding import Finding, Status
from hf_rocm_tune.doctor.links import link_of
from hf_rocm_tune.doctor.outcome import Report
from hf_rocm_tune.doctor.text import plain
from hf_rocm_tune.version import __version__

_MARK: dict[Status, str] = {"ok": "ok", "info": "note", "warn": "WARN", "fail": "FAIL", "unknown": "?", "skipped": "-"}
_COLOUR: dict[Status, str] = {"ok": "32", "info": "36", "warn": "33;1", "fail": "31;1", "unknown": "35", "skipped": "2"}
_INDENT = " " * 6
_LABEL = 8
NARROWEST, WIDEST = 60, 120


def _subject(finding: Finding) -> str:
    return f" [{finding.subject}]" if finding.subject and finding.subject not in finding.title else ""


def _headline(finding: Finding) -> str:
    return f"{finding.title}{_subject(finding)}"


class Table:
    """Lays findings out.

    Args:
        width: columns of the terminal.
        colour: whether it shows colours.
    """

    def __init__(self, *, width: int = 100, colour: bool = False) -> None:
        self._width = min(max(width, NARROWEST), WIDEST)
        self._colour = colour

    def render(self, report: Report) -> str:
        """The whole table."""
        lines = [self._bold(f"hf-rocm-tune doctor {__version__}"), *self._wrapped(report.about)]
        if report.source:
            lines += self._wrapped(f"recorded: {report.source}; nothing here is about the machine that shows it")
        if report.fault:
            lines += self._wrapped(f"A FAULT IS PUT IN ON REQUEST: {report.fault}")
        for title, findings in report.by_group().items():
            lines += ["", self._bold(title)]
            for finding in findings:
                lines += self._finding(finding)
        lines += self._not_run(report)
        verdict = {
            0: "nothing that was looked at stands against training",
            1: "look at the warnings",
            2: "not fit to train as it is",
        }
        ending = f"{report.summary()}; {report.seconds:.0f} s. Verdict: {verdict[report.diagnosis.exit_code]}."
        return "\n".join([*lines, "", *self._grave(report), *self._wrapped(ending)])

    def _grave(self, report: Report) -> Iterator[str]:
        """What the verdict rests on, once more where a reader of a long table is."""
        for status in ("fail", "warn"):
            for finding in report.diagnosis.findings:
                if finding.status == status:
                    yield from self._first(f"{_MARK[status]:<{len(_INDENT)}}", status, _headline(finding))

    def _finding(self, finding: Finding) -> Iterator[str]:
        mark = f"{_MARK[finding.status]:<{len(_INDENT)}}"
        subject = _subject(finding)
        if finding.status == "unknown":
            yield from self._first(mark, finding.status, f"{finding.check}{subject}: {finding.text}")
        elif finding.status == "ok":
            yield from self._first(mark, finding.status, f"{finding.title}: {finding.text}")
        else:
            yield from self._first(mark, finding.status, _headline(finding), bold=True)
            yield from self._wrapped(finding.text, _INDENT)
        for line in finding.evidence:
            yield from self._labelled("read", line)
        if finding.status in ("ok", "unknown"):
            return
        if finding.cure:
            yield from self._labelled("cure", finding.cure)
        trust = f" ({finding.confidence})" if finding.confidence else ""
        yield from self._labelled("source", "; ".join(finding.sources) + trust)
        for link in dict.fromkeys(filter(None, map(link_of, finding.sources))):
            yield f"{_INDENT}{'':<{_LABEL}}{self._painted(link, '2')}"

    def _first(self, mark: str, status: Status, text: str, *, bold: bool = False) -> Iterator[str]:
        lines = self._wrapped(text, _INDENT)
        for number, line in enumerate(lines):
            rest = line[len(_INDENT) :]
            head = self._painted(mark, _COLOUR[status]) if number == 0 else _INDENT
            yield head + (self._bold(rest) if bold else rest)

    def _labelled(self, label: str, text: str) -> Iterator[str]:
        lines = self._wrapped(text, _INDENT + " " * _LABEL)
        for number, line in enumerate(lines):
            shown = f"{label:<{_LABEL}}" if number == 0 else " " * _LABEL
            yield _INDENT + self._painted(shown, "2") + line[len(_INDENT) + _LABEL :]

    def _not_run(self, report: Report) -> Iterator[str]:
        reasons: Mapping[str, list[str]] = report.not_run()
        if reasons:
            yield ""
            yield self._bold("Not looked at")
        for reason, checks in reasons.items():
            mark = f"{_MARK['skipped']:<{len(_INDENT)}}"
            yield from self._first(mark, "skipped", f"{', '.join(checks)}: {reason}")

    def _wrapped(self, text: str, indent: str = "") -> list[str]:
        lines = textwrap.wrap(
            plain(text),
            width=self._width,
            initial_indent=indent,
            subsequent_indent=indent,
            break_on_hyphens=False,
            break_long_words=False,
        )
        return lines or [indent]

    def _bold(self, text: str) -> str:
        return self._painted(text, "1")

    def _painted(self, text: str, code: str) -> str:
        return f"\x1b[{code}m{text}\x1b[0m" if self._colour else text
