"""What is uploaded of a directory: refused, or prepared in a directory of its own with nothing local in it.

Refused are a directory that is not what its run wrote, and a run that ended with wrong bytes. Left out are files that
hold this machine's paths and are of no use elsewhere, and everything that the run's manifest does not list. JSON and
the model card are rewritten in the copy where they name local paths; the local file stays as it is, and the copy's own
manifest (``extra.published``) says which files differ from the local ones, and what was left out. All other files are
links to the originals, whose bytes are compared with the local manifest on the way.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from huggingface_hub import ModelCard
from huggingface_hub.errors import HFValidationError
from huggingface_hub.utils import validate_repo_id

from hf_rocm_tune.errors import CorruptionError, UsageError
from hf_rocm_tune.integrity import manifest
from hf_rocm_tune.integrity.atomic import read_plain
from hf_rocm_tune.integrity.manifest import MANIFEST_NAME, FileEntry, Manifest
from hf_rocm_tune.publish.history import REPORT_NAME, unrecovered
from hf_rocm_tune.redaction import Private, find_in_file, hub_id_of, scrub_json, scrub_text

CARD_NAME = "README.md"
# A pickle executes what it holds when it is loaded.
_LEFT_OUT = {"training_args.bin": "a pickle of this machine's settings", "run.json": "this machine's settings"}
_RESUME_ONLY = ("optimizer.pt", "scheduler.pt", "scaler.pt", "trainer_state.json", "rng_state")  # names begin so
_BASE_KEYS = ("base_model_name_or_path", "_name_or_path", "name_or_path")
# They may hold any text, a path by chance too, and are never rewritten.
_VOCABULARIES = frozenset({"tokenizer.json", "vocab.json", "added_tokens.json", "special_tokens_map.json"})

# The Hub's own, from huggingface_hub.repocard.
_FRONT_MATTER = re.compile(r"^(\s*---(?:\r\n|\r|\n))([\S\s]*?)((?:\r\n|\r|\n)---[ \t]*(\r\n|\n|$))")


# ---- what is refused ------------------------------------------------------------------------------------------------


def check_directory(directory: Path) -> Manifest:
    """The manifest of a directory whose files are those that the run wrote. A model card may have been edited since.

    Raises:
        UsageError: there is no such directory, it was never completed, or a file is not what was written.
        CorruptionError: the run's report tells of wrong bytes that were not recovered.
    """
    if not directory.is_dir():
        raise UsageError(f"{directory} is no directory: name the --output_dir of a run, or one of its checkpoints")
    found = manifest.inspect(directory)
    if found.manifest is None:
        problem = found.problems[0]
        why = "no run has completed it" if problem.kind == "missing" else str(problem)
        raise UsageError(
            f"{directory} holds no {MANIFEST_NAME} that can be trusted ({why}), so it is unknown whether its "
            "files are what was trained: let the run end, or name a checkpoint-N of it"
        )
    lost = [
        one
        for one in found.problems
        if not one.file.endswith(".md") and not (one.kind == "missing" and one.file in _LEFT_OUT)
    ]
    if lost:
        more = f" and {len(lost) - 1} more" if len(lost) > 1 else ""
        raise UsageError(f"{directory}: {lost[0]}{more}: it is not what was trained, so it is not uploaded")
    file = directory / REPORT_NAME
    try:
        wrong = unrecovered(json.loads(file.read_text(encoding="utf-8")))
    except FileNotFoundError:  # a checkpoint
        wrong = []
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise UsageError(f"{file} cannot be understood ({error!r}), so the run is not uploaded") from error
    if wrong:
        raise CorruptionError(
            f"{file} tells of corruption that was not recovered ({'; '.join(wrong[:3])}): this run is not uploaded. "
            "Train again, or push a checkpoint from before it"
        )
    return found.manifest


# ---- the copy -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Staged:
    """A directory that is ready to be uploaded.

    Attributes:
        root: where its files are.
        prefix: the folder on the Hub, with a "/" at its end; "" for the top.
        manifest: the one that is uploaded.
        changed: what was rewritten, by file.
        not_listed: files of the directory that stay here because no manifest lists them.
    """

    root: Path
    prefix: str
    manifest: Manifest
    changed: Mapping[str, str]
    not_listed: tuple[str, ...]

    @property
    def files(self) -> dict[str, tuple[Path, FileEntry]]:
        """Where the bytes are, their number and their SHA-256, by path on the Hub; the manifest is one of them."""
        entries = {**self.manifest.files, MANIFEST_NAME: manifest.entry_of(self.root / MANIFEST_NAME)}
        return {self.prefix + name: (self.root / name, entry) for name, entry in entries.items()}

    def described(self) -> list[str]:
        """What the user should know: what it holds, what differs from the local files, what stays here."""
        where = f" in {self.prefix}" if self.prefix else ""
        lines = [f"to be uploaded{where}: {', '.join((*self.manifest.files, MANIFEST_NAME))}"]
        lines += [f"{name}{where} is published without what is local: {what}" for name, what in self.changed.items()]
        if self.not_listed:
            lines.append(f"not uploaded, no manifest lists them: {', '.join(self.not_listed)}")
        return lines

    def drop(self) -> None:
        """Delete the prepared copy."""
        shutil.rmtree(self.root, ignore_errors=True)


def stage(
    directory: Path,
    written: Manifest,
    root: Path,
    *,
    private: Private,
    prefix: str = "",
    base_model_id: str | None = None,
    durable: bool = False,
) -> Staged:
    """Prepare the upload of a directory.

    Args:
        directory: a finished run or a checkpoint.
        written: its manifest, verified.
        root: an empty directory to prepare it in.
        private: what must not be in it.
        prefix: folder on the Hub, see `Staged`; only into one goes what a run needs to go on.
        base_model_id: the base model's id on the Hub, where it was loaded from a directory.
        durable: the copy must outlive the originals, which another part of the program may delete meanwhile.

    Raises:
        UsageError: a file cannot be read or is not what the manifest says, the card is not valid, or a file that cannot
            be rewritten holds something private.
    """
    left_out = {name: why for name, why in _LEFT_OUT.items() if (directory / name).exists()}
    left_out |= {} if prefix else {n: "for resuming only" for n in written.files if n.startswith(_RESUME_ONLY)}
    # A card that was deleted since is not missed.
    there = {name for name in written.files if name != CARD_NAME or (directory / name).exists()}
    names = sorted(there - {*_LEFT_OUT, *left_out, MANIFEST_NAME})
    changed: dict[str, str] = {}
    for name in names:
        try:
            text = _rewritten(directory / name, name, written.files[name], private, base_model_id, changed)
            _put(directory / name, root / name, text, durable=durable)
        except OSError as error:
            raise UsageError(f"{directory / name} cannot be read: {error.strerror or error}") from error
    new = manifest.write(
        root,
        run_id=written.run_id,
        step=written.step,
        status=written.status,
        files=names,
        tensors=written.tensors,
        extra={**written.extra, "published": {"changed": changed, "left_out": left_out}},
    )
    for name, entry in new.files.items():
        if name not in changed and name != CARD_NAME and entry != written.files[name]:
            raise _not_as_written(directory / name)
    top = sorted(path.name for path in directory.iterdir() if path.is_file() and not path.name.startswith(("_", ".")))
    return Staged(
        root=root,
        prefix=prefix,
        manifest=new,
        changed=changed,
        not_listed=tuple(name for name in top if name not in {*names, *left_out, MANIFEST_NAME}),
    )


def _rewritten(
    source: Path, name: str, entry: FileEntry, private: Private, base_model_id: str | None, changed: dict[str, str]
) -> str | None:
    """The text to upload in place of a file's own; None to upload the file as it is. Records what was changed."""
    if name == CARD_NAME:
        if source.is_symlink():  # the one file whose bytes may differ from the manifest's
            raise UsageError(f"{source} is a link, so it is unknown what it would publish: put the file itself there")
        before = _text_of(source, None)
        after, changes = clean_card(before, private, base_model_id=base_model_id)
        if after != before:
            changed[name] = "; ".join(changes)
        return after
    if name.endswith(".json") and name not in _VOCABULARIES:
        try:
            content = json.loads(_text_of(source, entry))
        except ValueError as error:
            raise UsageError(f"{source} is no JSON: {error}") from error
        public = dict(content) if isinstance(content, dict) else content
        for key in _BASE_KEYS if isinstance(content, dict) else ():
            base = content.get(key)
            if isinstance(base, str) and base and private.is_local(base):
                # Its id, else the last part of its path: a copy of the base beside loads it.
                public[key] = published_name(base, private, base_model_id) or Path(base).name
        public = scrub_json(public, private, names=name == REPORT_NAME)
        if public != content:
            changed[name] = _difference(content, public)
            return json.dumps(public, indent=2, ensure_ascii=False) + "\n"
        return None
    if what := find_in_file(source, private):
        raise UsageError(
            f"{source} holds {what}, and a file of this kind cannot be rewritten: take it out before you publish it"
        )
    return None


