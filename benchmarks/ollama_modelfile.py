"""Modelfiles for many chat templates, to be read and rendered by Ollama's own parser and template packages.

    python benchmarks/ollama_modelfile.py > rows.jsonl
    ./checker < rows.jsonl

Each line has a Modelfile for one of the templates that TRL brings or of our own (with braces, with quotation marks),
the stop texts that it must hold, and conversations with what the Jinja template makes of them. ``checker`` is
``ollama_modelfile.go``, built beside Ollama's sources (packages ``api``, ``parser`` and ``template`` and what they
import) by ``go build``; it prints for each how many conversations Ollama renders alike, and whether the stop texts are
read as they are. Which templates cannot be written is printed on standard error.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import trl
from jinja2 import TemplateError

from benchmarks import llama_cpp
from hf_rocm_tune.publish import ollama
from tests import tiny
from tests.data.test_published_templates import OWN

TURNS = ("<|eot_id|>", "<|start_header_id|>", "<|end_header_id|>", "<end_of_turn>", "<start_of_turn>", "<|end|>")
TURNS += ("<|user|>", "<|assistant|>", "<|system|>")
STOPS = ["<|im_end|>", 'a"b', "back\\slash", "\nUser:", "two words ", "x\\n"]
BRACES = (
    "{% for m in messages %}{{ '{' + m['role'] + ': {' + m['content'] + '}}\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '{assistant: {' }}{% endif %}"
)
SYSTEM = {"role": "system", "content": 'Be {{ brief }}, "please".'}
USER = {"role": "user", "content": 'Why? {{ .System }} {x} \\ """ \n\nüñ 🙂'}
ANSWER = {"role": "assistant", "content": "Because.\n- one\n- two {{ end }}"}
LAST = {"role": "user", "content": "{{"}
TALKS = [[USER], [USER, ANSWER, LAST], [USER, ANSWER, LAST, ANSWER, USER]]
TALKS += [[SYSTEM, *talk] for talk in TALKS]


def templates() -> dict[str, str]:
    bundled = (Path(trl.__file__).parent / "chat_templates").glob("*.jinja")
    quoted = BRACES.replace("{' + m", "\"' + m").replace(": {'", '" "\'').replace("}}\\n", '"\\n')
    ours = {"braces": BRACES, "quotes": quoted, "gemma": llama_cpp.GEMMA_TEMPLATE, "phi": llama_cpp.PHI_TEMPLATE}
    return {file.stem: file.read_text(encoding="utf-8") for file in bundled} | OWN | ours


def main() -> int:
    left = []
    for name, text in sorted(templates().items()):
        tokenizer = tiny.build_tokenizer(chat_template=False)
        tokenizer.add_special_tokens({"additional_special_tokens": [*TURNS]})
        tokenizer.chat_template = text
        for adds_bos in (False, True):
            pieces = ollama.pieces_of(tokenizer, adds_bos=adds_bos)
            if pieces is None:
                left.append(f"{name}{', bos added' if adds_bos else ''}")
                continue
            talks = []
            for talk in TALKS:
                try:
                    rendered = tokenizer.apply_chat_template(talk, tokenize=False, add_generation_prompt=True)
                except TemplateError:  # it refuses system messages
                    continue
                expected = rendered.removeprefix(tokenizer.bos_token) if adds_bos else rendered
                talks.append({"messages": talk, "expected": expected})
            file = ollama.modelfile("./x.gguf", pieces, STOPS, has_template=True)
            row = {"name": name, "modelfile": file, "stops": STOPS, "talks": talks}
            print(json.dumps(row, ensure_ascii=False))
    print(f"not written: {', '.join(left)}", file=sys.stderr)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
