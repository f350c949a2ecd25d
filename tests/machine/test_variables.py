"""The variable policy: each row applies where it should and nowhere else, and the user's value always stands."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from hf_rocm_tune import cli
from hf_rocm_tune.machine import variables
from hf_rocm_tune.machine.variables import (
    RULES,
    Decision,
    MachineFacts,
    announce,
    covers,
    evaluate,
    explain,
    read_facts,
    read_torch_file,
)

ROOT = Path(__file__).resolve().parents[2]
XT = MachineFacts(True, ("gfx1100",))
HALO = replace(XT, archs=("gfx1151",))
MIXED = replace(XT, archs=("gfx1036", "gfx1100"))
CPU = MachineFacts(False, ())
NO_TORCH = MachineFacts(None, None, "torch is gone; no kernel files")
PAIR = "expandable_segments:True,max_split_size_mb:512"
ALONE = "expandable_segments:True,garbage_collection_threshold:0.8"


# On an RX 7900 XT with the tested torch: what each rule of the policy does about a value.
ON_XT = {
    "error": """
        PYTORCH_HIP_ALLOC_CONF=backend:cudaMallocAsync HSA_OVERRIDE_GFX_VERSION=9.4.2 HSA_OVERRIDE_GFX_VERSION=11.5.1
        PYTORCH_ALLOC_CONF=backend:hipMallocAsync HSA_OVERRIDE_GFX_VERSION=nonsense
    """,
    "warn": """
        PYTORCH_NO_HIP_MEMORY_CACHING=1 AMD_SERIALIZE_KERNEL=3 AMD_SERIALIZE_COPY=3 HIP_LAUNCH_BLOCKING=1
        HSA_ENABLE_IPC_MODE_LEGACY=1 PYTORCH_ALLOC_CONF=expandable_segments:True
    """,
    "info": """
        HSA_OVERRIDE_GFX_VERSION=11.0.0 HSA_ENABLE_SDMA=0 HSA_ENABLE_PEER_SDMA=0 HIP_FORCE_DEV_KERNARG=1
        BNB_ROCM_VERSION=715 RCCL_DEBUG=INFO RCCL_P2P_DISABLE=1 RCCL_BUFFSIZE=1 RCCL_SOCKET_IFNAME=eth0
        RCCL_IB_DISABLE=1 RCCL_NET_GDR_LEVEL=3 RCCL_MAX_NCHANNELS=8 RCCL_NCHANNELS=8 RCCL_TREE_THRESHOLD=0
        NCCL_RING_THRESHOLD=0 HCCL_DEBUG=INFO HIP_DISABLE_IPC=1 PYTORCH_ROCM_DEVICE=0 HSA_UNALIGNED_ACCESS_MODE=1
    """,
}
# Variable(s), value, facts, action: with the above, a line for each rule and each of its conditions.
FIRES = [
    *((*pair.split("=", 1), XT, action) for action, pairs in ON_XT.items() for pair in pairs.split()),
    ("PYTORCH_CUDA_ALLOC_CONF", PAIR, XT, "error"),
    ("PYTORCH_HIP_ALLOC_CONF", " max_split_size_mb:32 , Expandable_Segments : true ", XT, "error"),
    ("PYTORCH_ALLOC_CONF", ALONE, XT, "warn"),
    ("PYTORCH_CUDA_ALLOC_CONF", "max_split_size_mb:64,backend:hipMallocAsync", XT, "error"),
    ("PYTORCH_NO_CUDA_MEMORY_CACHING", "1", CPU, "warn"),
    ("HSA_OVERRIDE_GFX_VERSION", "11.0.0", replace(XT, archs=("gfx1100", "gfx1100")), "info"),
    ("HSA_OVERRIDE_GFX_VERSION", "11.0.0", MIXED, "error"),
    ("HSA_OVERRIDE_GFX_VERSION_1", "11.0.0", MIXED, "error"),
    ("HSA_OVERRIDE_GFX_VERSION", "11.5.1", HALO, "info"),
    ("HSA_OVERRIDE_GFX_VERSION", "11.0.0", HALO, "error"),
    ("HSA_OVERRIDE_GFX_VERSION", "10.3.0", replace(XT, archs=("gfx1031",)), "info"),
    ("HSA_OVERRIDE_GFX_VERSION", "10.3.0", replace(XT, archs=("gfx1032", "gfx1036")), "info"),
    ("HSA_OVERRIDE_GFX_VERSION", "10.3.0", replace(XT, archs=("gfx1031", "gfx1100")), "error"),
    ("HSA_OVERRIDE_GFX_VERSION", "10.3.0", replace(XT, archs=("gfx1010",)), "error"),
]

SILENT_ON_XT = """
    NCCL_P2P_DISABLE=1 PYTORCH_ALLOC_CONF=max_split_size_mb:512 OMP_NUM_THREADS=8 NCCL_SOCKET_IFNAME=^lo
    PYTORCH_ALLOC_CONF=expandable_segments:False,max_split_size_mb:512 PYTORCH_ALLOC_CONF=backend:native
    PYTORCH_ALLOC_CONF=,,::: AMD_SERIALIZE_KERNEL=0 HIP_LAUNCH_BLOCKING= HSA_ENABLE_SDMA=1 HIP_FORCE_DEV_KERNARG=0
    HSA_ENABLE_IPC_MODE_LEGACY=0 RCCL_MSCCL_ENABLE=0 RCCL_SOCKET_=x NCCL_DEBUG=INFO HIP_VISIBLE_DEVICES=0
    HSA_OVERRIDE_GFX_VERSION= TORCH_ROCM_AOTRITON_ENABLE_EXPERIMENTAL=1
