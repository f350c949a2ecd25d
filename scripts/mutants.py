"""Small changes to the code, one at a time, and whether the tests beside it notice: what survives is not tested.

    python scripts/mutants.py ROOM [--seed N] [--count N] [--only FILE] [--out FILE] [--again FILE]

``ROOM`` is a package such as ``plan``, ``publish`` or ``data``; its tests are those of ``tests/ROOM``, or what
``--tests`` names. The repository is copied, and the tests must pass in the copy as it is. Then one place is changed,
the tests run until the first failure, and the place is restored. Changes: a comparison turned round, an operator, a
number, a part of a condition or its "not" left out, one side of a choice, a keyword argument, the last element of a
list, or a statement left out. A change with which a test fails, or that does not even import, is "killed". Survivors
are printed with their lines and written as JSON; ``--again FILE`` tries the survivors of such a file once more. Each
run is a child of one process that has imported the libraries. Not in `make test`: each change costs a run of tests.
"""

from __future__ import annotations

import argparse
import ast
import copy
import importlib
import json
import math
import os
import random
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NoReturn

import pytest

ROOT = Path(__file__).resolve().parents[1]
LIBRARIES = ("torch", "transformers", "peft", "trl", "accelerate", "datasets")
_TURNED = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.In: ast.NotIn, ast.NotIn: ast.In, ast.Is: ast.IsNot, ast.IsNot: ast.Is,
}  # fmt: skip
_OTHER = {
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Add, ast.Div: ast.Mult, ast.FloorDiv: ast.Mult, ast.Mod: ast.Mult
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Mutant:
    """One change, by its place in a file."""

    file: str
    line: int
    what: str
    before: str  # the source of the changed expression or statement
    after: str


def mutants_of(file: Path) -> Iterator[tuple[Mutant, str]]:
    """Every change of a file, and the file's source with it."""
    source = file.read_text(encoding="utf-8")
    tree = ast.parse(source)
    lines = source.splitlines(keepends=True)
    for node in _executed(tree):
        for what, changed in _changes(node):
            segment = ast.get_source_segment(source, node)
            if segment is None:
                continue
            new = ast.unparse(changed)
            yield (
                Mutant(
                    file=file.relative_to(ROOT).as_posix(),
                    line=node.lineno,  # type: ignore[attr-defined]
                    what=what,
                    before=segment,
                    after=new,
                ),
                _replaced(lines, node, f"({new})" if isinstance(node, ast.expr) else new),
            )


def _executed(tree: ast.AST) -> Iterator[ast.AST]:
    """The nodes of a tree without annotations, and without those in f-strings, whose places Python 3.11 misstates."""
    for field, value in ast.iter_fields(tree):
        if field in ("annotation", "returns"):
            continue
        for node in value if isinstance(value, list) else [value]:
            if isinstance(node, ast.AST) and not isinstance(node, ast.JoinedStr):
                yield node
                yield from _executed(node)


def _changes(node: ast.AST) -> Iterator[tuple[str, ast.AST]]:
    if isinstance(node, ast.Compare) and len(node.ops) == 1 and type(node.ops[0]) in _TURNED:
        other = copy.deepcopy(node)
        other.ops = [_TURNED[type(node.ops[0])]()]
        yield "comparison", other
    if isinstance(node, ast.BinOp) and type(node.op) in _OTHER and not _is_text(node):
        other_op = copy.deepcopy(node)
        other_op.op = _OTHER[type(node.op)]()
        yield "operator", other_op
    if isinstance(node, ast.BoolOp):
        for at in range(len(node.values)):
            fewer = copy.deepcopy(node)
            del fewer.values[at]
            yield f"without part {at + 1}", fewer.values[0] if len(fewer.values) == 1 else fewer
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        yield "not left out", node.operand
    if isinstance(node, ast.Constant) and type(node.value) in (int, float):
        yield "number", ast.Constant(node.value + 1)  # type: ignore[operator]
    if isinstance(node, ast.IfExp):
        yield "always the first", node.body
        yield "always the second", node.orelse
    if isinstance(node, ast.Call) and node.keywords:
        for at, keyword in enumerate(node.keywords):
            if keyword.arg is not None:
                without = copy.deepcopy(node)
                del without.keywords[at]
                yield f"without {keyword.arg}=", without
    is_list = isinstance(node, ast.Set) or (isinstance(node, ast.List | ast.Tuple) and isinstance(node.ctx, ast.Load))
    if is_list and len(node.elts) > 1:  # type: ignore[attr-defined]
        shorter: Any = copy.deepcopy(node)
        shorter.elts = shorter.elts[:-1]
        yield "without the last element", shorter
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
        yield "statement left out", ast.Pass()
    if isinstance(node, ast.AugAssign):
        yield "statement left out", ast.Pass()


def _is_text(node: ast.BinOp) -> bool:
    sides = (node.left, node.right)
    return any(isinstance(one, ast.JoinedStr | ast.List) or _is_str(one) for one in sides)


def _is_str(node: ast.AST) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, str)


