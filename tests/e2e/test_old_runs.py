"""What an earlier commit wrote goes on, is used and is shown, or is refused in one line; nothing is verified less.

`tests/old_runs` keeps what the commit left, byte for byte, and `tests/old_runs/make.py` says how it was made. Absolute
paths in these files lead nowhere, so each command names the base. Numbers are compared within a tolerance with a run of
this version from its beginning, because another CPU may round otherwise.
"""

from __future__ import annotations

import hashlib
import json
import math
import shutil
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from hf_rocm_tune import cli
from hf_rocm_tune.survive import manifest
from tests.e2e.command import CommandServer, Result
from tests.e2e.conftest import ADAPTER, assert_covered, done, losses_of, report_of, sampled
from tests.old_runs.make import COMMON, HERE, RUNS
from tests.publish.hub_server import USER, LoopbackHub, loopback_hub, on_hub, use

ARCHIVES = sorted(HERE.glob("*.tar.xz"))
TOLERANCE = {
    "lora_killed": 1e-3,
    "full_killed": 1e-3,
    "card_killed": 1e-2,
}  # relative, of a loss; the card uses bfloat16
OPTIMIZER = "optimizer.pt"


class Kept:
    """A copy of an earlier commit's runs, and commands on it.

    Args:
        place: holds ``model``, ``data`` and the runs.
        servers: run commands, with a card and without.
    """

    def __init__(self, place: Path, servers: dict[bool, CommandServer]) -> None:
        self.place = place
        self._servers = servers

    def sft(self, name: str, *more: str, output: str = "", card: bool | None = None, fault: str = "") -> Result:
        """The command of a run of `RUNS`, in its directory or another one, on its device or the other one."""
        text, environment = RUNS[name]
        on_card = "SIMCARD" in environment if card is None else card
        return self.start(text, *more, output=output or name, card=on_card, fault=fault)

    def start(self, flags: str, *more: str, output: str, card: bool = False, fault: str = "") -> Result:
        """A training with these flags."""
        env = {"HF_ROCM_TUNE_FAULT": fault} if fault else {}
        argv = ["--output_dir", output, *flags.split(), "--doctor", "off", *more]
        return self._servers[card].run(*argv, env=env, cwd=self.place)

    def command(self, verb: str, *argv: str) -> Result:
        """Another command, on the CPU."""
        return self._servers[False].run(*argv, env={"VERB": verb}, cwd=self.place)

    def refused(self, result: Result) -> str:
        """The one line of a refusal."""
        assert result.code == 2 and len(result.error_lines) == 1, result.stderr[-2000:]
        assert "Traceback" not in result.stderr
        return result.error_lines[0]

    def content(self) -> dict[str, bytes]:
        """All files."""
        return {str(path): path.read_bytes() for path in self.place.rglob("*") if path.is_file()}


