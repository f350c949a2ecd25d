"""How patient the supervisor is."""

from __future__ import annotations

from dataclasses import dataclass

from hf_rocm_tune.errors import UsageError


@dataclass(frozen=True, kw_only=True)
class Settings:
    """The flags of ``hf-rocm-tune run``.

    Args:
        max_restarts: restarts without a new checkpoint between them; a new verified checkpoint begins the count again.
            Steps are finite, so the whole is.
        max_skips: optimizer steps that may be left out, over all of the run. More are no bad batches.
        stall_seconds: without a sign of life (one a micro-step) after which a job that trains is ended; 0 for never.
        start_seconds: the same before the first step, where nothing tells of progress: downloads, tokenising.
        backoff_seconds: before the first restart; each further one without a new checkpoint waits twice as long, up to
            five minutes.
        grace_seconds: from SIGTERM to SIGKILL for a job that stands still.

    Raises:
        UsageError: a value is out of range.
    """

    max_restarts: int = 8
    max_skips: int = 3
    stall_seconds: float = 1800.0
    start_seconds: float = 7200.0
    backoff_seconds: float = 5.0
    grace_seconds: float = 60.0

    def __post_init__(self) -> None:
        for name in self.__dataclass_fields__:
            if not getattr(self, name) >= 0:
                raise UsageError(f"--{name} must be 0 or more, got {getattr(self, name)}")
