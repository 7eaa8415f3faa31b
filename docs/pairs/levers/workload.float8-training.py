# Before
model = Transformer()
model.to("cuda", torch.bfloat16)
optimizer = torch.optim.AdamW(model.parameters())
for x, y in loader:
    loss = F.cross_entropy(model(x), y)
# After
from flatout.blocks.training import float8

model = Transformer()
model.to("cuda", torch.bfloat16)
float8.convert(model)
model.compile()
optimizer = torch.optim.AdamW(model.parameters())
for x, y in loader:
    loss = F.cross_entropy(model(x), y)
