"""DeepSpeed: what is said of it, since it moves, broadcasts and averages by itself.

Its engine takes the model over. Weights are verified up to there; what it sends between the cards afterwards passes
none of our checks, so the coverage says so and ``verify="full"`` asks for consent. Checkpoints are its own: they are
staged and get a manifest, and are not compared with the live tensors.

For LoRA there is nothing to gain: ZeRO-2 shards gradients and optimizer state, which are tens of megabytes there.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from accelerate.utils import str_to_bool

from hf_rocm_tune.errors import UsageError

if TYPE_CHECKING:
    from hf_rocm_tune.models.placement import Coverage

_ROW = {
    "tensor": "weights and gradients under DeepSpeed",
    "reason": "DeepSpeed broadcasts weights from rank 0 and averages gradients by itself",
}


def check_deepspeed(environ: Mapping[str, str], *, verify: str, consent: bool) -> None:
    """Refuse, before the model is loaded, what `with_deepspeed` would refuse after it.

    Args:
        environ: where the launcher says what it was told.
        verify: ``--verify``.
        consent: ``--consent_unverified``.

    Raises:
        UsageError: DeepSpeed is used, and everything is to be verified.
    """
    if bool(str_to_bool(environ.get("ACCELERATE_USE_DEEPSPEED", "false"))) and verify == "full" and not consent:
        raise UsageError(
            "--verify full cannot be kept with DeepSpeed, which broadcasts weights and averages gradients by itself: "
            "train with --accelerate_config dual_rx7900xt (for LoRA, ZeRO-2 gains nothing over it), or consent with "
            "--consent_unverified"
        )


def with_deepspeed(found: Coverage, *, enabled: bool) -> Coverage:
    """The coverage of a model, with what DeepSpeed does past the checks."""
    return replace(found, unverified=[*found.unverified, _ROW]) if enabled else found
