# Before
x = bags_of_words  # nearly all zeros
for _ in range(num_epochs):
    h = x @ weight
    loss = F.cross_entropy(head(h.relu()), y)
    loss.backward()
# After
x = bags_of_words.to_sparse()
for _ in range(num_epochs):
    h = torch.sparse.mm(x, weight)
    loss = F.cross_entropy(head(h.relu()), y)
    loss.backward()
