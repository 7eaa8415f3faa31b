# Before
for step in range(num_steps):
    chosen = random.sample(records, 64)
    x = torch.tensor([[r["age"], r["income"], r["debt"]] for r in chosen])
    y = torch.tensor([r["label"] for r in chosen])
    loss = F.cross_entropy(model(x), y)
    loss.backward()
# After
all_x = torch.tensor([[r["age"], r["income"], r["debt"]] for r in records])
all_y = torch.tensor([r["label"] for r in records])
for step in range(num_steps):
    rows = torch.tensor(random.sample(range(len(records)), 64))
    loss = F.cross_entropy(model(all_x[rows]), all_y[rows])
    loss.backward()
