"""Trains: data comes in, roles are called, advantages and losses are computed."""

import sys

from configs.extras import MOVED

if sys.argv[0] == "-m":  # `python -m training.X` imports this first; a module that has moved cannot answer itself
    name = sys.orig_argv[sys.orig_argv.index("-m") + 1]
    if name in MOVED:
        raise SystemExit(f"python -m {name} is {MOVED[name]} now.")
