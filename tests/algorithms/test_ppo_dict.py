"""ppo_dict.py: an encoder for each entry, rollouts of dicts, and that it learns what only all entries together tell."""

import shutil

import gymnasium as gym
import numpy as np
import pytest
import torch
from conftest import comparable, definitions, rows
from gymnasium.spaces import Box
from gymnasium.vector import SyncVectorEnv
from probes_parts import DICTS

import solorl

DICT = definitions("ppo_dict")
SMALL = "--num-envs 2 --num-steps 16 --total-timesteps 128 --num-minibatches 2 --eval-episodes 1".split()
MIXED = DICTS[
    "Mixed"
]  # entries of an image, a matrix and a vector, two of them with names that modules have as methods


def samples(space, count, seed=0):
    """A batch of random observations."""
    space.seed(seed)
    drawn = [space.sample() for _ in range(count)]
    return {name: np.stack([each[name] for each in drawn]) for name in space}


@pytest.fixture
def agent():
    torch.manual_seed(0)
    agent = DICT["Agent"](MIXED.spaces, 3)
    torch.nn.init.normal_(agent.actor[-1].weight)  # logits of some size
    return agent


# ---------------------------------------------------------------------- the networks
@pytest.mark.parametrize("shape", [(8, 8, 1), (84, 84, 3), (5, 7, 2), (1, 1, 1), (210, 160, 3)])
def test_images_of_any_size_are_encoded(shape):
    encoder = DICT["Images"](*shape)
    image = torch.randint(0, 256, (3, *shape), dtype=torch.uint8)
    features = encoder(image)
    assert features.shape == (3, 64) and features.abs().max() <= 1
    torch.testing.assert_close(features[1:2], encoder(image[1:2]))


def test_a_convolution_slides_over_height_and_width():
    """The first layer by hand: channels are the last axis, bytes are scaled to numbers from 0 to 1."""
    torch.manual_seed(0)
    encoder = DICT["Images"](4, 6, 2)
    image = torch.randint(0, 256, (1, 4, 6, 2), dtype=torch.uint8)
    weight = encoder.network[0].weight.detach().double().numpy()  # (16, 2, 3, 3)
    padded = np.pad(image[0].double().numpy() / 255, ((1, 1), (1, 1), (0, 0)))
    expected = np.zeros((16, 2, 3))
    for row in range(2):
        for column in range(3):
            patch = padded[2 * row : 2 * row + 3, 2 * column : 2 * column + 3]
            expected[:, row, column] = np.einsum("ocij,ijc->o", weight, patch)
    seen = []
    encoder.network[0].register_forward_hook(lambda module, inputs, output: seen.append(output))
    encoder(image)
    np.testing.assert_allclose(seen[0][0].detach(), expected, atol=1e-5)


def test_features_are_those_of_each_entry_side_by_side(agent):
    """Changing one entry changes its 64 features only; both networks see all of them."""
    obs = {name: torch.as_tensor(x) for name, x in samples(MIXED, 5).items()}
    seen = []
    for net in (agent.actor, agent.critic):
        net.register_forward_hook(lambda module, inputs, output: seen.append(inputs[0]))
    agent(obs)
    other = {name: torch.as_tensor(x) for name, x in samples(MIXED, 5, seed=1).items()}
    for i, name in enumerate(MIXED):
        agent(obs | {name: other[name]})
        for before, after in zip(seen[:2], seen[-2:], strict=True):
            changed = (before != after).any(0).nonzero()[:, 0]
            assert before.shape == (5, 192) and set(changed.tolist()) <= set(range(64 * i, 64 * i + 64))
            assert len(changed) > 40


def test_the_order_of_the_entries_of_a_batch_changes_nothing(agent):
    obs = samples(MIXED, 5)
    again = dict(reversed(obs.items()))
    for one, other in zip(agent.step(obs), agent.step(again), strict=True):
        np.testing.assert_array_equal(one, other)


def test_act_gives_the_most_likely_actions_of_a_dict_of_arrays(agent):
    obs = samples(MIXED, 40)
    actions = agent.act(obs)
    with torch.no_grad():
        logits, value = agent({name: torch.as_tensor(x) for name, x in obs.items()})
    assert actions.tolist() == logits.argmax(1).tolist() and len(set(actions.tolist())) > 1
    np.testing.assert_allclose(agent.step(obs)[1], value, rtol=1e-5, atol=1e-6)


