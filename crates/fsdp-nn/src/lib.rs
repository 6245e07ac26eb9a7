//! FullyShardedDataParallel units, sharded optimizers and optimizer-state transforms.
