"""What is left of a training in its process once it is over: many in one process need no more memory than one."""

import gc
import sys
import weakref
from pathlib import Path

import pytest

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="memory mappings are counted as Linux tells them")
FILES = {
    "ppo_jax": "--total-timesteps 512 --num-envs 4 --num-steps 64 --num-minibatches 1 --update-epochs 1",
    "ppo": "--total-timesteps 512 --num-envs 4 --num-steps 64 --num-minibatches 1 --update-epochs 1",
}
EVERY = "--eval-every 0 --eval-episodes 1 --save-every 0"


def mappings():
    """How many pieces of memory this process has; Linux allows 65,530."""
    return Path("/proc/self/maps").read_text().count("\n")


@pytest.mark.parametrize("name", FILES)
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


@pytest.mark.slow
def test_a_hundred_trainings_need_no_more_memory_mappings_than_a_few(train):
    """The garbage is collected as in any process, not after each."""
    gc.collect()
    before, counts = mappings(), []
    for seed in range(100):
        train("ppo_jax", *FILES["ppo_jax"].split(), *EVERY.split(), "--seed", seed)
        counts.append(mappings())
    assert max(counts) - before < 4_000, counts
