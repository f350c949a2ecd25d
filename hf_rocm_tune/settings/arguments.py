"""The command line of a training job: every flag of ``trl sft`` (``dpo``, ``kto`` ...), ours, and recipe files.

A value comes from the command line, else from the recipe, else from our defaults, else from TRL's. Wrong input raises
one ``UsageError`` before anything is built. TRL's configuration is built last, because it creates Accelerate's state
and, with several ranks, connects them.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import importlib
import json
import math
import os
import re
import types
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, NoReturn, get_args

import yaml
from transformers.hf_argparser import string_to_bool
from trl import DatasetMixtureConfig, ModelConfig, ScriptArguments, TrlParser

from hf_rocm_tune.cards.averaging import SyncSettings
from hf_rocm_tune.cards.preflight import Asked, GradSync, Preflight
from hf_rocm_tune.cards.strategies import choose
from hf_rocm_tune.cards.strategy import CardSettings, ParallelStrategy, is_on
from hf_rocm_tune.data.formats import Method
from hf_rocm_tune.errors import UsageError, count_of
from hf_rocm_tune.lifecycle import stall
from hf_rocm_tune.machine import process
from hf_rocm_tune.models import recompute, streamed
from hf_rocm_tune.redaction import is_secret_name, redact_json, without_secrets
from hf_rocm_tune.settings.flags import ANSWERS_ONLY, CONFIG, unknown_flag
from hf_rocm_tune.settings.recipes import RecipeFile, apply_environment, recipe_of
from hf_rocm_tune.settings.values import missing, out_of_range
from hf_rocm_tune.settings.verbs import LORA_FACTOR, VERBS

if TYPE_CHECKING:
    from trl.trainer.base_config import _BaseConfig


_INITS = r"default|gaussian|orthogonal|pissa(_niter_[1-9]\d*)?|olora"


def _option(default: Any, meaning: str, aliases: Sequence[str] = ()) -> Any:
    return field(default=default, metadata={"help": meaning, "aliases": list(aliases)})


@dataclass(frozen=True, kw_only=True)
class TuneArguments:
    """The flags of every job. Their meaning is in the help of each."""

    verify: Literal["full", "sample", "off"] = _option("full", "Transfers to the device that are verified.")
    on_corruption: Literal["recover", "stop"] = _option(
        "recover", "On a corrupted transfer: send the bytes again, or end the run at once with exit code 3."
    )
    consent_unverified: bool = _option(False, "Train although `--verify full` does not cover every byte on the device.")
    sentinel_every: int = _option(50, "Steps between two checks of weights that must not change. 0: no checks.")
    check_arithmetic: Literal["off", "sampled", "every"] = _option(
        "sampled", "Products with frozen weights that are checked in training: none, a sample in each step, or all."
    )
    prefetch_batches: int = _option(
        1, "Batches transferred ahead of the one in use, above 1 within an accumulation window only. 0: none."
    )
    auto_fit: Literal["off", "plan"] = _option(
        "off", "Choose micro-batch, accumulation and checkpointing, where not given, for the free memory of the card."
    )
    effective_batch: int | None = _option(None, "With --auto_fit: sequences per step over all processes.")
    auto_fit_gib: float | None = _option(None, "With --auto_fit: GiB of the card to use. Default: its free memory.")
    recompute_layers: str | None = _option(
        None,
        "Checkpointing of the first layers only: how many are recomputed whole, and how many more keep the results of "
        "matrix products and attention (8 or 8,20). Default: all layers or none.",
    )
    stream_weights: str = _option(
        "off", "Frozen layers in host memory, brought to the card, verified, in use: how many, auto (by plan) or off."
    )
    one_pass_loss: bool | None = _option(
        None, "Compute the gradient of the loss together with the loss. Default: with --auto_fit."
    )
    init_lora_weights: str = _option(
        "default",
        "Initial values of LoRA's matrices: default, gaussian, orthogonal, or from the weights: pissa, pissa_niter_N, "
        "olora. Adapters of these three are saved as plain LoRA of twice the rank.",
    )
    adapter_name_or_path: str | None = _option(None, "Continue training an existing adapter, a directory or a Hub id.")
    loraplus_lr_ratio: float | None = _option(None, "LoRA+: learning rate of B over --learning_rate (usually 16).")
    embedding_learning_rate: float | None = _option(
        None, "Learning rate of embeddings and output head when they are trained (--lora_modules_to_save)."
    )
    loss_on_picture_tokens: bool | None = _option(
        None,
        "Count the placeholder tokens of pictures in the loss, as TRL does. Default: they do not count; a run begun by "
        "a version that counted them goes on so.",
    )
    image_folder: str | None = _option(
        None, "The folder of pictures that rows name by relative paths. Default: that of the data file."
    )
    max_pixels: int | None = _option(None, "Make larger pictures smaller, to so many pixels (as 262144: 512 x 512).")
    train_vision_tower: Literal["no", "lora", "whole"] | None = _option(
        None, "Train the vision tower of an image-text model with adapters or whole. Default: no."
    )
    train_projector: Literal["no", "lora", "whole"] | None = _option(
        None, "Likewise what leads from the vision tower into the language model. Default: no."
    )
    mask_thinking: bool = _option(False, "Leave the text from <think> to </think> out of the loss.")
    on_oom: Literal["step_down", "stop"] = _option(
        "step_down", "Out of device memory: smaller micro-batches at the same effective batch, or exit code 5."
    )
    max_skipped_steps: int = _option(
        5, "Steps of the last 100 that may be skipped because loss or gradients are not finite; more: exit code 3."
    )
    doctor: Literal["quick", "off"] = _option("quick", "Check the machine before the run, by what is read quickly.")
    telemetry_every: float = _option(1.0, "Seconds between two readings of temperature, power and load. 0: never.")
    overwrite_output_dir: bool = _option(False, "Replace the files of another run in the output directory.")
    eval_split_size: str | None = _option(
        None,
        "Split this part of the training rows off for evaluation: a share below 1, or a number of rows. auto: only if "
        "the data has no split for it, a twentieth of the rows and at most 200.",
    )
    early_stopping_patience: int | None = _option(None, "Stop after this many evaluations without improvement.")
    early_stopping_threshold: float = _option(0.0, "Smallest improvement of the metric that counts for early stopping.")
    sample_every: int | None = _option(None, "Answer --sample_prompts every so many steps, in the log and the report.")
    sample_prompts: list[str] | None = _option(None, "Prompts for --sample_every.")  # noqa: RUF009
    sample_images: list[str] | None = _option(  # noqa: RUF009
        None, "Pictures for --sample_prompts: one for each prompt, or one for all."
    )
    hub_base_model_id: str | None = _option(None, "Hub id to name as base model in what is pushed.")
    verbose: bool = _option(False, "Print each default that differs from TRL's, and why.", aliases=["-v"])
    dry_run: Literal["text", "html", "json"] | None = _option(
        None, "Check all settings, show the rows as the model reads them with the tokens that count, and exit."
    )
    print_config: bool = _option(False, "Print the resolved configuration as a YAML recipe and exit.")

    def __post_init__(self) -> None:
        if self.recompute_layers is not None:
            recompute.parse(self.recompute_layers)
        streamed.parse(self.stream_weights)
        if not re.fullmatch(_INITS, self.init_lora_weights):
            raise ValueError(
                f"--init_lora_weights {self.init_lora_weights}: choose default, gaussian, orthogonal, pissa, "
                "pissa_niter_N or olora; loftq makes an adapter that does not fit the original weights"
            )

    @property
    def rewrites_base(self) -> bool:
        """Whether LoRA is initialised from the weights, which then lose that part."""
        return self.init_lora_weights.startswith(("pissa", "olora"))

    @property
    def recompute(self) -> tuple[int, int] | None:
        return None if self.recompute_layers is None else recompute.parse(self.recompute_layers)

    @property
    def eval_rows(self) -> int | float | Literal["auto"] | None:
        """``eval_split_size`` as ``train_test_split(test_size=)`` has it: an int counts rows, a float is a share."""
        if self.eval_split_size is None:
            return None
        if self.eval_split_size == "auto":
            return "auto"
        size = float(self.eval_split_size)
        return int(size) if size >= 1 else size


@dataclass(frozen=True, kw_only=True)
class RanksArguments:
    """The flags of a job on several cards or machines. Their meaning is in the help of each."""

    grad_sync: Asked = _option(  # noqa: RUF009
        "auto",
        "How several processes average gradients: DistributedDataParallel over the process group, through host memory "
        "over gloo (verified in both directions), or what works in the preflight.",
    )
    grad_compression: Literal["none", "fp16", "bf16", "powersgd"] = _option(
        "none",
        "What processes exchange of the gradients: all, a cast to 16 bits, or PowerSGD's approximation of rank 1.",
    )
    split_layers: str | None = _option(
        None, "Split one model over several cards in one process: layers on each card (18, or 18,22), or auto."
    )
    pipeline: Literal["auto", "off"] = _option(
        "off", "With --split_layers: the cards compute different micro-batches at once; the result is the same."
    )
    tensor_parallel: bool = _option(False, "Two processes compute each layer together, with half of its weights each.")
    preflight: Literal["auto", "always", "off"] = _option(
        "auto",
        "Test the cards before several processes join, in child processes with deadlines, under 30 seconds in all. "
        "auto: when training on cards; always: on the CPU too.",
    )
    stall_timeout: str = _option(
        "auto",
        "Seconds without progress in a step after which the job ends with exit code 4; evaluations, saves and the "
        "first steps get 4 times as long. auto: 300, or 10 times the median step. 0: never.",
    )

    def __post_init__(self) -> None:
        stall.parse(self.stall_timeout)
        self.sync(None)

    def sync(self, chosen: str | None) -> SyncSettings:
        """How gradients are averaged: as the user set it, else as ``chosen`` by the preflight; None: none ran."""
        wanted = chosen if self.grad_sync == "auto" else self.grad_sync
        method: GradSync = next((known for known in get_args(GradSync) if known == wanted), "ddp")
        return SyncSettings(method=method, compression=self.grad_compression)


class Difference(NamedTuple):
    """A default of ours that differs from TRL's, in use because the user gave no value."""

    name: str  # the flag without its dashes
    trl: object  # the value that ``trl sft`` would use
    ours: object  # the one that is used
    reason: str


