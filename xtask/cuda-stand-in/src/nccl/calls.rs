//! NCCL's calls, carried out on a stream.

use half::{bf16, f16};

use super::messages::{Aborted, Messages, Received, behind, content, header};
use crate::kernels::Element;
use crate::machine::elements;
use crate::memory::Address;

/// One call.
#[derive(Debug, Clone, Copy)]
pub(super) enum Call {
    AllGather {
        from: Address,
        to: Address,
        count: usize,
        dtype: i32,
    },
    ReduceScatter {
        from: Address,
        to: Address,
        count: usize,
        dtype: i32,
        op: i32,
    },
    AllReduce {
        from: Address,
        to: Address,
        count: usize,
        dtype: i32,
        op: i32,
    },
    Broadcast {
        from: Address,
        to: Address,
        count: usize,
        dtype: i32,
        root: usize,
    },
    Send {
        from: Address,
        count: usize,
        dtype: i32,
        peer: usize,
    },
    Receive {
        to: Address,
        count: usize,
        dtype: i32,
        peer: usize,
    },
}

/// The number of bytes of an element, by NCCL's number of its type.
pub(super) const fn size(dtype: i32) -> Option<usize> {
    Some(match dtype {
        0 | 1 => 1,
        6 | 9 => 2,
        2 | 3 | 7 => 4,
        4 | 5 | 8 => 8,
        _ => return None,
    })
}

const SUM: i32 = 0;
const MAX: i32 = 2;
const AVERAGE: i32 = 4;

/// Returns `true` for the reductions and types that are known here.
pub(super) const fn reduces(op: i32, dtype: i32) -> bool {
    matches!(op, SUM | MAX | AVERAGE) && size(dtype).is_some()
}

/// Carries out the calls of a group: everything is sent before anything is received.
///
/// # Errors
/// Addresses, other ranks' calls, and the file system's.
pub(super) fn carry_out(
    calls: &[Call],
    messages: &mut Messages,
    is_aborted: &impl Fn() -> bool,
) -> Result<Result<(), Aborted>, String> {
    for call in calls {
        send(call, messages)?;
    }
    for call in calls {
        if receive(call, messages, is_aborted)? == Err(Aborted) {
            return Ok(Err(Aborted));
        }
    }
    Ok(Ok(()))
}

fn read(address: Address, bytes: usize) -> Result<Vec<u8>, String> {
    Ok(elements::<u8>(address)?.first(bytes)?.to_vec())
}

fn write(address: Address, bytes: &[u8]) -> Result<(), String> {
    elements::<u8>(address)?.fill_from(bytes)
}

impl Call {
    /// Returns the bytes that a rank receives from others, of `ranks` in all.
    pub(super) fn moved_bytes(&self, ranks: usize) -> usize {
        let others = ranks - 1;
        let (dtype, elements) = match *self {
            Call::AllGather { dtype, count, .. } | Call::ReduceScatter { dtype, count, .. } => {
                (dtype, count * others)
            }
            // In a ring.
            Call::AllReduce { dtype, count, .. } => (dtype, 2 * count * others / ranks),
            Call::Broadcast { dtype, count, .. } => (dtype, count * others.min(1)),
            Call::Receive { dtype, count, .. } => (dtype, count),
            Call::Send { dtype, .. } => (dtype, 0),
        };
        elements * size(dtype).unwrap_or(0)
    }

    /// Returns the number of elements of a message.
    const fn count(&self) -> usize {
        match *self {
            Call::AllGather { count, .. }
            | Call::ReduceScatter { count, .. }
            | Call::AllReduce { count, .. }
            | Call::Broadcast { count, .. }
            | Call::Send { count, .. }
            | Call::Receive { count, .. } => count,
        }
    }

