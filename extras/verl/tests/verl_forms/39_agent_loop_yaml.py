# verl 0.5 to 0.10.dev | docs/advance/agent_loop.rst, recipe/langgraph_agent/example: a class named in a yaml, with settings
# keys: rollout.agent.agent_loop_config_path=39_agent_loop_yaml.yaml rollout.agent.default_agent_loop=retrying
#       (json or yaml: a list of {name, _target_, …}; further keys are keyword arguments of the constructor)
# observed: tries=2 reaches __init__; init_class (0.5 to 0.6) runs once a worker with the settings; extra column "tries"
from typing import Any
from uuid import uuid4

from verl.experimental.agent_loop.agent_loop import AgentLoopBase, AgentLoopOutput


class Retrying(AgentLoopBase):
    def __init__(self, trainer_config, server_manager, tokenizer, processor, tries: int = 1, **kwargs):
        super().__init__(trainer_config, server_manager, tokenizer, processor, **kwargs)
        self.tries = tries

    @classmethod
    def init_class(cls, config, tokenizer, processor=None, **kwargs):
        if not getattr(cls, "_class_initialized", False):
            cls._class_initialized = True

    async def run(self, sampling_params: dict[str, Any], **kwargs) -> AgentLoopOutput:
        prompt = self.tokenizer.apply_chat_template(
            list(kwargs["raw_prompt"]), add_generation_prompt=True, tokenize=True
        )
        for _ in range(self.tries):
            done = await self.server_manager.generate(
                uuid4().hex, prompt_ids=prompt, sampling_params={**sampling_params, "max_tokens": 4}
            )
            if done.stop_reason != "aborted":
                break
        return AgentLoopOutput(
            prompt_ids=prompt,
            response_ids=done.token_ids,
            response_mask=[1] * len(done.token_ids),
            response_logprobs=done.log_probs,
            num_turns=2,
            metrics={},
            extra_fields={"tries": self.tries},
        )
