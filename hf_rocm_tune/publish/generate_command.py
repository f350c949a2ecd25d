"""``hf-rocm-tune generate``: answers to prompts, on standard output; everything else goes to standard error."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hf_rocm_tune.errors import UsageError
from hf_rocm_tune.publish.generate_flags import add_model_flags, add_sampling_flags, load_settings, sampling
from hf_rocm_tune.publish.generate_prompts import Prompt, read_prompts

if TYPE_CHECKING:
    from hf_rocm_tune.publish.generate import Answer
    from hf_rocm_tune.publish.generate_model import Loaded
    from hf_rocm_tune.publish.generate_settings import Sampling


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Define the flags."""
    add_model_flags(parser)
    add_sampling_flags(parser)
    parser.add_argument("--prompt", action="append", default=[], metavar="TEXT", help="may be given several times")
    parser.add_argument("--file", type=Path, help="a text that is one prompt, or a .jsonl of prompts or messages")
    parser.add_argument("--raw", action="store_true", help="without the chat template: the model goes on with the text")
    parser.add_argument("--json", action="store_true", help="one JSON object a prompt, instead of streamed text")


def run(wanted: argparse.Namespace, prepare: Callable[[], None]) -> int:
    """Answer every prompt."""
    settings, chosen = load_settings(wanted), sampling(wanted)
    prompts = read_prompts(wanted.prompt, wanted.file, sys.stdin)
    prepare()
    from hf_rocm_tune.publish.generate import render
    from hf_rocm_tune.publish.generate_model import loaded_model

    with reader_may_leave(), loaded_model(settings, say) as loaded:
        if wanted.compare:
            require_adapter(loaded)
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
            stream(loaded, ids, chosen, compare=wanted.compare)
    return 0


def say(line: str) -> None:
    """A line beside the answers."""
    print(f"hf-rocm-tune: {line}", file=sys.stderr, flush=True)


@contextmanager
def reader_may_leave() -> Iterator[None]:
    """Whoever reads our standard output may stop doing so (``| head``): that ends the command, and is no error."""
    try:
        yield
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # what Python still flushes at its end


def require_adapter(loaded: Loaded) -> None:
    """For ``--compare``.

    Raises:
        UsageError: the model is a whole one.
    """
    if loaded.adapter is None:
        raise UsageError(f"--compare sets a base beside its adapter, and {loaded.name} is a whole model")


def stream(loaded: Loaded, ids: list[int], chosen: Sampling, *, compare: bool) -> Answer:
    """Print an answer while it is made, after that of the base where both are wanted; returns the model's own."""
    if compare:
        print(f"--- base {loaded.base}", flush=True)
        with loaded.without_adapter():
            _streamed(loaded, ids, chosen)
        print(f"--- adapter {loaded.name}", flush=True)
    return _streamed(loaded, ids, chosen)


def _streamed(loaded: Loaded, ids: list[int], chosen: Sampling) -> Answer:
    from hf_rocm_tune.publish.generate import answer

    given = answer(loaded, ids, chosen, lambda text: print(text, end="", flush=True))
    print(flush=True)
    if not given.complete:
        say(f"stopped after {given.tokens} tokens (--max_new_tokens, or the end of the model's context)")
    return given


def _row(loaded: Loaded, prompt: Prompt, ids: list[int], chosen: Sampling, *, compare: bool) -> dict[str, Any]:
    from hf_rocm_tune.publish.generate import answer

    row: dict[str, Any] = {"prompt": prompt, "prompt_tokens": len(ids)}
    if compare:
        with loaded.without_adapter():
            row["base"] = answer(loaded, ids, chosen).text
    given = answer(loaded, ids, chosen)
    rounded = round(given.seconds, 3)
    return {**row, "completion": given.text, "tokens": given.tokens, "complete": given.complete, "seconds": rounded}
