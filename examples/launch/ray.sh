#!/usr/bin/env bash
# Makes a Ray cluster of machines by hand:
#   on the first machine:   bash examples/launch/ray.sh head
#   on each of the others:  bash examples/launch/ray.sh join ADDRESS_OF_THE_FIRST
#   on the first again:     python -m extras.cluster --nodes 2 && python main.py trainer.nnodes=2 …
#   on each, at the end:    ray stop
# All need the same versions, the same path of this folder, a disk in common for the run's folder, and the same token:
# copy ~/.ray/auth_token, which `head` makes, to the others, readable by you alone.
set -euo pipefail
cd "$(dirname "$0")/../.."
[ ! -f .venv/bin/activate ] || source .venv/bin/activate
export RAY_AUTH_MODE=token
# export GLOO_SOCKET_IFNAME=eth0 NCCL_SOCKET_IFNAME=eth0  # where machines have several interfaces

case "${1:-}" in
  head)
    [ -n "${RAY_AUTH_TOKEN:-}" ] || [ -f ~/.ray/auth_token ] || ray get-auth-token --generate >/dev/null
    ray start --head --port=6379
    ;;
  join) ray start --address="${2:?the address of the first machine}:6379" ;;
  *) echo "usage: bash $0 head | join ADDRESS" >&2 && exit 2 ;;
esac
