"""Pushes a run's checkpoints while it trains, and its result when it has ended.

A checkpoint is linked (or copied) beside the output directory when it is in place, and uploaded by a thread while the
training goes on; a rotation that deletes it meanwhile takes nothing from the upload. A push that fails is said at once
and ends nothing: what it was to bring is brought with the next one, and the last one, of the result, must succeed.

``hub_strategy`` as transformers has it: "end" pushes only the result; "every_save" the model of each checkpoint;
"checkpoint" also the whole of the newest one, as ``last-checkpoint``; "all_checkpoints" the whole of each. Checkpoints
that come faster than they can be uploaded are pushed together, in one commit, and of several models the newest counts;
``hub_always_push`` makes the training wait for each. Checkpoints are checked by the hashes that the Hub states, the
result byte by byte unless the user wants hashes only.
"""

from __future__ import annotations

import shlex
import shutil
import threading
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

from hf_rocm_tune.errors import CorruptionError, Interrupted, TuneError, UsageError
from hf_rocm_tune.integrity import manifest
from hf_rocm_tune.integrity.atomic import create_staging
from hf_rocm_tune.integrity.manifest import Manifest
from hf_rocm_tune.publish.hub import (
    LAST_CHECKPOINT,
    Checkpoints,
    HubError,
    Pushed,
    PushSettings,
    Repository,
    Say,
    Verify,
    private_here,
)
from hf_rocm_tune.publish.staging import Staged, check_directory, stage

Strategy = Literal["end", "every_save", "checkpoint", "all_checkpoints"]
_EARLY_ATTEMPTS = 2
_HEARTBEAT_S = 5.0
_LAST_SECONDS = 10.0


