"""A base on the Hub, an adapter trained on it, pushed and signed; and back: `verify`, plain PEFT and `generate`."""

from __future__ import annotations

import hashlib
import json
import re
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from huggingface_hub import snapshot_download
from safetensors.torch import load_file

from hf_rocm_tune.survive import manifest
from hf_rocm_tune.survive.manifest import MANIFEST_NAME, FileEntry, Manifest
from tests.e2e.command import CommandServer, Result
from tests.e2e.conftest import flags
from tests.publish.hub_server import TOKEN, USER, File, LoopbackHub, loopback_hub, use
from tests.publish.keys import make_pair

pytest.importorskip("model_signing")

BASE, RESULT = f"{USER}/small-base", f"{USER}/answers"
_WEIGHTS = "adapter_model.safetensors"


@dataclass(frozen=True)
class Published:
    """What is on the Hub, and what is here."""

    hub: LoopbackHub
    server: CommandServer
    base: Path
    out: Path
    room: Path

    def run(self, verb: str, *argv: str, token: str = "") -> Result:
        return self.server.run(*argv, env={"VERB": verb, "HF_TOKEN": token})

    def change(self, repo: str, path: str, change: Callable[[bytes], bytes]) -> None:
        """One more commit, in which a file is another."""
        files = dict(self.hub.store.repos[repo].files())
        files[path] = self.file(path, change(self.hub.store.content_of(files[path])))
        self.hub.store.repos[repo].add_commit("main", files, "change")

    def file(self, path: str, content: bytes) -> File:
        if not path.endswith(".safetensors"):
            return File(content=content, size=len(content))
        oid = hashlib.sha256(content).hexdigest()
        self.hub.store.objects[oid] = content
        return File(lfs=oid, size=len(content))


@pytest.fixture(scope="module")
def published(scratch: Path, model_of: Callable[[str], Path], messages: Path) -> Iterator[Published]:
    room = scratch / "published"
    room.mkdir()
    private, _ = make_pair(room, "mine")
    make_pair(room, "other")
    with loopback_hub() as hub:
        variables = {"HF_ENDPOINT": hub.url, "HF_HUB_OFFLINE": "0", "HF_HUB_DISABLE_XET": "1", "HF_TOKEN": ""}
        server = CommandServer(room / "commands", variables)
        made = Published(hub, server, model_of("llama3"), room / "out", room)
        repo = hub.store.create(BASE, private=False)
        files = {one.name: made.file(one.name, one.read_bytes()) for one in made.base.iterdir() if one.is_file()}
        repo.add_commit("main", files, "the base")
        settings = flags(
            model_name_or_path=BASE,
            dataset_name=messages,
            output_dir=made.out,
            max_steps=2,
            per_device_train_batch_size=2,
            max_length=64,
            save_strategy="no",
            learning_rate=0.02,
            disable_tqdm=True,
            doctor="off",
        )
        trained = server.run(*settings)
        assert trained.code == 0, trained.stderr[-2000:]
        assert "vLLM serves it as it is: --enable-lora" in trained.stdout
        pushed = made.run("push", str(made.out), RESULT, "--public", "--sign", str(private), token=TOKEN)
        assert pushed.code == 0 and "model.sig" in pushed.stderr + pushed.stdout, pushed.stderr[-2000:]
        assert f"--lora-modules NAME={RESULT}" in pushed.stdout
        yield made
        server.close()


@pytest.fixture
def restored(published: Published) -> Iterator[Published]:
    """What a test changes on the Hub is taken back."""
    before = {name: repo.branches["main"] for name, repo in published.hub.store.repos.items()}
    yield published
    for name, commit in before.items():
        published.hub.store.repos[name].branches["main"] = commit


def one_bit(content: bytes) -> bytes:
    return content[:-1] + bytes([content[-1] ^ 1])


