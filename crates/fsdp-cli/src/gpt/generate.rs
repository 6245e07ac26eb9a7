//! Text from a model, token by token.

use candle_core::{Device, IndexOp as _, Result, Tensor};
use candle_nn::kv_cache::KvCache;
use fsdp::nn::{Recomputed, Unit};

use super::Gpt;
use super::block::Block;

/// The dimension of positions in keys and values.
const POSITIONS: usize = 2;

impl Gpt {
    /// Continues `prompt` by `length` tokens, and returns those (u32). `draw` chooses each one by
    /// the scores `[vocab]` of all tokens.
    ///
    /// All units are gathered once, and are whole until the end. Keys and values of earlier
    /// positions are kept, so a token costs one position. Where the text is longer than the model's
    /// context, the context starts again with the last half of it.
    ///
    /// # Errors
    /// No prompt; those of `draw`; those of [`Self::logits`].
    pub(crate) fn generate(
        &self,
        prompt: &[u32],
        length: usize,
        device: &Device,
        draw: &mut dyn FnMut(&Tensor) -> Result<u32>,
    ) -> Result<Tensor> {
        if prompt.is_empty() {
            candle_core::bail!("a text has to begin with a token");
        }
        let seq = self.config.seq;
        with_gathered_blocks(&self.blocks, &[], &mut |blocks| {
            let mut caches = vec![KvCache::new(POSITIONS, seq); blocks.len()];
            let mut text = prompt.to_vec();
            // The context begins with the token at `context_start`. Its first
            // `cached_length` positions are in the caches.
            let mut context_start = 0;
            let mut cached_length = 0;
            for _ in 0..length {
                // If the context is full, begin again with its last half: all positions change, so
                // the caches are of no use.
                if text.len() - context_start > seq {
                    context_start = text.len() - seq.div_ceil(2);
                    cached_length = 0;
                    caches.iter_mut().for_each(KvCache::reset);
                }
                // Only tokens whose keys and values are not cached pass through the model: all of
                // the context after a restart, otherwise one.
                let new_tokens =
                    Tensor::new(&text[context_start + cached_length..], device)?.unsqueeze(0)?;
                let mut x = self.embed(&new_tokens, cached_length)?;
                for (block, cache) in blocks.iter().zip(&mut caches) {
                    x = block.forward(&x, Some(cache))?;
                }
                // The output at the last position scores the next token.
                let last_output = x.narrow(1, x.dim(1)? - 1, 1)?;
                cached_length = text.len() - context_start;
                text.push(draw(&self.scores(&last_output)?.i((0, 0))?.detach())?);
            }
            Tensor::new(&text[prompt.len()..], device)
        })
    }
}

/// Calls `use_blocks` with the blocks of all units, while the parameters of all units are gathered.
/// For that, each unit runs inside the run of the one before it. `units` are those that are not
/// gathered yet, and `blocks` are of the others.
fn with_gathered_blocks(
    units: &[Unit<Recomputed<Block>>],
    blocks: &[&Block],
    use_blocks: &mut dyn FnMut(&[&Block]) -> Result<Tensor>,
) -> Result<Tensor> {
    match units.split_first() {
        None => use_blocks(blocks),
        Some((unit, other_units)) => unit.run(|block| {
            with_gathered_blocks(
                other_units,
                &[blocks, &[block.module()]].concat(),
                use_blocks,
            )
        }),
    }
}
