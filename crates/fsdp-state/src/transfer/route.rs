//! The routes of boxes between ranks: arithmetic that gives the same result on every rank, without
//! communication.

use fsdp_comm::ProcessGroup;
use fsdp_layout::boxes::checked_numel;
use fsdp_layout::cover::{subtract, uncovered};
use fsdp_layout::{ErrorKind, TensorBox};

use crate::error::StateError;

/// The boxes of one tensor that each rank has, and those that each wants.
#[derive(Debug, Clone)]
pub(crate) struct Layout {
    /// The global shape.
    pub(crate) shape: Vec<usize>,
    /// Bytes of an element.
    pub(crate) element_bytes: usize,
    /// Each rank's boxes; several ranks may have one element.
    pub(crate) held_boxes: BoxesPerRank,
    /// The boxes that each rank wants; those of one rank do not overlap.
    pub(crate) wanted_boxes: BoxesPerRank,
}

/// A list of boxes for each rank. The empty lists of ranks without boxes take no memory.
#[derive(Debug, Clone)]
pub(crate) struct BoxesPerRank {
    rank_count: usize,
    /// The ranks that have boxes, in order, and their lists.
    lists: Vec<(usize, Vec<TensorBox>)>,
}

/// Returns what the ranks have sent for each of `count` values. `sent` has a list from each rank,
/// with an item for each value.
///
/// # Errors
/// A rank that sent fewer items.
pub(crate) fn group_by_value<T>(
    sent: Vec<Vec<T>>,
    count: usize,
) -> Result<Vec<Vec<T>>, StateError> {
    let mut values: Vec<Vec<T>> = Vec::with_capacity(count);
    values.resize_with(count, || Vec::with_capacity(sent.len()));
    for (rank, items) in sent.into_iter().enumerate() {
        if items.len() < count {
            return Err(incomplete_error(rank));
        }
        for (value, item) in values.iter_mut().zip(items) {
            value.push(item);
        }
    }
    Ok(values)
}

/// Returns the error for a rank of the group that did not send all that the others expect of it.
/// It happens only if the ranks run different versions of this crate.
pub(crate) fn incomplete_error(rank: usize) -> StateError {
    StateError::Other {
        message: format!("rank {rank} of the group sent fewer values than the others expect"),
        kind: ErrorKind::Other,
    }
}

impl BoxesPerRank {
    /// Returns lists for all ranks.
    pub(crate) fn from_lists(lists: Vec<Vec<TensorBox>>) -> Self {
        BoxesPerRank {
            rank_count: lists.len(),
            lists: lists
                .into_iter()
                .enumerate()
                .filter(|(_, boxes)| !boxes.is_empty())
                .collect(),
        }
    }

    /// Returns a list for this rank of the group, and empty ones for the others.
    pub(crate) fn for_own_rank(group: &ProcessGroup, boxes: Vec<TensorBox>) -> Self {
        BoxesPerRank {
            rank_count: group.world_size(),
            lists: vec![(group.rank(), boxes)],
        }
    }

    /// Returns the same lists with each box replaced by what `change` returns, or left out if
    /// that is `None`.
    fn map(&self, change: impl Fn(&TensorBox) -> Option<TensorBox>) -> Self {
        BoxesPerRank {
            rank_count: self.rank_count,
            lists: self
                .lists
                .iter()
                .map(|(rank, boxes)| (*rank, boxes.iter().filter_map(&change).collect()))
                .collect(),
        }
    }
}

impl std::ops::Index<usize> for BoxesPerRank {
    type Output = [TensorBox];

    fn index(&self, rank: usize) -> &[TensorBox] {
        match self.lists.binary_search_by_key(&rank, |(rank, _)| *rank) {
            Ok(index) => &self.lists[index].1,
            Err(_) => &[],
        }
    }
}

/// A box that goes from one rank to one wanted box.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Piece {
    /// The rank that sends it.
    pub(crate) source: usize,
    /// The index of the receiver's wanted box that it lies in.
    pub(crate) target: usize,
    /// The box.
    pub(crate) bounds: TensorBox,
}

