"""A recording answers as the machine did, errors included, and a damaged recording is one line, never a traceback."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hf_rocm_tune.machine.sysfs import (
    MAX_BYTES,
    LiveTree,
    RecordedTree,
    RecordingTree,
    Tree,
    parse_int,
    read_int,
    read_text,
)

PATHS = (
    "text",
    "binary",
    "empty",
    "huge",
    "dir",
    "dir/inner",
    "link",
    "loop",
    "dangling",
    "pipe",
    "none",
    "text/under",
)


@pytest.fixture
def odd(tmp_path: Path) -> Path:
    """A directory with one of everything that may stand where a file belongs."""
    (tmp_path / "text").write_text("16\n")
    (tmp_path / "binary").write_bytes(b"\xff\x00\x01")
    (tmp_path / "empty").touch()
    with (tmp_path / "huge").open("wb") as file:
        file.truncate(1 << 40)
    (tmp_path / "dir").mkdir()
    (tmp_path / "dir/inner").write_text("x")
    (tmp_path / "link").symlink_to("../drivers/amdgpu")
    (tmp_path / "loop").symlink_to("loop")
    (tmp_path / "dangling").symlink_to("nowhere")
    os.mkfifo(tmp_path / "pipe")
    return tmp_path


def answer(question: Callable[..., Any], *arguments: Any) -> tuple[Any, str]:
    """What a tree answers: the value, or the number of its error."""
    try:
        return question(*arguments), ""
    except OSError as error:
        return None, f"{error.errno} {error.strerror}"


def answers(tree: Tree, paths: tuple[str, ...] = PATHS) -> dict[str, list[tuple[Any, str]]]:
    """One question for every path, as the readers ask: a path is asked about in one way."""
    questions: dict[str, Callable[..., Any]] = {"dir": tree.names, "link": tree.link, "none": tree.link}
    return {path: [answer(questions.get(path, lambda at: tree.read(at, MAX_BYTES)), path)] for path in paths}


def test_a_recording_gives_every_answer_again(odd: Path) -> None:
    recorder = RecordingTree(LiveTree(odd))
    live = answers(recorder)
    assert [value for value, _ in live["text"]] == [b"16\n"]
    assert live["loop"][0][1] and live["huge"][0][1] and not live["pipe"][0][1]  # a pipe is empty, and does not block
    replayed = RecordedTree(json.loads(json.dumps(recorder.recording())))
    assert answers(replayed) == live


def test_directories_that_were_not_listed_follow_from_the_paths_below_them() -> None:
    tree = RecordedTree({"schema": 1, "files": {"/a/b/c": "1"}, "links": {"a/l": "x"}, "errors": {"a/e/f": "EACCES"}})
    assert tree.names("a") == ["b", "e", "l"]
    assert tree.names("") == ["a"]
    for question, path, error in (
        (tree.names, "a/b/c", NotADirectoryError),
        (lambda at: tree.read(at, 9), "a/b", IsADirectoryError),
        (lambda at: tree.read(at, 9), "a/e/f", PermissionError),
        (tree.link, "a/b/c", OSError),
        (tree.node, "a/none", FileNotFoundError),
    ):
        with pytest.raises(error):
            question(path)


def test_a_recorded_error_is_raised_again_with_the_system_s_words() -> None:
    tree = RecordedTree({"schema": 1, "errors": {"f": "EPERM", "g": "E_OF_ANOTHER_SYSTEM"}})
    with pytest.raises(PermissionError, match="Operation not permitted"):
        tree.read("f", 9)
    with pytest.raises(OSError, match="Input/output error"):
        tree.read("g", 9)


def test_half_a_surrogate_in_a_recording_is_read_as_binary() -> None:
    recording = json.loads('{"schema": 1, "files": {"f": "\\ud800"}, "names": {"d": ["\\udfff"]}, "x": "left alone"}')
    tree = RecordedTree(recording)
    with pytest.raises(UnicodeDecodeError):
        tree.read("f", 9).decode()
    assert tree.names("d") == ["\udfff"]


def test_only_groups_that_own_devices_are_recorded() -> None:
    machine = {
        "schema": 1,
        "nodes": {"dev/kfd": {"usable": True, "group": "109"}},
        "process": {"groups": ["alice", "109", "render", "sudo"]},
    }
    recorder = RecordingTree(RecordedTree(machine))
    recorder.process()
    recorder.node("dev/kfd")
    assert recorder.recording()["process"]["groups"] == ["109", "render"]
    assert "alice" not in json.dumps(recorder.recording())


def test_a_path_root_knows_files_and_nothing_of_this_process(tmp_path: Path) -> None:
    facts = LiveTree(tmp_path).process()
    assert (facts.release, facts.groups, facts.shm_bytes, facts.cpu) == (None, None, None, None)
    live = LiveTree().process()
    assert live.platform
    assert live.release


def test_a_path_that_the_system_cannot_even_ask_for_is_an_error_of_the_system(tmp_path: Path) -> None:
    tree = LiveTree(tmp_path)
    for path in ("a\0b", "x" * 5000, "/".join(["d"] * 3000)):
        for question in (tree.names, tree.link, tree.node, lambda at: tree.read(at, 9)):
            with pytest.raises(OSError, match=r"Invalid argument|name too long|Not a directory"):
                question(path)


def test_a_plain_file_is_no_device_node(tmp_path: Path) -> None:
    (tmp_path / "kfd").touch()
    with pytest.raises(OSError, match="No such device"):
        LiveTree(tmp_path).node("kfd")
    assert LiveTree().node("dev/null").usable is True


@pytest.mark.parametrize("text", ["+1", "-1", "1_0", " ", "0x10", "\u00b2", "\u0661", "18446744073709551616"])
def test_only_plain_decimal_numbers_of_64_bits_are_numbers(tmp_path: Path, text: str) -> None:
    assert parse_int(text) is None
    (tmp_path / "number").write_text(text)
    reading = read_int(LiveTree(tmp_path), "number")
    assert reading.value is None and reading.reason
    (tmp_path / "number").write_text(" 42\n")
    assert read_int(LiveTree(tmp_path), "number").value == 42


def test_an_oversized_file_is_not_taken_into_memory(odd: Path) -> None:
    assert "more than" in read_text(LiveTree(odd), "huge").reason
