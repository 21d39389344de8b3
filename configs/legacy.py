"""Spellings that guides and older verl versions use, and verl keys that have nothing to act on here.

`RENAMED`: old key or section → today's. `RENAMED_VALUES`: one value of a key that became another key.
`NO_EFFECT`: accepted, so that a command brought from verl runs, with the reason shown.
"""

RENAMED = {
    "algorithm.policy_loss_fn": "actor_rollout_ref.actor.policy_loss.loss_mode",
    "custom_reward_function": "reward.custom_reward_function",
    "reward_model.custom_reward_function": "reward.custom_reward_function",
    "actor_rollout_ref.rollout.max_response_length": "actor_rollout_ref.rollout.response_length",
    "actor_rollout_ref.actor.grad_clip": "actor_rollout_ref.actor.optim.clip_grad",
    "critic.grad_clip": "critic.optim.clip_grad",
    "trainer.max_actor_ckpt_to_keep": "trainer.max_ckpt_to_keep",
    "trainer.max_critic_ckpt_to_keep": "trainer.max_ckpt_to_keep",
    "actor_rollout_ref.actor.optim.warmup_style": "actor_rollout_ref.actor.optim.lr_scheduler_type",
    "critic.optim.warmup_style": "critic.optim.lr_scheduler_type",
}

CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)

RENAMED_VALUES = {
    ("data.chat_template", "chatml"): ("actor_rollout_ref.model.custom_chat_template", CHATML),
    ("actor_rollout_ref.rollout.name", "naive"): ("actor_rollout_ref.rollout.name", "hf"),
}

_ONE_WORKER = "one worker holds the whole model, nothing is sharded or offloaded"
_VLLM = "it belongs to the vllm engine, and the rollouts are made by the model itself (rollout.name=hf)"
_BY_DESIGN = "it is always so here"

NO_EFFECT = {
    "actor_rollout_ref.actor.strategy": _ONE_WORKER,
    "actor_rollout_ref.ref.strategy": _ONE_WORKER,
    "critic.strategy": _ONE_WORKER,
    "actor_rollout_ref.actor.fsdp_config.param_offload": _ONE_WORKER,
    "actor_rollout_ref.actor.fsdp_config.optimizer_offload": _ONE_WORKER,
    "actor_rollout_ref.ref.fsdp_config.param_offload": _ONE_WORKER,
    "critic.model.fsdp_config.param_offload": _ONE_WORKER,
    "critic.model.fsdp_config.optimizer_offload": _ONE_WORKER,
    "actor_rollout_ref.actor.ulysses_sequence_parallel_size": _ONE_WORKER,
    "trainer.balance_batch": _ONE_WORKER,
    "actor_rollout_ref.rollout.tensor_model_parallel_size": _VLLM,
    "actor_rollout_ref.rollout.gpu_memory_utilization": _VLLM,
    "actor_rollout_ref.rollout.enforce_eager": _VLLM,
    "actor_rollout_ref.rollout.free_cache_engine": _VLLM,
    "actor_rollout_ref.rollout.enable_chunked_prefill": _VLLM,
    "actor_rollout_ref.rollout.max_num_batched_tokens": _VLLM,
    "actor_rollout_ref.rollout.max_model_len": _VLLM,
    "actor_rollout_ref.rollout.load_format": _VLLM,
    "actor_rollout_ref.rollout.mode": _VLLM,
    "actor_rollout_ref.hybrid_engine": _BY_DESIGN,
    "actor_rollout_ref.model.use_remove_padding": "micro-batches are trimmed to their longest row",
    "critic.model.use_remove_padding": "micro-batches are trimmed to their longest row",
    "actor_rollout_ref.rollout.calculate_log_probs": _BY_DESIGN,
    "data.validation_shuffle": "validation sees every row, so their order does not matter",
    "data.return_raw_chat": _BY_DESIGN,
    "data.dataloader_num_workers": "rows are read in the driver, whose position in the data is part of a checkpoint",
    "data.filter_overlong_prompts_workers": "prompts are measured in this process",
    "trainer.device": "the device is the GPU if there is one, else the CPU",
}
