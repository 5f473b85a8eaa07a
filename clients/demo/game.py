"""The environment: guess a secret number from hints, several turns an episode, in characters.

Owns the rules, the rewards and the alphabet. Knows nothing of policies or of gristmill.

An episode reads, the policy's own characters in brackets:

    1-9?
    [5
    ]higher
    [7
    ]correct

A reply that is no number of the range is malformed. The harness then strips it from what the policy sees next, as
harnesses do, so that the turn does not extend the one before it: it becomes a training row of its own.
"""

from __future__ import annotations

from dataclasses import dataclass

REPLY_CHARACTERS = "0123456789\n"
ALPHABET = REPLY_CHARACTERS + "-?" + "".join(sorted(set("correcthigherlowermalformed"))) + "_"
END = ALPHABET.index("\n")
PAD = ALPHABET.index("_")

LARGEST = 9
MAX_TURNS = 3
MAX_REPLY_TOKENS = 2
REWARDS = {"correct": 1.0, "malformed": -0.2}


def encode(text: str) -> list[int]:
    return [ALPHABET.index(character) for character in text]


def decode(tokens: list[int]) -> str:
    return "".join(ALPHABET[token] for token in tokens)


@dataclass(frozen=True, slots=True)
class Turn:
    """The result of one reply. answer: correct, higher, lower or malformed. stop_reason: why the reply ended."""

    answer: str
    reward: float
    is_last: bool
    stop_reason: str


class Episode:
    """One game with one secret. `context` is what the policy sees next."""

    def __init__(self, secret: int) -> None:
        self.context = encode(f"1-{LARGEST}?\n")
        self.done = False
        self._secret = secret
        self._turns = 0

    def reply(self, tokens: list[int]) -> Turn:
        """Apply the policy's reply, and append it and the answer to the context."""
        self._turns += 1
        answer = self._answer(tokens)
        self.done = answer == "correct" or self._turns == MAX_TURNS
        kept = [] if answer == "malformed" else tokens
        self.context = [*self.context, *kept, *encode(f"{answer}\n")]
        return Turn(answer, REWARDS.get(answer, 0.0), self.done, "stop" if tokens[-1] == END else "length")

    def _answer(self, tokens: list[int]) -> str:
        guess = _number(tokens)
        if guess is None:
            return "malformed"
        return "correct" if guess == self._secret else "higher" if guess < self._secret else "lower"


def _number(tokens: list[int]) -> int | None:
    text = decode(tokens)
    if not text.endswith("\n") or not text[:-1].isdigit() or text.startswith("0"):
        return None
    number = int(text)
    return number if 1 <= number <= LARGEST else None
