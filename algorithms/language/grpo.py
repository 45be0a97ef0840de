# /// script
# requires-python = ">=3.11"
# dependencies = ["solorl>=0.1", "gymnasium>=1.2,<1.5", "numpy>=1.26,<3", "torch>=2.5"]
# ///
"""Group relative policy optimisation (GRPO): a tiny language model learns from rewards that a program gives.

`global_step` counts answers: right ones that the warm-up shows, then those that the model gives and a program judges.

Paper     Shao et al. 2024, https://arxiv.org/abs/2402.03300 ("Eq. n" below)
          Dr. GRPO: Liu et al. 2025, https://arxiv.org/abs/2503.20783; DAPO: Yu et al. 2025,
          https://arxiv.org/abs/2503.14476; RLOO: Ahmadian et al. 2024, https://arxiv.org/abs/2402.14740
Run       solo train grpo --env-id text/reverse-8
Spaces    vector -> multidiscrete, text
Differs   root of its family
Not for   other environments: ppo_multidiscrete.py
Details   docs/algorithms/grpo.md
"""

import copy
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Literal, NamedTuple

import gymnasium as gym
import numpy as np
import torch
import torch.nn as nn

from solorl import Run, RunArgs, parse

END = 0  # the token that ends an answer


@dataclass
class Args(RunArgs):
    env_kind = "text"  # --env-id is a task of text: a prompt, an answer, a program that judges it
    env_id: str = "text/reverse-8"  # id of the task, one of your own: module:Name-v0
    total_timesteps: int = 100_000  # answers, the warm-up's included
    warmup_examples: int = 500  # right answers from which the warm-up learns, again and again
    warmup_batch_size: int = 64  # of these per gradient step
    warmup_fraction: float = 0.2  # fraction of total_timesteps that the warm-up takes at most, from 0 to 1
    warmup_exact: float = 0.25  # it ends once greedy answers to new prompts have this mean reward, from 0 to 1
    num_prompts: int = 32  # prompts per iteration
    group_size: int = 16  # G, answers to each prompt
    num_updates: int = 2  # mu, gradient steps per iteration, each on all answers
    learning_rate: float = 3e-4  # learning rate of AdamW
    weight_decay: float = 0.0  # of AdamW
    max_grad_norm: float = 1.0  # clip the global norm of the gradient; inf: do not clip
    temperature: float = 1.0  # of the answers that are judged, and of all their log-probabilities
    clip_coef: float = 0.2  # epsilon of Eq. 3
    clip_high: float = 0.2  # the same for ratios above 1 (0.28 in DAPO)
    kl_coef: float = 0.04  # beta of Eq. 3 (0 in Dr. GRPO and DAPO)
    baseline: Literal["group", "others", "critic", "none"] = "group"  # mean of the group or of its others (RLOO), value
    std_norm: bool = True  # divide a group's advantages by its standard deviation (not in Dr. GRPO, RLOO)
    mean_over: Literal["answers", "tokens", "places"] = "answers"  # tokens in DAPO, places in Dr. GRPO: see the page
    drop_equal_groups: bool = False  # leave out groups whose answers have equal rewards (DAPO, which draws others)
    vf_coef: float = 0.5  # weight of the error of the values with --baseline critic
    num_layers: int = 2  # layers of the transformer
    num_heads: int = 4  # attention heads of a layer
    width: int = 128  # numbers that a layer has for each token, a multiple of --num-heads
    eval_episodes: int = 500  # prompts of one evaluation, with seeds of their own


class Batch(NamedTuple):
    """All answers of an iteration, num_prompts * group_size of them: n."""

    prompt: torch.Tensor  # (n, prompt_length)
    answer: torch.Tensor  # (n, answer_length), as all that follow
    logprob: torch.Tensor  # by the policy that gave the answer
    reference: torch.Tensor  # the same by the reference
    advantage: torch.Tensor
    weight: torch.Tensor  # of each token in the loss
    returns: torch.Tensor  # the reward of the answer, at each of its tokens


def make_env(env_id, **kwargs):
    """One environment, for training and for evaluation."""
    return gym.make(env_id, **kwargs)


def causal_attention(query, key, value):
    """Softmax attention of each token to itself and to those before it: query (batch, heads, length, size), key and
    value (batch, heads, before + length, size) -> (batch, heads, length, size)."""
    length, all_length = query.shape[2], key.shape[2]
    later = torch.ones(length, all_length, dtype=torch.bool, device=query.device).triu(all_length - length + 1)
    score = query @ key.mT / query.shape[-1] ** 0.5
    return score.masked_fill(later, -torch.inf).softmax(-1) @ value


