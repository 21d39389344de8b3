"""Episodes: the policy and an environment, tools or a simulated user take turns. Open it to see how an episode is
played (episode.py), and how an environment (environment.py), tools (tools.py) or a user's class (user_code.py) answer.
"""
