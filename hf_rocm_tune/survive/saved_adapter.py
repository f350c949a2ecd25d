"""An adapter on disk or on the Hub: located, read once, checked against its manifest, and attached to a model.

What is checked is a private copy in memory, and that copy is what is used. Refused are methods other than LoRA's, LoHa,
LoKr, IA3 and OFT, and adapters whose initialisation rewrote the base weights, unless they were converted at the save.
"""

from __future__ import annotations

import json
import os
import re
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError

from hf_rocm_tune.errors import CorruptionError, UsageError
from hf_rocm_tune.foreign import bounded_patterns, check_printable, read_object
from hf_rocm_tune.models.base_files import TEMPLATE_FOLDER, TOKENIZER_FILE, further_templates
from hf_rocm_tune.models.files import GENERATION_FILE, check_safetensors, sums
from hf_rocm_tune.paths import expand_user
from hf_rocm_tune.survive import manifest
from hf_rocm_tune.survive.run_directory import list_checkpoints, run_settings
from hf_rocm_tune.transfer import digest
from hf_rocm_tune.upstream import REWRITES_BASE

if TYPE_CHECKING:
    from peft import PeftConfig, PeftModel
    from torch import Tensor
    from transformers import PreTrainedModel

    from hf_rocm_tune.transfer import Mover

CONFIG_FILE = "adapter_config.json"
WEIGHTS_FILE = "adapter_model.safetensors"
NAME = "default"
"""The name under which an adapter is attached."""

_METHODS = ("LORA", "LOHA", "LOKR", "IA3", "OFT")
_TOKENIZER_SETTINGS = "tokenizer_config.json"
_PLAIN = "plain PEFT may load it (PeftModel.from_pretrained)"
_NOT_BELOW = ["*/*"]  # checkpoints of a run; the same weights in yet another form
_BASE_FILES = [
    *("model*.safetensors", "*.json", "*.jinja", "*.model", "*.txt", "*.py", "*.tiktoken"),
    *("LICENSE*", "NOTICE*", "USE_POLICY*"),
]


@dataclass(frozen=True, kw_only=True)
class Adapter:
    """An adapter; its files are those of its manifest, if it has one."""

    name: str  # as the user gave it
    origin: Path  # where it is
    files: manifest.PrivateCopy
    config: PeftConfig
    written: manifest.Manifest | None
    settings: Mapping[str, Any]  # of the run that trained it, from its ``run.json``; empty without one

    @property
    def directory(self) -> Path:
        """The private copy: configuration, weights, tokenizer."""
        return self.files.directory

    @property
    def has_tokenizer(self) -> bool:
        return any((self.directory / name).is_file() for name in ("tokenizer.json", "tokenizer_config.json"))

    @property
    def is_reward(self) -> bool:
        """Whether it is of a reward model, which gives one score."""
        return str(self.config.task_type) == "SEQ_CLS"

    @property
    def trained_in_bits(self) -> int | None:
        """4 or 8 if its run quantised the base, else None (also if that is not known)."""
        if self.settings.get("load_in_4bit"):
            return 4
        if self.settings.get("load_in_8bit"):
            return 8
        return None

    @property
    def method(self) -> str:
        """Such as ``LoRA, r=16``, for a line to the user."""
        name = self.config.peft_type.value.replace("LORA", "LoRA")
        if getattr(self.config, "use_dora", False):
            name = "DoRA"
        rank = getattr(self.config, "r", None)
        if rank:
            name += f", r={rank}"
        return name

    @property
    def described(self) -> str:
        """Name, method and whether its files are attested, in one phrase."""
        attested = "not attested: it has no integrity.json"
        if self.written:
            attested = f"equal to its manifest (step {self.written.step})"
        return f"adapter {self.name} ({self.method}), {attested}"


@dataclass(frozen=True, kw_only=True)
class Base:
    """The model below an adapter."""

    name: str
    revision: str | None  # on the Hub; None for the main one

    @property
    def hub_id(self) -> str | None:
        """Its id on the Hub; None for a directory."""
        return None if os.path.isdir(expand_user(self.name)) else self.name

    def download(self, *, weights: bool = True) -> Path:
        """Its directory, downloaded if it is on the Hub, its weights only if wanted; a ``UsageError`` if that fails."""
        if self.hub_id is None:
            return expand_user(self.name)
        from huggingface_hub import snapshot_download
        from huggingface_hub.errors import HfHubHTTPError, HFValidationError

        left_out = _NOT_BELOW if weights else [*_NOT_BELOW, "*.safetensors"]
        wanted: dict[str, Any] = {"allow_patterns": _BASE_FILES, "ignore_patterns": left_out}
        try:
            directory = Path(snapshot_download(self.name, revision=self.revision, **wanted))
            _download_templates(self.name, self.revision, directory)
            if weights and not any(directory.glob("*.safetensors")):  # a repository of pickles only
                snapshot_download(self.name, revision=self.revision, allow_patterns="pytorch_model*.bin")
            return directory
        except (OSError, HfHubHTTPError, HFValidationError) as error:
            raise UsageError(
                f"the base {self.name} cannot be downloaded ({_short(error)}): name a directory or a Hub id with --base"
            ) from error


