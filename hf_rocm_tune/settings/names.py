"""The flags of a training verb before torch, transformers and TRL are imported: aliases, a check of names, ``--help``.

Importing those takes ten seconds, and a mistyped flag or a look at the help needs none of them. So the names, defaults
and spellings of flags are read from the sources of the very classes that the parser in ``arguments`` is built from,
upstream's as they are installed and ours. That parser still decides: what is refused here it would refuse as well, and
where a source cannot be read nothing is refused here. Values are not looked at.
"""

from __future__ import annotations

import ast
import difflib
import functools
import importlib.util
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hf_rocm_tune.data.formats import Method
from hf_rocm_tune.errors import UsageError
from hf_rocm_tune.settings import recipe as recipe_file

#: Names that people type, and the flags that they stand for; in recipes too.
ALIASES = {
    "model": "model_name_or_path",
    "dataset": "dataset_name",
    "lr": "learning_rate",
    "epochs": "num_train_epochs",
    "batch_size": "per_device_train_batch_size",
    "max_seq_length": "max_length",
}
HELP_ALL = "--help_all"
_HELP = frozenset({"-h", "--help"})


@dataclass(frozen=True, kw_only=True)
class Verb:
    """A training verb: what its help says, and whose fields its flags are beside those that all verbs have."""

    config: str  # TRL's class of training settings
    what: str  # one sentence
    script: tuple[str, str] = ("trl", "ScriptArguments")  # module and name of TRL's class of the other settings
    # defaults that the sources of TRL do not tell, by flag: ours that differ, and what one flag takes from another
    ours: Mapping[str, str] = field(default_factory=dict)

    @property
    def owners(self) -> tuple[tuple[str, str], ...]:
        """Module and name of the classes that the parser is built from, in its order."""
        ours = tuple(("hf_rocm_tune.settings.flags", name) for name in ("TuneArguments", "RanksArguments"))
        return (*ours, self.script, *(("trl", name) for name in (self.config, "ModelConfig", _MIXTURE)))

    @property
    def trainer(self) -> str:
        """TRL's class of trainer."""
        return self.config.replace("Config", "Trainer")


_MIXTURE = "DatasetMixtureConfig"
_EVERY = {
    "use_peft": "true",
    "lora_dropout": "0",
    "lora_target_modules": "all-linear",
    "activation_checkpointing": "true",
}
_RATE = {**_EVERY, "learning_rate": "1e-05; 1e-06 without LoRA"}
VERBS: dict[Method, Verb] = {
    "sft": Verb(
        config="SFTConfig",
        what="Fine-tune a language model; every byte that goes to the device is verified.",
        ours={**_EVERY, "learning_rate": "0.0002; 2e-05 without LoRA"},
    ),
    "dpo": Verb(config="DPOConfig", what="Train on pairs of a chosen and a rejected answer, verified.", ours=_RATE),
    "kto": Verb(config="KTOConfig", what="Train on answers that are wanted or not, verified.", ours=_RATE),
    "reward": Verb(
        config="RewardConfig",
        what="Train a reward model on chosen and rejected answers, verified.",
        ours={**_EVERY, "learning_rate": "0.001; 0.0001 without LoRA"},
    ),
    "grpo": Verb(
        config="GRPOConfig",
        what="Train on rewards of the model's own answers, verified.",
        script=("trl.scripts.grpo", "GRPOScriptArguments"),
        ours=_RATE,
    ),
}


def answered(verb: Method, argv: Sequence[str]) -> bool:
    """Print the help where a command line asks for it, and say whether it did; else check the names of its flags.

    Call it before torch is imported.

    Raises:
        UsageError: as `check`.
    """
    if HELP_ALL in argv:
        from hf_rocm_tune.machine.process import prepare_process
        from hf_rocm_tune.settings.arguments import help_all

        prepare_process(os.environ)
        print(help_all(verb))
    elif _HELP & set(argv):
        print(screen(verb))
    else:
        check(verb, argv)
        return False
    return True


