"""The reader of command lines: flags, types, and the ranges that stand in the comments."""

import argparse
import ast
import dataclasses
import functools
import importlib.util
import re
import sys
import tomllib
import typing

import pytest
from conftest import ROOT

from solorl import RunArgs
from solorl.args import command_line
from solorl.args.command_line import RANGE, check_ranges, comments_of, given_arguments, parser_of, value_of
from solorl.catalog import stub
from solorl.lab.studies.plan import table_flags
from solorl.lab.studies.task import words
from solorl.scripts import script_paths

VALUES = (
    "-inf -200 -1 -0.5 -0 0 0.5 1 1.5 2 200 2147483647 2147483648 9223372036854775807 9223372036854775808 1e300 inf"
)
VALUES += " nan None many"
SIZES = "1 2 200 2147483647 2147483648 9223372036854775807"
NUMBERS = "-0 0 0.5 1 1.5 2 200 2147483647 2147483648 9223372036854775807 9223372036854775808 1e300"
# Accepted values -> the fields, of all files, that accept these of VALUES and no other. Recorded with the reader before
# this one; a range that changes is a change of behaviour and is written here.
ACCEPTED = {
    "-0 0 1 2 200 2147483647": "seed",
    SIZES: "threads eval_episodes total_timesteps num_envs buffer_size batch_size policy_frequency num_seeds num_steps "
    "target_network_frequency train_frequency n_atoms num_minibatches update_epochs num_actors "
    "num_replay_shards n_step broadcast_frequency teacher_steps",
    f"-0 0 {SIZES}": "log_every save_every eval_every learning_starts offline_steps",
    f"-200 -1 -0.5 {NUMBERS} None": "target_return",
    f"-200 -1 -0.5 {NUMBERS}": "v_min v_max",
    NUMBERS: "utd_ratio learning_rate exploration_noise policy_lr q_lr alpha target_entropy_scale policy_noise "
    "output_penalty temperature duration_exponent epsilon_exponent clip_coef vf_coef ent_coef std_init rpo_alpha",
    "-0 0 0.5 1": "gamma tau start_e end_e exploration_fraction gae_lambda q_lambda "
    "base_epsilon prioritized_replay_alpha prioritized_replay_beta norm_rate",
    f"{NUMBERS} inf": "noise_clip max_grad_norm",
    f"{NUMBERS} None": "target_kl",
}
TABLE = {name: values.split() for values, names in ACCEPTED.items() for name in names.split()}
# What could be meant for a phrase of RANGE.
LIKE_A_RANGE = re.compile(
    r"(from|between|in|to|and|or|than) [\[(]?-?\d|\d ?(-|\.\.|,|to|and) ?-?\d|\binf|negative|\bsign|\bzero|\b0:"
    r"|[<>]=|[≤≥]|at (least|most) \d",
    re.IGNORECASE,
)


def load(path, name="loaded"):
    """The class Args of a file, which stays in sys.modules, where its source is looked for."""
    spec = importlib.util.spec_from_file_location(f"{name}_{path.stem}", path)
    sys.modules[spec.name] = module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.Args


@functools.cache
def args_of(name):
    return load(script_paths()[name])


@pytest.fixture
def made(tmp_path, monkeypatch):
    """`made("x: int = 1  # help", ...)` is a class Args with these fields."""

    def make(*fields):
        path = tmp_path / "made.py"
        lines = [
            "from dataclasses import dataclass",
            "from solorl import RunArgs",
            "@dataclass",
            "class Args(RunArgs):",
        ]
        path.write_text("\n".join(["'''Title.'''", *lines, *(f"    {field}" for field in fields), ""]))
        monkeypatch.setitem(sys.modules, "made_made", None)
        return load(path, "made")

    return make


def read(args_type, *argv):
    args = args_type(**given_arguments(args_type, list(argv)))
    check_ranges(args)
    return args


def refusal(args_type, *argv):
    with pytest.raises(argparse.ArgumentError) as error:
        read(args_type, *argv)
    return str(error.value)


# ---------------------------------------------------------------------- ranges
@pytest.mark.parametrize("name", script_paths())
def test_values_are_accepted_as_in_the_table(name, monkeypatch):
    monkeypatch.setattr(command_line, "comments_of", functools.cache(comments_of))
    args_type = args_of(name)
    hints = typing.get_type_hints(args_type)
    fields = [field.name for field in dataclasses.fields(args_type) if field.name in TABLE]
    offline = any(field.name == "dataset" for field in dataclasses.fields(args_type))
    assert {"seed", "target_return"} <= set(fields)
    assert offline or {
        "total_timesteps",
        *(["gamma"] if name not in ("ars", "dagger", "grpo", "alphazero", "alphazero_jax") else []),
    } <= set(fields)
    for field in fields:
        accepted, flag = [], "--" + field.replace("_", "-")
        for text in VALUES.split():
            args = args_type()
            try:
                setattr(args, field, value_of(flag, hints[field], text))
                check_ranges(args)
            except argparse.ArgumentError as error:
                assert str(error).startswith((f"{flag} is ", f"{flag} must be "))
            else:
                accepted.append(text)
        assert accepted == TABLE[field], field


