"""One zygote, one set of models and data, and one way of running jobs for all end-to-end tests."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import pytest
import yaml

from hf_rocm_tune.settings.arguments import RanksArguments, TuneArguments
from hf_rocm_tune.survive import manifest
from tests import simcard, tiny
from tests.e2e.command import TIMEOUT, CommandServer, Result, Running
from tests.two_ranks import environments

ADAPTER = "adapter_model.safetensors"


def sampled(values: Iterable[str], *normal: str) -> list[Any]:
    """Values for ``parametrize``: the normal suite has those that are named, the long one has all."""
    return [pytest.param(value, marks=() if value in normal else pytest.mark.long) for value in values]


@pytest.fixture(scope="session")
def scratch(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory for models, data and output of all end-to-end tests."""
    return tmp_path_factory.mktemp("e2e")


@pytest.fixture(scope="session")
def card_server(scratch: Path) -> Iterator[CommandServer]:
    """Runs commands in processes that have a simulated card; ``SIMCARD_*`` variables may differ from run to run."""
    try:
        environment = simcard.environment()
    except simcard.NoCompiler as missing:
        pytest.skip(str(missing))
    started = CommandServer(scratch / "card", environment)
    yield started
    started.close()


@pytest.fixture(scope="session")
def model_of(scratch: Path) -> Callable[[str], Path]:
    """Directory of a tiny model of an architecture, built once."""
    models = scratch / "models"
    return lambda arch: tiny.build_mxfp4(models) if arch == "gpt_oss-mxfp4" else tiny.build(arch, models)


@pytest.fixture(scope="session")
def messages(scratch: Path) -> Path:
    """A directory with train.jsonl (48 rows) and test.jsonl (9 rows) of messages."""
    return tiny.write_dataset_dir(scratch / "messages", train=48, test=9)


@pytest.fixture
def base_flags(messages: Path, tmp_path: Path) -> list[str]:
    """Flags that all small runs share; the output directory is `tmp_path / "out"`."""
    return flags(
        dataset_name=messages,
        output_dir=tmp_path / "out",
        max_steps=4,
        per_device_train_batch_size=2,
        max_length=64,
        logging_steps=1,
        lora_dropout=0.0,
        disable_tqdm=True,
        save_strategy="no",
    )


@dataclass(kw_only=True)
class Job:
    """A training command, and its runs.

    Args:
        server: runs it.
        root: directory of the undisturbed runs.
        settings: flags of each run but for the output directory; None leaves one out.
        env: variables of each run.
        cwd: working directory of each run.
    """

    server: CommandServer
    root: Path
    settings: dict[str, Any]
    env: dict[str, str] = field(default_factory=dict)
    cwd: Path | None = None

    def argv(self, output: Path, *more: str, **changed: Any) -> list[str]:
        """The command line."""
        settings = {"output_dir": output, **self.settings, **changed}
        return [*flags(**{name: value for name, value in settings.items() if value is not None}), *more]

    def start(
        self,
        output: Path,
        *more: str,
        fault: str = "",
        crash: str = "",
        env: dict[str, str] | None = None,
        **changed: Any,
    ) -> Running:
        """Starts the command, with faults of transfers and with a crash."""
        harm = {"HF_ROCM_TUNE_FAULT": fault, "HF_ROCM_TUNE_CRASH": crash}
        environment = {**self.env, **{name: text for name, text in harm.items() if text}, **(env or {})}
        return self.server.start(*self.argv(output, *more, **changed), env=environment, cwd=self.cwd)

    def run(self, output: Path, *more: str, **changed: Any) -> Result:
        """Runs the command to its end."""
        return self.start(output, *more, **changed).wait()

    def done(self, output: Path, *more: str, **changed: Any) -> Result:
        """Runs the command, which must end well."""
        return done(self.run(output, *more, **changed))

    def ranks(
        self, output: Path, *more: str, each: Sequence[dict[str, str]] = ({}, {}), crash: str = "", **changed: Any
    ) -> list[Result]:
        """Runs several ranks as a launcher starts them, but forked, each with variables of its own."""
        common = {**self.env, **({"HF_ROCM_TUNE_CRASH": crash} if crash else {})}
        ranks = environments(output.with_suffix(".exit.json"), each, **common)
        started = [self.start(output, *more, env=env, **changed) for env in ranks]
        return [rank.wait() for rank in started]

    def launched(
        self, config: str, output: Path, env: dict[str, str] | None = None, **changed: Any
    ) -> subprocess.CompletedProcess[str]:
        """The real command line, with a launcher and its configuration."""
        command = [sys.executable, "-m", "hf_rocm_tune", "sft", "--accelerate_config", config]
        environment = {**os.environ, **(env or {})}
        argv = [*command, *self.argv(output, **changed)]
        return subprocess.run(argv, capture_output=True, text=True, check=False, timeout=TIMEOUT, env=environment)

    def clean(self, *more: str, ranks: int = 1, **changed: Any) -> Path:
        """The output of an undisturbed run, made once for each change."""
        output = self.root / "-".join(map(str, ["clean", ranks, *more, *(f"{k}={v}" for k, v in changed.items())]))
        output = output.with_name(output.name.replace("/", "_"))
        if not output.exists():
            made = [self.run(output, *more, **changed)] if ranks == 1 else self.ranks(output, *more, **changed)
            for each in made:
                done(each)
        return output