    /// Returns the header of the call's messages, and the bytes of an element.
    fn header(&self) -> Result<(Vec<u8>, usize), String> {
        let (name, dtype) = match *self {
            Call::AllGather { dtype, .. } => ("ncclAllGather", dtype),
            Call::ReduceScatter { dtype, .. } => ("ncclReduceScatter", dtype),
            Call::AllReduce { dtype, .. } => ("ncclAllReduce", dtype),
            Call::Broadcast { dtype, .. } => ("ncclBroadcast", dtype),
            Call::Send { dtype, .. } | Call::Receive { dtype, .. } => ("ncclSend", dtype),
        };
        let count = self.count();
        let size = size(dtype).ok_or_else(|| format!("type {dtype} is not known"))?;
        Ok((header(name, dtype, count), size))
    }
}

/// Sends what this rank contributes to a call to the ranks that need it.
fn send(call: &Call, messages: &mut Messages) -> Result<(), String> {
    let (header, size) = call.header()?;
    let rank = messages.rank();
    let ranks = messages.ranks();
    let mut post = |to: usize, address: Address, bytes: usize| -> Result<(), String> {
        messages.send(to, &[header.as_slice(), &read(address, bytes)?].concat())
    };
    match *call {
        Call::AllGather { from, count, .. } | Call::AllReduce { from, count, .. } => {
            (0..ranks).try_for_each(|to| post(to, from, count * size))
        }
        Call::ReduceScatter { from, count, .. } => {
            (0..ranks).try_for_each(|to| post(to, behind(from, to * count * size), count * size))
        }
        Call::Broadcast {
            from, count, root, ..
        } if rank == root => (0..ranks).try_for_each(|to| post(to, from, count * size)),
        Call::Broadcast { .. } | Call::Receive { .. } => Ok(()),
        Call::Send {
            from, count, peer, ..
        } => post(peer, from, count * size),
    }
}

fn receive(
    call: &Call,
    messages: &mut Messages,
    is_aborted: &impl Fn() -> bool,
) -> Result<Result<(), Aborted>, String> {
    let (header, size) = call.header()?;
    let ranks = messages.ranks();
    let sources = match *call {
        Call::AllGather { .. } | Call::ReduceScatter { .. } | Call::AllReduce { .. } => 0..ranks,
        Call::Broadcast { root, .. } => root..root + 1,
        Call::Receive { peer, .. } => peer..peer + 1,
        Call::Send { .. } => 0..0,
    };
    let mut parts = Vec::new();
    for from in sources {
        match messages.receive(from, is_aborted)? {
            Ok(Received::Message(message)) => {
                parts.push(content(&message, &header, from)?.to_vec());
            }
            Ok(Received::Undefined) => parts.push(vec![0xff; call.count() * size]),
            Err(Aborted) => return Ok(Err(Aborted)),
        }
    }
    match *call {
        Call::AllGather { to, count, .. } => {
            for (rank, part) in parts.iter().enumerate() {
                write(behind(to, rank * count * size), part)?;
            }
        }
        Call::ReduceScatter { to, dtype, op, .. } | Call::AllReduce { to, dtype, op, .. } => {
            write(to, &reduce(&parts, dtype, op)?)?;
        }
        Call::Broadcast { to, .. } | Call::Receive { to, .. } => write(to, &parts.concat())?,
        Call::Send { .. } => {}
    }
    Ok(Ok(()))
}

