"""Each private place of an upstream library that the package touches is in the table of `upstream`.

Found in the package's syntax trees: names that begin with an underscore, of modules, of what is imported from them, of
attributes (also as strings in ``getattr`` and the like); and functions of upstream modules, and methods of upstream
objects, that are replaced. Not found: a private attribute that a class of ours has too, where upstream's sources below
do not name it.
"""

from __future__ import annotations

import ast
import importlib.util
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from hf_rocm_tune.train.trainer import VerifiedSFTTrainer
from hf_rocm_tune.upstream import SEAMS, overrides

PACKAGE = Path(__file__).resolve().parent.parent / "hf_rocm_tune"
UPSTREAM = frozenset(
    {"torch", "transformers", "accelerate", "peft", "trl", "bitsandbytes", "datasets", "safetensors", "tokenizers"}
)
HOLDERS = (
    "torch/nn/modules/module.py", "torch/optim/optimizer.py", "torch/nn/parallel/distributed.py",
    "torch/distributed/tensor/_api.py", "torch/utils/data/dataloader.py", "torch/amp/grad_scaler.py",
    "transformers/trainer.py", "transformers/modeling_utils.py", "transformers/configuration_utils.py",
    "transformers/modeling_layers.py", "accelerate/accelerator.py", "accelerate/data_loader.py", "accelerate/state.py",
    "peft/peft_model.py", "peft/tuners/tuners_utils.py", "peft/tuners/lora/layer.py",
    "trl/trainer/base_trainer.py", "trl/trainer/sft_trainer.py", "trl/trainer/dpo_trainer.py",
    "trl/trainer/grpo_trainer.py", "trl/trainer/reward_trainer.py",
)  # fmt: skip
"""Sources of the classes whose objects we hold: a name of theirs is theirs although a class of ours has it too."""
STANDARD = frozenset({"_exit", "_getframe", "_current_frames", "_asdict", "_replace", "_fields", "_actions", "_name"})
"""Of Python's own library: os, sys, named tuples, argparse, ctypes."""
FIELDS = frozenset({"decode", "type"})
"""Settings of datasets' pictures and argparse's flags that are named as methods of torch are."""
OURS = "_hf_rocm_tune"


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__") and name != "_" and not name.startswith(OURS)


@cache
def names_of_holders() -> frozenset[str]:
    found: set[str] = set()
    for source in sources_of_holders():
        found.update(re.findall(r"(?:self\.|def )(_[a-zA-Z]\w*)", source))
    return frozenset(name for name in found if is_private(name))


@cache
def sources_of_holders() -> tuple[str, ...]:
    sources = []
    for holder in HOLDERS:
        library, _, path = holder.partition("/")
        spec = importlib.util.find_spec(library)
        assert spec is not None and spec.submodule_search_locations is not None
        sources.append((Path(spec.submodule_search_locations[0]) / path).read_text(encoding="utf-8"))
    return tuple(sources)


@cache
def methods_of_holders() -> frozenset[str]:
    """Public methods, which are replaced where one is assigned to an object; not properties."""
    found = set()
    for tree in map(ast.parse, sources_of_holders()):
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef):
                inside = [each for each in node.body if isinstance(each, ast.FunctionDef)]
                found |= {each.name for each in inside if not any(map(is_property, each.decorator_list))}
    return frozenset(name for name in found - own_fields() - FIELDS if not name.startswith("_"))


@cache
def own_fields() -> frozenset[str]:
    """Public attributes that objects of this package give themselves."""
    stored = (node for tree in trees().values() for node in ast.walk(tree) if isinstance(node, ast.Attribute))
    return frozenset(
        node.attr for node in stored if isinstance(node.ctx, ast.Store) and ast.unparse(node.value) == "self"
    )


def is_property(decorator: ast.expr) -> bool:
    return ast.unparse(decorator).rpartition(".")[2] in ("property", "setter", "cached_property")


@cache
def trees() -> dict[str, ast.Module]:
    return {
        str(path.relative_to(PACKAGE)): ast.parse(path.read_text(encoding="utf-8"))
        for path in sorted(PACKAGE.rglob("*.py"))
    }


