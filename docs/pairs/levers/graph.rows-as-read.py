# Before
model = GraphNetwork()
optimizer = torch.optim.Adam(model.parameters())
for epoch in range(num_epochs):
    logits = model(features, edges)
    loss = F.cross_entropy(logits[train_rows], labels[train_rows])
    loss.backward()
# After
from flatout import compute_rows_as_read

model = GraphNetwork()
compute_rows_as_read(model.head)
optimizer = torch.optim.Adam(model.parameters())
for epoch in range(num_epochs):
    logits = model(features, edges)
    loss = F.cross_entropy(logits[train_rows], labels[train_rows])
    loss.backward()
