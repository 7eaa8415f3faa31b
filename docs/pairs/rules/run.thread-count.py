# Before
torch.set_num_threads(1)
for x, y in loader:
    loss = F.cross_entropy(model(x), y)
    loss.backward()
# After
torch.set_num_threads(len(os.sched_getaffinity(0)))
for x, y in loader:
    loss = F.cross_entropy(model(x), y)
    loss.backward()