def test_the_table_names_fields_that_exist():
    fields = {field.name for name in script_paths() for field in dataclasses.fields(args_of(name))}
    assert TABLE.keys() <= fields


@pytest.mark.parametrize(
    ("field", "accepted", "refused", "must"),
    [
        ("x: float = 0.9  # share, from 0 to 1", "0 0.5 1 -0", "-0.1", "at least 0"),
        ("x: float = 0.9  # share, from 0 to 1", "0 1", "1.01 2", "at most 1"),
        ("x: float | None = None  # share, from 0 to 1", "0 1 None", "1.01", "at most 1"),
        ("x: float = -1.0  # angle; from -2.5 to 2.5", "-2.5 2.5", "-2.6 -1e9", "at least -2.5"),
        ("x: int = 5  # rank, from 2 to 2147483647", "2 2147483647", "2147483648", "at most 2147483647"),
        ("x: int = 5  # rank, from 2 to 9", "2 9", "1 0 -1", "at least 2"),
        ("x: int = 5  # steps; 0: none", "0 1 99", "-1", "at least 0"),
        ("x: int = 5  # steps, at least; 0: only at the end [tune: 1..9]", "0 1 99", "-1", "at least 0"),
        ("x: float = 5.0  # bound; inf: do not clip", "0 7 inf", "-inf -1", "at least 0"),
        ("x: float = 5.0  # bound; inf: do not clip", "0 7 inf", "nan", "a finite number"),
        ("x: float = 5.0  # score; may be negative", "-7.5 0 7", "inf -inf nan", "a finite number"),
        ("x: int = 5  # score, may be negative", "-7 0 7 -9223372036854775808", "", ""),
        ("x: int = 5  # a size", "1 99", "0 -1", "at least 1"),
        ("x: int = 0  # a count", "0 99", "-1", "at least 0"),
        ("x: float = 5.0  # a number", "0 99", "-1 -1e-9 -1e3", "at least 0"),
        ("x: float = 5.0  # a number", "0 99", "nan inf -inf", "a finite number"),
        ("x: float | None = None  # a number", "0 99 None", "-1", "at least 0"),
        ("x: float = -5.0", "-99 0 99", "inf nan", "a finite number"),
        ("x: float = 0.9  # from 0 to 1", "0 1", "1.01", "at most 1"),
        ("x: float = 5.0  # from 0 to 1 is not the last part", "7", "-1", "at least 0"),
        ("x: float = 5.0  # anneal from 0 to 1", "7", "-1", "at least 0"),
    ],
)
def test_each_phrase_is_enforced(made, field, accepted, refused, must):
    args_type = made(field)
    for text in accepted.split():
        assert read(args_type, "--x", text).x == (None if text == "None" else float(text))
    for text in refused.split():
        sentence = refusal(args_type, "--x", text)
        assert sentence.startswith("--x is ") and sentence.endswith(f", but must be {must}")


def test_ranges_hold_for_saved_values_too(made):
    args = made("x: float = 0.9  # share, from 0 to 1")()
    args.x = 7.0
    with pytest.raises(argparse.ArgumentError, match=r"--x is 7.0, but must be at most 1"):
        check_ranges(args)


def numeric(args_type, name):
    hint = typing.get_type_hints(args_type)[name]
    return not {int, float}.isdisjoint({hint, *typing.get_args(hint)})


def near_misses(comments):
    return {name: text for name, text in comments.items() if LIKE_A_RANGE.search(text) and not RANGE.search(text)}


@pytest.mark.parametrize("args_type", [RunArgs, stub.RunArgs, *script_paths()])
def test_no_comment_nearly_says_a_range(args_type):
    args_type = args_of(args_type) if isinstance(args_type, str) else args_type
    comments = {name: text for name, text in comments_of(args_type).items() if numeric(args_type, name)}
    assert len(comments) > 2
    assert near_misses(comments) == {}


@pytest.mark.parametrize(
    "comment",
    [
        *("share, between 0 and 1", "share, 0 to 1", "share in [0, 1]", "share, 0..1", "share, From 0 to 1"),
        *(
            "share from 0 to 1",
            "share, from 0 to 1.",
            "from 0 to 1, a share",
            "share, from 0 to one",
            "share, 0-1",
            "share,from 0 to 1",
        ),
        *("steps, or 0", "steps; zero: none", "steps 0: none", "steps; 0: none; then all", "at least 0", "size >= 1"),
        *("bound, or inf", "bound; infinite: none", "bound inf: none", "bound; Inf: none", "score; can be negative"),
        *("score may be negative", "score; may be negative, too", "score, any sign", "score; negative values allowed"),
    ],
)
def test_near_misses_are_found(comment):
    assert near_misses({"x": comment}) == {"x": comment}


