# Before
model = resnet50().cuda()
for x, y in loader:
    x, y = x.cuda(), y.cuda()
    loss = F.cross_entropy(model(x), y)
    loss.backward()
# After
model = resnet50().cuda().to(memory_format=torch.channels_last)
for x, y in loader:
    x, y = x.cuda().to(memory_format=torch.channels_last), y.cuda()
    loss = F.cross_entropy(model(x), y)
    loss.backward()
