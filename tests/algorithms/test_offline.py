"""The offline family: what is learned from of a data set, formulas by hand, learning from little data sets."""

import dataclasses
import json
import shutil
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from conftest import comparable, definitions, drop_last_checkpoint, rows
from recorded import recorded
from safetensors.numpy import load_file

import solorl
from solorl.data.dataset import digest, read, read_about

SHORT = "--total-timesteps 30 --batch-size 8 --eval-every 0 --eval-episodes 1".split()
NAMES = ["bc", "td3_bc", "rebrac", "awac", "edac", "fql"]
BC, TD3_BC, REBRAC, AWAC, EDAC = map(definitions, ("bc", "td3_bc", "rebrac", "awac", "edac"))


def half_random(obs, rng):
    """CartPole: to the side to which the pole falls, half of the actions at random."""
    good = obs[:, 2] + 0.5 * obs[:, 3] + 0.1 * obs[:, 1] > 0
    return np.where(rng.random(len(obs)) < 0.5, rng.integers(2, size=len(obs)), good)


def swing(obs, rng):
    """Pendulum: a torque with the turn."""
    return np.tanh(obs[:, 2:] * 0.5 + obs[:, 1:2]).astype(np.float32)


def flags(env_id="Pendulum-v1", **options):
    return ["--env-id", env_id, "--dataset", recorded(env_id, **options)]


def fixed(output):
    """A policy or critic with this output, whatever it sees."""
    return lambda *inputs: output


# ---------------------------------------------------------------------- data
@pytest.mark.parametrize("name", NAMES)
def test_the_batches_are_transitions_of_the_data(name, train):
    """Obs, action, reward, terminated and next_obs are of the same row."""
    seen, data = train(name, *flags(), *SHORT)["data"].sample(8, "cpu"), read(recorded("Pendulum-v1"))
    for i in range(8):
        [row] = np.flatnonzero((data.obs == seen.obs[i].numpy()).all(1))
        assert np.array_equal(seen.action[i], data.action[row])
        assert seen.reward[i] == data.reward[row] and seen.done[i] == data.terminated[row]
        assert np.array_equal(seen.next_obs[i], data.next_obs[row])


def test_only_the_end_of_the_task_is_done():
    """In CartPole an episode ends; the end of the recording and a time limit are no end."""
    for env_id in ("CartPole-v1", "Pendulum-v1"):
        data = read(recorded(env_id))
        batch = BC["transitions"](data, data.obs.shape[1])
        assert np.array_equal(batch.done, data.terminated) and data.truncated.any()
        assert batch.done.any() == (env_id == "CartPole-v1")


def test_samples_are_uniform():
    arrays = BC["Batch"](*[np.arange(5, dtype=np.float32)] * 5)
    drawn = BC["Data"](arrays).sample(50_000, "cpu")
    counts = torch.bincount(drawn.reward.long(), minlength=5)
    assert (counts - 10_000).abs().max() < 500 and torch.equal(drawn.obs, drawn.next_obs)


@pytest.mark.parametrize("top", [0.0, 0.1, 0.3, 0.5, 1.0])
def test_the_best_episodes(top):
    """Against a loop over episodes of random lengths and returns; those that were cut come last."""
    rng = np.random.default_rng(3)
    episode = np.repeat(np.arange(10), rng.integers(1, 6, 10))
    reward = rng.normal(size=len(episode)).astype(np.float32)
    returns = [reward[episode == i].sum() for i in range(10)]
    cut = np.arange(10) % 4 == 1
    data = SimpleNamespace(episode=episode, cut=cut, returns=lambda: np.array(returns))
    best = sorted(range(10), key=lambda i: (cut[i], -returns[i]))[: max(1, round(top * 10))]
    assert top != 0.3 or cut[np.argsort(returns)[-3:]].any()  # one of the highest returns is of an episode that was cut
    assert BC["best_episodes"](data, top).tolist() == [i in best for i in episode]


