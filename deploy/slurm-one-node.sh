#!/bin/bash
#SBATCH --nodes=1 --gpus-per-node=8 --requeue --open-mode=append
#SBATCH --signal=B:TERM@180
# Not run on a cluster here: tests/launch/test_batch_scripts.py runs it with stand-ins for SLURM's commands.
#
#   sbatch deploy/slurm-one-node.sh RUN.toml [RUN_DIRECTORY]
#
# One machine. A job that is interrupted after it saved a newer step is requeued. docs/restarts.md describes what happens after an interruption, a lost node or an error.

file=${1:-run.toml}
run=${2:-runs/default}  # run.dir of that file, or its checkpoint.dir
newest() { fullshard ckpt list "$run" 2>/dev/null | grep -v -e "not whole" -e avoided | tail -n 1 | cut -d " " -f 1; }
# On the first start, checkpoints in this directory belong to an earlier run, which train sets aside.
before=
[ "${SLURM_RESTART_COUNT:-0}" -gt 0 ] && before=$(newest)

fullshard train "$file" --set run.restarts=3 &
launcher=$!
trap 'kill -TERM $launcher' TERM
while kill -0 $launcher 2>/dev/null; do wait $launcher; done
wait $launcher; code=$?  # of the launcher, and not of a wait that the signal has ended
[ $code -eq 75 ] && [[ $(newest) > $before ]] && scontrol requeue "$SLURM_JOB_ID"
exit $code
