"""Three machines that pay 1 with a chance of their own, unknown and new in each episode: ten pulls in all."""

import gymnasium as gym
from gymnasium import spaces

PULLS, BOTH = 10, 0.4  # chances are drawn from beta(BOTH, BOTH): most are high or low


class Bandit(gym.Env):
    action_space = spaces.Discrete(3)
    observation_space = spaces.Text(32, charset="+-.\n")

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.chances = self.np_random.beta(BOTH, BOTH, 3).tolist()
        self.won, self.lost = [0, 0, 0], [0, 0, 0]
        return self.view(), {}

    def step(self, action):
        pays = self.np_random.random() < self.chances[int(action)]
        (self.won if pays else self.lost)[int(action)] += 1
        return self.view(), float(pays), sum(self.won + self.lost) == PULLS, False, {}

    def view(self):
        pulls = zip(self.won, self.lost, strict=True)  # of each machine, whatever their order was
        return "\n".join(("+" * won + "-" * lost).ljust(PULLS, ".") for won, lost in pulls)


gym.register("Bandit-v0", Bandit, max_episode_steps=PULLS)
