"""A checkpoint's shards, ours and verl's, become a folder for from_pretrained, or are refused by name."""

import json
import shutil
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import pytest
import torch
from huggingface_hub import HfApi, ModelCard
from torch import Tensor
from transformers import AutoModelForCausalLM

from configs.schema import ModelConfig, OptimConfig
from extras.merge.__main__ import main as merge
from extras.merge.__main__ import merge as merge_folder
from extras.sharding.fsdp2 import full_tensor
from extras.sharding.tests.test_model_checkpoint import CPU, EVERYTHING, make_engine, saved_engine, train
from tests.ranks import Ranks
from tests.runs import compose
from training.checkpoint import config_yaml
from workers.collectives import group_size, rank
from workers.engine import TrainEngine
from workers.models import load_causal_lm


def save_as_verl(model: Path, folder: Path) -> dict[str, Tensor]:
    """Writes what verl's FSDPCheckpointManager writes of a model under FSDP2: each rank its state dicts of DTensors."""
    engine, place, size = make_engine(model), rank(), group_size()
    train(engine, 0)
    folder.mkdir(exist_ok=True)
    extra = {"lr_scheduler": {"last_epoch": 1, "_last_lr": [0.01]}, "rng": {"cpu": torch.get_rng_state()}}
    parts = {"model": engine.module.state_dict(), "optim": engine.optimizer.state_dict(), "extra_state": extra}
    for name, part in parts.items():
        torch.save(part, folder / f"{name}_world_size_{size}_rank_{place}.pt")
    if place == 0:
        (folder / "fsdp_config.json").write_text(json.dumps({"FSDP_version": 2, "world_size": size}))
        engine.module.config.save_pretrained(folder / "huggingface")
    return {name: full_tensor(value).clone() for name, value in engine.module.state_dict().items()}


def test_verls_fsdp_folder_is_merged(tiny_model, tmp_path):
    wanted = Ranks(2).run(save_as_verl, tiny_model, tmp_path / "actor")[0]
    merge(f"merge --backend fsdp --local_dir {tmp_path}/actor --target_dir {tmp_path}/merged".split())
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    assert all(torch.equal(value, wanted[name]) for name, value in loaded.state_dict().items())
    (tmp_path / "actor/model_world_size_2_rank_1.pt").unlink()
    with pytest.raises(ValueError, match=r"model_world_size_2_rank_1.pt cannot be loaded \(FileNotFoundError"):
        merge_folder(tmp_path / "actor", tmp_path / "again")


def test_our_shards_are_merged_to_the_bit(tiny_model, tmp_path):
    state, _ = saved_engine(tiny_model, tmp_path / "saved", (-1, 1), False)
    merge(f"merge --backend fsdp --local_dir {tmp_path}/saved --target_dir {tmp_path}/merged".split())
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    assert all(torch.equal(value, state[name]) for name, value in loaded.state_dict().items())


@pytest.fixture
def run(tiny_model, tmp_path) -> Path:
    """A run's folder with a checkpoint of step 4, whose base model has a card."""
    base = shutil.copytree(tiny_model, tmp_path / "hub/models--some--base-1b/snapshots/a")
    (base / "README.md").write_text("---\nlicense: apache-2.0\n---\nA base.")
    step = tmp_path / "run/global_step_4"
    saved_engine(tiny_model, step / "actor", (-1, 1), False)
    settings = [f"actor_rollout_ref.model.path={base}", "actor_rollout_ref.actor.optim.lr=0.5", "trainer.seed=0"]
    (step / "config.yaml").write_text(config_yaml(compose(*settings, "env.id=FrozenLake-v1")))
    record = [(number, {"val-core/maze/acc/mean@1": number / 10} | {"x": 1.0}) for number in range(0, 8, 2)]
    record.append((5, {"x": 1.0}))
    lines = [json.dumps({"step": number, "data": data}) for number, data in record]
    (tmp_path / "run/metrics.jsonl").write_text("\n".join(lines))
    (tmp_path / "run/run.json").write_text(json.dumps({"starts": [{"versions": {"python": "3.0", "torch": "9"}}]}))
    return step / "actor"


def test_a_model_has_a_card_of_its_run(run, tmp_path):
    merge(f"merge --backend fsdp --local_dir {run} --target_dir {tmp_path}/merged".split())
    card = ModelCard.load(tmp_path / "merged/README.md")
    data = card.data.to_dict()
    assert data["base_model"] == "some/base-1b" and data["license"] == "apache-2.0"
    assert data["library_name"] == "transformers" and data["pipeline_tag"] == "text-generation"
    assert data["tags"] == ["nano-verl", "grpo"]
    rows = ["| 0 | 0 |", "| 2 | 0.2 |", "| 4 | 0.4 |"]
    assert "| step | val-core/maze/acc/mean@1 |\n|---|---|\n" + "\n".join(rows) + "\n\n## Versions" in card.text
    assert "| `actor_rollout_ref.actor.optim.lr` | 0.5 |\n" in card.text and "| `trainer.seed` | 0 |\n" in card.text
    assert "some/base-1b, trained by nano-verl, after 4 steps." in card.text and "python 3.0, torch 9" in card.text
    assert str(tmp_path) not in card.content


