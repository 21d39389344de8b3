"""On-policy distillation: losses against slow twins, one trajectory by two ways, several teachers, a server as one."""

import json
import shlex
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

import main
from configs.errors import ConfigError
from configs.schema import ModelConfig
from custom.tiny_model import save_tiny_model
from extras.distillation.divergence import compute_opd_advantage, forward_kl
from extras.distillation.prompt_scores import ServerTeacher
from extras.distillation.settings import LossConfig, Teacher
from extras.distillation.teachers import HeldTeacher, Teachers
from tests.batches import ragged_batch
from tests.runs import ROOT, compose, learning_metrics, needs_vllm, short_run
from tests.servers import answering
from training.losses import ReadableNamespace, get_policy_loss_fn, register_policy_loss
from training.roles import loss_reads
from workers.dp_actor import ReferencePolicy
from workers.micro_batches import MicroBatchSize
from workers.model_worker import ModelWorker, model_bytes
from workers.models import load_causal_lm
from workers.parallel import Replicas

REF = "actor_rollout_ref.ref.model.path"
MODELS, TEMPERATURE = "distillation.teacher_models", "actor_rollout_ref.rollout.temperature"
ENABLED = "distillation.enabled=true"
SIZE = MicroBatchSize(None, 64)
RATE = ["actor_rollout_ref.actor.optim={lr: 1e-3, lr_warmup_steps: 0, lr_scheduler_type: constant}"]
WEIGHTS = "actor_rollout_ref.actor.checkpoint.save_contents=[hf_model]"


@pytest.fixture(scope="module")
def teachers(tmp_path_factory) -> list[Path]:
    folder = tmp_path_factory.mktemp("teachers")
    for seed in (5, 6):
        save_tiny_model(folder / str(seed), seed=seed, hidden_size=48, layers=2)
    return [folder / "5", folder / "6"]


def weights(folder: Path, steps: int) -> dict[str, Tensor]:
    return load_file(folder / f"global_step_{steps}/actor/huggingface/model.safetensors")


# Losses


def test_forward_kl_is_that_of_a_slow_twin_in_value_and_gradient():
    generator = torch.Generator().manual_seed(0)
    teacher, student = (torch.randn(3, 4, 11, generator=generator, dtype=torch.float64) for _ in range(2))
    log_p, ids = teacher.log_softmax(-1).topk(5)
    student.requires_grad_()
    losses, shares = forward_kl(student, log_p, ids)
    [gradient] = torch.autograd.grad(losses.sum(), student)
    slow = 0.0
    for row in range(3):
        for place in range(4):
            q, p = student[row, place].softmax(0), teacher[row, place].softmax(0)
            kept = sorted(range(11), key=lambda token: -p[token].item())[:5]
            divergence = sum(p[token] * (p[token].log() - q[token].log()) for token in kept)
            assert losses[row, place].item() == pytest.approx(max(0.0, divergence.item()), abs=1e-6)
            slow = slow + (divergence if divergence > 0 else 0 * divergence)
    [expected] = torch.autograd.grad(slow, student)
    assert (gradient - expected).abs().max() < 1e-6
    assert ((shares["teacher_mass"] > 0.4) & (shares["teacher_mass"] < 1)).all()
    clamped, _ = forward_kl(student, log_p, ids, least=-1.0)
    assert clamped.isfinite().all() and not torch.equal(clamped, losses)


def of_loss(name: str, **settings) -> tuple[Tensor, dict, dict[str, Tensor]]:
    """The loss of six tokens, in two rows, the last of which is masked."""
    generator = torch.Generator().manual_seed(1)
    columns = {name: -torch.rand(2, 3, generator=generator) for name in ("old", "new", "teacher")}
    columns["advantages"], mask = torch.randn(2, 3, generator=generator), torch.tensor([[1, 1, 1], [1, 1, 0]])
    config = ReadableNamespace(
        **{"clip_ratio": 0.2, "clip_ratio_low": None, "clip_ratio_high": None, "clip_ratio_c": 3.0},
        policy_loss=SimpleNamespace(distillation=LossConfig(**settings), task_loss="vanilla"),
        global_batch_info={"batch_num_tokens": 5, "global_batch_size": 2, "dp_size": 1, "loss_scale_factor": 3},
    )
    columns["new"].requires_grad_()
    rows = columns["old"], columns["new"], columns["advantages"], mask
    loss, metrics = get_policy_loss_fn(name)(*rows, "token-mean", config=config, teacher_log_prob=columns["teacher"])
    return loss, metrics, {**columns, "mask": mask}


