"""Is the job alive, and how far is it? Seen from the files that it writes (`training.supervised`)."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

from hf_rocm_tune.supervisor.settings import Settings
from hf_rocm_tune.training.supervised import (
    BEGUN_FILE,
    EARLIER_FILE,
    PULSE_FILE,
    Begun,
    Patience,
    Pulse,
    read_begun,
    read_pulse,
    tell_patience,
)


class Watch:
    """Watches one start of the job.

    What an earlier start left in the directory is put aside first.

    Args:
        directory: where the job writes.
        settings: the limits.
        clock: seconds that only grow, and not while the machine sleeps.
    """

    def __init__(self, directory: Path, settings: Settings, clock: Callable[[], float] = time.monotonic) -> None:
        self._directory, self._settings, self._clock = directory, settings, clock
        (directory / PULSE_FILE).unlink(missing_ok=True)
        if (directory / BEGUN_FILE).exists():
            (directory / BEGUN_FILE).replace(directory / EARLIER_FILE)
        limits = Patience(start_seconds=settings.start_seconds, stall_seconds=settings.stall_seconds)
        tell_patience(directory, limits)
        self.begun: Begun | None = None
        self.pulse: Pulse | None = None
        self._stamp = 0
        self._since = clock()

    def look(self) -> None:
        """Reads what is new."""
        if self.begun is None:
            self.begun = read_begun(self._directory / BEGUN_FILE)
        pulse, stamp = read_pulse(self._directory / PULSE_FILE)
        if pulse is not None and (pulse, stamp) != (self.pulse, self._stamp):
            self.pulse, self._stamp, self._since = pulse, stamp, self._clock()

    def silence(self) -> float | None:
        """Seconds without a sign of life, where they are more than the settings allow; else None."""
        if self.pulse is not None and self.pulse.phase == "publish":
            return None  # an upload tells of no progress
        starting = self.pulse is None or self.pulse.phase == "start"
        limit = self._settings.start_seconds if starting else self._settings.stall_seconds
        silent = self._clock() - self._since
        return silent if limit and silent > limit else None
