"""Data sets to and from Minari's store on this machine (`MINARI_DATASETS_PATH`, else `~/.minari`)."""

import io
import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np

from solorl.data.dataset import ABOUT, ARRAYS, SPACES, Writer, as_flags, read, read_about, space_of
from solorl.errors import UsageError, fitting, needs_extra, refuse
from solorl.lab.datasets.recording import MOST_BYTES, MOST_ROWS

ENV_ID = "solorl_env_id"  # in Minari's metadata, for environments that Gymnasium alone does not know


@contextmanager
def quiet() -> Iterator[None]:
    """Inside, a library that says much says nothing: no warnings, no logs, no prints."""
    before, heard = logging.root.manager.disable, io.StringIO()
    logging.disable(logging.CRITICAL)
    try:
        with warnings.catch_warnings(action="ignore"), redirect_stdout(heard), redirect_stderr(heard):
            yield
    finally:
        logging.disable(before)


@contextmanager
def minari(name: str) -> Iterator[Any]:
    """Minari, for its data set `name`. What it raises inside is a UsageError, as is its absence; it says nothing."""
    try:
        import h5py  # noqa: F401  without it nothing can be stored
        import minari
    except ImportError:
        raise UsageError(needs_extra("Minari", "minari")) from None
    refuse(not name.rpartition("-v")[2].isdecimal(), f"{name} does not end with a version, as hopper/medium-v0 does")
    with quiet(), fitting(f"the Minari data set {name}"):
        minari.dataset.minari_dataset.parse_dataset_id(name)  # of a malformed name Minari would make a folder
        yield minari


def export(folder: Path, name: str, low: float | None, high: float | None) -> int:
    """Write the data set of a folder as Minari's data set `name`, images without loss, with the reference scores `low`
    (random) and `high` (expert); the number of episodes. UsageError where there is one already, or that fails."""
    about, data = read_about(folder), read(folder)
    with fitting(str(folder / ABOUT)):
        spaces: Any = {key: space_of(about[key]) for key in SPACES}
        env_id, policy = str(about["env_id"]), str(about["policy"])
    ends = np.flatnonzero(data.terminated | data.truncated) + 1
    # an episode that was cut ends without a reason
    at_limit = data.truncated & ~np.isin(np.arange(len(data)), ends[data.cut] - 1)
    with minari(name) as library:
        refuse(name in library.list_local_datasets(), f"Minari has {name} already; name another one, or delete it")
        from minari.data_collector import EpisodeBuffer

        episodes = (
            EpisodeBuffer(
                observations=np.concatenate([data.obs[part], data.next_obs[part.stop - 1 : part.stop]]),
                actions=data.action[part], rewards=data.reward[part],
                terminations=data.terminated[part], truncations=at_limit[part], infos={},
            )
            for part in map(slice, [0, *ends[:-1]], ends)
        )  # fmt: skip
        code = f"{about.get('script', 'SoloRL')}, commit {(about.get('git') or {}).get('commit', 'unknown')}"
        made = library.create_dataset_from_buffers(
            name, episodes, env=env_id if env_id in gym.registry else None, **spaces, algorithm_name=policy,
            description=f"{policy} on {env_id}, seed {about.get('seed')}; actions are the agent's", code_permalink=code,
            ref_min_score=low, ref_max_score=high, data_format="hdf5", jpeg_encoding=False,
        )  # fmt: skip
        made.storage.update_metadata({ENV_ID: env_id})
    return len(ends)


def bring(name: str, folder: Path) -> int:
    """Write Minari's data set `name` into a folder; the number of episodes. UsageError where that cannot be done."""
    writer = Writer(folder)
    with minari(name) as library:
        if name not in library.list_local_datasets():
            raise UsageError(f"there is no Minari data set {name} here; `minari download {name}` fetches one")
        dataset = library.load_dataset(name)
        spaces = dataset.observation_space, dataset.action_space
        about, spec = dataset.storage.metadata, dataset.env_spec
        env_id, policy = about.get(ENV_ID, spec.id if spec else ""), about.get("algorithm_name", f"Minari's {name}")
        writer.open({"env_id": env_id, "policy": policy, "minari": name, "num_envs": 1}, spaces)
        waiting: list[Any] = []
        for episode in dataset.iterate_episodes():
            waiting.append(episode)
            if sum(map(len, waiting)) > MOST_ROWS or sum(each.observations.nbytes for each in waiting) > MOST_BYTES:
                writer.add(_piece(waiting, *spaces))
                waiting = []
        if waiting:
            writer.add(_piece(waiting, *spaces))
    return int(dataset.total_episodes)


def _piece(episodes: list[Any], obs_space: gym.Space, action_space: gym.Space) -> dict[str, np.ndarray]:
    """Whole episodes as a piece of one environment. One that ends without a reason was cut. UsageError where they are
    not in their spaces: a type must not change a number."""

    def joined(name: str, space: gym.Space | None = None, rows: slice = slice(None)) -> np.ndarray:
        values = np.concatenate([np.asarray(getattr(each, name))[rows] for each in episodes])[:, None]
        typed = values.astype(space.dtype) if space else values
        wrong = space and (values.shape[2:] != space.shape or (typed.dtype.kind != "f" and (typed != values).any()))
        refuse(wrong, f"{name} of type {values.dtype} and shape {values.shape[2:]} are not in {space}")
        return typed

    terminated, truncated = (as_flags(joined(name), name) for name in ("terminations", "truncations"))
    ended, last = terminated | truncated, np.cumsum([len(each) for each in episodes]) - 1
    cut = ~ended & np.isin(np.arange(len(ended)), last)[:, None]
    refuse(ended.sum() + cut.sum() > len(episodes), "an episode continues after a step that ends it")
    obs, final_obs = (joined("observations", obs_space, rows) for rows in (slice(-1), slice(-1, None)))
    action, reward = joined("actions", action_space), joined("rewards").astype(np.float32).reshape(ended.shape)
    arrays = (obs, action, reward, terminated, truncated | cut, final_obs[:, 0], final_obs[-1])
    return {**dict(zip(ARRAYS, arrays, strict=True)), "cut": cut}
