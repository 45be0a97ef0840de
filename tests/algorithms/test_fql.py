"""FQL: the flow and its steps against loops, losses by hand, and data with two modes, of which one is better."""

import gymnasium as gym
import numpy as np
import pytest
import torch
from conftest import definitions, documented_keys, rows
from recorded import recorded

import solorl

FQL = definitions("fql")
SIZES = (3, 2, [8, 8])


class TwoModes(gym.Env):
    """One step; the reward is 1 for an action on the side of the observation (-1 or 1), 0 on the other side, and -1 in
    the middle, which the data does not know."""

    observation_space = gym.spaces.Box(-1.0, 1.0, (1,), np.float32)
    action_space = gym.spaces.Box(-1.0, 1.0, (1,), np.float32)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.obs = self.np_random.choice([-1.0, 1.0], size=1).astype(np.float32)
        return self.obs, {}

    def step(self, action):
        reward = -1.0 if abs(action[0]) < 0.3 else float(action[0] * self.obs[0] > 0)
        return self.obs, reward, True, False, {}


gym.register("TwoModes-v0", TwoModes, disable_env_checker=True)


def either(obs, rng):
    """An action near 0.6 or -0.6, whatever is seen."""
    mode = rng.choice([-0.6, 0.6], size=(len(obs), 1))
    return (mode + 0.05 * rng.normal(size=mode.shape)).astype(np.float32)


def random_batch(n=16):
    """A Batch of observations of 3 and actions of 2 dimensions, in double precision."""
    generator = torch.Generator().manual_seed(0)
    obs, next_obs = (torch.randn(n, 3, generator=generator, dtype=torch.float64) for _ in range(2))
    action = 2 * torch.rand(n, 2, generator=generator, dtype=torch.float64) - 1
    reward = torch.randn(n, generator=generator, dtype=torch.float64)
    return FQL["Batch"](obs, action, reward, (torch.arange(n) % 2).double(), next_obs)


def networks(*kinds):
    torch.manual_seed(0)
    return [FQL[kind](*SIZES).double() for kind in kinds]


