"""``generate``: what it prints is what the model says; faults on the way are found; wrong input is one line."""

from __future__ import annotations

import io
import json
import shutil
import signal
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub import snapshot_download
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

from hf_rocm_tune import cli
from hf_rocm_tune.foreign import visible
from hf_rocm_tune.publish.commands import talk
from hf_rocm_tune.publish.generate import Loaded, Settings, answer, loaded_model, render
from hf_rocm_tune.survive import manifest
from tests import tiny
from tests.publish.hub_server import USER, LoopbackHub
from tests.publish.merge_cases import EXPERTS, Case, build_base, ids, logits, lora, merged, reference, write_adapter

TOKENS = 10
QUESTION = "What comes next?"


@pytest.fixture(scope="module")
def classifier(made: dict[str, Path]) -> Path:
    """A model that judges texts and makes none."""
    directory = made["scratch"] / "classifier"
    model = AutoModelForSequenceClassification.from_config(AutoConfig.from_pretrained(made["base"]))
    model.save_pretrained(directory)
    tiny.build_tokenizer().save_pretrained(directory)
    return directory


@pytest.fixture
def run(made: dict[str, Path], capsys: pytest.CaptureFixture[str]) -> Any:
    """Runs ``generate NAME ...`` and gives code, standard output and standard error."""

    def command(name: str, *argv: str) -> tuple[int, str, str]:
        few = [] if "--max_new_tokens" in argv else ["--max_new_tokens", str(TOKENS)]
        code = cli.main(["generate", str(made.get(name, name)), *few, *argv])
        printed = capsys.readouterr()
        return code, printed.out, printed.err

    return command


def said(directory: Path, *, raw: bool = False, prompt: str = QUESTION) -> str:
    """What stock transformers says, the likeliest token each time."""
    tokenizer = AutoTokenizer.from_pretrained(directory)
    model = AutoModelForCausalLM.from_pretrained(directory)
    if raw:
        ids = tokenizer(prompt, return_tensors="pt")["input_ids"]
    else:
        chat = [{"role": "user", "content": prompt}]
        ids = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=True)[
            "input_ids"
        ]
    made = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=TOKENS, do_sample=False)
    return tokenizer.decode(made[0, ids.shape[1] :], skip_special_tokens=True)


def test_adapter_merged_model_and_stock_transformers_say_the_same(made: dict[str, Path], run: Any) -> None:
    wanted = said(made["merged"])
    for name in ("adapter", "merged"):
        code, out, err = run(name, "--prompt", QUESTION, "--temperature", "0")
        assert (code, out) == (0, wanted + "\n"), err
        assert "100 % of the bytes on the device verified" in err
    assert run("base", "--prompt", QUESTION, "--temperature", "0")[1] == said(made["base"]) + "\n" != wanted + "\n"


def test_a_model_without_a_template_takes_plain_text_and_says_so(made: dict[str, Path], run: Any) -> None:
    code, out, err = run("bare", "--prompt", QUESTION)
    assert (code, out) == (0, visible(said(made["bare"], raw=True)) + "\n")
    assert "has no chat template: prompts are taken as plain text" in err


def test_compare_shows_the_base_beside_the_adapter(made: dict[str, Path], run: Any) -> None:
    code, out, _ = run("adapter", "--prompt", QUESTION, "--compare", "--temperature", "0")
    head, base, beside, adapter = out.splitlines()[0], said(made["base"]), "--- adapter", said(made["merged"])
    assert code == 0
    assert head == f"--- base {made['base']}"
    before, _, after = out.partition(f"{beside} {made['adapter']}\n")
    assert before == f"{head}\n{base}\n" and after == adapter + "\n"


def test_json_has_both_and_says_how_it_ended(made: dict[str, Path], run: Any) -> None:
    code, out, _ = run("adapter", "--prompt", QUESTION, "--prompt", "Other", "--compare", "--json")
    rows = [json.loads(line) for line in out.splitlines()]
    assert code == 0 and [row["prompt"] for row in rows] == [QUESTION, "Other"]
    assert rows[0]["completion"] == said(made["merged"]) and rows[0]["base"] == said(made["base"])
    assert (rows[0]["tokens"], rows[0]["complete"]) == (TOKENS, False)


def test_the_same_seed_says_the_same_and_another_one_something_else(run: Any) -> None:
    drawn = [
        run("adapter", "--prompt", QUESTION, "--temperature", "1", "--top_k", "50", "--seed", seed)[1]
        for seed in ("1", "1", "2")
    ]
    assert drawn[0] == drawn[1] != drawn[2]


