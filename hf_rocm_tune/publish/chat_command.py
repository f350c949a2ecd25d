"""``hf-rocm-tune chat``: a conversation on the terminal, or line by line through a pipe."""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Callable, Iterator
from typing import IO

from hf_rocm_tune.errors import UsageError
from hf_rocm_tune.publish.generate_command import reader_may_leave, require_adapter, say
from hf_rocm_tune.publish.generate_flags import add_model_flags, add_sampling_flags, load_settings, sampling

_PROMPT = "> "


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Define the flags."""
    add_model_flags(parser)
    add_sampling_flags(parser)
    parser.epilog = "in the conversation /help lists the commands"


def run(wanted: argparse.Namespace, prepare: Callable[[], None]) -> int:
    """Talk until the user ends it."""
    settings, chosen = load_settings(wanted), sampling(wanted)
    prepare()
    from hf_rocm_tune.publish.chat import HELP, Chat
    from hf_rocm_tune.publish.generate_model import loaded_model

    with reader_may_leave(), loaded_model(settings, say) as loaded:
        if wanted.compare:
            require_adapter(loaded)
        if not loaded.tokenizer.chat_template:
            raise UsageError(
                f"the tokenizer of {loaded.name} has no chat template, so there is no conversation with it: "
                "hf-rocm-tune generate takes plain text"
            )
        talk = Chat(
            loaded=loaded,
            sampling=chosen,
            show=lambda text: print(text, end="", flush=True),
            tell=say,
            compare=wanted.compare,
            system=wanted.system,
        )
        if sys.stdin.isatty():
            say(HELP)
        talk.run(_lines(sys.stdin))
    return 0


def _lines(stdin: IO[str]) -> Iterator[str]:
    """Lines as they are typed, edited with readline; of a pipe just its lines, without a prompt."""
    if not stdin.isatty():
        yield from _piped(stdin)
        return
    _use_readline()
    while True:
        try:
            yield input(_PROMPT)
        except EOFError:
            print()
            return
        except KeyboardInterrupt:
            print()
            say("/quit or Ctrl-D ends the conversation")


def _piped(stdin: IO[str]) -> Iterator[str]:
    try:
        yield from stdin
    except UnicodeDecodeError as error:
        raise UsageError(f"standard input is no {error.encoding} text (byte {error.start}): convert it") from error


def _use_readline() -> None:
    """Gives `input` its editing and history, where this Python was built with it."""
    if importlib.util.find_spec("readline") is not None:
        importlib.import_module("readline")
