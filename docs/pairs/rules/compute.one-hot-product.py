# Before
linear = nn.Linear(vocabulary_size, 256, bias=False)
for tokens, y in loader:
    h = linear(F.one_hot(tokens, vocabulary_size).float())
    loss = F.cross_entropy(head(h), y)
# After
embedding = nn.Embedding(vocabulary_size, 256)
for tokens, y in loader:
    h = embedding(tokens)
    loss = F.cross_entropy(head(h), y)