def check(verb: Method, argv: Sequence[str]) -> None:
    """Refuse flags, and keys of the recipe on the command line, that no class of the verb has.

    Raises:
        UsageError: one line with all of them and the nearest names; or the recipe cannot be read.
    """
    try:
        known = {option for flag in flags(verb).values() for option in flag.options}
    except _Unreadable:
        return
    path, rest = recipe_file.take_flag(canonical(argv), recipe_file.FLAG)
    given = []
    for argument in rest:
        if argument == "--":
            break
        # as argparse has it: what has a space in it is a value
        if argument.startswith("--") and " " not in argument:
            given.append(argument.partition("=")[0])
    names = list(flags(verb))
    if faults := [unknown(name, names, dashes="--") for name in given if name not in known]:
        raise UsageError("; ".join(faults))
    if path is not None:
        recipe = recipe_file.read_recipe(path)
        keys = canonical_keys(recipe)
        if faults := [unknown(key, names, dashes="") for key, name in keys.items() if name not in names]:
            raise UsageError(f"recipe {recipe.path}: {'; '.join(faults)}")


def canonical(argv: Sequence[str]) -> list[str]:
    """A command line with the flags that its aliases stand for."""

    def renamed(argument: str) -> str:
        name, equals, value = argument.partition("=")
        full = ALIASES.get(name.removeprefix("--").replace("-", "_")) if name.startswith("--") else None
        return argument if full is None else f"--{full}{equals}{value}"

    return [renamed(argument) for argument in argv]


def canonical_keys(recipe: recipe_file.Recipe) -> dict[str, str]:
    """The keys of a recipe and the flags that they stand for: with dashes, with leading ones, or by an alias.

    Raises:
        UsageError: two keys stand for one flag.
    """
    found: dict[str, str] = {}
    for key in recipe.values:
        plain = key.removeprefix("--").replace("-", "_")
        name = ALIASES.get(plain, plain)
        if twin := next((other for other, same in found.items() if same == name), None):
            raise UsageError(f"recipe {recipe.path}: {twin} and {key} are the same flag, --{name}; keep one")
        found[key] = name
    return found


def unknown(name: str, names: Sequence[str], *, dashes: str) -> str:
    """The message for a name that nobody knows: the nearest that exists, or whose it is.

    Args:
        name: as it was written.
        names: of all flags of the verb, without dashes.
        dashes: ``--`` for a flag, nothing for a key of a recipe.
    """
    from hf_rocm_tune.launch import is_launcher_flag

    plain = name.removeprefix("--").replace("-", "_")
    what = "flag" if dashes else "key"
    if is_launcher_flag(plain):
        return f"{what} {name} belongs to the launcher; give it on the command line of `hf-rocm-tune sft`"
    nearest = difflib.get_close_matches(plain, [*names, *ALIASES], n=1, cutoff=0.5)
    hint = f"; did you mean {dashes}{nearest[0]}?" if nearest else f"; see {HELP_ALL} for those that exist"
    return f"unknown {what} {name}{hint}"


# ---- the help: one screen -----------------------------------------------------------------------------------------

