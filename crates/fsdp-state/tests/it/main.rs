//! State dicts over many ranks.

#[cfg(test)]
mod agreement;
#[cfg(test)]
mod broadcast;
#[cfg(test)]
mod distribute;
#[cfg(test)]
mod gather;
#[cfg(test)]
mod ranks;
#[cfg(test)]
mod replicas;
mod reshard;
#[cfg(test)]
mod streaming;
#[cfg(test)]
mod utilities;
