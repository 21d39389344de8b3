"""Shows a run at TensorBoard and at services: trainer.logger=[console,tensorboard,wandb,mlflow,trackio,swanlab]."""
