# Before
model = Transformer()
model.compile()
optimizer = torch.optim.AdamW(model.parameters())
for x, y in loader:
    loss = F.cross_entropy(model(x), y)
# After
from flatout.blocks.training.recompute_in_graphs import recompute_cheap_operators

recompute_cheap_operators()
model = Transformer()
model.compile()
optimizer = torch.optim.AdamW(model.parameters())
for x, y in loader:
    loss = F.cross_entropy(model(x), y)
