"""All machines of this directory, and the real command on a machine that is written below a directory."""

from __future__ import annotations

import contextlib
import io
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from unittest import mock

from hf_rocm_tune.cli import main
from hf_rocm_tune.doctor import command as doctor_command
from hf_rocm_tune.doctor import diagnose
from hf_rocm_tune.doctor.findings import Evidence, skipped
from tests.machines.cards import CARDS
from tests.machines.case import Case
from tests.machines.platforms import PLATFORMS
from tests.machines.software import SOFTWARE
from tests.machines.variables import VARIABLES

MACHINES: dict[str, Case] = {**CARDS, **SOFTWARE, **VARIABLES, **PLATFORMS}
assert len(MACHINES) == len(CARDS) + len(SOFTWARE) + len(VARIABLES) + len(PLATFORMS), "a name is given twice"
COLUMNS = 80
FORMS = {"table": (), "verbose": ("-v",), "json": ("--json",)}


@dataclass(frozen=True, kw_only=True)
class Replay:
    """What the command said of one machine: exit code and output of each form, and stderr of all."""

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
            for line in (one["title"], one["text"], one["fix"], *one["read"], one["source"])
        )


def command(*flags: str, evidence: Evidence | None = None) -> tuple[int, str, str]:
    """``hf-rocm-tune doctor FLAGS`` in this process: exit code, standard output and standard error.

    On the machine of the evidence, nothing is measured: its cards are not here.
    """
    out, err = io.StringIO(), io.StringIO()
    with contextlib.ExitStack() as stack:
        stack.enter_context(contextlib.redirect_stdout(out))
        stack.enter_context(contextlib.redirect_stderr(err))
        if evidence is not None:
            stack.enter_context(mock.patch.object(doctor_command, "read_here", return_value=evidence))
            stack.enter_context(
                mock.patch.object(diagnose, "run_measured", return_value=[skipped(diagnose.NOTHING_THERE)])
            )
        code = main(["doctor", *flags])
    return code, out.getvalue(), err.getvalue()


def replay(evidence: Evidence) -> Replay:
    """The command on a machine, in all of its forms."""
    done = {form: command(*flags, evidence=evidence) for form, flags in FORMS.items()}
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
