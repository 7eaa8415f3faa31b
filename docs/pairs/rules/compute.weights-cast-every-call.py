# Before
with torch.inference_mode(), torch.autocast("cuda", dtype=torch.bfloat16):
    for x in requests:
        answers.append(model(x).argmax(-1))
# After
model = model.to(torch.bfloat16)
with torch.inference_mode():
    for x in requests:
        answers.append(model(x.to(torch.bfloat16)).argmax(-1))
