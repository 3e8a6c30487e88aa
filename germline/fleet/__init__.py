"""Who evaluates which members."""

from germline.fleet.local import Local

__all__ = ["Local"]