class CausalLayer(nn.Module):
    """A layer of GPT-2: each token attends to itself and to those before it; layer normalisation stands first."""

    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.query_key_value, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x, past):
        """x (batch, length, width); past: keys and values of the tokens before these, (batch, 2, heads, before, size),
        None for the first ones -> (batch, length, width), and past with those of these tokens."""
        parts = self.query_key_value(self.norm1(x)).chunk(3, -1)
        query, *new = (y.unflatten(-1, (self.heads, -1)).transpose(1, 2) for y in parts)
        keys_values = torch.stack(new, 1) if past is None else torch.cat([past, torch.stack(new, 1)], 3)
        attended = causal_attention(query, *keys_values.unbind(1))
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        return x + self.mlp(self.norm2(x)), keys_values


class Agent(nn.Module):
    """A language model, with a value of each beginning of an answer for --baseline critic."""

    def __init__(self, num_tokens, prompt_length, answer_length, args):
        super().__init__()
        self.prompt_length, self.answer_length, self.temperature = prompt_length, answer_length, args.temperature
        self.token = nn.Embedding(num_tokens, args.width)
        self.place = nn.Embedding(prompt_length + answer_length, args.width)
        self.layers = nn.ModuleList(CausalLayer(args.width, args.num_heads) for _ in range(args.num_layers))
        self.norm = nn.LayerNorm(args.width)
        self.actor, self.critic = nn.Linear(args.width, num_tokens), nn.Linear(args.width, 1)
        for module in self.modules():
            if isinstance(module, (nn.Linear, nn.Embedding)):
                nn.init.normal_(module.weight, std=0.02)
            if isinstance(module, nn.Linear):
                nn.init.zeros_(module.bias)

    def forward(self, tokens, past=None):
        """What follows each token, which depends on it and on those before: tokens (batch, length), past as this
        function gave it for the tokens before -> log-probabilities (batch, length, num_tokens), values (batch, length),
        past."""
        before, after = 0 if past is None else past[0].shape[3], []
        x = self.token(tokens) + self.place.weight[before : before + tokens.shape[1]]
        for i, layer in enumerate(self.layers):
            x, keys_values = layer(x, None if past is None else past[i])
            after.append(keys_values)
        x = self.norm(x)
        return (self.actor(x) / self.temperature).log_softmax(-1), self.critic(x).squeeze(-1), after

    def evaluate_answers(self, prompt, answer):
        """Log-probabilities, entropies and values of each token: prompt (n, prompt_length), answer (n, answer_length)
        -> (n, answer_length) each. The value of a token is that of what stands before it."""
        logprobs, value, _ = self(torch.cat([prompt, answer[:, :-1]], 1))
        logprobs, value = logprobs[:, self.prompt_length - 1 :], value[:, self.prompt_length - 1 :]
        entropy = -(logprobs.exp() * logprobs).sum(-1)
        return logprobs.gather(-1, answer[..., None]).squeeze(-1), entropy, value

    @torch.no_grad()
    def generate(self, prompt, group_size=1, greedy=False):
        """Answers to each prompt, token by token: prompt (n, prompt_length) -> answers, their log-probabilities and
        values, all (n * group_size, answer_length). After the end token there are only end tokens."""
        tokens, past, columns = prompt, None, []
        for place in range(self.answer_length):
            logprobs, value, past = self(tokens, past)
            if place == 0:  # keys and values of a prompt are computed once for all of its answers
                logprobs, value, *past = (x.repeat_interleave(group_size, 0) for x in (logprobs, value, *past))
                ended = torch.zeros_like(value[:, -1], dtype=torch.bool)
            choices = logprobs[:, -1]  # (n * group_size, num_tokens)
            token = choices.argmax(-1) if greedy else torch.multinomial(choices.exp(), 1).squeeze(-1)
            token = token.masked_fill(ended, END)
            columns.append((token, choices.gather(1, token[:, None]).squeeze(1), value[:, -1]))
            ended, tokens = ended | (token == END), token[:, None]
        return tuple(torch.stack(column, 1) for column in zip(*columns, strict=True))

    def act(self, obs, greedy=True):  # NumPy (batch, prompt_length) -> NumPy (batch, answer_length)
        prompt = torch.as_tensor(obs, dtype=torch.int64, device=self.place.weight.device)
        return self.generate(prompt, greedy=greedy)[0].cpu().numpy()


def answer_mask(answer):
    """1 for each token up to and with the first end token, 0 after it: (n, answer_length) -> the same, floats."""
    ends = (answer == END).cumsum(1)
    return ((ends == 0) | ((ends == 1) & (answer == END))).float()


