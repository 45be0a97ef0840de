"""Self-play has a score: every seat in turn, against random actions and an older self, computed by hand."""

import contextlib
import io
import re

import gymnasium as gym
import numpy as np
import pytest
import torch
from conftest import comparable, own_registry, rows
from duel import BONUS, JAX, ROUNDS, TORCH, Duel
from gymnasium.utils.seeding import np_random
from safetensors import safe_open
from safetensors.numpy import load_file

from solorl.checkpoints import checkpoint
from solorl.compute.device import CONFIRM, EVALUATE, env_seed
from solorl.envs.pettingzoo import Game, register
from solorl.run import pictures
from solorl.run.evaluation import play_scores
from solorl.run.load import Play, play_script
from solorl.run.saving import Checkpoints

OLDER = [1, 1, 1, 2, 2, 2, 2, 4]  # the level of the older self at levels 1 to 8: after a quarter to a half of the steps
SCORE = "eval/episodic_return"
FLAGS = ("--eval-every", "10", "--eval-episodes", "3")


@pytest.fixture(autouse=True)
def duel(monkeypatch):
    own_registry(monkeypatch)
    register("Duel-v0", Duel, teams="each")
    register("Together-v0", Duel)


@pytest.fixture(params=["torch", "jax"])
def duel_script(request, tmp_path):
    """`duel_script(opponents)` writes the training and returns its path."""
    return lambda opponents: write(tmp_path, request.param, opponents)


def write(folder, framework, opponents, closed=None):
    path, text = folder / f"duel_{framework}.py", {"torch": TORCH, "jax": JAX}[framework]
    closed = opponents if closed is None else closed
    path.write_text(text.replace("EVALUATED", repr(opponents)).replace("CLOSED", repr(closed)))
    return path


def seed_of(variables):
    run = variables["run"]
    return run.runs[0] if hasattr(run, "runs") else run


def against_random(level, seeds):
    """The mean returns of the two seats when a policy of this level plays against random actions."""
    total = np.zeros(2)
    for seed in seeds:
        space = gym.spaces.MultiDiscrete([3, 3], seed=seed)
        cards = np.random.default_rng(int(np_random(seed)[0].integers(2**31))).integers(3, size=ROUNDS + 1)
        random = np.array([space.sample() for _ in range(ROUNDS)])
        for seat in (0, 1):
            hits = (random[:, 1 - seat] == cards[:ROUNDS]).sum()
            total[seat] += level - hits + (BONUS if seat == 0 else -BONUS)
    return total / len(seeds)


def test_scores_are_those_computed_by_hand(train, duel_script):
    v = train(str(duel_script(("random", "older"))), *FLAGS)
    found = rows(seed_of(v).dir, SCORE)
    seeds = [env_seed(1, EVALUATE, i) for i in range(3)]
    assert [row["global_step"] for row in found] == list(range(10, 90, 10))
    for level, row in enumerate(found, 1):
        even, odd = against_random(level, seeds)
        assert row[f"{SCORE}_even"] == pytest.approx(even) and row[f"{SCORE}_odd"] == pytest.approx(odd)
        assert row[SCORE] == row[f"{SCORE}_vs_random"] == pytest.approx((even + odd) / 2)
        assert row[f"{SCORE}_vs_older"] == level - OLDER[level - 1]
        assert row["eval/episodic_length"] == ROUNDS
    assert found[-1][SCORE] > 3  # it knows all the cards


def test_opponents_change_nothing_that_is_learned(train, tmp_path):
    learned = []
    for opponents in ((), ("random", "older")):
        v = train(str(write(tmp_path, "torch", opponents)), *FLAGS, runs_dir=tmp_path / str(len(opponents)))
        of_training = [{k: x for k, x in row.items() if "eval" not in k} for row in comparable(v["run"].dir)]
        learned.append([row for row in of_training if len(row) > 1])
        assert v["agent"].bias.item() == 8
    assert learned[0] == learned[1]


def test_a_self_play_goes_on_exactly(train, duel_script, tmp_path):
    path = str(duel_script(("older", "random")))
    whole = seed_of(train(path, *FLAGS, runs_dir=tmp_path / "whole")).dir
    cut = seed_of(train(path, *FLAGS, "--total-timesteps", "50", runs_dir=tmp_path / "cut")).dir
    resumed = train(path, "--resume", cut, "--total-timesteps", "80", "--resume-changed")
    assert resumed["start"] == 5 and comparable(cut) == comparable(whole)
    ours, theirs = (load_file(run_dir / "model_last.safetensors") for run_dir in (whole, cut))
    assert all(np.array_equal(ours[name], theirs[name]) for name in ours)
    states = [checkpoint.load_checkpoint(run_dir / "checkpoint")[0] for run_dir in (whole, cut)]
    assert [step for step, _ in states[0]["selves"]] == [step for step, _ in states[1]["selves"]] == [40, 80]


def test_target_and_best_model_are_those_of_the_score(train, duel_script):
    """Against the older self the scores are 0, 1, 2, 2, 3, ...; against itself the first team's return is the bonus."""
    path = str(duel_script(("older",)))
    v = train(path, *FLAGS, "--target-return", "3")
    run = seed_of(v)
    assert run.step == 50 and "target 3 reached; on fresh seeds 3.0: done" in train.out
    run = seed_of(train(path, *FLAGS, "--total-timesteps", "80"))
    with safe_open(run.dir / "model.safetensors", framework="numpy") as file:
        assert file.metadata()["step"] == "70" and float(file.metadata()[SCORE]) == 5


