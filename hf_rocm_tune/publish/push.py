"""``hf-rocm-tune push DIR REPO``, and the pushes of a run while it trains.

A push is one commit. Files that differ from the manifest are refused before anything is sent; the bytes that are
compared are the bytes that are sent, and the Hub's own hashes are compared after the commit. Files that no manifest
lists stay here, local paths in JSON and ``README.md`` are rewritten. The same command continues a push that failed.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args

from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi, RepoFile, get_token
from huggingface_hub.errors import HfHubHTTPError, HFValidationError

from hf_rocm_tune.errors import CommandParser, CorruptionError, Interrupted, TuneError, UsageError
from hf_rocm_tune.foreign import parse_json, read_bytes
from hf_rocm_tune.publish import say, serving, signing
from hf_rocm_tune.publish.history import REPORT_NAME, collect, read_json
from hf_rocm_tune.publish.page import PAGE_NAME, page_of
from hf_rocm_tune.publish.readme import README_NAME, clean_readme, is_hub_id, published_names
from hf_rocm_tune.publish.signing import SIGNATURE_NAME
from hf_rocm_tune.publish.verdict import judge
from hf_rocm_tune.redaction import (
    Private,
    find_private,
    local_paths,
    print_line,
    redact,
    remember,
    scrub_json,
    scrub_text,
)
from hf_rocm_tune.survive import manifest
from hf_rocm_tune.survive.manifest import MANIFEST_NAME, FileEntry, Manifest, read_once
from hf_rocm_tune.survive.run_directory import list_checkpoints, run_settings
from hf_rocm_tune.version import __version__

Say = Callable[[str], None]
Checkpoints = Literal["none", "last", "all"]
# A pickle executes code when it is loaded; the record has this machine's settings.
_LEFT_OUT = ("training_args.bin", "run.json", MANIFEST_NAME)
_RESUME_ONLY = ("optimizer.pt", "scheduler.pt", "scaler.pt", "trainer_state.json", "rng_state")  # names begin so
_BASE_KEYS = ("base_model_name_or_path", "_name_or_path", "name_or_path")
# May contain any text; never rewritten.
_VOCABULARIES = frozenset({"tokenizer.json", "vocab.json", "added_tokens.json", "special_tokens_map.json"})
_LAST = "last-checkpoint/"
_TOKENS_PAGE = "https://huggingface.co/settings/tokens"
_LARGE = 10 << 20  # bytes, from which the Hub's large file storage takes every file


class HubError(TuneError):
    """The Hub did not accept an upload; it may at another time. The local files are unchanged."""


@dataclass(frozen=True, kw_only=True)
class PushSettings:
    """How to push."""

    private: bool | None = None  # True refuses a public repository, False makes a new one public, None a private one
    revision: str = "main"  # branch; created if it does not exist
    base_model_id: str | None = None  # the base model's id on the Hub, where it was loaded from a directory
    report: bool = False  # the page of `hf-rocm-tune report`, too
    checkpoints: Checkpoints = "none"  # beside the result: the "last" one as ``last-checkpoint``, or "all"
    sign: Path | None = None  # a private key in PEM, with which all that is published is signed

    def __post_init__(self) -> None:
        if self.base_model_id is not None and not is_hub_id(self.base_model_id):
            raise UsageError(f"--base_model_id must be an id on the Hub such as ORG/NAME, got {self.base_model_id!r}")


class Pushed(NamedTuple):
    """A push that was checked."""

    url: str
    commit: str
    files: int
    bytes: int

    @property
    def summary(self) -> str:
        """The push in one line."""
        what = f"pushed to {self.url} (commit {self.commit[:10]}): {self.files} files, {self.bytes / 1e6:.3g} MB"
        return f"{what}; all hashes on the Hub are correct"


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
        UsageError: the directory, the name, the token or the ``README.md`` is wrong.
        CorruptionError: the run ended with corruption, or the Hub states another hash than was sent.
        HubError: the Hub does not accept it now.
    """
    settings = settings or PushSettings()
    directory = Path(directory)
    signer = signing.signer(settings.sign) if settings.sign is not None else None
    repository = _Repository(directory, repo_id, settings, token)
    pieces = repository.stage(_parts(directory, settings.checkpoints))
    if settings.report:
        pieces[PAGE_NAME] = _Piece.of(page_of([collect(directory)]).encode("utf-8", "replace"))
    if signer is not None:
        hashes = {path: piece.entry.sha256 for path, piece in pieces.items()}
        signature = signing.sign({path: piece.content for path, piece in pieces.items()}, hashes, signer, repo_id)
        pieces[SIGNATURE_NAME] = _Piece.of(signature)
    say(f"to be uploaded: {', '.join(pieces)}")
    return repository.send(pieces, "Upload with hf-rocm-tune")