/// The collective that suits a layout.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Route {
    /// Every rank has what it wants.
    Local,
    /// One rank has the whole tensor, and all ranks want the whole of it.
    Broadcast { root: usize },
    /// The tensor is spread over ranks, and all ranks want the whole of it.
    AllGather,
    /// Some ranks want the whole tensor: one gather for each, so that no rank sends more than its
    /// boxes at a time.
    Gather { roots: Vec<usize> },
    /// One rank has the tensor, and others want parts of it.
    Scatter { root: usize },
    /// Anything else.
    AllToAll,
}

impl Layout {
    /// Returns the number of bytes of the whole tensor.
    pub(crate) fn byte_len(&self) -> usize {
        // Several dimensions may be large if one is 0, so this is no plain product.
        let numel = checked_numel(&self.shape).expect("a schema has no tensor that is too large");
        numel * self.element_bytes
    }

    /// Returns the number of bytes that a rank wants.
    pub(crate) fn bytes_wanted(&self, rank: usize) -> usize {
        self.wanted_boxes[rank]
            .iter()
            .map(TensorBox::numel)
            .sum::<usize>()
            * self.element_bytes
    }

    /// Returns the first rank that wants elements that no rank has, and the first box of them.
    fn find_hole(&self) -> Option<(usize, TensorBox)> {
        // Elements that nobody has matter only where somebody wants them.
        let holes = uncovered(
            &TensorBox::whole(&self.shape),
            self.held_boxes.lists.iter().flat_map(|(_, boxes)| boxes),
        );
        if holes.is_empty() {
            return None;
        }
        self.wanted_boxes.lists.iter().find_map(|(rank, boxes)| {
            let missing_boxes = boxes
                .iter()
                .flat_map(|bounds| holes.iter().filter_map(|hole| hole.intersect(bounds)));
            missing_boxes.min().map(|missing| (*rank, missing))
        })
    }

    /// Checks that some rank has every element that a rank of the group wants. `key` is the
    /// tensor's name in errors.
    ///
    /// # Errors
    /// [`StateError::NotCovered`].
    pub(crate) fn check_covered(
        &self,
        group: &ProcessGroup,
        operation: &'static str,
        key: &str,
    ) -> Result<(), StateError> {
        match self.find_hole() {
            None => Ok(()),
            Some((rank, missing)) => Err(StateError::NotCovered {
                operation,
                key: key.to_owned(),
                shape: self.shape.clone(),
                rank: group.global_ranks()[rank],
                missing,
            }),
        }
    }

    /// Returns `true` if a rank has all elements that it wants.
    fn has_all_that_it_wants(&self, rank: usize) -> bool {
        self.wanted_boxes[rank]
            .iter()
            .all(|bounds| uncovered(bounds, &self.held_boxes[rank]).is_empty())
    }

    /// Chooses the cheapest collective that moves every wanted element to the ranks that want it.
    pub(crate) fn choose_route(&self) -> Route {
        let sources = ranks_with_elements(&self.held_boxes);
        let receivers = ranks_with_elements(&self.wanted_boxes);
        if receivers
            .iter()
            .all(|&rank| self.has_all_that_it_wants(rank))
        {
            return Route::Local;
        }
        // Whole tensors have collectives of their own, which need no list of pieces.
        let whole = [TensorBox::whole(&self.shape)];
        let is_wanted_whole = receivers
            .iter()
            .all(|&rank| self.wanted_boxes[rank] == whole);
        let is_everywhere = receivers.len() == self.wanted_boxes.rank_count;
        match sources[..] {
            [root] if is_wanted_whole && is_everywhere => Route::Broadcast { root },
            _ if is_wanted_whole && is_everywhere => Route::AllGather,
            _ if is_wanted_whole => Route::Gather { roots: receivers },
            [root] => Route::Scatter { root },
            _ => Route::AllToAll,
        }
    }

    /// Returns the pieces that make up what a rank wants. It takes as much as possible from itself,
    /// then from the ranks after it, so that ranks with copies of a tensor share the work.
    pub(crate) fn pieces_for(&self, receiver: usize) -> Vec<Piece> {
        let ranks = self.held_boxes.rank_count;
        self.find_pieces(
            &self.wanted_boxes[receiver],
            (0..ranks).map(|distance| (receiver + distance) % ranks),
        )
    }

    /// Returns the pieces that make up the whole, in rank order; a rank's come in the order of its
    /// boxes.
    pub(crate) fn pieces_of_whole(&self) -> Vec<Piece> {
        self.find_pieces(
            &[TensorBox::whole(&self.shape)],
            0..self.held_boxes.rank_count,
        )
    }

