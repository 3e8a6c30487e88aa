"""Who evaluates which members, and how an update is shared out."""

from germline.fleet.elastic import Elastic
from germline.fleet.exchange import Exchange
from germline.fleet.launch import launched, run_here
from germline.fleet.local import Local
from germline.fleet.spmd import SPMD, TIMEOUT

__all__ = ["SPMD", "TIMEOUT", "Elastic", "Exchange", "Local", "launched", "run_here"]
