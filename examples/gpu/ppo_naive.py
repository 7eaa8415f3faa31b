"""PPO on many pendulums at once, as a first version is written: nets of width 64, small minibatches, a plain loop.

The pendulums are tensors on the device, so that no simulator has to be waited for.
"""

import argparse
import math

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributions import Normal


class Pendulums:
    """Pendulums to swing up: angle and speed; a torque; the reward is less the further and the faster one is."""

    def __init__(self, count, device):
        self.angle = (torch.rand(count, device=device) * 2 - 1) * math.pi
        self.speed = torch.rand(count, device=device) * 2 - 1
        self.age = torch.randint(200, (count,), device=device)

    def observe(self):
        return torch.stack([self.angle.cos(), self.angle.sin(), self.speed / 8], dim=1)

    def step(self, torque):
        torque = 2 * torque.clamp(-1, 1)
        turned = (self.angle + math.pi) % (2 * math.pi) - math.pi
        reward = -(turned**2 + 0.1 * self.speed**2 + 0.001 * torque**2)
        self.speed = (self.speed + 0.05 * (15 * self.angle.sin() + 3 * torque)).clamp(-8, 8)
        self.angle = self.angle + 0.05 * self.speed
        self.age = self.age + 1
        over = self.age >= 200
        self.angle = torch.where(over, (torch.rand_like(self.angle) * 2 - 1) * math.pi, self.angle)
        self.speed = torch.where(over, torch.rand_like(self.speed) * 2 - 1, self.speed)
        self.age = torch.where(over, torch.zeros_like(self.age), self.age)
        return self.observe(), reward / 10, over


class Agent(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.critic = nn.Sequential(
            nn.Linear(3, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh(), nn.Linear(width, 1)
        )
        self.actor = nn.Sequential(
            nn.Linear(3, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh(), nn.Linear(width, 1)
        )
        self.log_std = nn.Parameter(torch.zeros(1))

    def value(self, x):
        return self.critic(x).squeeze(-1)

    def act(self, x, action=None):
        policy = Normal(self.actor(x).squeeze(-1), self.log_std.exp().expand(len(x)))
        if action is None:
            action = policy.sample()
        return action, policy.log_prob(action), policy.entropy(), self.value(x)


def advantages(rewards, values, overs, last, discount=0.99, decay=0.95):
    found, following = torch.zeros_like(rewards), 0.0
    for t in reversed(range(len(rewards))):
        after = last if t == len(rewards) - 1 else values[t + 1]
        alive = 1.0 - overs[t].float()
        error = rewards[t] + discount * after * alive - values[t]
        following = error + discount * decay * alive * following
        found[t] = following
    return found


def parse(doc):
    parser = argparse.ArgumentParser(description=doc)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--count", type=int, default=64, help="pendulums")
    parser.add_argument("--length", type=int, default=32, help="steps of all of them before an update")
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--minibatches", type=int, default=32)
    parser.add_argument("--iterations", type=int, default=500)
    return parser


def main():
    args = parse(__doc__).parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)
    world = Pendulums(args.count, device)
    agent = Agent(args.width).to(device)
    optimizer = torch.optim.Adam(agent.parameters(), lr=3e-4, eps=1e-5)
    seen = world.observe()
    size = args.count * args.length // args.minibatches
    for iteration in range(1, args.iterations + 1):
        rows = []
        for _ in range(args.length):
            with torch.no_grad():
                action, log_prob, _, value = agent.act(seen)
            following, reward, over = world.step(action)
            rows.append((seen, action, log_prob, value, reward, over))
            seen = following
        observed, actions, log_probs, values, rewards, overs = (torch.stack(part) for part in zip(*rows))
        with torch.no_grad():
            gains = advantages(rewards, values, overs, agent.value(seen))
        returns = (gains + values).flatten()
        observed, actions, log_probs, gains = (
            observed.flatten(0, 1),
            actions.flatten(),
            log_probs.flatten(),
            gains.flatten(),
        )
        for _ in range(args.epochs):
            order = torch.randperm(len(actions), device=device)
            for start in range(0, len(order), size):
                part = order[start : start + size]
                _, log_prob, entropy, value = agent.act(observed[part], actions[part])
                ratio = (log_prob - log_probs[part]).exp()
                gain = gains[part]
                gain = (gain - gain.mean()) / (gain.std() + 1e-8)
                policy_loss = torch.max(-gain * ratio, -gain * ratio.clamp(0.8, 1.2)).mean()
                loss = policy_loss + 0.5 * F.mse_loss(value, returns[part]) - 0.01 * entropy.mean()
                optimizer.zero_grad()
                loss.backward()
                nn.utils.clip_grad_norm_(agent.parameters(), 0.5)
                optimizer.step()
        if iteration % 10 == 0:
            print(f"iteration {iteration:5d}  mean reward {rewards.mean().item():.4f}")


if __name__ == "__main__":
    main()
