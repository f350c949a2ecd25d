"""Files that change between check and use, in real commands: what is used is what was checked.

`open_flips.c` flips a bit of a file just before it is opened for the n-th time, for every n that there is, for good or
until the next time. Silent would be: the command ends well, with another result than the undisturbed one.
"""

from __future__ import annotations

import itertools
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from hf_rocm_tune.survive import manifest
from tests import tiny
from tests.e2e.command import CommandServer, Result
from tests.publish.hub_server import TOKEN, USER, LoopbackHub, loopback_hub, on_hub, write_run
from tests.publish.merge_cases import build_base, lora, write_adapter

ADAPTER = "adapter_model.safetensors"
CONFIG = "adapter_config.json"
SEEDS = [0, *(pytest.param(seed, marks=pytest.mark.long) for seed in range(1, 10))]
PRIVATE = "hf-rocm-tune-"  # how the names of directories of private copies begin
Command = Callable[[Path, dict[str, str]], tuple[int, Any, str]]


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("there is no C compiler to build the library that flips bits")
    built = tmp_path_factory.mktemp("flips") / "open_flips.so"
    source = Path(__file__).parents[1] / "e2e" / "open_flips.c"
    subprocess.run([compiler, "-shared", "-fPIC", "-O1", "-o", str(built), str(source), "-ldl"], check=True)
    return built


