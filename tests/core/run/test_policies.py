"""What a policy may be, in evaluation, in films, in `solorl.load` and while it trains; in torch and in JAX."""

import runpy
import sys
from itertools import pairwise

import numpy as np
import pytest
from conftest import comparable, refused, rows
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from kinds import Allowed, Pairs, Parts, name_parts, obey, repeat_pair

import solorl
from solorl import EnvPoolVectorEnv
from solorl.catalog.standalone import standalone
from solorl.checkpoints import env_state
from solorl.envs.vector import VectorEnvs
from solorl.run.evaluation import open_game, play_episodes
from solorl.run.pictures import film

SEEDS = [1, 2, 3]
SAME_STEP = AutoresetMode.SAME_STEP


def vector(kind):
    return SyncVectorEnv([kind] * len(SEEDS), autoreset_mode=SAME_STEP)


# ---------------------------------------------------------------------- masks of one agent
@pytest.mark.parametrize("envs", [lambda: [Allowed() for _ in SEEDS], lambda: [vector(Allowed)]])
def test_masks_reach_the_policy(envs):
    """Also those of vector environments."""
    returns, lengths = play_episodes(envs(), obey, SEEDS)
    assert returns.tolist() == lengths.tolist() and len(set(lengths)) > 1


def test_masks_reach_the_policy_in_a_film_of_a_vector_environment(tmp_path):
    def make_envs(env_id, num_envs, render_mode=None):
        return SyncVectorEnv([lambda: Allowed(render_mode=render_mode)] * num_envs, autoreset_mode=SAME_STEP)

    returns, lengths = play_episodes([Allowed()], obey, [7])
    assert film(open_game(make_envs, "", "rgb_array", 0), obey, 7, tmp_path / "film.mp4") == returns[0] == lengths[0]


def test_where_no_environment_gives_a_mask_it_is_none_and_where_one_does_the_others_allow_all():
    def policy(obs, action_mask):
        masks.append(action_mask)
        return np.zeros(len(obs), int)

    masks = []
    play_episodes([Allowed(gives=False)], policy, [1])
    assert masks and all(mask is None for mask in masks)
    for envs in ([Allowed(), Allowed(gives=False)],
                 [SyncVectorEnv([Allowed, lambda: Allowed(gives=False)], autoreset_mode=SAME_STEP)]):  # fmt: skip
        masks.clear()
        play_episodes(envs, policy, [1, 2])
        assert all(mask.dtype == bool and mask[0].sum() == 2 and mask[1].all() for mask in masks)


def test_vector_environments_tell_the_masks_of_the_current_observations():
    """After a reset, after a step, and after the reset that a step brings; that of the final observation, too."""
    envs = VectorEnvs([Allowed] * 3)
    assert envs.metadata["autoreset_mode"] == SAME_STEP
    envs.reset(seed=SEEDS)
    ended = 0
    for _ in range(20):
        before = envs.action_mask
        assert before.shape == (3, 4) and before.dtype == bool
        np.testing.assert_array_equal(before, [env.unwrapped.mask for env in envs.envs])
        _, reward, terminated, _, infos = envs.step(before.argmax(1))
        assert (reward == 1).all()
        np.testing.assert_array_equal(infos["action_mask"], envs.action_mask)
        for i in np.flatnonzero(terminated):
            final = infos["final_info"]["action_mask"][i]
            assert final.sum() == 2 and not np.shares_memory(final, envs.action_mask)
            ended += not np.array_equal(final, envs.action_mask[i])
    assert ended > 3
    bare = VectorEnvs([lambda: Allowed(gives=False)])
    bare.reset(seed=1)
    assert bare.action_mask is None


def test_masks_go_on_exactly():
    whole, cut = (VectorEnvs([Allowed] * 2) for _ in range(2))
    for envs in (whole, cut):
        env_state.record(envs)
        envs.reset(seed=[1, 2])
    for _ in range(8):
        whole.step([0, 1])
    assert env_state.restore(cut, env_state.capture(whole)) == []
    for _ in range(8):
        np.testing.assert_array_equal(cut.action_mask, whole.action_mask)
        for x, y in zip(whole.step([2, 1])[:4], cut.step([2, 1])[:4], strict=True):
            np.testing.assert_array_equal(x, y)


