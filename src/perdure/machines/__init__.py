"""Virtual machines: the driver protocol, QEMU, its jail, the accelerator probe, and the host's end of the guest channel."""
