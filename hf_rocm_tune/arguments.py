"""The command line of a fine-tuning job: every flag of ``trl sft``, ours, and recipe files.

A value comes from the command line, else from the recipe, else from our defaults, else from TRL's. Where our default
differs from TRL's, the difference is recorded with its reason, so that a run can print it.

Wrong input ends as one ``UsageError`` before anything is built; building ``SFTConfig`` comes last, because it makes
Accelerate's state (and, with several ranks, connects them).
"""

from __future__ import annotations

import argparse
import dataclasses
import difflib
import math
import os
import types
import typing
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Literal, NoReturn, TypeVar

import yaml
from trl import DatasetMixtureConfig, ModelConfig, ScriptArguments, SFTConfig
from trl.scripts._hf_argparser import HfArgumentParser, string_to_bool

from hf_rocm_tune import defaults, process, recipe_file
from hf_rocm_tune.defaults import Difference
from hf_rocm_tune.errors import UsageError


@dataclass(frozen=True, kw_only=True)
class TuneArguments:
    """The flags that ``trl sft`` does not have. Their meaning is in the help of each."""

    verify: Literal["full", "sample", "off"] = field(
        default="full", metadata={"help": "Which transfers to the device are verified: all, a sample, or none."}
    )
    on_corruption: Literal["recover", "stop"] = field(
        default="recover",
        metadata={"help": "Whether bytes that arrived wrong are sent again, or end the run with exit code 3 at once."},
    )
    consent_unverified: bool = field(
        default=False, metadata={"help": "Train although `--verify full` does not cover every byte on the device."}
    )
    sentinel_every: int = field(
        default=50,
        metadata={"help": "Steps between two looks at weights that must not change. 0 turns the looks off."},
    )
    compare_optimizer_every: int = field(
        default=0,
        metadata={"help": "Steps between two comparisons of the optimizer's state over all ranks. 0 for never."},
    )
    prefetch_batches: int = field(
        default=1,
        metadata={
            "help": "Batches beyond the one in use that may be on their way to the device; above 1 it counts within "
            "an accumulation window only. 0 moves each batch when it is used."
        },
    )
    auto_fit: Literal["off", "plan", "probe"] = field(
        default="off",
        metadata={
            "help": "Choose micro-batch, accumulation and activation checkpointing, as far as they are not given, for "
            "the free memory of the card: by the plan, or corrected by a worst-case step before the run. The effective "
            "batch stays."
        },
    )
    effective_batch: int | None = field(
        default=None,
        metadata={
            "help": "With --auto_fit: sequences to one optimizer step over all processes. Default: what "
            "--per_device_train_batch_size and --gradient_accumulation_steps make."
        },
    )
    auto_fit_gib: float | None = field(
        default=None,
        metadata={"help": "With --auto_fit: GiB of the card to fit into. Default: what is free on it."},
    )
    on_oom: Literal["step_down", "stop"] = field(
        default="step_down",
        metadata={
            "help": "When a step runs out of device memory: do it again with smaller micro-batches at the same "
            "effective batch, or end the run with exit code 5. (With several ranks, step_down averages gradients after "
            "the last backward of a step instead of during it.)"
        },
    )
    max_skipped_steps: int = field(
        default=5,
        metadata={
            "help": "Steps among the last 100 that may be left out because loss or gradients are not finite; one more "
            "ends the run with exit code 3."
        },
    )
    doctor: Literal["quick", "off"] = field(
        default="quick",
        metadata={"help": "Whether the machine is looked at before the run: what can be read in a few seconds."},
    )
    telemetry_every: float = field(
        default=1.0,
        metadata={
            "help": "Seconds between two looks at the card's temperature, power and load during a run. 0 for never."
        },
    )
    overwrite_output_dir: bool = field(
        default=False, metadata={"help": "Use an output directory that holds another run; its files are replaced."}
    )
    eval_split_size: float | None = field(
        default=None,
        metadata={
            "help": "Evaluation rows to split off when the dataset has no test split: a share below 1, or a number."
        },
    )
    early_stopping_patience: int | None = field(
        default=None, metadata={"help": "Stop after this many evaluations without a better metric."}
    )
    early_stopping_threshold: float = field(
        default=0.0, metadata={"help": "How much better the metric must be to count for early stopping."}
    )
    hub_base_model_id: str | None = field(
        default=None,
        metadata={
            "help": "Name of the base model on the Hub (ORG/NAME) for what is pushed, where --model_name_or_path is a "
            "directory; without it the published copy names the directory's last part."
        },
    )
    hub_verify: Literal["download", "hashes"] = field(
        default="download",
        metadata={
            "help": "How a pushed result is checked: every byte, downloaded, or only the hashes that the Hub states."
        },
    )
    print_config: bool = field(
        default=False, metadata={"help": "Print the resolved configuration as a YAML recipe and exit."}
    )

    def __post_init__(self) -> None:
        size = self.eval_split_size
        if size is not None and not (0 < size < 1 or (size >= 1 and size == int(size))):
            raise ValueError(f"--eval_split_size must be a share between 0 and 1 or a number of rows, got {size}")
        for name in ("sentinel_every", "compare_optimizer_every", "prefetch_batches", "telemetry_every"):
            if not getattr(self, name) >= 0:  # a NaN is not either
                raise ValueError(f"--{name} must be 0 (off) or more, got {getattr(self, name)}")
        if self.auto_fit == "off" and (self.effective_batch is not None or self.auto_fit_gib is not None):
            name = "effective_batch" if self.effective_batch is not None else "auto_fit_gib"
            raise ValueError(f"--{name} works only with --auto_fit plan or --auto_fit probe; add one of them")
        if self.effective_batch is not None and self.effective_batch < 1:
            raise ValueError(f"--effective_batch must be 1 or more, got {self.effective_batch}")
        if self.auto_fit_gib is not None and not 0 < self.auto_fit_gib < math.inf:
            raise ValueError(f"--auto_fit_gib must be more than 0, and finite, got {self.auto_fit_gib}")
        if self.max_skipped_steps < 0:
            raise ValueError(f"--max_skipped_steps must be 0 or more, got {self.max_skipped_steps}")
        if self.early_stopping_patience is not None and self.early_stopping_patience < 1:
            raise ValueError(f"--early_stopping_patience must be 1 or more, got {self.early_stopping_patience}")
        if self.early_stopping_threshold < 0:
            raise ValueError(f"--early_stopping_threshold must be 0 or more, got {self.early_stopping_threshold}")

    @property
    def eval_rows(self) -> int | float | None:
        """``eval_split_size`` as ``train_test_split(test_size=)`` has it: an int counts rows, a float is a share."""
        size = self.eval_split_size
        return int(size) if size is not None and size >= 1 else size


