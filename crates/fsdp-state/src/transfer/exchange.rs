//! The collectives that carry out a [`Layout`].

use fsdp_comm::{CommError, ProcessGroup};

use super::hand::{Hand, of_source};
use super::packing::{Source, pack};
use super::route::{Layout, Piece, Route};
use crate::memory::{Buffer, ElementType};
use crate::{StateError, StateValue};

/// Tensors that one collective carries together have at most this many bytes; larger ones go alone.
const BUCKET_BYTES: usize = 32 << 20;

/// And this many they may always have.
const LEAST_BUCKET_BYTES: usize = 1 << 20;

/// After so many bytes of tensors ranks tell each other whether they still can go on.
const STATUS_BYTES: usize = 256 << 20;

/// One tensor on its way to the boxes that this rank wants.
#[derive(Debug)]
pub(crate) struct Item<'a> {
    /// Where it is and where it goes.
    pub(crate) layout: Layout,
    /// What this rank has of it.
    pub(crate) source: Option<&'a StateValue>,
    /// What it becomes here.
    pub(crate) element: ElementType,
}

/// What a rank got of one tensor, box by box; nothing after a failure on this rank.
pub(crate) type Received = Option<Vec<Buffer>>;

/// The data of one function call. A rank that meets an error of its own goes on with zeros, so that no rank waits
/// for it, until the ranks tell each other how they are: then all return that error.
#[derive(Debug)]
pub(crate) struct Exchange<'g> {
    group: &'g ProcessGroup,
    operation: &'static str,
    failure: Option<StateError>,
    unreported: usize,
}

impl<'g> Exchange<'g> {
    pub(crate) fn new(group: &'g ProcessGroup, operation: &'static str) -> Self {
        Exchange { group, operation, failure: None, unreported: 0 }
    }

    /// Runs something that only concerns this rank; nothing is run after a failure.
    pub(crate) fn attempt<T>(&mut self, f: impl FnOnce() -> Result<T, StateError>) -> Option<T> {
        if self.failure.is_some() {
            return None;
        }
        let outcome = f();
        self.note(outcome)
    }

    fn note<T>(&mut self, outcome: Result<T, StateError>) -> Option<T> {
        match outcome {
            Ok(value) => Some(value),
            Err(error) => {
                self.failure.get_or_insert(error);
                None
            }
        }
    }

    /// Tells the other ranks, and returns any rank's failure.
    pub(crate) fn finish(self) -> Result<(), StateError> {
        Ok(self.group.agree(self.operation, self.failure.map_or(Ok(()), Err))?)
    }

    fn moved(&mut self, bytes: usize) -> Result<(), CommError> {
        self.unreported = self.unreported.saturating_add(bytes);
        if self.unreported >= STATUS_BYTES {
            self.unreported = 0;
            self.group.agree(self.operation, self.failure.take().map_or(Ok(()), Err))?;
        }
        Ok(())
    }

    /// Moves one tensor, by itself.
    pub(crate) fn run(&mut self, item: &Item<'_>) -> Result<Received, CommError> {
        let mut received = self.run_together(std::slice::from_ref(item), &item.layout.route())?;
        Ok(received.pop().flatten())
    }

