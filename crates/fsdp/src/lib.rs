//! Shard candle models over many ranks; save, load, reshard, verify and convert their state.
