"""Checkpoints in safetensors files, read without torch and without a copy."""

from cufp8.checkpoint.file import CheckpointError, Files, Stored

__all__ = ["CheckpointError", "Files", "Stored"]
