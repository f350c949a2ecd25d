"""``bench``: what is compared is the same work, bytes are checked, and the output can be read by programs."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from hf_rocm_tune import cli
from hf_rocm_tune.bench import loads, transfers
from hf_rocm_tune.bench.command import byte_size
from hf_rocm_tune.bench.report import Spread, ratios, show_bytes, sizes
from hf_rocm_tune.bench.transfers import HOST, Direction, Send, directions, measure, missing_ways
from hf_rocm_tune.errors import CorruptionError, OutOfMemoryError, StallError, UsageError
from hf_rocm_tune.machine.child import Outcome
from hf_rocm_tune.transfer import Mover

ON_HOST = Direction("host to device", HOST, HOST)


def run(capsys: pytest.CaptureFixture[str], *argv: str) -> tuple[int, str, str]:
    code = cli.main(["bench", *argv])
    printed = capsys.readouterr()
    return code, printed.out, printed.err


def bench(*argv: str) -> tuple[list[str], Any, str]:
    """A benchmark as a process of its own: its lines, the result that the last of them is, and standard error."""
    command = [sys.executable, "-m", "hf_rocm_tune", "bench", *argv]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    return lines, json.loads(lines[-1]), done.stderr


def test_last_line_is_the_json_that_the_file_holds(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "result.json"
    flags = ["transfer", "--device", "cpu", "--max_size", "16KiB", "--repeats", "2", "--json", str(file)]
    code, out, _ = run(capsys, *flags)
    assert code == 0
    result = json.loads(out.splitlines()[-1])
    assert result == json.loads(file.read_text())
    assert set(result) == {
        *("schema", "bench", "command", "machine", "settings", "rows", "notes", "left_out"),
    }
    assert (result["schema"], result["bench"]) == (1, "transfer")
    assert result["command"] == " ".join(["hf-rocm-tune bench", *flags])
    assert {"torch", "accelerate", "hf-rocm-tune", "python"} <= set(result["machine"]["versions"])
    assert result["machine"]["cores"] >= 1 and result["machine"]["memory_gb"] > 0
    assert any("no accelerator" in note for note in result["notes"]), "the CPU's figures are named as such"
    table = out.splitlines()[:-1]
    for row in result["rows"]:
        assert any(row["way"] in line and show_bytes(row["bytes"]) in line for line in table)
        assert row["seconds"]["n"] == 2 and 0 < row["seconds"]["min"] <= row["seconds"]["median"]
    for left in result["left_out"]:
        assert left["reason"] and any(left["what"] in line for line in table)


def test_every_way_is_measured_at_every_size_and_arrives_right() -> None:
    rows = [row for nbytes in (1, 4097, 1 << 16) for row in measure(ON_HOST, nbytes, 2)]
    ways = ["raw pageable", "tensor.to", "ours, unverified", "ours, verified"]
    assert [row["way"] for row in rows] == ways * 3
    assert all(row["wrong"] == 0 and math.isfinite(row["gb_per_s"].median) for row in rows)
    reference = [row for row in rows if row["way"] == row["reference"]]
    assert [row["speed_to_reference"].median for row in reference] == [1, 1, 1]


def test_ours_verifies_on_one_side_only(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[str, float, float]] = []
    stock = Mover.close

    def close(self: Mover) -> None:
        weights = self.report.to_dict()["weights"]
        seen.append((self.settings.verify, weights["bytes"], weights["verified_bytes"]))
        stock(self)

    monkeypatch.setattr(Mover, "close", close)
    measure(ON_HOST, 4096, 1)
    (off, moved, unverified), (full, moved_too, verified) = seen
    assert (off, unverified, full) == ("off", 0, "full")
    assert moved == moved_too == verified > 0


def test_wrong_bytes_are_counted_and_said(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    stock = transfers.prepare

    def prepare(direction: Direction, source: torch.Tensor, movers: Any) -> dict[str, Send]:
        return {**stock(direction, source, movers), "zeroing": lambda: torch.zeros_like(source)}

    monkeypatch.setattr(transfers, "prepare", prepare)
    code, out, _ = run(capsys, "transfer", "--device", "cpu", "--max_size", "4KiB", "--repeats", "3")
    assert code == 0
    rows = json.loads(out.splitlines()[-1])["rows"]
    assert {row["way"]: row["wrong"] for row in rows if row["wrong"]} == {"zeroing": 3}
    assert "3 copies ARRIVED WRONG" in out


@pytest.mark.gpu
def test_on_an_accelerator_every_way_is_there() -> None:
    found, _ = directions(torch.device("cuda", 0))
    for direction in found:
        names = [row["way"] for row in measure(direction, 1 << 16, 1)]
        assert {"tensor.to", "send_to_device"} <= set(names)
        if direction.source.type == "cpu":
            assert {"raw pinned", "raw pageable", "ours, unverified", "ours, verified"} <= set(names)
        assert not {what.rpartition(", ")[2] for what in missing_ways(direction)} & set(names)


def test_sizes_reach_the_largest_and_do_not_pass_it() -> None:
    assert sizes(4096, 4096) == [4096]
    assert sizes(4096, 100_000) == [4096, 16384, 65536, 100_000]
    assert sizes(4096, 1 << 30)[-2:] == [1 << 28, 1 << 30]


@pytest.mark.parametrize(
    ("text", "nbytes"), [("4096", 4096), ("4k", 4096), ("4KiB", 4096), ("1.5 MB", 3 << 19), ("1G", 1 << 30)]
)
def test_sizes_are_read_as_people_write_them(text: str, nbytes: int) -> None:
    assert byte_size(text) == nbytes


def test_a_result_that_finds_no_room_is_printed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "full.json").symlink_to("/dev/full")
    flags = ["--device", "cpu", "--max_size", "4KiB", "--repeats", "1", "--json", str(tmp_path / "full.json")]
    code, out, err = run(capsys, "transfer", *flags)
    assert code == 2 and "full.json cannot be written" in err
    assert json.loads(out.splitlines()[-1])["bench"] == "transfer"


@pytest.mark.parametrize(
    ("argv", "named"),
    [
        ([], ["transfer|load|step"]),
        (["transfers"], ["transfers"]),
        (["transfer", "--max_size", "many"], ["--max_size", "'many'", "64KiB"]),
        (["transfer", "--max_size", "1KiB"], ["--max_size", "4 KiB"]),
        (["transfer", "--max_size", "1000000G"], ["--max_size", "memory"]),
        (["transfer", "--repeats", "0"], ["--repeats", "0"]),
        (["transfer", "--device", "tpu9"], ["--device", "tpu9"]),
        (["transfer", "--device", "cuda:77"], ["--device", "cuda:77"]),
        (["transfer", "--device", "meta"], ["--device", "meta"]),
        (["transfer", "--json", "no/such/directory/x.json"], ["--json", "no/such/directory"]),
        (["load", "--scale", "2"], ["--scale", "2"]),
        (["load", "--repeats", "0"], ["--repeats"]),
        (["load", "--dir", "no/such/directory"], ["--dir"]),
        *(
            ([kind, flag, value], [flag])
            for kind in ("step", "comm", "sft")
            for flag, value in (("--hidden", "100"), ("--hidden", "0"), ("--turns", "-1"), ("--steps", "0"))
        ),
        (["step", "--turns", "0"], ["--turns"]),
        (["step", "--sentinel_every", "-1"], ["--sentinel_every"]),
        (["comm", "--repeats", "0"], ["--repeats"]),
        (["sft", "--steps", "1"], ["--steps"]),
        (["sft", "--gib", "0"], ["--gib"]),
        (["sft", "--device", "cpu", "--model", "./no/such/model"], ["--model ./no/such/model"]),
        (["comm", "--max_size", "100"], ["--max_size"]),
    ],
)
def test_wrong_input_is_one_line_and_code_2(
    argv: list[str], named: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, err = run(capsys, *argv)
    assert (code, out) == (2, "")
    assert err.count("\n") == 1
    assert all(name in err for name in named), err


def test_help_imports_no_torch() -> None:
    code = (
        "import sys; from hf_rocm_tune import cli\n"
        "try: cli.main(['bench', 'load', '--help'])\n"
        "except SystemExit as end: assert not end.code\n"
        "assert 'torch' not in sys.modules\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert "--load_in_4bit" in done.stdout


def test_spread_and_ratios() -> None:
    assert Spread.of([3.0]) == Spread(median=3, q1=3, q3=3, min=3, max=3, n=1)
    found = Spread.of([5.0, 1.0, 4.0, 2.0, 3.0])
    assert (found.min, found.q1, found.median, found.q3, found.max, found.n) == (1, 2, 3, 4, 5, 5)
    assert ratios([2.0, 9.0], [1.0, 3.0]).median == 2.5, "pair by pair, not of the medians"
    with pytest.raises(ValueError, match="zip"):
        ratios([1.0], [1.0, 2.0])
    assert Spread(**found.to_dict()) == found


# ---- load: the checkpoint is a real one, and the two sides load the same -------------------


TINY = loads.config_for(loads.SMALLEST_SCALE)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny checkpoint as the benchmark builds it."""
    folder = tmp_path_factory.mktemp("checkpoint")
    loads.write(TINY, folder)
    return folder