@dataclass(frozen=True, kw_only=True)
class Arguments:
    """A job's settings, complete and checked.

    Args:
        script, training, model, mixture: TRL's own objects, as ``trl sft`` builds them.
        tune: our own settings.
        given: names that the user set, by flag or recipe.
        differences: our defaults in use that differ from TRL's.
    """

    script: ScriptArguments
    training: SFTConfig
    model: ModelConfig
    mixture: DatasetMixtureConfig
    tune: TuneArguments
    given: frozenset[str]
    differences: tuple[Difference, ...]

    def resolved(self) -> dict[str, object]:
        """Every setting by name, as plain JSON values. Access tokens are left out."""
        flat: dict[str, object] = {}
        for part in (self.tune, self.script, self.model, self.mixture, self.training):
            for each in dataclasses.fields(part):
                if each.init and each.name not in _SECRETS:
                    flat[each.name] = _plain(getattr(part, each.name))
        return flat

    def to_yaml(self) -> str:
        """The settings as a recipe: ``--config`` of it gives the same job again, and so does ``trl sft``'s own.

        ``print_config`` is left out, or the recipe would only print itself.
        """
        settings = {name: value for name, value in self.resolved().items() if name != "print_config"}
        return yaml.safe_dump(settings, sort_keys=False, allow_unicode=True)


