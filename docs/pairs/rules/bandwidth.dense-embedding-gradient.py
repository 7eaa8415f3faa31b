# Before
users = nn.Embedding(5_000_000, 64)
optimizer = torch.optim.Adam([*users.parameters(), *net.parameters()])
for ids, y in loader:
    optimizer.zero_grad()
    F.mse_loss(net(users(ids)), y).backward()
    optimizer.step()
# After
users = nn.Embedding(5_000_000, 64, sparse=True)
optimizer = torch.optim.Adam(net.parameters())
rows_optimizer = torch.optim.SparseAdam(users.parameters())
for ids, y in loader:
    optimizer.zero_grad()
    rows_optimizer.zero_grad()
    F.mse_loss(net(users(ids)), y).backward()
    optimizer.step()
    rows_optimizer.step()
