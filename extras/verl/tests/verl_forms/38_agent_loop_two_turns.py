# verl 0.5 to 0.10.dev | docs/advance/agent_loop.rst, docs/start/agentic_rl.rst: a loop with a tool of its own, two turns
# keys: as 37 (default_agent_loop=looker); one request_id for both turns (sticky session)
# observed: prompt | answer (mask 1) | what the tool said (mask 0, log-prob 0.0) | answer (mask 1); reward_score, when the
#   loop gives one, is the row's score and no reward function is called; num_turns 4
from typing import Any
from uuid import uuid4

from verl.experimental.agent_loop.agent_loop import AgentLoopBase, AgentLoopOutput, register


@register("looker")
class Looker(AgentLoopBase):
    async def run(self, sampling_params: dict[str, Any], **kwargs) -> AgentLoopOutput:
        width = self.config.actor_rollout_ref.rollout.response_length
        prompt = await self.apply_chat_template(list(kwargs["raw_prompt"]))
        request_id, ids, mask, log_probs = uuid4().hex, [], [], []

        async def speak():
            done = await self.server_manager.generate(
                request_id=request_id, prompt_ids=prompt + ids, sampling_params=sampling_params
            )
            ids.extend(done.token_ids)
            mask.extend([1] * len(done.token_ids))
            log_probs.extend(done.log_probs or [0.0] * len(done.token_ids))
            return self.tokenizer.decode(done.token_ids, skip_special_tokens=True)

        first = await speak()
        told = await self.apply_chat_template(
            [{"role": "tool", "content": f"you said {len(first)} characters"}], remove_system_prompt=True
        )
        if len(ids) + len(told) < width:
            ids.extend(told)
            mask.extend([0] * len(told))
            log_probs.extend([0.0] * len(told))
            await speak()
        return AgentLoopOutput(
            prompt_ids=prompt,
            response_ids=ids[:width],
            response_mask=mask[:width],
            response_logprobs=log_probs[:width],
            reward_score=float("4" in first) if kwargs.get("scored") else None,
            num_turns=4,
            metrics={"generate_sequences": 0.0, "tool_calls": 0.0},
            extra_fields={"turn_scores": [], "tool_rewards": [0.0]},
        )
