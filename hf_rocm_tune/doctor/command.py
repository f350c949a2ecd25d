"""``hf-rocm-tune doctor``."""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from hf_rocm_tune.doctor import capture
from hf_rocm_tune.doctor.diagnose import all_checks, diagnose, listing, select
from hf_rocm_tune.doctor.evidence import Check, read_here
from hf_rocm_tune.doctor.measured import VARIABLE, DoctorFault
from hf_rocm_tune.doctor.report import Report, about, markdown, table
from hf_rocm_tune.errors import CommandParser, UsageError

PROGRAM = "hf-rocm-tune doctor"
NARROWEST, WIDEST = 60, 120


def main(argv: Sequence[str]) -> int:
    """Run the command.

    Args:
        argv: the arguments behind ``doctor``.

    Returns:
        0 fine, 1 warnings, 2 failures.

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
        report = capture.Identity.of_this_machine(os.environ).out_of_report(report)
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
        groups={check.name: check.group for check in all_checks()},
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
