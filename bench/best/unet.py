"""The diffusion of examples/gpu/unet_diffusion.py as people train it who know how: bfloat16, channels last, torch.compile.

    python bench/best/unet.py [--compile default|graphs|tuned] [--flash] [options of the example]

'graphs' records CUDA graphs; 'tuned' tries the sizes of compiled kernels one by one, too, which took more than seven minutes on
an H200. Reductions of mixed order are off: with them torch 2.11 returns gradients of another shape for the weights of this
model's norms, and the script ends (issue 178080 of pytorch/pytorch).
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from denoising_diffusion_pytorch import GaussianDiffusion, Unet

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples" / "gpu"))

from resnet_images import shapes
from unet_diffusion import parse


def main() -> None:
    parser = parse(__doc__)
    parser.add_argument("--compile", choices=("default", "graphs", "tuned"), default="default")
    parser.add_argument("--flash", action="store_true", help="the Unet's flash_attn")
    args = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)
    torch.backends.cudnn.benchmark = True
    torch.set_float32_matmul_precision("high")
    images, _ = shapes(8 * args.batch, args.size, torch.Generator().manual_seed(1))
    images = images.clamp(-1, 1).add(1).div(2).to(device, memory_format=torch.channels_last)
    model = Unet(dim=args.dim, dim_mults=(1, 2, 4, 8), flash_attn=args.flash)
    diffusion = GaussianDiffusion(model, image_size=args.size, timesteps=1000)
    diffusion = diffusion.to(device, memory_format=torch.channels_last)
    options = {"triton.mix_order_reduction": False}
    if args.compile in ("graphs", "tuned"):
        options["triton.cudagraphs"] = True
    if args.compile == "tuned":
        options["coordinate_descent_tuning"] = True
    model.compile(options=options)
    optimizer = torch.optim.Adam(diffusion.parameters(), lr=8e-5, betas=(0.9, 0.99), fused=True)
    for step in range(1, args.steps + 1):
        rows = torch.randint(len(images), (args.batch,)).to(device, non_blocking=True)
        with torch.autocast(device, torch.bfloat16):
            loss = diffusion(images[rows])
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(diffusion.parameters(), 1.0)
        optimizer.step()
        if step % 20 == 0:
            print(f"step {step:5d}  loss {loss.item():.4f}")


if __name__ == "__main__":
    main()
