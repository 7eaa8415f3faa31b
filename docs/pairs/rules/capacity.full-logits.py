# Before
hidden = transformer(tokens)
logits = head(hidden)
loss = F.cross_entropy(logits.view(-1, vocabulary_size), targets.view(-1))
loss.backward()
# After
from flatout import linear_cross_entropy

hidden = transformer(tokens)
loss = linear_cross_entropy(hidden, head.weight, targets, head.bias)
loss.backward()