def base_of(adapter: Adapter, name: str | None = None) -> Base:
    """The base that the user or the adapter names; a relative directory may lie in any directory above the adapter."""
    base = name or str(adapter.config.base_model_name_or_path or "")
    if not base:
        raise UsageError(f"{adapter.name} does not say which model it was trained on: name it with --base")
    if name is None and not os.path.isdir(expand_user(base)):
        base = str(above(adapter.origin, base) or base)
    if base.startswith((".", "/", "~")) and not os.path.isdir(expand_user(base)):
        raise UsageError(f"the base {base} does not exist: name a directory or a Hub id with --base")
    return Base(name=base, revision=None if name else getattr(adapter.config, "revision", None))


def above(directory: Path, name: str) -> Path | None:
    """A model that a result names by a relative path, which may begin in any directory above the result."""
    folders = (folder / name for folder in directory.resolve().parents)
    return next((path for path in folders if (path / "config.json").is_file()), None)


def find_adapter(name: str, revision: str | None = None) -> Path | None:
    """The directory of an adapter, downloaded when ``name`` is a Hub id; None if there is no adapter of that name."""
    directory = expand_user(name)
    if os.path.isdir(directory):  # unlike Path.is_dir, never raises
        if (directory / CONFIG_FILE).is_file() or (directory / "config.json").is_file():
            return directory if (directory / CONFIG_FILE).is_file() else None
        what = "give an adapter or a model"
        checkpoints = [path for _, path in list_checkpoints(directory) if (path / CONFIG_FILE).is_file()]
        if checkpoints:
            what = f"finish the run, or give its newest checkpoint {checkpoints[-1]}"
        raise UsageError(f"{directory} has neither {CONFIG_FILE} nor config.json: {what}")
    if os.path.exists(directory) or name.startswith((".", "/", "~")):
        raise UsageError(f"{name} is not a directory: give the directory of an adapter or of a model, or a Hub id")
    from huggingface_hub import hf_hub_download, snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError

    try:
        hf_hub_download(name, CONFIG_FILE, revision=revision)
        # All of it: the manifest lists pictures and pages too.
        directory = Path(snapshot_download(name, revision=revision, ignore_patterns=_NOT_BELOW))
        _download_templates(name, revision, directory)
        return directory
    except (OSError, HfHubHTTPError, HFValidationError):  # missing, or the Hub cannot be reached: the loader reports it
        return None


def _download_templates(name: str, revision: str | None, directory: Path) -> None:
    """Chat templates beside the default one, which lie in a folder; a repository without a default one has none."""
    from huggingface_hub import snapshot_download

    if (directory / "chat_template.jinja").is_file():
        snapshot_download(name, revision=revision, allow_patterns=f"{TEMPLATE_FOLDER}/*.jinja")


def open_adapter(name: str) -> Adapter:
    """Find an adapter, read its files once and check them, before anything is loaded."""
    directory = find_adapter(name)
    if directory is None:
        raise UsageError(
            f"{name} is a whole model, or was not found on the Hub (check the spelling, the network and "
            "HF_HUB_OFFLINE): give an adapter's directory or Hub id"
        )
    return read_adapter(name, directory)


