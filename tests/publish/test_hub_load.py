"""What was pushed loads from the Hub with PEFT, by its name there, and is the adapter that was trained."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path

import huggingface_hub
import pytest
import torch
from huggingface_hub import constants, hf_hub_download, snapshot_download
from huggingface_hub.utils import disable_progress_bars, enable_progress_bars
from peft import AutoPeftModelForCausalLM, LoraConfig, PeftModel, get_peft_model
from transformers import AutoModelForCausalLM, AutoTokenizer

from hf_rocm_tune.integrity import manifest
from hf_rocm_tune.publish.hub import PushSettings, push
from tests import tiny
from tests.publish.hub_fixtures import QUICK, use
from tests.publish.hub_server import USER, LoopbackHub, loopback_hub

pytestmark = [
    # huggingface_hub 2.4 passes files as httpx2 no longer likes them (lfs.py, _upload_single_part).
    pytest.mark.filterwarnings("ignore:Use 'content=:DeprecationWarning"),
    # PEFT 0.21 reads an attribute that transformers 5.23 renamed: https://github.com/huggingface/peft/pull/2817
    pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning"),
]

REPO = f"{USER}/adapter"


@pytest.fixture(params=[False, True], ids=["lfs", "xet"])
def hub(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[LoopbackHub]:
    """A Hub with or without Xet, which this process uses, with an empty cache."""
    disable_progress_bars()
    with loopback_hub(xet=request.param) as server:
        use(server, monkeypatch, xet=request.param)
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
        monkeypatch.setattr("transformers.utils.hub._hf_api", None)  # it would remember the server of another test
        yield server
    huggingface_hub.close_session()
    enable_progress_bars()


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.build("llama3", tmp_path_factory.mktemp("models"))


@pytest.fixture
def trained(base: Path, tmp_path: Path) -> tuple[Path, torch.Tensor]:
    """An adapter that is not zero, as a run leaves it, and its logits."""
    out = tmp_path / "out"
    torch.manual_seed(0)
    model = get_peft_model(AutoModelForCausalLM.from_pretrained(base), LoraConfig(target_modules=["q_proj", "v_proj"]))
    for name, weight in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(weight)
    model.eval().save_pretrained(out)
    AutoTokenizer.from_pretrained(base).save_pretrained(out)
    manifest.write(out, run_id="run-1", step=1, status="final")
    with torch.no_grad():
        return out, model(torch.arange(16)[None]).logits


def test_peft_loads_it_by_its_name_on_the_hub(
    hub: LoopbackHub, base: Path, trained: tuple[Path, torch.Tensor], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, logits = trained
    done = push(out, REPO, settings=PushSettings(tags=("v1",), private=True), say=lambda _: None, patience=QUICK)
    loaded = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), REPO, revision="v1")
    with torch.no_grad():
        assert torch.equal(loaded.eval()(torch.arange(16)[None]).logits, logits)
    tokenizer = AutoTokenizer.from_pretrained(REPO)
    assert tokenizer("What is a checksum?") == AutoTokenizer.from_pretrained(base)("What is a checksum?")
    pulled = Path(snapshot_download(REPO, revision=done.commit))
    assert manifest.verify(pulled) == [], "a user can verify what was pulled with the manifest that came along"
    for name in ("adapter_model.safetensors", "tokenizer.json"):
        digests = {hashlib.sha256((place / name).read_bytes()).hexdigest() for place in (out, pulled)}
        assert len(digests) == 1
    # The published adapter names its base by the last part of the local path, so a copy of the base beside loads it.
    monkeypatch.chdir(base.parent)
    named = json.loads(Path(hf_hub_download(REPO, "adapter_config.json")).read_text())["base_model_name_or_path"]
    assert named == base.name
    again = AutoPeftModelForCausalLM.from_pretrained(REPO)
    with torch.no_grad():
        assert torch.equal(again.eval()(torch.arange(16)[None]).logits, logits)