def _text_of(source: Path, entry: FileEntry | None) -> str:
    """The text of a file, whose bytes are those that the manifest lists unless they may be others (None)."""
    content = read_plain(source)
    if entry is not None and hashlib.sha256(content).hexdigest() != entry.sha256:
        raise _not_as_written(source)
    try:
        return content.decode()
    except UnicodeDecodeError as error:
        raise UsageError(f"{source} is no UTF-8 text: {error}") from error


def _not_as_written(source: Path) -> UsageError:
    return UsageError(f"{source} is not what {MANIFEST_NAME} says: it is damaged, or being written")


def _difference(before: Any, after: Any) -> str:
    """The settings that differ, by name; what they were is private."""
    if not isinstance(before, dict) or not isinstance(after, dict):
        return "local paths were replaced"
    names = [key for key in before if before[key] != after.get(key)]
    base = next((f"{key} is {after[key]!r}" for key in _BASE_KEYS if key in names), "")
    others = [key for key in names if key not in _BASE_KEYS]
    rest = f"local paths and names in {', '.join(others)} were replaced" if others else ""
    return "; ".join(filter(None, (base, rest)))


def _put(source: Path, target: Path, text: str | None, *, durable: bool) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    if text is not None:
        target.write_text(text, encoding="utf-8", newline="")
        return
    real = source.resolve(strict=True)
    try:
        os.link(real, target)
    except OSError:  # another file system, or one without links
        if durable:
            shutil.copyfile(real, target)
        else:
            target.symlink_to(real)


