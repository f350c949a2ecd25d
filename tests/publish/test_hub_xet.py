"""With Xet: the real hf_xet against a storage of its own on loopback, upload and download; and a Hub that has none.

Not covered: version 2 of Xet's uploads (grants of signed addresses), deduplication against what the Hub holds already,
files of more than one xorb (64 MiB), and a broken connection to the storage (hf_xet has retries of its own).
"""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Iterator
from pathlib import Path

import huggingface_hub
import pytest
from huggingface_hub import hf_hub_download
from huggingface_hub.utils import disable_progress_bars, enable_progress_bars

from hf_rocm_tune.errors import CorruptionError, TuneError
from hf_rocm_tune.publish.hub import PushSettings, push
from tests.publish.hub_fixtures import QUICK, on_hub, use, write_run
from tests.publish.hub_server import TOKEN, USER, LoopbackHub, loopback_hub

REPO = f"{USER}/adapter"


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[LoopbackHub]:
    """A Hub with Xet, which this process uses."""
    disable_progress_bars()
    with loopback_hub(xet=True) as server:
        use(server, monkeypatch, xet=True)
        yield server
    huggingface_hub.close_session()
    enable_progress_bars()


def test_a_push_by_xet_arrives_and_comes_back_by_xet(hub: LoopbackHub, tmp_path: Path) -> None:
    out = write_run(tmp_path / "out", checkpoints=(4,))
    zeros = (out / "checkpoint-4" / "scheduler.pt").stat().st_size  # a file below the smallest chunk is among them
    done = push(out, REPO, settings=PushSettings(checkpoints="all"), say=lambda _: None, patience=QUICK)
    assert zeros < 8192 and hub.lines("POST /v1/xorbs/") and hub.lines("POST /v1/shards")
    assert hub.lines("^PUT|objects/batch") == [], "Git LFS was used"
    there = on_hub(hub, REPO)
    assert there["adapter_model.safetensors"] == (out / "adapter_model.safetensors").read_bytes()
    for name in ("adapter_model.safetensors", "checkpoint-4/optimizer.pt", "checkpoint-4/scheduler.pt"):
        got = hf_hub_download(REPO, name, cache_dir=tmp_path / "cache", revision=done.commit)
        assert Path(got).read_bytes() == (out / name).read_bytes()
    assert hub.lines("GET /v1/reconstructions/"), "the download did not go by Xet"
    again = push(out, REPO, settings=PushSettings(checkpoints="all"), say=lambda _: None, patience=QUICK)
    assert again.sent == 0 and again.commit == done.commit


def test_what_the_storage_serves_wrong_is_found(hub: LoopbackHub, tmp_path: Path) -> None:
    out = write_run(tmp_path / "out")
    digest = hashlib.sha256((out / "adapter_model.safetensors").read_bytes()).hexdigest()

    def damage() -> None:
        if digest in hub.store.objects:
            hub.store.objects[digest] = b"\0" + hub.store.objects[digest][1:]

    hub.fault("GET .*/resolve/", first=damage, times=None)
    with pytest.raises(CorruptionError, match=r"adapter_model\.safetensors arrives with other bytes"):
        push(out, REPO, say=lambda _: None, patience=QUICK)


@pytest.mark.parametrize("match", ["xet-write-token", "POST /.*/commit/", "POST /v1/shards"])
def test_a_500_on_the_way_is_survived(hub: LoopbackHub, tmp_path: Path, match: str) -> None:
    out = write_run(tmp_path / "out")
    fault = hub.fault(match, status=500)
    push(out, REPO, say=lambda _: None, patience=QUICK)
    assert fault.hits >= 1
    assert on_hub(hub, REPO)["adapter_model.safetensors"] == (out / "adapter_model.safetensors").read_bytes()


@pytest.mark.parametrize(
    ("status", "says"), [(401, "does not accept the token"), (403, "may not write"), (404, "HF_HUB_DISABLE_XET=1")]
)
def test_a_storage_that_refuses_is_explained_in_one_line(
    hub: LoopbackHub, tmp_path: Path, status: int, says: str
) -> None:
    out = write_run(tmp_path / "out")
    hub.fault("xet-write-token", status=status, times=None)
    with pytest.raises(TuneError, match=says) as caught:
        push(out, REPO, say=lambda _: None, patience=QUICK)
    assert "\n" not in str(caught.value) and TOKEN not in str(caught.value)


def test_a_hub_without_xet_says_so_and_takes_the_push_when_xet_is_off(
    hub: LoopbackHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = write_run(tmp_path / "out")
    hub.xet = False
    with pytest.raises(TuneError, match="HF_HUB_DISABLE_XET=1"):
        push(out, REPO, say=lambda _: None, patience=QUICK)
    shutil.rmtree(tmp_path / "cache", ignore_errors=True)
    use(hub, monkeypatch, xet=False)
    with pytest.warns(DeprecationWarning, match="content="):  # huggingface_hub 2.4, lfs.py
        push(out, REPO, say=lambda _: None, patience=QUICK)
    assert set(on_hub(hub, REPO)) >= {"adapter_model.safetensors", "integrity.json"}
