"""What is left of a training in its process once it is over: many in one process need no more memory than one."""

import gc
import subprocess
import sys
import weakref
from pathlib import Path

import pytest
from conftest import environment, script

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="memory mappings are counted as Linux tells them")
FILES = {
    "ppo_jax": "--total-timesteps 512 --num-envs 4 --num-steps 64 --num-minibatches 1 --update-epochs 1",
    "ppo": "--total-timesteps 512 --num-envs 4 --num-steps 64 --num-minibatches 1 --update-epochs 1",
}
EVERY = "--eval-every 0 --eval-episodes 1 --save-every 0"


def mappings():
    """How many pieces of memory this process has; Linux allows 65,530."""
    return Path("/proc/self/maps").read_text().count("\n")


@pytest.mark.parametrize("name", [pytest.param(x, marks=pytest.mark.slow) if x.endswith("_jax") else x for x in FILES])
def test_a_training_that_is_over_is_forgotten(name, train):
    """Neither `atexit`, nor a hook, nor a thread, nor a cache of JAX keeps it, its script or its compiled code. The
    first one does not count: modules that are imported then, as `multiprocessing`, remember which script runs."""
    kept, counts = [], []
    for _ in range(4):
        run = train(name, *FILES[name].split(), *EVERY.split())["run"]
        kept.append([weakref.ref(each) for each in (run, *getattr(run, "runs", []))])
        del run
        gc.collect()
        counts.append(mappings())
    assert not any(ref() for refs in kept[1:] for ref in refs)
    assert counts[-1] - counts[0] < 3 * 20, counts  # each would be some 600


MANY = """
import contextlib, io, pathlib, runpy, sys

path, times, flags = sys.argv[1], int(sys.argv[2]), sys.argv[3:]
for seed in range(times):
    sys.argv = [path, *flags, "--seed", str(seed)]
    with contextlib.redirect_stdout(io.StringIO()):
        runpy.run_path(path, run_name="__main__")
    print(pathlib.Path("/proc/self/maps").read_text().count(chr(10)))
"""


@pytest.mark.slow
def test_a_hundred_trainings_in_one_process_have_few_memory_mappings(tmp_path):
    """Where Python collects its garbage by itself."""
    flags = [*FILES["ppo_jax"].split(), *EVERY.split(), "--runs-dir", tmp_path]
    words = [sys.executable, "-c", MANY, script("ppo_jax"), 100, *flags]
    done = subprocess.run(map(str, words), env=environment(), capture_output=True, text=True, timeout=3600)
    counts = [int(line) for line in done.stdout.split()]
    assert len(counts) == 100 and max(counts) < 5_000, (counts, done.stderr)