def own_names(modules: dict[str, ast.Module]) -> frozenset[str]:
    """Private names that the package defines: functions, classes, fields, attributes of ``self``, of modules."""
    found: set[str] = set()
    for tree in modules.values():
        for node in ast.walk(tree):
            match node:
                case ast.FunctionDef(name=name, decorator_list=decorators):
                    if not any(isinstance(each, ast.Name) and each.id == "override" for each in decorators):
                        found.add(name)
                case ast.ClassDef(name=name):
                    found.add(name)
                case ast.Attribute(value=ast.Name(id="self" | "cls"), attr=name, ctx=ast.Store()):
                    found.add(name)
                case ast.Name(id=name, ctx=ast.Store()):
                    found.add(name)
    return frozenset(filter(is_private, found))


def imported(tree: ast.Module) -> set[str]:
    """Local names of upstream modules, and of what is imported from them."""
    found: set[str] = set()
    for node in ast.walk(tree):
        match node:
            case ast.Import(names=names):
                found |= {
                    (each.asname or each.name).partition(".")[0]
                    for each in names
                    if each.name.partition(".")[0] in UPSTREAM
                }
            case ast.ImportFrom(module=str(module), names=names) if module.partition(".")[0] in UPSTREAM:
                found |= {each.asname or each.name for each in names}
    return found


def derived(tree: ast.Module) -> dict[ast.AST, frozenset[str]]:
    """All nodes inside of classes with a base of upstream's, whose ``self`` has upstream's attributes too.

    With each: the names that its class defines itself.
    """
    theirs = imported(tree) | {"_Base"}
    inside: dict[ast.AST, frozenset[str]] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef) and any(
            isinstance(base, ast.Name | ast.Attribute) and ast.unparse(base).partition(".")[0] in theirs
            for base in node.bases
        ):
            inside.update(dict.fromkeys(ast.walk(node), own_names({"": ast.Module([node], [])})))
    return inside


@cache
def names_of_package() -> frozenset[str]:
    return own_names(trees())


def private_places(modules: dict[str, ast.Module]) -> Iterator[tuple[str, str]]:
    """Name of a place, and file and line that touch it."""
    own = names_of_package() | own_names(modules)
    ambiguous = own & names_of_holders()
    for file, tree in modules.items():
        theirs, inside = imported(tree), derived(tree)
        for node in ast.walk(tree):
            where = f"{file}:{getattr(node, 'lineno', 0)}"
            match node:
                case ast.Import(names=names):
                    for each in names:
                        parts = each.name.split(".")
                        if parts[0] in UPSTREAM:
                            yield from ((each.name, where) for part in parts if is_private(part))
                case ast.ImportFrom(module=str(module), names=names) if module.partition(".")[0] in UPSTREAM:
                    for each in names:
                        if is_private(each.name) or any(map(is_private, module.split("."))):
                            yield f"{module}.{each.name}", where
                case ast.Attribute(value=value, attr=name) if is_private(name) and name not in STANDARD:
                    of_self = isinstance(value, ast.Name) and value.id in ("self", "cls")
                    is_ours = of_self and (node not in inside or name in inside[node])
                    if name not in own or (name in ambiguous and not is_ours):
                        yield name, where
                case ast.Call(func=ast.Name(id="getattr" | "hasattr" | "setattr" | "delattr"), args=[_, name, *_]):
                    text = name.value if isinstance(name, ast.Constant) and isinstance(name.value, str) else ""
                    if is_private(text) and text not in STANDARD:
                        yield text, where
                case ast.Call(func=ast.Attribute(attr="import_module"), args=[ast.Constant(value=str(module))]):
                    if module.partition(".")[0] in UPSTREAM and any(map(is_private, module.split("."))):
                        yield module, where
                case ast.Assign(targets=targets):
                    for target in targets:
                        root = ast.unparse(target).partition(".")[0]
                        is_setting = ast.unparse(target).startswith("torch.backends.")  # torch's own, public
                        if not isinstance(target, ast.Attribute) or is_setting:
                            continue
                        of_object = ast.unparse(target.value) not in ("self", "cls")
                        if root in theirs or (of_object and target.attr in methods_of_holders()):
                            yield target.attr, where


