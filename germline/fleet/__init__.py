"""Who evaluates which members, and how an update is shared out. ``protocol.py`` has the whole interface."""

from germline.fleet.cluster.elastic import Elastic
from germline.fleet.local import Local
from germline.fleet.protocol import Fleet
from germline.fleet.spmd.fleet import SPMD