# ---- the model card -------------------------------------------------------------------------------------------------


def published_name(name: str, private: Private, base_model_id: str | None = None) -> str | None:
    """The id of the Hub by which a model or dataset is named in public; None where there is none.

    Args:
        name: an id of the Hub, which stays, or a path of this machine.
        base_model_id: the id that the user gave for it; without one, a path in the Hub's cache still tells its id.
    """
    if not private.is_local(name) and is_hub_id(name):
        return name
    return base_model_id or hub_id_of(name)


def is_hub_id(name: str) -> bool:
    """Whether a name has the form of an id on the Hub."""
    try:
        validate_repo_id(name)
    except HFValidationError:
        return False
    return True


def clean_card(text: str, private: Private, *, base_model_id: str | None = None) -> tuple[str, list[str]]:
    """A card that the Hub accepts and that gives nothing away.

    The Hub answers 400 to a card whose ``base_model`` or ``datasets`` is no id of the Hub, so a local path there is
    replaced by the id that the user gave, or taken out.

    Returns:
        The text, and what was changed, in words that give nothing away; the text is the same object if nothing was.

    Raises:
        UsageError: the metadata is no YAML mapping, or huggingface_hub cannot read it.
    """
    found = _FRONT_MATTER.match(text)
    front, body = ("", text) if found is None else (found[0], text[found.end() :])
    changes: list[str] = []
    try:
        if found is not None:
            metadata = yaml.safe_load(found[2]) or {}
            if not isinstance(metadata, dict):
                raise ValueError("it is no YAML mapping")
            cleaned = _clean_metadata(metadata, private, base_model_id, changes)
            if cleaned != metadata:
                front = f"---\n{yaml.safe_dump(cleaned, sort_keys=False, allow_unicode=True)}---\n"
        cleaned_body = scrub_text(body, private, names=False)
        if cleaned_body != body:
            changes.append("local paths or secrets in its text were replaced")
        result = front + cleaned_body if changes else text
        ModelCard(result)  # huggingface_hub's own reading; the Hub's is asked for when the card is uploaded
    except (yaml.YAMLError, ValueError, TypeError, KeyError, AttributeError) as error:
        said = " ".join(str(error).split())
        raise UsageError(
            f"the metadata of README.md cannot be read ({said}): mend the lines between the --- marks"
        ) from error
    return result, changes


def _clean_metadata(
    metadata: dict[str, Any], private: Private, base_model_id: str | None, changes: list[str]
) -> dict[str, Any]:
    """The metadata with ids of the Hub only; appends what was changed."""
    cleaned: dict[str, Any] = {}
    for key, value in metadata.items():
        if key in ("base_model", "datasets"):
            given = base_model_id if key == "base_model" else None
            names = value if isinstance(value, list) else [value]
            found = (published_name(str(name), private, given) for name in names if name is not None)
            ids = list(dict.fromkeys(filter(None, found)))
            if ids:
                cleaned[key] = ids if isinstance(value, list) else ids[0]
            if ids != names:
                changes.append(f"{key}: {', '.join(ids) or 'taken out, it was a local path'}")
            continue
        kept = value
        if key == "tags" and isinstance(value, list):  # base_model:adapter:NAME; the Hub makes its own of `base_model`
            kept = [tag for tag in value if ":" not in str(tag) or not private.is_local(str(tag).rpartition(":")[2])]
        cleaned[key] = scrub_json(kept, private, names=False)
        if cleaned[key] != value:
            changes.append(f"{key}: without local paths")
    if base_model_id and "base_model" not in cleaned:
        cleaned["base_model"] = base_model_id
        changes.append(f"base_model: {base_model_id}")
    return cleaned
