"""`solo dataset`: what is in a data set, and data sets to and from Minari."""

import builtins
import hashlib
import json
import os
import resource

import gymnasium as gym
import numpy as np
import pytest
from conftest import ROOT, definitions, refused

from solorl.cli import dataset
from solorl.data.dataset import Writer, open_datasets, read
from solorl.envs.spaces import bare_action_space
from solorl.envs.vector import VectorEnvs
from solorl.lab.datasets import exchange
from solorl.lab.datasets.recording import Recording
from solorl.lab.results import figures
from solorl.lab.results.reference_scores import D4RL
from solorl.lab.results.statistics import normalise

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
    assert normalise(3234.3, low, high) == pytest.approx(1) and normalise(low, low, high) == 0
    code, out, _ = solo(
        "dataset", "info", folder, "--random", folder, "--expert", recorded(tmp_path / "e", "Hopper-v5", 60)
    )
    line = next(line for line in out.splitlines() if line.startswith("D4RL score"))
    assert code == 0 and f"mean {100 * (returns.mean() + 20.272305) / 3254.572305:.2f}," in line
    assert "mean 0.00," in next(line for line in out.splitlines() if line.startswith("own score"))


def test_data_without_a_whole_episode_are_described_but_are_no_reference(solo, tmp_path):
    """As a few steps of long episodes are."""
    folder = recorded(tmp_path / "short", "HalfCheetah-v5", 10)
    code, out, err = solo("dataset", "info", folder, "--out", tmp_path / "returns.png")
    assert code == 0 and err == "" and "2, of which 2 were cut short" in out and "score" not in out
    assert "obs 16" in out and "nan" not in out
    code, out, err = solo("dataset", "info", folder, "--random", folder, "--expert", folder)
    assert code == 2 and out == "" and err.count("\n") == 1 and str(folder) in err and "whole episode" in err


def test_a_reader_that_leaves_is_no_folder_that_cannot_be_written(folder, monkeypatch):
    """As of `solo dataset info DIR | head`; `solo` itself sees to it."""

    def left(*values):
        raise BrokenPipeError(32, "Broken pipe")

    monkeypatch.setattr(builtins, "print", left)
    with pytest.raises(BrokenPipeError):
        dataset.main(["info", str(folder)])


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
    assert np.array_equal(one.cut, other.cut) and one.cut.any()
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
        ("export", str(folder), "mine/test-v0"): "Minari has mine/test-v0 already",
        ("export", str(folder), "a name-v0"): "the Minari data set a name-v0 does not fit: Malformed dataset ID",
        ("export", str(folder), "mine/test"): "mine/test does not end with a version",
        ("import", "mine/test", "there"): "mine/test does not end with a version",
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
    with pytest.raises(exchange.UsageError, match="~nobody_here is not a data set"):
        open_datasets("~nobody_here", "moody:Plain-v0", envs)
    other = VectorEnvs([lambda: gym.make("CartPole-v1")])
    with pytest.raises(exchange.UsageError, match="has the observation space"):
        open_datasets(str(folder), "moody:Plain-v0", other)


def test_numpy_alone_reads_a_piece(folder):
    with np.load(folder / "000000.npz") as piece:
        assert piece["obs"].shape == (150, 2, 3) and piece["after"].shape == (2, 3)


# ---------------------------------------------------------------------- folders of others
def changed(folder, transitions=None, **arrays):
    """The first piece with other arrays, named by dataset.json as if that were right."""
    piece, about = folder / "000000.npz", json.loads((folder / "dataset.json").read_text())
    with np.load(piece) as file:
        arrays = {name: file[name] for name in file.files} | arrays
    np.savez_compressed(piece, **{name: values for name, values in arrays.items() if values is not None})
    about["pieces"][0] |= {"sha256": hashlib.sha256(piece.read_bytes()).hexdigest()}
    about["pieces"][0] |= {} if transitions is None else {"transitions": transitions}
    (folder / "dataset.json").write_text(json.dumps(about))


