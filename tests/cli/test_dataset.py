"""`solo dataset`: what is in a data set, and data sets to and from Minari."""

import builtins
import json

import gymnasium as gym
import numpy as np
import pytest
from conftest import refused

from solorl.data import exchange
from solorl.data.dataset import open_datasets, read
from solorl.data.recording import Recording
from solorl.envs.vector import VectorEnvs
from solorl.results import figures
from solorl.results.reference_scores import D4RL, normalised

NAMES = ("obs", "action", "reward", "terminated", "truncated", "next_obs", "episode")


def recorded(folder, env_id="moody:Plain-v0", steps=150, num_envs=2):
    """A data set of random actions, with an episode cut in each environment."""
    envs = VectorEnvs([lambda: gym.make(env_id)] * num_envs)
    envs.action_space.seed(1)
    record = Recording(folder)
    spaces = envs.single_observation_space, envs.single_action_space
    record.open({"env_id": env_id, "policy": "random actions", "git": {"commit": "abc"}}, spaces, envs.reset(seed=1)[0])
    for _ in range(steps):
        action = envs.action_space.sample()
        obs, reward, terminated, truncated, infos = envs.step(action)
        record.add(action, reward, terminated, truncated, infos.get("final_obs"), obs)
    record.flush()
    return folder


@pytest.fixture
def folder(tmp_path):
    return recorded(tmp_path / "data")


@pytest.fixture
def store(tmp_path, monkeypatch):
    pytest.importorskip("minari")
    monkeypatch.setenv("MINARI_DATASETS_PATH", str(tmp_path / "minari"))
    return tmp_path / "minari"


# ---------------------------------------------------------------------- info
def test_info_counts_what_a_plain_count_gives(folder, solo, tmp_path, monkeypatch):
    drawn = []
    monkeypatch.setattr(figures, "write_histogram", lambda returns, path: drawn.append(returns))
    code, out, _ = solo("dataset", "info", folder, "--out", tmp_path / "returns.png")
    data, returns, total = read(folder), [], 0.0
    for i in range(300):
        total += float(data.reward[i])
        if data.terminated[i] or data.truncated[i]:
            if i not in (149, 299):  # where the recording ends in the middle of an episode
                returns.append(total)
            total = 0.0
    assert code == 0 and f"{len(returns) + 2}, of which 2 were cut short" in out
    np.testing.assert_allclose(drawn[0][str(folder)], returns, rtol=1e-6)
    assert f"mean {np.mean(returns):.1f}" in out or f"mean {np.mean(returns):.2f}" in out
    assert f"{data.terminated.sum()} terminated, {(data.truncated & ~data.terminated).sum() - 2} at a limit" in out
    assert f"{data.obs[:, 2].max():.2f}" in out and "SHA-256" in out


def test_scores_are_those_of_d4rl_and_of_own_data(solo, tmp_path):
    folder = recorded(tmp_path / "data", "Hopper-v5", 120)
    returns = read(folder).whole_returns()
    low, high = D4RL["Hopper"]
    assert normalised(3234.3, low, high) == pytest.approx(100) and normalised(low, low, high) == 0
    code, out, _ = solo(
        "dataset", "info", folder, "--random", folder, "--expert", recorded(tmp_path / "e", "Hopper-v5", 60)
    )
    line = next(line for line in out.splitlines() if line.startswith("D4RL score"))
    assert code == 0 and f"mean {100 * (returns.mean() + 20.272305) / 3254.572305:.2f}," in line
    assert "mean 0.00," in next(line for line in out.splitlines() if line.startswith("own score"))


def test_the_picture_is_written(folder, tmp_path):
    for name in ("returns.png", "returns.svg"):
        figures.write_histogram({"$a_b$": np.arange(9.0), "b": np.ones(3)}, tmp_path / name)
        assert (tmp_path / name).stat().st_size > 1000


# ---------------------------------------------------------------------- Minari
@pytest.mark.parametrize("kind", ["vectors", "images", "continuous"])
def test_there_and_back_is_equal_to_the_last_bit(kind, folder, store, solo, tmp_path, monkeypatch):
    monkeypatch.setattr(exchange, "MOST_ROWS", 40)  # several pieces
    if kind == "continuous":
        folder = recorded(tmp_path / "pendulum", "Pendulum-v1", 250)
    if kind == "images":
        folder, rng = tmp_path / "images", np.random.default_rng(0)
        images = rng.integers(0, 256, (71, 1, 32, 32, 3), np.uint8)
        record = Recording(folder)
        spaces = gym.spaces.Box(0, 255, (32, 32, 3), np.uint8), gym.spaces.Discrete(2)
        record.open({"env_id": "Own-v0", "policy": "mine"}, spaces, images[0])
        for t in range(70):
            record.add([1], [t], [t % 20 == 19], [t % 30 == 29], images[t : t + 1, 0], images[t + 1])
        record.flush()
    code, out, err = solo("dataset", "export", folder, "mine/test-v0")
    assert code == 0 and err == "" and out.startswith("Minari has mine/test-v0 now")
    assert solo("dataset", "import", "mine/test-v0", tmp_path / "back")[0] == 0
    one, other = read(folder), read(tmp_path / "back")
    for name in NAMES:
        first, second = getattr(one, name), getattr(other, name)
        assert first.dtype == second.dtype and np.array_equal(first, second), name
    spaces = [json.loads((each / "dataset.json").read_text()) for each in (folder, tmp_path / "back")]
    assert all(spaces[0][key] == spaces[1][key] for key in ("env_id", "observation_space", "action_space", "policy"))