def test_evaluate_is_the_distribution_of_torch(agent):
    obs, action = {name: torch.as_tensor(x) for name, x in samples(MIXED, 30).items()}, torch.randint(0, 3, (30,))
    logprob, entropy, value = agent.evaluate_actions(obs, action)
    logits, same = agent(obs)
    expected = torch.distributions.Categorical(logits=logits)
    torch.testing.assert_close(logprob, expected.log_prob(action))
    torch.testing.assert_close(entropy, expected.entropy())
    assert torch.equal(value, same) and value.shape == (30,)


def test_layers_are_orthogonal_with_their_gains():
    agent = DICT["Agent"](MIXED.spaces, 4)
    for name, parameter in agent.named_parameters():
        if parameter.ndim == 1:
            assert (parameter == 0).all(), name
            continue
        gain = {"actor.2.weight": 0.01, "critic.2.weight": 1.0}.get(name, 2**0.5)
        w = parameter.detach().double().flatten(1)
        gram = w @ w.T if w.shape[0] <= w.shape[1] else w.T @ w
        torch.testing.assert_close(gram, gain**2 * torch.eye(len(gram), dtype=w.dtype), atol=1e-4, rtol=1e-4)


def test_bytes_stay_bytes_and_all_other_numbers_become_float32():
    for dtype, wanted in ((np.uint8, np.uint8), (np.float64, np.float32), (np.int64, np.float32)):
        assert DICT["compact"](np.ones(3, dtype)).dtype == wanted
    assert [DICT["is_image"](MIXED[name]) for name in ("items", "keys", "z")] == [True, False, False]
    assert not DICT["is_image"](Box(0, 255, (84, 84), np.uint8))


# ---------------------------------------------------------------------- the rollout
def test_a_rollout_holds_what_the_environments_gave(train, monkeypatch):
    """All entries of all steps in their place, images as bytes; a time limit holds the value of the final one."""
    seen, step = [], SyncVectorEnv.step

    def note(self, action):
        result = step(self, action)
        if len(action) == 2:  # not those of evaluation
            seen.append(result)
        return result

    monkeypatch.setattr(SyncVectorEnv, "step", note)
    v = train("ppo_dict", "--env-id", "probes_parts:ShortTwoSenses-v0", "--learning-rate", "0", *SMALL)
    last = seen[-17:]
    for name, dtype in (("image", np.uint8), ("vector", np.float32)):
        assert v["obs"][name].dtype == dtype
        np.testing.assert_array_equal(v["obs"][name], np.stack([each[0][name] for each in last[:16]]))
        flat = v["obs"][name].reshape(32, *v["obs"][name].shape[2:])
        np.testing.assert_array_equal(v["rollout"].obs[name], flat)
    ends = np.argwhere(v["done"])
    assert len(ends) > 4
    for t, n in ends:
        final_obs = {name: np.asarray(x)[None] for name, x in last[t + 1][4]["final_obs"][n].items()}
        assert any((final_obs[name][0] != last[t + 1][0][name][n]).any() for name in final_obs)
        assert v["final_value"][t, n] == pytest.approx(v["agent"].step(final_obs)[1][0], abs=1e-5)
    assert (v["final_value"][v["done"] == 0] == 0).all() and (v["final_value"][v["done"] == 1] != 0).all()


def test_minibatches_hold_equal_rows_of_all_entries(train, batches):
    """Each epoch has every row of the rollout once, its entries together."""
    rollout = train("ppo_dict", *SMALL, "--update-epochs", "2")["rollout"]
    flat = lambda b: torch.cat([x.reshape(len(x), -1).double() for x in (*b.obs.values(), *b[1:])], 1)  # noqa: E731
    assert len(batches) == 4 * 2 * 2 and all(len(batch.action) == 16 for batch in batches)
    for i in (12, 14):
        assert sorted(torch.cat([flat(batch) for batch in batches[i : i + 2]]).tolist()) == sorted(
            flat(rollout).tolist()
        )


def test_first_ratio_is_one(train):
    v = train("ppo_dict", *SMALL, "--num-minibatches", "1", "--update-epochs", "1", "--learning-rate", "0.01")
    assert len(v["kl"]) == 1 and all(abs(v["metrics"][f"losses/{name}"]) < 1e-6 for name in ("approx_kl", "clipfrac"))