def parse(argv: Sequence[str], *, accelerator: bool | None = None, bf16_supported: bool | None = None) -> Arguments:
    """Read a command line and its recipe.

    Args:
        argv: the arguments, without the program's name.
        accelerator: whether there is a GPU; torch is asked unless given.
        bf16_supported: whether that GPU computes in bfloat16; torch is asked unless given.

    Returns:
        The settings. The recipe's ``env`` is in ``os.environ`` (what was set there before is kept).

    Raises:
        UsageError: the input is wrong; one message names everything that could be found at once.
        SystemExit: 0, after ``--help``.
    """
    parser = build_parser()
    path, rest = recipe_file.take_flag(argv, recipe_file.FLAG)
    given = _read_flags(parser, rest)
    if path is not None:
        recipe = recipe_file.read_recipe(path)
        recipe.apply_environment(os.environ)
        given = _read_recipe_values(parser, recipe) | given
    if given.get("use_cpu"):
        accelerator = False
    elif accelerator is None:
        accelerator = process.has_accelerator()
    if bf16_supported is None:
        bf16_supported = process.has_bf16()
    defaults.check(given, accelerator=accelerator)
    return _resolve(given, accelerator=accelerator, bf16_supported=accelerator and bf16_supported)


def build_parser() -> _Parser:
    """The parser of all flags: ours first in its help, then TRL's."""
    parser = _Parser(
        (TuneArguments, *_TRL_TYPES),
        prog="hf-rocm-tune sft",
        description="Fine-tune a language model; every byte that goes to the device is verified.",
        allow_abbrev=False,
    )
    parser.add_argument(
        recipe_file.FLAG,
        metavar="RECIPE",
        help="Read flags from a YAML mapping: a file, or a name of `hf-rocm-tune recipes ls`; the command line wins.",
    )
    for action in parser._actions:
        if action.type is string_to_bool:  # upstream wants a value after flags whose default is None, as `--bf16`
            action.nargs, action.const = "?", True
    return parser


class _Parser(HfArgumentParser):
    """TRL's parser, with errors as ``UsageError``."""

    def error(self, message: str) -> NoReturn:
        """Turn argparse's complaint into ours: one spelling of the flag, and where to read on."""
        if message.startswith("argument "):
            option, _, complaint = message.removeprefix("argument ").partition(": ")
            message = f"{option.split('/')[0]}: {complaint}"
        raise UsageError(message)


_TRL_TYPES = (ScriptArguments, SFTConfig, ModelConfig, DatasetMixtureConfig)
_SECRETS = frozenset({"hub_token", "push_to_hub_token"})
_UNSET = object()
_OWNERS = {
    each.name: owner for owner in (TuneArguments, *_TRL_TYPES) for each in dataclasses.fields(owner) if each.init
}
_TRL_DEFAULTS = {
    each.name: each.default_factory() if callable(each.default_factory) else each.default
    for owner in _TRL_TYPES
    for each in dataclasses.fields(owner)
    if each.init
}
_HINTS = {name: typing.get_type_hints(owner)[name] for name, owner in _OWNERS.items()}


def _read_flags(parser: _Parser, argv: Sequence[str]) -> dict[str, Any]:
    """What the command line sets, by name."""
    # A default is only filled in where the namespace has no value, so what is still _UNSET was not given.
    empty = argparse.Namespace(**dict.fromkeys(_OWNERS, _UNSET), config=None)
    namespace, unknown = parser.parse_known_args(list(argv), namespace=empty)
    flags = [argument for argument in unknown if argument.startswith("--")]
    if flags:
        raise UsageError("; ".join(_unknown(flag.partition("=")[0], dashes="--") for flag in flags))
    if unknown:
        raise UsageError(f"unexpected argument {unknown[0]!r}; flags begin with --, see --help")
    return {name: value for name in _OWNERS if (value := getattr(namespace, name)) is not _UNSET}


