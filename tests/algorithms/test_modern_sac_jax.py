"""CrossQ and TQC in JAX: losses and whole updates against the torch twin, running statistics, learning."""

from functools import cache, partial
from itertools import pairwise

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import torch
from conftest import definitions, rows
from safetensors.numpy import load_file
from test_actor_critic_jax import descend

from solorl.envs.open import open_envs

CROSSQ, T_CROSSQ = definitions("crossq_jax"), definitions("crossq")
TQC, T_TQC = definitions("tqc_jax"), definitions("tqc")


def close(mine, want, rtol=1e-5, atol=1e-5):
    """Two pytrees of the same structure; torch's tensors among them."""
    want = jax.tree.map(lambda x: x.detach().numpy() if torch.is_tensor(x) else x, want)
    assert jax.tree.structure(mine) == jax.tree.structure(want)
    for x, y in zip(jax.tree.leaves(mine), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(x, y, rtol=rtol, atol=atol)


def random_batch(here, there, n=16):
    """Transitions and standard normal noise (3, n, 2), for JAX and for torch."""
    rng = np.random.default_rng(0)
    obs, next_obs = rng.normal(size=(2, n, 3))
    columns = obs, rng.uniform(-1, 1, (n, 2)), rng.normal(size=n), rng.random(n) < 0.3, next_obs
    columns, noise = [np.asarray(x, np.float32) for x in columns], rng.normal(size=(3, n, 2)).astype(np.float32)
    return here["Batch"](*columns), noise, there["Batch"](*map(torch.from_numpy, columns)), torch.from_numpy(noise)


# ---------------------------------------------------------------------- CrossQ
def layer_of(norm, of=lambda x: x):
    """What gradient steps change in a BatchRenorm of torch; `of` takes an array from each parameter."""
    return {"norm_weight": of(norm.weight).clone(), "norm_bias": of(norm.bias).clone()}


def running_of(norm):
    return CROSSQ["RunningStats"](norm.mean.clone(), norm.var.clone(), norm.batches.int())


def layers_of(net, of=lambda x: x):
    """The layers of a NormalizedMLP of torch as JAX has them."""
    return [
        layer_of(norm, of) | {"weight": of(layer.weight).T.clone(), "bias": of(layer.bias).clone()}
        for norm, layer in zip(net.norms, net.layers, strict=True)
    ]


def as_net(module, of=lambda x: x):
    """An actor or a pair of critics of torch as a Net."""
    nets = [module.net] if hasattr(module, "net") else [module.q1, module.q2]
    layers, running = [layers_of(net, of) for net in nets], [[running_of(norm) for norm in net.norms] for net in nets]
    pair = [dict(zip(("q1", "q2"), x, strict=True)) if len(nets) == 2 else x[0] for x in (layers, running)]
    return CROSSQ["Net"](*pair)


def arrays(tree):
    return jax.tree.map(lambda x: jnp.asarray(x.detach().numpy()), tree)


def torch_nets(warm):
    """Actor and critic of torch with random normalisation, whose statistics have seen many or few batches."""
    torch.manual_seed(0)
    modules = T_CROSSQ["Actor"](3, 2), T_CROSSQ["Critic"](3, 2, 8)
    for norm in (x for module in modules for x in module.modules() if isinstance(x, T_CROSSQ["BatchRenorm"])):
        norm.weight.data.uniform_(0.5, 2)
        norm.bias.data.normal_()
        norm.mean.normal_()
        norm.var.uniform_(0.02, 9)  # so that some corrections are clipped
        norm.batches.fill_(100_000 if warm else 99_999)
    return modules


@pytest.mark.parametrize(("train", "warm"), [(True, False), (True, True), (False, True)])
def test_batch_renormalisation_is_that_of_the_torch_twin(train, warm):
    """Results, their gradient and the next running statistics."""
    norm = torch_nets(warm)[1].q1.norms[1]
    layer, running = arrays(layer_of(norm)), arrays(running_of(norm))
    x = np.random.default_rng(0).normal(2, 1.5, size=(32, 8)).astype(np.float32)
    there = torch.tensor(x, requires_grad=True)

    def weighted(x):
        out, after = CROSSQ["batch_renorm"](layer, running, x, train)
        return (out**3).sum(), (out, after)

    gradient, (out, after) = jax.grad(weighted, has_aux=True)(x)
    want = norm(there, train)
    (want**3).sum().backward()
    close(out, want)
    close(gradient / 100, there.grad / 100, atol=1e-4)
    close(after, running_of(norm))
    assert int(after.batches) == int(running.batches) + train


@cache
def gradient_of(name, **fixed):
    """A loss in JAX with its gradient, compiled once for all tests."""
    loss = (CROSSQ if "crossq" in name else TQC)[name]
    return jax.jit(jax.value_and_grad(partial(loss, **fixed), has_aux=True))


@pytest.mark.parametrize("warm", [False, True])
def test_losses_of_crossq_are_those_of_the_torch_twin(warm):
    """With their gradients and the next running statistics of the network that learns."""
    t_actor, t_critic = torch_nets(warm)
    actor, critic = arrays(as_net(t_actor)), arrays(as_net(t_critic))
    batch, noise, t_batch, t_noise = random_batch(CROSSQ, T_CROSSQ)

    want, want_metrics, want_entropy = T_CROSSQ["crossq_actor_loss"](t_actor, t_critic, 0.3, t_batch, t_noise[1])
    want.backward()
    loss = gradient_of("crossq_actor_loss")
    (value, (metrics, entropy, running)), gradients = loss(actor.layers, actor.running, critic, 0.3, batch, noise[1])
    close((value, metrics, entropy), (want, want_metrics, want_entropy))
    close(running, as_net(t_actor).running)
    close(gradients, as_net(t_actor, lambda x: x.grad).layers, rtol=1e-3, atol=2e-5)
    close(critic.running, as_net(t_critic).running)  # they rest while the actor learns

    want, want_metrics = T_CROSSQ["crossq_critic_loss"](t_critic, t_actor, 0.3, t_batch, t_noise[0], 0.9)
    t_critic.zero_grad()
    want.backward()
    loss = gradient_of("crossq_critic_loss")
    inputs = critic.layers, critic.running, actor._replace(running=running), 0.3, batch, noise[0], 0.9
    (value, (metrics, after)), gradients = loss(*inputs)
    close((value, metrics), (want, want_metrics))
    close(after, as_net(t_critic).running)
    close(gradients, as_net(t_critic, lambda x: x.grad).layers, rtol=1e-3, atol=2e-5)
    close(running, as_net(t_actor).running)


def test_crossq_acts_by_its_running_statistics():
    """As the torch twin: an observation alone gets the action that it gets among others."""
    t_actor, _ = torch_nets(True)
    obs, noise = np.random.default_rng(0).normal(size=(2, 9, 3)).astype(np.float32)
    for z in (0.0, noise[:, :2]):
        close(CROSSQ["act"](arrays(as_net(t_actor)), obs, z), t_actor.act(obs, z))
    alone = [CROSSQ["act"](arrays(as_net(t_actor)), row[None])[0] for row in obs]
    close(np.stack(alone), t_actor.act(obs))


def kinds(tree):
    return jax.tree.map(lambda x: (tuple(x.shape), str(x.dtype).removeprefix("torch.")), tree)


@pytest.mark.slow
def test_nets_of_crossq_begin_as_in_the_torch_twin():
    """Shapes, statistics that have seen nothing, weights within the bounds of torch, other ones in each net."""
    init = jax.jit(partial(CROSSQ["init_params"], obs_dim=3, action_dim=2, width=16))
    nets = init(jax.random.PRNGKey(0))
    want = as_net(T_CROSSQ["Actor"](3, 2)), as_net(T_CROSSQ["Critic"](3, 2, 16))
    assert kinds(nets) == kinds(want)
    for mine, there in zip(nets, want, strict=True):
        close(mine.running, there.running, rtol=0, atol=0)
    actor, critic = (net.layers for net in nets)
    for layer in (*actor, *critic["q1"], *critic["q2"]):
        bound = len(layer["weight"]) ** -0.5
        assert 0.8 * bound < abs(layer["weight"]).max() <= bound and 0 < abs(layer["bias"]).max() <= bound
        assert (layer["norm_weight"] == 1).all() and (layer["norm_bias"] == 0).all()
    assert (critic["q1"][0]["weight"] != critic["q2"][0]["weight"]).all()


@pytest.mark.slow
@pytest.mark.parametrize("autotune", [True, False])
def test_updates_of_crossq_are_those_of_the_torch_twin(autotune):
    """Three updates, of which the last moves the actor; by plain gradients: the bias of a layer in front of a
    normalisation has none but rounding errors, which Adam would scale up."""
    t_actor, t_critic = torch_nets(False)
    args = CROSSQ["Args"](autotune=autotune, alpha=1.3)
    setup = CROSSQ["Setup"](args, None, *[optax.sgd(1e-3)] * 3)
    actor, critic, log_alpha = arrays(as_net(t_actor)), arrays(as_net(t_critic)), jnp.log(1.3)
    states = (setup.actor_optimizer.init(x) for x in (actor.layers, critic.layers))
    learner = CROSSQ["Learner"](actor, critic, log_alpha, *states, setup.alpha_optimizer.init(log_alpha))
    temperature = T_CROSSQ["Temperature"](1.3)
    actor_sgd, critic_sgd = (torch.optim.SGD(x.parameters(), lr=1e-3) for x in (t_actor, t_critic))
    alpha_sgd = torch.optim.SGD(temperature.parameters(), lr=1e-3)
    batch, noise, t_batch, t_noise = random_batch(CROSSQ, T_CROSSQ)
    names = ("qf1_values", "qf2_values", "qf1_loss", "qf2_loss", "qf_loss")
    of_actor = ("actor_loss", "entropy", *(["alpha_loss"] if autotune else []))
    learned = tuple(({f"losses/{name}": 0.0 for name in each}, 0) for each in (names, of_actor))
    learn, wanted = jax.jit(partial(CROSSQ["learn_crossq"], setup=setup)), [{}, {}]
    for update in range(3):
        learner, learned = learn(update, learner, learned, batch, noise[:2])
        inputs = t_actor, temperature().detach(), t_batch, t_noise[0], args.gamma
        found = descend(T_CROSSQ["crossq_critic_loss"], t_critic, critic_sgd, *inputs)
        wanted[0] = {key: value + wanted[0].get(key, 0) for key, value in found.items()}
    inputs = t_critic, temperature().detach(), t_batch, t_noise[1]
    wanted[1] = descend(T_CROSSQ["crossq_actor_loss"], t_actor, actor_sgd, *inputs)
    if autotune:
        entropy = torch.tensor(wanted[1]["losses/entropy"])
        wanted[1] |= descend(T_CROSSQ["alpha_loss"], temperature, alpha_sgd, entropy, -2)
    assert [int(count) for _, count in learned] == [3, 1]
    close([sums for sums, _ in learned], wanted, rtol=1e-4)
    for mine, module in ((learner.actor, t_actor), (learner.critic, t_critic)):
        close(mine, as_net(module))
    close(learner.log_alpha, temperature.log_alpha)


@pytest.mark.slow
def test_the_actor_of_crossq_moves_once_in_policy_frequency_updates():
    """With its running statistics; those of the critics count every update."""
    args = CROSSQ["Args"](batch_size=8, buffer_size=80, learning_starts=10, policy_frequency=4, width=16)
    setup = CROSSQ["Setup"](args, open_envs("Pendulum-v1", 1), *[optax.adam(1e-4)] * 3)
    learners = [jax.jit(partial(CROSSQ["begin"], setup=setup))(jax.random.PRNGKey(3))]
    one = jax.jit(partial(CROSSQ["train_iteration"], setup=setup))
    for _ in range(30):
        learners.append(one(learners[-1])[0])
    learners = [training.learner for training in learners[10:]]  # before and after each of 20 updates
    for update, (old, new) in enumerate(pairwise(learners)):
        moves = (update + 1) % 4 == 0
        same = [np.array_equal(x, y) for x, y in zip(*map(jax.tree.leaves, (old.actor, new.actor)), strict=True)]
        assert not any(same) if moves else all(same)
        for stats in jax.tree.leaves(new.critic.running, is_leaf=lambda x: hasattr(x, "batches")):
            assert int(stats.batches) == update + 1
    assert int(learners[-1].actor.running[0].batches) == 5


# ---------------------------------------------------------------------- TQC
def as_layers(module, of=lambda x: x):
    """The layers of an actor, or of critics side by side, of torch as JAX has them."""
    layers = [layer for layer in module.net if hasattr(layer, "weight")]
    if hasattr(module, "num_critics"):
        return [{"weight": of(layer.weight).clone(), "bias": of(layer.bias)[:, 0].clone()} for layer in layers]
    return [{"weight": of(layer.weight).T.clone(), "bias": of(layer.bias).clone()} for layer in layers]


def tqc_nets():
    """Actor, critics and target critics of torch; the values of the targets differ widely."""
    torch.manual_seed(0)
    modules = T_TQC["Actor"](3, 2), *(T_TQC["Critic"](3, 2, 3, 5) for _ in range(2))
    torch.nn.init.normal_(modules[2].net[-1].weight)
    return modules


@pytest.mark.parametrize("num_dropped", [0, 2])
def test_losses_of_tqc_are_those_of_the_torch_twin(num_dropped):
    """With their gradients, the truncated mixture and the quantiles of each critic."""
    t_actor, t_critic, t_target = tqc_nets()
    actor, critic, target = (arrays(as_layers(module)) for module in (t_actor, t_critic, t_target))
    batch, noise, t_batch, t_noise = random_batch(TQC, T_TQC)
    quantiles = t_target(t_batch.obs, t_batch.action)
    close(TQC["quantiles_of"](target, batch.obs, batch.action), quantiles, atol=1e-4)
    mixture = TQC["truncate"](quantiles.detach().numpy(), num_dropped)
    np.testing.assert_array_equal(mixture, T_TQC["truncate"](quantiles, num_dropped).detach())
    assert mixture.shape == (16, 3 * (5 - num_dropped))

    inputs = t_target, t_actor, 0.3, t_batch, t_noise[0], 0.9, num_dropped
    want, want_metrics = T_TQC["tqc_critic_loss"](t_critic, *inputs)
    want.backward()
    inputs = target, actor, 0.3, batch, noise[0], 0.9
    (value, metrics), gradients = gradient_of("tqc_critic_loss", num_dropped=num_dropped)(critic, *inputs)
    close((value, metrics), (want, want_metrics))
    close(gradients, as_layers(t_critic, lambda x: x.grad), rtol=1e-3)

    t_critic.zero_grad()
    want, want_metrics, want_entropy = T_TQC["tqc_actor_loss"](t_actor, t_critic, 0.3, t_batch, t_noise[1])
    want.backward()
    (value, (metrics, entropy)), gradients = gradient_of("tqc_actor_loss")(actor, critic, 0.3, batch, noise[1])
    close((value, metrics, entropy), (want, want_metrics, want_entropy))
    close(gradients, as_layers(t_actor, lambda x: x.grad), rtol=1e-3)


def test_the_quantile_loss_is_that_of_the_torch_twin():
    """On both sides of 0 and of the bend of the Huber loss."""
    error, fraction = np.linspace(-3, 3, 61, dtype=np.float32)[:, None], np.float32([0.1, 0.5, 0.9])
    want = T_TQC["quantile_huber"](torch.from_numpy(error), torch.from_numpy(fraction))
    close(TQC["quantile_huber"](error, fraction), want)


@pytest.mark.slow
def test_critics_of_tqc_begin_as_in_the_torch_twin():
    """Shapes, weights within the bounds of torch, other ones in each critic."""
    critic = jax.jit(lambda key: TQC["init_critics"](key, 3, 2, 3, 5))(jax.random.PRNGKey(0))
    assert kinds(critic) == kinds(as_layers(T_TQC["Critic"](3, 2, 3, 5)))
    for layer in critic:
        bound = layer["weight"].shape[1] ** -0.5
        assert 0.8 * bound < abs(layer["weight"]).max() <= bound and 0 < abs(layer["bias"]).max() <= bound
        assert all((one != two).any() for one, two in pairwise(layer["weight"]))


@pytest.mark.slow
def test_updates_of_tqc_are_those_of_the_torch_twin():
    """Two updates, of which the first moves the actor twice; then the targets move, too."""
    t_actor, t_critic, t_target = tqc_nets()
    actor, critic, target = (arrays(as_layers(module)) for module in (t_actor, t_critic, t_target))
    args, log_alpha = TQC["Args"](tau=0.1), jnp.log(1.3)
    setup = TQC["Setup"](args, None, *[optax.sgd(1e-2)] * 3)
    states = (setup.actor_optimizer.init(x) for x in (actor, critic, log_alpha))
    learner = TQC["Learner"](actor, critic, target, log_alpha, *states)
    temperature = T_TQC["Temperature"](1.3)
    modules = t_actor, t_critic, temperature
    actor_sgd, critic_sgd, alpha_sgd = (torch.optim.SGD(x.parameters(), lr=1e-2) for x in modules)
    batch, noise, t_batch, t_noise = random_batch(TQC, T_TQC)
    names = ("qf_values", "qf_loss"), ("actor_loss", "entropy", "alpha_loss")
    learned = tuple(({f"losses/{name}": 0.0 for name in each}, 0) for each in names)
    learn = jax.jit(partial(TQC["learn_tqc"], setup=setup))
    for update in range(2):
        learner, learned = learn(update, learner, learned, batch, noise)
        inputs = t_target, t_actor, temperature().detach(), t_batch, t_noise[0], args.gamma, args.num_dropped
        descend(T_TQC["tqc_critic_loss"], t_critic, critic_sgd, *inputs)
        for k in range(2 * (update == 0)):
            inputs = t_critic, temperature().detach(), t_batch, t_noise[1 + k]
            found = descend(T_TQC["tqc_actor_loss"], t_actor, actor_sgd, *inputs)
            descend(T_TQC["alpha_loss"], temperature, alpha_sgd, torch.tensor(found["losses/entropy"]), -2)
        T_TQC["soft_update"](t_target, t_critic, 0.1)
    assert [int(count) for _, count in learned] == [2, 2]
    close(learner[:3], tuple(as_layers(module) for module in (t_actor, t_critic, t_target)))
    close(learner.log_alpha, temperature.log_alpha)


def test_more_quantiles_cannot_be_dropped_than_there_are(train):
    train("tqc_jax", "--num-dropped", 25, code=2)
    assert "--num-dropped 25 must be less than --num-quantiles 25" in train.out and train.out.count("\n") == 1


# ---------------------------------------------------------------------- whole trainings
@pytest.mark.slow
def test_saved_models_of_crossq_hold_the_running_statistics(train, solo):
    """Evaluations use them, and so does a model that is loaded; each seed has its own."""
    flags = "--env-id Pendulum-v1 --total-timesteps 3000 --learning-starts 500 --num-seeds 2 --width 64".split()
    v = train("crossq_jax", *flags, "--eval-every", 0, "--eval-episodes", 10)
    for i, run in enumerate(v["run"].runs):
        saved, net = load_file(run.dir / "model_last.safetensors"), v["run"].trainings.of(i, "learner.actor")
        np.testing.assert_array_equal(saved["actor.running.0.mean"], net.running[0].mean)
        np.testing.assert_array_equal(saved["actor.running.2.var"], net.running[2].var)
        assert saved["actor.layers.0.weight"].shape == (3, 256) and saved["actor.running.1.batches"] > 800
        assert rows(run.dir, "eval/episodic_return")[-1]["eval/episodic_return"] > -500
    means = [v["run"].trainings.of(i, "learner.actor").running[1].mean for i in range(2)]
    assert not np.array_equal(*means)
    code, out, err = solo("play", v["run"].runs[1].dir, "--episodes", 5)
    assert code == 0 and "over 5 greedy episodes" in out, out + err
    assert float(out.split("Pendulum-v1: ")[1].split()[0]) > -500


@pytest.mark.slow
@pytest.mark.parametrize("name", ["crossq_jax", "tqc_jax"])
def test_learns_pendulum(name, train):
    flags = "--total-timesteps 6000 --learning-starts 1000 --eval-every 0 --eval-episodes 20".split()
    run = train(name, "--env-id", "Pendulum-v1", *flags)["run"].runs[0]
    assert rows(run.dir, "eval/episodic_return")[-1]["eval/episodic_return"] > -250
