//! What one rank holds of a tensor while it moves.

use fsdp_comm::CommError;
use fsdp_layout::TensorBox;

use super::packing::{Source, copy_box, read_box, with_packed};
use super::route::{Layout, Piece, lie_in_order};
use crate::StateError;
use crate::memory::Buffer;

/// The boxes that a rank sends.
pub(super) fn of_source(pieces: &[Piece], source: usize) -> Vec<&TensorBox> {
    pieces.iter().filter(|piece| piece.source == source).map(|piece| &piece.bounds).collect()
}

/// One tensor in this rank's hands.
#[derive(Debug)]
pub(super) struct Hand<'a> {
    pub(super) layout: &'a Layout,
    pub(super) want: &'a [TensorBox],
    pub(super) sources: Vec<Source>,
    /// One for each wanted box; none after a failure.
    pub(super) buffers: Option<Vec<Buffer>>,
}

impl Hand<'_> {
    pub(super) fn bytes_of(&self, boxes: &[&TensorBox]) -> usize {
        boxes.iter().map(|bounds| bounds.numel() * self.layout.element).sum()
    }

    pub(super) fn copy_own(&mut self, rank: usize) -> Result<(), StateError> {
        let Some(buffers) = &mut self.buffers else { return Ok(()) };
        for piece in self.layout.pieces_for(rank).iter().filter(|piece| piece.source == rank) {
            let (want, to) = (&self.want[piece.target], buffers[piece.target].bytes_mut());
            read_box(&self.sources, &piece.bounds, want, self.layout.element, to)?;
        }
        Ok(())
    }

    /// Puts the bytes of a piece where they are wanted.
    pub(super) fn place(&mut self, piece: &Piece, bytes: &[u8]) {
        if let Some(buffers) = &mut self.buffers {
            let to = buffers[piece.target].bytes_mut();
            let element = self.layout.element;
            copy_box(bytes, &piece.bounds, to, &self.want[piece.target], &piece.bounds, element);
        }
    }

    fn counts(&self, ranks: usize, pieces: &[Piece]) -> Vec<usize> {
        let mut counts = vec![0; ranks];
        for piece in pieces {
            counts[piece.source] += self.bytes_of(&[&piece.bounds]);
        }
        counts
    }

    /// Sends this rank's pieces of the whole.
    pub(super) fn send(
        &self,
        rank: usize,
        ranks: usize,
        pieces: &[Piece],
        gather: impl FnOnce(Option<&mut [u8]>, &[usize], &[u8]) -> Result<(), CommError>,
    ) -> (Result<(), CommError>, Result<(), StateError>) {
        let counts = self.counts(ranks, pieces);
        let own = of_source(pieces, rank);
        with_packed(&self.sources, &own, self.layout.element, |input| gather(None, &counts, input))
    }

    /// Sends this rank's pieces of the whole and receives all: in place if they come in the order of the elements.
    pub(super) fn collect(
        &mut self,
        rank: usize,
        ranks: usize,
        pieces: &[Piece],
        gather: impl FnOnce(Option<&mut [u8]>, &[usize], &[u8]) -> Result<(), CommError>,
    ) -> (Result<(), CommError>, Result<(), StateError>) {
        let counts = self.counts(ranks, pieces);
        let own = of_source(pieces, rank);
        let element = self.layout.element;
        if let Some([buffer]) = self.buffers.as_deref_mut()
            && lie_in_order(pieces, &self.layout.shape)
        {
            let output = buffer.bytes_mut();
            return with_packed(&self.sources, &own, element, |input| gather(Some(output), &counts, input));
        }
        let mut received = vec![0u8; counts.iter().sum()];
        let outcome = with_packed(&self.sources, &own, element, |input| gather(Some(&mut received), &counts, input));
        let mut rest = &received[..];
        for piece in pieces {
            let (bytes, after) = rest.split_at(piece.bounds.numel() * element);
            self.place(piece, bytes);
            rest = after;
        }
        outcome
    }
}
