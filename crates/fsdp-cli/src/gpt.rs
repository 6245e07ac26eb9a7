//! nanoGPT's GPT-2 on a [`Scope`]: the model that `fsdp train` trains, in plain candle or sharded.

use candle_core::{D, DType, Device, IndexOp, Result, Tensor};
use candle_nn::{Init, VarBuilder};
use fsdp::nn::{Scope, Unit};
use serde::{Deserialize, Serialize};

/// The initial values of matrices and embeddings.
const NORMAL: Init = Init::Randn { mean: 0.0, stdev: 0.02 };

const LAYER_NORM_EPS: f64 = 1e-5;

/// The sizes of a [`Gpt`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct GptConfig {
    /// The number of blocks.
    pub layers: usize,
    /// The number of attention heads of a block, which share `hidden` equally.
    pub heads: usize,
    /// The width of the residual stream.
    pub hidden: usize,
    /// The longest sequence, which is the number of rows of the position embedding.
    pub seq: usize,
    /// The number of different tokens.
    pub vocab: usize,
}

/// The reason that a model cannot have its sizes.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum GptConfigError {
    /// A size is zero.
    #[error("a GPT cannot have `{size}` = 0")]
    Zero {
        /// The size.
        size: &'static str,
    },
    /// The heads cannot share the hidden width equally.
    #[error("hidden width {hidden} cannot be shared by {heads} heads: it must be a multiple of them")]
    Heads {
        /// The width.
        hidden: usize,
        /// The heads.
        heads: usize,
    },
}

impl GptConfig {
    /// Checks that a model can have these sizes.
    ///
    /// # Errors
    /// A size of zero, or a width that the heads cannot share.
    pub fn validate(&self) -> std::result::Result<(), GptConfigError> {
        let sizes = [
            ("layers", self.layers),
            ("heads", self.heads),
            ("hidden", self.hidden),
            ("seq", self.seq),
            ("vocab", self.vocab),
        ];
        if let Some((size, _)) = sizes.into_iter().find(|&(_, value)| value == 0) {
            return Err(GptConfigError::Zero { size });
        }
        if !self.hidden.is_multiple_of(self.heads) {
            return Err(GptConfigError::Heads { hidden: self.hidden, heads: self.heads });
        }
        Ok(())
    }
}

/// nanoGPT's GPT-2: learned positions, pre-norm blocks, exact GELU, output weights tied to the token embedding, no
/// dropout. Parameters have nanoGPT's names and torch's orientation (`Linear` weights are `[out, in]`), and torch's
/// initial distributions. Each block is one FSDP unit.
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
    blocks: Vec<Unit<Block>>,
    ln_f: LayerNorm,
}

impl Gpt {
    /// Declares the parameters, in nanoGPT's order.
    ///
    /// # Errors
    /// Sizes that make no model, and those of the scope.
    pub fn new(scope: &Scope, config: &GptConfig) -> Result<Self> {
        config.validate().map_err(candle_core::Error::wrap)?;
        let transformer = scope.pp("transformer");
        let vb = transformer.vb();
        let wte = vb.get_with_hints((config.vocab, config.hidden), "wte.weight", NORMAL)?;
        let wpe = vb.get_with_hints((config.seq, config.hidden), "wpe.weight", NORMAL)?;
        let layers = transformer.pp("h");
        let blocks = (0..config.layers)
            .map(|layer| layers.pp(layer).unit(|scope| Block::new(&scope.vb(), config)))
            .collect::<Result<_>>()?;
        let ln_f = LayerNorm::new(&vb.pp("ln_f"), config.hidden)?;
        scope.tie("lm_head.weight", "transformer.wte.weight");
        Ok(Gpt { config: *config, wte, wpe, blocks, ln_f })
    }

    /// Returns the sizes.
    #[must_use]
    pub const fn config(&self) -> &GptConfig {
        &self.config
    }

    /// Computes the next-token scores `[batch, time, vocab]` of tokens `[batch, time]` (u32), with `time` at most
    /// `seq`.
    ///
    /// # Errors
    /// Tokens of another rank or dtype, longer than `seq`, or outside the vocabulary.
    pub fn logits(&self, tokens: &Tensor) -> Result<Tensor> {
        let (batch, time) = tokens.dims2()?;
        let hidden = self.config.hidden;
        let mask = causal_mask(time, self.wte.dtype(), tokens.device())?;
        // Activations are `[batch * time, hidden]`, so that each matrix product is one 2-D product.
        let positions = self.wpe.narrow(0, 0, time)?.unsqueeze(0)?;
        let embedded = self.wte.index_select(&tokens.flatten_all()?, 0)?.reshape((batch, time, hidden))?;
        let mut x = embedded.broadcast_add(&positions)?.reshape((batch * time, hidden))?;
        for block in &self.blocks {
            x = block.run(|block| block.forward(&x, &mask))?;
        }
        let logits = self.ln_f.forward(&x)?.matmul(&self.wte.t()?)?;
        logits.reshape((batch, time, self.config.vocab))
    }

