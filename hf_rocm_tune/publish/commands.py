"""``hf-rocm-tune merge``, ``generate`` and ``chat``: their flags, prompts and the conversation.

Flags are checked before torch is imported. The merged directory and answers go to standard output, everything else to
standard error. In ``chat`` Ctrl-C stops the current answer, whose text so far stays in the conversation; with
``--compare`` the base answers each turn, too, and only the adapter's answer becomes part of the conversation.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import re
import shlex
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, TypeVar

from hf_rocm_tune.errors import TuneError, UsageError, checked
from hf_rocm_tune.paths import expand_user
from hf_rocm_tune.publish import export, say
from hf_rocm_tune.survive.atomic import write_text_atomic

if TYPE_CHECKING:
    from hf_rocm_tune.publish.generate import Loaded, Messages, Prompt, Sampling

T = TypeVar("T")
_DTYPES = ("float32", "float16", "bfloat16")
_UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}


# ---- flags ----------------------------------------------------------------------------------------------------------


def at_least(least: int) -> Callable[[str], int]:
    """An argparse type: a whole number from `least` on."""
    return checked(int, lambda value: value >= least, f"{least} or more")


def add_model_flags(parser: argparse.ArgumentParser) -> None:
    """Flags of the model."""
    parser.add_argument("model", help="directory of an adapter or a model, or a Hub id of either")
    parser.add_argument("--base", help="base of an adapter, where it is not the one that the adapter names")
    parser.add_argument("--revision", help="branch, tag or commit of a Hub id")
    parser.add_argument("--dtype", default="auto", choices=("auto", *_DTYPES), help="default: auto, as the model says")
    parser.add_argument("--load_in_4bit", action="store_true", help="quantise the base, as the adapter's run did")
    parser.add_argument("--attn_implementation", help="passed to transformers")
    parser.add_argument("--trust_remote_code", action="store_true", help="run the model's own Python code")
    parser.add_argument("--compare", action="store_true", help="run the base without the adapter too")


def add_chat_flags(parser: argparse.ArgumentParser) -> None:
    """Flags of the model and of sampling."""
    add_model_flags(parser)
    add = parser.add_argument
    positive = checked(float, lambda value: 0 < value < float("inf"), "more than 0")
    add("--max_new_tokens", type=at_least(1), default=256, help="of an answer (default: 256)")
    add(
        "--temperature",
        type=checked(float, lambda value: value == 0 or 1e-6 <= value < float("inf"), "0, or 1e-6 or more"),
        help="0: always the likeliest token (default: as the model says)",
    )
    add(
        "--top_p",
        type=checked(float, lambda value: 0 < value <= 1, "more than 0 and at most 1"),
        help="draw from the likeliest tokens with this share of probability",
    )
    add("--top_k", type=at_least(1), help="draw from so many likeliest tokens")
    add(
        "--min_p",
        type=checked(float, lambda value: 0 <= value <= 1, "between 0 and 1"),
        help="draw from tokens at least this likely, relative to the likeliest",
    )
    add("--repetition_penalty", type=positive, help="above 1: fewer repetitions")
    seed = checked(int, lambda value: 0 <= value < 2**32, "0 or more and below 2**32")
    add("--seed", type=seed, default=0, help="of the random numbers (default: 0)")
    add("--system", help="a system message before the conversation")
    parser.epilog = "in the conversation of `chat`, /help lists the commands"


def add_generate_flags(parser: argparse.ArgumentParser) -> None:
    add_chat_flags(parser)
    parser.add_argument("--prompt", action="append", default=[], metavar="TEXT", help="may be given several times")
    parser.add_argument("--file", type=Path, help="a text file with one prompt, or a .jsonl of prompts or messages")
    parser.add_argument("--raw", action="store_true", help="without the chat template: the model continues the text")
    parser.add_argument("--json", action="store_true", help="one JSON object a prompt, instead of streamed text")


def add_merge_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("adapter", help="directory or Hub id of an adapter")
    parser.add_argument("out", type=Path, help="directory to create")
    parser.add_argument("--base", help="directory or Hub id of the base model (default: the one the adapter names)")
    parser.add_argument("--dtype", choices=_DTYPES, help="of the stored weights (default: as the base stores them)")
    parser.add_argument(
        "--max_shard_size", type=_size, default="5GB", help="most bytes of a weight file (default: 5GB)"
    )
    parser.add_argument(
        "--gguf",
        nargs="?",
        const=export.DEFAULT_TYPE,
        type=str.lower,
        metavar="TYPE",
        help=f"as GGUF too, by llama.cpp, with a Modelfile for Ollama: q8_0, f16 ... (default: {export.DEFAULT_TYPE})",
    )
    parser.add_argument("--llama_cpp", type=Path, metavar="DIR", help="llama.cpp's directory (default: look on PATH)")
    parser.add_argument("--push", metavar="REPO", help="push the merged model to this repository on the Hub")
    parser.add_argument("--private", action="store_true", help="refuse a repository that is public")
    parser.add_argument("--trust_remote_code", action="store_true", help="run the base's own Python code")


def _size(text: str) -> int:
    """Bytes from "5GB", "800MiB" or a number; K, M and G of 1000, Ki, Mi and Gi of 1024."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-zA-Z]*)\s*", text)
    unit = match[2].upper() if match else ""
    if match is None or unit not in _UNITS:
        raise argparse.ArgumentTypeError(f"{text!r} is not a size: give one such as 5GB, 800MiB or a number of bytes")
    if not 1 <= (nbytes := float(match[1]) * _UNITS[unit]) < 2**63:
        raise argparse.ArgumentTypeError("give at least 1 byte, and less than 2**63")
    return int(nbytes)


