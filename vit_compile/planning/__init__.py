"""Policy in plain integers: units, ladders and packing. No torch, no device, no model."""
