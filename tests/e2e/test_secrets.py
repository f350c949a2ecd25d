"""A user's machine and secrets: what is imported, which variables a recipe sets, what is printed, which ports open."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from tests import tiny
from tests.e2e.command import CommandServer
from tests.e2e.conftest import flags

ROOT = Path(__file__).parents[2]
TOKENS = ("plain-and-nested-77", "hf_abcdefghijklmnopqrstuvwxyz", "in-a-list-of-mappings-5", "p4ssw0rd-of-a-proxy")
# Modules of the standard library and others that `python -m` has not imported before it finds the package.
EVIL = ("__future__", "enum", "re", "json", "yaml", "typing", "dataclasses", "torch", "transformers", "random")


@pytest.fixture
def argv(messages: Path, model_of: Callable[[str], Path], tmp_path: Path) -> list[str]:
    usual = {"max_steps": 1, "per_device_train_batch_size": 2, "max_length": 64, "disable_tqdm": True, "doctor": "off"}
    return flags(model_name_or_path=model_of("llama3"), dataset_name=messages, output_dir=tmp_path / "out", **usual)


def _nested() -> list[str]:
    settings = {"token": TOKENS[0], "proxies": {"https": f"http://me:{TOKENS[3]}@proxy:1", "api_key": TOKENS[2]}}
    return ["--model_init_kwargs", json.dumps(settings), "--hub_token", TOKENS[1]]


def _leaks(text: str) -> list[str]:
    return [token for token in TOKENS if token in text]


@pytest.mark.parametrize(
    ("more", "code"),
    [
        (["--print_config"], 0),
        (["--dataset_name", f"/nowhere/{TOKENS[0]}/rows.jsonl"], 2),
        (["--model_init_kwargs", '{"token": "plain-and-nested-77", '], 2),
        (["--learning_rate", TOKENS[1]], 2),
        ([], 1),  # transformers does not know the nested ones, and says so with their values
    ],
)
def test_a_token_in_any_setting_is_never_printed_nor_written(
    server: CommandServer, argv: list[str], tmp_path: Path, more: list[str], code: int
) -> None:
    done = server.run(*argv, *_nested(), *more)
    assert code == 1 or done.code == code, done.stderr[-2000:]
    assert _leaks(done.stdout + done.stderr) == []
    assert [path for path in tmp_path.rglob("*") if path.is_file() and _leaks(path.read_text(errors="replace"))] == []


def test_a_token_in_a_run_is_never_printed_nor_written(server: CommandServer, argv: list[str], tmp_path: Path) -> None:
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(json.dumps({"model_init_kwargs": {"token": TOKENS[0]}, "env": {"HSA_ENABLE_SDMA": "1"}}))
    done = server.run(*argv, "--config", str(recipe), "--hub_token", TOKENS[1])
    assert done.code == 0, done.stderr[-2000:]
    assert _leaks(done.stdout + done.stderr) == [] and f"recipe {recipe} sets HSA_ENABLE_SDMA=1" in done.stdout
    written = [path for path in (tmp_path / "out").rglob("*") if path.is_file()]
    assert written and [path for path in written if _leaks(path.read_bytes().decode("utf-8", "replace"))] == []


def test_a_recipe_sets_only_variables_of_the_policy(server: CommandServer, argv: list[str], tmp_path: Path) -> None:
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text("env: {LD_PRELOAD: /tmp/x.so, HSA_ENABLE_SDMA: 1}\n")
    done = server.run(*argv, "--config", str(recipe))
    assert done.code == 2 and "not LD_PRELOAD: remove them" in done.error_lines[0]


@pytest.mark.parametrize(
    ("start", "code"),
    [
        (["hf_rocm_tune.sft", "--no_such_flag"], 2),  # refused after the standard library's imports, before torch's
        pytest.param(["hf_rocm_tune.sft", "--print_config"], 0, marks=pytest.mark.long),
        pytest.param(
            ["hf_rocm_tune", "sft", "--accelerate_config", "cpu", "--print_config"], 0, marks=pytest.mark.long
        ),
    ],
)
def test_nothing_is_imported_from_the_working_directory(
    argv: list[str], tmp_path: Path, start: list[str], code: int
) -> None:
    place = tmp_path / "data"
    place.mkdir()
    for name in EVIL:
        (place / f"{name}.py").write_text(
            f"open({str(tmp_path / 'ran')!r}, 'a').write('{name} ')\nraise SystemExit(9)\n"
        )
    done = subprocess.run(
        [sys.executable, "-m", *start, *argv],
        cwd=place,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert not (tmp_path / "ran").exists(), (tmp_path / "ran").read_text()
    assert done.returncode == code and ("model_name_or_path" in done.stdout) == (code == 0), done.stderr[-2000:]


@pytest.mark.long
def test_two_ranks_on_one_machine_listen_on_loopback_only(argv: list[str], tmp_path: Path) -> None:
    launcher = ["--accelerate_config", "cpu_dual", "--max_restarts", "1"]
    job = subprocess.Popen(
        [sys.executable, "-m", "hf_rocm_tune", "sft", *launcher, *argv],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        cwd=tmp_path,
    )
    heard: set[str] = set()
    while job.poll() is None:
        for process in (psutil.Process(job.pid), *psutil.Process(job.pid).children(recursive=True)):
            try:
                found = process.net_connections("inet")
            except psutil.Error:
                continue
            heard |= {each.laddr.ip for each in found if each.status == psutil.CONN_LISTEN}
        try:
            job.wait(0.2)
        except subprocess.TimeoutExpired:
            continue
    said = job.communicate()[1]
    assert job.returncode == 0, said[-2000:]
    assert heard == {"127.0.0.1"}


def test_an_index_names_only_files_beside_it(
    server: CommandServer, argv: list[str], scratch: Path, tmp_path: Path
) -> None:
    model = tiny.build("llama3", scratch / "models", shards=3)
    copy = tmp_path / "model"
    copy.mkdir()
    for file in model.iterdir():
        (copy / file.name).write_bytes(file.read_bytes())
    index = copy / "model.safetensors.index.json"
    shard = next(copy.glob("*-00002-*.safetensors"))
    elsewhere = shard.rename(tmp_path / shard.name)
    for named in (f"../{shard.name}", str(elsewhere)):
        index.write_text((model / index.name).read_text().replace(shard.name, named))
        done = server.run(*argv, "--model_name_or_path", str(copy))
        assert done.code == 2 and "no path within its directory" in done.error_lines[0], done.stderr[-2000:]
