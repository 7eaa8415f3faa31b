"""Classify event sequences of different length with a GRU."""

import argparse

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

NUM_EVENTS = 24
PAD = NUM_EVENTS


class EventSequences(Dataset):
    """Sequences from a few Markov chains; the label is the chain. Lengths are log-normal."""

    def __init__(self, count, num_classes, max_length, seed):
        generator = torch.Generator().manual_seed(seed)
        chains = torch.rand(num_classes, NUM_EVENTS, NUM_EVENTS, generator=generator) ** 6
        lengths = torch.empty(count).log_normal_(3.6, 0.6, generator=generator).clamp(5, max_length).long()
        labels = torch.randint(num_classes, (count,), generator=generator)
        events = torch.randint(NUM_EVENTS, (count, 1), generator=generator)
        for _ in range(max_length - 1):
            following = torch.multinomial(chains[labels, events[:, -1]], 1, generator=generator)
            events = torch.cat([events, following], dim=1)
        self.sequences = [row[:length] for row, length in zip(events, lengths)]
        self.labels = labels

    def __len__(self):
        return len(self.sequences)

    def __getitem__(self, index):
        return self.sequences[index], self.labels[index]


def collate(samples):
    """Stack sequences to one [batch, time] tensor of events and a tensor of lengths."""
    sequences, labels = zip(*samples)
    lengths = torch.tensor([len(sequence) for sequence in sequences])
    events = torch.full((len(sequences), max(lengths)), PAD)
    for row, sequence in enumerate(sequences):
        events[row, : len(sequence)] = sequence
    return events, lengths, torch.stack(labels)


class EventClassifier(nn.Module):
    def __init__(self, num_classes, hidden=64):
        super().__init__()
        self.embed = nn.Embedding(NUM_EVENTS + 1, 32, padding_idx=PAD)
        self.gru = nn.GRU(32, hidden, batch_first=True)
        self.head = nn.Linear(hidden, num_classes)

    def forward(self, events, lengths):
        states, _ = self.gru(self.embed(events))
        last = states[torch.arange(len(events)), lengths - 1]
        return self.head(last)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--max-length", type=int, default=320)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--steps", type=int, default=100)
    args = parser.parse_args()

    torch.manual_seed(0)
    data = EventSequences(3200, 6, args.max_length, seed=2)
    loader = DataLoader(data, batch_size=args.batch, shuffle=True, collate_fn=collate)
    model = EventClassifier(num_classes=6)
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3, fused=True)
    criterion = nn.CrossEntropyLoss()

    batches = iter(loader)
    for step in range(1, args.steps + 1):
        events, lengths, labels = next(batches)
        loss = criterion(model(events, lengths), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 25 == 0:
            print(f"step {step}/{args.steps} loss {loss.item():.4f}")
    print(f"final loss {loss.item():.6f}")


if __name__ == "__main__":
    main()