def chosen(kind: type[T], wanted: argparse.Namespace) -> T:
    """A dataclass whose fields are named like flags."""
    return kind(**{one.name: getattr(wanted, one.name) for one in fields(kind)})  # type: ignore[arg-type]


def _check_sampling(wanted: argparse.Namespace) -> None:
    drawing = [name for name in ("top_p", "top_k", "min_p") if getattr(wanted, name) is not None]
    if wanted.temperature == 0 and drawing:
        raise UsageError(f"--temperature 0 takes the likeliest token, so --{drawing[0]} has no effect: leave one out")


# ---- the commands ---------------------------------------------------------------------------------------------------


def merge(wanted: argparse.Namespace, prepare: Callable[[], None]) -> int:
    if wanted.private and not wanted.push:
        raise UsageError("--private needs --push: give both, or neither")
    if wanted.llama_cpp and not wanted.gguf:
        raise UsageError("--llama_cpp needs --gguf: give both, or neither")
    tools = export.find_tools(wanted.gguf, wanted.llama_cpp) if wanted.gguf else None
    prepare()
    from hf_rocm_tune.publish import merge as merging

    directory = merging.merge(
        wanted.adapter,
        wanted.out,
        base_name=wanted.base,
        dtype=wanted.dtype,
        max_shard_bytes=wanted.max_shard_size,
        trust_remote_code=wanted.trust_remote_code,
        say=say,
    )
    print(directory)
    if tools is not None:
        try:
            print(export.export(directory, tools, say))
        except TuneError as error:
            raise type(error)(f"{error}; the merged model in {directory} is complete") from error
        except OSError as error:
            what = f"{directory / 'gguf'} cannot be written: {error.strerror}"
            raise UsageError(f"{what}; the merged model in {directory} is complete") from error
    if not wanted.push:
        return 0
    from hf_rocm_tune.publish.push import main as push

    more = [str(directory), wanted.push, *(["--private"] if wanted.private else [])]
    again = f"`{shlex.join(['hf-rocm-tune', 'push', *more])}` continues it"
    say(f"pushing it; if that fails, {again}")
    return push(more, again=again)


