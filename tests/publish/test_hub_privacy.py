"""No path, name or token of this machine gets into anything that is published, and nothing else is changed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml
from huggingface_hub import ModelCard

from hf_rocm_tune.errors import UsageError
from hf_rocm_tune.integrity import manifest
from hf_rocm_tune.publish.hub import PushSettings, push
from hf_rocm_tune.publish.staging import clean_card
from hf_rocm_tune.redaction import Private, find_in_file, hub_id_of, local_paths, scrub_json, scrub_text
from tests.publish.hub_fixtures import BASE, DATA, on_hub, write_run
from tests.publish.hub_server import TOKEN, USER, LoopbackHub, card_errors

# huggingface_hub 2.4 passes files as httpx2 no longer likes them (lfs.py, _upload_single_part).
pytestmark = pytest.mark.filterwarnings("ignore:Use 'content=:DeprecationWarning")

ENVIRON = {
    "USER": "planted-user",
    "HOME": "/home/planted-user",
    "HOSTNAME": "planted-host.lan",
    "WANDB_API_KEY": "k" * 40,
}
PRIVATE = Private.of_this_machine(ENVIRON, paths={BASE: "org/tiny", "/opt/kept here/d": ""}, secrets=[TOKEN, None])


@pytest.mark.parametrize(
    ("text", "published"),
    [
        ("loaded from /home/planted-user/runs/x7", "loaded from .../x7"),
        ("it is in /home/planted-user.", "it is in ~."),
        (f"`{BASE}/config.json`", "`org/tiny/config.json`"),
        ("/opt/kept here/d/part.jsonl", "d/part.jsonl"),
        ("base_model:adapter:/mnt/disk/llama", "base_model:adapter:.../llama"),
        ("file:///srv/hub/x", "file://.../x"),
        ("~/models/llama and ~other/models/y", ".../llama and .../y"),
        ("('/tmp/a/b', \"/data/c/d\")", "('.../b', \".../d\")"),
        ("in /root/.cache/huggingface/hub/models--org--name/snapshots/abc/config.json", "in .../org/name"),
        ("ssh planted-user@planted-host failed", "ssh user@host failed"),
        (f"token {TOKEN} and hf_{'a' * 34}", "token REDACTED and REDACTED"),
        (f"key {'k' * 40}", "key REDACTED"),
        ("https://bob:pass1234@example.org/x", "https://REDACTED@example.org/x"),
    ],
)
def test_what_is_private_is_replaced(text: str, published: str) -> None:
    assert scrub_text(text, PRIVATE) == published
    assert scrub_text(published, PRIVATE) == published, "what is public already is not changed again"


@pytest.mark.parametrize(
    "text",
    [
        "https://huggingface.co/org/name/blob/main/README.md",
        "/sys/class/kfd/kfd/topology/nodes and /usr/bin/cc -O3 and /dev/shm",
        "and/or, 3/4, text/html, model.layers.0/x",
        "</think> <|im_end|> /no_think",
        "POST /v1/chat/completions",
        "org/name and ./runs/x and ../data/y",
        "planted-users are not planted-user-7",
        "a token, a key and a password",
    ],
)
def test_what_is_public_stays(text: str) -> None:
    assert scrub_text(text, PRIVATE) == text


def test_names_stay_in_prose() -> None:
    private = Private.of_this_machine({"USER": "max", "HOME": "/home/max"})
    assert scrub_text("at most max tokens, max_length 5", private, names=False) == "at most max tokens, max_length 5"
    assert scrub_text("max is not in render; max_length 5", private) == "user is not in render; max_length 5"


def test_json_is_searched_to_its_last_leaf() -> None:
    before = {"/tmp/a/b": [{"x": f"{BASE}/y"}, 1, None, True, 0.5]}
    assert scrub_json(before, PRIVATE) == {".../b": [{"x": "org/tiny/y"}, 1, None, True, 0.5]}


def test_settings_are_searched_for_what_is_there(tmp_path: Path) -> None:
    settings = {
        "model": str(tmp_path),
        "datasets": [{"path": f"{tmp_path}/no"}, {"path": str(tmp_path)}],
        "n": 1,
        "x": ".",
    }
    assert local_paths(settings) == [str(tmp_path), str(tmp_path)]


def test_variables_that_only_sound_like_secrets_are_none() -> None:
    environ = {"TOKENIZERS_PARALLELISM": "falsefalse", "MAX_TOKENS": "100000000", "HF_TOKEN_PATH": "/x/y/zzzzzz"}
    assert Private.of_this_machine(environ).secrets == ()


@pytest.mark.parametrize(
    ("path", "name"),
    [
        ("/root/.cache/huggingface/hub/models--org--name/snapshots/abc", "org/name"),
        ("/x/models--gpt2/snapshots/abc", "gpt2"),
        ("/x/datasets--org--some--data", "org/some--data"),
        ("/x/models/org/name", None),
    ],
)
def test_the_hubs_cache_tells_the_id(path: str, name: str | None) -> None:
    assert hub_id_of(path) == name


def test_a_secret_is_found_across_the_pieces_in_which_a_file_is_read(tmp_path: Path) -> None:
    for start in ((1 << 20) - 5, 0, (2 << 20) - 1):
        file = tmp_path / str(start)
        file.write_bytes(b"\0" * start + TOKEN.encode() + b"\0" * 9)
        assert find_in_file(file, PRIVATE) == "a secret"
    weights = tmp_path / "w.safetensors"
    weights.write_bytes(len(TOKEN).to_bytes(8, "little") + TOKEN.encode() + b"\0" * 99)
    assert find_in_file(weights, PRIVATE) == "a secret"
    weights.write_bytes((2).to_bytes(8, "little") + b"{}" + TOKEN.encode())
    assert find_in_file(weights, PRIVATE) is None, "numbers are not searched"
    file.write_bytes(BASE.encode())
    assert find_in_file(file, PRIVATE) == f"the path {BASE}"
    file.write_bytes(b"/root /home/x/y /tmp/a/b")
    assert find_in_file(file, PRIVATE) is None, "a vocabulary may hold anything"


# ---- the card -------------------------------------------------------------------------------------------------


def card(**metadata: object) -> str:
    return f"---\n{yaml.safe_dump(metadata, sort_keys=False)}---\n\n# Text\n"


def data(text: str) -> dict[str, object]:
    assert card_errors(text) == [], "the Hub would refuse it"
    found: dict[str, object] = ModelCard(text).data.to_dict()
    return found


def test_a_card_without_anything_local_is_not_touched() -> None:
    text = card(base_model="org/name", datasets=["org/data", "squad"], tags=["lora", "base_model:adapter:org/name"])
    same, changes = clean_card(text, PRIVATE)
    assert same is text and changes == []


@pytest.mark.parametrize("base", [BASE, "~/models/x", "./x", "/nowhere/at/all", "file:///x/y"])
def test_a_local_base_model_is_taken_out_or_named(base: str) -> None:
    text = card(base_model=base, tags=[f"base_model:adapter:{base}", "lora"], library_name="peft")
    assert card_errors(text)
    without, changes = clean_card(text, PRIVATE)
    assert "base_model" not in data(without) and data(without)["tags"] == ["lora"] and changes
    assert data(without)["library_name"] == "peft"
    named, _ = clean_card(text, PRIVATE, base_model_id="org/tiny")
    assert data(named)["base_model"] == "org/tiny"
    assert data(named)["tags"] == ["lora"], "the Hub makes those of the base model itself"


def test_the_id_that_the_user_gives_is_added_to_a_card_without_one() -> None:
    assert data(clean_card(card(library_name="peft"), PRIVATE, base_model_id="org/tiny")[0])["base_model"] == "org/tiny"
    other = card(base_model="org/other")
    assert clean_card(other, PRIVATE, base_model_id="org/tiny")[0] is other, "the card has the last word"


def test_a_relative_directory_is_local_although_it_looks_like_an_id(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "models" / "llama").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert "base_model" not in data(clean_card(card(base_model="models/llama"), PRIVATE)[0])


def test_of_several_datasets_the_public_ones_stay() -> None:
    text, _ = clean_card(card(datasets=["org/data", DATA, "/x/datasets--org--cached/snapshots/a"]), PRIVATE)
    assert data(text)["datasets"] == ["org/data", "org/cached"]
    assert "datasets" not in data(clean_card(card(datasets=DATA), PRIVATE)[0])


def test_the_text_of_a_card_keeps_its_words() -> None:
    text = f"# planted-user's card\n\nmax 5 tokens, from `{BASE}`, https://x.org/a/b\n"
    assert clean_card(text, PRIVATE)[0] == "# planted-user's card\n\nmax 5 tokens, from `org/tiny`, https://x.org/a/b\n"


@pytest.mark.parametrize("block", ["a: [", "- a\n- b", "just words", "model-index: 3"])
def test_a_card_that_cannot_be_read_is_refused_in_one_line(block: str) -> None:
    with pytest.raises(UsageError, match=r"README\.md") as caught:
        clean_card(f"---\n{block}\n---\ntext", PRIVATE)
    assert "\n" not in str(caught.value)


# ---- a whole push ---------------------------------------------------------------------------------------------


def test_nothing_planted_gets_out(hub: LoopbackHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("USER", "planted-user")
    monkeypatch.setenv("SOME_API_KEY", "planted-key-0123456789")
    out = write_run(tmp_path / "planted-place" / "out", checkpoints=(4,))
    (out / "report.html").write_text(f"<p>{out} planted-key-0123456789</p>")
    said: list[str] = []
    push(out, f"{USER}/a", settings=PushSettings(checkpoints="all"), say=said.append)
    there = on_hub(hub, f"{USER}/a")
    leaks = {
        (path, planted)
        for path, content in there.items()
        for planted in ("planted-user", "planted-disk", "planted-place", "planted-key", TOKEN, str(tmp_path))
        if planted.encode() in content
    }
    assert leaks == set()
    sent = [one for one in hub.requests if TOKEN in one.path]
    assert sent == [] and TOKEN not in "\n".join(said)
    assert json.loads(there["adapter_config.json"])["base_model_name_or_path"] == "Tiny Llama"
    state = json.loads(there["checkpoint-4/trainer_state.json"])
    assert state["global_step"] == 4 and state["best_model_checkpoint"] == f"{USER}/a/checkpoint-4"
    report = json.loads(there["transfer_report.json"])
    assert report["findings"] == [{"text": "user is not in the group render; Tiny Llama/x is slow"}]


def test_the_base_model_is_named_as_the_user_says(hub: LoopbackHub, tmp_path: Path) -> None:
    out = write_run(tmp_path / "out")
    said: list[str] = []
    push(out, f"{USER}/a", settings=PushSettings(base_model_id="org/tiny"), say=said.append)
    there = on_hub(hub, f"{USER}/a")
    assert json.loads(there["adapter_config.json"])["base_model_name_or_path"] == "org/tiny"
    assert json.loads(there["tokenizer_config.json"])["name_or_path"] == "org/tiny"
    assert ModelCard(there["README.md"].decode()).data.base_model == "org/tiny"
    assert b"from `org/tiny`" in there["README.md"]


def test_a_secret_in_a_file_that_cannot_be_rewritten_stops_the_push(hub: LoopbackHub, tmp_path: Path) -> None:
    out = write_run(tmp_path / "out")
    (out / "loss.png").write_bytes(b"\x89PNG\0" + TOKEN.encode())
    listed = [*manifest.read(out).files, "loss.png"]  # type: ignore[union-attr]
    manifest.write(out, run_id="run-1", step=8, status="final", files=listed)
    with pytest.raises(UsageError, match=r"loss\.png holds a secret") as caught:
        push(out, f"{USER}/a")
    assert TOKEN not in str(caught.value) and hub.requests == []
