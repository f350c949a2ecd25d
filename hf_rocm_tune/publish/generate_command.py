"""``hf-rocm-tune generate``: answers to prompts on standard output, everything else on standard error; and the flags
that it shares with ``chat`` and ``eval``.

No torch here: a wrong flag is refused at once.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from hf_rocm_tune.errors import UsageError
from hf_rocm_tune.publish import say

if TYPE_CHECKING:
    from hf_rocm_tune.publish.generate import Loaded

DTYPES = ("auto", "float32", "bfloat16", "float16")

Messages = list[dict[str, Any]]
"""A conversation: ``role`` and ``content`` of each message."""
Prompt = str | Messages


@dataclass(frozen=True, kw_only=True)
class LoadSettings:
    """What to load, and how: the flags of `add_model_flags`.

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

    @classmethod
    def of(cls, wanted: argparse.Namespace) -> LoadSettings:
        """From the flags of `add_model_flags`."""
        return cls(**{field.name: getattr(wanted, field.name) for field in fields(cls)})


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """How tokens are chosen: the flags of `add_sampling_flags`. None is what the model's generation settings say.

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

    @classmethod
    def of(cls, wanted: argparse.Namespace) -> Sampling:
        """From the flags of `add_sampling_flags`."""
        return cls(**{field.name: getattr(wanted, field.name) for field in fields(cls)})


def add_model_flags(parser: argparse.ArgumentParser) -> None:
    """What to load, and how."""
    parser.add_argument("model", help="directory of an adapter or a model, or a Hub id of either")
    parser.add_argument("--base", help="base of an adapter, where it is not the one that the adapter names")
    parser.add_argument("--revision", help="branch, tag or commit of a Hub id")
    parser.add_argument("--dtype", default="auto", help=f"{', '.join(DTYPES)} (default: auto, as the model says)")
    parser.add_argument("--load_in_4bit", action="store_true", help="quantise the base, as the adapter's run did")
    parser.add_argument("--attn_implementation", help="passed to transformers")
    parser.add_argument("--trust_remote_code", action="store_true", help="run code that the model brings along")
    parser.add_argument("--compare", action="store_true", help="the base without the adapter, beside it")


def add_sampling_flags(parser: argparse.ArgumentParser) -> None:
    """How tokens are chosen."""
    parser.add_argument("--max_new_tokens", type=int, default=256, help="of an answer (default: 256)")
    parser.add_argument("--temperature", type=float, help="0: always the likeliest token (default: as the model says)")
    parser.add_argument("--top_p", type=float, help="draw from the likeliest tokens with this share of probability")
    parser.add_argument("--top_k", type=int, help="draw from so many likeliest tokens")
    parser.add_argument("--min_p", type=float, help="draw from tokens at least this likely, relative to the likeliest")
    parser.add_argument("--repetition_penalty", type=float, help="above 1: less of what was said before")
    parser.add_argument("--seed", type=int, default=0, help="of the random numbers (default: 0)")
    parser.add_argument("--system", help="a system message before the conversation")


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Define the flags of ``generate``."""
    add_model_flags(parser)
    add_sampling_flags(parser)
    parser.add_argument("--prompt", action="append", default=[], metavar="TEXT", help="may be given several times")
    parser.add_argument("--file", type=Path, help="a text that is one prompt, or a .jsonl of prompts or messages")
    parser.add_argument("--raw", action="store_true", help="without the chat template: the model goes on with the text")
    parser.add_argument("--json", action="store_true", help="one JSON object a prompt, instead of streamed text")


def run(wanted: argparse.Namespace, prepare: Callable[[], None]) -> int:
    """Answer every prompt."""
    settings, chosen = LoadSettings.of(wanted), Sampling.of(wanted)
    prompts = read_prompts(wanted.prompt, wanted.file, sys.stdin)
    prepare()
    from hf_rocm_tune.publish.generate import loaded_model, render

    with reader_may_leave(), loaded_model(settings, say, compare=wanted.compare) as loaded:
        if not loaded.tokenizer.chat_template and not wanted.raw:
            say(f"the tokenizer of {loaded.name} has no chat template: prompts are taken as plain text")
        for number, prompt in enumerate(prompts, start=1):
            ids = render(loaded, prompt, system=wanted.system, raw=wanted.raw)
            if wanted.json:
                row = _row(loaded, prompt, ids, chosen, compare=wanted.compare)
                print(json.dumps(row, ensure_ascii=False), flush=True)
                continue
            if len(prompts) > 1:
                print(f"{'' if number == 1 else chr(10)}=== prompt {number} of {len(prompts)}", flush=True)
            if wanted.compare:
                print(f"--- base {loaded.base}", flush=True)
                with loaded.without_adapter():
                    _stream(loaded, ids, chosen)
                print(f"--- adapter {loaded.name}", flush=True)
            _stream(loaded, ids, chosen)
    return 0


