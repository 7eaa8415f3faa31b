"""The PPO of examples/gpu/ppo_naive.py as LeanRL writes it: policy, advantages and update compiled and recorded in CUDA graphs.

    python bench/best/ppo.py [--graphs inductor|own|none] [options of the example]

LeanRL compiles the rollout's policy, the loop over rewards and the whole update, with an optimizer whose step lies on the device
(`capturable`), and records the policy and the update in CUDA graphs: 'inductor' by torch.compile's reduce-overhead, 'own' by
torch.cuda.CUDAGraph around the compiled functions. Worlds, sizes and draws of minibatches are those of the example.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples" / "gpu"))

import ppo_naive as example


class Recorded:
    """A function of tensors that is recorded in a CUDA graph after three calls; its results are overwritten by the next call."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function, self._calls = function, 0
        self._graph: torch.cuda.CUDAGraph | None = None
        self._inputs: tuple[Tensor, ...] = ()
        self._results: Any = None

    def __call__(self, *inputs: Tensor) -> Any:
        self._calls += 1
        if self._calls <= 3:
            stream = torch.cuda.Stream()
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                found = self._function(*inputs)
            torch.cuda.current_stream().wait_stream(stream)
            return found
        if self._graph is None:
            self._inputs = tuple(x.clone() for x in inputs)
            self._graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self._graph):
                self._results = self._function(*self._inputs)
        torch._foreach_copy_(self._inputs, inputs)
        self._graph.replay()
        return self._results


def main() -> None:
    parser = example.parse(__doc__)
    parser.add_argument("--graphs", choices=("inductor", "own", "none"), default="own")
    args = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)
    torch.set_float32_matmul_precision("high")
    world = example.Pendulums(args.count, device)
    agent = example.Agent(args.width).to(device)
    optimizer = torch.optim.Adam(agent.parameters(), lr=3e-4, eps=1e-5, capturable=device == "cuda", fused=True)
    torch.distributions.Distribution.set_default_validate_args(False)

    def policy(x: Tensor) -> tuple[Tensor, ...]:
        with torch.no_grad():
            action, log_prob, _, value = agent.act(x)
        return action, log_prob, value

    def update(observed: Tensor, actions: Tensor, log_probs: Tensor, gain: Tensor, returns: Tensor) -> Tensor:
        optimizer.zero_grad()
        _, log_prob, entropy, value = agent.act(observed, actions)
        ratio = (log_prob - log_probs).exp()
        gain = (gain - gain.mean()) / (gain.std() + 1e-8)
        policy_loss = torch.max(-gain * ratio, -gain * ratio.clamp(0.8, 1.2)).mean()
        loss = policy_loss + 0.5 * F.mse_loss(value, returns) - 0.01 * entropy.mean()
        loss.backward()
        nn.utils.clip_grad_norm_(agent.parameters(), 0.5)
        optimizer.step()
        return loss.detach()

    def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
        if args.graphs == "inductor":
            return torch.compile(function, mode="reduce-overhead")
        found = torch.compile(function)
        return Recorded(found) if args.graphs == "own" and device == "cuda" else found

    act, learn = compiled(policy), compiled(update)
    gains_of = torch.compile(example.advantages, fullgraph=True)
    seen = world.observe()
    size = args.count * args.length // args.minibatches
    for iteration in range(1, args.iterations + 1):
        rows = []
        for _ in range(args.length):
            if args.graphs == "inductor":
                torch.compiler.cudagraph_mark_step_begin()
            action, log_prob, value = (x.clone() for x in act(seen))
            following, reward, over = world.step(action)
            rows.append((seen, action, log_prob, value, reward, over))
            seen = following
        observed, actions, log_probs, values, rewards, overs = (torch.stack(part) for part in zip(*rows, strict=True))
        with torch.no_grad():
            gains = gains_of(rewards, values, overs, agent.value(seen))
        returns = (gains + values).flatten()
        flat = (observed.flatten(0, 1), actions.flatten(), log_probs.flatten(), gains.flatten(), returns)
        for _ in range(args.epochs):
            order = torch.randperm(len(returns), device=device)
            for start in range(0, len(order), size):
                part = order[start : start + size]
                if args.graphs == "inductor":
                    torch.compiler.cudagraph_mark_step_begin()
                learn(*(x[part] for x in flat))
        if iteration % 10 == 0:
            print(f"iteration {iteration:5d}  mean reward {rewards.mean().item():.4f}")


if __name__ == "__main__":
    main()
