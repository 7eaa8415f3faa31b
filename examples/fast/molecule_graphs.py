"""Message passing on random molecule-like graphs; predicts a property of the whole graph."""

import argparse

import torch
import torch.nn.functional as F
from torch import nn

ELEMENTS = 6


class GraphData:
    """Random trees with a few extra bonds; the target depends on elements and their neighbours."""

    def __init__(self, count, seed):
        generator = torch.Generator().manual_seed(seed)
        value = torch.randn(ELEMENTS, ELEMENTS, generator=generator)
        value = (value + value.T) / 2
        self.graphs = []
        for _ in range(count):
            size = int(torch.randint(8, 28, (), generator=generator))
            elements = torch.randint(ELEMENTS, (size,), generator=generator)
            child = torch.arange(1, size)
            parent = (torch.rand(size - 1, generator=generator) * child).long()
            extra = torch.randint(size, (2, size // 5), generator=generator)
            bonds = torch.cat([torch.stack([child, parent]), extra], dim=1)
            target = value[elements[bonds[0]], elements[bonds[1]]].mean()
            self.graphs.append((elements, torch.cat([bonds, bonds.flip(0)], dim=1), target))

    def batches(self, size):
        """Disjoint unions of `size` graphs: elements, edges, graph of each atom, targets."""
        merged = []
        for start in range(0, len(self.graphs) - size + 1, size):
            elements, edges, owner, targets = [], [], [], []
            offset = 0
            for g, (atoms, bonds, target) in enumerate(self.graphs[start : start + size]):
                elements.append(atoms)
                edges.append(bonds + offset)
                owner.append(torch.full((len(atoms),), g))
                targets.append(target)
                offset += len(atoms)
            merged.append((torch.cat(elements), torch.cat(edges, dim=1), torch.cat(owner), torch.stack(targets)))
        return merged


class MessagePassing(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.message = nn.Linear(width, width)
        self.update = nn.Linear(2 * width, width)

    def forward(self, atoms, edges):
        source, destination = edges
        messages = F.relu(self.message(atoms)).index_select(0, source)
        received = torch.zeros_like(atoms).index_add(0, destination, messages)
        return atoms + F.relu(self.update(torch.cat([atoms, received], dim=1)))


class GraphRegressor(nn.Module):
    def __init__(self, width=64, depth=3):
        super().__init__()
        self.embed = nn.Embedding(ELEMENTS, width)
        self.layers = nn.ModuleList([MessagePassing(width) for _ in range(depth)])
        self.readout = nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 1))

    def forward(self, elements, edges, owner, num_graphs):
        atoms = self.embed(elements)
        for layer in self.layers:
            atoms = layer(atoms, edges)
        total = atoms.new_zeros(num_graphs, atoms.shape[1]).index_add(0, owner, atoms)
        pooled = total / torch.bincount(owner, minlength=num_graphs).unsqueeze(-1)
        return self.readout(pooled).squeeze(-1)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--graphs", type=int, default=1920)
    args = parser.parse_args()

    torch.manual_seed(0)
    batches = GraphData(args.graphs, seed=4).batches(args.batch)
    model = GraphRegressor()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, fused=True)
    for epoch in range(args.epochs):
        for elements, edges, owner, targets in batches:
            loss = F.mse_loss(model(elements, edges, owner, len(targets)), targets)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        if epoch % 4 == 3:
            print(f"epoch {epoch}: loss {loss.item():.5f}")
    print(f"final loss {loss.item():.6f}")


if __name__ == "__main__":
    main()
