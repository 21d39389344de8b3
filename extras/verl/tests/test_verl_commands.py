"""The overrides of verl's example scripts, algorithm by algorithm, each key of which acts here or says why not."""

import re
from dataclasses import asdict

import pytest
from omegaconf import OmegaConf

from configs.checks import check_config
from configs.errors import ConfigError
from configs.import_utils import setting_at
from configs.loader import CONFIG_DIR, Arguments, load_config, parse_arguments, yaml_folder
from configs.schema import Config
from extras.evaluation.settings import EvaluationConfig, GenerationConfig
from extras.sft.settings import SFTConfig
from extras.verl.keys import COMMON as TABLE
from extras.verl.keys import judge
from tests.runs import compose

A, R, F, M = (f"actor_rollout_ref.{part}" for part in ("actor", "rollout", "ref", "model"))

COMMON = f"""
data.train_files=datasets:x data.val_files=datasets:x data.train_batch_size=1024 data.max_prompt_length=512
data.max_response_length=1024 data.filter_overlong_prompts=True data.truncation=error
actor_rollout_ref.model.path=Qwen/Qwen2.5-7B-Instruct actor_rollout_ref.model.use_remove_padding=True
actor_rollout_ref.model.enable_gradient_checkpointing=True {A}.optim.lr=1e-6 {A}.ppo_mini_batch_size=256
{A}.fsdp_config.param_offload=False {A}.fsdp_config.optimizer_offload=False
{R}.name=vllm {R}.tensor_model_parallel_size=2 {R}.gpu_memory_utilization=0.6 {R}.n=5
trainer.critic_warmup=0 trainer.logger=["console","wandb"] trainer.project_name=verl_examples
trainer.experiment_name=example trainer.n_gpus_per_node=8 trainer.nnodes=1 trainer.save_freq=20 trainer.test_freq=5
trainer.total_epochs=15
"""
BY_TOKENS = f"""
{A}.use_dynamic_bsz=True {A}.ppo_max_token_len_per_gpu=24576 {R}.log_prob_use_dynamic_bsz=True
{R}.log_prob_max_token_len_per_gpu=24576 {F}.log_prob_use_dynamic_bsz=True {F}.log_prob_max_token_len_per_gpu=24576
"""
KL_IN_LOSS = f"{A}.use_kl_loss=True {A}.kl_loss_coef=0.001 {A}.kl_loss_type=low_var_kl algorithm.use_kl_in_reward=False"
KL_IN_REWARD = f"{A}.use_kl_loss=False algorithm.use_kl_in_reward=True algorithm.kl_penalty=kl"

