"""What a merge holds in memory beside one file of its result does not grow with the layers. Counted, not timed."""

from __future__ import annotations

import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import AutoModelForCausalLM, LlamaConfig, PretrainedConfig, Qwen3MoeConfig

from hf_rocm_tune.publish.merge import merge
from tests.publish.merge_cases import EXPERTS, Case, lora, write_adapter

_COMMON = {"vocab_size": 512, "hidden_size": 128, "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 64}
CASES: dict[str, tuple[str, Case]] = {
    "linear layers, DoRA": ("dense", lora("", target_modules="all-linear", use_dora=True)),
    "experts": ("experts", lora("", target_modules=["q_proj"], target_parameters=EXPERTS)),
}


def config(kind: str, layers: int) -> PretrainedConfig:
    if kind == "dense":
        return LlamaConfig(**_COMMON, intermediate_size=1024, num_hidden_layers=layers)
    more = {"intermediate_size": 128, "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 128}
    return Qwen3MoeConfig(**_COMMON, **more, num_hidden_layers=layers)


def base_of(kind: str, layers: int, directory: Path) -> Path:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config(kind, layers), dtype=torch.bfloat16)
    model.save_pretrained(directory, max_shard_size=1_000_000)
    return directory


@pytest.mark.parametrize("name", CASES)
def test_the_peak_is_that_of_one_layer(name: str, tmp_path: Path) -> None:
    kind, case = CASES[name]
    peaks = []
    for layers in (2, 5):
        base = base_of(kind, layers, tmp_path / f"base-{layers}")
        adapter = write_adapter(case, base, tmp_path / f"adapter-{layers}")
        with CountedMemory() as counted:
            out = tmp_path / f"out-{layers}"
            merge(str(adapter), out, base_name=str(base), max_shard_bytes=1_000_000, say=lambda _: None)
        peaks.append(counted.peak)
        assert counted.now == 0  # nothing is kept
    assert 0 < peaks[1] < 1.2 * peaks[0]


def test_the_count_sees_a_model_that_is_loaded_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise the test above could pass because nothing is counted."""
    base = base_of("dense", 2, tmp_path / "base")
    monkeypatch.setenv("HF_DEACTIVATE_ASYNC_LOAD", "1")  # a count sees its own thread only; a merge has but one
    with CountedMemory() as counted:
        model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    assert counted.peak > 1.9 * sum(file.stat().st_size for file in base.glob("*.safetensors"))
    del model


# ---- Counts the host memory that torch operations allocate: bytes alive now, and their peak ----


class CountedMemory(TorchDispatchMode):
    """Within the block, `now` and `peak` in bytes."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0
        self.peak = 0
        self._known: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.overloadpacket is torch.ops.aten.set_:  # a tensor over memory that is there already: a mapped file, say
            return func(*args, **(kwargs or {}))
        given = {_key(leaf) for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)}
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor) and leaf.device.type == "cpu" and _key(leaf) not in given | self._known:
                self._count(leaf.untyped_storage())
        return result

    def _count(self, storage: torch.UntypedStorage) -> None:
        key, size = storage._cdata, storage.nbytes()
        self._known.add(key)
        self.now += size
        self.peak = max(self.peak, self.now)
        weakref.finalize(storage, self._forget, key, size)

    def _forget(self, key: int, size: int) -> None:
        self._known.discard(key)
        self.now -= size


def _key(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata if tensor.layout is torch.strided else -1
