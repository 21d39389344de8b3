"""A secret of three letters from A to D: find it in six guesses, which pays 1.

Behind each guess: how many of its letters are in the right place, and how many more are elsewhere in the secret.
"""

import gymnasium as gym
from gymnasium import spaces

LETTERS, LENGTH, GUESSES = "ABCD", 3, 6


def feedback(guess, secret):
    right = sum(a == b for a, b in zip(guess, secret, strict=True))
    return f"{right}{sum(min(guess.count(letter), secret.count(letter)) for letter in LETTERS) - right}"


class Mastermind(gym.Env):
    action_space = spaces.Text(LENGTH, min_length=LENGTH, charset=LETTERS)
    observation_space = spaces.Text(7 * GUESSES, charset=LETTERS + "0123 .\n")

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.secret = "".join(self.np_random.choice([*LETTERS], LENGTH))
        self.guesses = []
        return self.view(), {}

    def step(self, action):
        self.guesses.append((action, feedback(action, self.secret)))
        found = action == self.secret
        return self.view(), float(found), found or len(self.guesses) == GUESSES, False, {}

    def view(self):
        lines = [f"{guess} {answer}" for guess, answer in self.guesses]
        return "\n".join([*lines, *["... .."] * (GUESSES - len(lines))])


gym.register("Mastermind-v0", Mastermind, max_episode_steps=GUESSES)
