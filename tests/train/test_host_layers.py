"""Kernels that are wrong in the same way in every call: a layer that the host computes again at the start finds them.

The fault sits in torch's dispatcher, below autograd, of the training's own thread: the host's thread has right kernels.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForCausalLM, BitsAndBytesConfig

from hf_rocm_tune.errors import CorruptionError
from hf_rocm_tune.train.arithmetic import layers
from hf_rocm_tune.train.arithmetic.layer_copy import LayerCopy
from hf_rocm_tune.train.arithmetic.rounding import Rounding, compare, plain_attention
from tests import tiny
from tests.train.trainers import Make

RANK = 4  # of `trainers.build`


class Wrong(TorchDispatchMode):
    """Within the block results of operators whose name contains ``name`` are multiplied by ``factor``."""

    def __init__(self, name: str, factor: float, *, only: Callable[[Any], bool] = lambda args: True, last: int = -1):
        super().__init__()
        self._name, self._factor, self._only, self._last = name, factor, only, last
        self.done = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if self._name in func.name() and self._only(args) and self.done != self._last:
            self.done += 1
            first = result[0] if isinstance(result, tuple) else result
            first.mul_(self._factor)
        return result


@pytest.fixture
def make(make: Make) -> Make:
    """On a processor only this mode has layers computed again."""

    def with_all_checks(*arguments: Any, extra: dict[str, Any] | None = None, **options: Any) -> Any:
        return make(*arguments, extra={"check_arithmetic": "every", **(extra or {})}, **options)

    return with_all_checks


def of_adapter(args: Any) -> bool:
    return any(isinstance(each, Tensor) and each.dim() == 2 and RANK in each.shape for each in args)


KERNELS: dict[str, tuple[str, Callable[[Any], bool]]] = {
    "SiLU": ("aten::silu", lambda args: True),
    "RMSNorm": ("aten::rsqrt", lambda args: True),
    "attention's backward": ("attention_for_cpu_backward", lambda args: True),
    "LoRA's products": ("aten::mm", of_adapter),
    "rotary embedding": ("aten::neg", lambda args: True),
}


def checked(trainer: Any) -> dict[str, Any]:
    """The report's row on the one layer."""
    described = trainer.describe()["arithmetic"]
    assert described["host_layers_refusal"] is None, described
    (row,) = described["host_layers"]
    return dict(row)


@pytest.mark.parametrize("kernel", KERNELS)
def test_a_kernel_that_is_always_wrong_ends_the_run(make: Make, kernel: str) -> None:
    name, only = KERNELS[kernel]
    trainer = make(max_steps=2)
    with Wrong(name, 1.05, only=only) as wrong, pytest.raises(CorruptionError, match=r"wrong each time") as caught:
        trainer.train()
    assert wrong.done and ("its output" in str(caught.value)) == (kernel != "attention's backward")
    counted = trainer.transfer_report.to_dict()["arithmetic"]
    assert (counted["layers"], counted["disagreements"], counted["recovered"]) == (1, 1, 0)
    assert trainer.transfer_report.to_dict()["incidents"][-1]["kind"] == "repeatable"


