# Before
total = 0.0
for step, (x, y) in enumerate(loader):
    loss = train_step(x, y)
    total += loss.item()
    if step % 50 == 49:
        print(f"{total / 50:.3f}")
        total = 0.0
# After
total = 0.0
for step, (x, y) in enumerate(loader):
    loss = train_step(x, y)
    total += loss.detach()
    if step % 50 == 49:
        print(f"{float(total) / 50:.3f}")
        total = 0.0
