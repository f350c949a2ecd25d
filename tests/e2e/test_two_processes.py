"""Two processes with batch B train like one with batch 2B, and no rank's frozen weights come from another rank.

Accelerate deals batches out in turn, so the two batches of a step on two processes are together the one batch of the
step on one process, as long as the rows are a multiple of 2B; the loss is divided by the label tokens of all ranks. The
only difference is the order of float sums (and how far each batch is padded).
"""

from __future__ import annotations

BATCH = 2
