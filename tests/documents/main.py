"""The guide's step 4: a main of a user's own, of objects."""

import hydra
from parts import Market, MarketDataset, MarketReward

from training.ray_trainer import RayPPOTrainer


@hydra.main(config_path="config", config_name="test_config", version_base=None)
def main(config):
    env = Market()
    dataset = MarketDataset(env)
    reward_fn = MarketReward(env)
    trainer = RayPPOTrainer(config=config, train_dataset=dataset, reward_fn=reward_fn)
    trainer.fit()


if __name__ == "__main__":
    main()
