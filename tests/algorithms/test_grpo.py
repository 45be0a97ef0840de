"""GRPO: log-probabilities, masks, advantages and weights against loops and by hand; the transformer; what it learns."""

import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from conftest import comparable, definitions, drop_last_checkpoint, rows

GRPO = definitions("grpo")
SMALL = "--env-id text/reverse-3 --width 32 --num-layers 1 --num-heads 2".split()
SHORT = "--warmup-examples 50 --warmup-batch-size 16 --num-prompts 4 --group-size 4 --eval-every 0".split()
# One iteration in which some answers are right.
CREDIT = "--env-id text/reverse-2 --width 32 --num-layers 1 --num-heads 2 --warmup-examples 100"
CREDIT += " --warmup-fraction 0.962 --total-timesteps 6656 --learning-rate 2e-3 --num-prompts 16 --group-size 16"
CREDIT = [*CREDIT.split(), "--eval-every", "0", "--eval-episodes", "1"]
DEFAULT = GRPO["Args"]()


def made(width=32, prompt=4, answer=5, temperature=1.0, tokens=7, layers=2):
    torch.manual_seed(1)
    args = SimpleNamespace(width=width, num_layers=layers, num_heads=2, temperature=temperature)
    agent = GRPO["Agent"](tokens, prompt, answer, args)
    for p in agent.parameters():  # far from the start, where all probabilities are nearly equal
        torch.nn.init.normal_(p, std=0.3)
    return agent


def step_by_step(agent, prompt, answer):
    """Log-probabilities of an answer's tokens, each from a forward pass of its own over all tokens before it."""
    with torch.no_grad():
        found = []
        for t, token in enumerate(answer):
            logits = agent.actor(hidden(agent, torch.cat([prompt, answer[:t]])))[-1] / agent.temperature
            found.append(logits[token] - logits.exp().sum().log())
        return torch.stack(found)


def hidden(agent, tokens):
    """The last layer for one row of tokens, in loops: attention over the tokens up to each."""
    x = agent.token.weight[tokens] + agent.place.weight[: len(tokens)]
    for layer in agent.layers:
        query, key, value = layer.query_key_value(layer.norm1(x)).chunk(3, -1)
        size, attended = query.shape[-1] // layer.heads, torch.zeros_like(query)
        for head in range(layer.heads):
            part = slice(head * size, (head + 1) * size)
            for i in range(len(tokens)):
                score = torch.stack([query[i, part] @ key[j, part] for j in range(i + 1)]) / math.sqrt(size)
                attended[i, part] = sum(w * value[j, part] for j, w in enumerate(score.softmax(0)))
        x = x + layer.out(attended)
        x = x + layer.mlp(layer.norm2(x))
    return agent.norm(x)


