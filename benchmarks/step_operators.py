"""The operators of a step of an 8B model, their share of its time as counted, and where their code was executed.

    python benchmarks/step_operators.py [--tokens 4096] [--json FILE]

A LoRA and a QLoRA step (rank 16 on all linear layers, activations recomputed) of Llama 3 8B's shapes, with tensors
without memory: nothing is computed or measured. Each call counts as the longer of its operations at 50e12 a second and
the bytes that it reads and writes at 640e9, as `hf_rocm_tune/train/arithmetic/bounds.py` has them of a 7900 XT. What
a step's transfers, digests and sampled checks add is not in it, nor what a launch costs.

Whose code it is decides whether it was executed as gfx1100 machine code by `tests/gfx1100`: that of rocBLAS, hipBLASLt
and bitsandbytes was, and the Triton kernels of this project. torch's own kernels were not, nor was AOTriton's
attention: its build for ROCm is not in the package registries that the tests can reach.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.common import print_table

import torch  # isort: skip
from torch import Tensor, nn  # isort: skip
from torch.utils._python_dispatch import TorchDispatchMode  # isort: skip

OPERATIONS, BYTES = 50e12, 640e9
LAYERS, RANK, ROWS = 32, 16, 2
AMD, BITSANDBYTES, TRITON = "AMD's rocBLAS, hipBLASLt", "bitsandbytes' library", "Triton's, of this project"
AOTRITON, TORCH = "AOTriton's: not executed", "torch's own: not executed"
PRODUCTS = {"mm", "addmm", "bmm", "baddbmm"}
FREE = {
    "empty", "empty_like", "new_empty", "new_empty_strided", "empty_strided", "_unsafe_view", "_reshape_alias",
    "lift_fresh", "set_", "_local_scalar_dense",
}  # fmt: skip
"""Without a kernel, beside views."""
HALF_A_BYTE = 0.5 + 1 / 64 + 1 / 64 / 64
"""Of a weight in NF4 with its scales, which are 8-bit themselves."""


class Counted(TorchDispatchMode):
    """Counts the operators that are called within."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: dict[tuple[str, str], int] = defaultdict(int)
        self.seconds: dict[tuple[str, str], float] = defaultdict(float)

    def add(self, author: str, name: str, *, nbytes: float, operations: float = 0.0) -> None:
        """One call."""
        self.calls[author, name] += 1
        self.seconds[author, name] += max(operations / OPERATIONS, nbytes / BYTES)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        if func.namespace != "aten" or func.is_view or name in FREE:
            return found
        tensors = [each for each in torch.utils._pytree.tree_leaves((args, kwargs, found)) if isinstance(each, Tensor)]
        nbytes = sum(each.numel() * each.element_size() for each in tensors)
        if name in PRODUCTS:
            a, b = args[-2:] if name in ("mm", "bmm") else args[1:3]
            rows, inner, columns = a.shape[-2], a.shape[-1], b.shape[-1]
            count = a.shape[0] if a.dim() == 3 else 1
            self.add(AMD, name, nbytes=nbytes, operations=2.0 * count * rows * inner * columns)
        elif "scaled_dot_product" in name:
            query = args[1] if "backward" in name else args[0]
            batch, heads, length, width = query.shape
            passes = 5 if "backward" in name else 2
            causal = passes * batch * heads * length * length * width  # 2 operations each, for half of the pairs
            side = "backward" if "backward" in name else "forward"
            self.add(AOTRITON, f"attention, {side}", nbytes=nbytes, operations=float(causal))
        else:
            self.add(TORCH, name, nbytes=nbytes)
        return found


class FourBit(torch.autograd.Function):
    """A product with a weight that is dequantised before it, in both directions."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, layer: PackedLinear) -> Any:
        ctx.layer = layer
        return x @ layer.dequantised().t()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return gradient @ ctx.layer.dequantised(), None


class PackedLinear(nn.Linear):
    """Has no weight, but says what it takes to have one."""

    counted: Counted

    def dequantised(self) -> Tensor:
        """[out, in] in bfloat16."""
        size = self.out_features * self.in_features
        self.counted.add(BITSANDBYTES, "dequantise, 4 bit", nbytes=size * (2 + HALF_A_BYTE))
        return torch.empty(self.out_features, self.in_features, dtype=torch.bfloat16)

    def forward(self, x: Tensor) -> Any:
        return FourBit.apply(x.to(torch.bfloat16), self)


class HeadAndLoss(torch.autograd.Function):
    """The loss of this project: logits by a product, the loss and their gradient by a kernel, and a product back."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, head: Tensor, counted: Counted) -> Any:
        logits = hidden.to(head.dtype) @ head.t()
        counted.add(TRITON, "loss and its gradient", nbytes=2 * logits.numel() * logits.element_size())
        ctx.gradient = logits @ head
        return ctx.gradient.sum()

    @staticmethod
    def backward(ctx: Any, loss: Tensor) -> Any:
        return ctx.gradient * loss, None, None


