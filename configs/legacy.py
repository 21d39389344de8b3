"""Spellings that guides and older verl versions use, and verl keys that have nothing to act on here.

`RENAMED`: old key or section → today's; `OF_ALL_WORKERS`: the same, for a number that the workers share among them.
`RENAMED_VALUES`: one value of a key that became another key.
`NO_EFFECT`: accepted, so that a command brought from verl runs, with the reason shown. `ONLY_VALUE`: accepted with the
one value that says what is so here; any other asks for something this version does not have.
"""

RENAMED = {
    "algorithm.policy_loss_fn": "actor_rollout_ref.actor.policy_loss.loss_mode",
    "custom_reward_function": "reward.custom_reward_function",
    "reward_model.custom_reward_function": "reward.custom_reward_function",
    "reward_model.reward_kwargs": "reward.reward_kwargs",
    "reward_model.max_concurrent": "reward.max_concurrent",
    "reward_model.timeout": "reward.timeout",
    "reward_model.overlong_buffer": "reward.reward_kwargs.overlong_buffer_cfg",
    "actor_rollout_ref.actor.policy_loss.rollout_correction": "algorithm.rollout_correction",
    "actor_rollout_ref.rollout.max_response_length": "data.max_response_length",
    "data.trust_remote_code": "actor_rollout_ref.model.trust_remote_code",
    "actor_rollout_ref.actor.use_remove_padding": "actor_rollout_ref.model.use_remove_padding",
    "actor_rollout_ref.actor.grad_clip": "actor_rollout_ref.actor.optim.clip_grad",
    "critic.grad_clip": "critic.optim.clip_grad",
    "trainer.max_actor_ckpt_to_keep": "trainer.max_ckpt_to_keep",
    "trainer.max_critic_ckpt_to_keep": "trainer.max_ckpt_to_keep",
    "actor_rollout_ref.actor.optim.warmup_style": "actor_rollout_ref.actor.optim.lr_scheduler_type",
    "critic.optim.warmup_style": "critic.optim.lr_scheduler_type",
}

OF_ALL_WORKERS = {
    f"{section}.{name}": f"{section}.{name}_per_gpu"
    for section, name in (
        ("actor_rollout_ref.actor", "ppo_micro_batch_size"),
        ("actor_rollout_ref.ref", "log_prob_micro_batch_size"),
        ("actor_rollout_ref.rollout", "log_prob_micro_batch_size"),
        ("critic", "ppo_micro_batch_size"),
    )
}

CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)

RENAMED_VALUES = {
    ("data.chat_template", "chatml"): ("actor_rollout_ref.model.custom_chat_template", CHATML),
    ("actor_rollout_ref.rollout.name", "naive"): ("actor_rollout_ref.rollout.name", "hf"),
    **{
        ("actor_rollout_ref.rollout.load_format", old): ("actor_rollout_ref.rollout.load_format", new)
        for old, new in (("dummy_dtensor", "dummy"), ("dummy_hf", "dummy"), ("dummy_megatron", "dummy"), ("hf", "auto"))
    },
}

_WHOLE_MODEL = "every worker holds the whole model: nothing is sharded or offloaded"
_WHOLE_ENGINE = "every worker has an engine of its own, of the whole model"
_BY_DESIGN = "it is always so here"
_LOG_PROBS = "log-probs are cut by tokens, unless log_prob_micro_batch_size_per_gpu is set"
_VALUES = "values are computed in forward passes of the size of the critic's updates"
_FLOAT32 = "weights are always float32; fsdp_config.dtype chooses what is computed in"

