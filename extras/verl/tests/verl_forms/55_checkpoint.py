import sys
from pathlib import Path

from verl.utils.checkpoint.checkpoint_manager import find_latest_ckpt_path, get_checkpoint_tracker_filename

folder = Path(sys.argv[1])
assert Path(get_checkpoint_tracker_filename(str(folder))).name == "latest_checkpointed_iteration.txt"
newest = find_latest_ckpt_path(str(folder))
step = int((folder / "latest_checkpointed_iteration.txt").read_text())
print(step, newest, sorted(path.name for path in Path(newest, "actor").iterdir()))