def column(folder, name):
    with np.load(folder / "000000.npz") as file:
        return file[name].copy()


@pytest.mark.parametrize("what", ["a FIFO", "a link", "a FIFO for dataset.json", "a link to a device"])
def test_only_plain_files_are_opened(what, folder, solo, tmp_path):
    path = folder / ("dataset.json" if "dataset.json" in what else "000000.npz")
    if "FIFO" in what:
        path.unlink()
        os.mkfifo(path)
    else:
        path.rename(tmp_path / "moved")
        path.symlink_to("/dev/zero" if "device" in what else tmp_path / "moved")
    refused(solo("dataset", "info", folder), f"{path} is a ", "may hold plain files and folders only")


@pytest.mark.parametrize(
    ("arrays", "said"),
    [
        (
            {"reward": np.zeros((150, 2), complex)},
            "reward of type complex128 and shape (150, 2) is not allowed",
        ),
        ({"reward": np.zeros((150, 2), "datetime64[s]")}, "reward of type datetime64[s] and shape"),
        ({"reward": np.full((150, 2), "x")}, "reward of type <U1 and shape"),
        ({"terminated": np.full((150, 2), 2)}, "terminated must be 0 or 1"),
        ({"truncated": np.full((150, 2), np.nan)}, "truncated must be 0 or 1"),
        ({"after": None}, "after has the shape None, not (2, 3)"),
        ({"obs": np.zeros((150, 3))}, "obs has the shape (150, 3), not (150, 2, 3)"),
        ({"final_obs": np.zeros((0, 3))}, "final_obs has the shape (0, 3)"),
        ({"more": np.zeros((4_000, 10))}, "it unpacks to more than"),
    ],
)
def test_a_piece_that_is_no_piece_is_said_in_one_sentence(arrays, said, folder, solo):
    changed(folder, **arrays)
    refused(solo("dataset", "info", folder), "000000.npz cannot be read: ", said)


def test_a_small_piece_cannot_ask_for_much_memory(folder, solo, tmp_path):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    changed(folder, obs=np.zeros((1_000_000, 2, 3), np.float32))  # 24 MB that are 24 kB on the disk
    held = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    refused(solo("dataset", "info", folder), "it unpacks to more than")
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - max(before, held) < 20_000  # kB
    about = json.loads((folder / "dataset.json").read_text())
    about["pieces"][0]["transitions"] = 10**13  # so much would fit
    (folder / "dataset.json").write_text(json.dumps(about))
    refused(solo("dataset", "info", folder), "GiB of memory, but there are")
    about["observation_space"]["shape"] = [10**6, 10**7]
    (folder / "dataset.json").write_text(json.dumps(about))
    refused(solo("dataset", "info", folder), "dataset.json does not fit")


@pytest.mark.parametrize("kind", [np.int64, np.uint8, np.float32])
def test_flags_of_any_numbers_are_read(kind, folder):
    before = read(folder)
    changed(folder, **{name: column(folder, name).astype(kind) for name in ("terminated", "truncated")})
    for name in (*NAMES, "cut"):
        np.testing.assert_array_equal(getattr(before, name), getattr(read(folder), name), err_msg=name)
    assert read(folder).terminated.dtype == bool


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("reward", np.nan, "reward nan of transition 7 is not finite (1 such transitions of 300)"),
        ("obs", np.inf, "of transition 7 is not finite"),
        ("action", 9, "action 9 of transition 7 is not in Discrete(3)"),
        ("action", -1, "action -1 of transition 7 is not in Discrete(3)"),
    ],
)
def test_numbers_that_cannot_be_learned_from_are_said_before_anything_trains(name, value, said, folder, solo):
    values = column(folder, name)
    values[7, 0] = value
    changed(folder, **{name: values})
    refused(solo("dataset", "info", folder), said)
    words = ("train", "bc", "--env-id", "moody:Plain-v0", "--dataset", folder, "--runs-dir", folder.parent / "runs")
    code, _, err = solo(*words)
    assert code == 2 and said in err and "Traceback" not in err and not (folder.parent / "runs").exists()


