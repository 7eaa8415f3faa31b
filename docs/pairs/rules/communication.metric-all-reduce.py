# Before
for step, (x, y) in enumerate(loader):
    loss = train_step(x, y).detach()
    dist.all_reduce(loss, op=dist.ReduceOp.AVG)
    if step % 50 == 49:
        print(step, loss.item())
# After
total = torch.zeros((), device="cuda")
for step, (x, y) in enumerate(loader):
    total += train_step(x, y).detach()
    if step % 50 == 49:
        dist.all_reduce(total, op=dist.ReduceOp.AVG)
        print(step, total.item() / 50)
        total.zero_()
