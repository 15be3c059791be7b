# shellcheck shell=bash
# Sourced by train.sh and sweep_offline.sbatch: runs a command that can be stopped and resumed, and requeues this job.

# Slurm tells this shell to end by a signal. The shell passes the signal on to the command, which saves and exits with
# 75. A command that has hardly begun dies of the signal.
command='' told=''
trap 'told=yes; if [[ -n $command ]]; then kill -TERM "$command" 2>/dev/null || true; fi' TERM USR1

# In a job array, requeue only this task: the last task's SLURM_JOB_ID is the array's, too. Ask Slurm, because a job
# that was submitted by a task of an array inherits the array's variables.
job=$SLURM_JOB_ID
task=${SLURM_ARRAY_JOB_ID:-}_${SLURM_ARRAY_TASK_ID:-}
if [[ $(squeue --noheader --jobs="$task" --format=%A 2>/dev/null) == "$SLURM_JOB_ID" ]]; then
    job=$task
fi

# run COMMAND [ARGUMENT...]: leaves its exit status in $status
run() {
    "$@" &
    command=$!
    if [[ -n $told ]]; then kill -TERM "$command" 2>/dev/null || true; fi
    while wait "$command" && status=0 || status=$?; kill -0 "$command" 2>/dev/null; do :; done  # signals end a wait
    wait "$command" && status=0 || status=$?
}

# requeue SAVED: requeues the job if the command was stopped and can be resumed, otherwise exits with $status. SAVED
# names the checkpoint. If it is empty because the time was too short, the job is not requeued: that would never end.
requeue() {
    local state left restarts
    case $status/$told in 75/* | 143/yes | 138/yes) ;; *) exit "$status" ;; esac  # finished, or failed
    read -r state left restarts < <(
        squeue --noheader --jobs="$job" --Format=State:20,TimeLeft:20,RestartCnt:20 2>/dev/null
    ) || true
    if [[ $state != RUNNING ]]; then exit "$status"; fi  # canceled, or requeued by Slurm
    # Slurm warns up to a minute early, so two minutes before the limit; if three are left, the job was preempted.
    if [[ -z $1 ]] && ! [[ $left =~ ^(0?[3-9]:..|[1-9].:..|.*[1-9].*:..:..|UNLIMITED)$ && $restarts -lt 10 ]]; then
        echo "error: stopped before the first checkpoint, so not requeued: give the job more time" >&2
        exit "$status"
    fi
    trap - EXIT  # this job comes back
    echo "requeued${1:+; it will go on from $1}"
    scontrol requeue "$job"
}
