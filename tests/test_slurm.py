"""The batch script for Slurm: with stand-ins for Slurm's commands, each node starts the launcher that it should.

Not covered: a cluster.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from hf_rocm_tune import configs, launch
from hf_rocm_tune.distributed import machines_launch

# `srun` with a node list answers for that node; without one it starts the step on every node.
STAND_INS = {
    "scontrol": "echo node-a; sleep 0.2; echo node-b",  # as it does where there are many: the end comes later
    "hostname": 'echo "10.1.1.5 172.17.0.1 "',
    "srun": """
        while [[ $1 == --* ]]; do [[ $1 == --nodelist=* ]] && one=$1; shift; done
        if [[ -n ${one-} ]]; then exec "$@"; fi
        for node in 0 1; do SLURM_NODEID=$node "$@" || exit; done
    """,
    "hf-rocm-tune": f"""
        exec {sys.executable} -c 'import json, sys; print(json.dumps(sys.argv[1:]))' "$@"
    """,
}


@pytest.fixture
def started(checkout: Path, tmp_path: Path) -> list[list[str]]:
    """The command lines of both nodes."""
    for name, text in STAND_INS.items():
        program = tmp_path / name
        program.write_text(f"#!/bin/bash\n{text}\n")
        program.chmod(0o755)
    slurm = {"SLURM_JOB_ID": "41234", "SLURM_JOB_NODELIST": "node-[a-b]", "SLURM_NNODES": "2", "CARDS": "2"}
    done = subprocess.run(
        [str(checkout / "accelerate_configs/slurm_two_machines.sh"), "--output_dir", "/shared/my out"],
        env=os.environ | slurm | {"PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}"},
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    return [json.loads(line) for line in done.stdout.splitlines()]


def test_each_node_starts_the_launcher_with_its_own_rank(started: list[list[str]], tmp_path: Path) -> None:
    assert [line[0] for line in started] == ["sft", "sft"]
    lines = [launch.split(line[1:]) for line in started]
    for number, line in enumerate(lines):
        assert line.job == ["--output_dir", "/shared/my out"]
        assert line.accelerate_config == "multi_node"
        file = ["--config_file", str(configs.path(line.accelerate_config))]
        arguments = launch._parse_launcher_flags([*file, *line.launcher, "-m", "job"])
        assert (arguments.machine_rank, arguments.num_machines, arguments.num_processes) == (number, 2, 4)
        assert (arguments.main_process_ip, arguments.main_process_port) == ("10.1.1.5", 21234)
        assert arguments.max_restarts == 3


def test_the_launcher_accepts_what_the_nodes_give_it(started: list[list[str]], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machines_launch, "_own_address", lambda host, port, hosts_it: host)
    for line in map(launch.split, started):
        file = ["--config_file", str(configs.path("multi_node"))]
        arguments = launch._parse_launcher_flags([*file, *line.launcher, "-m", "job"])
        machines_launch.settle(arguments, {"machine_rank"}, {})
        assert arguments.rdzv_backend == "c10d"
