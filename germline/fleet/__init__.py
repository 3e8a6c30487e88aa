"""Fleets: they evaluate the members of a run, and share out its updates. ``protocol.py`` has the whole interface."""

from germline.fleet.cluster.fleet import Cluster, Dask, Elastic, Ray
from germline.fleet.local import Local
from germline.fleet.protocol import Fleet
from germline.fleet.spmd.fleet import SPMD
