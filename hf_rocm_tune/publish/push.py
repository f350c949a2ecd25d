"""``hf-rocm-tune push DIR REPO``, and the pushes of a run while it trains.

A directory whose files differ from its manifest, or whose run ended with corruption, is refused before anything is
sent. A staged copy omits files that only this machine can use and files that the manifest does not list; local paths in
JSON and the model card are rewritten. Its manifest (``extra.published``) lists the differences. Other files are links
to the originals. The local directory is only read.

During training, a checkpoint is linked (or copied) beside the output directory and uploaded by a thread, so that it can
be rotated out during the upload. As in transformers, a checkpoint that is written during another upload is not pushed.
A failed push is reported and does not end the training; the push of the result must succeed.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shlex
import shutil
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal, get_args

from huggingface_hub import get_token

from hf_rocm_tune.errors import CommandParser, CorruptionError, Interrupted, TuneError, UsageError
from hf_rocm_tune.publish import say
from hf_rocm_tune.publish.card import CARD_NAME, clean_card, is_hub_id, published_name
from hf_rocm_tune.publish.history import REPORT_NAME, checkpoints, run_settings, unrecovered
from hf_rocm_tune.publish.hub import HubError, Pushed, Repository, Say, Staged
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


@dataclass(frozen=True, kw_only=True)
class PushSettings:
    """How to push."""

    private: bool | None = None  # True refuses a public repository, False makes a new one public, None a private one
    revision: str = "main"  # branch; created if it does not exist
    tags: tuple[str, ...] = ()  # for the commit
    message: str = "Upload with hf-rocm-tune"  # first line of the commit
    base_model_id: str | None = None  # the base model's id on the Hub, where it was loaded from a directory
    checkpoints: Checkpoints = "none"  # beside the result: the "last" one as ``last-checkpoint``, or "all"

    def __post_init__(self) -> None:
        if self.base_model_id is not None and not is_hub_id(self.base_model_id):
            raise ValueError(f"base_model_id must be an id on the Hub such as ORG/NAME, got {self.base_model_id!r}")
        if self.checkpoints not in get_args(Checkpoints):
            raise ValueError(f"checkpoints must be one of {', '.join(get_args(Checkpoints))}, got {self.checkpoints!r}")
        if not self.message.strip() or not self.revision:
            raise ValueError("message and revision must not be empty")


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
    base = settings.base_model_id
    check_directory(directory)
    private = private_here(directory, repo_id=repo_id, base_model_id=base, token=token)
    repository = Repository(repo_id, private, say, token=token, revision=settings.revision)
    with TemporaryDirectory(prefix="hf-rocm-tune-push-") as scratch:
        staged = _stage_all(directory, Path(scratch), settings, private)
        amount = sum(entry.bytes for each in staged for _, entry in each.files.values())
        say(f"push to {repo_id}, branch {settings.revision}: {amount / 1e6:.3g} MB")
        for each in staged:
            for line in each.described():
                say(line)
        repository.open(private=settings.private)
        done = repository.upload(staged, message=settings.message)
    for tag in settings.tags:
        repository.tag(tag, done.commit)
    return done


def _stage_all(directory: Path, scratch: Path, settings: PushSettings, private: Private) -> list[Staged]:
    """Prepare the result, and the checkpoints that the settings ask for."""
    staged = []
    for prefix, source in [("", directory), *_checkpoints(directory, settings.checkpoints)]:
        folder = scratch / (prefix or "top")
        folder.mkdir(parents=True)
        base, written = settings.base_model_id, check_directory(source)
        staged.append(stage(source, written, folder, private=private, prefix=prefix, base_model_id=base))
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
        config = json.loads((directory / "adapter_config.json").read_text(encoding="utf-8"))
        base = config.get("base_model_name_or_path")
        if isinstance(base, str) and os.path.isabs(base):
            paths[base] = base_model_id or ""
    paths[str(directory.absolute())] = repo_id
    logged_in = get_token() if token is None else None
    return Private.of_this_machine(os.environ, paths=paths, secrets=[token, logged_in])


def _checkpoints(directory: Path, which: Checkpoints) -> list[tuple[str, Path]]:
    """Folder on the Hub and directory here of each checkpoint to push."""
    if which == "none":
        return []
    paths = checkpoints(directory)
    if not paths:
        raise UsageError(f"--checkpoints {which}: there is no checkpoint-N in {directory}; leave the flag out")
    return [(LAST_CHECKPOINT, paths[-1])] if which == "last" else [(f"{path.name}/", path) for path in paths]


# ---- what is refused ------------------------------------------------------------------------------------------------


def check_directory(directory: Path) -> Manifest:
    """The manifest of a directory whose files equal it, except a model card, which may have been edited.

    Raises:
        UsageError: there is no such directory, it is not complete, or a file differs from its manifest.
        CorruptionError: the run's report lists corruption that was not recovered.
    """
    if not directory.is_dir():
        raise UsageError(f"{directory} is not a directory: name the --output_dir of a run, or one of its checkpoints")
    found = manifest.inspect(directory)
    if found.manifest is None:
        problem = found.problems[0]
        why = "no run has finished there" if problem.kind == "missing" else str(problem)
        raise UsageError(
            f"{directory} has no valid {MANIFEST_NAME} ({why}), so it is unknown whether its files are what was "
            "trained: let the run end, or name one of its checkpoints (checkpoint-N)"
        )
    lost = [
        one
        for one in found.problems
        if not one.file.endswith(".md") and not (one.kind == "missing" and one.file in _LEFT_OUT)
    ]
    if lost:
        more = f" and {len(lost) - 1} more" if len(lost) > 1 else ""
        raise UsageError(f"{directory}: {lost[0]}{more}: the files are not what was trained, so nothing is uploaded")
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
    return found.manifest


# ---- the copy -------------------------------------------------------------------------------------------------------


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
    """Prepare the upload of a directory, whose manifest was verified, in an empty one.

    Args:
        private: what must not be in it.
        prefix: folder on the Hub, see `Staged`; files that only a resume needs go into a folder only.
        base_model_id: see `PushSettings`.
        durable: the originals may be deleted before the copy (by rotation of checkpoints).

    Raises:
        UsageError: a file cannot be read or differs from the manifest, the card is not valid, or a file that cannot be
            rewritten contains private names.
    """
    left_out = {name: why for name, why in _LEFT_OUT.items() if (directory / name).exists()}
    left_out |= {} if prefix else {n: "for resuming only" for n in written.files if n.startswith(_RESUME_ONLY)}
    # The card may have been deleted since.
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
        created=written.created,  # so that the same push makes no second commit
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
    """The text to upload instead of the file; None to upload the file. Records the changes."""
    if name == CARD_NAME:
        if source.is_symlink():  # the only file that may differ from the manifest
            raise UsageError(
                f"{source} is a link, so it is unknown what it would publish: replace it by the file itself"
            )
        before = _text_of(source, None)
        after, changes = clean_card(before, private, base_model_id=base_model_id)
        if after != before:
            changed[name] = "; ".join(changes)
        return after
    if name.endswith(".json") and name not in _VOCABULARIES:
        try:
            content = json.loads(_text_of(source, entry))
        except ValueError as error:
            raise UsageError(f"{source} is not JSON: {error}") from error
        public = dict(content) if isinstance(content, dict) else content
        for key in _BASE_KEYS if isinstance(content, dict) else ():
            base = content.get(key)
            if isinstance(base, str) and base and private.is_local(base):
                # Its id, else the last part of its path.
                public[key] = published_name(base, private, base_model_id) or Path(base).name
        public = scrub_json(public, private, names=name == REPORT_NAME)
        if public != content:
            changed[name] = _difference(content, public)
            return json.dumps(public, indent=2, ensure_ascii=False) + "\n"
        return None
    if what := find_in_file(source, private):
        raise UsageError(
            f"{source} holds {what}, and files of this kind cannot be rewritten: remove it before you publish the file"
        )
    return None


def _text_of(source: Path, entry: FileEntry | None) -> str:
    """The text of a file, whose bytes are those that the manifest lists; without an entry they may be others."""
    content = read_plain(source)
    if entry is not None and hashlib.sha256(content).hexdigest() != entry.sha256:
        raise _not_as_written(source)
    try:
        return content.decode()
    except UnicodeDecodeError as error:
        raise UsageError(f"{source} is not UTF-8 text: {error}") from error


def _not_as_written(source: Path) -> UsageError:
    return UsageError(f"{source} differs from {MANIFEST_NAME}: it is damaged, or being written")


def _difference(before: Any, after: Any) -> str:
    """The changed settings, by name; the old values are private."""
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

    Args:
        args: ``TrainingArguments``, of which ``output_dir`` and the ``hub_*`` settings are read.
        base_model_id: of the result, see `PushSettings`.
        local: paths that the run was given, each with its public replacement ("" for the last part).
        token: None for HF_TOKEN or the one of `hf auth login`.
        say: takes lines for the user, from any thread.

    Attributes:
        alive: called every few seconds while the training waits for a push.

    Raises:
        UsageError: a setting is not valid.
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
            self._settings = PushSettings(
                private=args.hub_private_repo, revision=revision, message="End of training", base_model_id=base_model_id
            )
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
        """Create the repository, before anything else takes time. A Hub that does not answer is reported and retried
        later.

        Raises:
            UsageError: token, name or settings are wrong.
        """
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
        self._missing, base, root = True, self._settings.base_model_id, create_staging(self._output_dir / "push")
        try:
            written, staged = manifest.read(directory), []
            if not isinstance(written, Manifest):
                raise UsageError(str(written))
            for prefix in ("", *folders):
                folder = root / (prefix or "top")
                folder.mkdir()
                staged.append(
                    stage(
                        directory,
                        written,
                        folder,
                        private=self._private,
                        prefix=prefix,
                        base_model_id=base,
                        durable=True,
                    )
                )
        except (TuneError, OSError) as error:
            self._say(f"{directory.name} could not be prepared for its push: {error}. Training continues")
            shutil.rmtree(root, ignore_errors=True)
            return
        # A daemon: an upload that hangs must not keep the process from ending.
        self._thread = threading.Thread(target=self._upload, args=(staged, root, written.step), daemon=True)
        self._thread.start()
        if self._wait_for_each:
            self.wait()

    def result(self, directory: Path) -> Pushed:
        """Push the finished run and the checkpoints of the strategy; returns when everything was checked.

        Raises:
            TuneError: the push failed; the message says where the result is and how to finish.
        """
        root = None
        try:
            self.wait()
            settings = self._settings
            if checkpoints(directory):
                settings = replace(settings, checkpoints=_WHOLE.get(self._strategy, "none"))
            root = create_staging(self._output_dir / "push")
            staged = _stage_all(directory, root, settings, self._private)
            done = self._send(staged, settings.message)
        except KeyboardInterrupt as stop:
            raise Interrupted(f"the push was stopped. {self._how_to_finish(directory)}") from stop
        except (UsageError, HubError, CorruptionError) as error:
            raise type(error)(f"the push failed: {error}. {self._how_to_finish(directory)}") from error
        finally:
            if root is not None:
                shutil.rmtree(root, ignore_errors=True)
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

    def _upload(self, staged: list[Staged], root: Path, step: int) -> None:
        try:
            self._send(staged, f"Training in progress, step {step}")
            self._missing = False
            self._say(f"step {step} is on the Hub: {self._repository.url}")
        except TuneError as error:
            self._say(f"the push of step {step} failed: {error}. Training continues; the next save tries again")
        finally:
            shutil.rmtree(root, ignore_errors=True)

    def _send(self, staged: list[Staged], message: str) -> Pushed:
        for line in (line for each in staged for line in replace(each, prefix="").described()):
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


# ---- the command ----------------------------------------------------------------------------------------------------


def main(argv: Sequence[str], *, again: str = "The same command continues it") -> int:
    """Run ``hf-rocm-tune push``; ``again`` ends the line of a push that failed."""
    wanted = vars(_parser().parse_args(list(argv)))
    directory, repo_id = wanted.pop("directory"), wanted.pop("repo_id")
    try:
        settings = PushSettings(**{**wanted, "tags": tuple(wanted["tags"])})
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
    parser.add_argument(
        "--tag", dest="tags", action="append", default=[], metavar="TAG", help="tag the commit; may be repeated"
    )
    parser.add_argument("--message", default=PushSettings.message, help="first line of the commit")
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