COMMANDS = {
    "grpo, balanced": f"""
        algorithm.adv_estimator=grpo {BY_TOKENS} {KL_IN_LOSS} {A}.strategy=fsdp2 {F}.strategy=fsdp2
        {A}.ulysses_sequence_parallel_size=2 {F}.ulysses_sequence_parallel_size=2 trainer.balance_batch=True
        {A}.fsdp_config.forward_prefetch=True {A}.fsdp_config.fsdp_size=-1 {A}.fsdp_config.reshard_after_forward=True
        {A}.entropy_from_logits_with_chunking=True {A}.entropy_checkpointing=True {A}.use_torch_compile=False
        actor_rollout_ref.model.use_fused_kernels=True actor_rollout_ref.model.use_liger=True
        actor_rollout_ref.model.enable_activation_offload=True actor_rollout_ref.model.use_shm=True
        {R}.layered_summon=True {R}.load_format=safetensors {R}.enable_prefix_caching=True
        """,
    "ppo, by tokens": f"""
        algorithm.adv_estimator=gae algorithm.gamma=1.0 algorithm.lam=0.95 {BY_TOKENS} {KL_IN_REWARD}
        critic.ppo_max_token_len_per_gpu=98304 critic.forward_max_token_len_per_gpu=98304 critic.use_dynamic_bsz=True
        critic.ulysses_sequence_parallel_size=2 critic.cliprange_value=0.5 critic.fsdp.param_offload=True
        critic.checkpoint.save_contents=[model,optimizer] reward_model.launch_reward_fn_async=False
        critic.model.fsdp_config.param_offload=False +{A}.fsdp_config.mixed_precision.reduce_dtype=fp32
        {A}.sum_pi_squared_checkpointing=False algorithm.sppo_eta=0.5 +reward_model.reward_kwargs.max_resp_len=1024
        """,
    "dapo": f"""
        algorithm.adv_estimator=grpo {BY_TOKENS} data.prompt_key=prompt data.truncation=left data.gen_batch_size=3072
        algorithm.use_kl_in_reward=False algorithm.kl_ctrl.kl_coef=0.0 {A}.use_kl_loss=False {A}.kl_loss_coef=0.0
        {A}.clip_ratio_low=0.2 {A}.clip_ratio_high=0.28 {A}.clip_ratio_c=10.0 {A}.loss_agg_mode=token-mean
        algorithm.filter_groups.enable=True algorithm.filter_groups.metric=acc
        algorithm.filter_groups.max_num_gen_batches=10 actor_rollout_ref.model.trust_remote_code=False
        +actor_rollout_ref.model.override_config.attention_dropout=0.
        +actor_rollout_ref.model.override_config.embd_pdrop=0. +actor_rollout_ref.model.override_config.resid_pdrop=0.
        {A}.optim.lr_warmup_steps=10 {A}.optim.weight_decay=0.1 {A}.entropy_coeff=0 {A}.grad_clip=1.0
        {R}.gpu_memory_utilization=0.80 {R}.enable_chunked_prefill=True {R}.max_num_batched_tokens=22528
        {R}.temperature=1.0 {R}.top_p=1.0 {R}.top_k=-1 {R}.val_kwargs.top_k=-1 {F}.fsdp_config.param_offload=True
        reward_model.reward_manager=dapo reward_model.overlong_buffer.enable=True reward_model.overlong_buffer.len=512
        reward_model.overlong_buffer.penalty_factor=1.0 trainer.resume_mode=auto
        """,
}


@pytest.mark.parametrize("name", COMMANDS)
def test_every_key_of_a_command_acts_or_says_why_not_and_they_agree(name, capsys, tmp_path):
    command = [*COMMON.split(), *COMMANDS[name].split(), f"{R}.name=hf", f"trainer.default_local_dir={tmp_path}"]
    config = compose(*command, name="ppo_trainer")
    said = capsys.readouterr().err
    settings, workers = asdict(config), config.trainer.nnodes * config.trainer.n_gpus_per_node
    given = [override.lstrip("+").partition("=")[::2] for override in command]
    verdicts = {key: judge(key, OmegaConf.from_dotlist([f"v={text}"]).v, Config) for key, text in given}
    idle = {key: verdict.why for key, verdict in verdicts.items() if verdict.kind == "no effect"}
    assert all(f"{key}=" in said for key in idle)
    for key, verdict in verdicts.items():
        if str(verdict.value).startswith("${per_worker:"):
            assert setting_at(settings, verdict.key) == int(dict(given)[key]) // workers
        elif key not in idle:
            assert setting_at(settings, verdict.key) == verdict.value, key
    renamed = [verdict for verdict in verdicts.values() if verdict.kind == "renamed"]
    assert len(said.splitlines()) == len(set(idle.values())) + len(renamed)
    check_config(config)


