"""verl's user who asks a GSM8K question, and asks again until the answer is right."""

import re
from typing import Any

from extras.interactions.base import BaseInteraction, last_answer

LOOKED_AT = 300  # characters at the end of an answer
ANSWER = re.compile(r"#### (-?[\d.,]+)")
RIGHT = "Your response is correct!"
WRONG = "Your response is incorrect! You need to reflect on your answer and try again."


class Gsm8kInteraction(BaseInteraction):
    """Ends with a score of 1 once the number after #### is interaction_kwargs.ground_truth."""

    async def generate_response(
        self, instance_id: str, messages: list[dict[str, Any]], **kwargs: Any
    ) -> tuple[bool, str, float, dict[str, Any]]:
        if "ground_truth" not in kwargs:
            raise ValueError("the row has no extra_info.interaction_kwargs.ground_truth, which the answer is held to.")
        numbers = [number.replace(",", "") for number in ANSWER.findall(last_answer(messages)[-LOOKED_AT:])]
        score = float(numbers[-1:] == [str(kwargs["ground_truth"])])
        return score == 1.0, RIGHT if score == 1.0 else WRONG, score, {}
