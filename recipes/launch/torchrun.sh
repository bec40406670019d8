#!/usr/bin/env bash
# Train a recipe under torchrun, on one node or on many; an existing run continues.
#
#   recipes/launch/torchrun.sh RECIPE.toml [OPTIONS of thinwire train]
#
# On many nodes, start the script on each with these variables:
#   NNODES       number of nodes
#   MASTER_ADDR  name or address of the first node, where ranks meet
#   NODE_RANK    0 on the first; without it, each node checks whether MASTER_ADDR is its own
# Set these if their defaults do not suit:
#   MASTER_PORT=29500  JOB_ID=thinwire  which distinguishes jobs
#   OUT=runs/RECIPE    the run's directory, which all nodes must see
#   NPROC=auto         ranks per node: one for each GPU
#   MAX_RESTARTS=3     number of times that a lost rank restarts all from the last checkpoint
# The script fails as long as the run is not complete, also where a signal to another node has stopped it.
# `thinwire doctor` prints the network interfaces that gloo and NCCL will use.
set -euo pipefail

recipe=${1:?usage: torchrun.sh RECIPE.toml [OPTIONS of thinwire train]}
shift
out=${OUT:-runs/$(basename "$recipe" .toml)}
nnodes=${NNODES:-1}
node_rank=${NODE_RANK:-${JOB_COMPLETION_INDEX:-}}  # the latter is set by Kubernetes

if ((nnodes > 1)); then
  meeting=(--rdzv-backend c10d --rdzv-id "${JOB_ID:-thinwire}"
    --rdzv-endpoint "${MASTER_ADDR:?name the node that the others meet on}:${MASTER_PORT:-29500}")
  # Without it, ranks of a node that stayed look for those of one that comes back as the first where they met before.
  export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1
  if [[ -n $node_rank ]]; then
    meeting+=(--rdzv-conf "is_host=$([[ $node_rank == 0 ]] && echo true || echo false)")
  fi
else
  meeting=(--standalone)
fi

options=(--out "$out")
if [[ -e $out/recipe.toml ]]; then
  options+=(--resume)
fi

# Seconds in which ranks may save after SIGTERM. torchrun's own are 30.
export TORCH_ELASTIC_SHUTDOWN_TIMEOUT=${TORCH_ELASTIC_SHUTDOWN_TIMEOUT:-110}

# Set before torchrun starts: a signal that came in between would end this script and leave torchrun running.
trap '[[ -n ${!:-} ]] || exit 143; kill -TERM "$!"' TERM
trap : INT  # Ctrl-C reaches torchrun by itself
torchrun --nnodes "$nnodes" --nproc-per-node "${NPROC:-auto}" --max-restarts "${MAX_RESTARTS:-3}" "${meeting[@]}" \
  -m thinwire.cli.main train "$recipe" "${options[@]}" "$@" &
agent=$!
status=0
wait "$agent" || status=$?
while kill -0 "$agent" 2>/dev/null; do  # a signal has ended the wait
  status=0
  wait "$agent" || status=$?
done

# Ranks that a signal to another node has stopped end without an error.
if ((status == 0)) && [[ ! -e $out/summary.json ]]; then
  echo "torchrun.sh: the run in $out is not complete; start the script again to continue it" >&2
  status=1
fi
exit "$status"