    /// Computes the mean cross-entropy of the scores against `targets` `[batch, time]` (u32), which is a scalar.
    ///
    /// # Errors
    /// The same as [`Self::logits`].
    pub fn loss(&self, tokens: &Tensor, targets: &Tensor) -> Result<Tensor> {
        let logits = self.logits(tokens)?.flatten_to(1)?;
        let targets = targets.flatten_all()?.unsqueeze(1)?;
        // The largest score is subtracted only to keep `exp` in range: no gradient needs to go through it.
        let shifted = logits.broadcast_sub(&logits.detach().max_keepdim(1)?)?;
        let log_sum = shifted.exp()?.sum_keepdim(1)?.log()?;
        (log_sum - shifted.gather(&targets, 1)?)?.mean_all()
    }
}

/// Returns 0 for a position (column) that another one (row) may see, and minus infinity for later positions.
fn causal_mask(time: usize, dtype: DType, device: &Device) -> Result<Tensor> {
    let mask: Vec<f32> = (0..time)
        .flat_map(|row| (0..time).map(move |column| if column <= row { 0.0 } else { f32::NEG_INFINITY }))
        .collect();
    Tensor::from_vec(mask, (time, time), device)?.to_dtype(dtype)
}

/// A block: attention and MLP, each on a normalised input and added to the residual stream.
struct Block {
    ln_1: LayerNorm,
    attn: Attention,
    ln_2: LayerNorm,
    mlp: Mlp,
}

impl Block {
    fn new(vb: &VarBuilder<'_>, config: &GptConfig) -> Result<Self> {
        Ok(Block {
            ln_1: LayerNorm::new(&vb.pp("ln_1"), config.hidden)?,
            attn: Attention::new(&vb.pp("attn"), config)?,
            ln_2: LayerNorm::new(&vb.pp("ln_2"), config.hidden)?,
            mlp: Mlp::new(&vb.pp("mlp"), config.hidden)?,
        })
    }

    fn forward(&self, x: &Tensor, mask: &Tensor) -> Result<Tensor> {
        let x = (x + self.attn.forward(&self.ln_1.forward(x)?, mask)?)?;
        let mlp = self.mlp.forward(&self.ln_2.forward(&x)?)?;
        x + mlp
    }
}

struct Attention {
    heads: usize,
    c_attn: Linear,
    c_proj: Linear,
}

impl Attention {
    fn new(vb: &VarBuilder<'_>, config: &GptConfig) -> Result<Self> {
        let hidden = config.hidden;
        Ok(Attention {
            heads: config.heads,
            c_attn: Linear::new(&vb.pp("c_attn"), hidden, 3 * hidden)?,
            c_proj: Linear::new(&vb.pp("c_proj"), hidden, hidden)?,
        })
    }

    fn forward(&self, x: &Tensor, mask: &Tensor) -> Result<Tensor> {
        let (rows, hidden) = x.dims2()?;
        let time = mask.dim(0)?;
        let (batch, width) = (rows / time, hidden / self.heads);
        // [3, batch, heads, time, width]
        let qkv = self.c_attn.forward(x)?.reshape((batch, time, 3, self.heads, width))?;
        let qkv = qkv.permute((2, 0, 3, 1, 4))?.contiguous()?.reshape((3, batch * self.heads, time, width))?;
        let (query, key, value) = (qkv.i(0)?, qkv.i(1)?, qkv.i(2)?);
        let scores = (query * (width as f64).powf(-0.5))?.matmul(&key.t()?)?.broadcast_add(mask)?;
        let mixed = softmax(&scores)?.matmul(&value)?;
        let mixed = mixed.reshape((batch, self.heads, time, width))?.transpose(1, 2)?;
        self.c_proj.forward(&mixed.reshape((rows, hidden))?)
    }
}

/// Computes softmax over the last dimension. candle's fused one has no backward.
fn softmax(x: &Tensor) -> Result<Tensor> {
    // The maximum is taken off so that no exponential overflows. It changes no result, so it needs no gradient.
    let exp = x.broadcast_sub(&x.detach().max_keepdim(D::Minus1)?)?.exp()?;
    exp.broadcast_div(&exp.sum_keepdim(D::Minus1)?)
}

struct Mlp {
    c_fc: Linear,
    c_proj: Linear,
}

impl Mlp {
    fn new(vb: &VarBuilder<'_>, hidden: usize) -> Result<Self> {
        Ok(Mlp {
            c_fc: Linear::new(&vb.pp("c_fc"), hidden, 4 * hidden)?,
            c_proj: Linear::new(&vb.pp("c_proj"), 4 * hidden, hidden)?,
        })
    }

    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        self.c_proj.forward(&self.c_fc.forward(x)?.gelu_erf()?)
    }
}

struct Linear {
    weight: Tensor,
    bias: Tensor,
}

