"""Predict tomorrow's anomaly at every weather station from its neighbours.

A graph network over the stations; tensors are [station, batch, feature].
"""

import argparse

import torch
import torch.nn.functional as F
from torch import nn

EARTH_RADIUS_KM = 6371.0


def great_circle_km(latitude, longitude):
    """Haversine distance between all pairs of places, given in radians."""
    half_lat = (latitude[:, None] - latitude[None, :]) / 2
    half_lon = (longitude[:, None] - longitude[None, :]) / 2
    chord = half_lat.sin() ** 2 + latitude.cos()[:, None] * latitude.cos()[None, :] * half_lon.sin() ** 2
    return 2 * EARTH_RADIUS_KM * chord.clamp(0, 1).sqrt().asin()


class StationLayer(nn.Module):
    """Every station listens to the stations around it and weighs them by content and distance."""

    def __init__(self, width, latitude, longitude, neighbours):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.message = nn.Linear(width, width)
        self.decay = nn.Parameter(torch.zeros(width))
        self.out = nn.Sequential(nn.Linear(2 * width, width), nn.GELU(), nn.Linear(width, width))
        distance = great_circle_km(latitude, longitude)
        nearest_km, nearest = distance.topk(neighbours, dim=1, largest=False)
        self.register_buffer("nearest_km", nearest_km)
        self.register_buffer("nearest", nearest)

    def forward(self, x):
        weight = torch.exp(-self.decay.exp() * self.nearest_km[..., None] / 500.0)
        y = self.norm(x)
        messages = self.message(y).index_select(0, self.nearest.flatten()).unflatten(0, self.nearest.shape)
        heard = (messages * weight[:, :, None]).sum(dim=1)
        return x + self.out(torch.cat([y, heard], dim=-1))


class StationModel(nn.Module):
    def __init__(self, days, width, depth, latitude, longitude, neighbours):
        super().__init__()
        self.embed = nn.Linear(days, width)
        self.layers = nn.Sequential(*[StationLayer(width, latitude, longitude, neighbours) for _ in range(depth)])
        self.head = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 1))

    def forward(self, history):
        return self.head(self.layers(self.embed(history))).squeeze(-1)


def make_weather(stations, days, generator):
    """Anomalies carried around the globe by a few travelling waves."""
    latitude = torch.asin(torch.rand(stations, generator=generator) * 1.8 - 0.9)
    longitude = (torch.rand(stations, generator=generator) * 2 - 1) * torch.pi
    day = torch.arange(days)[:, None]
    anomaly = torch.zeros(days, stations)
    for wave in range(1, 6):
        phase = wave * longitude - (0.15 + 0.07 * wave) * day + wave * 1.7
        anomaly += torch.cos(phase) * torch.cos(latitude) ** wave
    return latitude, longitude, anomaly + 0.2 * torch.randn(days, stations, generator=generator)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--stations", type=int, default=1000)
    parser.add_argument("--history", type=int, default=14)
    parser.add_argument("--neighbours", type=int, default=10)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--steps", type=int, default=150)
    args = parser.parse_args()

    torch.manual_seed(0)
    latitude, longitude, anomaly = make_weather(args.stations, 2000, torch.Generator().manual_seed(5))
    windows = anomaly.unfold(0, args.history + 1, 1)
    model = StationModel(args.history, 32, 2, latitude, longitude, args.neighbours)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, fused=True)
    for step in range(1, args.steps + 1):
        days = windows[torch.randint(len(windows), (args.batch,))]
        loss = F.mse_loss(model(days[..., :-1].transpose(0, 1)), days[..., -1].T)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 30 == 0:
            print(f"step {step:4d}  mse {loss.item():.4f}")
    print(f"final loss {loss.item():.6f}")


if __name__ == "__main__":
    main()
