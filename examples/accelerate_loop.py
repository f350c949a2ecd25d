"""An Accelerate loop with verified transfers: accelerate launch examples/accelerate_loop.py OUTPUT [--stock]

The only change to a loop written for Accelerate is the name of the class.
"""

import argparse

import torch
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import hf_rocm_tune


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("output")
    parser.add_argument("--stock", action="store_true", help="with Accelerate's own class: the losses are the same")
    parser.add_argument("--resume", action="store_true", help="go on from the state in OUTPUT")
    options = parser.parse_args()
    torch.manual_seed(0)
    accelerator = Accelerator() if options.stock else hf_rocm_tune.VerifiedAccelerator()
    rows = TensorDataset(torch.randn(256, 20), torch.randint(4, (256,)))
    loader = DataLoader(rows, batch_size=16, shuffle=True)
    model = nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 4))
    model[0].requires_grad_(False)  # frozen, and so watched
    optimizer = torch.optim.AdamW((p for p in model.parameters() if p.requires_grad), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, total_iters=32)
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
    if options.resume:
        accelerator.load_state(options.output)
    for epoch in range(2):
        for inputs, labels in loader:
            with accelerator.accumulate(model):
                loss = nn.functional.cross_entropy(model(inputs), labels)
                accelerator.backward(loss)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
        accelerator.print(f"epoch {epoch}: loss {loss.item():.6f}")
    accelerator.save_state(options.output)  # written aside, compared, sealed; load_state checks it
    accelerator.end_training()


if __name__ == "__main__":
    main()
