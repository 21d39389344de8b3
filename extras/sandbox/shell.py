"""The program that runs a shell script in the sandbox, among commands that only write down how they were called.

`run_shell` of this folder hands it to `run_python`, with a JSON of the arguments of `become_shell` on stdin. Its output
is a record of each call: how many words and the words, how many exported variables and these as NAME=value, all ended
by NUL; the first holds this folder. What the script itself says goes to stderr. Its working directory and HOME are
folders here whose entries are links, so that it can write to a log.
"""

import json
import os
import sys

RECORDS = 50  # the descriptor that records are written to; bash takes those from 10 on and from 63 down
MOST_LINKS = 80  # of a folder: the sandbox has 256 files
STANDS = ("python", "python2", "python3", *(f"python3.{minor}" for minor in range(8, 15)), "torchrun", "accelerate",
          "deepspeed", "ray", "uv", "pip", "pip3", "conda", "mamba", "hf", "huggingface-cli", "modelscope", "wandb",
          "vllm", "curl", "wget", "git", "ssh", "scp", "rsync", "docker", "sudo", "apt", "apt-get", "srun", "sbatch",
          "nvidia-smi", "numactl", "nsys", "sleep", "kill", "pkill", "tee", "mkdir", "rm", "cp", "mv", "ln", "touch",
          "chmod", "chown", "bash", "sh", "hdfs", "tmux", "screen", "kubectl", "apptainer", "singularity", "podman",
          "poetry", "pixi")  # fmt: skip

# A command that stands for all of STANDS, by its name. -p: bash keeps who it is (child.py: `count_alone`).
STAND = r"""#!BASH -p
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
"""

# Read first by every bash that the script starts. Functions are found where it changes PATH, too.
PRELUDE = r"""
enable -n kill
trap 'for _ in {1..20}; do [[ $(jobs -r) ]] || break; /bin/sleep 0.1; done' EXIT  # what it leaves in the background
for name in NAMES; do eval "function $name { HERE/bin/$name \"\$@\"; }"; done
unset name
ulimit() { :; }
cd() { builtin cd "$@" 2>/dev/null || HERE/bin/no-folder "$@"; }
pushd() { builtin pushd "$@" 2>/dev/null || HERE/bin/no-folder "$@"; }
popd() { builtin popd "$@" 2>/dev/null || :; }
source() { if [ -f "$1" ] && ( : < "$1" ) 2>/dev/null; then builtin source "$@"; else HERE/bin/no-file "$@"; fi; }
function . { source "$@"; }
command_not_found_handle() {
  case $1 in *-smi) return 127 ;; esac
  HERE/bin/no-command "$@"
}
"""


def become_shell(text: str, words: list[str], variables: dict[str, str], folders: dict) -> None:
    """Becomes a bash that runs the script `text`.

    Args:
        words: the script's name and arguments.
        folders: the working directory `cwd` and `home`, each the path and the names of its entries.
    """
    here = os.getcwd()
    for kind, (path, entries) in folders.items():
        os.mkdir(kind)
        for entry in entries[:MOST_LINKS]:
            os.symlink(os.path.join(path, entry), os.path.join(kind, entry))
    bash = next(path for path in ("/usr/bin/bash", "/bin/bash", "/usr/local/bin/bash") if os.path.exists(path))
    places = {"HERE": here, "PYTHON": sys.executable, "NAMES": " ".join(STANDS), "BASH": bash}
    os.mkdir("bin")
    write("bin/python", STAND, places, 0o755)
    for stand in (*STANDS[1:], "no-folder", "no-file", "no-command"):
        os.link("bin/python", f"bin/{stand}")
    write("prelude", PRELUDE, places, 0o644)
    os.dup2(1, RECORDS)
    os.dup2(2, 1)
    os.write(RECORDS, f"1\0{here}\x000\0".encode())
    os.chdir("cwd")
    own = {"PATH": f"{here}/bin:/usr/bin:/bin", "HOME": f"{here}/home", "TMPDIR": here, "PWD": os.getcwd()}
    os.execve(bash, ["bash", "-p", "-c", f". {here}/prelude; {text}", *words], variables | own)


def write(path: str, text: str, places: dict[str, str], mode: int) -> None:
    for name, value in places.items():
        text = text.replace(name, value)
    with open(os.open(path, os.O_WRONLY | os.O_CREAT, mode), "w") as file:
        file.write(text)


if __name__ == "__main__":
    become_shell(*json.load(sys.stdin))
