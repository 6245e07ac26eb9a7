//! Collectives on serializable values, and agreement on errors.

use fsdp_layout::Failure;
use serde::Serialize;
use serde::de::DeserializeOwned;

use crate::backend::Direction;
use crate::collectives::check;
use crate::error::{CommError, RankCall, bounded};
use crate::exchange::MAX_OBJECT_BYTES;
use crate::group::ProcessGroup;
use crate::record::{Call, Fault, Operation};
use crate::wire;

impl ProcessGroup {
    /// Gathers every rank's value, in rank order, on every rank. torch's `all_gather_object`.
    ///
    /// # Errors
    /// Objects that cannot be encoded or decoded, or are larger than [`MAX_OBJECT_BYTES`].
    pub fn all_gather_object<T: Serialize + DeserializeOwned>(
        &self,
        value: &T,
    ) -> Result<Vec<T>, CommError> {
        let call = Call::new(Operation::AllGatherObject);
        let objects = self.exchange(&call, Direction::AllGather, Ok(()), [value])?;
        decode_all(&call, &objects)
    }

    /// Gathers every rank's value, in rank order, on the root; other ranks get `None`. torch's
    /// `gather_object`.
    ///
    /// # Errors
    /// The same as [`all_gather_object`](Self::all_gather_object); different roots.
    pub fn gather_object<T: Serialize + DeserializeOwned>(
        &self,
        value: &T,
        root: usize,
    ) -> Result<Option<Vec<T>>, CommError> {
        let call = Call {
            root: Some(root),
            ..Call::new(Operation::GatherObject)
        };
        let arguments = check(&call, || self.check_root(root));
        let objects = self.exchange(&call, Direction::Gather { root }, arguments, [value])?;
        if self.rank() != root {
            return Ok(None);
        }
        decode_all(&call, &objects).map(Some)
    }

    /// Gives each rank `r` the `r`-th of the root's values. torch's `scatter_object_list`.
    /// `values` is `Some` on the root, with one value for each rank, and is ignored on all others.
    ///
    /// # Errors
    /// The same as [`all_gather_object`](Self::all_gather_object); different roots; another number
    /// of values.
    pub fn scatter_object<T: Serialize + DeserializeOwned>(
        &self,
        values: Option<&[T]>,
        root: usize,
    ) -> Result<T, CommError> {
        let call = Call {
            root: Some(root),
            ..Call::new(Operation::ScatterObject)
        };
        let arguments = check(&call, || {
            self.check_root(root)?;
            match values {
                _ if self.rank() != root => Ok(()),
                None => Err(format!("values must be given on root {root}")),
                Some(values) if values.len() == self.world_size() => Ok(()),
                Some(values) => Err(format!(
                    "there must be one value for each of {} ranks, not {}",
                    self.world_size(),
                    values.len()
                )),
            }
        });
        // Only the values of the root count.
        let values = values.filter(|_| self.rank() == root).unwrap_or_default();
        let objects = self.exchange(&call, Direction::Scatter { root }, arguments, values)?;
        decode(&call, &objects[root])
    }

    /// Copies the root's value to every rank. torch's `broadcast_object_list`.
    /// `value` is `Some` on the root and is ignored on all others.
    ///
    /// # Errors
    /// The same as [`all_gather_object`](Self::all_gather_object); different roots; no value on the
    /// root.
    pub fn broadcast_object<T: Serialize + DeserializeOwned>(
        &self,
        value: Option<&T>,
        root: usize,
    ) -> Result<T, CommError> {
        let call = Call {
            root: Some(root),
            ..Call::new(Operation::BroadcastObject)
        };
        let arguments = check(&call, || self.check_value(value.is_some(), root));
        let value = value.filter(|_| self.rank() == root);
        let objects = self.exchange(&call, Direction::Broadcast { root }, arguments, value)?;
        decode(&call, &objects[root])
    }

    /// Encodes the `values` of this rank and moves them in `direction`, as the operation `call`:
    /// one value for each rank in a scatter, else one for all. Returns the encoded object from each
    /// rank, which is empty if there is none.
    ///
    /// # Errors
    /// On all ranks: `arguments` that are wrong, or a value that cannot be encoded, on any of them.
    fn exchange<'v, T: Serialize + 'v>(
        &self,
        call: &Call,
        direction: Direction,
        arguments: Result<(), CommError>,
        values: impl IntoIterator<Item = &'v T>,
    ) -> Result<Vec<Vec<u8>>, CommError> {
        let mut objects = Vec::new();
        let arguments = arguments.and_then(|()| {
            for value in values {
                objects.push(encode(call, value)?);
            }
            Ok(())
        });
        self.begin(call.clone(), arguments)?
            .exchange_objects(None, direction, &objects)
    }

