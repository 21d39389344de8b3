"""Episodes of an environment: the policy acts, and is shown what came of it."""

from training.game import Environment, Game
from workers.deadlines import in_thread
from workers.episodes import Episode, Reply, Row


class Environments:
    """The environments of a worker's episodes, which are made when they are needed and used again."""

    def __init__(self, game: Game) -> None:
        self.game = game
        self.free: list[Environment] = []

    def take(self) -> Environment:
        return self.free.pop() if self.free else self.game.environment.clone()

    def give_back(self, environment: Environment) -> None:
        self.free.append(environment)


class EnvEpisode(Episode):
    """An episode from the state in `row`, in an environment of its own.

    It is played in another thread, which the environment may keep waiting for `timeout` seconds at a time (None: any).
    With `apart`, every state is shown in a prompt of its own, as the dataset shows the first; else by what the dataset
    writes behind an action.
    """

    def __init__(self, row: Row, environments: Environments, apart: bool, timeout: float | None) -> None:
        self.prompt_ids = row["raw_prompt_ids"]
        self.start = row["extra_info"]["state"]
        self.columns = {"success": None, "invalid_actions": 0, "reset_seed": self.start.seed}
        self.environments, self.apart, self.timeout = environments, apart, timeout
        self.environment: Environment | None = None
        self.is_usable = False

    async def step(self, answer: str) -> Reply:
        self.is_usable = False
        reply = await in_thread(self._act, answer, deadline=self.timeout)
        self.is_usable = True
        return reply

    async def close(self) -> None:
        if self.is_usable:  # not after an error, or while it hangs
            self.environments.give_back(self.environment)

    def _act(self, answer: str) -> Reply:
        """In another thread."""
        if self.environment is None:
            self.environment = self.environments.take()
            self.environment.reset(self.start.seed, self.start.actions)
        game = self.environments.game
        _, reward, _, _, info = self.environment.act(game.reader.extract_action(answer))
        columns = {"success": info["success"], "invalid_actions": info["invalid"]}
        if info["end_reason"] is not None:
            return Reply(reward=reward, end_reason=info["end_reason"], columns=columns)
        if not self.apart:
            messages = game.dataset.turn_messages(self.environment.state)
            return Reply(messages, reward=reward, columns=columns)
        prompt_ids = game.dataset.encode_state(self.environment.state)
        full = None if prompt_ids is not None else "context_full"
        return Reply(prompt_ids=prompt_ids, reward=reward, end_reason=full, columns=columns)