def _read_recipe_values(parser: _Parser, recipe: recipe_file.Recipe) -> dict[str, Any]:
    """What a recipe sets, by name, in the types of the flags."""
    values, faults = {}, []
    for key, value in recipe.values.items():
        name = key.removeprefix("--").replace("-", "_")
        try:
            if name not in _OWNERS:
                raise UsageError(_unknown(key, dashes=""))
            values[name] = _convert(parser, name, value)
        except UsageError as error:
            faults.append(str(error))
    if faults:
        raise UsageError(f"recipe {recipe.path}: {'; '.join(faults)}")
    return values


def _convert(parser: _Parser, name: str, value: Any) -> Any:
    """A YAML value in the type of a flag: through the flag's own parser, so that both accept the same."""
    allowed = _members(_HINTS[name])
    if value is None:
        if type(None) in allowed:
            return None
        raise UsageError(f"--{name}: expected a value, got nothing")
    if isinstance(value, dict):
        if dict in allowed:
            return value
        raise UsageError(f"--{name}: expected a single value, got a mapping")
    if isinstance(value, list):
        if list not in allowed:
            raise UsageError(f"--{name}: expected a single value, got a list")
        if not value or any(not isinstance(item, str) for item in value) or str in allowed:
            return value
        return _read_flags(parser, [f"--{name}", *value])[name]
    if isinstance(value, bool) and bool not in allowed:
        value = "yes" if value else "no"  # YAML reads the bare words as booleans: `eval_strategy: no`
    return _read_flags(parser, [f"--{name}={value}"])[name]


def _resolve(given: dict[str, Any], *, accelerator: bool, bf16_supported: bool) -> Arguments:
    """Fill in our defaults and build TRL's objects."""
    differences = defaults.differences(given, _TRL_DEFAULTS, accelerator=accelerator, bf16_supported=bf16_supported)
    values = {each.name: each.ours for each in differences} | given
    for old in ("gradient_checkpointing", "gradient_checkpointing_kwargs"):
        # transformers warns about its old name, even where only TRL's default has set it.
        values.setdefault(old.replace("gradient", "activation"), values.get(old, _TRL_DEFAULTS[old]))
    return Arguments(
        tune=_build(TuneArguments, values),
        script=_build(ScriptArguments, values),
        model=_build(ModelConfig, values),
        mixture=_build(DatasetMixtureConfig, values),
        training=_build(SFTConfig, values),
        given=frozenset(given),
        differences=differences,
    )


_Settings = TypeVar("_Settings")


def _build(owner: type[_Settings], values: Mapping[str, Any]) -> _Settings:
    """An object of TRL's or ours; what it says about its values becomes a ``UsageError``."""
    try:
        return owner(**{name: value for name, value in values.items() if _OWNERS[name] is owner})
    except (ValueError, TypeError, OSError, ImportError, NotImplementedError) as error:
        raise UsageError(str(error) or f"{owner.__name__} refuses its values: {type(error).__name__}") from error


def _members(hint: Any) -> set[Any]:
    """The types that a hint allows, without their parameters: ``list[str] | None`` has ``list`` and ``NoneType``."""
    if isinstance(hint, types.UnionType) or typing.get_origin(hint) is typing.Union:
        return {member for each in typing.get_args(hint) for member in _members(each)}
    return {typing.get_origin(hint) or hint}


def _unknown(name: str, *, dashes: str) -> str:
    """The message for a name that nobody knows: the nearest that exists, or whose it is."""
    from hf_rocm_tune.launch import is_launcher_flag

    plain = name.removeprefix("--").replace("-", "_")
    what = "flag" if dashes else "key"
    if is_launcher_flag(plain):
        return f"{what} {name} belongs to the launcher; give it on the command line of `hf-rocm-tune sft`"
    nearest = difflib.get_close_matches(plain, [*_OWNERS, "config"], n=1, cutoff=0.5)
    hint = f"; did you mean {dashes}{nearest[0]}?" if nearest else "; see --help for those that exist"
    return f"unknown {what} {name}{hint}"


def _plain(value: object) -> object:
    """A setting as a JSON value."""
    if isinstance(value, Enum):
        return value.value
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return _plain(dataclasses.asdict(value))
    if isinstance(value, Mapping):
        return {str(key): _plain(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]
    return value if value is None or isinstance(value, bool | int | float | str) else str(value)