def test_continuous_actions_outside_of_their_bounds_are_refused(solo, tmp_path):
    folder = recorded(tmp_path / "pendulum", "Pendulum-v1", 20)
    values = column(folder, "action")
    values[3, 0] = 2.000001  # rounding
    changed(folder, action=values)
    assert len(read(folder)) == 40
    values[3, 0] = 2.1
    changed(folder, action=values)
    refused(solo("dataset", "info", folder), "action [2.1] of transition 3 is not in Box(-2.0, 2.0")


def test_what_lies_in_a_folder_stays_there(folder, store, solo, tmp_path):
    mine = tmp_path / "mine"
    mine.mkdir()
    (mine / "000000.npz").write_bytes(b"mine")
    assert solo("dataset", "export", folder, "mine/test-v0")[0] == 0
    refused(solo("dataset", "import", "mine/test-v0", mine), "mine is not empty; name another folder")
    with pytest.raises(exchange.UsageError, match="is not empty"):
        recorded(mine)
    assert [path.name for path in mine.iterdir()] == ["000000.npz"] and (mine / "000000.npz").read_bytes() == b"mine"


def test_texts_of_others_do_not_control_the_terminal(folder, solo):
    about = json.loads((folder / "dataset.json").read_text())
    about |= {"policy": "\x1b[2Jmine", "env_id": "\x1b]0;x\x07Own-v0"}
    (folder / "dataset.json").write_text(json.dumps(about))
    code, out, err = solo("dataset", "info", folder)
    assert code == 0 and "\\x1b[2Jmine" in out and not {"\x1b", "\x07"} & {*out, *err}
    code, out, err = solo("train", "bc", "--env-id", "CartPole-v1", "--dataset", folder)
    assert code == 2 and "Own-v0" in err and not {"\x1b", "\x07"} & {*out, *err}


# ---------------------------------------------------------------------- data of others
def made_by_minari(kind, env_id="MountainCarContinuous-v0"):
    import minari
    from minari.data_collector import EpisodeBuffer

    def episodes():
        for k in range(6):
            ends = np.zeros((2, 4), kind)
            if k < 5:
                ends[k % 2, -1] = 1  # the last one ends without a reason
            obs = np.full((5, 2), k, np.float32) + np.arange(5, dtype=np.float32)[:, None] / 10
            yield EpisodeBuffer(observations=obs, actions=np.zeros((4, 1), np.float32), rewards=np.ones(4),
                                terminations=ends[0], truncations=ends[1], infos={})  # fmt: skip

    minari.create_dataset_from_buffers("own/flags-v0", list(episodes()), env=env_id)


@pytest.mark.parametrize("kind", [bool, np.int64, np.float32])
def test_flags_of_minari_may_be_of_any_numbers(kind, store, solo, tmp_path):
    made_by_minari(kind)
    assert solo("dataset", "import", "own/flags-v0", tmp_path / "data")[0] == 0
    data = read(tmp_path / "data")
    assert data.terminated.tolist() == ([False] * 3 + [True] + [False] * 4) * 3
    assert data.truncated.sum() == 3 and data.cut.tolist() == [False] * 5 + [True]
    assert solo("dataset", "info", tmp_path / "data")[0] == 0
    assert solo("dataset", "export", tmp_path / "data", "own/back-v0")[0] == 0
    assert solo("dataset", "import", "own/back-v0", tmp_path / "back")[0] == 0
    assert read(tmp_path / "back").cut.tolist() == data.cut.tolist()