    /// Moves tensors in this order, and hands each to `take`, with its position, before the next ones move. Small ones
    /// that take the same route in succession go together.
    pub(crate) fn run_each(
        &mut self,
        items: &[Item<'_>],
        mut take: impl FnMut(usize, Vec<Buffer>) -> Result<(), StateError>,
    ) -> Result<(), CommError> {
        let bucket = bucket_bytes(items);
        let mut start = 0;
        while start < items.len() {
            let route = items[start].layout.route();
            let mut bytes = items[start].layout.bytes();
            let mut end = start + 1;
            while end < items.len() && goes_together(&route) {
                let next = &items[end].layout;
                bytes = bytes.saturating_add(next.bytes());
                if bytes > bucket || next.route() != route {
                    break;
                }
                end += 1;
            }
            for (index, received) in (start..end).zip(self.run_together(&items[start..end], &route)?) {
                self.attempt(|| take(index, received.unwrap_or_default()));
            }
            start = end;
        }
        Ok(())
    }

    fn run_together(&mut self, items: &[Item<'_>], route: &Route) -> Result<Vec<Received>, CommError> {
        let rank = self.group.rank();
        let mut hands: Vec<Hand<'_>> = items.iter().map(|item| self.hand(item, rank)).collect();
        match route {
            Route::Local => self.copy_own(&mut hands),
            Route::AllGather => hands.iter_mut().try_for_each(|hand| self.all_gather(hand))?,
            Route::Gather { roots } => {
                roots.iter().try_for_each(|&root| hands.iter_mut().try_for_each(|hand| self.gather(hand, root)))?;
            }
            Route::Broadcast { root } => self.broadcast(&mut hands, *root)?,
            Route::Scatter { root } => self.scatter(&mut hands, *root)?,
            Route::AllToAll => self.all_to_all(&mut hands)?,
        }
        if *route != Route::Local {
            self.moved(items.iter().map(|item| item.layout.bytes()).sum())?;
        }
        Ok(hands.into_iter().map(|hand| hand.buffers).collect())
    }

    /// This rank's memory for an item.
    fn hand<'a>(&mut self, item: &'a Item<'_>, rank: usize) -> Hand<'a> {
        let layout = &item.layout;
        let buffers = self.attempt(|| {
            layout.want[rank].iter().map(|want| Buffer::zeros(item.element, &want.sizes)).collect::<Result<_, _>>()
        });
        let sources = self.attempt(|| item.source.map_or_else(|| Ok(Vec::new()), Source::of)).unwrap_or_default();
        Hand { layout, want: &layout.want[rank], sources, buffers }
    }

    /// Copies what this rank has of what it wants.
    fn copy_own(&mut self, hands: &mut [Hand<'_>]) {
        let rank = self.group.rank();
        for hand in hands {
            let copied = hand.copy_own(rank);
            self.note(copied);
        }
    }

    fn all_gather(&mut self, hand: &mut Hand<'_>) -> Result<(), CommError> {
        let pieces = hand.layout.pieces_of_whole();
        let group = self.group;
        let gathered = hand.collect(group.rank(), group.world_size(), &pieces, |output, counts, input| {
            group.all_gather_uneven_into(output.unwrap_or_default(), counts, input)
        });
        self.settle(gathered)
    }

    fn gather(&mut self, hand: &mut Hand<'_>, root: usize) -> Result<(), CommError> {
        let mut pieces = hand.layout.pieces_for(root);
        pieces.sort_by_key(|piece| piece.source);
        let group = self.group;
        let is_root = group.rank() == root;
        let gather = |output: Option<&mut [u8]>, counts: &[usize], input: &[u8]| {
            group.gather_uneven(output.filter(|_| is_root), counts, input, root)
        };
        let gathered = if is_root {
            hand.collect(group.rank(), group.world_size(), &pieces, gather)
        } else {
            hand.send(group.rank(), group.world_size(), &pieces, gather)
        };
        self.settle(gathered)
    }

    fn settle(&mut self, (sent, read): (Result<(), CommError>, Result<(), StateError>)) -> Result<(), CommError> {
        self.note(read);
        sent
    }

    fn broadcast(&mut self, hands: &mut [Hand<'_>], root: usize) -> Result<(), CommError> {
        if self.group.rank() == root {
            self.copy_own(hands);
        }
        let group = self.group;
        if let [Hand { buffers: Some(buffers), .. }] = hands
            && let [buffer] = &mut buffers[..]
        {
            return group.broadcast(buffer.bytes_mut(), root);
        }
        let mut packed: Vec<u8> = Vec::with_capacity(hands.iter().map(|hand| hand.layout.bytes()).sum());
        for hand in &mut *hands {
            let start = packed.len();
            packed.resize(start + hand.layout.bytes(), 0);
            if let Some(buffer) = hand.buffers.as_mut().and_then(|buffers| buffers.first_mut()) {
                packed[start..].copy_from_slice(buffer.bytes_mut());
            }
        }
        group.broadcast(&mut packed, root)?;
        let mut rest = &packed[..];
        for hand in hands {
            let (bytes, after) = rest.split_at(hand.layout.bytes());
            if let Some(buffer) = hand.buffers.as_mut().and_then(|buffers| buffers.first_mut()) {
                buffer.bytes_mut().copy_from_slice(bytes);
            }
            rest = after;
        }
        Ok(())
    }

    /// Sends each rank what it wants from the root: at once, or where copies are wanted in as many rounds as keep the
    /// root from packing much more than the tensors have.
    fn scatter(&mut self, hands: &mut [Hand<'_>], root: usize) -> Result<(), CommError> {
        let (rank, ranks) = (self.group.rank(), self.group.world_size());
        self.copy_own(hands);
        let wanted = |to: usize| -> usize { hands.iter().map(|hand| hand.layout.bytes_wanted(to)).sum() };
        let wanted: Vec<usize> = (0..ranks).map(|to| if to == root { 0 } else { wanted(to) }).collect();
        let most = hands.iter().map(|hand| hand.layout.bytes()).sum::<usize>().max(BUCKET_BYTES);
        let mut start = 0;
        while start < ranks {
            let mut bytes = 0;
            let fits = |&&wanted: &&usize| {
                bytes += wanted;
                bytes <= most
            };
            let end = start + wanted[start..].iter().take_while(fits).count().max(1);
            let counts: Vec<usize> =
                (0..ranks).map(|to| if (start..end).contains(&to) { wanted[to] } else { 0 }).collect();
            let mut send = Vec::new();
            if rank == root {
                send.reserve_exact(counts.iter().sum());
                (start..end).filter(|&to| to != root).for_each(|to| self.pack_for(hands, to, &mut send));
            }
            let mut received = vec![0u8; counts[rank]];
            self.group.scatter_uneven(&mut received, (rank == root).then_some(&send[..]), &counts, root)?;
            if counts[rank] > 0 {
                place_all(hands, &incoming(hands, rank), &received);
            }
            start = end;
        }
        Ok(())
    }

    /// Exchanges all pieces at once. What a rank has itself does not travel.
    fn all_to_all(&mut self, hands: &mut [Hand<'_>]) -> Result<(), CommError> {
        let (rank, ranks) = (self.group.rank(), self.group.world_size());
        self.copy_own(hands);
        let mut send_counts = vec![0; ranks];
        for to in (0..ranks).filter(|&to| to != rank) {
            let pieces = hands.iter().map(|hand| hand.bytes_of(&of_source(&hand.layout.pieces_for(to), rank)));
            send_counts[to] = pieces.sum();
        }
        let mut send = Vec::with_capacity(send_counts.iter().sum());
        (0..ranks).filter(|&to| to != rank).for_each(|to| self.pack_for(hands, to, &mut send));
        let incoming = incoming(hands, rank);
        let mut receive_counts = vec![0; ranks];
        for (index, piece) in &incoming {
            receive_counts[piece.source] += hands[*index].bytes_of(&[&piece.bounds]);
        }
        let mut received = vec![0u8; receive_counts.iter().sum()];
        self.group.all_to_all_uneven(&mut received, &receive_counts, &send, &send_counts)?;
        place_all(hands, &incoming, &received);
        Ok(())
    }

    /// Appends what this rank sends to another.
    fn pack_for(&mut self, hands: &[Hand<'_>], to: usize, send: &mut Vec<u8>) {
        let rank = self.group.rank();
        for hand in hands.iter().filter(|hand| hand.layout.concerns(rank, to)) {
            let pieces = hand.layout.pieces_for(to);
            let packed = pack(&hand.sources, &of_source(&pieces, rank), hand.layout.element, send);
            self.note(packed);
        }
    }
}

/// What comes to a rank, with the tensor it belongs to, in the order in which the senders pack it.
fn incoming(hands: &[Hand<'_>], rank: usize) -> Vec<(usize, Piece)> {
    let pieces_of = |(index, hand): (usize, &Hand<'_>)| {
        hand.layout.pieces_for(rank).into_iter().map(move |piece| (index, piece)).collect::<Vec<_>>()
    };
    let all = hands.iter().enumerate().flat_map(pieces_of);
    let mut incoming: Vec<(usize, Piece)> = all.filter(|(_, piece)| piece.source != rank).collect();
    incoming.sort_by_key(|(_, piece)| piece.source);
    incoming
}

/// Puts what came where it is wanted.
fn place_all(hands: &mut [Hand<'_>], incoming: &[(usize, Piece)], received: &[u8]) {
    let mut rest = received;
    for (index, piece) in incoming {
        let (bytes, after) = rest.split_at(hands[*index].bytes_of(&[&piece.bounds]));
        hands[*index].place(piece, bytes);
        rest = after;
    }
}

/// How many bytes go together in a call that moves `items`: with the row in which they travel, these need no more
/// memory than the largest tensor does by itself.
fn bucket_bytes(items: &[Item<'_>]) -> usize {
    let largest = items.iter().map(|item| item.layout.bytes()).max().unwrap_or(0);
    (largest / 2).clamp(LEAST_BUCKET_BYTES, BUCKET_BYTES)
}

/// Whether tensors that take this route may share a collective. Gathers do not: a rank that keeps nothing holds no
/// more than its part of one tensor.
const fn goes_together(route: &Route) -> bool {
    matches!(route, Route::Broadcast { .. } | Route::Scatter { .. } | Route::AllToAll)
}