def test_observations_are_standardised():
    obs = np.random.default_rng(0).normal(3, [1, 10], (1000, 2)).astype(np.float32)
    scaled = BC["Standardize"](obs)(torch.from_numpy(obs))
    expected = (obs - obs.mean(0)) / (obs.std(0) + 1e-3)
    np.testing.assert_allclose(scaled, expected, atol=1e-4)
    empty = BC["Standardize"](obs[:0])(torch.ones(1, 2))
    np.testing.assert_allclose(empty, np.ones((1, 2)) / 1.001)


# ---------------------------------------------------------------------- the run
@pytest.mark.parametrize("name", NAMES)
def test_a_resumed_run_ends_where_a_whole_one_does(name, train, tmp_path):
    words = [*flags(), *SHORT, "--save-every", 10]
    whole = train(name, *words)["run"].dir
    cut = shutil.copytree(whole, tmp_path / "cut")
    drop_last_checkpoint(cut)
    last = train(name, "--resume", cut)["run"].dir
    assert comparable(last) == comparable(whole)
    ours, theirs = (load_file(folder / "model_last.safetensors") for folder in (last, whole))
    assert ours.keys() == theirs.keys() and all(np.array_equal(ours[key], theirs[key]) for key in ours)


@pytest.mark.parametrize("name", NAMES)
def test_the_policy_plays_without_the_data(name, train, tmp_path):
    """With the mean and the standard deviation of the data, which are in the model; Gaussian ones can be sampled."""
    folder = shutil.copytree(recorded("Pendulum-v1"), tmp_path / "data")
    v = train(name, "--env-id", "Pendulum-v1", "--dataset", folder, *SHORT)
    shutil.rmtree(folder)
    policy, obs = solorl.load(v["run"].dir, device="cpu"), np.random.default_rng(1).normal(size=(5, 3))
    np.testing.assert_allclose(policy(obs.astype(np.float32)), v["actor"].act(obs.astype(np.float32)), atol=1e-6)
    if name in ("awac", "edac", "fql"):
        draw = policy.required_sampler()
        assert not np.array_equal(draw(obs.astype(np.float32)), draw(obs.astype(np.float32)))


@pytest.mark.parametrize("name", NAMES)
def test_steps_are_gradient_steps(name, train):
    v = train(name, *flags(), *SHORT)
    assert rows(v["run"].dir)[-1]["global_step"] == 30
    optimizer = v["optimizer" if name == "bc" else "critic_optimizer"]
    assert {int(each["step"]) for each in optimizer.state.values()} == {30}


@pytest.mark.parametrize("name", NAMES)
def test_a_wrong_data_set_is_refused_in_one_sentence(name, train, tmp_path):
    train(name, "--env-id", "Pendulum-v1", *SHORT, code=2)
    assert "error: --dataset must name a data set" in train.out
    train(name, "--env-id", "Pendulum-v1", "--dataset", recorded("CartPole-v1"), *SHORT, code=2)
    assert "is of CartPole-v1" in train.out and train.out.count("\n") == 1


def test_a_resumed_run_refuses_other_data_in_the_same_folder(train, tmp_path):
    """Unless it is told to take them; then they are the run's. Runs of older versions do not know what they had."""
    place, first, second = tmp_path / "data", recorded("CartPole-v1"), recorded("CartPole-v1", steps=40)
    digests = [[digest(read_about(folder))] for folder in (first, second)]
    shutil.copytree(first, place)
    run_dir = train("bc", "--env-id", "CartPole-v1", "--dataset", place, *SHORT)["run"].dir
    about = run_dir / "config.json"
    config = json.loads(about.read_text())
    assert config["dataset_sha256"] == digests[0]
    train("bc", "--resume", run_dir)
    assert json.loads(about.read_text()) == config
    shutil.rmtree(place)
    shutil.copytree(second, place)
    train("bc", "--resume", run_dir, code=2)
    assert f"{place} has changed" in train.out and train.out.count("\n") == 1
    assert json.loads(about.read_text()) == config
    train("bc", "--resume", run_dir, "--resume-changed")
    now = json.loads(about.read_text())
    assert now == config | {"dataset_sha256": digests[1], "changes": now["changes"]}
    assert now["changes"] == [{"step": 30, "args": {}, "dataset_sha256": digests}]
    train("bc", "--resume", run_dir)
    about.write_text(json.dumps({name: value for name, value in now.items() if name != "dataset_sha256"}))
    train("bc", "--resume", run_dir)
    both = train("bc", "--env-id", "CartPole-v1", "--dataset", f"{first},{second}", *SHORT)
    assert json.loads((both["run"].dir / about.name).read_text())["dataset_sha256"] == [*digests[0], *digests[1]]