@dataclass(frozen=True, kw_only=True)
class Arguments:
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
    preflight: Preflight | None = None  # its result; None if none ran

    @property
    def grad_sync(self) -> SyncSettings:
        return self.ranks.sync(self.preflight.method if self.preflight else None)

    def strategy(self) -> ParallelStrategy:
        return choose(
            CardSettings(
                world_size=self.training.world_size,
                sync=self.grad_sync,
                fsdp=is_on("ACCELERATE_USE_FSDP") or bool(self.training.fsdp),
                tensor_parallel=self.ranks.tensor_parallel,
                split=self.ranks.split_layers is not None,
                pipeline=self.ranks.pipeline == "auto",
            )
        )

    @property
    def sources(self) -> list[str]:
        """Names or paths of the data."""
        return [part.path for part in self.mixture.datasets] or [self.script.dataset_name]

    @property
    def is_streamed(self) -> bool:
        """Whether rows are read while the run trains on them."""
        return self.mixture.streaming if self.mixture.datasets else self.script.dataset_streaming

    @property
    def one_pass_loss(self) -> bool:
        """Whether the gradient of the loss is computed in forward, see `models.loss`."""
        if self.tune.one_pass_loss is not None:
            return self.tune.one_pass_loss
        return (
            self.method == "sft"
            and self.tune.auto_fit != "off"
            and not self.training.torch_compile
            and importlib.import_module("hf_rocm_tune.models.loss").is_known()  # TRL's private kernels
        )

    def resolved(self) -> dict[str, object]:
        """Every setting by name, as plain JSON values, without secrets."""
        flat: dict[str, object] = {}
        for part in (self.tune, self.ranks, self.script, self.model, self.mixture, self.training):
            for setting in dataclasses.fields(part):
                if setting.init and not is_secret_name(setting.name):
                    flat[setting.name] = without_secrets(_plain(getattr(part, setting.name)))
        return flat

    def to_yaml(self) -> str:
        """The settings as a recipe: ``--config`` of it gives the same job again, and so does ``trl sft``'s own.

        ``print_config`` is left out, or the recipe would only print itself.
        """
        settings = self.resolved()
        left_out = ["print_config"]
        if settings["adapter_name_or_path"] is not None:
            left_out += _OF_ADAPTERS
        if settings.get("steps_per_generation") is not None:
            left_out.append("generation_batch_size")  # GRPO takes one of the two and computes the other
        settings = {name: value for name, value in settings.items() if name not in left_out}
        return yaml.safe_dump(redact_json(settings), sort_keys=False, allow_unicode=True)


