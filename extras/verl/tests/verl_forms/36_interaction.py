from typing import Any, Optional
from uuid import uuid4

from verl.interactions.base import BaseInteraction


class CoachInteraction(BaseInteraction):
    def __init__(self, config: dict):
        super().__init__(config)
        self._truths = {}

    async def start_interaction(self, instance_id: Optional[str] = None, ground_truth: Optional[str] = None, **kwargs) -> str:
        instance_id = instance_id or str(uuid4())
        self._truths[instance_id] = ground_truth
        return instance_id

    async def generate_response(
        self, instance_id: str, messages: list[dict[str, Any]], **kwargs
    ) -> tuple[bool, str, float, dict]:
        said = next((m["content"] for m in reversed(messages) if m["role"] == "assistant"), "")
        score = await self.calculate_score(instance_id, said)
        return score > 0, "Right." if score else "Again.", score, {}

    async def calculate_score(self, instance_id: str, said: str = "", **kwargs) -> float:
        return float(str(self._truths[instance_id]) in said)

    async def finalize_interaction(self, instance_id: str, **kwargs) -> None:
        self._truths.pop(instance_id, None)
