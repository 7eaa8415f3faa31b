# Before
loss_actor = actor_loss(actor(encoder(x)), actions)
loss_critic = F.mse_loss(critic(encoder(x)), returns)
(loss_actor + loss_critic).backward()
# After
h = encoder(x)
loss_actor = actor_loss(actor(h), actions)
loss_critic = F.mse_loss(critic(h), returns)
(loss_actor + loss_critic).backward()
