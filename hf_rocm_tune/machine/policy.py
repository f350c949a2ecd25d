"""The environment variables that matter on ROCm, as rows: what is done about each, when, why and on whose word.

The rule above all rows: a healthy gfx1100 with a matching wheel needs no variable. Rows that set something are
conditional, and none overrides what the user has set. Where AMD contradicts itself (IOMMU) there is no row.

A row fires when all its conditions hold. A condition on something that could not be read (torch's version where torch
is missing or its version file has another form, the architectures of GPUs that could not be listed) makes the row
*cautious* instead: it says what was not known, an error becomes a warning, and nothing is set. Rows of one topic
exclude each other. A row that only says that a variable is real gives way to any that says more. Which card is visible
is chosen in ``machine/visible.py``, because it depends on the cards and not on a variable.
"""

from __future__ import annotations

from hf_rocm_tune.machine.rows_allocator import ALLOCATOR_ROWS
from hf_rocm_tune.machine.rows_names import REAL_ROWS, UNKNOWN_ROWS
from hf_rocm_tune.machine.rows_runtime import OVERRIDE_ROWS, RUNTIME_ROWS
from hf_rocm_tune.machine.rows_set import SET_ROWS
from hf_rocm_tune.machine.rules import Row

POLICY: tuple[Row, ...] = SET_ROWS + ALLOCATOR_ROWS + OVERRIDE_ROWS + RUNTIME_ROWS + UNKNOWN_ROWS + REAL_ROWS