@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")  # PEFT asks so
def test_pushed_and_back_it_is_what_was_trained(
    published: Published, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    done = published.run("verify", RESULT, "--key", str(published.room / "mine.pub.pem"))
    assert done.code == 0, done.stdout + done.stderr
    said = done.stdout
    assert re.search(r"as written: tester/answers: (\d+) of \1 files", said), said
    assert re.search(rf"the base {BASE} on the Hub, .*: (\d+) of \1 files are those that were trained on", said), said
    assert "signed with the key of mine.pub.pem" in said and "WRONG" not in said
    assert "100 % of the bytes on the device were verified" in said and "nothing differs" in said

    answered = published.run("generate", RESULT, "--prompt", "Hello", "--max_new_tokens", "4", "--temperature", "0")
    assert answered.code == 0 and "equal to its manifest (step 2)" in answered.stderr, answered.stderr

    from peft import AutoPeftModelForCausalLM

    use(published.hub, monkeypatch)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    pulled = snapshot_download(RESULT, cache_dir=tmp_path)
    base = snapshot_download(BASE, cache_dir=tmp_path)
    ids = torch.tensor([[1, 17, 300, 42, 5, 6]])
    logits = []
    for adapter in (pulled, str(published.out)):
        model = AutoPeftModelForCausalLM.from_pretrained(adapter, revision="main")
        assert model.peft_config["default"].base_model_name_or_path == BASE
        with torch.no_grad():
            logits.append(model(ids).logits)
            with model.disable_adapter():
                plain = model(ids).logits
    assert Path(base).is_dir() and torch.equal(*logits) and not torch.equal(logits[0], plain)


@pytest.mark.parametrize(
    ("repo", "path", "named"),
    [
        (RESULT, _WEIGHTS, r"adapter_model\.safetensors is changed \(.*\): \S*lora_\S+ differs"),
        pytest.param(RESULT, "tokenizer_config.json", r"tokenizer_config\.json is changed", marks=pytest.mark.long),
        (BASE, "model.safetensors", r"the base .*, is not what was trained on: model\.safetensors: its SHA-256 .*"),
        (BASE, "tokenizer.json", r"is not what was trained on: tokenizer\.json: its SHA-256 .*revision=[0-9a-f]{40}"),
        pytest.param(
            BASE, "config.json", r"is not what was trained on: config\.json: its SHA-256", marks=pytest.mark.long
        ),
    ],
)
def test_one_bit_on_the_hub_is_found_by_name(restored: Published, repo: str, path: str, named: str) -> None:
    restored.change(repo, path, one_bit)
    done = restored.run("verify", RESULT, "--key", str(restored.room / "mine.pub.pem"))
    wrong = [line for line in done.stdout.splitlines() if line.startswith("WRONG")]
    assert done.code == 3 and any(re.search(named, line) for line in wrong), done.stdout
    assert len(done.error_lines) == 1 and "Do not use it" in done.error_lines[0]
    signed = [line for line in wrong if "signature" in line]
    assert bool(signed) == (repo == RESULT) and all(path in line for line in signed)


def test_a_signature_of_another_and_a_manifest_that_fits_a_change(restored: Published) -> None:
    other = restored.run("verify", RESULT, "--key", str(restored.room / "other.pub.pem"))
    assert other.code == 3 and "it was signed with another key" in other.error_lines[0]

    # Whoever changes a file can write a manifest that fits it; the signature stays as it was.
    repo = restored.hub.store.repos[RESULT]
    changed = repo.files()["tokenizer_config.json"].content + b" "
    entry = FileEntry(bytes=len(changed), sha256=hashlib.sha256(changed).hexdigest())
    (restored.room / MANIFEST_NAME).write_bytes(repo.files()[MANIFEST_NAME].content)
    written = manifest.read(restored.room)
    assert isinstance(written, Manifest)
    forged = replace(written, files={**written.files, "tokenizer_config.json": entry})
    restored.change(RESULT, "tokenizer_config.json", lambda _: changed)
    restored.change(RESULT, MANIFEST_NAME, lambda _: manifest.to_json(forged).encode())
    fits = restored.run("verify", RESULT)
    assert fits.code == 0 and "who signed it; give the public key with --key" in fits.stdout
    found = restored.run("verify", RESULT, "--key", str(restored.room / "mine.pub.pem"))
    assert found.code == 3 and "integrity.json is not what was signed" in found.error_lines[0]

    # A push without a key takes the signature of what was there before away.
    again = restored.run("push", str(restored.out), RESULT, token=TOKEN)
    assert again.code == 0, again.stderr
    none = restored.run("verify", RESULT, "--key", str(restored.room / "mine.pub.pem"))
    assert none.code == 3 and "it has no signature (model.sig)" in none.error_lines[0]
    without = restored.run("verify", RESULT)
    assert without.code == 0 and "tester/answers: who wrote it: it is not signed" in without.stdout


def test_offline_the_cache_is_compared(
    published: Published, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from hf_rocm_tune import cli

    use(published.hub, monkeypatch)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    cached = Path(snapshot_download(BASE))
    snapshot_download(RESULT)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    asked = len(published.hub.requests)
    assert cli.main(["verify", RESULT]) == 0
    said = capsys.readouterr().out
    assert re.search(rf"the base {BASE} in the Hub's cache: (\d+) of \1 files", said), said
    weights = (cached / "model.safetensors").resolve()
    weights.write_bytes(one_bit(weights.read_bytes()))
    assert cli.main(["verify", RESULT]) == 3
    said = capsys.readouterr().out
    assert re.search(r"WRONG: .*model\.safetensors: its SHA-256 is not the recorded one", said), said
    assert len(published.hub.requests) == asked


def test_an_adapter_is_merged_into_a_base_of_pickles_here_and_on_the_hub(published: Published, tmp_path: Path) -> None:
    tensors = load_file(published.base / "model.safetensors")
    old = tmp_path / "old"
    shutil.copytree(published.base, old, ignore=shutil.ignore_patterns("*.safetensors"))
    names = sorted(tensors)
    shards = {"pytorch_model-00001-of-00002.bin": names[:5], "pytorch_model-00002-of-00002.bin": names[5:]}
    for file, own in shards.items():
        torch.save({name: tensors[name] for name in own}, old / file)
    index = {name: file for file, own in shards.items() for name in own}
    (old / "pytorch_model.bin.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}))
    repo = published.hub.store.create(f"{USER}/old", private=False)
    repo.add_commit("main", {one.name: published.file(one.name, one.read_bytes()) for one in old.iterdir()}, "old")
    merged = {}
    for number, base in enumerate((published.base, old, f"{USER}/old")):
        done = published.run("merge", str(published.out), str(tmp_path / f"{number}"), "--base", str(base))
        assert done.code == 0, done.stderr
        merged[number] = load_file(tmp_path / f"{number}" / "model.safetensors")
    assert "pickles (pytorch_model.bin)" in done.stderr and "not compared with the files" in done.stderr
    for other in (merged[1], merged[2]):
        assert merged[0].keys() == other.keys()
        assert all(torch.equal(merged[0][name], other[name]) for name in other)
    index[names[0]] = "../old/pytorch_model-00001-of-00002.bin"
    (old / "pytorch_model.bin.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}))
    refused = published.run("merge", str(published.out), str(tmp_path / "refused"), "--base", str(old))
    assert refused.code == 2 and "pytorch_model.bin.index.json" in refused.error_lines[0]
