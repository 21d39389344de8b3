"""Processes that answer requests and can be killed: of reward functions, and of environments."""
