"""A model's configuration without its weights: from a directory, from the Hub, or from fields."""

from __future__ import annotations

import logging
import socket
import urllib.parse
import urllib.request
import warnings
from collections.abc import Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hf_rocm_tune.errors import UsageError
from hf_rocm_tune.models.shapes_model import FOREIGN_ERRORS, first_line, text_config

if TYPE_CHECKING:
    from collections.abc import Iterator


def load_config(name: str, *, revision: str = "main", trust_remote_code: bool = False) -> Any:
    """Reads a configuration; no weights are looked for.

    Args:
        name: a directory with a ``config.json``, or a Hub id.
        revision: branch, tag or commit of a Hub id.
        trust_remote_code: passed to transformers.

    Raises:
        UsageError: there is none, or it describes no model that transformers knows.
    """
    from huggingface_hub.errors import StrictDataclassError
    from transformers import AutoConfig

    path = Path(name).expanduser()
    local = path.exists() or name.startswith((".", "/", "~"))
    if local and not (path / "config.json").is_file():
        raise UsageError(f"model: {name} has no config.json: give a model directory or a Hub id")
    where = str(path) if local else name
    cure = "download or copy it again" if local else "check the spelling, the network and HF_HUB_OFFLINE"
    try:
        with quiet():
            config = AutoConfig.from_pretrained(
                where,
                revision=revision,
                trust_remote_code=trust_remote_code,
                local_files_only=not local and not _hub_answers(),
            )
    except (*FOREIGN_ERRORS, OSError, StrictDataclassError) as error:
        raise UsageError(f"model {name}: its configuration cannot be read: {first_line(error)}; {cure}") from error
    if not config.architectures:
        raise UsageError(f"model {name}: its config.json names no architecture: give a causal language model")
    return config


def config_of(fields: Mapping[str, Any]) -> Any:
    """A configuration from its ``model_type`` and further fields, as a ``config.json`` has them."""
    from transformers import AutoConfig

    rest = dict(fields)
    with quiet():
        return AutoConfig.for_model(rest.pop("model_type"), **rest)


def longest_position(config: Any) -> int | None:
    """Tokens that a model was made for, where its configuration says so."""
    text = text_config(config)
    return next((value for key in _POSITIONS if isinstance(value := getattr(text, key, None), int) and value > 0), None)


def _hub_answers() -> bool:
    """Whether the Hub can be reached at all: its client would try for half a minute where it cannot."""
    from huggingface_hub import constants

    if constants.HF_HUB_OFFLINE:
        return False
    if urllib.request.getproxies():  # the way goes over another machine
        return True
    address = urllib.parse.urlsplit(constants.ENDPOINT)
    try:
        socket.create_connection((address.hostname or "", address.port or 443), timeout=_PATIENCE).close()
    except OSError:
        return False
    return True


_PATIENCE = 3.0  # seconds
_POSITIONS = ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length")


@contextmanager
def quiet() -> Iterator[None]:
    """Within the block libraries keep their remarks on configurations to themselves: nobody asked for them here."""
    logger = logging.getLogger("transformers")
    before = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(before)
