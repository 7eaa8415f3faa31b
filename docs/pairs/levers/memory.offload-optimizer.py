# Before
model = Transformer().to("cuda")
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
for x, y in loader:
    train_step(model, optimizer, x, y)
# After
from flatout import offload_state

model = Transformer().to("cuda")
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
offload_state(optimizer)
for x, y in loader:
    train_step(model, optimizer, x, y)
