"""The command line before torch and TRL are imported, which takes ten seconds: names of flags, ``--help``, recipes.

Names of flags are read from the sources of the classes from which the parser in ``arguments`` is built. That parser
refuses everything that is refused here, and nothing is refused here if a source cannot be read.
"""

from __future__ import annotations

import difflib
import functools
import importlib.util
import math
import os
import re
import sys
from collections.abc import Callable, Iterable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from hf_rocm_tune.configs import RECIPES, start_of
from hf_rocm_tune.data.formats import Method
from hf_rocm_tune.data.sources import refuse_missing
from hf_rocm_tune.errors import UsageError
from hf_rocm_tune.foreign import parse_yaml, read_text
from hf_rocm_tune.machine import gpus, process, variables
from hf_rocm_tune.machine.caches import unwritable
from hf_rocm_tune.paths import HUB_FIX, answers, is_local_model, require_model
from hf_rocm_tune.redaction import print_line, remember

CONFIG = "--config"
CONFIG_FLAG = "--accelerate_config"
HELP_ALL = "--help_all"
#: Names of both the launcher and ``trl sft``; they belong to the job, as in ``trl``.
SHARED_WITH_THE_JOB = frozenset({"debug", "gradient_accumulation_steps"})
_NOT_FOR_USERS = frozenset({"help", "module", "no_python", "training_script", "training_script_args"})
#: Other names of flags, on the command line and in recipes: short ones, and those of `plan` and of newer transformers.
ALIASES = {
    "model": "model_name_or_path",
    "dataset": "dataset_name",
    "lr": "learning_rate",
    "epochs": "num_train_epochs",
    "batch_size": "per_device_train_batch_size",
    "micro_batch": "per_device_train_batch_size",
    "max_seq_length": "max_length",
    "seq": "max_length",
    "lora_rank": "lora_r",
    "checkpointing": "gradient_checkpointing",
}
#: TRL's flag, which also takes ``auto`` here; `job.rows` decides it by the rows.
ANSWERS_ONLY = "assistant_only_loss"
LORA_FACTOR = 10  # an adapter's learning rate over that of full training, in TRL's examples


@dataclass(frozen=True, kw_only=True)
class Verb:
    """A training verb: its help, and the classes whose fields are its flags."""

    config: str  # TRL's class of training settings
    what: str  # one sentence
    rate: float  # TRL's learning rate
    script: tuple[str, str] = ("trl.scripts.utils", "ScriptArguments")  # TRL's class of the other settings
    library: str = ""  # module of config and trainer, if not ``trl``
    makes_rows: bool = False  # while it trains, so that they cannot be shown before
    keeps_columns: bool = False  # its collator reads columns that the model does not

    @property
    def owners(self) -> tuple[tuple[str, str], ...]:
        """Module and name of the classes that the parser is built from, in its order."""
        config = f"{self.library or 'trl.trainer'}.{self.config.removesuffix('Config').lower()}_config"
        ours = tuple(("hf_rocm_tune.settings.arguments", name) for name in ("TuneArguments", "RanksArguments"))
        common = (("trl.trainer.model_config", "ModelConfig"), ("trl.scripts.utils", "DatasetMixtureConfig"))
        return (*ours, self.script, (config, self.config), *common)

    @property
    def trainer(self) -> str:
        return self.config.replace("Config", "Trainer")


_SFT = "Fine-tune a language model; every byte sent to the device is verified."
_REWARD = "Train a reward model on chosen and rejected answers, verified."
_ORPO = "Train on pairs without a reference model (experimental in TRL), verified."
_GRPO = "Train on rewards for the model's own answers, verified."
_GRPO_SCRIPT = ("trl.scripts.grpo", "GRPOScriptArguments")
_ORPO_LIBRARY = "trl.experimental.orpo"
VERBS: dict[Method, Verb] = {
    "sft": Verb(config="SFTConfig", rate=2e-5, what=_SFT),
    "dpo": Verb(config="DPOConfig", rate=1e-6, what="Train on pairs of a chosen and a rejected answer, verified."),
    "kto": Verb(config="KTOConfig", rate=1e-6, what="Train on answers labelled good or bad, verified."),
    "reward": Verb(config="RewardConfig", rate=1e-4, what=_REWARD),
    "grpo": Verb(config="GRPOConfig", rate=1e-6, what=_GRPO, script=_GRPO_SCRIPT, makes_rows=True),
    "orpo": Verb(
        config="ORPOConfig", rate=1e-6, what=_ORPO, library=_ORPO_LIBRARY, makes_rows=True, keeps_columns=True
    ),
}


