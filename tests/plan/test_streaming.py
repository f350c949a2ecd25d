"""Plans of streamed layers: what stays on the card, what the host needs, what the link takes, and what is refused."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hf_rocm_tune import cli
from hf_rocm_tune.models.streamed import AUTO, LAYER_BUFFERS_A_CARD
from hf_rocm_tune.plan import PlanRequest, config_of, plan_for
from hf_rocm_tune.plan.estimate import GIB, CardMemory, host
from hf_rocm_tune.plan.fit import Plan
from tests.small_models import SMALL

LAYERS = 24
FIELDS = {**SMALL, "model_type": "llama", "architectures": ["LlamaForCausalLM"], "num_hidden_layers": LAYERS}
FIELDS |= {"hidden_size": 512, "intermediate_size": 2048, "max_position_embeddings": 512}
LARGE = CardMemory(name="large", usable=20 * GIB, desktop=0, context=0)


def planned(method: str, stream: int, card: CardMemory = LARGE, **more: Any) -> Plan:
    request = PlanRequest(methods=(method,), length=128, micro_batch=1, stream=stream, evaluates=False, **more)
    return plan_for(replace(request, checkpointing=True, mixes=False), card=card, config=config_of(FIELDS))


@pytest.mark.parametrize("method", ["lora", "qlora"])
def test_bytes_that_leave_the_card_are_the_host_s_and_come_twice_a_pass(method: str) -> None:
    resident = planned(method, 0)
    weights = resident.variants[method].weights
    for count in (1, LAYER_BUFFERS_A_CARD, 10, LAYERS):
        found = planned(method, count).nearest
        waiting = host(resident.variants[method], found.case)["streamed layers"]
        buffers = found.parts["buffers of streamed layers"]
        assert waiting == count * weights.streams[0]
        assert buffers == min(count, LAYER_BUFFERS_A_CARD) * weights.streams[0]
        assert resident.nearest.total - found.total == pytest.approx(waiting - buffers, rel=0.01)
        fetched = 2 * waiting * max(0, count - LAYER_BUFFERS_A_CARD) / count
        assert found.visiting == pytest.approx(found.case.accumulation * fetched)


@pytest.mark.parametrize("method", ["qlora", pytest.param("lora", marks=pytest.mark.long)])
def test_auto_streams_as_few_layers_as_leave_what_is_preferred_or_else_the_margin(method: str) -> None:
    whole, least = planned(method, 0).nearest.total, planned(method, LAYERS).nearest.total
    card = replace(LARGE, usable=int(0.98 * whole))
    assert least < card.usable - card.room, "with all layers in host memory the room is left"
    found = planned(method, AUTO, card).nearest
    assert 0 < found.case.streamed < LAYERS and found.spare >= card.room
    assert planned(method, found.case.streamed - 1, card).nearest.spare < card.room

    # a host that holds fewer layers: as many as leave the margin
    few = next(n for n in range(1, LAYERS) if planned(method, n, card).nearest.spare >= card.margin)
    assert few < found.case.streamed
    needed = sum(host(planned(method, few).variants[method], planned(method, few).nearest.case).values())
    small = planned(method, AUTO, replace(card, host=int(needed) + 1)).nearest
    assert (small.case.streamed, small.host_missing) == (few, 0)
    assert planned(method, AUTO, replace(card, usable=2 * int(whole))).nearest.case.streamed == 0


def test_auto_leaves_the_margin_with_few_layers_where_not_even_all_would_leave_what_is_preferred() -> None:
    least = planned("lora", LAYERS).nearest.total
    card = replace(LARGE, usable=int(1.08 * least))
    assert card.margin < card.usable - least < card.room
    few = planned("lora", AUTO, card).nearest
    assert 0 < few.case.streamed < LAYERS and few.spare >= card.margin
    assert planned("lora", few.case.streamed - 1, card).nearest.spare < card.margin


def test_a_host_too_small_and_a_slow_link_count() -> None:
    found = planned("lora", LAYERS)
    needed = sum(host(found.variants["lora"], found.nearest.case).values())
    assert planned("lora", LAYERS, replace(LARGE, host=int(needed) + 1)).choice is not None
    short = planned("lora", LAYERS, replace(LARGE, host=int(needed) - GIB))
    assert short.choice is None and short.nearest.host_missing == pytest.approx(GIB, abs=2)
    slow = planned("lora", LAYERS, replace(LARGE, link=LARGE.link / 1e4)).nearest
    seconds = slow.case.accumulation * slow.case.length / slow.tokens_per_second
    assert seconds == pytest.approx(slow.visiting / (LARGE.link / 1e4), rel=0.01)  # the link alone
    assert slow.tokens_per_second < found.nearest.tokens_per_second / 2


@pytest.mark.parametrize(
    ("flags", "code", "line"),
    [
        (["--cards", "2"], 2, "--stream_weights is planned for one card (of several, each streams for itself)"),
        (["--method", "full"], 2, "--stream_weights"),
        (
            ["--host_gib", "1", "--method", "lora", "--micro_batch", "1"],
            5,
            "GiB of host memory for streamed weights are missing",
        ),
    ],
)
def test_what_cannot_be_planned_is_refused_in_one_line(
    flags: list[str], code: int, line: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(FIELDS))
    argv = ["plan", "--model", str(tmp_path), "--gpu", "rx7900xt", "--seq", "128", "--stream_weights", "4"]
    assert cli.main([*argv, *flags]) == code
    (said,) = capsys.readouterr().err.splitlines()
    assert line in said
