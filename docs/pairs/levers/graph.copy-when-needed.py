# Before
import copy

best = None
for step, (x, y) in enumerate(loader):
    train_step(x, y)
    if step % 10 == 0:
        best = copy.deepcopy(model.state_dict())
# After
from flatout import copied

best = None
for step, (x, y) in enumerate(loader):
    train_step(x, y)
    if step % 10 == 0:
        best = copied(model.state_dict(), into=best)
