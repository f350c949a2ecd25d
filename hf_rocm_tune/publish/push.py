"""``hf-rocm-tune push DIR REPO``, and the pushes of a run while it trains.

A directory whose files differ from its manifest, or whose run ended with corruption, is refused before anything is
sent. Files that only this machine can use, and files that the manifest does not list, stay here; local paths in JSON
and the model card are rewritten. The manifest that is uploaded (``extra.published``) lists the differences. The local
directory is only read.

During training, a checkpoint is linked (or copied) beside the output directory and uploaded by a thread, so that it can
be rotated out during the upload. As in transformers, a checkpoint that is written during another upload is not pushed.
A failed push is reported and does not end the training; the push of the result must succeed.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import shlex
import shutil
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, get_args

from huggingface_hub import get_token

from hf_rocm_tune.errors import CommandParser, CorruptionError, Interrupted, TuneError, UsageError
from hf_rocm_tune.publish import say
from hf_rocm_tune.publish.card import CARD_NAME, clean_card, is_hub_id, published_name
from hf_rocm_tune.publish.history import REPORT_NAME, checkpoints, collect, run_settings, unrecovered
from hf_rocm_tune.publish.hub import HubError, Piece, Pushed, Repository, Say, Staged
from hf_rocm_tune.redaction import Private, find_in_file, scrub_json
from hf_rocm_tune.survive import manifest
from hf_rocm_tune.survive.atomic import create_staging, read_plain
from hf_rocm_tune.survive.manifest import MANIFEST_NAME, FileEntry, Manifest

Checkpoints = Literal["none", "last", "all"]
LAST_CHECKPOINT = "last-checkpoint/"
# A pickle executes code when it is loaded.
_LEFT_OUT = {"training_args.bin": "a pickle of this machine's settings", "run.json": "this machine's settings"}
_RESUME_ONLY = ("optimizer.pt", "scheduler.pt", "scaler.pt", "trainer_state.json", "rng_state")  # names begin so
_BASE_KEYS = ("base_model_name_or_path", "_name_or_path", "name_or_path")
# May contain any text; never rewritten.
_VOCABULARIES = frozenset({"tokenizer.json", "vocab.json", "added_tokens.json", "special_tokens_map.json"})
_LARGE = 10 << 20  # bytes, from which the Hub's large file storage takes every file


@dataclass(frozen=True, kw_only=True)
class PushSettings:
    """How to push."""

    private: bool | None = None  # True refuses a public repository, False makes a new one public, None a private one
    revision: str = "main"  # branch; created if it does not exist
    base_model_id: str | None = None  # the base model's id on the Hub, where it was loaded from a directory
    checkpoints: Checkpoints = "none"  # beside the result: the "last" one as ``last-checkpoint``, or "all"
    report: bool = False  # the page of `hf-rocm-tune report`, too

    def __post_init__(self) -> None:
        if self.base_model_id is not None and not is_hub_id(self.base_model_id):
            raise ValueError(f"base_model_id must be an id on the Hub such as ORG/NAME, got {self.base_model_id!r}")


def push(
    directory: str | Path,
    repo_id: str,
    *,
    settings: PushSettings | None = None,
    token: str | None = None,
    say: Say = print,
) -> Pushed:
    """Push a finished run, a checkpoint or a merged model. The local directory is only read.

    Args:
        directory: with the ``integrity.json`` of ours.
        repo_id: ``USER/NAME``, or ``NAME`` for one of the token's owner.
        settings: see `PushSettings`.
        token: with write access; None for HF_TOKEN or the one of `hf auth login`. It is never shown or stored.
        say: takes lines for the user.

    Raises:
        UsageError: the directory, the name, the token or the card is wrong.
        CorruptionError: the run ended with corruption, or the Hub states another hash than was sent.
        HubError: the Hub does not accept it now.
    """
    settings, directory = settings or PushSettings(), Path(directory)
    private = private_here(directory, repo_id=repo_id, base_model_id=settings.base_model_id, token=token)
    repository = Repository(repo_id, private, say, token=token, revision=settings.revision)
    staged = _stage_all(directory, settings, private)
    amount = sum(piece.entry.bytes for each in staged for piece in each.pieces.values())
    say(f"push to {repo_id}, branch {settings.revision}: {amount / 1e6:.3g} MB")
    for line in (line for each in staged for line in each.lines):
        say(line)
    repository.open(private=settings.private)
    return repository.upload(staged, message="Upload with hf-rocm-tune")


def _stage_all(directory: Path, settings: PushSettings, private: Private) -> list[Staged]:
    """Prepare the result, and the checkpoints that the settings ask for."""
    sources = [("", directory)]
    if settings.checkpoints != "none":
        found = checkpoints(directory) if directory.is_dir() else []
        if not found:
            raise UsageError(
                f"--checkpoints {settings.checkpoints}: there is no checkpoint-N in {directory}; leave the flag out"
            )
        last = settings.checkpoints == "last"
        sources += [(LAST_CHECKPOINT, found[-1])] if last else [(f"{path.name}/", path) for path in found]
    base = settings.base_model_id
    staged = [stage(source, private=private, prefix=prefix, base_model_id=base) for prefix, source in sources]
    if settings.report:
        from hf_rocm_tune.publish.page import PAGE_NAME, page_of

        page = Piece.of(page_of([collect(directory)]).encode("utf-8", "replace"))
        staged.append(Staged(prefix="", pieces={PAGE_NAME: page}, lines=(f"to be uploaded, too: {PAGE_NAME}",)))
    return staged


def private_here(
    directory: Path,
    *,
    repo_id: str,
    base_model_id: str | None,
    token: str | None,
    others: Mapping[str, str] | None = None,
) -> Private:
    """Private names of this machine, and the paths that the run was given, each with its public replacement ("" for the
    last part): ``repo_id`` for the directory, ``base_model_id`` for the base model.
    """
    paths = dict(others or {})
    for key, value in run_settings(directory).items():
        if isinstance(value, str) and os.path.isabs(value):
            paths.setdefault(value, (base_model_id or "") if key == "model_name_or_path" else "")
    with suppress(OSError, ValueError, AttributeError):
        content = read_plain(directory / "adapter_config.json")
        written = manifest.read(directory)
        if isinstance(written, Manifest) and written.files.get("adapter_config.json") != Piece.of(content).entry:
            raise UsageError(f"{directory}: adapter_config.json is changed: the files are not what was trained")
        base = json.loads(content).get("base_model_name_or_path")
        if isinstance(base, str) and os.path.isabs(base):
            paths[base] = base_model_id or ""
    paths[str(directory.absolute())] = repo_id
    logged_in = get_token() if token is None else None
    return Private.of_this_machine(os.environ, paths=paths, secrets=[token, logged_in])


# ---- what is uploaded -----------------------------------------------------------------------------------------------


def _sealed(directory: Path) -> Manifest:
    """The manifest of a directory that may be published."""
    if not directory.is_dir():
        raise UsageError(f"{directory} is not a directory: name the --output_dir of a run, or one of its checkpoints")
    written = manifest.read(directory)
    if not isinstance(written, Manifest):
        why = "no run has finished there" if written.kind == "missing" else str(written)
        raise UsageError(
            f"{directory} has no valid {MANIFEST_NAME} ({why}), so it is unknown whether its files are what was "
            "trained: let the run end, or name one of its checkpoints (checkpoint-N)"
        )
    file = directory / REPORT_NAME
    try:
        wrong = unrecovered(json.loads(file.read_text(encoding="utf-8")))
    except FileNotFoundError:  # a checkpoint
        wrong = []
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise UsageError(f"{file} has an unknown form ({error!r}), so the run is not uploaded") from error
    if wrong:
        raise CorruptionError(
            f"{file} reports corruption that was not recovered ({'; '.join(wrong[:3])}): this run is not uploaded. "
            "Train again, or push a checkpoint from before it"
        )
    return written


def stage(directory: Path, *, private: Private, prefix: str = "", base_model_id: str | None = None) -> Staged:
    """Read what is uploaded of a directory; large files are compared with the manifest and read when they are sent.

    Files that only a resume needs go into a folder (``prefix``) only. Refused: a file that differs from the manifest, a
    card that is not valid, private names in a file that cannot be rewritten, and a report of unrecovered corruption.
    """
    written = _sealed(directory)
    left_out = {name: why for name, why in _LEFT_OUT.items() if (directory / name).exists()}
    left_out |= {} if prefix else {n: "for resuming only" for n in written.files if n.startswith(_RESUME_ONLY)}
    pieces: dict[str, Piece] = {}
    changed: dict[str, str] = {}
    try:
        for name, entry in sorted(written.files.items()):
            if name in left_out or name in (*_LEFT_OUT, MANIFEST_NAME):
                continue
            if name == CARD_NAME and not os.path.lexists(directory / name):
                continue  # it may have been edited or deleted since
            pieces[name], what = _piece(directory, name, entry, private, base_model_id)
            if what:
                changed[name] = what
    except OSError as error:
        reason = error.strerror or error
        raise UsageError(f"{error.filename or directory} cannot be read ({reason}): nothing is uploaded") from error
    published = {"changed": changed, "left_out": left_out}
    files = {name: piece.entry for name, piece in pieces.items()}
    public = replace(written, files=files, extra={**written.extra, "published": published})
    pieces[MANIFEST_NAME] = Piece.of(manifest.to_json(public).encode())
    where = f" in {prefix}" if prefix else ""
    top = (path.name for path in directory.iterdir() if path.is_file() and not path.name.startswith(("_", ".")))
    stay = sorted(name for name in top if name not in {*pieces, *left_out})
    lines = [f"to be uploaded{where}: {', '.join(pieces)}"]
    lines += [f"{name}{where} is published without local names: {what}" for name, what in changed.items()]
    lines += [f"not uploaded, no manifest lists them: {', '.join(stay)}"] if stay else []
    return Staged(prefix=prefix, pieces={prefix + name: piece for name, piece in pieces.items()}, lines=tuple(lines))


def _piece(
    directory: Path, name: str, entry: FileEntry, private: Private, base_model_id: str | None
) -> tuple[Piece, str]:
    """One file as it is published, and what was changed in it, in words without the private content."""
    source, is_json = directory / name, name.endswith(".json") and name not in _VOCABULARIES
    if name == CARD_NAME:
        if source.is_symlink() or not source.is_file():  # the only file that may differ from the manifest
            raise UsageError(
                f"{source} is a link or no plain file, so nobody knows what it would publish: replace it by the file"
            )
        text, changes = clean_card(_decoded(source, read_plain(source)), private, base_model_id=base_model_id)
        return Piece.of(text.encode()), "; ".join(changes)
    if problems := manifest.compare(directory, {name: entry}):
        raise UsageError(f"{directory}: {problems[0]}: the files are not what was trained, so nothing is uploaded")
    large = entry.bytes > _LARGE and not is_json
    piece = Piece(entry=entry, source=source) if large else Piece.of(read_plain(source))
    if piece.entry != entry:
        raise UsageError(f"{source} differs from {MANIFEST_NAME}: it is damaged, or being written")
    if is_json:
        return _public_json(source, piece, private, base_model_id)
    with open(source, "rb") if piece.content is None else io.BytesIO(piece.content) as stream:
        what = find_in_file(stream, private, header_only=name.endswith(".safetensors"))
    if what:
        raise UsageError(
            f"{source} holds {what}, and files of this kind cannot be rewritten: remove it before you publish the file"
        )
    return piece, ""


def _public_json(source: Path, piece: Piece, private: Private, base_model_id: str | None) -> tuple[Piece, str]:
    try:
        content = json.loads(_decoded(source, piece.content or b""))
    except ValueError as error:
        raise UsageError(f"{source} is not JSON: {error}") from error
    if not isinstance(content, dict):
        raise UsageError(f"{source} is not a JSON object")
    public = dict(content)
    for key in _BASE_KEYS:
        base = content.get(key)
        if isinstance(base, str) and base and private.is_local(base):
            # Its id, else the last part of its path.
            public[key] = published_name(base, private, base_model_id) or Path(base).name
    public = scrub_json(public, private, names=source.name == REPORT_NAME)
    if public == content:
        return piece, ""
    base = next((f"; {key} is {public[key]!r}" for key in _BASE_KEYS if content.get(key) != public.get(key)), "")
    text = json.dumps(public, indent=2, ensure_ascii=False) + "\n"
    return Piece.of(text.encode()), f"local paths and names were replaced{base}"


def _decoded(source: Path, content: bytes) -> str:
    try:
        return content.decode()
    except UnicodeDecodeError as error:
        raise UsageError(f"{source} is not UTF-8 text: {error}") from error


# ---- while a run trains ----------------------------------------------------------------------------------------------

_EARLY_ATTEMPTS = 2
_HEARTBEAT_S = 5.0
_LAST_SECONDS = 10.0
_WHOLE: dict[str, Checkpoints] = {"checkpoint": "last", "all_checkpoints": "all"}  # by ``hub_strategy``


class Publisher:
    """Pushes one run. Only the first rank of a job has one.

    ``hub_strategy`` as in transformers: "end" pushes only the result; "every_save" the model of each checkpoint;
    "checkpoint" also all of the newest one, as ``last-checkpoint``; "all_checkpoints" all of each. A checkpoint is
    skipped while another one is uploaded, unless ``hub_always_push`` makes the training wait.

    ``local`` has paths that the run was given, each with its public replacement ("" for the last part); ``say`` is
    called from any thread, ``alive`` every few seconds while the training waits for a push.
    """

    def __init__(
        self,
        args: Any,
        *,
        base_model_id: str | None = None,
        local: Mapping[str, str] | None = None,
        token: str | None = None,
        say: Say = print,
    ) -> None:
        revision = args.hub_revision or "main"
        self._output_dir, self._wait_for_each, self._say = Path(args.output_dir), bool(args.hub_always_push), say
        self._strategy: str = getattr(args.hub_strategy, "value", args.hub_strategy)
        try:
            self._settings = PushSettings(private=args.hub_private_repo, revision=revision, base_model_id=base_model_id)
        except ValueError as error:
            raise UsageError(f"--{error}") from error
        repo_id = args.hub_model_id or self._output_dir.absolute().name
        self.alive: Callable[[], None] | None = None
        self._private = private_here(
            self._output_dir, repo_id=repo_id, base_model_id=base_model_id, token=token, others=local
        )
        self._repository = Repository(repo_id, self._private, say, token=token, revision=revision)
        self._opened = False
        self._thread: threading.Thread | None = None
        self._missing = False  # the newest checkpoint is not on the Hub
        self._printed: set[str] = set()

    @property
    def repo_id(self) -> str:
        """Complete once the repository has been opened."""
        return self._repository.repo_id

    def open(self) -> None:
        """Create the repository, before anything else takes time. A Hub that does not answer is asked again later."""
        try:
            self._repository.open(private=self._settings.private, attempts=_EARLY_ATTEMPTS)
            self._opened = True
        except HubError as error:
            self._say(f"{error}. Training starts nevertheless, and the push is tried at each save and at the end")

    def checkpoint(self, directory: Path) -> None:
        """Push a complete checkpoint, by the strategy. Failures are reported."""
        if self._strategy == "end" or self._uploading():
            self._missing = self._strategy != "end"
            return
        folders = {"checkpoint": [LAST_CHECKPOINT], "all_checkpoints": [f"{directory.name}/"]}.get(self._strategy, [])
        self._missing, root = True, create_staging(self._output_dir / "push")
        try:
            shutil.copytree(directory, root / directory.name, copy_function=_link)
        except OSError as error:
            self._say(f"{directory.name} could not be prepared for its push: {error}. Training continues")
            shutil.rmtree(root, ignore_errors=True)
            return
        # A daemon: an upload that hangs must not keep the process from ending.
        self._thread = threading.Thread(target=self._upload, args=(root / directory.name, ["", *folders]), daemon=True)
        self._thread.start()
        if self._wait_for_each:
            self.wait()

    def result(self, directory: Path) -> Pushed:
        """Push the finished run and the checkpoints of the strategy; an error says how to finish."""
        try:
            self.wait()
            settings = self._settings
            if checkpoints(directory):
                settings = replace(settings, checkpoints=_WHOLE.get(self._strategy, "none"))
            done = self._send(_stage_all(directory, settings, self._private), "End of training")
        except KeyboardInterrupt as stop:
            raise Interrupted(f"the push was stopped. {self._how_to_finish(directory)}") from stop
        except (UsageError, HubError, CorruptionError) as error:
            raise type(error)(f"the push failed: {error}. {self._how_to_finish(directory)}") from error
        self._missing = False
        self._say(done.summary)
        return done

    def wait(self) -> None:
        """Wait for the current upload."""
        while self._uploading():
            assert self._thread is not None
            self._thread.join(_HEARTBEAT_S)
            if self.alive is not None:
                self.alive()

    def close(self) -> None:
        """Stop, and report a checkpoint that was not pushed. Waits some seconds for an upload. May be called twice."""
        if self._thread is not None:
            self._thread.join(_LAST_SECONDS)
        if self._missing:
            self._say("the newest checkpoint is not on the Hub; the run, when it continues, pushes the next one")
        self._missing = False

    def _uploading(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    def _upload(self, copy: Path, prefixes: Sequence[str]) -> None:
        base = self._settings.base_model_id
        try:
            staged = [stage(copy, private=self._private, prefix=each, base_model_id=base) for each in prefixes]
            self._send(staged, f"Training in progress, step {copy.name.rpartition('-')[2]}")
            self._missing = False
            self._say(f"{copy.name} is on the Hub: {self._repository.url}")
        except TuneError as error:
            self._say(f"the push of {copy.name} failed: {error}. Training continues; the next save tries again")
        finally:
            shutil.rmtree(copy.parent, ignore_errors=True)

    def _send(self, staged: list[Staged], message: str) -> Pushed:
        for line in (line for each in staged if not each.prefix for line in each.lines):
            if line not in self._printed:
                self._printed.add(line)
                self._say(line)
        if not self._opened:
            self._repository.open(private=self._settings.private)
            self._opened = True
        return self._repository.upload(staged, message=message)

    def _how_to_finish(self, directory: Path) -> str:
        settings = self._settings
        words = ["hf-rocm-tune", "push", str(directory), self.repo_id]
        words += [] if settings.private is None else ["--private"] if settings.private else ["--public"]
        words += ["--revision", settings.revision] if settings.revision != "main" else []
        words += ["--base_model_id", settings.base_model_id] if settings.base_model_id else []
        if self._strategy in _WHOLE:
            words += ["--checkpoints", _WHOLE[self._strategy]]
        return f"The result in {directory} is complete: `{shlex.join(words)}` finishes the push"


def _link(source: str, target: str) -> None:
    real = os.path.realpath(source)
    try:
        os.link(real, target)
    except OSError:  # another file system, or one without links
        shutil.copyfile(real, target)


# ---- the command ----------------------------------------------------------------------------------------------------


def main(argv: Sequence[str], *, again: str = "The same command continues it") -> int:
    """Run ``hf-rocm-tune push``; ``again`` ends the line of a push that failed."""
    wanted = vars(_parser().parse_args(list(argv)))
    directory, repo_id = wanted.pop("directory"), wanted.pop("repo_id")
    try:
        settings = PushSettings(**wanted)
    except ValueError as error:
        raise UsageError(f"--{error}") from error
    try:
        done = push(directory, repo_id, settings=settings, say=say)
    except HubError as error:
        raise HubError(f"{error}. {again}") from error
    except KeyboardInterrupt as stop:
        raise Interrupted(f"the push was stopped. {again}") from stop
    print(done.summary)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = CommandParser(
        prog="hf-rocm-tune push",
        description="Upload a finished run to the Hugging Face Hub, without this machine's paths, and check the "
        "hashes that the Hub states. The token is the one of `hf auth login` or HF_TOKEN.",
    )
    parser.add_argument("directory", metavar="DIR", type=Path, help="a finished run, a checkpoint or a merged model")
    parser.add_argument("repo_id", metavar="REPO", help="USER/NAME, or NAME for one of your own")
    visibility = parser.add_mutually_exclusive_group()
    visibility.add_argument("--private", action="store_true", default=None, help="refuse a repository that is public")
    visibility.add_argument(
        "--public", action="store_false", dest="private", default=None, help="make a new repository public, not private"
    )
    parser.add_argument("--revision", default="main", metavar="BRANCH", help="created if it does not exist")
    parser.add_argument("--report", action="store_true", help="upload the page of `hf-rocm-tune report`, too")
    parser.add_argument(
        "--base_model_id", metavar="ORG/NAME", help="the base model on the Hub, where it was loaded from a directory"
    )
    parser.add_argument(
        "--checkpoints",
        choices=get_args(Checkpoints),
        default="none",
        help="push checkpoints too: the newest as last-checkpoint, or all (default: none)",
    )
    return parser
