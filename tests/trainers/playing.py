"""An environment to test with, and what the tests of episodes ask."""

import numpy as np

from cukit import Environment


class Asking(Environment):
    """Asks for more, a number of times that it draws."""

    reward = 0.0

    def reset(self, **columns):
        self.rng = np.random.default_rng([self.seed, self.index])
        self.left = int(self.rng.integers(0, 4))
        self.seen, self.said = [], []

    def respond(self, conversation):
        self.seen.append([dict(message) for message in conversation])
        self.reward += len(conversation[-1]["content"])
        self.left -= 1
        if self.left < 0:
            return None
        self.said.append(str(self.rng.integers(0, 1000)))
        return [{"role": "user", "content": self.said[-1]}]


ROWS = [{"prompt": [{"role": "user", "content": "+".join(map(str, range(i % 4 + 1)))}]} for i in range(6)]
SHORT = dict(n=3, max_tokens=60, stop=["1", "2", "a", "+"], logprobs=True)  # turns of some tokens
