"""``hf-rocm-tune plan --cards N --split``: one model over several cards instead of one on each."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path

import yaml

from hf_rocm_tune.errors import OutOfMemoryError, UsageError
from hf_rocm_tune.memory.plan import GIB, CardMemory
from hf_rocm_tune.plan_recipe import NO_DATA, PROGRAM, check_recipe, command, settings
from hf_rocm_tune.plan_request import PlanRequest


def plan_over_cards(request: PlanRequest, card: CardMemory, wanted: Namespace) -> int:
    """Plan and print; returns 0 where something fits.

    Args:
        request: the question, for one process.
        card: the memory of each card.
        wanted: the flags of ``hf-rocm-tune plan``: ``split`` is ``auto`` or the layers of each card.

    Raises:
        UsageError: the question is wrong, or this model cannot be planned.
        OutOfMemoryError: nothing fits; the plan is printed nevertheless.
    """
    from hf_rocm_tune.models.split import parse
    from hf_rocm_tune.plan_split import split_plan
    from hf_rocm_tune.plan_split_text import as_json, as_text

    given = parse(wanted.split)
    most = max(wanted.cards, 2) if given is None else len(given) + 1
    found = split_plan(request, cards=[card] * most, counts=given, within_limit=wanted.length is None)
    if given is not None and wanted.cards not in (1, len(found.cards)):
        raise UsageError(f"--split {wanted.split} is for {len(found.cards)} cards, --cards says {wanted.cards}")
    layers = ",".join(map(str, found.counts))
    line = f"{command(found.plan.request, found.option, wanted.dataset_name)} --split_layers {layers}"
    print(as_json(found, line) if wanted.json else as_text(found, line))
    if not found.cut.fits:
        missing = f"{-found.cut.least_spare / GIB:.1f} GiB are missing on the fullest of {len(found.cards)} cards"
        raise OutOfMemoryError(f"nothing fits: {missing}. Try --method qlora, a shorter --seq, or more cards")
    if wanted.emit is not None:
        check_recipe(wanted.emit, replace=wanted.force)
        content = settings(found.plan.request, found.option, wanted.dataset_name) | {"split_layers": layers}
        _write(wanted.emit, content, wanted.dataset_name)
        if not wanted.json:
            print(f"\nrecipe: {wanted.emit}")
    return 0


def _write(path: Path, content: dict[str, object], dataset: str | None) -> None:
    """The recipe of a choice.

    Raises:
        UsageError: it cannot be written.
    """
    head = (
        f"# One model split over several cards, in one process; `{PROGRAM} plan --split` says what each takes.\n"
        f"# Start: {PROGRAM} sft --config {path.name}{'' if dataset else f' --dataset_name {NO_DATA}'}\n"
    )
    text = yaml.safe_dump({k: v for k, v in content.items() if v is not None}, sort_keys=False, allow_unicode=True)
    try:
        path.write_text(head + text, encoding="utf-8")
    except OSError as error:
        raise UsageError(f"--emit {path} cannot be written: {error.strerror}; choose another file") from error