@pytest.mark.parametrize("known", [True, False])
@pytest.mark.parametrize("env_id", ["moody:Plain-v0", "Pendulum-v1"])
def test_the_page_makes_a_data_set_of_arrays_in_d4rls_layout(env_id, known, tmp_path, monkeypatch):
    """Without `next_observations` all is there but the last rows of what a limit, or the end of the file, has ended."""
    env = gym.make(env_id, max_episode_steps=7)
    env.action_space.seed(0)
    rows, obs = [], env.reset(seed=0)[0].copy()
    for _ in range(60):
        action = env.action_space.sample()
        after, reward, terminated, truncated, _ = env.step(action)
        rows.append((obs, action, reward, terminated, truncated, after.copy()))
        obs = (env.reset()[0] if terminated or truncated else after).copy()
    names = ("observations", "actions", "rewards", "terminals", "timeouts", "next_observations")
    arrays = dict(zip(names, map(np.array, zip(*rows, strict=True)), strict=True))
    np.savez(tmp_path / "mine.npz", **{name: arrays[name] for name in names[: 5 + known]})
    monkeypatch.chdir(tmp_path)
    page = (ROOT / "docs/offline_data.md").read_text().split("## Your own data")[1]
    exec(page.split("```python")[1].split("```")[0].replace("Hopper-v5", env_id), {})
    data = read(tmp_path / "data/mine")
    kept = [row for i, row in enumerate(rows) if known or row[3] or not (row[4] or i == 59)]
    assert len(data) == len(kept) < 61 - 5 * (not known)
    for i, (obs, action, reward, terminated, truncated, after) in enumerate(kept):
        assert (data.obs[i] == obs).all() and (data.action[i] == action).all() and data.reward[i] == np.float32(reward)
        assert data.terminated[i] == terminated and (terminated or (data.next_obs[i] == after).all())
        limit = truncated and not terminated
        follows = i + 1 == len(kept) or not (kept[i + 1][0] == after).all()
        assert data.truncated[i] == ((limit if known and i < 59 else follows) and not terminated)
    assert data.cut.sum() == (rows[-1][3] or rows[-1][4]) ^ 1 and not data.cut[:-1].any()
    envs = VectorEnvs([lambda: gym.make(env_id)])
    assert len(open_datasets("data/mine", env_id, envs)) == len(kept)


NOT_WHOLE = (
    ("actions", np.full(4, 0.5), "actions"),  # not choices; a type of integers would make zeros of them
    ("actions", np.zeros((4, 1), np.int64), "actions"),
    ("observations", np.zeros((5, 3)), "observations"),
    ("terminations", np.array([0, 1, 0, 0]), "continues"),
    ("rewards", np.zeros((4, 2)), "reshape"),
)


@pytest.mark.parametrize(("name", "value", "said"), NOT_WHOLE)
def test_what_minari_did_not_check_is_refused_before_it_is_written(name, value, said, store, solo, tmp_path):
    import minari
    from minari.data_collector import EpisodeBuffer

    ends = np.zeros((2, 4), bool)
    arrays = {"observations": np.zeros((5, 2), np.float32), "actions": np.ones(4, np.float32)}
    arrays |= {"rewards": np.ones((4, 1)), "terminations": ends[0], "truncations": ends[1]}
    spaces = {"observation_space": gym.spaces.Box(-1, 1, (2,)), "action_space": gym.spaces.Discrete(2)}
    for made, change in {"own/right-v0": {}, "own/wrong-v0": {name: value}}.items():
        minari.create_dataset_from_buffers(made, [EpisodeBuffer(**(arrays | change), infos={})], **spaces)
    assert solo("dataset", "import", "own/right-v0", tmp_path / "right")[0] == 0
    right = read(tmp_path / "right")
    assert right.action.dtype == np.int64 and right.action.tolist() == [1] * 4 and right.reward.tolist() == [1] * 4
    code, out, err = solo("dataset", "import", "own/wrong-v0", tmp_path / "wrong")
    assert code == 2 and out == "" and err.count("\n") == 1 and said in err
    assert not list((tmp_path / "wrong").glob("*.npz"))


