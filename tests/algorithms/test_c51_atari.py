"""c51_atari.py: what is not C51's (test_c51.py) nor the frames' (test_frame_replay.py): its network and its loop."""

import numpy as np
import pytest
import torch
from conftest import comparable, definitions, documented_keys, drop_last_checkpoint, rows

C51 = definitions("c51_atari")
SMALL = (
    "--env-id pixel_probe:Catch-v0 --total-timesteps 32 --learning-starts 20 --batch-size 4 --buffer-size 100".split()
)
SMALL += "--eval-every 0 --eval-episodes 1".split()


def network(num_actions=3):
    """A network with weights large enough that actions differ."""
    torch.manual_seed(0)
    net = C51["QNetwork"](num_actions, torch.linspace(-2, 2, 7))
    torch.nn.init.normal_(net.head.weight, std=0.5)
    return net


def test_the_head_is_cut_into_distributions_of_the_actions():
    """n_atoms logits for each action, in this order, from images scaled to [0, 1]; a value is their mean."""
    net, image = network(), np.random.default_rng(0).integers(0, 256, (5, 4, 84, 84), dtype=np.uint8)
    with torch.no_grad():
        x = torch.from_numpy(image).float() / 255
        for layer in list(net.network)[1:]:
            x = layer(x)
        assert x.shape == (5, 512)
        logit = net.head(x)[4, 7:14]
        torch.testing.assert_close(net.logits(torch.from_numpy(image))[4, 1], logit, rtol=1e-4, atol=1e-5)
        value = (logit.exp() / logit.exp().sum()) @ torch.linspace(-2, 2, 7)
        torch.testing.assert_close(net(torch.from_numpy(image))[4, 1], value, rtol=1e-4, atol=1e-5)


def test_it_acts_greedily():
    net, image = network(), np.random.default_rng(1).integers(0, 256, (30, 4, 84, 84), dtype=np.uint8)
    q, action = net(torch.from_numpy(image)).detach().numpy(), net.act(image)
    assert action.shape == (30,) and len(set(action)) > 1
    np.testing.assert_allclose(q[np.arange(30), action], q.max(1))


def test_its_settings_are_those_of_the_paper(train):
    """Of one short training: Adam's epsilon, the atoms, the logged keys, and that it has learned."""
    v = train("c51_atari", *SMALL)
    args = C51["Args"]()
    assert v["optimizer"].param_groups[0]["eps"] == 0.01 / 4 and args.learning_rate == 2.5e-4
    assert (args.n_atoms, args.v_min, args.v_max, args.batch_size) == (51, -10, 10, 32)
    assert v["q_network"].atoms.tolist() == v["target_network"].atoms.tolist() and len(v["q_network"].atoms) == 51
    logged = {key for row in rows(v["run"].dir) for key in row} - {"global_step", "wall_time"}
    assert logged == documented_keys("c51_atari")
    pairs = zip(v["q_network"].parameters(), v["target_network"].parameters(), strict=True)
    assert not any(torch.equal(x, y) for x, y in pairs)


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        ("--buffer-size 9", "--buffer-size must be at least 10"),
        ("--num-envs 3 --buffer-size 29", "--buffer-size must be at least 30"),
        ("--v-min 3 --v-max 3", "--v-min less than --v-max"),
        ("--env-id CartPole-v1", "use c51.py for vector observations"),
    ],
)
def test_what_it_cannot_train_is_refused(flags, sentence, train):
    train("c51_atari", *SMALL, *flags.split(), code=2)
    assert sentence in train.out and "Traceback" not in train.out


def test_the_smallest_buffer_works(train):
    assert train("c51_atari", *SMALL, *"--num-envs 2 --buffer-size 20".split())["replay"].inserted > 32


@pytest.mark.slow
def test_resumed_with_its_replay_equals_uninterrupted(train):
    """The last checkpoint thrown away, the run goes on from the one before: weights, images, metrics."""
    flags = "--total-timesteps 72 --num-envs 2 --buffer-size 50 --save-every 44 --save-replay --end-e 0.5".split()
    whole = train("c51_atari", *SMALL, *flags)
    expected, run_dir = comparable(whole["run"].dir), whole["run"].dir
    drop_last_checkpoint(run_dir)
    v = train("c51_atari", "--resume", run_dir)
    assert 0 < v["start"] < whole["num_iterations"] and comparable(run_dir) == expected
    for what in ("q_network", "target_network"):
        for x, y in zip(v[what].parameters(), whole[what].parameters(), strict=True):
            assert torch.equal(x, y)
    assert v["replay"].inserted == whole["replay"].inserted > 50
    both = [replay.arrays | vars(replay.state) for replay in (v["replay"], whole["replay"])]
    for key, array in both[0].items():
        assert np.array_equal(array, both[1][key]), key
