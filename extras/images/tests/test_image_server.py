"""The server reads the images of a chat's data URLs as the trainer reads those of a row, and fetches none."""

import base64

import openai
import pytest

from data.types import Request, SamplingParams
from extras.images.tests.conftest import picture
from extras.images.tests.test_rows import png
from extras.images.tests.test_scores import prompts_of
from extras.server.__main__ import load_served
from extras.server.tests.fixtures import compose, serving


def test_a_chat_with_an_image_is_answered_as_its_row(folders):
    config, prompt = compose(folders["idefics3"]), prompts_of(folders["idefics3"])[0]
    served, coded = load_served(config), f"data:image/png;base64,{base64.b64encode(png(picture(0))).decode()}"
    sampling, text = {"max_tokens": 8, "temperature": 0, "logprobs": True}, {"type": "text", "text": "how many?"}
    with serving(served, config) as at, openai.OpenAI(base_url=f"{at}/v1", api_key="-", max_retries=0) as client:

        def ask(url: str, *more: dict):
            messages = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": url}}, text, *more]}]
            return client.chat.completions.create(model="tiny", messages=messages, **sampling)

        found = ask(coded)
        refused = dict.fromkeys(("http://a/b.png", "file:///etc/passwd"), "is no data: URL")
        for url, words in (refused | {coded[:-40]: "image_url.0. cannot be read"}).items():
            with pytest.raises(openai.BadRequestError, match=words):
                ask(url)
        with pytest.raises(openai.BadRequestError, match="this server reads text, and images"):
            ask(coded, {"type": "video"})
    [done] = served.pump.engine.generate([Request(-1, prompt, SamplingParams(False, 1.0, -1, 1.0, 8), seed=0)])
    assert [token.logprob for token in found.choices[0].logprobs.content] == pytest.approx(done.log_probs, abs=1e-5)
    assert found.usage.prompt_tokens == len(prompt)