# ---- what is uploaded -----------------------------------------------------------------------------------------------


class _Piece(NamedTuple):
    """One file of an upload: its bytes, or where a large one is, which is read once more to be sent."""

    entry: FileEntry  # of what is uploaded
    content: bytes | Path

    @classmethod
    def of(cls, content: bytes) -> _Piece:
        return cls(FileEntry(bytes=len(content), sha256=hashlib.sha256(content).hexdigest()), content)

    def is_stored(self, there: RepoFile | None) -> bool:
        """Whether the Hub states the hash of these bytes: SHA-256 in large file storage, Git's SHA-1 elsewhere."""
        if there is None or there.size != self.entry.bytes:
            return False
        if there.lfs is not None or isinstance(self.content, Path):
            return there.lfs is not None and str(there.lfs.sha256) == self.entry.sha256
        return str(there.blob_id) == hashlib.sha1(b"blob %d\0" % len(self.content) + self.content).hexdigest()


def _parts(directory: Path, wanted: Checkpoints) -> dict[str, Path]:
    """A result and the checkpoints that are wanted, by their folders on the Hub."""
    parts = {"": directory}
    if wanted == "none":
        return parts
    checkpoints = [path for _, path in list_checkpoints(directory)]
    if not checkpoints:
        raise UsageError(f"--checkpoints {wanted}: there is no checkpoint-N in {directory}; leave the flag out")
    if wanted == "last":
        parts[_LAST] = checkpoints[-1]
    else:
        parts |= {f"{path.name}/": path for path in checkpoints}
    return parts


def _sealed(directory: Path) -> Manifest:
    """The manifest of a directory that may be published."""
    if not directory.is_dir():
        raise UsageError(f"{directory} is not a directory: name the --output_dir of a run, or one of its checkpoints")
    written = manifest.read(directory)
    if not isinstance(written, Manifest):
        raise UsageError(
            f"{directory} is not known to hold what was trained ({written}): let the run end, or name one of its "
            "checkpoints (checkpoint-N)"
        )
    verdict = judge(read_json(directory / REPORT_NAME), finished=True)
    if verdict.level == "bad":
        raise CorruptionError(
            f"{directory}: {verdict.headline} It is not uploaded: train again, or push a checkpoint from before it"
        )
    return written


def _piece(directory: Path, name: str, entry: FileEntry, private: Private, base_model_id: str | None) -> _Piece:
    """One file as it is published; an OSError or a ValueError if it cannot be read."""
    file = directory / name
    if name == README_NAME:  # the only file that may differ from the manifest
        if file.is_symlink() or not file.is_file():
            raise UsageError(f"{file} is a link or no plain file: replace it by the file")
        return _Piece.of(clean_readme(read_bytes(file).decode(), private, base_model_id=base_model_id).encode())
    problems = manifest.compare(directory, {name: entry})
    if problems:
        raise UsageError(f"{directory}: {problems[0]}: the files are not what was trained, so nothing is uploaded")
    is_json = file.suffix == ".json" and file.name not in _VOCABULARIES
    with file.open("rb") as opened:  # in large files names come first, then numbers
        begin = opened.read() if is_json else opened.read(_LARGE + 1)
    if len(begin) > _LARGE and not is_json:
        piece = _Piece(entry, file)
    else:
        piece = _Piece.of(begin)
    if piece.entry != entry:
        raise UsageError(f"{file} differs from {MANIFEST_NAME}: it is damaged, or being written")
    if not is_json:
        secret = find_private(begin, private)
        if secret:
            raise UsageError(f"{file} holds {secret}, and files of this kind cannot be rewritten: remove it")
        return piece
    given = parse_json(begin)
    public = scrub_json(_with_public_base(given, private, base_model_id), private, names=file.name == REPORT_NAME)
    if public == given:
        return piece
    return _Piece.of((json.dumps(public, indent=2, ensure_ascii=False) + "\n").encode())


def _with_public_base(content: Any, private: Private, base_model_id: str | None) -> Any:
    """The content of a JSON file, in which a base is named by its id on the Hub instead of a path."""
    if not isinstance(content, dict):
        return content
    public = {**content}
    for key in _BASE_KEYS:
        base = content.get(key)
        if isinstance(base, str) and base and private.is_local(base):
            names = published_names([base], private, base_model_id)
            public[key] = names[0] if names else Path(base).name
    return public


# ---- the Hub --------------------------------------------------------------------------------------------------------


