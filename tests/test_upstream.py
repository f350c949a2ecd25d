"""A seam that upstream moves is an error that names it, never a transfer that goes unverified in silence."""

from __future__ import annotations

import dataclasses
import importlib.util
import inspect
import os
import re
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from hf_rocm_tune import upstream
from hf_rocm_tune.errors import SeamError
from hf_rocm_tune.train.trainer import VerifiedSFTTrainer
from hf_rocm_tune.upstream import SEAMS, Seam

ABSENT = frozenset({"losses_without_triton_1_14"})
"""Rows of versions other than the installed one."""
HEAD = "trl.kernels.chunked_logprob"
HAS_HEAD = bool(importlib.util.find_spec("trl.kernels")) and bool(importlib.util.find_spec(HEAD))
"""Not in TRL before 1.15, of which a run takes the loss as it is."""
FOUND = [row for row in SEAMS if row.kind != "read" and (HAS_HEAD or not row.name.startswith(("head_", "losses_")))]
"""What can be looked up in a module; the others are attributes of objects, or of modules that have none of it now."""
every_seam = pytest.mark.parametrize("row", FOUND, ids=lambda row: row.name)
with_parameters = pytest.mark.parametrize("row", [row for row in FOUND if row.parameters], ids=lambda row: row.name)


def owner_of(row: Seam) -> tuple[Any, str]:
    """The module or class that holds a seam, and the seam's last name."""
    owner: Any = importlib.import_module(row.module)
    *path, last = row.attribute.split(".")
    for part in path:
        owner = getattr(owner, part)
    return owner, last


def definitions_of(row: Seam) -> list[Any]:
    """The classes that define a seam, bases of the one named too; the module where there is no class."""
    owner, last = owner_of(row)
    return [base for base in owner.__mro__ if last in vars(base)] if inspect.isclass(owner) else [owner]


def check(row: Seam) -> None:
    """As the start of a run does, or the first use of a feature."""
    upstream.resolve(row.name) if row.feature or row.without else upstream.check_all()


def refusal(row: Seam) -> str:
    with pytest.raises(SeamError) as caught:
        check(row)
    return str(caught.value)


@every_seam
def test_it_is_named_when_the_attribute_is_gone(row: Seam, monkeypatch: pytest.MonkeyPatch) -> None:
    for owner in definitions_of(row):
        monkeypatch.delattr(owner, row.attribute.split(".")[-1])
    message = refusal(row)
    assert f"{row.module}.{row.attribute}" in message
    assert "is missing" in message
    assert (
        " to ".join(upstream.TESTED[row.module.partition(".")[0]]) in message
        and row.why in message
        and "\n" not in message
    )
    assert message.startswith(f"{row.feature} is not possible" if row.feature else "cannot train")