def test_phrases_are_documented_where_they_are_read_and_for_contributors():
    for text in (command_line.__doc__, (ROOT / "CONTRIBUTING.md").read_text()):
        for phrase in ("from 0 to 1", "0: ", "inf: ", "may be negative"):
            assert phrase in text


def test_help_shows_the_range_as_it_stands():
    text = " ".join(parser_of(args_of("dqn")).format_help().split())
    assert "--gamma discount factor, from 0 to 1 [0.99]" in text
    assert "--learning-starts environment steps before the first gradient step; 0: learn at once [10000]" in text
    assert "(auto: the environment's); may be negative --capture-video" in text


# ---------------------------------------------------------------------- flags
@pytest.mark.parametrize(
    ("argv", "field", "value"),
    [
        ("--gamma 0.5", "gamma", 0.5),
        ("--gamma=.5", "gamma", 0.5),
        ("--num_envs 3", "num_envs", 3),
        ("--num_envs=3", "num_envs", 3),
        ("--num-envs 3 --num-envs 5", "num_envs", 5),
        ("--total-timesteps 1_000", "total_timesteps", 1000),
        ("--no-anneal-lr", "anneal_lr", False),
        ("--no_anneal_lr", "anneal_lr", False),
        ("--no-anneal-lr --anneal-lr", "anneal_lr", True),
        ("--track", "track", True),
        ("--target-kl 0.1", "target_kl", 0.1),
        ("--target-kl 0.1 --target-kl None", "target_kl", None),
        ("--wandb-entity me", "wandb_entity", "me"),
        ("--wandb-entity None", "wandb_entity", None),
        ("--exp-name None", "exp_name", "None"),
        ("--env-id probes:A_b-v0", "env_id", "probes:A_b-v0"),
        ("--env-id=a=b_c", "env_id", "a=b_c"),
        ("--exp-name=", "exp_name", ""),
        ("--exp-name=--seed", "exp_name", "--seed"),
        ("--target-return auto", "target_return", "auto"),
        ("--target-return=auto", "target_return", "auto"),
        *((f"--target-return{sign}{text}", "target_return", float(text))
          for text in ("-200", "-.5", "-1e3", "-1.5e-3", "7", "+7") for sign in " ="),
    ],
)  # fmt: skip
def test_flags_are_read(argv, field, value):
    read_value = getattr(read(args_of("ppo"), *argv.split()), field)
    assert read_value == value and type(read_value) is type(value)


def test_only_what_is_given_is_read():
    assert given_arguments(args_of("ppo"), []) == {}
    assert given_arguments(args_of("ppo"), ["--seed", "1", "--no-track"]) == {"seed": 1, "track": False}


def test_every_switch_works_both_ways():
    switches = [field.name for field in dataclasses.fields(args_of("ppo")) if isinstance(field.default, bool)]
    assert len(switches) > 10
    for name in switches:
        flag = name.replace("_", "-")
        assert given_arguments(args_of("ppo"), [f"--{flag}"]) == {name: True}
        assert given_arguments(args_of("ppo"), [f"--no-{flag}"]) == {name: False}


# What no integer is written as.
NO_INTEGERS = (*"many None 1.5 1.5e0 1.2345k 1e-3 1e 1e3k k 2m 2G 5__0 _5 1/2 0x10 inf nan 1e999999999".split(), "")


@pytest.mark.parametrize(
    ("text", "number"),
    [
        *(("500000", 500_000), ("500_000", 500_000), ("500k", 500_000), ("500K", 500_000), ("2M", 2_000_000)),
        *(("1e6", 1_000_000), ("1E6", 1_000_000), ("1e+6", 1_000_000), ("1.5M", 1_500_000), ("2.5e3", 2_500)),
        *(("1000000.0", 1_000_000), ("+4", 4), ("9_007_199_254_740_993", 2**53 + 1)),
        ("9223.372036854775807e15", 2**63 - 1),
    ],
)
def test_integers_are_read_as_people_write_them(text, number):
    args = read(args_of("ppo"), "--total-timesteps", text)
    assert args.total_timesteps == number and type(args.total_timesteps) is int


