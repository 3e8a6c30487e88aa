"""Weights as safetensors files."""

from pathlib import Path

from torch import Tensor, nn

from germline.engine.files import write_tensors
from germline.genome import Genome


def export_model(model: nn.Module, file: Path) -> None:
    """Write a model's state_dict, with tied weights once, as safetensors."""
    tensors: dict[str, Tensor] = {}
    seen: set[tuple[int, tuple[int, ...]]] = set()
    for name, tensor in model.state_dict().items():
        key = (tensor.data_ptr(), tuple(tensor.shape))
        if tensor.numel() and key in seen:
            continue
        seen.add(key)
        tensors[name] = tensor.detach().cpu().contiguous()
    write_tensors(file, tensors)


def export_theta(genome: Genome, theta: Tensor, file: Path) -> None:
    """Write the trainable parameters by name, with tied ones once, as safetensors."""
    views = genome.views(theta.detach().cpu())
    write_tensors(file, {slot.name: views[slot.name].contiguous() for slot in genome.slots})
