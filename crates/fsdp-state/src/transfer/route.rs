//! Which rank sends which box to whom: interval arithmetic that every rank does alike, without communication.

use fsdp_layout::TensorBox;
use fsdp_layout::cover::{subtract, uncovered};

/// Where one tensor is, and where it is wanted.
#[derive(Debug, Clone)]
pub(crate) struct Layout {
    /// The global shape.
    pub(crate) shape: Vec<usize>,
    /// Bytes of an element.
    pub(crate) element: usize,
    /// Each rank's boxes; several ranks may have one element.
    pub(crate) have: Vec<Vec<TensorBox>>,
    /// The boxes that each rank wants; those of one rank do not overlap.
    pub(crate) want: Vec<Vec<TensorBox>>,
}

/// A box that goes from one rank to one wanted box.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Piece {
    /// The rank that sends it.
    pub(crate) source: usize,
    /// Which of the receiver's wanted boxes it lies in.
    pub(crate) target: usize,
    /// The box.
    pub(crate) bounds: TensorBox,
}

/// The collective that suits a layout.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Route {
    /// Every rank has what it wants.
    Local,
    /// One rank has it all, and all want it all.
    Broadcast { root: usize },
    /// All want it all.
    AllGather,
    /// Some ranks want it all: one gather each, so that no rank sends more than its boxes at a time.
    Gather { roots: Vec<usize> },
    /// One rank has what others want parts of.
    Scatter { root: usize },
    /// Anything else.
    AllToAll,
}

impl Layout {
    /// Bytes of the whole tensor.
    pub(crate) fn bytes(&self) -> usize {
        self.shape.iter().product::<usize>() * self.element
    }

    /// Bytes that a rank wants.
    pub(crate) fn bytes_wanted(&self, rank: usize) -> usize {
        self.want[rank].iter().map(TensorBox::numel).sum::<usize>() * self.element
    }

    /// The first rank that wants elements that no rank has, and the first box of them.
    pub(crate) fn hole(&self) -> Option<(usize, TensorBox)> {
        let holes = uncovered(&TensorBox::whole(&self.shape), self.have.iter().flatten());
        if holes.is_empty() {
            return None;
        }
        self.want.iter().enumerate().find_map(|(rank, want)| {
            let missing = want.iter().flat_map(|want| holes.iter().filter_map(|hole| hole.intersect(want)));
            missing.min().map(|missing| (rank, missing))
        })
    }

    /// The collective for this layout.
    pub(crate) fn route(&self) -> Route {
        let holding = |boxes: &Vec<TensorBox>| boxes.iter().any(|bounds| !bounds.is_empty());
        let ranks_of = |lists: &[Vec<TensorBox>]| -> Vec<usize> {
            lists.iter().enumerate().filter(|(_, boxes)| holding(boxes)).map(|(rank, _)| rank).collect()
        };
        let (sources, receivers) = (ranks_of(&self.have), ranks_of(&self.want));
        let has_all = |&rank: &usize| self.want[rank].iter().all(|want| uncovered(want, &self.have[rank]).is_empty());
        if receivers.iter().all(has_all) {
            return Route::Local;
        }
        let whole = [TensorBox::whole(&self.shape)];
        let all_of_it = receivers.iter().all(|&rank| self.want[rank] == whole);
        match sources[..] {
            [root] if all_of_it && receivers.len() == self.want.len() => Route::Broadcast { root },
            _ if all_of_it && receivers.len() == self.want.len() => Route::AllGather,
            _ if all_of_it => Route::Gather { roots: receivers },
            [root] => Route::Scatter { root },
            _ => Route::AllToAll,
        }
    }

    /// The pieces that make up what a rank wants: its own as far as they go, then those of the ranks after it, so that
    /// copies of a tensor share the work.
    pub(crate) fn pieces_for(&self, receiver: usize) -> Vec<Piece> {
        let ranks = self.have.len();
        self.pieces(&self.want[receiver], (0..ranks).map(|k| (receiver + k) % ranks))
    }

    /// The pieces that make up the whole, in rank order; a rank's come in the order of its boxes.
    pub(crate) fn pieces_of_whole(&self) -> Vec<Piece> {
        self.pieces(&[TensorBox::whole(&self.shape)], 0..self.have.len())
    }

    /// Whether a rank may have something to send to another.
    pub(crate) fn concerns(&self, source: usize, receiver: usize) -> bool {
        self.have[source].iter().any(|have| self.want[receiver].iter().any(|want| have.intersect(want).is_some()))
    }

