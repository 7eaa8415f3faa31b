# Before
vocabulary_size = 50257
embedding = nn.Embedding(vocabulary_size, 768)
head = nn.Linear(768, vocabulary_size, bias=False)
# After
vocabulary_size = 50304  # 50257 tokens, rounded up to a multiple of 64
embedding = nn.Embedding(vocabulary_size, 768)
head = nn.Linear(768, vocabulary_size, bias=False)
