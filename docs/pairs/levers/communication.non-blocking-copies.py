# Before
for step in range(steps):
    rows = torch.randint(len(tokens), (batch,))
    x = tokens[rows.to(device)]
    train_step(x)


# After
for step in range(steps):
    rows = torch.randint(len(tokens), (batch,))
    x = tokens[rows.to(device, non_blocking=True)]
    train_step(x)
