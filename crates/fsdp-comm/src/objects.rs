//! Collectives on serializable values, and agreement.

use fsdp_layout::Failure;
use serde::Serialize;
use serde::de::DeserializeOwned;

use crate::backend::{Destination, Pattern, Plan};
use crate::collectives::check;
use crate::error::{CommError, RankCall, bounded};
use crate::group::ProcessGroup;
use crate::record::{Call, Fault, Operation, Record};
use crate::wire;

/// Largest object, in bytes, that a rank may send, and most that it may receive in one operation.
pub const MAX_OBJECT_BYTES: usize = wire::MAX_BYTES;

impl ProcessGroup {
    /// Every rank's value, in rank order, on every rank. torch's `all_gather_object`.
    ///
    /// # Errors
    /// Objects that cannot be encoded or decoded, or are larger than [`MAX_OBJECT_BYTES`].
    pub fn all_gather_object<T: Serialize + DeserializeOwned>(&self, value: &T) -> Result<Vec<T>, CommError> {
        let call = Call::new(Operation::AllGatherObject);
        let sent = encode(&call, value).map(|bytes| vec![bytes]);
        let received = self.exchange_objects(call.clone(), Pattern::AllGather, sent, |_, _| Some(0))?;
        received.iter().map(|bytes| decode(&call, bytes)).collect()
    }

    /// Every rank's value, in rank order, on the root; `None` on all others. torch's `gather_object`.
    ///
    /// # Errors
    /// As [`all_gather_object`](Self::all_gather_object); different roots.
    pub fn gather_object<T: Serialize + DeserializeOwned>(
        &self,
        value: &T,
        root: usize,
    ) -> Result<Option<Vec<T>>, CommError> {
        let call = Call { root: Some(root), ..Call::new(Operation::GatherObject) };
        let sent = check(&call, || self.check_root(root)).and_then(|()| Ok(vec![encode(&call, value)?]));
        let received =
            self.exchange_objects(call.clone(), Pattern::Gather { root }, sent, |_, to| (to == root).then_some(0))?;
        let values = || received.iter().map(|bytes| decode(&call, bytes)).collect();
        (self.rank() == root).then(values).transpose()
    }

    /// The `r`-th of the root's values on each rank `r`. torch's `scatter_object_list`.
    /// `values` is `Some` on the root, with one value for each rank, and is ignored on all others.
    ///
    /// # Errors
    /// As [`all_gather_object`](Self::all_gather_object); different roots; another number of values.
    pub fn scatter_object<T: Serialize + DeserializeOwned>(
        &self,
        values: Option<&[T]>,
        root: usize,
    ) -> Result<T, CommError> {
        let call = Call { root: Some(root), ..Call::new(Operation::ScatterObject) };
        let sent = check(&call, || {
            self.check_root(root)?;
            match values {
                Some(values) if self.rank() == root && values.len() != self.world_size() => Err(format!(
                    "there must be one value for each of {} ranks, not {}",
                    self.world_size(),
                    values.len()
                )),
                None if self.rank() == root => Err(format!("values must be given on root {root}")),
                _ => Ok(()),
            }
        });
        let values = values.filter(|_| self.rank() == root).unwrap_or_default();
        let sent = sent.and_then(|()| values.iter().map(|value| encode(&call, value)).collect());
        let received = self
            .exchange_objects(call.clone(), Pattern::Scatter { root }, sent, |from, to| (from == root).then_some(to))?;
        decode(&call, received.get(root).map_or(&[], Vec::as_slice))
    }

    /// The root's value on every rank. torch's `broadcast_object_list`.
    /// `value` is `Some` on the root and is ignored on all others.
    ///
    /// # Errors
    /// As [`all_gather_object`](Self::all_gather_object); different roots; no value on the root.
    pub fn broadcast_object<T: Serialize + DeserializeOwned>(
        &self,
        value: Option<&T>,
        root: usize,
    ) -> Result<T, CommError> {
        let call = Call { root: Some(root), ..Call::new(Operation::BroadcastObject) };
        let sent = check(&call, || {
            self.check_root(root)?;
            if self.rank() == root && value.is_none() {
                return Err(format!("a value must be given on root {root}"));
            }
            Ok(())
        });
        let value = value.filter(|_| self.rank() == root);
        let sent = sent.and_then(|()| value.iter().map(|value| encode(&call, value)).collect());
        let received = self
            .exchange_objects(call.clone(), Pattern::Broadcast { root }, sent, |from, _| (from == root).then_some(0))?;
        decode(&call, received.get(root).map_or(&[], Vec::as_slice))
    }

    /// Makes one rank's error every rank's error.
    ///
    /// Each rank brings the outcome of what it did by itself. If all bring `Ok`, each gets its own value back; if any
    /// brings `Err`, all get the same [`CommError::RankFailed`], which names every failing rank with the kind of its
    /// failure and its message (cut to [`MAX_MESSAGE_BYTES`](crate::MAX_MESSAGE_BYTES)). The group goes on.
    ///
    /// # Errors
    /// Any rank's error; ranks that agree on different operations.
    pub fn agree<T, E: Failure>(&self, operation: &str, outcome: Result<T, E>) -> Result<T, CommError> {
        self.agree_with(operation, Vec::new(), outcome)
    }

