"""``hf-rocm-tune doctor``: a table for a terminal, Markdown for an issue report, JSON for a program; and a capture:
the machine as a file without names and secrets, which can be diagnosed elsewhere.

The file is a recording (see ``machine.sysfs``) with the doctor's own sections::

    {"schema": 1, "source": "hf-rocm-tune 0.1.0", ..., "software": {...}, "environ": {"HIP_VISIBLE_DEVICES": "0"}}

``software`` is ``Software.to_dict()``; ``environ`` has only variables of the policy. What depends on a missing section
is unknown. Every string, keys included, is redacted, as in the reports of ``--json`` and ``--markdown``.

Secrets: see ``hf_rocm_tune.redaction``. Not covered: directories other than home directories, except names in them; and
names in ``_PUBLIC``, which are also words of the system.
"""

from __future__ import annotations

import argparse
import base64
import fnmatch
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

from hf_rocm_tune.doctor.diagnose import VARIABLE, Diagnosis, DoctorFault, all_checks, diagnose, listing, select
from hf_rocm_tune.doctor.findings import GROUPS, Check, Evidence, Finding, Status, read_here
from hf_rocm_tune.errors import CommandParser, UsageError
from hf_rocm_tune.machine.process import FILTERS
from hf_rocm_tune.machine.software import Software
from hf_rocm_tune.machine.survey import PACKED_CONFIG, survey
from hf_rocm_tune.machine.sysfs import RecordedTree
from hf_rocm_tune.machine.variables import POLICY, link_of
from hf_rocm_tune.paths import can_be_file
from hf_rocm_tune.redaction import Private, map_strings, redact
from hf_rocm_tune.survive.atomic import write_text_atomic
from hf_rocm_tune.version import __version__

PROGRAM = "hf-rocm-tune doctor"
NARROWEST, WIDEST = 60, 120
_COUNTED: Mapping[Status, tuple[str, str]] = {
    "fail": ("failure", "failures"),
    "warn": ("warning", "warnings"),
    "info": ("note", "notes"),
    "ok": ("ok", "ok"),
    "unknown": ("unknown", "unknown"),
    "skipped": ("not run", "not run"),
}
_MARKS: Mapping[Status, tuple[str, str]] = {
    "ok": ("ok", "green"),
    "info": ("note", "cyan"),
    "warn": ("WARN", "bold yellow"),
    "fail": ("FAIL", "bold red"),
    "unknown": ("?", "magenta"),
    "skipped": ("-", "dim"),
}
_VERDICTS = ("no problem found in what was checked", "check the warnings", "not ready to train")
_INDENT, _LABEL = 6, 8
# Escaped in an issue report: HTML, mentions, tables, images, emphasis.
_SPECIAL = re.compile(r"([\\*_\[\]<>|~#@!])")


