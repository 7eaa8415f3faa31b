# Before
for step, (x, y) in enumerate(loader):
    begin = time.perf_counter()
    train_step(x, y)
    torch.cuda.synchronize()
    seconds.append(time.perf_counter() - begin)
# After
events = [torch.cuda.Event(enable_timing=True)]
events[0].record()
for step, (x, y) in enumerate(loader):
    train_step(x, y)
    events.append(torch.cuda.Event(enable_timing=True))
    events[-1].record()
torch.cuda.synchronize()
seconds = [a.elapsed_time(b) / 1000 for a, b in zip(events, events[1:])]
