# Before
for x, rows in loader:
    y = torch.tensor([json.loads(texts[i])["label"] for i in rows.tolist()])
    loss = F.cross_entropy(model(x), y)
    loss.backward()
# After
labels = torch.tensor([json.loads(text)["label"] for text in texts])
for x, rows in loader:
    loss = F.cross_entropy(model(x), labels[rows])
    loss.backward()
