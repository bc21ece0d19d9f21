"""This machine: its processor, its devices, its disks, and transfers between host and device."""
