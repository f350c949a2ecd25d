"""A conversation with a model: its messages, the commands of ``hf-rocm-tune chat``, and the turns.

Ctrl-C while the model speaks stops that answer, and what was said until then stays in the conversation. With
``compare`` the base answers each turn too, to the same conversation; only the adapter's answer becomes part of it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from hf_rocm_tune.errors import UsageError
from hf_rocm_tune.integrity.atomic import write_text_atomic
from hf_rocm_tune.publish.generate import answer, apply_template
from hf_rocm_tune.publish.generate_model import Loaded
from hf_rocm_tune.publish.generate_settings import Messages, Sampling

HELP = (
    "/reset forgets the conversation, /system TEXT sets the system message (without TEXT: removes it), /save FILE "
    "writes it as a row of training data, /quit ends; Ctrl-C stops an answer"
)

Show = Callable[[str], None]
"""Prints text as it is, without a line end."""


@dataclass(kw_only=True)
class Chat:
    """One conversation.

    Attributes:
        loaded: who answers.
        sampling: how tokens are chosen.
        show: prints answers.
        tell: prints a line about the conversation, not of it.
        compare: let the base answer too.
        messages: what was said.
    """

    loaded: Loaded
    sampling: Sampling
    show: Show
    tell: Show
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
                self.turn(text)

    def turn(self, text: str) -> None:
        """One turn of the user's, and the model's answer to it."""
        asked = [*self.messages, {"role": "user", "content": text}]
        head = [{"role": "system", "content": self.system}] if self.system else []
        try:
            ids = apply_template(self.loaded.tokenizer, [*head, *asked])
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
        if name == "/help":
            return HELP
        return f"{name} is no command: {HELP}"

    def _save(self, name: str) -> str:
        if not name:
            return "/save needs the name of a file"
        if not self.messages:
            return "nothing was said yet, so nothing is saved"
        head = [{"role": "system", "content": self.system}] if self.system else []
        try:
            row = json.dumps({"messages": [*head, *self.messages]}, ensure_ascii=False)
            write_text_atomic(Path(name).expanduser(), row + "\n")
        except OSError as error:
            return f"{name} cannot be written: {error.strerror}"
        return f"saved {len(self.messages)} messages in {name}"