_SECTIONS: tuple[tuple[str, tuple[tuple[str, str, str], ...]], ...] = (
    (
        "model and data",
        (
            ("model_name_or_path", "NAME", "Hub id or directory"),
            ("dataset_name", "NAME", "Hub id, directory or file"),
            ("config", "RECIPE", "flags from a YAML file, or of `recipes ls`"),
            ("output_dir", "DIR", "what is trained, with its report"),
            ("max_length", "N", "tokens of a row; longer ones are cut"),
            ("packing", "", "several short examples to a row"),
            ("assistant_only_loss", "", "learn the assistant's turns only"),
        ),
    ),
    (
        "method",
        (
            ("use_peft", "BOOL", "LoRA; false trains all weights"),
            ("load_in_4bit", "", "QLoRA: LoRA on a base in 4 bits"),
            ("lora_r", "N", "rank of the adapters"),
            ("lora_alpha", "N", "their scale, divided by the rank"),
            ("lora_dropout", "X", "share of their inputs left out"),
            ("lora_target_modules", "NAME ...", "layers that get one"),
        ),
    ),
    (
        "steps",
        (
            ("num_train_epochs", "X", "times through the data"),
            ("max_steps", "N", "end after so many; -1: no limit"),
            ("learning_rate", "X", "learning rate"),
            ("per_device_train_batch_size", "N", "rows to one pass on a card"),
            ("gradient_accumulation_steps", "N", "passes to one step"),
            ("warmup_steps", "N", "steps until the full rate"),
            ("eval_strategy", "no|steps|epoch", "when to evaluate"),
            ("save_steps", "N", "steps between two checkpoints"),
            ("logging_steps", "N", "steps between two rows of the log"),
            ("seed", "N", "of everything random"),
        ),
    ),
    (
        "memory",
        (
            ("auto_fit", "off|plan|probe", "choose batch and checkpointing"),
            ("activation_checkpointing", "BOOL", "recompute instead of keep"),
            ("split_layers", "auto|N,N", "one model over several cards"),
            ("on_oom", "step_down|stop", "smaller passes, or exit code 5"),
        ),
    ),
    (
        "verification and result",
        (
            ("verify", "full|sample|off", "which transfers are verified"),
            ("on_corruption", "recover|stop", "send again, or exit code 3"),
            ("overwrite_output_dir", "", "replace another run that is there"),
            ("push_to_hub", "", "upload the result, and verify it there"),
            ("report_to", "NAME", "tensorboard, trackio, wandb ..."),
        ),
    ),
)


def screen(verb: Method) -> str:
    """The usual flags of a verb with the defaults that a run of ours has, on one screen."""
    about, known = VERBS[verb], _flags_or_none(verb)
    typed = {full: alias for alias, full in ALIASES.items()}
    lines = [f"usage: hf-rocm-tune {verb} --model NAME --dataset NAME [flags]", "", about.what]
    for title, rows in _SECTIONS:
        lines += ["", f"{title}:"]
        for name, metavar, text in rows:
            if known is not None and name not in known:
                continue
            default = about.ours.get(name) or (_shown(known[name].default) if known else "")
            told = f"{text} [{default}]" if default else text
            lines.append(f"  {f'--{typed.get(name, name)} {metavar}':<32}{told}".rstrip())
    return "\n".join(
        [
            *lines,
            "",
            "more:",
            "  --accelerate_config NAME        how it is launched: of `configs ls`, or a file",
            "  --print_config                  print all settings as a recipe, and end",
            "  -v                              say more at the start",
            f"  {HELP_ALL}                      every flag: ours, TRL's and the launcher's",
        ]
    )


def _flags_or_none(verb: Method) -> dict[str, Flag] | None:
    try:
        return flags(verb)
    except _Unreadable:
        return None


def _shown(default: object) -> str:
    """A default as a user would type it; nothing where there is none to tell."""
    if default is None or default is False or default is _NO_LITERAL:
        return ""
    return "true" if default is True else f"{default:g}" if isinstance(default, float) else str(default)


# ---- flags from sources -------------------------------------------------------------------------------------------

_NO_LITERAL = object()


@dataclass(frozen=True, kw_only=True)
class Flag:
    """A field of a class of settings, as its source has it."""

    default: Any  # `_NO_LITERAL` where it is computed
    options: tuple[str, ...]  # the spellings that the parser accepts


class _Unreadable(Exception):
    """A class was not found in the sources."""


@functools.cache
def flags(verb: Method) -> dict[str, Flag]:
    """All flags of a verb by name.

    Raises:
        _Unreadable: a class was not found.
    """
    found = {recipe_file.FLAG.removeprefix("--"): Flag(default=None, options=(recipe_file.FLAG,))}
    for module, name in VERBS[verb].owners:
        found |= _fields(module, name)
    return found


