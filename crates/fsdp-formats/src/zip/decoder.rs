//! A decoder of DEFLATE that knows where a stream begins.
//!
//! A part of a stream may say that it repeats earlier output. For miniz_oxide's own decoder of
//! streams there are zeros before the first byte of output, so it accepts a part of a damaged
//! stream that repeats what never was. This one does not.

use std::ops::Range;

use miniz_oxide::inflate::TINFLStatus;
use miniz_oxide::inflate::core::inflate_flags::{
    TINFL_FLAG_HAS_MORE_INPUT, TINFL_FLAG_USING_NON_WRAPPING_OUTPUT_BUF,
};
use miniz_oxide::inflate::core::{DecompressorOxide, TINFL_LZ_DICT_SIZE, decompress};

/// A decoder, and the last output of it.
pub(super) struct Decoder {
    state: Box<DecompressorOxide>,
    /// The last output. Once it is full, output goes to its beginning again.
    window: Vec<u8>,
    /// The bytes of the window that were decoded and not yet taken.
    waiting: Range<usize>,
    /// `true` once the window was full: all of its bytes are output then.
    was_full: bool,
}

impl Decoder {
    /// Makes a decoder that stands at the beginning of a stream.
    pub(super) fn new() -> Self {
        Decoder {
            state: Box::default(),
            window: vec![0; TINFL_LZ_DICT_SIZE],
            waiting: 0..0,
            was_full: false,
        }
    }

    /// Returns `true` if there are decoded bytes that were not yet taken.
    pub(super) fn has_waiting(&self) -> bool {
        !self.waiting.is_empty()
    }

    /// Moves decoded bytes to `dst`, as many as wait and fit. Returns how many.
    pub(super) fn take(&mut self, dst: &mut [u8]) -> usize {
        let count = self.waiting.len().min(dst.len());
        let start = self.waiting.start;
        dst[..count].copy_from_slice(&self.window[start..start + count]);
        self.waiting.start += count;
        count
    }

    /// Decodes some of the input that comes next. All that was decoded before must have been taken.
    /// Returns how many bytes of input were used up, and the status of the stream.
    ///
    /// A status of an error stays. Bytes that were decoded before the defect wait like others.
    pub(super) fn decode(&mut self, input: &[u8]) -> (usize, TINFLStatus) {
        debug_assert!(
            !self.has_waiting(),
            "bytes that wait would be lost when the window begins anew"
        );
        let mut start = self.waiting.end;
        if start == self.window.len() {
            start = 0;
            self.was_full = true;
        }
        let mut flags = TINFL_FLAG_HAS_MORE_INPUT;
        if !self.was_full {
            // With this flag nothing comes before the beginning of the window. Without it the end
            // of the window does.
            flags |= TINFL_FLAG_USING_NON_WRAPPING_OUTPUT_BUF;
        }
        let (status, used, written) =
            decompress(&mut self.state, input, &mut self.window, start, flags);
        self.waiting = start..start + written;
        (used, status)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Decodes a whole stream, which is given `step` bytes at a time; `None` if it is damaged, or
    /// has no end.
    fn decoded(stream: &[u8], step: usize) -> Option<Vec<u8>> {
        let mut decoder = Decoder::new();
        let mut output = Vec::new();
        let mut used = 0;
        loop {
            let end = stream.len().min(used + step);
            let (count, status) = decoder.decode(&stream[used..end]);
            used += count;
            let mut piece = [0; 1000];
            let mut is_stuck = count == 0;
            while decoder.has_waiting() {
                let taken = decoder.take(&mut piece);
                output.extend(&piece[..taken]);
                is_stuck = false;
            }
            if status == TINFLStatus::Done {
                return Some(output);
            }
            if is_stuck {
                return None;
            }
        }
    }

    #[test]
    fn a_stream_that_repeats_what_comes_before_its_beginning_is_damaged() {
        // The letter `a`, then three bytes from 1, 2 and 24577 bytes before, then the end.
        let sound = [75, 4, 2, 0];
        let damaged = [&[75, 4, 66, 0][..], &[75, 4, 94, 0, 0, 0]];
        for step in [1, 2, 100] {
            assert_eq!(decoded(&sound, step).as_deref(), Some(&b"aaaa"[..]));
            for stream in damaged {
                assert_eq!(decoded(stream, step), None, "{stream:?}");
            }
        }
    }

    #[test]
    fn output_of_several_windows_is_decoded() {
        // Noise, so that what is repeated lies as far back as it is long.
        let mut state = 1u32;
        let mut noise = || {
            state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            (state >> 24) as u8
        };
        for length in [1, 300, 20_000, 32_000, 32_500, 40_000] {
            let part: Vec<u8> = (0..length).map(|_| noise()).collect();
            let bytes = part.repeat(5);
            let stream = miniz_oxide::deflate::compress_to_vec(&bytes, 9);
            for step in [7, 5000, stream.len()] {
                assert!(decoded(&stream, step).is_some_and(|output| output == bytes));
            }
        }
    }
}