class _Repository:
    """A branch of a repository; ``NAME`` alone is one of the token's owner."""

    def __init__(self, directory: Path, repo_id: str, settings: PushSettings, token: str | None) -> None:
        self.repo_id = repo_id  # complete once the repository has been opened
        self._settings = settings
        self._is_open = False
        given = run_settings(directory)
        adapter = read_json(directory / "adapter_config.json")
        bases = [given.get("model_name_or_path"), adapter.get("base_model_name_or_path")]
        paths = dict.fromkeys(local_paths(given), "")
        paths |= dict.fromkeys(local_paths(bases), settings.base_model_id or "")
        paths[str(directory.absolute())] = repo_id
        secret = get_token() if token is None else token
        self._private = Private.of_this_machine(os.environ, paths=paths, secrets=[secret])
        remember({"secret": list(self._private.secrets)})
        for handler in logging.getLogger("huggingface_hub").handlers:
            handler.addFilter(_redact_record)  # adding it again changes nothing
        self._api = HfApi(token=token, library_name="hf-rocm-tune", library_version=__version__)

    def stage(self, parts: Mapping[str, Path]) -> dict[str, _Piece]:
        """What is published of directories, by path on the Hub; files that only a resume needs go into folders only."""
        pieces: dict[str, _Piece] = {}
        for prefix, directory in parts.items():
            written = _sealed(directory)
            own: dict[str, _Piece] = {}
            try:
                for name, entry in sorted(written.files.items()):
                    deleted = name == README_NAME and not os.path.lexists(directory / name)
                    if name not in _LEFT_OUT and not deleted and (prefix or not name.startswith(_RESUME_ONLY)):
                        own[name] = _piece(directory, name, entry, self._private, self._settings.base_model_id)
            except (OSError, ValueError) as error:
                raise UsageError(f"{directory} cannot be read ({error}): nothing is sent") from error
            public = replace(written, files={name: piece.entry for name, piece in own.items()})
            own[MANIFEST_NAME] = _Piece.of(manifest.to_json(public).encode())
            pieces |= {prefix + name: piece for name, piece in own.items()}
        return pieces

    def open(self) -> None:
        """Create the repository and its branch where they do not exist; a public one where ``private`` is refused."""
        hidden = self._settings.private is not False
        revision = self._settings.revision
        with self._errors():
            self.repo_id = self._api.create_repo(self.repo_id, private=hidden, exist_ok=True).repo_id
            public = self._settings.private and not self._api.repo_info(self.repo_id).private
            if revision != "main" and not revision.startswith("refs/"):
                self._api.create_branch(self.repo_id, branch=revision, exist_ok=True)
            # Sends nothing: create_repo hides a 401 or a 403 where the repository exists.
            readme = CommitOperationAdd(path_in_repo=README_NAME, path_or_fileobj=b"#")
            self._api.preupload_lfs_files(self.repo_id, additions=[readme], revision=revision)
        if public:
            raise UsageError(
                f"{self.repo_id} exists and is public, but --private is given: make it private in its settings on the "
                "Hub, or name another repository"
            )
        self._is_open = True

    def send(self, pieces: Mapping[str, _Piece], message: str) -> Pushed:
        """Upload in one commit, and check it: a ``CorruptionError`` if the Hub states other hashes."""
        if not self._is_open:
            self.open()
        revision = self._settings.revision
        with self._errors():
            head = str(self._api.repo_info(self.repo_id, revision=revision).sha)
            there = self._files(head)
            stale = self._stale(there, pieces, head)
            lacking = [path for path, piece in pieces.items() if not piece.is_stored(there.get(path))]
            changes: list[Any] = [self._addition(path, pieces[path]) for path in lacking]
            changes += [CommitOperationDelete(path_in_repo=path, is_folder=False) for path in stale]
            if changes:
                done = self._api.create_commit(self.repo_id, changes, commit_message=message, revision=revision)
                head = str(done.oid)
                there = self._files(head)
        wrong = [path for path, piece in pieces.items() if not piece.is_stored(there.get(path))]
        if wrong:
            raise CorruptionError(
                f"{self.repo_id} on the Hub has another hash than was sent for {', '.join(wrong[:3])} (commit "
                f"{head[:10]}). The local files are correct: delete those on the Hub, or push to another repository"
            )
        size = sum(piece.entry.bytes for piece in pieces.values())
        return Pushed(url=f"{self._api.endpoint}/{self.repo_id}", commit=head, files=len(pieces), bytes=size)

    def _addition(self, path: str, piece: _Piece) -> CommitOperationAdd:
        """The operation for one file; the bytes of a large one, in memory that nobody can write to, are sent first."""
        if isinstance(piece.content, bytes):
            return CommitOperationAdd(path_in_repo=path, path_or_fileobj=piece.content)
        if not piece.content.exists():
            raise UsageError(f"{path} was deleted before it was uploaded: nothing is published")
        with read_once(piece.content) as (copy, entry):
            if entry != piece.entry:
                raise UsageError(f"{path} has changed since it was checked: nothing is published")
            addition = CommitOperationAdd(path_in_repo=path, path_or_fileobj=str(copy))
            self._api.preupload_lfs_files(self.repo_id, additions=[addition], revision=self._settings.revision)
        return addition

    def _stale(self, there: Mapping[str, RepoFile], pieces: Mapping[str, _Piece], head: str) -> list[str]:
        """Files of an earlier push, which would be loaded together with the new ones, and its signature, which does
        not hold for what is there now."""
        earlier: Mapping[str, FileEntry] = {}
        if MANIFEST_NAME in there:
            old = manifest.read(Path(self._api.hf_hub_download(self.repo_id, MANIFEST_NAME, revision=head)).parent)
            if isinstance(old, Manifest):
                earlier = old.files
        folders = {path.partition("/")[0] for path in pieces if "/" in path}
        stale = []
        for path in there.keys() - pieces:
            if path in earlier or path.partition("/")[0] in folders or path == SIGNATURE_NAME:
                stale.append(path)
        return stale

    def _files(self, commit: str) -> dict[str, RepoFile]:
        entries = self._api.list_repo_tree(self.repo_id, recursive=True, revision=commit)
        return {entry.path: entry for entry in entries if isinstance(entry, RepoFile)}

    @contextmanager
    def _errors(self) -> Iterator[None]:
        """Errors of the Hub's client become ours here: a UsageError if the user can fix it, else a HubError."""
        try:
            yield
        except (TuneError, AssertionError, AttributeError, NameError, TypeError):
            raise
        except Exception as error:
            explained = _explained(error, self.repo_id)
            raise type(explained)(scrub_text(str(explained), self._private, names=False)) from error


