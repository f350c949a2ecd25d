"""What TRL uses of vLLM, played by transformers: written as a package ``vllm`` that TRL finds and takes for vLLM 0.31.

What it is sent is written to ``sent-N.safetensors`` in the working directory.
"""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoModelForCausalLM


class RequestOutput(SimpleNamespace):
    pass


class SamplingParams(SimpleNamespace):
    pass


class LLM:
    def __init__(self, *, model: str, seed: int, **options: Any) -> None:
        self._model = AutoModelForCausalLM.from_pretrained(model).eval()
        self._weights = dict(self._model.named_parameters())
        self._chance = torch.Generator().manual_seed(seed)
        self._sent: dict[str, Tensor] = {}
        self._number = 0
        runner = SimpleNamespace(model=self)
        executor = SimpleNamespace(driver_worker=SimpleNamespace(model_runner=runner))
        config = SimpleNamespace(max_model_len=options["max_model_len"] or 256)
        self.llm_engine = SimpleNamespace(model_executor=executor, model_config=config)

    def load_weights(self, weights: list[tuple[str, Tensor]]) -> None:
        for name, value in weights:
            self._weights[name].data.copy_(value)
            self._sent[name] = value.detach().clone().contiguous()

    def reset_prefix_cache(self) -> None:
        save_file(self._sent, f"sent-{self._number}.safetensors")
        self._number += 1

    @torch.no_grad()
    def generate(self, prompts: list[Any], sampling_params: Any, use_tqdm: bool) -> list[RequestOutput]:
        return [self._answer(prompt["prompt_token_ids"], sampling_params.max_tokens) for prompt in prompts]

    def _answer(self, prompt: list[int], most: int) -> RequestOutput:
        tokens, logprobs = [], []
        for _ in range(most):
            last = self._model(torch.tensor([[*prompt, *tokens]])).logits[0, -1].float().log_softmax(0)
            tokens.append(int(torch.multinomial(last.exp(), 1, generator=self._chance)))
            logprobs.append({tokens[-1]: SimpleNamespace(rank=1, logprob=float(last[tokens[-1]]))})
        answer = SimpleNamespace(token_ids=tokens, logprobs=logprobs)
        return RequestOutput(prompt_token_ids=prompt, outputs=[answer])


def install(directory: Path) -> None:
    """Write this file as the package, with what TRL imports for a server and the metadata of an installed package."""
    files = {
        "__init__.py": Path(__file__).read_text(encoding="utf-8"),
        "sampling_params.py": "StructuredOutputsParams = dict\n",
        "utils/network_utils.py": "get_ip = None\n",
        "distributed/weight_transfer/nccl_common.py": "trainer_init = None\n",
        "distributed/weight_transfer/packed_tensor.py": "packed_nccl_broadcast_producer = None\n",
        "../vllm-0.31.0.dist-info/METADATA": "Metadata-Version: 2.1\nName: vllm\nVersion: 0.31.0\n",
        "../vllm-0.31.0.dist-info/top_level.txt": "vllm\n",
    }
    for name, text in files.items():
        file = directory / "vllm" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text, encoding="utf-8")