def read_adapter(name: str, directory: Path) -> Adapter:
    """The files of an adapter, read once and checked."""
    advice = "the adapter differs from what its run wrote and is not used; copy it again, or take an earlier checkpoint"
    written: manifest.Manifest | None = None
    manifest_or_problem = manifest.read(directory)
    if isinstance(manifest_or_problem, manifest.Manifest):
        written = manifest_or_problem
    elif manifest_or_problem.kind != "missing":
        raise UsageError(f"{name}: {manifest_or_problem}: {advice}")
    if written:
        listed = set(written.files)
    else:
        listed = {path.name for path in directory.iterdir() if path.is_file()}
    for file in (CONFIG_FILE, WEIGHTS_FILE):
        if file not in listed and (directory / file).exists():
            raise UsageError(f"{name}: {file} is not in its integrity.json: another program wrote it")
    named = (CONFIG_FILE, WEIGHTS_FILE, GENERATION_FILE)
    beside = sorted(file for file in listed if "/" not in file)
    used = [file for file in beside if file in named or TOKENIZER_FILE.fullmatch(file)]
    used += [file for file in further_templates(directory) if written is None or file in listed]
    entries = written.files if written else None
    try:
        files = manifest.PrivateCopy(directory, used, entries)
        _forget_vocabulary_elsewhere(files)
    except (OSError, ValueError) as error:
        raise UsageError(f"{name}: {error}: {advice}") from error
    if WEIGHTS_FILE not in files.entries:
        raise UsageError(f"{name} has {CONFIG_FILE}, but no {WEIGHTS_FILE} (pickles are not loaded): copy it again")
    check_safetensors(files.directory / WEIGHTS_FILE)
    return Adapter(
        name=name,
        origin=directory,
        files=files,
        config=_read_config(name, files.directory),
        written=written,
        settings=run_settings(directory),
    )


def _forget_vocabulary_elsewhere(files: manifest.PrivateCopy) -> None:
    """Where a base has ``tokenizer.model`` alone, transformers saves the path that it was read from, beside a whole
    ``tokenizer.json``: no file elsewhere is read, and none is needed."""
    settings = files.directory / _TOKENIZER_SETTINGS
    if not settings.is_file() or not (files.directory / "tokenizer.json").is_file():
        return
    content = read_object(settings)
    if content.pop("vocab_file", None) is not None:
        files.set_content(_TOKENIZER_SETTINGS, json.dumps(content, indent=2).encode())


def attach(model: PreTrainedModel, adapter: Adapter, place: Callable[[Tensor, str], Tensor]) -> PeftModel:
    """Wrap a model with an adapter, active, in evaluation mode. What `place` returns for a tensor is used unchanged."""
    from peft import PeftModel, PeftModelForCausalLM
    from safetensors.torch import load_file

    wrapper = PeftModelForCausalLM if model.can_generate() else PeftModel
    adapter.config.inference_mode = True
    try:
        tensors = load_file(adapter.directory / WEIGHTS_FILE)
    except (SafetensorError, OSError) as error:
        raise UsageError(f"{adapter.name}: {WEIGHTS_FILE} cannot be read ({error}); copy it again") from error
    stored = sums(adapter.directory / WEIGHTS_FILE).tensors
    for name, tensor in tensors.items():
        if name not in stored or digest(tensor) != stored[name].digest:
            raise CorruptionError(
                f"{adapter.name}: {name} was read from {WEIGHTS_FILE} with other bytes than the file has: start the "
                "same command again; if it happens again, test this machine's memory"
            )
    _resize_vocabulary(model, tensors)
    placed = {name: place(tensor, name) for name, tensor in tensors.items()}
    misfit = f"{adapter.name} does not fit {type(model).__name__} of {model.name_or_path or 'this base'}"
    fix = "give the model that it was trained on with --base"
    try:
        with warnings.catch_warnings(), bounded_patterns():
            warnings.simplefilter("ignore")  # of ties, and of patterns that PEFT itself adds
            peft_model = wrapper(model, adapter.config, NAME, autocast_adapter_dtype=False, low_cpu_mem_usage=True)
            # Assigned, not copied: PEFT would move (and cast) what it loads to where, and what, the base weight is.
            peft_model.load_state_dict = partial(peft_model.load_state_dict, assign=True)
            unset, unexpected = set_tensors(peft_model, placed, NAME)
            del peft_model.load_state_dict
    except (ValueError, TypeError, KeyError, RuntimeError, NotImplementedError) as error:
        raise UsageError(f"{misfit}: {_short(error)}; {fix}") from error
    there = {name for name, value in peft_model.named_parameters(remove_duplicate=False) if not value.is_meta}
    adapters = (name for name in unset if f".{NAME}." in name or name.endswith(f".{NAME}"))
    missing = [name for name in adapters if name not in there]  # one that is tied to another is stored once
    # PEFT saves a trained module of a resized vocabulary twice, the second time under a name that it does not read.
    stray = [name for name in unexpected if ".modules_to_save." not in name]
    if missing or stray:
        what = f"it lacks {missing[0]}" if missing else f"it contains {stray[0]}, which does not belong to it"
        raise UsageError(f"{misfit}: {what} ({len(missing) + len(stray)} tensors in all); {fix}")
    peft_model.eval()
    return peft_model


