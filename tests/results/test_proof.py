"""The data and what is made of it: where results of the queue belong, the page that shows which file is proved by what,
and the models that stay."""

import sys

from conftest import ROOT

from solorl.results import result as results
from solorl.results.result import Result

sys.path.insert(0, str(ROOT / "benchmark"))
import collect


def made(folder, script, env_id, seed, variant="", steps=1000, score=1.0, **more):
    """A finished result in a folder."""
    columns = {"global_step": [steps], "wall_time": [9.0], "mean": [score], "std": [0.0], "length": [1.0]}
    more = {"wall_time": 3600.0, "machine": {"cores": 1}, **more}
    one = Result(
        env_id, script, seed, variant, args={"total_timesteps": steps}, global_step=steps, eval=columns, **more
    )
    return results.write(one, folder)


# ---------------------------------------------------------------------- benchmark/collect.py
def test_results_of_the_queue_go_where_their_siblings_are(tmp_path, capsys):
    queue, wanted = tmp_path / "queue", {}
    made(tmp_path / "actor_critic", "sac_continuous_action", "Hopper-v5", 1, steps=9000)
    made(tmp_path / "modern", "sac_continuous_action", "Hopper-v5", 1, steps=1000)
    made(tmp_path / "stopped", "twin_dqn", "CartPole-v1", 3)
    for script, env_id, variant, steps, folder in (
        ("sac_continuous_action", "Hopper-v5", "", 1000, "modern"),  # of the same budget
        ("sac_continuous_action", "Hopper-v5", "million", 9000, "actor_critic"),
        ("sac_continuous_action", "games/Cue-v0", "", 1000, "games"),  # games have a folder of their own
        ("sac_nstep", "Hopper-v5", "100k", 1000, "modern"),  # by its parent
    ):
        wanted[made(queue, script, env_id, 2, variant, steps).name] = folder
    assert collect.collect(queue, tmp_path, dry=True) == 0 and len(list(queue.iterdir())) == 4
    assert collect.collect(queue, tmp_path) == 0
    assert not list(queue.iterdir())
    assert all((tmp_path / folder / name).is_file() for name, folder in wanted.items())
    out = capsys.readouterr().out
    assert all(f"{name} -> {folder}" in out for name, folder in wanted.items())
    there = {path: path.read_bytes() for path in tmp_path.glob("*/*")}
    made(queue, "sac_nstep", "Hopper-v5", 2, "100k", 1000)  # the worker has written it again
    assert collect.collect(queue, tmp_path) == 0
    assert {path: path.read_bytes() for path in tmp_path.glob("*/*")} == there


def test_no_result_is_overwritten_and_none_goes_astray(tmp_path, capsys):
    made(tmp_path / "dqn", "dqn", "CartPole-v1", 1)
    made(tmp_path / "queue", "dqn", "CartPole-v1", 1, score=2.0)
    made(tmp_path / "queue", "someone", "Else-v1", 1)
    assert collect.collect(tmp_path / "queue", tmp_path) == 2
    assert "another is in dqn" in (out := capsys.readouterr().out) and "nothing tells where it belongs" in out
    assert results.read(tmp_path / "dqn/CartPole-v1__dqn__1.json.gz").eval["mean"] == [1.0]
