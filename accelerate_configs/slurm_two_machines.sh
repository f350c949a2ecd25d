#!/bin/bash
# One fine-tuning job on two nodes of a Slurm cluster: one launcher a node, one process a card.
#
# Needs:  an output directory, model and data that both nodes see, and hf-rocm-tune on the PATH of both.
# Start:  sbatch accelerate_configs/slurm_two_machines.sh --config mine.yaml --output_dir /shared/out
#         Everything after the script's name goes to `hf-rocm-tune sft`. CARDS=2 sbatch --gpus-per-node=2 ... for two cards.
# Again:  the same command goes on from the newest checkpoint; after a node failure Slurm does that by itself (--requeue).
#SBATCH --job-name=hf-rocm-tune
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=1
#SBATCH --cpus-per-task=8
#SBATCH --time=24:00:00
#SBATCH --signal=TERM@300
#SBATCH --requeue
#SBATCH --open-mode=append

set -euo pipefail

# By address: a node's name may mean a loopback address on the node itself.
nodes=$(scontrol show hostnames "$SLURM_JOB_NODELIST")
read -r first <<<"$nodes"
addresses=$(srun --nodes=1 --ntasks=1 --nodelist="$first" hostname -I)
read -r address _ <<<"$addresses"
# Two jobs of one user on one node must not meet.
port=$((20000 + SLURM_JOB_ID % 10000))

# $SLURM_NODEID is the node's own: the inner shell reads it. Without --kill-on-bad-exit=0 some sites end all launchers
# with the first that fails, which is before a restart.
exec srun --kill-on-bad-exit=0 bash -c '
    exec hf-rocm-tune sft --accelerate_config multi_node \
        --machine_rank "$SLURM_NODEID" --main_process_ip "$1" --main_process_port "$2" \
        --num_machines "$SLURM_NNODES" --num_processes "$((SLURM_NNODES * $3))" --max_restarts 3 "${@:4}"
' launcher "$address" "$port" "${CARDS:-1}" "$@"
