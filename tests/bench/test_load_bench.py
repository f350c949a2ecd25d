"""``bench load``: the checkpoint is a real one, the two sides load the same, and cold means cold."""

from __future__ import annotations

import json
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest
import torch

from hf_rocm_tune import cli
from hf_rocm_tune.bench import loads
from hf_rocm_tune.bench.loads import PeakMemory, measure
from hf_rocm_tune.errors import CorruptionError, OutOfMemoryError, StallError, UsageError
from hf_rocm_tune.machine.child import Outcome

TINY = loads.Shape(groups=1, head=64, vocabulary=128, layers=2)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny checkpoint as the benchmark builds it."""
    folder = tmp_path_factory.mktemp("checkpoint")
    loads.write(TINY, folder)
    return folder


def spec(model: Path, side: str, *, load_in_4bit: bool = False) -> dict[str, Any]:
    return {"model": str(model), "side": side, "device": "cpu", "verify": "full", "load_in_4bit": load_in_4bit}


def test_full_scale_is_llama_8b() -> None:
    shape = loads.shape_for(1)
    config = shape.config()
    assert shape.parameters == 8_030_261_248, "as Llama-3.1-8B has"
    assert (config.hidden_size, config.intermediate_size, config.num_hidden_layers) == (4096, 14336, 32)
    assert (config.num_attention_heads, config.num_key_value_heads, config.vocab_size) == (32, 8, 128256)


@pytest.mark.parametrize("scale", [1 / 4096, 0.001, 1 / 64, 0.03, 1 / 16, 0.5, 1])
def test_scale_is_about_what_is_asked_for(scale: float) -> None:
    shape = loads.shape_for(scale)
    assert 0.4 < shape.parameters / (scale * 8.03e9) < 2.2
    assert shape.head in (64, 128) and shape.hidden == 4 * shape.groups * shape.head


def test_default_scale_fits_its_budget() -> None:
    for budget in (2e7, 3e8, 1.2e9, 5e9, 17e9, 1e12):
        assert loads.shape_for(loads.largest_scale(budget)).nbytes <= budget


def test_checkpoint_is_complete_and_real(model: Path) -> None:
    from transformers import AutoModelForCausalLM

    assert len(list(model.glob("*.safetensors"))) == loads.SHARDS
    loaded, found = AutoModelForCausalLM.from_pretrained(model, dtype="auto", output_loading_info=True)
    assert not any(found[name] for name in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert {parameter.dtype for parameter in loaded.parameters()} == {torch.bfloat16}
    assert sum(parameter.numel() for parameter in loaded.parameters()) == TINY.parameters
    assert sum(file.stat().st_size for file in model.glob("*.safetensors")) >= TINY.nbytes
    assert all(bool(parameter.isfinite().all()) for parameter in loaded.parameters())


@pytest.mark.parametrize("load_in_4bit", [False, True])
def test_both_sides_load_and_only_ours_verifies(model: Path, load_in_4bit: bool) -> None:
    stock, ours = (measure(spec(model, side, load_in_4bit=load_in_4bit)) for side in ("stock", "ours"))
    assert (stock["verified_share"], ours["verified_share"]) == (None, 1.0)
    for one in (stock, ours):
        assert 0 < one["seconds_load"] <= one["seconds_to_forward"]
    if not load_in_4bit:  # a CPU with AVX512-BF16 repacks the stock model's 4-bit weights
        assert stock["logits"] == ours["logits"]


@pytest.mark.long
def test_the_command_compares_both_sides_and_removes_its_checkpoint(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ["load", "--device", "cpu", "--scale", "0.0003", "--repeats", "1", "--caches", "warm"]
    code = cli.main(["bench", *flags, "--dir", str(tmp_path)])
    printed = capsys.readouterr()
    assert code == 0, printed.err
    result = json.loads(printed.out.splitlines()[-1])
    assert [(row["cache"], row["side"]) for row in result["rows"]] == [("warm", "stock"), ("warm", "ours")]
    stock, ours = result["rows"]
    assert stock["logits"] == ours["logits"]
    assert (stock["seconds_to_stock"]["median"], ours["verified_share"]) == (1, 1)
    assert result["settings"]["shape"]["bytes"] == stock["bytes"] == ours["bytes"]
    assert any("scale as given" in note for note in result["notes"])
    assert list(tmp_path.iterdir()) == []


def test_cold_is_cold_and_warm_is_warm(tmp_path: Path) -> None:
    file = tmp_path / "weights"
    file.write_bytes(bytes(4 << 20))
    reason = loads.drop([file])
    if reason is not None:
        assert "page cache" in reason or "posix_fadvise" in reason
        pytest.skip(reason)
    assert loads.cached_share([file]) == 0
    loads.warm([file])
    assert loads.cached_share([file]) == 1


@pytest.mark.skipif(not Path("/dev/shm").is_dir(), reason="this system has no file system in memory at /dev/shm")
def test_a_cache_that_cannot_be_dropped_is_said(tmp_path: Path) -> None:
    file = Path("/dev/shm") / f"{tmp_path.parent.name}-{tmp_path.name}"
    try:
        file.write_bytes(bytes(1 << 20))
        assert "100 %" in str(loads.drop([file]))
    finally:
        file.unlink()


def test_cold_is_left_out_with_the_reason(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loads, "drop", lambda files: "it stays")
    bench = Namespace(caches=("cold",), verify="full", load_in_4bit=False, repeats=1)
    samples, left_out = loads._measure(bench, torch.device("cpu"), model, [])
    assert (samples, left_out) == ({}, [{"what": "cold page cache", "reason": "it stays"}])


def test_peak_of_anonymous_memory_is_seen() -> None:
    with PeakMemory() as memory:
        block = torch.ones(16 << 20)
        del block
    before, peak = memory.before["resident"], memory.peak["resident"]
    if before is None:
        pytest.skip("this system does not tell the memory of a process")
    assert memory.peak["anonymous"] is not None and peak is not None
    assert peak - before >= 48 << 20


@pytest.mark.parametrize(
    ("outcome", "kind", "says"),
    [
        (Outcome(status="died", code=2, error="UsageError: because"), UsageError, "loading (ours): because"),
        (Outcome(status="died", code=3, error="CorruptionError: x"), CorruptionError, "loading (ours): x"),
        (Outcome(status="died", code=5, error="OutOfMemoryError: x"), OutOfMemoryError, "loading (ours): x"),
        (Outcome(status="died", code=-9), OutOfMemoryError, "--scale"),
        (Outcome(status="timeout", seconds=9), StallError, "had not ended after 9 s"),
        (Outcome(status="died", code=1, tail="Traceback: here"), RuntimeError, "Traceback: here"),
    ],
)
def test_how_a_child_ends_is_passed_on(
    outcome: Outcome, kind: type[Exception], says: str, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loads.child, "run", lambda *_, **__: outcome)
    with pytest.raises(kind) as caught:
        loads._load(spec(model, "ours"))
    assert type(caught.value) is kind and says in str(caught.value)


@pytest.mark.long
def test_a_child_refuses_what_is_no_model(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"loading .ours.: model"):
        loads._load(spec(tmp_path, "ours"))