def test_a_suite_may_write_integers_as_people_do():
    """In TOML 1e6 is a float."""
    flags = table_flags(tomllib.loads("total-timesteps = 1e6\nnum-envs = '1k'\nnum-steps = 1_024"), "a suite")
    args = read(args_of("ppo"), *words(flags))
    assert (args.total_timesteps, args.num_envs, args.num_steps) == (1_000_000, 1_000, 1_024)


@pytest.mark.parametrize(
    ("argv", "sentence"),
    [
        ("--gama 1", "unknown option --gama; did you mean --gamma? (--help lists all)"),
        ("--num-env 3", "unknown option --num-env; did you mean --num-envs? (--help lists all)"),
        ("--no-aneal-lr", "unknown option --no-aneal-lr; did you mean --no-anneal-lr? (--help lists all)"),
        ("--no-gamma", "unknown option --no-gamma; did you mean --gamma? (--help lists all)"),
        ("--lerning_rate=3", "unknown option --lerning-rate; did you mean --learning-rate? (--help lists all)"),
        ("--zzzzzzzzzz", "unknown option --zzzzzzzzzz (--help lists all)"),
        ("-x", "unknown option -x (--help lists all)"),
        ("--num-envs 9223372036854775808", "--num-envs is too large: it must be smaller than 2**63"),
        ("-- --seed 3", "unknown option -- (--help lists all)"),
        *(
            (f"--num-envs={x}", f"--num-envs must be an integer such as 8, 500k, 2M or 1e6, got {x!r}")
            for x in NO_INTEGERS
        ),
        ("--num-envs -1k", "--num-envs is -1000, but must be at least 1"),
        ("--num-envs 0k", "--num-envs is 0, but must be at least 1"),
        ("--num-envs 1e99", "--num-envs is too large: it must be smaller than 2**63"),
        ("--gamma many", "--gamma must be a number, got 'many'"),
        ("--target-kl none", "--target-kl must be a number or None, got 'none'"),
        ("--num-envs", "--num-envs needs a value"),
        ("--num-envs --seed 1", "--num-envs needs a value"),
        ("--anneal-lr False", "--anneal-lr takes no value, got 'False'; write --anneal-lr or --no-anneal-lr"),
        ("--seed 2 --no-anneal-lr 1", "--anneal-lr takes no value, got '1'; write --anneal-lr or --no-anneal-lr"),
        ("--anneal-lr=False", "--anneal-lr or --no-anneal-lr takes no value"),
        ("--seed 3 4", "'4' does not follow a flag that takes a value; did you mean --env-id 4?"),
        ("--env-id A 4", "'4' does not follow a flag that takes a value"),
        ("Acrobot-v1", "'Acrobot-v1' does not follow a flag that takes a value; did you mean --env-id Acrobot-v1?"),
    ],
)
def test_a_sentence_names_flag_value_and_type(argv, sentence):
    assert refusal(args_of("ppo"), *argv.split()) == sentence


def test_other_types_are_set_in_the_file(made):
    args_type = made("sizes: tuple[int, ...] = (64, 64)  # of the layers")
    assert read(args_type, "--seed", "2").sizes == (64, 64)
    assert (
        refusal(args_type, "--sizes", "3") == "--sizes is of type tuple[int, ...], which only the file itself can set"
    )


def test_ranges_need_the_source():
    args_type = dataclasses.make_dataclass("Args", [("x", int, 1)], bases=(RunArgs,))
    sentence = refusal(args_type)  # as in a notebook
    assert sentence.startswith("the source of Args, which has the ranges of the arguments, cannot be read here")
    assert "`python FILE.py` or `solo train FILE.py`" in sentence


def test_the_reader_needs_the_standard_library_only():
    tree = ast.parse((ROOT / "solorl/args/command_line.py").read_text())
    modules = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    modules |= {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    assert modules and modules <= sys.stdlib_module_names


@pytest.mark.parametrize(("seed", "seeds"), [(2147483647, 2), (2147483600, 49)])
def test_the_last_of_several_seeds_is_in_the_range_of_a_seed(train, tmp_path, seed, seeds):
    train("ppo_jax", "--seed", seed, "--num-seeds", seeds, "--total-timesteps", 1, code=2)
    assert train.out == "error: the last of --num-seeds must be at most 2147483647\n"
    assert not (tmp_path / "runs").exists()
    train("ppo_jax", "--seed", seed, "--num-seeds", seeds - 1, "--total-timesteps", 1, code=2)
    assert "--total-timesteps 1 is less than one iteration" in train.out


@pytest.mark.parametrize("name", ["a/b", "/tmp/x"])
def test_an_experiment_whose_name_has_a_slash_is_refused(train, tmp_path, name):
    train("ppo", "--exp-name", name, code=2)
    sentence = f"--exp-name is part of a folder's name, so it must have no slash, got '{name}'"
    assert train.out == f"error: {sentence}\n" and not (tmp_path / "runs").exists()
