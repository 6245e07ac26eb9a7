//! nanoGPT's GPT-2 on a [`Scope`]: the model that `fsdp train` trains, in plain candle or sharded.

mod block;
mod config;
mod generate;

use candle_core::{DType, Result, Tensor};
use fsdp::nn::{Recomputed, Scope, Unit};
use fsdp::ops::{add, cross_entropy, embedding, linear};

use self::block::{Block, LayerNorm, NORMAL};
pub use self::config::GptConfig;

/// nanoGPT's GPT-2: learned positions, pre-norm blocks, exact GELU, output weights tied to the
/// token embedding, no dropout. Parameters have nanoGPT's names and torch's orientation (`Linear`
/// weights are `[out, in]`), and torch's initial distributions. Each block is one FSDP unit.
///
/// ```
/// use candle_core::{DType, Device, Tensor};
/// use candle_nn::{VarBuilder, VarMap};
/// use fsdp_cli::gpt::{Gpt, GptConfig};
/// use fsdp::prelude::*;
///
/// let variables = VarMap::new();
/// let scope = Scope::plain(VarBuilder::from_varmap(&variables, DType::F32, &Device::Cpu));
/// let config = GptConfig { layers: 2, heads: 2, hidden: 8, seq: 16, vocab: 256 };
/// let model = Gpt::new(&scope, &config)?;
/// let tokens = Tensor::new(&[[104u32, 101, 108], [108, 111, 33]], &Device::Cpu)?;
/// assert_eq!(model.logits(&tokens)?.dims(), [2, 3, 256]);
/// # Ok::<(), candle_core::Error>(())
/// ```
pub struct Gpt {
    config: GptConfig,
    wte: Tensor,
    wpe: Tensor,
    blocks: Vec<Unit<Recomputed<Block>>>,
    ln_f: LayerNorm,
}

impl Gpt {
    /// Declares the parameters, in nanoGPT's order.
    ///
    /// # Errors
    /// Invalid sizes, and the errors of the scope.
    pub fn new(scope: &Scope, config: &GptConfig) -> Result<Self> {
        Self::build(scope, config, false)
    }

    /// Declares the parameters. With `is_recomputed`, blocks compute their activations again in the
    /// backward instead of keeping them.
    ///
    /// # Errors
    /// The same as [`Self::new`].
    pub(crate) fn build(scope: &Scope, config: &GptConfig, is_recomputed: bool) -> Result<Self> {
        config.validate().map_err(candle_core::Error::wrap)?;
        let transformer = scope.pp("transformer");
        let vb = transformer.vb();
        let wte = vb.get_with_hints((config.vocab, config.hidden), "wte.weight", NORMAL)?;
        let wpe = vb.get_with_hints((config.seq, config.hidden), "wpe.weight", NORMAL)?;
        let layers = transformer.pp("h");
        let blocks = (0..config.layers)
            .map(|layer| {
                layers.pp(layer).unit(|scope| {
                    Ok(Recomputed::when(
                        is_recomputed,
                        Block::new(&scope.vb(), config)?,
                    ))
                })
            })
            .collect::<Result<_>>()?;
        let ln_f = LayerNorm::new(&vb.pp("ln_f"), config.hidden)?;
        // torch saves a tied weight under both names; here it is one tensor.
        scope.tie("lm_head.weight", "transformer.wte.weight");
        Ok(Gpt {
            config: *config,
            wte,
            wpe,
            blocks,
            ln_f,
        })
    }

    /// Computes the next-token scores `[batch, time, vocab]` of tokens `[batch, time]` (u32), with
    /// `time` at most `seq`.
    ///
    /// # Errors
    /// Tokens of another rank or dtype, longer than `seq`, or outside the vocabulary; on GPUs a
    /// token outside the vocabulary makes its scores NaN.
    pub fn logits(&self, tokens: &Tensor) -> Result<Tensor> {
        let mut x = self.embed(tokens, 0)?;
        for unit in &self.blocks {
            x = unit.run(|block| block.run(&[&x], |block, x| block.forward(&x[0], None)))?;
        }
        self.scores(&x)
    }

    /// Embeds tokens `[batch, time]` whose first position is `start_position`.
    fn embed(&self, tokens: &Tensor, start_position: usize) -> Result<Tensor> {
        let positions = self.wpe.narrow(0, start_position, tokens.dims2()?.1)?;
        add(&embedding(tokens, &self.wte)?, &positions)
    }

    /// Returns the next-token scores of the output of the last block.
    fn scores(&self, x: &Tensor) -> Result<Tensor> {
        linear(&self.ln_f.forward(x)?, &self.wte, None)
    }