    fn pieces(&self, wanted: &[TensorBox], sources: impl Iterator<Item = usize>) -> Vec<Piece> {
        let mut left: Vec<(usize, TensorBox)> =
            wanted.iter().cloned().enumerate().filter(|(_, want)| !want.is_empty()).collect();
        let mut pieces = Vec::new();
        for source in sources {
            for have in &self.have[source] {
                if left.is_empty() {
                    return pieces;
                }
                let mut rest = Vec::with_capacity(left.len());
                for (target, want) in left {
                    match want.intersect(have) {
                        Some(bounds) => {
                            rest.extend(subtract(&want, &bounds).into_iter().map(|part| (target, part)));
                            pieces.push(Piece { source, target, bounds });
                        }
                        None => rest.push((target, want)),
                    }
                }
                left = rest;
            }
        }
        pieces
    }
}

/// Whether pieces, one after the other, are the whole tensor in row-major order, so that they need not be sorted.
pub(crate) fn lie_in_order(pieces: &[Piece], shape: &[usize]) -> bool {
    let mut at = 0;
    let in_order = pieces.iter().all(|piece| match piece.bounds.flat_range(shape) {
        Some(range) if range.start == at => {
            at = range.end;
            true
        }
        _ => false,
    });
    in_order && at == shape.iter().product::<usize>()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rows(start: usize, len: usize) -> TensorBox {
        TensorBox::new(vec![start, 0], vec![len, 3])
    }

    fn layout(have: &[&[TensorBox]], want: &[&[TensorBox]]) -> Layout {
        let lists = |lists: &[&[TensorBox]]| lists.iter().map(|boxes| boxes.to_vec()).collect();
        Layout { shape: vec![4, 3], element: 4, have: lists(have), want: lists(want) }
    }

    #[test]
    fn each_layout_takes_the_cheapest_collective() {
        let whole = [rows(0, 4)];
        let (low, high) = ([rows(0, 2)], [rows(2, 2)]);
        let none: [TensorBox; 0] = [];
        for (have, want, route) in [
            ([&whole[..], &whole], [&low[..], &high], Route::Local),
            ([&low[..], &high], [&low[..], &high], Route::Local),
            ([&low[..], &none], [&none[..], &none], Route::Local),
            ([&none[..], &whole], [&whole[..], &whole], Route::Broadcast { root: 1 }),
            ([&low[..], &high], [&whole[..], &whole], Route::AllGather),
            ([&low[..], &high], [&none[..], &whole], Route::Gather { roots: vec![1] }),
            ([&whole[..], &none], [&low[..], &high], Route::Scatter { root: 0 }),
            ([&low[..], &high], [&high[..], &low], Route::AllToAll),
        ] {
            assert_eq!(layout(&have, &want).route(), route, "{have:?} -> {want:?}");
        }
    }

    #[test]
    fn what_nobody_has_is_missed_only_where_it_is_wanted() {
        let holes = layout(&[&[rows(0, 1)], &[rows(2, 1)]], &[&[rows(0, 1)], &[rows(0, 3)]]);
        assert_eq!(holes.hole(), Some((1, rows(1, 1))));
        assert_eq!(layout(&[&[rows(0, 1)], &[]], &[&[rows(0, 1)], &[]]).hole(), None);
        let empty = Layout { shape: vec![0, 3], element: 4, have: vec![vec![]], want: vec![vec![rows(0, 0)]] };
        assert_eq!(empty.hole(), None);
    }

    #[test]
    fn copies_of_a_tensor_share_the_work_and_own_elements_stay() {
        let whole = [rows(0, 4)];
        let layout = layout(&[&whole, &whole, &[rows(1, 1)]], &[&[], &[], &[rows(0, 3)]]);
        let sources: Vec<(usize, TensorBox)> =
            layout.pieces_for(2).into_iter().map(|piece| (piece.source, piece.bounds)).collect();
        assert_eq!(sources, [(2, rows(1, 1)), (0, rows(0, 1)), (0, rows(2, 1))]);
    }

    #[test]
    fn chunks_and_flat_ranges_lie_in_order_and_columns_do_not() {
        let flat = |range| fsdp_layout::boxes::boxes_of_flat_range(&[4, 3], range);
        let whole: &[TensorBox] = &[rows(0, 4)];
        let flat_ranges = layout(&[&flat(0..5), &flat(5..10), &flat(10..12)], &[whole, whole, whole]);
        assert!(lie_in_order(&flat_ranges.pieces_of_whole(), &[4, 3]));
        let column = |at| TensorBox::new(vec![0, at], vec![4, 1]);
        let columns = layout(&[&[column(0), column(1)], &[column(2)]], &[whole, whole]);
        assert!(!lie_in_order(&columns.pieces_of_whole(), &[4, 3]));
    }
}