def test_prompts_from_a_file_and_from_standard_input(
    made: dict[str, Path], run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "one.txt").write_text(QUESTION)
    rows = [
        {"prompt": QUESTION},
        {"messages": [{"role": "user", "content": QUESTION}, {"role": "assistant", "content": "not\u2028 taken\x85"}]},
    ]
    (tmp_path / "many.jsonl").write_text("".join(json.dumps(row, ensure_ascii=False) + "\n\n" for row in rows))
    wanted = said(made["merged"])
    assert run("merged", "--file", str(tmp_path / "one.txt"))[1] == wanted + "\n"
    many = run("merged", "--file", str(tmp_path / "many.jsonl"))[1]
    assert many == f"=== prompt 1 of 2\n{wanted}\n=== prompt 2 of 2\n{wanted}\n"
    monkeypatch.setattr(sys, "stdin", io.StringIO(QUESTION))
    assert run("merged")[1] == wanted + "\n"


def test_an_answer_that_ends_by_itself_is_not_called_stopped(made: dict[str, Path], tmp_path: Path, run: Any) -> None:
    """The tokenizer's end token counts, which is the one that the adapter was trained with, not only the base's."""
    tokenizer = AutoTokenizer.from_pretrained(made["merged"])
    first = tokenizer(said(made["merged"]))["input_ids"][0]
    tokenizer.eos_token = tokenizer.convert_ids_to_tokens(first)
    adapter = write_adapter(lora("llama3"), made["base"], tmp_path / "ends")
    tokenizer.save_pretrained(adapter)
    code, out, _ = run(str(adapter), "--prompt", QUESTION, "--json")
    row = json.loads(out)
    assert (code, row["tokens"], row["complete"], row["completion"]) == (0, 1, True, "")


