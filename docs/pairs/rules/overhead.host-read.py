# Before
running = 0.0
for step, (x, y) in enumerate(loader):
    loss = train_step(x, y)
    running += loss.item()
    if step % 50 == 49:
        print(step, running / 50)
        running = 0.0
# After
running = 0.0
for step, (x, y) in enumerate(loader):
    loss = train_step(x, y)
    running += loss.detach()
    if step % 50 == 49:
        print(step, running.item() / 50)
        running = 0.0