# ---------------------------------------------------------------------- behaviour cloning
def test_bc_loss_by_hand():
    rng = torch.Generator().manual_seed(1)
    logits, action = torch.randn(4, 3, generator=rng), torch.tensor([0, 2, 1, 1])

    def loss(output, action, discrete):
        actor = fixed(output)
        actor.discrete = discrete
        return BC["bc_loss"](actor, BC["Batch"](torch.zeros(4, 2), action, *[None] * 3))[0]

    expected = -sum(F.softmax(logits[i], 0)[a].log() for i, a in enumerate(action)) / 4
    torch.testing.assert_close(loss(logits, action, True), expected)
    wanted = torch.randn(4, 3, generator=rng)
    torch.testing.assert_close(loss(logits, wanted, False), ((logits - wanted) ** 2).sum() / 12)


# ---------------------------------------------------------------------- TD3+BC
def test_td3_bc_actor_loss_by_hand():
    """Eq. 3 and 5 with two transitions of one action; the gradient leaves the weight of the values alone."""
    action = torch.tensor([[0.5], [-0.25]], requires_grad=True)
    batch = TD3_BC["Batch"](torch.zeros(2, 1), torch.tensor([[0.0], [0.5]]), *[None] * 3)
    critic = SimpleNamespace(first=lambda obs, action: 4 * action.squeeze(1))  # values 2 and -1
    loss, metrics = TD3_BC["td3_bc_actor_loss"](fixed(action), critic, batch, 3.0)
    assert metrics["losses/bc_loss"].item() == pytest.approx((0.25 + 0.5625) / 2)
    assert loss.item() == pytest.approx(0.40625 - 2 * 0.5)
    loss.backward()  # of the error: the difference of each; of the values: 2 * 4 / 2
    torch.testing.assert_close(action.grad, torch.tensor([[0.5 - 4.0], [-0.75 - 4.0]]))


# ---------------------------------------------------------------------- ReBRAC
def test_the_next_action_is_that_of_the_next_row_of_the_same_episode():
    """Against a loop over episodes: the last transition of each, ended, cut or recorded last, has none."""
    data = read(recorded("Pendulum-v1"))
    data = dataclasses.replace(data, terminated=np.arange(400) % 60 == 59)
    batch = REBRAC["transitions_in_turn"](data, 3)
    for i in range(400):
        last = data.terminated[i] or data.truncated[i]
        assert batch.known[i] == (not last)
        assert np.array_equal(batch.next_action[i], data.action[i if last else i + 1])
    assert not batch.known[[59, 199, 399]].any()
    empty = dataclasses.replace(data, **{key: value[:0] for key, value in vars(data).items()})
    assert REBRAC["transitions_in_turn"](empty, 3).next_action.shape == (0, 1)


