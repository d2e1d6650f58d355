#!/bin/bash
#SBATCH --nodes=4 --ntasks-per-node=1 --gpus-per-node=8
#SBATCH --requeue --open-mode=append
#SBATCH --signal=B:TERM@180
# Not run on a cluster here: tests/launch/test_batch_scripts.py runs it with stand-ins for SLURM's commands.
#
#   sbatch deploy/slurm-several-nodes.sh RUN.toml [RUN_DIRECTORY]
#
# Several machines, by torchrun. A job that is interrupted after it saved a newer step is requeued. The run directory is shared. docs/restarts.md describes what happens after an interruption, a lost node or an error.

file=${1:-run.toml}
run=${2:-runs/default}  # run.dir of that file, or its checkpoint.dir
newest() { fullshard ckpt list "$run" 2>/dev/null | grep -v -e "not whole" -e avoided | tail -n 1 | cut -d " " -f 1; }
before=
[ "${SLURM_RESTART_COUNT:-0}" -gt 0 ] && before=$(newest)

export TORCH_ELASTIC_SHUTDOWN_TIMEOUT=120  # what a step and a save may take
head=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)

srun torchrun --nnodes="$SLURM_JOB_NUM_NODES" --nproc-per-node=8 --max-restarts=3 \
  --rdzv-backend=c10d --rdzv-endpoint="$head:29400" --rdzv-id="$SLURM_JOB_ID" \
  -m fullshard train "$file" &
step=$!
trap 'stopped=1; scancel --signal=TERM "$SLURM_JOB_ID"' TERM
while kill -0 $step 2>/dev/null; do wait $step; done
wait $step; code=$?
[ -n "$stopped" ] && [ $code -ne 0 ] && [[ $(newest) > $before ]] && scontrol requeue "$SLURM_JOB_ID"
exit $code