def test_a_model_is_pushed_and_what_the_hub_refuses_is_said_in_one_line(run, tmp_path, monkeypatch, capsys):
    asked = []

    class Hub(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"])).decode()
            asked.append((self.path, body))
            status, content = 200, {"url": f"{url}/me/model", "name": "me/model", "id": "me/model"}
            if self.headers["authorization"] != "Bearer good":
                status, content = 401, {"error": "no token"}
            elif "preupload" in self.path:
                files = [{"path": item["path"], "uploadMode": "regular"} for item in json.loads(body)["files"]]
                content = {"files": [{**file, "shouldIgnore": False} for file in files]}
            elif "commit" in self.path:
                content = {"commitUrl": f"{url}/me/model/commit/1", "commitOid": "1", "success": True}
            data = json.dumps(content).encode()
            self.send_response(status)
            self.send_header("content-length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        do_GET = do_POST

        def log_message(self, *_: object) -> None: ...

    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    url = f"http://127.0.0.1:{server.server_port}"
    Thread(target=server.serve_forever, daemon=True).start()
    words = f"merge --backend fsdp --local_dir {run} --push_to_hub me/model".split()
    monkeypatch.setattr("extras.merge.card.HfApi", partial(HfApi, endpoint=url, token="bad"))
    with pytest.raises(SystemExit) as stop:
        merge([*words, "--target_dir", f"{tmp_path}/a"])
    assert stop.value.code == 2 and "--push_to_hub me/model: " in (error := capsys.readouterr().err)
    assert f"{tmp_path}/a is whole. Needed: `hf auth login`" in error
    monkeypatch.setattr("extras.merge.card.HfApi", partial(HfApi, endpoint=url, token="good"))
    for private, more in ((True, []), (False, ["--no-private"])):
        asked.clear()
        merge([*words, "--target_dir", f"{tmp_path}/{private}", *more])
        assert "uploaded to " in capsys.readouterr().out
        made = next(json.loads(body) for path, body in asked if path.endswith("/repos/create"))
        assert (made.get("private", False) or made.get("visibility") == "private") is private, (
            "as the version spells it"
        )
    server.shutdown()
    server.server_close()
    lines = next(body for path, body in asked if "/commit/" in path).splitlines()
    files = {line["value"]["path"] for line in map(json.loads, lines) if line["key"] == "file"}
    assert files >= {"README.md", "config.json", "model.safetensors"}


def test_matrices_of_lora_are_not_merged_without_the_weights(tiny_model, tmp_path, capsys):
    module = load_causal_lm(ModelConfig(path=str(tiny_model), lora_rank=2))
    TrainEngine(module, OptimConfig(lr=0.01), 10, CPU, torch.float32).save(tmp_path, EVERYTHING)
    with pytest.raises(SystemExit):
        merge(f"merge --backend fsdp --local_dir {tmp_path} --target_dir {tmp_path}/merged".split())
    assert "holds LoRA's matrices alone" in capsys.readouterr().err


def test_links_out_of_a_checkpoint_are_not_followed(tiny_model, tmp_path, capsys):
    """A link's target would become a file of the model, and --push_to_hub would publish it."""
    saved_engine(tiny_model, saved := tmp_path / "saved", (-1, 1), False)
    huggingface = saved / "huggingface"
    (secrets := tmp_path / "secrets").mkdir()
    (secrets / "key.txt").write_text("secret")
    words = f"merge --backend fsdp --local_dir {saved} --push_to_hub me/model --target_dir".split()
    (saved / "more").mkdir()
    (saved / "more/deep.txt").symlink_to(secrets / "key.txt")
    for name, target in (
        ("notes.txt", secrets / "key.txt"), ("folder", secrets), ("chain.txt", saved / "more/deep.txt"),
        ("inside", saved / "more"), ("relative.txt", Path("../../secrets/key.txt")), ("dangling", saved / "nothing"),
    ):  # fmt: skip
        (link := huggingface / name).symlink_to(target)
        with pytest.raises(SystemExit) as stop:
            merge([*words, str(tmp_path / "merged")])
        assert stop.value.code == 2 and f"error: {link} is a link to {link.resolve()}: " in capsys.readouterr().err
        assert not (tmp_path / "merged").exists()
        link.unlink()
    (saved / "blob").write_text("{}")
    (huggingface / "kept.json").symlink_to(Path("../blob"))  # as the hub's cache has them
    merge_folder(saved, tmp_path / "merged")
    assert (tmp_path / "merged/kept.json").read_text() == "{}" and not (tmp_path / "merged/kept.json").is_symlink()


def test_merging_refuses_what_it_cannot_merge(tiny_model, tmp_path, capsys):
    saved_engine(tiny_model, saved := tmp_path / "saved", (-1, 1), False)

    def refusal(local_dir: Path, target_dir: Path, backend: str = "fsdp") -> str:
        with pytest.raises(SystemExit) as stop:
            merge(["merge", "--backend", backend, "--local_dir", str(local_dir), "--target_dir", str(target_dir)])
        assert stop.value.code == 2
        return capsys.readouterr().err

    target = tmp_path / "target"
    assert "--backend megatron" in refusal(saved, target, "megatron")
    assert f"--local_dir {tmp_path} lacks huggingface/config.json" in refusal(tmp_path, target)
    assert "holds weights already" in refusal(saved, tiny_model)
    (saved / "huggingface/config.json").unlink()
    assert "lacks huggingface/config.json" in refusal(saved, target)
    assert not target.exists()