def test_by_default_a_processor_is_not_checked_by_itself_and_a_card_s_wrong_kernel_is_named(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    sampled = {"check_arithmetic": "sampled"}
    trainer = make(max_steps=1, extra=sampled)
    trainer.train()
    assert "by the kernels that would check it" in trainer.describe()["arithmetic"]["host_layers_refusal"]
    monkeypatch.setattr(layers, "_is_host", lambda device: False)
    trainer = make(max_steps=2, extra=sampled)
    with Wrong("aten::silu", 1.05):
        trainer.train()
    row = checked(trainer)
    assert "its output" in row["differs_in"] and trainer.state.global_step == 2
    counted = trainer.transfer_report.to_dict()
    assert (counted["arithmetic"]["layers"], counted["arithmetic"]["disagreements"]) == (1, 0)
    (incident,) = counted["incidents"]
    assert incident["outcome"] == "named" and "doctor --full" in incident["text"]


@pytest.mark.parametrize("way", ["float32", "bf16", "nf4", "all weights"])
def test_a_right_layer_is_far_within_the_bound(make: Make, model_path: Any, way: str) -> None:
    model: Any = None
    if way == "all weights":
        model = AutoModelForCausalLM.from_pretrained(model_path)
    elif way == "nf4":
        four = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4")
        model = AutoModelForCausalLM.from_pretrained(model_path, quantization_config=four)
        model = get_peft_model(model, LoraConfig(r=RANK, target_modules="all-linear", task_type="CAUSAL_LM"))
    trainer = make(model=model, bf16=way == "bf16", max_steps=2)
    trainer.train()
    row = checked(trainer)
    assert row["layer"].endswith("layers.0") and row["tokens"] == 16 and not row["says_nothing_of"]
    assert row["tensors"] == 2 + (9 if way == "all weights" else 14)
    assert 0 < row["largest"] < 0.9 and 0 < row["widest"] < layers.WIDE


def test_what_is_wrong_once_is_computed_again_and_the_training_goes_on(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    stock = layers.HostLayers._on_device

    def harmed(self: Any, task: Any, given: Any) -> Any:
        found = stock(self, task, given)
        if not task.on_device.tensors:
            found.tensors["its output"][0, 3] *= 2
        return found

    monkeypatch.setattr(layers.HostLayers, "_on_device", harmed)
    trainer = make(max_steps=2)
    trainer.train()
    counted = trainer.transfer_report.to_dict()["arithmetic"]
    assert (counted["layers"], counted["disagreements"], counted["recovered"]) == (1, 1, 1)


class Activation(nn.Module):
    """An activation that is called as a function, whose derivative jumps."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name

    def forward(self, x: Tensor) -> Tensor:
        return JUMPS[self.name](x)


JUMPS: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": functional.relu,
    "in place": lambda x: (x * 1).relu_(),
    "clamp": lambda x: x.clamp(min=0),
    "mask": lambda x: torch.where(x < 0, 0.1 * x, x),
    "leaky": lambda x: functional.leaky_relu(x, 0.2),
    "hardswish": functional.hardswish,
}


def jumping(make: Make, model_path: Any, name: str, **options: Any) -> Any:
    model = AutoModelForCausalLM.from_pretrained(model_path)
    for module in model.modules():
        if hasattr(module, "act_fn"):
            module.act_fn = Activation(name)
    return make(model=model, **options)


@pytest.mark.parametrize("name", JUMPS)
def test_an_activation_whose_derivative_jumps_is_no_fault(make: Make, model_path: Any, name: str) -> None:
    """Rounding moves some numbers past the limit: small OPTs were accused of it."""
    trainer = jumping(make, model_path, name, max_steps=1, bf16=True)
    trainer.train()
    assert checked(trainer)["largest"] < 0.9


@pytest.mark.parametrize(
    ("name", "operator"), [("relu", "aten::relu"), ("in place", "aten::relu_"), ("clamp", "aten::clamp")]
)
def test_a_wrong_activation_whose_derivative_jumps_is_found(
    make: Make, model_path: Any, name: str, operator: str
) -> None:
    trainer = jumping(make, model_path, name, max_steps=1)
    in_layer = lambda args: args[0].dim() == 3  # noqa: E731
    with Wrong(operator, 1.05, only=in_layer) as wrong, pytest.raises(CorruptionError, match="wrong each time"):
        trainer.train()
    assert wrong.done


def test_a_comparison_that_is_wrong_is_found(make: Make, model_path: Any) -> None:
    class Flipped(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            result = func(*args, **(kwargs or {}))
            if func.name() == "aten::lt.Scalar" and result.dim() == 3:
                result[..., :8].logical_not_()
            return result

    trainer = jumping(make, model_path, "mask", max_steps=1)
    with Flipped(), pytest.raises(CorruptionError, match="the side of a limit of lt"):
        trainer.train()


def test_the_training_is_the_same_with_and_without(make: Make) -> None:
    results = []
    for mode in ("every", "off"):
        trainer = make(max_steps=3, lora={"lora_dropout": 0.2}, extra={"check_arithmetic": mode})
        trainer.train()
        results.append({name: each.detach().clone() for name, each in trainer.model.named_parameters()})
        refusal = trainer.describe()["arithmetic"]["host_layers_refusal"]
        assert refusal == (None if mode == "every" else "--check_arithmetic off")
    assert all(torch.equal(results[0][name], results[1][name]) for name in results[0])


def test_a_layer_that_the_host_cannot_compute_is_said_in_one_line(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    def build(self: Any) -> Any:
        raise RuntimeError("no kernel for the host\nand more")

    monkeypatch.setattr(layers.LayerCopy, "build", build)
    trainer = make(max_steps=1)
    trainer.train()
    described = trainer.describe()["arithmetic"]
    (row,) = described["host_layers"]
    assert row["refusal"].endswith("layers.0 cannot be computed on the host: RuntimeError: no kernel for the host")
    assert described["host_layers_refusal"] == row["refusal"]


def test_experts_are_chosen_as_on_the_device_and_a_wrong_choice_is_found(tmp_path: Any, make: Make) -> None:
    adapted = {"target_modules": ["q_proj"], "target_parameters": ["mlp.experts.gate_up_proj"]}
    trainer = make(model=tiny.build("qwen3_moe", tmp_path), lora=adapted, bf16=True, max_steps=1)
    trainer.train()
    assert checked(trainer)["largest"] < 0.9

    class Last(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            result = func(*args, **(kwargs or {}))
            if func.name() == "aten::topk":
                worst = torch.topk(args[0], args[1], dim=-1, largest=False)
                result[0].copy_(worst.values)
                result[1].copy_(worst.indices)
            return result

    trainer = make(model=tiny.build("qwen3_moe", tmp_path), lora={"target_modules": ["q_proj"]}, max_steps=1)
    with Last(), pytest.raises(CorruptionError, match="the choice of experts"):
        trainer.train()


# ---- the bound --------------------------------------------------------------------------------------------------


def test_the_error_names_what_ended_the_run_not_what_was_right_when_it_was_repeated(tmp_path: Any, make: Make) -> None:
    trainer = make(model=tiny.build("qwen3_moe", tmp_path), lora={"target_modules": ["q_proj"]}, max_steps=40)
    wrong_once = Wrong("aten::topk", 1.5, last=1)
    with wrong_once, Wrong("aten::rsqrt", 1.05), pytest.raises(CorruptionError, match="computed again on the host"):
        trainer.train()
    outcomes = [incident["outcome"] for incident in trainer.transfer_report.to_dict()["incidents"]]
    assert outcomes == ["recovered", "stopped"]


def test_random_rounding_moves_a_result_as_its_dtype_does() -> None:
    x = torch.randn(64, 64, generator=torch.Generator().manual_seed(1))
    right = x.softmax(-1) @ x
    with Rounding(2.0**-8, 0.0, seed=1):
        moved = x.softmax(-1) @ x
    rounded = (x.bfloat16().softmax(-1) @ x.bfloat16()).float()
    by_chance, by_dtype = (moved - right).norm(), (rounded - right).norm()
    assert 0.3 * by_dtype < by_chance < 3 * by_dtype
    assert torch.equal(x.softmax(-1) @ x, right)


def test_weights_are_not_rounded_where_an_adapter_is_added_to_them() -> None:
    """PEFT parametrises the weights of experts, which sets them to themselves."""
    layer = nn.Linear(4, 4)
    before = layer.weight.detach().clone()
    with Rounding(2.0**-8, 0.0, seed=1, weights=layer.parameters()):
        nn.utils.parametrize.register_parametrization(layer, "weight", nn.Identity())
    assert torch.equal(layer.parametrizations.weight.original, before)


def test_a_copy_of_a_layer_shares_no_memory_with_it() -> None:
    layer = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4)).requires_grad_(False)
    copied = LayerCopy(layer, lambda tensor: tensor, None).build()
    memory = {each.data_ptr() for each in layer.parameters()}
    assert memory.isdisjoint(each.data_ptr() for each in copied.parameters())


def test_a_tensor_that_is_a_little_larger_everywhere_is_found() -> None:
    random = torch.Generator().manual_seed(1)
    wanted = torch.randn(64, 64, generator=random)
    noises = [0.01 * torch.randn(64, 64, generator=random) for _ in range(4)]
    rounded = [wanted + each for each in noises[1:]]
    assert compare("x", wanted + noises[0], wanted, rounded, 1e30).ratio < 1
    assert compare("x", (wanted + noises[0]) * 1.02, wanted, rounded, 1e30).scale > 1
    one_row = wanted + noises[0]
    one_row[5] *= 1.3
    assert compare("x", one_row, wanted, rounded, 1e30).row > 1
    assert compare("x", wanted * torch.nan, wanted, rounded, 1e30).ratio == float("inf")


@pytest.mark.parametrize("case", ["causal", "mask", "floats", "grouped"])
def test_attention_by_plain_products_is_torch_s(case: str) -> None:
    query = torch.randn(1, 4, 6, 8)
    key, value = torch.randn(2, 1, 2 if case == "grouped" else 4, 6, 8)
    seen = torch.ones(6, 6, dtype=torch.bool).tril()
    more: dict[str, Any] = {
        "causal": {"is_causal": True},
        "mask": {"attn_mask": seen},
        "floats": {"attn_mask": torch.where(seen, 0.0, -1e9), "scale": 0.3},
        "grouped": {"enable_gqa": True},
    }[case]
    wanted = torch.nn.functional.scaled_dot_product_attention(query, key, value, **more)
    assert torch.allclose(plain_attention(query, key, value, **more), wanted, atol=1e-6)