def launcher_flags(module: str, function: str) -> dict[str, bool]:
    """The flags of an argparse parser that a function builds: name without dashes, and whether a value follows.

    Empty where the source cannot be read.
    """
    tree = _tree(module)
    built = (node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == function) if tree else ()
    found: dict[str, bool] = {}
    for call in (node for each in built for node in ast.walk(each) if isinstance(node, ast.Call)):
        if getattr(call.func, "attr", "") == "add_argument":
            settings = {each.arg: each.value for each in call.keywords}
            bare = "action" in settings and str(_literal(settings["action"])).startswith(("store_", "help"))
            for option in map(_literal, call.args):
                if isinstance(option, str) and option.startswith("--"):
                    found[option.removeprefix("--").replace("-", "_")] = not bare
    return found


def _fields(module: str, name: str) -> dict[str, Flag]:
    """The fields of a dataclass, those of its bases first."""
    where, node = _find(module, name)
    found: dict[str, Flag] = {}
    for base in reversed(node.bases):
        found |= _fields(where, ast.unparse(base))
    for each in node.body:
        if isinstance(each, ast.AnnAssign) and isinstance(each.target, ast.Name):
            kind = ast.unparse(each.annotation)
            flag = None if kind.startswith("ClassVar") else _flag(each.target.id, kind, each.value)
            if flag is not None:
                found[each.target.id] = flag
    return found


def _flag(name: str, kind: str, value: ast.expr | None) -> Flag | None:
    """One field; None where it is no argument of the constructor."""
    settings: dict[str | None, ast.expr] = {}
    default: Any = _NO_LITERAL if value is None else _literal(value)
    if isinstance(value, ast.Call):
        settings = {each.arg: each.value for each in value.keywords}
        default = _literal(settings["default"]) if "default" in settings else _NO_LITERAL
    if "init" in settings and _literal(settings["init"]) is False:
        return None
    aliases: list[str] = []
    if isinstance(metadata := settings.get("metadata"), ast.Dict):
        for key, each in zip(metadata.keys, metadata.values, strict=True):
            if key is not None and _literal(key) == "aliases":
                told = _literal(each)
                aliases = [told] if isinstance(told, str) else list(told)
    spelled = [name]
    if default is True and kind in ("bool", "bool | None"):
        spelled.append(f"no_{name}")
    options = {f"--{each}" for each in spelled} | {f"--{each.replace('_', '-')}" for each in spelled}
    return Flag(default=default, options=(*sorted(options), *aliases))


def _literal(node: ast.expr) -> Any:
    try:
        return ast.literal_eval(node)
    except ValueError:
        return _NO_LITERAL


def _find(module: str, name: str) -> tuple[str, ast.ClassDef]:
    """A class and the module that defines it: there, or where that imports it from, for type checkers only too."""
    tree = _tree(module)
    for node in _statements(tree.body) if tree is not None else ():
        if isinstance(node, ast.ClassDef) and node.name == name:
            return module, node
        if isinstance(node, ast.ImportFrom):
            for alias in node.names:
                if (alias.asname or alias.name) == name:
                    return _find(_absolute(module, node), alias.name)
    raise _Unreadable(f"{module}.{name}")


def _statements(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """Statements of a module, and those of its conditions."""
    for node in body:
        if isinstance(node, ast.If | ast.Try):
            yield from _statements([*node.body, *node.orelse])
        else:
            yield node


def _absolute(module: str, node: ast.ImportFrom) -> str:
    source = _source(module)
    parts = module.split(".") if source is not None and source.stem == "__init__" else module.split(".")[:-1]
    start = parts[: len(parts) - node.level + 1] if node.level else []
    return ".".join([*start, *([node.module] if node.module else [])])


@functools.cache
def _tree(module: str) -> ast.Module | None:
    source = _source(module)
    try:
        return None if source is None else ast.parse(source.read_text(encoding="utf-8"))
    except (OSError, SyntaxError, ValueError):
        return None


@functools.cache
def _source(module: str) -> Path | None:
    """The file of a module, found without importing its package."""
    top, *rest = module.split(".")
    spec = importlib.util.find_spec(top)
    if spec is None or not spec.submodule_search_locations:
        return None
    place = Path(spec.submodule_search_locations[0], *rest)
    return next((file for file in (place / "__init__.py", place.with_name(f"{place.name}.py")) if file.is_file()), None)