def test_the_loss_stands_beside_the_tasks_or_alone_and_is_clamped():
    alone, metrics, columns = of_loss("distillation", loss_mode="k2", use_task_rewards=False)
    halves = 0.5 * (columns["new"] - columns["teacher"]) ** 2
    assert alone.item() == pytest.approx((halves * columns["mask"]).sum().item() / 5)
    assert metrics["distillation/loss"].item() == pytest.approx(alone.item(), abs=1e-6)
    both, *_ = of_loss("distillation", loss_mode="k2", distillation_loss_coef=0.5)
    without, *_ = of_loss("distillation", loss_mode="k2", distillation_loss_coef=0.0)
    assert (both - without).item() == pytest.approx(alone.item() / 2, abs=1e-6)
    clamped, *_ = of_loss("distillation", loss_mode="k2", use_task_rewards=False, loss_max_clamp=0.01)
    assert clamped.item() == pytest.approx((halves.clamp(max=0.01) * columns["mask"]).sum().item() / 5)


def test_a_task_loss_beside_the_teacher_is_given_the_columns_that_it_names(
    tiny_model, teachers, tmp_path, restored_registries
):
    @register_policy_loss("near_the_reference")
    def loss(old_log_prob, log_prob, advantages, response_mask, loss_agg_mode, *, ref_log_prob, config):
        return ((log_prob - ref_log_prob) ** 2 * response_mask).mean(), {}

    named = "actor_rollout_ref.actor.policy_loss.loss_mode=near_the_reference"
    settings = [named, ENABLED, f"{MODELS}.x.model_path={teachers[0]}", "env.val_episodes=0"]
    config = compose(*short_run(tiny_model, tmp_path, *settings))
    assert "ref_log_prob" in loss_reads(config)
    main.run(config)
    alone = compose(*settings, "distillation.distillation_loss.use_task_rewards=false")
    assert "ref_log_prob" not in loss_reads(alone)


def test_as_a_policy_gradient_the_loss_is_a_reward():
    loss, metrics, columns = of_loss("distillation", loss_mode="k1", use_task_rewards=False, use_policy_gradient=True)
    [gradient] = torch.autograd.grad(loss, columns["new"])
    ratio = (columns["new"] - columns["old"]).exp()
    inside = (ratio > 0.8) & (ratio < 1.2) & columns["mask"].bool()
    expected = (columns["new"] - columns["teacher"]) * ratio / 5
    assert inside.any() and torch.allclose(gradient[inside], expected[inside], atol=1e-6)
    assert "distillation/pg_clipfrac" in metrics and "actor/pg_loss" not in metrics


def test_the_estimator_is_minus_the_log_ratio_and_a_part_of_grpos():
    mask, rewards = torch.tensor([[1, 1], [1, 0]]), torch.tensor([[0.0, 1.0], [0.0, 0.0]])
    old, ref = torch.tensor([[-1.0, -2.0], [-3.0, 9.0]]), torch.tensor([[-0.5, -4.0], [-3.0, 7.0]])
    advantages, _ = compute_opd_advantage(rewards, mask, ["a", "a"], old, ref)
    assert advantages.tolist() == [[0.5, -2.0], [0.0, 0.0]]
    mixed, _ = compute_opd_advantage(rewards, mask, ["a", "a"], old, ref, teacher_weight=2.0, reward_weight=1.0)
    assert mixed[0, 0] > 1.0 and mixed[1, 0] < 0


# Runs