    /// Computes the mean cross-entropy of the scores against `targets` `[batch, time]` (u32), which
    /// is a scalar.
    ///
    /// # Errors
    /// The same as [`Self::logits`].
    pub fn loss(&self, tokens: &Tensor, targets: &Tensor) -> Result<Tensor> {
        let mut logits = self.logits(tokens)?.flatten_to(1)?;
        if logits.dtype() != DType::F64 {
            // A mean over many tokens has more digits than the half types.
            logits = logits.to_dtype(DType::F32)?;
        }
        cross_entropy(&logits, &targets.flatten_all()?)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use candle_core::{Device, IndexOp as _};
    use candle_nn::{VarBuilder, VarMap};

    const CONFIG: GptConfig = GptConfig {
        layers: 2,
        heads: 2,
        hidden: 8,
        seq: 5,
        vocab: 11,
    };

    fn plain(config: &GptConfig) -> (VarMap, Gpt) {
        let variables = VarMap::new();
        let vb = VarBuilder::from_varmap(&variables, DType::F64, &Device::Cpu);
        let model = Gpt::new(&Scope::plain(vb), config).unwrap();
        (variables, model)
    }

    fn batch() -> (Tensor, Tensor) {
        let tokens = Tensor::new(&[[1u32, 4, 4, 10], [0, 7, 2, 3]], &Device::Cpu).unwrap();
        let targets = Tensor::new(&[[4u32, 4, 10, 5], [7, 2, 3, 9]], &Device::Cpu).unwrap();
        (tokens, targets)
    }

    #[test]
    fn parameters_have_the_names_and_shapes_of_nanogpt() {
        let (variables, _) = plain(&CONFIG);
        let variables = variables.data().lock().unwrap();
        let mut found: Vec<(&str, &[usize])> = variables
            .iter()
            .map(|(k, v)| (k.as_str(), v.dims()))
            .collect();
        found.sort_unstable();
        let mut expected: Vec<(String, Vec<usize>)> = vec![
            ("transformer.wte.weight".into(), vec![11, 8]),
            ("transformer.wpe.weight".into(), vec![5, 8]),
            ("transformer.ln_f.weight".into(), vec![8]),
            ("transformer.ln_f.bias".into(), vec![8]),
        ];
        for layer in 0..2 {
            for (name, shape) in [
                ("ln_1.weight", vec![8]),
                ("ln_1.bias", vec![8]),
                ("attn.c_attn.weight", vec![24, 8]),
                ("attn.c_attn.bias", vec![24]),
                ("attn.c_proj.weight", vec![8, 8]),
                ("attn.c_proj.bias", vec![8]),
                ("ln_2.weight", vec![8]),
                ("ln_2.bias", vec![8]),
                ("mlp.c_fc.weight", vec![32, 8]),
                ("mlp.c_fc.bias", vec![32]),
                ("mlp.c_proj.weight", vec![8, 32]),
                ("mlp.c_proj.bias", vec![8]),
            ] {
                expected.push((format!("transformer.h.{layer}.{name}"), shape));
            }
        }
        expected.sort_unstable();
        let expected: Vec<(&str, &[usize])> = expected
            .iter()
            .map(|(k, v)| (k.as_str(), v.as_slice()))
            .collect();
        assert_eq!(found, expected);
    }

    #[test]
    fn a_position_does_not_see_later_ones() {
        let (_variables, model) = plain(&CONFIG);
        let before = model
            .logits(&Tensor::new(&[[1u32, 2, 3, 4]], &Device::Cpu).unwrap())
            .unwrap();
        let after = model
            .logits(&Tensor::new(&[[1u32, 2, 9, 9]], &Device::Cpu).unwrap())
            .unwrap();
        let rows =
            |logits: &Tensor, at: usize| logits.i((0, at)).unwrap().to_vec1::<f64>().unwrap();
        assert_eq!(rows(&before, 0), rows(&after, 0));
        assert_eq!(rows(&before, 1), rows(&after, 1));
        assert_ne!(rows(&before, 2), rows(&after, 2));
    }

    /// Checks that every operation of the model has a right backward in candle: the gradient of
    /// each parameter, along a fixed direction, is the difference quotient of the loss.
    #[test]
    fn gradients_are_those_of_the_loss() {
        let (variables, model) = plain(&CONFIG);
        let (tokens, targets) = batch();
        let mut names: Vec<String> = variables.data().lock().unwrap().keys().cloned().collect();
        names.sort();
        // The same values in each run, large enough that no term of a derivative is lost in
        // rounding.
        for (index, name) in names.iter().enumerate() {
            let var = &variables.data().lock().unwrap()[name];
            let angles = Tensor::arange(0u32, var.elem_count() as u32, &Device::Cpu).unwrap();
            let angles = (angles.to_dtype(DType::F64).unwrap() * 0.7).unwrap() + index as f64;
            var.set(
                &(angles.unwrap().sin().unwrap() * 0.3)
                    .unwrap()
                    .reshape(var.dims())
                    .unwrap(),
            )
            .unwrap();
        }
        let grads = model.loss(&tokens, &targets).unwrap().backward().unwrap();
        let loss = || {
            model
                .loss(&tokens, &targets)
                .unwrap()
                .to_scalar::<f64>()
                .unwrap()
        };
        for (name, var) in variables.data().lock().unwrap().iter() {
            let grad = grads
                .get(var)
                .unwrap_or_else(|| panic!("no gradient of {name}"));
            let direction = Tensor::arange(0u32, var.elem_count() as u32, &Device::Cpu).unwrap();
            let direction = direction
                .to_dtype(DType::F64)
                .unwrap()
                .sin()
                .unwrap()
                .reshape(var.dims())
                .unwrap();
            let along = (grad * &direction)
                .unwrap()
                .sum_all()
                .unwrap()
                .to_scalar::<f64>()
                .unwrap();
            let value = var.as_tensor().copy().unwrap();
            let at = |distance: f64| {
                var.set(&(&value + (&direction * distance).unwrap()).unwrap())
                    .unwrap();
                loss()
            };
            let quotient = (at(1e-5) - at(-1e-5)) / 2e-5;
            at(0.0);
            let error = (along - quotient).abs() / quotient.abs().max(1e-2);
            assert!(error < 1e-7, "{name}: {along} is not {quotient}");
        }
    }

    #[test]
    fn a_text_continues_as_the_scores_of_all_that_is_before_say() {
        let (_variables, model) = plain(&GptConfig { seq: 12, ..CONFIG });
        let most_likely = |scores: &Tensor| scores.argmax(0)?.to_scalar::<u32>();
        let mut expected = vec![3u32, 7];
        for _ in 0..10 {
            let tokens = Tensor::new(expected.as_slice(), &Device::Cpu)
                .unwrap()
                .unsqueeze(0)
                .unwrap();
            let scores = model
                .logits(&tokens)
                .unwrap()
                .i((0, expected.len() - 1))
                .unwrap();
            expected.push(most_likely(&scores).unwrap());
        }
        let text = model
            .generate(&[3, 7], 10, &Device::Cpu, &mut |scores| most_likely(scores))
            .unwrap();
        assert_eq!(text.to_vec1::<u32>().unwrap(), expected[2..]);
    }

    #[test]
    fn a_text_longer_than_the_context_continues_after_its_last_half() {
        let (_variables, model) = plain(&CONFIG);
        let mut seen = Vec::new();
        let text = model.generate(&[1], 9, &Device::Cpu, &mut |scores| {
            seen.push(scores.to_vec1::<f64>()?);
            Ok(seen.len() as u32)
        });
        assert_eq!(
            text.unwrap().to_vec1::<u32>().unwrap(),
            [1, 2, 3, 4, 5, 6, 7, 8, 9]
        );
        // The sixth position does not fit any more: the context starts again with the last three.
        let tokens = Tensor::new(&[[3u32, 4, 5]], &Device::Cpu).unwrap();
        let expected = model
            .logits(&tokens)
            .unwrap()
            .i((0, 2))
            .unwrap()
            .to_vec1::<f64>()
            .unwrap();
        for (found, expected) in seen[5].iter().zip(expected) {
            assert!(
                (found - expected).abs() < 1e-12,
                "{found} is not {expected}"
            );
        }
        assert!(
            model
                .generate(&[], 1, &Device::Cpu, &mut |_| Ok(0))
                .is_err()
        );
    }

    #[test]
    fn sizes_that_make_no_model_are_refused() {
        let empty = GptConfig {
            layers: 0,
            ..CONFIG
        };
        let odd = GptConfig { heads: 3, ..CONFIG };
        for (config, message) in [
            (empty, "a GPT cannot have `layers` = 0"),
            (odd, "hidden width 8 cannot be shared by 3 heads"),
        ] {
            let error = config.validate().unwrap_err().message;
            assert!(error.starts_with(message), "{error}");
        }
    }
}
