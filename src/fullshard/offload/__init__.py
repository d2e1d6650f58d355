"""Offloaded training state: stored in host memory or crash-safe on a drive, and updated group by group.

adamw                the optimizer, its gradients, and its update in device memory; rounding is a part
state                the offloaded state of a model on one rank, and the thread that updates it
store, drive_store   state of the groups in host memory, or on a drive in `generations`
gather_source        shards that FSDP2 gathers, in memory or on a drive
generations          a rank's state in two files, one of which is complete at any moment
directories, drive   a rank's directory with its lock and manifests; files that bypass the page cache
"""
