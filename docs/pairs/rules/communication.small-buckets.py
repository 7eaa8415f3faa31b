# Before
for x, y in loader:
    train_step(x, y)
    for average in averages:
        dist.all_reduce(average, op=dist.ReduceOp.AVG)
# After
for x, y in loader:
    train_step(x, y)
    flat = torch.cat([average.flatten() for average in averages])
    dist.all_reduce(flat, op=dist.ReduceOp.AVG)
    parts = flat.split([average.numel() for average in averages])
    for average, part in zip(averages, parts):
        average.copy_(part.view_as(average))
