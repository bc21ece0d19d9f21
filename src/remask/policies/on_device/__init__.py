"""What layer hooks do on the device between layers: one file a hook, which the hook's half in the plan names."""

from remask.policies.on_device.base import Changed, DeviceHook, Hooked

__all__ = ["Changed", "DeviceHook", "Hooked"]
