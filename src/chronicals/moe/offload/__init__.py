"""The expert-offload engine: experts in host memory, of which some are in slots on the device."""
