# Before
for step, (x, y) in enumerate(loader):
    train_step(x, y)
    if step % 500 == 0:
        evaluate(model)
# After
for step, (x, y) in enumerate(loader):
    train_step(x, y)
    if step % 500 == 0:
        evaluate(model)
        print(f"{torch.cuda.clock_rate()} MHz at {torch.cuda.temperature()} C")
