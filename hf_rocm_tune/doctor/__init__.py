"""Is this machine fit to train, and if not, how is it fixed? And the drill, which shows that detection works.

Reading order: `findings` (what a check is given and says), one file a family of checks (`access software host links`
read, `links transfers arithmetic layers` measure), `diagnose` (which runs them, measurements in children), `command`;
`capture` takes a machine elsewhere. For a program: ``quick``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hf_rocm_tune.doctor.diagnose import quick

__all__ = ["quick"]


def __getattr__(name: str) -> Any:
    # Not imported at once: a measuring child imports this package and needs none of it.
    if name != "quick":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from hf_rocm_tune.doctor.diagnose import quick

    return quick