def test_rebrac_losses_by_hand():
    """Three transitions of two dimensions: the second is the end of the task, the third has no next action."""
    zeros, half = torch.zeros(3, 2), torch.full((3, 2), 0.5)
    reward, done, known = torch.tensor([1.0, 2.0, 3.0]), torch.tensor([0.0, 1.0, 0.0]), torch.tensor([1.0, 0.0, 0.0])
    batch = REBRAC["Batch"](zeros, half, reward, done, zeros, -half, known)
    target, q = (torch.full((3,), 4.0), torch.full((3,), 5.0)), (torch.zeros(3), torch.zeros(3))
    args = (fixed(q), fixed(target), fixed(half), batch, torch.tensor(0.2).expand(3, 2), 0.1, 0.9, 0.5)
    loss, metrics = REBRAC["rebrac_critic_loss"](*args)  # the target action is 0.6, its squared distance 2 * 1.1^2
    y = [1 + 0.9 * (4 - 0.5 * 2.42), 2, 3 + 0.9 * 4]
    assert loss.item() == pytest.approx(2 * sum(each**2 for each in y) / 3)
    assert metrics["losses/next_bc_loss"].item() == pytest.approx(2.42 / 3)

    q = (torch.tensor([1.0, -2.0, 3.0]), torch.tensor([4.0, -6.0, 2.0]))  # the smaller: 1, -6, 2
    loss, metrics = REBRAC["rebrac_actor_loss"](fixed(zeros), fixed(q), batch, 0.3)
    assert metrics["losses/bc_loss"].item() == pytest.approx(0.5)
    assert loss.item() == pytest.approx(0.3 * 0.5 + 1 / 3)


# ---------------------------------------------------------------------- AWAC
def test_awac_losses_by_hand():
    """Weights exp(advantage / temperature), the first of them clipped; the end of the task has no next value."""
    obs, action = torch.zeros(2, 3), torch.tensor([[0.1, 0.2], [0.3, 0.4]])
    batch = AWAC["Batch"](obs, action, torch.tensor([1.0, 2.0]), torch.tensor([0.0, 1.0]), obs)
    q = (torch.zeros(2), torch.zeros(2))
    target = (torch.full((2,), 3.0), torch.full((2,), 4.0))
    loss, _ = AWAC["awac_critic_loss"](fixed(q), fixed(target), fixed(action), batch, None, 0.9)
    assert loss.item() == pytest.approx(2 * ((1 + 0.9 * 3) ** 2 + 2**2) / 2)

    def critic(obs, asked):  # the policy's action is 0; the smaller values of the data are 4 and -0.5 more
        return (
            (5 + torch.tensor([4.0, -0.5]), torch.full((2,), 99.0)) if asked is action else (torch.full((2,), 5.0),) * 2
        )

    actor = AWAC["Actor"](AWAC["Standardize"](np.zeros((1, 3), np.float32)), 2)
    logprob = torch.distributions.Normal(actor.net(obs).tanh(), 1.0).log_prob(action).sum(1)
    loss, metrics = AWAC["awac_actor_loss"](actor, critic, batch, torch.zeros(2, 2), 0.5, 10.0)
    assert loss.item() == pytest.approx(-(10 * logprob[0].item() + np.exp(-1) * logprob[1].item()) / 2, rel=1e-5)
    assert metrics["losses/weight"].item() == pytest.approx((10 + np.exp(-1)) / 2)


def test_the_deviation_of_awac_stays_within_bounds():
    """Data of a deterministic policy makes it ever smaller, and the log-probabilities ever larger."""
    actor = AWAC["Actor"](AWAC["Standardize"](np.zeros((1, 3), np.float32)), 2)
    actor.log_std.data = torch.tensor([-9.0, 9.0])
    _, std = actor.mean_and_std(torch.zeros(1, 3))
    torch.testing.assert_close(std, torch.tensor([-5.0, 2.0]).exp())
    assert torch.isfinite(actor.logprob(torch.zeros(1, 3), torch.ones(1, 2))).all()


def test_awac_refuses_a_temperature_of_zero(train):
    train("awac", *flags(), *SHORT, "--temperature", 0, code=2)
    assert train.out == "error: --temperature must be more than 0\n"


# ---------------------------------------------------------------------- EDAC
def test_edac_gradients_by_the_action_are_those_of_autograd():
    torch.manual_seed(1)
    critic, obs, action = EDAC["Critic"](3, 2, 4), torch.randn(5, 3), torch.randn(5, 2)
    values, slope = critic.value_and_slope(obs, action)
    torch.testing.assert_close(values, critic(obs, action))
    for i in range(4):
        asked = action.clone().requires_grad_()
        [wanted] = torch.autograd.grad(critic(obs, asked)[i].sum(), asked)
        torch.testing.assert_close(slope[i], wanted)