def parse(
    argv: Sequence[str],
    *,
    method: Method = "sft",
    accelerator: bool | None = None,
    bf16_supported: bool | None = None,
    before_joining: Callable[[RanksArguments, bool, int], Preflight | None] | None = None,
) -> Arguments:
    """Read a command line and its recipe, whose ``env`` is in ``os.environ`` then (what was set before is kept).

    ``accelerator``, ``bf16_supported``: whether there is a GPU, and whether it computes in bfloat16; None: ask torch.
    ``before_joining``: `job.refusals.decide`, called before the ranks join a process group.
    """
    parser = build_parser(method)
    recipe, rest = recipe_of(argv)
    given = _read_flags(parser, rest)
    if recipe is not None:
        apply_environment(argv, os.environ)
        given = _read_recipe_values(parser, recipe) | given
    if accelerator is None:
        accelerator = process.has_accelerator()
    accelerator = accelerator and not given.get("use_cpu")
    if bf16_supported is None:
        bf16_supported = process.has_bf16()
    _check(given, accelerator=accelerator)
    flags = _flags(method)
    half = accelerator and bf16_supported
    different = differences(given, method=method, accelerator=accelerator, bf16_supported=half)
    values = {difference.name: difference.ours for difference in different}
    values |= given
    for more in ("", "_kwargs"):
        # transformers warns about its old name even if only TRL's default set it.
        old = f"gradient_checkpointing{more}"
        values.setdefault(f"{recompute.SETTING}{more}", values.get(old, flags.defaults[old]))
    tune, ranks, script, config, model, mixture = (
        functools.partial(_build, owner, owners=flags.owners, values=values) for owner in flags.types
    )
    ours = tune()
    of_ranks = ranks()
    preflight = None
    if before_joining is not None and not ours.print_config:
        steps: Any = values.get("gradient_accumulation_steps", flags.defaults["gradient_accumulation_steps"])
        preflight = before_joining(of_ranks, accelerator, steps)
    sync = of_ranks.sync(preflight.method if preflight else None)
    if sync.method == "host" and os.environ.get("WORLD_SIZE", "1") != "1":  # Accelerate takes a back end for a group
        backend = values.get("ddp_backend")
        if backend not in (None, "gloo"):
            raise UsageError(
                f"--ddp_backend {backend} does not work with gradients averaged through the host, which uses gloo: "
                "drop it, or choose --grad_sync ddp"
            )
        values["ddp_backend"] = "gloo"  # so that RCCL is not created
    return Arguments(
        method=method,
        tune=ours,
        ranks=of_ranks,
        script=script(),
        model=model(),
        mixture=mixture(),
        training=config(),  # last: it connects the ranks
        given=frozenset(given),
        differences=different,
        preflight=preflight,
    )


