"""What a run shows: few lines and a table in a pipe, one live line on a terminal, the same files either way."""

from __future__ import annotations

import json
import os
import re
import select
import termios
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from transformers import TrainerControl, TrainerState, TrainingArguments

from hf_rocm_tune.train.telemetry import TerminalCallback
from tests.e2e.command import CommandServer, log_rows
from tests.e2e.conftest import flags

STEPS = 6
BAR = "/6 [00:"
COUNTERS = ("integrity/mismatches", "integrity/recovered", "integrity/verified_gb")


@pytest.fixture
def argv(messages: Path, tmp_path: Path, model_of: Callable[[str], Path]) -> list[str]:
    return flags(
        model=model_of("llama3"),
        dataset=messages,
        output_dir=tmp_path / "out",
        max_steps=STEPS,
        batch_size=2,
        max_seq_length=64,
        logging_steps=2,
        eval_strategy="steps",
        eval_steps=3,
        save_strategy="no",
    )


def on_terminal(server: CommandServer, argv: list[str], env: dict[str, str] | None = None) -> tuple[int, str]:
    """Runs a command on a terminal of its own; its exit code, and all that the terminal was sent."""
    master, slave = os.openpty()
    termios.tcsetwinsize(master, (40, 100))
    name = os.ttyname(slave)
    request = {"do": "start", "argv": argv, "env": {"TERM": "xterm", "COLUMNS": "100", **(env or {})}, "cwd": "/"}
    pid = server.ask({**request, "stdout": name, "stderr": name})["pid"]
    seen, status, deadline = b"", None, time.monotonic() + 240
    while status is None:
        assert time.monotonic() < deadline, seen
        status = server.ask({"do": "wait", "pid": pid, "timeout": 0.05})["status"]
        while select.select([master], [], [], 0)[0]:
            seen += os.read(master, 65536)
    os.close(slave)
    os.close(master)
    return os.waitstatus_to_exitcode(status), seen.decode()


def screen(sent: str) -> list[str]:
    """The lines that are left on a wide terminal after all that it was sent."""
    lines, row, column = [""], 0, 0
    for part in re.findall(r"\x1b\[[0-9;?]*[A-Za-z]|\r|\n|[^\x1b\r\n]+", sent):
        if part == "\n":
            row += 1
            lines += [""] * (row == len(lines))
        elif part == "\r":
            column = 0
        elif part == "\x1b[2K":
            lines[row] = ""
        elif part.startswith("\x1b"):
            row -= int(part[2:-1] or 1) if part.endswith("A") else 0
        else:
            before, behind = lines[row][:column], lines[row][column + len(part) :]
            lines[row] = f"{before:<{column}}{part}{behind}"
            column += len(part)
    return [line.rstrip() for line in lines]


def messages(lines: list[str]) -> list[str]:
    """Our messages on a screen, whose line breaks stand between words."""
    too_long = [line for line in lines if len(line) >= 100 and max(map(len, line.split())) < 60]  # a path is not broken
    assert not too_long
    text = "\n".join(line for line in lines if line)
    return re.sub(r"\n  (?=\S)", " ", text).splitlines()


def test_a_pipe_gets_few_lines_and_a_table_without_control_characters(
    server: CommandServer, argv: list[str], tmp_path: Path
) -> None:
    done = server.run(*argv)
    assert done.code == 0, done.stderr[-2000:]
    assert not re.search(r"[\x00-\x09\x0b-\x1f\x7f]", done.stdout + done.stderr)
    assert "examples/s" not in done.stderr and "it/s" not in done.stderr  # bars of libraries
    lines = done.stdout.splitlines()
    start = lines[: next(number for number, line in enumerate(lines) if line.split()[0] == "step")]
    assert 0 < len(start) <= 8  # data, device, defaults, model; of each split its lengths and what is cut
    assert all(each.startswith("hf-rocm-tune: ") for each in start)
    assert "use_peft=True" in done.stdout and "learning_rate=0.0002" in done.stdout
    rows = log_rows(done.stdout)
    assert [row["step"] for row in rows] == ["2/6", "4/6", "6/6"]
    assert all(row["faults"] == "0" and float(row["loss"]) > 0 for row in rows)
    assert {"grad norm", "rate", "tokens/s", "verified"} <= rows[0].keys()
    assert done.stdout.count("evaluation: loss ") == 2 and "trained: " in done.stdout
    assert "{" not in done.stdout
    log = json.loads((tmp_path / "out" / "training_log.json").read_text())
    assert "mean_token_accuracy" in json.dumps(log) and "integrity/verified_gb" in json.dumps(log)


def test_a_quiet_run_prints_warnings_only(server: CommandServer, argv: list[str]) -> None:
    short = [*argv, "--max_steps", "2", "--eval_strategy", "no", "--max_seq_length", "24"]
    done = server.run(*short, env={"HF_ROCM_TUNE_QUIET": "1"})
    assert done.code == 0, done.stderr[-2000:]
    assert len(done.stdout.splitlines()) == 1 and done.stdout.startswith("hf-rocm-tune: warning: "), done.stdout


