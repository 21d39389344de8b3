from verl import DataProto
from verl.trainer.ppo.ray_trainer import RayPPOTrainer


class Halfway(RayPPOTrainer):
    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.updates = 0

    def _get_gen_batch(self, batch: DataProto) -> DataProto:
        found = super()._get_gen_batch(batch)
        found.meta_info["hint"] = self.global_steps
        return found

    def _update_actor(self, batch: DataProto) -> DataProto:
        self.updates += 1
        batch.batch["advantages"] = batch.batch["advantages"].clamp(-1, 1)
        return super()._update_actor(batch)

    def _validate(self, *args, **kwargs):
        return {**super()._validate(*args, **kwargs), "val-aux/extra": float(self.updates)}

    def _save_checkpoint(self):
        if self.global_steps > 1:
            super()._save_checkpoint()