WHOLE = {  # keys that are none of 0.9.1's defaults, which test_defaults.py has, nor of test_verl_spellings.py
    "0.2, plain": ("main", f"""
        {A}.fsdp_config.grad_offload=False {A}.ppo_micro_batch_size=128 {M}.use_rmpad=True critic.model.use_rmpad=True
        {F}.log_prob_micro_batch_size=128 {R}.log_prob_micro_batch_size=128 {A}.optim.min_lr_ratio=null
        trainer.val_generations_to_log_to_wandb=2 trainer.remove_previous_ckpt_in_save=False
        trainer.resume_from_path=False
        """),
    "0.3, plain": ("main", f"""
        {A}.checkpoint.contents=[model,optimizer,extra] {R}.use_fire_sampling=False custom_reward_function.path=null
        custom_reward_function.name=null reward_model.sandbox_fusion_url=http://x/run_code
        +custom_reward_function.overlong_buffer.enable=True +custom_reward_function.overlong_buffer.len=8
        trainer.default_hdfs_dir=hdfs://x algorithm.filter_groups.metric=seq_reward
        reward_model.inference.gpu_memory_utilization=0.8 +ray_kwargs.ray_init.num_gpus=4
        """),
    "0.4, multi-turn, profiled": ("main", f"""
        {R}.multi_turn.enable=True {R}.multi_turn.tool_config_path=configs/tools/calculator.yaml
        {R}.multi_turn.completion_callback=null {R}.update_weights_bucket_megabytes=512
        {M}.enable_activation_offloading=True {A}.profile_ranks=[0,1] {A}.profile_discrete=True
        {R}.profile_ranks_all=False trainer.profile_steps=[1,2] {A}.profiler.tool_config.torch.step_start=0
        """),
    "0.4, Megatron": ("main", f"""
        {A}.megatron.virtual_pipeline_model_parallel_size=2 {A}.load_weight=True {A}.optim.lr_warmup_steps=null
        {F}.megatron.tensor_model_parallel_size=2 critic.megatron.pipeline_model_parallel_size=2
        critic.megatron.seed=1 {A}.megatron.use_dist_checkpointing=False {A}.megatron.dist_checkpointing_path=/d
        critic.nccl_timeout=600 critic.kl_ctrl.kl_coef=0.01 {A}.optim.lr_decay_steps=10000000
        critic.optim.lr_warmup_steps=null
        """),
    "0.9, Megatron, LoRA, other engines": ("main", f"""
        model_engine=megatron {M}.lora.rank=4 {M}.lora.merge=False {M}.lora.type=lora {A}.megatron.use_mbridge=True
        {A}.megatron.pipeline_model_parallel_size=2 {A}.megatron.expert_model_parallel_size=4
        {A}.megatron.param_offload=True {F}.megatron.param_offload=True {A}.optim.lr_decay_style=linear
        +{A}.megatron.override_transformer_config.recompute_granularity=full
        +{A}.optim.override_optimizer_config.optimizer_cpu_offload=True
        {A}.veomni.param_offload=True {A}.veomni.fsdp_size=4 {A}.torchtitan.attn_type=x
        async_training.staleness_threshold=0.1 rollout.n_gpus_per_node=2
        """),
    "0.9, distilled": ("main", """
        distillation.enabled=True +distillation.teacher_models.math.key=openai/gsm8k
        +distillation.teacher_models.math.model_path=/t +distillation.teacher_models.math.num_replicas=1
        distillation.distillation_loss.loss_mode=forward_kl_topk
        +distillation.teacher_models.code.key=apps +distillation.teacher_models.code.model_path=/u
        """),
    "0.5, SFT of conversations": ("sft", """
        data.multiturn.enable=true data.multiturn.messages_key=messages optim.lr_scheduler=cosine
        data.chat_template=null model.strategy=fsdp2 trainer.checkpoint.save_contents=[model,optimizer,extra]
        model.fsdp_config.model_dtype=bf16 model.fsdp_config.offload_params=False optim.warmup_steps_ratio=0.1
        """),
    "0.9, SFT by Megatron": ("sft", """
        engine=megatron optim=megatron optim.lr_decay_style=cosine optim.min_lr=1e-6 engine.use_mbridge=True
        engine.tensor_model_parallel_size=2 engine.override_transformer_config.recompute_granularity=full
        data.ignore_input_ids_mismatch=True trainer.test_freq=after_each_epoch optim.exp_avg_dtype=bf16
        """),
    "0.5, generation": ("generation", """
        trainer.nnodes=1 trainer.n_gpus_per_node=8 rollout.response_length=8 rollout.tensor_model_parallel_size=2
        rollout.n=1 rollout.calculate_log_probs=False rollout.log_prob_micro_batch_size=8 actor.strategy=fsdp
        """),
}  # fmt: skip
SCHEMAS = {"main": Config, "sft": SFTConfig, "generation": GenerationConfig, "evaluation": EvaluationConfig}
YAMLS = {"main": "ppo_trainer"}