def noise(seed=3):
    return torch.randn(16, 2, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def fixed(output):
    """A network with this output, whatever it sees."""
    return lambda *inputs: output


# ---------------------------------------------------------------------- the flow
def test_the_flow_is_asked_on_the_way_from_noise_to_the_action():
    """Against a loop: what the network sees is that share of the way, what it should say the whole way."""
    batch, start, t, seen = random_batch(), noise(), torch.rand(16, 1).double(), []

    def flow(obs, x, time):
        seen.append((obs, x, time))
        return torch.ones(16, 2).double()

    loss, metrics = FQL["flow_loss"](flow, batch, start, t)
    expected = 0.0
    for i in range(16):
        for k in range(2):
            way = batch.action[i, k] - start[i, k]
            assert seen[0][1][i, k].item() == pytest.approx((start[i, k] + t[i, 0] * way).item())
            expected += (1 - way.item()) ** 2 / 32
    assert loss.item() == metrics["losses/flow_loss"].item() == pytest.approx(expected)
    assert seen[0][0] is batch.obs and seen[0][2] is t


def test_actions_of_the_flow_are_those_of_euler():
    """One row and one step at a time; at last they are clipped."""
    [flow], start, obs = networks("Flow"), 1.5 * noise(), random_batch().obs
    got = FQL["flow_actions"](flow, obs, start, 7)
    assert not got.requires_grad and (got.abs() == 1).any() and (got.abs() < 1).any()
    for i in range(4):
        x = start[i : i + 1]
        for step in range(7):
            x = x + flow(obs[i : i + 1], x, torch.tensor([[step / 7]]).double()).detach() / 7
        torch.testing.assert_close(got[i : i + 1], x.clamp(-1, 1))


def test_a_flow_along_straight_lines_arrives_in_any_number_of_steps():
    goal = torch.tensor([[0.3, -0.8]]).double().expand(16, 2)
    for steps in (1, 3, 10):
        way = goal - noise()
        torch.testing.assert_close(FQL["flow_actions"](fixed(way), None, noise(), steps), goal)


# ---------------------------------------------------------------------- losses
def test_critic_loss_by_hand():
    """The next action is the policy's, clipped; the mean of both target values counts, none where the task was over."""
    critic, target_critic, actor = networks("Critic", "Critic", "Actor")
    torch.nn.init.normal_(actor.net[-1].weight)
    batch = random_batch()
    loss, metrics = FQL["fql_critic_loss"](critic, target_critic, actor, batch, noise(), 0.9)
    next_action = actor(batch.next_obs, noise()).detach()
    assert (next_action.abs() > 1).any()
    first, second = (q.tolist() for q in target_critic(batch.next_obs, next_action.clamp(-1, 1)))
    values = [q.tolist() for q in critic(batch.obs, batch.action)]
    losses = [0.0, 0.0]
    for i in range(16):
        bootstrap = 0.0 if batch.done[i] else 0.9 * (first[i] + second[i]) / 2
        for k in range(2):
            losses[k] += (values[k][i] - batch.reward[i].item() - bootstrap) ** 2 / 16
    assert loss.item() == pytest.approx(sum(losses))
    expected = [*np.mean(values, 1), *losses, np.mean(losses)]
    np.testing.assert_allclose([x.item() for x in metrics.values()], expected)
    loss.backward()
    assert all(p.grad is None for net in (actor, target_critic) for p in net.parameters())
    assert all(p.grad is not None for p in critic.parameters())


@pytest.mark.parametrize("normalize_q", [False, True])
def test_actor_loss_by_hand(normalize_q):
    """The value is that of the clipped action, the distance that of the action as it is; the gradient takes the size of
    the values for a number."""
    action = torch.tensor([[0.5], [-2.0]], requires_grad=True)
    critic = lambda obs, action: (4 * action.squeeze(1), 2 * action.squeeze(1))  # noqa: E731
    args = (fixed(action), critic, None, None, torch.tensor([[0.0], [-1.0]]), 10.0, normalize_q)
    loss, metrics = FQL["fql_actor_loss"](*args)
    distance, value, size = (0.25 + 1.0) / 2, (3 * 0.5 - 3 * 1.0) / 2, (1.5 + 3) / 2 if normalize_q else 1
    assert metrics["losses/distill_loss"].item() == pytest.approx(distance)
    assert loss.item() == metrics["losses/actor_loss"].item() == pytest.approx(10 * distance - value / size)
    loss.backward()  # beyond the bounds the value gives none
    torch.testing.assert_close(action.grad, torch.tensor([[10 * 0.5 - 3 / 2 / size], [-10.0]]))


def test_distillation_moves_the_policy_only():
    """The policy and the flow see the same noise; neither flow nor critics get a gradient."""
    actor, flow, critic = networks("Actor", "Flow", "Critic")
    obs = random_batch().obs
    target = FQL["flow_actions"](flow, obs, noise(), 10)
    FQL["fql_actor_loss"](actor, critic, obs, noise(), target, 10.0, False)[0].backward(inputs=list(actor.parameters()))
    assert all(p.grad.abs().sum() > 0 for p in actor.parameters())
    assert all(p.grad is None for net in (flow, critic) for p in net.parameters())


def test_flow_matching_moves_the_flow_only():
    actor, flow, critic = networks("Actor", "Flow", "Critic")
    FQL["flow_loss"](flow, random_batch(), noise(), torch.rand(16, 1).double())[0].backward()
    assert all(p.grad.abs().sum() > 0 for p in flow.parameters())
    assert all(p.grad is None for net in (actor, critic) for p in net.parameters())


# ---------------------------------------------------------------------- networks
def test_layer_normalisation_is_that_of_the_critics_only():
    actor, flow, critic = networks("Actor", "Flow", "Critic")
    norms = [sum(isinstance(x, torch.nn.LayerNorm) for x in net.modules()) for net in (actor, flow, critic)]
    assert norms == [0, 0, 4]
    kinds = [type(layer).__name__ for layer in critic.q1]
    assert kinds == ["Linear", "GELU", "LayerNorm"] * 2 + ["Linear"]


def test_acting_is_a_step_from_noise_which_is_zero_in_evaluation():
    actor = FQL["Actor"](6, 2, [8])
    torch.nn.init.normal_(actor.net[-1].weight)
    obs = np.random.default_rng(0).normal(size=(50, 2, 3))
    flat = torch.tensor(obs, dtype=torch.float32).flatten(1)
    np.testing.assert_allclose(actor.act(obs), actor(flat, torch.zeros(50, 2)).detach().clamp(-1, 1), atol=1e-6)
    drawn = np.random.default_rng(1).normal(size=(50, 2)).astype(np.float32)
    expected = actor(flat, torch.from_numpy(drawn)).detach().clamp(-1, 1)
    np.testing.assert_allclose(actor.act(obs, drawn), expected, atol=1e-6)
    assert (np.abs(expected.numpy()) == 1).any()


# ---------------------------------------------------------------------- the training
def test_logged_keys_are_those_of_the_page_and_targets_follow(train):
    flags = "--env-id Pendulum-v1 --total-timesteps 5 --batch-size 8 --eval-every 0 --eval-episodes 1 --tau 1".split()
    v = train("fql", *flags, "--dataset", recorded("Pendulum-v1"), "--hidden-dim", 16, "--num-layers", 1)
    logged = {key for row in rows(v["run"].dir) for key in row} - {"global_step", "wall_time"}
    assert logged == documented_keys("fql")
    for who in ("actor", "flow", "critic"):
        assert {int(state["step"]) for state in v[f"{who}_optimizer"].state.values()} == {5}
    for x, y in zip(v["target_critic"].parameters(), v["critic"].parameters(), strict=True):
        assert torch.equal(x, y)


def test_the_policy_is_distilled_from_what_the_flow_makes_of_the_same_noise(train, monkeypatch):
    """In the real script: of the observations of the batch, by the flow as it is then."""
    nets, same, original = {}, [], solorl.Run.gradient_step

    def gradient_step(self, loss_of, module, *others):
        step, name = original(self, loss_of, module, *others), loss_of.__name__
        nets[name] = module

        def noted(*inputs):
            if name == "fql_actor_loss":
                _, obs, noise, flow_action, *_ = inputs
                same.append(torch.equal(flow_action, FQL["flow_actions"](nets["flow_loss"], obs, noise, 4)))
            return step(*inputs)

        return noted

    monkeypatch.setattr("solorl.Run.gradient_step", gradient_step)
    flags = "--env-id Pendulum-v1 --total-timesteps 5 --batch-size 8 --eval-every 0 --eval-episodes 1".split()
    flags += "--hidden-dim 16 --num-layers 1 --flow-steps 4".split()
    train("fql", *flags, "--dataset", recorded("Pendulum-v1"))
    assert same == [True] * 5


def test_the_flow_keeps_both_modes_and_the_policy_takes_the_better_one(train):
    """In the middle between the modes, where the mean of the data lies, is neither of them."""
    data = recorded("TwoModes-v0", 1000, 2, either)
    flags = "--env-id TwoModes-v0 --total-timesteps 500 --batch-size 64 --learning-rate 0.003 --tau 0.05".split()
    flags += "--hidden-dim 64 --num-layers 2 --alpha 0.3 --log-every 500 --eval-every 0 --eval-episodes 20".split()
    v = train("fql", *flags, "--dataset", data)
    assert v["run"].evaluator.score > 0.9
    torch.manual_seed(0)
    obs, noise = torch.ones(1000, 1), torch.randn(1000, 1)
    for seen in (obs, -obs):
        imitated = FQL["flow_actions"](v["flow"], seen, noise, 10) * seen  # the better mode is at 0.6
        near = [((imitated - mode).abs() < 0.2).float().mean().item() for mode in (-0.6, 0.6)]
        assert min(near) > 0.25 and sum(near) > 0.7 and (imitated.abs() < 0.3).float().mean() < 0.2
        chosen = v["actor"].act(seen.numpy(), noise.numpy()) * seen.numpy()
        assert (chosen > 0.3).mean() > 0.95