def help_all(method: Method) -> str:
    """All flags with the defaults of a run of ours on a card: ours first, then TRL's, then where the launcher's are."""
    parser = build_parser(method)
    different = differences({}, method=method, accelerator=True, bf16_supported=True)
    parser.set_defaults(**{difference.name: difference.ours for difference in different})
    return (
        f"{parser.format_help()}\nlauncher:\n  --accelerate_config NAME|PATH  and every flag of `accelerate launch`; "
        "`hf-rocm-tune configs ls` lists the names"
    )


def build_parser(method: Method = "sft") -> _Parser:
    flags = _flags(method)
    parser = _Parser(
        flags.types,
        prog=f"hf-rocm-tune {method}",
        description="Train a language model; every byte that goes to the device is verified.",
        allow_abbrev=False,
    )
    parser.method = method
    parser.add_argument(
        CONFIG,
        metavar="RECIPE",
        help="Read flags from a YAML mapping: a file, or a name of `hf-rocm-tune recipes ls`; the command line wins.",
    )
    for action in parser._actions:
        is_switch = _members(flags.hints.get(action.dest)) - {type(None)} == {bool}
        if is_switch and action.type is not None:  # upstream wants a value where the default is None, as for `--bf16`
            action.nargs = "?"
            action.const = True
        if action.dest == "dry_run":
            action.nargs = "?"
            action.const = "text"
        if action.dest == ANSWERS_ONLY:
            action.type = _yes_no_or_auto
            action.help = f"{action.help} auto: where the rows are conversations."
        if action.dest == "datasets":
            action.help = "A mixture: paths, or in a recipe mappings with path, split, fraction, columns ..."
    return parser