def test_play_has_random_opponents(train, duel_script):
    path = duel_script(("older", "random"))
    run = seed_of(train(str(path), *FLAGS))
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        play_script(path, run.dir, Play(episodes=4, model="model_last.safetensors"), neighbours=True)
    mean = against_random(8, [env_seed(1, CONFIRM, 2**19 + i) for i in range(4)]).mean()
    assert (
        f"Duel-v0: {mean:.2f} ± " in out.getvalue()
        and "over 4 greedy episodes against random actions" in out.getvalue()
    )


def test_a_film_is_the_first_game_that_is_evaluated(train, tmp_path, monkeypatch):
    """From the seat of the first team, with the same random actions."""
    filmed, film = [], pictures.film
    monkeypatch.setattr(pictures, "film", lambda *args: filmed.append(film(*args)))
    v = train(str(write(tmp_path, "torch", ("random",))), "--capture-video", "--eval-episodes", "1")
    assert (v["run"].dir / "videos" / "step_80.mp4").stat().st_size > 500
    even, _ = against_random(8, [env_seed(1, EVALUATE, 0)])
    assert filmed == [even] == [row[f"{SCORE}_even"] for row in rows(v["run"].dir, SCORE)]


def test_random_opponents_play_legal_actions():
    """Duel asserts it; a masked player has two actions of three, one with two actions has no third."""

    def act(obs, action_mask):
        return action_mask.argmax(-1)

    for kwargs in ({"masked": True}, {"masked": True, "sizes": (3, 2)}):
        play_scores([Game(Duel(**kwargs), "each", pad=True) for _ in range(4)], act, range(4), "random")
    continuous = [gym.make("mpe/simple_spread_v3", continuous_actions=True, teams="each") for _ in range(2)]
    scores, _ = play_scores(continuous, lambda obs: np.zeros((*obs.shape[:2], 5), np.float32), [1, 2], "random")
    assert len(scores) == 4 and scores[SCORE].shape == (2,)


def test_a_policy_with_memory_keeps_it_in_every_seat():
    def act(obs, state, first):
        state = np.zeros(len(obs), int) if state is None else state + 1
        assert first.all() == (state == 0).all()
        return np.where(state[:, None] < 3, obs[..., 0].astype(int), 3 - 1 - obs[..., 0].astype(int)), state

    def older(obs, state, first):
        state = [0] * len(obs) if state is None else [count + 1 for count in state]
        return obs[..., 0].astype(int), state

    scores, lengths = play_scores([Game(Duel(), "each")], act, [3], older)
    cards = np.random.default_rng(int(np_random(3)[0].integers(2**31))).integers(3, size=ROUNDS + 1)[:ROUNDS]
    assert scores[SCORE] == -(cards[3:] != 1).sum() and lengths == ROUNDS


def test_the_older_self_leaves_the_models_as_they_are():
    model = torch.nn.Linear(2, 1)
    kept = Checkpoints("")
    kept.name({"model": model})
    addresses = [p.data_ptr() for p in model.parameters()]
    kept.remember(10)
    before = model(torch.ones(1, 2)).item()
    with torch.no_grad():
        model.bias.add_(1)

    def policy(obs, fails):
        assert model(torch.ones(1, 2)).item() == before
        assert not fails, "in the policy"
        return obs

    assert kept.older(policy)(3, fails=False) == 3
    with pytest.raises(AssertionError, match="in the policy"):
        kept.older(policy)(3, fails=True)
    assert model(torch.ones(1, 2)).item() == pytest.approx(before + 1)
    assert [p.data_ptr() for p in model.parameters()] == addresses


def test_the_older_self_is_between_a_quarter_and_a_half():
    model = torch.nn.Linear(1, 1)
    kept = Checkpoints("")
    kept.name({"model": model})
    kept.remember(7)
    for step in range(14, 2000, 7):
        kept.remember(step)
        assert step / 4 < kept.selves[0][0] <= step / 2, step


# ---------------------------------------------------------------------- refusals
@pytest.mark.parametrize(
    ("opponents", "closed", "flags", "words"),
    [
        (("oldest",), None, (), "opponents are ('oldest',); allowed are random and older"),
        (("random",), (), (), "run.evaluate has the opponents ('random',), run.close has ()"),
        (
            ("random",),
            None,
            ("--env-id", "Together-v0"),
            'two teams or more, as `gym.make(env_id, teams="each")` gives',
        ),
    ],
)
def test_opponents_that_cannot_be_are_refused(train, tmp_path, opponents, closed, flags, words):
    path = write(tmp_path, "torch", opponents, closed)
    train(str(path), *FLAGS, *flags, code=2)
    assert words in train.out and "Traceback" not in train.out


@pytest.mark.parametrize("wrong", ["x", [[1, {}]], [[1, {}], [2, {}]], [["x", {}], [2, {}]]])
def test_a_checkpoint_with_a_wrong_older_self_is_refused(train, tmp_path, monkeypatch, wrong):
    path = write(tmp_path, "torch", ("older",))
    run = train(str(path), *FLAGS, "--total-timesteps", "20")["run"]
    load = checkpoint.load_checkpoint
    monkeypatch.setattr(checkpoint, "load_checkpoint", lambda *args: (load(*args)[0] | {"selves": wrong}, []))
    train(str(path), "--resume", run.dir, "--total-timesteps", "40", "--resume-changed", code=2)
    assert re.search("the older self in the checkpoint does not fit", train.out)
