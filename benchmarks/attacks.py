"""Attacks on whole trainings through the real command line, from outside: found, recovered, named, or silent.

attacks  each fault of `tests.e2e.memory_attacks` with several seeds, in several ways of training; what became of it:
         *recovered*: exit 0, the undisturbed run's adapter, and the report says what happened; *equal*: nothing is
         said, and the adapter is the undisturbed run's; *ended*: exit 3; *ended, then equal*: and the same command, not
         attacked, goes on to the undisturbed run's adapter; *named*: exit 0, another adapter, and the report says what
         happened; *in the docs*: nothing is said, and docs/verification.md names it as not verified; *silent*: nothing
         is said
clean    trainings of many small architectures in many ways: exit 0, no incident, no disagreement, equal replays
cost     processor seconds of a run with and without arithmetic checks, interleaved

python benchmarks/attacks.py --parts attacks --seeds 10 --json FILE
python benchmarks/attacks.py --parts clean --runs 110 --json FILE
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import resource
import shutil
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from common import Figures, main, print_table

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "scripts"))

from tests import simcard, tiny
from tests.e2e.command import CommandServer
from tests.two_ranks import environments

STEPS = 6
RESUMED = 2
FSDP2 = {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2", "FSDP_AUTO_WRAP_POLICY": "TRANSFORMER_BASED_WRAP"}
USUAL: Figures = {
    "max_steps": STEPS, "save_steps": 3, "per_device_train_batch_size": 2, "max_length": 48, "learning_rate": 0.01,
    "logging_steps": 1, "disable_tqdm": True, "lora_dropout": 0.0, "doctor": "off", "save_total_limit": 2,
    "max_grad_norm": 0.05,
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Way:
    """A way of training: its flags, where it runs, and how many ranks it has."""

    flags: Figures = field(default_factory=dict)
    card: bool = False
    ranks: int = 1
    env: dict[str, str] = field(default_factory=dict)
    arch: str = "llama3"
    layers: int = 2


BF16: Figures = {"dtype": "bfloat16", "bf16": True}
WAYS: dict[str, Way] = {
    "CPU": Way(),
    "QLoRA": Way(flags={"load_in_4bit": True}),
    "experts": Way(arch="qwen3_moe"),
    "two ranks": Way(ranks=2),
    "FSDP2": Way(ranks=2, env=FSDP2),
    "card": Way(card=True),
    "card QLoRA": Way(card=True, flags={"load_in_4bit": True}),
    "streamed QLoRA": Way(card=True, flags={"load_in_4bit": True, "stream_weights": 3}, layers=5),
    "streamed": Way(card=True, flags={**BF16, "stream_weights": 3}, layers=5),
    "float16": Way(card=True, flags={"fp16": True, "bf16": False}),
    "every": Way(flags={"check_arithmetic": "every"}),
    "every bf16": Way(flags={"check_arithmetic": "every", "bf16": True}),
    "every QLoRA": Way(flags={"check_arithmetic": "every", "load_in_4bit": True}),
    "every experts": Way(flags={"check_arithmetic": "every"}, arch="qwen3_moe"),
    "card bf16": Way(card=True, flags={"bf16": True}),
}
ALL = ("CPU", "QLoRA", "experts", "two ranks", "FSDP2", "card", "streamed")
ONE = ("CPU", "QLoRA", "card", "streamed")
READ = ("CPU", "QLoRA", "card", "streamed", "card QLoRA", "streamed QLoRA", "experts")
EITHER = ("once", "always")
"""By turns with the seed."""
KERNELS = ("SiLU", "SiLU's backward", "RMSNorm", "attention's backward", "LoRA's products", "rotary embedding")
ATTACKS: dict[str, tuple[Figures, tuple[str, ...]]] = {
    **{
        f"update: {what}": ({"kind": "update", "what": what, "when": EITHER}, ALL)
        for what in ("against the gradient", "lost", "twice as far", "first moment", "second moment")
    },
    **{
        f"clipping: {what}": ({"kind": "clipping", "what": what, "when": EITHER}, ("CPU", "QLoRA", "two ranks", "card"))
        for what in ("half", "wrong sign", "left out", "norm")
    },
    "scaler": ({"kind": "scaler"}, ("float16",)),
    "learning rate": ({"kind": "rate"}, ALL),
    "LoRA's scale": ({"kind": "adapter", "what": "scale"}, ALL),
    "LoRA's dropout": ({"kind": "adapter", "what": "dropout"}, ALL),
    "a trained weight": ({"kind": "trained", "moment": "before forward", "what": "weight"}, ONE),
    "a second moment": ({"kind": "trained", "moment": "after backward", "what": "exp_avg_sq"}, ONE),
    **{
        f"{kernel}, differs from call to call": (
            {"kind": "kernel", "kernel": kernel, "how": "varying", "strength": 0.005},
            ("CPU", "QLoRA", "two ranks", "card", "card bf16"),
        )
        for kernel in ("SiLU", "RMSNorm", "attention's backward", "LoRA's products")
    },
    **{
        f"{kernel}, wrong in the same way": (
            {"kind": "kernel", "kernel": kernel, "how": "always", "strength": 0.1},
            ("every", "every bf16", "every QLoRA", "card"),
        )
        for kernel in KERNELS
    },
    **{
        f"{what}, {when}": ({"kind": "routing", "what": what, "when": when}, ways)
        for what in ("wrong expert", "counts")
        for when, ways in (("always", ("experts", "every experts")), ("once", ("experts",)))
    },
    "a collator writes": ({"kind": "writes", "who": "collator"}, ALL),
    "a callback writes": ({"kind": "writes", "who": "callback"}, ALL),
    "bound elsewhere": ({"kind": "bound elsewhere"}, ("CPU", "QLoRA", "card", "streamed")),
    "streamed layer on the card": ({"kind": "streamed", "place": "card"}, ("streamed",)),
    "report cut off": ({"kind": "report cut", "times": 1}, ("CPU", "card")),
    "report cut off, always": ({"kind": "report cut", "times": 99}, ("CPU",)),
    "base misread": ({"kind": "misreading"}, READ),
    "base mapped wrongly": ({"kind": "mapped"}, ("CPU", "QLoRA", "experts")),
}
SIXTEEN_BITS = ("every bf16", "every QLoRA", "card", "card bf16")  # a card trains in bfloat16 by default
NOT_VERIFIED: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("wrong expert, once", "counts, once"), tuple(WAYS)),
    **{f"{kernel}, wrong in the same way": SIXTEEN_BITS for kernel in ("rotary embedding", "attention's backward")},
}
"""What docs/verification.md names as not verified, and in which ways: rows of experts between two samples (3), and
kernels that are within the bound of a layer on the host in 16 bits (2)."""


@dataclass(kw_only=True)
class Bench:
    """Runs commands, with models and data of its own."""

    place: Path
    servers: dict[bool, CommandServer] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.data = tiny.write_dataset_dir(self.place / "data", train=48, test=4)

    def server(self, card: bool) -> CommandServer:
        if card not in self.servers:
            environment = simcard.environment() if card else None
            self.servers[card] = CommandServer(self.place / f"server{int(card)}", environment)
        return self.servers[card]

    def model(self, way: Way) -> Path:
        return tiny.build(way.arch, self.place / "models", num_hidden_layers=way.layers)

    def run(self, way: Way, output: Path, model: Path, *attacks: Figures, **more: Any) -> tuple[list[int], str]:
        """The codes of all ranks, and what they said on standard error; the first rank is attacked."""
        settings = {"model_name_or_path": model, "dataset_name": self.data, "output_dir": output}
        settings |= {**USUAL, **way.flags, **more}
        argv = [part for name, value in settings.items() for part in (f"--{name}", str(value))]
        hit = {"MEMORY_ATTACK": json.dumps([*attacks])} if attacks else {}
        server = self.server(way.card)
        if way.ranks == 1:
            done = [server.start(*argv, env={**way.env, **hit}).wait()]
        else:
            envs = environments(output.with_suffix(".exit.json"), [{**way.env, **hit}, way.env])
            started = [server.start(*argv, env=env) for env in envs]
            done = [each.wait() for each in started]
        return [each.code for each in done], "\n".join(each.stderr for each in done)

    def close(self) -> None:
        for server in self.servers.values():
            server.close()


def adapter(output: Path) -> bytes | None:
    file = output / "adapter_model.safetensors"
    return file.read_bytes() if file.is_file() else None


def said_in(output: Path) -> list[str]:
    """What a report says of faults and of what was not expected."""
    try:
        report = json.loads((output / "transfer_report.json").read_text())
    except (OSError, ValueError):
        return []
    told = [f"{row.get('stage')}: {row.get('kind')}: {row.get('outcome')}" for row in report["incidents"]]
    told += [f"rebaselined: {row['reason']}" for row in report["rebaselined"] if "equal" not in row["reason"]]
    told += [f"differs: {row['layer']}" for row in report["arithmetic"].get("host_layers", []) if "differs_in" in row]
    if report["arithmetic"].get("deterministic") is False:
        told.append("not deterministic")
    return told


def attack(
    bench: Bench, name: str, way_name: str, seed: int, clean: dict[str, bytes | None], resumed: Counter[str]
) -> Figures:
    """One attacked run, and what became of it; of each attack the first `RESUMED` that ended are started again."""
    what, _ = ATTACKS[name]
    way = WAYS[way_name]
    model = bench.model(way)
    more = {"directory": str(model)} if what["kind"] == "misreading" else {}
    if way_name not in clean:
        codes, text = bench.run(way, bench.place / f"clean {way_name}", model)
        clean[way_name] = adapter(bench.place / f"clean {way_name}")
        told = said_in(bench.place / f"clean {way_name}")
        if set(codes) != {0} or told:
            print(f"the undisturbed run of {way_name}: {codes} {told} {text[-1000:]}", flush=True)
    output, log = bench.place / "attacked", bench.place / "attacked.log"
    shutil.rmtree(output, ignore_errors=True)
    log.unlink(missing_ok=True)
    step = 1 + seed % STEPS
    if name in ("scaler", "a second moment"):
        step = 2 + seed % (STEPS - 1)
    told = {**what, **more, "seed": seed, "step": step, "log": str(log)}
    if told.get("when") is EITHER:
        told["when"] = EITHER[seed // 2 % 2]
    codes, text = bench.run(way, output, model, told)
    said, lines = said_in(output), [line for line in text.splitlines() if "hf-rocm-tune: " in line and "error" in line]
    row: Figures = {"attack": name, "way": way_name, "seed": seed, "codes": codes, "said": said[:3]}
    if "when" in told:
        row["when"] = told["when"]
    row["line"] = lines[0][:220] if lines else ""
    happened = log.exists()
    if any(code < 0 or code not in (0, 3) for code in codes) or "Traceback" in text:
        row |= {"outcome": "failed", "text": text[-1500:]}
    elif not happened:
        row["outcome"] = "not hit"
    elif 3 in codes and resumed[name] >= RESUMED:
        row["outcome"] = "ended"
    elif 3 in codes:
        resumed[name] += 1
        again, text = bench.run(way, output, model)
        equal = set(again) == {0} and adapter(output) == clean[way_name]
        row["outcome"] = "ended, then equal" if equal else "ended, other result"
        if not equal:
            row["text"] = f"{again} {text[-600:]}"
    elif adapter(output) == clean[way_name]:
        row["outcome"] = "recovered" if said else "equal"
    else:
        row["outcome"] = "named" if said else "silent"
        if not said and way_name in NOT_VERIFIED.get(name, ()):
            row["outcome"] = "in the docs"
    return row


def attacks(bench: Bench, wanted: argparse.Namespace, rows: list[Figures]) -> None:
    cells = []
    for name, (_, ways) in ATTACKS.items():
        if wanted.only and not any(part in name for part in wanted.only):
            continue
        for seed in range(wanted.first_seed, wanted.first_seed + wanted.seeds):
            way = ways[seed % len(ways)]
            if not wanted.ways or way in wanted.ways:
                cells.append((name, way, seed))
    random.Random(0).shuffle(cells)
    cells.sort(key=lambda cell: cell[2])  # every attack once before any twice
    clean: dict[str, bytes | None] = {}
    resumed: Counter[str] = Counter()
    begun = time.monotonic()
    for name, way, seed in cells:
        if time.monotonic() - begun > wanted.seconds:
            break
        rows.append(attack(bench, name, way, seed, clean, resumed))
        keep(wanted, "attacks", rows)
        if rows[-1]["outcome"] not in ("recovered", "ended", "ended, then equal", "equal"):
            print(json.dumps(rows[-1]), flush=True)


def keep(wanted: argparse.Namespace, part: str, rows: list[Figures]) -> None:
    """What there is so far, beside the last result."""
    if wanted.json_file is not None:
        Path(f"{wanted.json_file}.{part}").write_text("\n".join(json.dumps(row) for row in rows) + "\n")


# ---- clean ----------------------------------------------------------------------------------------------------------

TYPES = (
    "llama", "qwen2", "qwen3", "mistral", "gemma", "gemma2", "phi3", "smollm3", "olmo2", "gpt2", "gpt_neox", "opt",
    "bloom", "granite", "glm4", "falcon", "nemotron", "phi", "cohere2", "starcoder2", "gptj", "mixtral", "qwen3_moe",
)  # fmt: skip
CLEAN: dict[str, Way] = {
    "LoRA": Way(),
    "LoRA, all checks": Way(flags={"check_arithmetic": "every"}),
    "bfloat16": Way(flags={"dtype": "bfloat16", "bf16": True, "check_arithmetic": "every"}),
    "bf16 autocast": Way(flags={"bf16": True, "check_arithmetic": "every", "optim": "adamw_torch_fused"}),
    "float16": Way(card=True, flags={"fp16": True, "bf16": False, "check_arithmetic": "every"}),
    "QLoRA": Way(flags={"load_in_4bit": True, "check_arithmetic": "every"}),
    "8 bit": Way(flags={"load_in_8bit": True}),
    "all weights": Way(flags={"use_peft": False, "learning_rate": 1e-4, "check_arithmetic": "every"}),
    "8-bit AdamW": Way(flags={"optim": "adamw_bnb_8bit"}),
    "SGD": Way(flags={"optim": "sgd"}),
    "dropout, accumulation": Way(flags={"lora_dropout": 0.1, "gradient_accumulation_steps": 2}),
    "recomputation": Way(flags={"gradient_checkpointing": True}),
    "two ranks": Way(ranks=2),
    "FSDP2": Way(ranks=2, env=FSDP2),
    "card": Way(card=True),
    "card bf16": Way(card=True, flags={"bf16": True}),
    "card QLoRA": Way(card=True, flags={"load_in_4bit": True, "bf16": True}),
    "streamed": Way(card=True, flags={**BF16, "stream_weights": 1}),
}


ALARMS = ("gradients that differ", "computed twice differ", "rounding explains", "wrong each time", "is wrong", "fault")
"""What a run says of a fault."""


def clean_runs(bench: Bench, wanted: argparse.Namespace, rows: list[Figures]) -> None:
    """Pairs of an architecture and a way, each architecture with other ways."""
    import small_versions

    tokenizer, begun = tiny.build_tokenizer(), time.monotonic()
    pairs = [(kind, way) for way in CLEAN for kind in wanted.types]
    random.Random(wanted.first_seed).shuffle(pairs)
    part, parts = map(int, wanted.shard.split("/"))
    pairs = pairs[part - 1 :: parts]
    for kind, name in pairs:
        if len(rows) >= wanted.runs or time.monotonic() - begun > wanted.seconds:
            break
        model, output = bench.place / "small" / kind, bench.place / "out"
        if not model.is_dir():
            with open(os.devnull, "w") as nowhere, contextlib.redirect_stderr(nowhere):
                try:
                    if kind in tiny.ARCHITECTURES:
                        model = tiny.build(kind, bench.place / "small")
                    else:
                        small_versions.build(kind, "causal", model, tokenizer)
                except Exception as error:  # whatever an architecture raises
                    print(f"{kind} cannot be built: {error}", flush=True)
                    shutil.rmtree(model, ignore_errors=True)
                    continue
        shutil.rmtree(output, ignore_errors=True)
        codes, text = bench.run(CLEAN[name], output, model, max_steps=wanted.steps, max_grad_norm=1.0)
        row: Figures = {"type": kind, "way": name, "codes": codes, "said": said_in(output)}
        warned = [line for line in text.splitlines() if any(words in line for words in ALARMS)]
        row |= {"warned": warned[:3], "outcome": "clean"}
        if set(codes) != {0} or row["said"] or warned:
            refused = set(codes) == {2}
            row["outcome"] = "refused" if refused else "alarm"
            row["text"] = text[-700:]
            print(json.dumps(row), flush=True)
        else:
            report = json.loads((output / "transfer_report.json").read_text())
            counted = report["arithmetic"]
            row |= {each: counted.get(each) for each in ("checked", "products", "replays", "layers", "updates")}
        rows.append(row)
        keep(wanted, "clean", rows)


# ---- cost -----------------------------------------------------------------------------------------------------------


def cost(bench: Bench, wanted: argparse.Namespace) -> Figures:
    """Processor seconds of whole runs of 30 steps, children included, by turns."""
    found: dict[str, list[float]] = {"off": [], "sampled": []}
    for _ in range(wanted.pairs):
        for mode in found:
            output = bench.place / "cost"
            shutil.rmtree(output, ignore_errors=True)
            way = Way(flags={"check_arithmetic": mode}, layers=6)
            with spent(bench.server(False)) as seconds:
                codes, text = bench.run(way, output, bench.model(way), max_steps=30, max_length=64)
            assert codes == [0], text[-2000:]
            found[mode].append(seconds[0])
    return {mode: {"median": statistics.median(rows), "all": rows} for mode, rows in found.items()}


@contextlib.contextmanager
def spent(server: CommandServer) -> Iterator[list[float]]:
    """Processor seconds of the server's ended children while the block runs."""

    def children() -> float:
        fields = Path(f"/proc/{server._process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[13]) + int(fields[14])) / os.sysconf("SC_CLK_TCK")

    before, seconds = children(), [0.0]
    yield seconds
    seconds[0] = children() - before


def run(wanted: argparse.Namespace) -> Figures:
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    found: Figures = {}
    with tempfile.TemporaryDirectory() as scratch:
        bench = Bench(place=Path(scratch))
        try:
            if "attacks" in wanted.parts:
                found["attacks"] = rows = []
                attacks(bench, wanted, rows)
                counted = Counter((row["attack"], row["outcome"]) for row in rows)
                print_table(["attack", "outcome", "runs"], [[*key, count] for key, count in sorted(counted.items())])
                found["outcomes"] = dict(Counter(row["outcome"] for row in rows))
            if "clean" in wanted.parts:
                found["clean"] = rows = []
                clean_runs(bench, wanted, rows)
                found["clean_outcomes"] = dict(Counter(row["outcome"] for row in rows))
            if "cost" in wanted.parts:
                found["cost"] = cost(bench, wanted)
        finally:
            bench.close()
    found["cpu_seconds"] = round(resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime, 1)
    return found


if __name__ == "__main__":
    main(
        run,
        __doc__,
        {
            "parts": {"nargs": "+", "choices": ["attacks", "clean", "cost"], "default": ["attacks"]},
            "only": {"nargs": "+", "metavar": "PART", "help": "attacks whose names contain one of these"},
            "ways": {"nargs": "+", "choices": list(WAYS), "help": "only in these ways"},
            "seeds": {"type": int, "default": 10, "help": "runs of each attack, in its ways by turns"},
            "first_seed": {"type": int, "default": 0},
            "runs": {"type": int, "default": 110, "help": "clean trainings"},
            "types": {
                "nargs": "+",
                "default": list(TYPES),
                "metavar": "TYPE",
                "help": "model types of clean trainings",
            },
            "steps": {"type": int, "default": 10, "help": "of a clean training"},
            "shard": {"default": "1/1", "help": "of the clean trainings, the first of two parts: 1/2"},
            "pairs": {"type": int, "default": 5, "help": "of runs for the cost"},
            "seconds": {"type": float, "default": 1e9, "help": "begin no other run after so many"},
        },
    )