def answered(verb: Method, argv: Sequence[str]) -> bool:
    """Print the help if asked for, and return whether it was; else check the flags. Called before torch is imported."""
    if HELP_ALL in argv:
        from hf_rocm_tune.settings.arguments import help_all

        process.prepare_process(os.environ)
        print(help_all(verb))
    elif {"-h", "--help"} & set(argv):
        print(screen(verb))
    else:
        check(verb, argv)
        return False
    return True


def check(verb: Method, argv: Sequence[str]) -> None:
    """Refuse flags and keys of the recipe that the verb does not have, and values that no run can use."""
    if not (known := flags(verb)):
        return
    recipe, typed = _typed(argv)
    on = {f"no_{name}" for name in known}  # `--no_NAME` is argparse's for flags that are on, and left to it
    if wrong := [flag for flag in typed if bare(flag) not in known | on]:
        raise UsageError("; ".join(unknown(flag, known, dashes="--") for flag in wrong))
    values = {bare(flag): value for flag, value in typed.items()}
    if recipe is not None:
        if wrong := [name for name in recipe.values if name not in known]:
            raise UsageError(f"recipe {recipe.path}: {'; '.join(unknown(name, known, dashes='') for name in wrong)}")
        values = {**recipe.values, **values}
    _check_values(values)


# ---- values that are refused before torch is imported; one that cannot be read here is left to the parser ------------

_RANGES: tuple[tuple[str, Callable[[Any], bool], str], ...] = (
    (
        "1 or more",
        lambda value: value >= 1,
        "sample_every effective_batch early_stopping_patience per_device_train_batch_size per_device_eval_batch_size "
        "gradient_accumulation_steps max_length lora_r lora_alpha eval_accumulation_steps max_pixels",
    ),
    (
        "0 or more, and finite",
        lambda value: 0 <= value < math.inf,
        "telemetry_every embedding_learning_rate max_skipped_steps early_stopping_threshold learning_rate weight_decay "
        "warmup_steps logging_steps eval_steps save_steps save_total_limit dataloader_num_workers adam_epsilon "
        "neftune_noise_alpha dataset_num_proc",
    ),
    ("0 (off) or more", lambda value: value >= 0, "sentinel_every prefetch_batches"),
    ("0 or more", lambda value: value >= 0, "max_grad_norm"),  # inf: no clipping
    ("more than 0, and finite", lambda value: 0 < value < math.inf, "loraplus_lr_ratio auto_fit_gib num_train_epochs"),
    ("0 or more and below 2**32", lambda value: 0 <= value < 2**32, "seed data_seed"),
    ("0 or more and below 1", lambda value: 0 <= value < 1, "adam_beta1 adam_beta2 lora_dropout"),
    # transformers treats 0 like -1
    ("1 or more, or -1 for no limit", lambda value: value == -1 or value >= 1, "max_steps"),
    (
        "a share between 0 and 1 or a number of rows",
        lambda size: 0 < size < 1 or (1 <= size < math.inf and size == int(size)),
        "eval_split_size",
    ),
    ("1 or more, or auto", lambda value: value >= 1, "pad_to_multiple_of"),
)


def out_of_range(given: Mapping[str, Any]) -> list[str]:
    """What is wrong with these values, which may still be text."""
    numbers = {name: _number(value) for name, value in given.items()}
    return [
        f"--{name} must be {expected}, got {given[name]}"
        for expected, holds, names in _RANGES
        for name in names.split()
        if numbers.get(name) is not None and not holds(numbers[name])
    ]


def _number(value: Any) -> Any:
    """The number that a text stands for; None for words that a flag may have instead, nan for others."""
    if not isinstance(value, str):
        return value
    try:
        return float(value)
    except ValueError:
        return None if value.lower() in ("none", "null", "auto") else math.nan


