# Variational autoencoder on the digits (Kingma and Welling, 2013).
import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn

torch.manual_seed(0)
torch.autograd.set_detect_anomaly(True)

STEPS = 300
BATCH = 256
LATENT = 8


class VAE(nn.Module):
    def __init__(self, hidden=192):
        super().__init__()
        self.encoder = nn.Sequential(
            nn.Linear(64, hidden),
            nn.LayerNorm(hidden),
            nn.SiLU(),
            nn.Linear(hidden, hidden),
            nn.LayerNorm(hidden),
            nn.SiLU(),
            nn.Linear(hidden, hidden),
            nn.LayerNorm(hidden),
            nn.SiLU(),
        )
        self.mean = nn.Linear(hidden, LATENT)
        self.log_variance = nn.Linear(hidden, LATENT)
        self.decoder = nn.Sequential(
            nn.Linear(LATENT, hidden),
            nn.LayerNorm(hidden),
            nn.SiLU(),
            nn.Linear(hidden, hidden),
            nn.LayerNorm(hidden),
            nn.SiLU(),
            nn.Linear(hidden, hidden),
            nn.LayerNorm(hidden),
            nn.SiLU(),
            nn.Linear(hidden, 64),
        )

    def forward(self, x):
        h = self.encoder(x)
        mean, log_variance = self.mean(h), self.log_variance(h)
        z = mean + torch.randn_like(mean) * torch.exp(0.5 * log_variance)
        return self.decoder(z), mean, log_variance


def negative_elbo(logits, x, mean, log_variance):
    reconstruction = F.binary_cross_entropy_with_logits(logits, x, reduction="sum")
    divergence = -0.5 * torch.sum(1 + log_variance - mean.pow(2) - log_variance.exp())
    return (reconstruction + divergence) / len(x)


images = torch.tensor(load_digits().data / 16.0, dtype=torch.float32)
vae = VAE()
optimizer = torch.optim.Adam(vae.parameters(), lr=2e-3, fused=True)

for step in range(1, STEPS + 1):
    x = images[torch.randint(len(images), (BATCH,))]
    logits, mean, log_variance = vae(x)
    loss = negative_elbo(logits, x, mean, log_variance)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 60 == 0:
        print(f"step {step}: negative ELBO {loss.item():.3f}")

print(f"final loss {loss.item():.6f}")
