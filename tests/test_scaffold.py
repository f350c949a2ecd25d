"""The set-up and the package as built: the right torch on each machine, no half-made .venv, a complete wheel."""

from __future__ import annotations

import ast
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from importlib import metadata
from pathlib import Path
from types import ModuleType

import pytest
from packaging.requirements import Requirement

CPU_NODE = "cpu_cores_count 16\nsimd_count 0\ngfx_target_version 0\n"
PLAIN = "torch==2.13.0"


def gpu_node(version: int) -> str:
    """The part of a KFD node's properties that says it is a GPU."""
    return f"cpu_cores_count 0\nsimd_count 168\nvendor_id 4098\ngfx_target_version {version}\n"


@pytest.fixture(scope="module")
def setup_env(checkout: Path) -> ModuleType:
    """The set-up script as a module."""
    spec = importlib.util.spec_from_file_location("setup_env", checkout / "scripts/setup_env.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def machine(tmp_path: Path, setup_env: ModuleType, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The set-up script with a project, a machine and a .venv of its own under ``tmp_path``."""
    (tmp_path / "pyproject.toml").write_text('[project]\nname = "empty"\nversion = "0"\n')
    monkeypatch.setattr(setup_env, "ROOT", tmp_path)
    monkeypatch.setattr(setup_env, "VENV", tmp_path / ".venv")
    monkeypatch.setattr(setup_env, "STATE", tmp_path / ".venv/state.json")
    return setup_env


def decide(setup_env: ModuleType, root: Path, *nodes: str | bytes, override: str | None = None, on: str = "linux"):
    """The decision on a machine whose KFD lists these nodes; ``root/proc`` and ``root/bin`` may be prepared."""
    for number, text in enumerate(nodes):
        node = root / f"sys/class/kfd/kfd/topology/nodes/{number}"
        node.mkdir(parents=True)
        (node / "properties").write_bytes(text.encode() if isinstance(text, str) else text)
    return setup_env.decide(
        sysfs=root / "sys",
        proc=root / "proc",
        search_path=str(root / "bin"),
        override=override,
        platform=on,
        devices=root / "dev",
    )


@pytest.mark.parametrize(
    ("versions", "nvidia", "build", "said"),
    [
        ([110000], False, "rocm7.2", "gfx1100"),
        ([110000], True, "rocm7.2", "gfx1100"),
        ([100306, 110000], False, "rocm7.2", "gfx1100"),
        ([100306], False, "cpu", "no kernels for gfx1036"),  # an integrated GPU alone
    ],
)
def test_an_amd_card_gets_the_rocm_build_and_no_other(
    setup_env: ModuleType, tmp_path: Path, versions: list[int], nvidia: bool, build: str, said: str
) -> None:
    if nvidia:
        (tmp_path / "proc/driver/nvidia/gpus/0000:01:00.0").mkdir(parents=True)
    choice = decide(setup_env, tmp_path, CPU_NODE, *map(gpu_node, versions))
    assert choice.build == build and said in choice.reason
    if build != "cpu":
        assert choice.attempts == ((f"{PLAIN}+{build}", f"https://download.pytorch.org/whl/{build}"),)


@pytest.mark.parametrize(
    "nodes",
    [
        (),
        (CPU_NODE,),
        (b"\xff\x00\xfe simd_count many\ngfx_target_version\n",),
        ("gfx_target_version 110000\n",),
        ("simd_count 168\ngfx_target_version 990000\n",),
    ],
)
def test_without_a_usable_gpu_it_is_the_cpu_build(setup_env: ModuleType, tmp_path: Path, nodes: tuple) -> None:
    choice = decide(setup_env, tmp_path, *nodes)
    assert choice.build == "cpu"
    index = "https://download.pytorch.org/whl/cpu"
    assert choice.attempts == ((f"{PLAIN}+cpu", None), (f"{PLAIN}+cpu", index), (PLAIN, None))


def test_nvidia_driver_or_tool_gets_the_plain_wheel(setup_env: ModuleType, tmp_path: Path) -> None:
    tool = tmp_path / "bin/nvidia-smi"
    tool.parent.mkdir()
    tool.write_text("#!/bin/sh\n")
    tool.chmod(0o755)
    assert decide(setup_env, tmp_path, CPU_NODE).attempts == ((PLAIN, None),)
    tool.unlink()
    (tmp_path / "proc/driver/nvidia/gpus").mkdir(parents=True)
    assert decide(setup_env, tmp_path).build == "cpu", "a driver that lists no GPU"
    (tmp_path / "proc/driver/nvidia/gpus/0000:01:00.0").mkdir()
    assert decide(setup_env, tmp_path).build == "cuda"


@pytest.mark.parametrize(
    ("value", "build", "first"),
    [
        ("rocm7.1", "rocm7.1", (f"{PLAIN}+rocm7.1", "https://download.pytorch.org/whl/rocm7.1")),
        ("cuda", "cuda", (PLAIN, None)),
        ("torch==2.14.0", "custom", ("torch==2.14.0", None)),
        ("https://example.org/torch.whl", "custom", ("https://example.org/torch.whl", None)),
        ("https://example.org/simple", "custom", ("torch>=2.10", "https://example.org/simple")),
    ],
)
def test_override_wins_over_the_machine(
    setup_env: ModuleType, tmp_path: Path, value: str, build: str, first: tuple[str, str | None]
) -> None:
    choice = decide(setup_env, tmp_path, CPU_NODE, gpu_node(110000), override=value)
    assert (choice.build, choice.attempts[0]) == (build, first)
    assert value in choice.reason


def test_in_wsl_the_reason_says_what_a_radeon_card_needs(setup_env: ModuleType, tmp_path: Path) -> None:
    (tmp_path / "dev").mkdir()
    (tmp_path / "dev/dxg").touch()
    choice = decide(setup_env, tmp_path)
    assert choice.build == "cpu" and "librocdxg" in choice.reason
    assert "HF_ROCM_TUNE_TORCH=rocm7.2 make setup" in choice.reason
    (tmp_path / "proc/driver/nvidia/gpus/0000:01:00.0").mkdir(parents=True)
    assert decide(setup_env, tmp_path).build == "cuda"


def test_another_rocm_than_the_wheel_s_takes_any_torch_of_its_index_and_no_other_build(
    machine: ModuleType, setup_env: ModuleType
) -> None:
    choice = setup_env.overridden("rocm7.0", "linux")
    assert choice.attempts[1:] == (("torch>=2.10", "https://download.pytorch.org/whl/rocm7.0"),)
    environment = machine.Environment(choice)
    environment.check_torch("2.12.1+rocm7.0")
    with pytest.raises(setup_env.SetupError, match=r"torch 2\.15\.0 came instead of a build for rocm7\.0"):
        environment.check_torch("2.15.0")


@pytest.mark.parametrize(
    ("torch", "wanted"),
    [
        ("2.13.0+rocm7.2", "torchvision==0.28.0+rocm7.2 --index-url https://download.pytorch.org/whl/rocm7.2"),
        ("2.14.1+cpu", "torchvision==0.29.1+cpu --index-url https://download.pytorch.org/whl/cpu"),
        ("2.13.0", "torchvision==0.28.0"),
        ("3.0.0+cpu", None),
    ],
)
def test_pictures_get_the_torchvision_of_this_torch_and_nothing_else(
    machine: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str], torch: str, wanted: str | None
) -> None:
    """A stand-in Python notes what pip is asked for; an index that lacks it is one line, and the set-up goes on."""
    python = tmp_path / ".venv/bin/python"
    python.parent.mkdir(parents=True)
    python.write_text(f'#!/bin/sh\n[ "$1" = -c ] && echo {torch} && exit\necho "$@" > {tmp_path}/asked\nexit 1\n')
    python.chmod(0o755)
    machine.Environment(machine.Choice("rocm", "", ())).install_torchvision()
    said, asked = capsys.readouterr().out, tmp_path / "asked"
    if wanted is None:
        assert not asked.exists() and said == ""
        return
    assert asked.read_text().split("--no-deps ")[1].strip() == wanted
    assert said == f"setup: {wanted.split()[0]} is not to be had: processors of pictures that need it do not work\n"


