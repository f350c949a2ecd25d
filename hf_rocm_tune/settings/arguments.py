"""The command line of a training job: every flag of ``trl sft`` (``dpo``, ``kto`` ...), ours, and recipe files.

A value comes from the command line, else from the recipe, else from our defaults, else from TRL's. Where our default
differs from TRL's, the difference is recorded with its reason, so that a run can print it.

Wrong input ends as one ``UsageError`` before anything is built; building TRL's configuration comes last, because it
makes Accelerate's state (and, with several ranks, connects them).
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import importlib
import math
import os
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

import yaml
from trl import DatasetMixtureConfig, ModelConfig, ScriptArguments
from trl.scripts._hf_argparser import HfArgumentParser, string_to_bool

from hf_rocm_tune.data.formats import Method
from hf_rocm_tune.data.sources import part_of_mixture
from hf_rocm_tune.errors import UsageError
from hf_rocm_tune.machine import process
from hf_rocm_tune.ranks.averaging import SyncSettings
from hf_rocm_tune.ranks.preflight import Preflight
from hf_rocm_tune.redaction import is_secret_name, redact_json, without_secrets
from hf_rocm_tune.settings import names
from hf_rocm_tune.settings import recipe as recipe_file
from hf_rocm_tune.settings.flags import RanksArguments, TuneArguments, process_group

if TYPE_CHECKING:
    from trl.trainer.base_config import _BaseConfig

_LORA_FACTOR = 10  # by which an adapter's learning rate is above that of all weights, in TRL's examples of each trainer


@dataclass(frozen=True, kw_only=True)
class Difference:
    """A default of ours that differs from TRL's, in use because the user gave no value."""

    name: str  # the flag without its dashes
    # trl, ours: the value that ``trl sft`` would use, and the one that is used
    trl: object
    ours: object
    reason: str


@dataclass(frozen=True, kw_only=True)
class Arguments:
    """A job's settings, complete and checked."""

    # script, training, model, mixture: TRL's own objects, as ``trl sft`` builds them
    method: Method
    script: ScriptArguments
    training: _BaseConfig  # `trl.SFTConfig`, `trl.DPOConfig` ...
    model: ModelConfig
    mixture: DatasetMixtureConfig
    tune: TuneArguments
    ranks: RanksArguments
    given: frozenset[str]  # names that the user set, by flag or recipe
    differences: tuple[Difference, ...]  # our defaults in use that differ from TRL's
    preflight: Preflight | None = None  # what the ranks have found out before they met; None where they did not try

    @property
    def grad_sync(self) -> SyncSettings:
        """How gradients are averaged: as the user says, else as the preflight has decided."""
        return self.ranks.sync(self.preflight.choice.way if self.preflight else None)

    def resolved(self) -> dict[str, object]:
        """Every setting by name, as plain JSON values. Secrets are left out, nested ones too."""
        flat: dict[str, object] = {}
        for part in (self.tune, self.ranks, self.script, self.model, self.mixture, self.training):
            for each in dataclasses.fields(part):
                if each.init and not is_secret_name(each.name):
                    flat[each.name] = without_secrets(_plain(getattr(part, each.name)))
        return flat

    def to_yaml(self) -> str:
        """The settings as a recipe: ``--config`` of it gives the same job again, and so does ``trl sft``'s own.

        ``print_config`` is left out, or the recipe would only print itself.
        """
        settings = {name: value for name, value in self.resolved().items() if name != "print_config"}
        if settings.get("steps_per_generation") is not None:
            settings.pop("generation_batch_size")  # GRPO takes one of the two, and makes the other of it
        return yaml.safe_dump(redact_json(settings), sort_keys=False, allow_unicode=True)


BeforeMeeting = Callable[[RanksArguments, bool, int], Preflight | None]
"""What the ranks do before they join a process group, given their flags, whether they train on an accelerator, and the
accumulation steps; see ``flags.decide``."""


def parse(
    argv: Sequence[str],
    *,
    method: Method = "sft",
    accelerator: bool | None = None,
    bf16_supported: bool | None = None,
    before_meeting: BeforeMeeting | None = None,
) -> Arguments:
    """Read a command line and its recipe.

    Args:
        argv: the arguments, without the program's name.
        method: of the training: which of TRL's trainers, and so which flags.
        accelerator, bf16_supported: whether there is a GPU, and computes in bfloat16; torch is asked unless given.
        before_meeting: called when the settings are known and no process group is there yet, but for --print_config.

    Returns:
        The settings. The recipe's ``env`` is in ``os.environ`` (what was set there before is kept).

    Raises:
        UsageError: the input is wrong; one message names everything that could be found at once.
        SystemExit: 0, after ``--help``.
    """
    parser = build_parser(method)
    path, rest = recipe_file.take_flag(names.canonical(argv), recipe_file.FLAG)
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
    _check(given, accelerator=accelerator)
    if given.get("print_config"):
        before_meeting = None
    return _resolve(
        parser,
        given,
        accelerator=accelerator,
        bf16_supported=accelerator and bf16_supported,
        before_meeting=before_meeting,
    )


