"""REINFORCE with a baseline on a batch of cart-poles that are simulated in torch."""

import math

import torch
from torch import nn

NUM_ENVS = 32
HORIZON = 80
GAMMA = 0.99
UPDATES = 100


class CartPoles:
    """Barto, Sutton and Anderson's cart-pole, many at a time; a fallen pole starts again."""

    gravity, cart_mass, pole_mass, half_length, force, tau = 9.8, 1.0, 0.1, 0.5, 10.0, 0.02

    def __init__(self, num_envs, generator):
        self.generator = generator
        self.state = self.fresh(num_envs)

    def fresh(self, num_envs):
        return torch.rand(num_envs, 4, generator=self.generator) * 0.1 - 0.05

    def step(self, action):
        x, speed, angle, spin = self.state.unbind(1)
        force = self.force * (2.0 * action - 1.0)
        total = self.cart_mass + self.pole_mass
        cos, sin = torch.cos(angle), torch.sin(angle)
        temp = (force + self.pole_mass * self.half_length * spin**2 * sin) / total
        spin_rate = (self.gravity * sin - cos * temp) / (
            self.half_length * (4.0 / 3.0 - self.pole_mass * cos**2 / total)
        )
        acceleration = temp - self.pole_mass * self.half_length * spin_rate * cos / total
        state = torch.stack([speed, acceleration, spin, spin_rate], dim=1) * self.tau + self.state
        done = (state[:, 0].abs() > 2.4) | (state[:, 2].abs() > 12 * math.pi / 180)
        self.state = torch.where(done[:, None], self.fresh(len(state)), state)
        reward = torch.ones(len(state))
        return self.state, reward, done.float()


def discounted_returns(rewards, dones):
    """Discounted sum of the rewards up to the end of each episode."""
    horizon, num_envs = rewards.shape
    returns = torch.zeros(horizon, num_envs)
    running = torch.zeros(num_envs)
    for t in reversed(range(horizon)):
        running = rewards[t] + GAMMA * running * (1.0 - dones[t])
        returns[t] = running
    return returns


@torch.no_grad()
def rollout(envs, policy):
    states, actions, rewards, dones = [], [], [], []
    state = envs.state
    for _ in range(HORIZON):
        probability = torch.softmax(policy(state), dim=1)[:, 1]
        action = (torch.rand(NUM_ENVS, generator=envs.generator) < probability).float()
        states.append(state)
        actions.append(action)
        state, reward, done = envs.step(action)
        rewards.append(reward)
        dones.append(done)
    return torch.stack(states), torch.stack(actions), torch.stack(rewards), torch.stack(dones)


def main():
    torch.manual_seed(0)
    generator = torch.Generator().manual_seed(1)
    policy = nn.Sequential(nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, 2))
    value = nn.Sequential(nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, 1))
    optimizer = torch.optim.Adam([*policy.parameters(), *value.parameters()], lr=3e-3, fused=True)
    envs = CartPoles(NUM_ENVS, generator)

    for update in range(1, UPDATES + 1):
        states, actions, rewards, dones = rollout(envs, policy)
        returns = discounted_returns(rewards, dones) / 50.0
        log_prob = torch.log_softmax(policy(states), dim=-1)
        log_prob = log_prob.gather(-1, actions.long().unsqueeze(-1)).squeeze(-1)
        baseline = value(states).squeeze(-1)
        advantage = returns - baseline.detach()
        loss = -(log_prob * advantage).mean() + 0.5 * (baseline - returns).pow(2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if update % 20 == 0:
            print(f"update {update}: loss {loss.item():.4f}, falls {dones.sum().item():.0f}")

    print(f"final loss {loss.item():.6f}")


if __name__ == "__main__":
    main()