def _replaced(lines: list[str], node: ast.AST, new: str) -> str:
    """The source with a node's text replaced; columns of a syntax tree count bytes."""
    first, last = node.lineno - 1, node.end_lineno - 1  # type: ignore[attr-defined]
    head = lines[first].encode()[: node.col_offset].decode()  # type: ignore[attr-defined]
    tail = lines[last].encode()[node.end_col_offset :].decode()  # type: ignore[attr-defined]
    return "".join([*lines[:first], head + new + tail, *lines[last + 1 :]])


def passes(room: Path, tests: list[str], seconds: float) -> bool:
    """Whether the tests pass in a copy of the repository; one that hangs does not."""
    child = os.fork()
    if child == 0:
        _run_tests(room, tests, room.with_name("output"))
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            return os.waitstatus_to_exitcode(status) == 0
        time.sleep(0.05)
    os.killpg(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return False


def _run_tests(room: Path, tests: list[str], output: Path) -> NoReturn:
    """In a child: run the tests of the copy, also in the processes that they start, and end."""
    os.setsid()
    os.chdir(room)
    os.environ["PYTHONPATH"] = str(room)
    sys.path.insert(0, str(room))
    sink = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    for stream in (1, 2):
        os.dup2(sink, stream)
    code = 1
    try:
        imported = "ignore:Module already imported:pytest.PytestAssertRewriteWarning"
        code = int(pytest.main(["-q", "-x", "-p", "no:cacheprovider", "-W", imported, *tests]))
    except BaseException:  # the child ends here, whatever happens
        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def survives(room: Path, mutant: Mutant, source: str, tests: list[str], seconds: float) -> bool:
    """Whether the tests pass with one file changed."""
    file = room / mutant.file
    before = file.read_text(encoding="utf-8")
    file.write_text(source, encoding="utf-8")
    try:
        return passes(room, tests, seconds)
    finally:
        file.write_text(before, encoding="utf-8")


def copy_repository(room: Path) -> None:
    """What tests read: the package, the tests, and what lies beside them."""
    folders = [path for path in ROOT.iterdir() if path.is_dir() and not path.name.startswith((".", "__"))]
    for folder in folders:
        shutil.copytree(folder, room / folder.name, ignore=shutil.ignore_patterns("__pycache__"))
    for file in (*ROOT.glob("*.md"), *ROOT.glob("*.toml"), ROOT / "Makefile"):
        shutil.copy(file, room)


def _key(row: Mapping[str, Any]) -> tuple[str, ...]:
    """What names a change although lines have moved."""
    return tuple(row[name] for name in ("file", "what", "before", "after"))


def _survivors_of(file: Path) -> set[tuple[str, ...]]:
    rows = json.loads(file.read_text(encoding="utf-8"))["mutants"]
    return {_key(row) for row in rows if row["survived"]}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("room", help="a package of hf_rocm_tune: plan, publish, data ...")
    parser.add_argument("--only", metavar="NAME", action="append", help="a file of it, such as request.py")
    parser.add_argument("--tests", action="append", help="files of tests (default: tests/ROOM)")
    parser.add_argument("--count", type=int, default=50, help="changes to try (default: 50)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=900.0, help="that the tests may take (default: 900)")
    parser.add_argument("--budget", type=float, default=math.inf, help="seconds after which no further one is tried")
    parser.add_argument("--out", type=Path, help="JSON")
    parser.add_argument("--again", type=Path, metavar="FILE", help="JSON of an earlier run: try its survivors again")
    wanted = parser.parse_args()
    files = sorted((ROOT / "hf_rocm_tune" / wanted.room).rglob("*.py"))
    files = [file for file in files if not wanted.only or file.name in wanted.only]
    tests = wanted.tests or [f"tests/{wanted.room}"]
    every = [one for file in files for one in mutants_of(file)]
    if wanted.again is not None:
        chosen = [one for one in every if _key(asdict(one[0])) in _survivors_of(wanted.again)]
    else:
        chosen = random.Random(wanted.seed).sample(every, min(wanted.count, len(every)))
    for library in LIBRARIES:
        importlib.import_module(library)
    rows = []
    with tempfile.TemporaryDirectory(prefix="hf-rocm-tune-mutants-") as folder:
        room = Path(folder) / "copy"
        copy_repository(room)
        if not passes(room, tests, wanted.seconds):
            said = room.with_name("output").read_text(encoding="utf-8", errors="replace")
            raise SystemExit(f"{said[-3000:]}\n{' '.join(tests)} fail without any change: mend them first")
        began = time.monotonic()
        for number, (mutant, source) in enumerate(chosen, start=1):
            if time.monotonic() - began > wanted.budget:
                break
            lives = survives(room, mutant, source, tests, wanted.seconds)
            rows.append(asdict(mutant) | {"survived": lives})
            print(
                f"{number}/{len(chosen)} {'SURVIVED' if lives else 'killed'} {mutant.file}:{mutant.line} "
                f"{mutant.what}: {mutant.before!r} -> {mutant.after!r}",
                flush=True,
            )
            if wanted.out is not None:
                content = {"tests": tests, "seed": wanted.seed, "of": len(every), "mutants": rows}
                wanted.out.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    left = sum(row["survived"] for row in rows)
    print(f"{left} of {len(rows)} changes survived ({len(every)} there are)")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
