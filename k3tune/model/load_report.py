"""What loading a checkpoint took."""

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class LoadReport:
    """What a load read and what it left out.

    Attributes:
        tensors: tensors read.
        bytes_read: payload bytes read from the files, headers not counted.
        experts: global ids of the local experts in the order of their rows, by layer where layers
            differ.
        expert_tensors_skipped: tensors of other experts, not read.
        sharded_tensors_skipped: tensors of which other processes keep every byte, not read.
        vision_tensors_skipped: image-tower tensors, never read.
        vision_bytes_skipped: their bytes, as far as their files are there.
        seconds: time the load took.
        ignored_files: safetensors files in the folder that are no part of the checkpoint.
    """

    tensors: int
    bytes_read: int
    experts: tuple[int, ...] | Mapping[int, tuple[int, ...]]
    expert_tensors_skipped: int
    vision_tensors_skipped: int
    vision_bytes_skipped: int
    seconds: float
    ignored_files: tuple[str, ...] = ()
    sharded_tensors_skipped: int = 0
