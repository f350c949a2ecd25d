"""A plain PyTorch loop with verified transfers: python examples/plain_loop.py OUTPUT [--device cpu] [--stock]

With --stock the same loop runs without them: the printed losses are the same.
"""

import argparse
from contextlib import nullcontext

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import hf_rocm_tune


class Classifier(nn.Module):
    """A frozen embedding and body, and a head that is trained."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(100, 32).requires_grad_(False)
        self.body = nn.Linear(32, 64).requires_grad_(False)
        self.head = nn.Linear(64, 4)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(torch.relu(self.body(self.embedding(tokens).mean(1))))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("output")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--stock", action="store_true", help="without verified transfers")
    options = parser.parse_args()
    torch.manual_seed(0)
    rows = TensorDataset(torch.randint(100, (256, 16)), torch.randint(4, (256,)))
    loader = DataLoader(rows, batch_size=16, shuffle=True)
    with nullcontext() if options.stock else hf_rocm_tune.VerifiedTransfers(options.device) as transfers:
        model = Classifier().to(options.device)  # a plain copy: it is verified like every other one
        optimizer = torch.optim.AdamW((p for p in model.parameters() if p.requires_grad), lr=1e-2)
        if transfers:
            transfers.watch(model, optimizer)
        for epoch in range(2):
            for tokens, labels in transfers.batches(loader) if transfers else loader:
                logits = model(tokens.to(options.device))
                loss = nn.functional.cross_entropy(logits, labels.to(options.device))
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
            print(f"epoch {epoch}: loss {loss.item():.6f}")
        if transfers:
            transfers.check()
            transfers.save(model.state_dict(), options.output)
            transfers.write_report(options.output)
            print(transfers.report)


if __name__ == "__main__":
    main()
