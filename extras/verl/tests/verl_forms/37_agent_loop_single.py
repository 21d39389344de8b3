# verl 0.5 to 0.8.dev | docs/advance/agent_loop.rst; verl/experimental/agent_loop/single_turn_agent_loop.py
# keys: rollout.mode=async rollout.agent.default_agent_loop=one_answer (or agent_name in the rows), FILE imported by
#       actor_rollout_ref.model.external_lib (verl's workers import it through custom_cls or the agent yaml, see 39)
# observed: one instance a sample; kwargs hold every column of the row (raw_prompt, extra_info, index, tools_kwargs …);
#   response_ids, mask and log-probs are the engine's, cut to response_length; num_turns 2; extra column "seen"
from typing import Any
from uuid import uuid4

from verl.experimental.agent_loop.agent_loop import AgentLoopBase, AgentLoopMetrics, AgentLoopOutput, register
from verl.utils.profiler import simple_timer
from verl.utils.rollout_trace import rollout_trace_op


@register("one_answer")
class OneAnswer(AgentLoopBase):
    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.prompt_length = self.config.actor_rollout_ref.rollout.prompt_length
        self.response_length = self.config.actor_rollout_ref.rollout.response_length

    @rollout_trace_op
    async def run(self, sampling_params: dict[str, Any], **kwargs) -> AgentLoopOutput:
        messages = list(kwargs["raw_prompt"])
        prompt_ids = await self.loop.run_in_executor(
            None,
            lambda: self.tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=True),
        )
        metrics = {}
        with simple_timer("generate_sequences", metrics):
            output = await self.server_manager.generate(
                request_id=uuid4().hex, prompt_ids=prompt_ids, sampling_params=sampling_params
            )
        ids = output.token_ids[: self.response_length]
        return AgentLoopOutput(
            prompt_ids=prompt_ids,
            response_ids=ids,
            response_mask=[1] * len(ids),
            response_logprobs=output.log_probs[: len(ids)] if output.log_probs else None,
            num_turns=2,
            metrics=AgentLoopMetrics(**metrics),
            extra_fields={"seen": sorted(kwargs)[:3]},
        )