def _yes_no_or_auto(word: str) -> bool | str:
    return word if word == "auto" else string_to_bool(word)


class _Parser(TrlParser):
    method: Method  # whose flags it reads

    def error(self, message: str) -> NoReturn:
        if message.startswith("argument "):
            option, _, complaint = message.removeprefix("argument ").partition(": ")
            message = f"{option.split('/')[0]}: {complaint}"
        raise UsageError(message)


_OUR_TYPES = (TuneArguments, RanksArguments)
_UNSET = object()


class _Flags(NamedTuple):
    types: tuple[Any, ...]  # ours, then TRL's: script arguments, configuration, model, mixture
    owners: Mapping[str, type]
    defaults: Mapping[str, Any]
    hints: Mapping[str, Any]


@functools.cache
def _flags(method: Method) -> _Flags:
    os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")  # our help says that ORPO is experimental
    owned = VERBS[method].owners[len(_OUR_TYPES) :]
    types = (*_OUR_TYPES, *(getattr(importlib.import_module(module), name) for module, name in owned))
    owners: dict[str, Any] = {}
    defaults: dict[str, Any] = {}
    hints: dict[str, Any] = {}
    for owner in types:  # of two with the same flag the later one has it
        of_owner = typing.get_type_hints(owner)
        for setting in dataclasses.fields(owner):
            if not setting.init:
                continue
            owners[setting.name] = owner
            hints[setting.name] = of_owner[setting.name]
            defaults[setting.name] = setting.default
            if callable(setting.default_factory):
                defaults[setting.name] = setting.default_factory()
    return _Flags(types=types, owners=owners, defaults=defaults, hints=hints)


def _read_flags(parser: _Parser, argv: Sequence[str]) -> dict[str, Any]:
    # argparse fills in a default only where the namespace has no value: what is still _UNSET was not given.
    owners = _flags(parser.method).owners
    empty = argparse.Namespace(**dict.fromkeys(owners, _UNSET), config=None)
    namespace, unknown = parser.parse_known_args(list(argv), namespace=empty)
    flags = [argument for argument in unknown if argument.startswith("--")]
    if flags:
        raise UsageError("; ".join(unknown_flag(flag.partition("=")[0], owners, dashes="--") for flag in flags))
    if unknown:
        raise UsageError(f"unexpected argument {unknown[0]!r}; flags begin with --, see --help")
    return {name: getattr(namespace, name) for name in owners if getattr(namespace, name) is not _UNSET}


def _read_recipe_values(parser: _Parser, recipe: RecipeFile) -> dict[str, Any]:
    values = {}
    faults = []
    for name, value in recipe.values.items():
        try:
            values[name] = _convert(parser, name, value)
        except UsageError as error:
            faults.append(str(error))
    if faults:
        raise UsageError(f"recipe {recipe.path}: {'; '.join(faults)}")
    return values


