"""Checkpoints in safetensors files, read without torch and without a copy."""

from cufp8.checkpoint.file import CheckpointError, Files, Stored
from cufp8.checkpoint.reader import Checkpoint, Entry, load

__all__ = ["Checkpoint", "CheckpointError", "Entry", "Files", "Stored", "load"]
