# Before
h = graph_network(features, edges)
logits = head(h)
loss = F.cross_entropy(logits[train_rows], labels[train_rows])
loss.backward()
# After
h = graph_network(features, edges)
logits = head(h[train_rows])
loss = F.cross_entropy(logits, labels[train_rows])
loss.backward()
