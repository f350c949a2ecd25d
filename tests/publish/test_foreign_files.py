"""A stranger's package, through every verb that reads it: one line, code 2, in time, and nothing outside is touched.

Each attack spoils a copy of an adapter, a run or a model in one way. `DEADLINE` is far above what a refusal takes (one
or two seconds) and far below what the hangs took; a run that passes it is killed, and fails.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from hf_rocm_tune.survive import manifest
from tests.publish.hub_server import write_run
from tests.publish.strangers import DEADLINE, DEEP, ESCAPES, READERS, Place, by_verb, edit, forge, sampled

CONFIG = "adapter_config.json"


NAMES = {
    "relative": "../../victim/evil.model",
    "from a folder": "sub/../../../victim/evil.model",
    "absolute": "ROOM/victim/evil.model",
    "not normal": ".//tokenizer.model",
    "long": "a" * 300 + ".model",
    "very long": "ab/" * 700 + "x.model",
    "escapes": f"{ESCAPES}.model",
    "backslashes": "..\\victim\\evil.model",
    "surrogate": "\udcff.model",
}


@pytest.mark.parametrize(("verb", "kind"), by_verb(NAMES, short=5))
def test_a_manifest_that_names_a_file_elsewhere(place: Place, verb: str, kind: str) -> None:
    name = NAMES[kind].replace("ROOM", str(place.room))
    place.seal(**{name: place.victim / "secret.model"})
    assert "integrity.json" in place.refused(verb)


@pytest.mark.parametrize(("verb", "listed"), by_verb([True, False]))
def test_a_link_in_an_adapter(place: Place, verb: str, listed: bool) -> None:
    (place.adapter / "own.model").symlink_to(place.victim / "secret.model")
    if listed:
        place.seal(**{"own.model": place.victim / "secret.model"})
    else:
        (place.adapter / manifest.MANIFEST_NAME).unlink()
    assert "own.model is a link" in place.refused(verb)


@pytest.mark.parametrize(
    ("verb", "file"), by_verb(["integrity.json", CONFIG, "adapter_model.safetensors", "tokenizer.json"])
)
def test_a_pipe_in_an_adapter(place: Place, verb: str, file: str) -> None:
    (place.adapter / file).unlink()
    os.mkfifo(place.adapter / file)
    assert file in place.refused(verb)


@pytest.mark.parametrize("verb", READERS)
def test_a_run_record_that_is_a_pipe_is_not_waited_for(place: Place, verb: str) -> None:
    os.mkfifo(place.adapter / "run.json")
    done = place.run(verb)
    assert done.code == 0, done.stderr


# Of catastrophic backtracking: each takes exponential time on names of modules.
PATTERNS = {
    "target_modules": r"((\w|\.)*)*\.no_such",
    "exclude_modules": r"([a-z_.\d]+)+!",
    "rank_pattern": {r"((\w+\.?)+)+\$": 4},
    "alpha_pattern": {r"(.*|.*\.)*?(\w|\d|_|\.)*\$!": 4},
    "modules_to_save": [r"(([a-z_0-9]+\.?)+)+!"],
}


@pytest.mark.parametrize(("verb", "field"), by_verb(PATTERNS, short=1))
def test_regular_expressions_that_do_not_end(place: Place, verb: str, field: str) -> None:
    edit(place.adapter / CONFIG, **{field: PATTERNS[field]})
    place.seal()
    assert "regular expressions take more than" in place.refused(verb)


ODD = {
    "targets": {"target_modules": [f"q_proj{ESCAPES}"]},
    "base": {"base_model_name_or_path": f"org/{ESCAPES}"},
    "task": {"task_type": ESCAPES},
    "depth": {"megatron_config": json.loads(DEEP[4900:5100])},
}


@pytest.mark.parametrize(("verb", "kind"), by_verb(ODD))
def test_an_adapter_configuration_with_escapes_or_depth(place: Place, verb: str, kind: str) -> None:
    edit(place.adapter / CONFIG, **ODD[kind])
    place.seal()
    assert CONFIG in place.refused(verb)


@pytest.mark.parametrize(
    ("verb", "content"), by_verb([DEEP, '{"a":' * 5000 + "1" + "}" * 5000, '{"r": ' + "9" * 5000 + "}", "[]"])
)
def test_an_adapter_configuration_that_is_none(place: Place, verb: str, content: str) -> None:
    (place.adapter / CONFIG).write_text(content)
    place.seal()
    assert CONFIG in place.refused(verb)


# ---- runs that are shown or published ------------------------------------------------------------------------------


@pytest.fixture
def result(place: Place) -> Path:
    return write_run(place.room / "package" / "result")


def reseal(result: Path, **more: Path) -> None:
    """The manifest of a result, with these files in it by any name."""
    found = manifest.read(result)
    assert isinstance(found, manifest.Manifest)
    listed = {name: manifest.entry_of(result / name) for name in found.files if name not in more}
    forge(result, listed | {name: manifest.entry_of(file) for name, file in more.items()})


@pytest.mark.parametrize("kind", sampled(NAMES, 3))
def test_what_a_forged_manifest_names_is_not_pushed(place: Place, result: Path, kind: str) -> None:
    reseal(result, **{NAMES[kind].replace("ROOM", str(place.room)): place.victim / "secret.model"})
    assert "integrity.json" in place.refused("push", str(result), "user/name")


@pytest.mark.parametrize("where", ["tokenizer.json", "sub/tokenizer.json"])
def test_a_link_in_a_result_is_not_pushed(place: Place, result: Path, where: str) -> None:
    if "/" in where:
        (result / "sub").symlink_to(place.victim)
        (place.victim / "tokenizer.json").write_text("{}")
    else:
        (result / where).unlink()
        (result / where).symlink_to(place.victim / "secret.model")
    reseal(result, **{where: (result / where).resolve()})
    assert "is a link" in place.refused("push", str(result), "user/name")


@pytest.mark.parametrize("file", ["run.json", "transfer_report.json", "training_log.json", "integrity.json"])
@pytest.mark.parametrize("verb", ["report", "push"])
def test_a_pipe_in_a_run(place: Place, result: Path, verb: str, file: str) -> None:
    (result / file).unlink(missing_ok=True)
    os.mkfifo(result / file)
    done = place.run(verb, str(result), *(["user/name"] if verb == "push" else []))
    assert done.code in ((0,) if verb == "report" else (1, 2)), done.stderr  # 1: there is no Hub
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    "log",
    [
        {"step": 1e308, "max_steps": 1e308, "log": [{"step": 1e308, "loss": 1.0}, {"step": 1.0, "loss": 2.0}]},
        {"step": 10**400, "log": [{"step": -1e308, "loss": 1e308}, {"step": 1e308, "loss": -1e308}]},
        {"step": -5, "log": [{"step": 2**63, "loss": 5e-324}, {"step": 2**63 + 4096, "loss": 1e-320}]},
        {"step": 3, "log": [{"step": step, "loss": 1e-300 * step} for step in range(4)]},
    ],
)
def test_a_log_with_absurd_steps_and_figures_is_shown(place: Place, result: Path, log: dict[str, Any]) -> None:
    (result / "training_log.json").write_text(json.dumps({"schema": 1, "run_id": "run-1", **log}))
    done = place.run("report", str(result))
    assert done.code == 0 and "Traceback" not in done.stderr, done.stderr[-2000:]


@pytest.mark.parametrize("file", ["run.json", "training_log.json", "transfer_report.json"])
@pytest.mark.parametrize(
    "content", [DEEP, '{"a":' * 300 + "1" + "}" * 300, '{"run_id": "\\ud800"}', '"' + "x" * 10**7 + '"']
)
def test_a_run_whose_files_are_absurd_is_shown(place: Place, result: Path, file: str, content: str) -> None:
    (result / file).write_text(content)
    done = place.run("report", str(result))
    assert done.code == 0 and f"{file}: it is not used" in done.stderr, done.stderr[-2000:]


def test_escapes_in_a_run_do_not_reach_the_terminal(place: Place, result: Path) -> None:
    for name in ("training_log.json", "transfer_report.json"):
        text = re.sub(r'"(\w+)": "', lambda found: f'"{found[1]}": "{ESCAPES!r}'.replace("'", ""), '{"run_id": "x"}')
        (result / name).write_text(text)
    (result / "training_log.json").write_text(json.dumps({"run_id": f"{ESCAPES}", "log": []}))
    done = place.run("report", str(result))
    assert done.code == 0 and not re.search(r"[\x1b\x07\x9b]", done.stdout + done.stderr)


# ---- models ---------------------------------------------------------------------------------------------------------

SHARDS = {name: value for name, value in NAMES.items() if name not in ("surrogate",)}


@pytest.mark.parametrize(("verb", "kind"), by_verb(["link", *SHARDS], short=4))
def test_a_shard_index_that_names_a_file_elsewhere(place: Place, verb: str, kind: str) -> None:
    tensors = load_file(place.base / "model.safetensors")
    (place.base / "model.safetensors").unlink()
    name = "model-00001-of-00001.safetensors"
    save_file(tensors, place.victim / name, metadata={"format": "pt"})
    named = name if kind == "link" else SHARDS[kind].replace("ROOM", str(place.room)).replace("evil.model", name)
    if kind == "link":
        (place.base / name).symlink_to(place.victim / name)
    index = {"metadata": {}, "weight_map": dict.fromkeys(tensors, named)}
    (place.base / "model.safetensors.index.json").write_text(json.dumps(index))
    assert "model.safetensors.index.json" in place.refused(verb)


CONFIGURATIONS: dict[str, dict[str, Any]] = {
    "num_hidden_layers": {"num_hidden_layers": 10**9},
    "heads": {"num_attention_heads": 10**9, "num_key_value_heads": 10**9},
    "nested": {"rope_scaling": json.loads(DEEP[4900:5100])},
    "experts": {"text_config": {"num_local_experts": 1e12}},
}


@pytest.mark.parametrize(("verb", "says"), by_verb(CONFIGURATIONS, (*READERS, "plan")))
def test_a_model_configuration_that_no_model_has(place: Place, verb: str, says: str) -> None:
    edit(place.base / "config.json", **CONFIGURATIONS[says])
    argv = ["--model", str(place.base), "--method", "lora"] if verb == "plan" else []
    assert says in place.refused(verb, *argv)


# ---- redaction ------------------------------------------------------------------------------------------------------

LONG: dict[str, Callable[[int], str]] = {
    "dashes": lambda n: "-" * n,
    "flags": lambda n: "--a" * n,
    "words": lambda n: "token-" * n,
    "spaces": lambda n: "token" + " " * n,
    "quotes": lambda n: 'token:"' * n,
    "addresses": lambda n: "://" * n,
    "paths": lambda n: "/a" * n + " " + "/" * n + "~" * n,
    "keys": lambda n: "hf_" * n + "sk-" * n,
}


@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=() if kind in ("dashes", "paths") else pytest.mark.long) for kind in LONG]
)
def test_redaction_takes_time_in_proportion(place: Place, kind: str) -> None:
    """As in the message of a chat template's error; 20 s of CPU for 32,000 dashes before."""
    text = LONG[kind](200_000)
    script = place.room / "script.py"
    script.write_text(
        "import sys\nfrom hf_rocm_tune.redaction import Private, redact, scrub_text\n"
        "text = open('text').read()\nredact(text)\nscrub_text(text, Private())\n"
        "import logging\nfrom hf_rocm_tune.publish.push import _redact_record\n"
        "_redact_record(logging.LogRecord('x', 20, 'x', 1, text.replace('%', ''), (), None))\n"
    )
    (place.room / "text").write_text(text)
    done = place.server.start(env={"SCRIPT": str(script)}, cwd=place.room).wait(DEADLINE)
    assert done.code == 0, done.stderr
