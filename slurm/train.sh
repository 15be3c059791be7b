# shellcheck shell=bash
# Sourced by the .sbatch files of scripts: trains in this job, and goes on when the job is requeued.
#     source slurm/train.sh SCRIPT [ARGUMENTS OF THE SCRIPT]
# The run is runs/JOBNAME-JOBID, or that of --run-name NAME or --resume runs/NAME. If it holds a checkpoint, it goes on.
# Needs the array `launch`: the words before python, here and on the workers' nodes. For several learners it also needs
# `learners_per_node`: how many learners torchrun starts on each node. The task's other cores there are for workers.
source slurm/requeue.sh

script=$1
shift
name=${SLURM_JOB_NAME//[^[:alnum:]_.+=-]/_}-$SLURM_JOB_ID
name=${name/#./_}
experiment=$name resume='' previous=''
for word in "$@"; do
    case $word in --*=*) flag=${word%%=*} value=${word#*=} ;; *) flag=$previous value=$word ;; esac
    case $flag in
        --run[-_]name) name=$value ;;
        --exp[-_]name) experiment=$value ;;
        --resume) resume=$value ;;
    esac
    previous=$word
done
# The script checks these, too, but only after directories have been made and keys removed.
for flag in "--run-name $name" "--exp-name $experiment"; do
    value=${flag#* }
    if [[ ! $value =~ ^[[:alnum:]_+=-][[:alnum:]_.+=-]*$ ]]; then
        echo "error: ${flag%% *} must be of letters, digits and -_.+=, not begin with a dot, got ${value@Q}" >&2
        exit 2
    fi
done
if [[ -n $resume ]]; then
    name=$(realpath --canonicalize-missing --no-symlinks --relative-to=runs -- "$resume")
    if [[ $name == .* ]]; then
        echo "error: --resume must be runs/NAME in the working directory, got $resume" >&2
        exit 2
    fi
fi

# A task for each worker, and one for the head, which in a heterogeneous job is a part of its own.
tasks=${SLURM_NTASKS:-1} nodes=${SLURM_JOB_NUM_NODES:-1} size=''
if [[ -n ${learners_per_node:-} ]]; then
    each=${SLURM_CPUS_PER_TASK:-1}
    workers=$((nodes * (each - learners_per_node))) size="--nodes=$nodes --cpus-per-task=$each "
    if ((tasks != nodes || each < 2 * learners_per_node || each % learners_per_node)); then
        echo "error: a task on each node, with cores for $learners_per_node learners and as many workers each:" \
            "sbatch --ntasks-per-node=1 --cpus-per-task=$((3 * learners_per_node)), for example" >&2
        exit 2
    fi
else
    workers=${SLURM_NTASKS_HET_GROUP_1:-$((tasks - 1))}
    if [[ -z ${SLURM_NTASKS_HET_GROUP_1:-} ]]; then size="--ntasks=$tasks "; fi
fi
if ((workers < 1)); then
    echo "error: the first task is the head's, and each other a worker's: sbatch --ntasks=2 or more" >&2
    exit 2
fi
cpus=$(squeue --noheader --jobs="$job" --format=%C 2>/dev/null) || true
each=${SLURM_CPUS_PER_TASK:-1}
if [[ -z ${SLURM_NTASKS_HET_GROUP_1:-}${learners_per_node:-} ]] && ((${cpus:-0} >= (tasks + 1) * each)); then
    echo "warning: $workers workers, though the job's $cpus CPUs are enough for more: --ntasks sets how many" >&2
fi

# The command that resumes by hand. The script prints it when it is interrupted.
file=$(scontrol show job "$SLURM_JOB_ID" | sed -n 's/^ *Command=\([^ ]*\).*/\1/p' | head -n 1)
export CLUSTERENV_RESUME="${SCRIPT:+SCRIPT=$SCRIPT }sbatch $size${file#"$PWD/"}"

# One job at a time trains the run: another job's workers need the keys that are removed here.
lock=runs/$name/job
mkdir -p "runs/$name"
if ! (set -C && echo "$job" >"$lock") 2>/dev/null; then
    other=$(<"$lock")
    states=PENDING,CONFIGURING,RUNNING,SUSPENDED,COMPLETING
    if [[ $other != "$job" && -n $(squeue --noheader --states=$states --jobs="$other" --format=%T 2>/dev/null) ]]; then
        echo "error: runs/$name is being trained by job $other" >&2
        exit 2
    fi
    echo "$job" >"$lock"  # the lock was a killed job's, or ours before a requeue
fi
remove_keys() { rm -rf "runs/$name/workers/"clusterenv-*; }  # a killed head's keys open nothing any more
remove_keys
trap 'remove_keys; rm -f "$lock"; rmdir "runs/$name" 2>/dev/null || true' EXIT

has_checkpoint() { compgen -G "runs/$name/checkpoint-*.pt" >/dev/null; }
begin=(--run-name "$name")
if has_checkpoint; then
    begin=(--resume "runs/$name")
fi
options=(--num-workers "$workers" "${begin[@]}")
places=${SLURM_JOB_NODELIST:-}${SLURM_JOB_NODELIST_HET_GROUP_1:+ and $SLURM_JOB_NODELIST_HET_GROUP_1}
echo "job $job on $places: $workers workers, run directory runs/$name"
# shellcheck disable=SC2154  # the file that sources this one sets launch
python=("${launch[@]}" python)
if [[ -n ${learners_per_node:-} ]]; then
    # Workers run on their learner's node. This shell runs the first node's torchrun, and passes signals on to it.
    node=$(scontrol --oneliner show node "${SLURMD_NODENAME:-$(hostname -s)}")
    address=$(grep -o ' NodeAddr=[^ ]*' <<<"$node") port=$((20000 + SLURM_JOB_ID % 10000))
    torchrun=("${python[@]}" -m torch.distributed.run --nnodes "$nodes" --nproc-per-node "$learners_per_node")
    torchrun+=(--master-addr "${address#*=}" --master-port "$port" --node-rank)
    if ((nodes > 1)); then
        # shellcheck disable=SC2016  # expands on the node
        on_each='exec "${@:2:$1}" $((SLURM_PROCID + 1)) "${@:$1 + 2}"'
        srun --nodes=$((nodes - 1)) --ntasks=$((nodes - 1)) --relative=1 --overlap --cpu-bind=none --export=ALL \
            bash -c "$on_each" bash ${#torchrun[@]} "${torchrun[@]}" "$script" "${options[@]}" "$@" &
        others=$!
    fi
    run "${torchrun[@]}" 0 "$script" "${options[@]}" "$@"
    # torchrun's own status. It may also hide a failed save on a full disk; the job's next start reports that.
    if [[ -n $told && $status == 1 ]]; then status=75; fi
    if ((nodes > 1)); then
        kill "$others" 2>/dev/null || true
        wait "$others" || true
    fi
else
    options=(--launcher slurm "${options[@]}")
    if ((${#launch[@]})); then
        options+=(--worker-prefix "${launch[*]@Q}")
    fi
    run "${python[@]}" "$script" "${options[@]}" "$@"
fi
remove_keys
requeue "$(if has_checkpoint; then echo "runs/$name"; fi)"