@pytest.fixture(scope="module")
def server(library: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[CommandServer]:
    started = CommandServer(tmp_path_factory.mktemp("attacked"), {"LD_PRELOAD": str(library)})
    yield started
    started.close()


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """``base`` and ``adapter``, both with manifests, and ``rows`` to train on."""
    scratch = tmp_path_factory.mktemp("sound")
    shutil.copytree(build_base(lora("llama3"), scratch), scratch / "base")
    write_adapter(lora("llama3"), scratch / "base", scratch / "adapter")
    tiny.build_tokenizer().save_pretrained(scratch / "adapter")
    for name in ("base", "adapter"):
        manifest.write(scratch / name, run_id="run", step=1, status="final")
    tiny.write_messages_jsonl(scratch / "rows" / "train.jsonl", 8)
    return scratch


class Attacks:
    """Runs a command with each open of a file attacked, in fresh copies of its input."""

    def __init__(self, sound: Path, scratch: Path) -> None:
        self.sound, self.scratch = sound, scratch
        self._number = itertools.count()

    def __call__(self, command: Command, file: str, folder: str, seed: int) -> None:
        _, wanted, said = command(self._place(), {})
        assert wanted is not None, said
        outcomes = []
        for nth, back in itertools.product(range(1, 40), (0, 1)):
            place = self._place()
            log = place / "flips"
            flip = {"FILE": file, "IN": folder, "NTH": nth, "SEED": seed, "BACK": back, "LOG": log}
            code, found, said = command(place, {f"FLIP_{name}": str(value) for name, value in flip.items()})
            if not log.exists():  # it is not opened so often
                break
            errors = [line for line in said.splitlines() if line.startswith("hf-rocm-tune: error:")]
            attempt = f"open {nth}, {'back' if back else 'for good'}: code {code}, {log.read_text()}{said[-2000:]}"
            assert (code, len(errors)) in ((0, 0), (2, 1), (3, 1)), attempt
            if code == 0:
                assert found == wanted, f"silent: {attempt}"
            outcomes.append((code, log.read_text().split()[0]))
        private = folder == PRIVATE  # copies that nobody can write to
        assert outcomes and all((kind == "sealed") == private for _, kind in outcomes), outcomes
        assert private or any(code != 0 for code, _ in outcomes), "no attack was noticed: the test proves nothing"

    def _place(self) -> Path:
        place = self.scratch / str(next(self._number))
        for name in ("base", "adapter", "rows"):
            shutil.copytree(self.sound / name, place / name)
        return place


@pytest.fixture
def attacks(sound: Path, tmp_path: Path) -> Attacks:
    return Attacks(sound, tmp_path)


def _ran(done: Result, found: Callable[[], Any]) -> tuple[int, Any, str]:
    return done.code, found() if done.code == 0 else None, done.stderr


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(
    ("file", "folder"),
    [
        (ADAPTER, "adapter"),
        ("tokenizer.json", PRIVATE),
        *(pytest.param(file, "adapter", marks=pytest.mark.long) for file in (CONFIG, "tokenizer.json")),
        *(pytest.param(file, PRIVATE, marks=pytest.mark.long) for file in (ADAPTER, CONFIG)),
    ],
)
def test_an_adapter_to_generate_with(
    attacks: Attacks, server: CommandServer, file: str, folder: str, seed: int
) -> None:
    def generate(place: Path, env: dict[str, str]) -> tuple[int, Any, str]:
        flags = ("--base", str(place / "base"), "--prompt", "What comes next?", "--max_new_tokens", "8", "--json")
        done = server.run(str(place / "adapter"), *flags, "--temperature", "0", env={"VERB": "generate", **env})
        return _ran(done, lambda: json.loads(done.stdout)["completion"])

    attacks(generate, file, folder, seed)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(
    ("file", "folder"),
    [
        ("model.safetensors", "base"),
        ("tokenizer.json", "_staging"),
        *(
            pytest.param(*each, marks=pytest.mark.long)
            for each in (
                (CONFIG, "adapter"),
                (ADAPTER, "adapter"),
                ("model.safetensors", "_staging"),
                ("config.json", "_staging"),
                (ADAPTER, PRIVATE),
                ("tokenizer.json", PRIVATE),
            )
        ),
    ],
)
def test_base_adapter_and_result_of_a_merge(
    attacks: Attacks, server: CommandServer, file: str, folder: str, seed: int
) -> None:
    def merge(place: Path, env: dict[str, str]) -> tuple[int, Any, str]:
        flags = (str(place / "adapter"), str(place / "out"), "--base", str(place / "base"))
        done = server.run(*flags, env={"VERB": "merge", **env})

        def found() -> Any:
            seal = manifest.read(place / "out")  # which finds what changes after it was written
            assert isinstance(seal, manifest.Manifest)
            return seal.tensors, {name: entry for name, entry in seal.files.items() if name != "README.md"}

        return _ran(done, found)

    attacks(merge, file, folder, seed)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("file", [ADAPTER, pytest.param(CONFIG, marks=pytest.mark.long)])
def test_an_adapter_whose_training_goes_on(attacks: Attacks, server: CommandServer, file: str, seed: int) -> None:
    def train(place: Path, env: dict[str, str]) -> tuple[int, Any, str]:
        flags = {
            "model_name_or_path": place / "base",
            "adapter_name_or_path": place / "adapter",
            "dataset_name": place / "rows",
            "output_dir": place / "out",
            "max_steps": 1,
            "max_length": 48,
            "save_strategy": "no",
            "doctor": "off",
            "disable_tqdm": True,
        }
        argv = [part for name, value in flags.items() for part in (f"--{name}", str(value))]
        done = server.run(*argv, env=env)
        return _ran(done, lambda: (place / "out" / ADAPTER).read_bytes())

    # Not the run's own file, which it reads back.
    attacks(train, file, "adapter", seed)


# ---- push -----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def the_hub() -> Iterator[LoopbackHub]:
    with loopback_hub() as hub:
        yield hub


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(
    "file",
    [
        ADAPTER,
        *(pytest.param(each, marks=pytest.mark.long) for each in ("tokenizer.json", CONFIG, "chat_template.jinja")),
    ],
)
def test_a_file_of_a_result_that_is_pushed(
    library: Path, the_hub: LoopbackHub, tmp_path: Path, file: str, seed: int
) -> None:
    """No commit is ever made with other bytes than those of the run, not even one that is then noticed."""
    numbers = itertools.count()

    def push(place: Path, env: dict[str, str]) -> tuple[int, Any, str]:
        repo = f"{USER}/{file.replace('.', '-')}-{seed}-{next(numbers)}"
        environ = {**os.environ, "HF_ENDPOINT": the_hub.url, "HF_TOKEN": TOKEN, "HF_HUB_DISABLE_XET": "1", **env}
        environ |= {"HF_HUB_OFFLINE": "0", "HF_ROCM_TUNE_QUIET": "1", "HF_HOME": str(tmp_path / "hf")}
        command = [sys.executable, "-m", "hf_rocm_tune", "push", str(place), repo]
        environ["LD_PRELOAD"] = str(library)
        done = subprocess.run(command, env=environ, capture_output=True, text=True, check=False)
        there = on_hub(the_hub, repo) if repo in the_hub.store.repos else {}
        assert done.returncode == 0 or there == {}, f"{done.stderr}: {sorted(there)}"
        # Two of them name the repository, which is another each time.
        same = {name: there[name] for name in there if name not in ("integrity.json", "README.md")}
        return done.returncode, same or None, done.stderr

    class Runs(Attacks):
        def _place(self) -> Path:
            place = write_run(self.scratch / str(next(self._number)) / "result")
            if file == ADAPTER:  # one that is read when it is sent
                save_file({"weight": np.arange(11 << 18, dtype=np.float32)}, place / ADAPTER)
                listed = json.loads((place / manifest.MANIFEST_NAME).read_text())["files"]
                manifest.write(place, run_id="run-1", step=8, status="final", files=listed)
            return place

    Runs(tmp_path, tmp_path)(push, file, "result", seed)
