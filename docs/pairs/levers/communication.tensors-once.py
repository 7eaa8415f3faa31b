# Before
for step in range(num_steps):
    chosen = [records[i] for i in torch.randint(len(records), (64,)).tolist()]
    x = torch.tensor([[record[field] for field in FIELDS] for record in chosen])
    y = torch.tensor([record["label"] for record in chosen])
    loss = F.cross_entropy(model(x), y)
# After
all_x = torch.tensor([[record[field] for field in FIELDS] for record in records])
all_y = torch.tensor([record["label"] for record in records])
for step in range(num_steps):
    rows = torch.randint(len(records), (64,)).tolist()
    x = all_x[rows]
    y = all_y[rows]
    loss = F.cross_entropy(model(x), y)
