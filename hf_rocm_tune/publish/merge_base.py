"""The model below an adapter: which one, and where its files are."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from hf_rocm_tune.errors import UsageError
from hf_rocm_tune.publish.merge_adapter import short

if TYPE_CHECKING:
    from hf_rocm_tune.publish.merge_adapter import Adapter

_BASE_FILES = [
    *("model*.safetensors", "*.json", "*.jinja", "*.model", "*.txt", "*.py", "*.tiktoken"),
    *("LICENSE*", "NOTICE*", "USE_POLICY*"),
]
_NOT_BELOW = ["*/*"]  # the same weights in yet another form


@dataclass(frozen=True, kw_only=True)
class Base:
    """The model below an adapter: the name by which it goes, and its revision on the Hub (None: the main one)."""

    name: str
    revision: str | None

    @property
    def directory(self) -> Path | None:
        """Where it is, when it is on this machine under its own name."""
        path = Path(self.name).expanduser()
        return path if path.is_dir() else None

    @property
    def hub_id(self) -> str | None:
        """Its id on the Hub; None for a directory."""
        return None if self.directory else self.name


def base_of(adapter: Adapter, name: str | None = None) -> Base:
    """The base that the user names, else the one that the adapter names.

    Raises:
        UsageError: neither does, or it is a directory that is not there.
    """
    base = Base(
        name=name or str(adapter.config.base_model_name_or_path or ""),
        revision=None if name else getattr(adapter.config, "revision", None),
    )
    if not base.name:
        raise UsageError(f"{adapter.name} does not say which model it was trained on: name it with --base")
    if base.directory is None and base.name.startswith((".", "/", "~")):
        raise UsageError(f"the base {base.name} is not there: name a directory or a Hub id with --base")
    return base


def download(base: Base) -> Path:
    """The directory of a base; what the Hub has of it is downloaded.

    Raises:
        UsageError: it cannot be had.
    """
    if base.directory is not None:
        return base.directory
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError

    try:
        return Path(
            snapshot_download(base.name, revision=base.revision, allow_patterns=_BASE_FILES, ignore_patterns=_NOT_BELOW)
        )
    except (OSError, HfHubHTTPError, HFValidationError) as error:
        raise UsageError(
            f"the base {base.name} cannot be had ({short(error)}): name a directory or a Hub id with --base"
        ) from error