impl Linear {
    fn new(vb: &VarBuilder<'_>, input: usize, output: usize) -> Result<Self> {
        let bound = (input as f64).powf(-0.5);
        let weight = vb.get_with_hints((output, input), "weight", NORMAL)?;
        let bias = vb.get_with_hints(output, "bias", Init::Uniform { lo: -bound, up: bound })?;
        Ok(Linear { weight, bias })
    }

    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        // The transpose is a view: a copy would stay in the graph until backward, and the weight would not be freed.
        x.matmul(&self.weight.t()?)?.broadcast_add(&self.bias)
    }
}

/// A layer norm. candle's fused one has no backward.
struct LayerNorm {
    weight: Tensor,
    bias: Tensor,
}

impl LayerNorm {
    fn new(vb: &VarBuilder<'_>, hidden: usize) -> Result<Self> {
        let weight = vb.get_with_hints(hidden, "weight", Init::Const(1.0))?;
        let bias = vb.get_with_hints(hidden, "bias", Init::Const(0.0))?;
        Ok(LayerNorm { weight, bias })
    }

    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        let centered = x.broadcast_sub(&x.mean_keepdim(D::Minus1)?)?;
        let variance = centered.sqr()?.mean_keepdim(D::Minus1)?;
        let normal = centered.broadcast_div(&(variance + LAYER_NORM_EPS)?.sqrt()?)?;
        normal.broadcast_mul(&self.weight)?.broadcast_add(&self.bias)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use candle_nn::VarMap;

    const CONFIG: GptConfig = GptConfig { layers: 2, heads: 2, hidden: 8, seq: 5, vocab: 11 };

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
        let mut found: Vec<(&str, &[usize])> = variables.iter().map(|(k, v)| (k.as_str(), v.dims())).collect();
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
        let expected: Vec<(&str, &[usize])> = expected.iter().map(|(k, v)| (k.as_str(), v.as_slice())).collect();
        assert_eq!(found, expected);
    }

    #[test]
    fn a_position_does_not_see_later_ones() {
        let (_variables, model) = plain(&CONFIG);
        let before = model.logits(&Tensor::new(&[[1u32, 2, 3, 4]], &Device::Cpu).unwrap()).unwrap();
        let after = model.logits(&Tensor::new(&[[1u32, 2, 9, 9]], &Device::Cpu).unwrap()).unwrap();
        let rows = |logits: &Tensor, at: usize| logits.i((0, at)).unwrap().to_vec1::<f64>().unwrap();
        assert_eq!(rows(&before, 0), rows(&after, 0));
        assert_eq!(rows(&before, 1), rows(&after, 1));
        assert_ne!(rows(&before, 2), rows(&after, 2));
    }

    /// Checks that every operation of the model has a right backward in candle: the gradient of each parameter, along a
    /// fixed direction, is the difference quotient of the loss.
    #[test]
    fn gradients_are_those_of_the_loss() {
        let (variables, model) = plain(&CONFIG);
        let (tokens, targets) = batch();
        let mut names: Vec<String> = variables.data().lock().unwrap().keys().cloned().collect();
        names.sort();
        // The same values in each run, large enough that no term of a derivative is lost in rounding.
        for (index, name) in names.iter().enumerate() {
            let var = &variables.data().lock().unwrap()[name];
            let angles = Tensor::arange(0u32, var.elem_count() as u32, &Device::Cpu).unwrap();
            let angles = (angles.to_dtype(DType::F64).unwrap() * 0.7).unwrap() + index as f64;
            var.set(&(angles.unwrap().sin().unwrap() * 0.3).unwrap().reshape(var.dims()).unwrap()).unwrap();
        }
        let grads = model.loss(&tokens, &targets).unwrap().backward().unwrap();
        let loss = || model.loss(&tokens, &targets).unwrap().to_scalar::<f64>().unwrap();
        for (name, var) in variables.data().lock().unwrap().iter() {
            let grad = grads.get(var).unwrap_or_else(|| panic!("no gradient of {name}"));
            let direction = Tensor::arange(0u32, var.elem_count() as u32, &Device::Cpu).unwrap();
            let direction = direction.to_dtype(DType::F64).unwrap().sin().unwrap().reshape(var.dims()).unwrap();
            let along = (grad * &direction).unwrap().sum_all().unwrap().to_scalar::<f64>().unwrap();
            let value = var.as_tensor().copy().unwrap();
            let at = |distance: f64| {
                var.set(&(&value + (&direction * distance).unwrap()).unwrap()).unwrap();
                loss()
            };
            let quotient = (at(1e-5) - at(-1e-5)) / 2e-5;
            at(0.0);
            // candle's GELU derivative has six digits of 1/sqrt(2 pi).
            let error = (along - quotient).abs() / quotient.abs().max(1e-2);
            assert!(error < 1e-5, "{name}: {along} is not {quotient}");
        }
    }

    #[test]
    fn sizes_that_make_no_model_are_refused() {
        assert_eq!(GptConfig { layers: 0, ..CONFIG }.validate(), Err(GptConfigError::Zero { size: "layers" }));
        let odd = GptConfig { heads: 3, ..CONFIG };
        assert_eq!(odd.validate(), Err(GptConfigError::Heads { hidden: 8, heads: 3 }));
    }
}
