# Before
table = nn.Embedding(5_000_000, 64)
optimizer = torch.optim.Adagrad(table.parameters(), lr=0.1, fused=True)
for ids, y in loader:
    loss = F.mse_loss(net(table(ids)), y)
    loss.backward()
# After
table = nn.Embedding(5_000_000, 64, sparse=True)
optimizer = torch.optim.Adagrad(table.parameters(), lr=0.1)
for ids, y in loader:
    loss = F.mse_loss(net(table(ids)), y)
    loss.backward()
