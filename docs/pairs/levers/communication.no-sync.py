# Before
model = DistributedDataParallel(model)
for step in range(num_steps):
    for micro in range(4):
        loss = model(get_batch()) / 4
        loss.backward()
    optimizer.step()
    optimizer.zero_grad()
# After
from contextlib import nullcontext

model = DistributedDataParallel(model)
for step in range(num_steps):
    for micro in range(4):
        with model.no_sync() if micro < 3 else nullcontext():
            loss = model(get_batch()) / 4
            loss.backward()
    optimizer.step()
    optimizer.zero_grad()