@pytest.fixture(scope="session", params=ARCHIVES, ids=lambda path: path.name.partition(".")[0])
def unpacked(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The files as they were kept; only copied from."""
    place = tmp_path_factory.mktemp("unpacked")
    with tarfile.open(request.param) as opened:
        opened.extractall(place, filter="data")
    return place


@pytest.fixture(scope="session")
def servers(server: CommandServer, card_server: CommandServer) -> dict[bool, CommandServer]:
    return {False: server, True: card_server}


@pytest.fixture
def kept(unpacked: Path, servers: dict[bool, CommandServer], tmp_path: Path) -> Kept:
    return Kept(shutil.copytree(unpacked, tmp_path / "kept"), servers)


@pytest.fixture(scope="session")
def losses(unpacked: Path, servers: dict[bool, CommandServer], tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The losses of a run that this version makes from its beginning, by the run's name; each is made once."""
    place = Kept(shutil.copytree(unpacked, tmp_path_factory.mktemp("clean") / "kept"), servers)
    made: dict[str, list[float]] = {}

    def of(name: str) -> list[float]:
        if name not in made:
            done(place.sft(name, output="clean"))
            made[name] = losses_of(place.place / "clean")
            shutil.rmtree(place.place / "clean")
        return made[name]

    return of


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[LoopbackHub]:
    """A Hub that this process uses."""
    with loopback_hub() as server:
        use(server, monkeypatch)
        yield server


def assert_finished(output: Path) -> None:
    """The result is sealed and whole, and its report claims every byte."""
    inspection = manifest.inspect(output)
    assert inspection.problems == [] and inspection.manifest is not None and inspection.manifest.status == "final"
    assert_covered(report_of(output))


def flip(file: Path, *, at: float = 0.5) -> None:
    """Changes one bit."""
    content = bytearray(file.read_bytes())
    content[int(len(content) * at)] ^= 4
    file.write_bytes(content)


def seal_again(directory: Path, name: str) -> None:
    """Makes the manifest's entry of a file that of its present bytes; digests of tensors stay as they were written."""
    file = directory / manifest.MANIFEST_NAME
    body = json.loads(file.read_text())
    content = (directory / name).read_bytes()
    body["files"][name] = {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    del body["digest"]
    body["digest"] = hashlib.sha256(json.dumps(body, sort_keys=True, separators=(",", ":")).encode()).hexdigest()
    file.write_text(json.dumps(body, indent=1))


# ---- resumed ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", sampled(TOLERANCE, "lora_killed", "full_killed"))
def test_a_killed_run_goes_on_as_if_this_version_had_begun_it(kept: Kept, losses: Any, name: str) -> None:
    state = json.loads((kept.place / name / "checkpoint-4" / "trainer_state.json").read_text())
    before = [row["loss"] for row in state["log_history"]]
    resumed = done(kept.sft(name))
    assert "continues from checkpoint-4 of 6 steps (verified)" in resumed.stdout
    after = losses_of(kept.place / name)
    assert after[:4] == before and len(after) == 6
    assert after[4:] == pytest.approx(losses(name)[4:], rel=TOLERANCE[name])
    assert_finished(kept.place / name)
    report = report_of(kept.place / name)
    assert report["incidents"] == [] and report["files"]["verified"] > 0


def test_what_is_loaded_of_a_checkpoint_is_verified_on_its_way_to_the_card(kept: Kept) -> None:
    shutil.copytree(kept.place / "card_killed", kept.place / "again")
    done(kept.sft("card_killed"))
    done(kept.sft("card_killed", output="again", fault="kind=flip,rate=0.2,seed=3,persist=0,stage=optimizer"))
    assert (kept.place / "again" / ADAPTER).read_bytes() == (kept.place / "card_killed" / ADAPTER).read_bytes()
    wrong = [row for row in report_of(kept.place / "again")["incidents"] if row["stage"] == "optimizer"]
    assert wrong and {row["outcome"] for row in wrong} == {"recovered"}
    assert_finished(kept.place / "again")


@pytest.mark.parametrize("file", [ADAPTER, OPTIMIZER, "rng_state.pth", manifest.MANIFEST_NAME])
def test_a_checkpoint_with_one_changed_bit_is_named_and_the_one_before_it_is_used(
    kept: Kept, losses: Any, file: str
) -> None:
    flip(kept.place / "lora_killed" / "checkpoint-4" / file)
    resumed = done(kept.sft("lora_killed"))
    assert f"checkpoint-4 is damaged and is renamed: {file}" in resumed.stdout + resumed.stderr
    assert "continues from checkpoint-2 of 6 steps (verified)" in resumed.stdout
    assert (kept.place / "lora_killed" / "damaged-checkpoint-4").is_dir()
    assert losses_of(kept.place / "lora_killed")[2:] == pytest.approx(losses("lora_killed")[2:], rel=1e-3)
    assert_finished(kept.place / "lora_killed")


def test_digests_of_tensors_in_an_old_manifest_are_compared_with_what_is_loaded(kept: Kept) -> None:
    """The file's own hash is right again, so that only the tensor's digest can tell."""
    checkpoint = kept.place / "lora_killed" / "checkpoint-4"
    tensors = load_file(checkpoint / ADAPTER)
    changed = next(iter(tensors))
    tensors[changed] = tensors[changed] * 1.0001
    save_file(tensors, checkpoint / ADAPTER, metadata={"format": "pt"})
    seal_again(checkpoint, ADAPTER)
    assert changed in stopped(kept)


def test_digests_of_optimizer_state_in_an_old_manifest_are_compared_with_what_is_loaded(kept: Kept) -> None:
    checkpoint = kept.place / "lora_killed" / "checkpoint-4"
    state = torch.load(checkpoint / OPTIMIZER, weights_only=True)
    state["state"][3]["exp_avg"] *= 1.0001
    torch.save(state, checkpoint / OPTIMIZER)
    seal_again(checkpoint, OPTIMIZER)
    assert "optimizer.pt:/state/3/exp_avg" in stopped(kept)


def stopped(kept: Kept) -> str:
    """The one line of a resumption that ends with corruption, though all files are as the manifest says."""
    assert manifest.verify(kept.place / "lora_killed" / "checkpoint-4") == []
    result = kept.sft("lora_killed")
    assert result.code == 3 and len(result.error_lines) == 1 and "Traceback" not in result.stderr, result.stderr
    return result.error_lines[0]


def test_an_old_checkpoint_is_named_in_another_directory(kept: Kept, losses: Any) -> None:
    resumed = done(kept.sft("lora_killed", "--resume_from_checkpoint", "lora_killed/checkpoint-2", output="other"))
    assert "checkpoint-2" in resumed.stdout and "(verified)" in resumed.stdout
    assert losses_of(kept.place / "other")[2:] == pytest.approx(losses("lora_killed")[2:], rel=1e-3)
    assert_finished(kept.place / "other")


def test_an_old_adapter_is_trained_further(kept: Kept, losses: Any) -> None:
    done(kept.start(COMMON, "--adapter_name_or_path", "card_finished", output="more"))
    first = losses_of(kept.place / "more")[0]
    assert math.isfinite(first) and first < losses("lora_killed")[0] - 0.1, "it begins where the adapter was"
    assert_finished(kept.place / "more")


def test_a_finished_run_is_finished_and_stays_as_it_is(kept: Kept) -> None:
    before = kept.content()
    again = done(kept.sft("card_finished"))
    assert "already holds this finished run" in again.stdout
    assert kept.content() == before


# ---- refused ---------------------------------------------------------------------------------------------------------


def test_another_device_or_another_base_is_refused_in_one_line_and_changes_nothing(kept: Kept) -> None:
    lock = kept.place / "card_killed" / "_run.lock"
    lock.unlink()  # the only file that a refused start may take away
    (kept.place / "lora_killed" / "_run.lock").unlink()
    before = kept.content()
    said = kept.refused(kept.sft("card_killed", card=False))
    assert "bf16 True -> False" in said and "choose another --output_dir" in said
    assert kept.content() == before
    flip(kept.place / "model" / "model.safetensors", at=0.9)
    before = kept.content()
    said = kept.refused(kept.sft("lora_killed"))
    assert "the content of model_name_or_path" in said and "choose another --output_dir" in said
    assert kept.content() == before


@pytest.mark.parametrize("verb", ["generate", "merge"])
def test_a_base_that_is_not_where_it_was_is_asked_for(kept: Kept, verb: str) -> None:
    asked = ["--prompt", "Question"] if verb == "generate" else ["merged"]
    said = kept.refused(kept.command(verb, "card_finished", *asked))
    assert "name a directory or a Hub id with --base" in said


@pytest.mark.parametrize("verb", ["generate", "merge"])
def test_an_old_adapter_with_one_changed_bit_is_not_used(kept: Kept, verb: str) -> None:
    flip(kept.place / "card_finished" / ADAPTER, at=0.9)
    asked = ["--prompt", "Question"] if verb == "generate" else ["merged"]
    result = kept.command(verb, "card_finished", *asked, "--base", "model")
    assert result.code in (2, 3) and len(result.error_lines) == 1 and "Traceback" not in result.stderr
    assert ADAPTER in result.error_lines[0]
    assert not (kept.place / "merged").exists()


# ---- used and shown --------------------------------------------------------------------------------------------------


def test_old_results_answer_and_merge_to_the_same_answers(kept: Kept) -> None:
    asked = ["--prompt", "Question 3: what comes after?", "--temperature", "0", "--max_new_tokens", "8", "--json"]
    asked += ["--dtype", "float32"]
    answered = done(kept.command("generate", "card_finished", "--base", "model", *asked))
    assert "equal to its manifest (step 6)" in answered.stderr
    done(kept.command("merge", "card_finished", "merged", "--base", "model"))
    merged = done(kept.command("generate", "merged", *asked))
    bare = done(kept.command("generate", "model", *asked))
    texts = [json.loads(each.stdout.splitlines()[-1])["completion"] for each in (answered, merged, bare)]
    assert texts[0] == texts[1] != texts[2]
    for checkpoint in ("lora_killed/checkpoint-4", "full_killed/checkpoint-4"):
        base = ["--base", "model"] if checkpoint.startswith("lora") else []
        done(kept.command("generate", checkpoint, *base, *asked))
    done(kept.command("merge", "lora_killed/checkpoint-4", "merged-4", "--base", "model"))


@pytest.mark.filterwarnings("ignore:Use 'content=:DeprecationWarning")
def test_an_old_result_is_pushed_and_its_manifest_fits(
    kept: Kept, hub: LoopbackHub, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(kept.place)
    before = kept.content()
    assert cli.main(["push", "card_finished", f"{USER}/old", "--base_model_id", "org/base"]) == 0, (
        capsys.readouterr().err
    )
    assert kept.content() == before
    there = on_hub(hub, f"{USER}/old")
    assert there[ADAPTER] == before[str(kept.place / "card_finished" / ADAPTER)]
    assert not [name for name, content in there.items() if b"/tmp/old_runs" in content]
    for name, content in there.items():
        (kept.place / "pulled").mkdir(exist_ok=True)
        (kept.place / "pulled" / name).write_bytes(content)
    assert manifest.verify(kept.place / "pulled") == []


def test_old_runs_are_shown_with_what_was_found_in_them(kept: Kept) -> None:
    names = ["card_finished", "card_killed", "lora_killed", "full_killed"]
    for name in names:
        done(kept.command("report", name))
    finished, *killed = [(kept.place / name / "report.html").read_text() for name in names]
    assert "100 % of the bytes on the device were verified" in finished
    assert "Corruption was found 4 times and recovered before it was used" in finished
    assert "Faults were injected on request" in finished
    for page in killed:
        assert "The run has not finished" in page and "there is no transfer report" in page
    done(kept.command("report", *names, "--out", "all.html"))
    assert all(name in (kept.place / "all.html").read_text() for name in names)


def test_an_old_report_that_was_changed_is_no_evidence(kept: Kept) -> None:
    report = kept.place / "card_finished" / "transfer_report.json"
    report.write_text(report.read_text().replace('"mismatches": 2', '"mismatches": 0'))
    done(kept.command("report", "card_finished"))
    page = (kept.place / "card_finished" / "report.html").read_text()
    assert "differs from what was written: transfer_report.json is changed" in page