    /// Returns `true` if one rank has elements that another wants.
    pub(crate) fn moves_between(&self, source: usize, receiver: usize) -> bool {
        self.held_boxes[source].iter().any(|held_box| {
            self.wanted_boxes[receiver]
                .iter()
                .any(|wanted_box| held_box.intersect(wanted_box).is_some())
        })
    }

    /// Returns the parts of this layout that lie in one box of the tensor. The shape stays that of
    /// the whole tensor, and a rank's wanted boxes keep their positions: those outside the window
    /// become empty.
    pub(crate) fn cut_to_window(&self, window: &TensorBox) -> Layout {
        // Wanted boxes keep their positions, because these are the numbers of the slots.
        let nothing = TensorBox::new(vec![0; self.shape.len()], vec![0; self.shape.len()]);
        Layout {
            shape: self.shape.clone(),
            element_bytes: self.element_bytes,
            held_boxes: self.held_boxes.map(|bounds| bounds.intersect(window)),
            wanted_boxes: self
                .wanted_boxes
                .map(|bounds| Some(bounds.intersect(window).unwrap_or_else(|| nothing.clone()))),
        }
    }

    /// Finds the wanted boxes in the boxes of the sources, asked one after the other. What no
    /// source has is left out.
    fn find_pieces(
        &self,
        wanted_boxes: &[TensorBox],
        sources: impl Iterator<Item = usize>,
    ) -> Vec<Piece> {
        let mut unassigned: Vec<(usize, TensorBox)> = wanted_boxes
            .iter()
            .cloned()
            .enumerate()
            .filter(|(_, bounds)| !bounds.is_empty())
            .collect();
        let mut pieces = Vec::new();
        for source in sources {
            for held_box in &self.held_boxes[source] {
                if unassigned.is_empty() {
                    return pieces;
                }
                // The overlap with this box is a piece of the route. The wanted boxes around it
                // are looked for in the next box.
                let mut still_unassigned = Vec::with_capacity(unassigned.len());
                for (target, wanted_box) in unassigned {
                    match wanted_box.intersect(held_box) {
                        Some(bounds) => {
                            still_unassigned.extend(
                                subtract(&wanted_box, &bounds)
                                    .into_iter()
                                    .map(|part| (target, part)),
                            );
                            pieces.push(Piece {
                                source,
                                target,
                                bounds,
                            });
                        }
                        None => still_unassigned.push((target, wanted_box)),
                    }
                }
                unassigned = still_unassigned;
            }
        }
        pieces
    }
}

/// Cuts a tensor into boxes of at most `limit_bytes` bytes each (or one element), row-major.
pub(crate) fn cut_into_windows(
    shape: &[usize],
    element_bytes: usize,
    limit_bytes: usize,
) -> Vec<TensorBox> {
    let mut windows = vec![TensorBox::whole(shape)];
    for dimension in 0..shape.len() {
        let largest = windows.iter().map(TensorBox::numel).max();
        // There is no window if a dimension before this one is 0.
        if largest.is_none_or(|numel| numel.saturating_mul(element_bytes) <= limit_bytes) {
            break;
        }
        // The windows are too large, so cut them along this dimension: each gets as many rows as
        // fit, at least one.
        let row_bytes = shape[dimension + 1..]
            .iter()
            .product::<usize>()
            .saturating_mul(element_bytes)
            .max(1);
        let row_count = (limit_bytes / row_bytes).max(1);
        let mut parts = Vec::new();
        for window in windows {
            for start in (0..shape[dimension]).step_by(row_count) {
                let mut part = window.clone();
                part.offsets[dimension] = start;
                part.sizes[dimension] = row_count.min(shape[dimension] - start);
                parts.push(part);
            }
        }
        windows = parts;
    }
    windows
}

