"""From tensors to durable files and back: no config, no manager, no training loop."""
