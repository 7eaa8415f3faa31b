"""A diffusion model on pictures of coloured shapes with denoising-diffusion-pytorch, as its README begins: float32, a plain loop.

It needs `pip install denoising-diffusion-pytorch`. On a CPU it is a toy, so that the script can be tried anywhere.
"""

import argparse

import torch
from denoising_diffusion_pytorch import GaussianDiffusion, Unet
from resnet_images import shapes


def parse(doc):
    on_gpu = torch.cuda.is_available()
    parser = argparse.ArgumentParser(description=doc)
    parser.add_argument("--dim", type=int, default=64 if on_gpu else 8)
    parser.add_argument("--size", type=int, default=128 if on_gpu else 16)
    parser.add_argument("--batch", type=int, default=32 if on_gpu else 4)
    parser.add_argument("--steps", type=int, default=1000)
    return parser


def main():
    args = parse(__doc__).parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)
    images, _ = shapes(8 * args.batch, args.size, torch.Generator().manual_seed(1))
    images = images.clamp(-1, 1).add(1).div(2).to(device)
    model = Unet(dim=args.dim, dim_mults=(1, 2, 4, 8), flash_attn=False)
    diffusion = GaussianDiffusion(model, image_size=args.size, timesteps=1000).to(device)
    optimizer = torch.optim.Adam(diffusion.parameters(), lr=8e-5, betas=(0.9, 0.99))
    for step in range(1, args.steps + 1):
        rows = torch.randint(len(images), (args.batch,)).to(device)
        loss = diffusion(images[rows])
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(diffusion.parameters(), 1.0)
        optimizer.step()
        if step % 20 == 0:
            print(f"step {step:5d}  loss {loss.item():.4f}")


if __name__ == "__main__":
    main()
