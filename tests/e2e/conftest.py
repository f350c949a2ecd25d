"""One zygote and one set of models and data for all end-to-end tests."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests import simcard, tiny
from tests.e2e.command import CommandServer


def sampled(values: Iterable[str], *normal: str) -> list[Any]:
    """Values for ``parametrize``: the normal suite has those that are named, the long one has all."""
    return [pytest.param(value, marks=() if value in normal else pytest.mark.long) for value in values]


@pytest.fixture(scope="session")
def scratch(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory for models, data and output of all end-to-end tests."""
    return tmp_path_factory.mktemp("e2e")


@pytest.fixture(scope="session")
def server(scratch: Path) -> Iterator[CommandServer]:
    """Runs commands in processes of their own."""
    started = CommandServer(scratch)
    yield started
    started.close()


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