def test_a_terminal_has_one_live_line_that_leaves_nothing_behind(server: CommandServer, argv: list[str]) -> None:
    code, sent = on_terminal(server, [*argv, "--sample_every", "4", "--sample_prompts", "A question"])
    left = screen(sent)
    assert code == 0, left
    assert sum(line.startswith("hf-rocm-tune: step ") for line in left) == 2, left
    assert BAR in sent and "faults 0" in sent, repr(sent[-3000:])
    assert [row["step"] for row in log_rows("\n".join(left))] == ["2/6", "4/6", "6/6"]
    assert not any(BAR in line for line in left), left
    assert "{'loss'" not in sent
    assert re.fullmatch(
        r"hf-rocm-tune: integrity: VERIFIED, nothing was wrong: .* of step time spent on batch verification",
        messages(left)[-1],
    )


def test_an_error_is_the_last_line_of_a_terminal(server: CommandServer, argv: list[str]) -> None:
    fault = {"HF_ROCM_TUNE_FAULT": "kind=zero,stage=batches,rate=1,persist=1,seed=1"}
    code, sent = on_terminal(server, [*argv, "-v", "--on_corruption", "stop"], fault)
    left = messages(screen(sent))
    assert any("default use_peft=True (trl sft: False): LoRA" in line for line in left), "more is said on request"
    assert code == 3 and left[-1].startswith("hf-rocm-tune: error: "), left
    assert not any(BAR in line for line in left)


def test_the_watchdog_takes_the_live_line_away(server: CommandServer, argv: list[str]) -> None:
    code, sent = on_terminal(server, [*argv, "--stall_timeout", "2"], {"HF_ROCM_TUNE_CRASH": "step=3,kind=hang"})
    left = messages(screen(sent))
    assert BAR in sent and code == 4 and left[-1].startswith("hf-rocm-tune: error: no progress for "), left
    assert not any(BAR in line for line in left)


def test_a_narrower_terminal_keeps_no_half_of_a_bar(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The terminal has broken the bar into two lines: both are removed, and no later line is as long as they were."""
    shown = TerminalCallback(live=True, memory_gib=None)
    args = TrainingArguments(output_dir=str(tmp_path), use_cpu=True)
    state, control = TrainerState(global_step=1, max_steps=60, is_world_process_zero=True), TrainerControl()
    sent = []
    for columns in (100, 70):
        monkeypatch.setenv("COLUMNS", str(columns))
        if columns == 100:
            shown.on_train_begin(args, state, control)
        shown.training_bar.ncols, shown.training_bar.dynamic_ncols = columns, None
        state.global_step += 1
        shown.on_step_end(args, state, control)
        shown.on_log(args, state, control, logs={"loss": 1.0, **dict.fromkeys(COUNTERS, 0.0)})
        shown.training_bar.refresh()
        sent.append(capsys.readouterr().err)
    shown.on_train_end(args, state, control)
    assert "\x1b[1A\r\x1b[J" not in sent[0] and sent[1].startswith("\x1b[1A\r\x1b[J")
    assert max(map(len, re.split(r"[\r\n]", sent[1]))) == 70


@pytest.mark.parametrize(("columns", "figures"), [(60, 1), (90, 2), (120, 4), (200, 6)])
def test_the_live_line_tells_of_card_and_integrity(
    columns: int, figures: int, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    now = {"gpu/vram_used_gib": 17.24, "gpu/hotspot_c": 71.4, "integrity/verified_gb": 3.2}
    now |= {"integrity/mismatches": 2, "integrity/recovered": 2}
    shown = TerminalCallback(live=True, memory_gib=19.9)
    args = TrainingArguments(output_dir=str(tmp_path), use_cpu=True)
    state, control = TrainerState(global_step=4, max_steps=60, is_world_process_zero=True), TrainerControl()
    shown.on_train_begin(args, state, control)
    shown.training_bar.ncols, shown.training_bar.dynamic_ncols = columns, None
    logs = {"loss": 1.5, "speed/tokens_per_second": 1234.5, "rewards/margins": 0.25, "gpu/hotspot_max_c": 80.0, **now}
    shown.on_log(args, state, control, logs=logs)
    shown.training_bar.refresh()
    shown.on_train_end(args, state, control)
    sent = capsys.readouterr()
    all_of_them = "loss 1.5000 · faults 2 · verified 3.2 GB · tokens/s 1,234 · GiB 17.2/19.9 · hot 80 C"
    assert " · ".join(all_of_them.split(" · ")[:figures]) + "]" in sent.err and "4/60" in sent.err
    (row,) = log_rows(sent.out)
    assert (row["GiB"], row["hot"], row["margin"], row["faults"]) == ("17.2/19.9", "80 C", "0.250", "2")
