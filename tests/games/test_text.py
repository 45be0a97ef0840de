"""Tasks of text: what is asked and what is right, in characters and in tokens; one as an environment; one's own."""

import re

import gymnasium as gym
import numpy as np
import pytest
from conftest import refused
from gymnasium.utils.env_checker import check_env

import solorl.games.text as text
from solorl.envs.ids import check_env_id_of
from solorl.errors import UsageError
from solorl.scripts import script_paths

IDS = sorted(name for name in gym.registry if name.startswith("text/"))
CHARACTERS = dict(enumerate(".0123456789+="))
PROGRAMS = {
    "reverse": lambda asked: "".join(reversed(asked)),
    "sort": lambda asked: "".join(map(str, sorted(map(int, asked)))),
    "sum": lambda asked: str(int(asked.partition("+")[0]) + int(asked.partition("+")[2])),
}


def read(tokens):
    return "".join(CHARACTERS[int(token)] for token in tokens)


def test_there_are_tasks_of_several_sizes():
    assert len(IDS) == 30 and {"text/reverse-3", "text/reverse-8", "text/sort-8", "text/sum-2"} <= {*IDS}


@pytest.mark.parametrize("env_id", IDS)
def test_rewards_are_those_of_pythons_own_programs(env_id):
    """Of right answers, of one with another token, without an end, and with anything after the end."""
    task, rng = gym.make(env_id).unwrapped, np.random.default_rng(1)
    program, size = PROGRAMS[env_id[5:].partition("-")[0]], int(env_id.rpartition("-")[2])
    prompts, answers = task.examples(40, seed=3)
    assert prompts.shape == (40, task.prompt_length) and answers.shape == (40, task.answer_length)
    assert task.prompt_length + task.answer_length <= 32 and len(task.vocabulary) <= 20
    for prompt, answer in zip(prompts, answers, strict=True):
        asked, equals, nothing = read(prompt).partition("=")
        assert equals and not nothing and all(len(part) == size for part in asked.split("+"))
        assert read(answer) == program(asked).ljust(task.answer_length, ".")
    assert (task.rewards(prompts, answers) == 1).all() and task.rewards(prompts, answers).dtype == np.float32
    wrong, after = answers.copy(), answers.copy()
    place = rng.integers((answers != 0).sum(1))
    wrong[range(40), place] = wrong[range(40), place] % 10 + 1  # another digit
    assert not task.rewards(prompts, wrong).any()
    unended = np.where(answers == 0, 1, answers)
    assert not task.rewards(prompts, unended).any()
    ends = (answers == 0).argmax(1)
    after[np.arange(task.answer_length) > ends[:, None]] = 5
    assert (task.rewards(prompts, after) == 1).all()
    assert not task.rewards(prompts, np.zeros_like(answers)).any()


@pytest.mark.parametrize("env_id", ["text/reverse-8", "text/sort-3", "text/sum-2"])
def test_an_environment_asks_one_question(env_id):
    check_env(gym.make(env_id).unwrapped, skip_render_check=True)
    env = gym.make(env_id, render_mode="ansi")
    prompt, _ = env.reset(seed=4)
    again, _ = env.reset(seed=4)
    other, _ = env.reset(seed=5)
    assert prompt.tolist() == again.tolist() != other.tolist() and env.render() == read(other)
    right = PROGRAMS[env_id[5:].partition("-")[0]](read(other)[:-1])
    tokens = [".0123456789+=".index(character) for character in right.ljust(env.unwrapped.answer_length, ".")]
    obs, reward, terminated, truncated, _ = env.step(np.array(tokens))
    assert (reward, terminated, truncated) == (1.0, True, False) and obs.tolist() == other.tolist()
    assert env.render() == f"{read(other)}{right}  right"
    env.reset(seed=5)
    assert env.step(np.array([3, 2, *[0] * (env.unwrapped.answer_length - 2)]))[1] == 0.0
    assert env.render() == f"{read(other)}21  reward 0, right is {right}"


def test_questions_follow_the_seed_and_are_any():
    task = gym.make("text/sum-2").unwrapped
    first, second = task.examples(2000, seed=1)[0], task.examples(2000, seed=2)[0]
    assert (first == task.examples(2000, seed=1)[0]).all() and (first != second).any()
    numbers = [int(part) for asked in task.questions(first) for part in asked.split("+")]
    assert {*numbers} == {*range(10, 100)}


