"""Checks the format of the rows before a model is loaded, and converts it to TRL's.

Unchanged are the formats that TRL 1.16 reads; `as_trl` converts Alpaca's and other question-and-answer columns, and
ShareGPT's ``conversations``. Every row of a dataset is checked (about 30 seconds for a million conversations), of a
streamed one the first `STREAMED_ROWS`; not whether a chat template accepts the order of the roles.

Reading order: `check` (all rows of a split), `recognise` (which format they have), `layout` (what that says of every
row), `faults` (what is wrong with one), `traits` (what they have in common), `convert` (to TRL's format), `messages`
and `names` (what toolkits call the parts of a row).
"""

from __future__ import annotations

from hf_rocm_tune.data.formats.check import check_format, check_later, place_of
from hf_rocm_tune.data.formats.convert import as_trl, in_trls_format, with_decoded_calls
from hf_rocm_tune.data.formats.layout import FormatInfo, RowFinding
from hf_rocm_tune.data.formats.names import MARKS, MASKED, STREAMED_ROWS, Kind, Method

__all__ = [
    "MARKS",
    "MASKED",
    "STREAMED_ROWS",
    "FormatInfo",
    "Kind",
    "Method",
    "RowFinding",
    "as_trl",
    "check_format",
    "check_later",
    "in_trls_format",
    "place_of",
    "with_decoded_calls",
]