def set_tensors(model: PeftModel, tensors: Mapping[str, Tensor], adapter: str) -> tuple[list[str], list[str]]:
    """Gives an adapter of a model its tensors, by their names in its file.

    PEFT renames them as a model's original files are renamed, also where they have the model's names already: Inkling
    2's ``weight_proj`` becomes ``weight_proj.weight``. What it has not set for that reason is set by its name.

    Returns:
        Names of tensors of the model that were not set, and those of which the model has none.
    """
    from peft import set_peft_model_state_dict

    def in_file(name: str) -> str:
        begin, _, end = name.rpartition(f".{adapter}")
        return begin + end

    loaded = set_peft_model_state_dict(model, dict(tensors), adapter_name=adapter)
    ours = {name: in_file(name) for name in loaded.missing_keys if f".{adapter}" in name}
    by_name = {name: tensors[stored] for name, stored in ours.items() if stored in tensors}
    if not by_name:
        return loaded.missing_keys, loaded.unexpected_keys
    model.load_state_dict(by_name, strict=False)
    renamed = [name for name in loaded.unexpected_keys if in_file(name) not in tensors]
    stray = loaded.unexpected_keys
    if len(renamed) == len(by_name):
        stray = [name for name in stray if name not in renamed]
    return [name for name in loaded.missing_keys if name not in by_name], stray


def attach_for_training(adapter: Adapter, model: PreTrainedModel, mover: Mover) -> PeftModel:
    """Wrap a model with an adapter whose training continues: in float32 like a new one, except on a quantised base."""
    narrow = torch.bfloat16 if getattr(model, "is_quantized", False) else torch.float32

    def place(tensor: Tensor, name: str) -> Tensor:
        if tensor.is_floating_point():  # TRL keeps DoRA's magnitudes: bfloat16 rounds their small updates away
            tensor = tensor.to(torch.float32 if "lora_magnitude_vector" in name else narrow)
        return mover.move(tensor.clone(), name=name, stage="adapter")

    wrapped = attach(model, adapter, place)
    adapter.config.inference_mode = False
    wrapped.set_adapter(NAME)
    return wrapped


def _resize_vocabulary(model: PreTrainedModel, tensors: Mapping[str, Tensor]) -> None:
    """Resize the token embeddings to the number of rows in the adapter, which supplies their values."""
    embedding = model.get_input_embeddings()
    path = next((name for name, module in model.named_modules() if module is embedding), None)
    rows, width = embedding.weight.shape
    for name, tensor in tensors.items():
        of_embedding = name.startswith(f"base_model.model.{path}.") and name.endswith("weight")
        if of_embedding and ".lora_" not in name and tensor.ndim == 2 and tensor.shape[1] == width:
            if tensor.shape[0] != rows:
                model.resize_token_embeddings(tensor.shape[0], mean_resizing=False)
            return


def _read_config(name: str, directory: Path) -> PeftConfig:
    from peft import PeftConfig

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # fields of a newer PEFT; what they would change is refused by name
            check_printable(read_object(directory / CONFIG_FILE))
            config = PeftConfig.from_pretrained(str(directory))
    except (OSError, KeyError, ValueError, TypeError, AttributeError) as error:
        raise UsageError(
            f"{name}: {CONFIG_FILE} cannot be read by this PEFT ({_short(error)}): copy it again, or install the "
            "PEFT that wrote it (peft_version in it)"
        ) from error
    kind = getattr(config.peft_type, "value", None)
    if kind not in _METHODS:
        raise UsageError(f"{name} is {kind}, which is not supported: {', '.join(_METHODS)} are; {_PLAIN}")
    if getattr(config, "layer_replication", None):
        raise UsageError(f"{name} replicates layers (layer_replication), which is not supported; {_PLAIN}")
    scheme = getattr(config, "init_lora_weights", True)
    if isinstance(scheme, str) and scheme.lower().startswith(REWRITES_BASE):
        raise UsageError(
            f"{name}: init_lora_weights={scheme} rewrote the base weights when it was trained, so it does not fit the "
            "original ones: save it as plain LoRA with save_pretrained(path_initial_model_for_weight_conversion=...)"
        )
    return config


def _short(error: BaseException) -> str:
    """The first line of an error of PEFT or torch; of several shapes, the tensor."""
    mismatch = re.search(r"size mismatch for (\S+):", str(error))
    if mismatch:
        return f"{mismatch[1]} has another shape there"
    return (str(error).strip() or type(error).__name__).splitlines()[0][:200]