def group_advantage(reward, args):
    """Advantages of whole answers: reward (num_prompts, group_size) -> the same."""
    baseline = torch.zeros_like(reward)
    if args.baseline == "group":
        baseline = reward.mean(1, keepdim=True)
    elif args.baseline == "others":  # the mean of the other answers
        baseline = (reward.sum(1, keepdim=True) - reward) / (args.group_size - 1)
    advantage = reward - baseline
    if args.std_norm:
        advantage = advantage / (reward.std(1, keepdim=True) + 1e-4)
    equal = (reward == reward[:, :1]).all(1, keepdim=True) & (args.baseline != "none")
    return advantage.masked_fill(equal, 0)  # else rounding of the mean would be learned from


def token_weights(mask, mean_over):
    """What each token weighs in the loss: mask (n, answer_length), of which rows may be empty -> the same.

    answers: the mean of the answers' means (Eq. 3); tokens: the mean of all tokens; places: the sum over an answer is
    divided by the longest length, not by its own.
    """
    answers = mask.any(1).sum().clamp(min=1)
    if mean_over == "tokens":
        return mask / mask.sum().clamp(min=1)
    return mask / (mask.sum(1, keepdim=True).clamp(min=1) if mean_over == "answers" else mask.shape[1]) / answers


def imitation_loss(agent, prompt, answer):
    """The mean negative log-probability of right answers' tokens, and the metrics."""
    logprob, entropy, _ = agent.evaluate_answers(prompt, answer)
    weight = token_weights(answer_mask(answer), "tokens")
    loss = -(weight * logprob).sum()
    return loss, {"losses/imitation_loss": loss, "losses/entropy": (weight * entropy).sum()}


def grpo_loss(agent, batch, args):
    """The negative of Eq. 3, and the metrics."""
    logprob, entropy, value = agent.evaluate_answers(batch.prompt, batch.answer)
    assert logprob.shape == entropy.shape == value.shape == batch.advantage.shape == batch.weight.shape

    logratio = logprob - batch.logprob
    ratio = logratio.exp()
    clipped_ratio = ratio.clamp(1 - args.clip_coef, 1 + args.clip_high)
    objective = (batch.weight * torch.min(ratio * batch.advantage, clipped_ratio * batch.advantage)).sum()

    log_x = batch.reference - logprob
    reference_kl = (batch.weight * (log_x.exp() - log_x - 1)).sum()  # Eq. 4
    loss = -(objective - args.kl_coef * reference_kl)

    weight = token_weights(answer_mask(batch.answer), "tokens")  # of means over all tokens
    value_loss = 0.5 * (weight * (value - batch.returns) ** 2).sum()
    if args.baseline == "critic":
        loss = loss + args.vf_coef * value_loss
    with torch.no_grad():
        metrics = {
            "losses/policy_loss": -objective,
            "losses/value_loss": value_loss,
            "losses/reference_kl": reference_kl,
            "losses/entropy": (weight * entropy).sum(),
            "losses/approx_kl": (weight * (ratio - 1 - logratio)).sum(),  # k3 of http://joschu.net/blog/kl-approx.html
            "losses/clipfrac": (weight * ((ratio < 1 - args.clip_coef) | (ratio > 1 + args.clip_high))).sum(),
        }
    return loss, metrics