def generate(wanted: argparse.Namespace, prepare: Callable[[], None]) -> int:
    _check_sampling(wanted)
    prompts = read_prompts(wanted.prompt, wanted.file, sys.stdin)
    prepare()
    from hf_rocm_tune.publish.generate import LoadSettings, Sampling, loaded_model, render

    sampling = chosen(Sampling, wanted)
    with closed_stdout_is_no_error(), loaded_model(chosen(LoadSettings, wanted), say, compare=wanted.compare) as loaded:
        if not loaded.tokenizer.chat_template and not wanted.raw:
            say(f"the tokenizer of {loaded.name} has no chat template: prompts are taken as plain text")
        for number, prompt in enumerate(prompts, start=1):
            ids = render(loaded, prompt, system=wanted.system, raw=wanted.raw)
            if wanted.json:
                row = _row(loaded, prompt, ids, sampling, compare=wanted.compare)
                print(json.dumps(row, ensure_ascii=False), flush=True)
                continue
            if len(prompts) > 1:
                print(f"{'' if number == 1 else chr(10)}=== prompt {number} of {len(prompts)}", flush=True)
            if wanted.compare:
                print(f"--- base {loaded.base}", flush=True)
                with loaded.without_adapter():
                    _print_answer(loaded, ids, sampling, _show, say)
                print(f"--- adapter {loaded.name}", flush=True)
            _print_answer(loaded, ids, sampling, _show, say)
    return 0


@contextmanager
def closed_stdout_is_no_error() -> Iterator[None]:
    """A closed standard output (``| head``) ends the command without an error."""
    try:
        yield
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # what Python still flushes at its end


def _show(text: str) -> None:
    print(text, end="", flush=True)


def _print_answer(
    loaded: Loaded, ids: list[int], sampling: Sampling, show: Callable[[str], None], tell: Callable[[str], None]
) -> str:
    from hf_rocm_tune.publish.generate import answer

    given = answer(loaded, ids, sampling, show)
    show("\n")
    if not given.complete:
        tell(f"stopped after {given.tokens} tokens (--max_new_tokens, or the end of the model's context)")
    return given.text


def _row(loaded: Loaded, prompt: Prompt, ids: list[int], sampling: Sampling, *, compare: bool) -> dict[str, Any]:
    from hf_rocm_tune.publish.generate import answer

    row: dict[str, Any] = {"prompt": prompt, "prompt_tokens": len(ids)}
    if compare:
        with loaded.without_adapter():
            row["base"] = answer(loaded, ids, sampling).text
    given = answer(loaded, ids, sampling)
    rounded = round(given.seconds, 3)
    return {**row, "completion": given.text, "tokens": given.tokens, "complete": given.complete, "seconds": rounded}


# ---- prompts --------------------------------------------------------------------------------------------------------


