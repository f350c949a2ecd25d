"""What ``generate``, ``chat`` and ``eval`` are asked to do. No torch here: a wrong flag is refused at once."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from hf_rocm_tune.errors import UsageError

DTYPES = ("auto", "float32", "bfloat16", "float16")

Messages = list[dict[str, Any]]
"""A conversation: ``role`` and ``content`` of each message."""


@dataclass(frozen=True, kw_only=True)
class LoadSettings:
    """What to load, and how.

    Args:
        model: directory of an adapter or a model, or a Hub id of either.
        base: of an adapter, where it is not the one that the adapter names.
        revision: branch, tag or commit of a Hub id.
        dtype: of the weights that are not quantised: one of `DTYPES`; "auto" is what the model's configuration says.
        load_in_4bit: quantise the base with bitsandbytes, as the adapter's run did where that is known.
        attn_implementation: passed to transformers.
        trust_remote_code: passed to transformers.

    Raises:
        UsageError: a value that is not valid, naming it.
    """

    model: str
    base: str | None = None
    revision: str | None = None
    dtype: str = "auto"
    load_in_4bit: bool = False
    attn_implementation: str | None = None
    trust_remote_code: bool = False

    def __post_init__(self) -> None:
        if self.dtype not in DTYPES:
            raise UsageError(f"--dtype {self.dtype}: choose one of {', '.join(DTYPES)}")


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """How tokens are chosen; None is what the model's generation settings say.

    Args:
        max_new_tokens: of one answer.
        temperature: 0 takes the likeliest token each time; above 0 samples.
        top_p: samples from the likeliest tokens that have this share of the probability.
        top_k: samples from so many likeliest tokens.
        min_p: samples from tokens at least this likely, relative to the likeliest.
        repetition_penalty: above 1 makes what was said before less likely.
        seed: of the random numbers.

    Raises:
        UsageError: a value out of its bounds, naming it.
    """

    max_new_tokens: int = 256
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        bounds: dict[str, tuple[Callable[[Any], bool], str]] = {
            "max_new_tokens": (lambda value: value >= 1, "1 or more"),
            "temperature": (lambda value: 0 <= value < float("inf"), "0 or more"),
            "top_p": (lambda value: 0 < value <= 1, "more than 0 and at most 1"),
            "top_k": (lambda value: value >= 1, "1 or more"),
            "min_p": (lambda value: 0 <= value <= 1, "between 0 and 1"),
            "repetition_penalty": (lambda value: 0 < value < float("inf"), "more than 0"),
            "seed": (lambda value: 0 <= value < 2**32, "0 or more and below 2**32"),
        }
        for name, (holds, expected) in bounds.items():
            value = getattr(self, name)
            if value is not None and not holds(value):
                raise UsageError(f"--{name} must be {expected}, got {value}")
        drawing = [name for name in ("top_p", "top_k", "min_p") if getattr(self, name) is not None]
        if self.temperature == 0 and drawing:
            raise UsageError(
                f"--temperature 0 takes the likeliest token, so --{drawing[0]} says nothing: leave one out"
            )