class Publisher:
    """Pushes one run. Only the first rank of a job has one.

    Args:
        output_dir: the run's.
        repo_id: ``USER/NAME``, or ``NAME``.
        strategy: see the module's description.
        settings: for the result.
        wait_for_each: the training waits until a checkpoint is pushed.
        local: paths that the run was given, by what stands for them in public ("" for their last name).
        token: None for HF_TOKEN or the one of `hf auth login`.
        say: takes lines for the user, from any thread.

    Attributes:
        alive: called every few seconds while the training waits for a push.
    """

    def __init__(
        self,
        output_dir: Path,
        repo_id: str,
        *,
        strategy: Strategy = "every_save",
        settings: PushSettings | None = None,
        wait_for_each: bool = False,
        local: Mapping[str, str] | None = None,
        token: str | None = None,
        say: Say = print,
    ) -> None:
        self._output_dir, self._strategy, self._wait_for_each, self._say = output_dir, strategy, wait_for_each, say
        self._settings = settings or PushSettings()
        self.alive: Callable[[], None] | None = None
        base = self._settings.base_model_id
        self._private = private_here(output_dir, repo_id=repo_id, base_model_id=base, token=token, others=local)
        self._repository = Repository(repo_id, self._private, say, token=token, revision=self._settings.revision)
        self._opened = self._finishing = self._closed = False
        self._lock = threading.Lock()
        self._waiting: dict[str, Staged] = {}  # by prefix
        self._thread: threading.Thread | None = None  # while it uploads
        self._told: set[str] = set()

    @classmethod
    def of(
        cls,
        args: Any,
        *,
        base_model_id: str | None = None,
        verify: Verify = "download",
        local: Mapping[str, str] | None = None,
        token: str | None = None,
        say: Say = print,
    ) -> Publisher:
        """The one that ``TrainingArguments`` describe with their ``hub_*`` settings.

        Raises:
            UsageError: a setting cannot be.
        """
        try:
            settings = PushSettings(
                private=args.hub_private_repo,
                revision=args.hub_revision or "main",
                message="End of training",
                base_model_id=base_model_id,
                verify=verify,
            )
        except ValueError as error:
            raise UsageError(f"--{error}") from error
        return cls(
            Path(args.output_dir),
            args.hub_model_id or Path(args.output_dir).absolute().name,
            strategy=getattr(args.hub_strategy, "value", args.hub_strategy),
            settings=settings,
            wait_for_each=bool(args.hub_always_push),
            local=local,
            token=token,
            say=say,
        )

    @property
    def repo_id(self) -> str:
        """Of the repository; complete once it has been opened."""
        return self._repository.repo_id

    def open(self) -> None:
        """Make the repository, before anything else takes time. A Hub that does not answer is said, and asked later.

        Raises:
            UsageError: token, name or settings are wrong.
        """
        try:
            self._repository.open(private=self._settings.private, attempts=_EARLY_ATTEMPTS)
            self._opened = True
        except HubError as error:
            self._say(f"{error}. Training starts nevertheless, and the push is tried at each save and at the end")

    def checkpoint(self, directory: Path) -> None:
        """Push a checkpoint that is in place, or what the strategy wants of it. The Hub's failures are said."""
        folders = {"checkpoint": [LAST_CHECKPOINT], "all_checkpoints": [f"{directory.name}/"]}.get(self._strategy, [])
        if self._strategy == "end":
            return
        try:
            written = manifest.read(directory)
            if not isinstance(written, Manifest):
                raise UsageError(str(written))
            for prefix in ("", *folders):
                self._prepare(directory, written, prefix)
        except (TuneError, OSError) as error:
            self._say(f"{directory.name} could not be prepared for its push: {error}. Training goes on")
            return
        with self._lock:
            if self._thread is None:
                # A daemon: an upload that hangs must not keep the process from ending.
                self._thread = threading.Thread(target=self._push_waiting, name="push", daemon=True)
                self._thread.start()
        if self._wait_for_each:
            self.wait()

    def result(self, directory: Path) -> Pushed:
        """Push the finished run, and what earlier pushes could not bring; returns when all of it was checked.

        Raises:
            TuneError: it could not be brought; the message says where the result is and how to finish.
        """
        try:
            self._finishing = True  # the result takes the place of a model that waits
            self.wait()
            self._prepare(directory, check_directory(directory), "")
            rest = self._take()
            result = {"": rest.pop("")}
            self._waiting = rest
            done = self._bring(result, message=self._settings.message, verify=self._settings.verify)
            if self._waiting:
                self._bring(self._take(), message="Checkpoints", verify="hashes")
        except KeyboardInterrupt as stop:
            raise Interrupted(f"the push was stopped. {self._how_to_finish(directory)}") from stop
        except (UsageError, HubError, CorruptionError) as error:
            raise type(error)(f"the push failed: {error}. {self._how_to_finish(directory)}") from error
        finally:
            self._end()
        self._say(done.summary)
        return done

    def wait(self) -> None:
        """Until nothing is uploaded any more; what could not be brought still waits for the next push."""
        while (thread := self._thread) is not None:
            thread.join(_HEARTBEAT_S)
            if self.alive is not None:
                self.alive()

    def close(self) -> None:
        """End, and say what was not brought. May be called more than once."""
        if self._end():
            self._say("the newest checkpoint is not on the Hub; the run, when it goes on, pushes the next one")

    def _end(self) -> bool:
        """Whether something is left undone. An upload that is under way gets some seconds more."""
        with self._lock:
            first, self._closed = not self._closed, True
            thread = self._thread
        if thread is not None:
            thread.join(_LAST_SECONDS)
        left = self._take()
        for each in left.values():
            each.drop()
        return first and (bool(left) or (thread is not None and thread.is_alive()))

    def _push_waiting(self) -> None:
        """The thread: pushes what waits until nothing does, or it fails."""
        while True:
            with self._lock:
                if self._finishing or self._closed or not self._waiting:
                    self._thread = None
                    return
                taken, self._waiting = self._waiting, {}
            step = max(each.manifest.step for each in taken.values())
            try:
                self._bring(taken, message=f"Training in progress, step {step}", verify="hashes")
                self._say(f"step {step} is on the Hub: {self._repository.url}")
            except TuneError as error:
                self._say(f"the push of step {step} failed: {error}. Training goes on; the next save tries again")
                with self._lock:
                    if all(taken.get(prefix) is each for prefix, each in self._waiting.items()):  # nothing newer came
                        self._thread = None
                        return
            except BaseException:
                self._thread = None
                raise

    def _take(self) -> dict[str, Staged]:
        with self._lock:
            taken, self._waiting = self._waiting, {}
        return taken

    def _bring(self, taken: dict[str, Staged], *, message: str, verify: Verify) -> Pushed:
        """Push prepared copies; those that could not be brought wait for the next push, unless a newer one is there."""
        try:
            if not self._opened:
                self._repository.open(private=self._settings.private)
                self._opened = True
            done = self._repository.bring(list(taken.values()), message=message, verify=verify)
        except BaseException:
            with self._lock:
                for prefix, each in taken.items():
                    if self._closed or self._waiting.setdefault(prefix, each) is not each:
                        each.drop()
            raise
        for each in taken.values():
            each.drop()
        return done

    def _prepare(self, directory: Path, written: Manifest, prefix: str) -> None:
        """Add a copy to those that wait, in the place of an older one of its folder."""
        root = create_staging(self._output_dir / "push")
        base = self._settings.base_model_id
        try:
            prepared = stage(
                directory, written, root, private=self._private, prefix=prefix, base_model_id=base, durable=True
            )
        except BaseException:
            shutil.rmtree(root, ignore_errors=True)
            raise
        for line in replace(prepared, prefix="").described():  # what holds for one folder holds for all
            if line not in self._told:
                self._told.add(line)
                self._say(line)
        with self._lock:
            older = self._waiting.pop(prefix, None)
            self._waiting[prefix] = prepared
        if older is not None:
            older.drop()

    def _how_to_finish(self, directory: Path) -> str:
        settings = self._settings
        words = ["hf-rocm-tune", "push", str(directory), self.repo_id]
        words += [] if settings.private is None else ["--private"] if settings.private else ["--public"]
        words += ["--revision", settings.revision] if settings.revision != "main" else []
        words += ["--base_model_id", settings.base_model_id] if settings.base_model_id else []
        checkpoints: dict[str, Checkpoints] = {"checkpoint": "last", "all_checkpoints": "all"}
        if self._strategy in checkpoints:
            words += ["--checkpoints", checkpoints[self._strategy]]
        return (
            f"The result is complete in {directory} and nothing of it is lost: `{shlex.join(words)}` finishes the push"
        )
