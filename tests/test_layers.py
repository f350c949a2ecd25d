"""The layering rule of the package, enforced on its source.

    imports point down only, and packages of one layer do not import each other (imports inside functions count too)
    Hugging Face libraries are imported from data, models and cards upward only. `data` is among them
        because the verified loader is a true subclass of accelerate's, and because datasets are its subject
    what has to run before torch imports no torch; nor does the command line until a command needs it
    above `transfer` nobody moves a tensor between devices: only the mover does

A line that looks like a move and is none carries the comment ``# device: <why it moves nothing>``.
Each rule is also tried on a snippet that breaks it, so that a check that sees nothing cannot pass.
"""

from __future__ import annotations

import ast
import functools
import graphlib
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = "hf_rocm_tune"
SOURCE = Path(__file__).resolve().parent.parent / PACKAGE

# From low to high. A module that is not named is an entry point.
LAYERS: tuple[frozenset[str], ...] = (
    frozenset({"counters", "errors", "version", "redaction"}),
    frozenset({"configs", "foreign", "host_group", "page_cache", "paths", "safetensors_header", "upstream"}),
    frozenset({"machine"}),
    frozenset({"transfer"}),
    frozenset({"data", "models"}),
    frozenset({"cards", "survive"}),
    frozenset({"lifecycle"}),
    frozenset({"plan"}),
    frozenset({"train", "publish", "doctor"}),
)
ENTRY = len(LAYERS)
ROOT = ENTRY + 1  # cli, __main__ and the package itself, whose lazy names point at anything

HUGGING_FACE = frozenset({"transformers", "accelerate", "trl", "peft", "datasets", "tokenizers", "huggingface_hub"})
NO_HUGGING_FACE = frozenset(
    {
        "counters",
        "errors",
        "version",
        "redaction",
        "page_cache",
        "paths",
        "configs",
        "foreign",
        "host_group",
        "safetensors_header",
        "upstream",
        "machine",
        "transfer",
    }
)
NO_TORCH = re.compile(
    r"(counters|errors|version|redaction|paths|configs|foreign|safetensors_header)(\.\w+)*|cli|__main__|__init__"
    r"|machine(\.(?!process|software|child)\w+)?"
    r"|plan\.(estimate|request|fit|candidates|command)"
)

DEVICE_NAME = re.compile(r"(^|_)(device|cuda|gpu)(s?$|_)|^dev$")
DEVICE_TEXT = re.compile(r"^(cuda|cpu|hip|meta|xpu|mps)(:|$)")
MARKER = re.compile(r"# device: \S")


parsed = functools.cache(ast.parse)


def layer_of(top: str) -> int:
    """The rank of a top-level module or package of ours."""
    if top in {"__init__", "__main__", "cli"}:
        return ROOT
    return next((rank for rank, names in enumerate(LAYERS) if top in names), ENTRY)


def imported(tree: ast.AST, module: str, *, is_package: bool) -> Iterator[tuple[int, str]]:
    """Line and absolute dotted name of everything that a module imports, wherever in it.

    ``from a import b`` gives ``a.b``: b may be a module, and if it is not, its first two parts are still right.
    """
    parts = [PACKAGE, *module.split(".")]
    here = parts if is_package else parts[:-1]
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name
        elif isinstance(node, ast.ImportFrom):
            base = here[: len(here) - node.level + 1] if node.level else []
            stem = ".".join([*base, *([node.module] if node.module else [])])
            for alias in node.names:
                yield node.lineno, f"{stem}.{alias.name}"
        elif (
            isinstance(node, ast.Call)
            and getattr(node.func, "attr", getattr(node.func, "id", "")) in {"import_module", "__import__"}
            and node.args
            and isinstance(node.args[0], ast.Constant)
        ):
            yield node.lineno, str(node.args[0].value)