def help_all(method: Method) -> str:
    """All flags with the defaults of a run of ours on a card: ours first, then TRL's, then where the launcher's are."""
    parser = build_parser(method)
    ours = differences({}, method=method, accelerator=True, bf16_supported=True)
    parser.set_defaults(**{each.name: each.ours for each in ours})
    return (
        f"{parser.format_help()}\nlauncher:\n  --accelerate_config NAME|PATH  and every flag of `accelerate launch`; "
        "`hf-rocm-tune configs ls` lists the names"
    )


def build_parser(method: Method = "sft") -> _Parser:
    """The parser of all flags: ours first in its help, then TRL's."""
    flags = _flags(method)
    parser = _Parser(
        flags.types,
        prog=f"hf-rocm-tune {method}",
        description="Train a language model; every byte that goes to the device is verified.",
        allow_abbrev=False,
    )
    parser.method = method
    parser.add_argument(
        recipe_file.FLAG,
        metavar="RECIPE",
        help="Read flags from a YAML mapping: a file, or a name of `hf-rocm-tune recipes ls`; the command line wins.",
    )
    for action in parser._actions:
        if action.type is string_to_bool:  # upstream wants a value after flags whose default is None, as `--bf16`
            action.nargs, action.const = "?", True
        if action.dest == "datasets":
            action.type, action.metavar = part_of_mixture, "NAME[,fraction=0.3,split=...]"
            action.help = "A mixture: names or paths of datasets, each with a recipe's keys after commas."
    return parser


class _Parser(HfArgumentParser):
    """TRL's parser, with errors as ``UsageError``."""

    method: Method

    def error(self, message: str) -> NoReturn:
        """Turn argparse's complaint into ours: one spelling of the flag, and where to read on."""
        if message.startswith("argument "):
            option, _, complaint = message.removeprefix("argument ").partition(": ")
            message = f"{option.split('/')[0]}: {complaint}"
        raise UsageError(message)


_OUR_TYPES = (TuneArguments, RanksArguments)
_UNSET = object()


@dataclass(frozen=True, kw_only=True)
class _Flags:
    """The flags of one method."""

    types: tuple[type, ...]  # ours, then TRL's: script arguments, configuration, model, mixture
    owners: Mapping[str, type]
    defaults: Mapping[str, Any]  # TRL's
    hints: Mapping[str, Any]


@functools.cache
def _flags(method: Method) -> _Flags:
    theirs = tuple(
        getattr(importlib.import_module(module), name) for module, name in names.VERBS[method].owners[len(_OUR_TYPES) :]
    )
    owners = {each.name: owner for owner in (*_OUR_TYPES, *theirs) for each in dataclasses.fields(owner) if each.init}
    defaults = {
        each.name: each.default_factory() if callable(each.default_factory) else each.default
        for owner in theirs
        for each in dataclasses.fields(owner)
        if each.init
    }
    hints = {name: typing.get_type_hints(owner)[name] for name, owner in owners.items()}
    return _Flags(types=(*_OUR_TYPES, *theirs), owners=owners, defaults=defaults, hints=hints)


def _read_flags(parser: _Parser, argv: Sequence[str]) -> dict[str, Any]:
    """What the command line sets, by name."""
    # A default is only filled in where the namespace has no value, so what is still _UNSET was not given.
    owners = _flags(parser.method).owners
    empty = argparse.Namespace(**dict.fromkeys(owners, _UNSET), config=None)
    namespace, unknown = parser.parse_known_args(list(argv), namespace=empty)
    flags = [argument for argument in unknown if argument.startswith("--")]
    if flags:
        raise UsageError("; ".join(names.unknown(flag.partition("=")[0], [*owners], dashes="--") for flag in flags))
    if unknown:
        raise UsageError(f"unexpected argument {unknown[0]!r}; flags begin with --, see --help")
    return {name: value for name in owners if (value := getattr(namespace, name)) is not _UNSET}