def spec(model: Path, side: str, *, load_in_4bit: bool = False) -> dict[str, Any]:
    return {"model": str(model), "side": side, "device": "cpu", "verify": "full", "load_in_4bit": load_in_4bit}


def test_full_scale_is_llama_8b() -> None:
    config = loads.config_for(1)
    assert loads.checkpoint_bytes(config) == 2 * 8_030_261_248, "as Llama-3.1-8B has"
    assert (config.hidden_size, config.intermediate_size, config.num_hidden_layers) == (4096, 14336, 32)
    assert (config.num_attention_heads, config.num_key_value_heads, config.vocab_size) == (32, 8, 128256)


@pytest.mark.parametrize("scale", [1 / 2048, 0.001, 1 / 64, 0.03, 1 / 16, 0.5, 1])
def test_scale_is_about_what_is_asked_for(scale: float) -> None:
    assert 0.4 < loads.checkpoint_bytes(loads.config_for(scale)) / (scale * 16.06e9) < 2.2


def test_default_scale_fits_its_budget() -> None:
    for budget in (2e7, 3e8, 1.2e9, 5e9, 17e9, 1e12):
        assert loads.checkpoint_bytes(loads.config_for(loads.largest_scale(budget))) <= budget


def test_checkpoint_is_complete_and_real(model: Path) -> None:
    from transformers import AutoModelForCausalLM

    assert len(list(model.glob("*.safetensors"))) == loads.SHARDS
    loaded, found = AutoModelForCausalLM.from_pretrained(model, dtype="auto", output_loading_info=True)
    assert not any(found[name] for name in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert {parameter.dtype for parameter in loaded.parameters()} == {torch.bfloat16}
    nbytes = loads.checkpoint_bytes(TINY)
    assert sum(parameter.numel() for parameter in loaded.parameters()) == nbytes // 2
    sizes = [file.stat().st_size for file in model.glob("*.safetensors")]
    assert sum(sizes) >= nbytes and min(sizes) > nbytes / loads.SHARDS / 3, "shards of about the same size"
    assert all(bool(parameter.isfinite().all()) for parameter in loaded.parameters())


@pytest.mark.parametrize("load_in_4bit", [False, True])
def test_both_sides_load_and_only_ours_verifies(model: Path, load_in_4bit: bool) -> None:
    stock, ours = (loads.measure(spec(model, side, load_in_4bit=load_in_4bit)) for side in ("stock", "ours"))
    assert (stock["verified_share"], ours["verified_share"]) == (None, 1.0)
    for one in (stock, ours):
        assert 0 < one["seconds_load"] <= one["seconds_to_forward"]
    if not load_in_4bit:  # a CPU with AVX512-BF16 repacks the stock model's 4-bit weights
        assert stock["logits"] == ours["logits"]


@pytest.mark.long
def test_the_command_compares_both_sides_and_removes_its_checkpoint(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ["load", "--device", "cpu", "--scale", "0.0005", "--repeats", "1"]
    code = cli.main(["bench", *flags, "--dir", str(tmp_path)])
    printed = capsys.readouterr()
    assert code == 0, printed.err
    result = json.loads(printed.out.splitlines()[-1])
    assert [row["side"] for row in result["rows"]] == ["stock", "ours"]
    stock, ours = result["rows"]
    assert stock["logits"] == ours["logits"]
    assert (stock["seconds_to_stock"]["median"], ours["verified_share"]) == (1, 1)
    assert result["settings"]["shape"]["bytes"] == stock["bytes"] == ours["bytes"]
    assert any("scale as given" in note for note in result["notes"])
    assert list(tmp_path.iterdir()) == []


def test_memory_that_loading_takes_is_seen(model: Path) -> None:
    row = loads.measure(spec(model, "ours"))
    assert row["host_added"] >= 0
    before = loads._peak_memory()
    block = torch.ones(64 << 20)
    assert loads._peak_memory() - before >= 48 << 20
    del block


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


# ---- step: all sides train the same, and differ in what they verify only ------------------------------------


STEP_FLAGS = (
    *("--device", "cpu", "--hidden", "64", "--layers", "1", "--batch", "1", "--seq", "16"),
    *("--turns", "2", "--steps", "3", "--sentinel_every", "2"),
)


@pytest.mark.long
def test_sides_train_the_same_and_verify_what_they_say() -> None:
    lines, result, said = bench("step", *STEP_FLAGS)
    rows = {row["side"]: row for row in result["rows"]}
    assert list(rows) == ["off", "off again", "sample", "full"]
    assert all(any(line.startswith(side + " ") for line in lines) for side in rows)
    share = {side: row["batch_verified_bytes"] / row["batch_bytes"] for side, row in rows.items()}
    assert share["off"] == share["off again"] == 0 < share["sample"] < share["full"] == 1
    assert len({row["training_loss"] for row in rows.values()}) == 1, "verification changes no bit"
    assert {row["seconds"]["n"] for row in rows.values()} == {6}, "two turns of three steps"
    assert rows["off"]["ratio"]["max"] == rows["off"]["ratio"]["min"] == 1
    assert result["settings"]["parameters"] > 0
    assert sum("goal: " in note for note in result["notes"]) == 1
    assert "Warning" not in said, said


# ---- comm: every way gives the right average, and all trainings on two ranks are the same -------------------


COMM_FLAGS = (
    *("--device", "cpu", "--max_size", "20K", "--repeats", "2", "--hidden", "64", "--layers", "1"),
    *("--batch", "1", "--seq", "16", "--turns", "1", "--steps", "2"),
)


@pytest.mark.long
def test_all_ways_are_measured_and_right() -> None:
    lines, result, _ = bench("comm", *COMM_FLAGS)
    averages = [row for row in result["rows"] if row["part"] == "average"]
    assert {row["bytes"] for row in averages} == {1024, 4096, 16384, 20480}
    ways = {"gloo", "host, unverified", "host", "host, fp16", "host, bf16"}
    assert {row["way"] for row in averages} == ways and len(averages) == 4 * len(ways)
    assert all(row["wrong"] == 0 and row["seconds"]["n"] == 2 for row in averages)
    training = {row["way"]: row for row in result["rows"] if row["part"] == "training"}
    assert [row["ranks"] for row in training.values()] == [1] + [2] * 7
    same = {training[way]["loss"] for way in ("ddp", "ddp, again", "ddp, checked", "host, unverified", "host")}
    assert len(same) == 1, "averages through the host are those of the process group, bit for bit"
    assert training["host, bf16"]["loss"] not in same
    host = training["host"]
    assert host["bytes_between_ranks_per_step"] == host["trainable_bytes"] > 0
    assert host["bytes_to_host_and_back_per_step"] == 2 * host["trainable_bytes"]
    assert training["host, bf16"]["bytes_between_ranks_per_step"] * 2 == host["trainable_bytes"]
    assert {row["seconds"]["n"] for row in training.values()} == {2}
    assert all(any(line.startswith(way + " ") for line in lines) for way in training)
    assert sum("goal: " in note for note in result["notes"]) == 1
    assert result["left_out"][0]["what"] == "RCCL or NCCL"


# ---- sft: whole processes, one training ---------------------------------------------------------------------

SFT_FLAGS = ("--device", "cpu", "--hidden", "64", "--layers", "1", "--batch", "2", "--seq", "16")


@pytest.mark.long
def test_all_sides_fine_tune_alike_and_are_measured(tmp_path: Path) -> None:
    lines, result, _ = bench("sft", *SFT_FLAGS, "--turns", "1", "--steps", "4", "--json", str(tmp_path / "r.json"))
    assert json.loads((tmp_path / "r.json").read_text()) == result
    rows = {row["side"]: row for row in result["rows"]}
    assert list(rows) == ["bare loop", "trl sft", "ours, unverified", "ours, verified", "ours, auto_fit plan"]
    assert all(any(line.startswith(side + " ") for line in lines) for side in rows)
    for row in rows.values():
        assert row["steps"] == 4 and row["tokens_per_second"]["n"] == 1
        assert row["seconds"]["min"] > 0 and row["seconds_to_first_step"]["min"] > 0 and row["host_peak"] > 50 << 20
        assert row["cpu_seconds"]["median"] >= 0 and math.isfinite(row["loss"])
        # three steps of 32 tokens lie between the first and the last
        assert row["tokens_per_second"]["max"] == pytest.approx(96 / row["seconds"]["min"], rel=1e-3)
    assert rows["ours, verified"]["loss"] == rows["ours, unverified"]["loss"]
    assert rows["trl sft"]["loss"] == pytest.approx(rows["ours, verified"]["loss"], abs=2e-3)
    assert rows["trl sft"]["tokens_per_second_to_trl"]["max"] == 1
    chosen = rows["ours, auto_fit plan"]["chosen"]
    assert chosen["micro_batch"] * chosen["accumulation"] == 2
    notes = " ".join(result["notes"])
    assert "both end with the same loss" in notes and "verified to unverified: " in notes
    assert rows["ours, verified"]["largest_difference_of_losses"] <= 2e-3


@pytest.mark.long
def test_qlora_of_the_sides_that_are_wanted(tmp_path: Path) -> None:
    flags = ("--turns", "1", "--steps", "2", "--load_in_4bit", "--own_dropout", "--gib", "3", "--sides", "bare", "plan")
    _, result, _ = bench("sft", *SFT_FLAGS, *flags)
    rows = {row["side"]: row for row in result["rows"]}
    assert list(rows) == ["bare loop", "trl sft", "ours, auto_fit plan"]
    assert rows["ours, auto_fit plan"]["chosen"]["budget_bytes"] == 3 << 30


def test_a_side_that_fails_is_one_line_with_its_own_last_words(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "llama", "vocab_size": 64}')
    command = [sys.executable, "-m", "hf_rocm_tune", "bench", "sft", *SFT_FLAGS, "--model", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 2 and done.stdout == ""
    last = done.stderr.splitlines()[-1]
    assert "bare loop failed: " in last and "no file named model.safetensors" in last and "Traceback" not in last