def test_loss_and_estimator_are_one_trajectory(tiny_model, teachers, tmp_path):
    ways = {
        "loss": ["recipe=opd"],
        "estimator": ["algorithm.adv_estimator=opd", "actor_rollout_ref.actor.use_kl_loss=false"],
        "settings": [
            *("actor_rollout_ref.actor.use_kl_loss=false", ENABLED, f"{MODELS}.one.model_path={teachers[0]}"),
            "distillation.distillation_loss={loss_mode: k2, use_task_rewards: false}",
        ],
    }
    steps = ["trainer.total_training_steps=10", "trainer.save_freq=10", WEIGHTS, "env.val_episodes=0", *RATE]
    for name, way in ways.items():
        teacher = [] if name == "settings" else [f"{REF}={teachers[0]}"]
        main.run(compose(*short_run(tiny_model, tmp_path / name, *steps, *teacher, *way)))
    first, *others = (weights(tmp_path / name, 10) for name in ways)
    for other in others:
        assert max((first[name] - other[name]).abs().max() for name in first) < 1e-6
    start = load_file(tiny_model / "model.safetensors")
    assert max((first[name] - start[name]).abs().max() for name in first) > 1e-3
    scores = [learning_metrics(tmp_path / name)[10]["critic/score/mean"] for name in ways]
    assert len({*scores}) == 1


