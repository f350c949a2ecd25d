"""The journal of one supervision: kept in memory until it is known that the directory is this run's, then on disk.

A job that is refused (another run's directory, wrong flags) never begins, so nothing is written into a directory that
is not the run's.
"""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from hf_rocm_tune.training import journal
from hf_rocm_tune.training.supervised import Begun


class Ledger:
    """Collects entries and writes them to ``survival.jsonl`` as soon as a start of the job has begun its run.

    On several machines that is for one supervisor to do, see `belongs_to`; the machine with rank 0 may be another one
    at the next start.
    """

    def __init__(self) -> None:
        self._begun: Begun | None = None
        self._is_kept_elsewhere = False
        self._waiting: list[dict[str, Any]] = []
        self.failure: OSError | None = None
        """Why the last entry could not be written."""

    def add(self, event: str, **details: Any) -> None:
        """One entry; what is None is left out. Nothing while another machine's supervisor keeps the journal."""
        if self._is_kept_elsewhere:
            return
        told = {key: value for key, value in details.items() if value is not None}
        self._waiting.append({"time": datetime.now(UTC).isoformat(timespec="seconds"), "event": event, **told})
        self._write()

    def belongs_to(self, begun: Begun) -> None:
        """The run and its directory are known now; with them who keeps the journal from here on: who leads."""
        self._begun = begun
        self._is_kept_elsewhere = not begun.leads
        if self._is_kept_elsewhere:
            self._waiting.clear()
        self._write()

    def _write(self) -> None:
        self.failure = None
        while self._begun is not None and self._waiting:
            try:
                entry = {"run_id": self._begun.run_id, **self._waiting[0]}
                journal.append(Path(self._begun.output_dir), entry)
            except OSError as error:
                self.failure = error
                return
            self._waiting.pop(0)
