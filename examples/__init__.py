"""Holds environments, tasks and rewards to copy from; open the one that is most like yours.

Environments: minigrid_env, textarena_env (a game of two), openenv_env (on a server).
Tasks with rows and rewards: arithmetic, calculator_task (by calls of a tool).
"""