class Half(text.TextTask):
    """Two numbers of this sum, of which any are right, the nearer the better: short prompts."""

    def __init__(self, render_mode=None):
        super().__init__(4, 6, render_mode)

    def question(self, rng):
        return str(rng.integers(10, 200))

    def answer(self, question):
        return f"{question}+0"

    def judge(self, question, answer):
        fits = re.fullmatch(r"(\d+)\+(\d+)", answer)
        return 1 / (1 + abs(int(fits[1]) + int(fits[2]) - int(question))) if fits else -1.0


def test_a_task_of_ones_own():
    """Short prompts are filled up on their left; several answers are right, some are worth a part."""
    task = Half()
    prompts = task._prompts(["42", "142"])
    assert [read(prompt) for prompt in prompts] == [".42=", "142="] and task.questions(prompts) == ["42", "142"]
    answers = task._tokens(["40+2", "99+42"], task.answer_length, str.ljust)
    assert task.rewards(prompts, answers).tolist() == [1.0, 0.5]
    assert task.rewards(prompts, answers[:, ::-1].copy()).tolist() == [-1.0, -1.0]


@pytest.mark.parametrize("wrong", ["12345", "7x", "7.7"], ids=["too-long", "no-token", "the-end-token"])
@pytest.mark.parametrize("part", ["question", "answer"])
def test_a_text_that_has_no_tokens_is_one_sentence(monkeypatch, part, wrong):
    monkeypatch.setattr(Half, part, lambda *_: wrong + "1" * (part == "answer") * 3)
    with pytest.raises(UsageError, match=f"Half: '{wrong[:2]}.* must be at most {4 if part == 'question' else 6}"):
        Half().examples(3, seed=1)


def test_a_judge_that_returns_nothing_is_said(solo, monkeypatch, tmp_path):
    """By the trial before the training, in one sentence."""
    lines = "    def question(self, rng): return '12'\n    def answer(self, question): return '21'\n"
    module = "import gymnasium as gym\nfrom solorl.games.text import TextTask\nclass Silent(TextTask):\n" + lines
    module += "    def judge(self, question, answer): pass\n"
    end = "gym.register('Silent-v0', Silent, kwargs={'prompt_length': 3, 'answer_length': 3})\n"
    (tmp_path / "silent_judge.py").write_text(module + end)
    monkeypatch.chdir(tmp_path)
    refused(solo("train", "grpo", "--env-id", "silent_judge:Silent-v0"), "reward must be one number")


@pytest.mark.parametrize(
    ("env_id", "sentence"),
    [("games/TwoNumbers-v0", "is not a task of text, as text/reverse-8 is; use ppo_multidiscrete.py for other"),
     ("text/revers-8", "there is no environment text/revers-8; did you mean text/reverse-8")],
)  # fmt: skip
def test_other_ids_are_refused(env_id, sentence):
    with pytest.raises(UsageError, match=re.escape(sentence)):
        check_env_id_of(script_paths()["grpo"], env_id, "text")


def test_solo_play_prints_prompts_and_answers(train, solo):
    flags = "--env-id text/sum-1 --width 32 --num-layers 1 --warmup-fraction 0.32 --num-prompts 4 --total-timesteps 200"
    v = train("grpo", *flags.split(), "--eval-episodes", "3", "--capture-video")
    assert "warning: no video: the environment draws no pictures" in train.out
    for words in ([], ["--stochastic"]):
        code, out, err = solo("play", v["run"].dir, "--episodes", "4", *words)
        shown, last = out.splitlines()[:4], out.splitlines()[4]
        assert code == 0 and not err and last.startswith("text/sum-1: ")
        for line in shown:
            first, second, given, rest = re.fullmatch(r"(\d)\+(\d)=([\d+=]*)  (.*)", line).groups()
            right = str(int(first) + int(second))
            assert rest == ("right" if given == right else f"reward 0, right is {right}")
    code, out, err = solo("play", v["run"].dir, "--episodes", "1", "--video")
    assert code == 0 and "no video: the environment draws no pictures" in err
    refused(solo("play", v["run"].dir, "--render"), "needs a display")