def test_masks_of_envpool_are_those_of_the_current_observations():
    """In 2048 a move that changes nothing is not allowed."""
    pytest.importorskip("envpool")
    envs = EnvPoolVectorEnv("Play2048-v1", 2)
    allowed = 0

    def changes(obs):
        """Whether a row has two equal numbers side by side or a gap before a number; left, up, right, down."""
        board = np.where(obs.any(-1), obs.argmax(-1), 0)
        sides = (board, board.T, board[:, ::-1], board[::-1].T)
        return [any((a == b and a) or (not a and b) for row in side for a, b in pairwise(row))
                for side in sides]  # fmt: skip

    def policy(obs, action_mask):
        nonlocal allowed
        np.testing.assert_array_equal(action_mask, [changes(each) for each in obs])
        allowed += action_mask.sum()
        return action_mask.argmax(1)

    _, lengths = play_episodes([envs], policy, [1, 2])
    assert envs.action_mask.shape == (2, 4) and lengths.min() > 20 and allowed < 8 * lengths.max()


# ---------------------------------------------------------------------- spaces of several parts
@pytest.mark.parametrize(("kind", "policy"), [(Parts, name_parts), (Pairs, repeat_pair)])
def test_observations_and_actions_may_have_parts(kind, policy, tmp_path):
    """Dict and Tuple observations, Tuple and MultiDiscrete actions: side by side, together, and in a film."""
    returns, lengths = play_episodes([kind() for _ in SEEDS], policy, SEEDS)
    assert returns.tolist() == lengths.tolist() and lengths.min() > 1
    assert play_episodes([vector(kind)], policy, SEEDS)[0].tolist() == returns.tolist()
    assert film(kind(), policy, 1, tmp_path / "film.mp4") == returns[0]

    def make_envs(env_id, num_envs, render_mode=None):
        return SyncVectorEnv([kind] * num_envs, autoreset_mode=SAME_STEP)

    assert film(open_game(make_envs, "", "rgb_array", 0), policy, 1, tmp_path / "film.mp4") == returns[0]


# ---------------------------------------------------------------------- whole runs in torch
SCRIPT = """
from dataclasses import dataclass
import gymnasium as gym
import kinds
import numpy as np
import torch
from solorl import Run, RunArgs, parse

@dataclass
class Args(RunArgs):
    env_id: str = "kinds:Parts-v0"
    total_timesteps: int = 24

def make_env(env_id, **kwargs):
    return gym.make(env_id, **kwargs)

if __name__ == "__main__":
    args = parse(Args)
    run = Run(args)
    envs = run.vector_env(make_env, args.env_id, 2)
    run.require_spaces(envs, **KINDS)
    noise = torch.nn.Linear(1, 1)
    start = run.resume(noise=noise, envs=envs)
    obs, seen = run.reset(envs), []
    for iteration in run.loop(start, args.total_timesteps // 6):
        for step in range(3):
            mask = {} if envs.action_mask is None else {"action_mask": envs.action_mask}
            obs, reward, terminated, truncated, _ = envs.step(ACT(obs, **mask))
            run.episodes(iteration * 6 + 2 * step + 2, reward, terminated | truncated)
        seen.append((obs, envs.action_mask))
        run.log(iteration * 6 + 6, {})
        run.evaluate(iteration * 6 + 6, ACT, make_env)
        run.save(iteration * 6 + 6)
    run.close(ACT, make_env)
"""
KINDS = {
    "Parts": ("name_parts", 'dict(obs="dict", action="tuple")'),
    "Pairs": ("repeat_pair", 'dict(obs="tuple", action="multidiscrete")'),
    "Allowed": ("obey", 'dict(obs="vector", action="discrete")'),
}


@pytest.fixture
def path(tmp_path, request):
    """A script of one's own for the environments of a kind."""
    policy, spaces = KINDS[request.param]
    text = SCRIPT.replace("ACT", f"kinds.{policy}").replace("**KINDS", f"**{spaces}")
    (tmp_path / "mine.py").write_text(text.replace("Parts-v0", f"{request.param}-v0"))
    return tmp_path / "mine.py"


@pytest.mark.parametrize("path", KINDS, indirect=True)
def test_a_training_with_such_spaces_goes_on_exactly_and_can_be_loaded(path, train, tmp_path, solo):
    flags = ["--eval-episodes", "3", "--eval-every", "12"]
    whole = train(path, *flags, runs_dir=tmp_path / "whole")
    cut = train(path, *flags, "--total-timesteps", "12", runs_dir=tmp_path / "cut")["run"].dir
    resumed = train(path, "--resume", cut, "--total-timesteps", "24", "--resume-changed")
    assert resumed["start"] == 2 and resumed["run"].restarted == []
    assert comparable(cut) == comparable(whole["run"].dir)
    for row in rows(cut):
        name = "charts" if "charts/episodic_return" in row else "eval"
        if f"{name}/episodic_return" in row:
            assert row[f"{name}/episodic_return"] == row[f"{name}/episodic_length"] > 1
    policy, [obs, mask] = solorl.load(cut), whole["seen"][-1]
    action = policy(obs) if mask is None else policy(obs, action_mask=mask)
    actions = list(zip(*action, strict=True)) if isinstance(action, tuple) else list(action)
    space = policy.make_env().action_space
    assert len(actions) == 2 and all(each in space for each in actions)
    _, out, _ = solo("play", cut, "--episodes", "3")
    assert "± " in out and "over 3 greedy episodes" in out


