//! State dicts over many ranks.

mod agreement;
mod broadcast;
mod distribute;
mod gather;
mod ranks;
mod reshard;
mod streaming;
mod utilities;
