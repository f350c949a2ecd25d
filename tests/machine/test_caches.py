"""A cache that cannot be written is named with the variable that moves it, and not what was to be read through it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from hf_rocm_tune.machine import software
from hf_rocm_tune.machine.caches import CACHES, directory_of, unwritable
from tests import tiny

NOWHERE = "/proc/nowhere"  # where not even root can make a directory
VARIABLES = (
    "HF_HOME",
    "HF_DATASETS_CACHE",
    "HF_HUB_CACHE",
    "XDG_CACHE_HOME",
    "TRITON_HOME",
    "TRITON_CACHE_DIR",
    "HOME",
)


@pytest.fixture(autouse=True)
def _own_home(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))


@pytest.mark.parametrize(
    ("variable", "caches"),
    [
        ("HF_HOME", {"datasets", "hub", "pictures"}),
        ("XDG_CACHE_HOME", {"datasets", "hub", "pictures"}),
        ("HOME", {"datasets", "hub", "pictures", "triton"}),
        ("HF_DATASETS_CACHE", {"datasets"}),
        ("HF_HUB_CACHE", {"hub"}),
        ("TRITON_HOME", {"triton"}),
        ("TRITON_CACHE_DIR", {"triton"}),
    ],
)
def test_what_lies_in_a_directory_that_cannot_be_written_is_known(
    variable: str, caches: set[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    assert not any(map(unwritable, CACHES))
    assert list(tmp_path.iterdir()) == []  # asking creates nothing
    monkeypatch.setenv(variable, NOWHERE)
    said = {name: unwritable(name) for name in CACHES}
    assert {name for name, why in said.items() if why} == caches
    for name in caches:
        assert said[name].startswith(f"{directory_of(name)} cannot be written (")
        wanted = "TRITON_HOME or TRITON_CACHE_DIR" if name == "triton" else "HF_HOME"
        assert f"set {wanted}" in said[name]


def test_a_variable_of_its_own_wins(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HF_HOME", NOWHERE)
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "rows"))
    assert unwritable("datasets") == "" != unwritable("hub")


def test_the_libraries_look_there() -> None:
    program = (
        "import datasets.config, huggingface_hub.constants as hub; from hf_rocm_tune.machine.caches import *\n"
        "for name, theirs in (('datasets', datasets.config.HF_DATASETS_CACHE), ('hub', hub.HF_HUB_CACHE)):\n"
        "    assert str(theirs) == str(directory_of(name)), (name, theirs, directory_of(name))\n"
    )
    moved = {"XDG_CACHE_HOME": "/tmp/somewhere"}
    kept = {name: value for name, value in os.environ.items() if name not in VARIABLES or name == "HOME"}
    done = subprocess.run([sys.executable, "-c", program], env=kept | moved, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]


def test_triton_s_cache_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    if why := software.missing_for_triton():
        pytest.skip(why)
    monkeypatch.setenv("TRITON_CACHE_DIR", NOWHERE)
    assert software.missing_for_triton().startswith(f"the cache of what it compiles, {NOWHERE} cannot be written")


@pytest.mark.long
def test_a_run_blames_the_cache_and_not_the_dataset(tmp_path: Path) -> None:
    data = tmp_path / "rows.jsonl"
    data.write_text('{"text": "a row"}\n' * 4)
    command = [sys.executable, "-m", "hf_rocm_tune.sft", "--dataset_name", str(data), "--doctor", "off", "--use_cpu"]
    command += ["--model_name_or_path", str(tiny.build("llama3", tmp_path)), "--output_dir", str(tmp_path / "out")]
    done = subprocess.run(command, env={**os.environ, "HF_HOME": NOWHERE}, capture_output=True, text=True)
    line = done.stderr.strip().splitlines()[-1]
    assert (done.returncode, (tmp_path / "out").exists()) == (2, False), done.stderr[-2000:]
    assert line.startswith(f"hf-rocm-tune: error: the dataset '{data}' could not be read, for the cache {NOWHERE}")
    assert line.endswith("set HF_HOME or HF_DATASETS_CACHE to a directory that can be")
