# TRL 0.29 and 1.x, for the comparison | huggingface.co/docs/trl/openenv: GRPOTrainer(environment_factory=Shelf, reward_funcs=…)
# keys: (asked for in issue 27) env.path=FILE env.name=Shelf with tools of its methods; reward reads the object
# observed: one object a sample; reset(**row) before the first answer, its text follows the prompt (None: nothing); every
#   public method but reset is a tool (docstring with Args, typed); an exception is the tool's answer; after the episode
#   reward_func(environments=[…], **columns) reads env.reward
class Shelf:
    def __init__(self):
        self.books, self.reward = [], 0.0

    def reset(self, **kwargs) -> str | None:
        self.books, self.reward, self.wanted = [], 0.0, str(kwargs.get("ground_truth", "4"))
        return "The shelf is empty."

    def put(self, book: str) -> str:
        """Puts a book on the shelf.

        Args:
            book: its title
        """
        if book in self.books:
            raise ValueError("It is there already.")
        self.books.append(book)
        self.reward += float(book == self.wanted)
        return f"{len(self.books)} books"

    def count(self) -> int:
        """Counts the books."""
        return len(self.books)


def reward_func(environments, **kwargs) -> list[float]:
    return [environment.reward for environment in environments]