/// Returns the ranks that have a box with elements in it.
fn ranks_with_elements(lists: &BoxesPerRank) -> Vec<usize> {
    lists
        .lists
        .iter()
        .filter(|(_, boxes)| boxes.iter().any(|bounds| !bounds.is_empty()))
        .map(|(rank, _)| *rank)
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rows(start: usize, len: usize) -> TensorBox {
        TensorBox::new(vec![start, 0], vec![len, 3])
    }

    fn layout(held_boxes: &[&[TensorBox]], wanted_boxes: &[&[TensorBox]]) -> Layout {
        let lists = |lists: &[&[TensorBox]]| lists.iter().map(|boxes| boxes.to_vec()).collect();
        Layout {
            shape: vec![4, 3],
            element_bytes: 4,
            held_boxes: BoxesPerRank::from_lists(lists(held_boxes)),
            wanted_boxes: BoxesPerRank::from_lists(lists(wanted_boxes)),
        }
    }

    #[test]
    fn a_rank_that_sends_too_little_is_named() {
        let sent = group_by_value(vec![vec![1, 2], vec![3, 4]], 2).unwrap();
        assert_eq!(sent, [[1, 3], [2, 4]]);
        let error = group_by_value(vec![vec![1, 2], vec![3]], 2).unwrap_err();
        assert!(
            error.to_string().starts_with("rank 1 of the group"),
            "{error}"
        );
    }

    #[test]
    fn each_layout_takes_the_cheapest_collective() {
        let whole = [rows(0, 4)];
        let (low, high) = ([rows(0, 2)], [rows(2, 2)]);
        let none: [TensorBox; 0] = [];
        for (held_boxes, wanted_boxes, route) in [
            ([&whole[..], &whole], [&low[..], &high], Route::Local),
            ([&low[..], &high], [&low[..], &high], Route::Local),
            ([&low[..], &none], [&none[..], &none], Route::Local),
            (
                [&none[..], &whole],
                [&whole[..], &whole],
                Route::Broadcast { root: 1 },
            ),
            ([&low[..], &high], [&whole[..], &whole], Route::AllGather),
            (
                [&low[..], &high],
                [&none[..], &whole],
                Route::Gather { roots: vec![1] },
            ),
            (
                [&whole[..], &none],
                [&low[..], &high],
                Route::Scatter { root: 0 },
            ),
            ([&low[..], &high], [&high[..], &low], Route::AllToAll),
        ] {
            assert_eq!(
                layout(&held_boxes, &wanted_boxes).choose_route(),
                route,
                "{held_boxes:?} -> {wanted_boxes:?}"
            );
        }
    }

    #[test]
    fn what_nobody_has_is_missed_only_where_it_is_wanted() {
        let holes = layout(
            &[&[rows(0, 1)], &[rows(2, 1)]],
            &[&[rows(0, 1)], &[rows(0, 3)]],
        );
        assert_eq!(holes.find_hole(), Some((1, rows(1, 1))));
        assert_eq!(
            layout(&[&[rows(0, 1)], &[]], &[&[rows(0, 1)], &[]]).find_hole(),
            None
        );
        let (held_boxes, wanted_boxes) = (
            BoxesPerRank::from_lists(vec![vec![]]),
            BoxesPerRank::from_lists(vec![vec![rows(0, 0)]]),
        );
        let empty = Layout {
            shape: vec![0, 3],
            element_bytes: 4,
            held_boxes,
            wanted_boxes,
        };
        assert_eq!(empty.find_hole(), None);
    }

    #[test]
    fn copies_of_a_tensor_share_the_work_and_own_elements_stay() {
        let whole = [rows(0, 4)];
        let layout = layout(&[&whole, &whole, &[rows(1, 1)]], &[&[], &[], &[rows(0, 3)]]);
        let sources: Vec<(usize, TensorBox)> = layout
            .pieces_for(2)
            .into_iter()
            .map(|piece| (piece.source, piece.bounds))
            .collect();
        assert_eq!(sources, [(2, rows(1, 1)), (0, rows(0, 1)), (0, rows(2, 1))]);
    }

    #[test]
    fn windows_cover_a_tensor_once_and_stay_below_the_limit() {
        for (shape, limit) in [
            (vec![5, 7, 3], 24),
            (vec![2, 9], 8),
            (vec![40], 12),
            (vec![], 1),
            (vec![3, 0], 1),
        ] {
            let cut = cut_into_windows(&shape, 4, limit);
            let whole = TensorBox::whole(&shape);
            assert_eq!(
                cut.iter().map(TensorBox::numel).sum::<usize>(),
                whole.numel(),
                "{shape:?}"
            );
            assert!(uncovered(&whole, &cut).is_empty(), "{shape:?}");
            assert!(
                cut.iter().all(|window| window.numel() * 4 <= limit.max(4)),
                "{shape:?}: {cut:?}"
            );
        }
    }
}
