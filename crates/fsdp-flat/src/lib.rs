//! FlatParameter and ShardedTensor: candle tensors on layouts.