def import_violations(source: str, module: str, *, is_package: bool = False) -> list[str]:
    """What breaks the rules on imports in one module of ours, named without the package (``data.loader``)."""
    top = module.split(".")[0]
    rank = layer_of(top)
    found = []
    for line, name in imported(parsed(source), module, is_package=is_package):
        first, _, rest = name.partition(".")
        if first == PACKAGE and rank < ROOT:
            target = rest.split(".")[0] or "__init__"
            if target == target.lower() and not target.startswith("__version"):
                target_rank = layer_of(target)
            else:
                target_rank = ROOT  # a name of the package itself
            if target != top and (target_rank > rank or (target_rank == rank and rank != ENTRY)):
                found.append(f"{module}:{line} imports {name}, which is not below it")
        if first in HUGGING_FACE and top in NO_HUGGING_FACE:
            found.append(f"{module}:{line} imports {first}: Hugging Face libraries are not for this layer")
        if first == "torch" and NO_TORCH.fullmatch(module) and rank < ROOT:
            found.append(f"{module}:{line} imports torch")
    return found


def names_device(node: ast.expr) -> bool:
    """Whether an argument is a device, or is called one."""
    if isinstance(node, ast.Starred):
        return names_device(node.value)
    if isinstance(node, ast.Constant):
        return isinstance(node.value, str) and DEVICE_TEXT.match(node.value) is not None
    if isinstance(node, ast.JoinedStr):
        return bool(node.values) and names_device(node.values[0])
    if isinstance(node, ast.Name):
        return DEVICE_NAME.search(node.id) is not None
    if isinstance(node, ast.Attribute):
        return DEVICE_NAME.search(node.attr) is not None
    if isinstance(node, ast.Call):
        return names_device(node.func)
    if isinstance(node, ast.IfExp):
        return names_device(node.body) or names_device(node.orelse)
    return False


def device_violations(source: str, module: str) -> list[str]:
    """The calls in one module that move a tensor between devices, or may: ``.cuda``, ``.to`` a device, ``copy_``."""
    if layer_of(module.split(".")[0]) <= layer_of("transfer"):
        return []
    lines = source.splitlines()
    found = []
    for node in ast.walk(parsed(source)):
        if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)):
            continue
        method = node.func.attr
        arguments = [*node.args, *(keyword.value for keyword in node.keywords)]
        moves = (
            method in {"cuda", "copy_"}
            or (method == "to" and any(keyword.arg == "device" for keyword in node.keywords))
            or (method == "to" and any(names_device(argument) for argument in arguments))
        )
        marked = any(MARKER.search(line) for line in lines[node.lineno - 1 : node.end_lineno])
        if moves and not marked:
            found.append(f"{module}:{node.lineno} {ast.unparse(node)}: only the mover moves tensors")
    return found


def modules() -> list[tuple[str, Path]]:
    """Every module of the package: its dotted name without the package, and its file."""
    found = []
    for file in sorted(SOURCE.rglob("*.py")):
        parts = file.relative_to(SOURCE).with_suffix("").parts
        if len(parts) > 1 and parts[-1] == "__init__":
            parts = parts[:-1]
        found.append((".".join(parts), file))
    return found


def test_imports_point_down_only() -> None:
    found = []
    for module, file in modules():
        found += import_violations(file.read_text(encoding="utf-8"), module, is_package=file.stem == "__init__")
    assert not found, "\n".join(["", *found])


def runtime_imports(source: str, module: str, *, is_package: bool) -> set[str]:
    """The modules that one imports when it runs, in functions too, but not for type checkers alone."""
    tree = ast.parse(source)
    for node in ast.walk(tree):
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            node.body = []
    return {name for _, name in imported(tree, module, is_package=is_package)}


def circle_in(sources: dict[str, tuple[str, bool]]) -> list[str]:
    """Modules that import each other in a circle; empty if there are none. ``sources``: text, and whether a package."""
    known = {f"{PACKAGE}.{module}": module for module in sources}
    graph = {}
    for module, (source, is_package) in sources.items():
        names = runtime_imports(source, module, is_package=is_package)
        both = names | {name.rpartition(".")[0] for name in names}
        graph[module] = {known[name] for name in both if name in known} - {module}
    try:
        graphlib.TopologicalSorter(graph).prepare()
    except graphlib.CycleError as error:
        return list(error.args[1])
    return []