class MakeJob(Protocol):
    """See `make_job`."""

    def __call__(
        self, name: str, *, arch: str = ..., train: int = ..., test: int = ..., server: Any = ..., **settings: Any
    ) -> Job: ...


@pytest.fixture(scope="session")
def make_job(server: CommandServer, scratch: Path) -> MakeJob:
    """Makes a command for the tests of a file, with data of its own; settings are added to those of all small runs."""

    def make(
        name: str, *, arch: str = "llama3", train: int = 16, test: int = 4, server: Any = server, **settings: Any
    ) -> Job:
        root = scratch / name
        common = {
            "model_name_or_path": tiny.build(arch, scratch / "models"),
            "dataset_name": tiny.write_dataset_dir(root / "data", train=train, test=test),
            "per_device_train_batch_size": 2,
            "max_length": 64,
            "learning_rate": 0.01,
            "logging_steps": 1,
            "disable_tqdm": True,
        }
        return Job(server=server, root=root, settings=common | settings)

    return make


def done(result: Result) -> Result:
    """A result that is good."""
    assert result.code == 0, result.stderr[-3000:]
    return result


def checkpoint(output: Path, step: int) -> Path:
    """Where the checkpoint of a step is."""
    return output / f"checkpoint-{step}"


def assert_covered(report: dict[str, Any]) -> None:
    """Every byte on the device was verified."""
    covered = report["coverage"]
    assert covered["unverified"] == [] and covered["verified_bytes"] == covered["device_bytes"] > 0


def assert_same_run(output: Path, expected: Path) -> None:
    """Adapter and losses are bit for bit those of another run, all bytes were verified, and the result is sealed."""
    assert (output / ADAPTER).read_bytes() == (expected / ADAPTER).read_bytes()
    assert losses_of(output) == losses_of(expected)
    found = manifest.inspect(output)
    assert found.manifest is not None and found.manifest.status == "final" and found.problems == []
    assert {ADAPTER, "transfer_report.json"} <= set(found.manifest.files)
    assert {path.name for path in output.glob("_*")} <= {"_run.lock", "_crashes.json"}
    assert_covered(report_of(output))


def flags(**settings: Any) -> list[str]:
    """``name=value`` pairs as command-line flags."""
    return [part for name, value in settings.items() for part in (f"--{name}", str(value))]


def report_of(output: Path) -> dict[str, Any]:
    """The transfer report of a run."""
    content: dict[str, Any] = json.loads((output / "transfer_report.json").read_text())
    return content


def losses_of(output: Path) -> list[float]:
    """Training losses by step, as the newest checkpoint's state has them."""
    newest = max(output.glob("checkpoint-*"), key=lambda path: int(path.name.split("-")[1]))
    history = json.loads((newest / "trainer_state.json").read_text())["log_history"]
    return [row["loss"] for row in history if "loss" in row]


def settings_for_trl(printed: str, output: Path) -> dict[str, Any]:
    """What ``--print_config`` said, without our own flags: a recipe for stock TRL."""
    own = {field.name for owner in (TuneArguments, RanksArguments) for field in dataclasses.fields(owner)}
    settings = {name: value for name, value in yaml.safe_load(printed).items() if name not in own}
    return {**settings, "output_dir": str(output)}


Start = Callable[..., Result]


@pytest.fixture
def start(server: CommandServer, model_of: Callable[[str], Path], tmp_path: Path) -> Start:
    """Runs a command of a training method; settings may be overridden."""

    def run(*extra: str, method: str = "sft", **settings: Any) -> Result:
        shared = {
            "model_name_or_path": model_of("llama3"),
            "output_dir": tmp_path / "out",
            "max_steps": 1,
            "save_strategy": "no",
            "per_device_train_batch_size": 2,
        }
        return server.run(
            *flags(**shared | settings), *extra, env={} if method == "sft" else {"METHOD": method}, cwd=tmp_path
        )

    return run
