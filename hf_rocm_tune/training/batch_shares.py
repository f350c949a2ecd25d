"""``--batch_shares``: ranks on unequal cards take unequal shares of each batch, and train as if they were even.

Two cards of unequal speed wait for the slower one in every step. With shares in proportion to their speed both are
done at the same time; the rows of a step, the effective batch and the number of steps stay. The gradient stays too, up
to rounding: transformers divides each rank's loss by the label tokens of all ranks, so how many rows a rank has does
not count (``average_tokens_across_devices``; refused without it). Random draws (dropout) differ, as with any split.

Not covered: TRL's logged entropy, which is a mean over ranks whatever their shares.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from typing_extensions import override

from hf_rocm_tune.data.batch_shares import share_batches
from hf_rocm_tune.distributed.agree import everyone
from hf_rocm_tune.errors import UsageError

if TYPE_CHECKING:
    from torch.utils.data import DataLoader
    from transformers import Trainer as _Base
else:
    _Base = object

AUTO = "auto"
_REPEATS = 7


class BatchSharesMixin(_Base):
    """See the module's description.

    Args:
        batch_rows: rows of a micro-step for each rank, in their order, of ``per_device_train_batch_size`` times the
            number of ranks; None for even batches.

    Raises:
        UsageError: the loss is a mean over each rank's own rows or tokens, so that uneven shares would weigh rows of
            one rank more than those of another.
    """

    def __init__(self, *arguments: Any, batch_rows: Sequence[int] | None = None, **keywords: Any) -> None:
        super().__init__(*arguments, **keywords)
        self.batch_rows = None if batch_rows is None else tuple(batch_rows)
        if batch_rows is None:
            return
        counted = self.model_accepts_loss_kwargs or self.compute_loss_func is not None
        if not (counted and self.args.average_tokens_across_devices):
            raise UsageError(
                "--batch_shares needs a loss that is divided by the label tokens of all ranks; here it is a mean over "
                "each rank's own: leave out --batch_shares, or give --average_tokens_across_devices true and a model "
                "whose loss takes num_items_in_batch"
            )

    @override
    def _get_dataloader(self, *arguments: Any, **keywords: Any) -> DataLoader[Any]:
        loader: DataLoader[Any] = super()._get_dataloader(*arguments, **keywords)
        if keywords.get("is_training") and self.batch_rows is not None:
            share_batches(loader, self.batch_rows)
        return loader


@dataclass(frozen=True, kw_only=True)
class ChosenRows:
    """Rows of a micro-step for each rank, and where they were measured, the speeds: 10^12 operations a second."""

    rows: tuple[int, ...]
    tflops: tuple[float, ...] = ()

    def line(self) -> str:
        """For the terminal."""
        each = ", ".join(f"rank {rank} {rows}" for rank, rows in enumerate(self.rows))
        measured = (
            f"; matrix products: {', '.join(f'{speed:.3g}' for speed in self.tflops)} TFLOP/s" if self.tflops else ""
        )
        return f"batch shares: of {sum(self.rows)} rows in each micro-step {each}{measured}"


def parse_shares(text: str) -> tuple[int, ...] | None:
    """``3:1`` as numbers; None for ``auto``.

    Raises:
        ValueError: it is neither.
    """
    if text == AUTO:
        return None
    parts = text.split(":")
    if len(parts) < 2 or not all(part.isdecimal() and 1 <= int(part) <= 10**6 for part in parts):
        raise ValueError(f"--batch_shares must be auto or whole numbers such as 3:1, one for each rank, got {text}")
    return tuple(int(part) for part in parts)


def rows_of(shares: Sequence[int], total: int) -> tuple[int, ...]:
    """Rows of a micro-step for each rank.

    Args:
        shares: of each rank.
        total: rows of all of them.

    Raises:
        UsageError: they are no whole numbers.
    """
    whole = sum(shares)
    if any(total * share % whole for share in shares):
        raise UsageError(
            f"--batch_shares {':'.join(map(str, shares))} does not divide the {total} rows of a micro-step "
            f"(--per_device_train_batch_size times {len(shares)} ranks): give shares or a batch size that do"
        )
    return tuple(total * share // whole for share in shares)


def nearest_rows(speeds: Sequence[float], total: int) -> tuple[int, ...]:
    """Rows in proportion to speed, as near as whole numbers come, and at least one for each rank.

    Args:
        speeds: above 0, in any unit.
        total: rows of all ranks, at least one a rank.
    """
    assert total >= len(speeds) and min(speeds) > 0, (speeds, total)
    rows = [1] * len(speeds)
    while sum(rows) < total:
        # The next row goes to whom it costs the least time, so the slowest is done as early as it can be.
        best = min(range(len(rows)), key=lambda rank: ((rows[rank] + 1) / speeds[rank], rank))
        rows[best] += 1
    return tuple(rows)


def choose_rows(wanted: str, *, ranks: int, batch_size: int, device: torch.device) -> ChosenRows:
    """What ``--batch_shares`` means for a job. Collective where it is ``auto``.

    Args:
        wanted: the flag.
        ranks: of the job.
        batch_size: ``--per_device_train_batch_size``, the mean of all ranks.
        device: of this rank.

    Raises:
        UsageError: there is one rank, not one share for each, or they do not divide the rows.
    """
    shares, total = parse_shares(wanted), ranks * batch_size
    if ranks == 1:
        raise UsageError("--batch_shares is for several processes, and this job has one: leave it out")
    if shares is not None:
        if len(shares) != ranks:
            raise UsageError(
                f"--batch_shares {wanted} has {len(shares)} shares for {ranks} processes: give one for each"
            )
        return ChosenRows(rows=rows_of(shares, total))
    everyone([0.0])  # all measure together, as they compute together in a step: what they share counts
    speeds = tuple(row[0] for row in everyone([_product_tflops(device)]))
    return ChosenRows(rows=nearest_rows(speeds, total), tflops=speeds)


def _product_tflops(device: torch.device) -> float:
    """The median speed of a square matrix product, bfloat16 on an accelerator and float32 on the CPU."""
    on_card = device.type == "cuda"
    size, dtype = (4096, torch.bfloat16) if on_card else (512, torch.float32)
    left = torch.ones(size, size, dtype=dtype, device=device)
    seconds = []
    for _ in range(_REPEATS + 2):
        began = time.perf_counter()
        left @ left
        if on_card:
            torch.cuda.synchronize(device)
        seconds.append(time.perf_counter() - began)
    return 2 * size**3 / statistics.median(seconds[2:]) / 1e12