def _read_recipe_values(parser: _Parser, recipe: recipe_file.Recipe) -> dict[str, Any]:
    """What a recipe sets, by name, in the types of the flags."""
    values, faults = {}, []
    for key, name in names.canonical_keys(recipe).items():
        try:
            if name not in (owners := _flags(parser.method).owners):
                raise UsageError(names.unknown(key, [*owners], dashes=""))
            values[name] = _convert(parser, name, recipe.values[key])
        except UsageError as error:
            faults.append(str(error))
    if faults:
        raise UsageError(f"recipe {recipe.path}: {'; '.join(faults)}")
    return values


def _convert(parser: _Parser, name: str, value: Any) -> Any:
    """A YAML value in the type of a flag: through the flag's own parser, so that both accept the same."""
    allowed = _members(_flags(parser.method).hints[name])
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


def _resolve(
    parser: _Parser,
    given: dict[str, Any],
    *,
    accelerator: bool,
    bf16_supported: bool,
    before_meeting: BeforeMeeting | None,
) -> Arguments:
    """Fill in our defaults and build TRL's objects; building the last of them lets the ranks meet."""
    flags = _flags(parser.method)
    different = differences(given, method=parser.method, accelerator=accelerator, bf16_supported=bf16_supported)
    values = {each.name: each.ours for each in different} | given
    for old in ("gradient_checkpointing", "gradient_checkpointing_kwargs"):
        # transformers warns about its old name, even where only TRL's default has set it.
        values.setdefault(old.replace("gradient", "activation"), values.get(old, flags.defaults[old]))
    build = functools.partial(_build, owners=flags.owners, values=values)
    tune, ranks = build(TuneArguments), build(RanksArguments)
    script: Any = build(flags.types[2])
    model, mixture = build(ModelConfig), build(DatasetMixtureConfig)
    steps: Any = values.get("gradient_accumulation_steps", flags.defaults["gradient_accumulation_steps"])
    preflight = before_meeting(ranks, accelerator, steps) if before_meeting else None
    values |= process_group(ranks.sync(preflight.choice.way if preflight else None), values, os.environ)
    return Arguments(
        method=parser.method,
        tune=tune,
        ranks=ranks,
        script=script,
        model=model,
        mixture=mixture,
        training=build(flags.types[3]),
        given=frozenset(given),
        differences=different,
        preflight=preflight,
    )


_Settings = TypeVar("_Settings")


def _build(owner: type[_Settings], *, owners: Mapping[str, type], values: Mapping[str, Any]) -> _Settings:
    """An object of TRL's or ours; what it says about its values becomes a ``UsageError``."""
    try:
        return owner(**{name: value for name, value in values.items() if owners[name] is owner})
    except (ValueError, TypeError, OSError, ImportError, NotImplementedError) as error:
        raise UsageError(str(error) or f"{owner.__name__} refuses its values: {type(error).__name__}") from error


def _members(hint: Any) -> set[Any]:
    """The types that a hint allows, without their parameters: ``list[str] | None`` has ``list`` and ``NoneType``."""
    if isinstance(hint, types.UnionType) or typing.get_origin(hint) is typing.Union:
        return {member for each in typing.get_args(hint) for member in _members(each)}
    return {typing.get_origin(hint) or hint}


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


# ---- defaults and bounds, by plain values before TRL's objects are built -------------------------------------------


def differences(
    given: Mapping[str, Any], *, method: Method = "sft", accelerator: bool, bf16_supported: bool
) -> tuple[Difference, ...]:
    """Our defaults for the flags that were not given, as far as they differ from TRL's."""
    found: list[Difference] = []
    defaults = _flags(method).defaults

    def default(name: str, ours: object, reason: str, *, upstream: object = None) -> None:
        theirs = defaults[name] if upstream is None else upstream
        if name not in given and ours != theirs:
            found.append(Difference(name=name, trl=theirs, ours=ours, reason=reason))

    lora = given.get("use_peft", True)
    default("use_peft", True, "LoRA; --use_peft false trains all weights")
    if lora:
        rate = float(f"{_LORA_FACTOR * defaults['learning_rate']:.6g}")
        default("learning_rate", rate, "adapters start at zero and learn at about ten times the rate")
        if given.get("lora_target_parameters") is None:
            default("lora_target_modules", ["all-linear"], "every linear layer but the output head")
        default("lora_dropout", 0.0, "dropout makes a step slower and keeps more activations")
        if method == "reward":
            default("lora_task_type", "SEQ_CLS", "the head that gives the reward is new: it is trained and saved whole")
    if given.get("load_in_4bit"):
        default("use_bnb_nested_quant", True, "QLoRA: the quantisation constants are quantised too")
    # TRL resolves an unset bf16 to "not fp16", whatever the device can do.
    fp16 = given.get("fp16", False)
    default(
        "bf16",
        bf16_supported and not fp16,
        "the device computes in bfloat16" if bf16_supported else "no device here computes in bfloat16",
        upstream=not fp16,
    )
    if given.get("load_in_4bit") and not fp16:
        default("dtype", "bfloat16", "QLoRA computes in bfloat16, and so do the layers that are not quantised")
    elif lora and bf16_supported and not fp16:
        default("dtype", "bfloat16", "frozen weights take half the memory; adapters are trained in float32")
    if given.get("early_stopping_patience") is not None:
        default("metric_for_best_model", "loss", "early stopping watches the evaluation loss")
    if not accelerator:
        default("use_cpu", True, "there is no GPU here")
    default("dataloader_pin_memory", False, "the verified transfer has page-locked slots of its own")
    return tuple(found)


