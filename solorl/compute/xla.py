"""XLA: its threads, its device, compiled code on the disk, and many iterations in one compiled call."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from solorl.errors import quit_with
from solorl.machine import own_cores

# Operations of microseconds: handing them to other threads costs more than it brings.
PARALLEL = ("xla_cpu_multi_thread_eigen", "xla_cpu_enable_concurrency_optimized_scheduler")
# of the compiler; on a GPU other operations, without which a resumed run differs in the last bits
OPTIONS: dict[str, Any] = {"cpu": dict.fromkeys(PARALLEL, False), "gpu": {"xla_gpu_deterministic_ops": True}}


def is_cpu(device: Any) -> bool:
    """Whether a device of JAX is the CPU."""
    return device.platform == "cpu"


def keep_compiled_code(threads: int) -> None:
    """Compiled code, which is another one for every number of threads, stays on the disk; the environment variable
    JAX_COMPILATION_CACHE_DIR says where else."""
    if not os.environ.get("JAX_COMPILATION_CACHE_DIR"):
        try:
            cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
            folder = cache / "solorl" / "jax" / f"threads_{threads}"
            folder.mkdir(parents=True, exist_ok=True)
        except (OSError, RuntimeError):  # no home
            return
        jax.config.update("jax_compilation_cache_dir", str(folder))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.5)


def start_xla(threads: int) -> int:
    """Start XLA, which has one pool of threads for all seeds, as large as an environment variable says while it starts.
    One that the user has set stays; in a process in which XLA runs already nothing changes. Returns the number."""
    if os.environ.get("NPROC", "").isdigit():
        return int(os.environ["NPROC"])
    threads = min(threads, len(own_cores()))
    os.environ["NPROC"] = str(threads)
    try:
        jax.devices()
    finally:
        del os.environ["NPROC"]  # not for processes started from here
    return threads


def choose_device(name: str) -> None:
    """Let JAX use the device of `--device`; one sentence and exit code 2 where there is none."""
    if name == "auto":
        return
    platform, _, number = name.partition(":")
    try:
        if number and not number.isdecimal():
            raise ValueError(number)
        devices = jax.devices({"cuda": "gpu"}.get(platform, platform))
        jax.config.update("jax_default_device", devices[int(number or 0)])
    except (RuntimeError, ValueError, IndexError):
        there = sorted({device.platform for device in jax.devices()})
        quit_with(f"--device {name} was asked for, but JAX sees only {', '.join(there)}; --device cpu runs everywhere")


def compiled(iteration: Callable[..., Any], chunk: int, training: Any, *shared: Any) -> Callable[..., Any]:
    """A call `(training, count, *shared)` of `count` iterations, at most `chunk`, that writes over its first argument:
    the training after them, and their reports (chunk, ...), of which the first `count` mean something."""

    def many(training: Any, count: Any, *shared: Any) -> Any:
        report = jax.eval_shape(iteration, training, *shared)[1]
        history = jax.tree.map(lambda x: jnp.zeros((chunk, *x.shape), x.dtype), report)

        def body(i: Any, carry: Any) -> Any:
            training, report = iteration(carry[0], *shared)
            return training, jax.tree.map(lambda all, one: all.at[i].set(one), carry[1], report)

        return jax.lax.fori_loop(0, count, body, (training, history))

    options = OPTIONS.get(jax.tree.leaves(training)[0].device.platform)
    return jax.jit(many, donate_argnums=0).lower(training, jnp.int32(0), *shared).compile(options)