def _check_values(given: Mapping[str, Any]) -> None:
    """Refuses what is wrong in any case; ``given``: flags as typed, or a recipe's values, by name."""
    if faults := out_of_range(given):
        raise UsageError("; ".join(faults))
    model, data = given.get("model_name_or_path"), given.get("dataset_name")
    if isinstance(model, str):
        require_model(model)
    if isinstance(data, str):
        refuse_missing(data)
    # A recipe is written without the model, and without a network.
    if isinstance(model, str) and not is_local_model(model) and "print_config" not in given:
        _require_on_hub(model, given.get("model_revision"))


def _require_on_hub(model: str, revision: str | None) -> None:
    """Refuses a model of which not even the configuration can be had. Other answers of the Hub are for the loader."""
    from huggingface_hub import constants, hf_hub_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError, RepositoryNotFoundError
    from huggingface_hub.utils import logging

    said = {  # by type: a gated model is one of the first as well
        RepositoryNotFoundError: "the Hub has no model of this name, or none that your token may read",
        LocalEntryNotFoundError: "the Hub cannot be reached, and the model is not in its cache",
    }
    verbosity = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        offline = constants.HF_HUB_OFFLINE or not answers(constants.ENDPOINT)
        hf_hub_download(model, "config.json", revision=revision, local_files_only=offline)
    except (HfHubHTTPError, OSError, ValueError) as error:
        if isinstance(error, OSError) and (why := unwritable("hub")):
            raise UsageError(f"model {model}: it cannot be fetched, for the cache {why}") from error
        if what := said.get(type(error)):
            raise UsageError(f"model {model}: {what}; {HUB_FIX}") from error
    finally:
        logging.set_verbosity(verbosity)


# ---- the words of a command line ----------------------------------------------------------------------------------


def recipe_of(argv: Sequence[str]) -> tuple[RecipeFile | None, list[str]]:
    """The recipe of a command line, and the rest of it, without aliases."""
    path, rest = take_flag(canonical(argv), CONFIG)
    return None if path is None else read_recipe(path), rest


def _typed(argv: Sequence[str]) -> tuple[RecipeFile | None, dict[str, Any]]:
    recipe, rest = recipe_of(argv)
    given: dict[str, Any] = {}
    last = ""
    for argument in rest[: rest.index("--")] if "--" in rest else rest:
        if argument.startswith("--") and " " not in argument:  # as in argparse: one with a space is a value
            last, equals, value = argument.partition("=")
            given[last] = value if equals else None
        elif last and given[last] is None:
            given[last] = argument
    return recipe, given


def bare(argument: str) -> str:
    """The name of a flag, without dashes and value."""
    return argument.partition("=")[0].lstrip("-").replace("-", "_")


def full_name(name: str) -> str:
    """The flag that a name stands for, which may be the name itself."""
    newer = "activation_checkpointing"  # of transformers from 5.23 on; older ones know the other name only
    if name.startswith(newer) and newer not in flags("sft"):
        return name.replace("activation", "gradient", 1)
    return ALIASES.get(name, name)


def canonical(argv: Sequence[str]) -> list[str]:
    def renamed(argument: str) -> str:
        full = full_name(bare(argument)) if argument.startswith("--") else bare(argument)
        return argument if full == bare(argument) else "--" + full + "".join(argument.partition("=")[1:])

    return [renamed(argument) for argument in argv]


def unknown(name: str, names: Iterable[str], *, dashes: str) -> str:
    what = "flag" if dashes else "key"
    if bare(name) in launcher_flags() or bare(name) == bare(CONFIG_FLAG):
        return f"{what} {name} belongs to the launcher; give it on the command line of `hf-rocm-tune sft`"
    nearest = difflib.get_close_matches(bare(name), [*names, *ALIASES], n=1, cutoff=0.5)
    hint = f"; did you mean {dashes}{nearest[0]}?" if nearest else f"; {HELP_ALL} lists all"
    return f"unknown {what} {name}{hint}"


# ---- the help: one screen -----------------------------------------------------------------------------------------

