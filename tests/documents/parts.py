"""An environment, its data set and its reward manager, as the extraction guide writes them: steps 2 and 3."""

import torch

from data.protocol import DataProto
from data.rl_dataset import RLHFDataset


class Market:
    """Shows a price: below 5 one buys, else one sells."""

    def get_state(self, index):
        return {"price": index % 10}

    def get_action(self, state):
        return "B" if state["price"] < 5 else "S"

    def compute_reward(self, state, action):
        return 1.0 if action == self.get_action(state) else -1.0


class MarketDataset(RLHFDataset):
    def __init__(self, env, **kwargs):
        super().__init__(**kwargs)
        self.env = env

    def __len__(self):
        return 20

    def __getitem__(self, index):
        state = self.env.get_state(index)
        return {"prompt": self.state_to_text(state), "state": state, "expected_action": self.env.get_action(state)}

    def state_to_text(self, state):
        return f"{state['price']}="


class MarketReward:
    def __init__(self, environment, **kwargs):
        self.environment = environment

    def __call__(self, data: DataProto) -> torch.Tensor:
        pairs = zip(data.responses, data.state, strict=True)
        rewards = [self.environment.compute_reward(state, self.extract_action(text)) for text, state in pairs]
        return torch.tensor(rewards)

    def extract_action(self, text):
        return text.strip()[:1]


def make_market(env_id, **settings):
    return Market()
