"""TRL's own tests of its trainers, as they are and with our mixin in front of each trainer.

    python benchmarks/upstream_suites.py TRL_SOURCES [--files test_sft_trainer.py ...] [--match TEXT] [--json FILE]

TRL_SOURCES is a checkout of TRL with ``tests`` and ``scripts``. The tests name models and data sets of the Hub; here
they are folders of the same names below the directory in which the tests run: the data made by TRL's own scripts, the
models of the same architectures and sizes with a small vocabulary and TRL's chat templates. What is compared is each
test's outcome: one that passes as it is must pass with the mixin. What fails as it is needs the real model, or is of
another version of TRL than the one that is installed.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import os
import re
import subprocess
import sys
import tempfile
from importlib import metadata
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from tests import tiny  # noqa: E402

FILES = ("test_sft_trainer.py", "test_dpo_trainer.py", "test_kto_trainer.py", "test_reward_trainer.py")
TRAINERS = ("SFTTrainer", "DPOTrainer", "KTOTrainer", "RewardTrainer", "GRPOTrainer")
ORG = "trl-internal-testing"
SIZE: dict[str, Any] = {"hidden_size": 8, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
GROUPED: dict[str, Any] = {**SIZE, "num_key_value_heads": 2}
MIXTURE = {**GROUPED, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "decoder_sparse_step": 1}
#: The configuration's class, its values, and TRL's template.
MODELS: dict[str, tuple[str, dict[str, Any], str]] = {
    "tiny-Qwen2ForCausalLM-2.5": ("Qwen2Config", GROUPED, "qwen2_5"),
    "tiny-Qwen3ForCausalLM": ("Qwen3Config", {**GROUPED, "head_dim": 8}, "qwen3"),
    "tiny-Qwen3MoeForCausalLM": ("Qwen3MoeConfig", {**MIXTURE, "head_dim": 8}, "qwen3"),
    "tiny-LlamaForCausalLM-3.2": ("LlamaConfig", GROUPED, "llama3_2"),
    "tiny-LlamaForCausalLM-3.1": ("LlamaConfig", GROUPED, "llama3_1"),
    "tiny-LlamaForCausalLM-3": ("LlamaConfig", GROUPED, "llama3"),
    "tiny-MistralForCausalLM-0.1": ("MistralConfig", GROUPED, "qwen2_5"),
    "tiny-MistralForCausalLM-0.2": ("MistralConfig", GROUPED, "qwen2_5"),
    "tiny-GPTNeoXForCausalLM": ("GPTNeoXConfig", SIZE, "qwen2_5"),
    "tiny-GemmaForCausalLM": ("GemmaConfig", {**GROUPED, "head_dim": 8}, "gemma"),
    "tiny-Gemma2ForCausalLM": ("Gemma2Config", {**GROUPED, "head_dim": 8}, "qwen2_5"),
    "tiny-CohereForCausalLM": ("CohereConfig", GROUPED, "cohere"),
    "tiny-Phi3ForCausalLM": ("Phi3Config", GROUPED, "phi3"),
    "tiny-Qwen2ForSequenceClassification-2.5": ("Qwen2Config", {**GROUPED, "num_labels": 1}, "qwen2_5"),
    "tiny-Qwen3ForSequenceClassification": ("Qwen3Config", {**GROUPED, "head_dim": 8, "num_labels": 1}, "qwen3"),
    "tiny-LlamaForSequenceClassification-3.2": ("LlamaConfig", {**GROUPED, "num_labels": 1}, "llama3"),
}
_PLUGIN = """
import trl
from hf_rocm_tune import VerifiedTransferMixin

for _name in {trainers!r}:
    _stock = getattr(trl, _name)
    _ours = type(_name, (VerifiedTransferMixin, _stock), {{}})
    setattr(trl, _name, _ours)
    setattr(__import__(_stock.__module__, fromlist=[_name]), _name, _ours)
