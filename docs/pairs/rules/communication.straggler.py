# Before
for step, (x, y) in enumerate(loader):
    train_step(x, y)
    if rank == 0:
        correct = num_correct(model, validation_loader)
        print(step, correct.item())
# After
for step, (x, y) in enumerate(loader):
    train_step(x, y)
    if step % 500 == 0:
        correct = num_correct(model, my_part_of_validation)
        dist.reduce(correct, dst=0)
        if rank == 0:
            print(step, correct.item())
