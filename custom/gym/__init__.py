"""Shows gymnasium environments to a policy as text: prompts, actions, optimal moves, processes of their own.

Open it to change how observations are written out or actions are read, if the settings of `ENVIRONMENTS` in
custom/env_wrapper.py do not do.
"""