def test_actions_in_the_bounds_of_the_environment_are_scaled_as_make_env_does(tmp_path):
    folder = recorded(tmp_path / "data", "Pendulum-v1", 20)
    make_env = definitions("td3_bc")["make_env"]
    envs = VectorEnvs([lambda: make_env("Pendulum-v1")])
    data, bare = open_datasets(str(folder), "Pendulum-v1", envs), read(folder)
    assert np.abs(bare.action).max() > 1 and data.action.dtype == np.float32
    back = [make_env("Pendulum-v1").action(action) for action in data.action]  # what the environment gets for it
    np.testing.assert_allclose(back, bare.action, atol=1e-6)
    clipped = VectorEnvs([lambda: gym.wrappers.ClipAction(gym.make("Pendulum-v1"))])
    with pytest.raises(
        exchange.UsageError, match="its actions must be in these bounds, or in those of the environment"
    ):
        open_datasets(str(folder), "Pendulum-v1", clipped)


def test_the_bounds_of_an_environment_are_those_of_its_registered_function(tmp_path):
    """Which may wrap another one; what `make_env` wraps around it does not count."""
    space, zeros, env_id = gym.make("turned:Turned-v0").action_space, np.zeros((3, 1)), "turned:Turned-v0"
    writer = Writer(tmp_path / "data")
    writer.open({"env_id": env_id, "num_envs": 1}, (gym.make(env_id).observation_space, space))
    obs, action = np.zeros((3, 1, 3), np.float32), np.array([[[0.0]], [[2.5]], [[5.0]]], np.float32)
    ends = {"terminated": zeros, "truncated": zeros, "final_obs": obs[:0, 0], "after": obs[0]}
    writer.add({"obs": obs, "action": action, "reward": zeros, **ends})
    envs = VectorEnvs([lambda: definitions("td3_bc")["make_env"](env_id)])
    assert open_datasets(str(tmp_path / "data"), env_id, envs).action.tolist() == [[-1], [0], [1]]
    clipped = VectorEnvs([lambda: gym.wrappers.ClipAction(gym.make(env_id))])  # as of PPO, which `solo record` plays
    assert bare_action_space(clipped) == bare_action_space(envs) == space


@pytest.mark.parametrize("dtype", [np.int8, np.int32, np.float32])
def test_actions_have_the_type_of_the_space_whatever_the_pieces_have(dtype, tmp_path):
    """Data by another program may count actions in any type; a loss over classes takes int64."""
    space, zeros = gym.make("CartPole-v1").observation_space, np.zeros((3, 1))
    writer = Writer(tmp_path / "data")
    writer.open({"env_id": "CartPole-v1", "num_envs": 1}, (space, gym.spaces.Discrete(2)))
    obs, action = np.zeros((3, 1, 4), np.float32), np.array([[1], [0], [1]], dtype)
    ends = {"terminated": zeros, "truncated": zeros, "final_obs": obs[:0, 0], "after": obs[0]}
    writer.add({"obs": obs, "action": action, "reward": zeros, **ends})
    envs = VectorEnvs([lambda: gym.make("CartPole-v1")])
    data = open_datasets(str(tmp_path / "data"), "CartPole-v1", envs)
    assert data.action.dtype == np.int64 and data.action.tolist() == [1, 0, 1]


def test_a_module_may_give_the_environment_that_data_know_by_its_name(folder):
    about = json.loads((folder / "dataset.json").read_text())
    (folder / "dataset.json").write_text(json.dumps({**about, "env_id": "Plain-v0"}))
    envs = VectorEnvs([lambda: gym.make("moody:Plain-v0")])
    assert len(open_datasets(str(folder), "moody:Plain-v0", envs)) == 300
    assert len(open_datasets(str(folder), "Plain-v0", envs)) == 300
