"""LoRA on a Llama of the sizes of examples/gpu/lora_naive.py by PEFT on transformers' model: bfloat16, compiled, fused AdamW.

    python bench/best/lora.py [--compile model|layers|none] [--liger] [--recompute] [options of the example]

The frozen weights are held in bfloat16, adapters of rank 16 beside all products of the layers in float32, as PEFT has them.
`--liger` takes norms, rotary turns, gates, and the head with its loss from Liger kernels, which is what is public of Unsloth's
speed-ups.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples" / "gpu"))

from llama_naive import parse, read_documents


def main() -> None:
    parser = parse(__doc__)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--compile", choices=("model", "layers", "none"), default="model")
    parser.add_argument("--liger", action="store_true")
    parser.add_argument("--recompute", action="store_true")
    args = parser.parse_args()
    from peft import LoraConfig, get_peft_model
    from transformers import LlamaConfig, LlamaForCausalLM

    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)
    if args.liger:
        from liger_kernel.transformers import apply_liger_kernel_to_llama

        apply_liger_kernel_to_llama()
    config = LlamaConfig(
        vocab_size=args.vocab,
        hidden_size=args.width,
        intermediate_size=args.inner,
        num_hidden_layers=args.layers,
        num_attention_heads=args.heads,
        num_key_value_heads=args.kv_heads,
        max_position_embeddings=args.context,
        attn_implementation="sdpa",
        use_cache=False,
    )
    model = LlamaForCausalLM(config).to(torch.bfloat16)
    wanted = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    model = get_peft_model(model, LoraConfig(r=args.rank, lora_alpha=2 * args.rank, target_modules=wanted)).to(device)
    if args.recompute:
        model.gradient_checkpointing_enable()
        model.enable_input_require_grads()
    if args.compile == "layers":
        for layer in model.base_model.model.model.layers:
            layer.compile()
    elif args.compile == "model":
        model.compile()
    optimizer = torch.optim.AdamW([w for w in model.parameters() if w.requires_grad], lr=1e-3, fused=True)
    tokens = torch.cat(read_documents()).to(device)
    offsets = torch.arange(args.context, device=device)
    for step in range(1, args.steps + 1):
        starts = torch.randint(len(tokens) - args.context - 1, (args.batch,)).to(device, non_blocking=True)
        rows = tokens[starts[:, None] + offsets]
        with torch.autocast(device, torch.bfloat16):
            loss = model(input_ids=rows, labels=rows).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 20 == 0:
            print(f"step {step:5d}  loss {loss.item():.4f}")


if __name__ == "__main__":
    main()
