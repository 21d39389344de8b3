"""Holds environments, tasks, rewards and agents to copy from; open the one that is most like yours.

Environments: minigrid_env, textarena_env (a game of two), openenv_env (on a server).
Tasks with rows and rewards: arithmetic, calculator_task (by calls of a tool).
Rewards: reward_math, reward_code (in a sandbox), reward_qa, reward_custom; scripts.create_reward_template copies them.
Agents, which play rows as programs of their own: openai_agent, openai_agents_sdk, langchain_agent.
"""
