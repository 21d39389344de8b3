# verl 0.6 to 0.10.dev | recipe/collabllm, recipe/safe…: subclasses of ToolAgentLoop
# keys: rollout.agent.default_agent_loop=polite rollout.multi_turn.tool_config_path=29_tool_base.yaml
# observed: _call_tool is called for every call of a tool, its text begins with "Please: "; otherwise as tool_agent
from verl.experimental.agent_loop.agent_loop import register
from verl.experimental.agent_loop.tool_agent_loop import AgentData, AgentState, ToolAgentLoop


@register("polite")
class PoliteToolAgent(ToolAgentLoop):
    async def _handle_generating_state(self, agent_data: AgentData, sampling_params, ignore_termination=False):
        state = await super()._handle_generating_state(agent_data, sampling_params, ignore_termination)
        agent_data.extra_fields["generated"] = agent_data.extra_fields.get("generated", 0) + 1
        return AgentState.TERMINATED if agent_data.assistant_turns >= 3 else state

    async def _call_tool(self, tool_call, tools_kwargs, agent_data):
        response, reward, more = await super()._call_tool(tool_call, tools_kwargs, agent_data)
        response.text = "Please: " + (response.text or "")
        return response, reward, more
