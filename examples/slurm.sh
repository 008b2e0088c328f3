#!/usr/bin/env bash
# A training over hosts that publishes every step into a folder that all of them see, and a mirror of it beside it.
#   sbatch --export=ALL,TRAIN=train.py,MIRROR=s3://bucket/run-42 examples/slurm.sh
#SBATCH --job-name=run-42
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --time=24:00:00
#SBATCH --signal=B:TERM@120
#SBATCH --requeue
set -euo pipefail

REPO=${REPO:-$SLURM_SUBMIT_DIR/repo}
TRAIN=${TRAIN:-train.py}
HEAD=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
export REPO

# Whatever ends the job, the mirror is told, and copies what is there: it goes on where it was when the job comes back.
if [[ -n ${MIRROR:-} ]]; then
    deltackpt mirror "$REPO" "$MIRROR" --watch --wait --limit 200MB/s &
    mirror=$!
    trap 'kill -TERM "$mirror" 2>/dev/null || true; wait "$mirror" || true; deltackpt mirror "$REPO" "$MIRROR"' EXIT
fi

# The hook in TRAIN proves which step its weights are, so a job that was requeued goes on after it.
srun --kill-on-bad-exit=1 torchrun --nnodes "$SLURM_NNODES" --nproc-per-node "${SLURM_GPUS_ON_NODE:-1}" \
    --rdzv-backend c10d --rdzv-endpoint "$HEAD:${PORT:-29500}" --rdzv-id "$SLURM_JOB_ID" "$TRAIN" &
training=$!
trap 'kill -TERM "$training"' TERM
wait "$training"