_SCREEN = """\
model and data:
  --model NAME                    Hub id or directory
  --dataset NAME                  Hub id, directory or file
  --config RECIPE                 a YAML file, or the name of a built-in recipe
  --output_dir DIR                result and report
  --max_seq_length N              tokens per row; longer rows are cut [1024]
  --packing                       pack several short examples into one sequence
  --assistant_only_loss BOOL|auto train on the assistant's answers only
  --mask_thinking                 leave <think> ... </think> out of the loss
  --eval_split_size X|auto        rows split off from the data to evaluate

method:
  --use_peft BOOL                 LoRA; false trains all weights [true]
  --load_in_4bit                  QLoRA: LoRA on a base in 4 bits
  --lora_r N                      rank of the adapters [16]
  --lora_alpha N                  adapter scale is alpha over rank [32]
  --lora_dropout X                dropout before the adapters [0]
  --lora_target_modules NAME ...  layers with adapters [all-linear]
  --adapter_name_or_path DIR|ID   continue training an adapter
OWN
steps:
  --epochs X                      passes over the data [3]
  --max_steps N                   stop after N steps; -1: no limit [-1]
  --lr X                          learning rate [RATE]
  --batch_size N                  rows in one pass on a card [8]
  --gradient_accumulation_steps N passes per step [1]
  --warmup_steps N                steps to reach the full rate
  --eval_strategy no|steps|epoch  when to evaluate [no]
  --early_stopping_patience N     stop after N evaluations without improvement
  --save_steps N                  steps between two checkpoints [500]
  --logging_steps N               steps between two log rows [10]
  --seed N                        seed of all random numbers [42]

memory:
  --auto_fit off|plan             choose batch and checkpointing [off]
  --gradient_checkpointing BOOL   recompute activations [true]
  --stream_weights auto|off|N     layers in host memory, fetched in use [off]
  --split_layers auto|N,N         put one model on several cards
  --tensor_parallel               compute each layer on two cards
  --on_oom step_down|stop         smaller passes, or exit code 5 [step_down]

verification and result:
  --verify full|sample|off        which transfers are verified [full]
  --on_corruption recover|stop    send again, or exit code 3 [recover]
  --overwrite_output_dir          replace another run in --output_dir
  --push_to_hub                   upload the result and verify it
  --report_to NAME                tensorboard, trackio, wandb ... [none]

more:
  --accelerate_config NAME        name or path of an Accelerate config
  --dry_run                       show the rows and what counts, and exit
  --print_config                  print all settings as a recipe and exit
  -v, --quiet                     print more at the start, or warnings only
  --help_all                      every flag: ours, TRL's and the launcher's"""
_BETA = "  --beta X                        weight of the distance to the reference [{}]\n"
_ANSWER = "  --max_completion_length N       tokens per answer; longer ones are cut"
_OF_METHOD: dict[Method, str] = {
    "dpo": f"{_BETA.format(0.1)}  --loss_type NAME                sigmoid, ipo, hinge, apo_zero ...\n",
    "kto": f"""{_BETA.format(0.1)}\
  --desirable_weight X            weight of the good answers [1]
  --undesirable_weight X          weight of the bad answers [1]
""",
    "orpo": f"  --beta X                        weight of the odds ratio [0.1]\n{_ANSWER}\n",
    "reward": "  --center_rewards_coefficient X  keeps the rewards around zero\n",
    "grpo": f"""\
  --reward_funcs NAME ...         of TRL, or module.function
  --reward_model_name_or_path ID  a reward model, verified too
  --num_generations N             answers for each prompt [8]
  --steps_per_generation N        micro-batches from one generation
{_ANSWER} [512]
{_BETA.format(0)}""",
}
#: Flags of the screen that the other methods refuse, and those whose default GRPO computes.
_SFT_ONLY = frozenset({"auto_fit", "split_layers"})
_COMPUTED = frozenset({"per_device_train_batch_size", "gradient_accumulation_steps"})
_NO_FIELDS = frozenset({bare(CONFIG_FLAG), bare(HELP_ALL), ""})


def screen(verb: Method) -> str:
    """The common flags of a verb with their defaults, on one screen."""
    known, row = flags(verb), VERBS[verb]
    hidden = frozenset[str]() if verb == "sft" else _SFT_ONLY | (_COMPUTED if verb == "grpo" else set())
    hidden |= {"dry_run"} if row.makes_rows else set()
    own = f"\n{verb}:\n{_OF_METHOD[verb]}" if verb in _OF_METHOD else ""
    text = _SCREEN.replace("OWN\n", f"{own}\n").replace(
        "[RATE]", f"[{LORA_FACTOR * row.rate:g}; {row.rate:g} without LoRA]"
    )
    lines = [f"usage: hf-rocm-tune {verb} --model NAME --dataset NAME [flags]", "", row.what, ""]
    for line in text.splitlines():
        typed = bare(line.split()[0]) if line.startswith("  --") else ""
        name = ALIASES.get(typed, typed)
        if name not in hidden and (not known or name in known | _NO_FIELDS):
            lines.append(line)
    return "\n".join(lines)