def _convert(parser: _Parser, name: str, value: Any) -> Any:
    """A YAML value in the type of a flag: through the flag's own parser, so that both accept the same."""
    hints = _flags(parser.method).hints
    if name not in hints:
        raise UsageError(unknown_flag(name, hints, dashes=""))
    allowed = _members(hints[name])
    kinds = {type(None): "nothing", dict: "a mapping", list: "a list"}
    if type(value) in kinds and type(value) not in allowed:
        raise UsageError(f"--{name}: expected a single value, got {kinds[type(value)]}")
    if isinstance(value, list) and list[str] in (hints[name], *typing.get_args(hints[name])):
        for item in value:
            if not isinstance(item, str):
                raise UsageError(f"--{name}: expected a list of text, got {item} in it; put it in quotes")
    if type(value) in kinds:
        return value
    if isinstance(value, bool) and bool not in allowed:
        value = "yes" if value else "no"  # YAML reads the bare words as booleans: `eval_strategy: no`
    return _read_flags(parser, [f"--{name}={value}"])[name]


def _build(owner: Any, *, owners: Mapping[str, type], values: Mapping[str, Any]) -> Any:
    """An object of TRL's or ours; errors about its values become a ``UsageError``."""
    try:
        return owner(**{name: value for name, value in values.items() if owners[name] is owner})
    except (ValueError, TypeError, OSError, ImportError, NotImplementedError) as error:
        raise UsageError(str(error) or f"{owner.__name__} refuses its values: {type(error).__name__}") from error


def _members(hint: Any) -> set[Any]:
    """The types that a hint allows, without parameters: ``list`` and ``NoneType`` for ``list[str] | None``."""
    if isinstance(hint, types.UnionType) or typing.get_origin(hint) is typing.Union:
        members = set()
        for part in typing.get_args(hint):
            members |= _members(part)
        return members
    return {typing.get_origin(hint) or hint}


def _plain(value: object) -> object:
    def known(other: Any) -> object:
        return vars(other) if dataclasses.is_dataclass(other) else str(getattr(other, "value", other))

    return json.loads(json.dumps(value, default=known))