"""


def spoken(environ: dict[str, str], facts: MachineFacts, name: str) -> list[Decision]:
    return [one for one in evaluate(environ, facts) if one.variable == name]


@pytest.mark.parametrize(("name", "value", "facts", "action"), FIRES)
def test_a_row_fires_under_its_condition(name: str, value: str, facts: MachineFacts, action: str) -> None:
    environ = {name: value}
    (decision,) = spoken(environ, facts, name)
    assert (decision.action, decision.value) == (action, value) and decision.reason and decision.source
    assert environ == {name: value}, "nothing is changed"


@pytest.mark.parametrize("pair", SILENT_ON_XT.split())
def test_a_row_is_silent_without_its_condition(pair: str) -> None:
    assert evaluate(dict([pair.split("=", 1)]), XT) == []


def test_every_rule_of_the_policy_is_fired_by_the_table() -> None:
    unfired = {rule.reason for rule in RULES}
    for name, value, facts, _ in FIRES:
        for decision in evaluate({name: value}, facts):
            unfired -= {reason for reason in unfired if reason in decision.reason}
    assert unfired == set() and len(RULES) < 17


def test_a_healthy_machine_needs_nothing_and_hears_nothing() -> None:
    for facts in (XT, CPU, NO_TORCH, MIXED):
        assert evaluate({"PATH": "/usr/bin", "HOME": "/root", "LOCAL_RANK": "0"}, facts) == []


@pytest.mark.parametrize(("name", "value"), [(name, value) for name, value, _, action in FIRES if action == "error"])
def test_an_error_is_none_without_rocm_and_softer_where_something_is_not_known(name: str, value: str) -> None:
    assert evaluate({name: value}, CPU) == []
    (decision,) = evaluate({name: value}, NO_TORCH)
    assert decision.action == "warn" and "uncertain" in decision.reason and "torch is gone" in decision.reason
    assert "no kernel files" in explain([decision])


def test_a_recipe_may_set_real_names_and_nothing_that_loads_code() -> None:
    real = ("NCCL_DEBUG", "OMP_NUM_THREADS", "HSA_ENABLE_SDMA", "HIP_VISIBLE_DEVICES")
    assert all(map(covers, real))
    assert not any(map(covers, ("LD_PRELOAD", "NCCL_NET_PLUGIN", "HSA_TOOLS_LIB", "PYTHONPATH", "NCCL", "")))


def said(capsys: pytest.CaptureFixture[str], environ: dict[str, str]) -> list[str]:
    announce(evaluate(environ, XT), environ)
    return capsys.readouterr().err.splitlines()


def test_each_matter_is_one_line_once_per_process_tree(capsys: pytest.CaptureFixture[str]) -> None:
    environ = {"PYTORCH_ALLOC_CONF": PAIR + ",\nx:\x1b[31m" + "y" * 5000, "RCCL_DEBUG": "1"}
    lines = said(capsys, environ)
    assert len(lines) == 2 and lines[0].startswith("hf_rocm_tune: error: PYTORCH_ALLOC_CONF=")
    assert "\x1b" not in lines[0] and max(map(len, lines)) < 700
    assert said(capsys, dict(environ)) == []
    assert len(said(capsys, {**environ, "HIP_LAUNCH_BLOCKING": "1"})) == 1


def test_only_the_first_rank_speaks_and_quiet_silences_notes(capsys: pytest.CaptureFixture[str]) -> None:
    for rank, lines in {"0": 1, "": 1, "-1": 1, "1": 0}.items():
        environ = {"RCCL_DEBUG": "1", "HIP_LAUNCH_BLOCKING": "1", "LOCAL_RANK": rank, "HF_ROCM_TUNE_QUIET": "1"}
        assert ["warning: HIP_LAUNCH_BLOCKING" in line for line in said(capsys, environ)] == [True] * lines


def test_the_command_puts_the_gravest_first_with_fix_and_address(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    present = {"RCCL_DEBUG": "1", "PYTORCH_ALLOC_CONF": PAIR, "NCCL_DEBUG": "INFO"}
    chosen = Decision(variable="HIP_VISIBLE_DEVICES", action="set", value="0,2", reason="two cards", source="a page")
    monkeypatch.setattr(variables, "DECISIONS", [chosen, *evaluate(present, XT)])
    assert cli.main(["env", "--strict"]) == 1
    shown = capsys.readouterr()
    order = [shown.out.index(name) for name in ("PYTORCH_ALLOC_CONF", "HIP_VISIBLE_DEVICES=0,2", "RCCL_DEBUG")]
    assert order == sorted(order) and "fix: unset both" in shown.out
    assert "https://github.com/ROCm/legacy-rocm-build/issues/6603" in shown.out
    assert shown.err.strip().splitlines() == ["hf-rocm-tune env --strict: PYTORCH_ALLOC_CONF: see `hf-rocm-tune env`"]
    assert "No variable" in explain([])


@pytest.mark.parametrize(
    ("text", "version", "rocm"),
    [
        ("__version__ = '2.13.0+cpu'\nhip: Optional[str] = None\n", "2.13.0+cpu", False),
        ("__version__ = '2.10.0+rocm7.1'\nhip: Optional[str] = '7.1.2'\n", "2.10.0+rocm7.1", True),
        ("__version__ = '2.4'\n", "2.4", None),
        ("\x00\xff garbage", None, None),
    ],
)
def test_torch_is_read_as_text(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, version: str | None, rocm: bool | None
) -> None:
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch/version.py").write_text(text)
    monkeypatch.setattr(variables, "package_directory", lambda name: tmp_path / name if name == "torch" else None)
    assert (read_torch_file()[0].get("__version__"), read_facts(()).is_rocm) == (version, rocm)


def run(code: str, extra: dict[str, str] | None = None) -> str:
    """What a fresh process prints on stdout and stderr together."""
    environ = {"PATH": "/usr/bin:/bin", "PYTHONPATH": str(ROOT), **(extra or {})}
    done = subprocess.run([sys.executable, "-c", code], env=environ, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return (done.stdout + done.stderr).strip()


def test_the_import_brings_no_torch_and_the_lazy_names_are_listed() -> None:
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
print(os.environ.get("HIP_VISIBLE_DEVICES"))
from hf_rocm_tune.machine import variables
print(*[d.action for d in variables.DECISIONS])
"""


