"""What is uploaded of a directory, prepared in a directory of its own: nothing local in it, and a manifest of its own.

Left out are files that hold this machine's paths and are of no use elsewhere (``training_args.bin`` is a pickle that
executes what it holds when it is loaded), and everything that the run's manifest does not list. Text that names local
paths is rewritten in the copy; the local file stays as it is, and the copy's manifest (``extra.published``) says which
files differ from the local ones, and what was left out.

All other files are links to the originals, whose bytes are compared with the local manifest on the way.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hf_rocm_tune.errors import UsageError
from hf_rocm_tune.integrity import manifest
from hf_rocm_tune.integrity.atomic import read_plain
from hf_rocm_tune.integrity.manifest import MANIFEST_NAME, FileEntry, Manifest
from hf_rocm_tune.publish.privacy import Private, find_in_file, scrub_json
from hf_rocm_tune.publish.upload_card import clean_card, published_name
from hf_rocm_tune.publish.upload_refusals import LEFT_OUT

CARD_NAME = "README.md"
RESUME_ONLY = ("optimizer.pt", "scheduler.pt", "scaler.pt", "trainer_state.json", "rng_state")
"""How the names begin that only a run that goes on needs."""

_BASE_KEYS = ("base_model_name_or_path", "_name_or_path", "name_or_path")
# They may hold any text, a path by chance too, and are never rewritten.
_VOCABULARIES = frozenset({"tokenizer.json", "vocab.json", "added_tokens.json", "special_tokens_map.json"})
_WRITTEN_BY_MACHINES = frozenset({"transfer_report.json"})


@dataclass(frozen=True, kw_only=True)
class Entry:
    """One file that is to be on the Hub: its path there, where its bytes are, their number and their SHA-256."""

    path_in_repo: str
    source: Path
    bytes: int
    sha256: str


@dataclass(frozen=True, kw_only=True)
class Staged:
    """A directory that is ready to be uploaded.

    Attributes:
        root: where its files are.
        prefix: the folder on the Hub, with a "/" at its end; "" for the top.
        entries: its files, the manifest among them.
        manifest: the one that is uploaded.
        changed: what was rewritten, by file.
        not_listed: files of the directory that stay here because no manifest lists them.
    """

    root: Path
    prefix: str
    entries: tuple[Entry, ...]
    manifest: Manifest
    changed: Mapping[str, str] = field(default_factory=dict)
    not_listed: tuple[str, ...] = ()

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
    for_resume: bool = False,
    durable: bool = False,
) -> Staged:
    """Prepare the upload of a directory.

    Args:
        directory: a finished run or a checkpoint.
        written: its manifest, verified.
        root: an empty directory to prepare it in.
        private: what must not be in it.
        prefix: folder on the Hub, see `Staged`.
        base_model_id: the base model's id on the Hub, where it was loaded from a directory.
        for_resume: take the files of `RESUME_ONLY` too.
        durable: the copy must outlive the originals, which another part of the program may delete meanwhile.

    Raises:
        UsageError: a file cannot be read or is not what the manifest says, the card is not valid, or a file that cannot
            be rewritten holds something private.
    """
    names, left_out = _select(directory, written, for_resume=for_resume)
    changed: dict[str, str] = {}
    for name in names:
        try:
            text = _rewritten(directory / name, name, written.files[name], private, base_model_id, changed)
            _put(directory / name, root / name, text, durable=durable)
        except OSError as error:
            raise UsageError(f"{directory / name} cannot be read: {error.strerror or error}") from error
    said = {"changed": changed, "left_out": left_out}
    new = manifest.write(
        root,
        run_id=written.run_id,
        step=written.step,
        status=written.status,
        files=names,
        tensors=written.tensors,
        extra={**written.extra, "published": said},
    )
    for name, entry in new.files.items():
        if name not in changed and name in written.files and name != CARD_NAME and entry != written.files[name]:
            raise _not_as_written(directory / name)
    listed = {*names, *left_out, MANIFEST_NAME}
    return Staged(
        root=root,
        prefix=prefix,
        entries=tuple(_entries(root, prefix, new)),
        manifest=new,
        changed=changed,
        not_listed=tuple(name for name in _top_files(directory) if name not in listed),
    )


def _select(directory: Path, written: Manifest, *, for_resume: bool) -> tuple[list[str], dict[str, str]]:
    """Names to upload, and names that are left out with the reason."""
    left_out = {name: why for name, why in LEFT_OUT.items() if (directory / name).exists()}
    left_out |= {} if for_resume else {n: "for resuming only" for n in written.files if n.startswith(RESUME_ONLY)}
    # A card that was deleted since is not missed.
    wanted = {name for name in written.files if name != CARD_NAME or (directory / name).exists()}
    return sorted(wanted - {*LEFT_OUT, *left_out, MANIFEST_NAME}), left_out


def _top_files(directory: Path) -> Iterable[str]:
    return sorted(path.name for path in directory.iterdir() if path.is_file() and not path.name.startswith(("_", ".")))


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
        public = _named_in_public(content, private, base_model_id)
        public = scrub_json(public, private, names=name in _WRITTEN_BY_MACHINES)
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


def _named_in_public(content: Any, private: Private, base_model_id: str | None) -> Any:
    """Settings with the base model's public name: its id, else the last part of its path, which loads it beside."""
    if not isinstance(content, dict):
        return content
    public = dict(content)
    for key in _BASE_KEYS:
        name = content.get(key)
        if isinstance(name, str) and name and private.is_local(name):
            public[key] = published_name(name, private, base_model_id) or Path(name).name
    return public


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


def _entries(root: Path, prefix: str, new: Manifest) -> Iterable[Entry]:
    for name, one in new.files.items():
        yield Entry(path_in_repo=prefix + name, source=root / name, bytes=one.bytes, sha256=one.sha256)
    own = (root / MANIFEST_NAME).read_bytes()
    digest = hashlib.sha256(own).hexdigest()
    yield Entry(path_in_repo=prefix + MANIFEST_NAME, source=root / MANIFEST_NAME, bytes=len(own), sha256=digest)
