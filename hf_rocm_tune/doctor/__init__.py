"""Is this machine fit to train, and if not, how is it fixed? And the drill, which shows that detection works.

Reading order: `findings` (what is known and said), `evidence`, one file a family of checks (`access software system
pcie` read; `transfers casts memory pairs gemm attention layers` measure, in children that `measured` runs), `diagnose`,
`report`, `command`; `capture` takes a machine elsewhere. For a program: ``quick``.
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
