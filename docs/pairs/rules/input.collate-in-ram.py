# Before
loader = DataLoader(TensorDataset(images, labels), batch_size=256, shuffle=True)
for x, y in loader:
    loss = F.cross_entropy(model(x), y)
    loss.backward()
# After
for rows in torch.randperm(len(images)).split(256):
    x, y = images[rows], labels[rows]
    loss = F.cross_entropy(model(x), y)
    loss.backward()