if __name__ == "__main__":
    # ---- setup
    args = parse(Args)
    run = Run(args)  # seeds Python, NumPy and torch
    envs = run.vector_env(make_env, args.env_id, 1)  # for its spaces
    run.require_spaces(envs, obs="vector", action="multidiscrete")
    prompt_length, answer_length = envs.single_observation_space.shape[0], len(envs.single_action_space.nvec)
    num_tokens = int(envs.single_action_space.nvec[0])
    envs.close()
    task = make_env(args.env_id).unwrapped  # its programs: examples of right answers, rewards
    run.require(hasattr(task, "rewards"), f"{args.env_id} is not a task of text: it has no `examples` and `rewards`")
    batch_size = args.num_prompts * args.group_size
    total = args.total_timesteps
    warmup_iterations = int(args.warmup_fraction * total) // args.warmup_batch_size
    left = total - warmup_iterations * args.warmup_batch_size  # answers after a warm-up that takes all it may
    sentence = f"--total-timesteps {total} leaves no iteration of {batch_size} answers after the warm-up"
    run.require(left >= batch_size, sentence)
    run.require(args.group_size > 1, "--group-size must be at least 2")
    by_group = args.baseline in ("group", "others")  # so that equal rewards have advantage 0
    run.require(by_group or args.baseline == "critic" or not args.std_norm, "--baseline none needs --no-std-norm")
    run.require(by_group or not args.drop_equal_groups, "--drop-equal-groups needs --baseline group or others")
    run.require(args.temperature > 0, "--temperature must be more than 0")
    equal = args.width % args.num_heads == 0
    run.require(equal, f"--width {args.width} must be a multiple of the {args.num_heads} of --num-heads")

    agent = Agent(num_tokens, prompt_length, answer_length, args).to(run.device)
    reference = copy.deepcopy(agent)
    optimizer = torch.optim.AdamW(agent.parameters(), lr=args.learning_rate, weight_decay=args.weight_decay)
    # imitation_step(*inputs): an optimiser step on imitation_loss(agent, *inputs); returns its metrics
    imitation_step = run.gradient_step(imitation_loss, agent, optimizer, args.max_grad_norm)
    gradient_step = run.gradient_step(grpo_loss, agent, optimizer, args.max_grad_norm)
    examples = task.examples(args.warmup_examples, seed=np.random.randint(2**31))  # prompts, right answers
    examples = [torch.as_tensor(x, device=run.device) for x in examples]
    now = SimpleNamespace(warmup_steps=0, exact=0.0)  # answers shown so far; mean reward of the last greedy ones
    start = run.resume(agent=agent, reference=reference, optimizer=optimizer, now=now)  # what a checkpoint holds

    # ---- warm-up: as long as no answer is right all rewards are 0, and so are all advantages
    # (two loops: a resumed run continues with iteration `start` of the one in which it was saved)
    for iteration in run.loop(start, warmup_iterations, last=False):
        if now.exact >= args.warmup_exact:
            break
        global_step = now.warmup_steps = (iteration + 1) * args.warmup_batch_size

        # ---- 1. learn
        index = torch.randint(args.warmup_examples, (args.warmup_batch_size,), device=run.device)
        run.learned(imitation_step(*(x[index] for x in examples)))
        prompt, _ = task.examples(args.warmup_batch_size, seed=np.random.randint(2**31))
        now.exact = float(task.rewards(prompt, agent.act(prompt)).mean())

        # ---- 2. report
        run.log(global_step, {"charts/warmup_exact": now.exact})
        run.save(global_step)

    # ---- reinforcement learning: the rest of total_timesteps
    num_iterations = (total - now.warmup_steps) // batch_size
    for iteration in run.loop(start, num_iterations):
        global_step = now.warmup_steps + (iteration + 1) * batch_size
        if iteration == 0:
            reference.load_state_dict(agent.state_dict())

        # ---- 1. act: "sample G outputs for each question" (Algorithm 1)
        prompt, _ = task.examples(args.num_prompts, seed=np.random.randint(2**31))
        prompt = torch.as_tensor(prompt, device=run.device)
        answer, logprob, value = agent.generate(prompt, args.group_size)
        prompt = prompt.repeat_interleave(args.group_size, 0)
        reward = task.rewards(prompt.cpu().numpy(), answer.cpu().numpy())
        run.episode(global_step, float(reward.mean()), 1)  # one row for all answers

        # ---- 2. credit: advantages within each group; all tokens of an answer have that of the answer
        mask = answer_mask(answer)
        reward = torch.as_tensor(reward, device=run.device).view(-1, args.group_size)
        equal = reward.amin(1) == reward.amax(1)  # whether all answers to a prompt are as good
        returns = reward.flatten()[:, None].expand_as(mask)
        if args.baseline == "critic":
            advantage = returns - value
        else:
            advantage = group_advantage(reward, args).flatten()[:, None].expand_as(mask)
        dropped = (equal & args.drop_equal_groups).repeat_interleave(args.group_size)
        weight = token_weights(mask * ~dropped[:, None], args.mean_over)
        with torch.no_grad():
            reference_logprob, _, _ = reference.evaluate_answers(prompt, answer)
        batch = Batch(prompt, answer, logprob, reference_logprob, advantage, weight, returns)

        # ---- 3. learn: the first of these steps has ratio 1 everywhere
        for _ in range(args.num_updates):
            run.learned(gradient_step(batch, args))

        # ---- 4. report, when due: a row has the means of the metrics of all gradient steps since the last row
        metrics = {"charts/equal_groups": equal.float().mean(), "charts/answer_length": mask.sum(1).mean()}
        run.log(global_step, metrics | {"charts/warmup_exact": now.exact})
        run.evaluate(global_step, agent.act, make_env)
        run.save(global_step)

    run.close(agent.act, make_env, sample=lambda obs: agent.act(obs, greedy=False))  # a last evaluation; `solo play`
