# Before
u = model(torch.stack([x, y, t], dim=-1))
u_x = torch.autograd.grad(u.sum(), x, create_graph=True)[0]
u_y = torch.autograd.grad(u.sum(), y, create_graph=True)[0]
u_t = torch.autograd.grad(u.sum(), t, create_graph=True)[0]
# After
u = model(torch.stack([x, y, t], dim=-1))
gradients = torch.autograd.grad(u.sum(), (x, y, t), create_graph=True)
u_x, u_y, u_t = gradients