# ---------------------------------------------------------------------- the language model
@pytest.mark.parametrize("temperature", [1.0, 0.5])
def test_logprobs_are_those_of_a_loop_over_tokens(temperature):
    """Of evaluate_answers, and of the answers that were drawn, whose keys and values are remembered."""
    agent = made(temperature=temperature)
    prompt = torch.randint(7, (3, 4))
    answer, logprob, value = agent.generate(prompt, group_size=2)
    prompt = prompt.repeat_interleave(2, 0)
    again, entropy, value_again = agent.evaluate_answers(prompt, answer)
    expected = torch.stack([step_by_step(agent, *pair) for pair in zip(prompt, answer, strict=True)])
    torch.testing.assert_close(again, expected, atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(logprob, again.detach(), atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(value, value_again.detach(), atol=1e-5, rtol=1e-4)
    assert logprob.std() > 0.1 and (entropy > 0).all() and (entropy < math.log(7)).all()


def test_later_tokens_change_nothing_before_them():
    agent, tokens = made(), torch.randint(7, (1, 9))
    other = tokens.clone()
    other[0, 5:] = (other[0, 5:] + 1) % 7
    (one, value, _), (two, value2, _) = agent(tokens), agent(other)
    torch.testing.assert_close(one[:, :5], two[:, :5])
    torch.testing.assert_close(value[:, :5], value2[:, :5])
    assert ((one[:, 5:] - two[:, 5:]).abs().amax(-1) > 1e-3).all()


def test_greedy_answers_are_those_of_whole_forward_passes():
    agent, prompts = made(), torch.randint(7, (6, 4))
    answers = agent.act(prompts.numpy())
    assert answers.dtype == np.int64 and answers.shape == (6, 5)
    for prompt, answer in zip(prompts, answers, strict=True):
        tokens, expected = prompt, []
        for _ in range(5):
            token = agent.actor(hidden(agent, tokens))[-1].argmax()
            token = torch.tensor(0) if 0 in expected else token
            expected.append(int(token))
            tokens = torch.cat([tokens, token[None]])
        assert answer.tolist() == expected


def test_answers_are_drawn_from_the_policy_and_nothing_follows_an_end():
    agent = made(answer=2)
    prompt = torch.randint(7, (1, 4))
    answer, _, _ = agent.generate(prompt, group_size=20_000)
    assert (answer[answer[:, 0] == 0] == 0).all()
    for first in range(7):
        expected = step_by_step(agent, prompt[0], torch.tensor([first]))[0].exp()
        assert (answer[:, 0] == first).float().mean() == pytest.approx(float(expected), abs=0.012)
    among = answer[answer[:, 0] == 3][:, 1]
    expected = step_by_step(agent, prompt[0], torch.tensor([3, 5]))[1].exp()
    assert len(among) > 200 and (among == 5).float().mean() == pytest.approx(float(expected), abs=0.06)


def test_what_counts_of_an_answer_ends_with_its_first_end_token():
    answer = torch.tensor([[3, 0, 0, 0], [0, 0, 0, 0], [1, 2, 3, 4], [1, 2, 3, 0]])
    assert GRPO["answer_mask"](answer).tolist() == [[1, 1, 0, 0], [1, 0, 0, 0], [1, 1, 1, 1], [1, 1, 1, 1]]


# ---------------------------------------------------------------------- credit
def advantage(reward, **args):
    args = SimpleNamespace(**{"baseline": "group", "std_norm": True, "group_size": 4} | args)
    return GRPO["group_advantage"](torch.tensor(reward), args)


def test_advantages_by_hand():
    reward = [[1.0, 0.0, 0.0, 0.0], [1.0, 1.0, 1.0, 1.0], [0.0, 0.0, 0.0, 0.0]]
    std = (3 * 0.25**2 + 0.75**2) ** 0.5 / 3**0.5  # of a sample: 0.5
    expected = [[0.75 / std, *[-0.25 / std] * 3], [0.0] * 4, [0.0] * 4]
    torch.testing.assert_close(advantage(reward), torch.tensor(expected), atol=1e-3, rtol=0)
    expected = [[0.75, -0.25, -0.25, -0.25], [0.0] * 4, [0.0] * 4]
    torch.testing.assert_close(advantage(reward, std_norm=False), torch.tensor(expected))
    expected = [[1.0, *[-1 / 3] * 3], [0.0] * 4, [0.0] * 4]  # less the mean of the others
    torch.testing.assert_close(advantage(reward, std_norm=False, baseline="others"), torch.tensor(expected))
    torch.testing.assert_close(advantage(reward, std_norm=False, baseline="none"), torch.tensor(reward))


@pytest.mark.parametrize("baseline", ["group", "others"])
def test_nothing_is_learned_from_a_group_of_equal_rewards(baseline):
    """Of any size: the mean of twelve times 0.3 is not 0.3 in float32, and Adam would make a whole step of the rest."""
    for size in range(2, 33):
        for tenths in range(1, 10):
            found = advantage([[tenths / 10] * size], baseline=baseline, group_size=size)
            assert not found.any(), (size, tenths)
    assert advantage([[0.3, 0.3, 0.3, 0.4]], baseline=baseline).all()


def test_weights_by_hand():
    """Two answers, of one token and of three; a third one is left out."""
    mask = torch.tensor([[1.0, 0, 0, 0], [1, 1, 1, 0], [0, 0, 0, 0]])
    weights = {way: GRPO["token_weights"](mask, way).tolist() for way in ("answers", "tokens", "places")}
    third = 1 / 6
    expected = {
        "answers": [[0.5, 0, 0, 0], [third, third, third, 0], [0] * 4],
        "tokens": [[0.25, 0, 0, 0], [0.25, 0.25, 0.25, 0], [0] * 4],
        "places": [[0.125, 0, 0, 0], [0.125, 0.125, 0.125, 0], [0] * 4],
    }
    for way, wanted in expected.items():
        np.testing.assert_allclose(weights[way], wanted, rtol=1e-6)
        assert not GRPO["token_weights"](torch.zeros(3, 4), way).any()


def batch_of(agent, n=6):
    prompt = torch.randint(7, (n, 4))
    answer, logprob, _ = agent.generate(prompt)
    mask = GRPO["answer_mask"](answer)
    noise, others = torch.randn(2, *answer.shape)
    weight = GRPO["token_weights"](mask, "answers")
    returns = torch.rand(n, 1).expand(n, 5)
    return GRPO["Batch"](prompt, answer, logprob + 0.3 * noise, logprob + others, torch.randn(n, 5), weight, returns)


@pytest.mark.parametrize("baseline", ["group", "critic"])
def test_the_loss_is_that_of_a_loop_over_tokens(baseline):
    """Eq. 3 and 4, of each token by itself; nothing after an end token counts."""
    agent = made()
    batch = batch_of(agent)
    args = GRPO["Args"](clip_coef=0.1, clip_high=0.3, kl_coef=0.7, vf_coef=0.9, baseline=baseline)
    loss, metrics = GRPO["grpo_loss"](agent, batch, args)
    objective = kl = clipped = value_loss = total = 0.0
    _, _, value = agent.evaluate_answers(batch.prompt, batch.answer)
    for i in range(len(batch.prompt)):
        logprob, answer = step_by_step(agent, batch.prompt[i], batch.answer[i]), batch.answer[i].tolist()
        length = answer.index(0) + 1 if 0 in answer else len(answer)
        for t in range(length):
            ratio = math.exp(logprob[t] - batch.logprob[i, t])
            a, x = float(batch.advantage[i, t]), math.exp(batch.reference[i, t] - logprob[t])
            objective += min(ratio * a, max(min(ratio, 1.3), 0.9) * a) / length / 6
            kl += (x - math.log(x) - 1) / length / 6
            clipped, total = clipped + (ratio < 0.9 or ratio > 1.3), total + 1
            value_loss += 0.5 * float((value[i, t] - batch.returns[i, t]).detach()) ** 2
    assert 0 < clipped < total < batch.answer.numel()
    assert float(metrics["losses/policy_loss"]) == pytest.approx(-objective, abs=1e-4)
    assert metrics["losses/reference_kl"].item() == pytest.approx(kl, abs=1e-4)
    assert float(metrics["losses/clipfrac"]) == pytest.approx(clipped / total, abs=1e-5)
    assert float(metrics["losses/value_loss"]) == pytest.approx(value_loss / total, abs=1e-4)
    expected = -objective + 0.7 * kl + (0.9 * value_loss / total if baseline == "critic" else 0)
    assert float(loss) == pytest.approx(expected, abs=1e-4)


def test_the_mean_of_the_estimator_is_the_divergence():
    """Over all answers of one token, each with its probability as its weight."""
    agent, reference = made(answer=1), made(answer=1)
    torch.nn.init.normal_(reference.actor.weight)
    prompt, answer = torch.tensor([[1, 2, 3, 4]]).expand(7, 4), torch.arange(7)[:, None]
    p, q = (each.evaluate_answers(prompt, answer)[0].detach() for each in (agent, reference))
    batch = GRPO["Batch"](prompt, answer, p, q, torch.zeros(7, 1), p.exp(), torch.zeros(7, 1))
    _, metrics = GRPO["grpo_loss"](agent, batch, DEFAULT)
    divergence = float((p.exp() * (p - q)).sum())
    assert divergence > 0.1 and metrics["losses/reference_kl"].item() == pytest.approx(divergence, abs=1e-4)


def test_imitation_is_the_mean_over_tokens_up_to_the_end():
    agent = made()
    prompt, answer = torch.randint(7, (2, 4)), torch.tensor([[3, 0, 0, 0, 0], [1, 2, 3, 4, 0]])
    loss, _ = GRPO["imitation_loss"](agent, prompt, answer)
    one, two = (step_by_step(agent, *pair) for pair in zip(prompt, answer, strict=True))
    assert float(loss) == pytest.approx(-float(one[:2].sum() + two.sum()) / 7, abs=1e-4)


# ---------------------------------------------------------------------- the script
def test_the_first_ratio_is_one(train):
    """With one gradient step for each batch nothing is ever clipped."""
    flags = "--warmup-fraction 0.5 --total-timesteps 64 --num-updates 1 --learning-rate 0".split()
    v = train("grpo", *SMALL, *SHORT, *flags, "--eval-episodes", "1")
    again, _, _ = v["agent"].evaluate_answers(v["prompt"], v["answer"])
    torch.testing.assert_close(again.detach(), v["logprob"], atol=1e-5, rtol=1e-5)
    row = rows(v["run"].dir, "losses/clipfrac")[-1]
    assert row["losses/clipfrac"] == 0 and row["losses/approx_kl"] < 1e-6 and row["losses/reference_kl"] < 1e-6


def test_rewards_and_groups_belong_to_their_prompts(train):
    """Each row of the batch, by reading its tokens; questions differ."""
    v = train("grpo", *CREDIT)
    reward, end = v["reward"], v["answer"] == 0
    assert reward.shape == (16, 16) and 0 < reward.mean() < 1
    for prompt, answer, one in zip(v["prompt"].tolist(), v["answer"].tolist(), reward.flatten(), strict=True):
        assert prompt[2] == 12 and one == (answer == [prompt[1], prompt[0], 0])
    groups = v["prompt"].view(16, 16, 3)
    assert (groups == groups[:, :1]).all() and len({tuple(row) for row in groups[:, 0].tolist()}) > 8
    assert torch.equal(v["equal"], (reward == 0).all(1) | (reward == 1).all(1)) and 0 < v["equal"].float().mean() < 1
    assert v["metrics"]["charts/equal_groups"] == v["equal"].float().mean()
    length = torch.where(end.any(1), end.int().argmax(1) + 1, 3)
    assert v["metrics"]["charts/answer_length"] == length.float().mean()
    row = rows(v["run"].dir, "charts/episodic_return")[-1]
    assert row["charts/episodic_return"] == pytest.approx(float(reward.mean()))


def test_the_warm_up_ends_where_enough_answers_are_right(train):
    v = train("grpo", *CREDIT)
    warm = rows(v["run"].dir, "losses/imitation_loss")
    shares = [row["charts/warmup_exact"] for row in warm]
    assert shares[-1] >= 0.25 > max(shares[:-1]) and len(warm) > 1
    assert v["now"].warmup_steps == warm[-1]["global_step"] == 64 * len(warm) < 6400
    last = rows(v["run"].dir)[-1]
    assert 6656 - 256 < last["global_step"] <= 6656  # the answers that it has left are used


@pytest.mark.parametrize("flags", [["--drop-equal-groups"], ["--baseline", "critic", "--no-std-norm"]])
def test_switches_of_credit(train, flags):
    v = train("grpo", *CREDIT, *flags)
    batch, mask = v["batch"], GRPO["answer_mask"](v["answer"])
    kept = (batch.weight > 0).any(1)
    assert batch.weight.sum() == pytest.approx(1.0) and not (batch.weight * (1 - mask)).any()
    if "critic" in flags:
        torch.testing.assert_close(batch.advantage, v["reward"].flatten()[:, None] - v["value"])
        assert kept.all()
    else:
        assert torch.equal(kept, ~v["equal"].repeat_interleave(16)) and 0 < kept.float().mean() < 1


def test_the_reference_is_the_model_after_the_warm_up(train):
    flags = [*SMALL, *SHORT, "--eval-episodes", "1"]
    warm = train("grpo", *flags, "--total-timesteps", "176", "--warmup-fraction", "0.91", "--learning-rate", "1e-3")
    torch.testing.assert_close(warm["batch"].reference, warm["batch"].logprob, atol=1e-5, rtol=1e-5)
    v = train("grpo", *flags, "--total-timesteps", "208", "--warmup-fraction", "0.77", "--learning-rate", "1e-3")
    for x, y, z in zip(*(each.parameters() for each in (warm["reference"], v["reference"], v["agent"])), strict=True):
        assert torch.equal(x, y)
        assert not torch.equal(y, z) or y.shape == (1, 32) or y.shape == (1,)  # the value head does not learn


@pytest.mark.parametrize("total", ["96", "272"])
def test_resumed_equals_uninterrupted(train, total):
    """From within the warm-up, and from after it."""
    flags = [*SMALL, *SHORT, "--warmup-fraction", "0.59", "--total-timesteps", "272", "--eval-episodes", "2"]
    whole = train("grpo", *flags, "--save-every", total if total == "96" else "224")
    expected, run_dir = comparable(whole["run"].dir), whole["run"].dir
    drop_last_checkpoint(run_dir)
    v = train("grpo", "--resume", run_dir)
    assert comparable(run_dir) == expected
    for name in ("agent", "reference"):
        for x, y in zip(v[name].parameters(), whole[name].parameters(), strict=True):
            assert torch.equal(x, y)


def test_learns_to_reverse(train):
    """Two digits, from hardly any right answers."""
    flags = "--env-id text/reverse-2 --width 32 --num-layers 1 --num-heads 2 --warmup-examples 30"
    flags += " --warmup-fraction 0.025 --total-timesteps 26k --learning-rate 2e-3 --eval-every 0 --log-every 500"
    v = train("grpo", *flags.split())
    share = [row["eval/episodic_return"] for row in rows(v["run"].dir, "eval/episodic_return")]
    assert share[-1] > 0.95


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        (["--width", "30"], "--width 30 must be a multiple of the 4 of --num-heads"),
        (["--group-size", "1"], "--group-size must be at least 2"),
        (["--temperature", "0"], "--temperature must be more than 0"),
        (["--total-timesteps", "560"], "--total-timesteps 560 leaves no iteration of 512 answers after the warm-up"),
        (["--env-id", "CartPole-v1"], "CartPole-v1 is not a task of text, as text/reverse-8 is; use ppo_multi"),
        (["--env-id", "text/reverse-80"], "there is no environment text/reverse-80; did you mean text/reverse-"),
        (["--env-id", "solorl.games:games/TwoNumbers-v0"], "is not a task of text: it has no `examples` and `rewards`"),
        (["--baseline", "none"], "--baseline none needs --no-std-norm"),
        (["--baseline", "critic", "--drop-equal-groups"], "--drop-equal-groups needs --baseline group or others"),
        (["--baseline", "mean"], "--baseline must be group or others or critic or none, got 'mean'"),
    ],
)  # fmt: skip
def test_bad_input_is_one_sentence(train, flags, sentence):
    train("grpo", *flags, code=2)
    assert sentence in train.out and train.out.count("\n") == 1
