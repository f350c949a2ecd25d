"""All machines of this directory, and the real command on a recording."""

from __future__ import annotations

import contextlib
import io
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hf_rocm_tune.cli import main
from tests.machines.cards import CARDS
from tests.machines.case import Case
from tests.machines.platforms import PLATFORMS
from tests.machines.software import SOFTWARE
from tests.machines.variables import VARIABLES

MACHINES: dict[str, Case] = {**CARDS, **SOFTWARE, **VARIABLES, **PLATFORMS}
assert len(MACHINES) == len(CARDS) + len(SOFTWARE) + len(VARIABLES) + len(PLATFORMS), "a name is given twice"
COLUMNS = 80
FORMS = {"table": (), "json": ("--json",), "markdown": ("--markdown",)}


@dataclass(frozen=True, kw_only=True)
class Replay:
    """What the command said of one recording.

    Attributes:
        codes: exit code of each form.
        text: output of each form.
        stderr: of all three.
    """

    codes: Mapping[str, int]
    text: Mapping[str, str]
    stderr: str

    @property
    def report(self) -> dict[str, Any]:
        """The JSON form, parsed."""
        parsed: dict[str, Any] = json.loads(self.text["json"])
        return parsed

    @property
    def findings(self) -> list[dict[str, Any]]:
        """The findings of the JSON form."""
        found: list[dict[str, Any]] = self.report["findings"]
        return found

    @property
    def words(self) -> str:
        """What the findings say, show and advise, one line each."""
        return "\n".join(
            line
            for one in self.findings
            for line in (one["title"], one["text"], one["cure"], *one["evidence"], *one["sources"])
        )


def command(*flags: str) -> tuple[int, str, str]:
    """``hf-rocm-tune doctor FLAGS`` in this process: exit code, standard output and standard error."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = main(["doctor", *flags])
    return code, out.getvalue(), err.getvalue()


def written(recording: Mapping[str, Any], file: Path) -> Path:
    """The recording as a file."""
    file.write_text(json.dumps(recording), encoding="utf-8")
    return file


def replay(recording: Mapping[str, Any], file: Path) -> Replay:
    """The command on a recording, in all of its forms."""
    written(recording, file)
    done = {form: command("--from", str(file), *flags) for form, flags in FORMS.items()}
    return Replay(
        codes={form: code for form, (code, _, _) in done.items()},
        text={form: out for form, (_, out, _) in done.items()},
        stderr="".join(err for _, _, err in done.values()),
    )


def statuses(found: list[dict[str, Any]], *, named: Mapping[str, list[str]]) -> dict[str, list[str]]:
    """Status to the rows found, in the form of ``Case.expected``: with their subject where ``named`` gives one."""
    told: dict[str, list[str]] = {status: [] for status in named}
    for one in found:
        if one["status"] in told:
            whole = f"{one['row']} {one['subject']}"
            told[one["status"]].append(whole if whole in named[one["status"]] else one["row"])
    return {status: sorted(rows) for status, rows in told.items()}