def main(argv: Sequence[str]) -> int:
    """Run the command on the arguments after ``doctor``: 0 ok, 1 warnings, 2 failures.

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
    if wanted.json or wanted.markdown:  # these are for others; the table is for the user
        report = without_names(report, PrivateNames.of_this_machine(os.environ))
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
        evidence, source = read_capture(recording)
    else:
        _say("reading the machine, and querying torch")
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
    if not can_be_file(file):
        raise UsageError(f"--capture {file} is not a file in a directory that exists; choose another")
    evidence, recording = read_here()
    things = write_capture(file, evidence, recording)
    _show(
        f"{file}: {things} entries of this machine, without names, secrets and serial numbers. Check it before you "
        f"send it; `{PROGRAM} --from {file}` diagnoses it on any machine."
    )
    return 0


def _show(text: str) -> None:
    encoding = sys.stdout.encoding or "utf-8"
    # A name in a capture may have characters that this stream cannot encode.
    print(text.encode(encoding, "backslashreplace").decode(encoding), flush=True)


def _announce(check: Check) -> None:
    if check.measured:
        _say(f"{check.about} (about {max(check.seconds, 1):.0f} s)")


def _say(text: str) -> None:
    """Show the current step on a terminal, over the previous one."""
    if sys.stderr.isatty():
        sys.stderr.write(f"\r\x1b[K{text}")
        sys.stderr.flush()


def _parser() -> argparse.ArgumentParser:
    parser = CommandParser(
        prog=PROGRAM,
        description="Checks whether this machine is ready to train, and names the fix for each problem. "
        "Exit code: 0 ok, 1 warnings, 2 failures.",
    )
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--json", action="store_true", help="print JSON, without names of users and secrets")
    form.add_argument("--markdown", action="store_true", help="the same as Markdown, for an issue report")
    name = "NAME"
    parser.add_argument("--only", nargs="+", default=[], metavar=name, help="run these checks or groups only")
    parser.add_argument("--skip", nargs="+", default=[], metavar=name, help="leave these checks or groups out")
    parser.add_argument("--full", action="store_true", help="run the long measured checks as well; minutes")
    action = parser.add_mutually_exclusive_group()
    action.add_argument("--list", action="store_true", help="list the checks, and exit")
    action.add_argument("--capture", type=Path, metavar="FILE", help="write what was read to a file, and exit")
    of_file = "diagnose a file of --capture instead of this machine"
    action.add_argument("--from", type=Path, dest="recording", metavar="FILE", help=of_file)
    return parser


@dataclass(frozen=True, kw_only=True)
class Report:
    """A diagnosis and its surroundings.

    Attributes:
        diagnosis: what was found.
        about: the machine in one line.
        source: of a recording; empty for this machine.
        fault: the injected fault, or empty.
        seconds: total time.
    """

    diagnosis: Diagnosis
    about: str
    source: str
    fault: str
    seconds: float

    def by_group(self) -> dict[str, list[Finding]]:
        """Titles of groups to their findings, in order, without skipped checks (see ``not_run``)."""
        found: dict[str, list[Finding]] = {title: [] for title in GROUPS.values()}
        for finding in self.diagnosis.findings:
            if finding.status != "skipped":
                found[GROUPS[_groups()[finding.check]]].append(finding)
        return {title: findings for title, findings in found.items() if findings}

    def not_run(self) -> dict[str, list[str]]:
        found: dict[str, list[str]] = {}
        for finding in self.diagnosis.findings:
            if finding.status == "skipped":
                found.setdefault(finding.text, []).append(finding.check)
        return found

    def summary(self) -> str:
        counts = {status: self.diagnosis.count(status) for status in _COUNTED}
        shown = [f"{count} {_COUNTED[status][count != 1]}" for status, count in counts.items() if count]
        return ", ".join(shown) or "no check was run"

    def to_dict(self) -> dict[str, Any]:
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


def without_names(report: Report, owner: PrivateNames) -> Report:

    def cleaned(finding: Finding) -> Finding:
        clean = owner.out_of_variable if finding.check == "variables" else owner.out_of
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
        about=owner.out_of(report.about),
        source=owner.out_of(report.source),
        fault=owner.out_of_variable(report.fault),
    )


def about(evidence: Evidence) -> str:
    """The machine in one line: cards, processor, kernel and torch."""
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
    """One line of printable text; a capture may contain anything."""
    return " ".join("".join(letter if letter.isprintable() else " " for letter in text).split())


def table(report: Report, console: Console) -> None:
    """Print the diagnosis; the console decides on the width and on colours."""
    for line in _lines(report, console):
        console.print(line, no_wrap=True, overflow="ignore", crop=False)


def _lines(report: Report, console: Console) -> Iterator[Text]:
    def wrapped(text: str, head: Text | None = None, style: str = "") -> Iterator[Text]:
        """The text after a head, which is in the first line only; words are not split."""
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
        yield from wrapped(f"recorded: {report.source}; the findings are not about this machine")
    if report.fault:
        yield from wrapped(f"A FAULT IS INJECTED ON REQUEST: {report.fault}")
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
        yield from (Text(), Text("Not run", style="bold"))
    for reason, checks in report.not_run().items():
        yield from first("skipped", f"{', '.join(checks)}: {reason}")
    yield Text()
    # The failures and warnings again, at the end of a long table.
    for status in ("fail", "warn"):
        for one in report.diagnosis.findings:
            if one.status == status:
                yield from first(one.status, f"{one.title}{_subject(one)}")
    verdict = _VERDICTS[report.diagnosis.exit_code]
    yield from wrapped(f"{report.summary()}; {report.seconds:.0f} s. Verdict: {verdict}.")


def _subject(finding: Finding) -> str:
    return f" [{finding.subject}]" if finding.subject and finding.subject not in finding.title else ""


def markdown(report: Report) -> str:
    lines = [f"## hf-rocm-tune doctor {__version__}", "", _escaped(report.about), "", f"**{report.summary()}**"]
    if report.source:
        lines += ["", f"Recorded: {_escaped(report.source)}"]
    if report.fault:
        lines += ["", f"**A fault was injected on request:** {_code(report.fault)}"]
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
        lines += ["", "### Not run", ""]
        lines += [f"- {', '.join(map(_code, checks))}: {_escaped(reason)}" for reason, checks in reasons.items()]
    return "\n".join(lines)


def _escaped(text: str) -> str:
    """Text escaped for Markdown; backticks stay code."""
    parts = plain(text).split("`")
    if len(parts) % 2 == 0:  # an odd backtick is not code
        return _SPECIAL.sub(r"\\\1", "'".join(parts))
    return "`".join(part if number % 2 else _SPECIAL.sub(r"\\\1", part) for number, part in enumerate(parts))


def _code(text: str) -> str:
    """Text as code; a backtick in it would end it."""
    return f"`{plain(text).replace('`', chr(39))}`"


def _linked(source: str) -> str:
    link = link_of(source)
    return f"[{_escaped(source)}]({link})" if link else _escaped(source)


# ---- a machine as a file ----------------------------------------------------------------------------------------

MAX_BYTES = 32 << 20
_NO_TEXT = base64.b64encode(b"\0\0\0\0").decode()
_WHAT = "is it a file of `doctor --capture`?"
# Names that identify nobody, in addition to those of `redaction`.
_PUBLIC = frozenset(
    {"system", "slice", "amdgpu", "kfd", "render", "video", "card", "pci", "usb", "proc", "sys", "dev", "lib", "boot"}
    | {"podman", "lxc", "container"}
)
_FORMS: tuple[tuple[re.Pattern[str], str], ...] = (
    (re.compile(r"(?<![\w.-])(/home|/Users|/var/home|[A-Za-z]:[\\/]Users)([\\/])[^\\/\s:;,'\"`()<>]+"), r"\1\2user"),
    (re.compile(r"\b(?:[0-9a-fA-F]{2}:){5}[0-9a-fA-F]{2}\b"), "00:00:00:00:00:00"),
    (re.compile(r"\b[0-9a-fA-F]{8}-(?:[0-9a-fA-F]{4}-){3}[0-9a-fA-F]{12}\b"), "00000000-0000-0000-0000-000000000000"),
    (re.compile(r"\bGPU-[0-9a-fA-F]{8,32}\b"), "GPU-0000000000000000"),
    # Ids of containers and digests; no check reads such a long one.
    (re.compile(r"\b[0-9a-fA-F]{32,}\b"), "0" * 32),
    (re.compile(r"[\w.+-]+@[\w-]+(?:\.[\w-]+)+"), "user@host"),
    (re.compile(r"(?m)^((?:unique_id|serial_number|serial)\b\s*:?\s*)\S+"), r"\g<1>0"),
)
_IP_ADDRESS = re.compile(r"(?<![\w.])(?:[0-9]{1,3}\.){3}[0-9]{1,3}(?![\w.])")


@dataclass(frozen=True, kw_only=True)
class PrivateNames:
    """Names to redact: logins, host names, unusual home directories."""

    users: tuple[str, ...]
    hosts: tuple[str, ...]
    homes: tuple[str, ...]

    @classmethod
    def of_this_machine(cls, environ: Mapping[str, str]) -> PrivateNames:
        """Names of the user and the machine from the system and its variables, without those in ``_PUBLIC``."""
        private = Private.of_this_machine(environ)
        users, hosts = (
            tuple(name for name in names if name.lower() not in _PUBLIC) for names in (private.users, private.hosts)
        )
        return cls(users=users, hosts=hosts, homes=tuple(private.paths))

    def out_of(self, text: str) -> str:
        """One text without names, secrets and serial numbers."""
        for home in self.homes:
            if home not in ("/", "/root", "/tmp"):
                text = re.sub(rf"{re.escape(home)}(?=/|\b|$)", "/home/user", text)
        text = redact(text)
        for form, instead in _FORMS:
            text = form.sub(instead, text)
        for names, instead in ((self.users, "user"), (self.hosts, "host")):
            for name in names:
                text = re.sub(rf"(?i)(?<![A-Za-z0-9]){re.escape(name)}(?![A-Za-z0-9])", instead, text)
        return text

    def out_of_variable(self, value: str) -> str:
        """The value of a variable; network addresses too, which look like versions elsewhere."""
        return _IP_ADDRESS.sub("0.0.0.0", self.out_of(value))


def of_policy(environ: Mapping[str, str]) -> dict[str, str]:
    """The variables of the policy, and the filters of visible devices."""
    patterns = {*FILTERS, *(pattern for row in POLICY for pattern in row.variables)}
    return {
        name: value
        for name, value in sorted(environ.items())
        if any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)
    }


def pack(evidence: Evidence, recording: Mapping[str, Any], owner: PrivateNames) -> dict[str, Any]:
    """The content of a capture."""
    software = evidence.software.to_dict() if evidence.software else {}
    packed: dict[str, Any] = map_strings({**recording, "software": software, "binary": {}}, owner.out_of, owner.out_of)
    packed["source"] = f"hf-rocm-tune {__version__}, doctor --capture"
    # Only files that are always binary keep their content; others are marked as binary.
    packed["binary"] = {
        owner.out_of(path): text if path == PACKED_CONFIG or path.endswith("/gpu_metrics") else _NO_TEXT
        for path, text in recording["binary"].items()
    }
    if evidence.environ is not None:
        known = of_policy(evidence.environ)
        packed["environ"] = {name: owner.out_of_variable(value) for name, value in known.items()}
    return packed


def write_capture(file: Path, evidence: Evidence, recording: Mapping[str, Any]) -> int:
    """Write the file. Returns the number of its entries.

    Raises:
        UsageError: it cannot be written.
    """
    packed = pack(evidence, recording, PrivateNames.of_this_machine(os.environ))
    try:
        write_text_atomic(file, json.dumps(packed, indent=1, sort_keys=True) + "\n")
    except OSError as error:
        raise UsageError(f"--capture {file} cannot be written: {error.strerror}; choose another file") from error
    return sum(len(packed[section]) for section in ("files", "binary", "links", "names", "nodes"))


def read_capture(file: Path) -> tuple[Evidence, str]:
    """The evidence in a file of `write_capture`, and its source.

    Raises:
        UsageError: the file has another form.
    """
    packed = _load(file)
    tree = RecordedTree(packed)
    environ = packed.get("environ")
    known = isinstance(environ, dict) and all(isinstance(value, str) for value in environ.values())
    if environ is not None and not known:
        raise UsageError(f"--from {file}: 'environ' must map names to texts; {_WHAT}")
    try:
        software = Software.from_dict(packed["software"]) if packed.get("software") else None
    except ValueError as error:
        raise UsageError(f"--from {file}: {error}; {_WHAT}") from error
    evidence = Evidence(machine=survey(tree), software=software, environ=environ, recorded=True)
    return evidence, str(packed.get("source") or "a recording without a source")


def _load(file: Path) -> dict[str, Any]:
    try:
        with file.open("rb") as handle:
            raw = handle.read(MAX_BYTES + 1)
    except OSError as error:
        raise UsageError(f"--from {file} cannot be read: {error.strerror}") from error
    if len(raw) > MAX_BYTES:
        raise UsageError(f"--from {file} is larger than {MAX_BYTES >> 20} MiB: {_WHAT}")
    try:
        packed = json.loads(raw.decode("utf-8"))
    except (ValueError, RecursionError) as error:
        raise UsageError(f"--from {file} is not JSON ({error}): {_WHAT}") from error
    if not isinstance(packed, dict):
        raise UsageError(f"--from {file} is not a JSON object: {_WHAT}")
    return packed
