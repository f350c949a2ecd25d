"""torchvision: whether the one that is installed fits torch, and hidden from the libraries where it does not.

It is compiled for one build of torch. Beside another (the package index has it for CUDA only) importing it fails, and
so does everything of transformers that finds it. Only processors of pictures use it: for a model of text it is hidden
without being imported.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import re
import sys
from importlib import metadata
from pathlib import Path

from hf_rocm_tune.paths import expand_user

_NAME = "torchvision"
_INDEX = "https://download.pytorch.org/whl/"
_SEES = ("vision_config", "image_token_id", "image_token_index", "vision_tower", "visual", "vit_config", "auto_map")
_ADAPTER = "adapter_config.json"
_PROCESSORS = ("preprocessor_config.json", "processor_config.json")


def is_installed() -> bool:
    return importlib.util.find_spec(_NAME) is not None


def problem() -> str:
    """Why torchvision cannot be imported beside this torch; empty where it can, or is not installed. Imports both."""
    if not is_installed():
        return ""
    try:
        importlib.import_module(_NAME)
    except Exception as error:  # RuntimeError of torch's library, OSError of the loader, ImportError
        for name in [name for name in sys.modules if name.partition(".")[0] == _NAME]:
            del sys.modules[name]
        return " ".join(f"{type(error).__name__}: {error}".split())
    return ""


def hide_unless_used(model: str | None) -> str | None:
    """Hide torchvision where the model is one of text, or where it does not fit torch, before transformers is imported.

    Returns what is to be said of a torchvision that does not fit; None else.
    """
    if "transformers" in sys.modules or not is_installed():
        return None
    if model is not None and is_of_text(model):
        sys.modules[_NAME] = None  # type: ignore[assignment]  # Python's own mark of a module that is not there
        return None
    why = problem()
    if not why:
        return None
    sys.modules[_NAME] = None  # type: ignore[assignment]
    torch = metadata.version("torch")
    return (
        f"torchvision {metadata.version(_NAME)} does not fit torch {torch} and is not used ({why}); most processors of "
        f"pictures need it: {install(torch)}"
    )


def install(torch_version: str) -> str:
    """The command that installs the torchvision for a torch, such as 2.13.0+rocm7.2, and nothing else."""
    public, _, build = torch_version.partition("+")
    release = re.match(r"(\d+)\.(\d+)\.?(\d+)?", public)
    wanted = _NAME
    if release is not None and release[1] == "2":  # torchvision 0.28 belongs to torch 2.13 (pytorch/vision, README)
        wanted = f"{_NAME}==0.{int(release[2]) + 15}.{release[3] or 0}"
    if build and re.fullmatch(r"rocm[\d.]+|cpu|cu\d+|xpu", build):
        wanted = f"{wanted}+{build} --index-url {_INDEX}{build}"
    return f"`pip install --force-reinstall --no-deps {wanted}`"


def is_of_text(model: str) -> bool:
    """Whether the files of a model say that it reads text only; False where they are not on this machine yet."""
    directory = _directory(model)
    if directory is not None and (directory / _ADAPTER).is_file():
        base = _base_of(directory)
        if base is not None:
            directory = _directory(base)
    if directory is None or any((directory / name).is_file() for name in _PROCESSORS):
        return False
    from hf_rocm_tune.foreign import read_json  # its YAML is not needed to look at what is installed

    try:
        config = read_json(directory / "config.json")
    except (OSError, ValueError):
        return False
    return isinstance(config, dict) and not any(name in config for name in _SEES)


def _base_of(adapter: Path) -> str | None:
    """The base that an adapter names."""
    from hf_rocm_tune.foreign import read_json

    try:
        config = read_json(adapter / _ADAPTER)
    except (OSError, ValueError):
        return None
    base = config.get("base_model_name_or_path") if isinstance(config, dict) else None
    return base if isinstance(base, str) else None


def _directory(model: str) -> Path | None:
    """The model's files on this machine: its own directory, or one in the cache of the Hub's client."""
    local = expand_user(model)
    if os.path.isdir(local):
        return local
    home = os.environ.get("HF_HOME") or "~/.cache/huggingface"
    cache = expand_user(os.environ.get("HF_HUB_CACHE") or f"{home}/hub")
    snapshots = cache / f"models--{model.replace('/', '--')}" / "snapshots"
    configs = sorted(snapshots.glob("*/config.json"))
    return configs[-1].parent if configs else None
