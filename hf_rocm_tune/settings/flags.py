"""Names of flags before torch and TRL are imported, which takes ten seconds.

They are read from the sources of the classes from which the parser in ``arguments`` is built. That parser refuses
everything that is refused here, and nothing is refused here if a source cannot be read.
"""

from __future__ import annotations

import difflib
import functools
import re
from collections.abc import Iterable, Sequence

from hf_rocm_tune.data.formats import Method
from hf_rocm_tune.lifecycle.launcher_flags import CONFIG_FLAG, bare, launcher_flags
from hf_rocm_tune.settings.verbs import VERBS
from hf_rocm_tune.upstream import source_of

CONFIG = "--config"
HELP_ALL = "--help_all"
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
#: What other toolkits and newcomers call a flag: it is not taken, and the message names ours.
_ELSEWHERE = {
    **dict.fromkeys(("qlora", "4bit", "load_4bit", "quantization_bit"), "load_in_4bit"),
    **dict.fromkeys(("8bit", "load_8bit"), "load_in_8bit"),
    **dict.fromkeys(("rank", "r", "lora_dim"), "lora_rank"),
    **dict.fromkeys(("alpha",), "lora_alpha"),
    **dict.fromkeys(("base_model", "model_name", "model_path", "pretrained"), "model"),
    **dict.fromkeys(("data", "data_path", "train_file", "train_data", "file"), "dataset"),
    **dict.fromkeys(("out", "output", "out_dir", "save_dir"), "output_dir"),
    **dict.fromkeys(("batch", "bs", "micro_batch_size", "train_batch_size"), "batch_size"),
    **dict.fromkeys(("steps", "max_iters", "iters"), "max_steps"),
    **dict.fromkeys(("grad_accum", "grad_accumulation", "accumulate"), "gradient_accumulation_steps"),
    **dict.fromkeys(("cutoff_len", "sequence_len", "seq_len", "seq_length", "context", "max_len"), "max_length"),
    **dict.fromkeys(("scheduler", "lr_scheduler"), "lr_scheduler_type"),
    **dict.fromkeys(("optimizer",), "optim"),
    **dict.fromkeys(("train_on_inputs", "train_on_answers", "answers_only"), "assistant_only_loss"),
    **dict.fromkeys(("resume",), "resume_from_checkpoint"),
}
#: TRL's flag, which also takes ``auto`` here; `job.rows` decides it by the rows.
ANSWERS_ONLY = "assistant_only_loss"


# ---- one argument of a command line ----------------------------------------------------------------------------------


def full_name(name: str) -> str:
    """The flag that a name stands for, which may be the name itself."""
    newer = "activation_checkpointing"  # of transformers from 5.23 on; older ones know the other name only
    if name.startswith(newer) and newer not in flags("sft"):
        return name.replace("activation", "gradient", 1)
    return ALIASES.get(name, name)


def canonical(argv: Sequence[str]) -> list[str]:
    """A command line with each alias replaced by its flag."""
    return [_renamed(argument) for argument in argv]


def _renamed(argument: str) -> str:
    name = bare(argument)
    if not argument.startswith("--") or full_name(name) == name:
        return argument
    _, equals, value = argument.partition("=")
    return f"--{full_name(name)}{equals}{value}"


def unknown_flag(name: str, names: Iterable[str], *, dashes: str) -> str:
    """What to say of a flag (``dashes`` are ``--``) or a recipe's key that is none of ``names``."""
    what = "flag" if dashes else "key"
    if bare(name) in launcher_flags() or bare(name) == bare(CONFIG_FLAG):
        return f"{what} {name} belongs to the launcher; give it on the command line of `hf-rocm-tune sft`"
    known = [*names, *ALIASES]
    elsewhere = _ELSEWHERE.get(bare(name))
    nearest = [elsewhere] if elsewhere in known else difflib.get_close_matches(bare(name), known, n=1, cutoff=0.5)
    hint = f"; did you mean {dashes}{nearest[0]}?" if nearest else f"; {HELP_ALL} lists all"
    return f"unknown {what} {name}{hint}"


# ---- names of flags from sources ----------------------------------------------------------------------------------


@functools.cache
def flags(verb: Method) -> frozenset[str]:
    """The flags of a verb; none if one of its classes is not found."""
    fields = [_fields(*owner) for owner in VERBS[verb].owners]
    if not all(fields):
        return frozenset()
    return frozenset({"config"}.union(*fields))


_BASES = {"_BaseConfig": "trl.trainer.base_config", "TrainingArguments": "transformers.training_args"}


def _fields(module: str, name: str) -> set[str]:
    """The fields of a dataclass and of its bases."""
    definition = re.search(rf"^class {name}(?:\((\w+)\))?:\n((?:    .*\n|\n)*)", source_of(module), re.MULTILINE)
    if definition is None:
        return set()
    base, body = definition.groups()
    fields = set(re.findall(r"^    ([a-z]\w*): (?!ClassVar)", body, re.MULTILINE))
    if base:
        fields |= _fields(_BASES.get(base, "trl.scripts.utils"), base)
    return fields
