"""``hf-rocm-tune merge``, ``generate`` and ``chat``: flags (checked before torch is imported), prompts, conversation.

The merged directory and answers go to standard output, everything else to standard error.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Callable, Iterable
from contextlib import nullcontext, suppress
from dataclasses import replace
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from hf_rocm_tune.errors import TuneError, UsageError, checked
from hf_rocm_tune.foreign import parse_json, visible
from hf_rocm_tune.publish import export, say

if TYPE_CHECKING:
    from hf_rocm_tune.publish.generate import Answer, Loaded, Messages, Prompt

_DTYPES = ("float32", "float16", "bfloat16")


# ---- flags ----------------------------------------------------------------------------------------------------------


def add_chat_flags(parser: argparse.ArgumentParser) -> None:
    """Flags of the model and of sampling."""
    add = parser.add_argument
    at_least_one = checked(int, lambda value: value >= 1, "1 or more")
    add("model", help="directory of an adapter or a model, or a Hub id of either")
    add("--base", help="base of an adapter, where it is not the one that the adapter names")
    add("--revision", help="branch, tag or commit of a Hub id")
    add(
        "--dtype",
        default="auto",
        choices=("auto", *_DTYPES),
        help="load the weights in this dtype (default: auto, as the model says)",
    )
    add("--load_in_4bit", action="store_true", help="quantise the base, as the adapter's run did")
    add("--trust_remote_code", action="store_true", help="run the model's own Python code")
    add("--max_new_tokens", type=at_least_one, default=256, help="stop an answer after this many tokens (default: 256)")
    warm = checked(float, lambda value: value == 0 or 1e-6 <= value < float("inf"), "0, or 1e-6 or more")
    add(
        "--temperature",
        type=warm,
        help="sampling temperature; 0 takes the likeliest token (default: as the model says)",
    )
    share = checked(float, lambda value: 0 < value <= 1, "more than 0 and at most 1")
    add("--top_p", type=share, help="draw from the likeliest tokens with this share of probability")
    add("--top_k", type=at_least_one, help="draw from this many of the likeliest tokens")
    seed = checked(int, lambda value: 0 <= value < 2**32, "0 or more and below 2**32")
    add("--seed", type=seed, default=0, help="seed of the random numbers (default: 0)")
    add("--system", help="a system message before the conversation")
    add(
        "--image",
        action="append",
        default=[],
        metavar="FILE",
        help="put this picture before the text, in a chat before that of the first message; may be given several times",
    )


def add_generate_flags(parser: argparse.ArgumentParser) -> None:
    add_chat_flags(parser)
    parser.add_argument("--compare", action="store_true", help="run the base without the adapter too")
    given = parser.add_mutually_exclusive_group()
    given.add_argument(
        "--prompt", action="append", default=[], metavar="TEXT", help="answer this prompt; may be given several times"
    )
    given.add_argument(
        "--file", type=Path, help="answer a text file with one prompt, or a .jsonl of prompts or messages"
    )
    parser.add_argument("--raw", action="store_true", help="continue the text as it is, without the chat template")
    parser.add_argument(
        "--json", action="store_true", help="print one JSON object per prompt instead of streaming text"
    )


def add_merge_flags(parser: argparse.ArgumentParser) -> None:
    size = checked(str, lambda text: re.fullmatch(r"[1-9]\d{0,17}([KMG]B)?", text) is not None, "such as 5GB or 800MB")
    parser.add_argument("adapter", help="directory or Hub id of an adapter")
    parser.add_argument("out", type=Path, help="directory to create")
    parser.add_argument("--base", help="directory or Hub id of the base model (default: the one the adapter names)")
    parser.add_argument("--dtype", choices=_DTYPES, help="store the weights in this dtype (default: that of the base)")
    parser.add_argument(
        "--max_shard_size", type=size, default="5GB", help="largest size of a weight file (default: 5GB)"
    )
    parser.add_argument(
        "--gguf",
        nargs="?",
        const=export.DEFAULT_TYPE,
        type=str.lower,
        metavar="TYPE",
        help=f"write GGUF of this type too, with llama.cpp: q8_0, f16 ... (default: {export.DEFAULT_TYPE})",
    )
    parser.add_argument(
        "--keep_base",
        action="store_true",
        help="write the adapter alone as GGUF (--gguf f16, bf16 or f32), for llama.cpp's --lora; nothing is merged",
    )
    parser.add_argument("--llama_cpp", type=Path, metavar="DIR", help="llama.cpp's directory (default: look on PATH)")
    parser.add_argument("--trust_remote_code", action="store_true", help="run the base's own Python code")


def _ready(prepare: Callable[[str | None], None], model: str) -> None:
    """Import what loads models; off a terminal it shows no progress bars."""
    prepare(model)
    from transformers.utils import logging

    if not sys.stderr.isatty():
        logging.disable_progress_bar()


# ---- the commands ---------------------------------------------------------------------------------------------------


def merge(wanted: argparse.Namespace, prepare: Callable[[str | None], None]) -> int:
    if wanted.keep_base and not wanted.gguf:
        raise UsageError("--keep_base writes an adapter as GGUF: give --gguf f16, bf16 or f32 with it")
    if wanted.llama_cpp and not wanted.gguf:
        raise UsageError("--llama_cpp needs --gguf: give both, or neither")
    if wanted.keep_base and wanted.dtype:
        raise UsageError("--keep_base merges nothing, so --dtype has no meaning: the type is the one of --gguf")
    tools = export.find_tools(wanted.gguf, wanted.llama_cpp, adapter=wanted.keep_base) if wanted.gguf else None
    _ready(prepare, wanted.adapter)
    if wanted.keep_base:
        print(_adapter_as_gguf(wanted, tools))
        return 0
    from hf_rocm_tune.publish import merge as merging

    directory = merging.merge(
        wanted.adapter,
        wanted.out,
        base_name=wanted.base,
        dtype=wanted.dtype,
        max_shard_size=wanted.max_shard_size,
        trust_remote_code=wanted.trust_remote_code,
        say=say,
    )
    print(directory)
    if tools is not None:
        try:
            print(export.export(directory, tools, say, trust_remote_code=wanted.trust_remote_code))
        except (TuneError, OSError) as error:
            kind = type(error) if isinstance(error, TuneError) else UsageError
            raise kind(f"{error}; the merged model in {directory} is complete") from error
    return 0


def _adapter_as_gguf(wanted: argparse.Namespace, tools: export.Tools | None) -> Path:
    from hf_rocm_tune.survive.saved_adapter import base_of, open_adapter

    assert tools is not None
    if wanted.out.exists() and (not wanted.out.is_dir() or any(wanted.out.iterdir())):
        raise UsageError(f"{wanted.out} exists and is not empty: choose another directory, or remove it")
    adapter = open_adapter(wanted.adapter)
    say(adapter.described)
    base = base_of(adapter, wanted.base).download(weights=False)
    trust = wanted.trust_remote_code
    return export.export_adapter(adapter, base, wanted.out.resolve(), tools, say, trust_remote_code=trust)


def generate(wanted: argparse.Namespace, prepare: Callable[[str | None], None]) -> int:
    prompts = read_prompts(wanted.prompt, wanted.file, sys.stdin)
    _ready(prepare, wanted.model)
    from hf_rocm_tune.publish.generate import Settings, answer, loaded_model, pictured, render, render_pictures

    del wanted.prompt, wanted.file
    as_json = vars(wanted).pop("json")
    with loaded_model(Settings(**vars(wanted)), say) as loaded:
        if not loaded.tokenizer.chat_template and not wanted.raw:
            say(f"the tokenizer of {wanted.model} has no chat template: prompts are taken as plain text")
        names = {}  # of the models that answer, by the key of the answer
        if wanted.compare:
            names["base"] = f"base {loaded.base}"
        names["completion"] = f"adapter {wanted.model}"
        for number, prompt in enumerate(prompts, start=1):
            seen: dict[str, Any] | None = None
            if wanted.image or pictured(prompt):
                seen = render_pictures(loaded, prompt)
                ids = seen["input_ids"][0].tolist()
            else:
                ids = render(loaded, prompt)
            row: dict[str, Any] = {"prompt": prompt, "prompt_tokens": len(ids)}
            if len(prompts) > 1 and not as_json:
                print(f"=== prompt {number} of {len(prompts)}", flush=True)
            for key, name in names.items():
                if wanted.compare and not as_json:
                    print(f"--- {name}", flush=True)
                with loaded.model.disable_adapter() if key == "base" else nullcontext():
                    if as_json:
                        given = answer(loaded, ids, seen=seen)
                    else:
                        given = _stream(loaded, ids, [], seen)
                row |= {key: given.text, "tokens": given.tokens, "complete": given.complete}
            if as_json:
                print(json.dumps(row, ensure_ascii=False), flush=True)
    return 0


def _stream(loaded: Loaded, ids: list[int], pieces: list[str], seen: dict[str, Any] | None = None) -> Answer:
    """Print an answer as it is generated; its pieces are in the list even where Ctrl-C stops it."""
    from hf_rocm_tune.publish.generate import answer

    def show(text: str) -> None:
        pieces.append(text)
        print(visible(text), end="", flush=True)

    try:
        given = answer(loaded, ids, show, seen=seen)
    except KeyboardInterrupt:
        print(flush=True)
        raise
    print(flush=True)
    if not given.complete:
        say(f"stopped after {given.tokens} tokens (--max_new_tokens, or the end of the model's context)")
    return given


# ---- prompts --------------------------------------------------------------------------------------------------------


def read_prompts(given: list[str], file: Path | None, stdin: IO[str]) -> list[Prompt]:
    """All prompts of a command line: texts, the rows of a ``.jsonl`` file, any other file, or standard input."""
    if not given and file is None and stdin.isatty():
        raise UsageError("no prompt: give --prompt TEXT, --file FILE, or text on standard input")
    try:
        if file is not None and file.suffix == ".jsonl":
            lines = enumerate(file.read_text(encoding="utf-8").split("\n"), start=1)  # JSON texts may have U+2028
            prompts = [_of_row(line, f"--file {file}, line {at}") for at, line in lines if line.strip()]
        else:
            prompts = [*given] or [file.read_text(encoding="utf-8") if file is not None else stdin.read()]
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{file or 'standard input'} cannot be read as UTF-8 text: {error}") from error
    if not prompts or any(not (prompt.strip() if isinstance(prompt, str) else prompt) for prompt in prompts):
        raise UsageError("a prompt is empty: give some text, with --prompt or on standard input")
    return prompts


def _of_row(line: str, where: str) -> Prompt:
    try:
        row = parse_json(line)
        prompt = row.get("prompt", row.get("messages"))
        if isinstance(prompt, str):
            return prompt
        roles = [(message["role"], message["content"])[0] for message in prompt]
        return list(prompt[: len(roles) - roles[::-1].index("user")])
    except (AttributeError, TypeError, KeyError, ValueError) as error:
        raise UsageError(
            f"{where}: expected JSON with 'prompt' (text) or 'messages' with 'role' and 'content', one of them the "
            "user's"
        ) from error


# ---- the conversation -----------------------------------------------------------------------------------------------

HELP = "/reset clears the conversation, /image FILE shows a picture, exit ends it; Ctrl-C stops an answer"


def chat(wanted: argparse.Namespace, prepare: Callable[[str | None], None]) -> int:
    _ready(prepare, wanted.model)
    from hf_rocm_tune.publish.generate import Settings, loaded_model

    with loaded_model(Settings(**vars(wanted)), say) as loaded:
        if not loaded.tokenizer.chat_template:
            raise UsageError(
                f"the tokenizer of {wanted.model} has no chat template, which chat needs: "
                "hf-rocm-tune generate takes plain text"
            )
        lines: Iterable[str] = sys.stdin
        if sys.stdin.isatty():
            say(HELP)
            with suppress(ImportError):
                import readline  # noqa: F401 - gives `input` its editing and history
            lines = iter(lambda: input("> "), None)
        with suppress(EOFError):
            talk(loaded, lines)
    return 0


def talk(loaded: Loaded, lines: Iterable[str]) -> Messages:
    """Answer line after line until there is none, or ``exit``; gives the conversation."""
    from hf_rocm_tune.publish.generate import open_picture, pictured, render, render_pictures

    messages: Messages = []
    shown = [*loaded.settings.image]  # files of pictures that belong to the next message
    for name in shown:
        open_picture(loaded, name)
    conversation = replace(loaded, settings=replace(loaded.settings, image=()))
    for line in lines:
        text = line.strip()
        if text in ("exit", "quit", "/exit", "/quit"):
            break
        if text == "/reset":
            messages = []
            shown = []
            say("the conversation is cleared")
        elif text.startswith("/image ") and text.removeprefix("/image ").strip():
            name = text.removeprefix("/image ").strip()
            try:
                open_picture(loaded, name)
            except UsageError as refused:
                say(str(refused))
            else:
                shown.append(name)
                say(f"{name} is shown with your next message")
        elif text.startswith("/"):
            say(HELP)
        elif text:
            content: Any = text
            if shown:
                content = [*({"type": "image", "image": name} for name in shown), {"type": "text", "text": text}]
            asked = [*messages, {"role": "user", "content": content}]
            pieces: list[str] = []
            try:
                seen = render_pictures(conversation, asked) if pictured(asked) else None
                ids = render(loaded, asked) if seen is None else seen["input_ids"][0].tolist()
                _stream(loaded, ids, pieces, seen)
            except UsageError as refused:  # no room in the context, or roles that the template refuses
                say(f"{refused}; /reset starts over")
                continue
            except KeyboardInterrupt:
                say("stopped")
            messages = [*asked, {"role": "assistant", "content": "".join(pieces)}]
            shown = []
    return messages