@pytest.fixture
def two_gpus(tmp_path: Path) -> Path:
    """Root of a machine with a gfx1036 before an RX 7900 XT, and a ROCm torch that does nothing."""
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch/__init__.py").write_text("")
    (tmp_path / "torch/version.py").write_text("__version__ = '2.13.0+rocm7.2'\nhip: Optional[str] = '7.2.26015'\n")
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
        "from hf_rocm_tune.machine import gpus\n"
        f"gpus.read_topology.__defaults__ = (gpus.Files(Path({str(root)!r})),)\n"
        "del sys.modules['hf_rocm_tune']"
    )
    return run(START.format(fake=str(root), first=first, patch=patch), extra).splitlines()


@pytest.mark.parametrize(("environ", "shown"), [({}, ["1", "set"]), ({"HIP_VISIBLE_DEVICES": "0,1"}, ["0,1", "keep"])])
def test_a_start_hides_the_integrated_gpu_and_keeps_the_user_s_filter(
    two_gpus: Path, environ: dict[str, str], shown: list[str]
) -> None:
    assert start(two_gpus, "json", environ) == shown


def test_a_start_after_torch_changes_nothing_and_names_the_variable(two_gpus: Path) -> None:
    value, actions, line = start(two_gpus, "torch")
    assert (value, actions) == ("None", "warn")
    assert "HIP_VISIBLE_DEVICES" in line and "too late" in line
