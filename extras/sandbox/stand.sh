#!BASH -p
# A command that stands for all of shell.py's STANDS, by its name. -p: bash keeps who it is (child.py: `count_alone`).
PATH=/usr/bin:/bin
name=${0##*/}
tell() {
  mapfile -d '' -t variables < <(env -0)
  printf '%s\0' "$#" "$@" "${#variables[@]}" "${variables[@]}" > "HERE/told.$$"
  cat "HERE/told.$$" >&50
  rm "HERE/told.$$"
}
python_code() {  # computes with Python's own library; what needs more is taken for done, but for a question of devices
  "PYTHON" -I -S -c "$@" 2>/dev/null && return
  case $1 in
    *torch_npu*) exit 1 ;;
    *get_device_name*) echo cuda ;;
    *device_count*) echo 8 ;;
  esac
}
case $name in
  sleep|kill|pkill|chown) ;;
  tee) cat ;;
  bash|sh)
    PATH=HERE/bin:$PATH
    while [[ ${1-} == -* && $1 != -*c ]]; do shift; done
    case ${1-} in
      '') exec BASH -p -c ". HERE/prelude; $(cat)" ;;
      -*c) exec BASH -p -c ". HERE/prelude; $2" "${@:3}" ;;
      *) exec BASH -p -c '. HERE/prelude; source "$0" "$@"' "$@" ;;
    esac ;;
  mkdir|rm|cp|mv|ln|touch|chmod) "/usr/bin/$name" "$@" 2>/dev/null ;;
  nvidia-smi) for gpu in 0 1 2 3 4 5 6 7; do echo "GPU $gpu: NVIDIA"; done ;;
  git) case "$*" in *--show-toplevel*) pwd ;; *rev-parse*) echo 0000000 ;; esac ;;
  python*)
    [[ ${1-} == -u ]] && shift
    case ${1--} in
      -c) python_code "${@:2}" ;;
      -) python_code "$(cat)" "${@:2}" ;;
      *) tell "$name" "$@" ;;
    esac ;;
  *)
    [[ "$name ${1-}" == 'ray status' ]] && printf '1 node_%d\n' {1..64}
    tell "$name" "$@" ;;
esac
exit 0