@pytest.mark.parametrize("path", ["Parts"], indirect=True)
def test_other_kinds_are_refused_in_one_sentence(path, train):
    path.write_text(path.read_text().replace('action="tuple"', 'action="multidiscrete"'))
    train(path, code=2)
    said = "error: kinds:Parts-v0 has tuple actions, but mine.py takes multidiscrete actions; no file takes dict "
    assert train.out.startswith(said) and train.out.count("\n") == 1


@pytest.mark.parametrize("path", ["Allowed"], indirect=True)
def test_a_stochastic_policy_is_played_and_loaded(path, train, solo):
    """One that takes what is not allowed half of the time."""
    drawn = "def drawn(obs, action_mask):\n    return np.random.randint(4, size=len(obs))\n\n\nif __name__"
    text = path.read_text().replace("if __name__", drawn)
    path.write_text(text.replace("make_env)\n\n", "make_env)\n").replace(
        "run.close(kinds.obey, make_env)", "run.close(kinds.obey, make_env, sample=drawn)"
    ))  # fmt: skip
    run_dir = train(path, "--eval-episodes", "3")["run"].dir
    policy, obs, mask = solorl.load(run_dir), np.zeros((200, 2, 3)), np.ones((200, 4), bool)
    assert set(policy(obs, action_mask=mask)) == {0} and set(policy.sample(obs, action_mask=mask)) == {0, 1, 2, 3}
    code, out, _ = solo("play", run_dir, "--episodes", "20", "--stochastic")
    assert code == 0 and "over 20 stochastic episodes" in out
    mean = float(out.split(": ")[1].split(" ")[0])
    again, greedy = (solo("play", run_dir, "--episodes", "20", *words)[1] for words in (["--stochastic"], []))
    assert again == out and mean < float(greedy.split(": ")[1].split(" ")[0])


@pytest.mark.parametrize("path", ["Allowed"], indirect=True)
def test_a_script_without_a_stochastic_policy_says_so(path, train, solo):
    run_dir = train(path, "--eval-episodes", "2")["run"].dir
    refused(solo("play", run_dir, "--stochastic"), "has no stochastic policy", "run.close(..., sample=...)")
    with pytest.raises(solorl.errors.UsageError, match="no stochastic policy"):
        solorl.load(run_dir).sample(np.zeros((1, 2, 3)), action_mask=np.ones((1, 4), bool))


def alone(path, tmp_path, monkeypatch, capsys):
    """The variables of a copy of a script that needs no SoloRL, and what it prints."""
    (tmp_path / "alone.py").write_text(standalone(path, "alone.py"))
    monkeypatch.setattr(sys, "argv", ["alone.py", "--eval-episodes", "3", "--save-to", str(tmp_path / "x.npz")])
    try:
        return runpy.run_path(str(tmp_path / "alone.py"), run_name="__main__"), capsys.readouterr().out
    except SystemExit as end:
        return end.code, capsys.readouterr().err


@pytest.mark.parametrize("path", ["Allowed"], indirect=True)
def test_a_standalone_copy_has_the_same_masks(path, train, tmp_path, monkeypatch, capsys):
    ours = train(path, "--eval-episodes", "3")
    theirs, out = alone(path, tmp_path, monkeypatch, capsys)
    for (obs, mask), (other, same) in zip(ours["seen"], theirs["seen"], strict=True):
        np.testing.assert_array_equal(obs, other)
        np.testing.assert_array_equal(mask, same)
    mean = rows(ours["run"].dir, "eval/episodic_return")[-1]["eval/episodic_return"]
    assert f"evaluation {mean:.1f} ± " in out and len(theirs["seen"]) == 4


@pytest.mark.parametrize("path", ["Parts"], indirect=True)
def test_a_standalone_copy_refuses_spaces_of_several_parts(path, tmp_path, monkeypatch, capsys):
    code, err = alone(path, tmp_path, monkeypatch, capsys)
    assert code == 2 and err.count("\n") == 1
    assert "cannot have observations of the kind dict and actions of tuple" in err
