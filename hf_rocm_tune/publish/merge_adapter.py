"""An adapter as it lies on disk or on the Hub, found and checked against its manifest before anything is loaded.

Covered: LoRA with DoRA, rsLoRA, experts' parameters, whole modules and trained tokens; LoHa, LoKr, IA3, OFT. Refused:
other methods, and adapters that only fit base weights which their initialisation had rewritten (PiSSA and its like,
unless they were converted when they were saved).
"""

from __future__ import annotations

import json
import re
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hf_rocm_tune.errors import UsageError
from hf_rocm_tune.integrity import manifest
from hf_rocm_tune.models.files import check_safetensors

if TYPE_CHECKING:
    from peft import PeftConfig

CONFIG_FILE = "adapter_config.json"
WEIGHTS_FILE = "adapter_model.safetensors"

_CARD = "README.md"  # a user may edit it after training
_METHODS = ("LORA", "LOHA", "LOKR", "IA3", "OFT")
# PEFT 0.21.2: initialisations that take what they put into the adapter out of the base weight. "eva" and others that
# only choose the adapter's values are not among them.
_REWRITES_BASE = ("pissa", "olora", "corda", "loftq", "lora_ga")
_NOT_BELOW = ["*/*"]  # checkpoints of the run
_HUB_CURE = "check the spelling, the network and HF_HUB_OFFLINE"


@dataclass(frozen=True, kw_only=True)
class Adapter:
    """A checked adapter.

    Attributes:
        name: as the user gave it.
        directory: where its files are.
        config: PEFT's configuration.
        attested: its files are those that its manifest recorded; False where it has no manifest.
        run_id: of the run that trained it, and at which step; "" and 0 where no manifest says.
        settings: of the run that trained it, as ``run.json`` beside it has them; empty where there is none.
    """

    name: str
    directory: Path
    config: PeftConfig
    attested: bool
    run_id: str
    step: int
    settings: Mapping[str, Any]

    @property
    def trained_in_bits(self) -> int | None:
        """4 or 8 where its run was told to quantise the base, else None (also where that is not known)."""
        return 4 if self.settings.get("load_in_4bit") else 8 if self.settings.get("load_in_8bit") else None

    @property
    def tied(self) -> bool:
        """Whether PEFT was asked to keep tied layers tied."""
        return bool(getattr(self.config, "ensure_weight_tying", False))

    @property
    def method(self) -> str:
        """Such as ``LoRA, r=16``, for a line to the user."""
        kind = "DoRA" if getattr(self.config, "use_dora", False) else str(self.config.peft_type.value)
        rank = getattr(self.config, "r", None)
        return kind + (f", r={rank}" if isinstance(rank, int) else "")

    @property
    def described(self) -> str:
        """What it is and whether its files are the ones that were written, in one phrase."""
        if not self.attested:
            return f"adapter {self.name} ({self.method}), not attested: it has no integrity.json"
        return f"adapter {self.name} ({self.method}), equal to its manifest (run {self.run_id[:8]}, step {self.step})"


def find_adapter(name: str, revision: str | None = None) -> Path | None:
    """The directory of an adapter, downloaded when ``name`` is a Hub id; None where there is no adapter by that name.

    Raises:
        UsageError: a directory that holds neither an adapter nor a model.
    """
    directory = Path(name).expanduser()
    if directory.is_dir():
        return _adapter_in(directory)
    if directory.exists() or name.startswith((".", "/", "~")):
        raise UsageError(f"{name} is no directory: give the directory of an adapter or of a model, or a Hub id")
    from huggingface_hub import hf_hub_download, snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError

    try:
        hf_hub_download(name, CONFIG_FILE, revision=revision)
        # All of it: the manifest lists pictures and pages too.
        return Path(snapshot_download(name, revision=revision, ignore_patterns=_NOT_BELOW))
    except (OSError, HfHubHTTPError, HFValidationError):  # not there, or not to be reached: who loads it will say
        return None


