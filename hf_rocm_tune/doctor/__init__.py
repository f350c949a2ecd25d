"""Is this machine fit to train, and if not, what cures it? And the drill, which shows that detection works.

Reading order: ``rows`` (what is known), ``finding``, ``evidence``, ``check``, ``checks`` (what is read), ``measured``
(what is tried), ``diagnose``, ``command``; ``capture`` takes a machine elsewhere. For a program: ``quick``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hf_rocm_tune.doctor.brief import quick

__all__ = ["quick"]


def __getattr__(name: str) -> Any:
    # Not imported at once: a measuring child imports this package and needs none of it.
    if name != "quick":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from hf_rocm_tune.doctor.brief import quick

    return quick
