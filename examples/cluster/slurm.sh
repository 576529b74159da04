#!/bin/bash
# Trains on 2 nodes with 8 GPUs each, one process per GPU:
#
#   sbatch examples/cluster/slurm.sh --config=wmt14_en_de_big --workdir=/shared/runs/big
#
# A job that reaches its time limit, or is preempted, saves a checkpoint, exits with code 75 and is
# put into the queue again, where it continues exactly. Adapt the lines with #SBATCH to the cluster.
#SBATCH --job-name=flaxformer_mt
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=8
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=8
#SBATCH --time=24:00:00
#SBATCH --signal=TERM@180
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=%x-%j.log
set -uo pipefail

# 16,384 target positions for each of 16 GPUs. A batch that is larger than the one of the
# configuration needs fewer steps, and often a higher learning rate.
BATCH_TOKENS=${BATCH_TOKENS:-$((16384 * SLURM_NTASKS))}

for argument in "$@"; do
  case $argument in --workdir=*) WORKDIR=${argument#--workdir=} ;; esac
done
: "${WORKDIR:?give --workdir=FOLDER on a file system that all nodes share}"

if [[ ${SLURM_RESTART_COUNT:-0} -eq 0 ]]; then
  srun --kill-on-bad-exit=1 flaxformer-mt doctor --workdir "$WORKDIR" --cluster slurm || exit 1
fi

srun --kill-on-bad-exit=1 flaxformer-mt train --cluster=slurm --parallel.fsdp=8 \
  --train.batch-tokens="$BATCH_TOKENS" "$@"
code=$?
if [[ $code -eq 75 ]]; then
  scontrol requeue "$SLURM_JOB_ID"
fi
exit $code
