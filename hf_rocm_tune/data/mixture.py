"""Several datasets as one: the ``datasets:`` list of a recipe, mixed by TRL."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from trl import get_dataset

from hf_rocm_tune.data.sources import Splits, explained
from hf_rocm_tune.errors import UsageError

if TYPE_CHECKING:
    from trl import DatasetMixtureConfig
    from trl.scripts.utils import DatasetConfig


def load_mixture(mixture: DatasetMixtureConfig, *, train_split: str, test_split: str, need_eval: bool) -> Splits:
    """Loads and mixes the datasets of a recipe.

    Args:
        mixture: TRL's configuration; its ``test_split_size`` makes a ``test`` split.
        train_split: split to train on.
        test_split: split to evaluate on, when ``need_eval``.
        need_eval: whether rows to evaluate on are wanted.

    Raises:
        UsageError: a dataset cannot be read, or there is nothing to evaluate on.
    """
    names = ", ".join(part.path for part in mixture.datasets)
    with explained(names, files=[file for part in mixture.datasets for file in _local_files(part)]):
        mixed = get_dataset(mixture)
    if train_split not in mixed or (need_eval and test_split not in mixed):
        raise UsageError(
            f"the mixture of {names} has the splits {', '.join(mixed)}: set `test_split_size` in the recipe to split "
            "off rows for the evaluation"
        )
    evaluation = mixed[test_split] if need_eval else None
    return Splits(train=mixed[train_split], eval=evaluation, description=f"mixture of {names}")


def _local_files(part: DatasetConfig) -> list[Path]:
    """The files of a part that are named one by one and are on this machine."""
    named = part.data_files or [part.path]
    names = [named] if isinstance(named, str) else list(named.values() if isinstance(named, dict) else named)
    return [Path(name) for name in names if Path(name).is_file()]
