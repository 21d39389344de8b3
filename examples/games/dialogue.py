"""A journey to book: ask for city, day and hour, and book when all have been said, which pays 1.

The customer answers what was asked, something else, or nothing of use. A question costs 0.05, booking too early 0.2.
"""

import string

import gymnasium as gym
from gymnasium import spaces

WORDS = ("Rome", "Oslo", "Lima", "Bonn"), ("Mon", "Tue", "Fri", "Sun"), ("1pm", "2pm", "7am", "9am")
CHAT = "well", "hm", "oh", "wait"
PATIENCE = 10  # answers


class Dialogue(gym.Env):
    action_space = spaces.Discrete(4)  # ask for city, day, hour; book
    observation_space = spaces.Text(5 * PATIENCE + 5, charset=string.ascii_letters + string.digits + " ")

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.wishes = [str(self.np_random.choice(words)) for words in WORDS]
        self.said = []
        return self.view(), {}

    def step(self, action):
        if action == 3 and {*self.wishes} <= {*self.said}:
            return self.view(), 1.0, True, False, {}
        if action == 3:
            self.said.append("no")
        else:
            answers = self.wishes[int(action)], self.np_random.choice(self.wishes), self.np_random.choice(CHAT)
            self.said.append(str(self.np_random.choice(answers, p=[0.5, 0.3, 0.2])))
        return self.view(), -0.2 if action == 3 else -0.05, len(self.said) == PATIENCE, False, {}

    def view(self):
        return "".join(f"{word:5}" for word in ("hello", *self.said))


gym.register("Dialogue-v0", Dialogue, max_episode_steps=PATIENCE)
