# Before
correct = 0
predictions = model(x).argmax(-1)
for i in range(len(y)):
    if predictions[i].item() == y[i].item():
        correct += 1
# After
correct = torch.zeros((), dtype=torch.long, device=x.device)
predictions = model(x).argmax(-1)
correct += (predictions == y).sum()