def put_in_its_place(row: Seam, parameters: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    namespace: dict[str, Any] = {}
    exec(f"def other({', '.join(parameters)}): ...", namespace)
    owner, last = owner_of(row)
    stands_alone = isinstance(inspect.getattr_static(owner, last), staticmethod)
    monkeypatch.setattr(owner, last, staticmethod(namespace["other"]) if stands_alone else namespace["other"])


@with_parameters
def test_it_is_named_when_its_parameters_change_and_may_gain_some_at_its_end(
    row: Seam, monkeypatch: pytest.MonkeyPatch
) -> None:
    put_in_its_place(row, [*row.parameters, "something_new=None"], monkeypatch)
    check(row)
    put_in_its_place(row, ["first_of_all", *row.parameters[:-1]], monkeypatch)
    assert f"{row.module}.{row.attribute}" in (message := refusal(row)) and "its parameters are" in message


# ---- what our trainer overrides -----------------------------------------------------------------------------

OVERRIDES = [(ours, name, theirs[-1]) for ours, name, theirs in upstream.overrides(VerifiedSFTTrainer)]


def named_parameters(ours: type, name: str) -> list[str]:
    """Parameters beside ``self`` that an override of ours names."""
    each = list(inspect.signature(vars(ours)[name]).parameters.values())[1:]
    return [one.name for one in each if one.kind is one.POSITIONAL_OR_KEYWORD]


def test_whatever_hides_a_name_of_upstream_s_is_marked_as_an_override() -> None:
    """Found by comparing the classes, so that no list has to be kept."""
    bases = VerifiedSFTTrainer.__mro__
    ours = [base for base in bases if base.__module__.startswith("hf_rocm_tune")]
    theirs = {name for base in bases if base not in (*ours, object) for name in vars(base) if not name.startswith("__")}
    marked = {(base, name) for base, name, _ in OVERRIDES}
    assert {(base, name) for base in ours for name in vars(base) if name in theirs} == marked
    assert {"_load_best_model", "_load_from_checkpoint", "_save_checkpoint"} <= {name for _, name in marked}


def test_the_installed_versions_are_tested_ones() -> None:
    upstream.check_overrides(VerifiedSFTTrainer)
    assert upstream.untested() == []
    assert all(map(upstream.is_tested, upstream.TESTED))


@pytest.mark.parametrize("name", sorted({name for _, name, _ in OVERRIDES}))
def test_an_override_of_what_upstream_has_renamed_is_an_error(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for base in VerifiedSFTTrainer.__mro__:
        if not base.__module__.startswith("hf_rocm_tune") and name in vars(base):
            monkeypatch.delattr(base, name)
    with pytest.raises(SeamError, match=rf"{name} overrides: the method that it overrides is missing"):
        upstream.check_overrides(VerifiedSFTTrainer)


@pytest.mark.parametrize("name", sorted({name for ours, name, _ in OVERRIDES if named_parameters(ours, name)}))
def test_an_override_of_what_has_other_parameters_is_an_error(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    root = next(root for _, each, root in OVERRIDES if each == name)

    def other(self: Any, something_new: Any) -> None: ...

    monkeypatch.setattr(root, name, other)
    with pytest.raises(SeamError, match=rf"{name} overrides: {root.__name__} has the parameters"):
        upstream.check_overrides(VerifiedSFTTrainer)


def test_a_trainer_is_not_even_made_without_what_it_overrides(monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers import Trainer

    from hf_rocm_tune import VerifiedTransferMixin

    class Verified(VerifiedTransferMixin, Trainer):
        """As a user would define it."""

    monkeypatch.delattr(Trainer, "_load_best_model")
    with pytest.raises(SeamError, match="_load_best_model"):
        Verified()


def test_which_optimizers_are_bitsandbytes_is_told_by_their_names() -> None:
    from transformers.trainer_optimizer import _BITSANDBYTES_OPTIMIZERS
    from transformers.training_args import OptimizerNames

    from hf_rocm_tune.train.refusals import is_of_bitsandbytes

    assert [name for name in OptimizerNames if is_of_bitsandbytes(name.value)] == [
        name for name in OptimizerNames if name in _BITSANDBYTES_OPTIMIZERS
    ]


# ---- names that a library does not have ---------------------------------------------------------------------

WITHOUT_A_NAME = """
import importlib.abc, importlib.util, sys

class Finder(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name != "{module}":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        sys.meta_path.insert(0, self)
        execute = spec.loader.exec_module
        spec.loader.exec_module = lambda module: (execute(module), delattr(module, "{name}"))
        return spec

sys.meta_path.insert(0, Finder())
"""
IMPORTS_THE_TRAINER = """
import sys
from hf_rocm_tune.lifecycle.exits import run_guarded

def main():
    import hf_rocm_tune.settings.arguments
    import hf_rocm_tune.train.trainer

sys.exit(run_guarded(main))
"""


@pytest.mark.parametrize(
    ("module", "name", "says"),
    [
        (
            "transformers.hf_argparser",
            "string_to_bool",
            r'transformers [\d.]+ does not have what "The command line of a training job" '
            r"\(hf_rocm_tune\.settings\.arguments\) imports from it: cannot import name 'string_to_bool'.* "
            r"Install transformers 5\.19\.0 to [\d.]+, or report this",
        ),
        pytest.param(
            "peft",
            "PeftConfig",
            r"peft [\d.]+ does not have what trl [\d.]+ imports from it: cannot import name 'PeftConfig'.* "
            r"Install peft 0\.20\.0 to [\d.]+, or report this",
            marks=pytest.mark.long,
        ),
    ],
)
def test_a_name_that_a_library_does_not_have_is_one_line(module: str, name: str, says: str, tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(WITHOUT_A_NAME.format(module=module, name=name))
    done = subprocess.run(
        [sys.executable, "-c", IMPORTS_THE_TRAINER],
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1
    assert re.fullmatch(rf"hf-rocm-tune: error: {says}\n", done.stderr), done.stderr


# ---- what is replaced ---------------------------------------------------------------------------------------

PATCHED = [row for row in FOUND if row.patched]


@pytest.mark.parametrize("row", PATCHED, ids=lambda row: row.name)
def test_a_replacement_lasts_as_long_as_its_block(row: Seam) -> None:
    owner, last = owner_of(row)
    before = inspect.getattr_static(owner, last)

    def passing(stock: Any) -> Any:
        return lambda *arguments, **keywords: stock(*arguments, **keywords)

    with suppress(ZeroDivisionError), upstream.replaced(row.name, passing):
        assert inspect.getattr_static(owner, last) is not before
        raise ZeroDivisionError
    assert inspect.getattr_static(owner, last) is before


def test_a_lasting_replacement_is_made_once_and_keeps_the_signature(monkeypatch: pytest.MonkeyPatch) -> None:
    import bitsandbytes.functional

    stock = inspect.unwrap(bitsandbytes.functional.dequantize_4bit)
    monkeypatch.setattr(bitsandbytes.functional, "dequantize_4bit", stock)
    made = []

    def make(replaced: Any) -> Any:
        made.append(replaced)
        return lambda *arguments, **keywords: replaced(*arguments, **keywords)

    for _ in range(3):
        upstream.replace_for_good("dequantise", make)
    assert made == [stock]
    assert inspect.signature(bitsandbytes.functional.dequantize_4bit) == inspect.signature(stock)
    upstream.check_all()


def test_a_run_says_which_libraries_are_newer_than_those_that_were_tried(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from hf_rocm_tune.job import run

    class Enough(Exception):
        """The line has been printed."""

    def stop(_: Any) -> bool:
        raise Enough

    monkeypatch.setattr(run, "several_machines", stop)
    words = [
        "--model_name_or_path",
        "m",
        "--dataset_name",
        "d",
        "--output_dir",
        str(tmp_path / "out"),
        "--doctor",
        "off",
    ]
    for newest, said in (("0.0.1", True), ("99.0", False)):
        monkeypatch.setitem(upstream.TESTED, "peft", ("0.0.1", newest))
        with pytest.raises(Enough):
            run.run(words)
        told = [line for line in capsys.readouterr().out.splitlines() if "newer than the tested versions: " in line]
        assert any(" peft " in line for line in told) == said


# ---- attributes of objects ----------------------------------------------------------------------------------

READ = [row for row in SEAMS if row.kind == "read"]


@pytest.mark.parametrize("row", [row for row in READ if row.name not in ABSENT], ids=lambda row: row.name)
def test_an_attribute_of_objects_is_known_to_the_module_that_makes_them(row: Seam) -> None:
    upstream.check(row)


@pytest.mark.parametrize("row", READ, ids=lambda row: row.name)
def test_an_attribute_that_is_gone_is_an_error_or_has_another_way(row: Seam, monkeypatch: pytest.MonkeyPatch) -> None:
    other = SimpleNamespace()
    if row.without:
        assert upstream.read(row.name, other) is None
        return
    with pytest.raises(SeamError, match=re.escape(row.feature) if row.feature else "cannot train"):
        upstream.read(row.name, other)
    moved = dataclasses.replace(row, attribute=f"{row.attribute}_moved")
    monkeypatch.setitem(upstream._BY_NAME, row.name, moved)
    with pytest.raises(SeamError, match="_moved"):
        upstream.check(moved)


def test_a_run_on_one_card_needs_few_of_them() -> None:
    assert len([row for row in SEAMS if not row.feature]) <= 15
