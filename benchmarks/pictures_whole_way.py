"""Image-text models through the whole way by the command line, each step beside what must be equal.

    python benchmarks/pictures_whole_way.py MODELS ROWS NAME... [--json FILE]

Preview, plan, LoRA with evaluation, the same run killed and resumed, QLoRA, merge, and an answer about a picture by the
adapter and by the merged model, beside the answer of plain transformers with PEFT. ROWS is a folder of data with
``train`` and ``test`` rows.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from tests.e2e.command import CommandServer, Result  # noqa: E402

STEPS = 4
ASKED = "What is in this picture?"


def losses(output: Path) -> list[float]:
    state = output / f"checkpoint-{STEPS}" / "trainer_state.json"
    return [row["loss"] for row in json.loads(state.read_text())["log_history"] if "loss" in row]


def plain_answer(model: Path, adapter: Path, picture: Path) -> str:
    """What transformers and PEFT say, without this package."""
    from peft import PeftModel
    from PIL import Image
    from transformers import AutoModelForImageTextToText, AutoProcessor

    adapted = PeftModel.from_pretrained(AutoModelForImageTextToText.from_pretrained(model), str(adapter)).eval()
    processor = AutoProcessor.from_pretrained(adapter)
    parts = [{"type": "image", "image": Image.open(picture)}, {"type": "text", "text": ASKED}]
    turns = [{"role": "user", "content": parts}]
    how = {"add_generation_prompt": True, "tokenize": True, "return_dict": True, "return_tensors": "pt"}
    inputs = processor.apply_chat_template(turns, **how)
    made = adapted.generate(**inputs, max_new_tokens=8, do_sample=False)
    return str(processor.decode(made[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True))


def walk(server: CommandServer, model: Path, rows: Path, picture: Path, scratch: Path) -> dict[str, Any]:
    """One model; each step is ``ok`` or what is wrong."""
    found: dict[str, Any] = {"model": model.name}
    settings = ["--model_name_or_path", str(model), "--dataset_name", str(rows), "--max_length", "512"]
    settings += ["--per_device_train_batch_size", "2", "--max_steps", str(STEPS), "--logging_steps", "1"]
    settings += ["--save_strategy", "steps", "--save_steps", "2", "--disable_tqdm", "True", "--lora_dropout", "0"]

    def run(step: str, *argv: str, code: int = 0, **env: str) -> Result:
        result = server.start(*argv, env=env).wait(600)
        wrong = result.code != code or "Traceback" in result.stderr
        found[step] = f"{result.code}: {result.stderr.strip()[-300:]}" if wrong else "ok"
        return result

    run("preview", *settings, "--output_dir", str(scratch / "none"), "--dry_run", "text")
    run("plan", "--model", str(model), "--dataset", str(rows), "--max_length", "512", VERB="plan")
    whole, killed, merged = scratch / "whole", scratch / "killed", scratch / "merged"
    evaluated = ["--eval_strategy", "steps", "--eval_steps", "2"]
    result = run("LoRA, evaluation", *settings, *evaluated, "--output_dir", str(whole))
    report = json.loads((whole / "transfer_report.json").read_text())
    coverage = report["coverage"]
    found["verified"] = coverage["verified_bytes"] / coverage["device_bytes"]
    found["evaluated"] = "eval" in result.stdout
    fault = {"HF_ROCM_TUNE_CRASH": "step=3,kind=kill"}
    run("killed", *settings, *evaluated, "--output_dir", str(killed), code=-9, **fault)
    run("resumed", *settings, *evaluated, "--output_dir", str(killed))
    found["resumed equals whole"] = losses(killed)[-1] == losses(whole)[-1]
    run("QLoRA", *settings, "--load_in_4bit", "--output_dir", str(scratch / "qlora"))
    run("merge", str(whole), str(merged), VERB="merge")
    answers = []
    for name, directory in (("generate", whole), ("generate, merged", merged)):
        argv = [str(directory), "--prompt", ASKED, "--max_new_tokens", "8", "--temperature", "0", "--json"]
        said = run(name, *argv, "--image", str(picture), VERB="generate")
        answers.append(json.loads(said.stdout.splitlines()[-1])["completion"] if said.code == 0 else None)
    found["merged says the same"] = answers[0] == answers[1]
    found["plain transformers says the same"] = answers[0] == plain_answer(model, whole, picture)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", type=Path)
    parser.add_argument("rows", type=Path)
    parser.add_argument("names", nargs="+")
    parser.add_argument("--picture", type=Path, required=True)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as scratch:
        server = CommandServer(Path(scratch) / "server")
        for name in given.names:
            model, picture = (given.models / name).absolute(), given.picture.absolute()
            try:
                rows.append(walk(server, model, given.rows.absolute(), picture, Path(scratch) / name))
            except Exception as error:  # the table has the other models
                rows.append({"model": name, "ended": f"{type(error).__name__}: {error}"[:300]})
            print(rows[-1], flush=True)
        server.close()
    content = json.dumps({"command": "pictures_whole_way", "rows": rows})
    if given.json:
        given.json.write_text(content + "\n")
    print(content)


if __name__ == "__main__":
    main()
