"""The diagnosis as Markdown, to be pasted into an issue report."""

from __future__ import annotations

import re
from collections.abc import Iterator

from hf_rocm_tune.doctor.finding import Finding
from hf_rocm_tune.doctor.links import link_of
from hf_rocm_tune.doctor.outcome import Report
from hf_rocm_tune.doctor.text import plain
from hf_rocm_tune.version import __version__

# What a text must not do in a report: open HTML, mention a user, start a table, an image or an emphasis.
_SPECIAL = re.compile(r"([\\*_\[\]<>|~#@!])")


def escaped(text: str) -> str:
    """Text that reads in Markdown as it stands; what is in backticks stays code."""
    parts = plain(text).split("`")
    if len(parts) % 2 == 0:  # a backtick without a partner opens nothing
        return _SPECIAL.sub(r"\\\1", "'".join(parts))
    return "`".join(part if number % 2 else _SPECIAL.sub(r"\\\1", part) for number, part in enumerate(parts))


def code(text: str) -> str:
    """Text as code; a backtick in it would end it."""
    return f"`{plain(text).replace('`', chr(39))}`"


def render(report: Report) -> str:
    """The whole report."""
    lines = [f"## hf-rocm-tune doctor {__version__}", "", escaped(report.about), "", f"**{report.summary()}**"]
    if report.source:
        lines += ["", f"Recorded: {escaped(report.source)}"]
    if report.fault:
        lines += ["", f"**A fault was put in on request:** {code(report.fault)}"]
    for title, findings in report.by_group().items():
        lines += ["", f"### {escaped(title)}", ""]
        for finding in findings:
            lines += _finding(finding)
    reasons = report.not_run()
    if reasons:
        lines += ["", "### Not looked at", ""]
        lines += [f"- {', '.join(map(code, checks))}: {escaped(reason)}" for reason, checks in reasons.items()]
    return "\n".join(lines)


def _finding(finding: Finding) -> Iterator[str]:
    subject = f" {code(finding.subject)}" if finding.subject else ""
    title = finding.check if finding.status == "unknown" else finding.title
    yield f"- **{finding.status}** {code(finding.check)}{subject}: **{escaped(title)}**. {escaped(finding.text)}"
    for line in finding.evidence:
        yield f"  - read: {code(line)}"
    if finding.cure:
        yield f"  - cure: {escaped(finding.cure)}"
    if finding.sources:
        trust = f" ({finding.confidence})" if finding.confidence else ""
        yield f"  - source: {'; '.join(map(_source, finding.sources))}{trust}"


def _source(source: str) -> str:
    link = link_of(source)
    return f"[{escaped(source)}]({link})" if link else escaped(source)
