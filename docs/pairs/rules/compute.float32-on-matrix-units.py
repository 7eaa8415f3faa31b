# Before
model = Transformer().cuda()
for x, y in loader:
    loss = F.cross_entropy(model(x), y)
    loss.backward()
# After
torch.set_float32_matmul_precision("high")
model = Transformer().cuda()
for x, y in loader:
    loss = F.cross_entropy(model(x), y)
    loss.backward()