# ---- names of flags from sources ----------------------------------------------------------------------------------


@functools.cache
def flags(verb: Method) -> frozenset[str]:
    """The flags of a verb; none if one of its classes is not found."""
    fields = [_fields(*owner) for owner in VERBS[verb].owners]
    return frozenset({"config"}.union(*fields)) if all(fields) else frozenset()


@functools.cache
def launcher_flags() -> dict[str, bool]:
    """The flags that only the launcher reads: name without dashes, and whether a value follows."""
    found: dict[str, bool] = {}
    for call in _source("accelerate.commands.launch").partition("    return parser")[0].split("add_argument(")[1:]:
        valued = re.search(r'action="(store_|help)', call) is None
        found |= dict.fromkeys(map(bare, re.findall(r'^\s*"(--\S+)"', call, re.MULTILINE)), valued)
    return {name: valued for name, valued in found.items() if name not in SHARED_WITH_THE_JOB | _NOT_FOR_USERS}


_BASES = {"_BaseConfig": "trl.trainer.base_config", "TrainingArguments": "transformers.training_args"}


def _fields(module: str, name: str) -> set[str]:
    """The fields of a dataclass and of its bases."""
    found = re.search(rf"^class {name}(?:\((\w+)\))?:\n((?:    .*\n|\n)*)", _source(module), re.MULTILINE)
    if found is None:
        return set()
    own = set(re.findall(r"^    ([a-z]\w*): (?!ClassVar)", found[2], re.MULTILINE))
    return own | _fields(_BASES.get(found[1], "trl.scripts.utils"), found[1]) if found[1] else own


@functools.cache
def _source(module: str) -> str:
    """The source of a module, found without importing its package; empty where it cannot be read."""
    top, *rest = module.split(".")
    spec = importlib.util.find_spec(top)
    if spec is None or not spec.submodule_search_locations:
        return ""
    file = Path(spec.submodule_search_locations[0], *rest).with_suffix(".py")
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        return ""


# ---- recipes ---------------------------------------------------------------------------------------------------------


class RecipeFile(NamedTuple):
    path: Path
    values: Mapping[str, Any]  # YAML values by flag, not yet checked
    env: Mapping[str, str]  # environment variables that `variables` knows


def take_flag(argv: Sequence[str], flag: str) -> tuple[str | None, list[str]]:
    """Remove ``FLAG VALUE`` or ``FLAG=VALUE`` from a command line."""
    value, rest, arguments = None, [], iter(argv)
    for argument in arguments:
        if argument == flag:
            value = next(arguments, "")
            if not value or value.startswith("--"):
                raise UsageError(f"{flag} needs a value after it")
        elif argument.startswith(f"{flag}="):
            value = argument.partition("=")[2]
        else:
            rest.append(argument)
    return value, rest


def method_of(recipe: RecipeFile) -> Method:
    """The verb that a recipe is for: the one of the command in its opening comment, else the first that has its keys.

    Where no verb has all keys, the one that has most of them: its message names the others.
    """
    stated = start_of(recipe.path.read_text(encoding="utf-8")).split()[1:2]
    if stated and stated[0] in VERBS:
        return next(verb for verb in VERBS if verb == stated[0])
    return min(VERBS, key=lambda verb: len(recipe.values.keys() - flags(verb)))


