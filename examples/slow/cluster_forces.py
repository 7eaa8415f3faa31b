"""Fit energies and forces of small atom clusters with a continuous-filter network.

The reference is a Morse potential; the model follows SchNet (Schuett et al., 2017) in miniature.
"""

import numpy as np
import torch
from torch import nn

ATOMS = 14
BATCH = 16
STEPS = 100


def morse_energy(positions):
    """Sum over the pairs of a Morse potential with its minimum at distance 1."""
    i, j = torch.triu_indices(ATOMS, ATOMS, offset=1)
    distance = (positions[:, i] - positions[:, j]).norm(dim=-1)
    return ((1.0 - torch.exp(-2.0 * (distance - 1.0))) ** 2 - 1.0).sum(dim=1)


def make_clusters(count, generator):
    """Jittered pieces of a cubic lattice, with energy and forces."""
    grid = torch.stack(torch.meshgrid(*[torch.arange(3.0)] * 3, indexing="ij"), dim=-1).reshape(-1, 3)
    order = torch.rand(count, len(grid), generator=generator).argsort(dim=1)[:, :ATOMS]
    positions = grid[order] + 0.12 * torch.randn(count, ATOMS, 3, generator=generator)
    positions.requires_grad_(True)
    energy = morse_energy(positions)
    (gradient,) = torch.autograd.grad(energy.sum(), positions)
    return positions.detach(), energy.detach(), -gradient


class RadialBasis(nn.Module):
    """Gaussians of the distance, evenly spaced up to the cutoff."""

    def __init__(self, num_gaussians=50, cutoff=4.0):
        super().__init__()
        centers = np.linspace(0.0, cutoff, num_gaussians)
        self.register_buffer("centers", torch.from_numpy(centers))
        self.gamma = 0.5 / (centers[1] - centers[0]) ** 2
        self.cutoff = cutoff

    def forward(self, distance):
        gaussians = torch.exp(-self.gamma * (distance[..., None] - self.centers) ** 2)
        window = 0.5 * (torch.cos(torch.pi * distance / self.cutoff) + 1.0) * (distance < self.cutoff)
        return (gaussians * window[..., None]).to(distance.dtype)


class ClusterModel(nn.Module):
    def __init__(self, width=16, num_gaussians=50):
        super().__init__()
        self.basis = RadialBasis(num_gaussians)
        self.atom = nn.Parameter(torch.randn(width))
        self.filter = nn.Linear(num_gaussians, width)
        self.update = nn.Sequential(nn.Linear(width, width), nn.Tanh())
        self.readout = nn.Sequential(nn.Linear(width, width), nn.Tanh(), nn.Linear(width, 1))
        self.register_buffer("self_pair", torch.eye(ATOMS).unsqueeze(-1))

    def forward(self, positions):
        difference = positions[:, :, None] - positions[:, None]
        distance = (difference.pow(2) + self.self_pair).sum(dim=-1).sqrt()
        weight = self.filter(self.basis(distance)) * (1.0 - self.self_pair)
        atoms = self.atom.expand(len(positions), ATOMS, -1)
        atoms = atoms + self.update((weight * atoms[:, None]).sum(dim=2))
        return self.readout(atoms).sum(dim=(1, 2))


torch.manual_seed(0)
positions, energies, forces = make_clusters(1024, torch.Generator().manual_seed(3))
energies = energies - energies.mean()
model = ClusterModel()
optimizer = torch.optim.Adam(model.parameters(), lr=2e-3, fused=True)

for step in range(1, STEPS + 1):
    rows = torch.randint(len(positions), (BATCH * 8,))
    x = positions[rows].requires_grad_(True)
    energy = model(x)
    (gradient,) = torch.autograd.grad(energy.sum(), x, create_graph=True)
    energy_loss = (energy - energies[rows]).pow(2).mean()
    force_loss = (-gradient - forces[rows]).pow(2).mean()
    loss = 0.05 * energy_loss + force_loss
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 25 == 0:
        print(f"step {step}: loss {loss.item():.4f}")

print(f"final loss {loss.item():.6f}")
