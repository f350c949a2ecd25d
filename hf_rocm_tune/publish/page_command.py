"""``hf-rocm-tune report DIR``: plots of a run as PNG files, and its report as one HTML page."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from hf_rocm_tune.errors import UsageError
from hf_rocm_tune.integrity.atomic import write_text_atomic
from hf_rocm_tune.publish import page
from hf_rocm_tune.publish.history_read import Left, collect
from hf_rocm_tune.publish.history_verdict import judge
from hf_rocm_tune.publish.plots import Panel, panels
from hf_rocm_tune.publish.privacy import Private, scrub_text

PROGRAM = "hf-rocm-tune report"
PAGE_NAME = "report.html"


def main(argv: Sequence[str], *, link_of: Callable[[str], str] = lambda _: "") -> int:
    """Run the command.

    Args:
        argv: the arguments behind ``report``.
        link_of: the address of a finding's source.

    Returns:
        0; whatever goes wrong is raised.
    """
    wanted = _parser().parse_args(list(argv))
    left = collect(wanted.directory)
    target: Path = wanted.out or wanted.directory / PAGE_NAME
    _check(target)
    shown = panels(left.rows, left.report)
    from hf_rocm_tune.publish.plots_draw import svg

    drawn = [(panel, svg(panel)) for panel in shown]
    private = Private.of_this_machine(os.environ, paths=_paths(left))
    title = scrub_text(wanted.directory.absolute().name, private) or "run"
    content = page.build(page.clean(left, private), drawn, title=title, link_of=link_of)
    try:
        pictures = _write_pictures(shown, target.with_name(f"{target.stem}_plots"))
        write_text_atomic(target, content)
    except OSError as error:
        raise UsageError(
            f"{target} cannot be written: {error.strerror or error}; name another file with --out"
        ) from error
    verdict = judge(left.report, finished=left.finished, damaged=left.damaged)
    _say(f"{verdict.level}: {verdict.headline}", *verdict.notes, *(f"missing: {line}" for line in left.missing))
    print(target)
    for picture in pictures:
        print(picture)
    return 0


def _write_pictures(shown: Sequence[Panel], folder: Path) -> list[Path]:
    from hf_rocm_tune.publish.plots_draw import write_png

    if not shown:
        return []
    folder.mkdir(exist_ok=True)
    written = []
    for panel in shown:
        written.append(folder / f"{panel.name}.png")
        write_png(panel, written[-1])
    return written


def _check(target: Path) -> None:
    """Refuse a file that cannot be, before anything is drawn."""
    if os.path.isdir(target) or not target.name:  # unlike Path.is_dir, never raises
        raise UsageError(f"--out {target} is a directory; name the file of the page")
    if not os.path.isdir(target.parent):
        raise UsageError(f"--out {target}: there is no directory {target.parent}; make it, or name another file")


def _paths(left: Left) -> Mapping[str, str]:
    """The paths that the run was given: they are private wherever they lie."""
    found: dict[str, str] = {str(left.directory): ""}

    def look(value: Any) -> None:
        if isinstance(value, str) and os.path.isabs(value):
            found[value] = ""
        elif isinstance(value, dict):
            for one in value.values():
                look(one)
        elif isinstance(value, list):
            for one in value:
                look(one)

    look(dict(left.settings))
    return found


def _say(*lines: str) -> None:
    for line in lines:
        print(f"hf-rocm-tune: {' '.join(line.split())}", file=sys.stderr, flush=True)


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog=PROGRAM,
        description="Plots of a run as PNG files, and its report as one HTML page without scripts or outside requests. "
        "Reads whatever a run left, finished or not, and says what is missing.",
    )
    parser.add_argument("directory", metavar="DIR", type=Path, help="the --output_dir of a run, or a checkpoint")
    parser.add_argument(
        "--out",
        type=Path,
        metavar="FILE",
        help=f"the page (default: {PAGE_NAME} in DIR); the pictures go into FILE's name with _plots, beside it",
    )
    return parser


class _Parser(argparse.ArgumentParser):
    """argparse with its errors as ``UsageError``."""

    def error(self, message: str) -> NoReturn:
        """Say it in one line."""
        raise UsageError(f"{message}; see `{self.prog} --help`")