    /// Copies the root's value to every rank, unless any rank has an error, which then becomes the
    /// error of every rank: [`agree`](Self::agree) and [`broadcast_object`](Self::broadcast_object)
    /// in one.
    ///
    /// Each rank passes the outcome of its own work. The root's value is `Some`; those of all other
    /// ranks are ignored. If any rank passes `Err`, or the root's value cannot be encoded, all get
    /// the same [`CommError::RankFailed`], as from [`agree`](Self::agree). The group can still be
    /// used. A small value moves in the same round as the outcomes.
    ///
    /// # Errors
    /// Any rank's error; a value that cannot be encoded or decoded, or is larger than
    /// [`MAX_OBJECT_BYTES`]; different operations or roots; no value and no error on the root.
    pub fn broadcast_result<T: Serialize + DeserializeOwned, E: Failure>(
        &self,
        operation: &str,
        outcome: Result<Option<T>, E>,
        root: usize,
    ) -> Result<T, CommError> {
        let call = Call {
            label: Some(bounded(operation)),
            root: Some(root),
            ..Call::new(Operation::BroadcastResult)
        };
        // A root with an error has no value, and needs none.
        let has_value = !matches!(outcome, Ok(None));
        let arguments = check(&call, || self.check_value(has_value, root));
        let mut turn = self.begin(call.clone(), arguments)?;
        let mut own_objects = Vec::new();
        let mut fault = None;
        match &outcome {
            // A value that cannot be encoded is an error on every rank, like an error of the work.
            Ok(Some(value)) if self.rank() == root => match encode(&call, value) {
                Ok(bytes) => own_objects.push(bytes),
                Err(error) => fault = Some(Fault::new(&error)),
            },
            Ok(_) => {}
            Err(error) => fault = Some(Fault::new(error)),
        }
        let objects = turn.exchange_objects(fault, Direction::Broadcast { root }, &own_objects)?;
        decode(&call, &objects[root])
    }

    /// Checks the arguments of a broadcast, in which the root must give a value.
    fn check_value(&self, has_value: bool, root: usize) -> Result<(), String> {
        self.check_root(root)?;
        if self.rank() == root && !has_value {
            return Err(format!("a value must be given on root {root}"));
        }
        Ok(())
    }

    /// Turns an error of any rank into an error of every rank.
    ///
    /// Each rank passes the outcome of its own work. If all pass `Ok`, each gets its own value
    /// back; if any passes `Err`, all get the same [`CommError::RankFailed`], which names every
    /// failing rank with the kind of its failure and its message (cut to
    /// [`MAX_MESSAGE_BYTES`](crate::MAX_MESSAGE_BYTES)). The group can still be used.
    ///
    /// # Errors
    /// Any rank's error; ranks that agree on different operations.
    pub fn agree<T, E: Failure>(
        &self,
        operation: &str,
        outcome: Result<T, E>,
    ) -> Result<T, CommError> {
        self.agree_with(operation, Vec::new(), outcome)
    }

    /// Turns errors into errors of every rank, as [`agree`](Self::agree) does, and fails if the
    /// ranks do not pass the same hash of the data they are about to work on.
    ///
    /// # Errors
    /// The same as [`agree`](Self::agree); [`CommError::SchemaMismatch`] names the ranks whose
    /// hashes differ.
    pub fn agree_on<T, E: Failure>(
        &self,
        operation: &str,
        schema_hash: u64,
        outcome: Result<T, E>,
    ) -> Result<T, CommError> {
        self.agree_with(operation, vec![schema_hash], outcome)
    }

    /// Runs the round of an agreement. It fails on every rank if one rank has an error, or if the
    /// ranks' `schema_hashes` differ.
    fn agree_with<T, E: Failure>(
        &self,
        operation: &str,
        schema_hashes: Vec<u64>,
        outcome: Result<T, E>,
    ) -> Result<T, CommError> {
        let call = Call {
            label: Some(bounded(operation)),
            sizes: vec![schema_hashes.len()],
            ..Call::new(Operation::Agree)
        };
        let mut turn = self.begin(call, Ok(()))?;
        let fault = outcome.as_ref().err().map(Fault::new);
        turn.round(fault, schema_hashes, &[], |attachments| {
            // The hashes are not a part of the calls, so that the error for a difference says what
            // differs.
            if attachments
                .iter()
                .all(|attachment| attachment.numbers == attachments[0].numbers)
            {
                return Ok(None);
            }
            let schemas = attachments
                .iter()
                .zip(self.global_ranks())
                .map(|(attachment, &rank)| {
                    let hashes = attachment.numbers.iter();
                    let schema: String = hashes.map(|hash| format!("{hash:016x}")).collect();
                    (rank, format!("schema {schema}"))
                });
            Err(CommError::SchemaMismatch {
                operation: operation.to_owned(),
                schemas: RankCall::collect(schemas),
            })
        })?;
        Ok(outcome.unwrap_or_else(|_| {
            unreachable!("a rank with an error has a fault, with which the round fails")
        }))
    }
}

/// Encodes an object for other ranks. An object of more than [`MAX_OBJECT_BYTES`] is an error.
fn encode<T: Serialize>(call: &Call, value: &T) -> Result<Vec<u8>, CommError> {
    let encoded = wire::encode(value).and_then(|bytes| match bytes.len() {
        ..=MAX_OBJECT_BYTES => Ok(bytes),
        len => Err(format!("it has {len} bytes, more than {MAX_OBJECT_BYTES}")),
    });
    encoded.map_err(|message| CommError::object(call.name(), "encode", message))
}

/// Decodes an object of another rank.
fn decode<T: DeserializeOwned>(call: &Call, bytes: &[u8]) -> Result<T, CommError> {
    wire::decode(bytes).map_err(|message| CommError::object(call.name(), "decode", message))
}

/// Decodes the objects of all ranks.
fn decode_all<T: DeserializeOwned>(call: &Call, objects: &[Vec<u8>]) -> Result<Vec<T>, CommError> {
    objects.iter().map(|bytes| decode(call, bytes)).collect()
}
