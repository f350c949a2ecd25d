"""Two machines, as two agents of plain torchrun on loopback: what a user starts without a launcher of ours."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from hf_rocm_tune.survive import manifest
from tests.e2e.conftest import report_of
from tests.two_ranks import free_port


@pytest.mark.long
def test_two_agents_of_torchrun_train_one_adapter(
    base_flags: list[str], model_of: Callable[[str], Path], tmp_path: Path
) -> None:
    meeting = ["--rdzv_backend", "c10d", "--rdzv_endpoint", f"127.0.0.1:{free_port()}", "--rdzv_id", "run"]
    command = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--nproc_per_node", "1", *meeting]
    own = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1", "GLOO_SOCKET_IFNAME": "lo"}
    job = ["-m", "hf_rocm_tune.sft", *base_flags, "--model_name_or_path", str(model_of("llama3")), "--doctor", "off"]
    agents = [
        subprocess.Popen(
            [*command, "--local_addr", "127.0.0.1", *job],
            env=os.environ | own,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for _ in range(2)
    ]
    try:
        said = [agent.communicate(timeout=480)[0] for agent in agents]
    finally:
        for agent in agents:
            agent.kill()
    assert [agent.returncode for agent in agents] == [0, 0], said
    assert sum("several machines: torch, gloo and RCCL listen on all interfaces" in each for each in said) == 1
    assert manifest.verify(tmp_path / "out") == []
    covered = report_of(tmp_path / "out")["coverage"]
    assert covered["verified_bytes"] == covered["device_bytes"] > 0
