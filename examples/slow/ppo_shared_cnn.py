# PPO update phase on a toy "find the bright pixel" environment with image observations.
# The actor and the critic share one convolutional encoder.
import torch
from torch import nn
from torch.distributions import Categorical

torch.manual_seed(0)

GRID, N_ACT = 20, 5
N_ENVS, HORIZON = 32, 16
ITERATIONS, EPOCHS, MINIBATCH = 10, 3, 64
GAMMA, LAM, CLIP, VF_COEF, ENT_COEF = 0.97, 0.95, 0.2, 0.5, 0.01
MOVES = torch.tensor([[0, 0], [0, 1], [0, -1], [1, 0], [-1, 0]])


class VecEnv:
    """N independent agents on a grid; reward for getting nearer to a target."""

    def __init__(self, n):
        self.n = n
        self.pos = torch.randint(0, GRID, (n, 2))
        self.goal = torch.randint(0, GRID, (n, 2))

    def obs(self):
        out = torch.zeros(self.n, 2, GRID, GRID)
        rows = torch.arange(self.n)
        out[rows, 0, self.pos[:, 0], self.pos[:, 1]] = 1.0
        out[rows, 1, self.goal[:, 0], self.goal[:, 1]] = 1.0
        return out

    def step(self, action):
        before = (self.pos - self.goal).abs().sum(1)
        self.pos = (self.pos + MOVES[action]).clamp(0, GRID - 1)
        after = (self.pos - self.goal).abs().sum(1)
        done = after == 0
        reward = (before - after).float() * 0.1 + done.float()
        fresh = torch.randint(0, GRID, (self.n, 2))
        self.goal = torch.where(done[:, None], fresh, self.goal)
        return self.obs(), reward, done.float()


class Encoder(nn.Sequential):
    def __init__(self, dim=96):
        super().__init__(
            nn.Conv2d(2, 16, 3, padding=1),
            nn.ReLU(),
            nn.Conv2d(16, 32, 3, stride=2, padding=1),
            nn.ReLU(),
            nn.Conv2d(32, 32, 3, padding=1),
            nn.ReLU(),
            nn.Flatten(),
            nn.Linear(32 * (GRID // 2) ** 2, dim),
            nn.ReLU(),
        )


class Actor(nn.Module):
    def __init__(self, encoder, dim=96):
        super().__init__()
        self.encoder = encoder
        self.logits = nn.Linear(dim, N_ACT)

    def forward(self, obs):
        return Categorical(logits=self.logits(self.encoder(obs)), validate_args=False)


class Critic(nn.Module):
    def __init__(self, encoder, dim=96):
        super().__init__()
        self.encoder = encoder
        self.value = nn.Sequential(nn.Linear(dim, 32), nn.Tanh(), nn.Linear(32, 1))

    def forward(self, obs):
        return self.value(self.encoder(obs)).squeeze(-1)


encoder = Encoder()
actor, critic = Actor(encoder), Critic(encoder)
weights = list({id(p): p for m in (actor, critic) for p in m.parameters()}.values())
optim = torch.optim.Adam(weights, lr=5e-4, eps=1e-5, fused=True)
env = VecEnv(N_ENVS)
obs = env.obs()
updates = 0

for it in range(ITERATIONS):
    seen, A, LP, R, D = [], [], [], [], []
    with torch.no_grad():
        for _ in range(HORIZON):
            pi = actor(obs)
            a = pi.sample()
            seen.append(obs), A.append(a), LP.append(pi.log_prob(a))
            obs, r, d = env.step(a)
            R.append(r), D.append(d)
        seen, A, LP, R, D = map(torch.stack, (seen, A, LP, R, D))
        V = critic(torch.cat([seen.flatten(0, 1), obs])).view(HORIZON + 1, N_ENVS)
        adv, last = torch.zeros_like(R), torch.zeros(N_ENVS)
        for t in reversed(range(HORIZON)):
            delta = R[t] + GAMMA * V[t + 1] * (1 - D[t]) - V[t]
            last = delta + GAMMA * LAM * (1 - D[t]) * last
            adv[t] = last
        ret = (adv + V[:-1]).flatten()
        adv = ((adv - adv.mean()) / (adv.std() + 1e-8)).flatten()
        seen, A, LP = seen.flatten(0, 1), A.flatten(), LP.flatten()

    for _ in range(EPOCHS):
        for mb in torch.randperm(len(A)).split(MINIBATCH):
            o = seen[mb]
            pi = actor(o)
            v = critic(o)
            ratio = torch.exp(pi.log_prob(A[mb]) - LP[mb])
            gain = torch.min(ratio * adv[mb], ratio.clamp(1 - CLIP, 1 + CLIP) * adv[mb]).mean()
            v_loss = (v - ret[mb]).pow(2).mean()
            loss = -gain + VF_COEF * v_loss - ENT_COEF * pi.entropy().mean()
            optim.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(weights, 0.5)
            optim.step()
            updates += 1
    if it % 2 == 1:
        print(f"iter {it + 1:3d}  updates {updates}  reward/step {R.mean().item():+.4f}  v_loss {v_loss.item():.4f}")
print(f"final loss {loss.item():.5f}")
