"""Search over documents of one's own: BM25, in memory."""

import math
import re
from collections import Counter, defaultdict
from typing import Any

from data.rows import read_rows
from extras.tools.tool_classes import BaseTool, ToolResponse, ToolSchema, schema_of_text

WORD = re.compile(r"\w+")
K1, B = 1.2, 0.75  # how soon repetition stops to count, and how much length does (Robertson and Zaragoza, 2009)


def words_of(text: str) -> list[str]:
    return WORD.findall(text.lower())


class Index:
    """BM25 scores of `documents` for queries; documents that share no word with a query are skipped."""

    def __init__(self, documents: list[str]) -> None:
        counts = [Counter(words_of(document)) for document in documents]
        lengths = [sum(count.values()) for count in counts]
        mean = sum(lengths) / len(lengths) or 1.0
        self.weights = [K1 * (1 - B + B * length / mean) for length in lengths]
        self.places: dict[str, list[tuple[int, int]]] = defaultdict(list)  # word → (document, how often)
        for index, count in enumerate(counts):
            for word, times in count.items():
                self.places[word].append((index, times))

    def scores(self, query: str) -> dict[int, float]:
        """Returns scores by document, of those that share a word with `query`."""
        scores: dict[int, float] = defaultdict(float)
        for word in dict.fromkeys(words_of(query)):
            matches = self.places.get(word, [])
            rarity = math.log(1 + (len(self.weights) - len(matches) + 0.5) / (len(matches) + 0.5))
            for index, times in matches:
                scores[index] += rarity * times * (K1 + 1) / (times + self.weights[index])
        return scores

    def best(self, query: str, count: int) -> list[int]:
        """Returns the documents with the highest scores, best first; equal ones in their order."""
        scores = self.scores(query)
        return sorted(scores, key=lambda index: (-scores[index], index))[:count]


class Search(BaseTool):
    """The documents that fit a query best.

    `config.corpus` names a .jsonl, .json or .parquet file with a row for each document: its text in the column
    `config.text_key` (text), and, if there is one, its title in `config.title_key` (title). `config.top_k` (3) of them
    are shown.
    """

    def __init__(self, config: dict[str, Any], tool_schema: dict[str, Any] | None = None) -> None:
        super().__init__(config, tool_schema)
        settings = self.settings(name="search", corpus=None, text_key="text", title_key="title", top_k=3)
        if not settings["corpus"]:
            raise ValueError("config.corpus is not set: name a .jsonl file with a text for each document.")
        text_key, title_key, self.top_k = settings["text_key"], settings["title_key"], settings["top_k"]
        self.documents = []
        for origin, row in read_rows(settings["corpus"]):
            if not isinstance(row.get(text_key), str):
                raise ValueError(f"{origin}: column {text_key!r} holds no text; config.text_key names another.")
            title = row.get(title_key)
            self.documents.append(f"{title}\n{row[text_key]}" if title else row[text_key])
        self.index = Index(self.documents)

    def get_openai_tool_schema(self) -> ToolSchema:
        name, description = self.config.get("name", "search"), "Finds the documents that fit a query best."
        return schema_of_text(name, description, "query", "words to look for")

    async def execute(
        self, instance_id: str, parameters: dict[str, Any], **kwargs: Any
    ) -> tuple[ToolResponse, float, dict[str, Any]]:
        best = self.index.best(parameters["query"], self.top_k)
        texts = [f"[{rank}] {self.documents[index]}" for rank, index in enumerate(best, start=1)]
        return ToolResponse(text="\n\n".join(texts) or "Nothing was found."), 0.0, {}