def _check(given: Mapping[str, Any], *, accelerator: bool) -> None:
    """Check what the user gave where that needs more than one flag or a bound, all of it at once.

    Raises:
        UsageError: one line with everything that is wrong.
    """
    faults = [
        f"--{name} must be {expected}, got {given[name]}"
        for name, (holds, expected) in _BOUNDS.items()
        if given.get(name) is not None and not holds(given[name])
    ]
    if not given.get("model_name_or_path"):
        faults.append("no model: give --model (--model_name_or_path), a Hub id or a directory")
    if not given.get("dataset_name") and not given.get("datasets"):
        faults.append("no data: give --dataset (--dataset_name), a Hub id, a directory or a file")
    quantised = [name for name in ("load_in_4bit", "load_in_8bit") if given.get(name)]
    if len(quantised) == 2:
        faults.append("--load_in_4bit and --load_in_8bit exclude each other; keep one")
    elif quantised and given.get("use_peft") is False:
        faults.append(f"--{quantised[0]} works only with LoRA; leave --use_peft false or --{quantised[0]} away")
    if given.get("early_stopping_patience") is not None and given.get("eval_strategy", "no") == "no":
        faults.append("--early_stopping_patience needs evaluations; add --eval_strategy steps (or epoch)")
    if given.get("fp16") and not accelerator:
        faults.append("--fp16 needs a GPU, and this job runs on the CPU; leave it away")
    if given.get("fp16") and given.get("bf16"):
        faults.append("--fp16 and --bf16 exclude each other; keep one")
    if faults:
        raise UsageError("; ".join(faults))


_Bound = tuple[Callable[[Any], bool], str]
_AT_LEAST_ONE: _Bound = (lambda value: value >= 1, "1 or more")
_NOT_NEGATIVE: _Bound = (lambda value: value >= 0, "0 or more")
_POSITIVE: _Bound = (lambda value: value > 0, "more than 0")
_SEED: _Bound = (lambda value: 0 <= value < 2**32, "0 or more and below 2**32")
_BETA: _Bound = (lambda value: 0 <= value < 1, "0 or more and below 1")
_BOUNDS: dict[str, _Bound] = {
    "per_device_train_batch_size": _AT_LEAST_ONE,
    "per_device_eval_batch_size": _AT_LEAST_ONE,
    "gradient_accumulation_steps": _AT_LEAST_ONE,
    # transformers takes 0, like -1, for "no limit": a surprise for whoever asked for no step.
    "max_steps": (lambda value: value == -1 or value >= 1, "1 or more, or -1 for no limit"),
    "num_train_epochs": _POSITIVE,
    "learning_rate": (lambda value: 0 <= value < math.inf, "0 or more, and finite"),
    "weight_decay": _NOT_NEGATIVE,
    "max_grad_norm": _NOT_NEGATIVE,
    "warmup_steps": _NOT_NEGATIVE,
    "logging_steps": _NOT_NEGATIVE,
    "eval_steps": _NOT_NEGATIVE,
    "save_steps": _NOT_NEGATIVE,
    "save_total_limit": _NOT_NEGATIVE,
    "dataloader_num_workers": _NOT_NEGATIVE,
    "max_length": _AT_LEAST_ONE,
    "lora_r": _AT_LEAST_ONE,
    "lora_alpha": _AT_LEAST_ONE,
    "seed": _SEED,
    "data_seed": _SEED,
    "adam_beta1": _BETA,
    "adam_beta2": _BETA,
    "adam_epsilon": _NOT_NEGATIVE,
    "eval_accumulation_steps": _AT_LEAST_ONE,
    "lora_dropout": (lambda value: 0 <= value < 1, "0 or more and below 1"),
}
