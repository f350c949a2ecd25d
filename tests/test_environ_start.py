"""A fresh process that imports the package: what it reads of torch and of the machine, sets, and leaves alone."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]


@pytest.mark.parametrize(
    ("text", "version", "rocm"),
    [
        ("__version__ = '2.13.0+cpu'\nhip: Optional[str] = None\n", "2.13.0+cpu", False),
        ("__version__ = '2.10.0+rocm7.1'\nhip: Optional[str] = '7.1.2'\n", "2.10.0+rocm7.1", True),
        ('__version__ = "2.4"\nhip = "6.1"\n', "2.4", True),
        ("__version__ = '2.4'\n", "2.4", None),
        ("", None, None),
        ("\x00\xff garbage", None, None),
    ],
)
def test_torch_is_read_as_text_and_never_imported(
    tmp_path: Path, text: str, version: str | None, rocm: bool | None
) -> None:
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch/__init__.py").write_text("raise SystemError('imported')\n")
    (tmp_path / "torch/version.py").write_text(text)
    code = (
        "from hf_rocm_tune.machine.variables import read_facts; f = read_facts(archs=()); "
        "assert (f.torch_version is None) == ('torch_version' in f.reasons); print((f.torch_version, f.is_rocm))"
    )
    assert run(code, {"PYTHONPATH": f"{tmp_path}:{ROOT}"}) == repr((version, rocm))


def run(code: str, extra: dict[str, str] | None = None) -> str:
    """What a fresh process prints on stdout and stderr together."""
    environ = {"PATH": "/usr/bin:/bin", "PYTHONPATH": str(ROOT), **(extra or {})}
    done = subprocess.run([sys.executable, "-c", code], env=environ, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return (done.stdout + done.stderr).strip()


def test_importing_the_package_imports_no_torch_and_says_nothing() -> None:
    assert run("import hf_rocm_tune, sys; assert 'torch' not in sys.modules; print(hf_rocm_tune.__version__[0])") == "0"


def test_the_lazy_names_are_listed_and_a_wrong_one_is_an_attribute_error() -> None:
    code = (
        "import hf_rocm_tune as h, sys\n"
        "assert {'VerifiedTransferMixin', 'VerifiedSFTTrainer', 'was_verified'} <= set(dir(h)) & set(h.__all__)\n"
        "assert not hasattr(h, 'VerifiedNothing') and 'torch' not in sys.modules"
    )
    assert run(code) == ""


# A stand-in for the installation and the kernel's files: all else is the package's own start.
START = """
import sys
sys.path.insert(0, {fake!r})
from pathlib import Path
import {first}
{patch}
import hf_rocm_tune, os
print(os.environ.get("HIP_VISIBLE_DEVICES"), os.environ.get("TORCH_ROCM_AOTRITON_ENABLE_EXPERIMENTAL"))
from hf_rocm_tune.machine import variables
print(*[d.action for d in variables.DECISIONS])
"""


@pytest.fixture
def two_gpus(tmp_path: Path) -> Path:
    """Root of a machine with a gfx1036 before an RX 7900 XT, and a ROCm torch 2.9 that does nothing."""
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch/__init__.py").write_text("")
    (tmp_path / "torch/version.py").write_text("__version__ = '2.9.1+rocm6.4'\nhip: Optional[str] = '6.4.4'\n")
    for node, version, size in ((0, 100306, 1 << 29), (1, 110000, 20 << 30)):
        directory = tmp_path / f"sys/class/kfd/kfd/topology/nodes/{node}"
        (directory / "mem_banks/0").mkdir(parents=True)
        (directory / "properties").write_text(f"simd_count 8\ngfx_target_version {version}\n")
        (directory / "mem_banks/0/properties").write_text(f"heap_type 1\nsize_in_bytes {size}\n")
    return tmp_path


def start(root: Path, first: str, extra: dict[str, str] | None = None) -> list[str]:
    # The reader's default root is the only thing that differs from a real start on such a machine.
    patch = (
        "import types\n"
        f"package = types.ModuleType('hf_rocm_tune'); package.__path__ = [{str(ROOT / 'hf_rocm_tune')!r}]\n"
        "sys.modules['hf_rocm_tune'] = package\n"
        "from hf_rocm_tune.machine import kfd\n"
        f"kfd.read_topology.__defaults__ = (Path({str(root)!r}),)\n"
        "del sys.modules['hf_rocm_tune']"
    )
    return run(START.format(fake=str(root), first=first, patch=patch), extra).splitlines()


def test_a_start_before_torch_hides_the_integrated_gpu_and_sets_what_is_needed(two_gpus: Path) -> None:
    assert start(two_gpus, "json") == ["1 1", "set set"]


def test_a_start_after_torch_changes_nothing_and_names_both_variables(two_gpus: Path) -> None:
    values, actions, *lines = start(two_gpus, "torch")
    assert (values, actions) == ("None None", "warn warn")
    assert ["HIP_VISIBLE_DEVICES" in lines[0], "AOTRITON" in lines[1]] == [True, True]
    assert all("too late" in line for line in lines)


def test_a_start_keeps_the_user_s_filter_and_flag(two_gpus: Path) -> None:
    user = {"HIP_VISIBLE_DEVICES": "0,1", "TORCH_ROCM_AOTRITON_ENABLE_EXPERIMENTAL": "0"}
    assert start(two_gpus, "json", user) == ["0,1 0", "keep keep"]