def test_edac_similarity_is_that_of_pairs():
    """A loop over pairs of different critics; 1 for two that are alike, times the number of critics."""
    slope = torch.randn(4, 6, 3, generator=torch.Generator().manual_seed(1))
    pairs = [(i, j) for i in range(4) for j in range(4) if i != j]
    wanted = sum(F.cosine_similarity(slope[i], slope[j], dim=1).mean() for i, j in pairs) / 3
    torch.testing.assert_close(EDAC["similarity"](slope), wanted)
    assert EDAC["similarity"](slope[:1].expand(4, 6, 3)).item() == pytest.approx(4)


def test_edac_losses_by_hand():
    """The smallest of three critics counts, for the target and the actor."""
    q, slope = torch.tensor([[1.0, 5.0], [2.0, 4.0], [3.0, 6.0]]), torch.ones(3, 2, 1)
    critic = SimpleNamespace(value_and_slope=lambda obs, action: (torch.zeros(3, 2), slope))
    actor = fixed((torch.zeros(2, 1), torch.tensor([-1.0, 2.0])))
    batch = EDAC["Batch"](torch.zeros(2, 1), torch.zeros(2, 1), torch.ones(2), torch.zeros(2), torch.zeros(2, 1))
    loss, metrics = EDAC["edac_critic_loss"](critic, fixed(q), actor, 0.5, batch, None, 0.9, 0.1)
    y = [1 + 0.9 * (1 + 0.5), 1 + 0.9 * (4 - 1.0)]
    assert metrics["losses/qf_loss"].item() == pytest.approx(3 * (y[0] ** 2 + y[1] ** 2) / 2)
    assert (loss - metrics["losses/qf_loss"]).item() == pytest.approx(0.1 * 3, rel=1e-4)
    loss, _, entropy = EDAC["edac_actor_loss"](actor, fixed(q), 0.5, batch, None)
    assert loss.item() == pytest.approx(((-0.5 - 1) + (1.0 - 4)) / 2) and entropy.item() == -0.5


# ---------------------------------------------------------------------- behaviour cloning, the training
def test_bc_learns_from_the_best_episodes_only(train, batches):
    train("bc", *flags("CartPole-v1"), *SHORT, "--top", 0.1)
    data = read(recorded("CartPole-v1"))
    best = data.obs[data.episode == np.where(data.cut, -np.inf, data.returns()).argmax()]
    assert round(0.1 * len(data.returns())) == 1
    assert all((best == row.numpy()).all(1).any() for batch in batches for row in batch.obs)


@pytest.mark.parametrize("name", ["bc", "iql_discrete"])
def test_the_pole_is_balanced_better_than_in_the_data(name, train):
    """The data is as good as that of a half-trained DQN, 183 steps an episode, but of a controller with random actions
    in half of the steps: that is made in a moment."""
    folder = recorded("CartPole-v1", 4000, 8, half_random)
    assert read(folder).whole_returns().mean() < 200
    words = "--env-id CartPole-v1 --total-timesteps 200 --batch-size 64 --learning-rate 0.003 --log-every 200".split()
    run = train(name, "--dataset", folder, *words, "--eval-every", 0, "--eval-episodes", 3)["run"]
    assert rows(run.dir, "eval/episodic_return")[-1]["eval/episodic_return"] > 400


@pytest.mark.slow
def test_bc_imitates_continuous_actions(train):
    """A linear policy on Pendulum, which it then takes to within 0.05."""
    words = [*flags(policy=swing), "--total-timesteps", 600]
    v = train("bc", *words, "--learning-rate", 1e-3, "--eval-every", 0, "--eval-episodes", 1)
    obs = read(recorded("Pendulum-v1", policy=swing)).obs
    assert np.abs(v["actor"].act(obs) - swing(obs, None)).mean() < 0.05