def read_recipe(given: str | Path) -> RecipeFile:
    """Read a recipe: a file at that path, which wins over a recipe of that name."""
    path, known = Path(given), RECIPES.names()
    if str(given) in known and not os.path.isfile(path):
        path = RECIPES.path(str(given))
    elif not os.path.exists(path):
        nearest = difflib.get_close_matches(path.stem, known, n=1, cutoff=0.5) if path.name == str(given) else []
        hint = f"did you mean {nearest[0]}? " if nearest else ""
        raise UsageError(
            f"recipe {given} does not exist: {hint}give {CONFIG} the path of a YAML file, or a name that "
            "`hf-rocm-tune recipes ls` lists"
        )
    try:
        content = parse_yaml(read_text(path), _NoDuplicates)
    except (OSError, ValueError) as error:
        raise UsageError(f"recipe {path} cannot be read: {error}") from error
    except yaml.YAMLError as error:
        mark, problem = getattr(error, "problem_mark", None), getattr(error, "problem", None) or error
        where = f" line {mark.line + 1}, column {mark.column + 1}" if mark else ""
        raise UsageError(f"recipe {path}{where} is not valid YAML: {problem}") from error
    if not isinstance(content, dict):
        found = "an empty file" if content is None else f"a {type(content).__name__}"
        raise UsageError(f"recipe {path} must be a mapping of flag names to values, got {found}")
    env = content.pop("env", None) or {}
    if not isinstance(env, dict) or any(isinstance(v, dict | list) or v is None for v in env.values()):
        raise UsageError(f"recipe {path}: `env` must map variable names to plain values, got {env!r}")
    if foreign := [str(name) for name in env if not variables.covers(str(name))]:
        raise UsageError(
            f"recipe {path}: `env` may set variables of ROCm, RCCL and torch that hf-rocm-tune knows, "
            f"not {', '.join(foreign)}: remove them, or set them in your shell"
        )
    remember(content)
    values: dict[str, Any] = {}
    for key, value in content.items():  # which may have dashes or be aliases
        name = full_name(bare(str(key)))
        if name in values:
            raise UsageError(f"recipe {path}: {key} and another key are the same flag, --{name}; keep one")
        values[name] = value
    return RecipeFile(path=path, values=values, env={str(key): str(value) for key, value in env.items()})


def apply_environment(argv: Sequence[str], environ: MutableMapping[str, str]) -> None:
    """Set the ``env`` of the recipe on this command line, and print it, before torch is imported; what is set stays."""
    recipe, _ = recipe_of(argv)
    if recipe is None:
        return
    for name, value in recipe.env.items():
        if name not in environ:
            environ[name] = value
            if environ.get("RANK", "0") == "0":
                # As a YAML comment, so that `--print_config > recipe.yaml` stays a recipe.
                print_line(f"# hf-rocm-tune: recipe {recipe.path} sets {name}={value}")


class _NoDuplicates(yaml.SafeLoader):
    """A YAML loader that refuses a key that is given twice; PyYAML's own silently keeps the last."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys = [key for key, _ in node.value if isinstance(key, yaml.ScalarNode) and not key.tag.endswith(":merge")]
        for number, key in enumerate(keys):
            if key.value in [earlier.value for earlier in keys[:number]]:
                problem = f"the key {key.value!r} is given twice"
                raise yaml.constructor.ConstructorError(problem=problem, problem_mark=key.start_mark)
        return super().construct_mapping(node, deep=deep)


def given_value(argv: Sequence[str], name: str) -> Any:
    """The value of a flag as typed, or else as in the recipe; None where neither has it."""
    recipe, typed = _typed(argv)
    values = {bare(flag): value for flag, value in typed.items()}
    return values.get(name, recipe.values.get(name) if recipe else None)


def asks_for_split(argv: Sequence[str]) -> bool:
    recipe, typed = _typed(argv)
    return any(bare(name) == "split_layers" for name in [*typed, *(recipe.values if recipe else ())])


def show_all_cards(argv: Sequence[str], environ: MutableMapping[str, str]) -> None:
    """Make several cards visible if the job splits a model, and print it; does nothing once torch is imported."""
    if not asks_for_split(argv) or "torch" in sys.modules:
        return
    environ["HF_ROCM_TUNE_SPLIT"] = "1"  # for processes that this one starts
    found = gpus.read_topology()
    nodes = () if variables.read_facts(()).is_rocm is False else found.nodes
    count = process.local_processes(environ)
    choice = process.choose(nodes, environ, complete=found.complete, processes=count, split=True)
    process.enact(choice, environ)
    common: Any = {"action": "set", "reason": choice.reason, "source": "--split_layers"}
    made = [variables.Decision(variable=name, value=value, **common) for name, value in choice.variables.items()]
    variables.remember(made)
    variables.announce(made)
