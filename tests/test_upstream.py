"""A seam that upstream moves is an error that names it, never a transfer that goes unverified in silence."""

from __future__ import annotations

import importlib
import inspect
from contextlib import suppress
from typing import Any

import pytest

from hf_rocm_tune import upstream
from hf_rocm_tune.errors import SeamError
from hf_rocm_tune.upstream import SEAMS, Seam

every_seam = pytest.mark.parametrize("row", SEAMS, ids=lambda row: row.name)


def owner_of(row: Seam) -> tuple[Any, str]:
    """The module or class that holds a seam, and the seam's last name."""
    owner: Any = importlib.import_module(row.module)
    *path, last = row.attribute.split(".")
    for part in path:
        owner = getattr(owner, part)
    return owner, last


def definition_of(row: Seam) -> Any:
    """The class that defines a seam, which may be a base of the one named; the module where there is no class."""
    owner, last = owner_of(row)
    return next((base for base in owner.__mro__ if last in vars(base)), owner) if inspect.isclass(owner) else owner


def refusal() -> str:
    with pytest.raises(SeamError) as caught:
        upstream.check_all()
    return str(caught.value)


@every_seam
def test_it_is_there_today(row: Seam) -> None:
    owner, last, value = upstream.resolve(row.name)
    assert (owner, last) == owner_of(row)
    assert callable(value)


@every_seam
def test_it_is_named_when_the_attribute_is_gone(row: Seam, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(definition_of(row), row.attribute.split(".")[-1])
    message = refusal()
    assert f"{row.module}.{row.attribute}" in message
    assert "is not there" in message
    assert row.checked in message and row.why in message and "\n" not in message


@every_seam
@pytest.mark.parametrize("change", ["renamed", "reordered", "shortened"])
def test_it_is_named_when_its_parameters_change(row: Seam, change: str, monkeypatch: pytest.MonkeyPatch) -> None:
    changed = {
        "renamed": [*row.parameters[:-1], f"{row.parameters[-1]}_new"],
        "reordered": ["first_of_all", *row.parameters],
        "shortened": list(row.parameters[:-1]),
    }[change]
    namespace: dict[str, Any] = {}
    exec(f"def moved({', '.join(changed)}): ...", namespace)
    owner, last = owner_of(row)
    stands_alone = isinstance(inspect.getattr_static(owner, last), staticmethod)
    monkeypatch.setattr(owner, last, staticmethod(namespace["moved"]) if stands_alone else namespace["moved"])
    message = refusal()
    assert f"{row.module}.{row.attribute}" in message
    assert "its parameters are" in message


@every_seam
def test_it_may_gain_parameters_at_its_end(row: Seam, monkeypatch: pytest.MonkeyPatch) -> None:
    namespace: dict[str, Any] = {}
    exec(f"def longer({', '.join(row.parameters)}, something_new=None): ...", namespace)
    owner, last = owner_of(row)
    stands_alone = isinstance(inspect.getattr_static(owner, last), staticmethod)
    monkeypatch.setattr(owner, last, staticmethod(namespace["longer"]) if stands_alone else namespace["longer"])
    upstream.check_all()


def test_a_library_that_is_gone_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def gone(name: str) -> Any:
        raise ImportError(f"No module named {name!r}")

    monkeypatch.setattr(upstream.importlib, "import_module", gone)
    assert SEAMS[0].module in refusal()


def test_a_trainer_is_not_even_made_without_its_seams(monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers import Trainer

    from hf_rocm_tune import VerifiedTransferMixin

    class Verified(VerifiedTransferMixin, Trainer):
        """As a user would define it."""

    monkeypatch.delattr("transformers.trainer.Trainer._prepare_inputs")
    with pytest.raises(SeamError, match="_prepare_inputs"):
        Verified()


PATCHED = [row for row in SEAMS if row.patched]


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
    import accelerate.data_loader

    stock = inspect.unwrap(accelerate.data_loader.send_to_device)
    monkeypatch.setattr(accelerate.data_loader, "send_to_device", stock)
    made = []

    def make(replaced: Any) -> Any:
        made.append(replaced)
        return lambda *arguments, **keywords: replaced(*arguments, **keywords)

    for _ in range(3):
        upstream.replace_for_good("send_to_device", make)
    assert made == [stock]
    assert inspect.signature(accelerate.data_loader.send_to_device) == inspect.signature(stock)
    upstream.check_all()