@pytest.mark.parametrize(("stage", "kind"), [("weights", "zero"), ("adapter", "flip"), ("batches", "zero")])
def test_faults_on_the_way_are_recovered_and_the_words_stay_the_same(
    stage: str, kind: str, made: dict[str, Path], run: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_ROCM_TUNE_FAULT", f"kind={kind},seed=3,stage={stage}")
    code, out, err = run("adapter", "--prompt", QUESTION, "--temperature", "0")
    assert (code, out) == (0, said(made["merged"]) + "\n"), err
    assert "faults are injected on request" in err
    assert "arrived wrong" in err


def test_a_fault_that_stays_ends_it_before_a_word_is_said(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_ROCM_TUNE_FAULT", "kind=flip,persist=1,stage=batches")
    code, out, err = run("adapter", "--prompt", QUESTION)
    assert (code, out) == (3, "")
    assert len([line for line in err.splitlines() if line.startswith("hf-rocm-tune: error:")]) == 1


ATTACHED: dict[str, Case] = {
    "whole modules": lora("qwen3", modules_to_save=["embed_tokens", "lm_head"]),
    "trained tokens": lora("qwen3", trainable_token_indices=[5, 17]),
    "experts": lora("qwen3_moe", target_modules=["q_proj"], target_parameters=EXPERTS),
}


@pytest.mark.parametrize("name", ATTACHED)
def test_what_is_attached_is_what_stock_peft_attaches(name: str, made: dict[str, Path]) -> None:
    case = ATTACHED[name]
    base = build_base(case, made["scratch"])
    adapter = write_adapter(case, base, made["scratch"] / "attached" / name)
    with loaded_model(Settings(model=str(adapter)), lambda _: None) as loaded:
        alone, wanted = reference(base, adapter)
        assert torch.equal(logits(loaded.model), wanted)
        with loaded.model.disable_adapter():
            assert torch.equal(logits(loaded.model), alone)
        assert loaded.covered.unverified == []
    with loaded_model(Settings(model=str(adapter), dtype="bfloat16"), lambda _: None) as half:
        found = logits(half.model)  # whole modules of float32 in a bfloat16 model too
        assert float((found - wanted).abs().max()) < 0.1 * float(wanted.abs().max())


def test_a_relative_base_is_found_from_elsewhere(
    made: dict[str, Path], tmp_path: Path, run: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The adapter names its base as the run was given it, from the directory in which the run was started."""
    shutil.copytree(made["base"], tmp_path / "project" / "models" / "base")
    adapter = Path(shutil.copytree(made["adapter"], tmp_path / "project" / "runs" / "one"))
    config = json.loads((adapter / "adapter_config.json").read_text())
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    for name, code in (("models/base", 0), ("./models/base", 0), ("./models/gone", 2)):
        (adapter / "adapter_config.json").write_text(json.dumps({**config, "base_model_name_or_path": name}))
        found = run("../project/runs/one", "--prompt", QUESTION)
        assert found[0] == code, found[2]
    assert "./models/gone does not exist: name a directory or a Hub id with --base" in found[2]


REFUSED: list[tuple[str, list[str], list[str]]] = [
    ("adapter", ["--prompt", " "], ["empty"]),
    ("adapter", ["--prompt", "x", "--file", "y"], ["--file", "not allowed with", "--prompt"]),
    ("adapter", ["--file", "gone.txt"], ["gone.txt cannot be read"]),
    ("adapter", ["--prompt", "x", "--temperature", "-1"], ["--temperature", "1e-6 or more"]),
    ("adapter", ["--prompt", "\udcff"], ["the prompt cannot be rendered"]),
    ("adapter", ["--prompt", "x", "--base", "./gone"], ["./gone does not exist", "--base"]),
    ("adapter", ["--prompt", "x", "--base", "owner/gone"], ["owner/gone", "--base names another base"]),
    ("adapter", ["--prompt", "word " * 400], ["tokens, and", "takes 256", "shorten"]),
    ("merged", ["--prompt", "x", "--compare"], ["--compare", "whole model"]),
    ("merged", ["--prompt", "x", "--base", "y"], ["--base y", "not an adapter"]),
    ("bare", ["--prompt", "x", "--system", "y"], ["--system needs a chat template"]),
    ("scratch", ["--prompt", "x"], ["neither adapter_config.json nor config.json"]),
    ("owner/nothing", ["--prompt", "x"], ["owner/nothing"]),
]


@pytest.mark.parametrize(("name", "argv", "named"), REFUSED)
def test_wrong_input_is_one_line(name: str, argv: list[str], named: list[str], run: Any) -> None:
    code, out, err = run(name, *argv)
    errors = [line for line in err.splitlines() if line.startswith("hf-rocm-tune: error:")]
    assert (code, out, len(errors)) == (2, "", 1), err
    assert all(part in errors[0] for part in named), errors[0]


def test_a_model_that_makes_no_text_is_refused(classifier: Path, run: Any) -> None:
    code, out, err = run(str(classifier), "--prompt", "x")
    assert (code, out) == (2, "") and "it gives scores and no text" in err


@pytest.mark.gpu
def test_on_an_accelerator_all_of_it_is_there_verified_and_says_the_same(made: dict[str, Path]) -> None:
    with loaded_model(Settings(model=str(made["adapter"])), lambda _: None) as loaded:
        assert {value.device.type for value in loaded.model.parameters()} == {"cuda"}
        assert loaded.covered.verified_bytes == loaded.covered.device_bytes > 0
        placed = loaded.place({"input_ids": ids()})
        with torch.no_grad():
            found = loaded.model(**placed, use_cache=False).logits.float().cpu()
    assert float((found - reference(made["base"], made["adapter"])[1]).abs().max()) < 1e-3


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ('{"prompt": "x"}\nnot json\n', ["line 2", "expected JSON"]),
        ('{"text": "x"}\n', ["line 1", "with 'prompt'"]),
        ('{"messages": [{"role": "assistant", "content": "x"}]}\n', ["line 1", "one of them the user's"]),
        ("", ["empty"]),
    ],
)
def test_a_wrong_row_is_named_by_its_line(text: str, named: list[str], run: Any, tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text(text)
    code, out, err = run("adapter", "--file", str(tmp_path / "rows.jsonl"))
    assert (code, out) == (2, "")
    assert all(part in err for part in named), err


def test_without_a_prompt_a_terminal_is_told_what_to_give(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = io.StringIO()
    monkeypatch.setattr(terminal, "isatty", lambda: True)
    monkeypatch.setattr(sys, "stdin", terminal)
    code, _, err = run("adapter")
    assert code == 2 and "give --prompt TEXT" in err


# ---- Merged, pushed, and answered from by its id on the Hub (a server on loopback); adapters by their id  ----


# huggingface_hub 2.4 hands bytes to its HTTP client in a way that the client calls outdated.
pytestmark = pytest.mark.filterwarnings("ignore:Use 'content=:DeprecationWarning")

ASK = ["--prompt", "What comes next?", "--max_new_tokens", "8", "--temperature", "0"]


def said_by(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    capsys.readouterr()
    assert cli.main(["generate", *argv, *ASK]) == 0
    return capsys.readouterr().out


def test_an_adapter_answers_by_its_id_and_is_merged_by_it(
    hub: LoopbackHub, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    base, adapter, out, _ = merged(lora("llama3"), tmp_path, "adapter")
    tiny.build_tokenizer().save_pretrained(adapter)
    (adapter / "README.md").write_text("---\nlibrary_name: peft\n---\n\n# Card\n")
    manifest.write(adapter, run_id="run-9", step=5, status="final")
    repo = f"{USER}/adapter"
    assert cli.main(["push", str(adapter), repo]) == 0, capsys.readouterr().err
    assert said_by(capsys, repo, "--base", str(base)) == said_by(capsys, str(out))
    pulled = Path(snapshot_download(repo))
    assert manifest.verify(pulled) == [], "a user can verify what was pulled with the manifest that came along"
    assert cli.main(["merge", repo, str(tmp_path / "again"), "--base", str(base)]) == 0
    assert "equal to its manifest (step 5)" in capsys.readouterr().err
    found, wanted = manifest.read(tmp_path / "again"), manifest.read(out)
    assert isinstance(found, manifest.Manifest) and isinstance(wanted, manifest.Manifest)
    assert found.tensors == wanted.tensors


# ---- chat: a conversation through a pipe and on a terminal; Ctrl-C stops an answer only ---------------------


def reply(loaded: Loaded, *turns: str) -> str:
    """What the model says to turns that alternate between user and assistant."""
    messages = [{"role": ("user", "assistant")[at % 2], "content": turn} for at, turn in enumerate(turns)]
    return answer(loaded, render(loaded, messages)).text


def test_each_turn_sees_what_was_said_before(loaded: Loaded, capsys: pytest.CaptureFixture[str]) -> None:
    found = talk(loaded, iter(["one\n", "\n", "two\n"]))
    first = reply(loaded, "one")
    second = reply(loaded, "one", first, "two")
    assert [message["content"] for message in found] == ["one", first, "two", second]
    assert capsys.readouterr().out == f"{first}\n{second}\n"


def test_commands_of_a_conversation(loaded: Loaded, capsys: pytest.CaptureFixture[str]) -> None:
    lines = ["/hlep", "one", "/reset", "two", "word " * 400, "exit", "never said"]
    brief = replace(loaded, settings=replace(loaded.settings, system="Be brief"))
    found = talk(brief, iter(lines))
    assert [message["content"] for message in found] == ["two", reply(brief, "two")]
    told = [line.removeprefix("hf-rocm-tune: ") for line in capsys.readouterr().err.splitlines()]
    told = [line for line in told if not line.startswith("stopped after")]
    assert told[0].startswith("/reset clears") and told[1] == "the conversation is cleared"
    assert told[2].endswith("shorten it; /reset starts over")


def test_ctrl_c_stops_the_answer_and_the_conversation_goes_on(
    loaded: Loaded, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pieces: list[str] = []

    class Output(io.StringIO):
        def write(self, text: str) -> int:
            pieces.append(text)
            if len(pieces) == 1:
                signal.raise_signal(signal.SIGINT)
            return len(text)

    monkeypatch.setattr(sys, "stdout", Output())
    found = talk(loaded, iter(["one", "two"]))
    monkeypatch.undo()
    assert "hf-rocm-tune: stopped\n" in capsys.readouterr().err
    assert found[1]["content"] == pieces[0]  # what was said until then stays
    assert found[3]["content"] == reply(loaded, "one", pieces[0], "two")


def test_through_a_pipe_only_answers_are_printed(
    made: dict[str, Path], loaded: Loaded, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("one\n/reset\none\n"))
    code = cli.main(["chat", str(made["adapter"]), "--max_new_tokens", "6", "--temperature", "0"])
    printed = capsys.readouterr()
    assert (code, printed.out) == (0, 2 * (reply(loaded, "one") + "\n"))
    assert "100 % of the bytes on the device verified" in printed.err


def test_at_a_terminal_ctrl_d_ends_the_conversation(
    made: dict[str, Path], loaded: Loaded, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    typed = iter(["one"])

    def read(prompt: str) -> str:
        if (found := next(typed, None)) is None:
            raise EOFError
        return found

    terminal = io.StringIO()
    monkeypatch.setattr(terminal, "isatty", lambda: True)
    monkeypatch.setattr(sys, "stdin", terminal)
    monkeypatch.setattr("builtins.input", read)
    code = cli.main(["chat", str(made["adapter"]), "--max_new_tokens", "6", "--temperature", "0"])
    printed = capsys.readouterr()
    assert (code, printed.out) == (0, f"{reply(loaded, 'one')}\n")
    assert "/reset clears" in printed.err
