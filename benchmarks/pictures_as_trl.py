"""Losses of trainings with pictures beside TRL's own, with and without the places of pictures in the loss.

    python benchmarks/pictures_as_trl.py MODELS ROWS [--names NAME...] [--sets SET...] [--json FILE]

MODELS has image-text models in folders, ROWS has data sets in folders. Three steps each, by the real commands:
``--loss_on_picture_tokens true`` beside ``trl sft`` as it is, and our default beside one whose labels are masked
by hand where the configuration's image token stands. Both train adapters on tower, projector and language model, as TRL
does. ``equal``: losses and every tensor of the adapter are the same to the last bit. JSON of an earlier
call is kept and added to.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
import yaml
from safetensors.torch import load_file

from hf_rocm_tune.settings.arguments import RanksArguments, TuneArguments
from tests.e2e.command import CommandServer, Result

WAYS = {"as TRL": ["--loss_on_picture_tokens", "true"], "masked": []}
LIKE_TRL = ["--lora_target_modules", "all-linear"]
STOCK = """
import runpy, sys

import torch
from transformers import AutoConfig
from trl.trainer import sft_trainer

model, way = sys.argv[1:3]
del sys.argv[1:3]
config = AutoConfig.from_pretrained(model)
image = next(getattr(config, name) for name in ("image_token_id", "image_token_index") if hasattr(config, name))


class Masked(sft_trainer.DataCollatorForVisionLanguageModeling):
    def torch_call(self, examples):
        batch = super().torch_call(examples)
        batch["labels"][batch["input_ids"] == image] = -100
        return batch


if way == "masked":
    sft_trainer.DataCollatorForVisionLanguageModeling = Masked
runpy.run_module("trl.scripts.sft", run_name="__main__", alter_sys=True)
"""


def losses(output: Path) -> list[float]:
    """Training losses, as the only checkpoint has them."""
    (state,) = output.glob("checkpoint-*/trainer_state.json")
    return [row["loss"] for row in json.loads(state.read_text())["log_history"] if "loss" in row]


def failed(result: Result) -> str:
    """What a command that failed said at its end."""
    return f"exit {result.code}: {' '.join(result.stderr.split())[-300:]}"


def compared(server: CommandServer, model: Path, rows: Path, way: str, scratch: Path) -> dict[str, Any]:
    """One training beside TRL's."""
    found: dict[str, Any] = {"model": model.name, "rows": rows.name, "way": way}
    settings = ["--model_name_or_path", str(model), "--dataset_name", str(rows), "--max_length", "512"]
    settings += ["--per_device_train_batch_size", "2", "--max_steps", "3", "--logging_steps", "1", "--save_steps", "3"]
    settings += ["--disable_tqdm", "True", "--lora_dropout", "0", "--output_dir", str(scratch / "ours"), *LIKE_TRL]
    settings += ["--eval_strategy", "no", *WAYS[way]]
    ours = server.start(*settings).wait(600)
    if ours.code:
        return found | {"ours": failed(ours)}
    printed = server.start(*settings, "--print_config").wait(600)
    own = {field.name for owner in (TuneArguments, RanksArguments) for field in dataclasses.fields(owner)}
    recipe = {name: value for name, value in yaml.safe_load(printed.stdout).items() if name not in own}
    (scratch / "trl.yaml").write_text(yaml.safe_dump({**recipe, "output_dir": str(scratch / "trl")}))
    (scratch / "stock.py").write_text(STOCK)
    argv = [str(model), way, "--config", str(scratch / "trl.yaml")]
    stock = server.start(*argv, env={"SCRIPT": str(scratch / "stock.py")}).wait(600)
    if stock.code:
        return found | {"trl": failed(stock)}
    found |= {"losses": losses(scratch / "ours"), "trl's losses": losses(scratch / "trl")}
    adapters = [load_file(scratch / name / "adapter_model.safetensors") for name in ("ours", "trl")]
    same = adapters[0].keys() == adapters[1].keys() and all(
        torch.equal(tensor, adapters[1][name]) for name, tensor in adapters[0].items()
    )
    return found | {"equal": same and found["losses"] == found["trl's losses"]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", type=Path)
    parser.add_argument("rows", type=Path)
    parser.add_argument("--names", nargs="*")
    parser.add_argument("--sets", nargs="*", default=["single", "mixed"])
    parser.add_argument("--ways", nargs="*", default=list(WAYS), choices=list(WAYS))
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    models = sorted(path for path in given.models.absolute().iterdir() if (path / "config.json").is_file())
    found: list[dict[str, Any]] = []
    if given.json and given.json.is_file():
        found = json.loads(given.json.read_text())["rows"]
    with tempfile.TemporaryDirectory() as folder:
        server = CommandServer(Path(folder) / "server")
        cells = [(model, name, way) for model in models for name in given.sets for way in given.ways]
        for number, (model, name, way) in enumerate(cells):
            if given.names and model.name not in given.names:
                continue
            scratch = Path(folder) / str(number)
            scratch.mkdir()
            found.append(compared(server, model, given.rows.absolute() / name, way, scratch))
            print(json.dumps(found[-1]), flush=True)
            equal = sum(row.get("equal", False) for row in found)
            if given.json:
                content = {"command": "pictures_as_trl", "equal": equal, "rows": found}
                given.json.write_text(json.dumps(content) + "\n")
        server.close()


if __name__ == "__main__":
    main()
