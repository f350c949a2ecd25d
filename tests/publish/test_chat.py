"""``chat``: a conversation through a pipe and on a terminal; Ctrl-C stops an answer, not the session."""

from __future__ import annotations

import io
import json
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from hf_rocm_tune import cli
from hf_rocm_tune.publish.commands import Chat
from hf_rocm_tune.publish.generate import Loaded, Sampling, answer, apply_template

SHORT = Sampling(max_new_tokens=6, temperature=0)


@pytest.fixture
def talk(loaded: Loaded) -> Callable[..., tuple[Chat, list[str], list[str]]]:
    """A conversation, what it printed, and the lines beside it."""

    def make(lines: list[str], **more: Any) -> tuple[Chat, list[str], list[str]]:
        shown: list[str] = []
        told: list[str] = []
        chat = Chat(loaded=loaded, sampling=SHORT, **{"show": shown.append, "tell": told.append, **more})
        chat.run(iter(lines))
        return chat, shown, told

    return make


def reply(loaded: Loaded, *turns: str, system: str | None = None) -> str:
    """What the model says to turns that alternate between user and assistant."""
    messages = [{"role": "system", "content": system}] if system else []
    messages += [{"role": ("user", "assistant")[at % 2], "content": turn} for at, turn in enumerate(turns)]
    return answer(loaded, apply_template(loaded.tokenizer, messages), SHORT).text


def test_each_turn_sees_what_was_said_before(loaded: Loaded, talk: Any) -> None:
    chat, shown, _ = talk(["one\n", "\n", "two\n"])
    first = reply(loaded, "one")
    second = reply(loaded, "one", first, "two")
    assert [message["content"] for message in chat.messages] == ["one", first, "two", second]
    assert "".join(shown) == f"{first}\n{second}\n"


def test_reset_and_system(loaded: Loaded, talk: Any) -> None:
    chat, _, told = talk(["one", "/reset", "/system Be brief", "two", "/system"])
    assert chat.messages == [
        {"role": "user", "content": "two"},
        {"role": "assistant", "content": reply(loaded, "two", system="Be brief")},
    ]
    assert chat.system is None
    assert [line for line in told if "tokens" not in line] == [
        "the conversation is forgotten",
        "the system message is set",
        "there is no system message now",
    ]


def test_quit_ends_it_and_an_unknown_command_does_not(talk: Any) -> None:
    chat, _, told = talk(["/hlep", "/help", "/quit", "never said"])
    assert chat.messages == []
    assert told[0].startswith("/hlep is no command: ") and told[1] in told[0]


def test_what_is_saved_can_be_trained_on(talk: Any, tmp_path: Path) -> None:
    from hf_rocm_tune.data.formats import check_format
    from hf_rocm_tune.data.sources import load_source

    file = tmp_path / "said.jsonl"
    _, _, told = talk(
        ["/save x", "/system Be brief", "one", "/save", f"/save {tmp_path}/no/such/place", f"/save {file}"]
    )
    assert [line for line in told if "tokens" not in line][-3:] == [
        "/save needs the name of a file",
        f"{tmp_path}/no/such/place cannot be written: No such file or directory",
        f"saved 2 messages in {file}",
    ]
    assert "nothing was said yet, so nothing is saved" in told
    rows = load_source(str(file)).train
    assert check_format(rows, has_chat_template=True, model_name="m").kind == "messages"
    assert [message["role"] for message in json.loads(file.read_text())["messages"]] == ["system", "user", "assistant"]


def test_compare_lets_the_base_speak_first_and_only_the_adapter_is_remembered(loaded: Loaded, talk: Any) -> None:
    chat, shown, _ = talk(["one"], compare=True)
    mine = reply(loaded, "one")
    with loaded.without_adapter():
        base = reply(loaded, "one")
    assert base != mine
    assert "".join(shown) == f"[base] {base}\n[adapter] {mine}\n"
    assert chat.messages[-1]["content"] == mine


def test_ctrl_c_stops_the_answer_and_the_conversation_goes_on(loaded: Loaded, talk: Any) -> None:
    pieces: list[str] = []

    def show(text: str) -> None:
        pieces.append(text)
        if len(pieces) == 1:
            signal.raise_signal(signal.SIGINT)

    chat, _, told = talk(["one", "two"], show=show)
    assert told[0] == "stopped"
    assert chat.messages[1]["content"] == pieces[0]  # what was said until then stays
    assert chat.messages[3]["content"] == reply(loaded, "one", pieces[0], "two")


def test_a_conversation_that_is_full_says_so_and_goes_on(loaded: Loaded, talk: Any) -> None:
    chat, _, told = talk(["word " * 400, "one"])
    assert "shorten it; /reset begins anew" in told[0]
    assert [message["content"] for message in chat.messages] == ["one", reply(loaded, "one")]


def test_through_a_pipe_only_answers_are_printed(
    made: dict[str, Path], loaded: Loaded, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("one\n/reset\none"))
    code = cli.main(["chat", str(made["adapter"]), "--max_new_tokens", "6", "--temperature", "0"])
    printed = capsys.readouterr()
    assert (code, printed.out) == (0, 2 * (reply(loaded, "one") + "\n"))
    assert "100 % of the bytes on the device verified" in printed.err


@pytest.mark.parametrize(
    ("name", "argv", "named"),
    [
        ("bare", [], ["no chat template", "hf-rocm-tune generate"]),
        ("merged", ["--compare"], ["--compare", "whole model"]),
        ("adapter", ["--top_k", "0"], ["--top_k"]),
    ],
)
def test_wrong_input_is_one_line(
    name: str, argv: list[str], named: list[str], made: dict[str, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["chat", str(made[name]), *argv]) == 2
    errors = [line for line in capsys.readouterr().err.splitlines() if line.startswith("hf-rocm-tune: error:")]
    assert len(errors) == 1 and all(part in errors[0] for part in named)


def test_at_the_prompt_ctrl_c_says_how_to_end_and_ctrl_d_ends(
    made: dict[str, Path], loaded: Loaded, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    typed: Iterator[str | type[BaseException]] = iter([KeyboardInterrupt, "one", EOFError])

    def read(prompt: str) -> str:
        assert prompt == "> "
        found = next(typed)
        if isinstance(found, str):
            return found
        raise found

    terminal = io.StringIO()
    monkeypatch.setattr(terminal, "isatty", lambda: True)
    monkeypatch.setattr(sys, "stdin", terminal)
    monkeypatch.setattr("builtins.input", read)
    code = cli.main(["chat", str(made["adapter"]), "--max_new_tokens", "6", "--temperature", "0"])
    printed = capsys.readouterr()
    assert (code, printed.out) == (0, f"\n{reply(loaded, 'one')}\n\n")
    assert "/reset forgets" in printed.err and "/quit or Ctrl-D ends the conversation" in printed.err