def test_the_metadata_are_complete(store, solo, tmp_path):
    import minari

    folder = recorded(tmp_path / "data", "HalfCheetah-v5", 8)
    assert solo("dataset", "export", folder, "cheetah/random-v0")[0] == 0
    found = minari.load_dataset("cheetah/random-v0")
    about = found.storage.metadata
    assert (about["ref_min_score"], about["ref_max_score"]) == D4RL["HalfCheetah"]
    assert about["algorithm_name"] == "random actions" and "abc" in about["code_permalink"] and about["description"]
    assert found.env_spec.id == "HalfCheetah-v5" and found.recover_environment().spec.id == "HalfCheetah-v5"
    assert found.total_steps == 16 and about["jpeg_encoding"] is False


# ---------------------------------------------------------------------- mistakes
def test_mistakes_are_said_in_one_sentence(folder, store, solo, tmp_path):
    assert solo("dataset", "export", folder, "mine/test-v0")[0] == 0
    for words, said in {
        ("info", "nowhere"): "nowhere is not a data set: it has no dataset.json that can be read",
        ("info", str(folder), "--random", str(folder)): "--random and --expert go together",
        ("info", str(folder), "--out", "a.txt"): "--out is a picture of info, PNG or SVG, not a.txt",
        ("export", str(folder)): "solo dataset export takes a folder and a name of Minari's",
        ("export", str(folder), "mine/test-v0"): "Minari has a data set mine/test-v0 already",
        ("export", str(folder), "a name"): "the Minari data set a name does not fit: Malformed dataset ID",
        ("export", "nowhere", "mine/test-v1"): "nowhere is not a data set",
        ("import", "mine/other-v0", "there"): "there is no Minari data set mine/other-v0 here",
        ("import", "mine/test-v0", str(folder)): "has a data set already",
        ("show", str(folder)): "invalid choice: 'show'",
    }.items():
        refused(solo("dataset", *words), said)


def test_without_minari_a_sentence_names_the_extra(folder, solo, monkeypatch):
    imported = builtins.__import__

    def without(name, *rest, **named):
        if name.partition(".")[0] in ("minari", "h5py"):
            raise ModuleNotFoundError(f"No module named '{name}'", name=name)
        return imported(name, *rest, **named)

    monkeypatch.setattr(builtins, "__import__", without)
    for words in (("export", folder, "mine/test-v0"), ("import", "mine/test-v0", folder / "other")):
        refused(solo("dataset", *words), "Minari needs an extra: pip install 'solorl[minari]'")


def spoil(folder, what):
    about, piece = folder / "dataset.json", folder / "000000.npz"
    content = json.loads(about.read_text())
    if what == "a changed byte":
        piece.write_bytes(piece.read_bytes()[:-30] + b"x" + piece.read_bytes()[-29:])
    elif what == "a missing piece":
        piece.unlink()
    elif what == "no pieces":
        about.write_text(json.dumps({**content, "pieces": []}))
    elif what == "a path":
        about.write_text(json.dumps({**content, "pieces": [{"file": "../x.npz"}]}))
    elif what == "a later format":
        about.write_text(json.dumps({**content, "format": 2}))
    elif what == "no JSON":
        about.write_text("{")


@pytest.mark.parametrize(
    ("what", "said"),
    {
        "a changed byte": "000000.npz cannot be read: it is damaged",
        "a missing piece": "000000.npz cannot be read: No such file",
        "no pieces": "is an empty data set",
        "a path": "is damaged: its list of pieces cannot be read",
        "a later format": "has format 2; this version reads format 1",
        "no JSON": "is not a data set: it has no dataset.json that can be read",
    }.items(),
)
def test_damage_is_said_in_one_sentence(what, said, folder, solo):
    spoil(folder, what)
    refused(solo("dataset", "info", folder), said)


def test_other_spaces_are_refused(folder, tmp_path):
    envs = VectorEnvs([lambda: gym.make("moody:Plain-v0")])
    assert len(open_datasets(f"{folder},{folder}", "moody:Plain-v0", envs)) == 600
    with pytest.raises(exchange.UsageError, match="is of moody:Plain-v0"):
        open_datasets(str(folder), "CartPole-v1", envs)
    other = VectorEnvs([lambda: gym.make("CartPole-v1")])
    with pytest.raises(exchange.UsageError, match="has the observation space"):
        open_datasets(str(folder), "moody:Plain-v0", other)


def test_numpy_alone_reads_a_piece(folder):
    with np.load(folder / "000000.npz") as piece:
        assert piece["obs"].shape == (150, 2, 3) and piece["after"].shape == (2, 3)