def one_step(method: str, layers: int, tokens: int) -> Counted:
    """What a step with so many layers counts."""
    from peft import LoraConfig, get_peft_model
    from torch._subclasses.fake_tensor import FakeTensorMode
    from transformers import LlamaConfig, LlamaModel

    counted = Counted()
    config = LlamaConfig(
        hidden_size=4096, intermediate_size=14336, num_hidden_layers=layers, num_attention_heads=32,
        num_key_value_heads=8, vocab_size=128256, max_position_embeddings=8192, attn_implementation="sdpa",
    )  # fmt: skip
    with torch.device("meta"):
        model: Any = LlamaModel(config).to(torch.bfloat16)
        if method == "QLoRA":
            _pack(model, counted)
        lora = LoraConfig(r=RANK, lora_dropout=0.0, target_modules="all-linear")
        model = get_peft_model(model, lora, autocast_adapter_dtype=method == "LoRA")
    with FakeTensorMode():
        for module in model.modules():
            for name, given in module.named_parameters(recurse=False):
                like = torch.empty(given.shape, dtype=given.dtype)
                setattr(module, name, nn.Parameter(like, requires_grad=given.requires_grad))
            for name, given in module.named_buffers(recurse=False):
                setattr(module, name, torch.empty(given.shape, dtype=given.dtype))
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        model.enable_input_require_grads()
        model.train()
        head = torch.empty(config.vocab_size, config.hidden_size, dtype=torch.bfloat16)
        trained = [each for each in model.parameters() if each.requires_grad]
        optimizer = torch.optim.AdamW(trained, lr=1e-4, foreach=method == "LoRA")
        ids = torch.zeros(ROWS, tokens // ROWS, dtype=torch.long)
        with counted:
            with torch.autocast("cpu", torch.bfloat16):
                hidden = model(input_ids=ids, use_cache=False).last_hidden_state
                loss = HeadAndLoss.apply(hidden.reshape(tokens, -1), head, counted)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(trained, 1.0)
            if method == "LoRA":
                optimizer.step()
        if method == "QLoRA":
            for each in trained:  # weight and gradient in 2 bytes, two states in one, the first three read and written
                counted.add(BITSANDBYTES, "AdamW, 8 bit", nbytes=each.numel() * (2 * 2 + 2 + 2 * 2))
    return counted


def _pack(model: nn.Module, counted: Counted) -> None:
    for module in model.modules():
        for name, child in module.named_children():
            if type(child) is nn.Linear:
                packed = PackedLinear(child.in_features, child.out_features, bias=False, dtype=torch.bfloat16)
                packed.counted = counted
                setattr(module, name, packed)


def table(method: str, tokens: int) -> list[dict[str, Any]]:
    """Rows by share; those of one layer, times their number, and what is there once."""
    one, two = one_step(method, 1, tokens), one_step(method, 2, tokens)
    seconds = {key: one.seconds[key] + (two.seconds[key] - one.seconds[key]) * (LAYERS - 1) for key in two.seconds}
    calls = {key: one.calls[key] + (two.calls[key] - one.calls[key]) * (LAYERS - 1) for key in two.calls}
    total = sum(seconds.values())
    return [
        {"executed": author, "operator": name, "calls": calls[author, name], "share": seconds[author, name] / total}
        for author, name in sorted(seconds, key=lambda key: -seconds[key])
    ]


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=4096, help="of a step, in two rows")
    parser.add_argument("--json", type=Path, metavar="FILE", help="the result goes here")
    wanted = parser.parse_args()
    found: dict[str, Any] = {"note": "counted, nothing executed or measured", "command": sys.argv, "methods": {}}
    for method in ("LoRA", "QLoRA"):
        rows = table(method, wanted.tokens)
        by_author: dict[str, float] = defaultdict(float)
        for row in rows:
            by_author[row["executed"]] += row["share"]
        found["methods"][method] = {"shares": by_author, "operators": rows}
        print(f"\n{method}, a step of {wanted.tokens} tokens")
        print_table(["code", "share"], [[author, f"{share:.1%}"] for author, share in by_author.items()])
        print_table(
            ["code", "operator", "calls", "share"],
            [[row["executed"], row["operator"], row["calls"], f"{row['share']:.2%}"] for row in rows],
        )
    if wanted.json is not None:
        wanted.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