@contextmanager
def reader_may_leave() -> Iterator[None]:
    """Whoever reads our standard output may stop doing so (``| head``): that ends the command, and is no error."""
    try:
        yield
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # what Python still flushes at its end


def _stream(loaded: Loaded, ids: list[int], chosen: Sampling) -> None:
    """Print an answer while it is made."""
    from hf_rocm_tune.publish.generate import answer

    given = answer(loaded, ids, chosen, lambda text: print(text, end="", flush=True))
    print(flush=True)
    if not given.complete:
        say(f"stopped after {given.tokens} tokens (--max_new_tokens, or the end of the model's context)")


def _row(loaded: Loaded, prompt: Prompt, ids: list[int], chosen: Sampling, *, compare: bool) -> dict[str, Any]:
    from hf_rocm_tune.publish.generate import answer

    row: dict[str, Any] = {"prompt": prompt, "prompt_tokens": len(ids)}
    if compare:
        with loaded.without_adapter():
            row["base"] = answer(loaded, ids, chosen).text
    given = answer(loaded, ids, chosen)
    rounded = round(given.seconds, 3)
    return {**row, "completion": given.text, "tokens": given.tokens, "complete": given.complete, "seconds": rounded}


# ---- prompts --------------------------------------------------------------------------------------------------------


def read_prompts(given: Sequence[str], file: Path | None, stdin: IO[str]) -> list[Prompt]:
    """All prompts of a command line.

    Args:
        given: texts of ``--prompt``.
        file: a ``.jsonl`` file with a row for each prompt (``prompt``: text or messages; ``messages``: a conversation,
            of which everything up to the last user's turn is taken), or any other text, which is one prompt.
        stdin: read when neither is given; the whole of it is one prompt.

    Raises:
        UsageError: there is nothing, or it cannot be read.
    """
    if given and file is not None:
        raise UsageError("--prompt and --file exclude each other: give one")
    prompts: list[Prompt] = list(given)
    if file is not None:
        prompts = list(_of_file(file))
    elif not given:
        if stdin.isatty():
            raise UsageError("no prompt: give --prompt TEXT, --file FILE, or text on standard input")
        prompts = ["".join(lines_of(stdin))]
    if not prompts or any(not (prompt.strip() if isinstance(prompt, str) else prompt) for prompt in prompts):
        raise UsageError("a prompt is empty: give some text")
    return prompts


def lines_of(stdin: IO[str]) -> Iterator[str]:
    """Lines of a pipe.

    Raises:
        UsageError: they are not of the encoding that the terminal says.
    """
    try:
        yield from stdin
    except UnicodeDecodeError as error:
        raise UsageError(f"standard input is no {error.encoding} text (byte {error.start}): convert it") from error


def _of_file(file: Path) -> Iterator[Prompt]:
    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else f"it is no UTF-8 text (byte {error.start})"
        raise UsageError(f"--file {file} cannot be read: {reason}") from error
    if file.suffix != ".jsonl":
        yield text
        return
    for number, line in enumerate(text.splitlines(), start=1):
        if line.strip():
            yield _of_row(line, f"--file {file}, line {number}")


def _of_row(line: str, where: str) -> Prompt:
    try:
        row = json.loads(line)
    except ValueError as error:
        raise UsageError(f"{where} is no JSON: {error}") from error
    if not isinstance(row, dict) or not {"prompt", "messages"} & row.keys():
        raise UsageError(f"{where}: expected an object with 'prompt' or 'messages'")
    prompt = row.get("prompt", row.get("messages"))
    if isinstance(prompt, str):
        return prompt
    if not isinstance(prompt, list) or not all(
        isinstance(message, dict) and isinstance(message.get("role"), str) and "content" in message
        for message in prompt
    ):
        raise UsageError(f"{where}: expected text, or a list of messages with 'role' and 'content'")
    last = max((at for at, message in enumerate(prompt) if message["role"] == "user"), default=-1)
    if last < 0:
        raise UsageError(f"{where}: the conversation has no message of the user to answer")
    return prompt[: last + 1]
