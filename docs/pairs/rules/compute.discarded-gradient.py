# Before
fake = generator(noise)
loss_d = loss_real(critic(real)) + loss_fake(critic(fake))
critic_optimizer.zero_grad()
loss_d.backward()
critic_optimizer.step()
# After
fake = generator(noise)
loss_d = loss_real(critic(real)) + loss_fake(critic(fake.detach()))
critic_optimizer.zero_grad()
loss_d.backward()
critic_optimizer.step()