/// Returns the reduction of all ranks' elements.
fn reduce(parts: &[Vec<u8>], dtype: i32, op: i32) -> Result<Vec<u8>, String> {
    Ok(match dtype {
        0 => whole(
            parts,
            op,
            |bytes| i64::from(i8::from_ne_bytes(bytes)),
            |value| (value as i8).to_ne_bytes(),
        ),
        1 => whole(
            parts,
            op,
            |bytes| i64::from(u8::from_ne_bytes(bytes)),
            |value| (value as u8).to_ne_bytes(),
        ),
        2 => whole(
            parts,
            op,
            |bytes| i64::from(i32::from_ne_bytes(bytes)),
            |value| (value as i32).to_ne_bytes(),
        ),
        3 => whole(
            parts,
            op,
            |bytes| i64::from(u32::from_ne_bytes(bytes)),
            |value| (value as u32).to_ne_bytes(),
        ),
        4 => whole(parts, op, i64::from_ne_bytes, i64::to_ne_bytes),
        // The sum of 64 bits is the same with and without a sign, and the maximum is not.
        5 if op == MAX => combine(parts, u64::from_ne_bytes, u64::to_ne_bytes, u64::max),
        5 => whole(parts, op, i64::from_ne_bytes, i64::to_ne_bytes),
        6 => float::<f16, 2>(parts, op, f16::from_ne_bytes, f16::to_ne_bytes),
        7 => float::<f32, 4>(parts, op, f32::from_ne_bytes, f32::to_ne_bytes),
        8 => float::<f64, 8>(parts, op, f64::from_ne_bytes, f64::to_ne_bytes),
        9 => float::<bf16, 2>(parts, op, bf16::from_ne_bytes, bf16::to_ne_bytes),
        _ => return Err(format!("type {dtype} is not known")),
    })
}

fn combine<T: Copy, const N: usize>(
    parts: &[Vec<u8>],
    from: impl Fn([u8; N]) -> T,
    to: impl Fn(T) -> [u8; N],
    both: impl Fn(T, T) -> T,
) -> Vec<u8> {
    let mut rows = parts.iter().map(|part| {
        part.as_chunks::<N>()
            .0
            .iter()
            .map(|&bytes| from(bytes))
            .collect::<Vec<T>>()
    });
    let first = rows.next().expect("a group has a rank");
    let all = rows.fold(first, |all, row| {
        all.into_iter().zip(row).map(|(x, y)| both(x, y)).collect()
    });
    all.into_iter().flat_map(to).collect()
}

fn whole<const N: usize>(
    parts: &[Vec<u8>],
    op: i32,
    from: impl Fn([u8; N]) -> i64,
    to: impl Fn(i64) -> [u8; N],
) -> Vec<u8> {
    let ranks = parts.len() as i64;
    let both = if op == MAX {
        i64::max
    } else {
        i64::wrapping_add
    };
    let divisor = if op == AVERAGE { ranks } else { 1 };
    combine(parts, from, |value| to(value / divisor), both)
}

fn float<T: Element, const N: usize>(
    parts: &[Vec<u8>],
    op: i32,
    from: impl Fn([u8; N]) -> T,
    to: impl Fn(T) -> [u8; N],
) -> Vec<u8> {
    let ranks = parts.len() as f64;
    let divisor = if op == AVERAGE { ranks } else { 1.0 };
    let both = if op == MAX {
        f64::max
    } else {
        |x: f64, y: f64| x + y
    };
    combine(
        parts,
        |bytes| from(bytes).to_f64(),
        |value| to(T::from_f64(value / divisor)),
        both,
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reductions_are_those_of_their_types() {
        let bytes = |values: &[f32]| {
            values
                .iter()
                .flat_map(|x| x.to_ne_bytes())
                .collect::<Vec<u8>>()
        };
        let parts = [bytes(&[1.0, 5.0]), bytes(&[2.0, -5.0])];
        assert_eq!(reduce(&parts, 7, SUM).unwrap(), bytes(&[3.0, 0.0]));
        assert_eq!(reduce(&parts, 7, MAX).unwrap(), bytes(&[2.0, 5.0]));
        assert_eq!(reduce(&parts, 7, AVERAGE).unwrap(), bytes(&[1.5, 0.0]));
        assert_eq!(reduce(&[vec![200], vec![100]], 1, SUM).unwrap(), [44]);
        let large = [u64::MAX.to_ne_bytes().to_vec(), 1u64.to_ne_bytes().to_vec()];
        assert_eq!(reduce(&large, 5, MAX).unwrap(), u64::MAX.to_ne_bytes());
        assert_eq!(reduce(&large, 5, SUM).unwrap(), 0u64.to_ne_bytes());
        assert!(reduce(&large, 77, SUM).is_err() && !reduces(3, 7) && reduces(AVERAGE, 9));
    }
}
