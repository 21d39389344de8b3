"""Plays episodes: the policy and an environment, tools or a simulated user take turns. Open it to see how one is
played (episode.py), and how an environment (environment.py), tools (tools.py) or a user's class (user_code.py) answer.
"""