def of_rows(folder: Path, *sources: str) -> list[str]:
    """Settings of a run on rows of these data sources, in turn, that are all scored 0."""
    rows = [{"prompt": f"{number} + 1 =", "data_source": sources[number % len(sources)]} for number in range(8)]
    (folder / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (folder / "zero.py").write_text("def compute_score(data_source, solution_str, ground_truth=None): return 0.0\n")
    return [
        *(f"data.train_files={folder}/rows.jsonl", f"reward.custom_reward_function.path={folder}/zero.py"),
        *("data.train_batch_size=4", "data.max_prompt_length=16", "data.max_response_length=4", "env.id=null"),
        *("data.custom_cls.path=null", "env.val_episodes=0", "trainer.total_training_steps=2"),
    ]


def two(teachers: list[Path], *keys: str) -> list[str]:
    models = [f"one.model_path={teachers[0]}", f"two.model_path={teachers[1]}"]
    named = [f"{name}.key={key}" for name, key in zip(("one", "two"), keys, strict=True)]
    return [ENABLED, *(f"{MODELS}.{each}" for each in (*models, *named))]


@pytest.mark.parametrize("mode", ["k3", "forward_kl_topk"])
def test_each_row_has_the_teacher_of_its_source(tiny_model, teachers, tmp_path, mode):
    loss = f"distillation.distillation_loss={{loss_mode: {mode}, topk: 4, use_task_rewards: false}}"
    run = short_run(tiny_model, tmp_path / "run", *of_rows(tmp_path, "a", "b"), *two(teachers, "a", "b"), loss)
    main.run(compose(*run))
    metrics = learning_metrics(tmp_path / "run")
    assert metrics[1]["distillation/loss"] > 0 and metrics[1]["actor/grad_norm"] > 0
    if mode == "forward_kl_topk":
        assert 0 < metrics[1]["distillation/student_mass"] < metrics[1]["distillation/teacher_mass"] <= 1


def held(path: Path, topk: int | None = None) -> HeldTeacher:
    module = load_causal_lm(ModelConfig(path=str(path)))
    return HeldTeacher(ReferencePolicy(module, SIZE), 1.0, topk, vocabulary=module.config.vocab_size)


@pytest.mark.parametrize("topk", [None, 3])
def test_rows_come_back_in_their_order_each_by_its_own_teacher(teachers, topk):
    batch = ragged_batch()
    batch.batch["teacher"] = torch.arange(len(batch)) % 2
    both = [held(path, topk) for path in teachers]
    mixed = Teachers(both).compute(batch)
    for place, teacher in enumerate(both):
        alone, own = teacher.score(batch), batch.batch["teacher"] == place
        for name, column in alone.batch.items():
            assert torch.allclose(mixed.batch[name][own].double(), column[own].double(), atol=1e-5)
    nobodys = batch.select_idxs(torch.zeros(len(batch), dtype=torch.bool))
    assert len(both[0].score(nobodys)) == 0


def test_the_likeliest_tokens_are_those_of_a_plain_forward(teachers):
    batch, model = ragged_batch(), AutoModelForCausalLM.from_pretrained(teachers[0])
    scores, width = held(teachers[0], topk=3).score(batch), batch.batch["responses"].shape[1]
    for row in range(len(batch)):
        mask = batch.batch["attention_mask"][row].bool()
        ids = batch.batch["input_ids"][row][mask]
        log_probs = model(input_ids=ids[None]).logits[0].log_softmax(-1)
        for column in batch.batch["response_mask"][row].nonzero()[:, 0].tolist():
            place = int(mask[: len(mask) - width + column].sum()) - 1
            top = log_probs[place].topk(3)
            assert scores.batch["teacher_topk_ids"][row, column].tolist() == top.indices.tolist()
            assert torch.allclose(scores.batch["teacher_topk_log_probs"][row, column], top.values, atol=1e-5)


@pytest.mark.parametrize("lora", [[], ["actor_rollout_ref.model.lora_rank=4", "actor_rollout_ref.model.lora_alpha=8"]])
def test_the_teacher_is_the_teacher_with_lora_too(tiny_model, teachers, tmp_path, lora):
    """The reference scores as its teacher does; with LoRA it would otherwise be the policy without its adapter."""
    run = [f"{REF}={teachers[0]}", "recipe=opd", *two(teachers, "a", "b"), *lora, "env.val_episodes=0"]
    config = compose(*short_run(tiny_model, tmp_path, *run))
    worker = ModelWorker(config, 4, ["actor", "ref", "teachers"])
    batch = ragged_batch()
    expected = held(teachers[0]).score(batch).batch["teacher_log_prob"]
    found = worker.roles["ref"].compute_log_prob(batch, 1.0, ["ref_log_prob"]).batch["ref_log_prob"]
    assert (found - expected).abs().max() < 1e-5
    batch.batch["teacher"] = torch.zeros(len(batch), dtype=torch.long)
    assert (worker.roles["teachers"].compute(batch).batch["teacher_log_prob"] - expected).abs().max() < 1e-5
    own = held(tiny_model).score(batch).batch["teacher_log_prob"]
    assert (own - expected).abs().max() > 1e-2


def test_the_models_of_all_teachers_are_counted(tiny_model, teachers, tmp_path):
    config = compose(*short_run(tiny_model, tmp_path, *two(teachers, "a", "b"), "env.val_episodes=0"))
    numbers = sum(weight.numel() for weight in AutoModelForCausalLM.from_pretrained(teachers[0]).parameters())
    assert model_bytes(config, {"policy": Replicas(), "ref": Replicas()})["teachers"] == 2 * 4 * numbers


# Refusals


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (["distillation.enabled=true"], r"no teacher: set distillation\.teacher_models\.NAME\.model_path"),
        ([f"{MODELS}.x.key=a"], r"teacher_models\.x: a teacher has either model_path or base_url"),
        ([f"{MODELS}={{x: {{model_path: a}}, y: {{model_path: b}}}}"], r"teacher_models\.x\.key is not set"),
        ([f"{MODELS}={{x: {{model_path: a, key: k}}, y: {{model_path: b, key: k}}}}"], r"one key, of k, k"),
        ([f"{MODELS}.x.base_url=http://h", f"{TEMPERATURE}=0.7"], r"a server scores at temperature 1\. Set"),
        ([f"{MODELS}.x.model_path=a", "distillation.distillation_loss.loss_mode=k1"], "does not .* set loss_mode=k2"),
        ([f"{MODELS}.x.modelpath=a"], r"unknown key 'distillation\.teacher_models\.x\.modelpath'"),
        ([f"{MODELS}.x.timeout=long"], r"teacher_models\.x\.timeout='long': Value 'long'"),
    ],
)
def test_settings_that_cannot_teach_are_refused(settings, message):
    with pytest.raises(ConfigError, match=message):
        compose("distillation.enabled=true", *settings)


def other_tokens(folder: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.add_tokens(["<other>"])
    tokenizer.save_pretrained(folder)


def fewer_positions(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "max_position_embeddings": 8}))


