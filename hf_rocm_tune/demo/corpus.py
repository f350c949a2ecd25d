"""Real text that is on every machine: questions and answers from the docstrings of Python's standard library.

The sources are parsed, not imported, so nothing of theirs runs. The pairs depend only on the Python version: modules,
names and splits come in a fixed order. Private names and test packages are left out.
"""

from __future__ import annotations

import ast
import hashlib
import json
import re
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_SKIPPED = frozenset({"test", "tests", "idlelib", "lib2to3", "site-packages", "dist-packages", "__pycache__"})
_SHORTEST, _LONGEST = 20, 400
_TEST_SHARE = 20  # one pair in this many is held back for evaluation

Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef


@dataclass(frozen=True, kw_only=True)
class Pair:
    """A question about a name of the standard library, and the first paragraph of its docstring."""

    question: str
    answer: str

    @property
    def row(self) -> dict[str, list[dict[str, str]]]:
        """The pair as a row in TRL's ``messages`` format."""
        return {
            "messages": [
                {"role": "user", "content": self.question},
                {"role": "assistant", "content": self.answer},
            ]
        }

    @property
    def held_back(self) -> bool:
        """Whether it is for evaluation: decided by its answer, so that equal answers are never on both sides."""
        return int(hashlib.sha256(self.answer.encode()).hexdigest(), 16) % _TEST_SHARE == 0


def read_pairs(root: Path | None = None) -> list[Pair]:
    """All pairs, in the order of the module names; each question once.

    Args:
        root: folder with Python sources, by default that of the running Python's standard library.
    """
    root = root or Path(sysconfig.get_paths()["stdlib"])
    pairs: dict[str, Pair] = {}
    for path in sorted(root.rglob("*.py")):
        names = path.relative_to(root).with_suffix("").parts
        if not _SKIPPED.intersection(names) and not any(name.startswith("_") and name != "__init__" for name in names):
            for pair in _pairs_of_module(path, ".".join(name for name in names if name != "__init__")):
                pairs.setdefault(pair.question, pair)
    return list(pairs.values())


def write_splits(folder: Path, pairs: list[Pair]) -> None:
    """Write ``train.jsonl`` and ``test.jsonl`` in TRL's ``messages`` format."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, wanted in (("train", False), ("test", True)):
        rows = (json.dumps(pair.row, ensure_ascii=False) + "\n" for pair in pairs if pair.held_back is wanted)
        (folder / f"{name}.jsonl").write_text("".join(rows), encoding="utf-8")


def _pairs_of_module(path: Path, module: str) -> Iterator[Pair]:
    try:
        tree = ast.parse(path.read_bytes())
    except (SyntaxError, ValueError):  # templates and samples that are no valid Python
        return
    if answer := _first_paragraph(tree):
        yield Pair(question=f"What is the module {module} for?", answer=answer)
    yield from _pairs_of_body(tree, module)


def _pairs_of_body(owner: ast.Module | ast.ClassDef, name: str) -> Iterator[Pair]:
    for node in owner.body:
        if not isinstance(node, Definition) or node.name.startswith("_"):
            continue
        qualified = f"{name}.{node.name}"
        if answer := _first_paragraph(node):
            verb = f"What is {qualified}?" if isinstance(node, ast.ClassDef) else f"What does {qualified} do?"
            yield Pair(question=verb, answer=answer)
        if isinstance(node, ast.ClassDef):
            yield from _pairs_of_body(node, qualified)


def _first_paragraph(node: ast.Module | Definition) -> str | None:
    text = ast.get_docstring(node) or ""
    paragraph = " ".join(re.split(r"\n\s*\n", text.strip(), maxsplit=1)[0].split())
    return paragraph if _SHORTEST <= len(paragraph) <= _LONGEST else None