def read_prompts(given: Sequence[str], file: Path | None, stdin: IO[str]) -> list[Prompt]:
    """All prompts of a command line: texts, the rows of a ``.jsonl`` file, any other file, or standard input.

    A row has ``prompt`` (text or messages), or ``messages``, of which all up to the last user's turn is taken.

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
        prompts = ["".join(_lines_of(stdin))]
    if not prompts or any(not (prompt.strip() if isinstance(prompt, str) else prompt) for prompt in prompts):
        raise UsageError("a prompt is empty: give some text")
    return prompts


def _lines_of(stdin: IO[str]) -> Iterator[str]:
    try:
        yield from stdin
    except UnicodeDecodeError as error:
        raise UsageError(f"standard input is not {error.encoding} text (byte {error.start}): convert it") from error


def _of_file(file: Path) -> Iterator[Prompt]:
    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else f"it is not UTF-8 text (byte {error.start})"
        raise UsageError(f"--file {file} cannot be read: {reason}") from error
    if file.suffix != ".jsonl":
        yield text
        return
    for number, line in enumerate(text.split("\n"), start=1):  # not splitlines: JSON texts may have U+2028
        if line.strip():
            yield _of_row(line, f"--file {file}, line {number}")


def _of_row(line: str, where: str) -> Prompt:
    try:
        row = json.loads(line)
    except ValueError as error:
        raise UsageError(f"{where} is not JSON: {error}") from error
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
        raise UsageError(f"{where}: the conversation has no user message to answer")
    return prompt[: last + 1]


# ---- the conversation -----------------------------------------------------------------------------------------------

HELP = (
    "/reset clears the conversation, /system TEXT sets the system message (without TEXT: removes it), /save FILE "
    "writes it to a new file as a row of training data, /quit ends; Ctrl-C stops an answer"
)


def chat(wanted: argparse.Namespace, prepare: Callable[[], None]) -> int:
    _check_sampling(wanted)
    prepare()
    from hf_rocm_tune.publish.generate import LoadSettings, Sampling, loaded_model

    sampling = chosen(Sampling, wanted)
    with closed_stdout_is_no_error(), loaded_model(chosen(LoadSettings, wanted), say, compare=wanted.compare) as loaded:
        if not loaded.tokenizer.chat_template:
            raise UsageError(
                f"the tokenizer of {loaded.name} has no chat template, which chat needs: "
                "hf-rocm-tune generate takes plain text"
            )
        if sys.stdin.isatty():
            say(HELP)
        Chat(loaded=loaded, sampling=sampling, show=_show, tell=say, compare=wanted.compare, system=wanted.system).run(
            _lines(sys.stdin)
        )
    return 0


def _lines(stdin: IO[str]) -> Iterator[str]:
    """Lines as they are typed, edited with readline; of a pipe just its lines, without a prompt."""
    if not stdin.isatty():
        yield from _lines_of(stdin)
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
    """One conversation."""

    loaded: Loaded
    sampling: Sampling
    show: Callable[[str], None]  # prints text of an answer, without a newline
    tell: Callable[[str], None]  # prints a status line
    compare: bool = False  # let the base answer too
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
        from hf_rocm_tune.publish.generate import apply_template

        asked = [*self.messages, {"role": "user", "content": text}]
        try:
            ids = apply_template(self.loaded.tokenizer, self._with_system(asked))
            if self.compare:
                self.show("[base] ")
                with self.loaded.without_adapter():
                    self._answer(ids)
                self.show("[adapter] ")
            reply = self._answer(ids)
        except (
            UsageError
        ) as refused:  # no room in the context, or roles that the template refuses: the session continues
            self.tell(f"{refused}; /reset starts over")
            return
        self.messages = [*asked, {"role": "assistant", "content": reply}]

    def _answer(self, ids: list[int]) -> str:
        pieces: list[str] = []

        def write(text: str) -> None:
            pieces.append(text)
            self.show(text)

        try:
            return _print_answer(self.loaded, ids, self.sampling, write, self.tell)
        except KeyboardInterrupt:
            self.show("\n")
            self.tell("stopped")
            return "".join(pieces)

    def _command(self, text: str) -> str:
        name, _, rest = text.partition(" ")
        rest = rest.strip()
        if name == "/reset":
            self.messages = []
            return "the conversation is cleared"
        if name == "/system":
            self.system = rest or None
            return "the system message is set" if rest else "the system message is removed"
        if name == "/save":
            return self._save(rest)
        return HELP if name == "/help" else f"unknown command {name}: {HELP}"

    def _save(self, name: str) -> str:
        if not name:
            return "/save needs the name of a file"
        if not self.messages:
            return "the conversation is empty, nothing is saved"
        file = expand_user(name)
        if os.path.lexists(file):
            return f"{name} exists and is kept: choose another name"
        try:
            row = json.dumps({"messages": self._with_system(self.messages)}, ensure_ascii=False)
            write_text_atomic(file, row + "\n")
        except (OSError, ValueError) as error:  # ValueError: a character that no path or no text may have
            return f"{name} cannot be written: {getattr(error, 'strerror', None) or error}"
        return f"saved {len(self.messages)} messages in {name}"