@pytest.mark.parametrize(
    ("change", "message"),
    [(other_tokens, r"model_path=.*other tokens than the policy"), (fewer_positions, r"model_path was made for 8 pos")],
)
def test_a_teacher_that_cannot_read_the_policys_answers_is_refused_early(tiny_model, tmp_path, change, message):
    save_tiny_model(tmp_path / "teacher", seed=5, hidden_size=48, layers=2)
    change(tmp_path / "teacher")
    teacher = ["distillation.enabled=true", f"distillation.teacher_models.x.model_path={tmp_path}/teacher"]
    with pytest.raises(ValueError, match=f"distillation.teacher_models.x.{message}"):
        main.build(compose(*short_run(tiny_model, tmp_path / "run", *teacher, "env.val_episodes=0")))


def test_a_row_without_a_teacher_is_refused_by_its_source(tiny_model, teachers, tmp_path):
    run = short_run(tiny_model, tmp_path / "run", *of_rows(tmp_path, "a", "c"), *two(teachers, "a", "b"))
    with pytest.raises(ValueError, match=r"data_source=c, and distillation\.teacher_models has teachers of a, b"):
        main.run(compose(*run))


def test_the_commands_of_the_page_compose():
    page = (ROOT / "docs/distillation.md").read_text().replace("\\\n", " ")
    commands = [shlex.split(line)[2:] for line in page.splitlines() if line.startswith("python main.py")]
    assert len(commands) >= 3
    for _, name, *overrides in commands:
        compose(*overrides, name=name)


# A server


def check_served(url: str, teacher: Path, tiny_model: Path, folder: Path) -> None:
    """Holds what the server at `url` says, of the sampled tokens and of the likeliest, against the model itself."""
    served = ["distillation.enabled=true", f"distillation.teacher_models.x.base_url={url}"]
    main.build(compose(*short_run(tiny_model, folder, *served)))
    for topk in (None, 3):
        batch = ragged_batch()
        found = ServerTeacher(Teacher(base_url=url), topk).score(batch)
        expected = held(teacher, topk).score(batch)
        for name, column in expected.batch.items():
            assert torch.allclose(found.batch[name].double(), column.double(), atol=1e-4)


def test_our_server_can_teach_and_a_run_learns_from_it(tiny_model, teachers, tmp_path):
    fixtures = pytest.importorskip("extras.server.tests.fixtures")
    load_served = pytest.importorskip("extras.server.__main__").load_served
    config, taught = fixtures.compose(teachers[0]), {}
    with fixtures.serving(load_served(config), config) as url:
        check_served(url, teachers[0], tiny_model, tmp_path)
        for name, where in {"server": f"base_url={url}", "held": f"model_path={teachers[0]}"}.items():
            run = [ENABLED, f"{MODELS}.x.{where}", "trainer.total_training_steps=2", "env.val_episodes=0"]
            main.run(compose(*short_run(tiny_model, tmp_path / name, *run)))
            taught[name] = learning_metrics(tmp_path / name)[2]["distillation/loss"]
    assert taught["server"] == pytest.approx(taught["held"], rel=1e-4)


@needs_vllm
@pytest.mark.slow
def test_vllms_server_can_teach(tiny_model, wide_headed_model, tmp_path):
    fixtures = pytest.importorskip("extras.server.tests.fixtures")
    with fixtures.vllm_server(wide_headed_model, 40, 24) as url:
        check_served(url, wide_headed_model, tiny_model, tmp_path)


@pytest.mark.parametrize(
    ("room", "scored", "message"),
    [
        (20, {"decoded_token": "?"}, "takes sequences of 20 tokens; .*--max-model-len"),
        (4096, {"decoded_token": "?"}, r"to the policy and '\?' to .*the policy's tokenizer"),
        (4096, None, "without prompt_logprobs of each token"),
    ],
)
def test_a_server_that_cannot_teach_is_refused_before_workers_start(tiny_model, tmp_path, room, scored, message):
    def answer(method: str, path: str, body: dict | None) -> tuple[int, dict]:
        if method == "GET":
            return 200, {"data": [{"id": "teacher", "max_model_len": room}]}
        tokens = [None, *({str(token): scored} for token in body["prompt"][1:])]
        return 200, {"choices": [{"prompt_logprobs": scored and tokens}]}

    with answering(answer) as url, pytest.raises(ConfigError, match=message):
        main.build(compose(*short_run(tiny_model, tmp_path, ENABLED, f"{MODELS}.x.base_url={url}")))
