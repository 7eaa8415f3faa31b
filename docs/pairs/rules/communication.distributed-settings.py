# Before
os.environ["NCCL_P2P_DISABLE"] = "1"
dist.init_process_group("nccl")
# After
dist.init_process_group("nccl")
