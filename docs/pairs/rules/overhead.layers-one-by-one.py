# Before
heads = nn.ModuleList(nn.Linear(64, 16) for _ in range(32))
for x, y in loader:  # x: (32, batch, 64)
    out = torch.stack([head(x[i]) for i, head in enumerate(heads)])
    loss = F.mse_loss(out, y)
# After
weight = nn.Parameter(torch.empty(32, 64, 16).uniform_(-0.125, 0.125))
bias = nn.Parameter(torch.empty(32, 1, 16).uniform_(-0.125, 0.125))
for x, y in loader:  # x: (32, batch, 64)
    out = torch.baddbmm(bias, x, weight)
    loss = F.mse_loss(out, y)