def _redact_record(record: logging.LogRecord) -> bool:
    """Remove secrets, and the query part of addresses (signatures of uploads), from a log record."""
    record.msg = re.sub(r"(://[^\s?]*)(?:\?\S*)?", r"\1", redact(record.getMessage()))
    record.args = ()
    return True


def _explained(error: BaseException, repo_id: str) -> TuneError:
    message = " ".join(str(error).split())
    if isinstance(error, ValueError) and README_NAME in message:
        return UsageError(f"the Hub refuses the model card: {message}; correct it")
    if isinstance(error, HFValidationError):
        return UsageError(f"{repo_id!r} is not a valid repository name: write USER/NAME")
    if isinstance(error, RuntimeError) and error.__cause__ is not None:  # huggingface_hub wraps those of uploads
        error = error.__cause__
    if not isinstance(error, HfHubHTTPError):
        return HubError(f"the Hub cannot be reached ({type(error).__name__}: {message}): check the network")
    status = error.response.status_code
    info = f"{status}: {error.server_message}" if error.server_message else str(status)
    if status >= 500 or status in (408, 409, 412, 425, 429):
        return HubError(f"the Hub answers {info}: try again later")
    fix = ""
    if status in (401, 403):
        fix = f": make a token with write access at {_TOKENS_PAGE}, then `hf auth login`"
    return UsageError(f"the Hub refuses the push to {repo_id} ({info}){fix}")


# ---- while a run trains ----------------------------------------------------------------------------------------------

_HEARTBEAT_S = 5.0
_WHOLE: dict[str, Checkpoints] = {"checkpoint": "last", "all_checkpoints": "all"}  # by ``hub_strategy``