@cache
def listed() -> frozenset[str]:
    names = {row.attribute.rpartition(".")[2] for row in SEAMS} | {f"{row.module}.{row.attribute}" for row in SEAMS}
    names |= {part for row in SEAMS for part in f"{row.module}.{row.attribute}".split(".") if is_private(part)}
    names |= {row.module for row in SEAMS}
    return frozenset(names | {name for _, name, _ in overrides(VerifiedSFTTrainer)})


def unlisted(modules: dict[str, ast.Module]) -> dict[str, list[str]]:
    known, found = listed(), dict[str, list[str]]()
    for name, where in private_places(modules):
        if name not in known:
            found.setdefault(name, []).append(where)
    return found


def test_each_is_in_the_table() -> None:
    assert unlisted(trees()) == {}


SNIPPETS = {
    "read": ("trainer._step_counter", "_step_counter"),
    "read of an attribute that we have too": ("model._save(directory)", "_save"),
    "by getattr": ("getattr(model, '_pp_plan', None)", "_pp_plan"),
    "by setattr": ("setattr(model, '_pp_plan', {})", "_pp_plan"),
    "imported name": ("from transformers.trainer import _is_peft_model", "transformers.trainer._is_peft_model"),
    "imported module": ("import torch._inductor.config", "torch._inductor.config"),
    "name of a private module": ("from torch._higher_order_ops import wrap", "torch._higher_order_ops.wrap"),
    "imported at run time": (
        "import importlib\nimportlib.import_module('torch._export')", "torch._export",
    ),
    "replaced function": ("from accelerate import utils\nutils.send_to_device = None", "send_to_device"),
    "replaced method": ("def use(accelerator):\n    accelerator.backward = None", "backward"),
    "replaced method of an attribute": (
        "class Ours:\n    def use(self):\n        self.loader.set_epoch = None", "set_epoch",
    ),
    "attribute of a base": (
        "from transformers import Trainer\nclass Ours(Trainer):\n    def go(self):\n        self._run_epoch()",
        "_run_epoch",
    ),
}  # fmt: skip


@pytest.mark.parametrize("kind", SNIPPETS)
def test_one_that_no_row_lists_is_found(kind: str) -> None:
    code, name = SNIPPETS[kind]
    listed_save = {name} & listed()  # the row of one that is listed is taken for absent
    found = {place for place, _ in private_places({"new.py": ast.parse(code)}) if place == name}
    assert found == {name}
    assert kind == "read of an attribute that we have too" or not listed_save


def test_what_is_ours_or_python_s_is_none() -> None:
    code = "class Ours:\n    def __init__(self):\n        self._mine = 1\nimport os\nos._exit(Ours()._mine)"
    assert "new.py" not in str([*unlisted({"new.py": ast.parse(code)}).values()])


MOST = 15
METHODS = {"sft": {"checkpointing_off", "checkpointing_on"}, "dpo, kto, reward, grpo": {"_prepare_dataset"}}
"""What a method of training does not touch of the places of a run on one card."""


@pytest.mark.parametrize("method", METHODS)
def test_a_run_on_one_card_touches_at_most_fifteen(method: str) -> None:
    rows = {row.name for row in SEAMS if not row.feature}
    overridden = {name for _, name, _ in overrides(VerifiedSFTTrainer) if is_private(name)}
    assert len((rows | overridden) - METHODS[method]) <= MOST


def test_the_page_lists_all_places() -> None:
    page = (PACKAGE.parent / "docs" / "private_places.md").read_text(encoding="utf-8")
    tables, _, rest = page.partition("## Overridden")
    assert set(re.findall(r"^\| `([\w.]+)` \|", tables, re.MULTILINE)) == {
        f"{row.module}.{row.attribute}" for row in SEAMS
    }
    overridden = {name for _, name, _ in overrides(VerifiedSFTTrainer) if is_private(name)}
    listed_there = rest.partition("## ")[0]
    assert set(re.findall(r"^\| `(_\w+)` \|", listed_there, re.MULTILINE)) == overridden