    /// As [`agree`](Self::agree), and all ranks must bring the same hash of what they are about to work on.
    ///
    /// # Errors
    /// As [`agree`](Self::agree); [`CommError::SchemaMismatch`] names the ranks whose hashes differ.
    pub fn agree_on<T, E: Failure>(
        &self,
        operation: &str,
        schema_hash: u64,
        outcome: Result<T, E>,
    ) -> Result<T, CommError> {
        self.agree_with(operation, vec![schema_hash], outcome)
    }

    fn agree_with<T, E: Failure>(
        &self,
        operation: &str,
        schema: Vec<u64>,
        outcome: Result<T, E>,
    ) -> Result<T, CommError> {
        let label = bounded(&operation);
        let call = Call { label: Some(label), sizes: vec![schema.len()], ..Call::new(Operation::Agree) };
        let mut turn = self.begin(call, Ok(()))?;
        let (value, fault) = match outcome {
            Ok(value) => (Some(value), None),
            Err(error) => (None, Some(Fault::new(&error))),
        };
        turn.round(fault, schema, &[], |records| {
            let own = |record: &Record<'_>| record.header.own.clone();
            if records.iter().all(|record| Some(own(record)) == records.first().map(own)) {
                return Ok(None);
            }
            let schemas = records.iter().zip(self.global_ranks()).map(|(record, &rank)| {
                let hash = record.header.own.first().copied().unwrap_or_default();
                (rank, format!("schema {hash:016x}"))
            });
            Err(CommError::SchemaMismatch { operation: operation.to_owned(), schemas: RankCall::collect(schemas) })
        })?;
        // A rank without a value has a fault, with which the round fails on every rank.
        value.ok_or_else(|| CommError::RankFailed { operation: operation.to_owned(), failures: Vec::new() })
    }

    /// Moves encoded objects: each rank has sent some, and `which(from, to)` tells which of them a rank gets.
    /// Returns what came from each rank; nothing where nothing was to come.
    fn exchange_objects(
        &self,
        call: Call,
        pattern: Pattern,
        sent: Result<Vec<Vec<u8>>, CommError>,
        which: impl Fn(usize, usize) -> Option<usize>,
    ) -> Result<Vec<Vec<u8>>, CommError> {
        let (sent, arguments) = match sent {
            Ok(sent) => (sent, Ok(())),
            Err(error) => (Vec::new(), Err(error)),
        };
        let (rank, world_size) = (self.rank(), self.world_size());
        let mut turn = self.begin(call.clone(), arguments)?;
        let sizes: Vec<u64> = sent.iter().map(|bytes| bytes.len() as u64).collect();
        let mut received: Vec<Vec<u8>> = (0..world_size).map(|_| Vec::new()).collect();
        turn.round(None, sizes, &sent.concat(), |records| {
            // Where the object lies in the bytes that a rank sends.
            let range = |from: usize, to: usize| {
                let sizes = records.get(from).map_or(&[][..], |record| &record.header.own);
                let index = which(from, to).filter(|&index| index < sizes.len());
                let bytes = |sizes: &[u64]| sizes.iter().fold(0u64, |sum, &size| sum.saturating_add(size));
                index.map_or(0..0, |index| bytes(&sizes[..index])..bytes(&sizes[..=index]))
            };
            for to in 0..world_size {
                let total = (0..world_size).fold(0u64, |sum, from| {
                    let range = range(from, to);
                    sum.saturating_add(range.end - range.start)
                });
                if total > MAX_OBJECT_BYTES as u64 {
                    let operation = call.name().to_owned();
                    let message = format!("rank {to} would receive {total} bytes, more than {MAX_OBJECT_BYTES}");
                    return Err(CommError::InvalidArgument { operation, message });
                }
            }
            let range = |from: usize, to: usize| {
                let range = range(from, to);
                range.start as usize..range.end as usize
            };
            let from: Vec<_> = (0..world_size).map(|from| range(from, rank)).collect();
            let destinations = received.iter_mut().zip(&from).map(|(bytes, range)| {
                bytes.resize(range.len(), 0);
                vec![bytes.as_mut_slice()]
            });
            let sizes = records.iter().flat_map(|record| &record.header.own);
            Ok(Some(Plan {
                pattern,
                longest: sizes.max().copied().unwrap_or_default() as usize,
                to: (0..world_size).map(|to| range(rank, to)).collect(),
                destination: Destination::Copy(destinations.collect()),
                from,
            }))
        })?;
        Ok(received)
    }
}

fn encode<T: Serialize>(call: &Call, value: &T) -> Result<Vec<u8>, CommError> {
    let error = |message| CommError::Object { operation: call.name().to_owned(), action: "encode".to_owned(), message };
    let bytes = wire::encode(value).map_err(error)?;
    if bytes.len() > MAX_OBJECT_BYTES {
        return Err(error(format!("it has {} bytes, more than {MAX_OBJECT_BYTES}", bytes.len())));
    }
    Ok(bytes)
}

fn decode<T: DeserializeOwned>(call: &Call, bytes: &[u8]) -> Result<T, CommError> {
    wire::decode(bytes).map_err(|message| CommError::Object {
        operation: call.name().to_owned(),
        action: "decode".to_owned(),
        message,
    })
}