@pytest.mark.parametrize(("name", "entry", "space"), [
    ("Nested", "inner", "Dict('x': "), ("Number", "number", "Discrete(3)"), ("Point", "point", "Box(-1.0, 1.0, (), "),
])  # fmt: skip
def test_other_entries_are_refused_in_one_sentence(name, entry, space, train):
    env_id = f"probes_parts:{name}-v0"
    train("ppo_dict", "--env-id", env_id, "--total-timesteps", 1, code=2)
    assert train.out.startswith(f"error: {env_id}: {entry} must be a Box with one axis or more, but is {space}")
    assert train.out.count("\n") == 1


def test_observations_without_entries_are_refused_with_the_file_to_use(train):
    train("ppo_dict", "--env-id", "CartPole-v1", code=2)
    assert (
        train.out == "error: CartPole-v1 has vector observations, but ppo_dict.py takes dict observations; use ppo.py\n"
    )


# ---------------------------------------------------------------------- whole trainings
def test_entries_may_have_any_name_and_type(train):
    v = train("ppo_dict", "--env-id", "probes_parts:Mixed-v0", *SMALL, "--total-timesteps", 64)
    kinds = {
        "items": (np.uint8, (16, 2, 84, 84, 3)),
        "keys": (np.float32, (16, 2, 2, 3)),
        "z": (np.float32, (16, 2, 2)),
    }
    assert {name: (x.dtype, x.shape) for name, x in v["obs"].items()} == kinds


def test_same_seed_same_weights_and_another_seed_others(train):
    a, b, c = (train("ppo_dict", *SMALL, "--seed", seed)["agent"].state_dict() for seed in (1, 1, 2))
    assert all(torch.equal(a[name], b[name]) for name in a)
    assert not any(torch.equal(a[name], c[name]) for name in a if name.endswith("weight"))


def test_resumed_equals_uninterrupted(train, tmp_path):
    """Stopped in the middle of an episode: bit for bit the same in the end, and the same rows."""
    flags = [*SMALL, "--num-steps", 12, "--total-timesteps", 192]
    whole = train("ppo_dict", *flags, runs_dir=tmp_path / "whole")
    run_dir = train("ppo_dict", *flags, "--save-every", "96", runs_dir=tmp_path / "cut")["run"].dir
    parts = sorted((run_dir / "checkpoint").iterdir())
    assert len(parts) >= 2
    shutil.rmtree(parts[-1])  # the one of the end: what is resumed is the one before
    again = train("ppo_dict", "--resume", run_dir)
    assert again["start"] > 0 and again["run"].restarted == []
    for key, value in whole["agent"].state_dict().items():
        assert torch.equal(value, again["agent"].state_dict()[key]), key
    losses = [[row for row in comparable(each["run"].dir) if "losses/entropy" in row] for each in (whole, again)]
    assert losses[0][-1] == losses[1][-1]


def test_a_trained_policy_is_loaded_and_played(train, solo):
    run_dir = train("ppo_dict", *SMALL)["run"].dir
    env = gym.make("games/TwoSenses-v0")
    assert solorl.load(run_dir)(samples(env.observation_space, 3)).shape == (3,)
    assert "over 2 greedy episodes" in solo("play", run_dir, "--episodes", "2")[1]


def score(run_dir):
    """The mean return of the final evaluation."""
    return rows(run_dir, "eval/episodic_return")[-1]["eval/episodic_return"]


@pytest.mark.slow
def test_learns_what_only_both_entries_tell(train):
    """With the default flags; the same policy with one entry hidden plays by chance, which is 0.5."""
    v = train("ppo_dict", "--log-every", 10_000, "--eval-every", 0, "--eval-episodes", 50)
    assert score(v["run"].dir) >= 0.95
    for hidden in ("image", "vector"):
        env, total = gym.make("games/TwoSenses-v0", hide=hidden), 0.0
        for seed in range(50):
            (obs, _), over = env.reset(seed=seed), False
            while not over:
                action = v["agent"].act({name: x[None] for name, x in obs.items()})[0]
                obs, reward, _, over, _ = env.step(action)
                total += reward
        assert total / 50 < 0.5 + 4 * 0.5 / 500**0.5, hidden


@pytest.mark.slow
@pytest.mark.parametrize("env_id", ["Blind", "Deaf"])
def test_without_one_entry_nothing_can_be_learned(env_id, train):
    """Chance is 0.5: 500 steps of an evaluation are within 4 standard errors of it."""
    v = train("ppo_dict", "--env-id", f"probes_parts:{env_id}-v0", "--total-timesteps", 20_000, "--log-every", 10_000,
              "--eval-every", 0, "--eval-episodes", 50)  # fmt: skip
    assert score(v["run"].dir) == pytest.approx(0.5, abs=4 * 0.5 / 500**0.5)