def open_adapter(name: str, revision: str | None = None) -> Adapter:
    """Find an adapter and check its files, before anything is loaded.

    Raises:
        UsageError: there is none, it is damaged, or of a kind that cannot be attached.
    """
    directory = find_adapter(name, revision)
    if directory is None:
        if Path(name).expanduser().is_dir():
            raise UsageError(f"{name} is a whole model, not an adapter: give an adapter's directory or Hub id")
        raise UsageError(f"no {CONFIG_FILE} of {name} could be found on the Hub: {_HUB_CURE}, or give a directory")
    written = _check_manifest(name, directory)
    config = _read_config(name, directory)
    _check_kind(name, config)
    _check_weights(name, directory)
    return Adapter(
        name=name,
        directory=directory,
        config=config,
        attested=written is not None,
        run_id=written.run_id if written else "",
        step=written.step if written else 0,
        settings=_settings_of_run(directory),
    )


def _adapter_in(directory: Path) -> Path | None:
    if (directory / CONFIG_FILE).is_file():
        return directory
    if (directory / "config.json").is_file():
        return None
    checkpoints = sorted(
        (path for path in directory.glob("checkpoint-*") if (path / CONFIG_FILE).is_file()),
        key=lambda path: (len(path.name), path.name),
    )
    if checkpoints:
        raise UsageError(
            f"{directory} holds no finished adapter, but {len(checkpoints)} checkpoints: finish the run, or give "
            f"{checkpoints[-1]}"
        )
    raise UsageError(
        f"{directory} holds neither {CONFIG_FILE} nor config.json: give an adapter's or a model's directory"
    )


def _check_manifest(name: str, directory: Path) -> manifest.Manifest | None:
    if not (directory / manifest.MANIFEST_NAME).exists():
        return None
    found = manifest.inspect(directory)
    problems = [problem for problem in found.problems if problem.file != _CARD]
    if problems or found.manifest is None:
        raise UsageError(
            f"{name}: {problems[0]}: the adapter is not what its run wrote and is not used; copy it again, or "
            "take an earlier checkpoint"
        )
    needed = [CONFIG_FILE, WEIGHTS_FILE]
    if stray := [file for file in needed if (directory / file).exists() and file not in found.manifest.files]:
        raise UsageError(f"{name}: {stray[0]} is not in its integrity.json: it was put there by something else")
    return found.manifest


def _read_config(name: str, directory: Path) -> PeftConfig:
    from peft import PeftConfig

    try:
        with warnings.catch_warnings(record=True):  # fields of a newer PEFT; what they would change is refused by name
            warnings.simplefilter("always")
            return PeftConfig.from_pretrained(str(directory))
    except KeyError as error:
        raise UsageError(f"{name}: {CONFIG_FILE}: this version of PEFT knows no method {error}: update it") from error
    except (OSError, ValueError, TypeError, AttributeError) as error:
        raise UsageError(f"{name}: {CONFIG_FILE} cannot be read ({short(error)}): copy it again") from error


def _check_kind(name: str, config: PeftConfig) -> None:
    if config.peft_type.value not in _METHODS:
        raise UsageError(f"{name} is {config.peft_type.value}, which is not covered here: {', '.join(_METHODS)} are")
    scheme = getattr(config, "init_lora_weights", True)
    if isinstance(scheme, str) and scheme.lower().startswith(_REWRITES_BASE):
        raise UsageError(
            f"{name}: init_lora_weights={scheme} rewrote the base weights when it was trained, so it does not fit the "
            "original ones: save it as plain LoRA with save_pretrained(path_initial_model_for_weight_conversion=...)"
        )


def _check_weights(name: str, directory: Path) -> None:
    if (directory / WEIGHTS_FILE).is_file():
        check_safetensors(directory / WEIGHTS_FILE)
        return
    if (directory / "adapter_model.bin").is_file():
        raise UsageError(f"{name}: adapter_model.bin is a pickle, which is not read here: save it as safetensors")
    raise UsageError(f"{name} has {CONFIG_FILE}, but no {WEIGHTS_FILE}: copy it again, or take a checkpoint")


def _settings_of_run(directory: Path) -> Mapping[str, Any]:
    """From the run that wrote this directory, or the directory above a checkpoint."""
    for place in (directory, directory.parent):
        try:
            settings = json.loads((place / "run.json").read_text(encoding="utf-8"))["settings"]
        except (OSError, ValueError, KeyError, TypeError):
            continue
        return settings if isinstance(settings, dict) else {}
    return {}


def short(error: BaseException) -> str:
    """The telling line of an error of PEFT's or torch's."""
    if other := re.search(r"size mismatch for (\S+):", str(error)):
        return f"{other[1]} has another shape there"
    chosen = next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
    return chosen if len(chosen) <= 200 else chosen[:197] + "..."