"""


def build_models(place: Path) -> None:
    import torch
    import transformers

    for name, (kind, values, template) in MODELS.items():
        tokenizer = tiny.build_tokenizer(chat_template=False)
        tokenizer.chat_template = _template(template)
        tokenizer.model_max_length = 1_000_000
        ids = {f"{each}_token_id": getattr(tokenizer, f"{each}_token_id") for each in ("pad", "bos", "eos")}
        config = getattr(transformers, kind)(vocab_size=len(tokenizer), **ids, **values)
        auto = "SequenceClassification" if "Sequence" in name else "CausalLM"
        torch.manual_seed(0)
        make = getattr(transformers, f"AutoModelFor{auto}").from_config
        model = make(config, dtype=torch.bfloat16)
        model.save_pretrained(place / ORG / name)
        tokenizer.save_pretrained(place / ORG / name)


def _template(name: str) -> str:
    import trl

    folder = Path(str(trl.__file__)).parent / "chat_templates"
    return (folder / f"{name}.jinja").read_text(encoding="utf-8")


def build_data(sources: Path, place: Path) -> None:
    """The data sets by TRL's scripts, whose pushes to the Hub are written to folders here."""
    from datasets import DatasetDict

    configurations: dict[str, list[str]] = {}

    def push(made: Any, name: str, config_name: str = "default", **_: Any) -> None:
        for split, rows in made.items():
            file = place / name / config_name / f"{split}.parquet"
            file.parent.mkdir(parents=True, exist_ok=True)
            rows.to_parquet(str(file))
        configurations.setdefault(name, []).append(config_name)

    DatasetDict.push_to_hub = push
    for script in sorted((sources / "scripts").glob("generate_*_dataset.py")):
        spec = importlib.util.spec_from_file_location(script.stem, script)
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[script.stem] = module
        with contextlib.chdir(sources):
            spec.loader.exec_module(module)
            named = module.ScriptArguments()
            module.main(named.test_size, True, named.repo_id)
    for name, found in configurations.items():
        lines = ["---", "configs:"]
        for each in found:
            lines += [f"- config_name: {each}", "  data_files:"]
            for file in sorted((place / name / each).glob("*.parquet")):
                lines += [f"  - split: {file.stem}", f"    path: {each}/{file.name}"]
        (place / name / "README.md").write_text("\n".join([*lines, "---", ""]), encoding="utf-8")


def outcomes(place: Path, files: list[str], match: str, *, mixin: bool) -> dict[str, str]:
    """For each test what pytest says of it; ``mixin``: with ours in front of TRL's trainers."""
    (place / "with_mixin.py").write_text(_PLUGIN.format(trainers=TRAINERS), encoding="utf-8")
    command = [sys.executable, "-m", "pytest", "-q", "-rA", "--tb=line", "-p", "no:cacheprovider"]
    command = [*command, *(["-p", "with_mixin"] if mixin else []), *(["-k", match] if match else [])]
    env = {"PYTHONPATH": f"{ROOT}:{place}", "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "HF_HOME": str(place / "hf")}
    done = subprocess.run(
        [*command, "-o", "addopts=", *(f"tests/{file}" for file in files)],
        cwd=place,
        env={**os.environ, **env},
        capture_output=True,
        text=True,
        check=False,
    )
    found = re.findall(r"^(PASSED|FAILED|ERROR|SKIPPED|XFAIL|XPASS)\s+(tests/\S+)(.*)$", done.stdout, flags=re.M)
    if not found:
        raise SystemExit(done.stdout[-2000:] + done.stderr[-2000:])
    return {name: outcome + (said[:300] if outcome != "PASSED" else "") for outcome, name, said in found}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sources", type=Path)
    parser.add_argument("--files", nargs="+", default=list(FILES))
    parser.add_argument("--match", default="")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    sources = given.sources.resolve()
    with tempfile.TemporaryDirectory() as scratch:
        place = Path(scratch)
        (place / "tests").symlink_to(sources / "tests")
        build_models(place)
        build_data(sources, place)
        rows: dict[str, dict[str, str]] = {}
        for file in given.files:
            for name, mixin in (("as they are", False), ("with the mixin", True)):
                for test, outcome in outcomes(place, [file], given.match, mixin=mixin).items():
                    rows.setdefault(test, {})[name] = outcome
    passed = [each for each in rows.values() if each.get("as they are") == "PASSED"]
    lost = {test: each for test, each in rows.items() if each in passed and each.get("with the mixin") != "PASSED"}
    versions = {name: metadata.version(name) for name in ("trl", "transformers", "peft", "torch")}
    content = {
        "benchmark": "upstream_suites",
        "versions": versions,
        "tests": len(rows),
        "pass as they are": len(passed),
    }
    content |= {"pass with the mixin": len(passed) - len(lost), "lost": lost, "rows": rows}
    if given.json:
        given.json.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    print(json.dumps({name: each for name, each in content.items() if name != "rows"}, indent=1))


if __name__ == "__main__":
    main()
