"""The model card, ``README.md``: what was trained, on what, how it is loaded, and how it was verified.

The card is made of plain values, so that whoever trains need not be imported here. Values that this program did not
choose (names of files, settings, texts of incidents) go through `privacy` and are written as text, never as Markdown.
The card is valid for the Hub: ``base_model`` and ``datasets`` are ids of the Hub or not there.

A card ends with the hash of its own text. One whose hash is still right is ours and is replaced by the next; any other
``README.md`` has been written or edited by a person and is kept.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from hf_rocm_tune.publish.card_metadata import metadata
from hf_rocm_tune.publish.card_sections import sections
from hf_rocm_tune.publish.history import Row, Trained
from hf_rocm_tune.publish.privacy import Private, scrub_json, scrub_text
from hf_rocm_tune.publish.upload_card import published_name

CARD_NAME = "README.md"
_SIGNED = re.compile(
    r"\A(?P<text>.*)\n\n<!-- hf-rocm-tune wrote this card \((?P<sha256>[0-9a-f]{64})\)[^\n]*-->\s*\Z", re.S
)


@dataclass(frozen=True, kw_only=True)
class CardFacts:
    """Everything that a card says.

    Args:
        name: title of the card.
        base_model: name or path of the base model, as it was given.
        base_model_id: its id on the Hub, where it was loaded from a directory and the user has said so.
        revision: of the base model; None for the default.
        datasets: names or paths, as they were given.
        data: one line about the rows.
        trained: see `Trained`.
        settings: of the run, by name.
        rows: the log history.
        step: optimizer steps done.
        final: False for a checkpoint in the middle of the run.
        report: the transfer report.
        picture: name of the picture of the loss beside the card; None for none.
        repo_id: where the adapter will be on the Hub, if that is known.
    """

    name: str
    base_model: str
    trained: Trained
    base_model_id: str | None = None
    revision: str | None = None
    datasets: Sequence[str] = ()
    data: str = ""
    settings: Mapping[str, Any] = field(default_factory=dict)
    rows: Sequence[Row] = ()
    step: int = 0
    final: bool = True
    report: Mapping[str, Any] = field(default_factory=dict)
    picture: str | None = None
    repo_id: str | None = None

    @property
    def is_adapter(self) -> bool:
        """Whether the base model is needed to use what was trained."""
        return self.trained.adapter_dtype is not None


def build(facts: CardFacts, private: Private) -> str:
    """The whole card, with metadata and hash.

    Args:
        facts: what it says.
        private: what must not be in it.
    """
    base_id = published_name(facts.base_model, private, facts.base_model_id)
    ids = [published_name(name, private) for name in facts.datasets]
    clean = replace(
        facts,
        name=" ".join(scrub_text(facts.name, private).split()) or "model",
        base_model=base_id or Path(scrub_text(facts.base_model, private)).name,
        base_model_id=base_id,
        datasets=tuple(dict.fromkeys(name for name in ids if name)),
        data=scrub_text(facts.data, private),
        settings=scrub_json(facts.settings, private),
        report=scrub_json(facts.report, private),
    )
    text = f"---\n{metadata(clean)}\n---\n\n" + "\n\n".join(sections(clean))
    return _sign(text.encode("utf-8", "replace").decode().rstrip())


def is_ours(text: str) -> bool:
    """Whether a card is one of `build`'s and was not changed since."""
    found = _SIGNED.match(text)
    return found is not None and found["sha256"] == _digest(found["text"])


def kept(file: Path) -> bytes | None:
    """The bytes of a ``README.md`` that a person wrote or edited; None where there is none or it is ours."""
    try:
        content = file.read_bytes()
    except FileNotFoundError:
        return None
    return None if is_ours(content.decode("utf-8", "replace")) else content


def _sign(text: str) -> str:
    return (
        f"{text}\n\n<!-- hf-rocm-tune wrote this card ({_digest(text)}); a card that was edited is kept, "
        "one that was not is replaced when training goes on -->\n"
    )


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
