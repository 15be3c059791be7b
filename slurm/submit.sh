# shellcheck shell=bash
# Sourced by sweep_offline.sbatch and figures.sbatch: submits further jobs with this one's options, which sbatch does not
# pass on by itself. Other options belong in #SBATCH lines.
log=$(scontrol show job "$SLURM_JOB_ID" | sed -n 's/^ *StdOut=//p')
log=${log//_4294967294/}  # %a where there is no array
output() { printf -- '--output=%s/%s' "${log%/*}" "$(basename "$log" | sed "s/\(.*\)$SLURM_JOB_ID/\1$1/")"; }
options=(--parsable --export=ALL "--cpus-per-task=$SLURM_CPUS_PER_TASK" "--partition=$SLURM_JOB_PARTITION")
options+=("--time=$(squeue --noheader --jobs="$SLURM_JOB_ID" --format=%l)")
options+=(${SLURM_JOB_ACCOUNT:+"--account=$SLURM_JOB_ACCOUNT"} ${SLURM_JOB_QOS:+"--qos=$SLURM_JOB_QOS"})
options+=(${SLURM_MEM_PER_NODE:+"--mem=$SLURM_MEM_PER_NODE"} ${SLURM_MEM_PER_CPU:+"--mem-per-cpu=$SLURM_MEM_PER_CPU"})

# submit NUMBER [OPTION...] FILE [ARGUMENT...]: prints the number of the job, whose log has NUMBER instead of this one's
submit() {
    local id
    id=$(sbatch "${options[@]}" "$(output "$1")" "${@:2}") || return
    echo "${id%%;*}"
}