def compose_whole(entry: str, *overrides: str):
    schema = SCHEMAS[entry]
    return load_config(Arguments(YAMLS.get(entry, entry), yaml_folder(schema), list(overrides), False), schema)


@pytest.mark.parametrize("name", WHOLE)
def test_whole_commands_of_all_kinds_and_versions_compose(name, capsys):
    entry, overrides = WHOLE[name]
    compose_whole(entry, *overrides.split())
    said = capsys.readouterr().err.splitlines()
    assert len(said) == len(set(said)) and all(line.startswith("notice: ") for line in said)


@pytest.mark.parametrize(
    ("entry", "override", "named"),
    [
        ("main", "data.chat_template=alpaca", f"{M}.custom_chat_template"),
        ("sft", "data.chat_template=qwen", "model.custom_chat_template"),
        ("main", f"{R}.interactions=[conversation]", f"{R}.multi_turn.interaction_config_path"),
        ("main", "reward_model.reward_format=x", "reward.custom_reward_function.path"),
        ("main", "algorithm.rollout_correction.enable=True", "algorithm.rollout_correction.rollout_is=token"),
        ("main", f"{A}.optim.beta1=0.8", "optim.betas"),
        ("evaluation", "reward_model.enable=True", "reward.custom_reward_function.path"),
        ("main", "algorithm.in_reward_kl.coef=0.001", "set algorithm.use_kl_in_reward"),
        ("main", f"{A}.kl_loss.coef=0.001", "kl_loss_type and kl_loss_coef"),
        ("main", "distillation.enabled=True", "no teacher: set distillation"),
    ],
)
def test_a_key_that_guides_show_is_refused_by_what_to_set(entry, override, named):
    with pytest.raises(ConfigError, match=re.escape(named)) as refused:
        compose_whole(entry, override)
    assert "Did you mean" not in str(refused.value)


def test_a_reason_names_the_keys_of_the_command_that_it_is_given_in():
    assert judge("model.use_liger", True, SFTConfig).why.startswith("model.kernels ")


@pytest.mark.parametrize("key", TABLE.renamed)
def test_no_spelling_is_judged_in_two_ways(key):
    assert judge(key, 1, Config).kind in ("renamed", "no effect", "unknown")  # unknown: a whole section


