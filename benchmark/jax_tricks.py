"""What each trick of `ppo_jax.py` is worth: its speed on CartPole-v1 with one trick undone at a time.

    python benchmark/jax_tricks.py --rounds 5

The variants are the file itself with a few words replaced; they learn the same. Each measurement is a process of its
own, one seed; the clock starts after 80 iterations, everything compiled. A round measures every variant once, in turn;
the table gives the median, the range and the ratio to the file as it is within the same round. Writes the numbers to
`--out`.
"""

import json
import tempfile
from pathlib import Path

import speed

SCRIPT = speed.ROOT / "algorithms/ppo/ppo_jax.py"
WHOLE = "as it is"
STEPS, WARM_UP = 1_280 * 512, 80 * 512
UNDONE = {  # what is given up -> what stands in the file and what stands there instead
    "XLA may use its threads": [
        (
            "from solorl.run.seeds import Runs\n",
            "import os\n\nfrom solorl.run.seeds import ONE_THREAD, Runs\n\n"
            "ONE_THREAD.clear()\nos.environ['NPROC'] = str(os.cpu_count())\n",
        ),
    ],
    "every iteration a call of its own": [("chunk=16", "chunk=1")],
    "noise drawn step by step": [
        (
            "noise = jax.random.gumbel(noise_key, (*shape, int(envs.single_action_space.n)))",
            "noise = jax.random.split(noise_key, args.num_steps)",
        ),
        (
            "sampler = partial(act, params)\n",
            "sampler = lambda obs, key: act(params, obs, "
            "jax.random.gumbel(key, (args.num_envs, int(envs.single_action_space.n))))\n",
        ),
    ],
    "first states drawn step by step": [
        ("fresh = envs.starts(start_key, args.num_steps)", "fresh = jax.random.split(start_key, args.num_steps)"),
        ("envs.step(state, action, fresh)", "envs.step(state, action, envs.starts(fresh, 1)[0])"),
    ],
    "probability by a gather, not a mask": [
        (
            "    taken = action[:, None] == jnp.arange(logprobs.shape[1])  # for few actions faster than a gather\n",
            "    picked = jnp.take_along_axis(logprobs, action[:, None].astype(jnp.int32), 1)\n",
        ),
        ("jnp.where(taken, logprobs, 0).sum(1)", "picked[:, 0]"),
    ],
    "GAE's loop not unrolled": [("reverse=True, unroll=16", "reverse=True")],
    "each array shuffled by itself": [
        (
            "return jnp.concatenate(columns, 1), [x.shape[2:] for x in arrays]",
            "return tuple(columns), [x.shape[2:] for x in arrays]",
        ),
        (
            "return [rows[:, b : b + w].reshape(-1, *s) for b, w, s in zip(begins, widths, shapes, strict=True)]",
            "return [x.reshape(-1, *s) for x, s in zip(rows, shapes, strict=True)]",
        ),
        (
            "minibatches = jax.random.permutation(key, batch).reshape(args.num_minibatches, -1, batch.shape[1])",
            "order = jax.random.permutation(key, len(batch[0]))\n"
            "        minibatches = tuple(x[order].reshape(args.num_minibatches, -1, x.shape[1]) for x in batch)",
        ),
    ],
    "parameters as a tree, not a vector": [
        ("optimizer.init(ravel_pytree(params)[0])", "optimizer.init(params)"),
        ("vector, unravel = ravel_pytree(params)", "vector, unravel = params, lambda params: params"),
        (
            "    gradient *= jnp.minimum(1, args.max_grad_norm / (jnp.linalg.norm(gradient) + 1e-6))\n",
            "    scale = jnp.minimum(1, args.max_grad_norm / (optax.global_norm(gradient) + 1e-6))\n"
            "    gradient = jax.tree.map(lambda x: scale * x, gradient)\n",
        ),
        (
            "return (vector - learning_rate * direction, state), terms",
            "return (jax.tree.map(lambda x, y: x - learning_rate * y, vector, direction), state), terms",
        ),
    ],
}


def variants():
    """Name of what is undone -> source of the script; a ValueError where the file no longer has the words."""
    source = SCRIPT.read_text()
    found = {WHOLE: source}
    for name, changes in UNDONE.items():
        text = source
        for old, new in changes:
            if text.count(old) != 1:
                raise ValueError(f"{name}: {old!r} stands {text.count(old)} times in {SCRIPT.name}")
            text = text.replace(old, new)
        found[name] = text
    return found


def table(path):
    """The measurements of a file as a Markdown table."""
    about = json.loads(Path(path).read_text())
    lines = ["| `ppo_jax.py` | steps/s, median | range | ratio to the file as it is |", "|---|---:|---:|---:|"]
    lines += speed.rows(about["rounds"], [WHOLE])
    return "\n".join([*lines, "", f"{speed.where(about['rounds'], about)}, one seed, one thread but where said."])


def main():
    args = speed.arguments("jax_tricks", __doc__).parse_args()
    rounds = []
    with tempfile.TemporaryDirectory() as folder:
        files = {}
        for number, (name, text) in enumerate(variants().items()):
            files[name] = Path(folder) / f"variant_{number}.py"
            files[name].write_text(text)
        for _ in range(args.rounds):
            rates = {name: speed.solorl(file, STEPS, WARM_UP, "--save-every", 0) for name, file in files.items()}
            rounds.append(rates)
            speed.write(args.out, rounds=rounds, threads=1)  # so that an interruption loses one round
    print(table(args.out))


if __name__ == "__main__":
    main()
