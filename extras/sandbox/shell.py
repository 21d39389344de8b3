"""The program that runs a shell script in the sandbox, where commands only record how they are called.

`run_shell` of this folder hands it to `run_python`, with a JSON of the arguments of `become_shell` on stdin. Its output
is a record of each call: how many words and the words, how many exported variables and these as NAME=value, all ended
by NUL; the first holds this folder. The script's own output goes to stderr. Its working directory and HOME are folders
in this one whose entries are links, so that it can write to a log.
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


def become_shell(
    text: str, words: list[str], variables: dict[str, str], folders: dict, stand: str, prelude: str
) -> None:
    """Becomes a bash that runs the script `text`.

    Args:
        words: the script's name and arguments.
        folders: the working directory `cwd` and `home`, each the path and the names of its entries.
        stand, prelude: stand.sh, which stands for a command, and prelude.sh, which every bash reads first.
    """
    folder = os.getcwd()
    for kind, (path, entries) in folders.items():
        os.mkdir(kind)
        for entry in entries[:MOST_LINKS]:
            os.symlink(os.path.join(path, entry), os.path.join(kind, entry))
    bash = next(path for path in ("/usr/bin/bash", "/bin/bash", "/usr/local/bin/bash") if os.path.exists(path))
    places = {"HERE": folder, "PYTHON": sys.executable, "NAMES": " ".join(STANDS), "BASH": bash}
    os.mkdir("bin")
    write("bin/python", stand, places, 0o755)
    for name in (*STANDS[1:], "no-folder", "no-file", "no-command"):
        os.link("bin/python", f"bin/{name}")
    write("prelude", prelude, places, 0o644)
    os.dup2(1, RECORDS)
    os.dup2(2, 1)
    os.write(RECORDS, f"1\0{folder}\x000\0".encode())
    os.chdir("cwd")
    changes = {"PATH": f"{folder}/bin:/usr/bin:/bin", "HOME": f"{folder}/home", "TMPDIR": folder, "PWD": os.getcwd()}
    os.execve(bash, ["bash", "-p", "-c", f". {folder}/prelude; {text}", *words], variables | changes)


def write(path: str, text: str, places: dict[str, str], mode: int) -> None:
    for name, value in places.items():
        text = text.replace(name, value)
    with open(os.open(path, os.O_WRONLY | os.O_CREAT, mode), "w") as file:
        file.write(text)


if __name__ == "__main__":
    become_shell(*json.load(sys.stdin))
