"""The variables that guides, reports and documents name for gfx1100, held against the policy.

The list is typed here as data, so that a row that is lost, or a level that drifts, is noticed.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from dataclasses import replace

import pytest

from hf_rocm_tune import cli
from hf_rocm_tune.machine import decide as deciding
from hf_rocm_tune.machine import variables
from hf_rocm_tune.machine.variables import POLICY, Decision, MachineFacts, evaluate, explain, links_of

XT = MachineFacts(torch_version="2.13.0+rocm7.2", hip_version="7.2.26015", archs=("gfx1100",))
UNKNOWN = MachineFacts(
    torch_version=None,
    hip_version=None,
    archs=None,
    reasons={"torch_version": "no torch", "hip_version": "no torch", "archs": "no list of GPUs"},
)
PAIR = "expandable_segments:True,max_split_size_mb:512"

# variable, value, level on a healthy RX 7900 XT with torch 2.13 and ROCm 7.2, level where nothing is known,
# and the name that the user is told to use
NAMED = [
    ("HIP_VISIBLE_DEVICES, CUDA_VISIBLE_DEVICES, ROCR_VISIBLE_DEVICES", "0", "warn", "warn", ""),
    ("TORCH_ROCM_AOTRITON_ENABLE_EXPERIMENTAL", "1", "keep", "keep", ""),
    ("FLASH_ATTENTION_TRITON_AMD_ENABLE", "TRUE", "keep", "keep", ""),
    ("NCCL_P2P_DISABLE", "1", "keep", "keep", ""),
    ("NCCL_DEBUG", "INFO", "keep", "keep", ""),
    ("MIOPEN_USER_DB_PATH", "/var/lib/miopen", "keep", "keep", ""),
    ("MIOPEN_CUSTOM_CACHE_DIR", "/var/lib/miopen", "keep", "keep", ""),
    ("TORCH_BLAS_PREFER_HIPBLASLT", "0", "keep", "keep", ""),
    ("OMP_NUM_THREADS", "8", "keep", "keep", ""),
    ("PYTORCH_CUDA_ALLOC_CONF", PAIR, "error", "warn", ""),
    ("PYTORCH_HIP_ALLOC_CONF", PAIR, "error", "warn", ""),
    ("PYTORCH_ALLOC_CONF", PAIR, "error", "warn", ""),
    ("PYTORCH_ALLOC_CONF", "expandable_segments:True", "warn", "warn", ""),
    ("PYTORCH_ALLOC_CONF", "backend:cudaMallocAsync", "error", "warn", ""),
    ("PYTORCH_ALLOC_CONF", "backend:hipMallocAsync", "error", "warn", ""),
    ("HSA_OVERRIDE_GFX_VERSION", "11.0.0", "info", "warn", ""),
    ("HSA_OVERRIDE_GFX_VERSION", "10.3.0", "error", "warn", ""),
    ("PYTORCH_NO_HIP_MEMORY_CACHING", "1", "warn", "warn", ""),
    ("PYTORCH_NO_CUDA_MEMORY_CACHING", "1", "warn", "warn", ""),
    ("AMD_SERIALIZE_KERNEL", "3", "warn", "warn", ""),
    ("AMD_SERIALIZE_COPY", "3", "warn", "warn", ""),
    ("HIP_LAUNCH_BLOCKING", "1", "warn", "warn", ""),
    ("HSA_ENABLE_SDMA", "0", "info", "info", ""),
    ("HSA_ENABLE_PEER_SDMA", "0", "info", "info", ""),
    ("HIP_FORCE_DEV_KERNARG", "1", "info", "info", ""),
    ("HSA_FORCE_FINE_GRAIN_PCIE", "1", "info", "info", ""),
    ("HSA_ENABLE_IPC_MODE_LEGACY", "1", "warn", "warn", ""),
    ("HSA_NO_SCRATCH_RECLAIM", "1", "info", "info", ""),
    ("RCCL_DEBUG", "INFO", "info", "info", "NCCL_DEBUG"),
    ("RCCL_BUFFSIZE", "1", "info", "info", "NCCL_BUFFSIZE"),
    ("RCCL_SOCKET_IFNAME", "eth0", "info", "info", "NCCL_SOCKET_IFNAME"),
    ("RCCL_NCHANNELS", "8", "info", "info", "NCCL_MAX_NCHANNELS"),
    ("RCCL_TREE_THRESHOLD", "0", "info", "info", "NCCL_ALGO"),
    ("RCCL_RING_THRESHOLD", "0", "info", "info", "NCCL_ALGO"),
    ("NCCL_TREE_THRESHOLD", "0", "info", "info", "NCCL_ALGO"),
    ("HCCL_DEBUG", "INFO", "info", "info", "NCCL_DEBUG"),
    ("HIP_DISABLE_IPC", "1", "info", "info", "HSA_ENABLE_IPC_MODE_LEGACY"),
    ("PYTORCH_ROCM_DEVICE", "0", "info", "info", "HIP_VISIBLE_DEVICES"),
    ("HSA_UNALIGNED_ACCESS_MODE", "1", "info", "info", ""),
    ("MIOPEN_DISABLE_CACHE", "1", "warn", "warn", ""),
    ("PYTORCH_TUNABLEOP_ENABLED", "1", "info", "info", ""),
    ("TORCH_CUDA_SANITIZER", "1", "info", "info", ""),
    ("HSA_OVERRIDE_GFX_VERSION", "11.5.1", "error", "warn", ""),
    ("HSA_OVERRIDE_GFX_VERSION", "9.4.2", "error", "warn", ""),
    ("HSA_OVERRIDE_GFX_VERSION_1", "11.0.0", "info", "warn", ""),
    ("PAL_HIP_IPC_FLAG", "1", "keep", "keep", ""),
    ("RCCL_IB_DISABLE", "1", "info", "info", "NCCL_IB_DISABLE"),
    ("RCCL_NET_GDR_LEVEL", "3", "info", "info", "NCCL_NET_GDR_LEVEL"),
    ("RCCL_MAX_NCHANNELS", "8", "info", "info", "NCCL_MAX_NCHANNELS"),
    ("RCCL_MSCCL_ENABLE", "0", "keep", "keep", ""),
    ("RCCL_P2P_NET_DISABLE", "1", "keep", "keep", ""),
    ("RCCL_LL128_FORCE_ENABLE", "1", "keep", "keep", ""),
    ("RCCL_LOG_LEVEL", "1", "keep", "keep", ""),
    ("NCCL_SOCKET_IFNAME", "^lo", "keep", "keep", ""),
    ("NCCL_IB_DISABLE", "1", "keep", "keep", ""),
    ("NCCL_BUFFSIZE", "1", "keep", "keep", ""),
    ("NCCL_MAX_NCHANNELS", "8", "keep", "keep", ""),
    ("NCCL_ALGO", "Ring", "keep", "keep", ""),
    ("PYTORCH_ALLOC_CONF", "max_split_size_mb:32", "keep", "keep", ""),
    ("PYTORCH_ALLOC_CONF", "garbage_collection_threshold:0.95", "info", "info", ""),
    ("PYTORCH_ALLOC_CONF", "garbage_collection_threshold:0.8", "keep", "keep", ""),
    ("PYTORCH_ALLOC_CONF", "roundup_power2_divisions:32", "keep", "keep", ""),
    ("PYTORCH_ALLOC_CONF", "max_split_size_mb:19", "warn", "warn", ""),
    ("MIOPEN_USER_DB_PATH", "/tmp/miopen", "info", "info", ""),
    ("MIOPEN_ENABLE_LOGGING", "1", "keep", "keep", ""),
    ("MIOPEN_LOG_LEVEL", "4", "keep", "keep", ""),
    ("KMP_AFFINITY", "compact", "keep", "keep", ""),
]


@pytest.mark.parametrize(("names", "value", "level", "unknown_level", "instead"), NAMED)
def test_each_variable_that_is_named_has_a_row_of_the_right_level(
    names: str, value: str, level: str, unknown_level: str, instead: str
) -> None:
    present = dict.fromkeys(names.split(", "), value)
    (decision,) = evaluate(present, XT)
    assert decision.action == level
    assert bool(decision.cure) == (level != "keep")
    assert instead in f"{decision.cure} {decision.reason}"
    if instead:
        assert "ignored" in decision.reason
    (cautious,) = evaluate(present, UNKNOWN)
    assert cautious.action == unknown_level
    if unknown_level != level:
        assert "not certain here" in cautious.reason


def test_where_nothing_is_known_nothing_is_set_and_the_reason_is_given() -> None:
    assert not [one for one in evaluate({"HOME": "/root"}, UNKNOWN) if one.action == "set"]
    (decision,) = evaluate({"PYTORCH_ALLOC_CONF": PAIR}, UNKNOWN)
    assert "no torch" in decision.reason
    head = explain([decision], UNKNOWN).splitlines()[:2]
    assert "torch not known" in head[0]
    assert "no torch" in head[1] and "no list of GPUs" in head[1]
    assert "not known:" not in explain([], XT)


@pytest.mark.parametrize(
    "value",
    [
        *("max_split_size_mb:0", "max_split_size_mb:19", "max_split_size_mb:x", "max_split_size_mb:"),
        *("garbage_collection_threshold:0", "garbage_collection_threshold:1.0", "garbage_collection_threshold:x"),
        *("roundup_power2_divisions:3", "roundup_power2_divisions:0", "expandable_segments:true"),
        "max_split_size_mb:64,expandable_segments:yes",
    ],
)
def test_what_torch_refuses_is_said_before_torch_says_it(value: str) -> None:
    torch = pytest.importorskip("torch")
    assert "warn" in {one.action for one in evaluate({"PYTORCH_ALLOC_CONF": value}, XT) if "refuses" in one.reason}
    before = torch._C._accelerator_getAllocatorSettings()
    with pytest.raises((RuntimeError, ValueError, IndexError)):
        torch._C._accelerator_setAllocatorSettings(value)
    torch._C._accelerator_setAllocatorSettings(before)


@pytest.mark.parametrize(
    "value",
    [
        *("", ",,:::", "x" * 5000, "max_split_size_mb", "max_split_size_mb:20", "max_split_size_mb:\x00"),
        *("roundup_power2_divisions:[256:1,512:2,>:4]", "garbage_collection_threshold:" + "9" * 400, "a:b:c", "é:ü"),
    ],
)
def test_no_value_of_the_allocator_s_breaks_the_policy(value: str) -> None:
    for facts in (XT, UNKNOWN):
        for decision in evaluate({"PYTORCH_ALLOC_CONF": value}, facts):
            assert explain([decision])


def test_every_row_that_finds_fault_has_a_cure_and_every_row_a_source() -> None:
    for row in POLICY:
        assert row.source.strip() and row.reason.strip()
        assert bool(row.cure) == (row.action in ("info", "warn", "error"))


def test_every_issue_that_a_row_names_has_an_address() -> None:
    names = {name.strip() for row in POLICY for name in row.source.split(";")}
    issues = {name for name in names if "#" in name}
    assert len(issues) > 10
    for issue in issues:
        (link,) = links_of(issue)
        assert re.fullmatch(rf"https://github\.com/[\w-]+/[\w-]+/issues/{issue.split('#')[1]}", link)
    assert links_of("somebody said so; rccl#1129; rccl#1129") == ("https://github.com/ROCm/rccl/issues/1129",)
    assert links_of("") == links_of("unheard/of#1") == ()


@pytest.fixture
def judged_before() -> Iterator[None]:
    """This process has judged its variables on an RX 7900 XT; forgotten afterwards."""
    kept, decisions = dict(deciding._FACTS), list(variables.DECISIONS)
    variables.apply(os.environ, replace(XT, torch_version="2.9.1+rocm6.4", hip_version="6.4"), torch_loaded=True)
    yield
    deciding._FACTS.clear()
    deciding._FACTS.update(kept)
    variables.DECISIONS[:] = decisions


def test_a_second_look_knows_what_the_first_has_read(judged_before: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HSA_OVERRIDE_GFX_VERSION", "11.0.0")

    def said() -> Decision:
        made = variables.apply(os.environ, torch_loaded=True)
        return next(one for one in made if one.variable == "HSA_OVERRIDE_GFX_VERSION")

    assert (said().action, "not certain" in said().reason) == ("info", False)
    known = variables.known_facts()
    assert known is not None and known.archs == ("gfx1100",)
    monkeypatch.setenv("HIP_VISIBLE_DEVICES", "1")  # other GPUs may be visible now
    assert "not certain" in said().reason or said().action == "keep"


def test_the_command_puts_the_gravest_first_with_cure_and_address(
    judged_before: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    present = {"RCCL_DEBUG": "1", "PYTORCH_ALLOC_CONF": PAIR, "NCCL_DEBUG": "INFO"}
    monkeypatch.setattr(variables, "DECISIONS", evaluate(present, XT))
    assert cli.main(["env", "--strict"]) == 1
    shown = capsys.readouterr()
    order = [shown.out.index(name) for name in ("PYTORCH_ALLOC_CONF", "RCCL_DEBUG", "NCCL_DEBUG=INFO")]
    assert order == sorted(order)
    assert "cure: unset both" in shown.out
    assert "https://github.com/ROCm/legacy-rocm-build/issues/6603" in shown.out
    assert "a ROCm 6.4 build; visible AMD GPUs: gfx1100" in shown.out
    assert shown.err.strip().splitlines() == ["hf-rocm-tune env --strict: PYTORCH_ALLOC_CONF: see `hf-rocm-tune env`"]
    assert cli.main(["env", "--json"]) == 0
    listed = json.loads(capsys.readouterr().out)
    assert [one["links"] != [] for one in listed] == [True, True, True]
    assert cli.main(["env", "--export", "--strict"]) == 1
    assert capsys.readouterr().out == ""
