from verl.tools.base_tool import BaseTool
from verl.tools.schemas import ToolResponse


class Notebook(BaseTool):
    async def execute(self, instance_id, parameters, agent_data=None, **kwargs):
        notes = agent_data.extra_fields.setdefault("notes", [])
        notes.append(parameters["note"])
        said = f"{len(notes)} notes; {len(agent_data.messages)} messages; turn {agent_data.assistant_turns}"
        return ToolResponse(text=said), 0.0, {}