def differences(
    given: Mapping[str, Any], *, method: Method = "sft", accelerator: bool, bf16_supported: bool
) -> tuple[Difference, ...]:
    """Our defaults in use that differ from TRL's; ``given``: the user's values."""
    verb = VERBS[method]
    theirs = {**_flags(method).defaults, "bf16": not given.get("fp16", False)}  # an unset bf16 becomes that
    lora = given.get("use_peft", True)
    nf4 = bool(given.get("load_in_4bit"))
    fp16 = given.get("fp16", False)
    half = lora and bf16_supported and not fp16
    bf16 = "the device computes in bfloat16" if bf16_supported else "no device here computes in bfloat16"
    qlora = "QLoRA computes in bfloat16, and so do the layers that are not quantised"
    frozen = "frozen weights take half the memory; adapters are trained in float32"
    batches = {"per_device_train_batch_size", "gradient_accumulation_steps"}
    generates = method == "grpo" and not given.keys() & {*batches, "steps_per_generation", "generation_batch_size"}
    answers = int(given.get("num_generations", theirs["num_generations"])) if generates else 0
    micro = 2 - answers % 2
    at_once = "as many answers are generated at once as a prompt has, and trained on in micro-batches"
    modules = lora and given.get("lora_target_parameters") is None
    rate = float(f"{LORA_FACTOR * verb.rate:.6g}")
    stops = given.get("early_stopping_patience") is not None
    rows: list[tuple[Any, str, object, str]] = [
        (True, "use_peft", True, "LoRA; --use_peft false trains all weights"),
        (lora, "learning_rate", rate, "adapters start at zero and need about ten times the rate"),
        (modules, "lora_target_modules", ["all-linear"], "every linear layer except the output head"),
        (lora, "lora_dropout", 0.0, "dropout slows a step down and keeps more activations"),
        (lora and method == "reward", "lora_task_type", "SEQ_CLS", "the reward head is new: trained and saved whole"),
        (nf4, "use_bnb_nested_quant", True, "QLoRA: the quantisation constants are quantised too"),
        (True, "bf16", bf16_supported and not fp16, bf16),
        ((nf4 and not fp16) or half, "dtype", "bfloat16", qlora if nf4 else frozen),
        (stops, "metric_for_best_model", "loss", "early stopping watches the evaluation loss"),
        (generates, "per_device_train_batch_size", micro, at_once),
        (generates, "gradient_accumulation_steps", answers // micro, at_once),
        (verb.keeps_columns, "remove_unused_columns", False, "its collator reads more than the model does"),
        (not accelerator, "use_cpu", True, "there is no GPU here"),
        (True, "dataloader_pin_memory", False, "the verified transfer has its own page-locked slots"),
    ]
    different = []
    for applies, name, ours, reason in rows:
        if applies and name not in given and ours != theirs[name]:
            different.append(Difference(name=name, trl=theirs[name], ours=ours, reason=reason))
    return tuple(different)


_OF_ADAPTERS = (
    *("init_lora_weights", "lora_r", "lora_alpha", "lora_dropout", "lora_target_modules", "lora_target_parameters"),
    *("lora_modules_to_save", "lora_task_type", "use_rslora", "use_dora"),
)


def _faults_of_mixture(parts: Sequence[Any]) -> Iterator[str]:
    """Values of a mixture's parts that TRL does not check; a bare path is one of its objects already."""
    for number, part in enumerate(parts, start=1):
        values = part if isinstance(part, Mapping) else {"path": getattr(part, "path", None)}
        share: Any = values.get("fraction")
        wrong = share is not None and not (type(share) in (int, float) and 0 < share < math.inf)
        if wrong or not isinstance(values.get("path"), str):
            yield f"--datasets, part {number}: expected a path, and a fraction above 0 if any, got {part}"


def _check(given: Mapping[str, Any], *, accelerator: bool) -> None:
    faults = [*out_of_range(given), *missing(given)]
    if given.get("load_in_4bit") and given.get("load_in_8bit"):
        faults.append("--load_in_4bit and --load_in_8bit exclude each other; keep one")
    own = ", ".join(f"--{name}" for name in _OF_ADAPTERS if given.get(name) is not None)
    if own and given.get("adapter_name_or_path") is not None:
        faults.append(f"--adapter_name_or_path has its own {own}: drop them")
    if given.get("early_stopping_patience") is not None and given.get("eval_strategy", "no") == "no":
        faults.append("--early_stopping_patience needs evaluations; add --eval_strategy steps (or epoch)")
    if (given.get("sample_every") is None) != (given.get("sample_prompts") is None):
        faults.append("--sample_every and --sample_prompts belong together: give both, or neither")
    prompts = given.get("sample_prompts") or ()
    images = given.get("sample_images")
    if images is not None and len(images) not in (1, len(prompts)):
        faults.append(
            f"--sample_images: {count_of(len(images), 'picture')} for {count_of(len(prompts), 'prompt')}: give one "
            "for each of --sample_prompts, or one for all"
        )
    if given.get("fp16") and not accelerator:
        faults.append("--fp16 needs a GPU, and this job runs on the CPU: drop it")
    parts = [f"--{name}" for name in ("train_vision_tower", "train_projector") if given.get(name) is not None]
    if parts and (given.get("use_peft") is False or given.get("adapter_name_or_path") is not None):
        faults.append(f"{' and '.join(parts)} belong to a new adapter: drop them, or train one")
    faults += _faults_of_mixture(given.get("datasets") or ())
    for name, value in given.items():
        if name.endswith("_kwargs") and isinstance(value, str) and not value.lstrip().startswith("{"):
            faults.append(f"--{name} must be a mapping of names to values, got {value}")
    if faults:
        raise UsageError("; ".join(faults))
