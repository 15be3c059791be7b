# Sourced by ppo.sbatch, dqn.sbatch and ppo_hetjob.sbatch: trains in this job, and where the job is requeued, goes on.
#     source slurm/train.sh SCRIPT [ARGUMENTS OF THE SCRIPT]
# The run is runs/JOBNAME-JOBID, or runs/NAME with --run-name NAME. If that holds a checkpoint, the run goes on from it.
# Wants the array `launch`: what to put before python, here and on the workers' nodes.

script=$1
shift
name=$SLURM_JOB_NAME-$SLURM_JOB_ID
previous=
for word in "$@"; do
    case $previous in --run-name | --run_name) name=$word ;; esac
    case $word in --run-name=* | --run_name=*) name=${word#*=} ;; esac
    previous=$word
done

# What a killed head has left there: keys that open nothing any more.
rm -rf "runs/$name/workers/"clusterenv-*
has_checkpoint() { compgen -G "runs/$name/checkpoint-*.pt" >/dev/null; }
begin=(--run-name "$name")
if has_checkpoint; then
    begin=(--resume "runs/$name")
fi
# A task for each worker, and one for the head, which in a heterogeneous job is a part of its own.
workers=${SLURM_NTASKS_HET_GROUP_1:-$((${SLURM_NTASKS:-1} - 1))}
if ((workers < 1)); then
    echo "error: the first task is the head's, and each other a worker's: sbatch --ntasks=2 or more" >&2
    exit 2
fi
options=(--launcher slurm --num-workers "$workers" "${begin[@]}")
if ((${#launch[@]})); then
    options+=(--worker-prefix "${launch[*]@Q}")
fi

# Slurm tells this shell that time is up. It passes that on to the head, which saves a checkpoint and exits with 75.
"${launch[@]}" python "$script" "${options[@]}" "$@" &
head=$!
trap 'kill -TERM "$head" 2>/dev/null || true' TERM USR1
while wait "$head" && status=0 || status=$?; kill -0 "$head" 2>/dev/null; do :; done  # a signal ends the first wait
wait "$head" && status=0 || status=$?
rm -rf "runs/$name/workers/"clusterenv-*

state=$(squeue --noheader --jobs="$SLURM_JOB_ID" --format=%T 2>/dev/null) || state=
if ((status != 75)) || [[ ${state%%$'\n'*} != RUNNING ]]; then  # finished, failed, canceled, or requeued by Slurm
    exit "$status"
elif ! has_checkpoint; then
    echo "error: stopped before the first checkpoint, so not requeued: give the job more time" >&2
    exit "$status"
fi
echo "requeued; it will go on from runs/$name"
scontrol requeue "$SLURM_JOB_ID"
