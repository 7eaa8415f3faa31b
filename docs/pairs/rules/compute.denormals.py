# Before
model = Decoder()
for x, y in loader:
    loss = F.mse_loss(model(x), y)
    loss.backward()
# After
torch.set_flush_denormal(True)
model = Decoder()
for x, y in loader:
    loss = F.mse_loss(model(x), y)
    loss.backward()
