"""``hf-rocm-tune chat``: a conversation on the terminal, or line by line through a pipe.

Ctrl-C while the model speaks stops that answer, and what was said until then stays in the conversation. With
``--compare`` the base answers each turn too, to the same conversation; only the adapter's answer becomes part of it.
No torch is imported before the flags have been read.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, TYPE_CHECKING

from hf_rocm_tune.errors import UsageError
from hf_rocm_tune.integrity.atomic import write_text_atomic
from hf_rocm_tune.publish import say
from hf_rocm_tune.publish.generate_command import (
    LoadSettings,
    Messages,
    Sampling,
    add_model_flags,
    add_sampling_flags,
    lines_of,
    reader_may_leave,
)

if TYPE_CHECKING:
    from hf_rocm_tune.publish.generate import Loaded

HELP = (
    "/reset forgets the conversation, /system TEXT sets the system message (without TEXT: removes it), /save FILE "
    "writes it as a row of training data, /quit ends; Ctrl-C stops an answer"
)


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Define the flags."""
    add_model_flags(parser)
    add_sampling_flags(parser)
    parser.epilog = "in the conversation /help lists the commands"


def run(wanted: argparse.Namespace, prepare: Callable[[], None]) -> int:
    """Talk until the user ends it."""
    settings, chosen = LoadSettings.of(wanted), Sampling.of(wanted)
    prepare()
    from hf_rocm_tune.publish.generate import loaded_model

    with reader_may_leave(), loaded_model(settings, say, compare=wanted.compare) as loaded:
        if not loaded.tokenizer.chat_template:
            raise UsageError(
                f"the tokenizer of {loaded.name} has no chat template, so there is no conversation with it: "
                "hf-rocm-tune generate takes plain text"
            )
        if sys.stdin.isatty():
            say(HELP)
        Chat(
            loaded=loaded,
            sampling=chosen,
            show=lambda text: print(text, end="", flush=True),
            tell=say,
            compare=wanted.compare,
            system=wanted.system,
        ).run(_lines(sys.stdin))
    return 0


def _lines(stdin: IO[str]) -> Iterator[str]:
    """Lines as they are typed, edited with readline; of a pipe just its lines, without a prompt."""
    if not stdin.isatty():
        yield from lines_of(stdin)
        return
    if importlib.util.find_spec("readline") is not None:
        importlib.import_module("readline")  # gives `input` its editing and history
    while True:
        try:
            yield input("> ")
        except EOFError:
            print()
            return
        except KeyboardInterrupt:
            print()
            say("/quit or Ctrl-D ends the conversation")


@dataclass(kw_only=True)
class Chat:
    """One conversation.

    Attributes:
        loaded: who answers.
        sampling: how tokens are chosen.
        show: prints text of answers as it is, without a line end.
        tell: prints a line about the conversation, not of it.
        compare: let the base answer too.
        system: the system message.
        messages: what was said.
    """

    loaded: Loaded
    sampling: Sampling
    show: Callable[[str], None]
    tell: Callable[[str], None]
    compare: bool = False
    system: str | None = None
    messages: Messages = field(default_factory=list)

    def run(self, lines: Iterator[str]) -> None:
        """Answer line after line until there is none, or ``/quit``."""
        for line in lines:
            text = line.strip()
            if text.split(maxsplit=1)[:1] == ["/quit"]:
                return
            if text.startswith("/"):
                self.tell(self._command(text))
            elif text:
                self._turn(text)

    def _with_system(self, messages: Messages) -> Messages:
        return [*([{"role": "system", "content": self.system}] if self.system else []), *messages]

    def _turn(self, text: str) -> None:
        """One turn of the user's, and the model's answer to it."""
        from hf_rocm_tune.publish.generate import apply_template

        asked = [*self.messages, {"role": "user", "content": text}]
        try:
            ids = apply_template(self.loaded.tokenizer, self._with_system(asked))
            if self.compare:
                self.show("[base] ")
                with self.loaded.without_adapter():
                    self._answer(ids)
                self.show("[adapter] ")
            said = self._answer(ids)
        except UsageError as refused:  # no room in the context, or roles that the template refuses: the session goes on
            self.tell(f"{refused}; /reset begins anew")
            return
        self.messages = [*asked, {"role": "assistant", "content": said}]

    def _answer(self, ids: list[int]) -> str:
        from hf_rocm_tune.publish.generate import answer

        pieces: list[str] = []

        def write(text: str) -> None:
            pieces.append(text)
            self.show(text)

        try:
            given = answer(self.loaded, ids, self.sampling, write)
            self.show("\n")
            if not given.complete:
                self.tell(f"stopped after {given.tokens} tokens (--max_new_tokens, or the end of the model's context)")
        except KeyboardInterrupt:
            self.show("\n")
            self.tell("stopped")
        return "".join(pieces)

    def _command(self, text: str) -> str:
        name, _, rest = text.partition(" ")
        rest = rest.strip()
        if name == "/reset":
            self.messages = []
            return "the conversation is forgotten"
        if name == "/system":
            self.system = rest or None
            return "the system message is set" if rest else "there is no system message now"
        if name == "/save":
            return self._save(rest)
        return HELP if name == "/help" else f"{name} is no command: {HELP}"

    def _save(self, name: str) -> str:
        if not name:
            return "/save needs the name of a file"
        if not self.messages:
            return "nothing was said yet, so nothing is saved"
        try:
            row = json.dumps({"messages": self._with_system(self.messages)}, ensure_ascii=False)
            write_text_atomic(Path(name).expanduser(), row + "\n")
        except OSError as error:
            return f"{name} cannot be written: {error.strerror}"
        return f"saved {len(self.messages)} messages in {name}"
