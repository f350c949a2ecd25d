"""The table of files that others wrote and that a command reads, each spoilt in every way: in time, no traceback.

`READ` is the table: a file of it that no verb reads any more, or a reader that is missing in it, is a fault of it. A
spoilt file is either used or not (code 0), or refused in one line (code 2) that leaves nothing; nothing outside the
package is touched, nothing acts on the terminal, and what a link leads to is not shown.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.publish.hub_server import write_run
from tests.publish.strangers import DEEP, ESCAPES, Place, edit, names

READ: dict[str, tuple[str, ...]] = {
    "package/adapter/adapter_config.json": ("generate", "merge", "sft", "verify"),
    "package/adapter/adapter_model.safetensors": ("generate", "merge", "sft", "verify"),
    "package/adapter/integrity.json": ("generate", "merge", "sft", "verify"),
    "package/adapter/attested_files.json": ("verify",),
    "package/adapter/model.sig": ("verify",),
    "package/adapter/transfer_report.json": ("verify",),
    "package/adapter/tokenizer.json": ("generate", "merge"),
    "package/adapter/tokenizer_config.json": ("generate", "merge"),
    "package/adapter/chat_template.jinja": ("generate", "merge"),
    "package/adapter/generation_config.json": ("generate", "merge"),
    "package/adapter/run.json": ("generate", "merge", "sft", "verify"),
    "package/base/config.json": ("generate", "merge", "sft", "plan", "preview", "verify"),
    "package/base/model.safetensors": ("generate", "merge", "sft", "verify"),
    "package/base/model.safetensors.index.json": ("generate", "merge", "sft"),
    "package/base/generation_config.json": ("generate", "merge", "sft"),
    "package/base/tokenizer.json": ("sft", "preview"),
    "package/base/tokenizer_config.json": ("sft", "preview", "merge"),
    "package/base/special_tokens_map.json": ("sft", "preview"),
    "package/base/added_tokens.json": ("sft", "preview"),
    "package/base/chat_template.jinja": ("sft", "preview"),
    "package/base/additional_chat_templates/tool.jinja": ("sft", "preview"),
    "package/base/processor_config.json": ("sft", "preview"),
    "package/base/preprocessor_config.json": ("sft", "preview"),
    "package/base/adapter_config.json": ("sft", "generate"),
    "package/result/run.json": ("report", "push"),
    "package/result/training_log.json": ("report", "push"),
    "package/result/transfer_report.json": ("report", "push"),
    "package/result/integrity.json": ("report", "push"),
    "package/result/README.md": ("push",),
    "rows/train.jsonl": ("preview",),
    "rows/README.md": ("preview",),
    "recipe.yaml": ("recipe",),
    "template.jinja": ("template",),
    "prompts.jsonl": ("prompts",),
}


def _replace(write: Callable[[Path], object]) -> Callable[[Path, Path], None]:
    def spoil(file: Path, _victim: Path) -> None:
        file.parent.mkdir(exist_ok=True)
        file.unlink(missing_ok=True)
        write(file)

    return spoil


def _link(file: Path, victim: Path) -> None:
    _replace(lambda path: path.symlink_to(victim / "secret.model"))(file, victim)


HARMS: dict[str, Callable[[Path, Path], None]] = {
    "pipe": _replace(os.mkfifo),
    "link": _link,
    "deep": _replace(lambda file: file.write_text(DEEP)),
    "long": _replace(lambda file: file.write_text('{"a": "' + "x-" * (9 << 20) + '"}')),
    "number": _replace(lambda file: file.write_text('{"a": ' + "9" * 10_000 + "}")),
    "escapes": _replace(lambda file: file.write_text(json.dumps({f"a{ESCAPES}": ESCAPES, "name": f"../../{ESCAPES}"}))),
    "raw": _replace(lambda file: file.write_text(f"{ESCAPES}{{% if %}}\n{ESCAPES}: [")),
    "list": _replace(lambda file: file.write_text("[[1], {}]")),
    "surrogate": _replace(lambda file: file.write_text('{"a": "\\ud800", "\\udfff": 1}')),
    "bytes": _replace(lambda file: file.write_bytes(bytes(range(256)) * 40)),
    "empty": _replace(lambda file: file.write_bytes(b"")),
    "directory": _replace(Path.mkdir),
}
CASES = [
    (file, harm, verb)
    for file, verbs in READ.items()
    for harm in HARMS
    for verb in verbs
    if (file, harm) != ("prompts.jsonl", "pipe")  # the user's own, who may wait for it
]
SAMPLE = {
    ("package/base/tokenizer_config.json", "pipe"), ("package/base/chat_template.jinja", "link"),
    ("package/base/special_tokens_map.json", "deep"), ("package/base/preprocessor_config.json", "escapes"),
    ("package/base/adapter_config.json", "list"), ("rows/train.jsonl", "pipe"), ("recipe.yaml", "pipe"),
    ("template.jinja", "raw"), ("prompts.jsonl", "surrogate"), ("package/result/README.md", "link"),
    ("package/adapter/generation_config.json", "bytes"), ("package/adapter/model.sig", "pipe"),
}  # fmt: skip


def cases() -> list[object]:
    """All of them in the long suite; of each pair in `SAMPLE` the first verb in the short one."""
    return [
        pytest.param(*case, marks=() if case[:2] in SAMPLE and case[2] == READ[case[0]][0] else pytest.mark.long)
        for case in CASES
    ]


def argv_of(place: Place, verb: str) -> tuple[str, list[str]]:
    """The command that reads the files of a package by this verb."""
    sft = place.argv("sft")
    at = sft.index("--adapter_name_or_path")
    stock, answer = [*sft[:at], *sft[at + 2 :]], place.argv("generate")
    prompt = answer.index("--prompt")
    return {
        "preview": ("sft", [*stock, "--dry_run", "text"]),
        "recipe": ("sft", ["--config", str(place.room / "recipe.yaml"), *stock]),
        "template": ("sft", [*stock, "--chat_template_path", str(place.room / "template.jinja"), "--dry_run", "text"]),
        "prompts": (
            "generate",
            [*answer[:prompt], "--file", str(place.room / "prompts.jsonl"), *answer[prompt + 2 :]],
        ),
        "plan": ("plan", ["--model", str(place.base), "--method", "lora"]),
        "report": ("report", [str(place.room / "package" / "result")]),
        "push": ("push", [str(place.room / "package" / "result"), "user/name"]),
        "verify": ("verify", [str(place.adapter), "--base", str(place.base)]),
    }.get(verb, (verb, place.argv(verb) if verb in ("generate", "merge", "sft") else []))


ACTS = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f]")


def endure(place: Place, verb: str) -> tuple[int, str]:
    """The code and all that was said by a command that is given something spoilt."""
    command, argv = argv_of(place, verb)
    before, outside = names(place.room), names(place.victim)
    done = place.run(command, *argv)
    said = re.sub(r"\x1b\[[0-9;]*m|\r", "", done.stdout + done.stderr)
    assert "Traceback" not in said, said[-3000:]
    allowed = {"push": (0, 1, 2), "verify": (0, 2, 3)}.get(verb, (0, 2))  # 1: there is no Hub; 3: it is damaged
    assert done.code in allowed and len(done.error_lines) == (done.code != 0), f"{done.code}: {said[-2000:]}"
    assert not ACTS.search(said), said
    assert names(place.victim) == outside and "private" not in said
    if done.code == 2:
        assert names(place.room) == before, "a refused command leaves nothing"
    return done.code, said


@pytest.mark.parametrize(("file", "harm", "verb"), cases())
def test_a_spoilt_file(place: Place, file: str, harm: str, verb: str) -> None:
    write_run(place.room / "package" / "result")
    (place.room / "recipe.yaml").write_text("max_steps: 1\n")
    (place.room / "template.jinja").write_text("{% for m in messages %}{{ m.content }}{% endfor %}")
    (place.room / "prompts.jsonl").write_text('{"prompt": "Hello"}\n')
    path = place.room / file
    if file.endswith("index.json"):
        (place.base / "model.safetensors").unlink()
    if path.is_dir():
        pytest.skip("there is a directory of that name")
    HARMS[harm](path, place.victim)
    if harm not in ("pipe", "link", "directory") and "adapter/" in file and "integrity" not in file:
        place.seal()
    endure(place, verb)


# ---- settings that name files ---------------------------------------------------------------------------------------

NAMED = {
    "vocab_file": "ROOM/victim/secret.model",
    "merges_file": "../../victim/secret.model",
    "tokenizer_file": "ROOM/victim/secret.model",
    "chat_template_file": "../../victim/secret.model",
    "special_tokens_map_file": "ROOM/victim/secret.model",
    "spm_file": "sub/../../../victim/secret.model",
    "fast_tokenizer_files": ["../../victim/tokenizer.4.0.0.json"],
    "nested_path": {"inner": {"vocab_file": "../../victim/secret.model"}},
}


@pytest.mark.parametrize(
    ("file", "key"),
    [
        pytest.param(file, key, marks=() if at + turn in (0, 6) else pytest.mark.long)
        for turn, file in enumerate(("tokenizer_config.json", "processor_config.json", "preprocessor_config.json"))
        for at, key in enumerate(NAMED)
    ],
)
def test_a_setting_that_names_a_file_elsewhere(place: Place, file: str, key: str) -> None:
    path = place.base / file
    if not path.exists():
        path.write_text("{}")
    edit(path, **json.loads(json.dumps({key: NAMED[key]}).replace("ROOM", str(place.room))))
    code, said = endure(place, "preview")
    assert code == 2 and file in said, said


def test_paths_of_an_authors_own_machine_are_no_harm(place: Place) -> None:
    edit(
        place.base / "tokenizer_config.json",
        special_tokens_map_file="/root/.cache/huggingface/hub/none/special_tokens_map.json",
        name_or_path="/home/someone/model",
    )
    assert endure(place, "preview")[0] == 0


# ---- chat templates and panics --------------------------------------------------------------------------------------

LOOP = "{% for a in range(90000) %}{% for b in range(90000) %}{% set c = a + b %}{% endfor %}{% endfor %}"
TEMPLATES = {
    "loops": LOOP,
    "macro": "{% macro f(n) %}{% for i in range(9) %}{{ f(n + 1) if n < 40 }}{% endfor %}{% endmacro %}{{ f(1) }}",
    "repeat": "{{ 'a' * 10000000000 }}",
    "power": "{% set n = messages | length + 9 %}{{ n ** 9999999999 }}",
    "width": "{{ '%9999999999d' % 1 }}{{ 'a'.center(9999999999) }}",
}


@pytest.mark.parametrize(
    ("kind", "verb"),
    [
        pytest.param(kind, verb, marks=() if (kind, verb) == ("loops", "preview") else pytest.mark.long)
        for kind in TEMPLATES
        for verb in ("preview", "generate", "sft", "merge")
    ],
)
def test_a_template_that_takes_for_ever(place: Place, kind: str, verb: str) -> None:
    text = TEMPLATES[kind] + "{% for m in messages %}{{ m.content }}{% endfor %}"
    for directory in (place.base, place.adapter):
        (directory / "chat_template.jinja").write_text(text)
    place.seal()
    code, said = endure(place, verb)
    if verb != "merge":  # it need not be rendered there
        assert code == 2 and "template" in said, said


RENDERS = """
import os, sys
from jinja2.sandbox import ImmutableSandboxedEnvironment
from hf_rocm_tune import foreign
from hf_rocm_tune.errors import UsageError
foreign.TEMPLATE_SECONDS = 0.1  # of CPU time
foreign.limit_templates()
render = lambda text: ImmutableSandboxedEnvironment().from_string(text).render()
assert render("{{ 1 }}") == "1"
"""
THEN = {
    "another program": 'os.execv(sys.executable, [sys.executable, "-c", "for _ in range(9_999_999): pass"])',
    "long work": "for _ in range(9_999_999): pass",
    "a forked process": """
if (child := os.fork()) == 0:
    try:
        render("{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}")
    except UsageError:
        os._exit(0)
    os._exit(1)
sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
""",
}


@pytest.mark.parametrize("then", THEN)
def test_the_time_limit_of_templates_is_for_each_rendering(then: str) -> None:
    """It outlives none, also where nobody handles its signal, and holds in a worker that tokenizes."""
    assert subprocess.run([sys.executable, "-c", RENDERS + THEN[then]], check=False, timeout=60).returncode == 0


@pytest.mark.parametrize("verb", ["preview", pytest.param("sft", marks=pytest.mark.long)])
def test_a_tokenizer_that_panics(place: Place, verb: str) -> None:
    """An assertion in Rust, which Python sees as a ``BaseException``."""
    edit(place.base / "tokenizer.json", truncation=PANICS)
    code, said = endure(place, verb)
    assert code == 2 and "tokenizer" in said, said


PANICS = {"direction": "Right", "max_length": 2, "strategy": "LongestFirst", "stride": 9}