class Publisher(_Repository):
    """Pushes one run. Only the first rank of a job has one.

    ``hub_strategy`` as in transformers: "end" pushes only the result; "every_save" the model of each checkpoint;
    "checkpoint" also all of the newest one, as ``last-checkpoint``; "all_checkpoints" all of each. A thread uploads a
    checkpoint; one that is written meanwhile is not pushed, unless ``hub_always_push`` makes the training wait. A
    failed push is reported and does not end the training; the push of the result must succeed.

    ``say`` is called from any thread, ``alive`` every few seconds while a training with ``hub_always_push`` waits.
    """

    def __init__(
        self, args: Any, *, base_model_id: str | None = None, token: str | None = None, say: Say = print
    ) -> None:
        self._strategy: str = getattr(args.hub_strategy, "value", args.hub_strategy)
        self._wait_for_each = bool(args.hub_always_push)
        self._say = say
        self.alive = lambda: None
        settings = PushSettings(
            private=args.hub_private_repo,
            revision=args.hub_revision or "main",
            base_model_id=base_model_id,
            checkpoints=_WHOLE.get(self._strategy, "none"),
        )
        directory = Path(args.output_dir)
        super().__init__(directory, args.hub_model_id or directory.absolute().name, settings, token)
        self._thread: threading.Thread | None = None

    def open(self) -> None:
        """Create the repository, before anything else takes time. A Hub that does not answer is asked again later."""
        try:
            super().open()
        except HubError as error:
            self._say(f"{error}. Training starts nevertheless, and the push is tried at each save and at the end")

    def checkpoint(self, directory: Path) -> None:
        """Push a complete checkpoint, by the strategy. Failures are reported."""
        if self._strategy == "end":
            return
        name = directory.name
        step = name.rpartition("-")[2]
        if self._thread is not None and self._thread.is_alive():
            self._say(f"{name} is not pushed, because the push of an earlier checkpoint goes on")
            return
        folder = {"last": _LAST, "all": f"{name}/"}.get(self._settings.checkpoints, "")

        def upload() -> None:
            try:
                done = self.send(self.stage({"": directory, folder: directory}), f"Training in progress, step {step}")
                self._say(f"{name} is on the Hub: {done.url}")
            except TuneError as error:
                self._say(f"the push of {name} failed: {error}. Training continues; the next save tries again")

        # A daemon: an upload that hangs must not keep the process from ending.
        self._thread = threading.Thread(target=upload, daemon=True)
        self._thread.start()
        while self._wait_for_each and self._thread.is_alive():
            self._thread.join(_HEARTBEAT_S)
            self.alive()

    def result(self, directory: Path) -> Pushed:
        """Push the finished run and the checkpoints of the strategy; an error says how to finish."""
        finish = f"The result in {directory} is complete, and the same command again finishes the push"
        try:
            self.wait()
            wanted = self._settings.checkpoints if list_checkpoints(directory) else "none"
            done = self.send(self.stage(_parts(directory, wanted)), "End of training")
        except KeyboardInterrupt as stop:
            raise Interrupted(f"the push was stopped. {finish}") from stop
        except (UsageError, HubError, CorruptionError) as error:
            raise type(error)(f"the push failed: {error}. {finish}") from error
        self._say(done.summary)
        return done

    def wait(self) -> None:
        """Wait for the current upload."""
        if self._thread is not None:
            self._thread.join()


# ---- the command ----------------------------------------------------------------------------------------------------


def main(argv: Sequence[str]) -> int:
    """Run ``hf-rocm-tune push``."""
    parser = CommandParser(
        prog="hf-rocm-tune push",
        description="Upload a finished run to the Hugging Face Hub, without this machine's paths, and check the "
        "hashes that the Hub states. The token is the one of `hf auth login` or HF_TOKEN.",
    )
    add = parser.add_argument
    add("directory", metavar="DIR", type=Path, help="a finished run, a checkpoint or a merged model")
    add("repo_id", metavar="REPO", help="USER/NAME, or NAME for one of your own")
    seen = parser.add_mutually_exclusive_group().add_argument
    seen("--private", action="store_true", default=None, help="refuse a repository that is public")
    seen("--public", action="store_false", dest="private", default=None, help="make a new repository public")
    add("--revision", default="main", metavar="BRANCH", help="push to this branch; it is created if it does not exist")
    add(
        "--base_model_id", metavar="ORG/NAME", help="name this base model on the Hub, if it was loaded from a directory"
    )
    add("--report", action="store_true", help="upload the page of `hf-rocm-tune report`, too")
    more = "push checkpoints too: the newest as last-checkpoint, or all (default: none)"
    add("--checkpoints", choices=get_args(Checkpoints), default="none", help=more)
    help_sign = "a private key (PEM, elliptic curve): sign all that is published, for `hf-rocm-tune verify --key`"
    add("--sign", type=Path, metavar="KEY", help=help_sign)
    wanted = vars(parser.parse_args(list(argv)))
    directory = wanted.pop("directory")
    repo_id = wanted.pop("repo_id")
    try:
        done = push(directory, repo_id, settings=PushSettings(**wanted), say=say)
    except HubError as error:
        raise HubError(f"{error}. The same command continues it") from error
    except KeyboardInterrupt as stop:
        raise Interrupted("the push was stopped. The same command continues it") from stop
    print(done.summary)
    for line in serving.lines(read_json(directory / "adapter_config.json"), repo_id):
        print_line(line)
    return 0
