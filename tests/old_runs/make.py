"""Makes ``COMMIT.tar.xz`` beside this file: what a commit's ``sft`` leaves, for `tests/e2e/test_old_runs.py`.

``python tests/old_runs/make.py COMMIT`` runs the commit's own code, taken by ``git archive``, with the libraries of
this interpreter. The archive holds a model of 10,192 parameters with its data, and four runs of six steps:

- ``lora_killed``: on the CPU, killed in step 5, with the checkpoints of steps 2 and 4
- ``full_killed``: the same with all weights trained, and one checkpoint
- ``card_killed``: LoRA on the simulated card, killed in step 5, with one checkpoint
- ``card_finished``: LoRA on the simulated card, finished, with zeros injected into its transfers and recovered
"""

from __future__ import annotations

import io
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

HERE = Path(__file__).resolve().parent
COMMON = (
    "--model_name_or_path model --dataset_name data --max_steps 6 --per_device_train_batch_size 2 --max_length 64 "
    "--logging_steps 1 --disable_tqdm True --seed 7"
)
LORA = "--learning_rate 0.05 --lora_r 2 --lora_alpha 4 --lora_dropout 0.1"
FULL = "--use_peft False --learning_rate 0.001"
KILLED = {"HF_ROCM_TUNE_CRASH": "step=5,kind=kill"}
ZEROS = {"HF_ROCM_TUNE_FAULT": "kind=zero,rate=0.05,seed=7,persist=0"}
CARD = {"SIMCARD": "1"}
# Name of the run, its own flags, its environment. Tests give the same flags.
RUNS: dict[str, tuple[str, dict[str, str]]] = {
    "lora_killed": (f"{COMMON} {LORA} --save_steps 2", KILLED),
    "full_killed": (f"{COMMON} {FULL} --save_steps 4", KILLED),
    "card_killed": (f"{COMMON} {LORA} --save_steps 4", CARD | KILLED),
    "card_finished": (f"{COMMON} {LORA} --save_strategy no", CARD | ZEROS),
}
INPUTS = """
from pathlib import Path
import torch, transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from tests import tiny

bpe = Tokenizer(models.BPE())
bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
bpe.decoder = decoders.ByteLevel()
letters = pre_tokenizers.ByteLevel.alphabet()
special = list(tiny.SPECIAL_TOKENS)
trainer = trainers.BpeTrainer(vocab_size=280, special_tokens=special, initial_alphabet=letters, show_progress=False)
bpe.train_from_iterator(tiny.training_text(), trainer=trainer)
pad, bos, start, end, unk = special
tokenizer = transformers.PreTrainedTokenizerFast(
    tokenizer_object=bpe, pad_token=pad, bos_token=bos, eos_token=end, unk_token=unk,
    additional_special_tokens=[start], model_max_length=tiny.CONTEXT,
)
tokenizer.chat_template = tiny.CHAT_TEMPLATE
config = transformers.LlamaConfig(
    vocab_size=280, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
    num_key_value_heads=1, head_dim=8, max_position_embeddings=tiny.CONTEXT, tie_word_embeddings=True,
    initializer_range=0.3, pad_token_id=0, bos_token_id=1, eos_token_id=3,
)
torch.manual_seed(11)
transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained("model")
tokenizer.save_pretrained("model")
tiny.write_dataset_dir(Path("data"), train=12, test=2, seed=3)
"""


def main(commit: str) -> None:
    """Make the archive of one commit, a revision in the form that names the file."""
    with tempfile.TemporaryDirectory() as code:
        archive = subprocess.run(
            ["git", "archive", commit], cwd=HERE.parents[1], capture_output=True, check=True
        ).stdout
        with tarfile.open(fileobj=io.BytesIO(archive)) as opened:
            opened.extractall(code, filter="data")
        place = Path("/tmp/old_runs")  # the runs record it, so it names nobody's directory; it must not exist
        place.mkdir()
        _run(code, place, ["-c", INPUTS], {})
        for name, (flags, environment) in RUNS.items():
            _run(code, place, ["-m", "hf_rocm_tune.sft", "--output_dir", name, *flags.split()], environment)
            lock = place / name / "_run.lock"
            if lock.exists():
                lock.write_text("process 4321 on workstation")
        with tarfile.open(HERE / f"{commit}.tar.xz", "w:xz") as written:
            for path in sorted(place.iterdir()):
                written.add(path, path.name, filter=_anonymous)
        shutil.rmtree(place)


def _run(code: str, place: Path, argv: list[str], environment: dict[str, str]) -> None:
    paths = [code, f"{code}/tests/simcard/boot"] if "SIMCARD" in environment else [code]
    offline = {"HF_HUB_OFFLINE": "1", "HF_HUB_DISABLE_TELEMETRY": "1", "OMP_NUM_THREADS": "1"}
    variables = {**os.environ, **offline, "PYTHONPATH": os.pathsep.join(paths), **environment}
    code_of_exit = subprocess.run([sys.executable, *argv], cwd=place, env=variables, check=False).returncode
    expected = -9 if "HF_ROCM_TUNE_CRASH" in environment else 0
    if code_of_exit != expected:
        raise SystemExit(f"{argv} ended with {code_of_exit}, not {expected}")


def _anonymous(entry: tarfile.TarInfo) -> tarfile.TarInfo:
    entry.uid = entry.gid = 0
    entry.uname = entry.gname = ""
    return entry


if __name__ == "__main__":
    main(sys.argv[1])
