"""A stranger's package and the verbs that read it: what a refusal is, and manifests with any names in them."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import pytest

from hf_rocm_tune.survive import manifest
from tests import tiny
from tests.e2e.command import CommandServer, Result

DEADLINE = 120.0  # seconds, on a busy machine
READERS = ("generate", "merge", "sft")
ESCAPES = "\x1b]52;c;cm0gLXJmIH4=\x07\x1b[2J\x9b31m"
DEEP = "[" * 5000 + "]" * 5000


class Place:
    """A directory of a test: ``adapter``, ``base`` and ``rows`` in it may be spoilt, ``victim`` may not be touched."""

    def __init__(self, made: dict[str, Path], server: CommandServer, room: Path) -> None:
        self.server, self.room = server, room
        self.adapter, self.base = room / "package" / "adapter", room / "package" / "base"
        shutil.copytree(made["adapter"], self.adapter)
        shutil.copytree(made["base"], self.base)
        self.rows = tiny.write_messages_jsonl(room / "rows" / "train.jsonl", 8).parent
        self.victim = room / "victim"
        self.victim.mkdir()
        (self.victim / "secret.model").write_text("private")
        self.seal()

    def seal(self, **more: Path) -> None:
        """A manifest of the adapter that is right, and lists further files by any name."""
        (self.adapter / manifest.MANIFEST_NAME).unlink(missing_ok=True)
        entries = {name: manifest.entry_of(self.adapter / name) for name in manifest.list_files(self.adapter)}
        entries |= {name: manifest.entry_of(file) for name, file in more.items()}
        forge(self.adapter, entries)

    def argv(self, verb: str) -> list[str]:
        if verb == "generate":
            flags = ["--base", self.base, "--prompt", "Hello", "--max_new_tokens", "3"]
            return [str(part) for part in (self.adapter, *flags)]
        if verb == "merge":
            return [str(part) for part in (self.adapter, self.room / "merged", "--base", self.base)]
        settings = {
            "model_name_or_path": self.base,
            "adapter_name_or_path": self.adapter,
            "dataset_name": self.rows,
            "output_dir": self.room / "out",
            "max_steps": 1,
            "max_length": 48,
            "save_strategy": "no",
            "doctor": "off",
            "disable_tqdm": True,
        }
        return [part for name, value in settings.items() for part in (f"--{name}", str(value))]

    def run(self, verb: str, *argv: str) -> Result:
        env = {} if verb == "sft" else {"VERB": verb}
        return self.server.start(*(argv or self.argv(verb)), env=env, cwd=self.room).wait(DEADLINE)

    def refused(self, verb: str, *argv: str) -> str:
        """What the one line says with which a command is refused; it leaves nothing."""
        before = names(self.room)
        done = self.run(verb, *argv)
        assert done.code == 2, f"{done.code}: {done.stdout[-500:]}{done.stderr[-2000:]}"
        assert "Traceback" not in done.stderr and len(done.error_lines) == 1, done.stderr[-2000:]
        said = re.sub(r"\x1b\[[0-9;]*m", "", done.stderr + done.stdout)  # colours of transformers
        assert not re.search(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f]", said)
        assert names(self.room) == before, "a refused command leaves nothing"
        return done.error_lines[0]


def names(room: Path) -> dict[str, str]:
    """What there is below a directory: links by where they lead, files by their bytes."""
    found = {}
    for path in room.rglob("*"):
        kind = "directory"
        if path.is_symlink():
            kind = f"link to {os.readlink(path)}"
        elif path.is_file():
            kind = hashlib.sha256(path.read_bytes()).hexdigest()
        found[path.relative_to(room).as_posix()] = kind
    return found


def forge(directory: Path, entries: dict[str, manifest.FileEntry]) -> None:
    """A manifest that lists any names, with the digest that its content has."""
    made = manifest.Manifest(run_id="run-1", step=3, status="final", created="2026-01-01T00:00:00+00:00", files=entries)
    (directory / manifest.MANIFEST_NAME).write_text(manifest.to_json(made))


def edit(file: Path, **changed: Any) -> None:
    content = json.loads(file.read_text())
    file.write_text(json.dumps(content | changed))


def by_verb(kinds: Iterable[Any], verbs: Sequence[str] = READERS, short: int = 99) -> list[Any]:
    """Every kind with every verb; the first kinds with one verb each in the short suite, the rest in the long one."""
    return [
        pytest.param(verb, kind, marks=() if at % len(verbs) == turn and at < short else pytest.mark.long)
        for at, kind in enumerate(kinds)
        for turn, verb in enumerate(verbs)
    ]


def sampled(kinds: Iterable[Any], short: int) -> list[Any]:
    """Every kind; only the first ones in the short suite."""
    return [pytest.param(kind, marks=() if at < short else pytest.mark.long) for at, kind in enumerate(kinds)]