def test_no_modules_import_each_other_in_a_circle() -> None:
    # A package's names, which its own modules need not import, are no module of the circle.
    files = [(module, file) for module, file in modules() if file.stem != "__init__"]
    assert len(files) > 150
    assert circle_in({module: (file.read_text(encoding="utf-8"), False) for module, file in files}) == []


def test_a_circle_is_seen_also_through_an_import_in_a_function() -> None:
    sources = {
        "a": "from hf_rocm_tune import b",
        "b": "def lazily():\n    from hf_rocm_tune.c import f",
        "c": "import torch",
    }
    texts = {module: (text, False) for module, text in sources.items()}
    assert circle_in(texts) == []
    assert circle_in(texts | {"c": ("from .a import g", False)})


def test_only_the_mover_moves_tensors() -> None:
    found = []
    for module, file in modules():
        found += device_violations(file.read_text(encoding="utf-8"), module)
    assert not found, "\n".join(["", *found])


def test_what_must_come_before_torch_does_not_bring_it() -> None:
    names = [module for module, _ in modules() if NO_TORCH.fullmatch(module) and module != "__main__"]
    assert {"errors", "configs"} <= set(names)
    targets = [PACKAGE if name == "__init__" else f"{PACKAGE}.{name}" for name in names]
    code = (
        "import importlib, sys\n"
        f"for name in {targets!r}:\n"
        "    importlib.import_module(name)\n"
        "    if 'torch' in sys.modules: sys.exit(f'{name} imports torch')\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("transfer.staging", "from hf_rocm_tune.train.trainer import VerifiedTransferMixin"),
        ("transfer.staging", "def lazily():\n    from hf_rocm_tune import train"),
        ("data.loader", "def lazily():\n    from ..models.loading import load"),
        ("data.loader", "from hf_rocm_tune import VerifiedSFTTrainer"),
        ("train.trainer", "from hf_rocm_tune.sft import main"),
        ("sft", "from hf_rocm_tune.cli import main"),
        ("errors", "import importlib\nimportlib.import_module('hf_rocm_tune.machine')"),
        ("transfer.staging", "import accelerate.utils"),
        ("plan.estimate", "import torch"),
        ("machine.variables", "import torch.cuda"),
    ],
)
def test_forbidden_import_is_seen(module: str, source: str) -> None:
    assert import_violations(source, module)


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("data.loader", "from accelerate.data_loader import DataLoaderShard"),
        ("data.loader", "from .sources import open_source"),
        ("train.trainer", "from hf_rocm_tune.errors import SeamError\nimport torch"),
        ("demo", "from hf_rocm_tune import sft"),
        ("cli", "def command():\n    import torch\n    from hf_rocm_tune.sft import main"),
    ],
)
def test_allowed_import_passes(module: str, source: str) -> None:
    assert not import_violations(source, module)


@pytest.mark.parametrize(
    "call",
    [
        "x.cuda()",
        "x.to('cuda:1')",
        "x.to(f'cuda:{rank}')",
        "x.to(device)",
        "x.to(other.device, torch.bfloat16)",
        "x.to(torch.device('cpu'))",
        "x.to(dtype=torch.float32, device=where)",
        "x.to('cpu' if small else where)",
        "x.copy_(y)",
        "x.to(\n    device\n)  # device:",
    ],
)
def test_move_outside_the_mover_is_seen(call: str) -> None:
    assert device_violations(call, "train.trainer")
    assert not device_violations(call, "transfer.mover")


@pytest.mark.parametrize(
    "call",
    ["x.to(torch.float32)", "x.to(dtype)", "x.to(dtype=d)", "x.copy_(y)  # device: both are on the host", "x.cpu()"],
)
def test_what_moves_nothing_passes(call: str) -> None:
    assert not device_violations(call, "train.trainer")
