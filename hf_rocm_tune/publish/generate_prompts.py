"""Where prompts come from: the command line, a file, or standard input."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO, Any

from hf_rocm_tune.errors import UsageError
from hf_rocm_tune.publish.generate_settings import Messages

Prompt = str | Messages


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
        prompts = [_decoded(stdin)]
    if not prompts or any(not (prompt.strip() if isinstance(prompt, str) else prompt) for prompt in prompts):
        raise UsageError("a prompt is empty: give some text")
    return prompts


def _decoded(stdin: IO[str]) -> str:
    try:
        return stdin.read()
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
    if not isinstance(prompt, list) or not all(_is_message(message) for message in prompt):
        raise UsageError(f"{where}: expected text, or a list of messages with 'role' and 'content'")
    last = max((at for at, message in enumerate(prompt) if message["role"] == "user"), default=-1)
    if last < 0:
        raise UsageError(f"{where}: the conversation has no message of the user to answer")
    return prompt[: last + 1]


def _is_message(message: Any) -> bool:
    return isinstance(message, dict) and isinstance(message.get("role"), str) and "content" in message