NO_EFFECT = {
    "actor_rollout_ref.actor.strategy": _WHOLE_MODEL,
    "actor_rollout_ref.ref.strategy": _WHOLE_MODEL,
    "critic.strategy": _WHOLE_MODEL,
    "actor_rollout_ref.actor.fsdp_config.param_offload": _WHOLE_MODEL,
    "actor_rollout_ref.actor.fsdp_config.optimizer_offload": _WHOLE_MODEL,
    "actor_rollout_ref.ref.fsdp_config.param_offload": _WHOLE_MODEL,
    "critic.model.fsdp_config.param_offload": _WHOLE_MODEL,
    "critic.model.fsdp_config.optimizer_offload": _WHOLE_MODEL,
    "actor_rollout_ref.actor.ulysses_sequence_parallel_size": _WHOLE_MODEL,
    "trainer.balance_batch": "workers always get shares of about equal work",
    "actor_rollout_ref.rollout.tensor_model_parallel_size": _WHOLE_ENGINE,
    "actor_rollout_ref.rollout.data_parallel_size": _WHOLE_ENGINE,
    "actor_rollout_ref.rollout.mode": "engines live in the process of their worker",
    "actor_rollout_ref.hybrid_engine": _BY_DESIGN,
    "critic.model.use_remove_padding": "the critic does as actor_rollout_ref.model.use_remove_padding says",
    "actor_rollout_ref.actor.use_prefix_grouper": "prompts are shared wherever sequences are packed",
    "actor_rollout_ref.actor.use_torch_compile": "nothing is compiled",
    "actor_rollout_ref.actor.data_loader_seed": "the order of mini-batches is derived from trainer.seed",
    "actor_rollout_ref.actor.fsdp_config.model_dtype": _FLOAT32,
    "actor_rollout_ref.ref.log_prob_use_dynamic_bsz": _LOG_PROBS,
    "actor_rollout_ref.rollout.log_prob_use_dynamic_bsz": _LOG_PROBS,
    "actor_rollout_ref.rollout.dtype": "engines compute in the trainer's precision, actor.fsdp_config.dtype",
    "actor_rollout_ref.rollout.disable_log_stats": "engines' own statistics are not logged",
    "actor_rollout_ref.rollout.calculate_log_probs": _BY_DESIGN,
    "critic.ulysses_sequence_parallel_size": _WHOLE_MODEL,
    "critic.model.enable_gradient_checkpointing": "the critic does as actor_rollout_ref.model says",
    "critic.forward_micro_batch_size": _VALUES,
    "critic.forward_micro_batch_size_per_gpu": _VALUES,
    "critic.forward_max_token_len_per_gpu": _VALUES,
    "data.validation_shuffle": "validation sees every row, so their order does not matter",
    "data.return_raw_chat": _BY_DESIGN,
    "data.dataloader_num_workers": "rows are read in the driver, whose position in the data is part of a checkpoint",
    "data.filter_overlong_prompts_workers": "prompts are measured in this process",
    "data.image_key": "prompts are text",
    "data.video_key": "prompts are text",
    "data.return_raw_input_ids": _BY_DESIGN,
    "data.return_full_prompt": _BY_DESIGN,
    "actor_rollout_ref.actor.calculate_sum_pi_squared": "it is computed where the estimator asks for sum_pi_squared",
    "reward.reward_kwargs.overlong_buffer_cfg.log": "reward/overlong_reward is logged wherever there is a penalty",
    "trainer.device": "the device is the GPU if there is one, else the CPU",
}

HYDRA = (
    "Hydra only composes the settings here: trainer.default_local_dir is the folder of the run, --config-path a folder "
    "of yaml files, and each value of a sweep is a run of its own."
)

_FUNCTION = "name a function of yours, for one response or for a whole batch, in reward.custom_reward_function.path"

ONLY_VALUE = {
    "data.gen_batch_size": ((None,), "the prompts of a step are generated for together: set data.train_batch_size."),
    "reward_model.enable": ((False,), f"reward models are not part of this version: {_FUNCTION}."),
    "reward_model.reward_manager": (("naive", "dapo"), f"managers have no names in this version: {_FUNCTION}."),
    "reward_model.launch_reward_fn_async": (
        (False,),
        "an `async def` reward function is awaited for reward.max_concurrent rows at once.",
    ),
    "actor_rollout_ref.model.lora_rank": ((0,), "LoRA is not part of this version: all weights are trained."),
    "actor_rollout_ref.rollout.ignore_eos": ((False,), "responses always end at a stop token."),
    "actor_rollout_ref.rollout.multi_turn.enable": (
        (False,),
        "multi-turn training is not part of this version; env.val_episodes validates on whole episodes.",
    ),
    "trainer.default_hdfs_dir": ((None,), "checkpoints go to trainer.default_local_dir."),
}