def test_keep_installs_no_torch_and_other_systems_have_no_wheel_named_cpu(
    setup_env: ModuleType, tmp_path: Path
) -> None:
    assert decide(setup_env, tmp_path, on="darwin").attempts == ((PLAIN, None),)
    assert decide(setup_env, tmp_path, gpu_node(110000), override="keep").attempts == ()


@pytest.mark.parametrize("value", ["rocm", "rocm7.2 ; rm -rf"])
def test_override_that_is_none_of_them_is_one_line_and_code_2(checkout: Path, value: str) -> None:
    done = subprocess.run(
        [sys.executable, checkout / "scripts/setup_env.py", "--dry-run"],
        env={**os.environ, "HF_ROCM_TUNE_TORCH": value},
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith(f"setup: HF_ROCM_TUNE_TORCH={value} is not understood: use ")
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize("python", [(3, 10, 4), (3, 15, 0)])
def test_a_python_without_wheels_is_one_line_and_code_2(
    machine: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    python: tuple[int, int, int],
) -> None:
    monkeypatch.setattr(sys, "version_info", python)
    assert machine.main([]) == 2
    have = ".".join(map(str, python))
    said = f"setup: Python 3.11 to 3.14 is needed, this is {have}: make PYTHON=python3.13 setup\n"
    assert capsys.readouterr().err == said
    assert not machine.VENV.exists()


def stand_in(site: Path, version: str, requires: str = "") -> None:
    """An installed distribution named torch with this version, and a package that states it."""
    hip = "'7.2.1'" if "rocm" in version else "None"
    cuda = "'13.0'" if "+cu" in version else "None"
    information = site / f"torch-{version}.dist-info"
    information.mkdir(parents=True)
    (information / "METADATA").write_text(f"Metadata-Version: 2.1\nName: torch\nVersion: {version}\n{requires}")
    (information / "INSTALLER").write_text("pip\n")
    (site / "torch").mkdir()
    (site / "torch/__init__.py").write_text("from torch.version import __version__\n")
    (site / "torch/version.py").write_text(f"__version__ = '{version}'\nhip = {hip}\ncuda = {cuda}\n")
    files = ["torch/__init__.py,,", "torch/version.py,,"]
    (information / "RECORD").write_text("\n".join([*files, f"{information.name}/METADATA,,", ""]))


def environment_with(place: Path, version: str) -> Path:
    """The interpreter of a new virtual environment whose torch is a stand-in."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", place], check=True)
    (site,) = place.glob("lib/python3*/site-packages")
    stand_in(site, version)
    return place / "bin/python"


def set_up(python: Path, script: Path, value: str) -> subprocess.CompletedProcess[str]:
    """``make setup`` as a process of this interpreter."""
    environment = {name: word for name, word in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
    environment["HF_ROCM_TUNE_TORCH"] = value
    return subprocess.run(
        [python, script], env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=240
    )


def project_with_the_script(checkout: Path, place: Path) -> Path:
    """A project that requires nothing and needs no build tool, with the set-up script of this one."""
    (place / "scripts").mkdir(parents=True)
    (place / "backend.py").write_text(
        "import zipfile\n"
        "def build_editable(directory, settings=None, metadata=None):\n"
        "    name = 'empty-0-py3-none-any.whl'\n"
        "    with zipfile.ZipFile(f'{directory}/{name}', 'w') as wheel:\n"
        "        for file, text in (('METADATA', 'Metadata-Version: 2.1\\nName: empty\\nVersion: 0\\n'),\n"
        "                           ('WHEEL', 'Wheel-Version: 1.0\\nRoot-Is-Purelib: true\\nTag: py3-none-any\\n'),\n"
        "                           ('RECORD', '')):\n"
        "            wheel.writestr(f'empty-0.dist-info/{file}', text)\n"
        "    return name\n"
    )
    (place / "pyproject.toml").write_text(
        '[project]\nname = "empty"\nversion = "0"\n'
        '[build-system]\nrequires = []\nbuild-backend = "backend"\nbackend-path = ["."]\n'
    )
    return Path(shutil.copy(checkout / "scripts/setup_env.py", place / "scripts"))


def test_keep_takes_the_torch_of_the_virtual_environment_that_runs_it(checkout: Path, tmp_path: Path) -> None:
    python = environment_with(tmp_path / "opt/venv", "2.12.0+rocm7.2.4")
    script = project_with_the_script(checkout, tmp_path / "project")
    done = set_up(python, script, "keep")
    assert done.returncode == 0, done.stderr
    code = "import torch; print(torch.__version__, torch.__file__)"
    own = tmp_path / "project/.venv/bin/python"
    said = subprocess.run([own, "-c", code], capture_output=True, text=True, check=True, cwd=tmp_path).stdout
    assert said.split()[0] == "2.12.0+rocm7.2.4" and said.split()[1].startswith(str(tmp_path / "opt/venv"))


def test_keep_refuses_an_old_torch_and_leaves_it(checkout: Path, tmp_path: Path) -> None:
    python = environment_with(tmp_path / "opt/venv", "2.9.1+rocm6.4")
    done = set_up(python, project_with_the_script(checkout, tmp_path / "project"), "keep")
    assert done.returncode == 2
    said = (
        r"setup: torch 2\.9\.1\+rocm6\.4 is too old, 2\.10 or newer is needed: HF_ROCM_TUNE_TORCH=\S+ make setup .*\n"
    )
    assert re.fullmatch(said, done.stderr)
    assert list((tmp_path / "opt/venv").glob("lib/python3*/site-packages/torch-2.9.1+rocm6.4.dist-info"))


def test_keep_without_a_torch_names_where_it_looked(checkout: Path, tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", tmp_path / "bare"], check=True)
    script = project_with_the_script(checkout, tmp_path / "project")
    done = set_up(tmp_path / "bare/bin/python", script, "keep")
    assert done.returncode == 2 and f"no torch in {tmp_path / 'bare'} or .venv" in done.stderr


OLD, NEW = ["2.9.1+rocm6.4"], ["2.10.0", "2.11.0", "2.12.0", "2.13.0", "2.14.1", "2.15.0"]
LOCAL = ["+rocm7.2", "+gitf8f4d8f", "+cpu"]
TORCHES = [*OLD, *(f"{version}{local}" for version in NEW for local in LOCAL), "2.10.0a0+git8d1b7f9", "2.15.0.dev1+cpu"]


def test_no_requirement_leads_a_resolver_away_from_an_installed_torch(checkout: Path) -> None:
    """Of this project, its extras and all that they require, as installed here."""
    project = tomllib.loads((checkout / "pyproject.toml").read_text())["project"]
    lines = [*project["dependencies"], *(line for lines in project["optional-dependencies"].values() for line in lines)]
    waiting, seen, bounds = [(line, "hf-rocm-tune") for line in lines], set(), []
    while waiting:
        line, by = waiting.pop()
        wanted = Requirement(line)
        if wanted.marker and not any(wanted.marker.evaluate({"extra": extra}) for extra in ("", *wanted.extras)):
            continue
        if re.match("torch|triton|pytorch", wanted.name):
            bounds.append((by, wanted))
        elif (wanted.name, frozenset(wanted.extras)) not in seen:
            seen.add((wanted.name, frozenset(wanted.extras)))
            try:
                required = metadata.requires(wanted.name) or []
            except metadata.PackageNotFoundError:
                continue  # of another platform, or an extra that is not installed here
            for further in required:
                marker = Requirement(further).marker
                if not marker or any(marker.evaluate({"extra": extra}) for extra in ("", *wanted.extras)):
                    waiting.append((further.partition(";")[0], wanted.name))
    assert {by for by, _ in bounds} >= {"hf-rocm-tune", "accelerate", "peft", "bitsandbytes"}
    refused = [
        f"{by} requires {wanted}, which refuses {version}"
        for by, wanted in bounds
        for version in (TORCHES if wanted.name == "torch" else [])
        if not wanted.specifier.contains(version, prereleases=True)
    ]
    pinned = [f"{by} requires {wanted}" for by, wanted in bounds if wanted.name != "torch" and wanted.specifier]
    assert refused + pinned == []


@pytest.mark.long
@pytest.mark.parametrize("version", TORCHES)
def test_pip_and_uv_leave_an_installed_torch(checkout: Path, tmp_path: Path, version: str) -> None:
    """Needs a package index. An extra is asked for, too."""
    python = environment_with(tmp_path / "venv", version)
    tools = {
        "pip": [sys.executable, "-m", "pip", "--python", python, "install", "--dry-run", "--quiet", "--report", "-"]
    }
    if uv := shutil.which("uv", path=os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])):
        tools["uv"] = [uv, "pip", "install", "--dry-run", "--python", python]
    for tool, command in tools.items():
        done = subprocess.run(
            [*command, f"{checkout}[loggers,kernel-check]"], capture_output=True, text=True, check=False
        )
        if done.returncode and "index" in done.stderr and "ResolutionImpossible" not in done.stderr:
            pytest.skip("no package index can be reached")
        assert done.returncode == 0, done.stderr
        if tool == "pip":
            names = {one["metadata"]["name"].lower() for one in json.loads(done.stdout)["install"]}
        else:
            names = set(re.findall(r"^ [-+~] ([\w-]+)", done.stderr, flags=re.MULTILINE))
        assert "hf-rocm-tune" in names and "accelerate" in names
        assert not [name for name in names if name == "torch" or name.startswith("nvidia")], tool


def run_with_torch(checkout: Path, place: Path, version: str, *words: str) -> subprocess.CompletedProcess[str]:
    """A command of ours where a stand-in torch comes before the one of this environment."""
    stand_in(place, version)
    (place / "rows.jsonl").write_text('{"text": "a row"}\n')
    (place / "m").mkdir()
    (place / "m/config.json").write_text('{"model_type": "llama"}')
    path = os.pathsep.join([str(place), str(checkout)])
    return subprocess.run(
        [sys.executable, "-m", "hf_rocm_tune", *words],
        env={**os.environ, "PYTHONPATH": path},
        cwd=place,
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.parametrize(
    ("version", "fix"),
    [
        ("2.9.1+rocm6.4", 'pip install "torch>=2.10" --index-url https://download.pytorch.org/whl/rocm7.2'),
        ("2.8.0+cu128", 'pip install "torch>=2.10"'),
        ("2.9.0a0+git1234567", 'pip install "torch>=2.10" --index-url https://download.pytorch.org/whl/cpu'),
    ],
)
@pytest.mark.parametrize(
    "verb", [("sft", "--dataset", "rows.jsonl", "--model", "./m"), ("generate", "./m", "--prompt", "x")]
)
def test_an_old_torch_is_one_line_with_the_command_for_this_machine(
    checkout: Path, tmp_path: Path, version: str, fix: str, verb: tuple[str, ...]
) -> None:
    done = run_with_torch(checkout, tmp_path, version, *verb)
    assert done.stderr == f"hf-rocm-tune: error: torch {version} is too old, 2.10 or newer is needed: {fix}\n"
    assert done.returncode == 2


def test_an_old_torch_is_told_where_the_package_is_used_from_python(checkout: Path, tmp_path: Path) -> None:
    stand_in(tmp_path, "2.9.1+cpu")
    code = (
        "import hf_rocm_tune\ntry:\n hf_rocm_tune.VerifiedSFTTrainer\nexcept Exception as e: print(type(e).__name__, e)"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), str(checkout)])}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.startswith("UsageError torch 2.9.1+cpu is too old, 2.10 or newer is needed: pip install ")


def test_what_counts_as_too_old(setup_env: ModuleType) -> None:
    from hf_rocm_tune.machine.torch_build import is_supported
    from hf_rocm_tune.upstream import TESTED

    assert [version for version in TORCHES if not is_supported(version)] == OLD
    assert is_supported("2.10.0.dev20260101+rocm7.2") and not is_supported("2.9.0rc1") and is_supported("my-build")
    assert TESTED["torch"][0].startswith(".".join(map(str, setup_env.OLDEST_TORCH)) + ".")


def test_venv_of_the_users_own_is_refused_and_left_as_it_is(
    machine: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    machine.VENV.mkdir()
    (machine.VENV / "precious").write_text("kept")
    monkeypatch.setenv("HF_ROCM_TUNE_TORCH", "cpu")
    assert machine.main([]) == 2
    assert ".venv was not made by make setup" in capsys.readouterr().err
    assert [file.name for file in machine.VENV.iterdir()] == ["precious"]


def test_a_link_to_the_environment_of_another_checkout_is_refused_and_nothing_there_is_changed(
    machine: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = tmp_path / "other checkout"
    other.mkdir()
    state = json.dumps({"made_by": "setup", "state": "ready"})
    for name, text in ((machine.STATE.name, state), ("precious", "kept")):
        (other / name).write_text(text)
    machine.VENV.symlink_to(other)
    monkeypatch.setenv("HF_ROCM_TUNE_TORCH", "cpu")
    assert machine.main([]) == 2
    assert ".venv is a link to" in capsys.readouterr().err
    assert {file.name: file.read_text() for file in other.iterdir()} == {machine.STATE.name: state, "precious": "kept"}


@pytest.mark.long
def test_failed_setup_never_looks_finished_and_the_next_starts_afresh(
    machine: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HF_ROCM_TUNE_TORCH", str(tmp_path / "missing.whl"))
    for _ in range(2):
        assert machine.main([]) == 2
        assert "torch could not be installed" in capsys.readouterr().err
        assert json.loads(machine.STATE.read_text())["state"] == "installing"
        assert not (machine.VENV / "left over").exists()
        (machine.VENV / "left over").write_text("from the interrupted one")


def test_ready_holds_only_for_the_same_inputs(machine: ModuleType, tmp_path: Path) -> None:
    environment = machine.Environment(machine.overridden("cpu", "linux"))
    environment.python.parent.mkdir(parents=True)
    environment.python.touch()
    environment.write_state("installing", made_by="setup")
    assert not environment.is_ready()
    environment.write_state("ready", made_by="setup")
    assert environment.is_ready()
    assert not machine.Environment(machine.overridden("cuda", "linux")).is_ready(), "another torch"
    (tmp_path / "pyproject.toml").write_text("[project]\n")
    assert not machine.Environment(machine.overridden("cpu", "linux")).is_ready(), "another pyproject.toml"
    machine.STATE.write_text('{"state": "rea')
    assert not environment.is_ready(), "half a state file"


def build(target: str, source: Path, into: Path) -> Path:
    """Build the sdist or the wheel of the project in ``source``, without writing into it."""
    command = [sys.executable, "-m", "hatchling", "build", "-t", target, "-d", str(into)]
    done = subprocess.run(command, cwd=source, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    (built,) = into.glob("*.tar.gz" if target == "sdist" else "*.whl")
    return built


def test_wheel_built_from_the_sdist_is_complete(checkout: Path, tmp_path: Path) -> None:
    sdist = build("sdist", checkout, tmp_path)
    with tarfile.open(sdist) as archive:
        archive.extractall(tmp_path, filter="data")
    wheel = build("wheel", tmp_path / sdist.name.removesuffix(".tar.gz"), tmp_path)
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        entry_points = next(name for name in names if name.endswith("/entry_points.txt"))
        assert "hf-rocm-tune = hf_rocm_tune.cli:main" in archive.read(entry_points).decode()
    sources = {str(file.relative_to(checkout)) for file in (checkout / "hf_rocm_tune").rglob("*.py")}
    shipped = {f"hf_rocm_tune/accelerate_configs/{file.name}" for file in (checkout / "accelerate_configs").iterdir()}
    assert len(shipped) >= 4
    assert sources | shipped | {"hf_rocm_tune/py.typed"} <= names
    assert any(name.endswith("licenses/LICENSE") for name in names)
    assert not [
        name for name in names if name.split("/")[0] not in {"hf_rocm_tune", wheel.stem.split("-py3")[0] + ".dist-info"}
    ]


def test_every_import_is_a_declared_dependency(checkout: Path) -> None:
    project = tomllib.loads((checkout / "pyproject.toml").read_text())["project"]
    extras = [line for name, lines in project["optional-dependencies"].items() if name != "dev" for line in lines]
    declared = {line.split(">")[0].split("=")[0].lower() for line in [*project["dependencies"], *extras]}
    known = {
        "yaml": "pyyaml",
        "PIL": "pillow",
        "IPython": "ipython",
        "triton": "torch",
        "lm_eval": "lm-eval",
        "model_signing": "model-signing",
    }  # the GPU builds of torch bring triton
    for file in (checkout / "hf_rocm_tune").rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom) and not node.level:
                names = [node.module or ""]
            for name in {name.split(".")[0] for name in names} - set(sys.stdlib_module_names) - {"hf_rocm_tune"}:
                assert known.get(name, name) in declared, (
                    f"{file} imports {name}, which pyproject.toml does not declare"
                )


def test_help_lists_every_target(checkout: Path) -> None:
    done = subprocess.run(["make", "--no-print-directory"], cwd=checkout, capture_output=True, text=True, check=True)
    listed = {line.split()[0] for line in done.stdout.splitlines()}
    assert listed == {
        "help",
        "setup",
        "demo",
        "test",
        "unit",
        "test-long",
        "gpu",
        "evening",
        "drift",
        "lint",
        "format",
        "wheel",
        "clean",
    }


@pytest.mark.long
def test_the_newest_allowed_dependencies_train(checkout: Path, tmp_path: Path) -> None:
    """Installed afresh: pip takes the newest that the bounds allow. Needs a package index, and minutes."""
    copy = Path(shutil.copytree(checkout, tmp_path / "copy", ignore=shutil.ignore_patterns(".venv", ".git", "build")))
    environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
    environment |= {"HF_ROCM_TUNE_TORCH": "cpu"}
    made = subprocess.run([sys.executable, "scripts/setup_env.py"], cwd=copy, env=environment, check=False)
    if made.returncode:
        pytest.skip("no package index can be reached")
    python = copy / ".venv/bin/python"
    subprocess.run([python, "-m", "pip", "check"], check=True)
    command = [python, "-m", "pytest", "-q", "tests/e2e/test_journeys.py", "tests/test_upstream.py"]
    done = subprocess.run(command, cwd=copy, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-3000:]
