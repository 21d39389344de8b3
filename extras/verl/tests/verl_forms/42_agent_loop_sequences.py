# verl 0.9 to 0.10.dev | docs/advance/reward_loop.rst ("trajectories … of multiple output sequences", main_ppo_sync / V1 trainer)
# keys: rollout.agent.default_agent_loop=halves
# observed: run returns a list of AgentLoopOutput: rows of one episode; the last has the score; advantages are those of the
#   last for all rows of the session
from uuid import uuid4

from verl.experimental.agent_loop.agent_loop import AgentLoopBase, AgentLoopMetrics, AgentLoopOutput, register


@register("halves")
class Halves(AgentLoopBase):
    async def run(self, sampling_params, **kwargs) -> list[AgentLoopOutput]:
        outputs = []
        for words in ("one", "two"):
            messages = [*kwargs["raw_prompt"], {"role": "user", "content": words}]
            prompt = self.tokenizer.apply_chat_template(messages, add_generation_prompt=True)
            done = await self.server_manager.generate(
                request_id=uuid4().hex, prompt_ids=prompt, sampling_params=sampling_params
            )
            outputs.append(
                AgentLoopOutput(
                    prompt_ids=prompt,
                    response_ids=done.token_ids,
                    response_mask=[1] * len(done.token_ids),
                    response_logprobs=done.log_probs,
                    metrics=AgentLoopMetrics(),
                    num_turns=2,
                )
            )
        return outputs
