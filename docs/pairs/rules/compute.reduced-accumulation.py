# Before
torch.set_float32_matmul_precision("highest")
model = Transformer().to("cuda", torch.bfloat16)
loss = F.cross_entropy(model(x), y)
# After
torch.set_float32_matmul_precision("highest")
torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
model = Transformer().to("cuda", torch.bfloat16)
loss = F.cross_entropy(model(x), y)