def test_a_yaml_of_verls_is_resolved_as_it_stands_before_its_keys_move_and_told_of_in_one_line(tmp_path, capsys):
    """Keys that take their value over from keys which are dropped, or which they are renamed to, and what is left open
    (???); an override reaches what interpolates its key."""
    (tmp_path / "ppo_trainer.yaml").write_text("""
defaults: [{critic@critic: dp_critic}, {length@trainer: short}, _self_]
actor_rollout_ref:
  actor:
    _target_: some.Class
    use_remove_padding: ${oc.select:actor_rollout_ref.model.use_remove_padding,false}
    optim: {optimizer: AdamW, clip_grad: 1.0, lr_warmup_steps: null, zero_indexed_step: true}
    grad_clip: 0.5
    fsdp_config: {strategy: fsdp, seed: 42, qat: {enable: false, mode: w4}, ulysses_sequence_parallel_size: 1}
    profiler: {enable: false, all_ranks: false, tool_config: {nsys: {discrete: false}}}
  model: {use_remove_padding: true, lora: {rank: 0, merge: false}}
  rollout: {chat_scheduler: null, multi_turn: {max_turns: null},
    name: "???", nnodes: 0, mtp: "${oc.select:actor_rollout_ref.model.mtp,null}", trace: {token2text: false}}
critic: {forward_max_token_len_per_gpu: "${.ppo_max_token_len_per_gpu}", ppo_max_token_len_per_gpu: 99}
reward_model: {enable: true, nccl_timeout: 600,
  forward_max_token_len_per_gpu: "${critic.forward_max_token_len_per_gpu}"}
reward: {reward_model: {rollout: {name: "???"}}}
algorithm: {rollout_is_level: token, rollout_is_mode: truncate, rollout_is_veto_threshold: 1e-4}
trainer: {balance_batch: true, esi_redundant_time: 0, use_legacy_worker_impl: auto, device: cuda}
data: {image_key: images, filter_overlong_prompts_workers: 1, return_raw_chat: false}
ray_kwargs: {ray_init: {num_cpus: null}}
""")
    (tmp_path / "critic").mkdir()
    (tmp_path / "critic/dp_critic.yaml").write_text("cliprange_value: 0.1\n")
    (tmp_path / "length").mkdir()
    for name, epochs in (("short", 3), ("long", 4)):
        (tmp_path / f"length/{name}.yaml").write_text(f"total_epochs: {epochs}")
    (tmp_path / "critic/megatron_critic.yaml").write_text("{load_weight: true, cliprange_value: 0.2}\n")
    arguments = ["--config-path", str(tmp_path), "--config-name", "ppo_trainer"]
    more = ["critic.ppo_max_token_len_per_gpu=77", f"{M}.use_remove_padding=False", "critic@critic=megatron_critic"]
    more += ["length@trainer=long"]
    config = load_config(parse_arguments([*arguments, *more], "ppo_trainer", None), Config)
    assert config.reward.reward_model.forward_max_token_len_per_gpu == config.critic.ppo_max_token_len_per_gpu == 77
    assert config.actor_rollout_ref.model.use_remove_padding is False and config.actor_rollout_ref.rollout.name == "hf"
    assert (config.critic.cliprange_value, config.trainer.total_epochs) == (0.2, 4)
    assert config.actor_rollout_ref.actor.optim.clip_grad == 1.0  # today's spelling, beside the old one
    [said] = capsys.readouterr().err.splitlines()
    assert "have no effect here" in said and f"python -m extras.verl {tmp_path}/ppo_trainer.yaml" in said


ELSEWHERE = ["--config-path=config --config-name=ppo_megatron_trainer.yaml", "--config-name=fully_async_ppo_trainer"]


@pytest.mark.parametrize("arguments", [*ELSEWHERE, "--config-path=./config"])
def test_a_yaml_of_verls_that_is_not_here_is_read_as_ours(arguments, capsys):
    parsed = parse_arguments(arguments.split(), "ppo_trainer", None)
    assert (parsed.config_name, parsed.config_dir) == ("ppo_trainer", CONFIG_DIR)
    assert "one of verl's" in capsys.readouterr().err


@pytest.mark.parametrize("override", ["actor@actor_rollout_ref.actor=megatron_actor", "+critic@critic=dp_critic"])
def test_a_choice_among_verls_files_has_no_effect_and_says_so(override, capsys):
    assert compose_whole("main", override) == compose_whole("main")
    [said] = capsys.readouterr().err.splitlines()
    assert said.startswith(f"notice: {override} has no effect: there is one backend")


def test_what_is_left_to_be_given_is_asked_for_and_a_tilde_of_what_is_not_set_is_told():
    with pytest.raises(ConfigError, match=r"data\.train_files is \?\?\?, which stands for a value"):
        compose_whole("main", "data.train_files=???")
    assert compose_whole("main", f"~{A}.optim.lr", "~critic") == compose_whole("main")


ABSENT = f"""
{R}.quantization=fp8 {R}.repetition_penalty=1.05 {R}.stop=END {R}.chat_scheduler=mine.Scheduler critic.model.lora_rank=8
{A}.optim.optimizer=SGD {A}.optim.eps=1e-06 {A}.tis_imp_ratio_cap=2 {A}.kd_loss_type=kl
algorithm.rollout_is_threshold=2.0 +actor_rollout_ref.model.speculator.n_predict=3
"""


@pytest.mark.parametrize("override", ABSENT.split())
def test_what_a_key_asks_for_and_is_not_here_is_refused_with_what_is(override):
    with pytest.raises(ConfigError, match=f"^{override.lstrip('+')}: "):
        compose(override, name="ppo_trainer")
