"""Episodes: the policy and an environment, tools or a simulated user take turns. Open it to see how an episode is
played (episode.py), or how an environment (environment.py), a conversation (conversation.py) or the calls of tools
(toolbox.py) answer.
"""
