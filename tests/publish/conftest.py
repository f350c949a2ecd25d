"""Fixtures of the tests of publishing: the Hub on loopback, and an adapter with its base that many tests share."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import huggingface_hub
import pytest
from huggingface_hub.utils import _http as upstream_http
from huggingface_hub.utils import disable_progress_bars, enable_progress_bars

from hf_rocm_tune.publish.generate import Loaded, Settings, loaded_model
from tests import tiny
from tests.e2e.command import CommandServer
from tests.publish.hub_server import LoopbackHub, loopback_hub, use
from tests.publish.merge_cases import lora, merged
from tests.publish.strangers import Place


@pytest.fixture(scope="session")
def made(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A base, its adapter with a tokenizer, both merged, and a model without a chat template."""
    scratch = tmp_path_factory.mktemp("made")
    base, adapter, out, _ = merged(lora("llama3"), scratch, "adapter")
    tiny.build_tokenizer().save_pretrained(adapter)
    bare = tiny.build("llama3", scratch / "models", chat_template=False)
    return {"base": base, "adapter": adapter, "merged": out, "bare": bare, "scratch": scratch}


@pytest.fixture(scope="module")
def loaded(made: dict[str, Path]) -> Iterator[Loaded]:
    """The adapter of `made`, loaded."""
    with loaded_model(Settings(model=str(made["adapter"]), max_new_tokens=6, temperature=0), lambda _: None) as model:
        yield model


@pytest.fixture
def place(made: dict[str, Path], server: CommandServer, tmp_path: Path) -> Place:
    """A stranger's package, to be spoilt."""
    return Place(made, server, tmp_path)


@pytest.fixture(name="hub")
def loopback(monkeypatch: pytest.MonkeyPatch) -> Iterator[LoopbackHub]:
    """A Hub without Xet, which this process uses. Only waits are shortened."""
    disable_progress_bars()
    monkeypatch.setattr(upstream_http, "time", SimpleNamespace(sleep=lambda seconds: time.sleep(seconds / 100)))
    with loopback_hub() as server:
        use(server, monkeypatch)
        yield server
    huggingface_hub.close_session()
    enable_progress_bars()
    logging.getLogger("huggingface_hub").setLevel(logging.WARNING)
