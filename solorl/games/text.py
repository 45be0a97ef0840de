"""Text: a question, and a program that judges the answer. For tiny language models."""

from collections.abc import Callable, Iterable
from typing import Any

import gymnasium as gym
import numpy as np

from solorl.errors import UsageError


class TextTask(gym.Env[np.ndarray, np.ndarray]):
    """One prompt, one answer: an episode has one step. Its return is 1 if the answer is exactly right, else 0.

    Observations (prompt_length,) and actions (answer_length,) are tokens: places in `vocabulary`. Its first character
    ends an answer, and nothing after that counts; it also fills up short prompts on their left. A prompt is the
    question and "=". A task of your own has `question`, `answer`, and `judge` where several answers are right.
    """

    metadata: dict[str, Any] = {"render_modes": ["ansi"], "render_fps": 1}  # noqa: RUF012
    vocabulary = ".0123456789+="

    def __init__(self, prompt_length: int, answer_length: int, render_mode: str | None = None):
        self.prompt_length, self.answer_length, self.render_mode = prompt_length, answer_length, render_mode
        self.observation_space = gym.spaces.Box(0, len(self.vocabulary) - 1, (prompt_length,), np.int64)
        self.action_space = gym.spaces.MultiDiscrete([len(self.vocabulary)] * answer_length)
        self.shown = ""

    # ------------------------------------------------------------------ what a task is
    def question(self, rng: np.random.Generator) -> str:
        """A new question, of at most prompt_length - 1 characters."""
        raise NotImplementedError

    def answer(self, question: str) -> str:
        """A right answer, of at most answer_length - 1 characters."""
        raise NotImplementedError

    def judge(self, question: str, answer: str) -> float:
        """What an answer is worth."""
        return float(answer == self.answer(question))

    # ------------------------------------------------------------------ many at once
    def examples(self, count: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
        """Prompts (count, prompt_length) of new questions, and right answers (count, answer_length)."""
        rng = np.random.default_rng(seed)
        questions = [self.question(rng) for _ in range(count)]
        return self._prompts(questions), self._tokens(map(self.answer, questions), self.answer_length, str.ljust)

    def rewards(self, prompts: np.ndarray, answers: np.ndarray) -> np.ndarray:
        """What answers (n, answer_length) to prompts (n, prompt_length) are worth: (n,)."""
        pairs = zip(self.questions(prompts), self.replies(answers), strict=True)
        return np.array([self.judge(*pair) for pair in pairs], np.float32)

    def questions(self, prompts: np.ndarray) -> list[str]:
        """The texts of prompts (n, prompt_length), without the "="."""
        return [text.lstrip(self.vocabulary[0])[:-1] for text in self._texts(prompts)]

    def replies(self, answers: np.ndarray) -> list[str]:
        """The texts of answers (n, answer_length), up to their ends."""
        return [text.partition(self.vocabulary[0])[0] for text in self._texts(answers)]

    def _prompts(self, questions: Iterable[str]) -> np.ndarray:
        return self._tokens((f"{one}=" for one in questions), self.prompt_length, str.rjust)

    def _tokens(self, texts: Iterable[str], length: int, filled: Callable[[str, int, str], str]) -> np.ndarray:
        """Texts that are filled up to `length`; UsageError where one is too long or has characters of no token."""
        texts, known = list(texts), self.vocabulary[1:]
        if wrong := [text for text in texts if len(text) > length or set(text) - set(known)]:
            raise UsageError(f"{type(self).__name__}: {wrong[0]!r} must be at most {length} of the characters {known}")
        return np.array([[*map(self.vocabulary.index, filled(text, length, self.vocabulary[0]))] for text in texts])

    def _texts(self, tokens: np.ndarray) -> list[str]:
        return ["".join(row) for row in np.array([*self.vocabulary])[tokens]]

    # ------------------------------------------------------------------ one, as an environment
    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[np.ndarray, dict]:
        """See `gymnasium.Env.reset`."""
        super().reset(seed=seed)
        self.asked = self.question(self.np_random)
        self.shown = f"{self.asked}="
        return self._prompts([self.asked])[0], {}

    def step(self, action: Any) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        """See `gymnasium.Env.step`."""
        reply, right = self.replies(np.asarray(action)[None])[0], self.answer(self.asked)
        reward = self.judge(self.asked, reply)
        verdict = "right" if reply == right else f"reward {reward or 0:g}, right is {right}"
        self.shown += f"{reply}  {verdict}"
        return self._prompts([self.asked])[0], reward, True, False, {}

    def render(self) -> str:
        """The question and, after the step, the answer."""
        return self.shown


class Reverse(TextTask):
    """Digits, backwards: 314=413."""

    def __init__(self, digits: int, render_mode: str | None = None):
        super().__init__(digits + 1, digits + 1, render_mode)

    def question(self, rng: np.random.Generator) -> str:
        """Any digits."""
        return "".join(map(str, rng.integers(10, size=self.prompt_length - 1)))

    def answer(self, question: str) -> str:
        """The last one first."""
        return question[::-1]


class Sort(Reverse):
    """Digits in their order: 314=134."""

    def answer(self, question: str) -> str:
        """The smallest one first."""
        return "".join(sorted(question))


class Sum(TextTask):
    """Two numbers, of this number of digits: 47+85=132."""

    def __init__(self, digits: int, render_mode: str | None = None):
        self.low, self.high = 10 ** (digits - 1), 10**digits
        super().__init__(2 * digits + 2, digits + 2, render_mode)

    def question(self, rng: np.random.Generator) -> str:
        """Any two, of which neither begins with 0."""
        return "+".join(map(str, rng.integers(self.low, self.high, size=2)))

    def answer(self, question: str) -> str:
        """Their sum."""
        return str(sum(map(int, question.split("+"))))


for _name, _class in (("reverse", Reverse), ("sort", Sort), ("sum", Sum)):
    for _digits in range(1, 13 if _class is not Sum else 7):
        gym.register(f"text/{_name}-{_digits}", f"{__name__}:{_class.__name__}", kwargs={"digits": _digits})
