"""The one varlen attention operation, its kernels, and what is known about other attention operations."""
